"""Options of a recording (segment size and time, retention, syncing), and a recorder's status.

Law of this file: a value out of bounds is refused at construction with one sentence, before a file is made.
"""

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from kvbm_console.core.config import SECOND_NS, require
from kvbm_console.core.errors import UsageError

SEGMENT_BYTES: Final = 256 * 1000 * 1000
"""A segment is rotated at this size: recovery scans it within a second, retention works in steps of it."""
SEGMENT_NS: Final = 600 * SECOND_NS
SEGMENT_BYTES_MIN: Final = 1_000_000
"""Every segment begins with a keyframe, which takes up to some megabytes: smaller segments would hold little else."""
SEGMENT_BYTES_MAX: Final = 4_000_000_000
"""A crash leaves at most this to be scanned, in about three seconds."""
SEGMENT_NS_MIN: Final = SECOND_NS
SEGMENT_NS_MAX: Final = 24 * 3_600 * SECOND_NS
KEEP_NS_MIN: Final = 60 * SECOND_NS
SYNC_INTERVAL_S: Final = 1.0
"""A power loss may take this much. Measured: syncing every second raises the writer's p99 from 37 to 61 us."""
SYNCS: Final[dict[str, float | None]] = {"1s": SYNC_INTERVAL_S, "always": 0.0, "never": None}
"""Word of ``--sync`` to seconds between two syncs: 0 after every flush, None only at the end of a segment."""

T = TypeVar("T")

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_SIZES: Final = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_AGES_NS: Final = {"s": SECOND_NS, "m": 60 * SECOND_NS, "h": 3_600 * SECOND_NS, "d": 86_400 * SECOND_NS}


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """The limits within which a directory is kept."""

    keep_bytes: int | None = None
    keep_ns: int | None = None
    segment_bytes: int = 0
    """Size of a segment, for the room that stays free."""

    @property
    def wanted(self) -> bool:
        """True if anything is ever removed."""
        return self.keep_bytes is not None or self.keep_ns is not None


KEEP_ALL: Final = Retention()


class RecordingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of ``serve`` and ``rec start`` about a recording."""

    segment_bytes: int = SEGMENT_BYTES
    segment_ns: int = SEGMENT_NS
    keep_bytes: int | None = None
    """Most bytes of the whole directory, None for no bound. Sealed segments go, oldest first."""
    keep_ns: int | None = None
    """The time for which a sealed segment stays; None means for ever."""
    sync: str = "1s"
    """A word of ``SYNCS``."""
    queue_bytes: int | None = None
    """Bytes that may wait to be written; None for the usual room."""

    def __post_init__(self) -> None:
        require(SEGMENT_BYTES_MIN <= self.segment_bytes <= SEGMENT_BYTES_MAX, "segment-size", "from 1MB to 4GB",
                f"{self.segment_bytes}B")
        require(SEGMENT_NS_MIN <= self.segment_ns <= SEGMENT_NS_MAX, "segment-time", "from 1s to 24h",
                f"{self.segment_ns / SECOND_NS:g}s")
        require(self.keep_bytes is None or self.keep_bytes >= 2 * self.segment_bytes, "keep",
                f"at least two segments ({2 * self.segment_bytes}B)", f"{self.keep_bytes}B")
        require(self.keep_ns is None or self.keep_ns >= KEEP_NS_MIN, "keep", "at least 1m",
                f"{(self.keep_ns or 0) / SECOND_NS:g}s")
        require(self.sync in SYNCS, "sync", f"one of {', '.join(SYNCS)}", self.sync)

    @property
    def sync_interval_s(self) -> float | None:
        """Seconds between two syncs, 0 for after every flush, None for only at the end of a segment."""
        return SYNCS[self.sync]

    def settings(self) -> dict[str, Any]:
        """The arguments of a ``Recorder`` that these options come to."""
        retention = Retention(keep_bytes=self.keep_bytes, keep_ns=self.keep_ns, segment_bytes=self.segment_bytes)
        return {
            "segment_bytes": self.segment_bytes, "segment_ns": self.segment_ns,
            "sync_interval_s": self.sync_interval_s, "retention": retention,
            **({} if self.queue_bytes is None else {"queue_bytes": self.queue_bytes}),
        }


class RecorderStatus(msgspec.Struct, frozen=True):
    """A recorder's status, for heartbeats and screens. ``synced_age_ns`` is the time since everything written was also
    synced."""

    state: str
    """``recording``, ``degraded`` or ``closed``."""
    written_seq: int
    synced_seq: int
    synced_age_ns: int
    not_recorded: int
    path: str
    bytes: int
    segment: int = 1
    reason: str | None = None
    """Why it is degraded, in the system's words."""
    sync_failures: int = 0
    removed_segments: int = 0
    """Sealed segments that retention has removed."""


def parse_size(text: str) -> int:
    """Bytes of ``256MB`` or ``1.5GiB``. Raises ``UsageError``.

    >>> parse_size("256MB")
    256000000
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"must be a size with a unit such as 256MB or 20GiB, got {text!r}")
    return round(float(match[1]) * _SIZES[match[2]])


def parse_age(text: str) -> int:
    """Nanoseconds of ``10m`` or ``7d``. Raises ``UsageError``.

    >>> parse_age("1.5h")
    5400000000000
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"must be a time with a unit such as 10m or 7d, got {text!r}")
    return round(float(match[1]) * _AGES_NS[match[2]])


def parse_keep(text: str) -> tuple[int | None, int | None]:
    """(bytes, nanoseconds) of a size or a time; the other value is None. Raises ``UsageError``."""
    if _AGE.fullmatch(text.strip()):
        return None, parse_age(text)
    if _SIZE.fullmatch(text.strip()):
        return parse_size(text), None
    raise UsageError(f"must be a size such as 20GB or a time such as 7d, got {text!r}")


def recording_options(
    *, segment_size: str | None = None, segment_time: str | None = None, keep: str | None = None,
    sync: str | None = None,
) -> RecordingOptions:
    """Options from the words of a command line; omitted words take their default. Raises ``UsageError``."""
    values: dict[str, Any] = {} if sync is None else {"sync": sync}
    if segment_size is not None:
        values["segment_bytes"] = _named("segment-size", segment_size, parse_size)
    if segment_time is not None:
        values["segment_ns"] = _named("segment-time", segment_time, parse_age)
    if keep is not None:
        values["keep_bytes"], values["keep_ns"] = _named("keep", keep, parse_keep)
    return RecordingOptions(**values)


def _named(flag: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{flag} {error}") from None
