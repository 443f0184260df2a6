"""The digest of a daemon: hit rates, times and missing prefixes in a few kilobytes that can be added up over a fleet.

Theory of operation
-------------------
Three parts, all of bounded size:

- Counts of prompt blocks and of hits by tier.
- ``DurationSketch``: how many durations fell into each bucket. A bucket ends at ``GAMMA`` times the end of the one
  before, so a quantile is at most 2 % too high (the DDSketch of Masson, Rim and Lee, VLDB 2019).
- ``Missing``: the blocks at which most prompt blocks began to miss, by the algorithm Space-Saving (Metwally, Agrawal
  and El Abbadi, ICDT 2005). When a new block comes and the table is full, it takes the place and the count of the
  smallest entry, which is its greatest possible error.

Two digests add up to the digest of both streams of events. Counts and times add up exactly. The entries of the missing
prefixes keep their bound: count - error <= true count <= count.

Law of this file: the order in which digests are added changes no count and no time.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from kvbm_console.analysis.admissions import FirstMisses, SeenHits
from kvbm_console.analysis.request_times import LiveTimes, RequestTimes
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.core import events as ev
from kvbm_console.core.ids import SlotState
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen

GAMMA: Final = 1.02
COUNTED_MAX: Final = 256
"""Missing prefixes that a daemon counts. Each whose share of the missed blocks is above 1/256 is among them."""
MISSING_MAX: Final = 64
"""Missing prefixes that a digest tells: the largest of those that are counted."""
UNKNOWN: Final = "unknown"
"""The reason where a leader cannot know it: that of an engine that is watched beside its host tier."""
_LOG: Final = math.log(GAMMA)
BUCKET_MAX: Final = math.ceil(64 * math.log(2) / _LOG)
"""Bucket of the longest time that 64 bits hold."""
Count = Annotated[int, msgspec.Meta(ge=0)]
"""A number of a digest. Digests come from other programs: impossible numbers are refused when they are decoded, so a
sum never fails."""
Bucket = Annotated[int, msgspec.Meta(ge=0, le=BUCKET_MAX)]
Hits = Annotated[list[Count], msgspec.Meta(min_length=4, max_length=4)]


class DurationSketch(msgspec.Struct):
    """Durations by size.

    >>> times = DurationSketch()
    >>> for ms in range(1, 101): times.add(ms * 1_000_000)
    >>> 50e6 <= times.quantile(0.5) <= 50e6 * GAMMA
    True
    """

    buckets: dict[Bucket, Count] = {}

    def add(self, ns: int) -> None:
        """One more duration in nanoseconds."""
        bucket = math.ceil(math.log(ns) / _LOG) if ns > 1 else 0
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def add_all(self, other: "DurationSketch") -> None:
        """The durations of another digest."""
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    @property
    def count(self) -> int:
        """How many durations were added."""
        return sum(self.buckets.values())

    def quantile(self, share: float) -> int | None:
        """Nanoseconds that this share of the durations does not exceed, at most 2 % too high; None without any."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return math.ceil(GAMMA**bucket)
        return None


class MissedFrom(msgspec.Struct):
    """Prompts that began to miss at one block: ``blocks`` that they had to compute, and ``error`` of them at most that
    belong to other blocks."""

    blocks: Count = 0
    error: Count = 0
    requests: Count = 0
    why: str = ""
    """The reason of the last request, or ``UNKNOWN``."""


class Missing(msgspec.Struct):
    """The blocks at which most prompt blocks began to miss, by their hash."""

    of: dict[Count, MissedFrom] = {}

    def add(self, key: int, blocks: int, why: str) -> None:
        """A prompt missed ``blocks`` from this block on."""
        found = self.of.get(key)
        if found is None:
            found = MissedFrom()
            if len(self.of) >= COUNTED_MAX:
                smallest = min(self.of, key=lambda other: self.of[other].blocks)
                found.blocks = found.error = self.of.pop(smallest).blocks
            self.of[key] = found
        found.blocks += blocks
        found.requests += 1
        found.why = why

    def most(self, count: int) -> list[tuple[int, MissedFrom]]:
        """The entries with the most blocks that are certainly theirs."""
        return sorted(self.of.items(), key=lambda entry: entry[1].error - entry[1].blocks)[:count]

    def largest(self) -> "Missing":
        """The entries that a digest tells. None that is left out has more blocks than the smallest."""
        most = sorted(self.of, key=lambda key: (-self.of[key].blocks, key))[:MISSING_MAX]
        return Missing({key: self.of[key] for key in most})

    @property
    def _floor(self) -> int:
        """The most that a block which is not named may have missed."""
        return min(entry.blocks for entry in self.of.values()) if len(self.of) >= MISSING_MAX else 0

    def add_all(self, others: "Iterable[Missing]") -> None:
        """The missing prefixes of other digests. A block that a side does not name counts as its smallest entry."""
        sides = [self.of, *(other.of for other in others)]
        floors, above = 0, dict[int, int]()
        """What each block may have missed beyond the floors of all sides."""
        for side in sides:
            floor = Missing(side)._floor
            floors += floor
            for key, entry in side.items():
                above[key] = above.get(key, 0) + entry.blocks - floor
        most = sorted(above, key=lambda key: (-above[key], key))[:MISSING_MAX]
        added = {key: MissedFrom(floors + above[key], floors + above[key]) for key in most}
        reasons = dict.fromkeys(most, (0, ""))
        """Block to the reason of the side with the most requests."""
        for side in sides:
            for key in side.keys() & added.keys():  # few of many: only the rest of these is added up
                entry, found = side[key], added[key]
                found.error -= entry.blocks - entry.error
                found.requests += entry.requests
                reasons[key] = max(reasons[key], (entry.requests, entry.why))
        for key, found in added.items():
            _, found.why = reasons[key]
        self.of = added


