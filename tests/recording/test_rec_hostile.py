"""F22: hostile recordings are refused quickly, cheaply, with one sentence, and no code of theirs runs."""

import random
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import xxhash
import zstandard
from mcap.writer import CompressionType, Writer

from kvbm_console.analysis.walk import evidence_of, walk
from kvbm_console.core import columns, snapshots
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import CorruptRecording, RecordingError
from kvbm_console.core.events import PoolKnown
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import decode_facts, digest, encode_facts
from kvbm_console.core.stimuli import PoolDeclared
from kvbm_console.recording import format as fmt
from kvbm_console.recording.files import SegmentWriter
from kvbm_console.recording.output import Tape
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.seal import seal_segment, write_draft
from kvbm_console.recording.verify import verify
from kvbm_console.wire.batches import pack_events
from tests.recording.helpers import Log, frame_ends, write_active

CASES = Path(__file__).resolve().parents[2] / "recordings" / "cases"
SECONDS_MAX = 0.5
"""The bar is 100 ms on a machine of its own; a shared one gets room, a reader that believes a bomb needs far more."""
BYTES_MAX = 64 * 1024 * 1024


def read_everything(path: Path) -> int:
    """Open, read and fold; returns how many events there are."""
    recording = Recording.open(path)
    count = sum(map(len, recording.events()))
    recording.state_at(recording.last_seq)
    return count


def refused(path: Path) -> str:
    """Open and read everything; returns the sentence of the refusal, with its price checked."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(RecordingError) as error:
            read_everything(path)
        assert time.process_time() - begin < SECONDS_MAX
        assert tracemalloc.get_traced_memory()[1] < BYTES_MAX
    finally:
        tracemalloc.stop()
    sentence = str(error.value)
    assert sentence
    assert "\n" not in sentence
    return sentence


def sealed_with(path: Path, chunk: bytes, index: list[fmt.IndexEntry] | None = None) -> Path:
    """A file whose summary, index and CRCs are right and whose only chunk is this record."""
    with path.open("wb") as file:
        writer = Writer(file, compression=CompressionType.ZSTD, enable_data_crcs=True)
        writer.start(fmt.PROFILE, "stranger")
        writer.add_metadata(fmt.ABOUT_NAME, fmt.about_metadata(fmt.About()))
        at = file.tell()
        file.write(chunk)
        entry = fmt.IndexEntry(at, len(chunk), True, True, 0, 0, 0, 0, 0, 0)
        writer.add_attachment(0, 0, fmt.INDEX_NAME, "", fmt.encode_index(index or [entry]))
        writer.finish()
    return path


def chunk_record(declared: int, data: bytes, *, claimed_length: int | None = None, crc: int = 0) -> bytes:
    """A chunk record that says what it is told to."""
    body = struct.pack("<QQQII", 0, 0, declared, crc, 4) + b"zstd"
    body += struct.pack("<Q", len(data) if claimed_length is None else claimed_length) + data
    return struct.pack("<BQ", 6, len(body)) + body


def bomb(size: int) -> bytes:
    """Zeros, compressed without saying how many."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (chunk_record(2**32, zstandard.compress(b"x")), "claims 4294967296 bytes"),
        (chunk_record(2**63, zstandard.compress(b"x")), "claims"),
        (chunk_record(1_000, bomb(2**28)), "not as large as it claims"),
        (chunk_record(1_000, zstandard.compress(bytes(2**28))), "not as large as it claims"),
        (chunk_record(2**28, zstandard.compress(bytes(2**28))), "claims 268435456 bytes"),
        (chunk_record(1_000, b"zstd?", claimed_length=2**40), "contradict"),
        (chunk_record(1_000, b"nothing"), "corrupt"),
        (struct.pack("<BQ", 6, 2**62), "no chunk"),
        (struct.pack("<BQ", 9, 5) + bytes(5), "no chunk"),
    ],
    ids=["4GiB", "2^63", "hidden bomb", "bomb", "large bomb", "length", "no zstd", "record", "other record"],
)
def test_f22_bombs_and_lengths_in_sealed_files(tmp_path: Path, chunk: bytes, says: str) -> None:
    assert says in refused(sealed_with(tmp_path / "a.mcap", chunk))


