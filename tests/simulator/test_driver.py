"""The driver: speed changes how long it sleeps and nothing else; holds, lags and ends."""

import asyncio
from itertools import count

import anyio
import pytest

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import SlotState
from kvbm_console.core.leader import Outcome
from kvbm_console.core.stimuli import BreakpointsReplaced, HoldContinued, Stimulus
from kvbm_console.simulator import driver
from kvbm_console.simulator.driver import Pacer, drive
from kvbm_console.simulator.embedded import Rig, build, default_engine_config, default_leader_config, parse_workload

SHORT = "multiturn:sessions=3,turns=2,think=0.05,ramp=0.01,output=12,requests=6"


class Log:
    """Everything that was published, and a wait for the next publication."""

    def __init__(self) -> None:
        self.stimuli: list[Stimulus] = []
        self.events: list[object] = []
        self._event = asyncio.Event()

    def keep(self, stimulus: Stimulus, outcome: Outcome) -> None:
        self.stimuli.append(stimulus)
        self.events.extend(outcome.events)
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


def rig_of(text: str, log: Log) -> Rig:
    workload = parse_workload(text)
    return build(default_leader_config(workload), default_engine_config(workload), workload, publish=log.keep)


@pytest.mark.asyncio
async def test_the_events_are_the_same_at_any_speed() -> None:
    logs: list[Log] = []
    for speed in (3.0, 10.0, None):
        log = Log()
        await drive(rig_of(SHORT, log), speed=speed, changed=log.wait)
        logs.append(log)
    paced, faster, fastest = logs
    assert paced.stimuli == faster.stimuli == fastest.stimuli
    assert paced.events == faster.events == fastest.events
    assert len(paced.events) > 100


@pytest.mark.asyncio
async def test_a_moment_that_passes_between_two_looks_at_the_clock_ends_nothing() -> None:
    rig = rig_of(SHORT, Log())
    looks = count(0, 700_000)  # each look at the clock is 0.7 ms after the one before
    await drive(rig, speed=1.0, monotonic_ns=lambda: next(looks))
    assert rig.done


@pytest.mark.asyncio
async def test_paced_time_keeps_up_with_the_wall() -> None:
    log = Log()
    rig = rig_of(SHORT, log)
    started = anyio.current_time()
    await drive(rig, speed=10.0)
    took = anyio.current_time() - started
    assert took >= rig.now_ns / 1e9 / 10.0
    assert rig.done


@pytest.mark.asyncio
async def test_a_slice_gives_the_loop_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SLICE_NS", 1)
    log = Log()
    rig = rig_of(SHORT, log)
    turns = 0
    async with anyio.create_task_group() as tasks:
        async def count() -> None:
            nonlocal turns
            while True:
                await anyio.lowlevel.checkpoint()
                turns += 1

        tasks.start_soon(count)
        await drive(rig, speed=None)
        tasks.cancel_scope.cancel()
    assert turns > 50


@pytest.mark.asyncio
@pytest.mark.parametrize("speed", [None, 50.0])
async def test_a_held_rig_waits_for_the_release(speed: float | None) -> None:
    log = Log()
    rig = rig_of("multiturn:sessions=1,turns=1,requests=1", log)
    rig.dispatcher.submit(BreakpointsReplaced, "me", (BreakpointSpec(to_state=SlotState.DECODING, one_shot=True),))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: drive(rig, speed=speed, changed=log.wait))
        while not rig.only_held:
            await log.wait()
            await anyio.lowlevel.checkpoint()
        at_ns = rig.now_ns
        await anyio.wait_all_tasks_blocked()
        assert rig.now_ns == at_ns
        rig.dispatcher.submit(HoldContinued, None, "me", None)
    assert rig.done
    assert rig.engine.totals.finished == 1


@pytest.mark.asyncio
async def test_without_anybody_to_wait_for_a_held_rig_returns() -> None:
    log = Log()
    rig = rig_of("multiturn:sessions=1,turns=1,requests=1", log)
    rig.dispatcher.submit(BreakpointsReplaced, "me", (BreakpointSpec(to_state=SlotState.DECODING, one_shot=True),))
    await drive(rig, speed=None)
    assert rig.only_held
    assert not rig.done


