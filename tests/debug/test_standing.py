"""A stopped request stands still: on the demo's load a hold lasts until somebody continues it, and the others go on.

Law of this file: virtual time and the demo's own configuration, so every number is the same on every machine.
"""

import random
from typing import Any

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import audit
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.holds import POINT_OF_SITE, stands_at
from kvbm_console.core.ids import FinishReason, HoldEnd, Route, Site, SlotState, WaitPoint
from kvbm_console.simulator.calendar import EngineDeadlines
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig, build, default_engine_config, default_leader_config
from kvbm_console.simulator.multiturn import Multiturn, Settings

from .house import House

SECOND = 1_000_000_000
WARM_S = 4
"""After so long the demo's device pool is full and requests wait."""
HELD_S = 2
"""The least time that a person needs to look at something."""
OTHERS_SHARE = 0.7
"""Of the throughput without a hold: what the others keep."""
WATCHED_S = 6
SITES = list(Site)


class Demo:
    """The demo's machine, with the longest times of holds in engine time, as they are at speed 1."""

    def __init__(self) -> None:
        self.held: dict[int, ev.SlotHeld] = {}
        self.ended: list[ev.HoldReleased] = []
        self.done: list[int] = []
        """Slots of requests that ended well."""
        workload = Multiturn(Settings())
        self.rig: Rig = build(
            default_leader_config(workload), default_engine_config(workload), workload,
            publish=lambda _, outcome: self._saw(outcome.events),
        )
        self.rig.dispatcher.wall_deadlines = EngineDeadlines(self.rig.calendar, self.rig.dispatcher)

    def _saw(self, events: list[ev.Event]) -> None:
        for event in events:
            if isinstance(event, ev.SlotHeld):
                self.held[event.hold] = event
            elif isinstance(event, ev.HoldReleased):
                self.ended.append(event)
            elif isinstance(event, ev.SlotMoved) and event.reason is FinishReason.LENGTH:
                self.done.append(event.slot)

    def run(self, seconds: float) -> None:
        """Go on for so much virtual time."""
        self.rig.run(self.rig.now_ns + round(seconds * SECOND))

    def tell(self, kind: Any, *fields: Any) -> None:
        """A verb of the debugger."""
        self.rig.dispatcher.submit(kind, *fields)

    def stop_at(self, **fields: Any) -> None:
        """This breakpoint and no other."""
        self.tell(st.BreakpointsReplaced, "me", (BreakpointSpec(**fields),), "")

    def others_done(self) -> int:
        """Requests that ended well and were never held."""
        held = {event.slot for event in self.held.values()}
        return sum(slot not in held for slot in self.done)

    def lasted(self) -> list[float]:
        """Seconds that each hold has lasted, those left out that stand and have not had the time yet."""
        now_ns = self.rig.now_ns
        ends = {event.hold: event.at_ns for event in self.ended}
        return [
            (ends.get(hold, now_ns) - event.at_ns) / SECOND for hold, event in self.held.items()
            if hold in ends or now_ns - event.at_ns >= HELD_S * SECOND
        ]


def warm() -> Demo:
    """The demo under way."""
    demo = Demo()
    demo.run(WARM_S)
    demo.done.clear()
    return demo


@pytest.fixture(scope="module")
def undisturbed() -> int:
    """Requests that end in ``WATCHED_S`` when nothing is held."""
    demo = warm()
    demo.run(WATCHED_S)
    return demo.others_done()


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.label)
def test_a_hold_at_every_site_stands_for_two_seconds_and_more_while_the_others_run(
    site: Site, undisturbed: int
) -> None:
    demo = warm()
    demo.stop_at(site=site)
    demo.run(WATCHED_S)
    assert demo.lasted()
    assert min(demo.lasted()) >= HELD_S
    assert demo.others_done() >= OTHERS_SHARE * undisturbed
    assert audit(demo.rig.leader.state) == []


def test_what_an_operator_skips_is_held_as_well(undisturbed: int) -> None:
    demo = warm()
    demo.stop_at(site=Site.PROMOTE_WILL, one_shot=True)
    while not demo.held:
        demo.run(0.05)
    demo.stop_at(site=Site.SKIP_DID)
    demo.tell(st.CandidateSkipRequested, 1, "me")
    assert (demo.held[2].site, demo.held[2].slot) == (Site.SKIP_DID, demo.held[1].slot)
    demo.done.clear()
    demo.run(WATCHED_S)
    assert demo.rig.leader.state.holds[2].parked
    assert demo.others_done() >= OTHERS_SHARE * undisturbed
    demo.tell(st.HoldContinued, 2, "me", None)
    assert [event.why for event in demo.ended] == [HoldEnd.SKIPPED, HoldEnd.CONTINUED]


