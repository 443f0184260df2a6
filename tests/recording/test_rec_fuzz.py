"""F22: what reads, cuts, indexes, merges or follows a file survives anything in it: one kind of error, one sentence.

Every case is a whole recording with some bytes exchanged, taken out, doubled or cut off; a case that fails is printed
with its seed. ``KVBM_FULL=1`` tries many more.
"""

import os
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.core import events as ev
from kvbm_console.core.errors import CorruptRecording, KvbmConsoleError
from kvbm_console.core.ids import CandidateStatus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.cut import cut
from kvbm_console.recording.files import SegmentWriter
from kvbm_console.recording.format import Frame
from kvbm_console.recording.info import info_of
from kvbm_console.recording.merge import merge, sources_of
from kvbm_console.recording.playback import Playback
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import needs_index, rebuild_index, recover_directory
from kvbm_console.recording.verify import verify
from kvbm_console.wire.batches import pack_events, unpack_events
from tests.recording.helpers import Log, frames_of, real_run

FULL = bool(os.environ.get("KVBM_FULL"))
CASES = 1_500 if FULL else 60
SECONDS_MAX = 5.0
"""Of processor time for everything that is done with one case of 60 kB; a believed length would take minutes."""
pytestmark = [pytest.mark.fault, pytest.mark.timeout(3_600 if FULL else 120)]


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files that nobody needs: do not wait for the real disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


def damaged(whole: bytes, dice: random.Random) -> bytes:
    """The file with a few places changed."""
    data = bytearray(whole)
    for _ in range(dice.randrange(1, 5)):
        if not data:
            break
        at, size = dice.randrange(len(data)), dice.choice([1, 1, 4, 8, 30, 500])
        what = dice.randrange(6)
        if what == 0:
            data[at : at + size] = dice.randbytes(size)
        elif what == 1:
            data[at] ^= 1 << dice.randrange(8)
        elif what == 2:
            del data[at : at + size]
        elif what == 3:
            data[at:at] = data[at : at + size]
        elif what == 4:
            data[at : at + 8] = dice.choice([b"\xff" * 8, bytes(8), (2**31).to_bytes(8, "little")])
        elif dice.random() < 0.3:
            del data[max(60, at) :]
    return bytes(data)


def altered(frame: Frame, dice: random.Random) -> bytes:
    """The content of a frame with bytes exchanged, or one event of it with another number in some field."""
    if frame.channel != fmt.EVENTS or dice.random() < 0.4:
        return damaged(frame.data, dice)
    events = unpack_events(frame.data)
    at = dice.randrange(len(events))
    event = events[at]
    field = dice.choice(event.__struct_fields__[2:])
    value = getattr(event, field)
    if isinstance(value, bytes):
        value = dice.choice([b"", value[:-4], value * 2, dice.randbytes(8 * dice.randrange(4))])
    elif isinstance(value, int) and not isinstance(value, bool) and type(value) is int:
        value = dice.choice([0, -1, value + 1, 2**31 - 1, 2**62])
    elif isinstance(value, tuple):
        value = dice.choice([(), value[:-1], value * 2])
    elif isinstance(value, str):
        value = dice.choice(["", "other-0", "x" * 300])
    events[at] = msgspec.structs.replace(event, **{field: value})
    return pack_events(events).data


