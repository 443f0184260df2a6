"""Planted bugs: each is caught by the checks that every script runs, and the same story passes without it.

Law of this file: a bug is a subclass or a patch of one decider, never a flag of the product.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import audit
from kvbm_console.core.columns import pack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import FoldError, InvariantViolation
from kvbm_console.core.ids import ResetMode, SlotState
from kvbm_console.core.leader import Leader, Outcome, pipeline, requests, resets
from kvbm_console.core.leader.frame import Decider
from kvbm_console.core.state import APPLY, CacheState
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.dispatch import HostsDiverged
from tests.core.engine_model import BLOCK
from tests.core.scenes import forget_g1, serve
from tests.core.script import Script

CAUGHT = (AssertionError, FoldError, InvariantViolation, HostsDiverged)


def story(hosts: int = 1, make: Callable[[LeaderConfig, int], Leader] | None = None) -> Script:
    """Copies down and up, clones, evictions below, preemptions, a reset in the middle and one at the end."""
    script = Script(g1=12, g2=6, offload_threshold=0.0, hosts=hosts, make=make, twin=make is None)
    for turn in range(2):
        for number, word in enumerate(("abcd", "mnop", "abxy")):
            serve(script, f"s{turn}{number}", word)
        forget_g1(script, f"f{turn}")
        script.arrive(f"a{turn}", "abxy")
        script.admit(f"a{turn}")
        script.step(2)
        script.arrive(f"b{turn}", "mn")
        script.admit(f"b{turn}")
        script.move_all()
        script.step(3)
        script.clone(f"b{turn}", f"c{turn}")
        script.step(2)
        script.preempt(f"b{turn}")
        script.move_all()
        script.finish(f"c{turn}")
        script.reset(ResetMode.PHYSICAL if turn else ResetMode.LOGICAL)
        script.move_all()
    return script


def on_host(wrong: type[Leader], host: int = 1) -> Callable[[LeaderConfig, int], Leader]:
    """Leaders of which one is wrong."""
    return lambda config, number: wrong(config) if number == host else Leader(config, check=True)


class SkipsResets(Leader):
    """skip_reset_on_one_host"""

    def handle(self, stimulus: st.Stimulus) -> Outcome:
        if isinstance(stimulus, st.ResetRequested):
            return super().handle(st.LeaseLost(stimulus.n, stimulus.at_ns, 0, None, "nobody"))
        return super().handle(stimulus)


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_the_story_passes_without_a_bug(hosts: int) -> None:
    script = story(hosts)
    assert {event.new for event in script.ever(ev.SlotMoved)} >= {
        SlotState.ONBOARDING, SlotState.DECODING, SlotState.PREEMPTED, SlotState.FINISHED,
    }
    assert script.ever(ev.BlocksEvicted)
    assert script.ever(ev.SlotCloned)


def test_skip_reset_on_one_host_is_invisible_with_one_host_and_caught_at_once_with_two() -> None:
    alone = Script(make=lambda config, host: SkipsResets(config), twin=False)
    alone.arrive("a", "ab")
    alone.finish("a")
    alone.tell(st.ResetRequested, ResetMode.LOGICAL, source=0)
    with pytest.raises(HostsDiverged) as caught:
        story(2, on_host(SkipsResets))
    error = caught.value
    script = story(2)
    first_reset = next(one for one in script.stimuli if isinstance(one, st.ResetRequested))
    assert (error.host, error.n) == (1, first_reset.n)
    assert error.difference


def test_nondeterministic_allocation_is_caught() -> None:
    class Shuffled(Leader):
        def free_places(self, pool: PoolFacts, places: list[int]) -> None:
            super().free_places(pool, places)
            self.aids.pools[pool.info.pool].free.sort(reverse=True)

    with pytest.raises(HostsDiverged, match="host 1 differs from host 0"):
        story(2, on_host(Shuffled))


def test_double_free_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CacheState._device_blocks_released

    def twice(self: CacheState, event: ev.DeviceBlocksReleased) -> None:
        slot = self.slots[event.slot]
        pool = self.pools[slot.device_pool or 0]
        release(self, event)
        pool.unref(slot.device_blocks or [0])

    story()
    monkeypatch.setitem(APPLY, ev.DeviceBlocksReleased, twice)
    with pytest.raises(CAUGHT):
        story()


def test_clamp_at_zero_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that is counted twice and clamped: the audit finds references that are not counted."""
    unref = PoolFacts.unref

    def clamped(self: PoolFacts, ids: Any) -> None:
        unref(self, [block for block in ids if self.refs[block] > 0])
        unref(self, [block for block in ids if self.refs[block] > 0][:1])

    story()
    monkeypatch.setattr(PoolFacts, "unref", clamped)
    with pytest.raises(CAUGHT):
        story()


