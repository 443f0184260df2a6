"""Holds: a site that is passed becomes a match, a match a hit, and a hit holds, logs, captures or freezes.

Theory of operation
-------------------
A handler calls ``strike`` at each site. When the gate watches the site, ``pass_site`` asks it for the breakpoints that
match. It carries out their actions in a fixed order: failed conditions, logs, captures, freezes, holds.

A hold begins pending. Its slot goes on until it reaches the waitable point of the hold (``core.holds``). There the code
asks ``held_at``, which parks the slot, and returns without doing its work. Other slots go on. ``end_hold`` releases the
slot, and ``settle`` does the work at the end of the same stimulus. Resuming a held slot does not strike its site again:
``struck`` and ``returning`` remember the sites of candidates and of skipped slots.

A hold ends by continue, step, skip, its longest time, a lost lease, the end of its request, or pressure. Budgets bound
the number of holds and the share of the device pool that held slots own, so a debugger cannot stop an engine.

Example: a breakpoint at ``dispatch.will`` matches the load of slot 7. The hold waits at the point dispatch. Function
``dispatch`` asks ``held_at``, the slot is parked (``HoldParked``), and no copy starts. ``HoldContinued`` releases the
slot, and ``settle`` dispatches the same operation, so ``StartTransfer`` follows in the same outcome.

Law of this file: the order is fixed (``core.breakpoints``), and nothing here raises into the handler that passed the
site.
"""

from typing import Final

from kvbm_console.core import events as ev
from kvbm_console.core.breakpoints import STEPPED, Armed, Moment, hold_budget
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.expression import SLOT, variables
from kvbm_console.core.expression.closures import MESSAGE_CHARS_MAX
from kvbm_console.core.holds import FreezeFacts, HoldFacts, wait_point
from kvbm_console.core.ids import (
    Authority,
    BreakpointAction,
    BreakpointEnd,
    CandidateStatus,
    Clock,
    HoldEnd,
    OnTimeout,
    Site,
    SlotState,
    Suspend,
    Tier,
    WaitPoint,
)
from kvbm_console.core.instructions import PauseEngine, ResumeEngine, SetDeadline
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.slots import CandidateFacts, SlotFacts
from kvbm_console.core.stimuli import ENTRY_TAGS, CallAnnounced, CopyBegun, LookupObserved, MatchRequested
from kvbm_console.core.tiers import PoolFacts

MAX_HOLD_NS: Final = 30 * SECOND_NS
"""Of a hold that no breakpoint asked for: a step, or an until."""
LOGS_PER_SECOND_MAX: Final = 1_000
"""Messages of a breakpoint in a second of engine time. A person does not read more, and each message is recorded."""
PRESSURE_WINDOW_NS: Final = 2 * SECOND_NS
"""An unheld request that suffers twice within this time makes the oldest hold go on (safety rule 7)."""
_SKIPPED: Final = (SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE)


def moment_of(
    site: Site, slot: SlotFacts, old: SlotState, new: SlotState, candidate: CandidateFacts | None = None,
    since_ns: int | None = None,
) -> Moment:
    """The facts of the site."""
    if candidate is None:
        return Moment(site, slot.slot, slot.request, old, new, since_ns=since_ns)
    status = CandidateStatus.SKIPPED if site is Site.SKIP_DID else candidate.status
    route = candidate.route
    return Moment(site, slot.slot, slot.request, old, new, route, route.target, candidate.candidate, status)


def strike(
    decider: Decider, site: Site, slot: SlotFacts, old: SlotState, new: SlotState,
    candidate: CandidateFacts | None = None, since_ns: int | None = None,
) -> None:
    """A site is passed. If a breakpoint watches it, or a client asked a slot to stop there, carry out the effects.

    At a move, ``since_ns`` tells since when the slot was in ``old``.
    """
    if decider.gate is None or not decider.gate.watches(site, new):
        return
    moment = moment_of(site, slot, old, new, candidate, since_ns)
    if decider.observer is not None:
        decider.observer(moment, slot)
    pass_site(decider, slot, moment)


