"""Classes of ages: how long ago something was, in steps of 1, 2 and 5, so that counts of ages stay small.

Law of this file: a class is named by its bound, the longest age in it, in nanoseconds; the last one has what is older.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

AGE_BOUNDS_NS: Final[tuple[int, ...]] = (*(step * 10**power for power in range(6, 13) for step in (1, 2, 5)), 10**15)
"""1, 2, 5 ms up to 5,000 s, and eleven days for all that is older: nobody remembers evictions for so long."""


def age_class(age_ns: int) -> int:
    """The index of the class of an age.

    >>> AGE_BOUNDS_NS[age_class(1_500_000)]
    2000000
    """
    return min(bisect_left(AGE_BOUNDS_NS, age_ns), len(AGE_BOUNDS_NS) - 1)


def age_within(counts: Sequence[int], share: float) -> int | None:
    """The smallest bound within which this share of what was counted lies; None when nothing was."""
    wanted, seen = share * sum(counts), 0
    for bound, count in zip(AGE_BOUNDS_NS, counts, strict=True):
        seen += count
        if seen and seen >= wanted:
            return bound
    return None
