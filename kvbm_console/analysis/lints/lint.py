"""The base of all lints, and the findings that they tell.

A lint is one class: a visitor of events, with its name, its texts and its place in the console as attributes. Defining
the class registers it in ``LINTS``, from which ``doctor``, the console and the metrics take all that they tell of it.

Law of this file: a finding names its evidence by number, and a lint keeps a bounded number of findings that are over.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, ClassVar, Final, Literal

import msgspec

from kvbm_console.analysis.visitor import Handler, Visitor, merged
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.events import Event
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen

EVIDENCE_MAX: Final = 8
"""Event numbers per finding; ``count`` is the number of all occurrences."""
PAST_MAX: Final = 200
"""Past findings kept per lint: more than a person reads."""
MINUTE_NS: Final = 60 * SECOND_NS
"""A problem that was seen in the last minute goes on."""
OVER_SHOWN_NS: Final = 60 * SECOND_NS
"""A finding that is over is shown this long; the log keeps it."""


class Level(IntEnum):
    """The severity. A note is worth knowing and does not make the diagnosis a bad one."""

    FAULT = 0
    HELD = 1
    CAUTION = 2
    NOTE = 3

    @property
    def label(self) -> str:
        """The level's name as people read it."""
        return self.name.lower()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem that needs a person. Times are the engine's; ``until_ns`` is None while the problem lasts."""

    lint: str
    level: Level
    who: str
    what: str
    because: str
    seq: int
    """The event with which it begins, or which shows it best."""
    evidence: tuple[int, ...] = ()
    """Further events, at most ``EVIDENCE_MAX``."""
    request: str | None = None
    slot: str | None = None
    since_ns: int = 0
    until_ns: int | None = None
    count: int = 1
    weight: int = 0
    """Longest or largest first among equals."""


class Lint(Visitor):
    """Base of all lints. Raises ``TypeError`` for a subclass without its name or a text, or with a name that is taken.

    ``findings`` is asked for everything; most lints only tell ``now`` or put what is ``over`` aside.
    """

    name: ClassVar[str]
    """The stable key, which JSON carries."""
    level: ClassVar[Level] = Level.CAUTION
    """The level of its findings, unless a finding sets its own."""
    threshold: ClassVar[str]
    """The limit above which it speaks."""
    bad: ClassVar[str]
    """The reason why its findings are bad."""
    do: ClassVar[str]
    """The remedy."""
    on_stream: ClassVar[bool] = True
    """False for a lint that needs a whole recording, or a client that knows its own connection."""
    drawn: ClassVar[bool] = True
    """False where the console knows better by itself: its heartbeat tells the state of the recorder."""
    ends: ClassVar[bool] = False
    """True if the lint reports the end of a problem; the console then greys the finding."""
    whole_run: ClassVar[bool] = False
    """True if the lint judges a share of all events so far; the finding stays as long as the share is exceeded."""
    view: ClassVar[Literal["log", "slots", "tiers", "transfers"]] = "log"
    """The console's view of a finding that is not about one request."""
    of_engine: ClassVar[bool] = False
    """True if ``who`` is an engine, which the console then names as its daemon does."""
    one_by_one: ClassVar[bool] = False
    """True if the console lists each finding, because each waits for a person; else it folds those of all requests."""

    def __init_subclass__(cls) -> None:
        for attribute in ("name", "threshold", "bad", "do"):
            if not vars(cls).get(attribute):
                raise TypeError(f"lint {cls.__name__} has no {attribute}")
        if cls.name in LINTS:
            raise TypeError(f"lint {cls.__name__} has the name of {LINTS[cls.name].__name__}: {cls.name}")
        LINTS[cls.name] = cls

    def __init__(self) -> None:
        super().__init__()
        self.past: list[Finding] = []

    @classmethod
    def finding(
        cls, who: str, what: str, because: str, *, seq: int, level: Level | None = None, evidence: Iterable[int] = (),
        slot: SlotFacts | None = None, request: str | None = None, since_ns: int = 0, until_ns: int | None = None,
        count: int = 1, weight: int = 0,
    ) -> Finding:
        """A finding of this lint; ``slot`` gives the request, too."""
        return Finding(
            lint=cls.name, level=cls.level if level is None else level, who=who, what=what, because=because, seq=seq,
            evidence=tuple(evidence), request=request if slot is None else slot.request,
            slot=None if slot is None else str(slot.slot), since_ns=since_ns, until_ns=until_ns, count=count,
            weight=weight,
        )

    def over(self, finding: Finding) -> None:
        """Keep a finding about a problem that has ended."""
        if len(self.past) < PAST_MAX:
            self.past.append(finding)

    def now(self, state: CacheState, at_ns: int) -> Iterator[Finding]:
        """The problems of these facts at this time."""
        yield from ()

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """Problems of the past and of now; ``state`` is None where the evidence ends in a gap."""
        yield from self.past
        if state is not None:
            yield from self.now(state, at_ns)


LINTS: Final[dict[str, type[Lint]]] = {}
"""Every lint by its name. ``kvbm_console.analysis.lints`` imports all files that define lints."""