def pass_site(decider: Decider, slot: SlotFacts, moment: Moment) -> None:
    """A watched site is passed. Carry out the actions of the breakpoints that match."""
    assert decider.gate is not None
    matched, failed = decider.gate.ask(moment, slot, decider.state)
    for number, message in failed:
        decider.emit(ev.BreakpointStopped, number, BreakpointEnd.FAILED, message)
    effective = [armed for armed in matched if _counts(decider, armed)]
    logs = [armed for armed in effective if armed.spec.action is BreakpointAction.LOG]
    if logs:
        _log(decider, slot, moment, logs)
    captures = _numbers(effective, BreakpointAction.SNAPSHOT)
    if captures:
        said = _messages(decider, slot, moment, effective, BreakpointAction.SNAPSHOT)
        decider.emit(ev.BreakpointHit, captures, slot.slot, moment.site, BreakpointAction.SNAPSHOT, said)
        capture(decider, slot, moment, captures)
    freezers = [armed for armed in effective if armed.spec.action is BreakpointAction.FREEZE]
    if freezers:
        numbers = tuple(armed.number for armed in freezers)
        said = _messages(decider, slot, moment, freezers, BreakpointAction.FREEZE)
        decider.emit(ev.BreakpointHit, numbers, slot.slot, moment.site, BreakpointAction.FREEZE, said)
        freeze(decider, freezers[0].known.owner, min(armed.spec.max_hold_ns for armed in freezers))
    holders = [armed for armed in effective if armed.spec.action is BreakpointAction.HOLD]
    asked_by = _asked(decider, moment)
    if holders or asked_by is not None:
        _hold(decider, slot, moment, holders, asked_by)
    if failed or asked_by is not None or not all(armed.known.enabled for armed in effective):
        decider.rearm()


def _numbers(effective: list[Armed], action: BreakpointAction) -> tuple[int, ...]:
    return tuple(armed.number for armed in effective if armed.spec.action is action)


def _messages(
    decider: Decider, slot: SlotFacts, moment: Moment, effective: list[Armed], action: BreakpointAction
) -> str:
    """The messages at a hit of the breakpoints that have a template."""
    text = "; ".join(
        armed.message(slot, decider.state, moment) for armed in effective
        if armed.spec.action is action and armed.message is not None
    )
    return text if len(text) <= MESSAGE_CHARS_MAX else text[: MESSAGE_CHARS_MAX - 1] + "…"


def _counts(decider: Decider, armed: Armed) -> bool:
    """Count a match; True if it takes effect after the ignored matches and by the hit condition."""
    count = decider.memory.matches.get(armed.number, 0) + 1
    decider.memory.matches[armed.number] = count
    count -= armed.spec.ignore_count
    return count > 0 and (armed.counts is None or armed.counts(count))


def _asked(decider: Decider, moment: Moment) -> str | None:
    """The client that asked for this slot to stop here by a step or an until, or None."""
    memory, slot = decider.memory, moment.slot
    if slot in memory.stepping and moment.site in STEPPED:
        return memory.stepping.pop(slot)
    at_site = memory.until_site.get(slot)
    if at_site is not None and at_site[0] is moment.site:
        del memory.until_site[slot]
        return at_site[1]
    at_state = memory.until.get(slot)
    if at_state is not None and moment.site is Site.TRANSITION_DID and at_state[0] is moment.new:
        del memory.until[slot]
        return at_state[1]
    return None


# --- logs and captures ---


def _log(decider: Decider, slot: SlotFacts, moment: Moment, logs: list[Armed]) -> None:
    """Say that breakpoints were hit; those with a template of their own each with its message."""
    silent = []
    for armed in logs:
        if not _within_rate(decider, armed.number):
            decider.emit(
                ev.BreakpointStopped, armed.number, BreakpointEnd.OVERRUN,
                f"more than {LOGS_PER_SECOND_MAX} messages in one second",
            )
        elif armed.message is None:
            silent.append(armed.number)
        else:
            message = armed.message(slot, decider.state, moment)
            decider.emit(
                ev.BreakpointHit, (armed.number,), slot.slot, moment.site, BreakpointAction.LOG, message
            )
    if silent:
        decider.emit(ev.BreakpointHit, tuple(silent), slot.slot, moment.site, BreakpointAction.LOG)


def _within_rate(decider: Decider, number: int) -> bool:
    since, count = decider.memory.logged.get(number, (decider.at_ns, 0))
    if decider.at_ns - since >= SECOND_NS:
        since, count = decider.at_ns, 0
    decider.memory.logged[number] = (since, count + 1)
    return count < LOGS_PER_SECOND_MAX


def capture(decider: Decider, slot: SlotFacts, moment: Moment, numbers: tuple[int, ...]) -> None:
    """Put the slot's values on the record."""
    names, values = variables(slot, decider.state, moment, SLOT)
    decider.emit(ev.SlotCaptured, slot.slot, moment.site, numbers, names, values)


# --- holds ---


