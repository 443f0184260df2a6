"""One recording inside a merged one: how its numbers and names read there, and its facts beside those of the others.

Two daemons number their slots, copies and places alike and may serve a request of the same name, so every number and
name of a source is translated: pools and slots are numbered anew in the order in which they appear, numbers of
candidates, operations, batches, holds and breakpoints are interleaved, names get the source's in front.

Law of this file: the facts that the translated events fold to are the facts of the sources, side by side
(``side_by_side``); what one source does changes nothing of another.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import Event
from kvbm_console.core.holds import FreezeFacts
from kvbm_console.core.slots import ADVANCING_STATES, SlotFacts
from kvbm_console.core.state import CacheState, Totals
from kvbm_console.core.tiers import FREE, PoolFacts


class Numbers:
    """What the sources share: the next slot and pool, the iterations of all engines."""

    def __init__(self) -> None:
        self.slot = self.pool = self.iteration = 0

    def next_slot(self) -> int:
        """The number of one more slot."""
        self.slot += 1
        return self.slot - 1

    def next_pool(self) -> int:
        """The index of one more pool."""
        self.pool += 1
        return self.pool - 1


class Part:
    """Source ``index`` of ``of``, whose time 0 is ``shift_ns`` of the merged recording's."""

    def __init__(self, index: int, of: int, name: str, shift_ns: int, shared: Numbers) -> None:
        self.index, self.of, self.name, self.shift_ns = index, of, name, shift_ns
        self.shared = shared
        self.state: CacheState | None = None
        """Its own facts; None before its recording begins."""
        self.pools: dict[int, int] = {}
        self.slots: dict[int, int] = {}

    def begin(self, state: CacheState) -> None:
        """Its facts are these from now on; what was live before and is not named any more is gone."""
        self.state = state
        for pool in state.pools:
            if pool.info.pool not in self.pools:
                self.pools[pool.info.pool] = self.shared.next_pool()
        self.slots = {number: self.shared.next_slot() for number in state.slots}

    # --- names ---

    def number(self, own: int) -> int:
        """The number of a candidate, operation, batch, hold or breakpoint."""
        return own * self.of + self.index

    def source(self, own: int) -> int:
        """The index of an engine. The leader's own pools go to its first engine, which nobody else's slots ask."""
        return self.index + 1 if own <= 1 else own * self.of + self.index + 1

    def text(self, own: str) -> str:
        """A request, owner or session."""
        return f"{self.name}/{own}" if own else own

    def spec(self, own: BreakpointSpec) -> BreakpointSpec:
        """A breakpoint with its number, and that of the one it waits for."""
        depends_on = self.number(own.depends_on) if own.depends_on else 0
        return msgspec.structs.replace(own, id=self.number(own.id), depends_on=depends_on)

    def event(self, event: Event, others: "Iterable[Part]") -> Event:
        """The event as it reads in the merged recording, but for ``seq`` and ``cause``; not folded yet."""
        changes: dict[str, Any] = {"at_ns": event.at_ns + self.shift_ns}
        if isinstance(event, ev.PoolKnown):
            if event.pool not in self.pools:  # else it takes over the index of a pool that is forgotten
                self.pools[event.pool] = self.shared.next_pool()
        elif isinstance(event, ev.SlotOpened | ev.SlotCloned):
            self.slots[event.slot] = self.shared.next_slot()
        for field in event.__struct_fields__:
            translate = TRANSLATED.get(field)
            if translate is not None and (value := getattr(event, field)) is not None:
                changes[field] = translate(self, value)
        if isinstance(event, ev.IterationAdvanced):
            changes |= self._iteration(event, others)
        return msgspec.structs.replace(event, **changes)

    def _iteration(self, event: ev.IterationAdvanced, others: "Iterable[Part]") -> dict[str, Any]:
        """An iteration computes a token of every decoding slot by itself: those of other engines are told to stay."""
        assert self.state is not None
        self.shared.iteration += event.iteration - self.state.iteration
        slots, positions = [*map(self.slots.__getitem__, event.slots)], [*event.positions]
        running, waiting = event.running, event.waiting
        for other in others:
            if other is self or other.state is None:
                continue
            running, waiting = running + other.state.running, waiting + other.state.waiting
            for slot in other.state.slots.values():
                if slot.state in ADVANCING_STATES:
                    slots.append(other.slots[slot.slot])
                    positions.append(slot.computed_tokens(other.state.iteration))
        return {
            "iteration": self.shared.iteration, "running": running, "waiting": waiting, "slots": tuple(slots),
            "positions": tuple(positions),
        }

    def fold(self, event: Event) -> None:
        """Its own facts behind one of its own events."""
        assert self.state is not None
        self.state.apply(event)
        if isinstance(event, ev.SlotClosed):
            del self.slots[event.slot]