@pytest.mark.asyncio
async def test_it_ends_at_the_time_that_was_said() -> None:
    log = Log()
    rig = rig_of("multiturn", log)
    await drive(rig, speed=None, until_ns=500_000_000)
    assert rig.now_ns <= 500_000_000 < (rig.next_ns or 0)


@pytest.mark.asyncio
async def test_what_comes_from_outside_while_it_sleeps_is_stamped_with_the_time_between() -> None:
    log = Log()
    rig = rig_of("multiturn:sessions=2,turns=1,ramp=3600,output=1,requests=2", log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: drive(rig, speed=1_000.0, changed=log.wait))
        while rig.engine.totals.finished < 1:
            await log.wait()
        last_ns = rig.now_ns
        await anyio.wait_all_tasks_blocked()
        rig.dispatcher.submit(HoldContinued, None, "me", None)
        stamped = log.stimuli[-1].at_ns
        tasks.cancel_scope.cancel()
    assert last_ns < stamped < 3_600_000_000_000


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_none_is_refused(speed: float) -> None:
    with pytest.raises(UsageError, match="speed must be above 0"):
        Pacer(speed, lambda: 0, 0)


@pytest.mark.asyncio
async def test_a_long_lag_is_forgotten_instead_of_caught_up() -> None:
    """A suspended machine: after an hour without the wall's clock, virtual time goes on from where it was."""
    log = Log()
    rig = rig_of(SHORT, log)
    wall = [0]

    def monotonic_ns() -> int:
        wall[0] += 1_000_000
        return wall[0]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: drive(rig, speed=1.0, changed=log.wait, monotonic_ns=monotonic_ns))
        while rig.engine.totals.finished < 1:
            await log.wait()
        before_ns = rig.now_ns
        wall[0] += 3_600_000_000_000
        while rig.engine.totals.finished < 2:
            await log.wait()
        slept_through = rig.now_ns - before_ns
        tasks.cancel_scope.cancel()
    assert slept_through < 10_000_000_000
    assert not rig.done


class FakeLoopTime:
    """A clock that each idle turn moves by 1 us, and each delivered event by 100 us."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.turns = 0
        self.delivered = 0

    def __call__(self) -> int:
        self.now_ns += 1_000
        self.turns += 1
        return self.now_ns

    async def deliver(self, events: int, turns_apart: int) -> None:
        """Works as the RPC library does: one event a turn at most, the next one a few turns later."""
        for _ in range(events):
            for _ in range(turns_apart):
                await asyncio.sleep(0)
            self.now_ns += 100_000
            self.delivered += 1


@pytest.mark.asyncio
async def test_events_that_come_one_a_turn_are_handled_between_two_slices() -> None:
    clock = FakeLoopTime()
    turns = driver.Turns(clock)
    await turns.take()
    library = asyncio.create_task(clock.deliver(10, turns_apart=3))
    for _ in range(8):
        await turns.take()
    assert clock.delivered == 10, "with one turn a slice that would be thirty slices and more"
    await library


@pytest.mark.asyncio
async def test_a_first_turn_that_is_slow_behind_every_slice_is_no_client() -> None:
    """The first turn takes four times as long as the others, so 16 idle turns followed each slice."""
    clock = FakeLoopTime()
    turns = driver.Turns(clock)
    library = asyncio.create_task(clock.deliver(2, turns_apart=1))
    for _ in range(3):
        await _after_a_slice(clock, turns)  # a client, so that later turns are known
    await library
    before = clock.turns
    for _ in range(10):
        await _after_a_slice(clock, turns)
    assert clock.turns - before == 10 * 2


async def _after_a_slice(clock: FakeLoopTime, turns: driver.Turns) -> None:
    def cold() -> None:
        clock.now_ns += 19_000

    asyncio.get_running_loop().call_soon(cold)
    await turns.take()


@pytest.mark.asyncio
async def test_without_clients_a_slice_costs_one_turn_and_a_flood_keeps_the_engine_for_a_bounded_time() -> None:
    clock = FakeLoopTime()
    turns = driver.Turns(clock)
    await turns.take()
    before = clock.turns
    for _ in range(10):
        await turns.take()
    assert clock.turns - before == 10 * 2, "one reading before the turn and one behind it"
    flood = asyncio.create_task(clock.deliver(10_000, turns_apart=1))
    before = clock.turns
    await turns.take()
    assert clock.turns - before <= driver.TURNS_MAX + 1
    flood.cancel()
