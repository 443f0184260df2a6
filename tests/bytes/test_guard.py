"""No process is forked once the daemon runs, and no I/O outlives the process that asked for it.

A forked daemon would share its threads' locks, its gRPC and its arenas with the child. io_uring writes into an arena
after its process has been killed and reaped, so a place would be used again under a running copy.
"""

import os
import re
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.bytes.machines import ROOT, Killer, Taken, machine

FORBIDDEN = re.compile(r"\bos\.fork|forkpty|preexec_fn|io_uring|liburing|\bcaio\b|ProcessPoolExecutor\((?!.*spawn)")


@pytest.mark.parametrize("room", ["kvbm_console", "server", "tui"])
def test_no_source_forks_or_names_io_uring(room: str) -> None:
    sources = list((ROOT / room).rglob("*.py"))
    assert len(sources) > 10
    found = [f"{path}: {match[0]}" for path in sources for match in FORBIDDEN.finditer(path.read_text("utf-8"))]
    assert not found


def test_a_run_with_deaths_forks_nothing_and_opens_no_ring(tmp_path: Path) -> None:
    forks: list[str] = []
    watching = True
    sys.addaudithook(lambda event, _: forks.append(event) if watching and event.startswith("os.fork") else None)
    opened: set[str] = set()
    killer = Killer(every=200, seed=5)

    def look(events: int) -> None:
        if events % 40 == 0 and killer.rig is not None and killer.rig.ranks is not None:
            for process in filter(None, killer.rig.ranks.processes):
                for one in Path(f"/proc/{process}/fd").glob("*"):
                    try:
                        opened.add(os.readlink(one).split(":")[0] + ":" + os.readlink(one).rpartition("[")[2])
                    except OSError:
                        continue  # it was killed meanwhile
        killer(events)

    rig = killer.rig = machine(Taken(look), tmp_path, requests=15)
    with closing(rig):
        rig.run_to_end()
    watching = False
    assert rig.ranks is not None
    assert rig.ranks.report.deaths > 0
    assert forks == []
    assert any(name.startswith("socket:") for name in opened), "the descriptors of the workers were seen"
    assert not any("io_uring" in name for name in opened)
