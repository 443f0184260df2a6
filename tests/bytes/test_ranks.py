"""Bytes under the simulated engine: the recording stays the same, and every block is what it must be."""

import os
import random
import signal
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import to_builtins

from kvbm_console.bytes import memory, ranks
from kvbm_console.bytes.orders import RankPool
from kvbm_console.cli.summary import carried_text, carried_well
from kvbm_console.core import events as ev
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import Note, ResetMode, Tier
from kvbm_console.core.stimuli import ResetRequested
from kvbm_console.simulator.embedded import Rig
from tests.bytes.machines import Killer, Taken, arena_of, machine

POLICIES = ("simple_lru", "lrfu_auto", "lfu")


def run(rig: Rig) -> ranks.BytesReport | None:
    with closing(rig):
        rig.run_to_end()
    return None if rig.ranks is None else rig.ranks.report


def random_machine(seed: int, directory: Path | None) -> tuple[bytes, ranks.BytesReport | None]:
    dice, taken = random.Random(seed), Taken()
    sizes = {"g1": dice.randrange(120, 200), "g2": dice.choice([0, 40, 200, 400]), "g3": dice.choice([0, 60, 500])}
    rig = machine(
        taken, directory, seed=seed, ranks=dice.choice([1, 2, 3]), sizes=sizes, requests=dice.randrange(15, 40),
        offload_threshold=dice.choice([0.0, 0.5, 0.9]), prefetch=dice.choice(["none", "chain"]),
    )
    rig.engine.windows = dice.random() < 0.5
    report = run(rig)
    return taken.encoded, report


def same_recordings(seeds: range, directory: Path) -> int:
    compared = 0
    for seed in seeds:
        alone, _ = random_machine(seed, None)
        carried, report = random_machine(seed, directory / str(seed))
        assert carried == alone, f"bytes change the recording of machine {seed}"
        assert report is not None
        assert report.sound
        assert not report.failed_blocks
        compared += report.compared_blocks
    return compared


def test_recordings_are_those_of_runs_without_bytes(tmp_path: Path) -> None:
    assert same_recordings(range(2), tmp_path) > 200


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_random_machines_record_the_same(tmp_path: Path) -> None:
    assert same_recordings(range(100, 150), tmp_path) > 10_000


def test_a_dead_worker_is_replaced_and_nothing_wrong_is_used(tmp_path: Path) -> None:
    killer = Killer(every=200, seed=1)
    taken = Taken(killer)
    rig = killer.rig = machine(taken, tmp_path, requests=20)
    report = run(rig)
    assert report is not None
    assert 2 <= report.deaths <= killer.kills
    assert report.sound
    failures = [event for event in taken.of(ev.OperationReported) if not event.ok]
    assert all("its worker was killed by SIGKILL" in event.error for event in failures)
    notes = [event.detail for event in taken.of(ev.Noted) if event.note is Note.PART_ENDED]
    assert len(notes) == report.deaths
    assert all(detail.startswith("rank ") for detail in notes)


def test_a_flipped_byte_of_the_host_tier_fails_a_load_and_reaches_no_request(tmp_path: Path) -> None:
    dice, taken = random.Random(2), Taken()
    rig = machine(taken, tmp_path)

    def flip(_: int) -> None:
        whole, first = arena_of(rig, dice.randrange(2), Tier.G2)
        at = dice.randrange(first, len(whole))
        whole[at] ^= 1 << dice.randrange(8)
        whole.close()

    taken.each = flip
    report = run(rig)
    assert report is not None
    assert report.failed_blocks > 0
    assert report.sound
    assert taken.of(ev.HitsLost)


def test_a_flipped_byte_of_the_device_is_found(tmp_path: Path) -> None:
    """The comparison of reused prefixes can fail."""
    taken = Taken()
    rig = machine(taken, tmp_path)

    def flip(_: int) -> None:
        whole, first = arena_of(rig, 0, Tier.G1)
        for at in range(first + 100, len(whole), 4096):
            whole[at] ^= 1
        whole.close()

    taken.each = lambda events: flip(events) if events % 500 == 0 else None
    report = run(rig)
    assert report is not None
    assert report.wrong_blocks > 0
    assert not report.sound


