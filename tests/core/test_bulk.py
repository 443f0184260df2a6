"""Many places at once are changed as one after the other: columns, counts, index, and what is refused."""

from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.core import bulk
from kvbm_console.core import columns as packing
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes, unpack_ids
from kvbm_console.core.errors import FoldError, InternalError
from kvbm_console.core.events import BlocksEvicted
from kvbm_console.core.ids import Authority, Condition, Tier
from kvbm_console.core.leader import Leader, lookups
from kvbm_console.core.tiers import FREE, READY, WRITING, PoolFacts, PoolInfo, quarantine
from kvbm_console.simulator.device_pool import DevicePool
from tests.benchmarks import samples

PLACES = 12
PLACE = st.integers(0, PLACES - 1)
SOME = st.lists(PLACE, min_size=2, max_size=8)
STEP = st.one_of(
    st.tuples(st.sampled_from(["ref", "unref", "forget", "evict"]), SOME),
    st.tuples(st.just("store"), st.lists(st.tuples(PLACE, st.integers(0, 9)), min_size=2, max_size=8),
              st.sampled_from([READY, WRITING])),
    st.tuples(st.just("quarantine"), st.lists(PLACE, min_size=1, max_size=1)),
)


def facts() -> PoolFacts:
    return PoolFacts(PoolInfo(0, 0, 0, 0, Tier.G2, "CPU_PINNED", PLACES, 16, Authority.LEADER))


@contextmanager
def bulk_from(count: int) -> Iterator[None]:
    before = bulk.BULK_MIN
    bulk.BULK_MIN = count  # type: ignore[misc]
    try:
        yield
    finally:
        bulk.BULK_MIN = before  # type: ignore[misc]


def carry_out(pool: PoolFacts, step: tuple[object, ...], number: int) -> str:
    """What was said against it, empty when it was done."""
    verb, items = step[0], step[1]
    assert isinstance(items, list)
    try:
        if verb == "store":
            pool.store([place for place, _ in items], [key for _, key in items], int(str(step[2])), number)
        elif verb == "quarantine":
            quarantine(pool, items, number)
        else:
            getattr(pool, str(verb))(items)
    except (FoldError, KeyError, ValueError) as error:
        return type(error).__name__
    return ""


def columns(pool: PoolFacts) -> tuple[object, ...]:
    return (pool.hash_of, pool.content, pool.refs, pool.stored_at, pool.by_hash, pool.copies, pool.counts)


@settings(max_examples=400)
@given(st.lists(STEP, max_size=25))
def test_in_bulk_as_one_after_the_other(steps: list[tuple[object, ...]]) -> None:
    alone, together = facts(), facts()
    for number, step in enumerate(steps, 1):
        with bulk_from(1_000):
            said = carry_out(alone, step, number)
        with bulk_from(2):
            said_too = carry_out(together, step, number)
        assert bool(said) == bool(said_too)
        if said:
            return  # a state that refused an event is discarded
        assert columns(alone) == columns(together)
        assert together.counts == together.walk()


COLUMNS = st.tuples(st.sampled_from([FREE, WRITING, READY]), st.integers(0, 3), st.booleans())


@given(st.lists(COLUMNS, max_size=12))
def test_places_are_counted_as_one_by_one(places: list[tuple[int, int, bool]]) -> None:
    pool = PoolFacts(PoolInfo(0, 0, 0, 0, Tier.G2, "", len(places), 16, Authority.LEADER))
    pool.content = bytearray(content for content, _, _ in places)
    pool.refs = array("I", [refs for _, refs, _ in places])
    pool.quarantined = {block: [] for block, (_, _, away) in enumerate(places) if away}
    found = Counter(pool.condition(block) for block in range(len(places)))
    assert pool.walk() == [found[condition] for condition in Condition]


def test_what_is_no_place_of_the_pool_is_not_written_elsewhere() -> None:
    with bulk_from(2):
        for wrong in ([0, PLACES], [3, -1], [2, 2]):
            pool = facts()
            packed = pack_ids(wrong)
            assert bulk.take_holder(pool, packed, READY) is None
            assert bulk.give_holder(pool, packed, READY) is None
            assert bulk.empty(pool, packed, READY) is None
            assert columns(pool) == columns(facts())


