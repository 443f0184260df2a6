"""``KvbmSlots``: a tier of vLLM's TieringOffloadingSpec in a slot file, bounded, with checksums, warm after a restart.

    "secondary_tiers": [{"type": "KvbmSlots", "module_path": "kvbm_console.tap.vllm_slots",
                         "root_dir": "/nvme/kv", "bytes_to_use": 200e9}]

Theory of operation
-------------------
The file says at its opening which blocks it has, so a lookup is one look into a dictionary and never waits for the
disk. A store takes a free slot or that of the block used longest ago. Threads copy between the host tier and the file,
and the manager's next poll takes what they have done. A block that comes back damaged is reported as not loaded, is
forgotten, and the request computes it again.

The file belongs to one model, dtype, layout, size of blocks, hash algorithm and hash seed, and vLLM does not start with
another. vLLM settles its hash function after it has made the tiers, so the entry names the algorithm
(``hash_algorithm``), and the first request verifies it. If it is another one, the tier logs that and keeps nothing.

Law of this file: importing it needs vLLM. The manager's thread never touches the disk, a block that a load reads is not
evicted, and bytes that are not those of the store are never told as loaded.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final

from kvbm_console.bytes.slot_file import ENTRY_WORDS, SlotFile, SlotFileRefused, SlotGeometry, SlotIdentity
from kvbm_console.tap.flatten import GROUP_BYTES
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.tiers import tell_damage

_base: Final[Any] = import_module("vllm.v1.kv_offload.tiering.base")
_offload: Final[Any] = import_module("vllm.v1.kv_offload.base")
_hashes: Final[Any] = import_module("vllm.v1.core.kv_cache_utils")
_hashing: Final[Any] = import_module("vllm.utils.hashing")
_log: Final = logging.getLogger("vllm.kvbm_console")
ALGORITHMS: Final = {"sha256": True, "sha256_cbor": True, "xxhash": False, "xxhash_cbor": False}
"""vLLM's hash algorithms, to whether vLLM gives them a fixed seed without PYTHONHASHSEED."""
LOADS_MAX: Final = 2
"""Loads of a block for one request. vLLM 0.33's host tier may evict what a waiting request has just loaded to make room
for what else the request loads, in turns and for ever. Then the request computes the block instead."""
THREADS: Final = 4
"""Threads for loads and as many for stores: more do not make a disk faster."""
_NOTHING: Final[Counter[bytes]] = Counter()


class _Row:
    """One block of a job."""

    __slots__ = ("damage", "error", "key", "place", "slot")

    def __init__(self, key: bytes, place: int, slot: int) -> None:
        self.key, self.place, self.slot = key, place, slot
        self.error: OSError | None = None
        self.damage: tuple[int, int] | None = None
        """The sum that was stored and the sum that came, if they differ."""

    @property
    def ok(self) -> bool:
        """True if the copy is whole."""
        return self.error is None and self.damage is None


class _Copy:
    """A job whose blocks are copied by threads, a part each."""

    __slots__ = ("began", "job", "parts", "rows", "took_s")

    def __init__(self, job: Any, rows: list[_Row], parts: int) -> None:
        self.job, self.rows, self.parts = job, rows, parts
        """``parts`` counts those that are not done."""
        self.began = 0.0
        self.took_s = 0.0


