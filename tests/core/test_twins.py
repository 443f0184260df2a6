"""Twins: identical prompts computed at once, so that a hash stands in two device places.

Law of this file: a hash is copied down once, by one place; a reset while that copy runs gives back every place.
"""

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.ids import Authority, Condition

from .engine_model import BLOCK
from .script import Script


def twins(**config: int) -> Script:
    """Two requests of one prompt were computed in the same iterations and have ended, so all of it stands there twice;
    then the device becomes full, and the coldest blocks are copied down."""
    script = Script(g1=64, **config)
    for name in ("a", "b"):
        script.arrive(name, "vwxyz")
        script.admit(name)
    script.step(2)
    for name in ("a", "b"):
        script.finish(name)
    assert len(script.state.pools[device(script)].copies) == 5
    script.arrive("filler", "", tail=(64 - 10 - 4) * BLOCK - 1)
    script.admit("filler")
    script.arrive("other", "m")
    script.admit("other")
    script.step()
    return script


def device(script: Script) -> int:
    return next(pool.info.pool for pool in script.state.pools if pool.info.authority is Authority.ENGINE)


@pytest.mark.parametrize("g2", [3, 16])
def test_a_hash_that_stands_twice_is_copied_once(g2: int) -> None:
    script = twins(g2=g2)
    script.move_all()
    assert script.ever(ev.CandidatePromoted)
    for planned in script.ever(ev.CandidatePlanned):
        hashes = unpack_hashes(planned.hashes)
        assert len(set(hashes)) == len(hashes)
    for promoted in script.ever(ev.CandidatePromoted):
        sources = unpack_ids(promoted.sources)
        assert len(set(sources)) == len(sources)
    (lower,) = [pool for pool in script.state.pools if pool.info.authority is Authority.LEADER]
    assert not lower.copies
    assert len(lower.by_hash) == lower.resident_blocks == min(g2, 5)


def test_a_reset_while_twins_are_copied_gives_back_every_place() -> None:
    script = twins()
    for operation in list(script.mover.queued):
        script.start(operation)
    assert script.state.operations
    script.reset()
    assert script.state.late
    script.move_all()
    assert not script.state.late
    for pool in script.state.pools:
        assert not pool.quarantined
        assert pool.counts[Condition.EMPTY] == len(pool)
    assert script.engine.pool.free_blocks == 64
