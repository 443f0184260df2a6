"""A console that comes back: the same owner, the same breakpoints, armed once."""

from collections.abc import Awaitable, Callable

import grpc.aio
import pytest

from kvbm_console.client import Client, LiveControls
from kvbm_console.client.questions import translating
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.errors import ConnectionLost, Refused
from kvbm_console.core.ids import Site, SlotState
from kvbm_console.service import LeaderService
from kvbm_console.stream.verbs import (
    ContinueHold,
    Disarm,
    EnableBreakpoint,
    RemoveBreakpoint,
    ReplaceBreakpoints,
    SetBreakpoint,
)
from kvbm_console.wire.protocol import method_path
from server.daemon import Daemon
from tests.faults.chaos import chaos
from tests.server.daemons import daemon_at, options_for, published, running, socket_directory


async def once_more(request: Callable[[], Awaitable[object]]) -> None:
    """Until the connection is there again; how soon the loss is known is the transport's affair."""
    while True:
        try:
            await request()
            return
        except ConnectionLost:
            continue


def armed(daemon: Daemon) -> dict[int, tuple[str, bool, int]]:
    return {
        number: (known.owner, known.enabled, known.hits) for number, known in daemon.service.state.breakpoints.items()
    }


@pytest.mark.asyncio
async def test_after_a_lost_connection_every_breakpoint_is_armed_once_and_keeps_its_hits() -> None:
    async with daemon_at() as daemon, chaos(daemon.address) as proxy:
        controls = LiveControls(proxy.address, name="console")
        for spec in (
            BreakpointSpec(to_state=SlotState.INITIALIZED, one_shot=True), BreakpointSpec(site=Site.EVICT_WILL),
            BreakpointSpec(site=Site.SKIP_DID), BreakpointSpec(site=Site.DISPATCH_WILL),
        ):
            await controls.ask(SetBreakpoint(spec))
        await controls.ask(EnableBreakpoint(3, False))
        daemon.service.dispatcher.submit_from(1, None, st.RequestArrived, "r", pack_hashes([1]), 20, 1, 0, None)
        await controls.ask(ContinueHold(None))
        before = armed(daemon)
        assert before == {1: ("console-1", False, 1), 2: ("console-1", True, 0), 3: ("console-1", False, 0),
                          4: ("console-1", True, 0)}
        proxy.reset()
        await published(daemon, lambda: not daemon.service.leases.owners)
        assert not any(enabled for _, enabled, _ in armed(daemon).values()), "disabled, not deleted"
        async with Client(daemon.address) as another, another.control("other", lease=False) as session:
            await session.ask(RemoveBreakpoint(4))
        await once_more(lambda: controls.ask(ContinueHold(None)))
        del before[4]
        assert armed(daemon) == before, "and what somebody else has removed stays removed"
        await controls.aclose()


@pytest.mark.asyncio
async def test_a_hold_goes_on_when_the_last_who_could_continue_it_removes_its_breakpoint() -> None:
    async with daemon_at() as daemon, Client(daemon.address) as client, client.control("you") as you:
        async with client.control("me") as me:
            for session in (me, you):
                await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.INITIALIZED)))
            daemon.service.dispatcher.submit_from(1, None, st.RequestArrived, "r", pack_hashes([1]), 20, 1, 0, None)
        await published(daemon, lambda: daemon.service.leases.owners == {you.owner})
        (hold,) = daemon.service.state.holds.values()
        assert (hold.owner, hold.breakpoints) == (me.owner, (1, 2)), "the other one still looks at it"
        await you.ask(RemoveBreakpoint(2))
        assert not daemon.service.state.holds


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["disarm before", "disarm between", "mute between"])
async def test_what_somebody_else_disarmed_is_not_armed_by_coming_back(how: str) -> None:
    async with daemon_at() as daemon, chaos(daemon.address) as proxy:
        controls = LiveControls(proxy.address, name="console")
        await controls.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.DECODING)))
        await controls.ask(SetBreakpoint(BreakpointSpec(site=Site.SKIP_DID)))
        async with Client(daemon.address) as another, another.control("ops@host", lease=False) as session:
            if how == "disarm before":
                await session.ask(Disarm())
            proxy.reset()
            await published(daemon, lambda: not daemon.service.leases.owners)
            if how == "disarm between":
                await session.ask(Disarm())
            elif how == "mute between":
                await session.ask(EnableBreakpoint(1, False))
        await once_more(lambda: controls.ask(ContinueHold(None)))
        kept = how == "mute between"
        assert armed(daemon) == {1: ("console-1", False, 0), 2: ("console-1", kept, 0)}
        assert daemon.service.state.breakpoints[1].message == "muted by ops@host"
        await controls.aclose()


