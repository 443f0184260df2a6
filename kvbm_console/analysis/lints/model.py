"""What a lint says, and what each lint means.

Law of this file: a finding names its evidence by number, its threshold, why it is bad and what to do; words are those
of the console (who, what, because), present tense and without blame.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final

import msgspec

from kvbm_console.core.config import SECOND_NS

EVIDENCE_MAX: Final = 8
"""Event numbers that one finding names; ``count`` says how often it was seen."""


class Level(IntEnum):
    """How bad. A note is worth knowing and does not make the diagnosis a bad one."""

    FAULT = 0
    HELD = 1
    CAUTION = 2
    NOTE = 3

    @property
    def label(self) -> str:
        """The level's name as people read it."""
        return self.name.lower()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that needs a person. Times of the engine; ``until_ns`` None: it is still so where the evidence ends."""

    lint: str
    level: Level
    who: str
    what: str
    because: str
    seq: int
    """Where it begins or is seen best."""
    evidence: tuple[int, ...] = ()
    """Further events, at most ``EVIDENCE_MAX``."""
    request: str | None = None
    slot: str | None = None
    since_ns: int = 0
    until_ns: int | None = None
    count: int = 1
    weight: int = 0
    """Longest or largest first among equals."""


class About(msgspec.Struct, frozen=True):
    """One lint: when it speaks, why that is bad, and what to do."""

    threshold: str
    bad: str
    do: str


ABOUT: Final[dict[str, About]] = {
    "stuck": About(
        "in one state for more than 4 × p99 of such stays, at least 2 s; 10 s while fewer than 20 were seen",
        "the request neither computes nor ends, and keeps its blocks from others",
        "look at what it waits for: a copy without a report points at its worker, blocks at the size of the tier; an "
        "abort or a reset frees what it holds",
    ),
    "deadlock": About(
        "for 5 s no request of an engine runs and no copy is in flight, and the first request of its queue wants more "
        "device blocks than are free",
        "no request can go on any more: each waits for blocks of another, or behind it; nothing ends that by itself",
        "abort the request that holds most, or reset the engine; then give the device tier more blocks or admit fewer "
        "requests, and report the circle to the engine's or connector's project",
    ),
    "polled": About(
        "the same call of a request refused 100 times or more",
        "the engine asks for something that will not come, for ever, and fills the log with it",
        "look at what the request waits for; an engine should ask once and wait to be told",
    ),
    "pin_leak": About(
        "a finished request that keeps blocks for 2 s without a copy, or a holder that nobody is",
        "the blocks can never be reused; the tier shrinks until nothing fits",
        "keep the recording and report it with 'rec verify': this is a bug",
    ),
    "held": About(
        "a slot that stands still at a breakpoint",
        "it keeps its blocks while it waits",
        "continue it; it goes on by itself when its time is over",
    ),
    "preempt_loop": About(
        "a request preempted 3 times within 60 s and hardly further than before, by less than 2 blocks",
        "what it computed is thrown away and computed again; throughput goes into nothing",
        "run fewer requests at once, or give the device tier more blocks",
    ),
    "pending": About(
        "a copy not begun for more than 4 × p99 of its route, at least 2 s; 10 s while fewer than 20 were seen",
        "blocks that should be saved or loaded wait in line",
        "look at what stands in front of it: a closed pipeline or a full tier below holds all of them, a busy link "
        "those that are promoted",
    ),
    "slow": About(
        "a copy on the wire for more than 4 × p99 of its route, at least 100 ms; 10 s while fewer than 20 were seen",
        "requests that wait for the load wait with it, and its places stay pinned at both ends",
        "look at the link or disk of this route",
    ),
    "silent": About(
        "a copy without all its reports for 30 s and for 4 × the limit of its route",
        "a report that never comes pins the places of the copy for ever, and its request never ends",
        "look at the worker of the silent rank; a reset frees the places when it reports or is gone",
    ),
    "failed_copies": About(
        "one copy that failed",
        "hits are taken back and computed again; blocks that should be kept are lost",
        "read the error that the rank reported",
    ),
    "straggler": About(
        "the last copy of a batch needs 4 × the time of the others, and 100 ms more",
        "the request waits for the slowest part of its load",
        "look at the tier that the straggler reads from",
    ),
    "duplicate": About(
        "5 % of the blocks that were copied, and 64 of them, stood in the target already or were on their way",
        "the link carries the same bytes twice",
        "let requests that share a prefix wait for the first one's load",
    ),
    "staged": About(
        "3 stagings, and 5 % of all, ended by their deadline",
        "places below are pinned for requests that are not admitted in time",
        "admit less or give the device tier more blocks; a longer staging_deadline_ns only hides it",
    ),
    "never_loaded": About(
        "1,000 blocks stored in a tier and fewer than 1 % of them ever loaded",
        "copying down costs bandwidth and pays nothing back",
        "make the tier larger than the time between two uses needs, store less, or do without it",
    ),
    "already_cached": About(
        "half of the candidates that ended, and 100 of them, were skipped as already_cached",
        "planning looks at the same blocks again and again",
        "look at who plans them; a higher offload_threshold plans less",
    ),
    "full": About(
        "no place of a tier empty or evictable for 2 s",
        "nothing can be admitted or copied there, whatever the policy",
        "lower the batch, or give the tier more blocks",
    ),
    "thrash": About(
        "of 100 or more blocks that a tier evicted in 60 s, more than 10 % came back within the window "
        "(--thrash-window)",
        "blocks are given up and fetched again: the copies cost more than they save",
        "the tier is too small for this reuse; compare capacities",
    ),
    "dropped_with_room": About(
        "of the blocks that a tier evicted, 100 and 5 % never had a copy below while the tier below had places to give",
        "they are computed again when they are asked for, although the tier below could have kept them",
        "copy down earlier: a lower --kv-offload-threshold, and no --offload-preset original; look at a link that is "
        "always busy",
    ),
    "lost": About(
        "any event that is missing",
        "what happened there is not known; behind it everything is exact again",
        "give the recorder or the reader more room, or look at the disk",
    ),
    "reports_lost": About(
        "any batch of an engine's event stream that never came, or could not be read",
        "what the engine holds is known only in part: its counts may be wrong until it clears its cache or restarts",
        "give the engine a replay address and this program that address too; raise the engine's hwm and buffer_steps",
    ),
    "engine_ended": About(
        "an engine whose event stream is followed has closed its port, or a tapped one ended with live requests",
        "nobody serves there, and its cache is lost: what comes next is computed anew",
        "look at the engine's log; it is followed again when it is back",
    ),
    "publisher_queue": About(
        "an engine whose event stream is followed and whose max_queue_size is below 10,000 batches; a note where it is "
        "not known, because a stream does not tell it",
        "vLLM's step waits while its publisher's queue is full (vllm-project/vllm#53859), and the thread that empties "
        "it answers replays, too",
        "set max_queue_size of kv_events_config to its default of 100,000; followed by its http:// address the engine "
        "tells its size",
    ),
    "recorder": About(
        "the recorder was degraded",
        "events were published and not recorded",
        "free space where the recording goes, or record elsewhere",
    ),
    "clock": About(
        "the wall clock moved by itself",
        "times of the wall before and behind it cannot be compared; order and ages are not affected",
        "nothing here; look at the time service of the machine",
    ),
    "blocked": About(
        "the daemon's loop stood still",
        "nobody was served meanwhile, and holds went past their time",
        "look at what the daemon was called for; an interceptor that blocks is the usual cause",
    ),
    "verdict": About(
        "the run ended here with a finding of `explore`",
        "the engine, its connector or the leader did what the named monitor forbids",
        "step back from here to see the course of it; the scenario, a reproduction and a text for an issue lie beside "
        "the recording",
    ),
    "wrong_bytes": About(
        "one block whose bytes differ from those that a store had taken",
        "the model reads or will read another context than the request has, and nothing else tells",
        "the edge that is named was missing: report it to the engine's or connector's project, and set \"action\": "
        "\"recompute\" of sanitize until it is mended",
    ),
    "violation": About(
        "a broken invariant",
        "the core caught itself in a mistake; the stimulus was refused and the facts are as before it",
        "keep the recording and report it: this is a bug",
    ),
    "late_reports": About(
        "10 reports refused as duplicate, late or of an older epoch",
        "a worker reports copies that nobody waits for; its bookkeeping and ours differ",
        "look at the worker that sends them",
    ),
    "unfinished": About(
        "a recording without its closing mark",
        "it is still being written, or its daemon was killed; what is there is whole",
        "'rec recover' makes it whole",
    ),
}
"""Every lint. The key is stable and is what JSON carries."""


OVER_SHOWN_NS: Final = 60 * SECOND_NS
"""How long something that is over needs attention; the log keeps it."""
LASTING: Final = (
    "deadlock", "stuck", "pending", "slow", "full", "thrash", "reports_lost", "engine_ended", "publisher_queue",
)
"""Lints that say when they are over: the console then greys what it has shown."""
WHOLE_RUN: Final = ("duplicate", "staged", "never_loaded", "already_cached", "late_reports")
"""Lints about shares of everything so far: they are true for as long as the share is."""


def current(findings: Iterable[Finding], now_ns: int) -> Iterator[Finding]:
    """The findings that need a person now, of a stream that is watched all the time. A note needs nobody, and a finding
    that is over leaves after a minute, or at once where its lint says when."""
    for finding in findings:
        over = finding.until_ns is not None and finding.lint not in WHOLE_RUN
        shown_ns = 0 if finding.lint in LASTING else OVER_SHOWN_NS
        if finding.level is not Level.NOTE and not (over and now_ns - (finding.until_ns or 0) > shown_ns):
            yield finding


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The document of ``doctor``: a stable contract."""

    evidence: str
    ok: bool
    """Whether nothing worse than a note was found."""
    events: int
    lost_events: int
    requests: int
    from_ns: int
    until_ns: int
    findings: tuple[Finding, ...]
    """Worst first, longest first among equals."""
    evicted_blocks: int = 0
    thrash_blocks: int = 0
    """Of these, brought back within the thrash window."""
    thrash_rate: float | None = None
    """``thrash_blocks`` / ``evicted_blocks``; None where nothing was evicted."""


