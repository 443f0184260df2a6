"""Retention: the oldest sealed segments go when a directory is too large, or they are too old.

What is being written, waits to be sealed, is a draft or is damaged counts as bytes and is never removed; neither is the
newest sealed segment. A reader that has a segment open keeps what it has.

Law of this file: only whole ``.mcap`` segments are removed, oldest first: what is left has no hole.
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
"""Ages are looked at this often; bytes also after every sealing."""
FREE_SEGMENTS: Final = 2
"""Room for so many segments stays free where something is retained at all: a sealing writes up to 0.82 of its source
before the source goes."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """What stays of a directory."""

    keep_bytes: int | None = None
    keep_ns: int | None = None
    segment_bytes: int = 0
    """Size of a segment, for the room that stays free."""

    @property
    def wanted(self) -> bool:
        """Whether anything is ever removed."""
        return self.keep_bytes is not None or self.keep_ns is not None


KEEP_ALL: Final = Retention()


def free_bytes(directory: Path) -> int:
    """What the disk still takes."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def retain(
    directory: Path, retention: Retention, *, wall: Callable[[], int] = time.time_ns,
    free: Callable[[Path], int] = free_bytes,
) -> list[Path]:
    """Remove what need not stay, and tell what that was. The caller holds the directory's lock. Raises ``OSError``."""
    if not retention.wanted:
        return []
    sizes = {path: path.stat() for path in directory.iterdir() if segment_number(path)}
    total = sum(found.st_size for found in sizes.values())
    room = free(directory)
    # An .active beside it means that a crash came between rename and removal: the sealed one is whole already.
    sealed = sorted((path for path in sizes if path.suffix == ".mcap"), key=segment_number)
    removed: list[Path] = []
    for path in sealed[:-1]:
        found = sizes[path]
        old = retention.keep_ns is not None and wall() - found.st_mtime_ns > retention.keep_ns
        large = retention.keep_bytes is not None and total > retention.keep_bytes
        tight = room < FREE_SEGMENTS * retention.segment_bytes
        if not (old or large or tight) or path.with_suffix(".active").exists():
            break
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        total -= found.st_size
        room += found.st_size
        removed.append(path)
    return removed