def everything(path: Path, place: Path, dice: random.Random) -> None:
    """All that is done with a recording that somebody sent."""
    recording = Recording.open(path)
    info_of(recording)
    first, last = recording.first_seq, recording.last_seq
    if last > first:
        one, other = sorted((dice.randrange(first, last), dice.randrange(first, last)))
        cut(recording, one, other, place / "cut.mcap")
        verify(place / "cut.mcap")
    playback = Playback(recording, follow=True)
    for seq in (last, (first + last) // 2, first):
        playback.seek(seq)
    playback.step(20)
    playback.refresh()
    diagnose(evidence_of(recording))
    verify(path)
    merge(sources_of([path, path]), place / "merged.mcap")


def folded(path: Path) -> None:
    """Every event is folded where the facts are known."""
    diagnose(evidence_of(Recording.open(path)))


def survives(work: Callable[[], object], told: str) -> bool:
    """Whether it went well; a refusal is one sentence of ours, quickly."""
    began = time.process_time()
    sentence: str | None = None
    try:
        work()
    except KvbmConsoleError as error:
        sentence = str(error)
    except Exception as error:
        raise AssertionError(f"{told}: {type(error).__name__} escaped") from error
    assert time.process_time() - began < SECONDS_MAX, told
    assert sentence is None or (sentence.strip() and "\n" not in sentence), told
    return sentence is None


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A sealed and an active recording of one run, with several keyframes and a gap."""
    found = {}
    for name, seal in (("sealed", True), ("active", False)):
        place = tmp_path_factory.mktemp(name)
        real_run(12).record(place, [13, 40, 3], keyframe_events=150, seal=seal)
        (path,) = [*place.glob("0*.mcap"), *place.glob("0*.active")]
        found[path.suffix] = path.read_bytes()
    return found


@pytest.mark.parametrize("suffix", [".mcap", ".active"])
def test_f22_fuzzed_files_are_read_cut_followed_and_merged_or_refused(
    tmp_path: Path, wholes: dict[str, bytes], suffix: str,
) -> None:
    read = refused = 0
    for seed in range(CASES):
        dice = random.Random(seed)
        place = tmp_path / "case"
        place.mkdir()
        path = place / f"000001-000000000000{suffix}"
        path.write_bytes(damaged(wholes[suffix], dice))
        ok = survives(partial(everything, path, place, dice), f"seed {seed}")
        read, refused = read + ok, refused + (not ok)
        shutil.rmtree(place)
    assert refused > CASES // 10, "the damage is real"


def test_f22_valid_frames_with_anything_in_them(tmp_path: Path, wholes: dict[str, bytes]) -> None:
    """Checks that are right over content that is not: numbers that nobody gave out, columns cut off, other kinds."""
    path = tmp_path / "000001-000000000000.active"
    path.write_bytes(wholes[".active"])
    frames, about = frames_of(path), Recording.open(path).segments[0].about
    refused = 0
    for seed in range(CASES):
        dice = random.Random(seed)
        place = tmp_path / "case"
        place.mkdir()
        segment = SegmentWriter(place, about)
        hit = set(dice.sample(range(1, len(frames)), dice.randrange(1, 4)))
        for number, frame in enumerate(frames):
            data = altered(frame, dice) if number in hit else frame.data
            segment.append(msgspec.structs.replace(frame, data=data))
        segment.file.close()
        work = partial(everything, segment.path, place, dice)
        refused += not survives(work, f"seed {seed}")
        shutil.rmtree(place)
    assert refused > CASES // 4


@pytest.mark.parametrize("suffix", [".mcap", ".active"])
def test_f22_what_is_salvaged_or_indexed_again_reads(tmp_path: Path, wholes: dict[str, bytes], suffix: str) -> None:
    """``rec recover --salvage`` and ``rec index`` on damaged files: what they leave is a recording, or they refuse."""
    mended = 0
    for seed in range(CASES):
        dice = random.Random(seed)
        place = tmp_path / "case"
        place.mkdir()
        path = place / f"000001-000000000000{suffix}"
        path.write_bytes(damaged(wholes[suffix], dice))

        def mend(path: Path = path, place: Path = place) -> None:
            if path.suffix == ".active":
                recover_directory(place, salvage=True)
            elif needs_index(path):
                rebuild_index(path)

        if survives(mend, f"seed {seed}") and list(place.glob("0*1-*.active")) + list(place.glob("0*.mcap")):
            mended += survives(partial(folded, place), f"seed {seed}")
        shutil.rmtree(place)
    assert mended > CASES // 3


def test_f22_a_follower_of_a_file_that_becomes_anything_goes_on_or_stands_still(
    tmp_path: Path, wholes: dict[str, bytes],
) -> None:
    """Its end is written anew again and again: whole frames, torn ones, garbage, fewer bytes than before."""
    whole = wholes[".active"]
    for seed in range(CASES // 2):
        dice = random.Random(seed)
        place = tmp_path / "case"
        place.mkdir()
        path = place / "000001-000000000000.active"
        at = len(whole) // 4
        path.write_bytes(whole[:at])
        playback = Playback(Recording.open(place), follow=True)
        playback.seek(playback.last_seq)
        playback.play()

        def follow(at: int = at, dice: random.Random = dice, path: Path = path, playback: Playback = playback) -> None:
            for _ in range(6):
                at = min(len(whole), at + dice.choice([10, 300, 5_000]))
                tail = whole[:at] if dice.random() < 0.6 else whole[: at - 200] + damaged(whole[at - 200 : at], dice)
                with path.open("r+b") as file:
                    file.write(tail)
                    file.truncate(len(tail) if dice.random() < 0.8 else len(tail) // 2)
                playback.refresh()
                playback.advance(10**10)
                playback.take()

        before = playback.position_seq
        survives(follow, f"seed {seed}")
        assert playback.position_seq >= before, seed
        shutil.rmtree(place)


def written(place: Path, *frames: Frame) -> Path:
    """An active segment of a keyframe of nothing and these frames."""
    log = Log()
    segment = SegmentWriter(place, fmt.About())
    seq, facts, memory = log.keyframe()
    segment.append(Frame(fmt.KEYFRAMES, seq, 0, 0, 0, fmt.encode_item(fmt.Keyframe(seq, True, facts, memory))))
    for frame in frames:
        segment.append(frame)
    segment.file.close()
    return segment.path


def test_f22_a_mark_whose_text_is_no_text_ends_what_counts(tmp_path: Path) -> None:
    data = bytearray(fmt.encode_item(fmt.Gap(0, 4, "a full disk")))
    data[data.index(b"a full disk")] = 0x8F
    recording = Recording.open(written(tmp_path, Frame(fmt.MARKS, 0, 5, 0, 0, bytes(data))))
    assert recording.last_seq == -1
    assert recording.segments[0].torn_bytes > 0


@pytest.mark.parametrize("event", [
    ev.CandidateEnded(0, 0, 0, 38, CandidateStatus.COMPLETED), ev.BlocksReserved(0, 0, 0, 9, 1, b"", b"abc"),
    ev.SlotClosed(0, 0, 0, 7), ev.BlocksReady(0, 0, 0, 3, 1, b"abcd"),
])
def test_f22_an_event_that_names_what_is_not_there_is_damage_for_every_walk(tmp_path: Path, event: ev.Event) -> None:
    """Who looks at an event before it is folded meets it unchecked; what he trips over is the recording's fault."""
    chunk = pack_events([event])
    path = written(tmp_path, Frame(fmt.EVENTS, 0, 1, 0, 0, chunk.data))
    with pytest.raises(CorruptRecording, match="event 0 does not fit the facts"):
        diagnose(evidence_of(Recording.open(path)))
