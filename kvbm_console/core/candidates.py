"""Candidates and operations: a planned transfer, and the worker-facing half of a promoted one.

Law of this file: a candidate reaches exactly one terminal status, once (I6); an operation holds its own references on
sources and targets until its last rank has reported.
"""

from typing import Final

import msgspec

from kvbm_console.core.ids import CandidateStatus, Route

TERMINAL: Final = frozenset(
    {CandidateStatus.COMPLETED, CandidateStatus.FAILED, CandidateStatus.CANCELLED, CandidateStatus.SKIPPED}
)
"""Statuses that end a candidate."""


class CandidateFacts(msgspec.Struct, array_like=True):
    """One planned transfer that is not terminal. ``slot`` is None for cached blocks that no live slot owns."""

    candidate: int
    slot: int | None
    route: Route
    hashes: list[int]
    targets: list[int]
    first_block: int | None
    status: CandidateStatus
    operation: int | None = None
    enqueued: bool = False
    found: int | None = None
    """Blocks that can be moved, None before the evaluation."""
    planned_ns: int = 0
    enqueued_ns: int | None = None
    evaluated_ns: int | None = None
    promoted_ns: int | None = None
    started_ns: int | None = None


class OperationFacts(msgspec.Struct, array_like=True):
    """The copy of ``sources[i]`` to ``targets[i]``."""

    operation: int
    candidate: int
    batch: int
    epoch: int
    source_pool: int
    target_pool: int
    sources: list[int]
    targets: list[int]
    started: bool = False
    reported: set[int] = set()
    """Ranks that have reported, well or not."""
    failed: set[int] = set()
    """Indices of blocks that some rank could not copy."""
    error: str = ""

    @property
    def blocks(self) -> int:
        """How many blocks the operation copies. A pool that is known by hash alone names no places on its side."""
        return max(len(self.sources), len(self.targets))
