"""When blocks come back, learnt from those that did, and what a place of a block is worth.

Blocks are divided into classes. For each class ``Returns`` counts how many blocks reached an age without a use, and how
many were used again at that age. Ages are octaves of time. Their ratio is the chance of a use in that octave. A class
with few counts leans on its row, the row on its half, the half on all blocks.

The worth of a place is the most uses a second that the block can still have: over every span of time from now on, the
chance of a use in the span, divided by the mean time until the use or the end of the span. That is the steepest line
from the present point to a later one in the plane of (time spent, uses had), so all ages of a class need one pass over
their convex hull. Among blocks whose next use is known only by chance, giving up the least worth keeps most hits (the
Gittins index of a place).

Example: of 100 sessions 50 come back after 8 s, the others never. A block of an age of 1 s is worth 0.5 uses in at most
8 s. At an age of 20 s it is worth next to nothing. At 7 s it is worth more than at 1 s, because less time is left to
wait. So neither the oldest nor the newest block goes first, but the one whose time has passed.

Law of this file: counts are whole events times powers of ``KEPT``, and worths depend on the counts of the last ``fit``.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

OCTAVES: Final = 40
"""From 1 microsecond to 12 days; older blocks stay in the last octave."""
RUNGS: Final = 2 * OCTAVES
"""A block is valued anew every half octave."""
BOUNDS: Final = (0, *(math.isqrt(10**6 << rung) for rung in range(1, RUNGS)))
"""Age in nanoseconds at which each rung begins."""
KEPT: Final = 0.9
"""Weight of earlier counts at each fit: 95 % of the counts are of the last 30 fits."""
LEANING: Final = 10.0
"""Counts that a class borrows from what it leans on."""
UNSEEN: Final = 0.02
"""The chance of a use in an octave of which nothing is known. As it is the same for all octaves and later ones are
longer, recency decides then."""
SPARE: Final = 2
"""Octaves behind the last observed one that are taken into account."""
COLUMNS: Final = 16
"""Classes of a row: by octaves of the gap before the last use, two each."""
SHARED_ROWS: Final = 8
ROWS: Final = 17
"""Rows of shared blocks by the logarithm of their uses, then rows of sessions by their turn."""
_TURN_ROWS: Final = (1, 2, 3, 4, 6, 9, 16, 32)
"""Last turn of each row but the last."""


def rung_of(age_ns: int) -> int:
    """The rung in which an age lies."""
    return bisect_right(BOUNDS, age_ns) - 1


def _column(gap_ns: int) -> int:
    """Gaps of microseconds are rare, so they share the first column."""
    return min(max(rung_of(gap_ns) // 4 - 4, 0), COLUMNS - 1)


def shared_class(uses: int, gap_ns: int) -> int:
    """The class of a block from which several sessions continue."""
    return min(uses.bit_length() - 1, SHARED_ROWS - 1) * COLUMNS + _column(gap_ns)


def session_class(turn: int, gap_ns: int) -> int:
    """The class of the blocks of one session, which is in its ``turn``."""
    return (SHARED_ROWS + bisect_right(_TURN_ROWS, turn - 1)) * COLUMNS + (_column(gap_ns) if turn > 1 else 0)


Column: TypeAlias = "array[float]"
"""A number for each octave or rung, without an object for each."""
_NOTHING: Final = (0.0,) * OCTAVES


class Returns:
    """Counts of every class, and the worths as of the last fit."""

    def __init__(self) -> None:
        self.used: dict[int, Column] = {}
        """Class to how many of its blocks were used again in each octave."""
        self.reached: dict[int, Column] = {}
        """Class to how many of its blocks reached each octave."""
        self.fits = 0
        self._used: dict[int, Column] = {}
        self._reached: dict[int, Column] = {}
        """The counts of the last fit."""
        self._prepare()

    def began(self, kind: int) -> None:
        """A block of this class was just used."""
        if kind not in self.used:
            self.used[kind], self.reached[kind] = _column_of(_NOTHING), _column_of(_NOTHING)
        self.reached[kind][0] += 1.0

    def again(self, kind: int, rung: int) -> None:
        """A block of this class was used again on this rung."""
        if kind in self.used:
            self.used[kind][rung // 2] += 1.0

    def climbed(self, kind: int, before: int, rung: int) -> None:
        """A block of this class has come from one rung to a higher one without a use."""
        reached = self.reached[kind]
        for octave in range(before // 2 + 1, rung // 2 + 1):
            reached[octave] += 1.0

    def fit(self) -> None:
        """Take the counts up to now as the base of ``worths``; later counts weigh more than these."""
        self.fits += 1
        self._used, self._reached = self.used, self.reached
        self.used = {kind: _column_of(count * KEPT for count in row) for kind, row in self._used.items()}
        self.reached = {kind: _column_of(count * KEPT for count in row) for kind, row in self._reached.items()}
        self._prepare()

    def _prepare(self) -> None:
        """The chances that classes lean on: of all blocks, of each half and of each row."""
        rows: dict[int, tuple[Sequence[float], Sequence[float]]] = {}
        for kind in sorted(self._used):
            for name in (kind // COLUMNS, *_halves(kind)):
                used, reached = rows.setdefault(name, (_NOTHING, _NOTHING))
                rows[name] = (_sum(used, self._used[kind]), _sum(reached, self._reached[kind]))
        used = rows[_ALL][0] if rows else _NOTHING
        seen = [octave for octave, count in enumerate(used) if count]
        self._first = seen[0] if seen else 0
        self._end = min(OCTAVES, (seen[-1] if seen else 0) + 1 + SPARE)
        nothing = _column_of([UNSEEN] * OCTAVES)
        chances = {_ALL: _chances(*rows[_ALL], nothing, 1.0) if rows else nothing}
        for name in (_SHARED, _SESSION):
            chances[name] = _chances(*rows[name], chances[_ALL], LEANING) if name in rows else chances[_ALL]
        for name in range(ROWS):
            half = chances[_SHARED if name < SHARED_ROWS else _SESSION]
            chances[name] = _chances(*rows[name], half, LEANING) if name in rows else half
        self._rows = chances
        self._worths: dict[int, Column] = {}

    def worths(self, kind: int) -> Column:
        """The worth of a place with a block of this class, for each rung; uses a second."""
        worths = self._worths.get(kind)
        if worths is None:
            chances = self._rows[kind // COLUMNS]
            if kind in self._used:
                chances = _chances(self._used[kind], self._reached[kind], chances, LEANING)
            worths = self._worths[kind] = _worths(chances, self._first, self._end)
        return worths

    # --- keyframes ---

    def export(self) -> Any:
        """Rows of (class, uses, reached), for now and for the last fit."""
        return [
            [[kind, list(used[kind]), list(reached[kind])] for kind in sorted(used)]
            for used, reached in ((self.used, self.reached), (self._used, self._reached))
        ] + [self.fits]

    def restore(self, exported: Any) -> None:
        """Take over exported counts."""
        now, fitted, self.fits = exported
        self.used = {kind: _column_of(used) for kind, used, _ in now}
        self.reached = {kind: _column_of(reached) for kind, _, reached in now}
        self._used = {kind: _column_of(used) for kind, used, _ in fitted}
        self._reached = {kind: _column_of(reached) for kind, _, reached in fitted}
        self._prepare()


_ALL, _SHARED, _SESSION = -1, -2, -3


def _halves(kind: int) -> tuple[int, int]:
    return _ALL, _SHARED if kind < SHARED_ROWS * COLUMNS else _SESSION


def _column_of(values: Iterable[float]) -> Column:
    return array("d", values)


def _sum(one: Sequence[float], other: Sequence[float]) -> Sequence[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _chances(
    used: Sequence[float], reached: Sequence[float], leaning: Sequence[float], weight: float,
) -> Column:
    """The chance of a use in each octave for a block that has reached it."""
    return _column_of(
        min(1.0, (use + weight * lean) / (reach + weight))
        for use, reach, lean in zip(used, reached, leaning, strict=True)
    )


def _worths(chances: Sequence[float], first: int, end: int) -> Column:
    """The worth on each rung, from the chances of the octaves ``first`` to ``end``."""
    had, spent, alive = [0.0], [0.0], 1.0
    for octave in range(first, end):
        chance = chances[octave]
        width = 1e-6 * (1 << octave + 1) if octave == first else 1e-6 * (1 << octave)
        had.append(had[-1] + alive * chance)
        spent.append(spent[-1] + alive * width * (1.0 - chance / 2))
        alive = max(alive * (1.0 - chance), 1e-9)
    hull: list[int] = []
    """Later points, the nearest last, of which each is the best for its predecessor."""
    best = [0.0] * (end - first)
    for at in range(end - first, -1, -1):
        while len(hull) > 1 and _slope(had, spent, at, hull[-1]) <= _slope(had, spent, at, hull[-2]):
            hull.pop()
        if hull:
            best[at] = _slope(had, spent, at, hull[-1])
        hull.append(at)
    middle = [_between(best, (rung - 0.5) / 2 - first) for rung in range(2 * first, 2 * end)]
    return _column_of([middle[0]] * (2 * first) + middle + [middle[-1]] * (RUNGS - 2 * end))


def _slope(had: list[float], spent: list[float], start: int, end: int) -> float:
    return (had[end] - had[start]) / (spent[end] - spent[start])


def _between(best: list[float], octave: float) -> float:
    """The line between the values in the middle of two octaves."""
    low = math.floor(octave)
    share = octave - low
    last = len(best) - 1
    return best[min(max(low, 0), last)] * (1.0 - share) + best[min(max(low + 1, 0), last)] * share
