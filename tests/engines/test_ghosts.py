"""Ghosts: blocks that are stored again, against a larger LRU cache that keeps everything it can."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.engines.kv_events import ghosts as module
from kvbm_console.engines.kv_events.ghosts import Ghosts


class Cache:
    """An LRU cache of blocks. Those that miss are stored, for which others are evicted."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.held: OrderedDict[int, None] = OrderedDict()

    def use(self, key: int) -> tuple[bool, list[int]]:
        """(whether it hit, evicted blocks)."""
        hit = key in self.held
        self.held[key] = None
        self.held.move_to_end(key)
        return hit, [self.held.popitem(last=False)[0] for _ in range(len(self.held) - self.places)]


@given(some.lists(some.integers(1, 30), max_size=200), some.integers(1, 8), some.sampled_from([1, 2, 4, 8, 16]))
def test_a_larger_cache_hits_at_least_what_the_distance_says(uses: list[int], places: int, more: int) -> None:
    """A block found within ``more`` evictions is a hit of a cache with ``more`` further places."""
    small, large, ghosts = Cache(places), Cache(places + more), Ghosts()
    for at, key in enumerate(uses):
        hit, gone = small.use(key)
        also, _ = large.use(key)
        assert also or not hit
        found = {} if hit else ghosts.find([key], at)
        assert sum(found.values()) <= 1
        if any(within <= more for _, within in found):
            assert also
        ghosts.evict(gone, at, places)


def test_the_time_since_the_eviction_and_forgetting() -> None:
    ghosts = Ghosts()
    ghosts.evict([1, 2, 3], 10**9, 3)
    ghosts.evict([4], 2 * 10**9, 3)
    assert ghosts.find([2, 4, 9], 3 * 10**9) == {(2 * 10**9, 4): 1, (10**9, 1): 1}
    assert ghosts.find([2], 3 * 10**9) == {}, "it is here again"
    ghosts.clear()
    assert ghosts.find([1, 3], 3 * 10**9) == {}


def test_few_samples_of_many_evictions_estimate_how_many_come_back() -> None:
    """Of 100,000 blocks every third comes back; the memory stays bounded."""
    dice = random.Random(5)
    ghosts, back, found = Ghosts(), 0, 0
    for at in range(100):
        keys = [dice.getrandbits(64) for _ in range(1_000)]
        ghosts.evict(keys, at, 10**6)
        assert len(ghosts._left) <= module.GHOSTS_MAX + 1_000
        again = keys[::3]
        back += len(again)
        found += sum(ghosts.find(again, at).values())
    assert found == pytest.approx(back, rel=0.05)
