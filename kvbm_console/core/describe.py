"""One line of text for every event: what logs, stories and ``tail`` show.

Law of this file: the match is total, so a new event kind that is forgotten here is a type error.
"""

from collections.abc import Sequence
from typing import assert_never

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.events import UnknownKind
from kvbm_console.core.holds import ended_text
from kvbm_console.core.ids import MissReason
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import ENTRY_NAMES


def kind(event: ev.Event) -> str:
    """The name of the event's kind, for example ``SlotMoved``."""
    return type(event).__name__


def slots_of(event: ev.Event) -> tuple[int, ...]:
    """The slots that an event names directly."""
    slot = getattr(event, "slot", None)
    if slot is None:
        return tuple(getattr(event, "slots", ()))
    return (slot,)


def slot_of(event: ev.Event, state: CacheState | None = None) -> int | None:
    """The one slot that an event is about, through its candidate or operation if ``state`` still knows them."""
    named = slots_of(event)
    if named:
        return named[0] if len(named) == 1 else None
    if state is None:
        return None
    operation = state.operations.get(getattr(event, "operation", -1))
    number = operation.candidate if operation is not None else getattr(event, "candidate", -1)
    candidate = state.candidates.get(number)
    return None if candidate is None else candidate.slot


def request_of(event: ev.Event, state: CacheState | None = None) -> str | None:
    """The request that an event names, else the request of its slot if ``state`` still knows the slot."""
    request = getattr(event, "request", None)
    if isinstance(request, str):
        return request
    slot = slot_of(event, state)
    facts = state.slots.get(slot) if state is not None and slot is not None else None
    return None if facts is None else facts.request


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count:,} blocks"


def _slots(slots: Sequence[int]) -> str:
    return f"{len(slots):,} {'slot' if len(slots) == 1 else 'slots'}"


def _ids(column: bytes) -> str:
    return _blocks(len(column) // 4)


def _tier(state: CacheState | None, pool: int) -> str:
    return f"pool {pool}" if state is None or pool >= len(state.pools) else state.pools[pool].info.tier.name


def mismatch(event: ev.ContentMismatched) -> str:
    """A worker's finding as one sentence."""
    block = f"block {unpack_hashes(event.hashes)[0]:016x}"[:14]
    if event.stage == "tier":
        return (f"{event.kind} {block[6:]} from tier {event.writer}: load {event.copy} filled host place {event.below} "
                f"with bytes of sum {event.edge}, and they were stored with {event.taken}")
    where = (
        f"at the end of store {event.copy} host slot {event.below} does not hold" if event.stage == "copy"
        else f"load {event.copy} from host slot {event.below} handed place {event.place} to the model without"
    )
    return (f"{event.kind} of {block} on rank {event.rank}: {where} what {event.taken}; "
            f"last writer: {event.writer}; missing edge: {event.edge}")


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)


def describe(event: ev.Event, state: CacheState | None = None) -> str:
    """One line without seq, time and slot; ``state`` turns pool numbers into tiers.

    >>> describe(ev.CandidateEnqueued(0, 0, 0, 7))
    'candidate 7'
    """
    if isinstance(event, UnknownKind):
        return f"kind {event.kind} of a newer version"
    return _describe(event, state)  # type: ignore[arg-type]


