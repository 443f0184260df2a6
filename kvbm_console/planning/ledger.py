"""The ledger: what a report needs of a machine with device memory alone, counted where a leader would decide nothing.

Law of this file: without a lower tier every lookup finds nothing more, nothing is withheld and no copy is made, so what
the leader adds to the engine are counts. The ledger makes the same counts, of the same moments, from the calls of the
engine and from its pool; ``tests/planning/test_ledger.py`` compares both, report by report and line by line, over
hundreds of machines. It decides nothing, keeps nothing of a request that has ended, and explains nothing: whoever asks
for records, verifies or compares hosts gets the leader.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvbm_console.core.config import REQUEST_ID_BYTES_MAX
from kvbm_console.core.errors import InternalError
from kvbm_console.core.ids import EMPTY_HASH, FinishReason, Tier
from kvbm_console.core.instructions import MatchAnswer
from kvbm_console.planning.meter import RequestRecord, StatsLine
from kvbm_console.planning.report import InstanceMeasures
from kvbm_console.planning.tokens import TokenGaps, per_token_ns
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.simulated import SimulatedEngine
from kvbm_console.simulator.work import Plan, Work
from kvbm_console.simulator.workloads import Request, Workload

SLICE_NS: Final = 100_000_000
"""Of the wall's time, between two reports of progress."""
_NOTHING_BELOW: Final = MatchAnswer(0, False)
_ALWAYS_CALM: Final = 2**31
"""More blocks than any pool has: nothing is copied down when one becomes full."""