class Histogram:
    """Durations by size, eight steps to the octave, so that a percentile is at most 9 % too high.

    >>> stays = Histogram()
    >>> for ms in range(1, 101): stays.add(ms * 1_000_000)
    >>> 99e6 <= stays.p99() <= 99e6 * 1.09
    True
    """

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self.count = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: int) -> None:
        """One more duration in nanoseconds."""
        bucket = _bucket(value)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1

    def p99(self) -> int:
        """Not less than 99 % of the durations; 0 when there are none."""
        wanted = -(-99 * self.count // 100)
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return _top(bucket)
        return 0


STEPS: Final = 8
FEW: Final = 20
"""Fewer durations than this tell nothing about what is usual: a p99 of five samples is their maximum."""
UNKNOWN_LIMIT_NS: Final = 10 * SECOND_NS


def _bucket(value: int) -> int:
    if value < STEPS:
        return max(0, value)
    shift = value.bit_length() - 4
    return STEPS * (shift + 1) + (value >> shift) - STEPS


def _top(bucket: int) -> int:
    """The largest value of a bucket."""
    if bucket < STEPS:
        return bucket
    shift, step = divmod(bucket - STEPS, STEPS)
    return ((step + STEPS + 1) << shift) - 1


def limit_of(stays: Histogram | None, least_ns: int) -> int:
    """Above this a duration is too long: four times what is usual, ``UNKNOWN_LIMIT_NS`` while that is not known."""
    if stays is None or stays.count < FEW:
        return max(UNKNOWN_LIMIT_NS, least_ns)
    return max(least_ns, 4 * stays.p99())


def spoken(ns: int) -> str:
    """An age in at most two units and three digits: ``48ms``, ``11.8s``, ``4m12s``.

    >>> spoken(48_000_000), spoken(11_800_000_000), spoken(252 * 10**9), spoken(7_260 * 10**9)
    ('48ms', '11.8s', '4m12s', '2h01m')
    """
    if ns < SECOND_NS:
        return f"{ns / 1e6:.3g}ms"
    if ns < 60 * SECOND_NS:
        return f"{ns / 1e9:.3g}s"
    seconds = ns // SECOND_NS
    if seconds < 3_600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    return f"{seconds // 3_600}h{seconds % 3_600 // 60:02}m"


def plural(count: int, word: str) -> str:
    """``1 copy``, ``6 copies``."""
    if count == 1:
        return f"1 {word}"
    return f"{count:,} {word[:-1]}ies" if word.endswith("y") else f"{count:,} {word}s"
