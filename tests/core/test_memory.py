"""What the leader remembers to decide with: empty places, and chains of blocks."""

from hypothesis import given
from hypothesis import strategies as hy

from kvbm_console.core.eviction.leaves import chains
from kvbm_console.core.leader.memory import PoolMemory


@given(hy.integers(1, 40), hy.booleans(), hy.lists(hy.tuples(hy.booleans(), hy.integers(0, 12)), max_size=30))
def test_the_lowest_empty_places_are_taken(capacity: int, old: bool, steps: list[tuple[bool, int]]) -> None:
    """``old``: a keyframe from before unused places were counted names all of them."""
    mine = PoolMemory(capacity_blocks=capacity)
    if old:
        mine.free = list(range(capacity))
    else:
        mine.unused = capacity
    empty, taken = set(range(capacity)), list[int]()
    for take, count in steps:
        if take:
            count = min(count, mine.room)
            places = mine.take(count, at_ns=0)
            assert places == sorted(empty)[:count]
            empty -= set(places)
            taken += places
        else:
            back, taken = taken[:count], taken[count:]
            mine.give_back(back)
            empty |= set(back)
        assert mine.room == len(empty)


@given(hy.data())
def test_blocks_are_sorted_into_chains(data: hy.DataObject) -> None:
    """Chains in prompt order, deepest first and mixed."""
    parents = data.draw(hy.lists(hy.integers(0, 30), min_size=1, max_size=30))
    parent_of = {key: min(parent, key - 1) for key, parent in enumerate(parents, 1) if parent and key > 1}
    keys = data.draw(hy.lists(hy.integers(1, len(parents)), min_size=1, unique=True))
    path = keys[:1]
    while path[-1] in parent_of:
        path.append(parent_of[path[-1]])
    some = path[data.draw(hy.integers(0, len(path) - 1)) :]
    hashes = {"prompt": some[::-1], "deepest": some, "mixed": keys}[
        data.draw(hy.sampled_from(["prompt", "deepest", "mixed"]))
    ]
    found = chains(parent_of, hashes)
    assert sorted(key for chain in found for key in chain) == sorted(hashes)
    seen = set[int]()
    for chain in found:
        assert list(map(parent_of.get, chain[1:])) == chain[:-1]
        assert parent_of.get(chain[0]) not in hashes or parent_of[chain[0]] in seen, "a chain goes on in front"
        seen |= set(chain)