@pytest.mark.asyncio
async def test_a_daemon_that_began_again_is_not_told_what_was_muted_and_keeps_dependencies() -> None:
    with socket_directory() as place:
        address = f"unix:{place}/d.sock"
        controls = LiveControls(address, name="console")
        async with running(options_for(None, address)):
            for spec in (
                BreakpointSpec(site=Site.SKIP_DID), BreakpointSpec(to_state=SlotState.DECODING),
                BreakpointSpec(to_state=SlotState.PREEMPTED, depends_on=2),
            ):
                await controls.ask(SetBreakpoint(spec))
        controls.saw({1: False, 2: True, 3: True})
        async with running(options_for(None, address)) as daemon:
            async with Client(address) as another, another.control("first", lease=False) as session:
                await session.ask(SetBreakpoint(BreakpointSpec(site=Site.EVICT_WILL)))  # so that numbers differ
            await once_more(lambda: controls.ask(ContinueHold(None)))
            known = daemon.service.state.breakpoints
            assert {number: (one.enabled, one.spec.depends_on) for number, one in known.items()} == {
                1: (True, 0), 2: (False, 0), 3: (True, 0), 4: (True, 3),
            }
            await controls.aclose()


@pytest.mark.asyncio
async def test_a_write_to_a_call_that_has_ended_is_a_lost_connection() -> None:
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        call = channel.stream_stream(method_path("Control"))()
        call.cancel()
        with pytest.raises(ConnectionLost, match="the connection to here was lost"), translating("here"):
            await call.write(b"")


@pytest.mark.asyncio
async def test_a_daemon_that_began_again_gets_the_breakpoints_anew() -> None:
    with socket_directory() as place:
        address = f"unix:{place}/d.sock"
        controls = LiveControls(address, name="console")
        async with running(options_for(None, address)):
            await controls.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.DECODING)))
        async with running(options_for(None, address)) as daemon:
            await once_more(lambda: controls.ask(ContinueHold(None)))
            assert armed(daemon) == {1: ("console-1", True, 0)}
            await controls.aclose()


def test_an_owner_is_taken_up_only_when_its_lease_is_gone_and_it_was_ours() -> None:
    service = LeaderService(LeaderConfig(), lambda: 0)
    service.start()
    first = service.sessions.open("console", lease=True)
    assert service.sessions.open("console", lease=True, owner=first.owner).owner == "console-2", "it is alive"
    service.sessions.close(first)
    for stranger in ("console-9", "console-0", "console-", "console-x", "other-1", "daemon", "console-²"):
        assert service.sessions.open("console", lease=True, owner=stranger).owner not in (stranger, "daemon")
    assert service.sessions.open("console", lease=True, owner="console-1").owner == "console-1"


def test_replacing_all_is_idempotent_and_refuses_what_is_wrong() -> None:
    service = LeaderService(LeaderConfig(), lambda: 0)
    service.start()
    session = service.sessions.open("console", lease=True)
    specs = [BreakpointSpec(to_state=SlotState.DECODING), BreakpointSpec(site=Site.EVICT_WILL)]
    first = service.sessions.replace(session, specs)
    told = [
        BreakpointSpec(id=verdict.id, site=spec.site, to_state=spec.to_state)
        for verdict, spec in zip(first, specs, strict=True)
    ]
    assert service.sessions.replace(session, told) == first
    assert service.sessions.replace(session, told) == first
    assert list(service.state.breakpoints) == [1, 2]
    with pytest.raises(Refused, match="condition, column 1"):
        service.sessions.replace(session, [BreakpointSpec(condition="x = 1")])
    assert list(service.state.breakpoints) == [1, 2]


@pytest.mark.asyncio
async def test_breakpoints_of_sessions_that_ended_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 8
    monkeypatch.setattr("kvbm_console.debug.sessions.BREAKPOINTS_MAX", most)
    async with (
        daemon_at() as daemon, Client(daemon.address) as client, client.control("stays", lease=True) as stays,
        client.control("shell", lease=False) as shell,
    ):
        await stays.ask(SetBreakpoint(BreakpointSpec(request="mine")))
        await shell.ask(SetBreakpoint(BreakpointSpec(request="the daemon's")))
        for life in range(2 * most):
            async with client.control("console", lease=True) as console:
                await console.ask(SetBreakpoint(BreakpointSpec(request=f"r{life}")))
            await published(daemon, lambda: len(daemon.service.leases.owners) == 1)
            known = [each.spec.request for each in daemon.service.state.breakpoints.values()]
            assert known[:2] == ["mine", "the daemon's"]
            assert len(known) <= most
        assert known[2:] == [f"r{life}" for life in range(most + 2, 2 * most)], "those that ended last are left"
        verdicts = await stays.ask(ReplaceBreakpoints(
            tuple(BreakpointSpec(request=f"m{at}") for at in range(most - 1))
        ))
        assert len(verdicts) == most - 1
        with pytest.raises(Refused, match=f"{most} breakpoints already"):
            await shell.ask(SetBreakpoint(BreakpointSpec(request="one too many")))
        kept = max(daemon.service.state.breakpoints)
        assert (await stays.ask(SetBreakpoint(BreakpointSpec(id=kept, request="changed")))).verified
