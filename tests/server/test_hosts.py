"""Several hosts as processes: the same stimuli, compared after each, and the first difference is told exactly."""

import os
import re
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvbm_console import hosts
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import ResetMode
from kvbm_console.core.leader import Leader
from kvbm_console.core.stimuli import ResetRequested, Stimulus
from kvbm_console.dispatch import HostsDiverged
from kvbm_console.simulator.embedded import build, default_engine_config, default_leader_config, parse_workload
from kvbm_console.wire.batches import pack_stimuli
from server.daemon import Daemon
from tests.server.daemons import options_for, socket_directory

CHATS = "multiturn:requests=40,seed=3,think=0.1"
ALTERED = """
from kvbm_console import hosts
from kvbm_console.core.leader import Leader

class Altered(Leader):
    def handle(self, stimulus):
        outcome = super().handle(stimulus)
        if stimulus.n == {n}:
            {what}
        return outcome

hosts.Leader = Altered
hosts.main()
"""
"""A host whose facts or memory something else changes once."""
DEAF = """
from kvbm_console import hosts
from kvbm_console.core.leader import resets
resets.reset = lambda *args: None
hosts.main()
"""
"""A host that skips resets, which no host notices alone."""
OTHER = """
from kvbm_console import hosts
from kvbm_console.core.config import LeaderConfig
LeaderConfig.digest = lambda self: 7
hosts.main()
"""


async def serve(socket: Path, on_ready: Any = None, **changes: Any) -> Daemon:
    """Run a daemon with two hosts to its end."""
    daemon = Daemon(options_for(CHATS, f"unix:{socket}/d.sock", speed=None, exit_when_done=True, hosts=2, **changes))
    await daemon.run(on_ready)
    return daemon


@pytest.mark.asyncio
async def test_two_hosts_agree_to_the_end() -> None:
    with socket_directory() as place:
        daemon = await serve(place)
    assert daemon.hosts is not None
    assert daemon.hosts.diverged is None
    assert daemon.summary().requests_finished == 40
    assert [host.n for host in daemon.hosts._hosts] == [daemon.service.dispatcher.n], "it has compared every stimulus"
    assert [part["healthy"] for part in daemon.service.parts.rows() if part["part"] == "host 1"] == [True]


@pytest.mark.asyncio
@pytest.mark.parametrize(("n", "what", "where"), [
    (300, "self.state.pools[0].stored_at[3] += 1", "pools.G2.stored_at[3]"),
    (777, "self.state.totals.preemptions += 1", "totals.preemptions"),
])
async def test_an_altered_host_is_found_at_that_very_stimulus(
    monkeypatch: pytest.MonkeyPatch, n: int, what: str, where: str
) -> None:
    monkeypatch.setattr(hosts, "HOST", ALTERED.format(n=n, what=what))
    with socket_directory() as place, pytest.raises(HostsDiverged) as caught:
        await serve(place)
    assert (caught.value.host, caught.value.n, caught.value.part) == (1, n, "facts")
    assert any(where in text for text in caught.value.difference), caught.value.difference


@pytest.mark.asyncio
async def test_altered_memory_is_found_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "HOST", ALTERED.format(n=300, what="self.memory.next_deadline += 1"))
    found = pytest.raises(HostsDiverged, match=r"next_deadline: \d+ is not \d+")
    with socket_directory() as place, found as caught:
        await serve(place)
    assert caught.value.part == "memory"
    assert caught.value.n >= 300


@pytest.mark.asyncio
async def test_a_host_that_skips_a_reset_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "HOST", DEAF)
    numbers: list[int] = []

    def reset(daemon: Daemon) -> None:
        numbers.append(daemon.service.dispatcher.n)
        daemon.service.submit(ResetRequested, ResetMode.LOGICAL)

    with socket_directory() as place, pytest.raises(HostsDiverged) as caught:
        await serve(place, reset)
    assert [caught.value.n] == numbers


@pytest.mark.asyncio
async def test_a_killed_host_is_a_part_that_ended_and_the_daemon_goes_on() -> None:
    def kill(daemon: Daemon) -> None:
        assert daemon.hosts is not None
        os.kill(daemon.hosts.processes[0], signal.SIGKILL)

    with socket_directory() as place:
        daemon = await serve(place, kill)
    assert daemon.summary().requests_finished == 40
    assert daemon.service.parts.warnings() == ["host 1 ended: killed by SIGKILL"]


@pytest.mark.asyncio
async def test_the_end_of_a_daemon_does_not_wait_for_a_stopped_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "BEHIND_S", 0.05)

    def stop(daemon: Daemon) -> None:
        assert daemon.hosts is not None
        os.kill(daemon.hosts.processes[0], signal.SIGSTOP)

    with socket_directory() as place:
        daemon = await serve(place, stop)
    assert daemon.summary().requests_finished == 40
    (warning,) = daemon.service.parts.warnings()
    assert re.fullmatch(r"host 1 ended: it has compared \d+ of \d+ stimuli", warning)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_host_that_is_far_behind_can_answer_or_is_given_up(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """Its socket holds fewer answers than come here, and nothing else reads them."""
    workload = parse_workload(CHATS)
    config, stimuli = default_leader_config(workload), list[Stimulus]()
    rig = build(config, default_engine_config(workload), workload, publish=lambda stimulus, _: stimuli.append(stimulus))
    rig.run_to_end()
    monkeypatch.setattr(hosts, "OUTBOX_BYTES_MAX", 0)
    monkeypatch.setattr(hosts, "BEHIND_S", 0.05 if stopped else 30.0)
    processes, leader = hosts.HostProcesses(config, 2), Leader(config)
    ended: list[str] = []
    processes.ended = lambda name, why: ended.append(why)
    with closing(processes):
        if stopped:
            os.kill(processes.processes[0], signal.SIGSTOP)
        for stimulus in stimuli[:1_500]:
            leader.handle(stimulus)
            processes.decided(leader.digest())
            processes.follow(pack_stimuli([stimulus]).data, None)
    assert processes.diverged is None
    assert ended == (["it has taken no stimulus for 0.05 s"] if stopped else [])


def test_another_configuration_is_refused_before_the_first_stimulus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "HOST", OTHER)
    with pytest.raises(UsageError, match="host 1 must have the configuration of host 0, got digest 0000000000000007"):
        hosts.HostProcesses(LeaderConfig(), 2)
    with pytest.raises(UsageError, match="--hosts must be from 1 to 16, got 17"):
        hosts.HostProcesses(LeaderConfig(), 17)


