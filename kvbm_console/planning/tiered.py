"""The figures of a machine with lower tiers, counted with the leader's decisions and without its events.

Copies down, victims and loads are decisions, and they are the leader's: ``SilentLeader`` decides them and folds them
into facts, and makes no stimulus, no packed column and no outcome for a reader. The engine's calls lead to the
functions behind the leader's entry points, without the checks of what a foreign engine may send. The links report to
the same functions. Rare calls (the deadline of a match, a clone) remain stimuli.

Law of this file: the report and the stats lines are those of a leader with the same ``windows``.
``tests/planning/test_tiered.py`` compares them over hundreds of machines.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Condition, FinishReason, ResetMode, SlotState, Tier
from kvbm_console.core.instructions import MatchAnswer
from kvbm_console.core.leader import Leader, Outcome, settle
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.filling import being_filled, fill, fill_spans, iteration_ended
from kvbm_console.core.leader.iterations import Appended, date_early, remember_early
from kvbm_console.core.leader.lookups import admit, assign, match, open_slot, pass_window
from kvbm_console.core.leader.pipeline import report
from kvbm_console.core.leader.requests import end, preempt, use_formed
from kvbm_console.core.leader.slots import move
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.snapshots import grown_facts
from kvbm_console.core.stimuli import ResetRequested, Stimulus, TransferFailed, TransferFinished, TransferStarted
from kvbm_console.dispatch import Dispatcher, start_leader
from kvbm_console.planning.ledger import MachineLedger
from kvbm_console.planning.meter import Readmitted, RequestRecord, StatsLine, device_of, stats_of
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.report import InstanceMeasures
from kvbm_console.simulator.calendar import Calendar, EngineDeadlines
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import SOURCE
from kvbm_console.simulator.link import LinkMover, LinkSpec
from kvbm_console.simulator.port import NOTHING, Groups, StimulusPort
from kvbm_console.simulator.work import Plan, Work
from kvbm_console.simulator.workloads import Request, Workload

P = ParamSpec("P")
T = TypeVar("T")
_S = SlotState
_OUT_OF = {_S.PREFILLING: _S.SKIPPED_PREFILL, _S.DECODING: _S.SKIPPED_DECODE}
_BACK_OF = {skipped: back for back, skipped in _OUT_OF.items()}


class SilentLeader(Leader):
    """Decides as a ``Leader`` and keeps no event. Columns stay lists, and no token is checked for its place (I15)."""

    def ids(self, places: Iterable[int]) -> Any:
        """A list."""
        return list(places)

    def hashes(self, keys: Iterable[int]) -> Any:
        """A list."""
        return list(keys)

    def emit(self, kind: Callable[Concatenate[int, int, int, P], ev.Event], *args: P.args, **kwargs: P.kwargs) -> None:
        """Make an event true."""
        self.state.apply(kind(self.state.seq, self.at_ns, self.n, *args, **kwargs))

    def note_place(self, slot: SlotFacts) -> None:
        """Nothing."""

    def change(self, config: LeaderConfig, device_blocks: int) -> None:
        """From now on decide with this configuration, over pools that are at least as large as before."""
        places = {Tier.G1: device_blocks, Tier.G2: config.g2_blocks, Tier.G3: config.g3_blocks}
        more = {at: places[pool.info.tier] - len(pool) for at, pool in enumerate(self.state.pools)}
        self.config = config
        if any(more.values()):
            self.state = grown_facts(self.state, more)
            for pool in self.lower_pools():
                self.live_memory.grow(pool.info.pool, more[pool.info.pool])
            for mine in self.memory.pools:
                mine.blocked = False
            self.look_at_pools()


class TieredLedger(MachineLedger):
    """A machine with lower tiers: the ``EnginePort`` of its engine, and the receiver of its mover's ``Reports``."""

    def __init__(
        self, leader: LeaderConfig, links: Sequence[LinkSpec], config: EngineConfig, workload: Workload, *,
        stats_every: int = 0, stats: Callable[[StatsLine], None] | None = None, windows: bool = True,
        ended: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        calendar = Calendar()
        self.leader = SilentLeader(leader)
        self._dispatcher = Dispatcher(self.leader, calendar.clock)
        self._port = StimulusPort(self._dispatcher.port(SOURCE))
        self._used = 0
        start_leader(self._dispatcher)
        mover = self.mover = LinkMover(
            calendar, self, config.token_bytes * leader.block_tokens, links=links, asynchronous=leader.asynchronous,
        )
        self._dispatcher.mover = mover
        self._dispatcher.engine_deadlines = EngineDeadlines(calendar, self._dispatcher)
        super().__init__(
            config, workload, leader.block_tokens, stats_every=stats_every, stats=stats, windows=windows, ended=ended,
            calendar=calendar, take_latency_ns=mover.take_latency_ns,
            arrivals_felt=leader.prefetch != "none" and min(leader.g2_blocks, leader.g3_blocks) > 0,
        )
        self._dispatcher.engines[SOURCE] = self.engine
        self._dispatcher.publish = self._published

    # --- a run ---

    def change(self, options: SimulateOptions) -> None:
        """As without tiers."""
        super().change(options)
        self.leader.change(options.leader_config(), options.total_kv_blocks)
        self._device = device_of(self.leader.state)

    def clear(self) -> None:
        """Forget the content of all tiers, as a reset does."""
        self._dispatcher.submit(ResetRequested, ResetMode.LOGICAL)

    def measures(self) -> InstanceMeasures:
        """The figures of the run; before ``clear``."""
        leader = self.leader
        policies = leader.live_memory.policies
        return InstanceMeasures(
            self.engine.totals, self.times, copy.deepcopy(leader.state.totals),
            Readmitted(leader.readmitted_blocks, leader.readmitted_hits),
            {pool.info.tier.name: policies[pool.info.pool].gauges() for pool in leader.lower_pools()},
            leader.memory.prefetch.gauges(),
        )

    def _line(self, name: str, *, passing: bool = False) -> StatsLine:
        return stats_of(self.leader.state, name, passing=passing)

    # --- deciding ---

    def _decide(
        self, decide: Callable[Concatenate[Decider, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Decide and settle, as of a stimulus. Its instructions wait for ``_carry_out``, so that what they lead to is
        counted behind it."""
        leader, dispatcher = self.leader, self._dispatcher
        leader.at_ns = dispatcher.at_ns = self._calendar.now_ns
        leader.instructions = []
        result = decide(leader, *args, **kwargs)
        settle(leader)
        self._measure()
        return result

    def _carry_out(self) -> None:
        if self.leader.instructions:
            self._dispatcher.carry_out(self.leader.instructions)

    def _published(self, stimulus: Stimulus, outcome: Outcome) -> None:
        self._measure()

    def _measure(self) -> None:
        """Count device blocks in use, those of copies included."""
        counts, times = self._device.counts, self.times
        times.passed(self._calendar.now_ns, self._used)
        self._used = used = counts[Condition.REFERENCED] + counts[Condition.WRITING]
        if used > times.peak_used:
            times.peak_used = used

    def _look(self) -> None:
        """Nothing: see ``_measure``."""

    def _pass(self) -> None:
        """Nothing: see ``_measure``."""

    def _slot(self, name: str) -> SlotFacts:
        state = self.leader.state
        return state.slots[state.slot_of[name]]

    # --- the mover's side (Reports) ---

    def submit(self, kind: type[Any], *args: Any) -> None:
        """A copy has begun or ended."""
        if kind is TransferStarted:
            self._decide(_begun, args[0])
        elif kind is TransferFinished:
            operation, epoch, rank = args
            self._decide(report, operation, epoch, rank, True, "", b"")
        else:
            assert kind is TransferFailed
            operation, epoch, rank, error, failed = args
            state = self.leader.state
            number = state.candidates[state.operations[operation].candidate].slot
            self._decide(report, operation, epoch, rank, False, error, failed)
            slot = None if number is None else state.slots.get(number)
            if slot is not None and not slot.preemptions and self._ended is not None:
                self._records[slot.request].hits = slot.hits
        self._carry_out()

    # --- the engine's side (EnginePort) ---

    def declared(self, blocks: int, block_tokens: int, groups: int) -> None:
        """The device pool exists."""
        self._port.declared(blocks, block_tokens, groups)
        self._device = device_of(self.leader.state)

    def arrived(self, request: Request) -> bool:
        """True unless a leader would refuse this request."""
        if not super().arrived(request):
            return False
        self._decide(
            open_slot, request.request, SOURCE, list(request.hashes), request.prompt_tokens, request.output_tokens,
            request.priority, request.session,
        )
        self._carry_out()
        return True

    def looked_up(self, name: str, computed_tokens: int) -> MatchAnswer:
        """Continue the prefix below the device."""
        answer = self._decide(match, self._slot(name), computed_tokens // self._block_tokens)
        self._carry_out()
        return answer

    def admitted(self, work: Work, prefix: int, found_tokens: int) -> None:
        """Score the prefix of a request and start its load."""
        slot = self._slot(work.name)
        self._decide(self._admit, slot, work, prefix, found_tokens)
        if not work.preempted and self._ended is not None:
            self._records[work.name].hits = slot.hits
        self._carry_out()

    def _admit(self, leader: Decider, slot: SlotFacts, work: Work, prefix: int, found_tokens: int) -> None:
        reused, hashes = work.held[: max(0, prefix - work.passed)], slot.hashes[work.passed :]
        fill_spans(leader, self._device, being_filled(leader, self._device, reused, hashes, work.passed))
        admit(leader, self._device, slot, work.held, prefix, found_tokens, work.passed)

    def appended(self, work: Work, ids: list[int]) -> None:
        """Mirror the blocks."""
        self._decide(assign, self._device, [self._slot(work.name)], [len(ids)], ids, 0, 0)
        self._carry_out()

    def shared(
        self, name: str, ids: list[int], *, stored: Groups = NOTHING, removed: Groups = NOTHING, cleared: bool = False
    ) -> None:
        """As ``EnginePort.shared``."""
        self._port.shared(name, ids, stored=stored, removed=removed, cleared=cleared)

    def passed(self, work: Work) -> list[int]:
        """Mirror the window; blocks that a running copy still uses are withheld."""
        fenced = self._decide(pass_window, self._slot(work.name), work.passed)
        self._carry_out()
        return [] if fenced is None else unpack_ids(fenced.ids)

    def cloned(self, work: Work, clones: Sequence[Work], ids: list[int]) -> None:
        """Open the clones, and count them as requests that arrived with the first sequence."""
        self._port.cloned(work, clones, ids)
        super().cloned(work, clones, ids)

    def scheduled(self, plan: Plan, iteration: int, running: int, waiting: int) -> None:
        """Move slots, mirror blocks and advance positions; then as without tiers."""
        self._decide(self._form, plan, iteration, running, waiting)
        super().scheduled(plan, iteration, running, waiting)
        self._carry_out()

    def _form(self, leader: Decider, plan: Plan, iteration: int, running: int, waiting: int) -> None:
        for name in (*plan.new, *plan.resumed):
            slot = self._slot(name)
            if slot.state is not _S.PREFILLING:
                move(leader, slot, _S.PREFILLING, iteration=iteration)
        for name in plan.unskipped:
            slot = self._slot(name)
            move(leader, slot, _BACK_OF[slot.state], iteration=iteration)
        for name in plan.first_tokens:
            move(leader, self._slot(name), _S.DECODING, iteration=iteration)
        for name in plan.skipped:
            slot = self._slot(name)
            move(leader, slot, _OUT_OF[slot.state], iteration=iteration)
        if plan.appended:
            self._append(leader, plan, iteration)
        last, slots = iteration + plan.steps - 1, tuple([self._slot(name).slot for name in plan.progressed])
        leader.emit(
            ev.IterationAdvanced, last, plan.steps, running, waiting, slots, tuple(plan.positions), tuple(plan.ended)
        )
        use_formed(leader, slots, plan.positions, plan.ended)
        leader.memory.issued.clear()

    def _append(self, leader: Decider, plan: Plan, iteration: int) -> None:
        slots, counts, ids = [self._slot(work.name) for work in plan.appended], plan.appended_counts, plan.appended_ids
        lost = assign(leader, self._device, slots, counts, ids, 0, 0, at_once=False)
        if plan.steps > 1 and lost:
            more: dict[int, int] = {}
            for slot, count in zip(slots, counts, strict=True):
                more[slot.slot] = more.get(slot.slot, 0) + count
            remember_early(leader, self._device, Appended(slots, counts, ids, more), iteration - 1, plan.steps, lost)

    def filled(
        self, iteration: int, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        """As without tiers, and blocks that are full may be copied down."""
        super().filled(iteration, works, counts, ids, hashes)
        self._decide(self._fill, works, counts, ids, hashes)
        self._carry_out()

    def _fill(
        self, leader: Decider, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        if leader.memory.early:
            date_early(leader)
        if ids:
            self._fill_spans(leader, works, counts, ids, hashes)
        iteration_ended(leader, self._device)

    def _fill_spans(
        self, leader: Decider, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        done: dict[str, int] = {}
        spans = []
        for work, count in zip(works, counts, strict=True):
            slot = self._slot(work.name)
            first = done.get(work.name, slot.filled_blocks)
            done[work.name] = first + count
            spans.append((slot, first, first + count))
        fill(leader, self._device, spans, ids, hashes)

    def preempted(self, work: Work) -> list[int]:
        """Take the blocks back; those that a running copy still uses are withheld."""
        fenced = unpack_ids(self._decide(preempt, self._slot(work.name)).ids)
        super().preempted(work)
        self._carry_out()
        return fenced

    def finished(self, name: str, ids: list[int], reason: FinishReason) -> bool:
        """Count the end of a request. True while copies of its blocks run."""
        delayed = self._decide(end, self._slot(name), reason).delay_free
        super().finished(name, ids, reason)
        self._carry_out()
        return delayed

    def computed_tokens(self, name: str) -> int:
        """As ``EnginePort.computed_tokens``."""
        return self._port.computed_tokens(name)

    def calm_blocks(self) -> int | None:
        """As ``EnginePort.calm_blocks``."""
        return self._port.calm_blocks()


def _begun(leader: Decider, operation: int) -> None:
    leader.emit(ev.OperationStarted, operation)