class LintFold:
    """Folds a stream of events and shows it to lints and ``more`` visitors, so that each sees the facts before and
    after in the same order.

    ``walk`` does the same with whole evidence, but needs the file layer.
    """

    def __init__(self, lints: list[Lint], more: Sequence[Visitor] = ()) -> None:
        self.lints = lints
        self._all: list[Visitor] = [*lints, *more]
        self._before: dict[type[Event], list[Handler]] = merged(visitor.before for visitor in self._all)
        self._after: dict[type[Event], list[Handler]] = merged(visitor.after for visitor in self._all)

    def resumed(self, state: CacheState, gap: GapSeen | None = None) -> None:
        """The facts are known from here on, behind ``gap`` unless that is None."""
        for visitor in self._all:
            visitor.resumed(state, gap)

    def apply(self, state: CacheState, event: Event) -> None:
        """``state.apply(event)``, shown to the lints. Raises ``FoldError`` as that does."""
        kind: type[Any] = type(event)
        for handler in self._before.get(kind, ()):
            handler(event, state)
        state.apply(event)
        for handler in self._after.get(kind, ()):
            handler(event, state)

    def findings(self, state: CacheState | None, at_ns: int) -> list[Finding]:
        """All findings so far and of now; unranked."""
        return [finding for lint in self.lints for finding in lint.findings(state, at_ns)]


def current(findings: Iterable[Finding], now_ns: int) -> Iterator[Finding]:
    """The findings of a watched stream that need a person now. Notes are left out. A finding that is over leaves after
    a minute, or at once where its lint says when."""
    for finding in findings:
        lint = LINTS[finding.lint]
        over = finding.until_ns is not None and not lint.whole_run
        shown_ns = 0 if lint.ends else OVER_SHOWN_NS
        if finding.level is not Level.NOTE and not (over and now_ns - (finding.until_ns or 0) > shown_ns):
            yield finding


class MinuteShare:
    """A part of a whole in the last minute, by the second.

    >>> share = MinuteShare()
    >>> share.add(0, 100, 0); share.add(1, 0, 30); share.add(61 * SECOND_NS, 50, 1)
    >>> (share.part, share.whole, share.percent), share.above(1, of=50), share.above(2, of=50)
    ((1, 50, 2), True, False)
    """

    __slots__ = ("_seconds", "part", "whole")

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()
        """(first time, whole, part) of each second in which something was counted; at most 61."""
        self.whole = 0
        self.part = 0

    def add(self, at_ns: int, whole: int, part: int) -> None:
        """Count at this time, and forget the seconds that are older than a minute."""
        self.whole += whole
        self.part += part
        if self._seconds and at_ns - self._seconds[-1][0] < SECOND_NS:
            self._seconds[-1][1] += whole
            self._seconds[-1][2] += part
        else:
            self._seconds.append([at_ns, whole, part])
        while self._seconds[0][0] <= at_ns - MINUTE_NS:
            _, gone, of_part = self._seconds.popleft()
            self.whole -= gone
            self.part -= of_part

    @property
    def since_ns(self) -> int:
        """The time of the first count that is not forgotten."""
        return self._seconds[0][0]

    @property
    def percent(self) -> int:
        """The share, rounded down; ``whole`` must not be 0."""
        return 100 * self.part // self.whole

    def above(self, percent: int, *, of: int) -> bool:
        """True if the whole is ``of`` or more, and the part more than this share of it."""
        return self.whole >= of and 100 * self.part > percent * self.whole

    def fresh(self, at_ns: int) -> bool:
        """True if something was counted in the last minute."""
        return at_ns - self._seconds[-1][0] < MINUTE_NS


class Histogram:
    """Durations by size, eight steps to the octave, so that a percentile is at most 9 % too high.

    >>> stays = Histogram()
    >>> for ms in range(1, 101): stays.add(ms * 1_000_000)
    >>> 99e6 <= stays.p99() <= 99e6 * 1.09
    True
    """

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self.count = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: int) -> None:
        """One more duration in nanoseconds."""
        bucket = _bucket(value)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1

    def p99(self) -> int:
        """Not less than 99 % of the durations; 0 when there are none."""
        rank = -(-99 * self.count // 100)
        count = 0
        for bucket in sorted(self._buckets):
            count += self._buckets[bucket]
            if count >= rank:
                return _top(bucket)
        return 0


STEPS: Final = 8
FEW: Final = 20
"""Fewer durations give no usual value, because a p99 of five samples is their maximum."""
UNKNOWN_LIMIT_NS: Final = 10 * SECOND_NS


def _bucket(value: int) -> int:
    if value < STEPS:
        return max(0, value)
    shift = value.bit_length() - 4
    return STEPS * (shift + 1) + (value >> shift) - STEPS


def _top(bucket: int) -> int:
    """The largest value of a bucket."""
    if bucket < STEPS:
        return bucket
    shift, step = divmod(bucket - STEPS, STEPS)
    return ((step + STEPS + 1) << shift) - 1


def limit_of(stays: Histogram | None, least_ns: int) -> int:
    """The limit of a duration: four times the p99, or ``UNKNOWN_LIMIT_NS`` while the p99 is unknown."""
    if stays is None or stays.count < FEW:
        return max(UNKNOWN_LIMIT_NS, least_ns)
    return max(least_ns, 4 * stays.p99())


def spoken(ns: int) -> str:
    """An age in at most two units and three digits: ``48ms``, ``11.8s``, ``4m12s``.

    >>> spoken(48_000_000), spoken(11_800_000_000), spoken(252 * 10**9), spoken(7_260 * 10**9)
    ('48ms', '11.8s', '4m12s', '2h01m')
    """
    if ns < SECOND_NS:
        return f"{ns / 1e6:.3g}ms"
    if ns < 60 * SECOND_NS:
        return f"{ns / 1e9:.3g}s"
    seconds = ns // SECOND_NS
    if seconds < 3_600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    return f"{seconds // 3_600}h{seconds % 3_600 // 60:02}m"


def plural(count: int, word: str) -> str:
    """``1 copy``, ``6 copies``."""
    if count == 1:
        return f"1 {word}"
    return f"{count:,} {word[:-1]}ies" if word.endswith("y") else f"{count:,} {word}s"
