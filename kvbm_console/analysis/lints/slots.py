"""Lints about slots: stuck, polled, held, pinned after the end, preempted again and again.

Law of this file: held time never counts against a slot, and the reason is read from facts.
"""

from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from kvbm_console.analysis.lints.lint import EVIDENCE_MAX, Finding, Histogram, Level, Lint, limit_of, plural, spoken
from kvbm_console.analysis.waits import (
    WORKING,
    Standstill,
    breakpoints_text,
    circle,
    daemon_of_slot,
    standstill,
    waits_for,
)
from kvbm_console.core import events as ev
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.ids import SlotState
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import ENTRY_NAMES
from kvbm_console.stream.feed import GapSeen

_S = SlotState
WATCHED: Final = (_S.INITIALIZED, _S.ONBOARD_STAGED, _S.ONBOARDING, _S.PREEMPTED, _S.FINISHING)
"""States in which a slot waits for something else than its turn."""
STUCK_LEAST_NS: Final = 2 * SECOND_NS
FAULT_FACTOR: Final = 4
FAULT_LEAST_NS: Final = 30 * SECOND_NS
"""A stay this many times over its limit is a fault, and at least half a minute."""
POLLED_LEAST: Final = 100
POLLS_KEPT_MAX: Final = 10_000
"""(request, call) pairs counted at once; refusals of further pairs are counted together."""
PREEMPTIONS: Final = 3
PREEMPT_WINDOW_NS: Final = 60 * SECOND_NS
PREEMPT_BLOCKS: Final = 2
"""A request that came this much further between its preemptions makes its way, slowly."""
LEAK_LEAST_NS: Final = 2 * SECOND_NS
DEADLOCK_LEAST_NS: Final = 5 * SECOND_NS
"""A connector that the tap does not know may load for some seconds without a word."""


def fault_after(limit_ns: int) -> int:
    """The age from which a stay is a fault and not only a caution."""
    return max(FAULT_LEAST_NS, FAULT_FACTOR * limit_ns)


class _Stay(msgspec.Struct):
    since_ns: int
    seq: int
    held_ns: int = 0
    held_since_ns: int | None = None

    def age(self, at_ns: int) -> int:
        """Time in the state without holds."""
        held = self.held_ns + (at_ns - self.held_since_ns if self.held_since_ns is not None else 0)
        return at_ns - self.since_ns - held


