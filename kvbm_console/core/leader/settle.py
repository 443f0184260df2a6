"""Quiescence: what one stimulus made possible is done before the next one is looked at.

Law of this file: it ends, because each round closes, promotes or parks something, and offloads are planned a few times.
"""

from typing import Final

from kvbm_console.core.leader.ends import close_slot
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.leader.holds import pause_engines
from kvbm_console.core.leader.offloads import plan_offloads
from kvbm_console.core.leader.pipeline import advance, dispatch, end_operation

_ROUNDS: Final = 3
"""What is copied into a pool may need room there, which something must be copied further down for."""


def settle(leader: Decider) -> None:
    """Run everything that can run now: ended operations, candidates, copies, closing slots, new offloads."""
    aids = leader.aids
    rounds = 0 if leader.config.by_order else _ROUNDS - 1
    while aids.complete or aids.pending or aids.undispatched or aids.ending or aids.dirty:
        before = leader.state.seq
        for number in aids.complete[:]:
            end_operation(leader, leader.state.operations[number])
        for number in aids.pending[:]:
            if leader.state.pipeline_closed:
                break
            advance(leader, leader.state.candidates[number])
        for number in aids.undispatched[:]:
            dispatch(leader, leader.state.operations[number])
        for number in aids.ending[:]:
            close_slot(leader, leader.state.slots[number])
        if aids.dirty and rounds < _ROUNDS:
            rounds += 1
            dirty, aids.dirty = aids.dirty, []
            for index in dirty:
                plan_offloads(leader, leader.state.pools[index])
        if leader.state.seq == before:
            break
    if aids.paused or leader.state.engines_paused:
        pause_engines(leader)