@pytest.mark.fault
def test_f22_a_nested_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """A chunk inside a chunk: only messages may stand in one."""
    inner = chunk_record(1_000, bomb(2**28))
    outer = chunk_record(len(inner), zstandard.compress(inner), crc=zlib.crc32(inner))
    assert "a chunk has a record of kind 0x6" in refused(sealed_with(tmp_path / "a.mcap", outer))


@pytest.mark.fault
@pytest.mark.parametrize("length", [2**31, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("place", ["header", "frame"])
def test_f22_lengths_in_active_files(tmp_path: Path, length: int, place: str) -> None:
    path = write_active(tmp_path, Log(), [5, 5])
    data = bytearray(path.read_bytes())
    at = 9 if place == "header" else frame_ends(path)[0] + 1
    data[at : at + 8] = struct.pack("<Q", length)
    path.write_bytes(data)
    refused(path)


@pytest.mark.fault
def test_f22_overlapping_checks_do_not_make_the_scan_quadratic(tmp_path: Path) -> None:
    """Damage, then thousands of checks that each claim the rest of the file."""
    path = write_active(tmp_path, Log(), [1], end=False)
    begin = path.stat().st_size + 9
    body = bytearray(b"\x00" * 9)
    body += struct.pack("<BQ", fmt.OP_MESSAGE, 2**20)
    for _ in range(20_000):
        length = begin + len(body) - path.stat().st_size
        body += fmt.CHECK.pack(fmt.OP_CHECK, fmt.CHECK_BODY_BYTES, fmt.CHECK_MAGIC, 0, length, 0, 0)
    with path.open("ab") as file:
        file.write(body)
    begin_s = time.process_time()
    recording = Recording.open(path)
    assert time.process_time() - begin_s < SECONDS_MAX
    assert recording.segments[0].torn_bytes == len(body)


@pytest.mark.fault
def test_f22_an_event_may_not_ask_for_a_pool_of_any_size(tmp_path: Path) -> None:
    path = write_active(tmp_path, Log(), [], end=False)
    path.unlink()
    segment = SegmentWriter(tmp_path, fmt.About())
    seq, facts, memory = Log().keyframe()
    segment.append(fmt.Frame(fmt.KEYFRAMES, seq, 0, 0, 0, fmt.encode_item(fmt.Keyframe(seq, True, facts, memory))))
    pool = PoolKnown(0, 0, 0, 0, 0, 0, 0, Tier.G2, "CPU", 2**31 - 1, 16, Authority.LEADER)
    segment.append(fmt.Frame(fmt.EVENTS, 0, 1, 0, 0, pack_events([pool]).data))
    segment.file.close()
    assert "a pool of 2147483647 blocks is above" in refused(path)
    with pytest.raises(CorruptRecording, match="a pool of 2147483647 blocks"):
        walk(evidence_of(Recording.open(path)), [])


@pytest.mark.fault
@pytest.mark.parametrize("known", [0, 1], ids=["events", "keyframe"])
@pytest.mark.parametrize("reader", ["verify", "info", "cut", "play"])
def test_f22_pools_that_are_declared_and_not_used_cost_nothing(tmp_path: Path, reader: str, known: int) -> None:
    small, large = (declared(tmp_path / f"{places}.mcap", places, known) for places in (16, fmt.POOL_BLOCKS_MAX))
    assert large.stat().st_size < 8_192
    assert peak_of(reader, large) - peak_of(reader, small) < BYTES_MAX // 4


@pytest.mark.fault
def test_f22_parts_of_a_keyframe_cost_nothing_together(tmp_path: Path) -> None:
    """Each part is a chunk that claims what it may, and no part is any use."""
    few, many = (with_parts(tmp_path / f"{parts}.mcap", parts) for parts in (2, 6))
    assert many.stat().st_size < 20_000
    assert peak_of("refuse", many) - peak_of("refuse", few) < BYTES_MAX // 4


def declared(path: Path, places: int, known: int = 0) -> Path:
    """A recording in which a leader hears of a device and a host tier of so many places. The first ``known`` of them
    stand in the keyframe that it begins with."""
    leader = Leader(LeaderConfig(g2_blocks=places))
    stimuli = [
        PoolDeclared(0, 0, 0, None, 0, 0, Tier.G2, "CPU", places, 16, Authority.LEADER),
        PoolDeclared(1, 1, 1, None, 0, 0, Tier.G1, "GPU", places, 16, Authority.ENGINE),
    ]
    for stimulus in stimuli[:known]:
        leader.handle(stimulus)
    tape = Tape(leader)
    for stimulus in stimuli[known:]:
        tape.take(stimulus, leader.handle(stimulus))
    assert [len(pool) for pool in leader.state.pools] == [places, places]
    return tape.save(path, "stranger")


def with_parts(path: Path, parts: int) -> Path:
    """A recording of a keyframe with so many parts, which are zeros."""
    seq, facts, memory = Log().keyframe()
    part = fmt.encode_item(fmt.KeyframePart(bytes(40 * 1024 * 1024)))
    head = fmt.Keyframe(seq, True, facts, memory, parts=parts, facts_bytes=5_000)
    frames = [*[fmt.Frame(fmt.MARKS, 0, 0, 0, 0, part)] * parts,
              fmt.Frame(fmt.KEYFRAMES, 0, 0, 0, 0, fmt.encode_item(head))]
    write_draft(path, fmt.About(), iter(frames))
    return path


READERS = """if True:
    import sys
    from pathlib import Path
    from kvbm_console.core.errors import CorruptRecording
    from kvbm_console.recording.cut import cut
    from kvbm_console.recording.info import info_of
    from kvbm_console.recording.playback import Playback
    from kvbm_console.recording.reader import Recording
    from kvbm_console.recording.verify import verify

    reader, path = sys.argv[1], Path(sys.argv[2])
    recording = Recording.open(path)
    if reader == "verify":
        report = verify(path)
        assert report.ok and report.stimuli and report.audits
    elif reader == "info":
        assert info_of(recording).engines
    elif reader == "play":
        playback = Playback(recording)
        playback.seek(recording.last_seq)
        assert playback.take()[0].state.seq == recording.last_seq + 1
    elif reader == "cut":
        assert cut(recording, recording.first_seq, recording.last_seq, path.with_suffix(".cut.mcap")).complete
    else:
        for read in (lambda: list(recording.frames()), lambda: recording.keyframe(0)):
            try:
                read()
            except CorruptRecording as error:
                assert "the keyframe at event 0 cannot be read: its parts cannot be unpacked" in str(error), error
            else:
                raise AssertionError("it was read")
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_of(reader: str, path: Path) -> int:
    """The most memory in bytes that a process of its own has resident which reads this recording."""
    done = subprocess.run([sys.executable, "-c", READERS, reader, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout)


@pytest.mark.parametrize("name", [*sorted(path.stem for path in CASES.glob("*.mcap")), "declared"])
def test_facts_in_mapped_columns_are_those_in_ordinary_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = declared(tmp_path / "a.mcap", 20_000) if name == "declared" else CASES / f"{name}.mcap"
    recording = Recording.open(path)
    for module in (columns, snapshots):
        monkeypatch.setattr(module, "MAPPED_FROM_BYTES", 2**40)
    ordinary, report = recording.state_at(recording.last_seq), verify(path)
    data, found = encode_facts(ordinary), digest(ordinary)
    for module in (columns, snapshots):
        monkeypatch.setattr(module, "MAPPED_FROM_BYTES", 0)
    monkeypatch.setattr(columns, "PART_PLACES", 4)
    mapped = recording.state_at(recording.last_seq)
    again = decode_facts(data)
    assert data == encode_facts(mapped) == encode_facts(again)
    assert found == digest(mapped) == digest(again) == xxhash.xxh3_64_intdigest(data)
    for mine, theirs, its in zip(ordinary.pools, mapped.pools, again.pools, strict=True):
        assert mine.counts == theirs.counts == its.counts == its.walk()
        assert list(mine.by_hash.items()) == list(theirs.by_hash.items())
        assert mine.by_hash == its.by_hash
    assert verify(path) == report


@pytest.mark.fault
def test_f22_events_may_not_ask_for_pools_of_any_size_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "POOLS_BLOCKS_MAX", 1_000)
    segment = SegmentWriter(tmp_path, fmt.About())
    seq, facts, memory = Log().keyframe()
    segment.append(fmt.Frame(fmt.KEYFRAMES, seq, 0, 0, 0, fmt.encode_item(fmt.Keyframe(seq, True, facts, memory))))
    pools = [PoolKnown(at, 0, 0, at, at, at, 0, Tier.G1, "GPU", 400, 16, Authority.OBSERVED) for at in range(3)]
    segment.append(fmt.Frame(fmt.EVENTS, 0, 3, 0, 0, pack_events(pools).data))
    segment.file.close()
    assert "pools of 1200 blocks together are above 1000" in refused(segment.path)
    with pytest.raises(CorruptRecording, match="pools of 1200 blocks together"):
        walk(evidence_of(Recording.open(segment.path)), [])


@pytest.mark.fault
@pytest.mark.parametrize(
    "data",
    [b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"\xc6\xff\xff\xff\xff", b"", b"\x80", msgspec.msgpack.encode("x")],
    ids=["map of 2^32", "nested", "bin of 2^32", "empty", "empty map", "other"],
)
@pytest.mark.parametrize("channel", [fmt.EVENTS, fmt.KEYFRAMES])
def test_f22_hostile_content_of_valid_frames(tmp_path: Path, data: bytes, channel: int) -> None:
    segment = SegmentWriter(tmp_path, fmt.About())
    segment.append(fmt.Frame(channel, 0, 1 if channel == fmt.EVENTS else 0, 0, 0, data))
    segment.append(fmt.Frame(fmt.MARKS, 1 if channel == fmt.EVENTS else 0, 0, 0, 0,
                             fmt.encode_item(fmt.SegmentEnd(0, False))))
    segment.file.close()
    refused(segment.path)


@pytest.mark.fault
@pytest.mark.parametrize("make", [bytes, lambda n: random.Random(n).randbytes(n), lambda n: fmt.MAGIC + bytes(n)])
@pytest.mark.parametrize("ending", [".active", ".mcap", ".txt"])
def test_f22_files_of_others(tmp_path: Path, make: Callable[[int], bytes], ending: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(make(10_000))
    refused(path)


def test_another_major_version_is_refused_by_both_numbers(tmp_path: Path) -> None:
    about = msgspec.structs.replace(fmt.About(), major=9, minor=0)
    segment = SegmentWriter(tmp_path, about)
    segment.file.close()
    assert "has recording format '9.0', this program reads 1.x" in refused(segment.path)


def test_another_programs_mcap_file_is_refused_by_its_profile(tmp_path: Path) -> None:
    path = tmp_path / "robot.mcap"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start("ros2")
        writer.finish()
    assert "its MCAP profile is 'ros2'" in refused(path)


@pytest.mark.fault
def test_f22_a_fuzzed_sealed_file_raises_nothing_else(tmp_path: Path) -> None:
    """Several flips at once, whole lengths among them: one type of error, with one sentence."""
    path = seal_segment(write_active(tmp_path, Log(), [20, 30]))
    whole = path.read_bytes()
    dice = random.Random(22)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 6)):
            at = dice.randrange(len(data))
            data[at : at + 8] = dice.randbytes(dice.choice([1, 8]))[: len(data) - at]
        path.unlink()
        path.write_bytes(data)
        sentence = ""
        try:
            assert read_everything(path) <= 50
        except RecordingError as error:
            sentence = str(error)
        assert "\n" not in sentence
