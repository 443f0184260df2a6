"""``attach --record``: what a console saw, as a recording with its daemon's configuration and clock."""

from pathlib import Path

import pytest

from kvbm_console.cli.keep import SeenKeeper, require_place
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from kvbm_console.stream.feed import Connected, EventsArrived, GapSeen, SnapshotTaken
from tests.recording.helpers import Run, real_run
from tui.model.mirror import Mirror

ANCHOR_NS = 1_800_000_000 * 10**9


def seen(run: Run, directory: Path, config: LeaderConfig | None) -> Recording:
    """A console that attached at event 100, missed 50 events, and was left at the end."""
    keeper, mirror = SeenKeeper(directory), Mirror()

    def take(item: Connected | SnapshotTaken | EventsArrived | GapSeen) -> None:
        mirror.take(item, 0)
        keeper.take(item, mirror)

    def snapshot(seq: int) -> SnapshotTaken:
        return SnapshotTaken(decode_facts(encode_facts(run.state_after(seq - 1))))

    events = run.all_events
    take(Connected("here", "run-1", 1, True, None, config=config, clock_anchor_ns=ANCHOR_NS))
    take(snapshot(100))
    take(EventsArrived(events[100:200]))
    take(GapSeen(200, 249, "reader too slow"))
    take(snapshot(250))
    for at in range(250, len(events), 40):
        take(EventsArrived(events[at : at + 40]))
    keeper.close()
    return Recording.open(directory)


def test_what_was_seen_replays_with_the_daemons_configuration_and_clock(tmp_path: Path) -> None:
    run = real_run()
    recording = seen(run, tmp_path, run.config)
    assert (recording.config, recording.clock_anchor_ns) == (run.config, ANCHOR_NS)
    assert recording.first_seq == 100
    assert encode_facts(recording.state_at(recording.last_seq)) == encode_facts(
        run.state_after(len(run.all_events) - 1))
    assert recording.keyframe(recording.last_seq, complete=True) is None, "a mirror has no memory to go on from"
    report = verify(tmp_path)
    assert (report.first_difference, report.decisions) == (None, False)
    assert sum(gap.count for gap in recording.gaps) >= 50


def test_of_a_newer_daemon_the_facts_tell_the_configuration(tmp_path: Path) -> None:
    run = real_run()
    config = seen(run, tmp_path, None).config
    assert (config.block_tokens, config.g2_blocks) == (run.config.block_tokens, run.config.g2_blocks)


def test_a_file_is_complete_when_it_has_its_name_and_never_replaces_another(tmp_path: Path) -> None:
    run = real_run()
    keeper, mirror = SeenKeeper(tmp_path / "seen.mcap"), Mirror()
    for incarnation in ("run-1", "run-2"):
        for item in (
            Connected("here", incarnation, 1, True, None, config=run.config, clock_anchor_ns=ANCHOR_NS),
            SnapshotTaken(decode_facts(encode_facts(run.state_after(99)))), EventsArrived(run.all_events[100:200]),
        ):
            mirror.take(item, 0)
            keeper.take(item, mirror)
        assert [path.name for path in keeper.made] == ["seen.mcap"][: len(keeper.made)]
        assert keeper.kept.place == str(tmp_path / "seen.mcap")
        assert keeper.kept.size_bytes > 0
    keeper.close()
    assert keeper.kept.events == 200
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert keeper.kept.size_bytes == size
    both = f"{tmp_path / 'seen.mcap'} and {tmp_path / 'seen-2.mcap'}"
    assert keeper.told() == f"recorded 200 events, {size // 1024} KiB, to {both}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seen-2.mcap", "seen.mcap"]
    for path, incarnation in ((tmp_path / "seen.mcap", "run-1"), (tmp_path / "seen-2.mcap", "run-2")):
        recording = Recording.open(path)
        assert (recording.incarnation, recording.first_seq, recording.last_seq) == (incarnation, 100, 199)


@pytest.mark.parametrize(("name", "said"), [
    ("there.mcap", "exists already"), ("left.mcap", "exists"), ("no/where.mcap", "directory that exists"),
    ("plain", "is a file: a recording is a new file"),
])
def test_a_place_that_cannot_be_is_refused_before_the_screen_changes(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "there.mcap").touch()
    (tmp_path / "plain").touch()
    (tmp_path / "left.mcap.parts").mkdir()
    with pytest.raises(UsageError, match=said):
        require_place(tmp_path / name)
