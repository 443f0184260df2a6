"""Warnings that the library's lints find in the stream (``kvbm_console.analysis.lints``); here they are only drawn.

Law of this file: nothing is found here. What is over leaves after a minute, or at once where the console itself greys
what it has shown.
"""

from collections.abc import Iterator
from typing import Final

from kvbm_console.analysis.lints import Finding, current

from .mirror import Mirror

DRAWN: Final = (
    "deadlock", "stuck", "slow", "full", "thrash", "verdict", "wrong_bytes", "violation", "polled", "pin_leak",
    "preempt_loop", "pending", "silent", "failed_copies", "straggler", "duplicate", "staged", "never_loaded",
    "already_cached", "blocked", "late_reports", "reports_lost", "engine_ended", "publisher_queue", "dropped_with_room",
)
"""Lints of the stream. A hold, a loss and the recorder's state are drawn from what the session itself knows: their
clocks and counts are of the connection, not of the events."""


def library_findings(mirror: Mirror, now_ns: int) -> Iterator[Finding]:
    """What the library's lints say now."""
    for finding in current(mirror.watch.findings(mirror.state, now_ns), now_ns):
        if finding.lint not in DRAWN or (finding.lint == "silent" and finding.request is not None):
            continue  # a silent copy's slot is stuck, and says so with the rank
        yield finding
