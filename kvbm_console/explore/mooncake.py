"""The adapters of Mooncake's connectors: blocks of a peer, and a store that engines share.

``MooncakeConnector`` moves a prompt's blocks from a prefilling engine to a decoding one, as NIXL's connector does. Its
requests have the same three roles.

``MooncakeStoreConnector`` keeps blocks by their hashes in a store of many machines. Its scheduler half asks the store
through a client, and the client and the store are ours. A lookup leases the blocks that it finds until its request has
loaded them or has ended, as Mooncake does for a time. A put fails when all blocks are leased or being written.

For example, the metadata says "save job 3 of s1t0, up to token 64, blocks 7, 9, 2 and 4", and the store has the first
two hashes. The adapter orders a copy of the blocks 2 and 4 into the slots 5 and 6, and reports the job when both lie
there.

Law of this file: the peer makes no mistake, and the store loses no block that is leased.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from kvbm_console.explore.connectors import Adapter, Unsupported
from kvbm_console.explore.nixl import FAR, NixlAdapter
from kvbm_console.explore.scenario import BLOCK
from kvbm_console.explore.shadow import Job, StepOrders

STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store"


class MooncakeAdapter(NixlAdapter):
    """``MooncakeConnector``."""

    connectors = ("MooncakeConnector",)
    name = "mooncake"
    fails_by_request = False

    def __init__(self, connector: Any, kind: str) -> None:
        super().__init__(connector, kind)
        self._far: dict[str, list[list[int]]] = {}
        """Request to the peer's blocks of its prompt."""

    def attach(self, machine: Any) -> None:
        self._machine = machine

    def from_peer(self, name: str, far: list[list[int]]) -> dict[str, Any]:
        self._far[name] = far
        return {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name, "remote_engine_id": FAR,
                "remote_bootstrap_addr": FAR}

    def for_peer(self, name: str) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}

    def orders(self, metadata: Any) -> StepOrders:
        orders = StepOrders(self.kind)
        for name, entry in metadata.reqs_to_recv.get(FAR, {}).items():
            pairs = [pair for far, here in zip(self._far[name], entry.local_block_ids, strict=False) if here
                     for pair in zip(far[-len(here):], here, strict=True)]
            if pairs:  # otherwise the peer is only told to free its blocks
                orders.loads.append(Job(self.number(name, True), True, name, pairs, self.kind))
        for name, (_, groups) in metadata.reqs_to_send.items():
            pairs = [(place, -1 - place) for group in groups for place in group if place]
            if pairs:  # otherwise the request is only announced
                orders.stores.append(Job(self.number(name, False), False, name, pairs, self.kind, peer=True))
        return orders


