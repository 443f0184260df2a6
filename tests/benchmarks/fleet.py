"""``python -m tests.benchmarks.fleet 1000``: the time of asking a fleet, and of asking its first daemon alone.

One process listens on as many sockets as the fleet has daemons, and answers at once whatever it was asked before. So
the figures are those of the asking side. The reference in the same run is a fleet of one daemon.
"""

import asyncio
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection

import grpc
import grpc.aio

from kvbm_console.client.fleet import Fleet
from kvbm_console.core.config import LeaderConfig
from kvbm_console.service import LeaderService
from server import questions
from server.servicer import ConsoleServicer, Identity

ROUNDS = 5


async def serve(place: str, count: int, ready: Connection) -> None:
    """Answer on ``count`` sockets until killed."""
    questions.SHARE, questions.SAVINGS_NS, questions.CALLER_NS = 1, 10**12, 10**15  # type: ignore[misc]
    began = time.monotonic_ns()
    service = LeaderService(LeaderConfig(g2_blocks=64, g3_blocks=64), lambda: time.monotonic_ns() - began)
    service.start()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((ConsoleServicer(service, Identity("bench", "bench")).handler(),))
    for at in range(count):
        server.add_insecure_port(f"unix:{place}/{at}.sock")
    await server.start()
    ready.send(True)
    await server.wait_for_termination()


async def ask(place: str, count: int) -> None:
    """Ask all of them a few times and print the times."""
    async with Fleet([f"unix:{place}/{at}.sock" for at in range(count)]) as fleet:
        for number in range(ROUNDS):
            wall, cpu = time.perf_counter(), time.process_time()
            report = await fleet.look()
            print(f"{count:>6} daemons, round {number}: {time.perf_counter() - wall:.3f} s, "
                  f"{time.process_time() - cpu:.3f} s of processor, {report.stands['gone']} gone", flush=True)


def main() -> None:
    """Measure a fleet of the size in the first argument, and of one daemon."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvbm-") as place:
        mine, theirs = spawn.Pipe()
        server = spawn.Process(target=_serve, args=(place, count, theirs), daemon=True)
        server.start()
        mine.recv()
        for size in (1, count):
            asyncio.run(ask(place, size))
        server.kill()


def _serve(place: str, count: int, ready: Connection) -> None:
    asyncio.run(serve(place, count, ready))


if __name__ == "__main__":
    main()
