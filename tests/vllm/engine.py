"""vLLM's own scheduler with a fake executor: a step takes no time, and tokens follow from the request's name.

Law of this file: nothing of the scheduler, its block pool, its connectors or its events is replaced; only the model is.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvbm_console.explore.scenario import BLOCK
from kvbm_console.explore.vllm import MODEL, PAGE
from tests.vllm.executor import LOAD_STEPS, Copies

TAP = {"kv_connector": "KvbmTap", "kv_connector_module_path": "kvbm_console.tap.vllm", "kv_role": "kv_both"}
Arrival = tuple[int, str, list[int], int]
"""Step of the arrival, name, prompt, tokens of the answer."""


def offloading(chunks: int, **more: Any) -> dict[str, Any]:
    """The entry of vLLM's own connector with a host tier of so many blocks."""
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": chunks * PAGE, "self_describing_kv_events": True, **more}}


def named(connector: dict[str, Any], **ours: Any) -> dict[str, Any]:
    """The entry of a connector with the tap around it, under its own name."""
    extra = {**connector.get("kv_connector_extra_config", {}), "kvbm": ours}
    path = TAP["kv_connector_module_path"]
    return {**connector, "kv_connector_module_path": path, "kv_connector_extra_config": extra}


def tap(inside: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """The tap's entry, around another connector's if one is given."""
    return {**TAP, "kv_connector_extra_config": {**extra, **({} if inside is None else {"connector": inside})}}


def spec_of(kind: str) -> Any:
    """One group of layers: ``full``, ``wide`` (blocks of twice the size), or ``window`` (of 64 tokens)."""
    if kind == "window":
        return SlidingWindowSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=torch.float32, sliding_window=64
        )
    size = BLOCK * (2 if kind == "wide" else 1)
    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=128, dtype=torch.float32)


class Engine:
    """One scheduler. ``steps`` of work are done by ``step``; ``batches`` are the KV events of each step."""

    def __init__(
        self, directory: Path, connector: dict[str, Any], *, blocks: int = 96, running: int = 8, tokens: int = 256,
        publish: tuple[str, str] | None = None, load_steps: int = LOAD_STEPS, fail_every: int = 0,
        groups: tuple[str, ...] = ("full",), layers: int = 1, caching: bool = True, events: bool = True,
        drafts: int = 0, **cache_options: Any,
    ) -> None:
        (directory / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=str(directory), dtype="float16", seed=0, skip_tokenizer_init=True)
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching, **cache_options)
        cache.num_gpu_blocks = blocks
        published: dict[str, Any] = {"publisher": "null"}
        if publish is not None:
            published = {"publisher": "zmq", "endpoint": publish[0], "replay_endpoint": publish[1], "topic": "kv"}
        config = VllmConfig(
            model_config=model, cache_config=cache, device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=running, max_num_batched_tokens=tokens, max_model_len=2048, enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            kv_transfer_config=KVTransferConfig(**connector),
            speculative_config=None if not drafts else SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, target_model_config=model,
                target_parallel_config=ParallelConfig(),
            ),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, **published) if events else None,
        )
        self.kv_cache = kv_cache = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[
                KVCacheGroupSpec([f"layer{at}.{layer}" for layer in range(layers)], spec_of(kind))
                for at, kind in enumerate(groups)
            ],
        )
        size, unit = resolve_kv_cache_block_sizes(kv_cache, config)
        kv_cache.hash_block_size = unit  # as vLLM's engine does it
        self.config, self._drafts = config, drafts
        self.extra: dict[str, Any] | None = None
        """Further arguments of each request."""
        self.scheduled_drafts: dict[str, int] = {}
        """Tokens of each request in the formed step that the model may refuse."""
        self.scheduler = Scheduler(
            vllm_config=config, kv_cache_config=kv_cache, log_stats=True,
            structured_output_manager=StructuredOutputManager(config), block_size=size, hash_block_size=unit,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(unit, sha256)
        self.batches, self.finished = list[Any](), list[str]()
        publisher = self.scheduler.kv_event_publisher
        send = publisher.publish

        def publish_and_keep(batch: Any) -> None:
            self.batches.append(batch)
            send(batch)

        publisher.publish = publish_and_keep
        self.copies: Any = Copies(load_steps, fail_every)
        """The executor's copies: has ``step`` and ``jobs``."""
        self.cached: dict[str, tuple[int, int]] = {}
        """Request to the prompt tokens that the engine says it found: in device memory, and below."""
        self.steps = 0

    @property
    def connector(self) -> Any:
        """The scheduler's connector: the tap."""
        return self.scheduler.connector

    def add(self, name: str, prompt: list[int], output: int) -> Request:
        """A request arrives."""
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, extra_args=self.extra)
        request = Request(name, prompt, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """Form a step, run it, and take its result."""
        output = self.scheduler.schedule()
        self.finish(output)
        return output

    def finish(self, output: Any) -> None:
        """The executor's part: one token for each request whose known tokens are all computed."""
        self.steps += 1
        self.formed = output
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            dice = random.Random(f"{name} {request.num_tokens}")
            told = output.scheduled_spec_decode_tokens.get(name, [])
            sampled.append([*told[: dice.randrange(len(told) + 1)], dice.randrange(1000)] if done else [])
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled,
            kv_connector_output=self.copies.step(output.kv_connector_metadata),
        )
        outputs = self.scheduler.update_from_output(output, result)
        if self._drafts:
            drafted = [name for name, tokens in zip(names, sampled, strict=True) if tokens]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafted, [[1] * self._drafts for _ in drafted]))
        for one in outputs.values():
            self.finished += [each.request_id for each in one.outputs if each.finish_reason is not None]
            self.cached.update({
                each.request_id: (each.prefill_stats.num_local_cached_tokens,
                                  each.prefill_stats.num_external_cached_tokens)
                for each in one.outputs if each.prefill_stats is not None
            })

    def run(self, requests: list[Arrival], *, aborts: float = 0.0) -> Iterator[Any]:
        """Take ``requests`` and step until all of them are done. Yields each formed step before it is run.

        Before a step a request is aborted with the probability ``aborts``, whatever its state is.
        """
        waiting, dice = list(requests), random.Random(len(requests))
        while waiting or self.busy:
            while waiting and waiting[0][0] <= self.steps:
                _, name, prompt, output = waiting.pop(0)
                self.add(name, prompt, output)
            live = [name for name, one in self.scheduler.requests.items() if not one.is_finished()]
            if live and dice.random() < aborts:
                self.scheduler.finish_requests(dice.choice(live), RequestStatus.FINISHED_ABORTED)
            output = self.scheduler.schedule()
            self.scheduled_drafts = {name: len(told) for name, told in output.scheduled_spec_decode_tokens.items()}
            yield output
            self.finish(output)
            assert self.steps < 5_000

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return self.scheduler.has_requests() or bool(self.copies.jobs)