class Stuck(Lint):
    """A slot that stays in one state for much longer than is usual."""

    name = "stuck"
    threshold = (
        "in one state for more than 4 × p99 of such stays, at least 2 s; 10 s while fewer than 20 were seen"
    )
    bad = "the request neither computes nor ends, and keeps its blocks from others"
    do = (
        "look at what it waits for. A copy without a report points at its worker, blocks at the size of the tier. An "
        "abort or a reset frees what it holds"
    )
    ends = True

    def __init__(self) -> None:
        super().__init__()
        self.usual: dict[tuple[SlotState, int], Histogram] = {}
        """Stays in a state by the slots of one of the ``daemons``."""
        self._stays: dict[int, _Stay] = {}
        self._copies: dict[int, list[int]] = {}
        """Open candidate to the events of its progress."""
        self._worked: dict[int, int] = {}
        """Engine to the last time at which one of its requests worked, was held, or had a copy."""
        self.before = {
            ev.SlotMoved: self._leaves, ev.SlotClosed: self._closes, ev.OperationStarted: self._came_on,
            ev.OperationReported: self._came_on, ev.CandidateEnded: self._copy_over,
            ev.CandidateSkipped: self._copy_over, ev.DeviceBlocksReleased: self._gives_back,
        }
        self.after = {
            ev.CandidatePlanned: self._planned, ev.CandidatePromoted: self._planned,
            ev.SlotMoved: self._enters, ev.SlotOpened: self._opens, ev.SlotCloned: self._opens,
            ev.SlotHeld: self._held, ev.HoldReleased: self._released, ev.Thawed: self._thawed,
        }

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Present slots; a hold that began before the evidence counts from the begin of the state."""
        self._stays = {
            slot.slot: _Stay(
                slot.since_ns, state.seq, 0,
                None if slot.hold is None else max(slot.since_ns, state.holds[slot.hold].since_ns),
            )
            for slot in state.slots.values()
        }

    def _planned(self, e: ev.CandidatePlanned | ev.CandidatePromoted, state: CacheState) -> None:
        self._copies.setdefault(e.candidate, []).append(e.seq)

    def _came_on(self, e: ev.OperationStarted | ev.OperationReported, state: CacheState) -> None:
        operation = state.operations.get(e.operation)
        if operation is not None:
            self._copies.setdefault(operation.candidate, []).append(e.seq)

    def _copy_over(self, e: ev.CandidateEnded | ev.CandidateSkipped, state: CacheState) -> None:
        self._copies.pop(e.candidate, None)
        candidate = state.candidates[e.candidate]
        if candidate.slot is not None and candidate.slot in state.slots:
            self._worked[state.slots[candidate.slot].source] = e.at_ns
        if candidate.operation is not None:
            self._worked[state.pools[state.operations[candidate.operation].source_pool].info.source] = e.at_ns

    def limit(self, state: SlotState, daemon: int) -> int:
        """The limit of a stay in this state, by a slot of one of the ``daemons``."""
        return limit_of(self.usual.get((state, daemon)), STUCK_LEAST_NS)

    def _opens(self, e: ev.SlotOpened | ev.SlotCloned, state: CacheState) -> None:
        self._stays[e.slot] = _Stay(e.at_ns, e.seq)

    def _leaves(self, e: ev.SlotMoved, state: CacheState) -> None:
        self._resolve(state.slots[e.slot].source, e, state)
        if e.old in WORKING:
            self._worked[state.slots[e.slot].source] = e.at_ns
        stay = self._stays.get(e.slot)
        if stay is None or e.old not in WATCHED:
            return
        slot, age = state.slots[e.slot], stay.age(e.at_ns)
        daemon = daemon_of_slot(state, slot)
        if age > self.limit(e.old, daemon):
            self.over(self._finding(state, slot, stay, age, f"it then went on to {e.new.words}", e.at_ns, (e.seq,)))
        self.usual.setdefault((e.old, daemon), Histogram()).add(age)

    def _gives_back(self, e: ev.DeviceBlocksReleased, state: CacheState) -> None:
        self._resolve(state.slots[e.slot].source, e, state)

    def _resolve(self, source: int, e: ev.Event, state: CacheState) -> None:
        """Runs before a slot moves or gives blocks back, and tells a deadlock that ends with this event as over."""
        if e.at_ns - self._worked.get(source, 0) < DEADLOCK_LEAST_NS:
            return
        still = standstill(state, source)
        since_ns = 0 if still is None else self._still_since(still)
        if still is not None and e.at_ns - since_ns >= DEADLOCK_LEAST_NS:
            self.over(msgspec.structs.replace(self._deadlock(still, since_ns, e.at_ns), until_ns=e.at_ns))
            self._worked[source] = e.at_ns

    def _enters(self, e: ev.SlotMoved, state: CacheState) -> None:
        held = state.slots[e.slot].hold is not None
        self._stays[e.slot] = _Stay(e.at_ns, e.seq, 0, e.at_ns if held else None)

    def _closes(self, e: ev.SlotClosed, state: CacheState) -> None:
        self._stays.pop(e.slot, None)

    def _held(self, e: ev.SlotHeld, state: CacheState) -> None:
        stay = self._stays.get(e.slot)
        if stay is not None and stay.held_since_ns is None:
            stay.held_since_ns = e.at_ns

    def _thawed(self, e: ev.Thawed, state: CacheState) -> None:
        for slot in state.slots.values():
            self._worked[slot.source] = e.at_ns

    def _released(self, e: ev.HoldReleased, state: CacheState) -> None:
        self._worked[state.slots[e.slot].source] = e.at_ns
        stay = self._stays.get(e.slot)
        if stay is not None and stay.held_since_ns is not None:
            stay.held_ns += e.at_ns - stay.held_since_ns
            stay.held_since_ns = None

    def level_of(self, state: CacheState, slot: SlotFacts, at_ns: int) -> Level | None:
        """The level of the slot's stay at this time; None while the stay is as usual, or while the slot is held."""
        stay = self._stays.get(slot.slot)
        if stay is None or slot.state not in WATCHED or slot.hold is not None:
            return None
        age, limit = stay.age(at_ns), self.limit(slot.state, daemon_of_slot(state, slot))
        if age <= limit:
            return None
        # A finishing request never goes back, so a report that it waits for is lost.
        return Level.FAULT if slot.state is _S.FINISHING or age > fault_after(limit) else Level.CAUTION

    def now(self, state: CacheState, at_ns: int) -> Iterator[Finding]:
        """Deadlocks, and slots that are stuck now for another reason."""
        explained: set[int] = set()
        for source in sorted({slot.source for slot in state.slots.values()}):
            still = standstill(state, source)
            since_ns = 0 if still is None else self._still_since(still)
            if still is not None and at_ns - since_ns >= DEADLOCK_LEAST_NS:
                explained.update(slot.slot for slot in still.waiting)
                yield self._deadlock(still, since_ns, at_ns)
        for number, stay in self._stays.items():
            slot = state.slots.get(number)
            if slot is not None and number not in explained and self.level_of(state, slot, at_ns) is not None:
                evidence = [seq for copy in sorted(slot.outstanding) for seq in self._copies.get(copy, ())]
                yield self._finding(
                    state, slot, stay, stay.age(at_ns), f"waits for {waits_for(state, slot)}", None,
                    tuple(evidence[:EVIDENCE_MAX]),
                )

    def _still_since(self, still: Standstill) -> int:
        """The time since when no request of this engine has worked although a request waited."""
        first = min(slot.since_ns for slot in still.waiting)
        return max(first, self._worked.get(still.source, 0))

    def _deadlock(self, still: Standstill, since_ns: int, at_ns: int) -> Finding:
        stays = [self._stays[slot.slot].seq for slot in still.waiting if slot.slot in self._stays]
        age = at_ns - since_ns
        return Deadlock.finding(
            f"engine {still.source}", f"deadlock {spoken(age)}", circle(still), seq=stays[0] if stays else 0,
            evidence=stays[1 : EVIDENCE_MAX + 1], since_ns=since_ns, count=len(still.waiting), weight=age,
        )

    def _finding(
        self, state: CacheState, slot: SlotFacts, stay: _Stay, age: int, because: str, until_ns: int | None,
        evidence: tuple[int, ...],
    ) -> Finding:
        never_ends = slot.state is _S.FINISHING and until_ns is None
        fault = never_ends or age > fault_after(self.limit(slot.state, daemon_of_slot(state, slot)))
        return self.finding(
            slot.request, f"{slot.state.words} {spoken(age)}", because, seq=stay.seq,
            level=Level.FAULT if fault else None, evidence=evidence, slot=slot, since_ns=stay.since_ns,
            until_ns=until_ns, weight=age,
        )


