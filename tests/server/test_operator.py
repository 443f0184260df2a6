"""Reset and drain over the wire: what they answer, how a drain ends, and that a rerun of the recording is equal.

Law of this file: nothing waits for time; what must be under way is held by a breakpoint.
"""

import asyncio
import inspect
from pathlib import Path

import pytest

from kvbm_console.client import Client
from kvbm_console.client.draining import DrainProgress, DrainReport, drain
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import ConnectionLost, Refused
from kvbm_console.core.events import DrainBegun, ResetBegun
from kvbm_console.core.ids import Authority, ResetMode, SlotState, Tier
from kvbm_console.core.stimuli import PoolDeclared
from kvbm_console.debug.sessions import Sessions
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from kvbm_console.stream.verbs import ContinueHold, Drain, Reset, SetBreakpoint
from kvbm_console.wire.v1 import console_pb2 as pb
from server.control import VERBS
from tests.server.daemons import daemon_at, published

ENDLESS = "multiturn:sessions=8,think=0.2"
HOUR_NS = 3_600 * 10**9


class Told:
    """Progress, with a mark when the first of it has come."""

    def __init__(self) -> None:
        self.progress: list[DrainProgress] = []
        self.begun = asyncio.Event()

    def __call__(self, progress: DrainProgress) -> None:
        self.progress.append(progress)
        self.begun.set()


def test_every_verb_of_the_contract_is_carried_out() -> None:
    verbs = {field.name for field in pb.ControlRequest.DESCRIPTOR.oneofs_by_name["verb"].fields}
    assert verbs - {"open"} == set(VERBS)
    for kind in VERBS.values():
        _, *fields = inspect.signature(getattr(Sessions, kind.verb)).parameters.values()
        assert len(fields) == 1 + len(kind.__struct_fields__), kind.__name__


@pytest.mark.asyncio
async def test_resets_and_drains_are_answered_recorded_and_rerun(tmp_path: Path) -> None:
    async with daemon_at(ENDLESS, record=tmp_path / "r", speed=20.0) as daemon:
        state = daemon.service.state
        await published(daemon, lambda: len(state.slots) > 2)
        async with Client(daemon.address, name="ann") as client:
            async with client.control("ann", lease=False) as session:
                answer = await session.ask(Reset(ResetMode.PHYSICAL))
                assert (answer.epoch, state.epoch) == (1, 1)
                assert answer.aborted_requests > 0
            seen = state.totals.slots_opened
            await published(daemon, lambda: state.totals.slots_opened > seen)
            over = await drain(client, "ann", 1, lambda progress: None)
            assert (over.drained, over.epoch) == (False, 2)
            assert over.remaining
            assert len(over.remaining) <= over.live_requests
            seen = state.totals.slots_opened
            await published(daemon, lambda: state.totals.slots_opened > seen)
            done = await drain(client, "ann", HOUR_NS, lambda progress: None)
            assert (done.drained, done.epoch, done.remaining, done.remaining_copies) == (True, 3, (), 0)
            seen = state.totals.slots_opened
            await published(daemon, lambda: state.totals.slots_opened > seen)  # new requests are taken again
    recording = Recording.open(tmp_path / "r")
    events = [event for batch in recording.events() for event in batch]
    asked = [event.by for event in events if isinstance(event, DrainBegun | ResetBegun)]
    assert asked == ["ann", "ann", "", "ann", ""]
    assert verify(tmp_path / "r").first_difference is None


@pytest.mark.asyncio
async def test_who_stops_waiting_leaves_the_target_draining_and_a_reset_ends_that() -> None:
    async with daemon_at(ENDLESS, speed=50.0) as daemon, Client(daemon.address) as client:
        state = daemon.service.state
        async with client.control("me", lease=False) as session:
            await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.DECODING, one_shot=True)))
            await published(daemon, lambda: any(hold.parked for hold in state.holds.values()))
            told = Told()
            waiting = asyncio.create_task(drain(client, "me", HOUR_NS, told))
            await told.begun.wait()
            assert state.draining
            assert told.progress[0].live_requests >= 1
            assert (told.progress[0].left_ns or 0) <= HOUR_NS
            with pytest.raises(Refused, match="drains already"):
                await session.ask(Drain(HOUR_NS))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert state.draining, "the daemon goes on"
            answer = await session.ask(Reset())
            assert (answer.epoch, state.draining, dict(state.holds)) == (1, False, {})
            assert (await session.ask(Drain(HOUR_NS))).seq > 0, "no deadline was left behind"


@pytest.mark.asyncio
async def test_a_drain_waits_for_a_held_request_and_ends_when_that_goes_on() -> None:
    async with daemon_at(ENDLESS, speed=50.0) as daemon, Client(daemon.address) as client:
        state = daemon.service.state
        async with client.control("me", lease=False) as session:
            await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.DECODING, one_shot=True)))
            await published(daemon, lambda: any(hold.parked for hold in state.holds.values()))
            told = Told()
            waiting = asyncio.create_task(drain(client, "me", HOUR_NS, told))
            await published(daemon, lambda: state.draining and state.all_held)
            assert not waiting.done()
            await session.ask(ContinueHold(None))
            report: DrainReport = await waiting
    assert (report.drained, report.epoch) == (True, 1)


@pytest.mark.asyncio
async def test_a_daemon_that_ends_while_it_drains_is_told_as_such() -> None:
    async with daemon_at(ENDLESS, speed=50.0) as daemon, Client(daemon.address) as client:
        state = daemon.service.state
        async with client.control("me", lease=False) as session:
            await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.DECODING, one_shot=True)))
            await published(daemon, lambda: any(hold.parked for hold in state.holds.values()))
        told = Told()
        waiting = asyncio.create_task(drain(client, "me", HOUR_NS, told))
        await told.begun.wait()
        daemon.stop()
        with pytest.raises(ConnectionLost):
            await waiting


@pytest.mark.asyncio
@pytest.mark.parametrize("authority", [Authority.OBSERVED, Authority.STREAM])
async def test_an_engine_that_is_only_watched_is_neither_reset_nor_drained(authority: Authority) -> None:
    async with daemon_at() as daemon, Client(daemon.address) as client:
        source = daemon.service.new_source()
        daemon.service.dispatcher.submit_from(source, None, PoolDeclared, 0, 0, Tier.G1, "GPU", 8, 16, authority)
        async with client.control("me", lease=False) as session:
            before = daemon.service.state.seq
            with pytest.raises(Refused, match="only watched cannot be reset"):
                await session.ask(Reset())
            with pytest.raises(Refused, match="only watched cannot be drained"):
                await session.ask(Drain(HOUR_NS))
            assert daemon.service.state.seq == before


@pytest.mark.asyncio
@pytest.mark.parametrize("deadline_ns", [0, -1, 10**15])
async def test_a_drain_without_a_sensible_bound_is_refused(deadline_ns: int) -> None:
    async with daemon_at() as daemon, Client(daemon.address) as client:
        async with client.control("me", lease=False) as session:
            with pytest.raises(Refused, match="deadline_ns must be from 1 to"):
                await session.ask(Drain(deadline_ns))
        assert not daemon.service.state.draining
