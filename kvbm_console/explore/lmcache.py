"""The adapter of LMCache's connector in multi-process mode, and the server beyond it.

The connector and its client for the scheduler (``LMCacheMPSchedulerAdapter``) are LMCache's own. The server behind the
client's transport is ours, and so is the worker. A chunk has ``CHUNK`` tokens. A store reserves chunks, and a lookup
finds them when the store has ended on all ranks. A lookup locks the chunks that it finds, and a locked chunk is not
evicted. The load of these chunks ends the lock, or the scheduler gives the lock back.

For example, the metadata says "STORE s1t0, tokens 32 to 96, blocks 7, 9, 2 and 4". The server reserves chunks 5 and 6,
and the worker copies these blocks to the slots 10, 11, 12 and 13.

Law of this file: the server answers as LMCache's own does, without its leases, which expire after 300 s.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from kvbm_console.explore.connectors import Adapter, Unsupported
from kvbm_console.explore.scenario import BLOCK
from kvbm_console.explore.shadow import Job, StepOrders

CHUNK = 2 * BLOCK
"""Tokens in a chunk of the server."""
CLIENT = "lmcache.integration.vllm.vllm_multi_process_adapter"


class LmcacheAnswer:
    """A future of LMCache's transport; it has its value after some steps, or when the caller waits."""

    def __init__(self, server: "LmcacheServer", value: Any = None, steps: int = 0) -> None:
        self._server, self._value, self._due = server, value, server.now + steps

    def query(self) -> bool:
        """True if the value is there."""
        return self._server.now >= self._due

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value."""
        return self._value

    def wait(self, timeout: float | None = None) -> bool:
        """Wait; never too long."""
        return True


@dataclass
class LmcacheChunk:
    """Tokens of a prefix that lie in the server."""

    number: int
    ready: bool = False
    locks: int = 0


class LmcacheServer:
    """LMCache's server, as its client for the scheduler sees it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.now = self.until = 0
        """This step, and the last step in which an answer is due."""
        self.capacity = 0
        self.copies: tuple[int, ...] = (0,)
        self.chunks: dict[tuple[int, ...], LmcacheChunk] = {}
        """Prefix to its last chunk, the least recently used one first."""
        self._found: dict[str, int] = {}
        """Request to the chunks that its lookup has found and locked."""
        self._asked = 0

    def _answer(self, value: Any = None) -> LmcacheAnswer:
        self._asked += 1
        steps = self.copies[self._asked % len(self.copies)] // 3
        self.until = max(self.until, self.now + steps)
        return LmcacheAnswer(self, value, steps)

    def prefix(self, tokens: Any, first: int, last: int) -> list[tuple[int, ...]]:
        """The keys of the chunks of these tokens."""
        return [tuple(tokens[:end]) for end in range((first // CHUNK + 1) * CHUNK, last // CHUNK * CHUNK + 1, CHUNK)]

    def reserve(self, key: tuple[int, ...]) -> LmcacheChunk | None:
        """A new chunk for a store; None if the chunk is there already, or without room."""
        if key in self.chunks:
            return None
        taken = {chunk.number for chunk in self.chunks.values()}
        if len(taken) >= self.capacity:
            oldest = next((old for old, chunk in self.chunks.items() if chunk.ready and not chunk.locks), None)
            if oldest is None:
                return None
            taken.discard(self.chunks.pop(oldest).number)
        made = self.chunks[key] = LmcacheChunk(min(set(range(len(taken) + 1)) - taken))
        return made

    def unlock(self, keys: list[tuple[int, ...]]) -> None:
        """Give the locks of a lookup back."""
        for key in keys:
            if key in self.chunks:
                self.chunks[key].locks -= 1

    # --- the transport's interface ---

    def get_chunk_size(self) -> LmcacheAnswer:
        """Tokens in a chunk."""
        return LmcacheAnswer(self, CHUNK)

    def lookup(self, key: Any, ranks: int) -> LmcacheAnswer:
        """Find and lock the chunks with which a prompt begins."""
        found = 0
        for prefix in self.prefix(key.token_ids, 0, key.end):
            chunk = self.chunks.get(prefix)
            if chunk is None or not chunk.ready:
                break
            chunk.locks += 1
            self.chunks[prefix] = self.chunks.pop(prefix)
            found += 1
        self._found[key.request_id] = found
        return self._answer()

    def query_prefetch_status(self, request: str) -> LmcacheAnswer:
        """The number of chunks that a lookup has found."""
        return self._answer(self._found.get(request, 0))

    def free_lookup_locks(self, key: Any, ranks: int) -> LmcacheAnswer:
        """Give the locks of a part of a lookup back."""
        most = self._found.get(key.request_id, 0) * CHUNK
        self.unlock(self.prefix(key.token_ids, key.start, min(key.end, most)))
        return self._answer()

    def end_session(self, request: str) -> LmcacheAnswer:
        """Forget a request. Its locks stay, as in LMCache."""
        self._found.pop(request, None)
        return self._answer()

    def report_block_allocation(self, *_: Any) -> LmcacheAnswer:
        """Take telemetry."""
        return self._answer()

    def clear(self, force: bool = False) -> LmcacheAnswer:
        """Forget the chunks that nobody uses."""
        self.chunks = {key: chunk for key, chunk in self.chunks.items() if not chunk.ready or chunk.locks}
        return self._answer()

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class LmcachePlan:
    """The orders of a step, which are the same on each rank."""

    metadata: Any
    jobs: list[Job] = field(default_factory=list)
    flush: set[int] = field(default_factory=set)


class LmcacheAdapter(Adapter):
    """``LMCacheMPConnector``."""

    connectors = ("LMCacheMPConnector",)
    name = "lmcache"
    half_name = "scheduler_adapter"

    def __init__(self, connector: Any, kind: str) -> None:
        super().__init__(connector, kind)
        self._server: LmcacheServer = next(iter(self.half.req_clients.values()))
        self.half._heartbeats = {}  # so that no thread is started
        self._plan = LmcachePlan(None)
        self._finished: list[str] = []
        """Requests that ended since the last step."""
        self._open: dict[int, tuple[Job, list[tuple[int, ...]], int]] = {}
        """Job to its order, its chunks, and the ranks on which it has not ended."""
        self._jobs = self._ranks = 0

    @staticmethod
    @contextlib.contextmanager
    def around(entry: dict[str, Any], files: Any) -> Iterator[None]:
        try:
            client: Any = import_module(CLIENT)
            factory = client.RequestClientFactory
        except (ImportError, AttributeError) as error:
            raise Unsupported(f"LMCache has no {CLIENT}.RequestClientFactory here ({error})") from None
        kept = factory.create
        factory.create = LmcacheServer
        try:
            yield
        finally:
            factory.create = kept

    def owners(self) -> list[Any]:
        return [self.connector, self.half]

    def attach(self, machine: Any) -> None:
        if len(machine.groups) > 1:
            raise ValueError("this adapter has one group of layers")
        self._server.capacity = max(1, machine.scenario.host_blocks * BLOCK // CHUNK)
        self._server.copies = machine.scenario.copies
        self._ranks = len(machine.workers)
        finished = self.connector.request_finished

        def ended(request: Any, block_ids: Any) -> Any:
            answer = finished(request, block_ids)
            if answer[0]:
                self._finished.append(request.request_id)
            return answer

        self.connector.request_finished = ended

    def before_step(self) -> bool:
        self._server.now += 1
        return self._server.now <= self._server.until

    def orders(self, metadata: Any) -> StepOrders:
        if self._plan.metadata is not metadata:
            self._plan = self._planned(metadata)
        jobs = [Job(job.number, job.load, job.request, list(job.pairs), job.kind, peer=job.peer, whole=job.whole)
                for job in self._plan.jobs]
        return StepOrders(self.kind, [job for job in jobs if job.load], [job for job in jobs if not job.load],
                          set(self._plan.flush))

    def _planned(self, metadata: Any) -> LmcachePlan:
        plan = LmcachePlan(metadata)
        if getattr(metadata, "need_flush_before_forward", False) and _waits():
            plan.flush = {number for number, (job, _, _) in self._open.items() if not job.load}
        for entry in metadata.requests:
            op, load = entry.op, entry.direction == "RETRIEVE"
            slots: dict[int, int] = {}  # index of a block to its slot
            mine: list[tuple[int, ...]] = []
            for key in self._server.prefix(op.token_ids, op.start, op.end):
                chunk = self._server.chunks.get(key) if load else self._server.reserve(key)
                if chunk is not None:
                    mine.append(key)
                    first, count = len(key) // BLOCK - CHUNK // BLOCK, CHUNK // BLOCK
                    slots.update((first + at, chunk.number * count + at) for at in range(count))
            skipped = op.skip_first_n_tokens // BLOCK
            pairs = [(slots[at], place) if load else (place, slots[at])
                     for at, place in enumerate(op.flat_block_ids, op.start // BLOCK)
                     if at in slots and at >= op.start // BLOCK + skipped]
            if load and len(pairs) != len(op.flat_block_ids) - skipped:
                raise LookupError(f"request {entry.request_id} loads chunks that are not in the server")
            self._order(plan, Job(0, load, entry.request_id, pairs, self.kind, whole=load), mine)
        for name in self._finished:
            self._order(plan, Job(0, False, name, [], self.kind, peer=True), [])
        self._finished = []
        return plan

    def _order(self, plan: LmcachePlan, job: Job, keys: list[tuple[int, ...]]) -> None:
        self._jobs += 1
        job.number = self._jobs
        plan.jobs.append(job)
        self._open[job.number] = job, keys, self._ranks

    def ended(self, jobs: list[Job]) -> None:
        for one in jobs:
            job, keys, left = self._open.pop(one.number)
            if left > 1:
                self._open[one.number] = job, keys, left - 1
            elif job.load:
                self._server.unlock(keys)
            else:
                for key in keys:
                    self._server.chunks[key].ready = True

    def held(self) -> Iterator[tuple[bytes, int]]:
        for chunk in self._server.chunks.values():
            yield chunk.number.to_bytes(8, "big"), chunk.locks


def _waits() -> bool:
    """True if the worker of this release waits for stores in flight when a request is preempted."""
    context: Any = import_module("lmcache.v1.multiprocess.transfer_context.worker_transfer")
    made = context.LMCacheDrivenTransferContext.__init__
    return "_inflight_stores" in made.__code__.co_names
