"""Following a recording that is being written: across rotations, sealings and the death of its writer."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording.playback import Playback, RecordingFeed
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.seal import seal_segment
from kvbm_console.recording.segments import ActiveSegment
from kvbm_console.recording.writer import Recorder
from kvbm_console.stream.feed import Connected, EventsArrived, FeedItem, SnapshotTaken
from tests.recording.helpers import Log, frame_ends, real_run, recorder_of, write_active


class Follower:
    """A console on a playback that follows: folds what it is told, and keeps count."""

    def __init__(self, path: Path) -> None:
        self.playback = Playback(Recording.open(path), follow=True)
        self.playback.seek(self.playback.last_seq)
        self.playback.play()
        self.state = CacheState()
        self.snapshots = 0
        self.look()

    def look(self) -> None:
        """One tick."""
        self.playback.refresh()
        self.playback.advance(33_000_000)
        for item in self.playback.take():
            if isinstance(item, SnapshotTaken):
                self.state, self.snapshots = item.state, self.snapshots + 1
            else:
                assert isinstance(item, EventsArrived)
                for event in item.events:
                    self.state.apply(event)


def test_a_follower_sees_every_event_once_across_rotations_and_sealings(tmp_path: Path) -> None:
    dice = random.Random(4)
    run = real_run()
    follower: list[Follower] = []

    def on_flush(recorder: Recorder) -> None:
        if dice.random() < 0.1:
            recorder.rotate()
        assert recorder.settle()
        if dice.random() < 0.1:
            for path in sorted(tmp_path.glob("*.active"))[:-1]:
                seal_segment(path)
        if not follower:
            follower.append(Follower(tmp_path))
        if dice.random() < 0.7:
            follower[0].look()
            assert follower[0].playback.at_end
            assert follower[0].state.seq == recorder.written_seq + 1

    run.record(tmp_path, [13, 40, 3], on_flush=on_flush, seal=False)
    one = follower[0]
    one.look()
    assert len(list(tmp_path.glob("0*"))) > 4, "it rotated"
    assert one.snapshots == 1, "no jump: it went on seamlessly"
    assert encode_facts(one.state) == encode_facts(run.state_after(len(run.all_events) - 1))
    assert encode_facts(one.playback.recording.state_at(200)) == encode_facts(run.state_after(200)), "the past stays"


def test_a_follower_goes_on_in_the_next_segment_although_the_writer_never_closed_the_last(tmp_path: Path) -> None:
    log = Log()
    first = recorder_of(log, tmp_path, seal=False)
    first.offer(*log.flush(10))
    assert first.settle()
    follower = Follower(tmp_path)
    # It dies: nothing is closed. The lock goes with the process; the same run goes on from the same number.
    first._syncer.stop(1.0)
    first._lock.release()
    second = recorder_of(log, tmp_path, seal=False)
    second.offer(*log.flush(10))
    assert second.settle()
    follower.look()
    assert (follower.state.seq, follower.snapshots) == (20, 1)
    second.close()


def test_a_torn_end_is_not_taken_until_it_is_whole(tmp_path: Path) -> None:
    path = write_active(tmp_path / "whole", Log(), [5, 5, 5])
    data, ends = path.read_bytes(), frame_ends(path)
    growing = tmp_path / path.name
    growing.write_bytes(data[: ends[1]])
    segment = ActiveSegment(growing)
    recording = Recording(growing, [segment], ["run"])
    seen = 0
    for size in range(ends[1], len(data) + 1, 7):
        growing.write_bytes(data[:size])  # truncated and written anew: what is mapped is never beyond what is verified
        recording.refresh()
        whole = sum(1 for end in ends if end <= size)
        assert recording.last_seq == [-1, -1, -1, 4, 4, 9, 9, 14][whole - 1 if whole < 8 else 7], size
        seen = max(seen, recording.last_seq)
    growing.write_bytes(data)
    recording.refresh()
    assert recording.last_seq == 14
    assert recording.finished
    assert not recording.refresh(), "nothing comes behind its end"


def test_a_follower_that_went_back_plays_at_its_speed_until_it_is_at_the_end_again(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path)
    recorder.offer(*log.flush(100))
    assert recorder.settle()
    follower = Follower(tmp_path)
    playback = follower.playback
    playback.seek(10)
    playback.set_speed(1e-6)
    playback.play()
    recorder.offer(*log.flush(100))
    assert recorder.settle()
    follower.look()
    assert (playback.position_seq, playback.last_seq) == (10, 199), "the bar grew, the tape did not jump"
    playback.set_speed(1_000.0)
    follower.look()
    assert playback.at_end
    assert playback.playing, "it waits for more"
    recorder.offer(*log.flush(50))
    assert recorder.settle()
    playback.set_speed(1e-6)
    follower.look()
    assert follower.state.seq == 250, "at the end it shows what comes when it comes"
    recorder.close()


@pytest.mark.asyncio
async def test_the_feed_of_a_follower_looks_by_itself(tmp_path: Path) -> None:
    log = Log()
    recorder = recorder_of(log, tmp_path)
    recorder.offer(*log.flush(10))
    assert recorder.settle()
    playback = Playback(Recording.open(tmp_path), follow=True)
    playback.seek(9)
    playback.play()
    items: list[FeedItem] = []
    feed: Any = RecordingFeed(playback).items()
    async for item in feed:
        items.append(item)
        if isinstance(item, SnapshotTaken):
            recorder.offer(*log.flush(5))
            assert recorder.settle()
        if isinstance(item, EventsArrived):
            break
    await feed.aclose()
    assert isinstance(items[0], Connected)
    assert (items[0].config, items[0].clock_anchor_ns) == (LeaderConfig(), 10**18)
    assert [event.seq for event in items[-1].events] == list(range(10, 15))  # type: ignore[union-attr]
    recorder.close()


def test_the_state_at_a_place_is_printed_as_the_status_document(tmp_path: Path) -> None:
    run = real_run()
    run.record(tmp_path, [13, 40], keyframe_events=300)
    invoke = CliRunner().invoke
    at_500 = invoke(cli, ["replay", str(tmp_path), "--at", "500", "--format", "json"])
    assert at_500.exit_code == 0, at_500.output
    document = msgspec.json.decode(at_500.stdout)
    assert {"slots", "tiers", "transfers", "breakpoints", "holds", "stream", "recorder"} <= set(document)
    assert document["stream"]["head_seq"] == 500
    state = run.state_after(500)
    assert [row["request"] for row in document["slots"]] == [slot.request for slot in state.slots.values()]
    ns = run.all_events[500].at_ns
    by_time = msgspec.json.decode(invoke(cli, ["replay", str(tmp_path), "--at", f"{ns}ns", "--format", "json"]).stdout)
    assert by_time["stream"]["head_seq"] == max(event.seq for event in run.all_events if event.at_ns <= ns)
    end = msgspec.json.decode(invoke(cli, ["replay", str(tmp_path), "--at", "end", "--format", "json"]).stdout)
    assert end == msgspec.json.decode(invoke(cli, ["replay", str(tmp_path), "--format", "json"]).stdout)
    assert end["stream"]["head_seq"] == len(run.all_events) - 1
    beyond = invoke(cli, ["replay", str(tmp_path), "--at", "999999", "--format", "json"])
    assert (beyond.exit_code, "has events 0 to" in beyond.stderr) == (2, True)
    both = invoke(cli, ["replay", str(tmp_path), "--follow", "--format", "json"])
    assert both.exit_code == 2
