"""vLLM's own scheduler with a fake executor: a step takes no time, and tokens follow from the request's name.

Law of this file: nothing of the scheduler, its block pool, its connectors or its events is replaced; only the model is.
"""

import json
import random
from collections.abc import Callable, Iterator
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
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from kvbm_console.explore.connectors import PAGE
from kvbm_console.explore.scenario import BLOCK
from kvbm_console.explore.vllm import MODEL
from tests.vllm import adapters
from tests.vllm.copies import LOAD_STEPS, Copies

TAP = {"kv_connector": "KvbmTap", "kv_connector_module_path": "kvbm_console.tap.vllm", "kv_role": "kv_both"}
Arrival = tuple[int, str, list[int], int]
"""Step of the arrival, name, prompt, tokens of the answer."""


def offloading(chunks: int, **more: Any) -> dict[str, Any]:
    """The entry of vLLM's own connector with a host tier of so many blocks."""
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": chunks * PAGE, "num_cpu_blocks": chunks,
                                          "self_describing_kv_events": True, **more}}


def named(connector: dict[str, Any], **ours: Any) -> dict[str, Any]:
    """The entry of a connector with the tap around it, under its own name."""
    extra = {**connector.get("kv_connector_extra_config", {}), "kvbm": ours}
    path = TAP["kv_connector_module_path"]
    return {**connector, "kv_connector_module_path": path, "kv_connector_extra_config": extra}


def tap(inside: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """The tap's entry, around another connector's if one is given."""
    return {**TAP, "kv_connector_extra_config": {**extra, **({} if inside is None else {"connector": inside})}}


HEADS = {"num_kv_heads": 1, "head_size": 128, "dtype": torch.float32}
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("FullAttentionSpec", {"block_size": BLOCK, **HEADS}),
    "wide": ("FullAttentionSpec", {"block_size": 2 * BLOCK, **HEADS}),
    "window": ("SlidingWindowSpec", {"block_size": BLOCK, "sliding_window": 64, **HEADS}),
    "chunked": ("ChunkedLocalAttentionSpec", {"block_size": BLOCK, "attention_chunk_size": 64, **HEADS}),
    "mla": ("MLAAttentionSpec", {"block_size": BLOCK, **HEADS, "head_size": 256}),
    "mamba": ("MambaSpec", {"block_size": BLOCK, "shapes": ((1, 4096),), "dtypes": (torch.float32,),
                            "mamba_cache_mode": "align"}),
}
"""Kind of a group of layers to its class and fields; a page of each kind has ``PAGE`` bytes, of ``wide`` twice that."""


