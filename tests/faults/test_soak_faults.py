"""A soak of whole processes: a busy, recorded daemon, and everything around it is killed or frozen again and again.

``KVBM_SOAK_SECONDS`` says for how long, an hour by default. The engine's speed is set for about 3,000 events a second.
All tables reach their bounds within five minutes at this rate, so memory is judged from the second quarter of an hour
on. Resident size is looked at once a second, and the floor of a minute is its lowest size.

An hour has 10^7 events, and the floors of equal minutes differ by up to 10 MB. So this test resolves about 100 MB per
10^8 events, and no slope below that follows from it. An hour in which the floor rose by 2.5 MB shows no leak, and
excludes none of 62 MB per 10^8 events. ``tests/server/test_memory_bounds.py`` counts objects and resolves 4 MB; no test
resolves the 1 MB that is wanted (``docs/memory.md``).

Law of this file: whatever happens around a daemon, its memory, descriptors, threads and directory stay within bounds,
its engine goes on, nothing is lost, and the recording is equal to a rerun.
"""

import asyncio
import os
import random
import signal
import statistics
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from kvbm_console.client import Client
from kvbm_console.recording.verify import verify
from tests.server.daemons import Process, process, socket_directory

SECONDS: Final = float(os.environ.get("KVBM_SOAK_SECONDS", "3600"))
SPEED: Final = os.environ.get("KVBM_SOAK_SPEED", "4.2")
KEEP_BYTES: Final = 100_000_000
HARM_S: Final = 5.0
"""From one thing that is killed or frozen to the next."""
FROZEN_S: Final = 2.0
FULL_S: Final = 1_800.0
"""From here on a run is long enough for its memory to be judged by its slope."""
MEGABYTES_MAX: Final = 700.0
GROWN_MEGABYTES: Final = 1.0
"""Per 10^8 events, beside the noise."""
NOISE_MEGABYTES: Final = 12.0
"""Of the lowest memory of a quarter of the run: what the export of one keyframe leaves in the allocator."""
READERS: Final = 8
MAIN: Final = "from kvbm_console.cli.main import main; main()"

pytestmark = [
    pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(int(SECONDS) + 900),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc"),
]

READER: Final = """
import asyncio, sys
from kvbm_console.client import Client
from tests.server.daemons import Mirror
async def main(address, folds):
    async with Client(address, name="reader") as client, client.subscribe(digests=True) as stream:
        mirror = Mirror()
        if not folds:
            stream.unread = True
        async for item in stream:
            if folds:
                mirror.take(item)
            if stream.position is not None:
                assert stream.received + stream.lost == stream.position - stream.start
asyncio.run(main(sys.argv[1], sys.argv[2] == "folds"))
"""
CONSOLE: Final = """
import os, pty, sys
command = [sys.executable, "-c", "from kvbm_console.cli.main import main; main()", "attach", sys.argv[1]]
os.environ["TERM"] = "xterm-256color"
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
pty.spawn(command, lambda fd: os.read(fd, 65536) and b"\\0")
"""
HOLDER: Final = """
import asyncio, sys
from kvbm_console.client import Client
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import SlotState
from kvbm_console.stream.verbs import SetBreakpoint
async def main(address):
    async with Client(address, name="holder") as client, client.control("holder", lease=True) as session:
        await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.ONBOARDING, one_shot=True)))
        await asyncio.sleep(3600)
asyncio.run(main(sys.argv[1]))
"""


