"""No feed can make the leader publish an event that its own fold refuses, break an invariant, or end it.

Law of this file: every stimulus is refused with the facts unchanged, or carried through. The leader checks all
invariants after each, and the mirror of the published events has the leader's digest.
"""

import os
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import SourceLost, StimulusRejected
from kvbm_console.core.ids import Authority, CandidateStatus, Tier
from server.feeding import FEED_KINDS, check_stimulus
from tests.server.hostile import BLOCK, FEEDS, FIELDS, KINDS, OF_KIND, World, run

FULL = bool(os.environ.get("KVBM_FULL"))
SEEDS = some.integers(0, 2**16)


class HostileFeeds(RuleBasedStateMachine):
    """Feeds tell stimuli of every kind, end and begin again, beside resets, breakpoints and deadlines."""

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        self.world = World(Random(seed))

    @rule(kind=some.sampled_from(KINDS), feed=some.integers(0, FEEDS - 1), seed=SEEDS)
    def tell(self, kind: type[st.Stimulus], feed: int, seed: int) -> None:
        self.world.dice.seed(seed)
        self.world.tell(self.world.feeds[feed], kind)

    @rule(seed=SEEDS)
    def anything(self, seed: int) -> None:
        self.world.dice.seed(seed)
        self.world.step()

    def teardown(self) -> None:
        self.world.check()


def test_no_feed_breaks_the_leader() -> None:
    run_state_machine_as_test(HostileFeeds, settings=settings(
        max_examples=2_000 if FULL else 40, stateful_step_count=80, deadline=None,
        suppress_health_check=list(HealthCheck),
    ))


@pytest.mark.parametrize("first", range(0, 10_000 if FULL else 60, 20))
def test_long_lies_by_seed(first: int) -> None:
    """Walks of 300 stimuli come to states that the short runs of a search seldom reach."""
    for seed in range(first, first + 20):
        try:
            run(seed, 300)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_every_kind_and_field_of_a_feed_is_told() -> None:
    told = {type(stimulus) for seed in range(4) for stimulus in run(seed, 400).told}
    assert told >= FEED_KINDS
    fields = {(kind, field) for kind in KINDS for field in kind.__struct_fields__[4:]}
    assert {field for kind, field in fields if (kind, field) not in OF_KIND} == set(FIELDS)


# --- what such runs found ---

PLACES = 8
ONE = pack_ids([1])


def watched() -> World:
    """A leader with one watched engine, whose request "a" has two blocks of its three."""
    world = World(Random(0), feeds=0)
    feed = world.open(Authority.OBSERVED)
    for stimulus in (
        st.PoolDeclared(0, 0, 0, None, 0, 0, Tier.G1, "GPU", PLACES, BLOCK, Authority.OBSERVED),
        st.PoolDeclared(0, 0, 0, None, 0, 0, Tier.G2, "CPU", None, BLOCK, Authority.STREAM),
        st.RequestArrived(0, 0, 0, None, "a", pack_hashes([1, 2, 3]), 3 * BLOCK + 1, 0, 0, None),
        st.BlocksAllocated(0, 0, 0, None, "a", pack_ids([0, 1, 2, 3]), 0),
    ):
        world.submit(feed, stimulus)
    return world


def step(**fields: Any) -> st.IterationScheduled:
    told = dict.fromkeys(st.IterationScheduled.__struct_fields__[6:], ())
    numbers = {"iteration": 1, "count": 1, "appended_ids": b"", "running": 1, "waiting": 0}
    return st.IterationScheduled(0, 0, 0, None, **{**told, **numbers, **fields})  # type: ignore[arg-type]


DEVICE = next(at for at, pool in enumerate(watched().dispatcher.leader.state.pools) if pool.info.source)


@pytest.mark.parametrize("stimulus", [
    step(new=("a",), appended=("a",), appended_counts=(1,), appended_ids=b"\x01"),
    step(new=("a",), progressed=("a",), positions=()),
    step(new=("a",), progressed=("a",), positions=(-1,)),
    step(new=("a",), appended=("a", "a"), appended_counts=(-1, 2), appended_ids=ONE),
    step(new=("a",), count=0),
    st.RequestArrived(0, 0, 0, None, "a", b"", 0, 0, 0, None),
    st.RequestArrived(0, 0, 0, None, "a", b"\x01", 16, 0, 0, None),
    st.BlocksAllocated(0, 0, 0, None, "a", pack_ids([5, 5]), 0),
    st.BlocksAllocated(0, 0, 0, None, "a", pack_ids([0, 1, 2, 3]), -BLOCK),
    st.IterationFinished(0, 0, 0, None, 1, ("a",), (2,), ONE, pack_hashes([1])),
    st.BlocksReported(0, 0, 0, None, DEVICE, pack_hashes([1]), b"", False, pack_ids([PLACES])),
    st.BlocksReported(0, 0, 0, None, DEVICE + 9, b"", b"", True),
    st.CopyBegun(0, 0, 0, None, 1, "a", DEVICE, DEVICE + 1, b"", 2**53, None),
    st.PoolDeclared(0, 0, 0, None, 1, 0, Tier.G1, "GPU", PLACES, BLOCK, Authority.OBSERVED),
    st.PoolDeclared(0, 0, 0, None, 0, 0, Tier.G3, "DISK", PLACES, BLOCK, Authority.OBSERVED),
    st.PoolDeclared(0, 0, 0, None, 0, 1, Tier.G1, "GPU", PLACES, 0, Authority.STREAM),
], ids=lambda stimulus: type(stimulus).__name__)
def test_a_report_whose_form_is_wrong_changes_nothing(stimulus: st.Stimulus) -> None:
    world = watched()
    world.submit(world.feeds[0], stimulus)
    assert [type(event) for event in world.last] == [StimulusRejected]


def test_a_report_of_a_connector_is_no_report_of_the_mover() -> None:
    world = watched()
    feed, state = world.feeds[0], world.dispatcher.leader.state
    world.submit(feed, st.CopyBegun(0, 0, 0, None, 1, "a", DEVICE, DEVICE + 1, pack_hashes([1]), 1, 4096))
    (operation,) = state.operations
    world.submit(feed, st.TransferFinished(0, 0, 0, None, operation, state.epoch, 0))
    assert list(state.operations) == [operation]
    assert state.totals.completions_refused == 1
    world.submit(feed, st.CopyEnded(0, 0, 0, None, 1, CandidateStatus.COMPLETED))
    assert not state.operations


def test_a_block_that_two_requests_hold_is_not_dropped_as_not_kept() -> None:
    world = watched()
    feed, state = world.feeds[0], world.dispatcher.leader.state
    world.submit(feed, step(new=("a",), progressed=("a",), positions=(49,)))
    ids = pack_ids([0, 1, 2])
    world.submit(feed, st.IterationFinished(0, 0, 0, None, 1, ("a",), (3,), ids, pack_hashes([1, 2, 3])))
    world.submit(feed, st.RequestCloned(0, 0, 0, None, "a", ("b",), pack_ids([5])))
    world.submit(feed, st.IterationFinished(0, 0, 0, None, 2, (), (), b"", b"", pack_ids([1])))
    assert [type(event) for event in world.last] == [SourceLost], "the report is wrong, or one of before"
    assert state.pools[DEVICE].by_hash[2] == 1
    world.check()


def test_only_the_end_of_a_feed_says_that_its_engine_is_gone() -> None:
    check_stimulus(st.SourceRestarted(0, 0, 1, None))
    with pytest.raises(UsageError, match="gone must be told by the end of the feed"):
        check_stimulus(st.SourceRestarted(0, 0, 1, None, True, True))
