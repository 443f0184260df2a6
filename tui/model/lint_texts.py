"""Why each lint is bad and what to do about it, and the threshold that it watches.

Law of this file: the library's lints are explained by the library; a test says that every one that is drawn is here.
"""

from typing import Final

import msgspec

from kvbm_console.analysis.lints import ABOUT

from .lint_more import DRAWN


class LintText(msgspec.Struct, frozen=True):
    """What is told of a lint beside its evidence."""

    threshold: str
    why: str
    what: str


TEXTS: Final[dict[str, LintText]] = {
    "held": LintText(
        "any hold",
        "Somebody stopped this request with a breakpoint. It keeps its blocks until it goes on; its caller waits.",
        "c continues it. It goes on by itself when its time is over, or when the session that holds it is gone.",
    ),
    "all_held": LintText(
        "every request in flight is held",
        "Nothing moves any more: no step of the engine can finish anything.",
        "C continues all, D also mutes the breakpoints. Otherwise the first hold ends by itself.",
    ),
    "frozen": LintText(
        "the target is frozen",
        "No engine forms an iteration and no copy is evaluated or begins: every request waits.",
        "F thaws it. Otherwise it goes on by itself, at the latest when the longest freeze is over.",
    ),
    "lost": LintText(
        "any loss within the last 5 minutes",
        "This console did not get some events: lists are exact again since the snapshot, but stories, rates and the "
        "timeline have a hole, which is drawn.",
        "The reader was too slow or away. Recordings of the daemon have the events if it records.",
    ),
    "part": LintText(
        "a part of the daemon ended within the last 5 minutes",
        "A task or thread of the daemon ended by a bug. It is restarted; what it did may have a hole.",
        "Report what the daemon's log says. If it does not run again, restart the daemon.",
    ),
    "recorder": LintText(
        "the recorder is degraded",
        "Events are not being kept: what happens now cannot be replayed.",
        "Free space on its disk, or point --record elsewhere; it goes on by itself as soon as it can write.",
    ),
}
"""Lint to its texts."""
TEXTS.update({lint: LintText(ABOUT[lint].threshold, ABOUT[lint].bad, ABOUT[lint].do) for lint in DRAWN})
