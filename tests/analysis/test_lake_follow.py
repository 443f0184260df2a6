"""Rows of a recording that is still written: as those of the finished recording, however often their writer is killed.

Law of this file: each row is in the lake once.
"""

import multiprocessing
import os
import random
import shutil
import signal
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pytest

from kvbm_console.analysis import lake
from kvbm_console.analysis.lake_files import add, follow
from kvbm_console.analysis.lake_questions import TABLES
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.core.errors import UsageError
from kvbm_console.parts import RESTART_PAUSE_NS, Parts
from kvbm_console.recording.reader import Recording
from server.daemon import Daemon
from tests.server.daemons import daemon_at, options_for, published

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
RUN = RECORDINGS / "screens" / "run.mcap"
LOAD = "multiturn:requests=40,sessions=6,system=64,turns=3"
CHUNK = 1_500
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload([__name__, "pyarrow.parquet"])


def rows(place: Path) -> dict[str, list[Any]]:
    """Every row of every table, without the names of the files."""
    return {
        table: duckdb.sql(f"select * from '{place}/{table}/*/*/*.parquet' order by all").fetchall() for table in TABLES
    }


def added(path: Path, place: Path, engine: str = "prod-1") -> dict[str, list[Any]]:
    recording = Recording.open(path)
    add(evidence_of(recording), place, engine, recording.incarnation, recording.clock_anchor_ns)
    return rows(place)


def write(path: Path, place: Path) -> None:
    """The writer that is killed: it writes all it has each time it looks."""
    lake.CHUNK_EVENTS = CHUNK  # type: ignore[misc]
    looks = count()
    follow(Recording.open(path), place, "prod-1", lambda seconds: next(looks) > 0, write_s=0.0)


def kill_often(kills: int, seed: int, path: Path, place: Path, expected: dict[str, list[Any]]) -> None:
    """Kill so many writers, each at a random moment, then let one finish.

    A writer that finished before its moment leaves every row once, and the next ones begin a new lake.
    """
    chance, longest_s = random.Random(seed), 0.5
    while kills:
        writer = SPAWN.Process(target=write, args=(path, place))
        writer.start()
        writer.join(chance.uniform(0, longest_s))
        if writer.is_alive():
            os.kill(writer.pid or 0, signal.SIGKILL)
            kills -= 1
            longest_s *= 1.1
        else:
            assert rows(place) == expected
            shutil.rmtree(place)
            longest_s *= 0.7
        writer.join()
    write(path, place)


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.fault
def test_each_row_is_there_once_however_often_writers_are_killed(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake, "CHUNK_EVENTS", CHUNK)
    expected = added(RUN, tmp_path / "whole")
    assert all(expected.values())
    kill_often(kills, 1, RUN, tmp_path / "killed", expected)
    assert rows(tmp_path / "killed") == expected
    for draft in (tmp_path / "killed").rglob("*.tmp"):
        draft.unlink()  # of a killed writer; no question reads them
    assert added(RUN, tmp_path / "killed") == expected


def test_what_is_complete_stays_when_the_oldest_segments_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from kvbm_console.cli.main import cli

    monkeypatch.setattr(lake, "CHUNK_EVENTS", CHUNK)
    expected = added(RUN, tmp_path / "lake")
    recording = Recording.open(RUN)
    late = tmp_path / "late.mcap"
    cut = ["rec", "cut", str(RUN), str(late), "--from", str(recording.first_seq + 2 * CHUNK + 100)]
    done = CliRunner().invoke(cli, cut, prog_name="kvbm-console")
    assert done.exit_code == 0, done.output
    assert Recording.open(late).first_seq > CHUNK
    assert added(late, tmp_path / "lake") == expected


@pytest.mark.asyncio
async def test_a_daemon_fills_the_lake_while_it_runs_and_after_its_writer_was_killed(tmp_path: Path) -> None:
    def writer(daemon: Daemon) -> int:
        assert daemon.lake is not None
        return 0 if daemon.lake._child is None else daemon.lake._child.pid

    record, place = tmp_path / "rec", tmp_path / "lake"
    async with daemon_at(LOAD, speed=None, record=record, lake=place, target="prod-1") as daemon:
        while not (first := writer(daemon)):
            await daemon.service.changed.wait()
        os.kill(first, signal.SIGKILL)
        await published(daemon, lambda: sum(daemon.service.state.totals.finished) == 40)
        while writer(daemon) == first:
            await daemon.service.changed.wait()
        assert any("lake ended and was restarted" in text for text in daemon.service.parts.warnings())
    assert rows(place) == added(record, tmp_path / "again")
    assert rows(place)["lookups"]


@pytest.mark.asyncio
async def test_a_writer_that_waits_for_its_restart_still_adds_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Parts, "_pause_ns", lambda *_: RESTART_PAUSE_NS)
    record, place = tmp_path / "rec", tmp_path / "lake"
    async with daemon_at(LOAD, speed=None, record=record, lake=place, target="prod-1") as daemon:
        assert daemon.lake is not None
        while daemon.lake._child is None:
            await daemon.service.changed.wait()
        daemon.lake._child.kill()
        while daemon.service.parts.is_healthy("lake"):
            await daemon.service.changed.wait()
        await published(daemon, lambda: sum(daemon.service.state.totals.finished) == 40)
    assert rows(place) == added(record, tmp_path / "again")


@pytest.mark.asyncio
async def test_a_daemon_that_begins_again_adds_its_rows_beside_the_old_ones(tmp_path: Path) -> None:
    record, place, count = tmp_path / "rec", tmp_path / "lake", []
    for _ in range(2):
        async with daemon_at(LOAD, speed=None, record=record, lake=place, target="prod-1") as daemon:
            await published(daemon, lambda: sum(daemon.service.state.totals.finished) == 40)
        count.append(len(rows(place)["requests"]))
    assert count == [40, 80]
    for run in Recording.open(record).runs:
        recording = Recording.open(record, run)
        add(evidence_of(recording), tmp_path / "again", "prod-1", run, recording.clock_anchor_ns)
    assert rows(place) == rows(tmp_path / "again")


def test_a_lake_needs_a_recording_in_a_directory(tmp_path: Path) -> None:
    for record in (None, tmp_path / "x.mcap"):
        with pytest.raises(UsageError, match="lake must be given with --record DIR, a directory"):
            options_for(LOAD, "unix:/x", lake=tmp_path, record=record)
