"""The shadow memory and the worker that copies in it.

The memory keeps no bytes. For each place it keeps the content, a number that stands for a prefix of tokens, and the
last writer. A step that computes tokens writes contents, and a copy carries contents. A step that reads a computed
block wants the content of its own prefix.

The worker obeys the connector's metadata and does no more. It submits loads and stores, waits for flushes, and reports
jobs when all their blocks have moved. Stores read the device from the step after their order, so that they are behind
the forward pass. vLLM's own worker does the same.

Law of this file: a copy happens between its order and its report, at a moment that the scenario chooses.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

LATE = 12
"""Moments after its report at which a faulty load writes again: other requests have its places by then."""
EMPTY = 0
"""The content of a place that was never written."""
Pairs = list[tuple[Any, Any]]
Writer = tuple[str, int, str, int]
"""(``step``, step, request, tokens), (``load``, job, request, host slot) or (``store``, job, request, place)."""
NOBODY: Writer = ("nobody", 0, "", 0)


@dataclass
class Job:
    """A copy of some blocks, as the connector ordered it."""

    number: int
    load: bool
    request: str
    pairs: list[tuple[int, int]]
    """(source place, target place) of each block."""
    kind: str = ""
    """The connector that ordered it."""
    sync: bool = False
    """True if the step of its order waits for it: a load ends before the forward pass, and a store after it."""
    peer: bool = False
    """True if the request has ended and keeps its places until the report, for another engine that reads these blocks.
    Without blocks the job ends when all stores of the request have ended."""
    whole: bool = False
    """True if a load that fails leaves no block."""
    submitted: int = 0
    due: list[int] = field(default_factory=list)
    """The moment at which each block moves."""
    reported: int = 0
    """The first moment at which the job may be reported."""
    moved: int = 0
    wanted: list[int] = field(default_factory=list)
    """For a store, the contents of its places at the order."""
    failed: frozenset[int] = frozenset()
    """Indices of the blocks of a load that do not arrive."""

    @property
    def lost(self) -> set[int]:
        """Places that a failed load did not fill."""
        return {self.pairs[at][1] for at in self.failed}


@dataclass
class TornStore:
    """A store read a content other than the ordered content."""

    job: int
    place: int
    wanted: int
    writer: Writer
    step: int


class Memory:
    """Contents and writers of the places of device and host."""

    def __init__(self) -> None:
        self.device: dict[int, int] = {}
        self.host: dict[tuple[str, int], int] = {}
        self.device_writer: dict[int, Writer] = {}
        self.host_writer: dict[tuple[str, int], Writer] = {}
        self.torn: dict[tuple[str, int], TornStore] = {}
        """Host slots whose last store read a content other than the ordered content."""
        self.came_from: dict[int, tuple[str, int]] = {}
        """Device place to the host slot that its last load read."""
        self.ordered: dict[int, int] = {}
        """Device place to the moment at which its last load was submitted."""
        self.promised: dict[int, tuple[int, str, Any]] = {}
        """Device place to (job, request, host slot) of an ordered load that has not filled it yet."""
        self.filled: dict[tuple[str, int], int] = {}
        """Host slot to the moment at which its last store wrote it."""
        self.regions: dict[str, Any] = {}
        """Connector to the host memory whose bytes hold its contents, because the engine itself copies them further.
        A region has ``read(slot)`` and ``write(slot, content)``."""
        self.moment = 0
        self.step = 0
        self.reads = 0

    def lies(self, slot: tuple[str, int]) -> int:
        """The content of a host slot."""
        region = self.regions.get(slot[0])
        return self.host.get(slot, EMPTY) if region is None else region.read(slot[1])

    def copy(self, job: Job, at: int) -> None:
        """Move block ``at`` of the job."""
        source, target = job.pairs[at]
        if job.load:
            slot = (job.kind, source)
            self.device[target] = EMPTY if at in job.failed else self.lies(slot)
            self.device_writer[target] = ("load", job.number, job.request, source)
            self.came_from[target] = slot
            self.ordered[target] = job.submitted
            self.promised.pop(target, None)
            return
        slot = (job.kind, target)
        content = self.device.get(source, EMPTY)
        self.host[slot] = content
        if job.kind in self.regions:
            self.regions[job.kind].write(target, content)
        self.host_writer[slot] = ("store", job.number, job.request, source)
        self.filled[slot] = self.moment
        self.torn.pop(slot, None)
        if content != job.wanted[at]:
            writer = self.device_writer.get(source, NOBODY)
            self.torn[slot] = TornStore(job.number, source, job.wanted[at], writer, self.step)

    def write(self, place: int, content: int, request: str, tokens: int) -> None:
        """Write tokens of a request that a step has computed into a place."""
        self.device[place] = content
        self.device_writer[place] = ("step", self.step, request, tokens)
        self.promised.pop(place, None)


def cause(memory: Memory, place: int, name: Callable[[int], str]) -> str:
    """The writer of a wrong content, and the edge that is missing. ``name`` describes a content."""
    writer = memory.device_writer.get(place, NOBODY)
    kind, number, request, other = writer
    if place in memory.promised:
        load, owner, source = memory.promised[place]
        return (f"load {load} of request {owner} was to fill it from host slot {source} and has not: this step did not "
                f"wait for load {load}, or load {load} was reported too early")
    if kind == "nobody":
        return "the place was never written"
    if kind == "step":
        return f"step {number} wrote it last, for request {request}: the place was given to {request} too"
    slot = memory.came_from[place]
    found = memory.lies(slot)
    text = f"load {number} of request {request} wrote it from host slot {other}"
    if memory.device.get(place, EMPTY) != found:
        return f"{text}, which was overwritten since: the load did not keep its slot"
    torn = memory.torn.get(slot)
    if torn is not None:
        return (f"{text}; store {torn.job} had filled that slot from place {torn.place} in step {torn.step}, when the "
                f"place no longer held {name(torn.wanted)}: {_after(torn.writer)} did not wait for store {torn.job}")
    _, store, stored, source = memory.host_writer.get(slot, NOBODY)
    if slot not in memory.host_writer:
        return f"{text}, which no store had filled yet: load {number} did not wait for it"
    writing = f"store {store} of request {stored}" if stored else f"store {store}"
    if memory.filled.get(slot, 0) >= memory.ordered[place]:
        return f"{text}; {writing} wrote that slot after load {number} was submitted: the load did not keep its slot"
    return f"{text}; {writing} had filled that slot from place {source}"


def _after(writer: Writer) -> str:
    kind, number, request, _ = writer
    return f"step {number} of request {request}" if kind == "step" else f"{kind} {number} of request {request}"


class ShadowWorker:
    """Takes metadata, moves blocks, reports jobs. ``faults`` are names of planted ``FAULTS``.

    ``fails`` is 0, or the number of asynchronous loads of which the last fails. Ranks copy at different moments and
    fail different loads."""

    def __init__(
        self, memory: Memory, copies: tuple[int, ...], faults: Iterable[str] = (), fails: int = 0, rank: int = 0,
    ) -> None:
        self.memory = memory
        self.copies = copies
        self.faults = frozenset(faults)
        self.fails, self.loads, self.rank = fails, rank, rank
        self.moment = 0
        self.jobs: list[Job] = []
        self.ordered: list[Job] = []
        """Stores that the next step submits."""
        self.seen = 0
        """Jobs of this run so far."""
        self.moved_blocks = 0
        self._again: list[tuple[int, Job]] = []
        """Fault ``late-write``: moments of late writes, with their loads."""

    @property
    def busy(self) -> bool:
        """True while a copy was ordered and not reported."""
        return bool(self.jobs or self.ordered)

    def begin(self, orders: "StepOrders") -> list[Job]:
        """Before the forward pass: submit ordered stores, carry out flushes, and load blocks that this step reads.

        Returns the flushed jobs and the loads that this step waits for; each has ended."""
        early = [job for job in orders.stores if job.number in orders.flush or "early-store" in self.faults]
        for job in [*self.ordered, *early]:
            self._submit(job)
        self.ordered = []
        orders.stores = [job for job in orders.stores if job not in early]
        ended = [] if "ignored-flush" in self.faults else self._flush(orders)
        for job in orders.loads:
            if job.sync:
                self._submit(job)
                if "late-sync-load" not in self.faults:
                    ended.append(self._finish(job))
        orders.loads = [job for job in orders.loads if not job.sync]
        self._move()
        return ended

    def _flush(self, orders: "StepOrders") -> list[Job]:
        due = [job for job in self.jobs
               if job.kind == orders.kind and (orders.flush_all or job.number in orders.flush)]
        return [self._finish(job) for job in due]

    def _finish(self, job: Job) -> Job:
        while job.moved < len(job.pairs):
            self._copy(job)
        self.jobs.remove(job)
        return job

    def end(self, orders: "StepOrders") -> list[Job]:
        """After the forward pass: take the loads and stores of this step. Returns the jobs that have ended."""
        for job in orders.loads:
            self._submit(job)
        ended = []
        for job in orders.stores:
            job.wanted = [self.memory.device.get(source, EMPTY) for source, _ in job.pairs]
            if job.sync:
                self._submit(job)
                ended.append(self._finish(job))
            else:
                self.ordered.append(job)
        self._move()
        due = [job for job in self.jobs if self._may_report(job)]
        ended += due
        for job in due:
            self.jobs.remove(job)
            if "late-write" in self.faults and job.load:
                self._again.append((self.moment + LATE, job))
        lost = [job for job in ended if self._loses(job)]
        if "double-report" in self.faults and ended:
            ended.append(ended[0])
        return [job for job in ended if job not in lost]

    def _may_report(self, job: Job) -> bool:
        hasty = ("hasty-load" in self.faults and job.load) or ("hasty-store" in self.faults and not job.load)
        if hasty and self.moment > job.submitted:
            while job.moved < len(job.pairs):
                job.moved += 1  # reported, and never copied
            return True
        if job.peer and not job.pairs:
            others = (other for other in [*self.jobs, *self.ordered] if other.pairs and not other.load)
            return all(other.request != job.request for other in others)
        return job.moved == len(job.pairs) and self.moment >= job.reported

    def _loses(self, job: Job) -> bool:
        return ("lost-store-report" if not job.load else "lost-load-report") in self.faults and job.number % 5 == 4

    def _submit(self, job: Job) -> None:
        if not job.load and not job.wanted:
            job.wanted = [self.memory.device.get(source, EMPTY) for source, _ in job.pairs]
        if job.load:
            self.memory.promised.update((target, (job.number, job.request, source)) for source, target in job.pairs)
        self._spoil(job)
        if job.load and not job.sync:
            self.loads += 1
            if self.fails and self.loads % self.fails == 0:
                count = len(job.pairs)
                job.failed = frozenset(range(count // 2 if self.loads % 2 and not job.whole else 0, count))
        entry = 0
        if job.pairs:
            entry = self.copies[(self.seen + 5 * self.rank) % len(self.copies)]
            self.seen += 1
        steps, order = divmod(entry, 3)
        job.submitted = self.moment
        job.reported = self.moment + 2 * steps
        count, span = len(job.pairs), 2 * steps
        if order == 0:
            job.due = [self.moment] * count
        elif order == 1:
            job.due = [job.reported] * count
        else:
            job.due = [self.moment + span * at // max(1, count - 1) for at in range(count)]
        self.jobs.append(job)

    def _spoil(self, job: Job) -> None:
        for name, spoil in PAIR_FAULTS.items():
            if name in self.faults and job.pairs:
                job.pairs[:] = spoil(job.pairs)
        if "wrong-slot" in self.faults and job.load:
            job.pairs[:] = [(source ^ 1, target) for source, target in job.pairs]

    def _move(self) -> None:
        """Advance the clock by a moment, and move the blocks that are due."""
        self.moment += 1
        self.memory.moment = self.moment
        for job in self.jobs:
            while job.moved < len(job.pairs) and job.due[job.moved] < self.moment:
                self._copy(job)
        for due, job in self._again:
            if due == self.moment:
                for at in range(len(job.pairs)):
                    self.memory.copy(job, at)

    def _copy(self, job: Job) -> None:
        self.memory.copy(job, job.moved)
        job.moved += 1
        self.moved_blocks += 1


def _turned(first: Pairs, second: Pairs) -> Pairs:
    """The sources of some blocks with the targets of others."""
    return [(source, target) for (source, _), (_, target) in zip(first, second, strict=True)]


PAIR_FAULTS: dict[str, Callable[[Pairs], Pairs]] = {
    "swapped-blocks": lambda pairs: _turned(pairs, [*pairs[1::-1], *pairs[2:]]),
    "torn-copy": lambda pairs: pairs[:-1] or pairs,
    "first-source": lambda pairs: _turned([pairs[0]] * len(pairs), pairs),
    "shifted-target": lambda pairs: _turned(pairs, [pairs[-1], *pairs[:-1]]),
}
"""Faults in the (source, target) of the blocks of a copy, which has at least one block."""
FAULTS = {
    "ignored-flush": "the worker does not wait for the jobs that it is told to flush",
    "early-store": "a store reads the device before the forward pass that fills it",
    "late-sync-load": "a load that this step reads ends after it",
    "hasty-load": "a load is reported before it has copied anything",
    "hasty-store": "a store is reported before it has copied anything",
    "lost-load-report": "every fifth job is not reported if it is a load",
    "lost-store-report": "every fifth job is not reported if it is a store",
    "double-report": "a job is reported twice",
    "late-write": "a load writes its blocks once more after it was reported",
    "swapped-blocks": "the first two blocks of a job change places",
    "torn-copy": "the last block of a job is not copied",
    "first-source": "all blocks of a job are filled from its first one",
    "shifted-target": "each block of a job lands one place further",
    "wrong-slot": "a load reads the host slot beside the ordered slot",
}
"""Faults of a worker that ``--fault`` plants, to show that the monitors find them."""


@dataclass
class StepOrders:
    """The copies and flushes that the metadata of a step orders."""

    kind: str = ""
    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)
    flush: set[int] = field(default_factory=set)
    flush_all: bool = False
