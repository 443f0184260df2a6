"""The document of ``rec info``: a recording at a glance.

Law of this file: sizes and counts come from the index, requests and engines from the facts at both ends. No event
between is decoded.
"""

import msgspec

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import RecordingError
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.recording.format import Gap
from kvbm_console.recording.reader import Recording


class SegmentInfo(msgspec.Struct, frozen=True):
    """One file of a run."""

    path: str
    sealed: bool
    first_seq: int
    last_seq: int
    bytes: int
    torn_bytes: int


class Versions(msgspec.Struct, frozen=True):
    """The program that wrote it, and the formats."""

    format: str
    wire: str
    program: str


class EngineInfo(msgspec.Struct, frozen=True):
    """An engine that drives requests, or whose event stream is followed."""

    source: int
    authority: str
    """The decider of its device blocks: ``engine``, ``observed`` by a tap, or ``stream`` if only its event stream is
    followed."""
    dp_ranks: int
    block_tokens: int
    capacity_blocks: int | None
    """Device blocks of all ranks, null when the engine does not tell."""


class RecordingInfo(msgspec.Struct, frozen=True):
    """The document of ``rec info``: a stable contract. Times of the engine in nanoseconds, absent values null."""

    path: str
    incarnation: str
    first_seq: int
    """Number of the first recorded event; the recording is empty when ``last_seq`` is below it."""
    last_seq: int
    events: int
    """Events that are in the recording: those in gaps do not count."""
    stimuli: int
    requests: int | None
    """Requests that were live at its beginning or came in it; null when its facts are unknown."""
    live_requests: int | None
    """Those of them that had not ended where its facts end."""
    engines: list[EngineInfo]
    """Engines that its facts name where they end, by source."""
    keyframes: int
    gaps: list[Gap]
    versions: Versions
    config: LeaderConfig
    config_digest: str
    labels: dict[str, str]
    clock_anchor_ns: int
    first_ns: int
    last_ns: int
    bytes: int
    bytes_per_event: float | None
    finished: bool
    """True if the run was closed on purpose; false while it is recorded and after a kill."""
    segments: list[SegmentInfo]
    runs: list[str]
    """Incarnations in the directory, oldest first; the last run is read by default."""
    unreadable: dict[str, str] = {}
    """Damaged segments in front of this run, by name, with the error."""


def info_of(recording: Recording) -> RecordingInfo:
    """The document of ``rec info``. Raises ``CorruptRecording``."""
    entries = recording.entries
    size = sum(segment.size for segment in recording.segments)
    about = recording.segments[0].about
    times = [entry for entry in entries if entry.events] or entries
    events = recording.events_count
    begin, end = _known(recording, recording.first_seq - 1), _known(recording, recording.last_seq)
    return RecordingInfo(
        path=str(recording.path), incarnation=recording.incarnation, first_seq=about.first_seq,
        last_seq=recording.last_seq, events=events, stimuli=sum(entry.stimuli for entry in entries),
        requests=None if begin is None or end is None else end.next_slot - begin.next_slot + len(begin.slots),
        live_requests=None if end is None else len(end.slots), engines=[] if end is None else _engines(end),
        keyframes=sum(entry.keyframe for entry in entries), gaps=recording.gaps,
        versions=Versions(f"{about.major}.{about.minor}", about.wire, about.program), config=recording.config,
        config_digest=f"{recording.config.digest():016x}", labels=about.labels,
        clock_anchor_ns=about.clock_anchor_ns, first_ns=times[0].first_ns if times else 0,
        last_ns=times[-1].last_ns if times else 0, bytes=size,
        bytes_per_event=round(size / events, 2) if events else None, finished=recording.finished,
        segments=[
            SegmentInfo(
                segment.path.name, segment.sealed, segment.about.first_seq, segment.next_seq - 1, segment.size,
                segment.torn_bytes,
            )
            for segment in recording.segments
        ],
        runs=recording.runs,
        unreadable={path.name: error for path, error in recording.unreadable.items()},
    )


def _known(recording: Recording, seq: int) -> CacheState | None:
    """The facts at this event or, when it lies in or behind a gap, in front of the gap; None without a keyframe."""
    for gap in reversed(recording.gaps):
        start = recording.keyframe_before(seq + 1)
        if gap.count and gap.first <= seq and (start is None or start <= gap.first):
            seq = gap.first - 1
    try:
        return recording.state_at(seq)
    except RecordingError:
        return None


def _engines(state: CacheState) -> list[EngineInfo]:
    found: list[EngineInfo] = []
    device = [pool.info for pool in state.pools if pool.info.tier is Tier.G1]
    for source in sorted({info.source for info in device}):
        pools = [info for info in device if info.source == source]
        capacities = [info.capacity_blocks for info in pools if info.capacity_blocks is not None]
        found.append(EngineInfo(
            source, Authority(pools[0].authority).label, len({info.dp_rank for info in pools}), pools[0].block_tokens,
            sum(capacities) if len(capacities) == len(pools) else None,
        ))
    return found
