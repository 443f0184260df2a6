"""JSON lines: every event as ``tail --format jsonl`` prints it, gaps as lines of their own.

Law of this file: one event, one line, in the order of ``seq``; what is missing is a line that says so.
"""

from typing import IO, Any

import msgspec

from kvbm_console.recording.walk import Evidence, Progress
from kvbm_console.stream.event_document import event_document
from kvbm_console.stream.feed import EventsArrived, GapSeen


def write_jsonl(evidence: Evidence, file: IO[bytes], progress: Progress | None = None) -> int:
    """Write all lines; how many there are."""
    encoder = msgspec.json.Encoder()
    lines = 0
    for item in evidence.items():
        documents: list[dict[str, Any]] = []
        if isinstance(item, EventsArrived):
            documents = [event_document(event) for event in item.events]
        elif isinstance(item, GapSeen):
            documents = [{"kind": "Gap", "first": item.first, "last": item.last, "reason": item.reason}]
        file.writelines(encoder.encode(document) + b"\n" for document in documents)
        lines += len(documents)
        if progress is not None:
            progress("export", lines, evidence.events)
    return lines
