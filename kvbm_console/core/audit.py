"""The audit: the numbered invariants, checked by walking the facts and not by arithmetic on counters.

Law of this file: the audit reads facts only and shares no code with the functions that change them.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.columns import Column, unpack_hashes, used
from kvbm_console.core.ids import Authority, CandidateStatus, SlotState
from kvbm_console.core.slots import TERMINAL
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import FREE, READY, WRITING, PoolFacts

RULES: Final[dict[str, str]] = {
    "I1": "the five conditions of a pool add up to its capacity, counted by walking",
    "I2": "the ref count of a place equals the references found in slots, staging and operations",
    "I4": "a place has a hash exactly when it has content, and every entry of the index points to such a place",
    "I5": "no place stands twice in a slot, and slots share only full blocks",
    "I6": "an open candidate is pending or promoted, and a promoted candidate has exactly one operation",
    "I7": "an unfinished onboard candidate belongs to a slot that is onboarding, preempted or finishing",
    "I8": "a finished slot owns nothing",
    "I12": "a hold and its slot name each other",
    "I13": "a tier that the leader decides evicts no block while a block that continues it stands there",
    "I15": "0 <= computed tokens <= tokens that the sequence may have, and every computed token has a place",
    "I16": "the source of a copy is readable",
    "I17": "a tier that the leader decides has a hash once, and a copy names a place once",
}
"""Rules that ``audit`` walks, and I13 of ``Lineage``; the others are tested (see docs/invariants.md)."""

LINKS_LEAST: Final = 1_024
"""So many links more than twice the cached blocks are kept before those of absent blocks are forgotten."""
_ONBOARD_OWNERS: Final = (SlotState.ONBOARDING, SlotState.PREEMPTED, SlotState.FINISHING)
_HAS_CONTENT: Final = bytes(map(bool, range(256)))
"""Content of a place to 1 if the place has content, otherwise 0, as a table for ``translate``."""


class Violation(msgspec.Struct, frozen=True):
    """One broken rule; ``slot`` is the slot concerned, if any."""

    rule: str
    detail: str
    slot: int | None = None


class Lineage:
    """I13, which facts alone do not show: shown the events of each stimulus, it names parents evicted before a child.

    A block's parent is known from the request that computed it: blocks that are older than the first event shown are
    never named. ``loose``: requests rule the order of eviction (``PolicyConfig.by_request``), and nothing is named.
    """

    def __init__(self, *, loose: bool = False) -> None:
        self._loose = loose
        self._parent_of: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}

    def saw(self, events: Sequence[ev.Event], state: CacheState) -> list[Violation]:
        """The violations among the events of one stimulus; ``state`` is the state after them."""
        if self._loose:
            return []
        evicted: list[ev.BlocksEvicted] = []
        written: set[int] = set()
        for event in events:
            if isinstance(event, ev.BlocksFilled):
                self._link(event, state)
            elif isinstance(event, ev.BlocksReserved):
                written.update(unpack_hashes(event.hashes))
            elif isinstance(event, ev.BlocksEvicted) and state.pools[event.pool].info.authority is Authority.LEADER:
                evicted.append(event)
        found = []
        for event in evicted:
            pool = state.pools[event.pool]
            for key in unpack_hashes(event.hashes):
                for child in () if key in pool.by_hash else self._children.get(key, ()):
                    if child in pool.by_hash and child not in written:
                        text = f"pool {event.pool} gave up {key:016x} before {child:016x}, which continues it"
                        found.append(Violation("I13", text, event.for_slot))
        if len(self._parent_of) > LINKS_LEAST + 2 * sum(len(pool.by_hash) for pool in state.pools):
            self._sweep(state)
        return found

    def _link(self, event: ev.BlocksFilled, state: CacheState) -> None:
        at, hashes = 0, unpack_hashes(event.hashes)
        for number, count in zip(event.slots, event.counts, strict=True):
            slot = state.slots.get(number)
            filled, at = hashes[at : at + count], at + count
            if slot is None or slot.hashes[slot.filled_blocks - count : slot.filled_blocks] != filled:
                continue
            first = max(1, slot.filled_blocks - count)
            for parent, key in pairwise(slot.hashes[first - 1 : slot.filled_blocks]):
                if key not in self._parent_of:
                    self._parent_of[key] = parent
                    self._children.setdefault(parent, []).append(key)

    def _sweep(self, state: CacheState) -> None:
        """Forget blocks that stand nowhere: whatever comes back is computed again and linked again."""
        cached = set().union(*(pool.by_hash for pool in state.pools))
        self._parent_of = {key: parent for key, parent in self._parent_of.items() if key in cached}
        self._children = {}
        for key, parent in self._parent_of.items():
            self._children.setdefault(parent, []).append(key)


def audit(state: CacheState) -> list[Violation]:
    """Every violation in the facts, empty when all is well. Walks everything: O(places + slots)."""
    found: list[Violation] = []
    references = _references(state)
    for pool in state.pools:
        found += _audit_pool(pool, references[pool.info.pool])
    found += _audit_slots(state)
    found += _audit_candidates(state)
    for number, hold in state.holds.items():
        slot = state.slots.get(hold.slot)
        if slot is None or slot.hold != number:
            found.append(Violation("I12", f"hold {number} and slot {hold.slot} do not name each other", hold.slot))
    return found


def quick_audit(pools: Sequence[PoolFacts]) -> list[Violation]:
    """The cheap part: counts of each of these pools against its capacity."""
    found = []
    for pool in pools:
        capacity = pool.capacity
        if sum(pool.counts) != capacity or min(pool.counts) < 0:
            found.append(Violation("I1", f"pool {pool.info.pool}: {pool.counts} do not add up to {capacity}"))
    return found


def _references(state: CacheState) -> list[Counter[int]]:
    references: list[Counter[int]] = [Counter() for _ in state.pools]
    for slot in state.slots.values():
        if slot.device_pool is not None:
            references[slot.device_pool].update(slot.device_blocks)
        for index, ids in slot.staged:
            references[index].update(ids)
    for operation in state.operations.values():
        references[operation.source_pool].update(operation.sources)
        references[operation.target_pool].update(operation.targets)
    return references


def _audit_pool(pool: PoolFacts, references: Counter[int]) -> list[Violation]:
    found = []
    name = f"pool {pool.info.pool}"
    capacity = pool.info.capacity_blocks
    walked = _walk(pool, references)
    if walked != pool.counts or (capacity is not None and sum(walked) != capacity):
        found.append(Violation("I1", f"{name}: walked {walked}, counted {pool.counts}, capacity {capacity}"))
    counted = list(map(pool.refs.__getitem__, references))
    if counted != list(references.values()) or _filled(pool.refs) != len(references):
        place = next(at for at in chain(references, range(len(pool))) if pool.refs[at] != references[at])
        found.append(Violation("I2", f"{name} place {place}: {pool.refs[place]} counted, {references[place]} found"))
    if any(
        bytes(map(bool, pool.hash_of[at].tolist())) != pool.content[at].tobytes().translate(_HAS_CONTENT)
        for at in used(pool.hash_of, pool.content)
    ):
        found.append(Violation("I4", f"{name}: hash and content of a place disagree"))
    return found + _audit_index(pool, name)


def _filled(column: Column) -> int:
    """Places whose value is not zero."""
    return sum(at.stop - at.start - column[at].tolist().count(0) for at in used(column))


def _walk(pool: PoolFacts, references: Counter[int]) -> list[int]:
    """Places by condition: columns counted in one pass each, holders from the references that were found."""
    content = pool.content
    away = pool.quarantined
    held = bytes(content[place] for place in references if place not in away) if away else (
        bytes(map(content.__getitem__, references))
    )
    kept = bytes(map(content.__getitem__, away))
    held_free, held_ready = held.count(FREE), held.count(READY)
    free, writing, ready = pool.capacity, -kept.count(WRITING), -kept.count(READY)
    for at in used(content):
        part = content[at].tobytes()
        free -= len(part) - part.count(FREE)
        writing += part.count(WRITING)
        ready += part.count(READY)
    empty, cached = free - kept.count(FREE) - held_free, ready - held_ready
    return [empty, cached, held_free + held_ready, writing, len(away)]


def _audit_index(pool: PoolFacts, name: str) -> list[Violation]:
    """Every entry of the index points to a place with that hash, and every full place is indexed once."""
    found = []
    if list(map(pool.hash_of.__getitem__, pool.by_hash.values())) != list(pool.by_hash):
        found.append(Violation("I4", f"{name}: the index has an entry for a place with another hash"))
    extra: list[int] = []
    for key, places in pool.copies.items():
        extra += places
        if key not in pool.by_hash or not places or any(pool.hash_of[place] != key for place in places):
            found.append(Violation("I4", f"{name}: the copies of hash {key:016x} differ from the places"))
    full = _filled(pool.hash_of)
    if extra and pool.info.authority is Authority.LEADER:
        found.append(Violation("I17", f"{name} has {len(pool.copies)} hashes in several places"))
    indexed = {*pool.by_hash.values(), *extra}
    if not len(indexed) == len(pool.by_hash) + len(extra) == full:
        found.append(Violation("I4", f"{name}: {full} full places, {len(indexed)} indexed"))
    return found


def _audit_slots(state: CacheState) -> list[Violation]:
    found = []
    owners: list[dict[int, int]] = [{} for _ in state.pools]
    for number, slot in state.slots.items():
        if len(set(slot.device_blocks)) != len(slot.device_blocks):
            found.append(Violation("I5", f"slot {number} lists a place twice", number))
        if slot.state is SlotState.FINISHED and (slot.end_block or slot.staged or slot.outstanding):
            found.append(Violation("I8", f"slot {number} is finished and owns something", number))
        computed = slot.computed_tokens(state.iteration)
        most = slot.most_tokens(slot.state)
        if not 0 <= computed <= most:
            found.append(Violation("I15", f"slot {number} has {computed} computed of at most {most} tokens", number))
        if slot.device_pool is None:
            continue
        pool = state.pools[slot.device_pool]
        if slot.end_block and computed > slot.end_block * pool.info.block_tokens:
            found.append(
                Violation("I15", f"slot {number}: {computed} tokens in {slot.end_block} blocks", number)
            )
        mine = owners[slot.device_pool]
        if not mine.keys().isdisjoint(slot.device_blocks):
            for place in slot.device_blocks:
                if place in mine and pool.content[place] == FREE:
                    found.append(
                        Violation("I5", f"slots {mine[place]} and {number} share unfilled place {place}", number)
                    )
        mine.update(dict.fromkeys(slot.device_blocks, number))
    return found


def _audit_candidates(state: CacheState) -> list[Violation]:
    found = []
    for number, candidate in state.candidates.items():
        operation = None if candidate.operation is None else state.operations.get(candidate.operation)
        promoted = candidate.status is CandidateStatus.PROMOTED
        if candidate.status in TERMINAL or promoted != (operation is not None):
            found.append(Violation("I6", f"candidate {number} is {candidate.status.label}", candidate.slot))
        if candidate.slot is not None:
            slot = state.slots.get(candidate.slot)
            if slot is None or number not in slot.outstanding:
                found.append(Violation("I6", f"candidate {number} is unknown to slot {candidate.slot}", candidate.slot))
            elif candidate.route.is_load and candidate.route.target == 1 and slot.state not in _ONBOARD_OWNERS:
                found.append(Violation("I7", f"candidate {number} of a {slot.state.label} slot", candidate.slot))
        if operation is not None:
            pool = state.pools[operation.source_pool]
            bad = [place for place in operation.sources if pool.content[place] != READY]
            for side in (operation.sources, operation.targets):
                if len(set(side)) != len(side):
                    number_of = f"operation {operation.operation}"
                    found.append(Violation("I17", f"{number_of} names a place twice in {side}", candidate.slot))
            if bad and pool.info.authority is Authority.LEADER:
                found.append(Violation("I16", f"operation {operation.operation} reads places {bad}", candidate.slot))
    for number, slot in state.slots.items():
        for candidate_id in slot.outstanding:
            if candidate_id not in state.candidates:
                found.append(Violation("I6", f"slot {number} waits for candidate {candidate_id}, gone", number))
    return found
