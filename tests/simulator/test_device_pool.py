"""The device pool: vLLM's order, all or nothing, and conservation against a model that walks a plain list."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm_console.core.errors import InternalError, UsageError
from kvbm_console.simulator.device_pool import DevicePool


def allocated(pool: DevicePool, count: int, prefix: tuple[int, ...] = ()) -> list[int]:
    ids = pool.allocate(count, prefix)
    assert ids is not None
    return ids


def snapshot(pool: DevicePool) -> tuple[object, ...]:
    return (pool.free_order(), list(pool.refs), list(pool.hash_of), pool.match([1]), pool.free_blocks)


def test_a_request_is_released_tail_first_and_its_prefix_outlives_its_tail() -> None:
    pool = DevicePool(4)
    ids = allocated(pool, 3)
    pool.store(ids, [1, 2, 3])
    pool.release(ids)
    assert pool.free_order() == [3, 2, 1, 0]
    assert allocated(pool, 2) == [3, 2]
    assert pool.match([1, 2, 3]) == [0, 1]


def test_unhashed_blocks_are_reused_before_anything_cached_or_never_used() -> None:
    pool = DevicePool(5)
    ids = allocated(pool, 3)
    pool.store(ids[:2], [1, 2])
    pool.release(ids)
    assert pool.free_order() == [2, 3, 4, 1, 0]


def test_a_hit_takes_blocks_out_of_the_free_order_and_back_to_its_end() -> None:
    pool = DevicePool(3)
    ids = allocated(pool, 3)
    pool.store(ids, [1, 2, 3])
    pool.release(ids)
    prefix = tuple(pool.match([1]))
    assert pool.allocate(0, prefix) == []
    assert pool.free_order() == [2, 1]
    pool.release(prefix)
    assert pool.free_order() == [2, 1, 0]


def test_the_prefix_being_admitted_is_never_evicted() -> None:
    pool = DevicePool(3)
    ids = allocated(pool, 2)
    pool.store(ids, [1, 2])
    pool.release(ids)
    prefix = tuple(pool.match([1, 2]))
    before = snapshot(pool)
    assert pool.allocate(2, prefix) is None
    assert snapshot(pool) == before
    assert allocated(pool, 1, prefix) == [2]


def test_a_hash_may_stand_in_several_places() -> None:
    pool = DevicePool(3)
    first, second = allocated(pool, 1), allocated(pool, 1)
    pool.store(first, [7])
    pool.store(second, [7])
    pool.release(first)
    assert pool.match([7]) == first
    assert allocated(pool, 2) == [2, *first]
    assert pool.match([7]) == second


def test_the_match_is_capped_by_its_caller() -> None:
    pool = DevicePool(3)
    pool.store(allocated(pool, 3), [1, 2, 3])
    assert pool.match([1, 2, 3], 2) == [0, 1]
    assert pool.match([9, 2]) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60), st.lists(
    st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 6))
def test_who_asks_again_gets_the_answer_of_who_asks_first(
    taken: list[tuple[int, int]], prompt: list[int], limit: int
) -> None:
    """Blocks come and go between the questions; the same hash may stand in a prompt twice."""
    pool, held = DevicePool(6), list[list[int]]()
    for first, count in taken:
        ids = pool.allocate(count) if len(held) < 3 else None
        if ids:
            keys = [1 + (first + at) % 9 for at in range(len(ids))]
            pool.store(ids, keys)
            held.append(ids)
        elif held:
            pool.release(held.pop(first % len(held)))
        again = pool.match(prompt, limit)
        assert again == pool.match(prompt, limit)
        known = pool.hash_of
        assert [known[place] for place in again] == prompt[: len(again)]
        assert len(again) == min(limit, len(prompt)) or prompt[len(again)] not in known


def test_clear_returns_to_the_initial_state() -> None:
    pool = DevicePool(3)
    pool.store(allocated(pool, 2), [1, 2])
    pool.clear()
    assert snapshot(pool) == snapshot(DevicePool(3))
    assert pool.audit([]) == []


def test_misuse_is_refused() -> None:
    pool = DevicePool(2)
    with pytest.raises(UsageError, match="capacity_blocks must be at least 1, got 0"):
        DevicePool(0)
    with pytest.raises(InternalError, match="no holder"):
        pool.release([0])
    with pytest.raises(InternalError, match="cannot take hash"):
        pool.store([0], [5])
    ids = allocated(pool, 1)
    pool.store(ids, [5])
    with pytest.raises(InternalError, match="cannot take hash"):
        pool.store(ids, [6])


def test_the_audit_sees_what_was_tampered_with() -> None:
    for tamper in ("_state", "hash_of", "_free"):
        pool = DevicePool(4)
        pool.store(allocated(pool, 2), [1, 2])
        assert pool.audit([[0, 1]]) == []
        if tamper == "_free":
            pool._free += 1
        else:
            getattr(pool, tamper)[0] = 9
        assert pool.audit([[0, 1]]) != []


def test_the_ring_stays_bounded_when_nothing_is_ever_allocated_anew() -> None:
    pool = DevicePool(4)
    ids = allocated(pool, 4)
    pool.store(ids, [1, 2, 3, 4])
    pool.release(ids)
    for _ in range(1_000):
        assert pool.allocate(0, ids) == []
        pool.release(ids)
    assert len(pool._ring) <= 8 * 4 + 4
    assert pool.free_order() == [3, 2, 1, 0]


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a model: an ordered dict as free list, hashes found by walking."""

    PLACES = 9

    def __init__(self) -> None:
        super().__init__()
        self.pool = DevicePool(self.PLACES)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.PLACES))
        self.refs = [0] * self.PLACES
        self.held: list[list[int]] = []
        self.stored: list[tuple[int, int]] = []
        """(hash, place) in the order in which they were stored."""

    def _found(self, sequence_hash: int) -> int | None:
        return next((place for known, place in self.stored if known == sequence_hash), None)

    @rule(count=st.integers(0, 6), hashes=st.lists(st.integers(1, 6), max_size=4, unique=True))
    def admit(self, count: int, hashes: list[int]) -> None:
        prefix: list[int] = []
        for sequence_hash in hashes:
            place = self._found(sequence_hash)
            if place is None:
                break
            prefix.append(place)
        assert self.pool.match(hashes) == prefix
        before = snapshot(self.pool)
        ids = self.pool.allocate(count, prefix)
        room = [place for place in self.free if place not in prefix]
        if len(room) < count:
            assert ids is None
            assert snapshot(self.pool) == before
            return
        assert ids == room[:count]
        for place in [*prefix, *room[:count]]:
            self.free.pop(place, None)
            self.refs[place] += 1
        gone = set(room[:count])
        self.stored = [entry for entry in self.stored if entry[1] not in gone]
        if prefix or ids:
            self.held.append(prefix + ids)

    @rule(ids=st.lists(st.integers(0, PLACES - 1), min_size=1, max_size=4, unique=True))
    def touch(self, ids: list[int]) -> None:
        """Any block may get one more holder, also one that nobody has used or filled yet."""
        self.pool.touch(ids)
        for place in ids:
            self.free.pop(place, None)
            self.refs[place] += 1
        self.held.append(ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        ids = data.draw(st.sampled_from(self.held))
        known = {place for _, place in self.stored}
        bare = [place for place in ids if place not in known]
        part = bare[: data.draw(st.integers(0, len(bare)))]
        hashes = data.draw(st.lists(st.integers(1, 6), min_size=len(part), max_size=len(part)))
        self.pool.store(part, hashes)
        self.stored.extend(zip(hashes, part, strict=True))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(ids)
        known = {place for _, place in self.stored}
        for place in reversed(ids):
            self.refs[place] -= 1
            if self.refs[place] == 0:
                self.free[place] = None
                if place not in known:
                    self.free.move_to_end(place, last=False)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.free = OrderedDict.fromkeys(range(self.PLACES))
        self.refs = [0] * self.PLACES
        self.held.clear()
        self.stored.clear()

    @invariant()
    def agree(self) -> None:
        assert self.pool.audit(self.held) == []
        assert self.pool.free_order() == list(self.free)
        assert self.pool.refs == self.refs
        assert self.pool.free_blocks == len(self.free)
        assert self.pool.most_holders == max(self.refs)


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