def test_a_persistent_breakpoint_keeps_what_it_holds_until_it_is_continued() -> None:
    demo = warm()
    demo.stop_at(to_state=SlotState.ONBOARDING, max_hold_ns=4 * SECOND)
    for _ in range(6):
        demo.run(1.5)
        for hold in list(demo.rig.leader.state.holds)[:1]:
            demo.tell(st.HoldContinued, hold, "me", None)
    kept = [event.why for event in demo.ended]
    assert len(kept) >= 5
    assert {HoldEnd.CONTINUED, HoldEnd.EXPIRED} == set(kept)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"site": site} for site in SITES] + [{"to_state": SlotState.ONBOARDING}],
                         ids=[*(site.label for site in SITES), "onboarding"])
def test_nine_of_ten_holds_end_by_their_longest_time(fields: dict[str, Any]) -> None:
    demo = warm()
    demo.run(20)
    without = demo.others_done()
    demo = warm()
    demo.stop_at(max_hold_ns=5 * SECOND, **fields)
    demo.run(20)
    assert sum(event.why is HoldEnd.EXPIRED for event in demo.ended) >= 0.9 * len(demo.ended) > 0
    assert demo.others_done() >= OTHERS_SHARE * without


# --- a copy that stands still, and the request that ends meanwhile ---


@pytest.mark.parametrize("site", [Site.CANDIDATE_ENQUEUE, Site.EVALUATE_DID, Site.PROMOTE_WILL, Site.DISPATCH_WILL,
                                  Site.COMPLETE_WILL], ids=lambda site: site.label)
def test_a_request_that_finishes_leaves_its_copy_held_and_its_blocks_with_it(site: Site) -> None:
    house = House(g1=8, g2=16, offload_threshold=0.0)
    house.stop_at(site, route=Route.G1_G2)
    house.decoding("r")
    house.move_all()
    assert house.hold.parked
    assert house.finish("r"), "the blocks stay allocated"
    slot = house.slot("r")
    assert slot.state is SlotState.FINISHING
    assert stands_at(house.hold, slot.state, len(slot.outstanding)) is POINT_OF_SITE[site]
    assert not house.ended
    house.go_on()
    house.move_all()
    assert not house.state.slots
    assert [name for name, _ in house.released] == ["r"]
    assert len(house.state.pools[1].by_hash) >= 4, "what was held was copied after all"


def test_a_hold_without_a_copy_left_passes_to_the_release() -> None:
    house = House(g1=8, g2=16, offload_threshold=0.0, hosts=3)
    house.stored_below()
    house.stop_at(Site.EVALUATE_WILL, one_shot=True)
    house.onboarding("r", "ab")
    house.stop_at(Site.SKIP_DID, owner="another")
    house.command(st.CandidateSkipRequested, house.hold.hold, "me")
    house.step(1)
    assert (house.hold.point, house.hold.parked) == (WaitPoint.PROMOTE, False)
    assert house.finish("r")
    slot = house.slot("r")
    assert house.hold.parked
    assert slot.device_blocks
    assert stands_at(house.hold, slot.state, len(slot.outstanding)) is WaitPoint.RELEASE
    house.go_on()
    assert not house.state.slots


def test_an_aborted_request_takes_its_held_copy_along() -> None:
    house = House(g1=8, g2=16, offload_threshold=0.0)
    house.stop_at(Site.PROMOTE_WILL)
    house.decoding("r")
    house.finish("r", FinishReason.ABORTED)
    assert not house.state.slots
    (released,) = house.ever(ev.HoldReleased)
    assert (released.why, released.by) == (HoldEnd.CANCELLED, "aborted")


# --- holds that nobody ends ---


@pytest.mark.parametrize("seed", [*range(6), 47, 52])
def test_whatever_is_held_every_request_that_is_not_ends(seed: int) -> None:
    """No deadline runs here. Rule 7 alone lets a hold go on that keeps a request from running at all."""
    dice = random.Random(seed)
    workload = Multiturn(Settings(
        sessions=dice.randint(4, 10), requests=40, user=dice.choice([60, 200]), system=64, output=dice.choice([20, 90]),
        think=0.1, seed=seed,
    ))
    g1 = dice.choice([40, 60, 90])
    config = LeaderConfig(
        g2_blocks=dice.choice([0, 60, 200]), g3_blocks=dice.choice([0, 300]), hold_budget_min=6, pressure_share=1.0,
        offload_threshold=dice.choice([0.0, 0.9]),
    )
    rig = build(config, EngineConfig(g1_blocks=g1, max_batch_tokens=128), workload, check=True)
    for _ in range(40):
        spec = BreakpointSpec(site=dice.choice(SITES), ignore_count=dice.randint(0, 5))
        rig.dispatcher.submit(st.BreakpointsReplaced, "me", (spec,), "")
        rig.run(rig.now_ns + SECOND // 5)
    rig.dispatcher.submit(st.BreakpointsReplaced, "me", (), "")
    rig.run_to_end()
    assert all(slot.hold is not None for slot in rig.leader.state.slots.values())
    rig.dispatcher.submit(st.HoldContinued, None, "me", None)
    rig.run_to_end()
    assert rig.done
