"""Runs of resident blocks: they are those of a plain search, whatever came and went before."""

from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.core.eviction.leaves import ResidentTree
from kvbm_console.core.eviction.policy import POLICIES, PolicyConfig
from kvbm_console.core.eviction.pool_policy import PoolPolicy
from tests.core.eviction.trees import EVERYTHING

KEYS = range(24)
_keys = some.sampled_from(KEYS)
_steps = some.lists(some.tuples(some.sampled_from(["add", "remove"]), some.lists(_keys, unique=True)), max_size=30)


def forest(numbers: list[int | None]) -> dict[int, int]:
    """Each block behind a lower one, or behind none that is known."""
    return {key: number % key for key, number in zip(KEYS, numbers, strict=True) if key and number is not None}


forests = some.lists(
    some.none() | some.integers(0, 1_000) | some.just(-1), min_size=len(KEYS), max_size=len(KEYS)
).map(forest)
"""Many blocks are behind the one before them (-1), so that there are runs."""


def runs_of(parent_of: dict[int, int], resident: set[int]) -> set[tuple[int | None, tuple[int, ...]]]:
    """Each run and what is in front of it, by a search."""
    children = {key: {child for child in resident if parent_of.get(child) == key} for key in KEYS}
    found = set()
    for first in resident:
        front = parent_of.get(first)
        if front is not None and front in resident and len(children[front]) == 1:
            continue
        run = [first]
        while len(children[run[-1]]) == 1:
            run += children[run[-1]]
        found.add((front, tuple(run)))
    return found


def assert_runs(tree: ResidentTree, parent_of: dict[int, int], resident: set[int]) -> None:
    runs = set(tree.run_of.values())
    assert {(run.front, tuple(run.keys)) for run in runs} == runs_of(parent_of, resident)
    assert {key: run for run in runs for key in run.keys} == tree.run_of
    behind = {front: {run for run in runs if run.front == front} for run in runs if (front := run.front) is not None}
    assert behind == tree.behind
    parents = {parent_of.get(key) for key in resident}
    assert {key for key in KEYS if tree.is_leaf(key)} == resident - parents


@settings(max_examples=300)
@given(parent_of=forests, taken=_steps, unknown=some.sets(_keys))
def test_runs_follow_from_the_resident_blocks_alone(
    parent_of: dict[int, int], taken: list[tuple[str, list[int]]], unknown: set[int]
) -> None:
    """Some parents become known only when all else has happened."""
    known = {key: parent for key, parent in parent_of.items() if key not in unknown}
    tree, resident = ResidentTree(known), set[int]()
    for verb, keys in taken:
        before = {key for key in KEYS if tree.is_leaf(key)}
        if verb == "add":
            fronts, leaves = tree.add(keys)
            resident |= set(keys)
        else:
            fronts, leaves = list[int](), tree.remove(keys)
            resident -= set(keys)
        assert_runs(tree, known, resident)
        after = {key for key in KEYS if tree.is_leaf(key)}
        assert after - before <= set(leaves) <= after
        assert (before - after) & resident <= set(fronts)
    known |= parent_of
    tree.relate(sorted(resident))
    assert_runs(tree, known, resident)


@given(parents=some.lists(_keys, min_size=len(KEYS), max_size=len(KEYS)), taken=_steps)
def test_hashes_that_continue_each_other_in_a_circle_are_never_leaves(
    parents: list[int], taken: list[tuple[str, list[int]]]
) -> None:
    """No engine has such hashes, but a client can send them."""
    parent_of = dict(zip(KEYS, parents, strict=True))
    for name in POLICIES:
        pool = PoolPolicy(PolicyConfig(policy=name), len(KEYS), parent_of)
        for now, (verb, keys) in enumerate(taken):
            resident = pool.policy.resident
            if verb == "add" and (fresh := [key for key in keys if key not in resident]):
                pool.insert(fresh, now)
            else:
                pool.forget([key for key in keys if key in resident])
            chosen, _ = pool.choose(len(KEYS), EVERYTHING, now)
            assert len(set(chosen)) == len(chosen)
            assert set(chosen) <= set(pool.policy.resident)
