"""The tape: step, seek and play agree with the fold, wherever one comes from; a gap is told and crossed."""

import errno
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.core.errors import UsageError
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording.info import info_of
from kvbm_console.recording.playback import CHECKPOINT_EVENTS, Playback, RecordingFeed
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.writer import RETRY_S
from kvbm_console.stream.feed import Connected, EventsArrived, FeedItem, GapSeen, SnapshotTaken
from tests.recording.helpers import Disk, FakeClock, Log, real_run, recorder_of


class Receiver:
    """Folds what a playback tells it, as a console does."""

    def __init__(self) -> None:
        self.state = CacheState()
        self.snapshots = 0
        self.gaps: list[GapSeen] = []

    def receive(self, items: list[FeedItem]) -> None:
        """Apply items in order."""
        for item in items:
            if isinstance(item, SnapshotTaken):
                self.state = item.state
                self.snapshots += 1
            elif isinstance(item, EventsArrived):
                for event in item.events:
                    self.state.apply(event)
            elif isinstance(item, GapSeen):
                self.gaps.append(item)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A real run with several keyframes."""
    directory = tmp_path_factory.mktemp("run")
    real_run().record(directory, [13, 40], keyframe_events=300)
    return Recording.open(directory)


def gap_recording(directory: Path) -> Recording:
    """Events 10 to 29 are missing, 30 to 49 are there."""
    disk, clock, log = Disk(), FakeClock(), Log()
    recorder = recorder_of(log, directory, open_file=disk.open, clock=clock)
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    disk.write_error = errno.EIO
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    disk.write_error = None
    clock.now_ns += round(RETRY_S * 10**9)
    assert recorder.settle()
    for _ in range(3):
        recorder.offer(*log.flush(10))
    recorder.close()
    return Recording.open(directory)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 40)), st.tuples(st.just("back"), st.integers(1, 40)),
        st.tuples(st.just("seek"), st.integers(-5, 5_000)), st.tuples(st.just("play"), st.integers(1, 400_000_000)),
        st.tuples(st.just("take"), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=40)
@given(actions=ACTIONS)
def test_whatever_keys_are_pressed_the_receiver_has_the_fold(
    recorded: Recording, actions: list[tuple[str, int]]
) -> None:
    playback, receiver = Playback(recorded), Receiver()
    position = playback.position_seq
    for action, value in actions:
        if action == "step":
            playback.step(value)
            position = min(position + value, recorded.last_seq)
        elif action == "back":
            playback.step(-value)
            position = max(position - value, 0)
        elif action == "seek":
            playback.seek(value)
            position = max(0, min(value, recorded.last_seq))
        elif action == "play":
            playback.play()
            playback.advance(value)
            playback.pause()
            assert playback.position_seq >= position
            position = playback.position_seq
        else:
            receiver.receive(playback.take())
            assert encode_facts(receiver.state) == encode_facts(playback.state)
        assert playback.position_seq == position
    receiver.receive(playback.take())
    assert encode_facts(receiver.state) == encode_facts(real_run().state_after(position))
    assert encode_facts(playback.state) == encode_facts(receiver.state)


def test_playing_follows_the_time_of_the_recording(recorded: Recording) -> None:
    events = real_run().all_events
    playback = Playback(recorded)
    start_ns = playback.at_ns
    playback.set_speed(4.0)
    playback.play()
    playback.advance(50_000_000)
    shown = [event for event in events if event.at_ns <= start_ns + 200_000_000]
    assert playback.position_seq == shown[-1].seq
    assert playback.at_ns == start_ns + 200_000_000
    playback.advance(10**15)
    assert playback.at_end
    assert not playback.playing
    playback.play()
    assert not playback.playing, "nothing follows the end"
    playback.toggle()
    assert playback.playing
    assert playback.position_seq == playback.first_seq, "space at the end plays from the beginning"


def test_one_step_back_is_one_event_back(recorded: Recording) -> None:
    playback = Playback(recorded)
    playback.seek(recorded.last_seq)
    for seq in range(recorded.last_seq - 1, recorded.last_seq - 30, -1):
        playback.step(-1)
        assert playback.position_seq == seq
    assert len(playback._checkpoints) <= 1 + 30 // CHECKPOINT_EVENTS + 1


def test_a_snapshot_belongs_to_the_receiver(recorded: Recording) -> None:
    playback = Playback(recorded)
    (taken,) = playback.take()
    assert isinstance(taken, SnapshotTaken)
    taken.state.slots.clear()
    taken.state.totals.slots_opened += 1
    playback.step(20)
    assert encode_facts(playback.state) == encode_facts(real_run().state_after(20))


def test_a_gap_is_told_and_crossed_in_one_step(tmp_path: Path) -> None:
    recording = gap_recording(tmp_path)
    playback, receiver = Playback(recording), Receiver()
    playback.seek(9)
    receiver.receive(playback.take())
    playback.step()
    receiver.receive(playback.take())
    assert receiver.gaps == [GapSeen(10, 29, "Input/output error")]
    assert playback.position_seq == 29
    assert receiver.state.seq == 30
    playback.step()
    receiver.receive(playback.take())
    assert (receiver.state.seq, len(receiver.gaps)) == (31, 1)


def test_playing_crosses_a_gap_and_seeking_into_it_goes_to_its_end(tmp_path: Path) -> None:
    recording = gap_recording(tmp_path)
    playback, receiver = Playback(recording), Receiver()
    playback.play()
    playback.advance(10**12)
    receiver.receive(playback.take())
    assert (playback.position_seq, len(receiver.gaps)) == (49, 1)
    assert encode_facts(receiver.state) == encode_facts(playback.state)
    for seq in (10, 15, 29):
        playback.seek(seq)
        assert playback.position_seq == 29


def test_a_tape_that_ends_in_a_gap_ends_before_it(tmp_path: Path) -> None:
    disk, log = Disk(), Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open)
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    disk.short = 10
    disk.free = 500
    recorder.offer(*log.flush(100))
    recorder.close()
    playback = Playback(Recording.open(tmp_path))
    playback.play()
    playback.advance(10**12)
    assert playback.position_seq == 9
    assert playback.at_end
    playback.seek(10**6)
    assert playback.position_seq == 9


def test_bad_speeds_are_refused(recorded: Recording) -> None:
    for speed in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="speed must be above 0"):
            Playback(recorded).set_speed(speed)


def test_density_covers_the_whole_time(recorded: Recording) -> None:
    cells = Playback(recorded).density(20)
    assert len(cells) == 20
    assert sum(cells) == info_of(recorded).events
    assert cells[0] > 0
    assert cells[-1] > 0


@pytest.mark.asyncio
async def test_the_feed_connects_shows_the_facts_and_plays(recorded: Recording) -> None:
    clock = FakeClock()

    async def sleep(seconds: float) -> None:
        clock.now_ns += round(seconds * 10**9)

    playback, receiver = Playback(recorded), Receiver()
    playback.set_speed(100.0)
    items = RecordingFeed(playback, clock=clock, sleep=sleep).items()
    connected = await anext(items)
    assert isinstance(connected, Connected)
    assert (connected.recording, connected.control, connected.incarnation) == (True, False, "run")
    receiver.receive([await anext(items)])
    assert receiver.snapshots == 1
    playback.play()
    while receiver.state.seq <= recorded.last_seq:
        receiver.receive([await anext(items)])
    assert receiver.snapshots == 1
    assert encode_facts(receiver.state) == encode_facts(real_run().state_after(recorded.last_seq))
    playback.seek(100)
    receiver.receive([await anext(items)])
    assert (receiver.snapshots, receiver.state.seq) == (2, 101)
    await items.aclose()  # type: ignore[attr-defined]
