"""Lints: what needs a person, found in facts and history and told in one sentence each.

Law of this file: a warning shows after two seconds of truth and leaves five seconds after it ended, so that nothing
flickers (a hold and a loss show at once); equal ones fold; held time never counts against a slot.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Final

import msgspec

from kvbm_console.core.events import SlotHeld
from kvbm_console.core.ids import Condition, SlotState, Tier
from kvbm_console.core.slots import SlotFacts

from .flows import LIMIT_SAMPLES
from .lint_more import library_findings
from .mirror import Mirror
from .numbers import S, count, duration, plural, spoken
from .series import percentile
from .waits import available, breakpoints_text, ranks_text, silent_ranks, waits_for

SHOW_AFTER_NS: Final = 2 * S
LEAVE_AFTER_NS: Final = 5 * S
LOSS_SHOWN_NS: Final = 300 * S
"""A loss needs attention for five minutes; the status row keeps the count for the whole run."""
STUCK_MIN_NS: Final = 2 * S
"""No state counts as stuck before this, however fast it usually is."""
STUCK_UNKNOWN_NS: Final = 10 * S
"""The limit while too few stays were seen to know what is usual, and the least for requests that wait their turn."""
FAULT_FACTOR: Final = 4
"""A stay this many times over its limit is a fault, and at least half a minute."""
FAULT_MIN_NS: Final = 30 * S
THRASH_SHARE: Final = 10
"""Percent of loaded blocks that may come back too soon."""
THRASH_MIN_BLOCKS: Final = 100
FOLDED_BY_REQUEST: Final = ("preempt_loop", "polled")
FOLD_FROM: Final = 3
"""So many equal warnings make one line."""
WATCHED: Final = (
    SlotState.INITIALIZED, SlotState.ONBOARD_STAGED, SlotState.ONBOARDING, SlotState.PREEMPTED, SlotState.FINISHING,
)
"""States in which a slot waits for something else than its turn."""


class Level(IntEnum):
    """How bad: a fault, a slot somebody holds, a caution."""

    FAULT = 0
    HELD = 1
    CAUTION = 2


class Warning(msgspec.Struct, frozen=True):
    """``who  what  because``; ``action`` is (key, word)."""

    key: str
    level: Level
    who: str
    what: str
    because: str
    action: tuple[str, str]
    request: str | None = None
    kind: str = ""
    ended_ns: int | None = None
    """Since when it is over (it then shows in grey); None while it is true."""
    order: int = 0
    """Longest first among equals."""
    seq: int | None = None
    """The event since which it is so, where one event says it."""

    @property
    def lint(self) -> str:
        """The rule that found it: the first word of its kind."""
        return self.kind.partition(" ")[0]


def state_limit(mirror: Mirror, state: SlotState, now_ns: int) -> int:
    """Above this a stay in ``state`` is too long: four times its p99 of the last minute."""
    times = mirror.times_in[state].window(now_ns)
    if len(times) < LIMIT_SAMPLES:
        return STUCK_UNKNOWN_NS
    least = STUCK_UNKNOWN_NS if state is SlotState.INITIALIZED else STUCK_MIN_NS
    return max(least, 4 * (percentile(times, 0.99) or 0))


def slot_level(mirror: Mirror, slot: SlotFacts, now_ns: int, limits: dict[SlotState, int]) -> Level | None:
    """The mark of one slot, from its state and age; None when nothing is wrong with it."""
    if slot.hold is not None:
        return Level.HELD
    if slot.state not in limits:
        return None
    life = mirror.lives.get(slot.slot)
    age = now_ns - slot.since_ns - (life.held_ns(slot.since_ns, now_ns) if life is not None else 0)
    limit = limits[slot.state]
    if age <= limit:
        return None
    return Level.FAULT if age > max(FAULT_MIN_NS, FAULT_FACTOR * limit) else Level.CAUTION


class Lints:
    """The warnings of one target over time."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, Warning]] = {}
        """Key to (true since, true last, the warning), in local time."""

    def check(self, mirror: Mirror, mono_ns: int) -> None:
        """Look at everything again; called a few times a second."""
        for warning in _all(mirror, mono_ns):
            first = self._seen[warning.key][0] if warning.key in self._seen else mono_ns
            self._seen[warning.key] = (first, mono_ns, warning)
        self._seen = {
            key: kept for key, kept in self._seen.items() if mono_ns - kept[1] <= LEAVE_AFTER_NS
        }

    def warnings(self, mono_ns: int) -> list[Warning]:
        """Those to show, worst first, longest first, equal ones folded."""
        return _fold(self.unfolded(mono_ns))

    def unfolded(self, mono_ns: int) -> list[Warning]:
        """Those to show one by one, worst first, longest first."""
        shown: list[Warning] = []
        for first, last, warning in self._seen.values():
            if last - first < SHOW_AFTER_NS and warning.kind not in ("held", "lost", "recorder", "all_held"):
                continue
            if mono_ns > last:
                if warning.kind == "held":
                    continue
                warning = msgspec.structs.replace(warning, ended_ns=mono_ns - last)
            shown.append(warning)
        return sorted(shown, key=lambda w: (w.ended_ns is not None, w.level, -w.order))


