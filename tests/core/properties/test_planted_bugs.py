"""The twelve planted bugs: each is caught by the checks that every script runs, and the same story passes without it.

Law of this file: a bug is a subclass or a patch of one decider (a host's leader with its device pool), never a flag of
the product; its test is named after it and tells its story twice, first without the bug.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final
from unittest.mock import patch

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.errors import FoldError, InvariantViolation
from kvbm_console.core.folding import APPLY
from kvbm_console.core.ids import ResetMode, Site, SkipReason, SlotState
from kvbm_console.core.leader import Leader, Outcome, requests, resets
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.memory import PoolMemory
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.dispatch import HostsDiverged
from kvbm_console.explore.leader_faults import LEADER_FAULTS
from kvbm_console.simulator.device_pool import DevicePool
from tests.core.engine_model import BLOCK
from tests.core.scenes import forget_g1, on_host, serve, story
from tests.core.script import Script

PLANTED: Final[dict[str, str]] = {
    "skip_reset_on_one_host": "one host passes over a reset: invisible with one host, caught at once with two",
    "nondeterministic_allocation": "one host hands out free places in another order",
    "clone_without_increment": "a clone shares a block whose ref count does not know it",
    "share_partial_block": "a clone writes into the partial last block of its parent",
    "double_free": "a released block loses two holders",
    "clamp_at_zero": "a count that would go below zero is kept at zero",
    "stale_row": "a slot goes on listing blocks that it has given up",
    "queue_not_purged": "a candidate of a slot that stops stays in the queue",
    "reset_keeps_queue": "a reset leaves candidates in the queue",
    "complete_at_promotion": "a copy counts as done when it is promoted, before it ran (D2)",
    "skip_never_closes": "a skipped candidate never closes, so its slot never leaves finishing (D3)",
    "reload_evicts_own_prefix": "the blocks of a reload are taken from the prefix that it continues",
}
"""Name of each bug to what it does."""
CAUGHT: Final = (AssertionError, FoldError, InvariantViolation, HostsDiverged)


def passes_and_is_caught(tell: Callable[[], object], plant: Callable[[], object]) -> str:
    """Tell a story without the bug, plant it, and tell it again; what the checks said."""
    tell()
    plant()
    with pytest.raises(CAUGHT) as caught:
        tell()
    return str(caught.value)


@pytest.fixture
def bugs() -> Iterator[ExitStack]:
    """Faults that are planted here are gone when the test ends."""
    with ExitStack() as stack:
        yield stack


def plant(name: str, bugs: ExitStack) -> None:
    """Plant a bug that ``explore leader --fault`` plants, too."""
    LEADER_FAULTS[name][1](bugs)


def test_every_planted_bug_has_its_test() -> None:
    named = [name for name in globals() if name.startswith("test_")]
    for bug in PLANTED:
        assert [name for name in named if name.startswith(f"test_{bug}_is_")], bug


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_the_story_passes_without_a_bug(hosts: int) -> None:
    script = story(hosts)
    assert {event.new for event in script.ever(ev.SlotMoved)} >= {
        SlotState.ONBOARDING, SlotState.DECODING, SlotState.PREEMPTED, SlotState.FINISHED,
    }
    assert script.ever(ev.BlocksEvicted)
    assert script.ever(ev.SlotCloned)


def test_skip_reset_on_one_host_is_invisible_with_one_host_and_caught_at_once_with_two() -> None:
    class SkipsResets(Leader):
        def handle(self, stimulus: st.Stimulus) -> Outcome:
            if isinstance(stimulus, st.ResetRequested):
                return super().handle(st.LeaseLost(stimulus.n, stimulus.at_ns, 0, None, "nobody"))
            return super().handle(stimulus)

    alone = Script(make=lambda config, host: SkipsResets(config), twin=False)
    alone.arrive("a", "ab")
    alone.finish("a")
    alone.tell(st.ResetRequested, ResetMode.LOGICAL, source=0)
    script = story(2)
    first_reset = next(one for one in script.stimuli if isinstance(one, st.ResetRequested))
    with pytest.raises(HostsDiverged) as caught:
        story(2, on_host(SkipsResets))
    assert (caught.value.host, caught.value.n) == (1, first_reset.n)
    assert "epoch: 1 is not 0" in caught.value.difference


def test_nondeterministic_allocation_is_caught() -> None:
    take = PoolMemory.take

    class Shuffled(Leader):
        def handle(self, stimulus: st.Stimulus) -> Outcome:
            with patch.object(PoolMemory, "take", lambda mine, *asked: take(mine, *asked)[::-1]):
                return super().handle(stimulus)

    story(2)
    with pytest.raises(HostsDiverged, match="host 1 differs from host 0") as caught:
        story(2, on_host(Shuffled))
    assert caught.value.difference


def test_clone_without_increment_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    clone = APPLY[ev.SlotCloned]

    def without(self: CacheState, event: ev.SlotCloned) -> None:
        clone(self, event)
        slot = self.slots[event.slot]
        self.pools[slot.device_pool or 0].unref(slot.device_blocks[:1])

    said = passes_and_is_caught(story, lambda: monkeypatch.setitem(APPLY, ev.SlotCloned, without))
    assert "I2" in said


def test_share_partial_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell() -> None:
        script = Script(g1=12, g2=0, twin=False)
        script.arrive("a", "ab")
        script.admit("a")
        script.step()
        script.clone("a", "c")
        script.step()

    cloned = APPLY[ev.SlotCloned]

    def shares(self: CacheState, event: ev.SlotCloned) -> None:
        """The clone lists the parent's own last block where it should have one of its own."""
        cloned(self, event)
        parent, clone = self.slots[event.parent], self.slots[event.slot]
        pool = self.pools[clone.device_pool or 0]
        pool.unref(clone.device_blocks[-1:])
        clone.device_blocks[-1:] = parent.device_blocks[-1:]
        pool.ref(clone.device_blocks[-1:])

    said = passes_and_is_caught(tell, lambda: monkeypatch.setitem(APPLY, ev.SlotCloned, shares))
    assert "I5" in said


