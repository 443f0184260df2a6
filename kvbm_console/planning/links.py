"""The measurement of ``bench links``: times of a worker process, fitted to latency and bandwidth.

Law of this file: a fit comes with its error, and one that is wrong by half or more is not written.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import Route
from kvbm_console.planning.copies import CopyTime, LinkFit, fit_links
from kvbm_console.simulator.link_settings import MEMCPY

ERROR_MAX: Final = 0.5
SHARE_S: Final = 8 * 5
"""Measurements of a whole run: sizes times kinds and depths."""
ROOM_BYTES: Final = 160 * 2**20
"""The file of the measurement and some room beside it."""
WORKER: Final = "from kvbm_console.planning.linkbench import main; main()"
LINGER_S: Final = 60.0
_ROUTES: Final = {MEMCPY: Route.G1_G2, "disk-read": Route.G3_G2, "disk-write": Route.G2_G3}


class LinkTime(msgspec.Struct, frozen=True):
    """The time of copies of one size: the median and the 90th percentile."""

    kind: str
    depth: int
    size_bytes: int
    p50_ns: int
    p90_ns: int
    rounds: int
    direct: bool
    """False if the page cache was not passed by."""


class MeasuredLink(msgspec.Struct, frozen=True):
    """A link as ``base_latency_ns + bytes / bytes_per_s``; ``error`` is the largest relative error of a size."""

    name: str
    depth: int
    base_latency_ns: int
    bytes_per_s: float
    error: float
    direct: bool


class LinkBench(msgspec.Struct, frozen=True):
    """The measured links, and the times behind them."""

    links: list[MeasuredLink]
    times: list[LinkTime]
    out: str | None = None


def measure_links(directory: Path | None, seconds: float) -> LinkBench:
    """Measure memory and, with a directory, its disk in a process of its own, for about so many seconds."""
    if directory is not None:
        _check_room(directory)
    words = [sys.executable, "-P", "-c", WORKER, f"{seconds / SHARE_S:.4f}"]
    if directory is not None:
        words.append(str(directory))
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=seconds + LINGER_S)
    except subprocess.TimeoutExpired:
        raise UsageError(f"--disk must answer within {seconds + LINGER_S:.0f} s, got {str(directory)!r}") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        raise UsageError(f"--disk must be a directory that can be written and read, got {str(directory)!r}: {why}")
    times = [msgspec.json.decode(line, type=LinkTime) for line in done.stdout.splitlines()]
    return LinkBench(fitted(times), times)


def _check_room(directory: Path) -> None:
    try:
        room = os.statvfs(directory)
    except OSError as error:
        raise UsageError(f"--disk must be a directory, got {str(directory)!r}: {error.strerror}") from None
    free = room.f_bavail * room.f_frsize
    if free < ROOM_BYTES:
        raise UsageError(f"--disk must have room for {ROOM_BYTES} bytes, got {str(directory)!r} with {free}")


def fitted(times: Sequence[LinkTime]) -> list[MeasuredLink]:
    """A link for each kind and depth, fitted to the medians of the sizes."""
    found = []
    for kind, depth in dict.fromkeys((row.kind, row.depth) for row in times):
        rows = [row for row in times if (row.kind, row.depth) == (kind, depth)]
        (fit,) = fit_links([CopyTime(_ROUTES[kind], row.size_bytes, 0, row.p50_ns) for row in rows])
        found.append(MeasuredLink(
            kind, depth, fit.latency_ns, fit.bytes_per_s, max(_off(fit, row) for row in rows), rows[0].direct
        ))
    return found


def _off(fit: LinkFit, row: LinkTime) -> float:
    told = fit.latency_ns + row.size_bytes * SECOND_NS / fit.bytes_per_s
    return abs(told - row.p50_ns) / row.p50_ns


def file_of(bench: LinkBench) -> str:
    """The file for ``--links``: of each kind the deepest. Raises ``UsageError`` for a fit that is wrong by half."""
    deepest = {link.name: link for link in sorted(bench.links, key=lambda link: link.depth)}
    for link in deepest.values():
        if link.error > ERROR_MAX:
            raise UsageError(
                f"--out must have fits within {ERROR_MAX:.0%}, and that of {link.name} is off by {link.error:.0%}: "
                "measure again when the machine is idle"
            )
    return "".join(
        f"[{link.name}]\nbytes_per_s = {link.bytes_per_s:.0f}\nbase_latency_ns = {link.base_latency_ns}\n"
        f"error = {link.error:.3f}\n\n" for link in deepest.values()
    )
