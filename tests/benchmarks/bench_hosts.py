"""Figures of several hosts: a daemon's service with a second host in a process of its own, beside the service alone,
and ``simulate`` with two hosts in one process.

Law of this file: the processor's time of all processes counts; starting the second one does not.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvbm_console.hosts import HostProcesses
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import simulate
from kvbm_console.service import LeaderService
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.embedded import (
    SOURCE,
    default_engine_config,
    default_leader_config,
    embed,
    parse_workload,
)
from tests.benchmarks.bench_bytes import by_turns
from tests.benchmarks.harness import Figure, Target

CHATS: Final = "multiturn:requests=100"
TURNS: Final = 5


def run(hosts: int) -> float:
    """Nanoseconds of all processors for each stimulus of a run."""
    workload, calendar = parse_workload(CHATS), Calendar()
    config = default_leader_config(workload)
    service = LeaderService(config, calendar.clock)
    if hosts > 1:
        service.hosts = HostProcesses(config, hosts)
        service.hosts.rerun = service.leader_after
    others = [] if service.hosts is None else service.hosts.processes
    began = sum(map(processor_ns, others)) + time.thread_time_ns()
    service.start()
    service.new_source(SOURCE)
    rig = embed(service.dispatcher, calendar, default_engine_config(workload), workload)
    rig.run_to_end()
    service.broadcaster.flush()
    if service.hosts is not None:
        asyncio.run(finish(service.hosts))
    took = sum(map(processor_ns, others)) + time.thread_time_ns() - began
    if service.hosts is not None:
        service.hosts.close()
    return took / service.dispatcher.n


async def finish(hosts: HostProcesses) -> None:
    """Until every host has compared everything."""
    hosts.attach(asyncio.get_running_loop())
    await hosts.caught_up(asyncio.Event())
    assert hosts.diverged is None


def processor_ns(process: int) -> int:
    """Time of the processor that a process has had."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0])


def two_hosts() -> Figure:
    """Two hosts that compare every stimulus."""
    return by_turns(
        "two hosts as processes, a stimulus", lambda: run(2), "one host", lambda: run(1), Target(ratio=3.0), TURNS
    )


def simulated(hosts: int) -> float:
    """Nanoseconds of the processor for each request of ``simulate`` through the leader, with a host tier."""
    options = SimulateOptions(
        trace="multiturn:requests=60", total_kv_blocks=512, kv_cpu_blocks=2_048, hosts=hosts, cleanup="none"
    )
    began = time.process_time_ns()
    document = simulate(options).document
    return (time.process_time_ns() - began) / document["requests_completed"]


def two_hosts_simulated() -> Figure:
    """Two hosts in one process that compare what they decide, and every 50 stimuli their facts."""
    return by_turns(
        "simulate with two hosts, a request", lambda: simulated(2), "one host", lambda: simulated(1),
        Target(ratio=2.5), TURNS,
    )


BENCHES: Final[dict[str, Callable[[], Figure]]] = {
    "two hosts": two_hosts, "two hosts, simulated": two_hosts_simulated,
}