class Meter:
    """The room that a process takes, looked at once a second."""

    def __init__(self, pid: int, directory: Path) -> None:
        self._proc, self._directory = Path(f"/proc/{pid}"), directory
        self.megabytes: list[float] = []
        self.descriptors = self.threads = 0
        self.disk_max = 0

    def look(self) -> None:
        """Once more."""
        pages = int((self._proc / "statm").read_text().split()[1])
        self.megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
        self.descriptors = len(os.listdir(self._proc / "fd"))
        self.threads = len(os.listdir(self._proc / "task"))
        disk = 0
        for path in self._directory.iterdir():
            try:
                disk += path.stat().st_size
            except FileNotFoundError:
                continue  # sealed or removed while the directory was listed
        self.disk_max = max(self.disk_max, disk)

    def floors(self) -> list[float]:
        """The lowest size of each minute."""
        return [min(self.megabytes[at : at + 60]) for at in range(0, len(self.megabytes), 60)]

    def grown(self) -> float:
        """How much higher the floor of the last quarter is than that of the second one, by medians of minutes' minima.

        An export makes a peak; the floor is what stays.
        """
        floors = self.floors()
        quarter = max(1, len(floors) // 4)
        return statistics.median(floors[-quarter:]) - statistics.median(floors[quarter : 2 * quarter] or floors)


class Around:
    """The processes around the daemon; one of them is killed or frozen now and then, and begins again."""

    def __init__(self, address: str, pid: int, seed: int) -> None:
        self._address, self._pid = address, pid
        self._random = random.Random(seed)
        self._children: dict[str, Process] = {}
        self.harmed = 0
        for index in range(READERS):
            self._begin(f"reader {index}")
        self._begin("holder")
        self._begin("console")

    def _begin(self, name: str) -> None:
        if name == "console":
            self._children[name] = Process("-c", CONSOLE, self._address)
        elif name == "holder":
            self._children[name] = Process("-c", HOLDER, self._address)
        else:
            self._children[name] = Process("-c", READER, self._address, "folds" if name.endswith("0") else "reads")

    def check(self) -> None:
        """Nothing has ended by itself."""
        for name, child in self._children.items():
            status, stderr = child.child.poll(), child.child.stderr
            if status is not None:
                raise AssertionError(f"the {name} ended with {status}: {stderr.read()[-2_000:] if stderr else ''}")

    def _sealing(self) -> list[int]:
        """The recorder's own child, while it seals."""
        found = subprocess.run(["pgrep", "-P", str(self._pid)], capture_output=True, text=True, check=False)
        return [int(line) for line in found.stdout.split()]

    async def harm(self) -> None:
        """Kill or freeze something; what was killed begins again."""
        self.check()
        self.harmed += 1
        name = self._random.choice([*self._children, "sealing"])
        frozen = self._random.random() < 0.5
        pids = self._sealing() if name == "sealing" else [self._children[name].pid]
        for pid in pids:
            with_signal(pid, signal.SIGSTOP if frozen else signal.SIGKILL)
        if frozen:
            await asyncio.sleep(FROZEN_S)
            for pid in pids:
                with_signal(pid, signal.SIGCONT)
        elif name != "sealing":
            self._children[name].end()
            self._begin(name)

    def end(self) -> None:
        """All of them."""
        for child in self._children.values():
            child.end()


def with_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


async def status_of(address: str) -> dict[str, Any]:
    """The status document, asked over a connection of its own."""
    async with Client(address, name="soak") as client:
        return await client.status()


async def soak(address: str, meter: Meter, around: Around) -> list[dict[str, Any]]:
    """Let it run; a document a minute, and the last one."""
    documents, began, harmed_at = [await status_of(address)], time.monotonic(), 0.0
    while (passed := time.monotonic() - began) < SECONDS:
        await asyncio.sleep(1.0)
        meter.look()
        if passed - harmed_at >= HARM_S:
            harmed_at = passed
            await around.harm()
        if passed >= 60.0 * len(documents):
            documents.append(await status_of(address))
            head, recorder = documents[-1]["stream"]["head_seq"], documents[-1]["recorder"]
            print(
                f"{passed:5.0f} s, {head:,} events, {meter.megabytes[-1]:.0f} MB, {meter.descriptors} descriptors, "
                f"{meter.threads} threads, {meter.disk_max / 1e6:.1f} MB at most, {recorder['state']}", flush=True,
            )
    documents.append(await status_of(address))
    return documents


@pytest.mark.asyncio
async def test_f30_a_daemon_outlives_what_is_around_it(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with socket_directory() as place, process(
        "-c", MAIN, "serve", "--listen", f"unix:{place}/d.sock", "--workload", "multiturn",
        "--g1-blocks", "2048", "--g2-blocks", "8192", "--g3-blocks", "32768", "--speed", SPEED,
        "--record", str(directory), "--segment-size", "16MB", "--keep", "100MB",
    ) as daemon:
        address = f"unix:{place}/d.sock"
        assert daemon.child.stderr is not None
        assert "serving on" in await asyncio.to_thread(daemon.child.stderr.readline)
        meter = Meter(daemon.pid, directory)
        await status_of(address)
        meter.look()
        quiet = meter.descriptors, meter.threads
        around = Around(address, daemon.pid, seed=15)
        try:
            documents = await soak(address, meter, around)
            around.check()
        finally:
            around.end()
        quiet_again = await settled(meter, quiet)
        daemon.send(signal.SIGTERM)
        assert await asyncio.to_thread(daemon.child.wait, 10) == 0
    events = documents[-1]["stream"]["head_seq"] - documents[0]["stream"]["head_seq"]
    grown = meter.grown()
    slope = f"{grown / events * 2e8:+.0f} per 10^8 events" if SECONDS >= FULL_S else "too short to tell a slope"
    print(
        f"{SECONDS:.0f} s, {events:,} events, {events / SECONDS:,.0f} a second, {around.harmed} harmed; memory "
        f"{max(meter.megabytes):.0f} MB at most, floor {grown:+.1f} MB, {slope}; "
        f"descriptors and threads {quiet} to {quiet_again}; disk {meter.disk_max / 1e6:.1f} MB of 100"
    )
    print("floors of the minutes in MB:", " ".join(f"{floor:.0f}" for floor in meter.floors()))
    assert {document["recorder"]["state"] for document in documents} == {"recording"}
    heads = [document["stream"]["head_seq"] for document in documents]
    assert all(before < after for before, after in pairwise(heads)), "its engine has kept going"
    assert meter.disk_max <= KEEP_BYTES
    assert max(meter.megabytes) <= MEGABYTES_MAX
    assert quiet_again[0] <= quiet[0] + 2
    assert quiet_again[1] <= quiet[1] + 2
    if SECONDS >= FULL_S:
        assert grown <= GROWN_MEGABYTES * events / 1e8 + NOISE_MEGABYTES
    report = await asyncio.to_thread(verify, directory)
    assert report.first_difference is None
    assert report.gaps == 0


async def settled(meter: Meter, quiet: tuple[int, int]) -> tuple[int, int]:
    """Descriptors and threads as soon as all clients have left, or as they are after ten seconds."""
    for _ in range(100):
        meter.look()
        if meter.descriptors <= quiet[0] and meter.threads <= quiet[1]:
            break
        await asyncio.sleep(0.1)
    return meter.descriptors, meter.threads
