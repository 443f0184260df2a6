"""Percentiles by nearest rank, as ``planning/REFERENCE.md`` defines them.

Law of this file: a percentile is a value that occurred.
"""

from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value", int, float)


def nearest_rank(ordered: Sequence[Value], percent: int) -> Value:
    """The smallest of the sorted values that ``percent`` of them do not exceed. Raises ``IndexError`` without values.

    >>> nearest_rank([10, 20, 30, 40], 50), nearest_rank([10, 20, 30, 40], 51)
    (20, 30)
    """
    return ordered[max(1, -(-percent * len(ordered) // 100)) - 1]