def _fold(warnings: list[Warning]) -> list[Warning]:
    groups: dict[tuple[str, Level, bool], list[Warning]] = {}
    for warning in warnings:
        groups.setdefault((warning.kind, warning.level, warning.ended_ns is not None), []).append(warning)
    result: list[Warning] = []
    for (kind, _, _), members in groups.items():
        worst = members[0]
        if len(members) >= FOLD_FROM and kind in FOLDED_BY_REQUEST:
            result.append(msgspec.structs.replace(
                worst, key=f"{worst.key}+", who=plural(len(members), "request"),
                because=f"worst {worst.who}: {worst.because}", action=("enter", "show them"),
            ))
            continue
        if len(members) < FOLD_FROM or not kind.startswith("stuck"):
            result.extend(members)
            continue
        state = kind.partition(" ")[2]
        result.append(msgspec.structs.replace(
            worst, key=f"{worst.key}+", who=plural(len(members), "request"), what=worst.what,
            because=f"longest {worst.who}; all in {state}", action=("enter", "show them"),
        ))
    return sorted(result, key=lambda w: (w.ended_ns is not None, w.level, -w.order))


def _all(mirror: Mirror, mono_ns: int) -> Iterator[Warning]:
    if mirror.state is None:
        return
    yield from _feed(mirror, mono_ns)
    now = mirror.now_ns(mono_ns)
    yield from _slots(mirror, mono_ns, now)
    yield from _routes(mirror, now)
    yield from _pools(mirror, now)
    for found in library_findings(mirror, now):
        yield Warning(
            f"{found.lint} {found.who}", Level(found.level), found.who, found.what, found.because,
            ("enter", "its story") if found.request is not None else ("9", "the log"), found.request, found.lint,
            order=found.weight, seq=found.seq,
        )


def _feed(mirror: Mirror, mono_ns: int) -> Iterator[Warning]:
    age = mirror.lost_age_ns(mono_ns)
    if age is not None and age < LOSS_SHOWN_NS:
        gap = mirror.gaps[-1]
        exact = "state is exact again" if gap.end_ns is not None else "waiting for a snapshot"
        yield Warning("lost", Level.CAUTION, plural(mirror.lost_events, "event"), f"lost {duration(age)} ago",
                      f"{gap.reason}; {exact}", ("9", "the log"), kind="lost")
    beat = mirror.heartbeat
    if beat is not None and beat.recorder == "degraded":
        yield Warning("recorder", Level.FAULT, "recorder", "degraded",
                      f"{count(beat.not_recorded)} events not recorded; look at the disk", ("8", "the recorder"),
                      kind="recorder")
    assert mirror.state is not None
    if mirror.state.totals.violations:
        number = mirror.state.totals.violations
        yield Warning("violations", Level.FAULT, "leader", plural(number, "broken invariant"),
                      "a stimulus was refused, the facts are unchanged", ("9", "the log"), kind="violations")
    if mirror.state.all_held:
        yield Warning("all_held", Level.CAUTION, "everything", "held",
                      f"{len(mirror.state.holds)} slots; nothing else moves", ("C", "continue all"), kind="all_held")


