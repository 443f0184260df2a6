"""Adapters: our worker's half of vLLM's own connectors, one class for each connector.

The connector's scheduler half is the real one. An adapter reads the metadata that this half sends to its worker, and
makes the report that the worker would send back. For example, ``OffloadingConnector`` orders "load job 7: host chunks 3
and 4 into places 12 and 9". The adapter turns that into a ``Job`` with the pairs (3, 12) and (4, 9). When the shadow
worker has moved both blocks, the adapter reports that job 7 is complete.

A connector with a secondary tier copies bytes itself, between its host memory and files. There the contents lie as
bytes in that memory (``HostBytes``), and steps of the scenario replace the threads of the tier (``SteppedPool``).

An author of another connector writes a subclass of ``Adapter`` and names it with ``--adapter``. ``conformance``
checks it.

Law of this file: an adapter has no opinion about right and wrong.
"""

import contextlib
import os
import struct
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from kvbm_console.explore.shadow import Job, StepOrders

PAGE = 16 * 1024
"""Bytes of a block of the absent model on one rank."""


GROUP_BYTES = 4
"""Bytes at the end of an ``OffloadKey`` that name the group of layers."""
INSIDE = "_tapped"
"""The attribute by which the tap keeps the connector that it is around."""


class Unsupported(Exception):
    """This release lacks a part that the driver needs; the text names the part."""


def unknown(metadata: Any) -> Unsupported:
    """The refusal of metadata that no adapter reads."""
    return Unsupported(f"no worker is known for {type(metadata).__name__} with "
                       f"{', '.join(sorted(vars(metadata)))[:80]}; --adapter takes one of your own")


class Adapter:
    """Our worker's half of one connector in one run.

    A subclass has ``connectors``, ``name`` and ``orders``. It has ``report`` if the worker answers with metadata of the
    connector's own. The other methods have defaults, for connectors that need no more. An exception of an adapter
    ends the exploration.

    ``kind`` names the connector's host memory, and tells two connectors of one class apart.
    """

    connectors: tuple[str, ...] = ()
    """Names of the classes of connectors that it serves, with their subclasses."""
    name = ""
    """Its host memory in sentences."""
    half_name = "connector_scheduler"
    """The attribute of the connector that has its tables; empty if they are the connector's own."""
    caches: tuple[str, ...] = ()
    """Tables of ``half`` that keep entries when all requests have ended."""
    peers = False
    """True if requests can name a peer, from which their prefix comes or to which their blocks go."""
    fails_by_request = False
    """True if a failed load is reported by the name of its request, not by its places."""

    def __init__(self, connector: Any, kind: str) -> None:
        self.connector, self.kind = connector, kind
        self.half: Any = getattr(connector, self.half_name, None) if self.half_name else connector
        if self.half is None:
            raise Unsupported(f"{type(connector).__name__} has no {self.half_name} here")
        self._empty = [(owner, name) for owner in self.owners() for name, table in vars(owner).items()
                       if isinstance(table, (dict, set, list)) and not table and name not in self.caches]

    def owners(self) -> list[Any]:
        """The objects of the scheduler half that keep tables about requests and copies."""
        return [self.half]

    def tables(self) -> Iterator[tuple[str, Any]]:
        """(name, content) of the tables that were empty at first. They must be empty when all requests have ended."""
        for owner, name in self._empty:
            yield f"{type(owner).__name__}.{name}", getattr(owner, name)

    @staticmethod
    def sized(extra: dict[str, Any], host_bytes: int, directory: str) -> None:
        """Give the connector's extra configuration a host tier of so many bytes, unless it has a size of its own."""

    @staticmethod
    def around(entry: dict[str, Any], files: Path) -> contextlib.AbstractContextManager[None]:
        """The context in which a connector of this entry is made; ``files`` is a directory for its files."""
        return contextlib.nullcontext()

    def attach(self, machine: Any) -> None:
        """Look at the machine, after its scheduler was made and before the first step.

        The adapter may keep ``machine.scenario``, and ``machine.workers`` with their memories. It may replace methods
        of the connector by functions that call them."""

    def arrive(self, name: str, contents: list[int]) -> dict[str, Any] | None:
        """The transfer parameters of a request; ``contents`` are those of its prompt's blocks."""
        return None

    def before_step(self) -> bool:
        """Do the work that is due between two steps. Returns True while more work remains."""
        return False

    def orders(self, metadata: Any) -> StepOrders:
        """The copies and flushes that the metadata of a step orders, asked once for each rank.

        A pair of a load is (host slot, device place), and of a store (device place, host slot). A slot is any number.
        Ranks get jobs of the same numbers."""
        raise NotImplementedError

    def ended(self, jobs: list[Job]) -> None:
        """Hear of the jobs of this connector that ended in a step on a rank."""

    @staticmethod
    def report(ended: list[Job]) -> Any:
        """The worker's metadata about the jobs of this connector that ended in a step; None without."""
        return None

    def held(self) -> Iterator[tuple[bytes, int]]:
        """(hash, references) of each host block that can be found."""
        yield from ()

    def medium(self) -> str:
        """The medium of the host blocks in the published events; empty if their events do not name each block."""
        return ""