class Deadlock(Lint):
    """Engines in which no request can go on. ``Stuck`` tells them, because it then leaves out their requests."""

    name = "deadlock"
    level = Level.FAULT
    threshold = (
        "for 5 s no request of an engine runs and no copy is in flight. The first request of its queue wants more "
        "device blocks than are free"
    )
    bad = "no request can go on any more, because each waits for blocks of another or behind it; nothing ends that"
    do = (
        "abort the request that holds most, or reset the engine. Then give the device tier more blocks or admit fewer "
        "requests, and report the circle to the engine's or connector's project"
    )
    ends = True
    view = "slots"
    of_engine = True


class Polled(Lint):
    """The same refused call, again and again."""

    name = "polled"
    threshold = "the same call of a request refused 100 times or more"
    bad = "the engine asks for something that will not come, for ever, and fills the log with it"
    do = "look at what the request waits for; an engine should ask once and wait to be told"

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[tuple[str, int], list[int]] = {}
        """(request, entry) to [times, first seq, last seq, first at_ns, last at_ns]."""
        self._why: dict[tuple[str, int], str] = {}
        self.after = {ev.StimulusRejected: self._rejected}

    def _rejected(self, e: ev.StimulusRejected, state: CacheState) -> None:
        key = (e.request or "", e.entry)
        if key not in self._calls and len(self._calls) >= POLLS_KEPT_MAX:
            key = ("", e.entry)
        call = self._calls.setdefault(key, [0, e.seq, e.seq, e.at_ns, e.at_ns])
        call[0] += 1
        call[2], call[4] = e.seq, e.at_ns
        self._why[key] = e.why

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """Calls that were refused too often."""
        for (request, entry), (times, first, last, since_ns, until_ns) in self._calls.items():
            if times >= POLLED_LEAST:
                live = state is not None and request in state.slot_of
                yield self.finding(
                    request or "an engine", f"refused {times:,} times",
                    f"{ENTRY_NAMES.get(entry, entry)}: {self._why[request, entry]}",
                    seq=first, evidence=(last,), request=request or None, since_ns=since_ns,
                    until_ns=None if live else until_ns, count=times, weight=times,
                )


