"""Blocks with the tokens of a missed block under another LoRA, salt or image, as event streams tell them.

Theory of operation
-------------------
Equal tokens have different hashes under different contexts. A stream tells the tokens' digest of a block once the block
is stored, which is after the look-up that missed it. So one pass finds the digests of a prompt's blocks, and a second
pass the other blocks that had such a digest behind the same block:

    stored: b, lora=x, digest 7, in front of it nothing    the prompt's first block, computed after it missed
    stored: a, lora=y, digest 7, in front of it nothing    was resident when b missed

Law of this file: two blocks are alike only if one stream told an equal digest and an equal block in front for both.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.walk import Evidence, walk
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.events import BlocksSeen
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.stream.feed import GapSeen

Likeness = tuple[int, int, int]
"""The source that tells a block, the digest of its tokens, and the hash in front, 0 at the beginning of a prompt."""
_SESSION = "session="
"""Begins the word of a context that does not change the hash."""


class TwinStay(NamedTuple):
    """A block was resident from one event to another, None while it stays."""

    key: int
    context: str
    tier: Tier
    from_seq: int
    to_seq: int | None


class Twins(NamedTuple):
    """Contexts of a prompt's blocks, and the stays of blocks that are like them."""

    context: dict[int, str]
    stays: dict[int, list[TwinStay]]

    def of(self, key: int, seq: int) -> TwinStay | None:
        """A block that is like ``key``, has another context and was resident at event ``seq``."""
        return next((
            stay for stay in self.stays.get(key, ())
            if stay.context != self.context[key] and stay.from_seq < seq and (stay.to_seq is None or stay.to_seq > seq)
        ), None)


class ContextMarks(Visitor):
    """The words of streams about the wanted blocks."""

    def __init__(self, wanted: Collection[int]) -> None:
        super().__init__()
        self._wanted = wanted
        self.found: dict[int, dict[Likeness, str]] = {}
        """Context by likeness of each of these blocks, which several engines may have."""
        self.after = {BlocksSeen: self._seen}

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        for pool in state.pools:
            if pool.chains is not None:
                self._keep(pool, self._wanted & pool.chains.marks.keys())

    def _seen(self, e: BlocksSeen, state: CacheState) -> None:
        if e.marked:
            self._keep(state.pools[e.pool], [key for key in _marked(e) if key in self._wanted])

    def _keep(self, pool: PoolFacts, keys: Collection[int]) -> None:
        for key in keys:
            likeness, context = _likeness(pool, key)
            if likeness[1]:
                self.found.setdefault(key, {})[likeness] = context


class _Stays(Visitor):
    """When blocks of these likenesses were resident."""

    def __init__(self, wanted: Collection[Likeness]) -> None:
        super().__init__()
        self._wanted = wanted
        self.stays: dict[Likeness, list[TwinStay]] = {}
        self._here: dict[tuple[int, int], Likeness] = {}
        """Pool and hash of resident blocks."""
        self.engines: dict[int, int] = {}
        """The tapped engine that each stream tells of, as of the end."""
        self.after = {BlocksSeen: self._seen}

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        for pool, key in list(self._here):
            self._left(pool, key, state.seq)
        for facts in state.pools:
            if facts.chains is not None:
                self._came(facts, facts.chains.marks, state.seq)

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        devices = [] if state is None else [pool.info for pool in state.pools if pool.info.tier is Tier.G1]
        streams, taps = (
            sorted({info.source for info in devices if info.authority is authority})
            for authority in (Authority.STREAM, Authority.OBSERVED)
        )
        alone = len(streams) == len(taps) == 1
        for source in streams:
            engine = taps[0] if alone else None if state is None else state.tapped_as(source)
            if engine is not None:
                self.engines[source] = engine

    def _seen(self, e: BlocksSeen, state: CacheState) -> None:
        pool = state.pools[e.pool]
        if self._here:
            gone = {key for number, key in self._here if number == e.pool} if e.cleared else unpack_hashes(e.removed)
            for key in gone:
                if (e.pool, key) in self._here and key not in pool.by_hash:
                    self._left(e.pool, key, e.seq)
        if e.marked:
            self._came(pool, _marked(e), e.seq)

    def _came(self, pool: PoolFacts, keys: Collection[int], seq: int) -> None:
        for key in keys:
            likeness, context = _likeness(pool, key)
            if likeness in self._wanted and (pool.info.pool, key) not in self._here:
                self._here[pool.info.pool, key] = likeness
                self.stays.setdefault(likeness, []).append(TwinStay(key, context, pool.info.tier, seq, None))

    def _left(self, pool: int, key: int, seq: int) -> None:
        stays = self.stays[self._here.pop((pool, key))]
        at = next(at for at in range(len(stays) - 1, -1, -1) if stays[at].key == key and stays[at].to_seq is None)
        stays[at] = stays[at]._replace(to_seq=seq)


def twins(evidence: Evidence, engine: int, marks: Mapping[int, Mapping[Likeness, str]]) -> Twins:
    """The blocks of this engine that are like these; a pass over the evidence unless there are none to look for."""
    found = Twins({}, {})
    if marks:
        visitor = _Stays({likeness for told in marks.values() for likeness in told})
        walk(evidence, (visitor,))
        for key, told in marks.items():
            for likeness, context in told.items():
                if visitor.engines.get(likeness[0]) == engine:
                    found.context[key], found.stays[key] = context, visitor.stays.get(likeness, [])
    return found


def _marked(e: BlocksSeen) -> list[int]:
    stored = unpack_hashes(e.stored)
    return [stored[at] for at in unpack_ids(e.marked)]


def _likeness(pool: PoolFacts, key: int) -> tuple[Likeness, str]:
    """Likeness and context of a resident block with a mark; the digest is 0 if the block is gone."""
    chains, place = pool.chains, pool.by_hash.get(key)
    mark = None if chains is None else chains.marks.get(key)
    if chains is None or mark is None or place is None:
        return (pool.info.source, 0, 0), ""
    return (pool.info.source, mark.content, chains.parent_of[place]), " ".join(_words(mark.context))


def _words(context: str) -> Iterator[str]:
    return (word for word in context.split() if not word.startswith(_SESSION))
