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

from kvbm_console.explore.scenario import BLOCK, Abort, Arrive, CacheReset, Scenario, tokens_of
from kvbm_console.explore.shadow import EMPTY, Job, Memory, ShadowWorker, StepOrders, cause, read_orders

PAGE = 16 * 1024
"""Bytes of a block of the absent model."""
IDLE_STEPS = 6
"""Steps in a row without work, copies or reports after which no change can follow."""
OVERTAKEN_MAX = 48
"""Steps in which later requests were scheduled while an earlier request waited for its turn alone."""
ASKED_MAX = 60
"""Answers "ask again" in a row without any copy in flight."""
STEPS_MAX = 3_000
MODEL = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": 1000, "max_position_embeddings": 4096,
    "word_embed_proj_dim": 64, "torch_dtype": "float16",
}
TABLES = ("_jobs", "_req_status", "_block_id_to_pending_jobs", "_chunks_being_loaded", "_blocks_being_loaded",
          "_reset_fence", "_reqs_to_load", "_reqs_to_store", "_load_event_to_reqs", "_store_event_to_blocks",
          "_pending_store_blocks", "_inflight_loads")
"""Tables of connectors that must be empty when all requests have ended and all copies were reported."""


class Unsupported(Exception):
    """This release lacks a part that the driver needs; the text names the part."""


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


class Found(Exception):
    """A monitor ends the run."""

    def __init__(self, monitor: str, sentence: str, kind: str) -> None:
        super().__init__(sentence)
        self.monitor, self.sentence, self.kind = monitor, sentence, kind


class Release:
    """The parts of the installed vLLM that the driver uses, looked up once."""

    def __init__(self) -> None:
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
        self._directory = tempfile.TemporaryDirectory(prefix="explore-")
        (Path(self._directory.name) / "config.json").write_text(json.dumps(MODEL))
        self._model = self.config.ModelConfig(
            model=self._directory.name, dtype="float16", seed=0, skip_tokenizer_init=True)
        self._configs: dict[Any, Any] = {}

    def configs(self, connector: dict[str, Any], scenario: Scenario) -> tuple[Any, Any]:
        """The configurations of the engine and of its cache for a scenario."""
        key = (json.dumps(connector, sort_keys=True), scenario.device_blocks, scenario.host_blocks,
               scenario.max_running, scenario.batch_tokens)
        if key not in self._configs:
            if len(self._configs) > 500:
                self._configs.clear()
            self._configs[key] = self._make(connector, scenario)
        vllm_config, cache = self._configs[key]
        return vllm_config, cache

    def _make(self, connector: dict[str, Any], scenario: Scenario) -> tuple[Any, Any]:
        kinds = self.config
        cache = kinds.CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        cache.num_gpu_blocks = scenario.device_blocks
        config = kinds.VllmConfig(
            model_config=self._model, cache_config=cache, device_config=kinds.DeviceConfig("cpu"),
            scheduler_config=kinds.SchedulerConfig(
                max_num_seqs=scenario.max_running, max_num_batched_tokens=scenario.batch_tokens, max_model_len=2048,
                enable_chunked_prefill=True, is_encoder_decoder=False,
            ),
            kv_transfer_config=kinds.KVTransferConfig(**sized(connector, scenario.host_blocks)),
            kv_events_config=kinds.KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        spec = self.interface.FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=import_module("torch").float32)
        group = self.interface.KVCacheGroupSpec(["layer"], spec)
        tensor = self.interface.KVCacheTensor
        known = {"size": scenario.device_blocks * PAGE, "shared_by": ["layer"], "layers": ["layer"],
                 "layer_stride": scenario.device_blocks * PAGE, "block_stride": PAGE}
        placed = tensor(**{part.name: known[part.name] for part in dataclasses.fields(tensor) if part.name in known})
        kv_cache = self.interface.KVCacheConfig(
            num_blocks=scenario.device_blocks, kv_cache_tensors=[placed], kv_cache_groups=[group])
        return config, kv_cache


def _get(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"vLLM has no {module}.{name} here ({error})") from None


