"""Pools: counts follow every change, what is refused, how a pool grows, and columns of ids and hashes."""

import os
from array import array
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.core import columns, stimuli
from kvbm_console.core.audit import audit, quick_audit
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes, unpack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import FoldError, InternalError
from kvbm_console.core.events import Event, StimulusRejected
from kvbm_console.core.ids import Authority, Condition, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import decode_facts, digest, encode_facts
from kvbm_console.core.tiers import FREE, READY, WRITING, PoolFacts, PoolInfo, quarantine
from kvbm_console.simulator.device_pool import DevicePool

PLACES = 12
PART = 4
PLACE = st.integers(0, PLACES - 1)
SOME = st.lists(PLACE, min_size=2, max_size=8)
STEP = st.one_of(
    st.tuples(st.sampled_from(["ref", "unref", "forget", "evict"]), SOME),
    st.tuples(st.just("store"), st.lists(st.tuples(PLACE, st.integers(0, 9)), min_size=2, max_size=8),
              st.sampled_from([READY, WRITING])),
    st.tuples(st.just("quarantine"), st.lists(PLACE, min_size=1, max_size=1)),
)


def facts(first: int = 0) -> PoolFacts:
    return PoolFacts(PoolInfo(0, 0, 0, 0, Tier.G2, "CPU_PINNED", PLACES - first, 16, Authority.LEADER, first))


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


@settings(max_examples=400)
@given(st.lists(STEP, max_size=25), st.integers(0, 2))
def test_counts_and_index_follow_every_change(steps: list[tuple[object, ...]], first: int) -> None:
    pool = facts(first)
    for number, step in enumerate(steps, 1):
        if carry_out(pool, step, number):
            return  # a state that refused an event is discarded
        assert pool.counts == pool.walk()
        standing: dict[int, set[int]] = {}
        for place, key in enumerate(pool.hash_of):
            if key:
                standing.setdefault(key, set()).add(place)
        assert {key: set(pool.places_of(key)) for key in pool.by_hash} == standing


COLUMNS = st.tuples(st.sampled_from([FREE, WRITING, READY]), st.integers(0, 3), st.booleans())


@given(st.lists(COLUMNS, max_size=12))
def test_places_are_counted_as_one_by_one(places: list[tuple[int, int, bool]]) -> None:
    pool = PoolFacts(PoolInfo(0, 0, 0, 0, Tier.G2, "", len(places), 16, Authority.LEADER))
    pool.content = memoryview(bytes(content for content, _, _ in places))
    pool.refs = memoryview(array("I", [refs for _, refs, _ in places]))
    pool.quarantined = {block: [] for block, (_, _, away) in enumerate(places) if away}
    found = Counter(pool.condition(block) for block in range(len(places)))
    assert pool.walk() == [found[condition] for condition in Condition]