def test_long_prompts_go_the_same_way_through_the_device_pool() -> None:
    """Above the bound a request is stored, released and evicted at once; the audit recounts it."""
    pool = DevicePool(64)
    for turn in range(40):
        count = 17 + turn % 30
        ids = pool.allocate(count)
        assert ids is not None
        keys = [turn * 1_000 + at for at in range(1, count + 1)]
        if turn % 5 == 4:
            keys[-1] = keys[0]  # the same content twice in one request
        full = count if turn % 3 else count - 2
        pool.store(ids[:full], keys[:full])
        assert pool.audit([ids]) == []
        assert pool.match(keys[: full - 1]) == ids[: full - 1]
        with pytest.raises(InternalError):
            pool.store(ids[:full], keys[:full])
        pool.release(ids)
        assert pool.audit([]) == []
        with pytest.raises(InternalError, match="no holder"):
            pool.release(ids)
        assert pool.free_blocks == 64


def test_a_leader_decides_the_same_however_many_places_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for many in (2, 10_000):
        monkeypatch.setattr(bulk, "BULK_MIN", many)
        monkeypatch.setattr(lookups, "BULK_MIN", many)
        leader = Leader(samples.CONFIG, check=True)
        events = [event for stimulus in samples.traffic(6, 5, 96) for event in leader.handle(stimulus).events]
        assert any(isinstance(event, BlocksEvicted) for event in events)
        told.append((events, leader.digest(), leader.aids_digest()))
    assert told[0] == told[1]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=60, max_size=70), st.data())
def test_a_column_that_was_seen_is_that_of_its_numbers_and_of_no_others(ids: list[int], data: st.DataObject) -> None:
    """Same length, first and last number, whatever is between; and whoever changes a list changes no column."""
    packed = pack_ids(ids)
    other = ids.copy()
    other[data.draw(st.integers(0, len(ids) - 1))] ^= data.draw(st.integers(0, 7))
    for numbers, as_packed, as_read in ((other, pack_ids, unpack_ids), (other, pack_hashes, unpack_hashes)):
        before = numbers.copy()
        size = len(as_packed(numbers)) // len(numbers)
        assert as_packed(numbers) == b"".join(number.to_bytes(size, "little") for number in numbers)
        column = as_packed(numbers)
        numbers[30] += 1
        assert as_read(column) == before
        as_read(column).clear()
        assert as_read(column) == before
        assert as_packed(before) == column != as_packed(numbers)
        numbers[30] -= 1
    assert unpack_ids(packed) == ids
    assert pack_ids(ids) == packed


@pytest.mark.parametrize("least", [2, 1_000])
@pytest.mark.parametrize("place", [-1, PLACES])
def test_a_place_that_there_is_not_takes_no_holder(place: int, least: int) -> None:
    with bulk_from(least), pytest.raises(FoldError, match="pool 0"):
        facts().ref([0, place])


@given(st.lists(st.tuples(st.sampled_from(["ref", "store", "quarantine", "give"]), PLACE), max_size=30))
def test_one_place_is_given_back_as_one_of_several(steps: list[tuple[str, int]]) -> None:
    one, several = facts(), facts()
    for number, (verb, place) in enumerate(steps):
        for pool in (one, several):
            if verb == "ref":
                pool.ref([place])
            elif verb == "quarantine":
                quarantine(pool, [place], number)
            elif verb == "store" and not pool.content[place]:
                pool.store([place], [number + 1], WRITING if place % 2 else READY, number)
        if verb == "give" and one.refs[place]:
            one.unref_one(place)
            several.unref([place])
        assert (one.refs, one.counts, one.walk()) == (several.refs, several.counts, several.counts)
    with pytest.raises(FoldError, match="no holder to give back"):
        facts().unref_one(3)


def test_a_pool_of_unknown_size_grows_after_many_of_its_places_were_looked_at() -> None:
    pool = PoolFacts(PoolInfo(0, 1, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM))
    with bulk_from(2):
        for first in (0, 8, 3):
            places = list(range(first, first + 8))
            pool.ref(places)
            assert bulk.contents_at(pool, pack_ids(places[:2])) == b""
            pool.store(places[:2], [first + 1, first + 2], READY, 1)
            assert bulk.contents_at(pool, pack_ids(places[:2])) == pack_hashes([first + 1, first + 2])
            assert bulk.contents_at(pool, pack_ids(places[:3])) is None, "one of them is empty"
    assert pool.counts == pool.walk()
    assert list(pool.refs) == [1] * 3 + [2] * 8 + [1] * 5


def test_columns_of_one_id_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_ONES_MAX", 3)
    column_of, id_of = packing._ColumnOf(), packing._IdOf()
    for block in (0, -1, 2**31 - 1, -2**31, 7, 0):
        column = block.to_bytes(4, "little", signed=True)
        assert (column_of[block], id_of[column], pack_ids([block])) == (column, block, column)
    assert len(column_of) == len(id_of) == 3
    for unfit in (2**32, -2**31 - 1):
        with pytest.raises(OverflowError):
            pack_ids([unfit])
    with pytest.raises(TypeError):
        pack_ids(["7"])  # type: ignore[list-item]
