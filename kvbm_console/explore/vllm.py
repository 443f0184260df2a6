"""vLLM's scheduler and connector, driven through a scenario, with a monitor after every step.

Real: the scheduler, its block pool, the connector's scheduler half, its manager and policy. Ours: the model (a token
follows from the request and its position), the worker (``shadow``) and the clock (steps).

Law of this file: a verdict names a fault of the engine, never of this driver. A missing part of the interface is
refused by its name before the first run.
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from kvbm_console.explore.connector_faults import CONNECTOR_FAULTS
from kvbm_console.explore.connectors import (
    PAGE,
    Adapter,
    OffloadingAdapter,
    SimpleAdapter,
    Unsupported,
    Workers,
    memory_directory,
)
from kvbm_console.explore.example import DecodeBenchAdapter, ExampleAdapter
from kvbm_console.explore.lmcache import LmcacheAdapter
from kvbm_console.explore.mooncake import MooncakeAdapter, MooncakeStoreAdapter
from kvbm_console.explore.nixl import NixlAdapter
from kvbm_console.explore.scenario import BLOCK, Abort, Arrive, CacheReset, Scenario, tokens_of
from kvbm_console.explore.shadow import EMPTY, Job, Memory, ShadowWorker, StepOrders, cause

IDLE_STEPS = 6
"""Steps in a row without work, copies or reports after which no change can follow."""
OVERTAKEN_MAX = 48
"""Steps in which later requests were scheduled while an earlier request waited for its turn alone."""
ASKED_MAX = 60
"""Answers "ask again" in a row, each without any copy in flight."""
FAILED_MAX = 12
"""Loads in a row that fail for a request which computes nothing between them."""
BROUGHT_MAX = 24
"""Times that a secondary tier brings the same chunk for a request which is not scheduled between them."""
STEPS_MAX = 3_000
ENGINES = ("vllm", "lmcache")
"""Packages whose exceptions are findings."""
WINDOW = 4 * BLOCK
"""Tokens that a layer with a sliding window reads."""
SALTS = tuple(group * 0x5851F42D4C957F2D & 0x3FFFFFFFFFFFFFFF for group in range(8))
"""Group of layers to the mask that its contents differ by from those of the first group."""
KEPT = "prefix_cache_retention_interval"
"""The setting of vLLM that says which blocks of a sliding window it caches. None is all of them."""
ADAPTERS: tuple[type[Adapter], ...] = (
    OffloadingAdapter, SimpleAdapter, NixlAdapter, LmcacheAdapter, MooncakeAdapter, MooncakeStoreAdapter,
    ExampleAdapter, DecodeBenchAdapter)
MODEL = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": 1000, "max_position_embeddings": 4096,
    "word_embed_proj_dim": 64, "torch_dtype": "float16",
}


@dataclass
class RunVerdict:
    """The finding of a monitor."""

    monitor: str
    step: int
    sentence: str
    signature: str
    """The bug's monitor and kind, without names and numbers, so the same bug has the same signature."""


@dataclass
class ScenarioRun:
    """A run to its end or its verdict."""

    steps: int = 0
    reads: int = 0
    moved_blocks: int = 0
    verdict: RunVerdict | None = None
    pairs: set[tuple[str, str]] = field(default_factory=set)
    """(state, event) pairs that were seen."""
    digest: int = 0
    """Digest of all decisions of the scheduler and the connector, step by step."""
    published: int = 0
    """Digest of all KV events that the engine publishes, in their order."""


class Found(Exception):
    """A monitor ends the run."""

    def __init__(self, monitor: str, sentence: str, kind: str) -> None:
        super().__init__(sentence)
        self.monitor, self.sentence, self.kind = monitor, sentence, kind


