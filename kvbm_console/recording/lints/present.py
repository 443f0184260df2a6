"""Which findings need a person now, of a stream that is watched all the time.

Law of this file: what is over leaves after a minute, or at once where its lint says when; a note needs nobody.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from kvbm_console.core.config import SECOND_NS
from kvbm_console.recording.lints.model import Finding, Level

OVER_SHOWN_NS: Final = 60 * SECOND_NS
"""How long something that is over needs attention; the log keeps it."""
LASTING: Final = (
    "deadlock", "stuck", "pending", "slow", "full", "thrash", "reports_lost", "engine_ended", "publisher_queue",
)
"""Lints that say when they are over: the console then greys what it has shown."""
WHOLE_RUN: Final = ("duplicate", "staged", "never_loaded", "already_cached", "late_reports")
"""Lints about shares of everything so far: they are true for as long as the share is."""


def current(findings: Iterable[Finding], now_ns: int) -> Iterator[Finding]:
    """Those that are so now, or were a moment ago."""
    for finding in findings:
        over = finding.until_ns is not None and finding.lint not in WHOLE_RUN
        shown_ns = 0 if finding.lint in LASTING else OVER_SHOWN_NS
        if finding.level is not Level.NOTE and not (over and now_ns - (finding.until_ns or 0) > shown_ns):
            yield finding