def test_complete_at_promotion_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    promote = pipeline._promote

    def at_once(leader: Decider, candidate: Any, *rest: Any) -> None:
        promote(leader, candidate, *rest)
        number = leader.state.next_operation - 1
        leader.emit(ev.OperationReported, number, 0, True, "", b"")
        leader.aids.complete.append(number)

    story()
    monkeypatch.setattr(pipeline, "_promote", at_once)
    with pytest.raises(CAUGHT):
        story()


def test_skip_never_closes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell() -> None:
        script = Script(g1=12, g2=2, offload_threshold=0.0)
        script.arrive("a", "abcd")
        script.admit("a")
        script.step()
        script.finish("a")
        script.move_all()
        assert not script.state.slots

    def forgets_to_close(leader: Decider, candidate: Any, reason: Any) -> None:
        leader.aids.pending.remove(candidate.candidate)

    tell()
    monkeypatch.setattr(pipeline, "skip", forgets_to_close)
    with pytest.raises(CAUGHT):
        tell()


def test_clone_without_increment_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    clone = CacheState._slot_cloned

    def without(self: CacheState, event: ev.SlotCloned) -> None:
        clone(self, event)
        slot = self.slots[event.slot]
        self.pools[slot.device_pool or 0].unref(slot.device_blocks[:1])

    story()
    monkeypatch.setitem(APPLY, ev.SlotCloned, without)
    with pytest.raises(CAUGHT):
        story()


def test_share_partial_block_is_caught() -> None:
    script = Script(g1=12, g2=0)
    script.arrive("a", "ab")
    script.admit("a")
    script.step()
    partial = script.slot("a").device_blocks[-1:]
    script.tell(st.RequestCloned, "a", ("c",), b"")
    assert script.rejected, "a clone without its own partial block"
    facts = script.mirror
    ids = pack_ids(script.slot("a").device_blocks)
    facts.apply(ev.SlotCloned(facts.seq, script.now, 99, facts.next_slot, 0, "c", ids))
    assert any(found.rule == "I5" and str(partial[0]) in found.detail for found in audit(facts))


def test_queue_not_purged_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset that leaves candidates in the leader's queue."""
    anew = resets._start_aids_anew

    def keeps(leader: Decider) -> None:
        pending = [99, *leader.aids.pending]
        anew(leader)
        leader.aids.pending = pending

    story()
    monkeypatch.setattr(resets, "_start_aids_anew", keeps)
    with pytest.raises((*CAUGHT, KeyError)):
        story()


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

    tell()
    monkeypatch.setattr(requests, "_fence", lambda leader, slot: [])
    with pytest.raises(CAUGHT):
        tell()


# --- F23 ---


class Altered(Leader):
    """A sound leader whose memory is changed by something else before one stimulus."""

    at_n = -1
    what = ""

    def handle(self, stimulus: st.Stimulus) -> Outcome:
        outcome = super().handle(stimulus)
        if stimulus.n == self.at_n:
            state, aids = self.state, self.aids
            if self.what == "refs":
                state.pools[0].refs[0] += 1
            elif self.what == "hash":
                state.pools[1].hash_of[3] ^= 1
            elif self.what == "totals":
                state.totals.preemptions += 1
            elif self.what == "order":
                aids.pools[0].free.append(10**6)
            else:
                aids.next_deadline += 1
        return outcome


@pytest.mark.fault
@pytest.mark.parametrize("what", ["refs", "hash", "totals", "order", "deadline"])
@pytest.mark.parametrize("host", [1, 2])
def test_f23_one_of_three_hosts_altered_at_a_random_step_is_found_at_that_very_step(what: str, host: int) -> None:
    steps = len(story(3).stimuli)
    dice = random.Random(f"{what} {host}")
    for at_n in dice.sample(range(5, steps), 4):
        wrong = type("AlteredHere", (Altered,), {"at_n": at_n, "what": what})
        with pytest.raises(HostsDiverged) as caught:
            story(3, on_host(wrong, host))
        assert (caught.value.host, caught.value.n) == (host, at_n)
        assert caught.value.difference
