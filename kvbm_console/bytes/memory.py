"""Memory that a daemon shares with its workers, and the room that they need.

Law of this file: memory and room that the machine does not have are refused before any of it is taken.
"""

import os
from pathlib import Path
from typing import Final

from kvbm_console.core.errors import UsageError

PAGE: Final = 4096


def arena_bytes(places: int, shard_bytes: int) -> int:
    """The size of an arena: a column of hashes, rounded up to a page, and the places."""
    return -(-places * 8 // PAGE) * PAGE + places * shard_bytes


def make_arena(name: str, places: int, shard_bytes: int) -> int:
    """The descriptor of a new arena, closed on exec. It takes memory as it is written."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, arena_bytes(places, shard_bytes))
    return fd


def require_memory(needed: int) -> None:
    """Refuse arenas that would push other programs out of memory."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        numbers = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}
    if needed > numbers["MemAvailable"]:
        raise UsageError(
            f"--bytes must have {needed} bytes of memory for G1 and G2, got {numbers['MemAvailable']}: fewer blocks "
            "or a smaller --kv-geometry take less"
        )


def slot_bytes(places: int, shard_bytes: int) -> int:
    """The size of a slot file of whole pages, with its index."""
    return PAGE + places * (shard_bytes + 64)


def require_room(directory: Path, needed: int) -> None:
    """Make the directory, and refuse it if its disk has less than ``needed`` bytes free."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        disk = os.statvfs(directory)
    except OSError as error:
        raise UsageError(f"--bytes must name a directory that can be written, got {directory}: {error.strerror}"
                         ) from None
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        raise UsageError(f"--bytes must name a directory with room for {needed} bytes, got {directory} with {free}")
