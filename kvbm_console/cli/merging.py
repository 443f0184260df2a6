"""The lines of ``rec merge``.

Law of this file: a JSON line is the document of ``tail`` with ``wall_ns`` and ``recording`` in front.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kvbm_console.cli.lines import event_document
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.describe import describe, kind
from kvbm_console.core.errors import UsageError
from kvbm_console.core.expression import compile_event_filter
from kvbm_console.recording.format import Gap
from kvbm_console.recording.merge import RECORDINGS_MAX, merged, sources_of


def lines_of(paths: Sequence[Path], where: str | None, *, form: str) -> Iterator[str]:
    """One line for every event and gap. Raises ``UsageError`` and ``RecordingError``."""
    if len(paths) > RECORDINGS_MAX:
        raise UsageError(f"at most {RECORDINGS_MAX} recordings are merged, got {len(paths)}")
    matches = None if where is None else compile_event_filter(where)
    sources = sources_of(paths)
    width = max(len(source.name) for source in sources)
    for one in merged([source.recording for source in sources]):
        what, name = one.what, sources[one.source].name
        if isinstance(what, Gap):
            if form == "jsonl":
                head = {"wall_ns": one.wall_ns, "recording": name, "gap": what}
                yield msgspec.json.encode(head).decode()
            else:
                yield f"{_wall(one.wall_ns)}  {name:<{width}}  {what.first:>10,}  {what.count:,} events are missing"
        elif matches is None or matches(what, None):
            if form == "jsonl":
                document = {"wall_ns": one.wall_ns, "recording": name, **event_document(what)}
                yield msgspec.json.encode(document).decode()
            else:
                yield f"{_wall(one.wall_ns)}  {name:<{width}}  {what.seq:>10,}  {kind(what)} {describe(what)}"


def _wall(ns: int) -> str:
    seconds, rest = divmod(ns, SECOND_NS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1_000:06d}Z"
