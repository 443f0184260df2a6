"""Events from a recorder's files: all of them in their order, up to the first hole.

Law of this file: what is expected is read from the recording by its own reader.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvbm_console.recording.reader import Recording
from kvbm_console.wire.batches import unpack_events
from kvbm_console.wire.frames import batch_of
from server.past_events import PastEvents

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


def past_of(path: Path, run: str, state: str = "recording") -> PastEvents:
    status = SimpleNamespace(path=str(path), state=state, written_seq=10**6)
    return PastEvents(cast(Any, SimpleNamespace(recorder=SimpleNamespace(status=lambda: status), incarnation=run)))


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 500, 10**6])
async def test_frames_have_all_events_in_order_up_to_a_hole(size: int, tmp_path: Path) -> None:
    path = Path(shutil.copy(RECORDINGS / "gap.mcap", tmp_path))
    recording = Recording.open(path)
    (hole,) = recording.gaps
    there = [event for events in recording.events(0) for event in events]
    past, found, at = past_of(path, recording.incarnation), list[Any](), 0
    while True:
        frames, behind = await past.frames(at, there[-1].seq, size)
        if not frames:
            break
        found += [event for frame in frames for event in unpack_events(batch_of(frame))]
        assert at < behind
        at = behind
    assert at == hole.first
    assert found == [event for event in there if event.seq < at]
    frames, behind = await past.frames(there[-3].seq, there[-1].seq, size)
    assert [event for frame in frames for event in unpack_events(batch_of(frame))] == there[-3:-1]


@pytest.mark.asyncio
async def test_files_that_are_gone_give_no_frame(tmp_path: Path) -> None:
    assert await past_of(tmp_path / "run.mcap", "a run").frames(5, 9, 100) == ([], 5)
    nobody = PastEvents(cast(Any, SimpleNamespace(recorder=None, incarnation="a run")))
    assert await nobody.frames(5, 9, 100) == ([], 5)
