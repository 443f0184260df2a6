"""A daemon as ``serve --speed max`` runs it, whose engine begins when told and that says what its work took.

``python -m tests.benchmarks.measured_engine WORKLOAD ADDRESS [DIRECTORY]``: prints a line when it can be connected to,
waits for a line on stdin, and prints its ``Taken`` when the work is done and the daemon has ended.

Law of this file: what is measured lies between the two lines: no start, no connecting, no sealing, no end.
"""

import asyncio
import sys
import time
from pathlib import Path

import msgspec

from server.daemon import Daemon
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


async def work(workload: str, address: str, directory: str | None) -> Taken:
    """One run."""
    record = {} if directory is None else {"record": Path(directory)}
    daemon = Measured(options_for(workload, address, speed=None, exit_when_done=True, **record))
    summary = await daemon.run()
    wall_ns, process_ns, thread_ns = (end - begin for begin, end in zip(daemon.began, daemon.ended, strict=True))
    did = msgspec.structs.replace(summary, events_published=0, stimuli=0, recorder=None)
    return Taken(wall_ns, process_ns, thread_ns, did)


if __name__ == "__main__":
    print(msgspec.json.encode(asyncio.run(work(*(*sys.argv[1:], None)[:3]))).decode())  # type: ignore[arg-type]
