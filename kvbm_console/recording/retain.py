"""Retention: the oldest segments go when a directory is too large, the disk too full, or they are too old.

A segment may go before it is sealed: sealing can fall behind for as long as an engine is busy, and a bound that waits
for sealing is none. Drafts and files that a salvage set aside count as bytes and are not removed. A reader that has a
segment open keeps what it has.

Law of this file: whole segments are removed, oldest first and never the last: the rest has no hole.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.recording.recover import segment_number

RETAIN_EVERY_S: Final = 60.0
"""Ages are looked at this often; bytes also at every rotation and around every sealing."""
FREE_SEGMENTS: Final = 2
"""Room for so many segments stays free where something is retained at all: a sealing writes up to 0.82 of its source
before the source goes."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a directory stays."""

    keep_bytes: int | None = None
    keep_ns: int | None = None
    segment_bytes: int = 0
    """Size of a segment, for the room that stays free."""

    @property
    def wanted(self) -> bool:
        """Whether anything is ever removed."""
        return self.keep_bytes is not None or self.keep_ns is not None


KEEP_ALL: Final = Retention()


def _files(directory: Path) -> dict[Path, os.stat_result]:
    """The recorder's files in this directory."""
    found: dict[Path, os.stat_result] = {}
    for path in directory.iterdir():
        if segment_number(path):
            with contextlib.suppress(FileNotFoundError):  # sealed or given up while the directory was listed
                found[path] = path.stat()
    return found


def used_bytes(directory: Path) -> int:
    """Bytes of the recorder's files in this directory. Raises ``OSError``."""
    return sum(found.st_size for found in _files(directory).values())


def free_bytes(directory: Path) -> int:
    """What the disk still takes."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def retain(
    directory: Path, retention: Retention, *, growth: int = 0, ending: Callable[[str], None] = lambda stem: None,
    wall: Callable[[], int] = time.time_ns, free: Callable[[Path], int] = free_bytes,
) -> list[Path]:
    """Remove the oldest segments until the rest and ``growth`` more bytes fit; returns the removed files.

    The caller holds the directory's lock and is writing the last segment, if any segment is being written. ``ending``
    is called with the name of each segment before the segment goes. Raises ``OSError``.
    """
    if not retention.wanted:
        return []
    files = _files(directory)
    total = growth + sum(found.st_size for found in files.values())
    room = free(directory)
    segments: dict[str, list[Path]] = {}
    # An .active sorts before its sealed twin, which a crash between rename and removal left beside it. It goes first:
    # a recovery would bring an .active back that stands alone.
    for path in sorted(files):
        if path.suffix in (".active", ".mcap"):
            segments.setdefault(path.stem, []).append(path)
    removed: list[Path] = []
    for stem in list(segments)[:-1]:
        paths = segments[stem]
        old = retention.keep_ns is not None and wall() - files[paths[-1]].st_mtime_ns > retention.keep_ns
        large = retention.keep_bytes is not None and total > retention.keep_bytes
        tight = room < FREE_SEGMENTS * retention.segment_bytes
        if not (old or large or tight):
            break
        ending(stem)
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            total -= files[path].st_size
            room += files[path].st_size
            removed.append(path)
    return removed
