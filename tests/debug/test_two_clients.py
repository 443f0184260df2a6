"""F13: two clients set, clear and continue, one of them forgets; callers wait in their own tasks.

One interleaving: some callers ask the leader again and again, each in a task that a breakpoint can pause; two clients
take turns in an order drawn at random, lose their leases, and at last everything is disarmed.

Law of this file: holds that began are holds that ended or live; whoever was let go goes on (no wake-up is lost); after
a disarm nobody waits. A seed names its interleaving.
"""

import asyncio
import os
import random

import anyio
import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import audit
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import BreakpointAction, Site, SlotState
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import digest
from kvbm_console.core.state import CacheState
from kvbm_console.debug.interceptors import HookedPort
from kvbm_console.debug.leases import Leases
from kvbm_console.debug.sessions import Session, Sessions
from kvbm_console.dispatch import Dispatcher, start_leader

FULL = bool(os.environ.get("KVBM_FULL"))
INTERLEAVINGS = 10_000 if FULL else 150
CALLERS = 3
TURNS = 14
SITES = (Site.CALL_WILL, Site.CALL_DID, Site.TRANSITION_DID)


class World:
    """A leader, its sessions, and callers that wait in their own tasks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0
        self.event = asyncio.Event()
        self.mirror = CacheState()
        self.began: set[int] = set()
        self.ended: set[int] = set()
        self.leader = Leader(LeaderConfig(g2_blocks=8, hold_budget_min=2), check=True)
        self.dispatcher = Dispatcher(self.leader, lambda: self.now, publish=self._published)
        self.leases = Leases(
            lambda: self.now, granted=lambda owner, back: self.dispatcher.submit(st.LeaseGranted, owner, back),
            lost=lambda owner: self.dispatcher.submit(st.LeaseLost, owner),
        )
        self.sessions = Sessions(self.dispatcher, self.leases)
        start_leader(self.dispatcher)
        self.answered = [0] * CALLERS
        self.over = False
        """Whether the clients have had their turns: then every caller ends behind its next answer."""
        for caller in range(CALLERS):
            self.dispatcher.submit_from(
                1, None, st.RequestArrived, f"r{caller}", pack_hashes([caller + 1]), 20, 8, 0, None
            )

    def _published(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        for event in outcome.events:
            self.mirror.apply(event)
            if isinstance(event, ev.SlotHeld):
                assert event.hold not in self.began
                self.began.add(event.hold)
            elif isinstance(event, ev.HoldReleased):
                assert event.hold in self.began, "released before it began"
                assert event.hold not in self.ended, "released twice"
                self.ended.add(event.hold)
        self.event.set()
        self.event = asyncio.Event()

    async def changed(self) -> None:
        await self.event.wait()

    async def call(self, caller: int) -> None:
        """One caller: an engine's task that asks about its own request, again and again."""
        port = HookedPort(self.dispatcher, 1, self.changed)
        while not self.over:
            await port.call(st.MatchRequested, f"r{caller}", 0)
            self.answered[caller] += 1
            await anyio.lowlevel.checkpoint()

    def turn(self, session: Session) -> None:
        """One thing that a client does; a lost race is answered."""
        rng, sessions, state = self.rng, self.sessions, self.leader.state
        mine = [number for number, known in state.breakpoints.items() if known.owner == session.owner]
        holds = [*state.holds, *sorted(self.ended)[-2:]]
        verb = rng.randrange(9)
        try:
            if verb <= 2:
                sessions.set(session, self._spec())
            elif verb == 3 and mine:
                sessions.remove(session, rng.choice(mine))
            elif verb == 4 and holds:
                assert sessions.continue_hold(session, rng.choice(holds)) in ("continued", "already_continued")
            elif verb == 5 and holds:
                assert sessions.step(session, rng.choice(holds)) in ("stepped", "already_continued")
            elif verb == 6:
                sessions.continue_hold(session, None)
            elif verb == 7 and mine:
                sessions.enable(session, rng.choice(mine), rng.random() < 0.7)
            elif verb == 8 and session.lease and rng.random() < 0.3:
                sessions.close(session)  # it forgets; its holds go on, its breakpoints are disabled
            else:
                sessions.renew(session)
        except Refused as error:
            raise AssertionError(f"a client was refused: {error}") from None

    def _spec(self) -> BreakpointSpec:
        rng = self.rng
        return BreakpointSpec(
            site=rng.choice(SITES), request=rng.choice(["*", "r0", "r[12]"]), one_shot=rng.random() < 0.3,
            action=rng.choice([BreakpointAction.HOLD, BreakpointAction.HOLD, BreakpointAction.LOG]),
            to_state=rng.choice([None, None, SlotState.INITIALIZED]), ignore_count=rng.choice([0, 0, 1]),
        )

    def check(self) -> None:
        """Conservation, and the mirror."""
        state = self.leader.state
        assert self.began - self.ended == set(state.holds)
        assert {slot.hold for slot in state.slots.values()} - {None} == set(state.holds)
        assert state.totals.holds == len(self.began)
        assert sum(state.totals.holds_ended) == len(self.ended)


async def interleaving(seed: int) -> int:
    """One seed, from the first call to the last; how many holds there were."""
    world = World(seed)
    first = world.sessions.open("one", lease=True)
    second = world.sessions.open("two", lease=world.rng.random() < 0.7)
    callers = [asyncio.ensure_future(world.call(caller)) for caller in range(CALLERS)]
    for _ in range(TURNS):
        for _ in range(world.rng.randrange(4)):
            await anyio.lowlevel.checkpoint()
        world.now += 1
        world.turn(world.rng.choice([first, second]))
        world.check()
    world.sessions.disarm(first)
    world.check()
    assert not world.leader.state.holds
    assert world.leader.gate is None
    world.over = True
    with anyio.fail_after(20):
        await asyncio.gather(*callers)  # every caller goes on: none waits for a wake-up that is lost
    assert digest(world.mirror) == world.leader.digest()
    assert audit(world.leader.state) == []
    return len(world.began)


@pytest.mark.asyncio
@pytest.mark.fault
@pytest.mark.timeout(600)
async def test_f13_two_clients_lose_no_wake_up_and_no_hold() -> None:
    held = 0
    for seed in range(INTERLEAVINGS):
        try:
            held += await interleaving(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert held > INTERLEAVINGS, "the clients and the callers did meet"
