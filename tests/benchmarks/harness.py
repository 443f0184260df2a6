"""Measures ratios: each figure beside its reference, in turns, in one process, medians of several rounds.

Law of this file: a figure without a reference that was measured in the same rounds is not printed. The machine is
shared, so only ratios are compared with the committed ones.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Final

import msgspec

ROUNDS: Final = 9
"""Odd, so that the median is a measurement; more rounds cost seconds and move it by less than a percent."""
TURN_NS: Final = 2_000_000
"""How long one side runs before the other has its turn: far above the clock's grain, and so short that a neighbour who
takes the processor takes it from both."""
TURNS: Final = 16
"""Turns of each side in one round."""

Work = Callable[[], object]


class Skipped(Exception):
    """A figure that cannot be measured here; the text is the reason."""


class Target(msgspec.Struct, frozen=True):
    """What the figure should reach. At least one bound; ``extra_ns`` is figure minus reference."""

    ratio: float | None = None
    ns: float | None = None
    extra_ns: float | None = None

    def words(self, unit: str = "ns") -> str:
        """The bounds as the table shows them."""
        parts = [
            text for text in (
                self.ratio is not None and f"{self.ratio:g}x",
                self.ns is not None and human(self.ns, unit),
                self.extra_ns is not None and f"+ {human(self.extra_ns)}",
            ) if text
        ]
        return "<= " + ", ".join(parts)

    def met(self, figure: "Figure") -> bool:
        """Whether the figure keeps every bound."""
        return (
            (self.ratio is None or figure.ratio <= self.ratio)
            and (self.ns is None or figure.ns <= self.ns)
            and (self.extra_ns is None or figure.extra_ns <= self.extra_ns)
        )


class Figure(msgspec.Struct, frozen=True):
    """One line of the table: nanoseconds per item of the figure and of its reference, and the median of the ratios."""

    name: str
    ns: float
    reference: str
    reference_ns: float
    ratio: float
    target: Target
    unit: str = "ns"
    """What ``ns`` counts; ``B``: bytes."""
    extra_ns: float = 0.0
    """Median difference of two neighbouring turns, per item: what a neighbour takes, it takes from both."""
    compared: bool = True
    """Whether its ratio is compared with the committed one: not that of a latency, which is the machine's as well."""
    half: tuple[float, float] | None = None
    """Half of the turns had a ratio between these, if the turns differ much."""


def measure(
    name: str, work: Work, items: int, reference: str, reference_work: Work, reference_items: int, target: Target,
    rounds: int = ROUNDS, turns: int = TURNS, turn_ns: int = TURN_NS,
) -> Figure:
    """Time both sides in turns. ``items`` are what one call of ``work`` handles; times are per item.

    Each turn begins with the other side: whoever is first after a collection finds less in the caches, which is worth
    one percent. A difference that is small beside either side wants many short turns: ``turn_ns``, where one call of
    ``work`` is short.
    """
    work()
    reference_work()
    (calls, took), (reference_calls, reference_took) = _calls(work, turn_ns), _calls(reference_work, turn_ns)
    turns = max(1, min(turns, TURNS * TURN_NS // max(took, reference_took)))
    ours, theirs, extra = [], [], []
    first = True
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            mine = other = 0
            for _ in range(turns):
                if first:
                    turn, reference_turn = _time(work, calls), _time(reference_work, reference_calls)
                else:
                    reference_turn, turn = _time(reference_work, reference_calls), _time(work, calls)
                first = not first
                extra.append(turn / (calls * items) - reference_turn / (reference_calls * reference_items))
                mine += turn
                other += reference_turn
            ours.append(mine / (turns * calls * items))
            theirs.append(other / (turns * reference_calls * reference_items))
            gc.collect()
    finally:
        gc.enable()
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return Figure(
        name, statistics.median(ours), reference, statistics.median(theirs), statistics.median(ratios), target,
        extra_ns=statistics.median(extra),
    )


def _calls(work: Work, turn_ns: int) -> tuple[int, int]:
    """How many calls fill one turn, and how long they take."""
    once = max(1, min(_time(work, 1) for _ in range(3)))
    calls = max(1, turn_ns // once)
    return calls, calls * once


def _time(work: Work, count: int) -> int:
    # The processor's time of this thread: what neighbours take does not count, and neither does a thread of our own.
    started = time.thread_time_ns()
    for _ in range(count):
        work()
    return time.thread_time_ns() - started


def human(nanoseconds: float, unit: str = "ns") -> str:
    """A time, or bytes, with three digits."""
    if unit == "B":
        return f"{nanoseconds:.3g} B"
    for below, word, size in ((1e3, "ns", 1.0), (1e6, "us", 1e3), (1e9, "ms", 1e6)):
        if nanoseconds < below:
            return f"{nanoseconds / size:.3g} {word}"
    return f"{nanoseconds / 1e9:.3g} s"
