"""An arena: every way of copying leaves the same bytes."""

import os

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.bytes.arena import NOTHING, Arena
from kvbm_console.bytes.memory import make_arena

PLACES, SIZE = 40, 64


def arenas() -> list[Arena]:
    """Two, of different bytes and hashes."""
    made = []
    for number in range(2):
        fd = make_arena("test", PLACES, SIZE)
        arena = Arena(fd, PLACES, SIZE)
        os.close(fd)
        arena.rows[:] = np.random.default_rng(number).integers(0, 256, (PLACES, SIZE), np.uint8)
        arena.keys[:] = np.arange(1, PLACES + 1) + 1000 * number
        made.append(arena)
    return made


@some.composite
def places(draw: some.DrawFn) -> list[int]:
    """Different places in any order, with runs of any length."""
    firsts = draw(some.permutations(range(0, PLACES, width := draw(some.sampled_from([1, 2, 4, 8, 40])))))
    return [place for first in firsts for place in range(first, first + width)]


@given(places(), places(), some.integers(0, PLACES), some.sets(some.integers(0, PLACES - 1), max_size=3))
def test_a_copy_moves_exactly_its_blocks(sources: list[int], targets: list[int], count: int, other: set[int]) -> None:
    source, target = arenas()
    sources, targets = sources[:count], targets[:count]
    bad = sorted(at for at in other if at < count)
    keys = [place + 1 + 7 * (at in bad) for at, place in enumerate(sources)]
    rows, hashes = target.rows.copy(), target.keys.copy()
    for at, (since, to) in enumerate(zip(sources, targets, strict=True)):
        if at not in bad:
            rows[to], hashes[to] = source.rows[since], source.keys[since]
    assert target.copy(source, sources, targets, keys) == bad
    assert (target.rows == rows).all()
    assert (target.keys == hashes).all()


@given(places(), some.integers(0, PLACES))
def test_a_store_puts_each_row_at_its_place(targets: list[int], count: int) -> None:
    source, target = arenas()
    rows, where = source.rows[:count], targets[:count]
    target.store(where, rows, list(range(1, count + 1)))
    assert (target.rows[where] == rows).all()
    assert (target.keys[where] == source.keys[:count]).all()
    target.spoil(where)
    assert (target.keys[where] == NOTHING).all()