def _hold(
    decider: Decider, slot: SlotFacts, moment: Moment, holders: list[Armed], asked_by: str | None
) -> None:
    numbers = tuple(armed.number for armed in holders)
    said = _messages(decider, slot, moment, holders, BreakpointAction.HOLD)
    announced = decider.entry == ENTRY_TAGS[CallAnnounced]
    point = WaitPoint.CALL if announced else wait_point(moment.site, moment.new)
    if point is None:  # a finished slot cannot wait, so its snapshot is recorded instead
        if numbers:
            decider.emit(ev.BreakpointHit, numbers, slot.slot, moment.site, BreakpointAction.SNAPSHOT, said)
        decider.emit(ev.HoldDenied, slot.slot, moment.site, "a finished slot cannot wait")
        capture(decider, slot, moment, numbers)
        return
    full = "" if slot.hold is not None else _cannot_wait(decider, slot, moment, point) or _over_budget(decider, slot)
    if numbers:
        action = BreakpointAction.LOG if full else BreakpointAction.HOLD
        decider.emit(ev.BreakpointHit, numbers, slot.slot, moment.site, action, said)
    if full:
        decider.emit(ev.HoldDenied, slot.slot, moment.site, full)
    elif slot.hold is None:
        _begin_hold(decider, slot, moment, point, holders, asked_by)


def _cannot_wait(decider: Decider, slot: SlotFacts, moment: Moment, point: WaitPoint) -> str:
    """Why a slot cannot stand still at this point; empty when it can. A watched engine asks before lookups, and a tap
    before a load from a lower tier."""
    if moment.site is Site.CALL_WILL and decider.entry == ENTRY_TAGS[LookupObserved]:
        return "its engine had looked it up already"
    asked = point is WaitPoint.DISPATCH and decider.entry == ENTRY_TAGS[CopyBegun]
    watched = slot.source in decider.watched and not asked and point not in (WaitPoint.LOOKUP, WaitPoint.CALL)
    return f"its engine is only watched and cannot stand still at {point.label}" if watched else ""


def _over_budget(decider: Decider, slot: SlotFacts) -> str:
    """Why this slot may not be held beside those that are (safety rule 4); empty when it may."""
    config, state = decider.config, decider.state
    budget = hold_budget(len(state.slots), config.hold_budget_min, config.hold_budget_share)
    if len(state.holds) >= budget:
        return f"the budget of {budget} holds is used up"
    pool = state.pool_of(Tier.G1, slot.source)
    mine = set() if pool is None else _places_of(decider, slot, pool)
    owned = set() if pool is None or not mine else _places_held(decider, pool)
    if pool is None or not owned:
        return ""
    wanted = len(owned | mine)
    if wanted <= config.pressure_share * pool.capacity:
        return ""
    return (
        f"held requests would own {wanted} of {pool.capacity} device blocks, "
        f"more than the {config.pressure_share:.0%} that others can spare"
    )


def _places_held(decider: Decider, pool: PoolFacts) -> set[int]:
    """The device places that held slots keep from others."""
    slots = [decider.state.slots[hold.slot] for hold in decider.state.holds.values()]
    return set().union(*(_places_of(decider, slot, pool) for slot in slots))


def _places_of(decider: Decider, slot: SlotFacts, pool: PoolFacts) -> set[int]:
    """The device places that a slot keeps from others, its own and those that its copies read or fill.

    After a preemption the latter are not its own.
    """
    index, state = pool.info.pool, decider.state
    places = set(slot.device_blocks) if slot.device_pool == index else set()
    promoted = (state.candidates[number].operation for number in slot.outstanding)
    for operation in (state.operations[number] for number in promoted if number is not None):
        places.update(operation.sources if operation.source_pool == index else ())
        places.update(operation.targets if operation.target_pool == index else ())
    return places


def _begin_hold(
    decider: Decider, slot: SlotFacts, moment: Moment, point: WaitPoint, holders: list[Armed], asked_by: str | None
) -> None:
    number = decider.state.next_hold
    max_hold_ns = min((armed.spec.max_hold_ns for armed in holders), default=MAX_HOLD_NS)
    decider.emit(
        ev.SlotHeld, number, slot.slot, moment.site, point, tuple(armed.number for armed in holders),
        holders[0].known.owner if holders else asked_by or "", max_hold_ns,
        max((armed.spec.suspend for armed in holders), default=Suspend.SLOT),
        max((armed.spec.on_timeout for armed in holders), default=OnTimeout.CONTINUE),
    )
    decider.ask(SetDeadline(decider.memory.deadline("hold", number), max_hold_ns, Clock.WALL))
    decider.clear_deadline("staging", slot.slot)
    if moment.new in _SKIPPED and point is WaitPoint.SCHEDULE:
        park(decider, slot)


def held_at(decider: Decider, slot: SlotFacts, point: WaitPoint) -> bool:
    """True if the slot has to stand still at this point; says so once when it gets there."""
    if slot.hold is None or decider.state.holds[slot.hold].point is not point:
        return False
    park(decider, slot)
    return True