def test_a_physical_reset_zeroes_every_byte_also_under_running_copies(tmp_path: Path) -> None:
    taken = Taken()
    rig = machine(taken, tmp_path)
    assert rig.ranks is not None
    under_copies = 0
    with closing(rig):
        for _ in range(5):
            while not rig.leader.state.operations and not rig.done:
                rig.run(rig.next_ns)
                rig.ranks.wait(0.0)
            under_copies += any(operation.started for operation in rig.leader.state.operations.values())
            rig.dispatcher.submit(ResetRequested, ResetMode.PHYSICAL)
            while rig.ranks.crowded:
                rig.ranks.wait(1.0)
            for rank in range(2):
                for tier in (Tier.G1, Tier.G2):
                    whole, first = arena_of(rig, rank, tier)
                    assert not any(whole[first:])
                    whole.close()
                assert not any((tmp_path / f"rank-{rank}" / "data").read_bytes())
        rig.run_to_end()
    assert under_copies > 1
    assert rig.ranks.report.sound


def test_a_silent_worker_is_told_of_and_killed_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SILENT_S", 0.05)
    monkeypatch.setattr(ranks, "KILL_S", 0.2)
    killer = Killer(every=300, seed=3, most=1, number=signal.SIGSTOP)
    taken = Taken(killer)
    rig = killer.rig = machine(taken, tmp_path, requests=15)
    report = run(rig)
    assert report is not None
    assert report.deaths >= 1
    assert report.sound
    details = [event.detail for event in taken.of(ev.Noted) if event.note is Note.PART_ENDED]
    assert sum("has not answered" in detail for detail in details) >= report.deaths


# --- bad input ---


def test_what_the_machine_has_not_is_refused_with_the_number_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = [RankPool(0, Tier.G2, 2**20), RankPool(1, Tier.G3, 2**30)]
    needed = memory.slot_bytes(2**30, 2**16)
    with pytest.raises(UsageError, match=f"--bytes must name a directory with room for {needed} bytes"):
        ranks.Ranks(pools, 1, 2**16, tmp_path, 16)
    needed = 4 * memory.arena_bytes(2**20, 2**20)
    with pytest.raises(UsageError, match=f"--bytes must have {needed} bytes of memory for G1 and G2"):
        ranks.Ranks(pools[:1], 4, 2**20, tmp_path, 16)
    with pytest.raises(UsageError, match="multiple of 4096 bytes on each rank, got 100"):
        ranks.Ranks(pools[:1], 1, 100, tmp_path, 16)


def test_a_directory_of_others_is_refused_by_name(tmp_path: Path) -> None:
    with (
        closing(machine(Taken(), tmp_path, ranks=1)),
        pytest.raises(UsageError, match="rank-0 is used by another process"),
    ):
        machine(Taken(), tmp_path, ranks=1)
    with pytest.raises(UsageError, match="another number of tokens in a block: 16 there, 32 here"):
        machine(Taken(), tmp_path, ranks=1, block_tokens=32)
    with pytest.raises(UsageError, match="needs --transfers async, got sync"):
        machine(Taken(), tmp_path, asynchronous=False)


def test_a_worker_that_is_still_starting_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the imports of a worker may take longer than an answer; killing it would begin them again."""
    monkeypatch.setattr(ranks, "KILL_S", 1.0)
    monkeypatch.setattr(ranks, "WORKER", f"import time; time.sleep(1.5); {ranks.WORKER}")
    with closing(ranks.Ranks([RankPool(0, Tier.G2, 8)], 1, 4096, tmp_path, 16)) as made:
        made.start()
        (process,) = made.processes
        assert process is not None
        os.kill(process, signal.SIGKILL)
        made.fill(0, [1], [2])
        while not made.idle:
            assert made.report.deaths < 5
            made.wait(0.1)


@pytest.mark.parametrize("count", ["wrong_blocks", "misused_places"])
def test_a_summary_of_bytes_that_were_wrong_is_told_and_fails(count: str) -> None:
    report = to_builtins(ranks.BytesReport(moved_bytes=2_000_000, failed_blocks=4))
    assert carried_well(report)
    assert carried_well(None)
    assert not carried_well({**report, count: 3})
    assert " 3 " in carried_text({**report, count: 3})
