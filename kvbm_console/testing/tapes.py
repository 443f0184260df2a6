"""The tapes of a test: leaders that are recorded while they are driven, and files named after the test.

Law of this file: leaders beyond ``TAPES_MAX`` are counted and not taped.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording.tape import Tape

TAPES_MAX: Final = 16
"""Leaders that are taped in one test; a property test builds thousands."""
NAME_CHARS_MAX: Final = 150
"""Of a file name, with room for a number and an ending."""


def safe_name(text: str) -> str:
    """A file name from the name of a test.

    >>> safe_name("tests/test_a.py::test_b[x/y]")
    'tests-test_a.py-test_b-x-y'
    """
    return re.sub(r"[^\w.]+", "-", text).strip("-")[-NAME_CHARS_MAX:]


class Tapes:
    """The tapes of one test."""

    def __init__(self) -> None:
        self.all: list[Tape] = []
        self.not_taped = 0
        """Leaders beyond ``TAPES_MAX``."""
        self._of: dict[int, tuple[Leader, Tape | None]] = {}

    def of(self, leader: Leader) -> Tape | None:
        """The tape of this leader, begun at its first stimulus; None when there are too many."""
        known = self._of.get(id(leader))
        if known is None:
            tape = Tape(leader) if len(self.all) < TAPES_MAX else None
            if tape is None:
                self.not_taped += 1
            else:
                self.all.append(tape)
            # The leader is kept with it, so that its id is not given to another one.
            known = self._of[id(leader)] = (leader, tape)
        return known[1]


@contextmanager
def taping() -> Iterator[Tapes]:
    """Tape every leader that handles a stimulus inside: ``Leader.handle`` is wrapped for that time."""
    tapes = Tapes()
    handle = Leader.handle

    def taped(self: Leader, stimulus: Stimulus) -> Outcome:
        tape = tapes.of(self)
        outcome = handle(self, stimulus)
        if tape is not None:
            tape.take(stimulus, outcome)
        return outcome

    Leader.handle = taped  # type: ignore[method-assign]
    try:
        yield tapes
    finally:
        Leader.handle = handle  # type: ignore[method-assign]