class MooncakeStore:
    """The store, and the client of the scheduler half in front of it."""

    def __init__(self, *_: Any) -> None:
        self.capacity = 0
        self.slots: dict[bytes, int] = {}
        """Hash to the slot of its block, the least recently used first."""
        self.ready: set[bytes] = set()
        """Hashes whose block has been written on all ranks."""
        self.leases: Counter[bytes] = Counter()
        self._leased: dict[str, list[bytes]] = {}
        """Request to the blocks that its last lookup has found."""

    def lookup(self, request: str, tokens: int, hashes: Any, non_block: bool = False) -> Any:
        """The prefix that the store has. It ends before the last token, which is computed for the next token."""
        self.release(request)
        found: list[bytes] = []
        for key in map(bytes, hashes[: (tokens - 1) // BLOCK]):
            if key not in self.ready:
                break
            found.append(key)
            self.slots[key] = self.slots.pop(key)
        self._leased[request] = found
        self.leases.update(found)
        return import_module(f"{STORE}.data").MooncakeLookupResult(len(found) * BLOCK)

    def release(self, request: str) -> None:
        """End the lease of a request."""
        self.leases.subtract(self._leased.pop(request, ()))

    def put(self, key: bytes) -> int | None:
        """A slot for a block that is not there; None if it is there, or without room."""
        if key in self.slots:
            return None
        if len(self.slots) >= self.capacity:
            oldest = next((old for old in self.slots if old in self.ready and not self.leases[old]), None)
            if oldest is None:
                return None
            self._forget(oldest)
        taken = set(self.slots.values())
        self.slots[key] = next(slot for slot in range(self.capacity) if slot not in taken)
        return self.slots[key]

    def _forget(self, key: bytes) -> None:
        self.ready.discard(key)
        del self.slots[key]

    def discard(self, request: str) -> None:
        """Hear that a request has ended."""
        self.release(request)

    def reset(self) -> bool:
        """Forget the blocks that nobody uses."""
        for key in [key for key in self.ready if not self.leases[key]]:
            self._forget(key)
        return True


class MooncakeStoreAdapter(Adapter):
    """``MooncakeStoreConnector``."""

    connectors = ("MooncakeStoreConnector",)
    name = "mooncake store"

    def __init__(self, connector: Any, kind: str) -> None:
        super().__init__(connector, kind)
        self._store: MooncakeStore = self.half.client
        self._orders: tuple[Any, list[Job]] = None, []
        """The metadata of this step, and its jobs, which are the same on each rank."""
        self._writing: dict[int, list[bytes]] = {}
        self._left: Counter[int] = Counter()
        """Job to the ranks on which it has not ended."""
        self._loads = self._ranks = 0

    @staticmethod
    @contextlib.contextmanager
    def around(entry: dict[str, Any], files: Any) -> Iterator[None]:
        scheduler: Any = import_module(f"{STORE}.scheduler")
        if not hasattr(scheduler, "LookupKeyClient"):
            raise Unsupported(f"vLLM has no {STORE}.scheduler.LookupKeyClient here")
        kept = scheduler.LookupKeyClient
        scheduler.LookupKeyClient = MooncakeStore
        try:
            yield
        finally:
            scheduler.LookupKeyClient = kept

    def attach(self, machine: Any) -> None:
        if len(machine.groups) > 1:
            raise ValueError("this adapter has one group of layers")
        self._store.capacity, self._ranks = machine.scenario.host_blocks, len(machine.workers)

    def orders(self, metadata: Any) -> StepOrders:
        if self._orders[0] is not metadata:
            self._orders = metadata, list(self._planned(metadata))
        jobs = [Job(job.number, job.load, job.request, list(job.pairs), self.kind) for job in self._orders[1]]
        return StepOrders(self.kind, [job for job in jobs if job.load], [job for job in jobs if not job.load])

    def _planned(self, metadata: Any) -> Iterator[Job]:
        for entry in metadata.requests:
            keys, places = [bytes(key) for key in entry.block_hashes], entry.block_ids[0]
            if entry.load_spec is not None and entry.load_spec.can_load:
                blocks = range(entry.load_spec.vllm_cached_tokens // BLOCK,
                               entry.load_spec.kvpool_cached_tokens // BLOCK)
                self._loads -= 1  # saves have numbers from 0 on
                self._left[self._loads] = self._ranks
                yield Job(self._loads, True, entry.req_id, [
                    (self._store.slots[keys[at]], places[at]) for at in blocks])
            if entry.can_save:
                slots = {at: self._store.put(key) for at, key in enumerate(keys[: entry.token_len_chunk // BLOCK])}
                pairs = [(places[at], slot) for at, slot in slots.items() if slot is not None]
                self._writing[entry.store_job_id] = [keys[at] for at, slot in slots.items() if slot is not None]
                self._left[entry.store_job_id] = self._ranks
                yield Job(entry.store_job_id, False, entry.req_id, pairs)

    def ended(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._left[job.number] -= 1
            if self._left[job.number]:
                continue
            if job.load:
                self._store.release(job.request)
            else:
                self._store.ready.update(self._writing.pop(job.number))

    @staticmethod
    def report(ended: list[Job]) -> Any:
        done = Counter(job.number for job in ended if not job.load)
        return import_module(f"{STORE}.data").MooncakeStoreWorkerMetadata(dict(done)) if done else None

    def held(self) -> Iterator[tuple[bytes, int]]:
        yield from ((key, self._store.leases[key]) for key in self._store.slots)
