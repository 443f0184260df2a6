"""Evidence for tests: what a script or a run in memory made, with pieces taken out.

Law of this file: evidence is folded from nothing, as a recording's would be.
"""

from collections.abc import Iterator, Mapping, Sequence

from kvbm_console.analysis.walk import Evidence
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Item
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken


def state_before(events: Sequence[Event], seq: int) -> CacheState:
    """The facts before event ``seq``."""
    state = CacheState()
    for event in events[:seq]:
        state.apply(event)
    return state


def evidence(
    events: Sequence[Event], config: LeaderConfig, *, begin: int = 0, gap: tuple[int, int] | None = None,
    memory: Mapping[int, int] | None = None,
) -> Evidence:
    """All events from ``begin`` on, without those of ``gap`` (first, last)."""

    def items() -> Iterator[Item]:
        yield SnapshotTaken(state_before(events, begin))
        if gap is None:
            yield EventsArrived(list(events[begin:]))
            return
        yield EventsArrived(list(events[begin : gap[0]]))
        yield GapSeen(gap[0], gap[1], "the disk was full")
        yield SnapshotTaken(state_before(events, gap[1] + 1))
        yield EventsArrived(list(events[gap[1] + 1 :]))

    return Evidence("test", config, len(events), items, lambda seq: dict(memory or {}) if seq == begin else {})
