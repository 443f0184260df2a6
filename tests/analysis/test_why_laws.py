"""Laws over whole runs: every missed block is explained once, by an event that says what it is said to say."""

from functools import cache
from typing import Any

import pytest

from kvbm_console.analysis.explain import Explanation, Missed, MissedRun, explain
from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.leader import Leader
from tests.analysis.evidence import evidence, state_before
from tests.recording.helpers import Run, real_run
from tests.server import hostile

SIZES = [(48, 96), (40, 16), (64, 0)]
"""Device and host blocks: a roomy host tier, one that thrashes, none."""


@cache
def run_of(g1_blocks: int, g2_blocks: int) -> Run:
    return real_run(18, g1_blocks, g2_blocks)


@cache
def explained(g1_blocks: int, g2_blocks: int) -> dict[str, Explanation]:
    run = run_of(g1_blocks, g2_blocks)
    what = evidence(run.all_events, run.config)
    names = {event.request for event in run.all_events if isinstance(event, ev.SlotOpened)}
    return {name: explain(what, name) for name in sorted(names)}


def prompt_of(run: Run, name: str) -> list[int]:
    return next(
        unpack_hashes(event.hashes) for event in run.all_events
        if isinstance(event, ev.SlotOpened) and event.request == name
    )


@pytest.mark.parametrize("sizes", SIZES)
def test_the_time_of_every_request_adds_up(sizes: tuple[int, int]) -> None:
    for one in explained(*sizes).values():
        assert one.spent.complete
        assert one.spent.ended
        assert sum(part.ns for part in one.spent.parts) == one.spent.total_ns > 0
        assert all(part.ns > 0 for part in one.spent.parts)


@pytest.mark.parametrize("sizes", SIZES)
def test_every_missed_block_is_explained_once(sizes: tuple[int, int]) -> None:
    for one in explained(*sizes).values():
        assert one.admissions
        for admission in one.admissions:
            blocks = [run.first for run in admission.misses if run.first is not None]
            assert blocks == list(range(one.prompt_blocks - admission.missed, one.prompt_blocks))
            assert sum(admission.hits) + admission.missed == one.prompt_blocks
            tail = one.prompt_tokens - one.prompt_blocks * one.block_tokens
            assert sum(run.tokens for run in admission.misses if run.first is None) == tail


@pytest.mark.parametrize("sizes", SIZES)
def test_the_deciding_event_says_so_itself(sizes: tuple[int, int]) -> None:
    run = run_of(*sizes)
    reasons: set[Missed] = set()
    for name, one in explained(*sizes).items():
        prompt = prompt_of(run, name)
        for admission in one.admissions:
            for missed in admission.misses:
                reasons.add(missed.reason)
                if missed.first is not None:
                    check(run, missed, prompt[missed.first], admission.lookup_seq or admission.seq)
    assert {Missed.NEVER_STORED, Missed.TOO_SHORT} <= reasons
    if sizes != SIZES[0]:
        assert Missed.EVICTED in reasons, reasons


@pytest.mark.parametrize("seed", [390, 12])
def test_whatever_engines_tell_every_request_is_explained(seed: int) -> None:
    """In the first a connector tells of a load when its request has ended."""
    world = hostile.run(seed, 300)
    leader = Leader(world.config)
    events = [event for stimulus in world.told for event in leader.handle(stimulus).events]
    what = evidence(events, world.config)
    for name in sorted({event.request for event in events if isinstance(event, ev.SlotOpened)}):
        assert explain(what, name).spent.total_ns >= 0


def naming(run: Run, key: int, before: int) -> list[Any]:
    """Events in front of ``before`` that store or evict this hash: an answer that shares nothing with the ledger."""
    kinds = ev.BlocksFilled | ev.BlocksReserved | ev.BlocksEvicted
    return [
        event for event in run.all_events[:before]
        if isinstance(event, kinds) and key in unpack_hashes(event.hashes)
    ]


def check(run: Run, missed: MissedRun, key: int, looked: int) -> None:
    named = naming(run, key, looked)
    match missed.reason:
        case Missed.NEVER_STORED:
            assert not named
        case Missed.EVICTED | Missed.NOT_OFFLOADED:
            assert missed.seq is not None
            event = run.all_events[missed.seq]
            assert isinstance(event, ev.BlocksEvicted)
            assert named[-1] is event
            stored_below = [one for one in named if isinstance(one, ev.BlocksReserved) and one.pool == 0]
            assert missed.reason is Missed.EVICTED or not stored_below or stored_below[-1].seq < missed.seq
        case Missed.BEHIND_A_MISS | Missed.FILTERED:
            state = state_before(run.all_events, looked)
            assert any(pool.ready_place(key) is not None for pool in state.pools)
        case Missed.BOUNDARY:
            pass
        case _:
            raise AssertionError(f"{missed} in a run without faults")