class Release:
    """The parts of the installed vLLM that the driver uses, looked up once, and adapters beside those of this program.
    """

    def __init__(self, *adapters: type[Adapter]) -> None:
        self.adapters = {name: adapter for adapter in (*ADAPTERS, *adapters) for name in adapter.connectors}
        """Class of a connector to its adapter."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        logging.disable(logging.CRITICAL)
        self.name, self.version = "vLLM", str(_get("vllm", "__version__"))
        self.config = import_module("vllm.config")
        for name in ("CacheConfig", "DeviceConfig", "KVEventsConfig", "KVTransferConfig", "ModelConfig",
                     "SchedulerConfig", "VllmConfig"):
            _get("vllm.config", name)
        self.sampling = _get("vllm.sampling_params", "SamplingParams")
        self.scheduler = _get("vllm.v1.core.sched.scheduler", "Scheduler")
        self.interface = import_module("vllm.v1.kv_cache_interface")
        self.outputs = import_module("vllm.v1.outputs")
        self.request = _get("vllm.v1.request", "Request")
        self.status = _get("vllm.v1.request", "RequestStatus")
        self.grammar = _get("vllm.v1.structured_output", "StructuredOutputManager")
        self.hash_of = _get("vllm.v1.core.kv_cache_utils", "get_block_hash")
        utils = import_module("vllm.v1.core.kv_cache_utils")
        sha = _get("vllm.utils.hashing", "sha256")
        utils.init_none_hash(sha)
        self.hasher = _get("vllm.v1.core.kv_cache_utils", "get_request_block_hasher")(BLOCK, sha)
        self._directory = tempfile.TemporaryDirectory(prefix="explore-", dir=memory_directory())
        self.files = Path(self._directory.name) / "files"
        """Files of secondary tiers, removed before each run."""
        (Path(self._directory.name) / "config.json").write_text(json.dumps(MODEL))
        self._model = self.config.ModelConfig(
            model=self._directory.name, dtype="float16", seed=0, skip_tokenizer_init=True)
        self._configs: dict[Any, Any] = {}

    def aggregator(self, connector: Any, ranks: int) -> Any:
        """The engine's own sum of the reports of several ranks; None for one rank."""
        if ranks == 1:
            return None
        return _get("vllm.distributed.kv_transfer.kv_connector.utils", "KVOutputAggregator").from_connector(
            connector, ranks)

    def configs(self, connector: dict[str, Any], scenario: Scenario) -> tuple[Any, Any]:
        """The configurations of the engine and of its cache for a scenario."""
        key = (json.dumps(connector, sort_keys=True), scenario.device_blocks, scenario.host_blocks,
               scenario.max_running, scenario.batch_tokens,
               *map(scenario.option, ("groups", "windows", "ranks", "on_failure")))
        if key not in self._configs:
            if len(self._configs) > 500:
                self._configs.clear()
            self._configs[key] = self._make(connector, scenario)
        vllm_config, cache = self._configs[key]
        return vllm_config, cache

    def _make(self, connector: dict[str, Any], scenario: Scenario) -> tuple[Any, Any]:
        kinds, groups, ranks = self.config, str(scenario.option("groups")).split("+"), int(scenario.option("ranks"))
        cache = kinds.CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        cache.num_gpu_blocks = scenario.device_blocks
        if scenario.option("windows") == "all" and hasattr(cache, KEPT):
            setattr(cache, KEPT, None)
        entry = {"kv_load_failure_policy": scenario.option("on_failure"),
                 **self._sized(connector, scenario.host_blocks * PAGE * ranks)}
        more = {} if ranks == 1 else {"parallel_config": kinds.ParallelConfig(
            tensor_parallel_size=ranks, distributed_executor_backend="external_launcher")}
        config = kinds.VllmConfig(
            model_config=self._model, cache_config=cache, device_config=kinds.DeviceConfig("cpu"),
            scheduler_config=kinds.SchedulerConfig(
                max_num_seqs=scenario.max_running, max_num_batched_tokens=scenario.batch_tokens, max_model_len=2048,
                enable_chunked_prefill=True, is_encoder_decoder=False,
            ),
            kv_transfer_config=kinds.KVTransferConfig(**entry),
            kv_events_config=kinds.KVEventsConfig(enable_kv_cache_events=True, publisher="null"), **more,
        )
        if groups != ["full"]:  # as on a device; vLLM without a device turns hybrid memory off
            config.scheduler_config.disable_hybrid_kv_cache_manager = False
        return config, self._cache(groups, scenario.device_blocks, cache)

    def _sized(self, connector: dict[str, Any], host_bytes: int) -> dict[str, Any]:
        """The connector's entry with a host tier of so many bytes, unless the entry itself has a size."""
        entry: dict[str, Any] = {"kv_role": "kv_both", **connector}
        extra = dict(entry.get("kv_connector_extra_config") or {})
        if entry["kv_connector"] in self.adapters:
            self.adapters[entry["kv_connector"]].sized(extra, host_bytes, str(self.files))
        if "connectors" in extra:
            extra["connectors"] = [self._sized(inner, host_bytes) for inner in extra["connectors"]]
        if isinstance(extra.get("connector"), dict):
            extra["connector"] = self._sized(extra["connector"], host_bytes)
        return {**entry, "kv_connector_extra_config": extra}

    def _cache(self, groups: list[str], blocks: int, config: Any) -> Any:
        """The engine's cache: a group of one layer for each kind, ``full`` or ``window``. It keeps windows as vLLM does
        by its configuration, in a release that can be told."""
        parts, shape = self.interface, {
            "block_size": BLOCK, "num_kv_heads": 1, "head_size": 128, "dtype": import_module("torch").float32}
        layers = [f"layer{at}" for at in range(len(groups))]
        specs = [parts.SlidingWindowSpec(**shape, sliding_window=WINDOW) if kind == "window" else
                 parts.FullAttentionSpec(**shape) for kind in groups]
        tensor = parts.KVCacheTensor
        known = {"size": blocks * PAGE, "shared_by": layers, "layers": layers, "layer_stride": blocks * PAGE,
                 "block_stride": PAGE}
        placed = tensor(**{part.name: known[part.name] for part in dataclasses.fields(tensor) if part.name in known})
        accepted = {part.name for part in dataclasses.fields(parts.KVCacheConfig)}
        kept = {KEPT: getattr(config, KEPT)} if KEPT in accepted and hasattr(config, KEPT) else {}
        return parts.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[placed], kv_cache_groups=[
            parts.KVCacheGroupSpec([layer], spec) for layer, spec in zip(layers, specs, strict=True)], **kept)


