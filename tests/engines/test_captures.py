"""Streams that real engines published: decoded without an unknown, folded to what an independent recount finds."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm_console.core.errors import UsageError
from kvbm_console.engines.kv_events.capture import CaptureFrame, CaptureWriter, pack_frame, read_frames
from kvbm_console.recording.reader import Recording
from tests.engines.payloads import Recount, batch, decode_batch, stored
from tests.engines.test_stream import House, facts_of

KEPT = Path(__file__).resolve().parents[2] / "recordings" / "kv-events"
"""Frames that engines published on synthetic workloads: four captures of vLLM 0.33, a capture of SGLang 0.5.23."""
NAMES = sorted(path.stem for path in KEPT.glob("*.bin"))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_here_is_what_was_captured(shared: Path, name: str) -> None:
    path = shared / "captures" / name / "frames.bin"
    if not path.is_file():
        pytest.skip(f"needs the capture {name} in the shared data")
    assert path.read_bytes() == (KEPT / f"{name}.bin").read_bytes()


@pytest.fixture(params=NAMES)
def capture(request: pytest.FixtureRequest) -> Path:
    """The frames of one capture."""
    return KEPT / f"{request.param}.bin"


def test_a_capture_decodes_and_folds_to_the_recount(capture: Path) -> None:
    house = House(snapshots=False)
    for frame in read_frames(capture):
        found = decode_batch(frame.payload)
        assert (found.unknown, found.malformed) == (0, 0)
        house.recount.take(frame.payload)
        house.stream.accept(frame.seq, frame.payload)
    left = house.recount.nonempty()
    state = house.dispatcher.leader.state
    assert facts_of(state) == left
    assert state.lost_sources == {}
    tape = Recording.open(capture.with_suffix(".mcap"))
    assert facts_of(tape.state_at(tape.last_seq)) == left
    counts = house.stream.counts
    assert (counts.gaps, counts.restarts, counts.unknown_events, counts.malformed_events) == (0, 0, 0, 0)
    assert counts.stored_blocks > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_frames_say_what_the_lines_beside_them_say(shared: Path, name: str) -> None:
    """The generic decoding that was written when the capture was made says the same as the frames."""
    capture = shared / "captures" / name / "frames.bin"
    if not capture.is_file():
        pytest.skip(f"needs the capture {name} in the shared data")
    lines = [json.loads(line) for line in (capture.parent / "events.jsonl").read_text().splitlines()]
    frames = list(read_frames(capture))
    assert [frame.seq for frame in frames] == [line["seq"] for line in lines]
    assert [frame.topic.decode() for frame in frames] == [line["topic"] for line in lines]
    blocks = [
        sum(len(event.get("block_hashes", [])) for event in line["raw"][1]) for line in lines
    ]
    assert [decode_batch(frame.payload).blocks for frame in frames] == blocks


def test_writing_and_reading(tmp_path: Path) -> None:
    frames = [CaptureFrame(1.5, b"kv", 0, batch(stored(1))), CaptureFrame(2.5, b"", 2**63, b"")]
    writer = CaptureWriter(tmp_path / "new")
    for frame in frames:
        writer.write(frame)
    writer.close()
    assert list(read_frames(tmp_path / "new")) == frames
    with pytest.raises(UsageError, match="exists already"):
        CaptureWriter(tmp_path / "new")


def test_a_torn_tail_is_left_out_and_damage_is_refused(tmp_path: Path) -> None:
    whole = pack_frame(CaptureFrame(1.0, b"kv", 0, b"payload"))
    path = tmp_path / "frames.bin"
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert len(list(read_frames(path))) == 1
        path.write_bytes(whole[:cut])
        with pytest.raises(UsageError, match="within its first frame"):
            list(read_frames(path))
    path.write_bytes(whole + b"\xff" * 64)
    with pytest.raises(UsageError, match=f"no frame at byte {len(whole)}"):
        list(read_frames(path))


def test_the_recount_is_no_echo_of_the_decoder() -> None:
    """The recount reads plain msgpack: breaking the decoder cannot break it in the same way."""
    recount = Recount()
    recount.take(msgspec.msgpack.encode([0, [stored(-5, b"\x00" * 24 + b"\x07" * 8)], 3]))
    expected: dict[Any, Any] = {(3, 0, "GPU"): {2**64 - 5: 1, 0x0707070707070707: 1}}
    assert recount.nonempty() == expected
