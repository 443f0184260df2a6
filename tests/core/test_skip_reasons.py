"""Every reason to skip a candidate that users can read is given by some course of events."""

from collections.abc import Callable

import pytest

from kvbm_console.core import stimuli as st
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.ids import Site, SkipReason, SlotState, Suspend
from kvbm_console.core.state import CacheState
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import engine_config, open_trace
from kvbm_console.planning.traces import parse_trace
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig, build
from kvbm_console.simulator.link_settings import LinkSetting

from .scenes import forget_g1, stored
from .script import Script


def prefilled(script: Script, name: str, word: str) -> None:
    script.arrive(name, word)
    assert script.admit(name)
    script.step()


def copied_by_another_meanwhile() -> Script:
    """Two requests compute the same blocks; the copy of one is held until that of the other has ended."""
    script = Script(g1=12, g2=16, offload_threshold=0.0)
    script.stop_at(Site.EVALUATE_WILL, request="a")
    for name in "ab":
        script.arrive(name, "ab")
        assert script.admit(name)
    script.step(2)
    script.move_all()
    script.go_on()
    return script


def everything_held_below() -> Script:
    script = stored("ab", g1=12, g2=2, staging_share=1.0)
    script.arrive("b", "ab")
    script.lookup("b")
    prefilled(script, "c", "xy")
    return script


def used_once() -> Rig:
    """Two requests, and a disk tier that takes what two have used."""
    rig = build(
        LeaderConfig(g2_blocks=60, g3_blocks=300, offload_threshold=0.0, eviction=PolicyConfig(disk_admission=2)),
        EngineConfig(g1_blocks=48), parse_trace("multiturn:requests=2,sessions=2,system=64,user=32,output=16"),
    )
    rig.run_to_end()
    return rig


def places_given_to_another() -> Script:
    """While a hold keeps the pipeline closed, the engine gives the planned places to another request."""
    script = Script(g1=9, g2=16, offload_threshold=0.0)
    script.arrive("still", "z")
    script.stop_at(Site.TRANSITION_DID, SlotState.PREFILLING, request="still", suspend=Suspend.PIPELINE)
    assert script.admit("still")
    script.step()
    prefilled(script, "a", "abcd")
    script.preempt("a")
    forget_g1(script)
    script.go_on()
    script.move_all()
    return script


def aborted_before_its_copy() -> Script:
    script = Script(offload_threshold=0.0)
    script.stop_at(Site.EVALUATE_WILL, request="a")
    prefilled(script, "a", "ab")
    script.abort("a")
    return script


def skipped_by_hand() -> Script:
    script = stored()
    script.stop_at(Site.EVALUATE_WILL)
    script.arrive("b", "abcd")
    script.admit("b")
    (hold,) = script.state.holds
    script.tell(st.CandidateSkipRequested, hold, "me", source=0)
    return script


def slower_than_the_pool() -> Rig:
    """A disk that writes a tenth of what the engine computes."""
    options = SimulateOptions(
        trace="multiturn:requests=40,sessions=12", total_kv_blocks=200, kv_disk_blocks=3_000, kv_offload_threshold=0.0,
        link=(LinkSetting("disk-write", 60e6),),
    )
    rig = build(options.leader_config(), engine_config(options), open_trace(options), links=options.links())
    rig.run_to_end()
    return rig


COURSES: dict[SkipReason, Callable[[], Script | Rig]] = {
    SkipReason.ALREADY_CACHED: copied_by_another_meanwhile,
    SkipReason.NO_CAPACITY: everything_held_below,
    SkipReason.BELOW_FREQUENCY: used_once,
    SkipReason.SOURCE_EVICTED: places_given_to_another,
    SkipReason.SLOT_STOPPING: aborted_before_its_copy,
    SkipReason.OPERATOR: skipped_by_hand,
    SkipReason.LINK_BUSY: slower_than_the_pool,
}


@pytest.mark.parametrize("reason", SkipReason, ids=lambda reason: reason.label)
def test_a_reason_to_skip_is_given_by_some_course_of_events(reason: SkipReason) -> None:
    assert COURSES[reason]().leader.state.totals.skipped[reason] > 0


def test_the_counts_of_reasons_keep_their_places() -> None:
    """Snapshots carry them by number, so one that is gone leaves its place empty."""
    totals = CacheState().totals
    assert len(totals.skipped) == 9, "the digests of older recordings have so many"
    totals.count_skip(SkipReason.LINK_BUSY)
    assert totals.skipped == [0] * 9 + [1]
    assert totals.skips() == {reason.label: int(reason is SkipReason.LINK_BUSY) for reason in SkipReason}
    assert {3, 6, 7}.isdisjoint(SkipReason)
