"""The slot tier under vLLM's own manager: found again after a restart, bounded, and never wrong.

Run by ``make test-vllm``.
"""

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from vllm.utils.hashing import sha256, xxhash
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import LookupResult

from kvbm_console.bytes.slot_file import PAGE_BYTES
from kvbm_console.core import events as ev
from kvbm_console.tap import vllm as binding
from tests.tap.watching import Watching
from tests.vllm.engine import Engine, offloading
from tests.vllm.features import Kept, workload
from tests.vllm.tiered import Below, key, tapped
from tests.vllm.truth import compare

pytestmark = pytest.mark.timeout(600)
KEYS = [key(number) for number in range(1, 65)]
BLOCK_BYTES = 16_384
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def made() -> Iterator[list[Below]]:
    """The managers of a test, shut down at its end."""
    managers: list[Below] = []
    yield managers
    for one in managers:
        one.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What the tier logs, whatever an earlier test has made of vLLM's loggers."""
    logger = logging.getLogger("vllm.kvbm_console")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "disabled", False)
    return caplog


def slots(directory: Path, blocks: int = 80, **more: Any) -> dict[str, Any]:
    """The entry of a tier with room for so many blocks."""
    return {"type": "KvbmSlots", "module_path": "kvbm_console.tap.vllm_slots", "root_dir": str(directory / "slots"),
            "bytes_to_use": blocks * (BLOCK_BYTES + 64), "n_threads": 2, **more}


def below(made: list[Below], directory: Path, *tiers: dict[str, Any], **more: Any) -> Below:
    made.append(Below(directory, list(tiers) or [slots(directory)], **more))
    return made[-1]


def flip(directory: Path, one: Below, which: Any) -> None:
    """Flip a bit of a block in the file."""
    with (directory / "slots" / "rank-0" / "data").open("r+b") as file:
        file.seek(one.tiers[0]._slots[which] * BLOCK_BYTES + 77)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def test_all_blocks_are_found_after_a_restart(tmp_path: Path, made: list[Below]) -> None:
    one = below(made, tmp_path)
    one.store(KEYS)
    one.forget_host()
    assert one.fetch(KEYS) == (KEYS, [])
    made.pop().close()
    again = below(made, tmp_path)
    assert again.fetch(KEYS) == (KEYS, [])
    gauges = again.tiers[0].gauges()
    assert (gauges["found_blocks"], gauges["damaged_blocks"], gauges["slots"]) == (64, 0, 80)


def test_the_tier_keeps_what_was_used_last_also_over_a_restart(tmp_path: Path, made: list[Below]) -> None:
    one = below(made, tmp_path, slots(tmp_path, 24))
    one.store(KEYS[:24])
    one.manager.touch(KEYS[:8], one.request())
    one.step()
    assert list(one.tiers[0]._slots) == KEYS[23:7:-1] + KEYS[7::-1], "what continues a block is older than the block"
    one.forget_host()
    made.pop().close()
    again = below(made, tmp_path, slots(tmp_path, 24))
    again.store(KEYS[24:40])
    again.forget_host()
    assert again.fetch(KEYS[:40]) == (KEYS[:8] + KEYS[24:40], [])
    assert again.tiers[0].gauges()["evicted_blocks"] == 16
    size = sum(path.stat().st_blocks * 512 for path in (tmp_path / "slots").rglob("*") if path.is_file())
    assert size <= 24 * (BLOCK_BYTES + 64) + 2 * PAGE_BYTES


def test_a_job_larger_than_the_tier_stores_a_part(tmp_path: Path, made: list[Below]) -> None:
    one = below(made, tmp_path, slots(tmp_path, 10))
    one.store(KEYS)
    one.forget_host()
    hits, wrong = one.fetch(KEYS)
    assert (len(hits), wrong) == (10, [])
    assert one.tiers[0].gauges()["not_stored_blocks"] == 54


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_flipped_bits_are_found_and_computed_again(
    tmp_path: Path, made: list[Below], restart: bool, around: bool, log: pytest.LogCaptureFixture
) -> None:
    """With and without the tap around the tier, whose own sums do not outlive a restart."""
    entry = tapped(slots(tmp_path), integrity="fail") if around else slots(tmp_path)
    one = below(made, tmp_path, entry)
    one.store(KEYS)
    bad = KEYS[3:60:13]
    for each in bad:
        flip(tmp_path, one, each)
    if restart:
        made.pop().close()
        one = below(made, tmp_path, entry)
    for _ in range(2):
        one.forget_host()
        assert one.fetch(KEYS, "victim") == ([each for each in KEYS if each not in bad], [])
    lines = [record.getMessage() for record in log.records if "damaged block" in record.getMessage()]
    assert len(lines) == len(bad)
    assert all("request victim" in line and "tier KvbmSlots" in line and "It is not used" in line for line in lines)
    assert one.tiers[0].gauges()["damaged_blocks"] == len(bad)
    one.store(bad)
    one.forget_host()
    assert one.fetch(KEYS) == (KEYS, []), "stored anew"


