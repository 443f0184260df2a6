"""Engines that crash and come back: how much of their former lives stays in the facts.

Law of this file: there are never more pools than engines had declared at the same time. The pool of an engine that
ended stays readable until another engine takes over its index, and is kept while anything still needs it.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import FoldError
from kvbm_console.core.ids import Authority, FinishReason, ResetMode, Tier
from kvbm_console.core.instructions import PoolAnswer
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import GROWN_MAX, REPLACEABLE
from kvbm_console.dispatch import Dispatcher, start_leader

from .engine_model import BLOCK
from .script import ENGINE, Script

LOWER = 2
"""Pools of the leader itself."""


class House:
    """A leader, a mirror that folds its events, and a leader restored before every stimulus that must do the same."""

    def __init__(self, authority: Authority) -> None:
        self.config = LeaderConfig(block_tokens=BLOCK, g2_blocks=8, g3_blocks=8)
        self.leader = Leader(self.config, check=True)
        self.mirror = CacheState()
        self.dispatcher = Dispatcher(self.leader, lambda: self.leader.state.at_ns + 1, publish=self._look)
        self.authority = authority
        self.living: dict[int, int] = {}
        """Source to the pools that it has declared."""
        self.most = 0
        self.next = 1
        start_leader(self.dispatcher)
        self.before = encode_facts(self.leader.state), self.leader.export()

    def _look(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        assert not [e for e in outcome.events if isinstance(e, ev.InvariantViolated)]
        for event in outcome.events:
            self.mirror.apply(event)
        assert encode_facts(self.mirror) == encode_facts(self.leader.state)
        if stimulus.n >= LOWER:
            twin = Leader.restore(self.config, *self.before)
            assert twin.handle(stimulus).events == outcome.events
            assert twin.export() == self.leader.export()
        self.before = encode_facts(self.leader.state), self.leader.export()

    def begin(self, capacity: int | None, groups: int) -> None:
        source, self.next = self.next, self.next + 1
        for group in range(groups):
            authority = self.authority if group == 0 else Authority.STREAM  # as a hybrid model's other groups
            answer = self.dispatcher.submit_from(
                source, None, st.PoolDeclared, 0, group, Tier.G1, "GPU", capacity, BLOCK, authority
            )
            assert isinstance(answer.result, PoolAnswer)
            pool = self.leader.state.pools[answer.result.pool]
            assert (pool.info.source, pool.info.group, pool.resident_blocks) == (source, group, 0)
        self.living[source] = groups
        self.most = max(self.most, sum(self.living.values()))

    def work(self, source: int, block: int) -> None:
        name = f"r{source}-{self.leader.state.seq}"
        ids = [block, block + 1]
        submit = self.dispatcher.submit_from
        submit(source, None, st.RequestArrived, name, pack_hashes([source * 100 + block + 1]), BLOCK + 1, 8, 0, None)
        submit(source, None, st.BlocksAllocated, name, pack_ids(ids), 0)

    def end(self, source: int) -> None:
        for slot in [slot for slot in self.leader.state.slots.values() if slot.source == source]:
            if self.authority is Authority.ENGINE:
                self.dispatcher.submit_from(
                    source, None, st.RequestFinished, slot.request, pack_ids(slot.device_blocks), FinishReason.ABORTED
                )
        self.dispatcher.submit_from(source, None, st.SourceRestarted, True, True)
        del self.living[source]


@pytest.mark.parametrize("authority", [Authority.OBSERVED, Authority.ENGINE, Authority.STREAM])
@given(data=some.data())
@settings(max_examples=25, deadline=None)
def test_pools_are_bounded_by_the_engines_that_lived_at_the_same_time(
    authority: Authority, data: some.DataObject
) -> None:
    house = House(authority)
    for _ in range(data.draw(some.integers(1, 24))):
        living = sorted(house.living)
        what = data.draw(some.sampled_from(["begin", "work", "end", "end", "reset"] if living else ["begin"]))
        if what == "begin" and len(living) < 4:
            house.begin(data.draw(some.sampled_from([8, 16, None])), data.draw(some.integers(0, 2)))
        elif what == "work" and authority is not Authority.STREAM:
            house.work(data.draw(some.sampled_from(living)), data.draw(some.integers(0, 6)))
        elif what == "end":
            house.end(data.draw(some.sampled_from(living)))
        elif what == "reset":
            house.dispatcher.submit(st.ResetRequested, ResetMode.LOGICAL)
        state = house.leader.state
        assert len(state.pools) <= LOWER + house.most
        known = {pool.info.source for pool in state.pools}
        assert set(state.lost_sources) <= known, "of an engine without a pool nothing stays"
        assert known >= {source for source, pools in house.living.items() if pools}


def test_a_pool_is_taken_over_only_when_the_last_copy_of_it_has_ended() -> None:
    script = Script(offload_threshold=0.0, twin=True)
    script.arrive("a", "abcd")
    assert script.admit("a")
    script.step()
    assert script.state.operations, "a copy of its blocks is under way"
    script.checks = False  # the oracles know one engine alone
    script.abort("a")
    script.tell(st.SourceRestarted, True, True)
    declared = (0, 0, Tier.G1, "GPU", 8, BLOCK, Authority.ENGINE)
    second = script.tell(st.PoolDeclared, *declared, source=2).pool
    assert second == len(script.state.pools) - 1 > script.device
    assert script.state.lost_sources == {ENGINE: REPLACEABLE}
    script.move_all()
    assert script.tell(st.PoolDeclared, *declared, source=3).pool == script.device
    assert not script.state.lost_sources


def test_an_engine_that_ended_stays_readable_when_it_does_not_say_that_it_is_replaceable() -> None:
    script = Script(g2=0)
    script.checks = False
    script.tell(st.SourceRestarted, True)
    answer = script.tell(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 8, BLOCK, Authority.ENGINE, source=2)
    assert answer.pool == script.device + 1, "a recording of before decides as it did"


@pytest.mark.parametrize("authority", [Authority.OBSERVED, Authority.ENGINE])
def test_a_pool_of_unknown_capacity_grows_to_no_id_that_is_named(authority: Authority) -> None:
    """One request with block 2**31 - 2 took 45 GB."""
    house = House(authority)
    house.begin(None, 1)
    submit = house.dispatcher.submit_from
    submit(1, None, st.RequestArrived, "r", pack_hashes([1]), BLOCK + 1, 8, 0, None)
    for top in (GROWN_MAX, 2**31 - 2):
        (event,) = submit(1, None, st.BlocksAllocated, "r", pack_ids([0, top]), 0).events
        assert isinstance(event, ev.StimulusRejected)
        assert f"from 0 to {GROWN_MAX - 1}" in event.why
    assert len(house.leader.state.pools[-1]) == 0
    with pytest.raises(FoldError, match="has 0 places"):
        house.mirror.apply(ev.BlocksReserved(house.mirror.seq, house.mirror.at_ns, 0, 2, 1, pack_ids([2**31 - 2]),
                                             pack_hashes([1])))