def _get(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"vLLM has no {module}.{name} here ({error})") from None


def entries(connector: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The connector's entry and the entries inside it."""
    yield connector
    extra = connector.get("kv_connector_extra_config") or {}
    for inner in (*extra.get("connectors", ()), extra.get("connector")):
        if isinstance(inner, dict):
            yield from entries(inner)


class Machine:
    """A scheduler in a scenario."""

    def __init__(
        self, release: Release, connector: dict[str, Any], scenario: Scenario, faults: tuple[str, ...] = (),
    ) -> None:
        self.release, self.scenario = release, scenario
        self.faults = faults
        self.groups = str(scenario.option("groups")).split("+")
        config, kv_cache = release.configs(connector, scenario)
        with contextlib.ExitStack() as stack:
            for entry in entries(connector):
                if entry["kv_connector"] in release.adapters:
                    stack.enter_context(release.adapters[entry["kv_connector"]].around(entry, release.files))
            self.scheduler = release.scheduler(
                vllm_config=config, kv_cache_config=kv_cache, log_stats=False,
                structured_output_manager=release.grammar(config), block_size=BLOCK,
            )
        self.connector = self.scheduler.connector
        for name in faults:
            if name in CONNECTOR_FAULTS:
                CONNECTOR_FAULTS[name][1](self.connector)
        self.workers = [
            ShadowWorker(Memory(), scenario.copies, faults, scenario.option("fails"), rank)
            for rank in range(scenario.option("ranks"))]
        self.halves = Workers(self.connector, release.adapters)
        for adapter in self.halves:
            adapter.attach(self)
        self._aggregator = release.aggregator(self.connector, len(self.workers))
        self.run = ScenarioRun()
        self.chains: dict[str, list[int]] = {}
        """Request to the content after each of its tokens."""
        self.tokens: dict[str, list[int]] = {}
        self.names: dict[int, tuple[str, int]] = {}
        """Content to the first request with this content, and its number of tokens."""
        self.live: dict[str, Any] = {}
        self.computed: dict[str, int] = {}
        """Request to the tokens computed for it, until it gets its first token."""
        self.false_answer: Found | None = None
        """The first false number of cached tokens. It ends the run last, so that it hides no other finding."""
        self.idle = 0
        self.overtaken: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        """Request to its loads that failed since it computed a token."""
        self.brought: dict[str, Counter[bytes]] = {}
        """Request to the chunks that a secondary tier has brought for it since it computed a token."""
        self.resident: dict[str, Counter[bytes]] = {}
        self._shape_name = "".join(f", {name} {value}" for name, value in scenario.machine)
        self._ours = tuple(f"{kind.__qualname__}." for adapter in self.halves for kind in type(adapter).__mro__
                           if issubclass(kind, Adapter))
        self._theirs = {type(adapter.connector).__module__ for adapter in self.halves}
        self._pending = False
        """True while a connector has work of its own between steps."""
        self._watch()

    @property
    def busy(self) -> bool:
        """True while a copy was ordered and not reported."""
        return self._pending or any(worker.busy for worker in self.workers)

    # --- watching the engine ---

    def _watch(self) -> None:
        """Wrap the connector's lookup, and take every event that the engine publishes."""
        ask = self.connector.get_num_new_matched_tokens

        def asked(request: Any, *args: Any, **kwargs: Any) -> Any:
            answer = ask(request, *args, **kwargs)
            in_vain = answer[0] is None and not self.busy
            self.asked[request.request_id] = self.asked[request.request_id] + 1 if in_vain else 0
            return answer

        self.connector.get_num_new_matched_tokens = asked
        self.scheduler.kv_event_publisher.publish = self._publish

    def _publish(self, batch: Any) -> None:
        for event in batch.events:
            kind, medium = type(event).__name__, getattr(event, "medium", "GPU") or "GPU"
            keys = tuple(getattr(event, "block_hashes", ()))
            self.run.published = hash((self.run.published, kind, medium, keys))
            if kind == "AllBlocksCleared":
                self.resident.pop("GPU", None)
                continue
            hashes = self.resident.setdefault(medium, Counter())
            group = int(getattr(event, "group_idx", None) or 0).to_bytes(1, "big") if len(self.groups) > 1 else b""
            for key in keys:
                name = key if isinstance(key, bytes) else int(key).to_bytes(8, "big", signed=key < 0)
                hashes[name[-8:] + group] += 1 if kind == "BlockStored" else -1

    # --- the run ---

    def play(self) -> ScenarioRun:
        """Run to the end, or to the first verdict."""
        try:
            self._play()
        except Found as found:
            self._end(found.monitor, found.sentence, f"{found.monitor}: {found.kind}")
        except Unsupported:
            raise
        except Exception as error:
            where = _where(error, self._ours, self._theirs)
            if where == "?":
                raise Unsupported("this release differs from the known releases, or the adapter from the connector: "
                                  f"{type(error).__name__}: {error}") from error
            text = re.sub(r" at 0x[0-9a-f]+", "", str(error))[:200] or "no message"
            self._end("no crash", f"{type(error).__name__} in {where}: {text}",
                      f"no crash: {type(error).__name__} in {where}")
        finally:
            with contextlib.suppress(Exception):
                self.scheduler.shutdown()
        self.run.reads = sum(worker.memory.reads for worker in self.workers)
        self.run.moved_blocks = sum(worker.moved_blocks for worker in self.workers)
        return self.run

    def _end(self, monitor: str, sentence: str, signature: str) -> None:
        self.run.verdict = RunVerdict(monitor, self.run.steps, sentence, signature)

    def _play(self) -> None:
        actions = list(self.scenario.actions)
        while actions or self.scheduler.has_requests() or self.busy:
            while actions and (actions[0].step <= self.run.steps):
                self._act(actions.pop(0))
            if not self.step() and actions:  # nothing left until the next action
                shift = max(0, actions[0].step - self.run.steps)
                actions = [dataclasses.replace(action, step=action.step - shift) for action in actions]
        for _ in range(4):  # the connector hears in the next step of the copies that ended in the last
            self.step()
        self._leaks()
        self._events()
        if self.false_answer is not None:
            raise self.false_answer

    def _act(self, action: Any) -> None:
        requests = self.scheduler.requests
        if isinstance(action, Arrive):
            prompt = [*self.tokens.get(action.after, ()), *tokens_of(action.prompt)]
            self.chains[action.name], self.tokens[action.name] = [], []
            self._extend(action.name, prompt)
            sampling = self.release.sampling(
                max_tokens=action.output, ignore_eos=True, extra_args=self._peer(action.name))
            request = self.release.request(action.name, prompt, sampling, None, block_hasher=self.release.hasher)
            self.live[action.name], self.computed[action.name] = request, 0
            self.scheduler.add_request(request)
            return
        if isinstance(action, Abort):
            request = requests.get(action.name)
            if request is not None and not request.is_finished():
                self.run.pairs.add((request.status.name, "abort"))
                self.scheduler.finish_requests(action.name, self.release.status.FINISHED_ABORTED)
            return
        assert isinstance(action, CacheReset)
        self.run.pairs.add(("copies" if self.busy else "no copies", f"reset {action.running}"))
        more = {"reset_connector": True} if action.connector else {}
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=action.running, **more)
        except RuntimeError as error:
            if not str(error).startswith("Failed to reset KV cache"):
                raise
            self.run.pairs.add(("copies", "reset refused"))  # with copies in flight, as vLLM's text says

    def _extend(self, name: str, tokens: list[int]) -> None:
        chain, names = self.chains[name], self.names
        self.tokens[name] += tokens
        content = chain[-1] if chain else 1
        for token in tokens:
            content = hash((content, token)) or 1
            chain.append(content)
            names.setdefault(content, (name, len(chain)))

    @staticmethod
    def of_group(content: int, group: int) -> int:
        """The content of the same tokens in the layers of a group."""
        return content ^ SALTS[group]

    def _peer(self, name: str) -> dict[str, Any] | None:
        """The transfer parameters of a request, for a connector that has peers."""
        chain = self.chains[name]
        ends = [min(end, len(chain)) - 1 for end in range(BLOCK, len(chain) + BLOCK, BLOCK)]
        for adapter in self.halves:
            params = adapter.arrive(name, [chain[end] for end in ends]) if adapter.peers else None
            if params is not None:
                return {"kv_transfer_params": params}
        return None

    def step(self) -> bool:
        """Run a step of the engine. Returns True if the step computed tokens or copied blocks."""
        self.run.steps += 1
        if self.run.steps > STEPS_MAX:
            raise Found("progress", f"not done after {STEPS_MAX} steps", "endless")
        self._pending = bool(sum(adapter.before_step() for adapter in self.halves))  # each does its work
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        ended: list[list[Job]] = []
        for worker in self.workers:
            worker.memory.step = self.run.steps
            parts = [orders for _, orders in self.halves.orders(metadata)]
            if worker.rank == 0:
                first = parts
                self.run.digest = hash((self.run.digest, *_decided(output, parts)))
            begun = [job for orders in parts for job in worker.begin(orders)]
            self._forward(worker.memory, output)
            ended.append(begun + [job for orders in parts for job in worker.end(orders)])
            self._peer_read(worker.memory, ended[-1])
        self._cover(output, first, ended)
        self.failed.update({name for rank in ended for job in rank if job.failed for name in job.request.split(",")})
        happened = bool(output.num_scheduled_tokens or any(ended) or self.busy)
        self._report(output, ended)
        self._progress(output, happened)
        return happened

    def _forward(self, memory: Memory, output: Any) -> None:
        """Write the contents that the forward pass computes, and check each computed block that it reads.

        A request may read full blocks that another request computes in the same pass, so full blocks are checked after
        the writes. Its own last block must already hold the tokens before the computed tokens.
        """
        manager = self.scheduler.kv_cache_manager
        batch = [(name, computed, manager.get_block_ids(name)) for name, computed in _computed(output)]
        for group, kind in enumerate(self.groups):
            self._compute(memory, output, [(name, computed, places[group]) for name, computed, places in batch],
                          group, kind == "window")

    def _compute(
        self, memory: Memory, output: Any, batch: list[tuple[str, int, list[int]]], group: int, window: bool,
    ) -> None:
        """The forward pass of a group of layers. A layer with a window reads the last ``WINDOW`` tokens only."""
        salt = SALTS[group]
        for name, computed, places in batch:
            if computed % BLOCK:
                self._want(memory, name, computed // BLOCK, places[computed // BLOCK],
                           self.chains[name][computed - 1] ^ salt, group)
        for name, computed, places in batch:
            after = computed + output.num_scheduled_tokens[name]
            chain = self.chains[name]
            for at in range(computed // BLOCK, (after - 1) // BLOCK + 1):
                tokens, place = min(after, (at + 1) * BLOCK), places[at]
                if window and not place:
                    continue  # the null block stands for tokens that no later step reads
                if not self._extends(memory.device.get(place, EMPTY), chain[tokens - 1] ^ salt, group):
                    memory.write(place, chain[tokens - 1] ^ salt, name, tokens)
        device = memory.device
        for name, computed, places in batch:
            full, first = computed // BLOCK, max(0, computed - WINDOW + 1) // BLOCK if window else 0
            memory.reads += full - first
            contents = self.chains[name][(first + 1) * BLOCK - 1 : full * BLOCK : BLOCK]
            for at, content in enumerate(contents, first):
                if device.get(places[at], EMPTY) != content ^ salt:
                    self._wrong(memory, name, at, places[at], content ^ salt, group)

    def _peer_read(self, memory: Memory, ended: list[Job]) -> None:
        """Check the blocks that a peer has read."""
        for job in ended if memory.torn else ():
            for place, slot in job.pairs if job.peer else ():
                torn = memory.torn.pop((job.kind, slot), None)
                if torn is not None:
                    raise Found("right content", f"the peer of request {job.request} reads place {place} and wants "
                                f"{self._name(torn.wanted)}, but finds {self._name(memory.host[job.kind, slot])}: the "
                                "place was given away before the peer reported that it has read it", "read by a peer")

    def _want(self, memory: Memory, name: str, at: int, place: int, content: int, group: int) -> None:
        memory.reads += 1
        found = memory.device.get(place, EMPTY)
        if found != content and not self._extends(found, content, group):
            self._wrong(memory, name, at, place, content, group)

    def _extends(self, longer: int, content: int, group: int = 0) -> bool:
        """True if ``longer`` begins with ``content``: more tokens of the same block of the same prefix."""
        if longer in (EMPTY, content):
            return longer == content
        request, tokens = self.names.get(longer ^ SALTS[group], ("", 0))
        if not tokens:
            return False
        content ^= SALTS[group]
        _, before = self.names[content]
        same_block = (before - 1) // BLOCK == (tokens - 1) // BLOCK
        return same_block and before < tokens and self.chains[request][before - 1] == content

    def _wrong(self, memory: Memory, name: str, at: int, place: int, wanted: int, group: int) -> None:
        found = memory.device.get(place, EMPTY)
        why = cause(memory, place, self._name)
        writer = memory.device_writer.get(place, ("nobody", 0, "", 0))[0]
        partial = self.names.get(found ^ SALTS[group], ("", 0))[1] and self._extends(wanted, found, group)
        where = f" of group {group}" if len(self.groups) > 1 else ""
        raise Found(
            "right content",
            f"request {name} reads block {at}{where} in place {place} and wants {self._name(wanted)}, but finds "
            f"{self._name(found)}: {why}" + (", before all its tokens were computed" if partial else ""),
            "load that was not waited for" if place in memory.promised else f"written by {writer}" + (
                ", torn store" if "did not wait for store" in why else ", incomplete block" if partial else ""),
        )

    def _name(self, content: int) -> str:
        if content == EMPTY:
            return "nothing"
        for group in range(len(self.groups)):
            if content ^ SALTS[group] in self.names:
                request, tokens = self.names[content ^ SALTS[group]]
                layers = f" in group {group}" if len(self.groups) > 1 else ""
                return f"the first {tokens} tokens of {request}{layers}"
        return "no prefix of a request"

    def _report(self, output: Any, ended: list[list[Job]]) -> None:
        """The workers' half of the step, as the model runners would return it."""
        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            token = (self.chains[name][-1] % 991) + 2
            sampled.append([token] if done else [])
            if done:
                self._extend(name, [token])
        results = [self.release.outputs.ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled,
            kv_connector_output=self._connector_output(jobs),
        ) for jobs in ended]
        result = results[0] if self._aggregator is None else self._aggregator.aggregate(results)
        self._told(output, self.scheduler.update_from_output(output, result))

    def _told(self, output: Any, answers: dict[int, Any]) -> None:
        """Truth of answers: the cached tokens that a user is told are those that were not computed.

        A preempted request computes tokens twice, so its number cannot be checked. The last token of a prompt is
        computed even if it is cached."""
        for name, count in output.num_scheduled_tokens.items():
            if name in self.computed:
                self.computed[name] += count
        for answer in (one for part in answers.values() for one in part.outputs):
            request, stats = self.live[answer.request_id], getattr(answer, "prefill_stats", None)
            computed = self.computed.pop(answer.request_id, None)
            if stats is None or computed is None or request.num_preemptions:
                continue
            prompt, told = len(request.prompt_token_ids), stats.num_cached_tokens
            if told != prompt - computed and not (told == prompt and computed == 1) and self.false_answer is None:
                self.false_answer = Found(
                    "truth of answers", f"request {answer.request_id} was told in step {self.run.steps} that {told} of "
                    f"{prompt} tokens were cached, and {computed} were computed", "cached tokens")

    def _connector_output(self, jobs: list[Job]) -> Any:
        """The report of the connectors' worker halves of a rank; None when no job ended."""
        if not jobs:
            return None
        meta = self.halves.report(jobs)
        came = {name for job in jobs if job.load and not job.sync for name in job.request.split(",") if name}
        went = {job.request for job in jobs if job.peer and not job.load}
        if meta is None and not came and not went:
            return None
        failed: dict[str, Any] = {}
        by_request = {adapter.kind for adapter in self.halves if adapter.fails_by_request or len(self.groups) > 1}
        lost = {place for job in jobs if job.kind not in by_request for place in job.lost}
        requests = {job.request for job in jobs if job.failed and job.kind in by_request}
        if lost:
            failed["invalid_block_ids"] = lost
        if requests:
            failed["failed_recving"] = requests
        return self.release.outputs.KVConnectorOutput(
            kv_connector_worker_meta=meta, finished_recving=came or None, finished_sending=went or None, **failed)

    # --- monitors over time ---

    def _progress(self, output: Any, happened: bool) -> None:
        self.idle = 0 if happened else self.idle + 1
        unfinished = [request for request in self.scheduler.requests.values() if not request.is_finished()]
        if self.idle >= IDLE_STEPS and unfinished:
            raise Found("progress", self._stuck(unfinished), self._shape(unfinished))
        for name in output.num_scheduled_tokens:
            self.failed.pop(name, None)
            self.brought.pop(name, None)
        self._rounds()
        self._order(output, unfinished)

    def _rounds(self) -> None:
        """A request that goes round in circles: asked, loaded or brought again, and never scheduled."""
        for name in self.scheduler.requests:
            if self.asked[name] > ASKED_MAX:
                raise Found("bounded wait", f"request {name} was told to ask again {self.asked[name]} times in a row, "
                            "and no copy is in flight", "ask again without end")
            if self.failed[name] > FAILED_MAX:
                raise Found("bounded wait", f"the last {self.failed[name]} loads of request {name} failed, and it "
                            "computed nothing between them: after each the connector offers the same blocks again",
                            "failed loads without end")
            times = max(self.brought.get(name, {}).values(), default=0)
            if times > BROUGHT_MAX:
                raise Found("bounded wait", f"a secondary tier has brought the same chunk {times} times for request "
                            f"{name}, which is not scheduled: each time the chunk leaves the host tier before the "
                            "request has all its chunks there", "brought again without end")

    def _order(self, output: Any, unfinished: list[Any]) -> None:
        new = [request.req_id for request in output.scheduled_new_reqs]
        if not new:
            return
        running = {request.request_id for request in self.scheduler.running}
        waiting = [request for request in unfinished if request.request_id not in running
                   and request.status is not self.release.status.WAITING_FOR_REMOTE_KVS]
        for request in waiting:
            if any(self.live[name].arrival_time > request.arrival_time for name in new):
                self.overtaken[request.request_id] += 1
                if self.overtaken[request.request_id] > OVERTAKEN_MAX:
                    raise Found("bounded wait", f"request {request.request_id} was overtaken {OVERTAKEN_MAX} times by "
                                "requests that arrived later", "overtaken")

    def _stuck(self, unfinished: list[Any]) -> str:
        """The wait-for graph of a deadlock in one sentence."""
        manager = self.scheduler.kv_cache_manager
        free = manager.block_pool.get_num_free_blocks()
        text = f"nothing was scheduled for {IDLE_STEPS} steps and no copy is in flight"
        waiting = [request for request in unfinished if not self._held(request)]
        holding = [request for request in unfinished if self._held(request)]
        if waiting:
            head = waiting[0]
            want = -(-head.num_tokens // BLOCK) * len(self.groups)
            text += (f"; request {head.request_id} ({_state(head)}) wants {want} blocks and {free} are free, with "
                     f"{len(waiting) - 1} more behind it")
        for request in holding:
            text += (f"; request {request.request_id} ({_state(request)}) holds {self._held(request)} blocks and is "
                     "not scheduled")
        return text

    def _held(self, request: Any) -> int:
        return sum(map(len, self.scheduler.kv_cache_manager.get_block_ids(request.request_id)))

    def _shape(self, unfinished: list[Any]) -> str:
        """The kind of a deadlock."""
        loaded = self.release.status.WAITING_FOR_REMOTE_KVS
        if any(request.status is loaded for request in unfinished):
            return "deadlock with a loaded request that is not scheduled"
        if any(map(self._held, unfinished)):
            return "deadlock, holding blocks"
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return "deadlock" + (" with all blocks free" if free == self.scenario.device_blocks - 1 else "")

    def _cover(self, output: Any, parts: list[StepOrders], ended: list[list[Job]]) -> None:
        pairs, jobs = self.run.pairs, self.workers[-1].jobs
        loads = sum(job.load for job in jobs)
        load = f"{min(loads, 2)} loads {min(len(jobs) - loads, 2)} stores{self._shape_name}"
        for status in {request.status for request in self.scheduler.requests.values()}:
            pairs.add((status.name, load))
        if getattr(output, "preempted_req_ids", None):
            pairs.add((load, "preempted"))
        for orders in parts:
            if orders.flush:
                pairs.add((load, "flush"))
            if orders.stores:
                pairs.add((load, "store"))
        for job in (job for rank in ended for job in rank):
            owner = self.scheduler.requests.get(job.request)
            how = "load failed" if job.failed else "load ended" if job.load else "store ended"
            pairs.add(("gone" if owner is None else owner.status.name, how + self._shape_name))

    # --- monitors at the end ---

    def _leaks(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        missing = self.scenario.device_blocks - 1 - pool.get_num_free_blocks()
        if missing:
            held = sorted(block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null)
            raise Found("no leak", f"{missing} device blocks are not free after all requests ended: places "
                        f"{held[:8]}", "device blocks")
        for adapter in self.halves:
            for name, table in adapter.tables():
                if table:
                    raise Found("no leak", f"{name} still has {len(table)} entries after all requests ended: "
                                f"{str(list(table)[:3])[:120]}", name)
            for block, references in adapter.held():
                if references:
                    raise Found("no leak", f"the host block of {block[:8].hex()} keeps {references} references after "
                                "all requests ended", "host references")

    def _events(self) -> None:
        """Truth of answers: the published events, folded, name the blocks that are cached."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        several = len(self.groups) > 1
        cached = {
            self.release.hash_of(block.block_hash)[-8:] + (block.block_hash[-1:] if several else b"")
            for block in blocks if block.block_hash is not None and not block.is_null
        }
        self._same("device", "GPU", cached)
        media = Counter(adapter.medium() for adapter in self.halves)
        for adapter in self.halves if not several else ():
            if media[adapter.medium()] == 1 and adapter.medium():
                self._same("host", adapter.medium(), {key[-8:] for key, _ in adapter.held()})

    def _same(self, tier: str, medium: str, cached: set[bytes]) -> None:
        published = set(+self.resident.get(medium, Counter()))
        if published != cached:
            raise Found("truth of answers", f"the KV events name {len(published - cached)} {tier} blocks that are not "
                        f"cached, and miss {len(cached - published)} that are", f"{tier} events")


def _computed(output: Any) -> Iterator[tuple[str, int]]:
    """(request, tokens computed before) of all requests that a step schedules."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def _decided(output: Any, parts: list[StepOrders]) -> Iterator[Any]:
    """The decisions of a step: tokens, new places, preemptions, copies and flushes, in its order."""
    yield tuple(output.num_scheduled_tokens.items())
    yield tuple((new.req_id, new.num_computed_tokens, *map(tuple, new.block_ids)) for new in output.scheduled_new_reqs)
    cached = output.scheduled_cached_reqs
    yield tuple(
        (name, *map(tuple, blocks or ())) for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True))
    yield tuple(sorted(getattr(output, "preempted_req_ids", None) or ()))
    for orders in parts:
        yield tuple((job.number, job.load, job.request, tuple(job.pairs)) for job in [*orders.loads, *orders.stores])
        yield (tuple(sorted(orders.flush)), orders.flush_all)


def _state(request: Any) -> str:
    return str(request.status.name).lower()


def _where(error: BaseException, adapters: tuple[str, ...], connectors: set[str]) -> str:
    """The function of the engine or of a module of ``connectors`` that raised. "?" if our own code or an adapter
    raised, also when the engine had called it."""
    trace, ours = error.__traceback__, os.path.dirname(_where.__code__.co_filename)
    name = "?"
    while trace is not None:
        code = trace.tb_frame.f_code
        file, theirs = code.co_filename, trace.tb_frame.f_globals.get("__name__") in connectors
        if os.path.dirname(file) == ours or getattr(code, "co_qualname", "").startswith(adapters):
            name = "?"
        elif theirs or any(f"{os.sep}{package}{os.sep}" in file for package in ENGINES):
            name = f"{Path(file).stem}.{code.co_name}"
        trace = trace.tb_next
    return name


def recorded(
    release: Release, connector: dict[str, Any], scenario: Scenario, faults: tuple[str, ...], path: str, tell: Any
) -> Any:
    """A machine with the tap around its connector, which sends its messages; the caller writes ``path``."""
    tapped = import_module("kvbm_console.explore.tapped")
    return tapped.Tapped(release, connector, scenario, faults, tell)


ENGINE = (Release, Machine)
"""Release and machine, as the worker makes them."""
