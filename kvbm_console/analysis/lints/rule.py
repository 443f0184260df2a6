"""A lint as a visitor: it watches events, and is asked for what it found.

Law of this file: a lint remembers a bounded number of things that are over; further ones are counted.
"""

from collections.abc import Iterator
from typing import Final

from kvbm_console.analysis.lints.model import Finding
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.core.state import CacheState

PAST_MAX: Final = 200
"""Findings that are over and that one lint keeps: nobody reads more of one kind."""


class Lint(Visitor):
    """Base of all lints."""

    def __init__(self) -> None:
        super().__init__()
        self.past: list[Finding] = []
        self.not_kept = 0

    def over(self, finding: Finding) -> None:
        """Something was wrong and is not any more."""
        if len(self.past) < PAST_MAX:
            self.past.append(finding)
        else:
            self.not_kept += 1

    def now(self, state: CacheState, at_ns: int) -> Iterator[Finding]:
        """What is wrong with these facts at this time."""
        yield from ()

    def findings(self, state: CacheState | None, at_ns: int) -> Iterator[Finding]:
        """What was wrong, and what is; ``state`` None when the facts are unknown where the evidence ends."""
        yield from self.past
        if state is not None:
            yield from self.now(state, at_ns)
