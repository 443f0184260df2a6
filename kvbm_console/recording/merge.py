"""Several recordings as one sequence, by the wall's clock: what happened where, and in which order.

A recording knows when the wall's clock stood at its engine's time 0. Two machines' clocks differ by what they differ
by: the order across recordings is as good as that, the order within one is always the recorded one.

Law of this file: events keep their own numbers, and a gap of one recording stands where it was among the others.
"""

import heapq
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.events import Event
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import decode_events
from kvbm_console.recording.format import Gap
from kvbm_console.recording.reader import Recording

RECORDINGS_MAX: Final = 64
"""Each holds its index and one chunk; a fleet that is larger is not read line by line."""
_ORDER: Final = attrgetter("wall_ns", "source")


class Happened(msgspec.Struct, frozen=True):
    """One event, or one gap, of one of the recordings."""

    wall_ns: int
    source: int
    """Which of them."""
    what: Event | Gap


class Source(msgspec.Struct, frozen=True):
    """One run of one recording, under a name that no other one has."""

    name: str
    recording: Recording


def sources_of(paths: Sequence[Path]) -> list[Source]:
    """All runs of all paths. Raises ``RecordingError``."""
    found: list[tuple[Path, Recording]] = []
    for path in paths:
        last = Recording.open(path)
        found += [(path, last if run == last.incarnation else Recording.open(path, run)) for run in last.runs]
    names = [path.name for path, _ in found]
    return [
        Source(path.name if names.count(path.name) == 1 else f"{path}@{recording.incarnation}", recording)
        for path, recording in found
    ]


def merged(recordings: Sequence[Recording]) -> Iterator[Happened]:
    """All events and gaps in the order of the wall's clock. Raises ``RecordingError``."""
    return heapq.merge(*(_happened(source, one) for source, one in enumerate(recordings)), key=_ORDER)


def _happened(source: int, recording: Recording) -> Iterator[Happened]:
    anchor = recording.segments[0].about.clock_anchor_ns
    for frame in recording.frames():
        if frame.channel == fmt.EVENTS:
            for event in decode_events(frame, recording.path):
                yield Happened(anchor + event.at_ns, source, event)
        elif frame.channel == fmt.MARKS:
            mark = fmt.decode_mark(frame.data)
            if isinstance(mark, Gap) and mark.count:
                yield Happened(frame.log_ns, source, mark)
