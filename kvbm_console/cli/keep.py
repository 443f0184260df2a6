"""``attach --record FILE.mcap`` or ``DIR``: records what a console sees, as a daemon records what it publishes.

A file is written as a segment in ``FILE.mcap.parts`` beside it and takes its name when it is complete; what a killed
console leaves there, ``rec recover`` makes whole.

Law of this file: what the console did not see is a stated gap of the recording; stimuli are not sent to consoles, so
such a recording can be replayed and explained, and not decided again.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import Tier
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording.options import SEGMENT_BYTES, SEGMENT_NS
from kvbm_console.recording.writer import Recorder
from kvbm_console.stream.feed import EventsArrived, FeedItem, SnapshotTaken
from kvbm_console.wire.batches import pack_events

if TYPE_CHECKING:
    from tui.model.mirror import Mirror


FILE_SUFFIX: Final = ".mcap"
FILE_BYTES_MAX: Final = 1 << 50
FILE_NS_MAX: Final = 1 << 62
"""A file is one segment, however large and long."""


class SeenKeeper:
    """Records what one session folds. One per place; ``close`` it when the console is left."""

    def __init__(self, place: Path, program: str = "") -> None:
        self.file = place if place.suffix == FILE_SUFFIX else None
        """The file to make; None for a directory of segments."""
        self.directory = place.with_name(f"{place.name}.parts") if self.file is not None else place
        self.made: list[Path] = []
        """Files that are complete: one for each incarnation of the target."""
        self.program = program
        self.recorder: Recorder | None = None
        self._incarnation = ""
        self._state: CacheState | None = None

    def take(self, item: FeedItem, mirror: "Mirror") -> None:
        """An item that was folded just now; the facts are those after it."""
        self._state = mirror.state
        if self._state is None or mirror.connected is None:
            return
        if isinstance(item, SnapshotTaken) and mirror.connected.incarnation != self._incarnation:
            self.close()
            self._incarnation = mirror.connected.incarnation
            whole = self.file is not None
            self.recorder = Recorder(
                self.directory, config=mirror.connected.config or config_of(self._state),
                incarnation=self._incarnation, keyframe=self._keyframe, program=self.program,
                clock_anchor_ns=mirror.connected.clock_anchor_ns, labels={"target": mirror.connected.target},
                segment_bytes=FILE_BYTES_MAX if whole else SEGMENT_BYTES,
                segment_ns=FILE_NS_MAX if whole else SEGMENT_NS,
            )
        elif isinstance(item, EventsArrived) and item.events and self.recorder is not None:
            self.recorder.offer(None, pack_events(item.events))

    def _keyframe(self) -> tuple[int, bytes, bytes]:
        assert self._state is not None
        return self._state.seq, encode_facts(self._state), b""

    def close(self) -> None:
        """End the recording in order."""
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None
            if self.file is not None:
                self._name(self.file)

    def _name(self, file: Path) -> None:
        """The sealed segment becomes the file; of a target that came back as another, the next one beside it."""
        segments = sorted(self.directory.glob(f"*{FILE_SUFFIX}"))
        if len(segments) != 1:
            return  # the recorder has said why: the disk, most likely
        if self.made:
            file = file.with_stem(f"{file.stem}-{len(self.made) + 1}")
        segments[0].rename(file)
        self.made.append(file)
        shutil.rmtree(self.directory)


def config_of(state: CacheState) -> LeaderConfig:
    """What the facts tell of the leader's configuration: block size and the tiers below; the rest are defaults.

    For a daemon of a newer version, whose own word cannot be read.
    """
    sizes = dict.fromkeys((Tier.G2, Tier.G3), 0)
    for pool in state.pools:
        if pool.info.tier in sizes:
            sizes[pool.info.tier] += pool.info.capacity_blocks or 0
    tokens = state.pools[0].info.block_tokens if state.pools else LeaderConfig().block_tokens
    return LeaderConfig(block_tokens=tokens, g2_blocks=sizes[Tier.G2], g3_blocks=sizes[Tier.G3])


def require_place(path: Path) -> Path:
    """Refuse early what the recorder would refuse after the console has drawn."""
    if path.suffix == FILE_SUFFIX:
        parts = path.with_name(f"{path.name}.parts")
        for one in (path, parts):
            if one.exists():
                raise UsageError(f"--record must name a new file, and {str(one)!r} exists")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"--record must name a file in a directory that exists, got {str(path)!r}")
    elif path.exists() and not path.is_dir():
        raise UsageError(f"--record must name a directory or a new file *.mcap, got the file {str(path)!r}")
    return path


def place_of(record: Path, number: int, total: int) -> Path:
    """Where the target of this number, from 1, is recorded: with several, a directory or a file for each."""
    if total == 1:
        return record
    return record.with_stem(f"{record.stem}-{number}") if record.suffix == FILE_SUFFIX else record / f"target-{number}"