def sized(connector: dict[str, Any], host_blocks: int) -> dict[str, Any]:
    """The connector's entry with a host tier of ``host_blocks``, unless the entry itself has a size."""
    entry: dict[str, Any] = {"kv_role": "kv_both", **connector}
    extra = dict(entry.get("kv_connector_extra_config") or {})
    if entry["kv_connector"] in ("OffloadingConnector", "SimpleCPUOffloadConnector"):
        extra.setdefault("cpu_bytes_to_use", host_blocks * PAGE)
    if "connectors" in extra:
        extra["connectors"] = [sized(inner, host_blocks) for inner in extra["connectors"]]
    if isinstance(extra.get("connector"), dict):
        extra["connector"] = sized(extra["connector"], host_blocks)
    return {**entry, "kv_connector_extra_config": extra}


class Machine:
    """A scheduler in a scenario."""

    def __init__(
        self, release: Release, connector: dict[str, Any], scenario: Scenario, faults: tuple[str, ...] = (),
    ) -> None:
        self.release, self.scenario = release, scenario
        config, kv_cache = release.configs(connector, scenario)
        self.scheduler = release.scheduler(
            vllm_config=config, kv_cache_config=kv_cache, log_stats=False,
            structured_output_manager=release.grammar(config), block_size=BLOCK,
        )
        self.connector = self.scheduler.connector
        for name in faults:
            if name in CONNECTOR_FAULTS:
                CONNECTOR_FAULTS[name][1](self.connector)
        self.memory = Memory()
        self.worker = ShadowWorker(self.memory, scenario.copies, faults)
        self.run = ScenarioRun()
        self.chains: dict[str, list[int]] = {}
        """Request to the content after each of its tokens."""
        self.tokens: dict[str, list[int]] = {}
        self.names: dict[int, tuple[str, int]] = {}
        """Content to the first request with this content, and its number of tokens."""
        self.live: dict[str, Any] = {}
        self.idle = 0
        self.overtaken: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.resident: dict[str, Counter[bytes]] = {}
        self._watch()

    # --- watching the engine ---

    def _watch(self) -> None:
        """Wrap the connector's lookup, and take every event that the engine publishes."""
        ask = self.connector.get_num_new_matched_tokens

        def asked(request: Any, *args: Any, **kwargs: Any) -> Any:
            answer = ask(request, *args, **kwargs)
            self.asked[request.request_id] = self.asked[request.request_id] + 1 if answer[0] is None else 0
            return answer

        self.connector.get_num_new_matched_tokens = asked
        self.scheduler.kv_event_publisher.publish = self._publish

    def _publish(self, batch: Any) -> None:
        for event in batch.events:
            kind, medium = type(event).__name__, getattr(event, "medium", "GPU") or "GPU"
            if kind == "AllBlocksCleared":
                self.resident.pop("GPU", None)
                continue
            hashes = self.resident.setdefault(medium, Counter())
            for key in event.block_hashes:
                name = key if isinstance(key, bytes) else int(key).to_bytes(8, "big", signed=key < 0)
                hashes[name[-8:]] += 1 if kind == "BlockStored" else -1

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
            where = _where(error)
            if where == "?":
                raise Unsupported(
                    f"this release differs from the known releases: {type(error).__name__}: {error}") from error
            text = re.sub(r" at 0x[0-9a-f]+", "", str(error))[:200] or "no message"
            self._end("no crash", f"{type(error).__name__} in {where}: {text}",
                      f"no crash: {type(error).__name__} in {where}")
        finally:
            with contextlib.suppress(Exception):
                self.scheduler.shutdown()
        self.run.reads = self.memory.reads
        self.run.moved_blocks = self.worker.moved_blocks
        return self.run

    def _end(self, monitor: str, sentence: str, signature: str) -> None:
        self.run.verdict = RunVerdict(monitor, self.run.steps, sentence, signature)

    def _play(self) -> None:
        actions = list(self.scenario.actions)
        while actions or self.scheduler.has_requests() or self.worker.busy:
            while actions and (actions[0].step <= self.run.steps):
                self._act(actions.pop(0))
            if not self.step() and actions:  # nothing left until the next action
                shift = max(0, actions[0].step - self.run.steps)
                actions = [dataclasses.replace(action, step=action.step - shift) for action in actions]
        for _ in range(4):  # the connector hears in the next step of the copies that ended in the last
            self.step()
        self._leaks()
        self._events()

    def _act(self, action: Any) -> None:
        requests = self.scheduler.requests
        if isinstance(action, Arrive):
            prompt = [*self.tokens.get(action.after, ()), *tokens_of(action.prompt)]
            request = self.release.request(
                action.name, prompt, self.release.sampling(max_tokens=action.output, ignore_eos=True), None,
                block_hasher=self.release.hasher,
            )
            self.chains[action.name], self.tokens[action.name] = [], []
            self._extend(action.name, prompt)
            self.live[action.name] = request
            self.scheduler.add_request(request)
            return
        if isinstance(action, Abort):
            request = requests.get(action.name)
            if request is not None and not request.is_finished():
                self.run.pairs.add((request.status.name, "abort"))
                self.scheduler.finish_requests(action.name, self.release.status.FINISHED_ABORTED)
            return
        assert isinstance(action, CacheReset)
        self.run.pairs.add(("copies" if self.worker.busy else "no copies", f"reset {action.running}"))
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

    def step(self) -> bool:
        """Run a step of the engine. Returns True if the step computed tokens or copied blocks."""
        self.run.steps += 1
        self.memory.step = self.run.steps
        if self.run.steps > STEPS_MAX:
            raise Found("progress", f"not done after {STEPS_MAX} steps", "endless")
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        parts = list(_orders(metadata))
        self.run.digest = hash((self.run.digest, *_decided(output, parts)))
        ended = [(orders, job) for orders in parts for job in self.worker.begin(orders)]
        self._forward(output)
        ended += [(orders, job) for orders in parts for job in self.worker.end(orders)] if parts else []
        self._cover(output, parts, ended)
        happened = bool(output.num_scheduled_tokens or ended or self.worker.busy)
        self._report(output, metadata, [job for _, job in ended])
        self._progress(output, happened)
        return happened

    def _forward(self, output: Any) -> None:
        """Write the contents that the forward pass computes, and check each computed block that it reads.

        A request may read full blocks that another request computes in the same pass, so full blocks are checked after
        the writes. Its own last block must already hold the tokens before the computed tokens.
        """
        manager = self.scheduler.kv_cache_manager
        batch = [(name, computed, manager.get_block_ids(name)[0]) for name, computed in _computed(output)]
        for name, computed, places in batch:
            if computed % BLOCK:
                self._want(name, computed // BLOCK, places[computed // BLOCK], self.chains[name][computed - 1])
        for name, computed, places in batch:
            after = computed + output.num_scheduled_tokens[name]
            chain = self.chains[name]
            for at in range(computed // BLOCK, (after - 1) // BLOCK + 1):
                tokens = min(after, (at + 1) * BLOCK)
                if not self._extends(self.memory.device.get(places[at], EMPTY), chain[tokens - 1]):
                    self.memory.write(places[at], chain[tokens - 1], name, tokens)
        device = self.memory.device
        for name, computed, places in batch:
            full = computed // BLOCK
            self.memory.reads += full
            for at, content in enumerate(self.chains[name][BLOCK - 1 : full * BLOCK : BLOCK]):
                if device.get(places[at], EMPTY) != content:
                    self._wrong(name, at, places[at], content)

    def _want(self, name: str, at: int, place: int, content: int) -> None:
        self.memory.reads += 1
        found = self.memory.device.get(place, EMPTY)
        if found != content and not self._extends(found, content):
            self._wrong(name, at, place, content)

    def _extends(self, longer: int, content: int) -> bool:
        """True if ``longer`` begins with ``content``: more tokens of the same block of the same prefix."""
        if longer in (EMPTY, content):
            return longer == content
        request, tokens = self.names.get(longer, ("", 0))
        _, before = self.names[content]
        same_block = (before - 1) // BLOCK == (tokens - 1) // BLOCK
        return same_block and before < tokens and self.chains[request][before - 1] == content

    def _wrong(self, name: str, at: int, place: int, wanted: int) -> None:
        found = self.memory.device.get(place, EMPTY)
        why = cause(self.memory, place, self._name)
        writer = self.memory.device_writer.get(place, ("nobody", 0, "", 0))[0]
        partial = found != EMPTY and self._extends(wanted, found)
        raise Found(
            "right content",
            f"request {name} reads block {at} in place {place} and wants {self._name(wanted)}, but finds "
            f"{self._name(found)}: {why}" + (", before all its tokens were computed" if partial else ""),
            f"written by {writer}" + (
                ", torn store" if "did not wait for store" in why else ", incomplete block" if partial else ""),
        )

    def _name(self, content: int) -> str:
        if content == EMPTY:
            return "nothing"
        request, tokens = self.names.get(content, ("?", 0))
        return f"the first {tokens} tokens of {request}"

    def _report(self, output: Any, metadata: Any, ended: list[Job]) -> None:
        """The worker's half of the step, as the model runner would return it."""
        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            token = (self.chains[name][-1] % 991) + 2
            sampled.append([token] if done else [])
            if done:
                self._extend(name, [token])
        result = self.release.outputs.ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled,
            kv_connector_output=_connector_output(self.release.outputs, metadata, ended),
        )
        self.scheduler.update_from_output(output, result)

    # --- monitors over time ---

    def _progress(self, output: Any, happened: bool) -> None:
        self.idle = 0 if happened else self.idle + 1
        unfinished = [request for request in self.scheduler.requests.values() if not request.is_finished()]
        if self.idle >= IDLE_STEPS and unfinished:
            raise Found("progress", self._stuck(unfinished), self._shape(unfinished))
        for name, times in self.asked.items():
            if times > ASKED_MAX and not self.worker.busy and name in self.scheduler.requests:
                raise Found("bounded wait", f"request {name} was told to ask again {times} times in a row, and no copy "
                            "is in flight", "ask again without end")
        self._order(output, unfinished)

    def _order(self, output: Any, unfinished: list[Any]) -> None:
        running = {request.request_id for request in self.scheduler.running}
        waiting = [request for request in unfinished if request.request_id not in running
                   and request.status is not self.release.status.WAITING_FOR_REMOTE_KVS]
        new = [request.req_id for request in output.scheduled_new_reqs]
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
            want = -(-head.num_tokens // BLOCK)
            text += (f"; request {head.request_id} ({_state(head)}) wants {want} blocks and {free} are free, with "
                     f"{len(waiting) - 1} more behind it")
        for request in holding:
            text += (f"; request {request.request_id} ({_state(request)}) holds {self._held(request)} blocks and is "
                     "not scheduled")
        return text

    def _held(self, request: Any) -> int:
        return len(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])

    def _shape(self, unfinished: list[Any]) -> str:
        """The kind of a deadlock."""
        loaded = self.release.status.WAITING_FOR_REMOTE_KVS
        if any(request.status is loaded for request in unfinished):
            return "deadlock with a loaded request that is not scheduled"
        return "deadlock" + (", holding blocks" if any(map(self._held, unfinished)) else "")

    def _cover(self, output: Any, parts: list[StepOrders], ended: list[Any]) -> None:
        pairs = self.run.pairs
        loads = sum(job.load for job in self.worker.jobs)
        load = f"{min(loads, 2)} loads {min(len(self.worker.jobs) - loads, 2)} stores"
        for request in self.scheduler.requests.values():
            pairs.add((request.status.name, load))
        if getattr(output, "preempted_req_ids", None):
            pairs.add((load, "preempted"))
        for orders in parts:
            if orders.flush:
                pairs.add((load, "flush"))
            if orders.stores:
                pairs.add((load, "store"))
        for _, job in ended:
            owner = self.scheduler.requests.get(job.request)
            pairs.add(("gone" if owner is None else owner.status.name, "load ended" if job.load else "store ended"))

    # --- monitors at the end ---

    def _leaks(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        missing = self.scenario.device_blocks - 1 - pool.get_num_free_blocks()
        if missing:
            held = sorted(block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null)
            raise Found("no leak", f"{missing} device blocks are not free after all requests ended: places "
                        f"{held[:8]}", "device blocks")
        for name, table in _tables(self.connector):
            if table:
                raise Found("no leak", f"{name} still has {len(table)} entries after all requests ended: "
                            f"{str(list(table)[:3])[:120]}", name)
        for key, block in _host_blocks(self.connector):
            if getattr(block, "ref_cnt", 0):
                raise Found("no leak", f"the host block of {key[:8].hex()} keeps {block.ref_cnt} references after all "
                            "requests ended", "host references")

    def _events(self) -> None:
        """Truth of answers: the published events, folded, name the blocks that are cached."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        cached = {
            self.release.hash_of(block.block_hash)[-8:] for block in blocks
            if block.block_hash is not None and not block.is_null
        }
        published = set(+self.resident.get("GPU", Counter()))
        if published != cached:
            raise Found("truth of answers", f"the KV events name {len(published - cached)} device blocks that are not "
                        f"cached, and miss {len(cached - published)} that are", "device events")


def _orders(metadata: Any) -> Iterator[StepOrders]:
    if metadata is None:
        return
    try:
        yield from read_orders(metadata)
    except TypeError as error:
        raise Unsupported(f"no worker is known for {error}") from None


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


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    name = "?"
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if f"{os.sep}vllm{os.sep}" in file and not file.endswith(f"explore{os.sep}vllm.py"):
            name = f"{Path(file).stem}.{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return name


def _connector_output(outputs: Any, metadata: Any, ended: list[Job]) -> Any:
    """The report of the connectors' worker halves on these jobs; None when no job ended."""
    meta = _worker_meta(metadata, ended)
    names = {name for job in ended if job.load and not job.sync for name in job.request.split(",") if name}
    if meta is None and not names:
        return None
    return outputs.KVConnectorOutput(kv_connector_worker_meta=meta, finished_recving=names or None)


def _worker_meta(metadata: Any, ended: list[Job]) -> Any:
    name = type(metadata).__name__
    if name == "MultiKVConnectorMetadata":
        parts = tuple(_worker_meta(part, ended) for part in metadata.metadata)
        if all(part is None for part in parts):
            return None
        module = import_module("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
        return module.MultiKVConnectorWorkerMetadata(metadata=parts)
    if name == "OffloadingConnectorMetadata":
        module = import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.common")
        done = Counter(job.number for job in ended if job.kind == "offloading")
        return module.OffloadingWorkerMetadata(completed_jobs=dict(done)) if done else None
    if name == "SimpleCPUOffloadMetadata":
        module = import_module("vllm.v1.simple_kv_offload.metadata")
        stores = {job.number: 1 for job in ended if job.kind == "simple" and not job.load}
        return module.SimpleCPUOffloadWorkerMetadata(completed_store_events=stores) if stores else None
    return None


def _halves(connector: Any) -> Iterator[Any]:
    """The scheduler halves inside a connector."""
    for name in ("connector_scheduler", "scheduler_manager"):
        half = getattr(connector, name, None)
        if half is not None:
            yield half
    for inner in getattr(connector, "_connectors", ()):
        yield from _halves(inner)
    inside = getattr(connector, "inner", None)
    if inside is not None:
        yield from _halves(inside)


def _tables(connector: Any) -> Iterator[tuple[str, Any]]:
    for half in _halves(connector):
        for name in TABLES:
            table = getattr(half, name, None)
            if isinstance(table, (dict, set, list)):
                yield f"{type(half).__name__}.{name}", table


def _host_blocks(connector: Any) -> Iterator[tuple[bytes, Any]]:
    for half in _halves(connector):
        policy = getattr(getattr(half, "manager", None), "_policy", None)
        for name in ("blocks", "chunks", "t1", "t2"):
            table = getattr(policy, name, None)
            if isinstance(table, dict):
                yield from table.items()


def recorded(
    release: Release, connector: dict[str, Any], scenario: Scenario, faults: tuple[str, ...], path: str, tell: Any
) -> Any:
    """A machine with the tap around its connector, which sends its messages; the caller writes ``path``."""
    tapped = import_module("kvbm_console.explore.tapped")
    return tapped.Tapped(release, connector, scenario, faults, tell)


# --- planted faults of a connector ---


def _half(connector: Any) -> Any:
    half = getattr(connector, "connector_scheduler", None)
    if half is None:
        raise Unsupported("faults of a connector are planted in OffloadingConnector; this one is another")
    return half


def _no_flush(connector: Any) -> None:
    half, build = _half(connector), _half(connector).build_connector_meta

    def forget(output: Any) -> Any:
        metadata = build(output)
        metadata.jobs_to_flush = None
        return metadata

    half.build_connector_meta = forget


def _no_fence(connector: Any) -> None:
    half, finished = _half(connector), _half(connector).request_finished

    def forget(request: Any) -> Any:
        answer = finished(request)
        half._block_id_to_pending_jobs.clear()
        return answer

    half.request_finished = forget


def _no_unpin(connector: Any) -> None:
    _half(connector).manager.complete_load = lambda *_, **__: None


def _no_pin(connector: Any) -> None:
    manager = _half(connector).manager
    prepare, complete = manager.prepare_load, manager.complete_load

    def unpinned(keys: Any, *rest: Any) -> Any:
        spec = prepare(keys, *rest)
        complete(keys, *rest)
        return spec

    manager.prepare_load = unpinned
    manager.complete_load = lambda *_, **__: None


def _ready_at_once(connector: Any) -> None:
    manager = _half(connector).manager
    prepare, complete = manager.prepare_store, manager.complete_store

    def hasty(keys: Any, *rest: Any) -> Any:
        output = prepare(keys, *rest)
        if output is not None:
            complete(output.keys_to_store, *rest)
        return output

    manager.prepare_store = hasty
    manager.complete_store = lambda *_, **__: None


def _keeps_request(connector: Any) -> None:
    half, build = _half(connector), _half(connector).build_connector_meta

    def forget(output: Any) -> Any:
        kept = dict(half._req_status)
        metadata = build(output)
        for name, status in kept.items():
            half._req_status.setdefault(name, status)
        return metadata

    half.build_connector_meta = forget


def _asks_again(connector: Any) -> None:
    ask = connector.get_num_new_matched_tokens

    def forever(request: Any, computed: int, *rest: Any) -> Any:
        answer = ask(request, computed, *rest)
        return (None, False) if answer[0] and answer[0] > 3 * BLOCK else answer

    connector.get_num_new_matched_tokens = forever


def _wrong_key(connector: Any) -> None:
    manager = _half(connector).manager
    prepare = manager.prepare_load

    def turned(keys: Any, *rest: Any) -> Any:
        spec = prepare(keys, *rest)
        spec.block_ids = spec.block_ids[::-1]
        return spec

    manager.prepare_load = turned


CONNECTOR_FAULTS: dict[str, tuple[str, Any]] = {
    "connector-no-flush": ("the connector never asks the worker to flush", _no_flush),
    "connector-no-fence": ("places of finished requests are forgotten while stores read them", _no_fence),
    "connector-no-unpin": ("a load keeps its host blocks for ever", _no_unpin),
    "connector-no-pin": ("a load does not keep its host blocks", _no_pin),
    "connector-ready-at-once": ("a stored block is found before its copy has ended", _ready_at_once),
    "connector-keeps-requests": ("finished requests stay in the connector's table", _keeps_request),
    "connector-asks-again": ("hits of more than three blocks are answered with \"ask again\"", _asks_again),
    "connector-turned-keys": ("the blocks of a load are taken in reverse order", _wrong_key),
}
"""Faults of OffloadingConnector that ``--fault`` plants: each omits a step."""
ENGINE = (Release, Machine)
"""Release and machine, as the worker makes them."""