TRANSLATED: Final[dict[str, Callable[[Part, Any], Any]]] = {
    "pool": lambda part, own: part.pools[own],
    "source_pool": lambda part, own: part.pools[own],
    "target_pool": lambda part, own: part.pools[own],
    "slot": lambda part, own: part.slots[own],
    "parent": lambda part, own: part.slots.get(own),
    "for_slot": lambda part, own: part.slots.get(own),
    "slots": lambda part, own: tuple(part.slots[one] for one in own),
    "candidate": Part.number, "operation": Part.number, "batch": Part.number, "hold": Part.number,
    "breakpoint": Part.number,
    "breakpoints": lambda part, own: tuple(map(part.number, own)),
    "specs": lambda part, own: tuple(map(part.spec, own)),
    "source": Part.source,
    "request": Part.text, "session": Part.text, "owner": Part.text, "by": Part.text,
}
"""Fields of events that name something of their source. A test compares it with all fields that identify."""


# --- facts -----------------------------------------------------------------------------------------------------------


def side_by_side(parts: Sequence[Part], shared: Numbers) -> CacheState:
    """The facts of all sources as one; ``seq`` and ``n`` are the caller's to say."""
    whole = CacheState()
    begun = [(part, part.state) for part in parts if part.state is not None]
    pools: dict[int, PoolFacts] = {}
    slots: dict[int, SlotFacts] = {}
    for part, state in begun:
        pools |= {part.pools[pool.info.pool]: _pool(part, pool) for pool in state.pools}
        slots |= {part.slots[slot.slot]: _slot(part, slot, state, shared.iteration) for slot in state.slots.values()}
        _copies(part, state, whole)
        _debugger(part, state, whole)
        whole.lost_sources |= {part.source(own): times for own, times in state.lost_sources.items()}
        whole.running, whole.waiting = whole.running + state.running, whole.waiting + state.waiting
        whole.draining |= state.draining
        whole.at_ns = max(whole.at_ns, state.at_ns + part.shift_ns)
        whole.totals = _sum(whole.totals, state.totals)
        whole.next_candidate = max(whole.next_candidate, part.number(state.next_candidate))
        whole.next_operation = max(whole.next_operation, part.number(state.next_operation))
        whole.next_hold = max(whole.next_hold, part.number(state.next_hold))
        whole.next_breakpoint = max(whole.next_breakpoint, part.number(state.next_breakpoint))
    whole.pools = [pools[index] for index in sorted(pools)]
    whole.slots = dict(sorted(slots.items()))
    whole.slot_of = {slot.request: slot.slot for slot in whole.slots.values()}
    whole.breakpoints = dict(sorted(whole.breakpoints.items()))
    whole.next_slot, whole.iteration = shared.slot, shared.iteration
    return whole


def _pool(part: Part, own: PoolFacts) -> PoolFacts:
    info = msgspec.structs.replace(own.info, pool=part.pools[own.info.pool], source=part.source(own.info.source))
    pool = PoolFacts(info)
    pool.hash_of, pool.content, pool.refs = own.hash_of[:], own.content[:], own.refs[:]
    shift = part.shift_ns
    pool.stored_at = array("q", (
        at if content == FREE else at + shift for at, content in zip(own.stored_at, own.content, strict=True)
    ))
    pool.by_hash = dict(own.by_hash)
    pool.copies = {key: list(places) for key, places in own.copies.items()}
    pool.quarantined = {place: [*map(part.number, runs)] for place, runs in own.quarantined.items()}
    pool.counts = list(own.counts)
    return pool


