"""Reading is what was written, whatever the flushes, keyframes and segments; facts are the fold (a real run)."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.core.errors import NotFound, RecordingError
from kvbm_console.core.events import SlotCloned, SlotOpened
from kvbm_console.core.snapshots import digest, encode_facts
from kvbm_console.recording.format import Frame, IndexEntry
from kvbm_console.recording.info import info_of
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.segments import ActiveSegment, SealedSegment
from tests.recording.helpers import Log, real_run, recorder_of, write_active

SHAPES = st.tuples(
    st.lists(st.integers(1, 120), min_size=1, max_size=6), st.sampled_from([40, 300, 10**9]),
    st.sampled_from([20_000, 10**9]), st.booleans(),
)
"""(stimuli of each flush, events between keyframes, bytes of a segment, sealed)."""


@settings(max_examples=12)
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_what_is_read_is_what_was_written_and_facts_are_the_fold(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[list[int], int, int, bool], seed: int
) -> None:
    flushes, keyframe_events, segment_bytes, sealed = shape
    directory = tmp_path_factory.mktemp("shape")
    run = real_run()
    run.record(directory, flushes, keyframe_events=keyframe_events, segment_bytes=segment_bytes, seal=sealed)
    recording = Recording.open(directory)
    assert [event for batch in recording.events() for event in batch] == run.all_events
    assert [stimulus for batch in recording.stimuli() for stimulus in batch] == run.stimuli
    info = info_of(recording)
    assert (info.events, info.stimuli) == (len(run.all_events), len(run.stimuli))
    assert info.finished
    assert info.gaps == []
    assert sum(recording.density(37)) == len(run.all_events)
    dice = random.Random(seed)
    for seq in (-1, 0, recording.last_seq, *(dice.randrange(recording.last_seq) for _ in range(3))):
        assert encode_facts(recording.state_at(seq)) == encode_facts(run.state_after(seq))
        assert next(iter(recording.events(seq + 1)), [None])[0] == (
            run.all_events[seq + 1] if seq < recording.last_seq else None
        )


def test_a_sealed_and_an_active_segment_are_read_alike(tmp_path: Path) -> None:
    run = real_run()
    for name, seal in (("active", False), ("sealed", True)):
        run.record(tmp_path / name, [17], keyframe_events=200, seal=seal)
    one, other = Recording.open(tmp_path / "active"), Recording.open(tmp_path / "sealed")
    assert isinstance(one.segments[0], ActiveSegment)
    assert other.segments[0].sealed
    assert list(one.events()) == list(other.events())
    mine, theirs = info_of(one), info_of(other)
    for field in ("first_seq", "last_seq", "events", "stimuli", "keyframes", "gaps", "first_ns", "last_ns", "config"):
        assert getattr(mine, field) == getattr(theirs, field), field
    assert mine.requests == sum(isinstance(event, SlotOpened | SlotCloned) for event in run.all_events)
    assert mine.live_requests == theirs.live_requests == len(one.state_at(one.last_seq).slots)
    (engine,) = mine.engines
    assert mine.engines == theirs.engines
    assert (engine.source, engine.authority, engine.dp_ranks) == (1, "engine", 1)
    middle = one.last_seq // 2
    assert digest(one.state_at(middle)) == digest(other.state_at(middle))
    assert one.density(5) == other.density(5)


def test_a_recording_that_is_being_written_can_be_read(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path)
    recorder.offer(*log.flush(5))
    assert recorder.settle()
    recording = Recording.open(tmp_path)
    assert (recording.last_seq, info_of(recording).finished) == (4, False)
    recorder.offer(*log.flush(5))
    assert recorder.settle()
    assert Recording.open(tmp_path).last_seq == 9
    recorder.close()


def test_a_run_without_events_can_be_read(tmp_path: Path) -> None:
    recorder_of(Log(), tmp_path).close()
    recording = Recording.open(tmp_path)
    assert (recording.first_seq, recording.last_seq, info_of(recording).events) == (0, -1, 0)
    assert recording.state_at(-1).seq == 0
    assert recording.density(3) == [0, 0, 0]


def test_numbers_outside_are_refused_with_the_bounds(tmp_path: Path) -> None:
    write_active(tmp_path, Log(), [5])
    recording = Recording.open(tmp_path)
    for seq in (-2, 5, 10**9):
        with pytest.raises(RecordingError, match=f"has events 0 to 4, not {seq}"):
            recording.state_at(seq)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="holds no recording"):
        Recording.open(tmp_path)
    with pytest.raises(RecordingError, match="does not exist"):
        Recording.open(tmp_path / "none")
    write_active(tmp_path, Log(), [5])
    with pytest.raises(NotFound, match="holds no run 'other', but run"):
        Recording.open(tmp_path, run="other")


def test_a_missing_segment_is_a_gap(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path, segment_bytes=4_000, seal=False)
    for _ in range(12):
        recorder.offer(*log.flush(40))
        assert recorder.settle()
    recorder.close()
    paths = sorted(tmp_path.glob("*.active"))
    assert len(paths) >= 4
    firsts = [int(path.stem.split("-")[1]) for path in paths]
    paths[1].unlink()
    recording = Recording.open(tmp_path)
    assert [(gap.first, gap.last) for gap in recording.gaps] == [(firsts[1], firsts[2] - 1)]
    assert recording.state_at(recording.last_seq).seq == recording.last_seq + 1
    with pytest.raises(RecordingError, match="unknown"):
        recording.state_at(firsts[2] - 2)


def test_events_are_read_without_the_keyframes_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keyframe of a full cache is as large as all events of a window around it."""
    run = real_run()
    run.record(tmp_path, [17], keyframe_events=200)
    recording = Recording.open(tmp_path)
    read: list[IndexEntry] = []
    frames = SealedSegment.frames

    def counted(self: SealedSegment, entry: IndexEntry) -> Iterator[Frame]:
        read.append(entry)
        return frames(self, entry)

    monkeypatch.setattr(SealedSegment, "frames", counted)
    assert [event for batch in recording.events() for event in batch] == run.all_events
    assert len(recording.keyframe_seqs) > 3
    assert read
    assert all(entry.events and not entry.keyframe for entry in read)
