"""Why each lint is bad and what to do about it, and the threshold that it watches.

Law of this file: every lint of ``model.lints`` has an entry here, and a test says so.
"""

from typing import Final

import msgspec

from kvbm_console.recording.lints import ABOUT

from .lint_more import DRAWN


class LintText(msgspec.Struct, frozen=True):
    """What is told of a lint beside its evidence."""

    threshold: str
    why: str
    what: str


TEXTS: Final[dict[str, LintText]] = {
    "stuck": LintText(
        "longer in one state than 4 × the p99 of the last minute, at least 2 s; a fault from 4 times that and 30 s on",
        "The request makes no progress while it keeps its blocks, and its caller waits. If many are stuck in the same "
        "state, what they wait for is the cause: a route, a rank, or room in G1.",
        "Open its story: the last line is what it waits for. A silent rank has lost a copy; restart that worker. "
        "Waiting for blocks: lower the batch or give G1 more room.",
    ),
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
    "slow": LintText(
        "older than 4 × the p99 of its route in the last minute",
        "Loads that are late keep requests out of the batch; offloads that are late keep G1 places in writing, which "
        "cannot be given out.",
        "Look at the queue of the route: many queued means that the link is full, few queued and slow wire times mean "
        "that the link or the disk itself is slow.",
    ),
    "full": LintText(
        "no place that is empty or cached",
        "No block can be given out: new requests wait, running ones are preempted, and what is preempted is computed "
        "again.",
        "Lower the number of requests in a batch, or give the tier more blocks; look for requests that finished and "
        "still pin theirs.",
    ),
    "thrash": LintText(
        "more than 10 % of at least 100 blocks that were loaded in a minute had been offloaded just before",
        "The same blocks go down and up again: the link works for nothing.",
        "The tier above is too small for the reuse of this traffic, or the policy evicts what comes back. Compare "
        "policies and capacities on a recording.",
    ),
    "lost": LintText(
        "any loss within the last 5 minutes",
        "This console did not get some events: lists are exact again since the snapshot, but stories, rates and the "
        "timeline have a hole, which is drawn.",
        "The reader was too slow or away. Recordings of the daemon have the events if it records.",
    ),
    "recorder": LintText(
        "the recorder is degraded",
        "Events are not being kept: what happens now cannot be replayed.",
        "Free space on its disk, or point --record elsewhere; it goes on by itself as soon as it can write.",
    ),
    "violations": LintText(
        "any invariant that was found broken",
        "The leader refused a stimulus that contradicts its facts: the engine and the leader disagree.",
        "Find the InvariantViolated event in the log and keep a recording; this is a bug of the engine's adapter or of "
        "the leader.",
    ),
    "clock": LintText(
        "the wall's clock of the daemon moved against its monotonic one",
        "Times of day on the screen jump. Order, ages and durations are unaffected: they never come from that clock.",
        "Look at the time service of the host.",
    ),
}
"""Lint to its texts."""
TEXTS.update({lint: LintText(ABOUT[lint].threshold, ABOUT[lint].bad, ABOUT[lint].do) for lint in DRAWN})
