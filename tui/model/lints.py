"""Lints: problems that need a person, found in facts and history, each in one sentence with its explanation.

The lints of the library (``kvbm_console.analysis.lints``) find most of them in the stream. This file adds the problems
that only a session can see: holds, losses, the recorder. It folds all of them and keeps their texts.

Law of this file: a warning appears after two seconds and leaves five seconds after its end, so that nothing flickers.
Holds, freezes and losses appear at once. Held time never counts against a slot.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from kvbm_console.analysis.lints import LINTS, Finding, Level, Lint, current
from kvbm_console.analysis.lives import Transfer
from kvbm_console.analysis.waits import breakpoints_text, way_of
from kvbm_console.core.events import SlotHeld
from kvbm_console.core.slots import SlotFacts
from kvbm_console.stream.feed import why_lost

from .mirror import Mirror
from .numbers import S, count, duration, plain, plural, spoken

SHOW_AFTER_NS: Final = 2 * S
LEAVE_AFTER_NS: Final = 5 * S
LOSS_SHOWN_NS: Final = 300 * S
"""A loss needs attention for five minutes; the status row keeps the count for the whole run."""
LEVELS: Final = {Level.FAULT: "fault", Level.HELD: "hold", Level.CAUTION: "caution"}
MANY: Final = "+"
"""The end of the key of a problem that several requests have."""
LOG: Final = ("9", "the log")
COPIES: Final = ("enter", "show them")
ACTIONS: Final = {"log": LOG, "slots": ("2", "the slots"), "tiers": ("6", "the tiers"), "transfers": COPIES}
"""The action of a finding that is not about one request, by the view of its lint."""
DRAWN: Final[dict[str, type[Lint]]] = {
    name: lint for name, lint in LINTS.items() if lint.on_stream and lint.drawn and lint.level is not Level.NOTE
}
"""Lints of the library whose findings are drawn."""


class SessionLint(msgspec.Struct, frozen=True):
    """A warning about the session itself: its clocks and counts are of the connection, not of the events."""

    name: str
    level: Level
    action: tuple[str, str]
    threshold: str
    bad: str
    do: str


HELD: Final = SessionLint(
    "held", Level.HELD, ("c", "continue now"), "any hold",
    "A breakpoint stopped this request. It keeps its blocks until it goes on; its caller waits.",
    "c continues it. It goes on by itself when its time is over, or when the session that holds it is gone.",
)
ALL_HELD: Final = SessionLint(
    "all_held", Level.CAUTION, ("C", "continue all"), "every request in flight is held",
    "Nothing moves any more: no step of the engine can finish anything.",
    "C continues all, D also mutes the breakpoints. Otherwise the first hold ends by itself.",
)
FROZEN: Final = SessionLint(
    "frozen", Level.CAUTION, ("F", "thaw now"), "the target is frozen",
    "No engine forms an iteration and no copy is evaluated or begins: every request waits.",
    "F thaws it. Otherwise it goes on by itself, at the latest when the longest freeze is over.",
)
LOST: Final = SessionLint(
    "lost", Level.CAUTION, LOG, "any loss within the last 5 minutes",
    "This console did not get some events. Lists are exact again since the snapshot, but stories, rates and the "
    "timeline have a hole, which is drawn.",
    "The reader was too slow or away. Recordings of the daemon have the events if it records.",
)
PART: Final = SessionLint(
    "part", Level.FAULT, LOG, "a part of the daemon ended within the last 5 minutes",
    "A task or thread of the daemon ended by a bug. It is restarted; its work may have a hole.",
    "Report the error in the daemon's log. If it does not run again, restart the daemon.",
)
TROUBLE: Final = SessionLint(
    "trouble", Level.CAUTION, LOG, "a part of the daemon did not work as it should within the last 5 minutes",
    "It runs, but something in its way keeps it from its work. The engine and all other parts go on.",
    "The reason names what is in its way, such as a broker that does not answer. Without that it goes on by itself.",
)
RECORDER: Final = SessionLint(
    "recorder", Level.FAULT, ("8", "the recorder"), "the recorder is degraded",
    "Events are not being kept, so the present cannot be replayed.",
    "Free space on its disk, or point --record elsewhere; it goes on by itself as soon as it can write.",
)
AT_ONCE: Final = ("verdict", *(lint.name for lint in (HELD, ALL_HELD, FROZEN, LOST, PART, TROUBLE, RECORDER)))
"""Warnings that show as soon as they are true."""
TEXTS: Final[dict[str, SessionLint | type[Lint]]] = {
    **{lint.name: lint for lint in (HELD, ALL_HELD, FROZEN, LOST, PART, TROUBLE, RECORDER)}, **DRAWN,
}
"""Every warning that may show, with its threshold, its consequence and the remedy."""


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
    """Time since its end (it then shows in grey); None while it is true."""
    order: int = 0
    """Longest first among equals."""
    seq: int | None = None
    """The event that began the warning; None without such an event."""

    @property
    def lint(self) -> str:
        """The rule that found it: the first word of its kind."""
        return self.kind.partition(" ")[0]


def slot_level(mirror: Mirror, slot: SlotFacts, now_ns: int) -> Level | None:
    """The mark of a slot: held, or the library's level of its stay; None for a healthy slot."""
    if slot.hold is not None:
        return Level.HELD
    return None if mirror.state is None else mirror.stuck.level_of(mirror.state, slot, now_ns)