def _slots(mirror: Mirror, mono_ns: int, now: int) -> Iterator[Warning]:
    state = mirror.state
    assert state is not None
    for hold in state.holds.values():
        slot = state.slots[hold.slot]
        left = max(0, mirror.hold_left_ns(hold.hold, mono_ns) or 0)
        because = f"at {breakpoints_text(hold.breakpoints)}; resumes by itself in {left // S} s"
        if not hold.parked:
            because = f"at {breakpoints_text(hold.breakpoints)}; will stop at its next {hold.point.label}"
        age = mirror.hold_age_ns(hold.hold, mono_ns)
        yield Warning(f"held {hold.hold}", Level.HELD, slot.request, f"held {duration(age)}", because,
                      ("c", "continue now"), slot.request, "held", order=age, seq=_held_seq(mirror, hold.slot))
    limits = {watched: state_limit(mirror, watched, now) for watched in WATCHED}
    for slot in state.slots.values():
        level = slot_level(mirror, slot, now, limits)
        if level is None or level is Level.HELD:
            continue
        age = now - slot.since_ns
        yield Warning(
            f"stuck {slot.slot} {slot.state}", level, slot.request, f"{slot.state.label} {duration(age)}",
            _why_stuck(mirror, slot, mono_ns), ("enter", "its story"), slot.request, f"stuck {slot.state.label}",
            order=age, seq=_move_seq(mirror, slot.slot),
        )


def _move_seq(mirror: Mirror, slot: int) -> int | None:
    """The event with which a slot entered its state."""
    life = mirror.lives.get(slot)
    return life.moves[-1].seq if life is not None and life.moves else None


def _held_seq(mirror: Mirror, slot: int) -> int | None:
    """The event with which a slot was held."""
    life = mirror.lives.get(slot)
    story = life.story if life is not None else ()
    return next((event.seq for event in reversed(story) if type(event) is SlotHeld), None)


def _why_stuck(mirror: Mirror, slot: SlotFacts, mono_ns: int) -> str:
    state = mirror.state
    assert state is not None
    for number in sorted(slot.outstanding):
        transfer = mirror.transfers.get(number)
        if transfer is not None and transfer.operation in state.operations:
            silent = silent_ranks(mirror, state.operations[transfer.operation])
            if silent:
                return f"op {transfer.operation} has no report from {ranks_text(silent)}"
    return "waits for " + waits_for(mirror, slot, mono_ns)


def _routes(mirror: Mirror, now: int) -> Iterator[Warning]:
    for route, flow in mirror.flows.routes.items():
        limit = flow.limit(now)
        if limit is None:
            continue
        here = [transfer for transfer in mirror.transfers.values() if transfer.route is route]
        slow = [transfer for transfer in here if transfer.age(now) > limit]
        if slow:
            queued = sum(transfer.started_ns is None for transfer in here)
            arrow = "↑" if route.is_load else "↓"
            yield Warning(
                f"slow {route.label}", Level.CAUTION, f"{arrow} {route.label.replace('>', '→')}",
                plural(len(slow), "slow transfer"), f"older than 4 × p99, {queued} queued", ("enter", "show them"),
                kind="slow", order=len(slow),
            )


def _pools(mirror: Mirror, now: int) -> Iterator[Warning]:
    assert mirror.state is not None
    for pool in mirror.state.pools:
        tier = pool.info.tier
        if pool.info.capacity_blocks and available(pool) == 0:
            yield Warning(f"full {pool.info.pool}", Level.CAUTION, tier.name, "full",
                          f"{count(pool.counts[Condition.REFERENCED])} referenced, nothing to evict; lower the batch",
                          ("6", "the tiers"), kind="full")
    for tier in (Tier.G2, Tier.G3, Tier.G4):
        loaded = int(mirror.flows.loaded[tier].total(60, now))
        back = int(mirror.flows.thrash[tier].total(60, now))
        if loaded >= THRASH_MIN_BLOCKS and back * 100 > THRASH_SHARE * loaded:
            yield Warning(f"thrash {tier.name}", Level.CAUTION, tier.name, f"thrash {back * 100 // loaded} %",
                          f"of {count(loaded)} blocks loaded; too small for this reuse", ("6", "the tiers"),
                          kind="thrash")


def ended_text(warning: Warning) -> str:
    """``ended 3 s ago``, empty while it is true."""
    return "" if warning.ended_ns is None else f"ended {spoken(warning.ended_ns)} ago"