class Counts(msgspec.Struct):
    """The counts of a digest. Decoded alone they cost a seventh of the whole."""

    prompt_blocks: Count = 0
    hits: Hits = msgspec.field(default_factory=lambda: [0, 0, 0, 0])
    """Prompt blocks found in G1 to G4."""
    missed_blocks: Count = 0
    """Prompt blocks that were computed although a cache could have held them."""
    finished: Count = 0
    preemptions: Count = 0
    lost_blocks: Count = 0
    """Prompt blocks that were found, and whose load failed; ``hits`` are without them."""


class Digest(Counts):
    """Hits, times and missing prefixes of a daemon's requests, as far back as the daemon remembers."""

    first_token: DurationSketch = msgspec.field(default_factory=DurationSketch)
    latency: DurationSketch = msgspec.field(default_factory=DurationSketch)
    missing: Missing = msgspec.field(default_factory=Missing)

    def told(self) -> "Digest":
        """A copy as it is sent, with the largest missing prefixes alone."""
        copy = msgspec.structs.replace(self, missing=self.missing.largest())
        return msgspec.convert(msgspec.to_builtins(copy), Digest)


def total(digests: Iterable[Digest]) -> Digest:
    """The digest of all their requests."""
    result, missing = Digest(), []
    for digest in digests:
        result.prompt_blocks += digest.prompt_blocks
        result.hits = [mine + theirs for mine, theirs in zip(result.hits, digest.hits, strict=True)]
        result.missed_blocks += digest.missed_blocks
        result.lost_blocks += digest.lost_blocks
        result.finished += digest.finished
        result.preemptions += digest.preemptions
        result.first_token.add_all(digest.first_token)
        result.latency.add_all(digest.latency)
        missing.append(digest.missing)
    result.missing.add_all(missing)
    return result


class DigestFold(Visitor):
    """Makes the digest of a stream of events. A request whose arrival was not seen has no times."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = Digest()
        self._misses = FirstMisses()
        self._times = RequestTimes()
        self._seen_hits = SeenHits()
        self.after = {
            ev.SlotOpened: self._opened, ev.SlotCloned: self._opened, ev.SlotMoved: self._moved,
            ev.LookupAnswered: self._looked_up, ev.PrefixScored: self._scored, ev.HitsLost: self._lost,
        }
        self.before = {ev.SlotClosed: self._closed}

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Forget requests that ended unseen."""
        self._misses.keep(state.slots.keys())
        self._seen_hits.keep(state.slots)
        self._times.resumed(state)

    def _opened(self, e: ev.SlotOpened | ev.SlotCloned, state: CacheState) -> None:
        self._first_token(self._times.opened(e))

    def _moved(self, e: ev.SlotMoved, state: CacheState) -> None:
        if self._times.moved(e):
            self._first_token(self._times.of[e.slot])
        if e.new is SlotState.PREEMPTED:
            self.digest.preemptions += 1

    def _first_token(self, times: LiveTimes) -> None:
        if times.seen and times.first_token_ns is not None:
            self.digest.first_token.add(times.first_token_ns - times.arrived_ns)

    def _looked_up(self, e: ev.LookupAnswered, state: CacheState) -> None:
        self._misses.looked_up(e, state)

    def _scored(self, e: ev.PrefixScored, state: CacheState) -> None:
        if e.readmitted:
            return
        digest, slot = self.digest, state.slots[e.slot]
        self._seen_hits.scored(slot)
        digest.prompt_blocks += e.prompt_blocks
        digest.hits = [count + found for count, found in zip(digest.hits, e.hits, strict=True)]
        miss = self._misses.scored(e, slot)
        if miss is not None:
            digest.missed_blocks += miss.blocks
            digest.missing.add(miss.key, miss.blocks, UNKNOWN if miss.why is None else miss.why.label)

    def _lost(self, e: ev.HitsLost, state: CacheState) -> None:
        if not e.readmitted and e.slot in self._seen_hits:
            self.digest.hits[e.tier - 1] -= e.blocks
            self.digest.lost_blocks += e.blocks

    def _closed(self, e: ev.SlotClosed, state: CacheState) -> None:
        self.digest.finished += 1
        self._misses.closed(e.slot)
        self._seen_hits.closed(e.slot)
        times = self._times.closed(e)
        if times.seen:
            self.digest.latency.add(e.at_ns - times.arrived_ns)