def _slot(part: Part, own: SlotFacts, state: CacheState, iteration: int) -> SlotFacts:
    return msgspec.structs.replace(
        own, slot=part.slots[own.slot], request=part.text(own.request), source=part.source(own.source),
        session=part.text(own.session or "") or None, since_ns=own.since_ns + part.shift_ns,
        opened_ns=own.opened_ns + part.shift_ns, hashes=list(own.hashes),
        parent=None if own.parent is None else part.slots.get(own.parent),
        anchor_tokens=own.computed_tokens(state.iteration), anchor_iteration=iteration,
        device_pool=None if own.device_pool is None else part.pools[own.device_pool],
        device_blocks=list(own.device_blocks), staged=[(part.pools[pool], list(ids)) for pool, ids in own.staged],
        outstanding=set(map(part.number, own.outstanding)), hold=None if own.hold is None else part.number(own.hold),
    )


def _copies(part: Part, state: CacheState, whole: CacheState) -> None:
    number, shift = part.number, part.shift_ns

    def at(own: int | None) -> int | None:
        return None if own is None else own + shift

    for own in state.candidates.values():
        whole.candidates[number(own.candidate)] = msgspec.structs.replace(
            own, candidate=number(own.candidate), slot=None if own.slot is None else part.slots.get(own.slot),
            operation=None if own.operation is None else number(own.operation), planned_ns=own.planned_ns + shift,
            enqueued_ns=at(own.enqueued_ns), evaluated_ns=at(own.evaluated_ns), promoted_ns=at(own.promoted_ns),
            started_ns=at(own.started_ns),
        )
    for operation in state.operations.values():
        whole.operations[number(operation.operation)] = msgspec.structs.replace(
            operation, operation=number(operation.operation), candidate=number(operation.candidate),
            batch=number(operation.batch), epoch=0, source_pool=part.pools[operation.source_pool],
            target_pool=part.pools[operation.target_pool], reported=set(operation.reported),
            failed=set(operation.failed),
        )
    whole.batches |= {number(batch): set(map(number, members)) for batch, members in state.batches.items()}
    whole.late |= {number(operation): set(ranks) for operation, ranks in state.late.items()}


def _debugger(part: Part, state: CacheState, whole: CacheState) -> None:
    for own in state.holds.values():
        hold = msgspec.structs.replace(
            own, hold=part.number(own.hold), slot=part.slots[own.slot],
            breakpoints=tuple(map(part.number, own.breakpoints)), owner=part.text(own.owner),
            since_ns=own.since_ns + part.shift_ns,
        )
        whole.holds[hold.hold] = hold
    for known in state.breakpoints.values():
        spec = part.spec(known.spec)
        whole.breakpoints[spec.id] = msgspec.structs.replace(known, spec=spec, owner=part.text(known.owner))
    whole.leases |= {part.text(owner): live for owner, live in state.leases.items()}
    whole.standing |= set(map(part.text, state.standing))
    if state.frozen is not None:
        since_ns = state.frozen.since_ns + part.shift_ns
        if whole.frozen is None or whole.frozen.since_ns <= since_ns:
            whole.frozen = FreezeFacts(part.text(state.frozen.by), since_ns, state.frozen.max_hold_ns)


def _sum(one: Totals, other: Totals) -> Totals:
    """Field by field; lists place by place, dicts key by key."""
    return Totals(*(_added(getattr(one, name), getattr(other, name)) for name in Totals.__struct_fields__))


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, bool):
        return one or other
    if isinstance(one, list):
        return [_added(a, b) for a, b in zip(one, other, strict=True)]
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
    return one + other
