"""Sources: the engines that report, with their losses, restarts, names and the cost of watching them.

Law of this file: counts from events and counts from the daemon are kept apart. An unknown count is None and never 0.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kvbm_console.core.ids import Authority, Condition
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts

SOURCES_MAX: Final = 1_024
"""Engines that are kept: sixteen times the publishers of a large deployment."""
WATCHED: Final = frozenset({Authority.STREAM, Authority.OBSERVED})
"""Pools that a real engine reports; the leader reports the pools of a simulated engine."""
COMPARED_MAX: Final = 200_000
"""Blocks of a pool that are compared with nearer pools, in some ten milliseconds. Larger pools have no answer."""


class TapCost(msgspec.Struct, frozen=True):
    """The cost of a tap to its engine since it began, from the status document."""

    calls: int
    dropped: int
    errors: int
    call_ns: int
    steps: int
    step_ns: int
    checked_blocks: int | None = None
    """Blocks whose bytes ``sanitize`` compared, None without it."""
    mismatched_blocks: int = 0
    audited_places: int | None = None
    """Places of the engine's pool that audits compared, None where the engine does not give its pool."""
    differing_places: int = 0


class Following(msgspec.Struct, frozen=True):
    """A publisher that the daemon follows, from the status document."""

    connected: bool
    batches: int
    gaps: int
    lost_batches: int
    restarts: int
    last_batch_ns: int | None
    metrics: str | None = None
    metrics_error: str | None = None


class Told(msgspec.Struct, frozen=True):
    """The daemon's last report on one source."""

    name: str
    cost: TapCost | None = None
    following: Following | None = None


class Seen(msgspec.Struct):
    """Counts from the events of one source."""

    gaps: int = 0
    restarts: int = 0
    clears: int = 0
    last_ns: int | None = None
    """Time of its last report."""


class Sources:
    """All engines of one target, by number."""

    def __init__(self) -> None:
        self.seen: dict[int, Seen] = {}
        self.told: dict[int, Told] = {}
        """Kept when a source ends: its last costs stay readable."""
        self._shares: dict[int, tuple[tuple[int, int], tuple[int | None, int | None]]] = {}
        self.left_out = 0
        """Reports that were left out, and sources that had to make way for newer ones."""
        self.recorder: tuple[str, int] | None = None
        """The path and the bytes of the recording; None without a recorder, and until the target has answered."""

    def of(self, source: int) -> Seen:
        """The counts of a source."""
        found = self.seen.get(source)
        if found is None:
            self._make_way(self.seen)
            found = self.seen[source] = Seen()
        return found

    def shares(self, state: CacheState, pool: PoolFacts) -> tuple[int | None, int | None]:
        """(``reusable``, ``only_here``) of a pool."""  # compared once: large pools take milliseconds
        at = id(state), state.seq
        known = self._shares.get(pool.info.pool)
        if known is None or known[0] != at:
            known = self._shares[pool.info.pool] = at, (reusable(pool), only_here(state, pool))
        return known[1]

    def _make_way(self, kept: dict[int, Any]) -> None:
        """At the limit, drop the source with the lowest number, because every restart of an engine has a higher
        number."""
        if len(kept) >= SOURCES_MAX:
            del kept[min(kept)]
            self.left_out += 1

    def tell(self, document: Mapping[str, Any]) -> None:
        """Take ``engines``, ``publishers`` and ``recorder`` of a status document; malformed rows are left out."""
        recorder = document.get("recorder") or {}
        path, size = recorder.get("path"), recorder.get("bytes")
        self.recorder = (path, size) if isinstance(path, str) and isinstance(size, int) else None
        for row in document.get("engines") or ():
            self._take(row, lambda name, row: Told(name, cost=msgspec.convert(row, TapCost)))
        for row in document.get("publishers") or ():
            self._take(row, lambda name, row: Told(name, following=msgspec.convert(row, Following)))

    def _take(self, row: Mapping[str, Any], read: Callable[[str, Mapping[str, Any]], Told]) -> None:
        try:
            source, told = int(row["source"]), read(str(row["name"]), row)
        except (KeyError, ValueError, TypeError, msgspec.ValidationError):
            self.left_out += 1
            return
        if source not in self.told:
            self._make_way(self.told)
        self.told[source] = told


def watched(state: CacheState) -> list[int]:
    """Real engines that report, and others that ended, in the order of their numbers."""
    found = {pool.info.source for pool in state.pools if pool.info.authority in WATCHED}
    return sorted(found | {source for source in state.lost_sources if source} | set(state.measured))


def uncertain(state: CacheState, source: int) -> bool:
    """True if reports of a source were lost or unclear, so that its counts may be wrong."""
    return source in state.lost_sources and not state.has_ended(source)


def blocks_only(state: CacheState) -> bool:
    """True if only event streams report, which name blocks and no requests."""
    return state.streams_only


def pools_of(state: CacheState, source: int) -> list[PoolFacts]:
    """Pools of a source: by rank, group, then near tiers first."""
    mine = [pool for pool in state.pools if pool.info.source == source]
    return sorted(mine, key=lambda pool: (pool.info.dp_rank, pool.info.group, pool.info.tier, pool.info.pool))


def reusable(pool: PoolFacts) -> int | None:
    """Resident blocks that a look-up can find: full and ready, each hash once. None when counting costs too much."""
    if not pool.counts[Condition.WRITING]:
        return len(pool.by_hash)
    if len(pool.by_hash) > COMPARED_MAX:
        return None
    return sum(pool.ready_place(key) is not None for key in pool.by_hash)


def only_here(state: CacheState, pool: PoolFacts) -> int | None:
    """Reusable blocks that no nearer pool of the same engine, rank and group has; None when there are too many."""
    info = pool.info
    if len(pool.by_hash) > COMPARED_MAX:
        return None
    rest = set(pool.by_hash)
    for other in state.pools:
        near = other.info
        if near.tier < info.tier and (near.source, near.dp_rank, near.group) == (info.source, info.dp_rank, info.group):
            rest -= other.by_hash.keys()
    return len(rest)