def test_double_free_is_caught(bugs: ExitStack) -> None:
    passes_and_is_caught(story, lambda: plant("double-free", bugs))


def test_clamp_at_zero_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that is counted twice and clamped: the audit finds references that are not counted."""
    unref = PoolFacts.unref

    def clamped(self: PoolFacts, ids: Any) -> None:
        unref(self, [block for block in ids if self.refs[block] > 0])
        unref(self, [block for block in ids if self.refs[block] > 0][:1])

    passes_and_is_caught(story, lambda: monkeypatch.setattr(PoolFacts, "unref", clamped))


def test_stale_row_is_caught(bugs: ExitStack) -> None:
    def tell() -> None:
        script = Script(g1=12, g2=6)
        script.arrive("a", "ab")
        script.admit("a")
        script.step()
        script.preempt("a")

    said = passes_and_is_caught(tell, lambda: plant("stale-row", bugs))
    assert said.startswith("I1"), "places that are counted free are listed"
    with pytest.raises(CAUGHT):
        story()


def test_queue_not_purged_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell() -> None:
        script = Script(g1=12, g2=6, offload_threshold=0.0)
        script.arrive("a", "abcd")
        script.admit("a")
        script.stop_at(Site.CANDIDATE_ENQUEUE)
        script.step()
        assert script.slot("a").outstanding, "a candidate waits where its slot is held"
        script.preempt("a")

    skip = requests.skip

    def stays(leader: Decider, candidate: Any, reason: SkipReason) -> None:
        skip(leader, candidate, reason)
        leader.memory.pending.append(candidate.candidate)

    tell()
    monkeypatch.setattr(requests, "skip", stays)
    with pytest.raises((*CAUGHT, KeyError)):
        tell()


def test_reset_keeps_queue_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    anew = resets._start_memory_anew

    def keeps(leader: Decider) -> None:
        pending = [99, *leader.memory.pending]
        anew(leader)
        leader.memory.pending = pending

    story()
    monkeypatch.setattr(resets, "_start_memory_anew", keeps)
    with pytest.raises((*CAUGHT, KeyError)):
        story()


def test_complete_at_promotion_is_caught(bugs: ExitStack) -> None:
    passes_and_is_caught(story, lambda: plant("complete-at-promotion", bugs))


def test_skip_never_closes_is_caught(bugs: ExitStack) -> None:
    def tell() -> None:
        script = Script(g1=12, g2=2, offload_threshold=0.0)
        script.arrive("a", "abcd")
        script.admit("a")
        script.step()
        script.finish("a")
        script.move_all()
        assert not script.state.slots

    passes_and_is_caught(tell, lambda: plant("skip-never-closes", bugs))


def test_reload_evicts_own_prefix_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell() -> None:
        """``ab`` is the coldest of device memory, and ``abc`` needs a place for the rest of it."""
        script = Script(g1=8, g2=16, offload_threshold=0.0)
        serve(script, "first", "abcd")
        forget_g1(script)
        for name, word in (("cold", "ab"), ("warm", "xy")):
            serve(script, name, word, steps=1)
        script.arrive("wall", "", tail=(script.engine.pool.free_blocks - 4) * BLOCK - 1)
        assert script.admit("wall")
        script.arrive("b", "abc")
        assert script.lookup("b") == BLOCK, "a and b stand in device memory, c below"
        assert script.allocate("b")
        script.move_all()
        script.step(2)

    def pays(self: DevicePool, count: int, prefix: Sequence[int] = ()) -> list[int] | None:
        if not self.fits(count, prefix):
            return None
        new = self._pop(count)
        self.touch(prefix)
        return new

    passes_and_is_caught(tell, lambda: monkeypatch.setattr(DevicePool, "allocate", pays))


def test_a_fence_that_is_lifted_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell() -> None:
        script = Script(g1=6, g2=8, offload_threshold=0.0)
        script.arrive("a", "abcd")
        script.admit("a")
        script.step()
        script.start(0)
        script.preempt("a")
        script.arrive("b", "", tail=script.engine.pool.free_blocks * BLOCK - 1)
        script.admit("b")
        script.step()
        script.done(0)

    passes_and_is_caught(tell, lambda: monkeypatch.setattr(requests, "_fence", lambda leader, slot: []))
