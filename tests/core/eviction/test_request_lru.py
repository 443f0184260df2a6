"""The order of eviction of requests, against vLLM's rule: a request's blocks have its rank, and its end uses them anew.

Law of this file: the orders are worked out by hand, or are those of the sorted ranks.
"""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.core.eviction.request_lru import RequestLru


def order(lru: RequestLru) -> list[int]:
    return lru.victims(len(lru.resident)) or []


def stored(lru: RequestLru, owner: int, keys: list[int]) -> None:
    """A request computes these blocks, and those that are not there are stored."""
    lru.admitted(owner, 0, [])
    lru.begin()
    lru.offered(owner, keys, 0, len(keys))
    lru.formed()
    lru.insert([key for key in keys if key not in lru.resident], None, 0)


def test_the_blocks_of_a_request_have_one_rank_and_the_deepest_is_the_coldest() -> None:
    lru = RequestLru()
    stored(lru, 1, [10, 11, 12])
    stored(lru, 2, [10, 21])
    assert order(lru) == [12, 11, 21, 10]


def test_the_end_of_a_request_uses_its_blocks_behind_the_iteration_that_follows() -> None:
    lru = RequestLru()
    stored(lru, 1, [10, 11])
    lru.finished(1)
    stored(lru, 2, [20])
    assert order(lru) == [11, 10, 20]
    lru.begin()
    assert order(lru) == [20, 11, 10]


def test_requests_that_end_together_are_used_in_the_order_that_is_told() -> None:
    for told, last in ((), 20), (("b", "a"), 10):
        lru = RequestLru()
        stored(lru, 1, [10])
        stored(lru, 2, [20])
        stored(lru, 3, [30])
        lru.finished(1, "a")
        lru.finished(2, "b")
        lru.finished(3, "c")
        lru.formed(told)
        lru.begin()
        assert order(lru)[-1] == 30
        assert order(lru)[-2] == last


def test_a_request_that_stores_blocks_anew_gives_them_the_rank_of_its_first_use() -> None:
    """It was preempted, and the tier gave its blocks up meanwhile."""
    lru = RequestLru()
    stored(lru, 1, [10, 11])
    stored(lru, 2, [20])
    lru.forget([10, 11])
    stored(lru, 1, [10, 11])
    assert order(lru) == [11, 10, 20]


def test_a_load_uses_the_loaded_blocks_alone() -> None:
    """The block in front of them was on the device."""
    lru = RequestLru()
    stored(lru, 1, [10, 11, 12])
    stored(lru, 2, [20])
    lru.admitted(3, 3, [11, 12], 1)
    assert order(lru) == [10, 20, 12, 11]


def test_blocks_that_are_being_written_are_not_used() -> None:
    lru = RequestLru()
    stored(lru, 1, [10])
    stored(lru, 2, [20])
    lru.admitted(3, 0, [])
    lru.offered(3, [10], 0, 1, {10})
    assert order(lru) == [10, 20]


def test_a_request_keeps_what_it_offers_in_an_iteration_and_no_other_prefix() -> None:
    """The second chunk of a prompt may evict the first one, as vLLM does."""
    lru = RequestLru()
    stored(lru, 1, [10, 11])
    lru.admitted(2, 0, [])
    lru.offered(2, [10, 11, 12, 13], 0, 3)
    assert lru.offered_with([12]) == {10, 11, 12}
    restored = RequestLru()
    restored.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(lru.export())))
    assert restored.offered_with([12]) == {10, 11, 12}
    lru.begin()
    lru.offered(2, [10, 11, 12, 13], 0, 4)
    assert lru.offered_with([13]) == {13}


def test_a_choice_gives_all_or_none_and_changes_nothing() -> None:
    lru = RequestLru()
    stored(lru, 1, [10, 11])
    assert lru.victims(3) is None
    assert lru.victims(1, protected={11}) == [10]
    assert lru.victims(1, lambda key: key == 10) == [10]
    assert order(lru) == [11, 10]
    lru.forget([11])
    assert order(lru) == [10]


KEYS = st.integers(0, 15)
Step = tuple[str, int, list[int]]
STEP: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 5), st.lists(KEYS, unique=True)),
    st.tuples(st.just("end"), st.integers(0, 5), st.just([])),
    st.tuples(st.just("touch"), st.just(0), st.lists(KEYS, unique=True, max_size=3)),
    st.tuples(st.just("choose"), st.integers(1, 6), st.lists(KEYS, max_size=4)),
    st.tuples(st.just("evict"), st.integers(1, 6), st.lists(KEYS, max_size=4)),
)


@given(st.lists(STEP, max_size=60))
def test_a_choice_is_that_of_the_sorted_ranks_whatever_was_chosen_before(steps: list[Step]) -> None:
    """``choose`` is a choice that nobody carries out."""
    lru, live = RequestLru(), set()
    for kind, number, keys in steps:
        if kind == "store" or (kind == "end" and number not in live):
            stored(lru, number, keys)
            live.add(number)
        elif kind == "end":
            lru.finished(number)
            live.discard(number)
        elif kind == "touch":
            lru.touch([key for key in keys if key in lru.resident])
        else:
            ranks = sorted((use, place, key) for key, use, place in lru.export()["ranks"])
            coldest = [key for _, _, key in ranks if key not in keys]
            chosen = lru.victims(number, None, set(keys))
            assert chosen == (coldest[:number] if len(coldest) >= number else None)
            lru.forget(chosen if kind == "evict" and chosen else [])


def test_a_block_that_is_stored_a_second_time_stands_once_in_the_order() -> None:
    lru = RequestLru()
    stored(lru, 1, [10, 11])
    lru.touch([20])
    lru.insert([10], None, 0)
    lru.touch([11, 30])
    assert order(lru) == [20, 10, 30, 11]


def test_a_restored_policy_goes_on_as_the_first_would() -> None:
    lru, other = RequestLru(), RequestLru()
    stored(lru, 1, [10, 11])
    stored(lru, 2, [20])
    lru.finished(1)
    other.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(lru.export())))
    for one in (lru, other):
        stored(one, 3, [10, 30])
        one.begin()
    assert order(lru) == order(other) == [20, 30, 11, 10]
    assert lru.export() == other.export()
