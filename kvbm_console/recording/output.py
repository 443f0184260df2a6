"""New recordings made of parts of others, or of what a daemon still remembers: one sealed file each.

Law of this file: a file has its name only when it is whole, durable and was read back; nothing is overwritten.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kvbm_console.core.errors import RecordingError, UsageError
from kvbm_console.core.events import Event
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import fold
from kvbm_console.recording.files import sync_directory
from kvbm_console.recording.format import About, Frame, Keyframe
from kvbm_console.recording.place import require_new, segment_file
from kvbm_console.recording.seal import write_draft
from kvbm_console.recording.sealed import SealedSegment
from kvbm_console.wire.batches import pack_events


class Made(msgspec.Struct, frozen=True):
    """What was written. ``complete``: stimuli are in it, so decisions replay too."""

    path: str
    first_seq: int
    last_seq: int
    first_ns: int
    last_ns: int
    bytes: int
    complete: bool

    @property
    def events(self) -> int:
        """How many events it spans."""
        return self.last_seq - self.first_seq + 1


def write_recording(path: Path, about: About, frames: Iterable[Frame]) -> Made:
    """Write a sealed recording of one file, or a directory that holds this file (``place``).

    Raises ``UsageError``, ``RecordingError`` and ``OSError``.
    """
    require_new(path)
    found = path.exists()
    file = segment_file(path, about.first_seq)
    draft = file.with_name(file.name + ".tmp")
    complete = False

    def watched() -> Iterator[Frame]:
        nonlocal complete
        for frame in frames:
            complete |= frame.channel == fmt.STIMULI
            yield from fmt.divided(frame)

    try:
        write_draft(draft, about, watched())
        segment = SealedSegment(draft)
        segment.verify_bytes()
        os.link(draft, file)  # unlike a rename it never takes the place of a file that came meanwhile
    except FileExistsError:
        raise UsageError(f"{path} exists already; nothing is overwritten") from None
    finally:
        draft.unlink(missing_ok=True)
        if file.parent == path and not found:
            with contextlib.suppress(OSError):  # not empty: what it was made for is in it
                path.rmdir()
    sync_directory(file.parent)
    times = [entry for entry in segment.entries if entry.events] or segment.entries
    return Made(
        str(path), about.first_seq, segment.next_seq - 1, times[0].first_ns, times[-1].last_ns, segment.size, complete
    )


def keyframe_frame(about: About, keyframe: Keyframe, at_ns: int) -> Frame:
    """The first frame of a recording: it repeats what the preamble says."""
    data = fmt.encode_item(msgspec.structs.replace(keyframe, about=about))
    at = about.clock_anchor_ns + at_ns
    return Frame(fmt.KEYFRAMES, keyframe.seq, 0, at, at, data)


def end_frame(about: About, last_seq: int, at_ns: int) -> Frame:
    """The last frame: closed on purpose."""
    at = about.clock_anchor_ns + at_ns
    return Frame(fmt.MARKS, last_seq + 1, 0, at, at, fmt.encode_item(fmt.SegmentEnd(last_seq, False)))


def event_frame(about: About, events: list[Event]) -> Frame:
    """A batch of events, encoded anew."""
    chunk = pack_events(events)
    anchor = about.clock_anchor_ns
    return Frame(fmt.EVENTS, chunk.first_seq, chunk.count, anchor + chunk.base_ns, anchor + chunk.last_ns, chunk.data)


def write_dump(path: Path, about: About, state: CacheState, batches: list[list[Event]], last_ns: int) -> Made:
    """What a daemon still remembers: facts, and the events behind them; no stimuli, so the state replays and no more.

    It begins ``last_ns`` before the last event, or with the facts when those are younger. ``state`` is folded forward.
    """
    require_new(path)
    if not batches:
        raise RecordingError("there is nothing to dump: the daemon has published no event since its snapshot")
    begin_ns = batches[-1][-1].at_ns - last_ns
    kept: list[list[Event]] = []
    for events in batches:
        at = 0
        if not kept:
            # Whole stimuli only: between the events of one an invariant may be open.
            at = next(
                (i for i, event in enumerate(events) if event.at_ns >= begin_ns and event.cause != (
                    events[i - 1].cause if i else state.n)), len(events),
            )
            fold(state, events[:at], path)
        if at < len(events):
            kept.append(events[at:])
    about = msgspec.structs.replace(about, first_seq=state.seq)
    at_ns = state.at_ns if not kept else min(state.at_ns, kept[0][0].at_ns)

    def frames() -> Iterator[Frame]:
        yield keyframe_frame(about, Keyframe(state.seq, False, encode_facts(state), b""), at_ns)
        for events in kept:
            yield event_frame(about, events)
        last = kept[-1][-1] if kept else None
        yield end_frame(about, state.seq - 1 if last is None else last.seq, at_ns if last is None else last.at_ns)

    return write_recording(path, about, frames())