class OffloadingAdapter(Adapter):
    """``OffloadingConnector`` with a host tier, and with files below it."""

    connectors = ("OffloadingConnector",)
    name = "offloading"

    def __init__(self, connector: Any, kind: str) -> None:
        super().__init__(connector, kind)
        config = getattr(self.half, "config", None)
        self._chunk = int(getattr(config, "blocks_per_chunk", getattr(config, "block_size_factor", 1)) or 1)
        self._tiers: list[Any] = []
        self._wait = 0
        self._machine: Any = None

    @staticmethod
    def sized(extra: dict[str, Any], host_bytes: int, directory: str) -> None:
        extra.setdefault("cpu_bytes_to_use", host_bytes)
        tiers = [dict(tier) for tier in extra.get("secondary_tiers", ())]
        for at, tier in enumerate(tiers):
            if tier.get("type") == "fs":
                tier.setdefault("root_dir", f"{directory}/tier{at}")
        if tiers:
            extra["secondary_tiers"] = tiers
            extra.setdefault("spec_name", "TieringOffloadingSpec")

    @staticmethod
    def around(entry: dict[str, Any], files: Path) -> contextlib.AbstractContextManager[None]:
        if "secondary_tiers" not in entry.get("kv_connector_extra_config", {}):
            return contextlib.nullcontext()
        emptied(files)
        return without_threads()

    def attach(self, machine: Any) -> None:
        manager = getattr(self.half, "manager", None)
        self._machine, self._tiers = machine, list(getattr(manager, "secondary_tiers", ()))
        for tier in self._tiers:
            if not isinstance(getattr(tier, "_pool", None), SteppedPool):
                raise Unsupported(f"no worker is known for a secondary tier of type {tier.tier_type}")
            tier._pool.fails = machine.scenario.option("fails")
            self._notice(tier)
        if self._tiers:
            region = getattr(getattr(manager, "primary_tier", None), "_mmap_region", None)
            if region is None:
                raise Unsupported("the tiering manager has no primary_tier._mmap_region here")
            for rank, worker in enumerate(machine.workers):
                worker.memory.regions[self.kind] = HostBytes(region, rank)

    def _notice(self, tier: Any) -> None:
        """Forget the writers of host slots that the tier fills, and count the chunks that it brings."""
        load = tier.submit_load

        def submit(job: Any) -> None:
            brought = self._machine.brought.setdefault(job.req_context.req_id, Counter())
            brought.update(bytes(key) for key in job.keys)
            for worker in self._machine.workers:
                for chunk in job.chunk_ids:
                    slot = (self.kind, int(chunk))
                    worker.memory.torn.pop(slot, None)
                    worker.memory.host_writer[slot] = ("file", job.job_id, job.req_context.req_id, int(chunk))
            load(job)

        tier.submit_load = submit

    def before_step(self) -> bool:
        copies = self._machine.scenario.copies
        for tier in self._tiers:
            pool: SteppedPool = tier._pool
            pool.advance(copies)
            asked = tier._lookup_manager._lookup_queue
            if asked.empty():
                continue
            if self._wait:
                self._wait -= 1
                continue
            self._wait = copies[pool.seen % len(copies)] // 3
            asked.put(None)  # ends the loop of the thread's function, which runs here
            tier._lookup_manager._worker()
        return any(tier._pool.jobs or not tier._lookup_manager._lookup_queue.empty() for tier in self._tiers)

    def orders(self, metadata: Any) -> StepOrders:
        if not hasattr(metadata, "store_jobs"):
            raise unknown(metadata)
        orders = StepOrders(self.kind, flush=set(metadata.jobs_to_flush or ()))
        for number, entry in metadata.load_jobs.items():
            orders.loads.append(Job(
                number, True, entry.req_id, self._pairs(entry), self.kind, sync=getattr(entry, "sync", False)))
        for number, entry in metadata.store_jobs.items():
            orders.stores.append(Job(number, False, entry.req_id, self._pairs(entry), self.kind))
        return orders

    def _pairs(self, entry: Any) -> list[tuple[int, int]]:
        """(source, target) of each block. A chunk of the host has the slots of its blocks; releases up to 0.25 have
        both specifications in one tuple."""
        source, target = getattr(entry, "transfer_spec", None) or (entry.src_spec, entry.dst_spec)
        ids = [[int(one) for one in getattr(spec, "block_ids", getattr(spec, "chunk_ids", ()))]
               for spec in (source, target)]
        if self._chunk > 1:
            load = not hasattr(source, "group_sizes")
            ids[not load] = list(self._slots(ids[not load], target if load else source))
        return list(zip(*ids, strict=True))

    def _slots(self, chunks: list[int], places: Any) -> Iterator[int]:
        """The slots of the places' blocks in chunks of several blocks; a first block may begin inside its chunk."""
        at = 0
        for size, first in zip(places.group_sizes, places.block_indices, strict=True):
            begin = first // self._chunk
            for block in range(first, first + size):
                yield chunks[at + block // self._chunk - begin] * self._chunk + block % self._chunk
            if size:
                at += (first + size - 1) // self._chunk - begin + 1

    @staticmethod
    def report(ended: list[Job]) -> Any:
        module = import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.common")
        done = Counter(job.number for job in ended)
        return module.OffloadingWorkerMetadata(completed_jobs=dict(done)) if done else None

    def held(self) -> Iterator[tuple[bytes, int]]:
        manager = getattr(self.half, "manager", None)
        policy = getattr(getattr(manager, "primary_tier", manager), "_policy", None)
        for name in ("blocks", "chunks", "t1", "t2"):
            table = getattr(policy, name, None)
            if isinstance(table, dict):
                yield from ((bytes(key[:-GROUP_BYTES]), block.ref_cnt) for key, block in table.items())

    def medium(self) -> str:
        return "CPU"


class SimpleAdapter(Adapter):
    """``SimpleCPUOffloadConnector``."""

    connectors = ("SimpleCPUOffloadConnector",)
    name = "simple"
    half_name = "scheduler_manager"

    @staticmethod
    def sized(extra: dict[str, Any], host_bytes: int, directory: str) -> None:
        extra.setdefault("cpu_bytes_to_use", host_bytes)

    def orders(self, metadata: Any) -> StepOrders:
        orders = StepOrders(self.kind, flush_all=metadata.need_flush)
        if metadata.load_event >= 0 and metadata.load_gpu_blocks:
            pairs = list(zip(metadata.load_cpu_blocks, metadata.load_gpu_blocks, strict=True))
            names = ",".join(metadata.load_event_to_reqs.get(metadata.load_event, ()))
            orders.loads.append(Job(metadata.load_event, True, names, pairs, self.kind))
        if metadata.store_event >= 0 and metadata.store_gpu_blocks:
            pairs = list(zip(metadata.store_gpu_blocks, metadata.store_cpu_blocks, strict=True))
            orders.stores.append(Job(metadata.store_event, False, "", pairs, self.kind))
        return orders

    @staticmethod
    def report(ended: list[Job]) -> Any:
        module = import_module("vllm.v1.simple_kv_offload.metadata")
        stores = {job.number: 1 for job in ended if not job.load}
        return module.SimpleCPUOffloadWorkerMetadata(completed_store_events=stores) if stores else None

    def held(self) -> Iterator[tuple[bytes, int]]:
        hash_of = import_module("vllm.v1.core.kv_cache_utils").get_block_hash
        for block in self.half.cpu_block_pool.blocks:
            if block.block_hash is not None and not block.is_null:
                yield hash_of(block.block_hash), block.ref_cnt

    def medium(self) -> str:
        return str(getattr(self.half, "kv_event_medium", "CPU"))


# --- a secondary tier ---


class HostBytes:
    """The host memory of a tiering manager, as the worker of a rank sees it: a content is 8 bytes at a slot's begin."""

    def __init__(self, region: Any, rank: int) -> None:
        self._bytes, self._row = region.mmap_obj, region._row_stride
        self._at = rank * region.cpu_page_size

    def read(self, slot: int) -> int:
        """The content of a slot."""
        content: int = struct.unpack_from("q", self._bytes, slot * self._row + self._at)[0]
        return content

    def write(self, slot: int, content: int) -> None:
        """Put a content into a slot."""
        struct.pack_into("q", self._bytes, slot * self._row + self._at, content)


class SteppedPool:
    """Stands in for a tier's thread pool: a job runs at the moment that the scenario's copies give."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.jobs: list[tuple[int, Any, list[Callable[[], Any]], bool]] = []
        """(moment, number, tasks, True for a load)."""
        self.fails = 0
        self.seen = self._loads = self._now = 0
        self._copies: tuple[int, ...] = (0,)
        self._done: list[tuple[Any, bool, float]] = []

    def enqueue_load(self, number: Any, _: int, tasks: Any) -> None:
        """Take a load."""
        self._take(number, list(tasks), True)

    def enqueue_store(self, number: Any, _: int, tasks: Any) -> None:
        """Take a store."""
        self._take(number, list(tasks), False)

    def _take(self, number: Any, tasks: list[Callable[[], Any]], load: bool) -> None:
        self.jobs.append((self._now + self._copies[self.seen % len(self._copies)] // 3, number, tasks, load))
        self.seen += 1

    def advance(self, copies: tuple[int, ...]) -> None:
        """Run what is due in the next step."""
        self._copies = copies
        self._now += 1
        self._run([job for job in self.jobs if job[0] < self._now])

    def _run(self, due: list[tuple[int, Any, list[Callable[[], Any]], bool]]) -> None:
        for job in due:
            self.jobs.remove(job)
            good = True
            self._loads += job[3]
            fails = job[3] and self.fails and self._loads % self.fails == 0
            for task in job[2] if not fails else ():
                try:
                    task()
                except Exception:  # as a thread of the pool does
                    good = False
            self._done.append((job[1], good and not fails, 0.0))

    def get_finished(self) -> list[tuple[Any, bool, float]]:
        """(number, success, seconds) of the jobs that ended since the last call."""
        done, self._done = self._done, []
        return done

    def wait_idle(self) -> None:
        """Run all jobs."""
        self._run(list(self.jobs))

    def shutdown(self, wait: bool = True) -> None:
        """Drop all jobs."""
        self.jobs.clear()


class NoThread:
    """Stands in for a thread that never runs by itself."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def start(self) -> None:
        """Nothing."""

    def join(self, timeout: float | None = None) -> None:
        """Nothing."""


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """While a scheduler is made: the threads of secondary tiers are replaced."""
    try:
        files: Any = import_module("vllm.v1.kv_offload.tiering.fs.manager")
        lookup: Any = import_module("vllm.v1.kv_offload.tiering.async_lookup")
    except ImportError as error:
        raise Unsupported(f"vLLM has no file tier here ({error})") from None
    for module, name in ((files, "DualQueueThreadPool"), (lookup, "threading")):
        if not hasattr(module, name):
            raise Unsupported(f"vLLM has no {module.__name__}.{name} here")
    kept = files.DualQueueThreadPool, lookup.threading
    files.DualQueueThreadPool = SteppedPool
    lookup.threading = types.SimpleNamespace(Thread=NoThread)
    try:
        yield
    finally:
        files.DualQueueThreadPool, lookup.threading = kept


def memory_directory() -> str:
    """The directory of memory that files of a tier lie in."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def emptied(directory: Path) -> None:
    """Remove the files of an earlier run."""
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


# --- several connectors ---


class Workers:
    """The adapters of a connector and of the connectors inside it."""

    def __init__(self, connector: Any, kinds: dict[str, type[Adapter]]) -> None:
        self._kinds = kinds
        self.connector = connector
        self.adapters: dict[int, Adapter] = {}
        """Identity of a connector to its adapter."""
        self._names: Counter[str] = Counter()
        self._make(connector)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self.adapters.values())

    def _make(self, connector: Any) -> None:
        inside = [getattr(connector, INSIDE, None), *getattr(connector, "_connectors", ())]
        for inner in inside:
            if inner is not None:
                self._make(inner)
        if any(inner is not None for inner in inside):
            return
        for parent in type(connector).__mro__:
            if parent.__name__ in self._kinds:
                adapter = self._kinds[parent.__name__]
                self._names[adapter.name] += 1
                more = f" {self._names[adapter.name]}" if self._names[adapter.name] > 1 else ""
                self.adapters[id(connector)] = adapter(connector, adapter.name + more)
                return

    def orders(self, metadata: Any, connector: Any = None) -> Iterator[tuple[Adapter, StepOrders]]:
        """The orders of each connector in the metadata of a step."""
        connector = self.connector if connector is None else connector
        if metadata is None:
            return
        inner = getattr(connector, INSIDE, None)
        if inner is not None:
            yield from self.orders(metadata, inner)
        elif hasattr(connector, "_connectors"):
            for child, part in zip(connector._connectors, metadata.metadata, strict=True):
                yield from self.orders(part, child)
        elif id(connector) in self.adapters:
            adapter = self.adapters[id(connector)]
            yield adapter, adapter.orders(metadata)
        elif type(metadata).__name__ not in ("KVConnectorMetadata", "TapMetadata"):
            raise unknown(metadata)

    def report(self, ended: list[Job], connector: Any = None) -> Any:
        """The worker's metadata about the jobs that ended in a step; None without."""
        connector = self.connector if connector is None else connector
        inner = getattr(connector, INSIDE, None)
        if inner is not None:
            return self.report(ended, inner)
        if hasattr(connector, "_connectors"):
            return _together(tuple(self.report(ended, child) for child in connector._connectors))
        adapter = self.adapters.get(id(connector))
        if adapter is None:
            return None
        mine = [job for job in ended if job.kind == adapter.kind]
        adapter.ended(mine)
        return adapter.report(mine)


def _together(parts: tuple[Any, ...]) -> Any:
    """The metadata of the workers inside a MultiConnector as one."""
    if all(part is None for part in parts):
        return None
    module = import_module("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
    return module.MultiKVConnectorWorkerMetadata(metadata=parts)


def loaded(text: str) -> type[Adapter]:
    """The adapter that ``MODULE:CLASS`` names. Raises ``Unsupported`` with a sentence."""
    module, _, name = text.partition(":")
    try:
        adapter = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise Unsupported(f"--adapter must be MODULE:CLASS, got {text!r}: {error}") from None
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter) and adapter.connectors):
        raise Unsupported(f"--adapter must name a subclass of kvbm_console.explore.connectors.Adapter with connectors, "
                          f"got {text!r}")
    return adapter


def worker_meta(metadata: Any, ended: list[Job]) -> Any:
    """The workers' metadata about jobs that ended, in the form of the connector of ``metadata``; None without."""
    name = type(metadata).__name__
    if name == "MultiKVConnectorMetadata":
        return _together(tuple(worker_meta(part, ended) for part in metadata.metadata))
    known = {"OffloadingConnectorMetadata": OffloadingAdapter, "SimpleCPUOffloadMetadata": SimpleAdapter}
    if name not in known or (name.startswith("Offloading") and not hasattr(metadata, "store_jobs")):
        return None
    return known[name].report([job for job in ended if job.kind == known[name].name])
