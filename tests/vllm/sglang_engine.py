"""SGLang's real scheduler on a CPU: only the model and the GPU kernels are missing.

Real: ``Scheduler`` with its constructor, ``Req``, ``ScheduleBatch``, ``SchedulePolicy``, ``PrefillAdder``, the batch
result processor, ``UnifiedRadixCache`` with its Rust or Python tree, both allocators, ``ReqToTokenPool`` and
``MHATokenToKVPool``, HiCache with its controller and host pool. Replaced: ``TpModelWorker``, by a worker that samples
from a seed, HiCache's copy kernel, by indexing, and each package of kernels that is not installed, by an empty module
(``Missing``).

Law of this file: it must be imported in a process of its own, because it fills ``sys.modules`` with empty modules.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import sys
import types
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

# A scheduler that fails, or stands for five minutes, sends SIGQUIT to the parent of its process. That ended the tests.
psutil.Process.parent = lambda process: process  # type: ignore[method-assign,assignment,return-value]
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] = "8"  # so that too many requests are admitted, and some retracted
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1024,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "float16",
}
ROWS = 8
"""Requests that may run at once."""
Arrival = tuple[int, str, list[int], int]


class _Empty(type):
    def __getattr__(cls, name: str) -> Any:
        return _absent(name)

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__


class Nothing(metaclass=_Empty):
    """Stands for every class, function and value of a package that is not installed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def __init_subclass__(cls, **_: Any) -> None:
        return

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _decorated(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return _absent(name)


def _absent(name: str) -> Any:
    if name.startswith("__") or name == "driver":  # Triton asks its driver for the GPU
        raise AttributeError(name)
    return Nothing


def _decorated(*args: Any, **options: Any) -> Any:
    """A decorator without effect, with or without arguments of its own."""
    return args[0] if len(args) == 1 and not options and callable(args[0]) else _decorated


class EmptyModule(types.ModuleType):
    """A package that is not installed."""

    __path__: list[str] = []
    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        return _decorated if name in ("jit", "autotune", "heuristics") else _absent(name)


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives SGLang an empty module for each package that is not installed; other packages still miss it."""

    def __init__(self) -> None:
        self.served: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.split(".")[0]
        if top in ("sglang", "torch"):
            return None
        if top not in self.served:
            frame: Any = sys._getframe(1)
            while frame and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib")):
                frame = frame.f_back
            if not frame or not frame.f_globals.get("__name__", "").startswith("sglang"):
                return None
            self.served.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return EmptyModule(spec.name)

    def exec_module(self, module: Any) -> None:
        return


def _install() -> None:
    # These look for Triton and torchvision, and must not find empty modules.
    importlib.import_module("torch._inductor.compile_fx")
    import_utils = importlib.import_module("transformers.utils.import_utils")

    for name in dir(import_utils):
        if name.startswith("is_") and name.endswith("_available"):
            with contextlib.suppress(Exception):
                getattr(import_utils, name)()
    sys.meta_path.append(Missing())


_install()
import torch  # noqa: E402
from sglang.srt import disaggregation  # noqa: E402
from sglang.srt.disaggregation import decode, prefill  # noqa: E402
from sglang.srt.disaggregation.fake import conn  # noqa: E402
from sglang.srt.disaggregation.kv_events import EventPublisherFactory, NullEventPublisher  # noqa: E402
from sglang.srt.disaggregation.utils import TransferBackend  # noqa: E402
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.managers import scheduler as scheduler_module  # noqa: E402
from sglang.srt.managers import tp_worker  # noqa: E402
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput  # noqa: E402
from sglang.srt.managers.utils import GenerationBatchResult  # noqa: E402
from sglang.srt.mem_cache import hicache_storage  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import common as host_memory  # noqa: E402
from sglang.srt.mem_cache.pool_host import mha as host_pools  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: E402


def _copy_pages(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """In the place of HiCache's kernel."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


# HiCache's copies wait for a device, whose events and kernels a CPU build does not have.
host_pools.transfer_kv_direct = _copy_pages
host_memory._cuda_host_register = lambda *_, **__: None


class Worker:
    """In the place of ``TpModelWorker``: real pools, and a model that samples from a seed."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int) -> None:
        from sglang.srt.configs.model_config import ModelConfig

        self.model_config = ModelConfig.from_server_args(server_args)
        size, page = server_args.max_total_tokens, server_args.page_size
        kv = MHATokenToKVPool(size, page, torch.float16, 1, 32, 1, "cpu", False)
        if page == 1:
            allocator: Any = TokenToKVPoolAllocator(size, torch.float16, "cpu", kv, need_sort=False)
        else:
            allocator = PagedTokenToKVPoolAllocator(size, page, torch.float16, "cpu", kv, need_sort=False)
        self.model_runner = types.SimpleNamespace(
            memory_pool_config=object(), req_to_token_pool=ReqToTokenPool(ROWS, 2048, "cpu", False),
            token_to_kv_pool_allocator=allocator, token_to_kv_pool=kv, device="cpu", forward_stream=torch.cpu.Stream(),
            prewarm_sampling=lambda: None, mtp_draft_mamba_pools=(), mtp_draft_device_pools=(), canary_manager=None,
            attn_backend=object(), prefill_aware_swa=False, spec_algorithm=None, model_config=self.model_config,
            effective_logical_max_total_num_tokens=size, kv_cache_dtype_str="float16", weight_load_mem_usage=0.0,
            device_timer=None, eplb_manager=None, hisparse_coordinator=None,
            ngram_embedding_manager=types.SimpleNamespace(prepare_for_forward=lambda batch, **_: batch),
            lora_manager=None, weight_updater=None, weight_exporter=None, use_ngram_embedding=False,
        )
        self.weight_load_time, self.preloaded_weights_bytes = 0.0, 0
        self.graph_time_usage: dict[str, float] = {}
        self.graph_memory_usage: dict[str, float] = {}
        self.is_hybrid_swa, self.sliding_window_size = False, None
        self.weight_update_runners: list[Any] = []

    def init_attention_backends(self) -> None:
        return

    def init_cuda_graphs(self) -> None:
        return

    def get_memory_pool(self) -> tuple[Any, Any]:
        return self.model_runner.req_to_token_pool, self.model_runner.token_to_kv_pool_allocator

    def get_pad_input_ids_func(self) -> None:
        return None

    def get_tokens_per_layer_info(self) -> tuple[None, None]:
        return None, None

    def register_hicache_layer_transfer_counter(self, counter: Any) -> None:
        self.counter = counter

    def set_hicache_consumer(self, index: int) -> None:
        return

    def is_dllm(self) -> bool:
        return False

    def get_worker_info(self) -> tuple[Any, ...]:
        size = self.model_runner.token_to_kv_pool_allocator.size
        stream = self.model_runner.forward_stream
        return size, 512, ROWS, None, size - 1, size - 6, 0, "cpu", stream, ROWS, 2048, size

    def forward_batch_generation(self, batch: Any, *_: Any, **__: Any) -> Any:
        """The next token of a request depends on its length alone, so equal prompts get equal answers."""
        tokens = [random.Random(int(length)).randrange(1000) for length in batch.seq_lens]
        return GenerationBatchResult(
            next_token_ids=torch.tensor(tokens, dtype=torch.int64), can_run_cuda_graph=False,
            logits_output=LogitsProcessorOutput(next_token_logits=None),
        )


tp_worker.TpModelWorker = Worker  # type: ignore[misc,assignment]
# SGLang's own fake transfer in the place of another. By its name it is refused by prefill engines (0.5.23).
disaggregation.utils._is_fake_transfer = decode._is_fake_transfer = lambda _: True
prefill.get_kv_class = decode.get_kv_class = functools.partial(
    lambda of, _, kind: of(TransferBackend.FAKE, kind), prefill.get_kv_class
)
EventPublisherFactory.register_publisher("silent", lambda **_: NullEventPublisher())  # "null" fails in this release


class Engine:
    """One scheduler that runs as its event loop does. ``events`` are its KV events."""

    def __init__(
        self, directory: Path, *, page: int = 16, tokens: int = 1024, tree: str = "rust", overlap: bool = False,
        **options: Any,
    ) -> None:
        (directory / "config.json").write_text(json.dumps(MODEL))
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = tree
        arguments = ServerArgs(
            model_path=str(directory), device="cpu", skip_tokenizer_init=True, page_size=page, max_total_tokens=tokens,
            disable_overlap_schedule=not overlap, attention_backend="torch_native", sampling_backend="pytorch",
            grammar_backend="none", load_format="dummy", log_level="error",
            **{"kv_events_config": '{"publisher": "silent"}', "chunked_prefill_size": 64, **options},
        )
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = scheduler_module.Scheduler(arguments, PortArgs.init_new(arguments))
        scheduler_module.bootstrap.init_parallel_runtime = lambda **_: None  # once in a process
        self.page = page
        self.mode = arguments.disaggregation_mode
        self.requests: dict[str, Any] = {}
        self.finished: list[str] = []
        self.events: list[Any] = []
        take = self.scheduler.tree_cache.take_events

        def take_and_keep() -> Any:
            events = take()
            self.events += events
            return events

        self.scheduler.tree_cache.take_events = take_and_keep
        self.steps = 0
        self.formed: Any = None
        self.ran: set[str] = set()
        """Requests of the last batch that has run."""

    def add(self, name: str, prompt: list[int], output: int, **more: Any) -> None:
        """A request arrives. Two engines share the end of its name, after the last ``-``, if each does a half."""
        if self.mode != "null":
            room = zlib.crc32(name.rpartition("-")[2].encode())
            more = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": room, **more}
        sampling = SamplingParams(max_new_tokens=output, ignore_eos=True)
        sampling.normalize(None)
        self.scheduler.handle_generate_request(TokenizedGenerateReqInput(
            rid=name, input_text="", input_ids=array("q", prompt), input_embeds=None, token_type_ids=None,
            mm_inputs=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
            token_ids_logprob=None, stream=False, **more,
        ))
        scheduler = self.scheduler
        if self.mode == "prefill":
            (*_, self.requests[name]) = scheduler.disagg_prefill_bootstrap_queue.queue
        elif self.mode == "decode":
            self.requests[name] = scheduler.disagg_decode_prealloc_queue.queue[-1].req
        else:
            self.requests[name] = scheduler.waiting_queue[-1]

    def abort(self, name: str) -> None:
        """A client gives up."""
        self.scheduler.abort_request(AbortReq(rid=name))

    def form(self) -> Any:
        """The first half of a turn of the event loop: the batch that the scheduler formed, None if idle."""
        scheduler = self.scheduler
        if self.mode == "prefill":
            scheduler.waiting_queue.extend(scheduler.disagg_prefill_bootstrap_queue.pop_bootstrapped())
            plan = scheduler.get_next_disagg_prefill_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
        elif self.mode == "decode":
            scheduler.process_decode_queue()
            plan = scheduler.get_next_disagg_decode_batch_to_run(running_batch=scheduler.running_batch)
        else:
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
        scheduler.running_batch = plan.running_batch
        scheduler.cur_batch_for_debug = self.formed = plan.batch_to_run
        scheduler.tree_cache.take_events()
        return plan.batch_to_run

    def finish(self) -> None:
        """The second half."""
        scheduler, batch = self.scheduler, self.formed
        self.steps += 1
        ran = {req.rid for req in batch.reqs} if batch else self.ran
        if scheduler.enable_overlap:
            self._finish_overlapped(batch)
        elif batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()  # checks the scheduler's memory by itself
        if self.mode == "prefill":
            scheduler.process_disagg_prefill_inflight_queue()
        scheduler.last_batch, self.ran = batch, ran
        scheduler.tree_cache.take_events()

    def _finish_overlapped(self, batch: Any) -> None:
        """As ``event_loop_overlap``: the result of a batch is processed while the next batch runs."""
        scheduler = self.scheduler
        scheduler.enable_skip_finishing_decode = True
        apart = scheduler.is_disable_overlap_for_batch(batch, last_batch=scheduler.last_batch)
        if apart:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        result = None
        if batch:
            result = scheduler.run_batch(batch)
            scheduler.result_queue.append((batch.copy(), result))
        if scheduler.last_batch and not apart:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        elif not scheduler.last_batch and batch is None:
            scheduler.on_idle()
        scheduler.launch_batch_sample_if_needed(result, batch)

    def settle(self) -> None:
        """Turns without work, after which the scheduler is idle and no thread of HiCache copies."""
        turns = 0
        while turns < 2 or getattr(self.scheduler.tree_cache, "ongoing_backup", None):
            assert self.form() is None
            self.finish()
            turns += 1

    def live(self) -> dict[str, Any]:
        """Requests that the scheduler has not ended."""
        scheduler = self.scheduler
        held = [
            *scheduler.waiting_queue, *scheduler.running_batch.reqs, *(self.formed.reqs if self.formed else ()),
            *([scheduler.chunked_req] if scheduler.chunked_req else ()),
            *(scheduler.last_batch.reqs if scheduler.last_batch else ()),
            *(req for batch, _ in scheduler.result_queue for req in batch.reqs),
        ]
        if self.mode == "prefill":
            held += scheduler.disagg_prefill_bootstrap_queue.queue
        if self.mode == "decode":
            held += scheduler.disagg_decode_prealloc_queue.retracted_queue
            held += [one.req for one in scheduler.disagg_decode_prealloc_queue.queue]
            held += [one.req for one in scheduler.disagg_decode_transfer_queue.queue]
        sent = {req.rid for req in self.sending()}
        return {req.rid: req for req in held if not req.finished() and req.rid not in sent}

    def sending(self) -> list[Any]:
        """Requests that this engine has prefilled, and whose blocks another engine reads."""
        return list(self.scheduler.disagg_prefill_inflight_queue or ())

    def run(self, requests: list[Arrival], *, aborts: float = 0.0, seed: int = 0) -> Iterator[Any]:
        """Take the requests and step until all are done. Yields each formed batch before it runs."""
        waiting, dice, first = list(requests), random.Random(seed), self.steps
        while waiting or self.live():
            while waiting and waiting[0][0] <= self.steps - first:
                _, name, prompt, output = waiting.pop(0)
                self.add(name, prompt, output)
            live = sorted(self.live())
            if live and dice.random() < aborts:
                self.abort(dice.choice(live))
            yield self.form()
            self.finish()
            assert self.steps < 5_000


__all__ = ["Engine", "HookRegistry", "conn", "hicache_storage"]