def park(decider: Decider, slot: SlotFacts) -> None:
    """The held slot stands still now."""
    assert slot.hold is not None
    if not decider.state.holds[slot.hold].parked:
        decider.emit(ev.HoldParked, slot.hold)


def end_hold(decider: Decider, hold: HoldFacts, why: HoldEnd, by: str) -> None:
    """The slot goes on; its delayed step happens at the end of this stimulus."""
    slot = decider.state.slots[hold.slot]
    decider.emit(ev.HoldReleased, hold.hold, hold.slot, why, by, decider.at_ns - hold.since_ns)
    decider.clear_deadline("hold", hold.hold)
    for operation, (blocks, size_bytes) in decider.memory.told_waiting.pop(hold.slot, {}).items():
        decider.emit(ev.OperationStarted, operation, blocks, size_bytes)
    if hold.point is WaitPoint.SCHEDULE and slot.state in _SKIPPED:
        decider.memory.returning[slot.slot] = True
    elif hold.site is Site.CALL_WILL and hold.point is WaitPoint.LOOKUP and hold.parked:
        # The engine asks again; that is the same call, which has stood still long enough.
        decider.memory.announced[slot.slot] = ENTRY_TAGS[MatchRequested]
    if slot.staged and slot.state is SlotState.ONBOARD_STAGED and not slot.end_block:
        decider.set_staging_deadline(slot)


def cancel_hold(decider: Decider, slot: SlotFacts, fate: str) -> None:
    """The request was ``fate``: whatever held it ends."""
    if slot.hold is not None:
        end_hold(decider, decider.state.holds[slot.hold], HoldEnd.CANCELLED, fate)


# --- freeze ---


def freeze(decider: Decider, by: str, max_hold_ns: int) -> None:
    """Everything stands still; a second freeze changes nothing."""
    decider.clear_deadline("run_for", 0)
    if decider.state.frozen is None:
        decider.emit(ev.Frozen, by, max_hold_ns)
        decider.ask(SetDeadline(decider.memory.deadline("freeze", 0), max_hold_ns, Clock.WALL))


def thaw(decider: Decider, why: HoldEnd, by: str) -> bool:
    """End a freeze. False when nothing was frozen."""
    decider.clear_deadline("run_for", 0)
    decider.clear_deadline("freeze", 0)
    frozen: FreezeFacts | None = decider.state.frozen
    if frozen is None:
        return False
    decider.emit(ev.Thawed, why, by, decider.at_ns - frozen.since_ns)
    return True


def pause_engines(decider: Decider) -> None:
    """Ask engines to pause or to go on, if that has changed; at the end of a stimulus."""
    wanted: list[int] = []
    if decider.state.engines_paused:
        wanted = sorted({
            pool.info.source for pool in decider.state.pools if pool.info.authority is Authority.ENGINE
        })
    paused = decider.memory.paused
    for source in wanted:
        if source not in paused:
            decider.ask(PauseEngine(source))
    for source in paused:
        if source not in wanted:
            decider.ask(ResumeEngine(source))
    decider.memory.paused = wanted


# --- pressure (safety rule 7) ---


def felt_pressure(decider: Decider, slot: SlotFacts) -> None:
    """An unheld request was preempted or refused: the second time within the window, the oldest hold goes on.

    Only a request counts that would fit if nothing were held, and does not fit beside the held slots. Any other
    finds its room when requests that are not held end: a full pool has a queue without a debugger, too.
    """
    if slot.hold is not None or not decider.state.holds:
        return
    pool = decider.state.pool_of(Tier.G1, slot.source)
    if pool is None or not _fits_only_without_holds(decider, slot, pool):
        return
    before = decider.memory.pressed.get(slot.slot)
    decider.memory.pressed[slot.slot] = decider.at_ns
    if before is not None and decider.at_ns - before <= PRESSURE_WINDOW_NS:
        decider.memory.pressed.clear()
        oldest = min(
            number for number, hold in decider.state.holds.items()
            if _places_of(decider, decider.state.slots[hold.slot], pool)
        )
        end_hold(decider, decider.state.holds[oldest], HoldEnd.PRESSURE, slot.request)


def _fits_only_without_holds(decider: Decider, slot: SlotFacts, pool: PoolFacts) -> bool:
    """True if the blocks of the request fit into the pool, and not beside those that held slots own."""
    size = decider.block_tokens_of(slot.source)
    needed = -(-slot.sequence_tokens(decider.state.iteration, size) // size)
    owned = _places_held(decider, pool)
    if needed > pool.capacity or needed <= pool.capacity - len(owned):
        return False
    # A held place is shared only if the engine finds it: one that is still being filled, or a further copy, is not.
    shared = owned.intersection(pool.ready_prefix(slot.hashes))
    return needed - len(shared) > pool.capacity - len(owned)
