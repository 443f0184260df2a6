"""A daemon as ``serve --speed max`` runs it, whose engine begins when told and that says what its work took.

``python -m tests.benchmarks.measured_engine WORKLOAD ADDRESS [--record DIRECTORY] [--fleet BROKER]``: prints a line
when it can be connected to, waits for a line on stdin, and prints its ``Taken`` when the work is done and the daemon
has ended. At the broker it publishes summaries and events.

Law of this file: what is measured lies between the two lines: no start, no connecting, no sealing, no end.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import msgspec

from kvbm_console.client.broker import broker_address
from server.daemon import Daemon
from server.options import DaemonOptions
from server.summary import Summary
from tests.server.daemons import options_for


class Taken(msgspec.Struct, frozen=True):
    """What the work took, in nanoseconds: by the wall, of the processor in all threads and in the loop's alone."""

    wall_ns: int
    process_ns: int
    thread_ns: int
    did: Summary
    """What was done, without the notes that a loop was kept from running, and how they were recorded."""


def now() -> tuple[int, int, int]:
    """The three clocks."""
    return time.monotonic_ns(), time.process_time_ns(), time.thread_time_ns()


class Measured(Daemon):
    """A daemon whose engine waits for a line on stdin, and that takes the time while it runs."""

    began = ended = (0, 0, 0)

    async def _drive(self) -> None:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin, told.set)
        print(flush=True)
        await told.wait()
        loop.remove_reader(sys.stdin)
        self.began = now()
        await super()._drive()
        self.ended = now()


async def work(options: DaemonOptions) -> Taken:
    """One run."""
    daemon = Measured(options)
    summary = await daemon.run()
    wall_ns, process_ns, thread_ns = (end - begin for begin, end in zip(daemon.began, daemon.ended, strict=True))
    did = msgspec.structs.replace(summary, events_published=0, stimuli=0, recorder=None)
    return Taken(wall_ns, process_ns, thread_ns, did)


def main() -> None:
    """One run as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("address")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--fleet", type=lambda url: broker_address(url, "--fleet"))
    given = parser.parse_args()
    options = options_for(
        given.workload, given.address, speed=None, exit_when_done=True, record=given.record, fleet=given.fleet,
        fleet_events=given.fleet is not None,
    )
    print(msgspec.json.encode(asyncio.run(work(options))).decode())


if __name__ == "__main__":
    main()