class Engine:
    """One scheduler. ``steps`` of work are done by ``step``; ``batches`` are the KV events of each step.

    With ``hook`` the scheduler itself has the tap, with these settings, and ``connector`` may be None.
    """

    transfer: Callable[[str, list[int]], dict[str, Any] | None] | None = None
    """Transfer parameters of the request of this name with this prompt."""

    def __init__(
        self, directory: Path, connector: dict[str, Any] | None, *, hook: dict[str, Any] | None = None,
        blocks: int = 96, running: int = 8, tokens: int = 256, publish: tuple[str, str] | None = None,
        load_steps: int = LOAD_STEPS, fail_every: int = 0,
        groups: tuple[str, ...] = ("full",), layers: int = 1, caching: bool = True, events: bool = True,
        drafts: int = 0, scheduling: dict[str, Any] | None = None, rank: int = 0, workers: int = 1,
        **cache_options: Any,
    ) -> None:
        (directory / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=str(directory), dtype="float16", seed=0, skip_tokenizer_init=True)
        cache = adapters.with_all(CacheConfig, block_size=BLOCK, enable_prefix_caching=caching, **cache_options)
        cache.num_gpu_blocks = blocks
        published: dict[str, Any] = {"publisher": "null"}
        if publish is not None:
            published = {"publisher": "zmq", "endpoint": publish[0], "replay_endpoint": publish[1], "topic": "kv"}
        config = VllmConfig(
            model_config=model, cache_config=cache, device_config=DeviceConfig("cpu"),
            scheduler_config=adapters.made(SchedulerConfig, **{
                "max_num_seqs": running, "max_num_batched_tokens": tokens, "max_model_len": 2048,
                "enable_chunked_prefill": True, "is_encoder_decoder": False, "async_scheduling": False,
                **(scheduling or {}),
            }),
            kv_transfer_config=None if connector is None else KVTransferConfig(**connector),
            speculative_config=None if not drafts else SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, target_model_config=model,
                target_parallel_config=ParallelConfig(),
            ),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, **published) if events else None,
        )
        config.parallel_config.data_parallel_rank = config.parallel_config.data_parallel_index = rank
        config.parallel_config.world_size = workers
        self.kv_cache = adapters.kv_cache_config(
            blocks, [adapters.spec(SPECS[kind][0], **SPECS[kind][1]) for kind in groups], layers, cache)
        self.config, self._drafts = config, drafts
        self.extra: dict[str, Any] | None = None
        """Further arguments of each request's sampling."""
        self.arguments: Callable[[str], dict[str, Any]] = lambda name: {}
        """Further arguments of the request of this name."""
        self.scheduled_drafts: dict[str, int] = {}
        """Tokens of each request in the formed step that the model may refuse."""
        self.scheduler, unit = adapters.scheduler(config, self.kv_cache, hook)
        self._hasher = adapters.hasher(unit)
        self._asynchronous = bool(config.scheduler_config.async_scheduling)
        self._sampled: dict[int, dict[str, list[int]]] = {}
        """Formed step, by its output's identity, to the tokens that its requests will get."""
        self.batches, self.finished = list[Any](), list[str]()
        publisher = self.scheduler.kv_event_publisher
        send = publisher.publish

        def publish_and_keep(batch: Any) -> None:
            self.batches.append(batch)
            send(batch)

        publisher.publish = publish_and_keep
        self.copies: Any = Copies(load_steps, fail_every, workers)
        """The executor's copies: has ``step`` and ``jobs``."""
        self.cached, self.transfers = dict[str, tuple[int, int]](), dict[str, dict[str, Any] | None]()
        """Request to the prompt tokens that the engine says it found, in device memory and below; ended request to
        the parameters of its transfer, which the server gives to the router."""
        self.steps = self.aborted = 0

    @property
    def connector(self) -> Any:
        """The scheduler's connector: the tap, unless it stands beside another connector."""
        return self.scheduler.connector

    @property
    def tap(self) -> Any:
        """The tap, at the scheduler or at its connector; has ``sender``."""
        return getattr(self.scheduler, "kvbm_tap", self.scheduler.connector)

    def add(self, name: str, prompt: list[int], output: int) -> Request:
        """A request arrives."""
        transfer = None if self.transfer is None else self.transfer(name, prompt)
        extra = self.extra if transfer is None else {**(self.extra or {}), "kv_transfer_params": transfer}
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, extra_args=extra)
        request = adapters.request(name, prompt, sampling, self._hasher, **self.arguments(name))
        self.scheduler.add_request(request)
        return request

    def form(self) -> Any:
        """Form a step, and decide the tokens that its requests will get."""
        scheduler = self.scheduler
        placed = {name: one.num_output_placeholders for name, one in scheduler.requests.items()}
        output = self.formed = scheduler.schedule()
        self.scheduled_drafts = {}
        sampled = self._sampled[id(output)] = {}
        for name in output.num_scheduled_tokens:
            request = scheduler.requests[name]
            told = output.scheduled_spec_decode_tokens.get(name, [])
            if told:
                self.scheduled_drafts[name] = len(told)
            if self._asynchronous:
                done = request.num_output_placeholders > placed[name]
            else:
                done = request.num_computed_tokens >= request.num_tokens
            dice = random.Random(f"{name} {request.num_tokens + request.num_output_placeholders}")
            sampled[name] = [*told[: dice.randrange(len(told) + 1)], dice.randrange(1000)] if done else []
        return output

    def step(self) -> Any:
        """Form a step, run it, and take its result."""
        output = self.form()
        self.finish(output)
        return output

    def finish(self, output: Any) -> None:
        """The executor's part: one token for each request whose known tokens are all computed."""
        self.steps += 1
        sampled = self._sampled.pop(id(output))
        names = list(sampled)
        result = adapters.runner_output(
            names, list(sampled.values()), self.copies.step(output.kv_connector_metadata, output.finished_req_ids))
        outputs = self.scheduler.update_from_output(output, result)
        if self._drafts:
            drafted = [name for name, tokens in sampled.items() if tokens]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafted, [[1] * self._drafts for _ in drafted]))
        for each in (each for one in outputs.values() for each in one.outputs):
            if each.finish_reason is not None:
                self.finished.append(each.request_id)
                self.transfers[each.request_id] = getattr(each, "kv_transfer_params", None)
            found = adapters.cached_tokens(each)
            if found is not None:
                self.cached[each.request_id] = found

    def run(
        self, requests: list[Arrival], *, aborts: float = 0.0, before: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Take ``requests`` and step until all of them are done. Yields each formed step before it is run.

        ``before`` is called before each step. Before a step a request is aborted with the probability ``aborts``,
        whatever its state is. With asynchronous scheduling a step is formed before the result of the last is known.
        """
        waiting, dice = list(requests), random.Random(len(requests))
        formed: list[Any] = []
        while waiting or self.busy or formed:
            while waiting and waiting[0][0] <= self.steps:
                _, name, prompt, output = waiting.pop(0)
                self.add(name, prompt, output)
            live = [name for name, one in self.scheduler.requests.items() if not one.is_finished()]
            if live and dice.random() < aborts:
                self.aborted += 1
                self.scheduler.finish_requests(dice.choice(live), RequestStatus.FINISHED_ABORTED)
            if before is not None:
                before()
            formed.append(self.form())
            yield formed[-1]
            while len(formed) > self._asynchronous:
                self.finish(formed.pop(0))
            if not self.busy and not waiting:
                while formed:
                    self.finish(formed.pop(0))
            assert self.steps < 5_000

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return self.scheduler.has_requests() or bool(self.copies.jobs)
