"""The form of what a watched engine reports: columns that fit each other, places that exist, numbers that count.

The report of a watched engine wins over our facts, so its handlers emit events before they have read all of it. They
can do so because the whole report was looked at here, in front of the first event.

Example: an iteration names a new request, and its column of appended blocks has a byte too many. Without this check the
request would move to ``prefilling`` before the column is read, and the stimulus could neither be refused nor carried
through.

Law of this file: a report whose form is wrong is refused with the facts unchanged. A report that is well formed and
contradicts the facts is not refused.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import EMPTY_HASH
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.lookups import check_arrival
from kvbm_console.core.tiers import PoolFacts


def check(decider: Decider, s: st.Stimulus) -> None:
    """Refuse a stimulus of a watched engine that has not the form of its kind."""
    look = _LOOKS.get(type(s))
    if look is not None:
        look(decider, s)


def _check_places(pool: PoolFacts, ids: Sequence[int], *, once: bool = True) -> None:
    """Refuse ids that are no places of the pool and, with ``once``, of which one stands twice."""
    first = pool.info.first_place
    if ids and not first <= min(ids) <= max(ids) < pool.places_max:
        raise Refused(f"block ids must be from {first} to {pool.places_max - 1}, got {min(ids)} to {max(ids)}")
    if once and len(set(ids)) != len(ids):
        raise Refused(f"a block of pool {pool.info.pool} was given out twice")


def _check_counts(field: str, counts: Sequence[int]) -> None:
    if counts and min(counts) < 0:
        raise Refused(f"{field} must be at least 0, got {min(counts)}")


def _arrival(decider: Decider, s: st.RequestArrived) -> None:
    before = decider.state.slot_named(s.request)
    if before is not None and before.source != s.source:
        raise Refused(f"request {s.request!r} exists already")
    check_arrival(decider, s)


def _lookup(decider: Decider, s: st.LookupObserved) -> None:
    _check_counts("computed_tokens", (s.computed_tokens,))
    _check_counts("tokens", (s.tokens or 0,))


def _allocation(decider: Decider, s: st.BlocksAllocated) -> None:
    _check_places(decider.device_pool(decider.live(s.request).source), unpack_ids(s.block_ids))
    _check_counts("external_tokens", (s.external_tokens,))
    if EMPTY_HASH in unpack_hashes(s.hashes) or EMPTY_HASH in unpack_hashes(s.passed_hashes):
        raise Refused("hashes must not be 0")
    _check_counts("found", s.found)
    _check_counts("passed_blocks", (s.passed_blocks,))
    beyond = s.passed_blocks - len(decider.live(s.request).hashes)
    if beyond > len(unpack_hashes(s.passed_hashes)) and not decider.live(s.request).end_block:
        raise Refused(f"{s.passed_blocks} blocks before the window of {s.request!r} need hashes, {beyond} have none")


def _schedule(decider: Decider, s: st.IterationScheduled) -> None:
    if s.count < 1:
        raise Refused(f"count must be at least 1, got {s.count}")
    _check_counts("running", (s.running,))
    _check_counts("waiting", (s.waiting,))
    if len(s.progressed) != len(s.positions):
        raise Refused(f"{len(s.progressed)} progressed requests have {len(s.positions)} positions")
    _check_counts("positions", s.positions)
    ids = unpack_ids(s.appended_ids)
    if len(s.appended) != len(s.appended_counts) or sum(s.appended_counts) != len(ids):
        raise Refused(f"{len(ids)} appended blocks do not match counts {s.appended_counts}")
    _check_counts("appended_counts", s.appended_counts)
    _check_places(decider.device_pool(s.source), ids)


def _filled(decider: Decider, s: st.IterationFinished) -> None:
    ids, hashes = unpack_ids(s.block_ids), unpack_hashes(s.hashes)
    if len(ids) != len(hashes) or len(s.requests) != len(s.counts) or sum(s.counts) != len(ids):
        raise Refused(f"{len(ids)} filled blocks do not match {len(hashes)} hashes and counts {s.counts}")
    _check_counts("counts", s.counts)
    _check_places(decider.device_pool(s.source), ids)
    _check_places(decider.device_pool(s.source), unpack_ids(s.unkept))


def _end(decider: Decider, s: st.RequestFinished) -> None:
    unpack_ids(s.block_ids)


def _copies(decider: Decider, s: st.CopiesObserved) -> None:
    unpack_ids(s.failed_ids)


def check_report(pool: PoolFacts, s: st.BlocksReported) -> None:
    """Refuse places and hashes of the device of a watched engine that do not fit each other. A step may give a place
    out twice."""
    places, stored = unpack_ids(s.places), unpack_hashes(s.stored)
    if s.removed or EMPTY_HASH in stored or (stored and len(stored) != len(places)):
        raise Refused(f"{len(stored)} hashes do not fit {len(places)} places of pool {pool.info.pool}")
    _check_places(pool, places, once=False)


_LOOKS: Final[dict[type[st.Stimulus], Callable[[Decider, Any], None]]] = {
    st.RequestArrived: _arrival,
    st.LookupObserved: _lookup,
    st.BlocksAllocated: _allocation,
    st.IterationScheduled: _schedule,
    st.IterationFinished: _filled,
    st.RequestFinished: _end,
    st.CopiesObserved: _copies,
}
