"""Warnings that the library's lints find in the stream (``kvbm_console.recording.lints``); here they are only drawn.

Law of this file: nothing is found here. What is over leaves after a minute, or at once where the console itself greys
what it has shown.
"""

from collections.abc import Iterator
from typing import Final

from kvbm_console.recording.lints import Finding
from kvbm_console.recording.lints import Level as Found

from .mirror import Mirror
from .numbers import S

OVER_SHOWN_NS: Final = 60 * S
"""How long something that is over needs attention; the log keeps it."""
DRAWN: Final = (
    "deadlock", "stuck", "slow", "full", "thrash", "violation", "polled", "pin_leak", "preempt_loop", "pending",
    "silent", "failed_copies", "straggler", "duplicate", "staged", "never_loaded", "already_cached", "blocked",
    "late_reports", "reports_lost", "engine_ended", "publisher_queue",
)
"""Lints of the stream. A hold, a loss and the recorder's state are drawn from what the session itself knows: their
clocks and counts are of the connection, not of the events."""
LASTING: Final = ("deadlock", "stuck", "pending", "slow", "full", "thrash", "reports_lost", "engine_ended",
                  "publisher_queue")
"""Lints that say when they are over: then the console greys what it has shown."""
WHOLE_RUN: Final = ("duplicate", "staged", "never_loaded", "already_cached", "late_reports")
"""Lints about shares of everything so far: they are true for as long as the share is."""


def library_findings(mirror: Mirror, now_ns: int) -> Iterator[Finding]:
    """What the library's lints say now."""
    state = mirror.state
    for finding in mirror.watch.findings(state, now_ns):
        over = finding.until_ns is not None and finding.lint not in WHOLE_RUN
        shown_ns = 0 if finding.lint in LASTING else OVER_SHOWN_NS
        if finding.lint not in DRAWN or (over and now_ns - (finding.until_ns or 0) > shown_ns):
            continue
        if finding.lint == "silent" and finding.request is not None:
            continue  # its slot is stuck, and says so with the rank
        if finding.level is not Found.NOTE:
            yield finding
