"""A machine that begins with the disk tier of an earlier run."""

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvbm_console.bytes.slot_file import SlotFile, SlotGeometry, SlotIdentity
from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.describe import describe
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.ids import Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from kvbm_console.simulator.embedded import Rig
from tests.bytes.machines import BLOCKS, SHARD_BYTES, Taken, machine

PROGRAM = [str(Path(sys.executable).parent / "kvbm-console")]
G3 = BLOCKS["g3"]


def run(directory: Path | None, *, warm: bool = True, **more: object) -> tuple[Taken, Rig]:
    taken = Taken()
    rig = machine(taken, directory, warm=warm, **more)  # type: ignore[arg-type]
    with closing(rig):
        rig.run_to_end()
    return taken, rig


def restored(taken: Taken) -> dict[int, int]:
    """Place to hash of the blocks that the leader was told of at its start."""
    told = [one for one in taken.stimuli if isinstance(one, st.BlocksRestored)]
    if not told:
        return {}
    (one,) = told
    kinds = [type(each) for each in taken.stimuli[: one.n + 2]]
    assert kinds == [st.PoolDeclared, st.PoolDeclared, st.BlocksRestored, st.PoolDeclared], "before the engine's pool"
    return dict(zip(unpack_ids(one.ids), unpack_hashes(one.hashes), strict=True))


def test_a_second_run_begins_with_the_disk_of_the_first(tmp_path: Path) -> None:
    first, rig = run(tmp_path)
    assert restored(first) == {}
    left = rig.leader.state.pools[1]
    second, again = run(tmp_path)
    found = restored(second)
    assert {place: key for place, key in enumerate(left.hash_of) if key} == found, "all that the first run had"
    assert again.ranks is not None
    assert again.ranks.report.sound
    assert not again.ranks.report.failed_blocks
    cold, _ = run(None)
    staged = [sum(len(unpack_ids(event.ids)) for event in taken.of(ev.BlocksStaged)) for taken in (cold, second)]
    assert staged[1] > staged[0]
    (reserved,) = [event for event in second.of(ev.BlocksReserved) if event.operation == ev.RESTORED]
    assert again.leader.state.pools[reserved.pool].info.tier is Tier.G3
    assert "from before the start" in describe(reserved, again.leader.state)


def decide_again(directory: Path, seed: int, policy: str) -> None:
    """Two runs, of which the second begins warm, and the second's decisions once more."""
    run(directory, eviction=PolicyConfig(policy=policy), seed=seed, requests=30)
    taken, rig = run(directory, eviction=PolicyConfig(policy=policy), seed=seed + 1, requests=30)
    assert restored(taken)
    leader = Leader(rig.leader.config, check=True)
    events = [event for stimulus in taken.stimuli for event in leader.handle(stimulus).events]
    assert events == taken.events
    assert leader.digest() == rig.leader.digest()
    twin = Leader.restore(rig.leader.config, encode_facts(rig.leader.state), rig.leader.export())
    assert (twin.digest(), twin.memory_digest()) == (leader.digest(), leader.memory_digest())


def test_todays_leader_decides_a_warm_run_again(tmp_path: Path) -> None:
    decide_again(tmp_path, 0, "lrfu_auto")


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("policy", ["lrfu_auto", "simple_lru", "learned", "lfu", "lrfu", "adaptive_lru"])
def test_todays_leader_decides_many_warm_runs_again(tmp_path: Path, policy: str) -> None:
    for seed in range(2, 12):
        decide_again(tmp_path / str(seed), seed, policy)


def test_a_recording_that_began_warm_is_verified(tmp_path: Path) -> None:
    command = [*PROGRAM, "serve", "--workload", "multiturn:requests=25,sessions=10,think=0.1,user=120,output=40",
               "--total-kv-blocks", "160", "--kv-cpu-blocks", "240", "--kv-disk-blocks", "480", "--kv-geometry",
               "1,1,512,1", "--bytes", str(tmp_path / "bytes"), "--ranks", "2", "--speed", "max", "--exit-when-done",
               "--listen", f"unix:{tmp_path}/s"]
    for number in range(2):
        done = subprocess.run([*command, "--record", str(tmp_path / f"rec{number}")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert re.search(r"\nbytes +moved .* blocks: 0 used with wrong bytes, 0 failed", done.stdout)
    told = [stimulus for batch in Recording.open(tmp_path / "rec1").stimuli() for stimulus in batch]
    assert any(isinstance(stimulus, st.BlocksRestored) for stimulus in told)
    found = verify(tmp_path / "rec1")
    assert (found.ok, found.not_rerun, found.first_difference) == (True, 0, None)


def file_of(directory: Path, rank: int, ranks: int = 2) -> SlotFile:
    identity = SlotIdentity("simulated", "bytes", f"page-first {SHARD_BYTES}", 16, rank, ranks, "xxh3_64", "0")
    return SlotFile.open(directory / f"rank-{rank}", SlotGeometry(G3, SHARD_BYTES), identity)


def test_only_blocks_that_every_rank_has_are_restored(tmp_path: Path) -> None:
    _, rig = run(tmp_path)
    had = {place: key for place, key in enumerate(rig.leader.state.pools[1].hash_of) if key}
    for rank in (0, 1):
        file = file_of(tmp_path, rank)
        for place in sorted(had)[rank::5]:
            file.drop(place)
            del had[place]
        file.close()
    second, again = run(tmp_path)
    assert restored(second) == had
    assert again.ranks is not None
    assert again.ranks.report.sound


def test_a_block_that_is_damaged_meanwhile_fails_its_load(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / "rank-1" / "data"
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), SHARD_BYTES):
        data[at] ^= 1
    path.write_bytes(data)
    second, rig = run(tmp_path, check=True)
    assert restored(second)
    assert rig.ranks is not None
    assert rig.ranks.report.sound
    assert rig.ranks.report.failed_blocks > 0
    failed = [stimulus for stimulus in second.stimuli if isinstance(stimulus, st.TransferFailed)]
    assert failed
    assert all(stimulus.rank == 1 and stimulus.failed for stimulus in failed)
    assert second.of(ev.HitsLost)
    assert rig.engine.totals.finished == 40
