"""Least squares without negative parts, and the errors of a fit.

Law of this file: a fit is the best of all choices of parts that are 0, so with few parts it is exact.
"""

from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvbm_console.analysis.nearest_rank import nearest_rank

Matrix = NDArray[np.float64]


class Errors(msgspec.Struct, frozen=True):
    """Relative errors as fractions: half of them are at most the median, 90 % at most ``p90``."""

    values: int
    median: float
    p90: float


def nonnegative(rows: Matrix, values: Matrix) -> Matrix:
    """The least squares solution without negative parts: the best of all choices of parts that are 0."""
    columns = rows.shape[1]
    best, least = np.zeros(columns), float(values @ values)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            part = np.linalg.lstsq(rows[:, chosen], values, rcond=None)[0]
            rest = values - rows[:, chosen] @ part
            if (part >= 0).all() and float(rest @ rest) < least:
                least = float(rest @ rest)
                best = np.zeros(columns)
                best[list(chosen)] = part
    return best


def standard_errors(rows: Matrix, values: Matrix, fitted: Matrix) -> list[float]:
    """The standard error of each coefficient of a least squares fit."""
    rest = values - rows @ fitted
    variance = float(rest @ rest) / max(1, len(values) - rows.shape[1])
    return [float(value) for value in np.sqrt(np.maximum(0, np.diag(np.linalg.pinv(rows.T @ rows)) * variance))]


def errors_of(values: list[float]) -> Errors | None:
    """Median and p90 of relative errors, None without any."""
    if not values:
        return None
    values.sort()
    return Errors(len(values), nearest_rank(values, 50), nearest_rank(values, 90))
