"""``attach --record FILE.mcap`` or ``DIR``: records the events that a console receives.

Law of this file: events that the console did not see are a stated gap of the recording. Stimuli are not sent to
consoles, so such a recording can be replayed and explained, and not decided again.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Tier
from kvbm_console.core.snapshots import sparse_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording.format import block_label
from kvbm_console.recording.output import FILE_SUFFIX, RecordingPath, require_new
from kvbm_console.recording.writer import Recorder
from kvbm_console.stream.feed import EventsArrived, FeedItem, SnapshotTaken
from kvbm_console.wire.batches import pack_events

if TYPE_CHECKING:
    from tui.model.mirror import Mirror
    from tui.source import Kept


class SeenKeeper:
    """Records the events that a session folds. Each place has a keeper of its own; ``close`` ends the recording."""

    def __init__(self, place: Path, program: str = "") -> None:
        self.place = RecordingPath(place)
        self.made: list[Path] = []
        """Files that are complete, a file for each incarnation of the target."""
        self.program = program
        self.recorder: Recorder | None = None
        self._events = self._bytes = self._missing = 0
        """Sums over complete recordings; events are those handed to the recorder."""
        self._begun = False
        self._before: set[Path] = set()
        """Segments of other runs in the directory."""
        self._segment = (0, 0)
        """Number and bytes of the segment that is being written."""
        self._incarnation = ""
        self._state: CacheState | None = None

    def take(self, item: FeedItem, mirror: "Mirror") -> None:
        """Record ``item``, which has just been folded; the session's facts already contain it."""
        self._state = mirror.state
        if self._state is None or mirror.connected is None:
            return
        if isinstance(item, SnapshotTaken) and mirror.connected.incarnation != self._incarnation:
            self.close()
            if not self._begun:
                self._begun, self._before = True, self._segments()
            self._incarnation = mirror.connected.incarnation
            self.recorder = Recorder(
                self.place.directory, config=mirror.connected.config or config_of(self._state),
                incarnation=self._incarnation, keyframe=self._keyframe, program=self.program,
                clock_anchor_ns=mirror.connected.clock_anchor_ns,
                labels={"target": mirror.connected.target, **block_label(mirror.connected.block_bytes)},
                **self.place.settings,
            )
        elif isinstance(item, EventsArrived) and item.events and self.recorder is not None:
            self.recorder.offer(None, pack_events(item.events))
            self._events += len(item.events)
            status = self.recorder.status()
            if status.segment != self._segment[0]:
                self._bytes += self._segment[1]
            self._segment = status.segment, status.bytes

    @property
    def kept(self) -> "Kept":
        """The recording so far, of all incarnations."""
        from tui.source import Kept

        now = self.recorder.status() if self.recorder is not None else None
        missing = self._missing + (now.not_recorded if now is not None else 0)
        size_bytes = self._bytes + (now.bytes if now is not None else 0)
        return Kept(str(self.place.file or self.place.directory), self._events - missing, size_bytes, missing)

    def _keyframe(self) -> tuple[int, memoryview, bytes]:
        assert self._state is not None
        return self._state.seq, sparse_facts(self._state), b""

    def close(self) -> None:
        """End the recording in order."""
        if self.recorder is not None:
            self.recorder.close()
            status = self.recorder.status()
            self._missing += status.not_recorded
            self.recorder = None
            made = self.place.finish(len(self.made) + 1)
            if made is not None and self.place.file is not None:
                self.made.append(made)
            files = self.made if self.place.file is not None else self._segments() - self._before
            self._bytes, self._segment = sum(path.stat().st_size for path in files), (0, 0)

    def _segments(self) -> set[Path]:
        return set(self.place.directory.glob("*.mcap"))

    def told(self) -> str:
        """The recording and its place, in one sentence."""
        from tui.model.numbers import plural, size

        kept = self.kept
        where = " and ".join(map(str, self.made)) or kept.place
        if not self._begun:
            return f"nothing was recorded to {where}: this console saw no target"
        lost = f"; {plural(kept.missing, 'event')} could not be written" if kept.missing else ""
        return f"recorded {plural(kept.events, 'event')}, {size(kept.size_bytes)}, to {where}{lost}"


def config_of(state: CacheState) -> LeaderConfig:
    """The leader's configuration as far as facts tell it, which is block size and the tiers below; the rest are
    defaults.

    For a daemon of a newer version, whose own configuration cannot be read.
    """
    sizes = dict.fromkeys((Tier.G2, Tier.G3), 0)
    for pool in state.pools:
        if pool.info.tier in sizes:
            sizes[pool.info.tier] += pool.info.capacity_blocks or 0
    tokens = state.pools[0].info.block_tokens if state.pools else LeaderConfig().block_tokens
    return LeaderConfig(block_tokens=tokens, g2_blocks=sizes[Tier.G2], g3_blocks=sizes[Tier.G3])


def require_place(path: Path) -> Path:
    """Refuse a place early that the recorder would refuse after the console has drawn."""
    if path.suffix == FILE_SUFFIX or not path.is_dir():
        require_new(path, "--record")
    return path


def place_of(record: Path, number: int, total: int) -> Path:
    """The place for the recording of the target of this number, from 1. With several targets each has a directory
    or a file."""
    if total == 1:
        return record
    return record.with_stem(f"{record.stem}-{number}") if record.suffix == FILE_SUFFIX else record / f"target-{number}"
