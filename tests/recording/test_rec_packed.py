"""Keyframes above a frame's limit are packed and divided; every reader sees them as it sees small ones.

Law of this file: what ``encode_keyframe`` divides, every way of reading puts together again, or refuses in a sentence.
"""

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core.errors import CorruptRecording, FoldError
from kvbm_console.core.snapshots import decode_facts, encode_facts, packed_elsewhere
from kvbm_console.recording import format as fmt
from kvbm_console.recording.cut import cut
from kvbm_console.recording.decode import unpacked_frames
from kvbm_console.recording.format import Frame, Keyframe
from kvbm_console.recording.playback import Playback
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import recover_directory, recover_segment
from kvbm_console.recording.seal import seal_segment
from kvbm_console.recording.verify import verify
from tests.recording.helpers import Log, frame_ends, frames_of, recorder_of

PARTS = 3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes megabytes in life takes kilobytes here."""
    monkeypatch.setattr(fmt, "PACKED_FROM_BYTES", 500)
    monkeypatch.setattr(fmt, "PART_BYTES", 200)


def a_run(directory: Path, log: Log) -> Path:
    """An active segment with three packed keyframes."""
    recorder = recorder_of(log, directory, keyframe_events=30, seal=False)
    for _ in range(9):
        recorder.offer(*log.flush(10))
        assert recorder.settle()
    recorder.close()
    (path,) = directory.glob("*.active")
    return path


@given(some.binary(max_size=3_000), some.binary(max_size=3_000))
def test_a_divided_keyframe_is_put_together_as_it_was(facts: bytes, memory: bytes) -> None:
    whole = Keyframe(7, bool(memory), facts, memory, fmt.About(incarnation="run"))
    frames = fmt.divided(Frame(fmt.KEYFRAMES, 7, 0, 1, 2, fmt.encode_item(whole)))
    assert all(len(frame.data) < fmt.PART_BYTES + 1_500 for frame in frames)
    (joined,) = unpacked_frames(frames, Path("x"))
    assert joined.keyframe == whole if len(frames) > 1 else fmt.decode_keyframe(joined.data) == whole
    events = Frame(fmt.EVENTS, 7, 0, 1, 2, b"")
    for missing in range(len(frames) - 1):
        with pytest.raises(CorruptRecording, match="of its"):
            list(unpacked_frames([events, *frames[:missing], *frames[missing + 1 :]], Path("x")))


def test_bytes_among_zeros_are_unpacked_where_they_were() -> None:
    facts = bytes(300_000) + b"f" + bytes(2_000_000) + random.Random(7).randbytes(400_000) + bytes(131_072)
    whole = Keyframe(7, True, facts, bytes(200_000) + b"m")
    frames = fmt.divided(Frame(fmt.KEYFRAMES, 7, 0, 1, 2, b"", whole))
    (joined,) = unpacked_frames(frames, Path("x"))
    assert len(frames) > 100
    assert joined.keyframe == whole


@pytest.mark.parametrize("sealed", [False, True])
def test_packed_keyframes_are_sought_verified_cut_and_played(tmp_path: Path, sealed: bool) -> None:
    log = Log()
    path = a_run(tmp_path / "run", log)
    assert sum(bool(fmt.decode_keyframe(one.data).parts) for one in frames_of(path) if one.channel == fmt.KEYFRAMES) > 2
    if sealed:
        seal_segment(path)
    recording = Recording.open(tmp_path / "run")
    assert len(recording.keyframe_seqs) > 2
    for seq in recording.keyframe_seqs:
        keyframe = recording.keyframe(seq)
        assert keyframe is not None
        assert not keyframe.parts
        assert decode_facts(keyframe.facts).seq == seq
        assert keyframe.memory == log.memory
    assert encode_facts(recording.state_at(recording.last_seq)) == encode_facts(log.state)
    report = verify(tmp_path / "run")
    assert (report.ok, report.events, report.stimuli) == (True, 90, 90)
    made = cut(recording, 25, 75, tmp_path / "cut.mcap")
    assert verify(Path(made.path)).ok
    playback = Playback(recording)
    playback.seek(44)
    assert playback.position_seq == 44


def test_a_segment_that_ends_inside_a_packed_keyframe_has_all_in_front_of_it(tmp_path: Path) -> None:
    log = Log()
    path = a_run(tmp_path, log)
    frames, ends, data = frames_of(path), frame_ends(path), path.read_bytes()
    for index, frame in enumerate(frames[:-1]):
        path.write_bytes(data[: ends[index + 1]])
        if index < PARTS:
            continue
        recording = Recording.open(tmp_path)
        assert recording.last_seq == frame.end_seq - 1
        if recording.keyframe_seqs:
            assert recording.state_at(recording.last_seq).seq == frame.end_seq


def test_a_salvage_leaves_out_the_packed_keyframe_that_lost_a_part(tmp_path: Path) -> None:
    log = Log()
    path = a_run(tmp_path, log)
    frames, ends = frames_of(path), frame_ends(path)
    second = [i for i, one in enumerate(frames) if one.channel == fmt.KEYFRAMES][1]
    data = bytearray(path.read_bytes())
    data[ends[second - 1] + 60] ^= 1  # in the part in front of it
    path.write_bytes(data)
    with pytest.raises(CorruptRecording):
        recover_directory(tmp_path)
    assert recover_segment(path, salvage=True).outcome == "salvaged"
    recording = Recording.open(tmp_path)
    assert recording.last_seq == log.state.seq - 1
    assert frames[second].first_seq not in recording.keyframe_seqs
    assert encode_facts(recording.state_at(recording.last_seq)) == encode_facts(log.state)
    assert verify(tmp_path).first_difference is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"facts_bytes": 2**40}, "above the limit of"), ({"memory_bytes": -1}, "above the limit of"),
     ({"memory_bytes": 0}, "not as large as it claims"), ({"parts": 2**31}, "of its 2147483648 parts")],
)
def test_a_packed_keyframe_that_lies_is_refused_before_it_is_unpacked(change: dict[str, int], sentence: str) -> None:
    whole = Keyframe(7, True, b"f" * 900, b"a" * 900)
    *parts, head = fmt.divided(Frame(fmt.KEYFRAMES, 7, 0, 1, 2, fmt.encode_item(whole)))
    lie = msgspec.structs.replace(fmt.decode_keyframe(head.data), **change)
    lying = msgspec.structs.replace(head, data=fmt.encode_item(lie))
    with pytest.raises(CorruptRecording, match=sentence):
        list(unpacked_frames([*parts, lying], Path("x")))
    broken = msgspec.structs.replace(parts[0], data=fmt.encode_item(fmt.KeyframePart(b"\x28\xb5\x2f\xfd" + b"x" * 99)))
    with pytest.raises(CorruptRecording, match="cannot be read"):
        list(unpacked_frames([broken, *parts[1:], head], Path("x")))


def test_a_reader_that_cannot_unpack_refuses_the_facts_by_their_version() -> None:
    """A reader of format 1.2 passes the parts over, as marks that it does not know, and meets these facts."""
    with pytest.raises(FoldError, match="snapshot version 2 is not 1"):
        decode_facts(packed_elsewhere())