class KvbmSlots(_base.SecondaryTierManager):  # type: ignore[misc]
    """The tier; see the top of this file."""

    medium: ClassVar[Any] = _offload.Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, *,
        root_dir: str = "", bytes_to_use: float = 0, n_threads: int = THREADS, hash_algorithm: str = "sha256",
        locality: str = "LOCAL", enable_kv_events: bool = False, **more: Any,
    ) -> None:
        """A setting that cannot be, and a directory that cannot be used, raise ``ValueError`` with one sentence."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if more:
            raise ValueError(
                f"KvbmSlots has no setting {min(more)!r}; its settings are root_dir, bytes_to_use, n_threads, "
                "hash_algorithm, locality and enable_kv_events"
            )
        if not root_dir:
            raise ValueError("root_dir of KvbmSlots must name a directory")
        if hash_algorithm not in ALGORITHMS:
            raise ValueError(f"hash_algorithm of KvbmSlots must be {', '.join(ALGORITHMS)}, got {hash_algorithm!r}")
        if isinstance(n_threads, bool) or not isinstance(n_threads, int) or not 1 <= n_threads <= 64:
            raise ValueError(f"n_threads of KvbmSlots must be a whole number from 1 to 64, got {n_threads!r}")
        self.locality = _offload.Locality(locality)
        self._bytes = primary_kv_view.cast("B")
        self._size: int = self._block_size_bytes
        one = SlotGeometry(1, self._size)
        slots = int(bytes_to_use) // (one.stride + ENTRY_WORDS * 8)
        if slots < 1:
            raise ValueError(f"bytes_to_use of KvbmSlots must be at least {one.stride + ENTRY_WORDS * 8:,} for one "
                             f"block, got {bytes_to_use!r}")
        identity = identity_of(offloading_spec.config, hash_algorithm)
        directory = Path(root_dir) / f"rank-{identity.rank}"
        try:
            self._file = SlotFile.open(directory, SlotGeometry(slots, self._size), identity)
        except SlotFileRefused as refused:
            raise ValueError(f"the tier KvbmSlots cannot begin: {refused}") from None
        self._identity: SlotIdentity | None = identity
        """None once it is verified."""
        self._refused = False
        """True if the engine's hash function is another one than the entry says."""
        self._slots: OrderedDict[bytes, int] = OrderedDict(
            (key + group.to_bytes(GROUP_BYTES, "big"), slot) for slot, key, group in self._file.entries()
        )
        """Key to slot of the whole blocks, the least recently used first."""
        taken = set(self._slots.values())
        self._free = [slot for slot in range(slots - 1, -1, -1) if slot not in taken]
        self._coming: set[bytes] = set()
        self._readers: Counter[int] = Counter()
        """Slot to the loads that read it."""
        self._touched: list[int] = []
        self._loads: dict[str, Counter[bytes]] = {}
        """Live request to the loads of each block for it."""
        self.events: list[Any] | None = [] if enable_kv_events else None
        self._counts = dict.fromkeys(("evicted_blocks", "not_stored_blocks", "damaged_blocks", "failed_copies"), 0)
        self._recorder: TapRecorder | None = None
        self._state = threading.Condition()
        self._open = 0
        """Jobs that threads work on; the lock of ``_state`` guards it and the parts of each job."""
        self._done: deque[_Copy] = deque()
        self._threads = n_threads
        self._loading = ThreadPoolExecutor(n_threads, "kvbm-load")
        self._storing = ThreadPoolExecutor(n_threads, "kvbm-store")
        _log.info("kvbm-console: %s has %d slots of %d bytes, %d blocks were found%s.", directory, slots, self._size,
                  self._file.found, ", the machine was restarted since" if self._file.rebooted else "")

    # --- for the tap ---

    def watched_by(self, recorder: TapRecorder) -> None:
        """Report damaged blocks to this tap, too."""
        self._recorder = recorder

    def gauges(self) -> dict[str, float]:
        """Counts since the engine began, for the figures of the connector."""
        file = self._file
        return {"slots": file.geometry.slots, "used_slots": len(self._slots), "found_blocks": file.found,
                "stored_blocks": file.stored, "synced_blocks": file.synced, **self._counts}

    # --- the manager's calls ---

    def on_new_request(self, req_context: Any) -> Any:
        """The tier has no wishes. The first request verifies the hash function."""
        if self._identity is not None:
            self._verify(self._identity)
            self._identity = None
        return _base.RequestOffloadingContext()

    def _verify(self, identity: SlotIdentity) -> None:
        function = _hashing.get_hash_fn_by_name(identity.hash_algorithm)
        if function(identity.hash_seed) != getattr(_hashes, "NONE_HASH", None):
            self._refused = True
            _log.error("kvbm-console: the tier KvbmSlots keeps nothing, because this engine does not hash with %s and "
                       "the seed %r: name its --prefix-caching-hash-algo as hash_algorithm in the entry of the tier.",
                       identity.hash_algorithm, identity.hash_seed)

    def lookup(self, key: Any, req_context: Any) -> Any:
        """HIT for a whole block, RETRY for one that is being stored."""
        if key in self._slots and not self._refused:
            if self._loads and self._loads.get(req_context.req_id, _NOTHING)[key] >= LOADS_MAX:
                return _offload.LookupResult.MISS
            self._slots.move_to_end(key)
            return _offload.LookupResult.HIT
        return _offload.LookupResult.RETRY if key in self._coming else _offload.LookupResult.MISS

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """These blocks of a prompt are used now. A block is newer than those that continue it, so a prompt is given up
        from its end. The file is told at the end of the step."""
        for key in reversed(list(keys)):
            slot = self._slots.get(key)
            if slot is not None:
                self._slots.move_to_end(key)
                self._touched.append(slot)

    def on_schedule_end(self, context: Any) -> None:
        """Let a thread tell the file what was used."""
        if self._touched:
            slots, self._touched = self._touched, []
            self._storing.submit(self._tell_used, slots)

    def _tell_used(self, slots: list[int]) -> None:
        for slot in slots:
            self._file.touch(slot)

    def on_request_finished(self, req_context: Any) -> None:
        """Its loads need not be counted any more."""
        self._loads.pop(req_context.req_id, None)

    def submit_store(self, job_metadata: Any) -> None:
        """Begin a store of the blocks that are not there."""
        rows = []
        for key, place in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            if key in self._slots or key in self._coming or self._refused:
                continue
            slot = self._slot()
            if slot is None:
                self._counts["not_stored_blocks"] += 1
                continue
            self._coming.add(key)
            rows.append(_Row(key, place, slot))
        self._begin(job_metadata, rows, self._storing, self._store)

    def _slot(self) -> int | None:
        """A free slot, or that of the block used longest ago that no load reads."""
        if self._free:
            return self._free.pop()
        key = next((key for key, slot in self._slots.items() if not self._readers[slot]), None)
        if key is None:
            return None
        self._counts["evicted_blocks"] += 1
        self._tell([key], removed=True)
        return self._slots.pop(key)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin a load. A block that was evicted since its lookup is one that does not arrive."""
        rows = []
        self._loads.setdefault(job_metadata.req_context.req_id, Counter()).update(job_metadata.keys)
        for key, place in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            slot = self._slots.get(key)
            if slot is not None:
                self._readers[slot] += 1
                rows.append(_Row(key, place, slot))
        self._begin(job_metadata, rows, self._loading, self._load)

    # --- the threads ---

    def _begin(self, job: Any, rows: list[_Row], pool: ThreadPoolExecutor, copy: Callable[[_Row], None]) -> None:
        size = -(-len(rows) // self._threads) or 1
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        each = _Copy(job, rows, len(parts))
        if not parts:
            self._done.append(each)
            return
        with self._state:
            self._open += 1
        each.began = time.monotonic()
        for part in parts:
            pool.submit(self._run, each, part, copy)

    def _run(self, each: _Copy, part: list[_Row], copy: Callable[[_Row], None]) -> None:
        for row in part:
            try:
                copy(row)
            except OSError as error:
                row.error = error.with_traceback(None)  # whose frames would keep the host tier's memory
        with self._state:
            each.parts -= 1
            if not each.parts:
                each.took_s = time.monotonic() - each.began
                self._done.append(each)
                self._open -= 1
                self._state.notify_all()

    def _block(self, row: _Row) -> tuple[bytes, memoryview, int]:
        view = self._bytes[row.place * self._size : (row.place + 1) * self._size]
        return row.key[:-GROUP_BYTES], view, int.from_bytes(row.key[-GROUP_BYTES:], "big")

    def _store(self, row: _Row) -> None:
        self._file.store(row.slot, *self._block(row))

    def _load(self, row: _Row) -> None:
        block = self._block(row)
        if not self._file.load(row.slot, *block):
            row.damage = self._file.sums(row.slot, *block)

    # --- results ---

    def get_finished_jobs(self) -> Iterable[Any]:
        """The results of the jobs that have ended."""
        results = []
        while self._done:
            each = self._done.popleft()
            for row in each.rows:
                (self._loaded if each.job.is_promotion else self._stored)(row, each.job)
            arrived = [row.key for row in each.rows if row.ok]
            self.touch(arrived, each.job.req_context)
            success = len(arrived) == (len(each.job.keys) if each.job.is_promotion else len(each.rows))
            results.append(_base.JobResult(
                each.job.job_id, success, None if success or not each.job.is_promotion else tuple(arrived) or None,
                each.took_s, len(each.rows) * self._size,
            ))
        return results

    def _stored(self, row: _Row, job: Any) -> None:
        self._coming.discard(row.key)
        if row.error is not None:
            self._failed(row)
            self._free.append(row.slot)
            return
        self._slots[row.key] = row.slot
        self._tell([row.key], removed=False)

    def _loaded(self, row: _Row, job: Any) -> None:
        self._readers[row.slot] -= 1
        if not self._readers[row.slot]:
            del self._readers[row.slot]
        if row.ok:
            return
        if row.error is not None:
            self._failed(row)
        if self._slots.get(row.key) != row.slot:
            return  # another load has found it
        if row.damage is not None:
            self._counts["damaged_blocks"] += 1
            stored, came = (f"xxh3 {value:016x}" for value in row.damage)
            tell_damage(self._recorder, str(self.tier_type), job, row.key, row.place, stored, came, used=False)
        del self._slots[row.key]
        self._file.drop(row.slot)
        self._free.append(row.slot)
        self._tell([row.key], removed=True)

    def _failed(self, row: _Row) -> None:
        self._counts["failed_copies"] += 1
        _log.error("kvbm-console: slot %d of the tier KvbmSlots: %s", row.slot, row.error)

    def _tell(self, keys: list[bytes], *, removed: bool) -> None:
        if self.events is not None:
            self.events.append(_offload.OffloadingEvent(
                keys=keys, medium=self.medium, removed=removed, locality=self.locality))

    def take_events(self) -> Iterable[Any]:
        """The blocks that came and went since the last call, if the entry asks for events."""
        taken: list[Any] = []
        if self.events:
            taken, self.events = self.events, []
        return taken

    def drain_jobs(self) -> None:
        """Wait until no copy uses the host tier."""
        with self._state:
            self._state.wait_for(lambda: not self._open)

    def shutdown(self) -> None:
        """Let the stores end, make everything durable and let the directory go. Loads that wait never begin."""
        self._loading.shutdown(cancel_futures=True)
        self._storing.shutdown()
        self._file.close()
        self._bytes.release()


def identity_of(config: Any, hash_algorithm: str) -> SlotIdentity:
    """The engine whose blocks these are, from vLLM's ``OffloadingConfig``."""
    parallel, cache = config.parallel, config.cache
    portable = parallel.is_parallelism_agnostic or getattr(config, "replicated_layout", False)
    layout = {
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "sizes": [1] * 4 if portable else [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "replicated": getattr(config, "replicated_layout", False),
        "canonical": getattr(config, "canonical_layout", False),
    }
    digest = hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and ALGORITHMS[hash_algorithm]:
        seed = getattr(_hashes, "DEFAULT_NONE_HASH_SEED", None)  # absent where vLLM's seed is random
    return SlotIdentity(
        model=config.model.name, dtype=config.model.dtype,
        layout=f"{getattr(config, 'kv_cache_layout', None)} {digest[:16]}",
        block_tokens=cache.tokens_per_hash * cache.blocks_per_chunk,
        rank=parallel.data_parallel_index, ranks=parallel.data_parallel_size,
        hash_algorithm=hash_algorithm, hash_seed=seed,
    )
