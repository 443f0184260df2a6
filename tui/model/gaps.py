"""Stretches of the stream that did not reach this console.

Law of this file: a shape only; nothing is ever filled in.
"""

import msgspec


class Gap(msgspec.Struct):
    """Events that were not delivered: from the last applied event before to the snapshot after."""

    first: int
    last: int
    reason: str
    start_ns: int
    end_ns: int | None
    """None until the snapshot came."""
    seen_mono_ns: int

    @property
    def count(self) -> int:
        """How many were lost."""
        return self.last - self.first + 1