class HeldSlots(Lint):
    """Slots that stand still because a person wants it so."""

    name = "held"
    level = Level.HELD
    threshold = "a slot that stands still at a breakpoint"
    bad = "it keeps its blocks while it waits"
    do = "continue it; it goes on by itself when its time is over"
    on_stream = False
    one_by_one = True

    def __init__(self) -> None:
        super().__init__()
        self._seq: dict[int, int] = {}
        self.after = {ev.SlotHeld: self._held}

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Holds that are there already."""
        for number in state.holds:
            self._seq.setdefault(number, state.seq)

    def _held(self, e: ev.SlotHeld, state: CacheState) -> None:
        self._seq[e.hold] = e.seq

    def now(self, state: CacheState, at_ns: int) -> Iterator[Finding]:
        """Holds that last."""
        for number, hold in state.holds.items():
            slot = state.slots[hold.slot]
            age = at_ns - hold.since_ns
            yield self.finding(
                slot.request, f"held {spoken(age)}",
                f"at {breakpoints_text(hold.breakpoints)}; resumes by itself after {spoken(hold.max_hold_ns)}",
                seq=self._seq[number], slot=slot, since_ns=hold.since_ns, weight=age,
            )


class PinLeak(Lint):
    """Places that are kept for a request that is gone. Of a whole recording, ``audited`` finds more of them."""

    name = "pin_leak"
    level = Level.FAULT
    threshold = "a finished request that keeps blocks for 2 s without a copy, or a holder that does not exist"
    bad = "the blocks can never be reused; the tier shrinks until nothing fits"
    do = "keep the recording and report it with 'rec verify': this is a bug"

    def now(self, state: CacheState, at_ns: int) -> Iterator[Finding]:
        """Finishing slots without a copy."""
        for slot in state.slots.values():
            age = at_ns - slot.since_ns
            if slot.state is _S.FINISHING and not slot.outstanding and slot.hold is None and age >= LEAK_LEAST_NS:
                yield self.finding(
                    slot.request, f"finishing {spoken(age)}",
                    f"{plural(len(slot.device_blocks), 'block')} kept, and no copy is left", seq=state.seq - 1,
                    slot=slot, since_ns=slot.since_ns, weight=age,
                )


class PreemptLoop(Lint):
    """A request that loses its blocks again and again."""

    name = "preempt_loop"
    threshold = "a request preempted 3 times within 60 s and hardly further than before, by less than 2 blocks"
    bad = "what it computed is thrown away and computed again; throughput goes into nothing"
    do = "run fewer requests at once, or give the device tier more blocks"

    def __init__(self) -> None:
        super().__init__()
        self._times: dict[int, deque[tuple[int, int, int]]] = {}
        """Slot to (at_ns, seq, computed tokens) of its last preemptions."""
        self._worst: dict[int, Finding] = {}
        self.after = {ev.SlotMoved: self._moved}
        self.before = {ev.SlotClosed: self._closed}

    def _moved(self, e: ev.SlotMoved, state: CacheState) -> None:
        if e.new is not _S.PREEMPTED:
            return
        times = self._times.setdefault(e.slot, deque(maxlen=PREEMPTIONS))
        times.append((e.at_ns, e.seq, e.computed_tokens))
        slot = state.slots[e.slot]
        block_tokens = 1 if slot.device_pool is None else state.pools[slot.device_pool].info.block_tokens
        further = e.computed_tokens - times[0][2]
        if (
            len(times) == PREEMPTIONS and e.at_ns - times[0][0] <= PREEMPT_WINDOW_NS
            and further < PREEMPT_BLOCKS * block_tokens
        ):
            first = self._worst.get(e.slot)
            within = spoken(e.at_ns - times[0][0])
            self._worst[e.slot] = self.finding(
                slot.request, f"preempted {slot.preemptions} times",
                f"{PREEMPTIONS} of them within {within}, {plural(max(0, further), 'token')} further",
                seq=first.seq if first is not None else times[0][1], evidence=(seq for _, seq, _ in times),
                slot=slot, since_ns=first.since_ns if first is not None else times[0][0],
                count=slot.preemptions, weight=slot.preemptions,
            )

    def _closed(self, e: ev.SlotClosed, state: CacheState) -> None:
        self._times.pop(e.slot, None)
        finding = self._worst.pop(e.slot, None)
        if finding is not None:
            self.over(msgspec.structs.replace(finding, until_ns=e.at_ns))

    def now(self, state: CacheState, at_ns: int) -> Iterator[Finding]:
        """Requests that are still in the loop."""
        yield from self._worst.values()
