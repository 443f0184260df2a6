"""The recorder of a running daemon: begin, rotate, end, and a dump of what it still remembers without one."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from kvbm_console.cli.recorder import _dump
from kvbm_console.cli.summary import summary_text
from kvbm_console.client import Client
from kvbm_console.core.errors import RecordingError, Refused, UsageError
from kvbm_console.core.ids import Note
from kvbm_console.core.snapshots import digest
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.recording import writer
from kvbm_console.recording.options import RecordingOptions
from kvbm_console.recording.output import RecordingPath
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from kvbm_console.stream.ring import Ring
from server.daemon import Daemon
from tests.server.daemons import daemon_at, finished, options_for, published, running

WORK = "multiturn:requests=40,seed=5"


@pytest.mark.asyncio
async def test_a_recording_begun_while_the_engine_runs_replays_by_decision(tmp_path: Path) -> None:
    async with daemon_at("multiturn:seed=5", speed=20.0) as daemon, Client(daemon.address) as client:
        await published(daemon, lambda: daemon.service.state.seq > 500)
        assert await client.record_status() is None
        begun = await client.record_start(str(tmp_path / "run"), RecordingOptions(sync="always"))
        assert (begun.state, begun.segment) == ("recording", 1)
        first = begun.written_seq + 1
        assert first > 500
        with pytest.raises(Refused, match=r"a recording is being written to .*; stop it first"):
            await client.record_start(str(tmp_path / "other"))
        await published(daemon, lambda: daemon.service.state.seq > first + 500)
        rotated = await client.record_rotate()
        await published(daemon, lambda: daemon.service.state.seq > first + 1_000)
        status = await client.record_status()
        assert status is not None
        assert (rotated.segment, status.segment) == (2, 2)
        stopped = await client.record_stop()
        assert stopped.state == "closed"
        assert stopped.synced_seq == stopped.written_seq >= first + 1_000
        for ask in (client.record_stop, client.record_rotate):
            with pytest.raises(Refused, match="nothing is being recorded"):
                await ask()
        again = await client.record_start(str(tmp_path / "run"))
        assert again.segment == 3, "another recording of the same run in the same directory"
    report = verify(tmp_path / "run")
    assert report.ok, report.first_difference
    assert report.decisions
    recording = Recording.open(tmp_path / "run")
    assert recording.first_seq == first
    assert recording.finished


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["stop", "end of the daemon"])
async def test_a_path_that_ends_in_mcap_becomes_one_sealed_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "run.mcap"
    async with daemon_at("multiturn:seed=5", speed=20.0) as daemon, Client(daemon.address) as client:
        begun = await client.record_start(str(path), RecordingOptions(segment_ns=10**9))
        await published(daemon, lambda: daemon.service.state.seq > begun.written_seq + 500)
        with pytest.raises(Refused, match=r"run.mcap is one segment: record to a directory to begin others"):
            await client.record_rotate()
        if ending == "stop":
            assert (await client.record_stop()).path == str(path)
            assert path.is_file()
            with pytest.raises(UsageError, match=r"run.mcap exists already; nothing is overwritten"):
                await client.record_start(str(path))
    assert path.is_file()
    assert not path.with_name("run.mcap.parts").exists()
    report = verify(path)
    assert report.ok, report.first_difference
    assert report.decisions


@pytest.mark.asyncio
async def test_the_end_of_a_daemon_names_the_recording_that_runs_then(tmp_path: Path) -> None:
    first, second = tmp_path / "first.mcap", tmp_path / "second.mcap"
    async with daemon_at(WORK, record=first) as daemon, Client(daemon.address) as client:
        assert (await client.record_stop()).path == str(first)
        await client.record_start(str(second))
    assert {file.name for file in (first, second) if file.is_file()} == {"first.mcap", "second.mcap"}
    assert daemon.summary().recorder is not None
    assert daemon.summary().recorder.path == str(second)


@pytest.mark.asyncio
async def test_only_control_may_steer_the_recorder_and_paths_are_checked(tmp_path: Path) -> None:
    async with running(options_for(None, "127.0.0.1:0")) as daemon, Client(daemon.address) as client:
        with pytest.raises(Refused, match="Recording needs the role control"):
            await client.record_start(str(tmp_path / "run"))
    async with daemon_at() as daemon, Client(daemon.address) as client:
        with pytest.raises(UsageError, match="directory must be an absolute path, got 'run'"):
            await client.record_start("run")
        with pytest.raises(UsageError, match="directory has at most 4096 bytes"):
            await client.record_start("/" + "x" * 5_000)
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError, match="cannot record to"):
            await client.record_start(str(tmp_path / "file"))
        assert daemon.service.recorder is None


async def dumped(daemon: Daemon, path: Path, last_ns: int) -> Any:
    """A dump of this daemon."""
    async with Client(daemon.address) as client:
        return await _dump(client, path, last_ns)


@pytest.mark.asyncio
async def test_a_dump_replays_by_state_and_verification_says_that_it_is_no_more(tmp_path: Path) -> None:
    path = tmp_path / "dump.mcap"
    async with daemon_at(WORK, speed=None) as daemon:
        rig = daemon.rig
        assert rig is not None
        await published(daemon, lambda: finished(daemon) == 40)
        state = daemon.service.state
        made = await dumped(daemon, path, 10**15)
        assert (made.first_seq, made.last_seq, made.complete) == (0, state.seq - 1, False), "the ring holds all of it"
        expected = digest(state)
        last = await dumped(daemon, tmp_path / "last.mcap", 10**9)
        assert 0 < last.first_seq < last.last_seq == state.seq - 1
        assert last.last_ns - last.first_ns <= 10**9
        with pytest.raises(UsageError, match="exists already; nothing is overwritten"):
            await dumped(daemon, path, 1)
    for file in (path, tmp_path / "last.mcap"):
        report = verify(file)
        assert report.ok, report.first_difference
        assert (report.decisions, report.stimuli, report.digest) == (False, 0, f"{expected:016x}")


@pytest.mark.asyncio
async def test_a_small_ring_gives_a_shorter_dump_from_its_oldest_base(tmp_path: Path) -> None:
    async with daemon_at(WORK, speed=None, ring=Ring(events_max=400)) as daemon:
        await published(daemon, lambda: finished(daemon) == 40)
        service = daemon.service
        oldest = service.oldest_snapshot()
        assert service.ring.first_seq <= oldest.seq < service.snapshot().seq or oldest.seq == service.snapshot().seq
        made = await dumped(daemon, tmp_path / "dump.mcap", 10**15)
        assert made.first_seq >= oldest.seq
        assert made.last_seq == service.state.seq - 1
    assert verify(tmp_path / "dump.mcap").ok


@pytest.mark.asyncio
async def test_a_daemon_without_events_has_nothing_to_dump(tmp_path: Path) -> None:
    async with daemon_at() as daemon:
        daemon.service.submit(NoteReported, Note.ENGINE_SUMMARY, "one")
        daemon.service._take_base()
        daemon.service._bases.clear()
        with pytest.raises(RecordingError, match="nothing to dump"):
            await dumped(daemon, tmp_path / "dump.mcap", 1)


@pytest.mark.asyncio
async def test_an_end_that_must_come_soon_names_the_segment_that_it_could_not_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.daemon.SEAL_GRACE_S", 0.0)
    for soon in (True, False):
        record = tmp_path / f"{soon}"
        daemon = Daemon(options_for("multiturn", f"unix:{tmp_path}/d.sock", record=record, speed=None))
        ready = asyncio.Event()
        task = asyncio.create_task(daemon.run(lambda _, ready=ready: ready.set()))
        await ready.wait()
        await published(daemon, lambda daemon=daemon: daemon.service.state.seq > 200)
        daemon.stop(soon=soon)
        summary = await task
        assert summary.recorder is not None
        left = ("000001-000000000000.active",) if soon else ()
        assert summary.recorder.unsealed == left
        assert ("1 segment is whole but not sealed: rec index" in summary_text(to_builtins(summary))) == soon
        assert verify(record).ok


@pytest.mark.asyncio
async def test_a_disk_that_hangs_when_the_file_is_named_does_not_keep_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.daemon.SEAL_GRACE_S", 1.0)
    goes_on = threading.Event()

    def hanging(place: RecordingPath) -> None:
        assert goes_on.wait(20)

    monkeypatch.setattr(RecordingPath, "finish", hanging)
    options = options_for("multiturn", f"unix:{tmp_path}/d.sock", record=tmp_path / "run.mcap", speed=None)
    daemon, ready = Daemon(options), asyncio.Event()
    task = asyncio.create_task(daemon.run(lambda _: ready.set()))
    try:
        await ready.wait()
        await published(daemon, lambda: daemon.service.state.seq > 200)
        daemon.stop(soon=True)
        summary = await asyncio.wait_for(task, 10)
    finally:
        goes_on.set()
    assert summary.recorder is not None
    assert summary.recorder.path.endswith(".mcap"), "sealed, and still under its own name"


@pytest.mark.asyncio
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_disk_that_hangs_when_a_recording_begins_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    asked, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hanging(*args: Any) -> Any:
        loop.call_soon_threadsafe(asked.set)
        assert goes_on.wait(20)
        return made(*args)

    made = writer.SegmentWriter
    monkeypatch.setattr(writer, "SegmentWriter", hanging)
    async with daemon_at("multiturn:seed=5", speed=20.0) as daemon, Client(daemon.address) as client:
        starting = asyncio.create_task(client.record_start(str(tmp_path / "run")))
        await asked.wait()
        monkeypatch.setattr(writer, "SegmentWriter", made)
        head = daemon.service.state.seq
        await published(daemon, lambda: daemon.service.state.seq > head + 500)
        if leaves:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await published(daemon, lambda: daemon.service.state.seq > head + 700)
        goes_on.set()
        if not leaves:
            assert (await starting).state == "recording"
        # Verbs wait for each other: this one is answered when the first has ended, whoever waits for that.
        status = await client.record_status()
        assert status is not None
        assert status.not_recorded == 0
        assert (await client.record_stop()).written_seq > head + 500
    report = verify(tmp_path / "run")
    assert (report.ok, report.gaps, report.decisions) == (True, 0, True), report
    assert Recording.open(tmp_path / "run").first_seq <= head


@pytest.mark.asyncio
async def test_a_verb_that_waits_for_the_disk_is_told_so_and_carried_out_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waited ten seconds and said that the daemon did not answer; the recording ended later."""
    monkeypatch.setattr("server.recording.ANSWER_S", 0.2)
    goes_on = threading.Event()
    close = writer.Recorder.close

    def hanging(recorder: writer.Recorder, *args: Any) -> None:
        assert goes_on.wait(20)
        close(recorder, *args)

    monkeypatch.setattr(writer.Recorder, "close", hanging)
    async with daemon_at("multiturn:seed=5", speed=20.0) as daemon, Client(daemon.address) as client:
        await client.record_start(str(tmp_path / "run"))
        try:
            with pytest.raises(Refused, match="the disk has not answered yet: stop is carried out when it does"):
                await client.record_stop()
            with pytest.raises(Refused, match="the disk has not answered yet: status"):
                await client.record_status()
        finally:
            goes_on.set()
        monkeypatch.undo()
        assert await client.record_status() is None
    assert verify(tmp_path / "run").ok
