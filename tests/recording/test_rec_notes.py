"""Both ends of a recorder's loss are events of the stream, with the reason and the exact count (F5)."""

import errno
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Note
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from kvbm_console.recording.writer import Recorder
from kvbm_console.service import LeaderService
from kvbm_console.wire.batches import unpack_events
from tests.recording.helpers import Disk

pytestmark = pytest.mark.fault


def recorded(service: LeaderService, directory: Path, disk: Disk) -> Recorder:
    recorder = Recorder(
        directory, config=service.config, incarnation=service.incarnation, keyframe=service.keyframe,
        open_file=disk.open, sync_interval_s=0.01,
    )
    service.recorder = recorder
    return recorder


def notes_of(service: LeaderService) -> list[ev.Noted]:
    service.broadcaster.flush()
    events = [event for data in service.ring.data_since(0) for event in unpack_events(data)]
    # A loaded machine blocks the loop, and that is noted too.
    return [event for event in events if isinstance(event, ev.Noted) and event.note is not Note.LOOP_BLOCKED]


async def until(service: LeaderService, note: Note) -> ev.Noted:
    """Wait for the next note of this kind; only what the service itself submits wakes this."""
    while not (notes := notes_of(service)) or notes[-1].note is not note:
        await service.changed.wait()
    return notes[-1]


def arrive(service: LeaderService, names: range) -> None:
    for name in names:
        service.dispatcher.submit_from(1, None, st.RequestArrived, f"r{name}", pack_hashes([name + 1]), 20, 1, 0, None)
    service.broadcaster.flush()


def full(disk: Disk) -> None:
    disk.free = 100


def broken(disk: Disk) -> None:
    disk.write_error = errno.EIO


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fault", "reason"), [(full, "No space left on device"), (broken, "Input/output error")],
)
async def test_a_loss_is_told_when_it_begins_and_with_its_count_when_it_ends(
    tmp_path: Path, fault: Callable[[Disk], None], reason: str,
) -> None:
    """Nothing is published between the disk's recovery and the second note: the recorder resumes by itself."""
    service, disk = LeaderService(LeaderConfig(), lambda: 0), Disk()
    recorder = recorded(service, tmp_path, disk)
    service.start()
    async with anyio.create_task_group() as group:
        await group.start(service.run)
        arrive(service, range(5))
        assert recorder.settle()
        before = service.state.seq
        fault(disk)
        arrive(service, range(5, 40))
        degraded = await until(service, Note.RECORDER_DEGRADED)
        assert degraded.detail == reason
        arrive(service, range(40, 60))
        lost = service.state.seq - before
        disk.free = disk.write_error = None
        resumed = await until(service, Note.RECORDER_RESUMED)
        arrive(service, range(60, 70))
        assert recorder.settle()
        group.cancel_scope.cancel()
    service.close()
    recorder.close()
    assert [note.note for note in notes_of(service)] == [Note.RECORDER_DEGRADED, Note.RECORDER_RESUMED]
    assert resumed.detail == f"recording again; {lost:,} events were not recorded"
    recording = Recording.open(tmp_path)
    assert sum(gap.count for gap in recording.gaps) == recorder.status().not_recorded == lost
    kept = [event for batch in recording.events() for event in batch if isinstance(event, ev.Noted)]
    assert kept == [resumed], "the first note is part of what was lost, the second stands behind it"
    assert verify(tmp_path).first_difference is None
    found = diagnose(evidence_of(recording)).findings
    assert any(one.lint == "recorder" and one.because == resumed.detail for one in found)


@pytest.mark.asyncio
async def test_a_disk_that_cannot_sync_is_told_and_loses_nothing(tmp_path: Path) -> None:
    service, disk = LeaderService(LeaderConfig(), lambda: 0), Disk()
    recorder = recorded(service, tmp_path, disk)
    service.start()
    async with anyio.create_task_group() as group:
        await group.start(service.run)
        disk.sync_error = errno.EIO
        arrive(service, range(5))
        degraded = await until(service, Note.RECORDER_DEGRADED)
        assert degraded.detail == "Input/output error"
        disk.sync_error = None
        resumed = await until(service, Note.RECORDER_RESUMED)
        group.cancel_scope.cancel()
    service.close()
    recorder.close()
    assert resumed.detail == "recording again; 0 events were not recorded"
    recording = Recording.open(tmp_path)
    assert not recording.gaps
    kept = [event for batch in recording.events() for event in batch if isinstance(event, ev.Noted)]
    assert kept == [degraded, resumed]


@pytest.mark.asyncio
async def test_a_recording_that_is_stopped_while_it_loses_is_told_with_its_count(tmp_path: Path) -> None:
    service, disk = LeaderService(LeaderConfig(), lambda: 0), Disk()
    recorder = recorded(service, tmp_path, disk)
    service.start()
    async with anyio.create_task_group() as group:
        await group.start(service.run)
        disk.free = 0
        arrive(service, range(5))
        await until(service, Note.RECORDER_DEGRADED)
        service.broadcaster.flush()
        service.recorder = None
        recorder.close()
        lost = recorder.status().not_recorded
        resumed = await until(service, Note.RECORDER_RESUMED)
        group.cancel_scope.cancel()
    assert lost == resumed.seq, "everything before this note"
    assert resumed.detail == f"stopped; {lost:,} events were not recorded"