def test_a_disk_that_fails(
    tmp_path: Path, made: list[Below], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    one = below(made, tmp_path)
    (tier,) = one.tiers
    real, calls = tier._file._medium.write, iter(range(1_000))

    def sometimes(slot: int, view: memoryview) -> None:
        if next(calls) % 4 == 0:
            raise OSError(errno.EIO, "Input/output error")
        real(slot, view)

    with monkeypatch.context() as patched:
        patched.setattr(tier._file._medium, "write", sometimes)
        one.store(KEYS)
    one.forget_host()
    hits, wrong = one.fetch(KEYS)
    assert (len(hits), wrong) == (48, [])
    with monkeypatch.context() as patched:
        patched.setattr(tier._file._medium, "read", lambda slot, view: sometimes(slot, view))
        one.forget_host()
        hits, wrong = one.fetch(hits)
    assert wrong == []
    assert tier.gauges()["failed_copies"] >= 16
    assert len(tier._free) + len(tier._slots) == 80, "no slot is lost"
    assert "Input/output error" in log.text


def test_reset_with_jobs_in_flight(tmp_path: Path, made: list[Below]) -> None:
    one = below(made, tmp_path)
    one.store(KEYS)
    for turn in range(10):
        one.forget_host()
        context = one.request()
        one.look(KEYS, context)
        one.look(KEYS[: 6 * turn], context)
        one.manager.on_request_finished(context)
    one.forget_host()
    assert one.fetch(KEYS) == (KEYS, [])
    assert not one.tiers[0]._readers


def test_a_block_that_is_read_is_not_evicted(tmp_path: Path, made: list[Below]) -> None:
    one = below(made, tmp_path, slots(tmp_path, 64))
    (tier,) = one.tiers
    one.store(KEYS)
    tier._readers.update(tier._slots.values())
    assert tier._slot() is None
    free = tier._slots[KEYS[7]]
    del tier._readers[free]
    assert tier._slot() == free
    assert tier.lookup(KEYS[7], None) is LookupResult.MISS
    tier._readers.clear()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"root_dir": ""}, "root_dir of KvbmSlots must name a directory"),
        ({"bytes_to_use": 100}, "bytes_to_use of KvbmSlots must be at least 16,448 for one block, got 100"),
        ({"bytes_to_use": 1e18}, "bytes free, and .* slots of 16,384 bytes with their index need"),
        ({"n_threads": 0}, "n_threads of KvbmSlots must be a whole number from 1 to 64, got 0"),
        ({"hash_algorithm": "md5"}, "hash_algorithm of KvbmSlots must be sha256, .*, got 'md5'"),
        ({"hash_algorithm": "xxhash"}, "hash seed is random, .*: set PYTHONHASHSEED"),
        ({"threads": 3}, "KvbmSlots has no setting 'threads'"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: Any, words: str) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match=words):
        Below(tmp_path, [slots(tmp_path) | more])


def test_blocks_of_another_engine_are_refused_by_name(
    tmp_path: Path, made: list[Below], monkeypatch: pytest.MonkeyPatch
) -> None:
    below(made, tmp_path)
    with pytest.raises(ValueError, match="is used by another process"):
        Below(tmp_path, [slots(tmp_path)])
    made.pop().close()
    with pytest.raises(ValueError, match="blocks of another layout"):
        Below(tmp_path, [slots(tmp_path)], layers=2)
    with pytest.raises(ValueError, match="blocks of another number of slots: 80 there, 81 here"):
        Below(tmp_path, [slots(tmp_path, 81)])
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"blocks of another model: '.*' there, '.*other' here"):
        Below(tmp_path / "other", [slots(tmp_path)])
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with pytest.raises(ValueError, match="blocks of another hash seed: 'vllm-none-hash' there, '7' here"):
        Below(tmp_path, [slots(tmp_path)])


