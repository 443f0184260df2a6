"""Several recordings in one order: by the wall's clock, each in its own order, gaps where they were."""

import json
from pathlib import Path

from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.recording.cut import cut
from kvbm_console.recording.format import Gap
from kvbm_console.recording.merge import merged, sources_of
from kvbm_console.recording.reader import Recording
from tests.recording.helpers import Log, recorder_of

SECOND = 10**9


def recording_at(directory: Path, anchor_ns: int, count: int, *, run: str = "run", lost: bool = False) -> Recording:
    """So many events, 1 us apart, behind this wall time."""
    log = Log()
    recorder = recorder_of(log, directory, clock_anchor_ns=anchor_ns, incarnation=run)
    recorder.offer(*log.flush(count))
    if lost:
        log.flush(5)
        recorder.offer(*log.flush(5))
        recorder.offer(*log.flush(5))
    recorder.close()
    return Recording.open(directory, run)


def test_events_interleave_by_the_wall_and_keep_their_own_order(tmp_path: Path) -> None:
    first = recording_at(tmp_path / "a", 10**18, 100)
    second = recording_at(tmp_path / "b", 10**18 + 50_500, 100)
    found = list(merged([first, second]))
    assert len(found) == 200
    assert [one.wall_ns for one in found] == sorted(one.wall_ns for one in found)
    for source in (0, 1):
        assert [one.what.seq for one in found if one.source == source] == list(range(100))  # type: ignore[union-attr]
    assert [one.source for one in found[:51]] == [0] * 51
    assert [one.source for one in found[51:60]] == [1, 0] * 4 + [1], "then they take turns"


def test_a_gap_stands_where_it_was(tmp_path: Path) -> None:
    recording = recording_at(tmp_path / "a", 10**18, 10, lost=True)
    assert sum(gap.count for gap in recording.gaps) > 0
    found = [one.what for one in merged([recording])]
    at = next(index for index, what in enumerate(found) if isinstance(what, Gap))
    assert at == 10
    events = [what for what in found if not isinstance(what, Gap)]
    missing = sum(what.count for what in found if isinstance(what, Gap))
    assert len(events) + missing == recording.last_seq + 1


def test_all_runs_of_a_directory_are_read_under_names_of_their_own(tmp_path: Path) -> None:
    recording_at(tmp_path / "a", 10**18, 3, run="one")
    recording_at(tmp_path / "a", 10**18 + SECOND, 3, run="two")
    sources = sources_of([tmp_path / "a"])
    assert [source.name for source in sources] == [f"{tmp_path / 'a'}@one", f"{tmp_path / 'a'}@two"]
    assert [one.source for one in merged([source.recording for source in sources])] == [0] * 3 + [1] * 3


def test_the_command_prints_text_and_json_lines(tmp_path: Path) -> None:
    recording = recording_at(tmp_path / "a", 10**18, 4)
    cut(recording, 1, 2, tmp_path / "part.mcap")
    run = CliRunner().invoke
    text = run(cli, ["rec", "merge", str(tmp_path / "a"), str(tmp_path / "part.mcap")])
    assert text.exit_code == 0, text.output
    lines = text.stdout.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("2001-09-09T01:46:40.000000Z  a         ")
    printed = run(cli, ["rec", "merge", str(tmp_path / "a"), "--format", "jsonl", "--where", "seq > 1"])
    documents = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [document["seq"] for document in documents] == [2, 3]
    assert list(documents[0])[:3] == ["wall_ns", "recording", "seq"]
    assert run(cli, ["rec", "merge", str(tmp_path / "none")]).exit_code == 2
    assert run(cli, ["rec", "merge", *["x"] * 65]).exit_code == 2
