"""Everything at once: killed and stopped workers, failing disks, flipped bytes, resets with copies in flight.

Law of this file: whatever happens, no request uses a wrong byte, no place is used under a running copy, and the engine
goes on to the end of its requests.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvbm_console.bytes import ranks
from kvbm_console.core import events as ev
from kvbm_console.core.ids import ResetMode, Tier
from kvbm_console.core.stimuli import ResetRequested
from kvbm_console.simulator.driver import drive
from kvbm_console.simulator.embedded import Rig
from tests.bytes.machines import ROOT, SHARD_BYTES, Taken, arena_of, machine

PAGES = 4
"""Pages of a block on a rank, so that half a block is whole pages."""


class Chaos:
    """All faults of a run, by dice. ``look`` is called after every stimulus, ``between`` when time may be disturbed."""

    def __init__(self, seed: int, *, kills: int, resets: int) -> None:
        self.dice = random.Random(seed)
        self.kills_left, self.resets_left = kills, resets
        self.kills = self.stops = self.flips = self.resets = 0
        self.rig: Rig | None = None

    def look(self, _: int) -> None:
        rig, dice = self.rig, self.dice
        if rig is None or rig.ranks is None:
            return
        running = [process for process in rig.ranks.processes if process is not None]
        if self.kills_left and running and dice.random() < 0.02:
            os.kill(dice.choice(running), signal.SIGKILL)
            self.kills_left -= 1
            self.kills += 1
        elif running and dice.random() < 0.002:
            os.kill(dice.choice(running), signal.SIGSTOP)  # until it is killed as silent
            self.stops += 1
        elif dice.random() < 0.05:
            whole, first = arena_of(rig, dice.randrange(2), Tier.G2)
            whole[dice.randrange(first, len(whole))] ^= 1 << dice.randrange(8)
            whole.close()
            self.flips += 1

    def between(self) -> None:
        assert self.rig is not None
        if self.resets_left and self.rig.leader.state.operations and self.dice.random() < 0.2:
            self.resets_left -= 1
            self.resets += 1
            mode = self.dice.choice([ResetMode.LOGICAL, ResetMode.PHYSICAL])
            self.rig.dispatcher.submit(ResetRequested, mode)


def survive(chaos: Chaos, directory: Path, monkeypatch: pytest.MonkeyPatch, requests: int) -> Taken:
    """Run a machine under chaos, with a disk that fails, and hold it to the law of this file."""
    monkeypatch.setattr(ranks, "SILENT_S", 0.3)
    monkeypatch.setattr(ranks, "KILL_S", 1.0)
    monkeypatch.setattr(ranks, "START_S", 30.0)
    monkeypatch.setattr(ranks, "WORKER", f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
                        f"from tests.bytes.faulty_worker import main; main(0.05, {PAGES * SHARD_BYTES})")
    taken = Taken(chaos.look)
    rig = machine(taken, directory, requests=requests, blocks=PAGES, seed=chaos.dice.randrange(1_000))
    chaos.rig = rig
    assert rig.ranks is not None
    with closing(rig):
        while not rig.done:
            rig.run(None, 2_000_000)
            if rig.waits_for_bytes:
                rig.ranks.wait(0.1)
            chaos.between()
    report = rig.ranks.report
    assert report.wrong_blocks == 0
    assert report.misused_places == 0
    assert report.deaths > 0
    assert report.failed_blocks > 0
    totals = rig.engine.totals
    assert totals.finished + totals.forgotten + totals.refused >= requests
    errors = {event.error for event in taken.of(ev.OperationReported) if not event.ok}
    assert any("killed by SIGKILL" in error for error in errors)
    return taken


def test_a_machine_survives_everything_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chaos = Chaos(1, kills=5, resets=2)
    survive(chaos, tmp_path, monkeypatch, 30)


@pytest.mark.slow
@pytest.mark.timeout(1_500)
def test_two_hundred_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = stops = flips = resets = 0
    errors: set[str] = set()
    seed = 100
    while kills < 200:
        chaos = Chaos(seed, kills=25, resets=4)
        taken = survive(chaos, tmp_path / str(seed), monkeypatch, 120)
        errors |= {event.error for event in taken.of(ev.OperationReported) if not event.ok}
        kills, stops = kills + chaos.kills, stops + chaos.stops
        flips, resets = flips + chaos.flips, resets + chaos.resets
        seed += 1
    print(f"{kills} kills, {stops} stops, {flips} flipped bytes, {resets} resets; {sorted(errors)}")
    assert {"Input/output error", "No space left on device", "short write"} <= errors
    assert resets > 4
    assert stops > 4


@pytest.mark.asyncio
async def test_a_death_is_told_within_a_tenth_of_a_second(tmp_path: Path) -> None:
    """On the loop of a daemon, at the speed of the wall; the best of five, because other processes run, too."""
    rig = machine(Taken(), tmp_path, requests=400)
    assert rig.ranks is not None
    rig.ranks.attach(asyncio.get_running_loop())
    told = asyncio.Event()
    rig.ranks.ended = lambda name, why: told.set()
    driver = asyncio.create_task(drive(rig, speed=1.0))
    took = []
    with closing(rig):
        for _ in range(5):
            while None in rig.ranks.processes:
                await rig.ranks.moved()
            told.clear()
            began = time.monotonic()
            process = rig.ranks.processes[1]
            assert process is not None
            os.kill(process, signal.SIGKILL)
            await told.wait()
            took.append(time.monotonic() - began)
        driver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driver
    assert min(took) < 0.1, took


def test_the_killer_finds_a_leader_that_frees_places_too_early(tmp_path: Path) -> None:
    """The claim on places can fail: here an engine fills a place that a copy reads.

    Replies are taken before each step and not behind the last, so the copy runs as far as the daemon knows.
    """
    taken = Taken()
    rig = machine(taken, tmp_path)
    assert rig.ranks is not None
    with closing(rig):
        while not rig.leader.state.operations:
            rig.ranks.wait(0.0)
            rig.run(rig.next_ns)
        (operation, *_) = rig.leader.state.operations.values()
        rig.ranks.fill(operation.source_pool, operation.sources[:1], [77])
    assert rig.ranks.report.misused_places == 1