def test_an_engine_that_hashes_otherwise_than_the_entry_says_is_told(
    tmp_path: Path, made: list[Below], log: pytest.LogCaptureFixture
) -> None:
    one = below(made, tmp_path)
    init_none_hash(xxhash)
    try:
        one.store(KEYS)
        one.forget_host()
        assert one.fetch(KEYS) == ([], [])
    finally:
        init_none_hash(sha256)
    assert "keeps nothing, because this engine does not hash with sha256" in log.text
    assert one.tiers[0].gauges()["stored_blocks"] == 0


# --- the whole engine -------------------------------------------------------------------------------------------------


def test_a_request_whose_loads_evict_each_other_computes_its_blocks(tmp_path: Path) -> None:
    """vLLM 0.33 goes round for ever with its own example tier: each load evicts blocks of the load before."""
    ends = {}
    for tier in ({"type": "example"}, slots(tmp_path, 400)):
        engine = Engine(tmp_path, offloading(40, spec_name="TieringOffloadingSpec", secondary_tiers=[tier]), blocks=48,
                        running=3)
        for steps, _ in enumerate(engine.run(workload(5, 6, 4))):
            engine.connector.connector_scheduler.manager.secondary_tiers[0].drain_jobs()
            if steps > 500:
                break
        ends[tier["type"]] = (len(engine.finished), list(engine.scheduler.requests))
        engine.scheduler.shutdown()
    assert ends["KvbmSlots"] == (24, [])
    assert len(ends["example"][1]) == 1, "or this release has mended it, and LOADS_MAX may go"


def test_vllms_scheduler_over_the_tier_with_findings_in_the_daemons_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "Sender", Kept)
    entry = offloading(40, spec_name="TieringOffloadingSpec", secondary_tiers=[slots(tmp_path, 400)])
    found = []
    for turn in range(2):
        engine = Engine(tmp_path, entry, hook={}, blocks=48, running=3)
        sender = engine.tap.sender
        watch = Watching(sender.recorder, sender.flattener, sender.settings)
        (tier,) = engine.connector.connector_scheduler.manager.secondary_tiers
        told: list[ev.ContentMismatched] = []
        if turn:
            monkeypatch.setattr(tier._file, "_sum", lambda *_: 4711)
        for output in engine.run(workload(5, 6, 4)):
            watch.pump()
            told += [event for event in watch.events if isinstance(event, ev.ContentMismatched)]
            compare(engine, watch.leader.state, set(output.num_scheduled_tokens))
            tier.drain_jobs()  # so that the course does not depend on the disk
        watch.pump()
        told += [event for event in watch.events if isinstance(event, ev.ContentMismatched)]
        assert watch.rejected == []
        assert len(told) == tier.gauges()["damaged_blocks"]
        assert all(event.request and event.writer == "KvbmSlots" and event.stage == "tier" for event in told)
        assert watch.leader.state.totals.moved_blocks["G2>G3"] > 0
        stats = sender.recorder.watch.measured()[-1]
        assert stats["tier 1:KvbmSlots damaged_blocks"] == len(told)
        found.append((len(told), stats["tier 1:KvbmSlots found_blocks"]))
        engine.scheduler.shutdown()
    assert found[0] == (0, 0)
    assert min(found[1]) > 0


CHILD = """
import sys
from pathlib import Path
from tests.vllm.test_slots import KEYS, Below, slots
one = Below(Path(sys.argv[1]), [slots(Path(sys.argv[1]))])
one.store(KEYS[:32])
print("stored", flush=True)
while True:
    one.forget_host()
    one.store(KEYS[32:])
    one.forget_host()
    one.tiers[0]._slots.clear()
    one.tiers[0]._free = list(range(79, -1, -1))
    one.store(KEYS[:32])
"""


@pytest.mark.fault
def test_an_engine_that_is_killed_leaves_no_wrong_block(tmp_path: Path, made: list[Below]) -> None:
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"stored\n"
            child.send_signal(signal.SIGKILL)
        one = below(made, tmp_path)
        hits, wrong = one.fetch(KEYS)
        assert hits
        assert wrong == []
        assert one.tiers[0].gauges()["damaged_blocks"] == 0
        made.pop().close()