def copy_level(mirror: Mirror, transfer: Transfer, now_ns: int) -> Level | None:
    """Caution for an open copy that waits, or is on the wire, longer than usual by the library; else None."""
    state, started_ns = mirror.state, transfer.started_ns
    candidate = None if state is None else state.candidates.get(transfer.candidate)
    if state is None or candidate is None:
        return None
    way = way_of(state, candidate)
    if started_ns is None:
        return Level.CAUTION if transfer.age(now_ns) > mirror.pending.limit(way) else None
    return Level.CAUTION if now_ns - started_ns > mirror.slow.limit(way) else None


class Lints:
    """The warnings of one target over time."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, Warning]] = {}
        """Key to (true since, true last, the warning), in local time."""
        self._checked = 0
        """Time of the last check: a warning that was true then is not over before the next check."""

    def check(self, mirror: Mirror, mono_ns: int, *, arrived: bool = False) -> None:
        """Check all warnings again; called a few times a second.

        ``arrived``: another place of a tape was reached. Its warnings are those of then, and show at once.
        """
        self._checked = mono_ns
        if arrived:
            self._seen = {}
        for warning in _all(mirror, mono_ns):
            since = mono_ns - SHOW_AFTER_NS if arrived else mono_ns
            first = self._seen[warning.key][0] if warning.key in self._seen else since
            self._seen[warning.key] = (first, mono_ns, warning)
        self._seen = {
            key: kept for key, kept in self._seen.items() if mono_ns - kept[1] <= LEAVE_AFTER_NS
        }

    def warnings(self, mono_ns: int) -> list[Warning]:
        """The problems to show, worst first, longest first."""
        return fold(self.unfolded(mono_ns))

    def unfolded(self, mono_ns: int) -> list[Warning]:
        """Every warning to show, worst first, longest first."""
        shown: list[Warning] = []
        for first, last, warning in self._seen.values():
            if last - first < SHOW_AFTER_NS and warning.kind not in AT_ONCE:
                continue
            if last < self._checked:
                if warning.kind == "held":
                    continue
                warning = msgspec.structs.replace(warning, ended_ns=mono_ns - last)
            shown.append(warning)
        return sorted(shown, key=_rank)


def tally(warnings: list[Warning]) -> str:
    """The number of warnings of each level, worst first: ``1 fault, 2 cautions``. Warnings that are over do not
    count."""
    levels = [warning.level for warning in warnings if warning.ended_ns is None]
    counts = [plural(levels.count(level), word) for level, word in LEVELS.items() if level in levels]
    return ", ".join(counts) or "nothing"


def fold(warnings: list[Warning]) -> list[Warning]:
    """A warning for each problem, worst first. Requests with the same lint and level are one problem with their number
    and the worst of them. Each hold stays a line of its own, because each waits for a person."""
    groups: dict[tuple[str, Level, bool], list[Warning]] = {}
    for warning in warnings:
        alike = warning.request is not None and warning.kind != "held"
        groups.setdefault(
            (warning.lint if alike else warning.key, warning.level, warning.ended_ns is not None), []
        ).append(warning)
    return sorted(map(_one_of, groups.values()), key=_rank)


def _one_of(alike: list[Warning]) -> Warning:
    worst = min(alike, key=_rank)
    if len(alike) == 1:
        return worst
    over = "" if worst.ended_ns is None else " ended"
    return msgspec.structs.replace(
        worst, key=f"{worst.lint} {worst.level.label}{over}{MANY}", who=plural(len(alike), "request"),
        because=f"worst {worst.who}: {worst.because}", action=("enter", "show them"),
    )


def _rank(warning: Warning) -> tuple[bool, Level, int]:
    return warning.ended_ns is not None, warning.level, -warning.order


def _all(mirror: Mirror, mono_ns: int) -> Iterator[Warning]:
    if mirror.state is None:
        return
    yield from _feed(mirror, mono_ns)
    yield from _holds(mirror, mono_ns)
    now_ns = mirror.now_ns(mono_ns)
    for found in current(mirror.watch.findings(mirror.state, now_ns), now_ns):
        lint = DRAWN.get(found.lint)
        # The slot of a silent copy is stuck, and says so with the rank.
        if lint is not None and not (found.lint == "silent" and found.request is not None):
            yield _of_library(mirror, lint, found)


def _of_library(mirror: Mirror, lint: type[Lint], found: Finding) -> Warning:
    kind = f"stuck {found.what.partition(' ')[0]}" if found.lint == "stuck" else found.lint
    return Warning(
        f"{kind} {found.who}", found.level, _named(mirror, found.who) if lint.of_engine else found.who, found.what,
        found.because, ("enter", "its story") if found.request is not None else ACTIONS[lint.view], found.request,
        kind, order=found.weight, seq=found.seq,
    )


def _of_session(lint: SessionLint, who: str, what: str, because: str, key: str = "") -> Warning:
    return Warning(key or lint.name, lint.level, who, what, because, lint.action, kind=lint.name)


_FORMS: Final = (
    (" ended and was restarted", PART, "restarted"), (" ended", PART, "ended"),
    (" runs as it should again", TROUBLE, "runs again"), ("", TROUBLE, "in trouble"),
)
"""How a daemon begins the sentence about a part (``parts.Parts.warnings``), and what is told then."""


def _of_part(sentence: str, key: str) -> Warning:
    told, _, because = sentence.partition(": ")
    ending, lint, what = next(form for form in _FORMS if told.endswith(form[0]))
    return _of_session(lint, plain(told.removesuffix(ending)), what, plain(because), key)


def _named(mirror: Mirror, who: str) -> str:
    """An engine by the name that its daemon knows, else by its number."""
    told = mirror.sources.told.get(int(who.rpartition(" ")[2]))
    return told.name if told is not None and told.name else who


def _feed(mirror: Mirror, mono_ns: int) -> Iterator[Warning]:
    age = mirror.lost_age_ns(mono_ns)
    if age is not None and age < LOSS_SHOWN_NS:
        gap = mirror.gaps[-1]
        exact = "state is exact again" if gap.end_ns is not None else "waiting for a snapshot"
        yield _of_session(
            LOST, plural(mirror.lost_events, "event"), f"lost {duration(age)} ago", f"{why_lost(gap.reason)}; {exact}"
        )
    beat = mirror.heartbeat
    if beat is not None and beat.recorder == "degraded":
        yield _of_session(
            RECORDER, "recorder", "degraded", f"{count(beat.not_recorded)} events not recorded; look at the disk"
        )
    for at, sentence in enumerate(() if beat is None else beat.warnings):
        yield _of_part(sentence, f"part {at}")
    if mirror.facts.all_held:
        yield _of_session(ALL_HELD, "everything", "held", f"{len(mirror.facts.holds)} slots; nothing else moves")
    frozen = mirror.facts.frozen
    if frozen is not None:
        left = max(0, mirror.frozen_left_ns(mono_ns) or 0)
        by = plain(frozen.by) or "a breakpoint"
        yield _of_session(FROZEN, "everything", "frozen", f"by {by}; goes on by itself in {left // S} s")


def _holds(mirror: Mirror, mono_ns: int) -> Iterator[Warning]:
    state = mirror.facts
    for hold in state.holds.values():
        slot = state.slots[hold.slot]
        left = max(0, mirror.hold_left_ns(hold.hold, mono_ns) or 0)
        because = f"at {breakpoints_text(hold.breakpoints)}; resumes by itself in {left // S} s"
        if not hold.parked:
            because = f"at {breakpoints_text(hold.breakpoints)}; will stop at its next {hold.point.label}"
        age = mirror.hold_age_ns(hold.hold, mono_ns)
        yield Warning(
            f"held {hold.hold}", HELD.level, slot.request, f"held {duration(age)}", because, HELD.action, slot.request,
            HELD.name, order=age, seq=_held_seq(mirror, hold.slot),
        )


def _held_seq(mirror: Mirror, slot: int) -> int | None:
    """The event with which a slot was held."""
    life = mirror.lives.get(slot)
    story = life.story if life is not None else ()
    return next((event.seq for event in reversed(story) if type(event) is SlotHeld), None)


def ended_text(warning: Warning) -> str:
    """``ended 3 s ago``, empty while it is true."""
    return "" if warning.ended_ns is None else f"ended {spoken(warning.ended_ns)} ago"