@given(st.lists(st.integers(0, 2), max_size=4 * PART), st.integers(0, 3))
def test_stretches_that_are_passed_over_are_zeros(values: list[int], more: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "PART_PLACES", PART)
        column = columns.zeros("Q", len(values))
        for place, value in enumerate(values):
            column[place] = value
        seen = [place for at in columns.used(column) for place in range(at.start, at.stop)]
        assert seen == [place for place in range(len(values)) if any(values[place // PART * PART :][:PART])]
        copy = columns.copied(column, len(values) + more)
        assert copy.tolist() == values + [0] * more
        copy[:] = columns.zeros("Q", len(copy))
        assert column.tolist() == values


def test_a_forked_process_does_not_write_into_the_facts_of_its_parent() -> None:
    column = columns.zeros("Q", columns.MAPPED_FROM_BYTES // 8)
    child = os.fork()
    if not child:
        column[0] = 7
        os._exit(column[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert column[0] == 0


def test_the_audit_recounts_long_prompts_in_the_device_pool() -> None:
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


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70))
def test_a_column_is_its_numbers_in_little_endian(ids: list[int]) -> None:
    for size, as_packed, as_read in ((4, pack_ids, unpack_ids), (8, pack_hashes, unpack_hashes)):
        column = as_packed(ids)
        assert column == b"".join(number.to_bytes(size, "little") for number in ids)
        assert as_read(column) == ids


@pytest.mark.parametrize("place", [-1, PLACES])
def test_a_place_that_there_is_not_takes_no_holder(place: int) -> None:
    with pytest.raises(FoldError, match="pool 0"):
        facts().ref([0, place])


def test_a_place_without_a_holder_gives_none_back() -> None:
    with pytest.raises(FoldError, match="no holder to give back"):
        facts().unref([3])


def test_a_pool_of_unknown_size_grows() -> None:
    pool = PoolFacts(PoolInfo(0, 1, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM))
    for first in (0, 8, 3):
        places = list(range(first, first + 8))
        pool.ref(places)
        pool.store(places[:2], [first + 1, first + 2], READY, 1)
        assert pool.filled(places[1:4]) == [first + 1]
    assert pool.counts == pool.walk()
    assert list(pool.refs) == [1] * 3 + [2] * 8 + [1] * 5


@pytest.mark.parametrize("unfit", [2**31, -2**31 - 1])
def test_an_id_that_is_no_int32_is_refused(unfit: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([unfit])
    with pytest.raises(TypeError):
        pack_ids(["7"])  # type: ignore[list-item]


def test_a_block_that_an_engine_keeps_for_padding_is_no_place() -> None:
    """vLLM gives its block 0 to no request: of 9 blocks, 8 are places, and they keep the engine's numbers."""
    leader = Leader(LeaderConfig(), check=True)

    def tell(kind: type[stimuli.Stimulus], *fields: Any) -> list[Event]:
        return leader.handle(kind(leader.state.n, 0, 1, None, *fields)).events

    tell(stimuli.PoolDeclared, 0, 0, Tier.G1, "GPU", 8, 16, Authority.OBSERVED, False, 1)
    (pool,) = leader.state.pools
    assert (len(pool), pool.capacity, pool.counts) == (9, 8, [8, 0, 0, 0, 0])
    tell(stimuli.RequestArrived, "r", pack_hashes(range(1, 9)), 8 * 16 + 1, 4, 0, None)
    (refused,) = tell(stimuli.BlocksAllocated, "r", pack_ids([0, 1]), 0)
    assert isinstance(refused, StimulusRejected)
    assert refused.why == "block ids must be from 1 to 8, got 0 to 1"
    tell(stimuli.BlocksAllocated, "r", pack_ids(range(1, 9)), 0)
    assert (pool.counts[Condition.EMPTY], pool.counts[Condition.REFERENCED]) == (0, 8)
    told = tell(stimuli.PlacesAudited, 0, 1, pack_hashes([0] * 8), pack_ids([1] * 8), 0, 0)
    assert [type(event) for event in told] == []
    assert audit(leader.state) == quick_audit(leader.state.pools) == []
    again = decode_facts(encode_facts(leader.state))
    assert digest(again) == digest(leader.state)
    assert (again.pools[0].info, again.pools[0].counts) == (pool.info, pool.counts)


@pytest.mark.parametrize("authority", [Authority.ENGINE, Authority.STREAM])
@pytest.mark.parametrize("first", [-1, 1])
def test_only_an_engine_whose_places_are_told_numbers_them(authority: Authority, first: int) -> None:
    leader = Leader(LeaderConfig(), check=True)
    declared = stimuli.PoolDeclared(0, 0, 1, None, 0, 0, Tier.G1, "GPU", 8, 16, authority, False, first)
    (refused,) = leader.handle(declared).events
    assert isinstance(refused, StimulusRejected)
    assert refused.why == f"first_place must be 0 in a pool whose places no tap tells, got {first}"


def test_a_first_place_has_a_bound() -> None:
    leader = Leader(LeaderConfig(), check=True)
    declared = stimuli.PoolDeclared(0, 0, 1, None, 0, 0, Tier.G1, "GPU", 8, 16, Authority.OBSERVED, False, 65)
    (refused,) = leader.handle(declared).events
    assert isinstance(refused, StimulusRejected)
    assert refused.why == "first_place must be from 0 to 64, got 65"


def test_an_event_that_names_a_place_below_the_first_is_refused() -> None:
    pool = facts(2)
    for change in (lambda: pool.ref([1, 3]), lambda: pool.store([1], [7], READY, 0)):
        with pytest.raises(FoldError, match="pool 0 has no place 1"):
            change()