class Ledger:
    """A machine without lower tiers and without a leader: the ``EnginePort`` of its engine.

    ``stats`` is told a line after every ``stats_every`` iterations, and at each ``point``.
    """

    standing: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()

    def __init__(
        self, config: EngineConfig, workload: Workload, block_tokens: int, *, stats_every: int = 0,
        stats: Callable[[StatsLine], None] | None = None, windows: bool = True,
        ended: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.points: list[StatsLine] = []
        self._block_tokens = block_tokens
        self._capacity = config.g1_blocks
        self._calendar = Calendar()
        self._windows = windows
        self._stats = stats
        self._stats_every = stats_every if stats is not None else 0
        self._ttft_ns = array("q")
        self._latency_ns = array("q")
        self._per_token_ns = array("q")
        self._gaps = TokenGaps()
        self._sampling: tuple[int, int, int, int, list[str]] = (0, 1, 0, 0, [])
        """Of the iterations that run: begin, number, requests that sample a token in each, how many of these are first
        tokens, and requests that may have been left out before."""
        self._ended = ended
        self._records: dict[str, RequestRecord] = {}
        """Of the live requests, where somebody is told how they end."""
        self._last_finish_ns = 0
        self._arrived_ns: dict[str, int] = {}
        """Of the live requests."""
        self._output_tokens: dict[str, int] = {}
        self._first_token_ns: dict[str, int] = {}
        self._prefilled: list[str] = []
        """Requests whose prompt the iteration that runs computes to its end: it samples their first token."""
        self._iteration = 0
        self._prompt_blocks = self._hit_blocks = 0
        self._stored_blocks = 0
        self._preemptions = self._requests_preempted = 0
        self._peak_used = 0
        self._at_ns = 0
        """Up to here device blocks in use are summed over time in ``_area``."""
        self._area = 0
        self._window: tuple[int, int, int] = (0, 0, 0)
        """Of iterations that were told at once: begin, number, and by how many iterations altogether their blocks were
        given before they were needed."""
        self.engine = SimulatedEngine(config, self, self._calendar, workload, block_tokens)
        self._pool = self.engine.scheduler.pool
        self.point("reset")

    # --- a run ---

    def run_to_end(self, progress: Callable[[int], None] | None = None) -> None:
        """Run until every request has ended; ``progress`` is told the finished ones about ten times a second."""
        engine = self.engine
        while not engine.done:
            engine.run(None, SLICE_NS)
            if engine.only_held:
                live = ", ".join(list(self._arrived_ns)[:10])
                raise InternalError(f"the engine is stuck at {engine.now_ns} ns without a hold: {live}")
            if progress is not None:
                progress(engine.totals.finished)
        if self._pool.free_blocks != self._capacity or self._pool.most_holders or self._arrived_ns:
            raise InternalError("every request has ended, and something holds device blocks", tuple(self._pool.audit()))

    def clear(self) -> None:
        """Give up what the device pool holds, as a reset does."""
        self.engine.clear(b"")

    def point(self, name: str) -> None:
        """Take the stats line of this moment."""
        line = self._line(name)
        self.points.append(line)
        if self._stats is not None:
            self._stats(line)

    def _line(self, name: str, *, passing: bool = False) -> StatsLine:
        free = self._pool.free_blocks
        return StatsLine(
            name, self._iteration, len(self._arrived_ns), self._capacity - free, free, self._pool.most_holders, passing
        )

    def measures(self) -> InstanceMeasures:
        """What the run came to; before ``clear``."""
        pool = self._pool
        evicted = self._stored_blocks - (self._capacity - pool.hash_of.count(EMPTY_HASH))
        return InstanceMeasures(
            engine=self.engine.totals, ttft_ns=self._ttft_ns, latency_ns=self._latency_ns,
            per_token_ns=self._per_token_ns, gap_counts=self._gaps.counts,
            last_finish_ns=self._last_finish_ns, completed=len(self._latency_ns), prompt_blocks=self._prompt_blocks,
            hit_blocks=_of_device(self._hit_blocks), lost_blocks=0, evicted_blocks=_of_device(evicted),
            moved_blocks={}, preemptions=self._preemptions,
            requests_preempted=self._requests_preempted, gauges={}, prefetch={}, peak_used=self._peak_used,
            mean_used=self._area / self._at_ns if self._at_ns else 0.0, points=tuple(self.points),
        )

    # --- the engine's side (EnginePort) ---

    def declared(self, blocks: int, block_tokens: int) -> None:
        """Nothing: the ledger has built it."""

    def arrived(self, request: Request) -> bool:
        """What a leader refuses is refused."""
        self._pass()
        name = request.request
        if (
            name in self._arrived_ns or not 1 <= len(name.encode()) <= REQUEST_ID_BYTES_MAX
            or request.prompt_tokens < 1 or request.output_tokens < 0
            or len(request.hashes) > request.prompt_tokens // self._block_tokens or EMPTY_HASH in request.hashes
        ):
            return False
        self._arrived_ns[name] = self._at_ns
        self._output_tokens[name] = request.output_tokens
        if self._ended is not None:
            self._records[name] = RequestRecord(name, self._at_ns, prompt_tokens=request.prompt_tokens)
        return True

    def looked_up(self, name: str, computed_tokens: int) -> MatchAnswer:
        """There is nothing below."""
        return _NOTHING_BELOW

    def admitted(self, work: Work, prefix: int, found_tokens: int) -> None:
        """Score it: only prompt blocks count."""
        blocks = len(work.request.hashes)
        self._prompt_blocks += blocks
        self._hit_blocks += min(prefix, blocks)
        if self._ended is not None:
            self._records[work.name].hits = min(prefix, blocks), 0, 0, 0

    def appended(self, work: Work, ids: list[int]) -> None:
        """Nothing: what is used is looked at when the iteration begins."""

    def cloned(self, work: Work, clones: Sequence[Work], ids: list[int]) -> None:
        """Each counts as a request that arrived with the first sequence."""
        for known in (self._arrived_ns, self._output_tokens, self._first_token_ns):
            if work.name in known:
                known.update({clone.name: known[work.name] for clone in clones})
        for clone in clones:
            self._gaps.cloned(work.name, clone.name)
            if self._ended is not None:
                record = self._records[work.name]
                self._records[clone.name] = msgspec.structs.replace(record, request=clone.name, preemptions=0)
        self._look()

    def scheduled(self, plan: Plan, iteration: int, running: int, waiting: int) -> None:
        """First tokens, blocks in use, stats lines."""
        before, last = self._iteration, iteration + plan.steps - 1
        self._iteration = last
        self._look()
        if plan.early:
            self._window = self._calendar.now_ns, plan.steps, sum(plan.early)
        self._prefilled = [
            work.name for work, count in plan.tokens if not work.prefilled and work.computed + count >= work.total
        ]
        self._begin(plan)
        if plan.first_tokens and len(self.points) == 1:
            self.point("prefill")
            self.engine.windows = self._windows
        every = self._stats_every
        if every and before // every != last // every:
            self._tell(range((before // every + 1) * every, last + 1, every), plan.early, iteration)

    def _begin(self, plan: Plan) -> None:
        """Who samples a token at the end of these iterations."""
        known = self._first_token_ns
        for name in plan.skipped:
            if name in known:
                self._gaps.left_out(name)
        again = [name for name in self._prefilled if name in known]
        ends = len(self._prefilled)
        self._sampling = (
            self._calendar.now_ns, plan.steps, plan.decoding + ends, ends - len(again),
            [*again, *plan.first_tokens, *plan.unskipped],
        )

    def _tell(self, iterations: range, early: Sequence[int], first: int) -> None:
        """The stats lines of these iterations, as each would have it alone: without blocks that are given early."""
        assert self._stats is not None
        line = self._line("decode", passing=True)
        for iteration in iterations:
            later = len(early) - bisect_right(early, iteration - first)
            self._stats(StatsLine(
                line.point, iteration, line.active_slots, line.blocks_used - later, line.blocks_free + later,
                line.max_ref_count, True,
            ))

    def filled(
        self, iteration: int, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        """The iterations of the last plan ended: where a prompt was computed to its end, there is a first token."""
        begun_ns, steps, requests, first, back = self._sampling
        self._gaps.sampled(begun_ns, self._calendar.now_ns, steps, requests, first, back)
        for name in self._prefilled:
            self._first_token_ns.setdefault(name, self._calendar.now_ns)
        begun_ns, count, early = self._window
        if early:
            self._area -= early * ((self._calendar.now_ns - begun_ns) // count)  # they last equally long
            self._window = (0, 0, 0)
        self._pass()
        self._stored_blocks += len(ids)

    def preempted(self, work: Work) -> list[int]:
        """Nothing is withheld."""
        self._look()
        self._preemptions += 1
        if not work.preempted:
            self._requests_preempted += 1
        if work.name in self._first_token_ns:
            self._gaps.left_out(work.name)
        if self._ended is not None:
            self._records[work.name].preemptions += 1
        return []

    def finished(self, name: str, ids: list[int], reason: FinishReason) -> bool:
        """Times are counted of completed requests alone."""
        arrived_ns, first_token_ns = self._arrived_ns.pop(name), self._first_token_ns.pop(name, None)
        tokens, now_ns = self._output_tokens.pop(name), self._calendar.now_ns
        self._gaps.gone(name)
        if reason is FinishReason.LENGTH:
            first_ns = now_ns if first_token_ns is None else first_token_ns
            self._last_finish_ns = now_ns
            self._ttft_ns.append(first_ns - arrived_ns)
            self._latency_ns.append(now_ns - arrived_ns)
            self._per_token_ns.append(per_token_ns(first_ns, now_ns, tokens))
        if self._ended is not None:
            record = self._records.pop(name)
            record.first_token_ns, record.finished_ns, record.reason = first_token_ns, now_ns, reason.label
            record.output_tokens = 0 if first_token_ns is None else tokens
            self._ended(record)
        return False

    def computed_tokens(self, name: str) -> int:
        """Nothing is loaded, so nobody asks."""
        raise InternalError(f"the load of {name} ended, and there is nothing to load from")

    def calm_blocks(self) -> int:
        """Nothing is copied down."""
        return _ALWAYS_CALM

    # --- device blocks over time ---

    def _look(self) -> None:
        """Blocks were given since the last time, or are about to be taken back."""
        used = self._capacity - self._pool.free_blocks
        if used > self._peak_used:
            self._peak_used = used

    def _pass(self) -> None:
        """Time has passed, and no block was given or taken back in this instant."""
        now_ns = self._calendar.now_ns
        if now_ns != self._at_ns:
            self._area += (self._capacity - self._pool.free_blocks) * (now_ns - self._at_ns)
            self._at_ns = now_ns


def _of_device(blocks: int) -> list[int]:
    return [blocks if tier is Tier.G1 else 0 for tier in Tier]
