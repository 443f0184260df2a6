"""The figures of a machine with device memory alone, counted without a leader, because it would decide nothing.

Without a lower tier no lookup finds more blocks, no block is withheld and no copy is made. So the leader adds only
counts to the engine. ``MachineLedger`` makes the same counts at the same moments, from the calls of the engine and from
its pool. It halves the time of ``simulate`` on the shared trace.

Law of this file: the report and the stats lines are those of a leader. ``tests/planning/test_ledger.py`` compares them
over hundreds of machines. Records, audits and several hosts need the leader. ``TieredLedger`` has lower tiers.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvbm_console.core.config import REQUEST_ID_BYTES_MAX
from kvbm_console.core.errors import InternalError
from kvbm_console.core.ids import EMPTY_HASH, FinishReason
from kvbm_console.core.instructions import MatchAnswer
from kvbm_console.core.state import Totals
from kvbm_console.planning.meter import Readmitted, RequestRecord, StatsLine, Timings
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.report import InstanceMeasures
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.port import NOTHING, Groups
from kvbm_console.simulator.simulated import SimulatedEngine
from kvbm_console.simulator.work import Plan, Work
from kvbm_console.simulator.workloads import Request, Workload

SLICE_NS: Final = 100_000_000
"""Wall time between two reports of progress."""
_NOTHING_BELOW: Final = MatchAnswer(0, False)
ALWAYS_CALM: Final = 2**31
"""More blocks than any pool has, because a full pool copies nothing down."""


class MachineLedger:
    """A machine without lower tiers and without a leader: the ``EnginePort`` of its engine.

    ``stats`` is called as in ``Timings``, and ``ended`` with the record of every request that has ended.
    """

    standing: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()

    def __init__(
        self, config: EngineConfig, workload: Workload, block_tokens: int, *, stats_every: int = 0,
        stats: Callable[[StatsLine], None] | None = None, windows: bool = True,
        ended: Callable[[RequestRecord], None] | None = None, calendar: Calendar | None = None,
        take_latency_ns: Callable[[], int] = lambda: 0, arrivals_felt: bool = False,
    ) -> None:
        self.times = Timings(stats_every, stats)
        self.totals = Totals()
        """The counts that a leader would make."""
        self.readmitted = Readmitted()
        self._block_tokens = block_tokens
        self._capacity = config.g1_blocks
        self._calendar = Calendar() if calendar is None else calendar
        self._windows = windows
        self._ended = ended
        self._records: dict[str, RequestRecord] = {}
        """Records of the live requests, if ``ended`` is given."""
        self._arrived_ns: dict[str, int] = {}
        """Live requests to their arrival."""
        self._output_tokens: dict[str, int] = {}
        self._first_token_ns: dict[str, int] = {}
        self._prefilled: list[str] = []
        """Requests whose prompt the running iteration completes, so it samples their first token."""
        self._iteration = 0
        self._stored_blocks = 0
        self.engine = SimulatedEngine(
            config, self, self._calendar, workload, block_tokens, take_latency_ns=take_latency_ns,
            arrivals_felt=arrivals_felt,
        )
        self._pool = self.engine.scheduler.pool
        self.point("reset")

    # --- a run ---

    def change(self, options: SimulateOptions) -> None:
        """From now on the machine has these limits, and memory that is at least as large as before."""
        config = EngineConfig(**options.engine_fields())
        self._pool.grow(config.g1_blocks - self._capacity)
        self._capacity = config.g1_blocks
        self.engine.config = self.engine.scheduler.config = config

    def run_to_end(self, progress: Callable[[int], None] | None = None) -> None:
        """Run until every request has ended; ``progress`` gets the finished requests about ten times a second."""
        engine = self.engine
        while not engine.done:
            engine.run(None, SLICE_NS)
            if engine.only_held:
                live = ", ".join(list(self._arrived_ns)[:10])
                raise InternalError(f"the engine is stuck at {engine.now_ns} ns without a hold: {live}")
            if progress is not None:
                progress(engine.totals.finished)
        if self._pool.free_blocks != self._capacity or self._pool.most_holders or self._arrived_ns:
            raise InternalError("every request has ended, and device blocks are still held", tuple(self._pool.audit()))

    def clear(self) -> None:
        """Forget the content of the device pool, as a reset does."""
        self.engine.clear(b"")

    def point(self, name: str) -> None:
        """Take the stats line of this moment."""
        self.times.point(self._line(name))

    def _line(self, name: str, *, passing: bool = False) -> StatsLine:
        free = self._pool.free_blocks
        return StatsLine(
            name, self._iteration, len(self._arrived_ns), self._capacity - free, free, self._pool.most_holders, passing
        )

    def measures(self) -> InstanceMeasures:
        """The figures of the run; before ``clear``."""
        self.totals.evicted_blocks[0] = self._stored_blocks - (
            self._capacity - self._pool.hash_of.count(EMPTY_HASH)
        )
        return InstanceMeasures(self.engine.totals, self.times, self.totals, self.readmitted)

    # --- the engine's side (EnginePort) ---

    def declared(self, blocks: int, block_tokens: int, groups: int) -> None:
        """Nothing: the ledger has built the pool."""

    def arrived(self, request: Request) -> bool:
        """True unless a leader would refuse this request."""
        self._pass()
        name, at_ns = request.request, self._calendar.now_ns
        if (
            name in self._arrived_ns or not 1 <= len(name.encode()) <= REQUEST_ID_BYTES_MAX
            or request.prompt_tokens < 1 or request.output_tokens < 0
            or len(request.hashes) > request.prompt_tokens // self._block_tokens or EMPTY_HASH in request.hashes
        ):
            return False
        self._arrived_ns[name] = at_ns
        self._output_tokens[name] = request.output_tokens
        if self._ended is not None:
            self._records[name] = RequestRecord(name, at_ns, prompt_tokens=request.prompt_tokens)
        return True

    def looked_up(self, name: str, computed_tokens: int) -> MatchAnswer:
        """No hit: there is no tier below."""
        return _NOTHING_BELOW

    def named(self, work: Work, count: int) -> None:
        """Count the blocks; ``filled`` does not name them again."""
        self._stored_blocks += count

    def admitted(self, work: Work, prefix: int, found_tokens: int) -> None:
        """Score the prefix of a request: only prompt blocks count."""
        blocks = len(work.request.hashes)
        if work.preempted:
            self.readmitted.prompt_blocks += blocks
            self.readmitted.hit_blocks += min(prefix, blocks)
            return
        self.totals.prompt_blocks += blocks
        self.totals.hit_blocks[0] += min(prefix, blocks)
        if self._ended is not None:
            self._records[work.name].hits = min(prefix, blocks), 0, 0, 0

    def appended(self, work: Work, ids: list[int]) -> None:
        """Nothing: the blocks in use are counted when the iteration begins."""

    def shared(
        self, name: str, ids: list[int], *, stored: Groups = NOTHING, removed: Groups = NOTHING, cleared: bool = False
    ) -> None:
        """Nothing: nobody asks what the groups beside the first have."""

    def passed(self, work: Work) -> list[int]:
        """Look at the blocks in use before the window gives some back; no block is withheld."""
        self._look()
        return []

    def cloned(self, work: Work, clones: Sequence[Work], ids: list[int]) -> None:
        """Count each clone as a request that arrived with the first sequence."""
        for known in (self._arrived_ns, self._output_tokens, self._first_token_ns):
            if work.name in known:
                known.update({clone.name: known[work.name] for clone in clones})
        for clone in clones:
            self.times.gaps.cloned(work.name, clone.name)
            if self._ended is not None:
                record = self._records[work.name]
                self._records[clone.name] = msgspec.structs.replace(record, request=clone.name, preemptions=0)
        self._look()

    def scheduled(self, plan: Plan, iteration: int, running: int, waiting: int) -> None:
        """Count first tokens and blocks in use, and report stats lines."""
        before, last = self._iteration, iteration + plan.steps - 1
        self._iteration = last
        self._look()
        self._prefilled = [
            work.name for work, count in plan.tokens if not work.prefilled and work.computed + count >= work.total
        ]
        self._begin(plan)
        if plan.first_tokens and len(self.times.points) == 1:
            self.point("prefill")
            self.engine.windows = self._windows
        self.times.tell(before, last, plan.early, lambda: self._line("decode", passing=True))

    def _begin(self, plan: Plan) -> None:
        known = self._first_token_ns
        for name in plan.skipped:
            if name in known:
                self.times.gaps.left_out(name)
        again = [name for name in self._prefilled if name in known]
        prefilling = {work.name for work, _ in plan.tokens if not work.prefilled} if plan.unskipped else ()
        ends = len(self._prefilled)
        self.times.begin(
            self._calendar.now_ns, plan.steps, plan.decoding + ends, ends - len(again),
            [*again, *plan.first_tokens, *(name for name in plan.unskipped if name not in prefilling)],
            sum(plan.early),
        )

    def filled(
        self, iteration: int, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        """The iterations of the last plan ended, and each completed prompt has its first token."""
        self.times.end(self._calendar.now_ns)
        for name in self._prefilled:
            self._first_token_ns.setdefault(name, self._calendar.now_ns)
        self._pass()
        self._stored_blocks += len(ids)

    def preempted(self, work: Work) -> list[int]:
        """Count a preemption; no block is withheld."""
        self._look()
        self.totals.preemptions += 1
        self.totals.requests_preempted += not work.preempted
        if work.name in self._first_token_ns:
            self.times.gaps.left_out(work.name)
        if self._ended is not None:
            self._records[work.name].preemptions += 1
        return []

    def finished(self, name: str, ids: list[int], reason: FinishReason) -> bool:
        """Count the end of a request; only completed requests count in the times."""
        arrived_ns, first_token_ns = self._arrived_ns.pop(name), self._first_token_ns.pop(name, None)
        tokens, now_ns = self._output_tokens.pop(name), self._calendar.now_ns
        self.times.gaps.gone(name)
        if reason is FinishReason.LENGTH:
            self.totals.finished[reason] += 1
            self.times.completed(arrived_ns, now_ns if first_token_ns is None else first_token_ns, now_ns, tokens)
        if self._ended is not None:
            record = self._records.pop(name)
            record.first_token_ns, record.finished_ns, record.reason = first_token_ns, now_ns, reason.label
            record.output_tokens = 0 if first_token_ns is None else tokens
            self._ended(record)
        return False

    def computed_tokens(self, name: str) -> int:
        """Never called, because nothing is loaded."""
        raise InternalError(f"the load of {name} ended, and there is nothing to load from")

    def calm_blocks(self) -> int | None:
        """More than the pool, because no block is copied down."""
        return ALWAYS_CALM

    # --- device blocks over time ---

    def _look(self) -> None:
        """Update the peak of used blocks, after an allocation and before a release."""
        used = self._capacity - self._pool.free_blocks
        if used > self.times.peak_used:
            self.times.peak_used = used

    def _pass(self) -> None:
        """Add the time that has passed, before any allocation or release at this instant."""
        self.times.passed(self._calendar.now_ns, self._capacity - self._pool.free_blocks)
