"""What the leader remembers to decide with: empty places, and chains of blocks that are looked at in bulk.

Law of this file: what is asked in bulk gives the answer of the plain definition, whatever was asked before.
"""

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as hy

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.leader.aids import PoolAids
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.prefixes import with_prefix


@given(hy.integers(1, 40), hy.booleans(), hy.lists(hy.tuples(hy.booleans(), hy.integers(0, 12)), max_size=30))
def test_the_lowest_empty_places_are_taken(capacity: int, old: bool, steps: list[tuple[bool, int]]) -> None:
    """``old``: a keyframe from before unused places were counted names all of them."""
    mine = PoolAids(capacity_blocks=capacity)
    if old:
        mine.free = list(range(capacity))
    else:
        mine.unused = capacity
    empty, taken = set(range(capacity)), list[int]()
    for take, count in steps:
        if take:
            count = min(count, mine.room)
            places = mine.take(count)
            assert places == sorted(empty)[:count]
            empty -= set(places)
            taken += places
        else:
            back, taken = taken[:count], taken[count:]
            mine.give_back(back)
            empty |= set(back)
        assert mine.room == len(empty)


def plainly(parent_of: dict[int, int], resident: set[int], hashes: list[int]) -> list[int]:
    """Each block behind its prefix, once."""
    order: dict[int, None] = {}
    for first in hashes:
        path = [first]
        while path[-1] in parent_of:
            path.append(parent_of[path[-1]])
        order.update(dict.fromkeys(reversed(path)))
    return [key for key in order if key in resident]


@given(hy.data())
def test_a_prefix_is_found_in_bulk_as_by_walking(data: hy.DataObject) -> None:
    """Chains in prompt order, deepest first and mixed, with a prompt at hand or not, after others and after losses."""
    parents = data.draw(hy.lists(hy.integers(0, 30), min_size=1, max_size=30))
    parent_of = {key: min(parent, key - 1) for key, parent in enumerate(parents, 1) if parent}
    parent_of = {key: parent for key, parent in parent_of.items() if parent}
    keys = list(range(1, len(parents) + 1))
    leader = Decider(LeaderConfig())
    leader.aids.parent_of = parent_of
    for _ in range(data.draw(hy.integers(1, 4))):
        path = [data.draw(hy.sampled_from(keys))]
        while path[-1] in parent_of:
            path.append(parent_of[path[-1]])
        at = data.draw(hy.integers(1, len(path)))
        shape = data.draw(hy.sampled_from(["prompt", "deepest", "mixed"]))
        hashes = {"prompt": path[:at][::-1], "deepest": path[:at], "mixed": data.draw(hy.permutations(path))}[shape]
        prompt = data.draw(hy.sampled_from([[], path[::-1], keys]))
        resident = set(data.draw(hy.lists(hy.sampled_from(keys))))
        pool = cast(Any, SimpleNamespace(by_hash=dict.fromkeys(resident, 0)))
        assert with_prefix(leader, pool, hashes, prompt) == plainly(parent_of, resident, hashes)
        if data.draw(hy.booleans()):
            parent_of.pop(data.draw(hy.sampled_from(keys)), None)
