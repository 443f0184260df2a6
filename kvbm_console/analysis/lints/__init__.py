"""Lints: what needs a person, found in events and facts, each with threshold, evidence, explanation and what to do.

The console draws them while events come in. ``doctor`` asks them about a whole recording or a live target, and tests
assert that there are none. They are visitors of one walk: ``analysis.diagnosis`` walks evidence, ``Watch`` folds a
stream. To add a lint, write its class in the file of its subject; nothing else names it.

Law of this package: a healthy run has no finding, and a finding names its evidence.
"""

from kvbm_console.analysis.lints import process, streams, tiers, worth  # noqa: F401
from kvbm_console.analysis.lints.copies import Pending, Slow
from kvbm_console.analysis.lints.lint import LINTS, Finding, Level, Lint, LintFold, current
from kvbm_console.analysis.lints.slots import WATCHED, Stuck, fault_after

__all__ = [
    "LINTS",
    "WATCHED",
    "Finding",
    "Level",
    "Lint",
    "LintFold",
    "Pending",
    "Slow",
    "Stuck",
    "all_lints",
    "current",
    "fault_after",
    "stream_lints",
]


def all_lints() -> list[Lint]:
    """One of each, fresh."""
    return [lint() for lint in LINTS.values()]


def stream_lints() -> list[Lint]:
    """Those for a stream that is watched all the time."""
    return [lint() for lint in LINTS.values() if lint.on_stream]