def _describe(event: ev.AnyEvent, state: CacheState | None) -> str:
    match event:
        case ev.PoolKnown():
            size = "unknown size" if event.capacity_blocks is None else _blocks(event.capacity_blocks)
            window = f", a window of {event.window:,} tokens" if event.window else ""
            return (
                f"{event.tier.name} {event.medium}, {size} of {event.block_tokens} tokens{window}, "
                f"{event.authority.words}"
            )
        case ev.SlotOpened():
            half = f", sends as {event.sends}" if event.sends is not None else ""
            half += f", receives {event.receives}" if event.receives is not None else ""
            return f"{event.request}, {event.prompt_tokens:,} prompt tokens, {_blocks(len(event.hashes) // 8)}{half}"
        case ev.SlotMoved():
            entry = ENTRY_NAMES.get(event.entry, str(event.entry))
            extra = f", {event.detail:,} tokens" if event.detail else ""
            why = f", {event.reason.words}" if event.reason is not None else ""
            return f"{event.old.words} → {event.new.words}{extra}{why}, by {entry}"
        case ev.SlotClosed():
            return "left the facts"
        case ev.SlotCloned():
            return f"{event.request}, clone of slot {event.parent}, {_ids(event.ids)}"
        case ev.LookupAnswered():
            found = ", ".join(f"G{at + 2} {count}" for at, count in enumerate(event.matched) if count)
            miss = "" if event.why is MissReason.NONE else f", then {event.why.words}"
            answer = "ask again" if event.answer is None else f"{event.answer:,} tokens"
            return f"G1 {event.local_blocks}{', ' + found if found else ''}{miss}: {answer}"
        case ev.BlocksStaged():
            return f"{_tier(state, event.pool)} {_ids(event.ids)}"
        case ev.StagingReleased():
            return event.why.words
        case ev.DeviceBlocksAssigned():
            reused = f", {event.reused} reused" if event.reused else ""
            external = f", {event.external_tokens:,} tokens to load" if event.external_tokens else ""
            passed = f", {event.passed_blocks:,} before the window" if event.passed_blocks else ""
            return f"{_tier(state, event.pool)} {_ids(event.ids)} to {_slots(event.slots)}{reused}{external}{passed}"
        case ev.DeviceBlocksReleased():
            return f"{_ids(event.ids)}, {event.why.words}"
        case ev.DeviceBlocksReplaced():
            return f"{_ids(event.ids)} from block {event.first} on, instead of its own copies"
        case ev.BlocksFilled():
            return f"{_tier(state, event.pool)} {_ids(event.ids)} of {_slots(event.slots)}"
        case ev.BlocksEvicted():
            wanted = "" if event.for_slot is None else f" for slot {event.for_slot}"
            return f"{_tier(state, event.pool)} {_ids(event.ids)}{wanted}, {event.rule.words}"
        case ev.BlocksReserved() | ev.BlocksReady():
            writer = {ev.TOLD: "told", ev.RESTORED: "from before the start"}.get(event.operation)
            return f"{_tier(state, event.pool)} {_ids(event.ids)}, {writer or f'op {event.operation}'}"
        case ev.BlocksDropped():
            return f"{_tier(state, event.pool)} {_ids(event.ids)}, op {event.operation}, {event.why.words}"
        case ev.CandidatePlanned():
            whose = f" of {event.request}" if event.request else ""
            return f"candidate {event.candidate} {event.route.words}, {_blocks(len(event.hashes) // 8)}{whose}"
        case ev.CandidateEnqueued():
            return f"candidate {event.candidate}"
        case ev.CandidateEvaluated():
            left = "" if event.filtered is None else f", others {event.filtered.words}"
            return f"candidate {event.candidate}, {_blocks(event.found)} to move{left}"
        case ev.CandidateSkipped():
            return f"candidate {event.candidate}, {event.reason.words}"
        case ev.CandidatePromoted():
            return f"candidate {event.candidate} is op {event.operation}, {_ids(event.targets)}"
        case ev.OperationStarted():
            size = "" if event.size_bytes is None else f", {event.size_bytes:,} bytes"
            return f"op {event.operation}" + (f", {_blocks(event.blocks)}{size}" if event.blocks else "")
        case ev.OperationReported():
            return f"op {event.operation} rank {event.rank}, {'ok' if event.ok else 'failed: ' + event.error}"
        case ev.CandidateEnded():
            return f"candidate {event.candidate}, {event.status.words}"
        case ev.BatchEnded():
            return f"batch {event.batch}"
        case ev.IterationAdvanced():
            return f"iteration {event.iteration:,}, {event.running} running, {event.waiting} waiting"
        case ev.PrefixScored():
            found = ", ".join(f"G{at + 1} {count}" for at, count in enumerate(event.hits) if count) or "no hit"
            return f"{found} of {_blocks(event.prompt_blocks)}{', after a preemption' if event.readmitted else ''}"
        case ev.HitsLost():
            return f"{event.tier.name} {_blocks(event.blocks)}, back to token {event.position:,}"
        case ev.BreakpointsChanged():
            return f"{event.owner} has {len(event.specs)}" + (f", by {event.by}" if event.by else "")
        case ev.BreakpointHit():
            says = f": {event.message}" if event.message else ""
            return f"breakpoint {_numbers(event.breakpoints)} at {event.site.words}, {event.action.words}{says}"
        case ev.SlotHeld():
            who = f"breakpoint {_numbers(event.breakpoints)}" if event.breakpoints else event.owner
            return f"hold {event.hold} by {who} at {event.site.words}, waits at {event.point.words}"
        case ev.HoldParked():
            return f"hold {event.hold} stands still"
        case ev.HoldReleased():
            reason = ended_text(event.why, event.by)
            return f"hold {event.hold} ended after {event.held_ns / 1e6:.1f} ms: {reason}"
        case ev.HoldDenied():
            return f"at {event.site.words}: {event.why}"
        case ev.LeaseChanged():
            return f"{event.owner} {'lost' if not event.live else 'back' if event.back else 'granted'}"
        case ev.ResetBegun():
            return event.mode.words + (f" by {event.by}" if event.by else "")
        case ev.ResetDone():
            return f"{event.mode.words}, epoch {event.epoch}"
        case ev.DrainBegun():
            return f"for {event.deadline_ns / 1e9:g} s" + (f" by {event.by}" if event.by else "")
        case ev.StimulusRejected():
            return f"{ENTRY_NAMES.get(event.entry, str(event.entry))}: {event.why}"
        case ev.CompletionRefused():
            return f"op {event.operation} of epoch {event.epoch}: {event.why}"
        case ev.InvariantViolated():
            return f"{event.rule}: {event.detail}"
        case ev.BlocksSeen():
            cleared = "cleared, " if event.cleared else ""
            earlier = event.age_ns is not None and event.age_ns >= 10**9
            return (
                f"{_tier(state, event.pool)} {cleared}{_blocks(len(event.stored) // 8)} stored, "
                f"{len(event.removed) // 8} removed"
                + (f", {(event.age_ns or 0) / 1e9:,.0f} s earlier" if earlier else "")
            )
        case ev.SourceLost():
            if event.gone:
                return f"source {event.source} ended"
            return f"source {event.source} {'restarted' if event.restarted else f'lost {event.first} to {event.last}'}"
        case ev.Noted():
            return f"{event.note.words}: {event.detail}" if event.detail else event.note.words
        case ev.BlocksQuarantined():
            return f"{_tier(state, event.pool)} {_ids(event.ids)} under op {event.operation}"
        case ev.BreakpointStopped():
            return f"breakpoint {event.breakpoint} {event.why.words}: {event.message}"
        case ev.SlotCaptured():
            return f"at {event.site.words}, {len(event.names)} values by breakpoint {_numbers(event.breakpoints)}"
        case ev.Frozen():
            return f"by {event.by}, for at most {event.max_hold_ns / 1e9:g} s"
        case ev.Thawed():
            return f"{event.why.words}{' by ' + event.by if event.by else ''} after {event.held_ns / 1e6:.1f} ms"
        case ev.PrefetchLimited():
            share = f"{event.used} of {event.judged} fetched blocks were used"
            return f"prefetch {'is limited to probes' if event.limited else 'is free again'}, {share}"
        case ev.ContentMismatched():
            return mismatch(event)
        case ev.EngineMeasured():
            values = zip(event.measures, event.values, strict=True)
            told = ", ".join(f"{measure.words} {value:,}" for measure, value in values)
            return f"source {event.source}: {told or 'its metrics cannot be read'}"
        case ev.ConnectorMeasured():
            longest = max(zip(event.longest_ns, event.methods, strict=True), default=None)
            at_most = "" if longest is None else f", longest {longest[1]} {longest[0] / 1e6:.1f} ms"
            return f"source {event.source}, {sum(event.calls):,} calls of connectors{at_most}"
        case ev.CallBlocked():
            return f"{event.connector}.{event.method} blocked the engine for {event.took_ns / 1e6:.1f} ms"
        case ev.AuditDiffered():
            return f"{_tier(state, event.pool)} differs from the engine's own pool: {event.detail}"
        case _:
            assert_never(event)
