"""JSON lines: every event as ``tail --format jsonl`` prints it, gaps as lines of their own.

Law of this file: each event is one line, in the order of ``seq``, and each gap is a line, too.
"""

from collections.abc import Callable, Iterator
from typing import IO, Any

from kvbm_console.analysis.walk import Evidence, Progress
from kvbm_console.core.events import Event
from kvbm_console.core.printable import json_text
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Item
from kvbm_console.stream.document import event_document
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken

EventFilter = Callable[[Event, CacheState | None], bool]
"""A filter of ``core.expression.compile_event_filter``; it takes the event and the facts before the event."""


def write_jsonl(
    evidence: Evidence, file: IO[bytes], progress: Progress | None = None, wanted: EventFilter | None = None
) -> int:
    """Write a line for each wanted event, or for each event, and for each gap; returns the number of lines."""
    lines = 0
    for item in evidence.items() if wanted is None else _matching(evidence.items(), wanted):
        documents: list[dict[str, Any]] = []
        if isinstance(item, EventsArrived):
            documents = [event_document(event) for event in item.events]
        elif isinstance(item, GapSeen):
            documents = [{"kind": "Gap", "first": item.first, "last": item.last, "reason": item.reason}]
        file.writelines(json_text(document).encode() + b"\n" for document in documents)
        lines += len(documents)
        if progress is not None:
            progress("export", lines, evidence.events)
    return lines


def _matching(items: Iterator[Item], wanted: EventFilter) -> Iterator[Item]:
    """The items with only the wanted events. Folds the facts, because an event alone lacks its slot's name."""
    state: CacheState | None = None
    for item in items:
        if isinstance(item, SnapshotTaken):
            state = item.state
        elif isinstance(item, GapSeen):
            state = None
        else:
            events = []
            for event in item.events:
                if wanted(event, state):
                    events.append(event)
                if state is not None:
                    state.apply(event)
            item = EventsArrived(events)
        yield item
