"""``status`` for people: the console's overview without a terminal, and then the tables.

Law of this file: what is asserted is what the command prints.
"""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.lints import Level
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.cli import status
from kvbm_console.cli.output import duration
from kvbm_console.cli.status import drawn, fold, printable
from kvbm_console.client.subscription import StreamItem
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import BatchArrived, EventsArrived, Heartbeat, SnapshotTaken
from kvbm_console.wire.batches import UnreadBatch, pack_events
from kvbm_console.wire.v1 import console_pb2 as pb
from tests.cli.programs import DEADLINE_S, PROGRAM, environment, serving
from tests.tui.script import connected
from tui.model.mirror import Mirror

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
SECTIONS = ("NEEDS YOU", "CACHE", "TIERS", "FLOWS", "SLOTS")


def test_a_hold_is_told_at_once_with_what_happens_next() -> None:
    tape = Recording.open(RECORDINGS / "breakpoint-hold.mcap")
    mirror = Mirror()
    mirror.take(connected(), 0)
    mirror.take(SnapshotTaken(tape.state_at(tape.first_seq)), 0)
    for events in tape.events(tape.first_seq + 1):
        for event in events:
            mirror.take(EventsArrived([event]), 0)
            if mirror.state is not None and mirror.state.holds:
                break
        else:
            continue
        break
    text = drawn(mirror)
    assert text[0].startswith(" NEEDS YOU   1 hold")
    assert "held" in text[1]
    assert "at breakpoint" in text[1]
    assert [name for name in SECTIONS if any(line.startswith(f" {name}") for line in text)] == list(SECTIONS)


def test_status_has_the_overview_and_the_tables(tmp_path: Path) -> None:
    with serving(tmp_path, "--workload", "multiturn", "--speed", "max", "--name", "chat-prod") as daemon:
        daemon.until("PrefixScored")
        text = daemon.output("status")
        document = json.loads(daemon.output("status", "--format", "json"))
        plain = subprocess.run(
            [PROGRAM, "status"], capture_output=True, cwd=tmp_path, timeout=DEADLINE_S, check=True,
            env={**environment(tmp_path), "PYTHONIOENCODING": "ascii:replace"},
        ).stdout
    for name in SECTIONS:
        assert f"\n {name}" in f"\n{text}"
        assert f"\n {name}".encode() in b"\n" + plain
    assert "\nstream    chat-prod  event " in text
    assert document["stream"]["name"] == "chat-prod"
    assert "HIT RATE" in text
    assert plain.isascii(), [line for line in plain.splitlines() if not line.isascii()]


def test_every_part_of_a_status_is_ascii_where_the_output_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [duration(691_000), duration(None), "G1→G2"]
    assert not any(cell.isascii() for cell in cells)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding="ascii"))
    assert printable(cells) == ["691us", "-", "G1>G2"]
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding="utf-8"))
    assert printable(cells) == cells


class Told:
    """A daemon that tells these items, and stood at ``next_seq`` when it was asked."""

    target = "here"

    def __init__(self, next_seq: int, told: list[StreamItem]) -> None:
        self.next_seq, self.told = next_seq, told

    async def hello(self) -> object:
        """Who it is."""
        return SimpleNamespace(target="here", incarnation="one", run=1, block_bytes=None)

    async def digest(self) -> tuple[int, int]:
        """The next event when the daemon was asked."""
        return self.next_seq, 0

    @asynccontextmanager
    async def subscribe(self, *, history: bool) -> AsyncIterator["Stream"]:
        """The items that the daemon remembers, and those of now."""
        assert history
        yield Stream(self.told)


class Stream:
    """Items; those that come while ``unread`` is set are batches of which only the heads are read."""

    def __init__(self, told: list[StreamItem]) -> None:
        self.told, self.unread = told, False

    async def __aiter__(self) -> AsyncIterator[StreamItem]:
        for item in self.told:
            if isinstance(item, EventsArrived) and self.unread:
                yield BatchArrived(UnreadBatch(pb.EventBatch.FromString(pack_events(item.events).data)))
            else:
                yield item


@pytest.mark.asyncio
@pytest.mark.parametrize(("head", "now"), [(2_500, "facts"), (2_299, "heartbeat")])
async def test_of_a_long_past_only_the_end_is_shown_and_nothing_decoded_of_what_comes_meanwhile(
    head: int, now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "PAST", 700)
    monkeypatch.setattr(UnreadBatch, "read", None)
    tape = Recording.open(RECORDINGS / "screens" / "run.mcap")
    events = [event for batch in tape.events(1_000) for event in batch]
    late_ns = events[1_299].at_ns + 60_000_000_000
    beat = Heartbeat(head, late_ns, None, None, None, None, 0, 1)
    early = Heartbeat(1_900, 1, None, None, None, None, 0, 1)
    past, up_to_now, later = (EventsArrived(events[at:to]) for at, to in ((0, 900), (900, 1_300), (1_300, 1_500)))
    daemon = Told(2_200, [early, SnapshotTaken(tape.state_at(999)), early, past, up_to_now, later, beat])
    mirror = await fold(daemon)  # type: ignore[arg-type]
    mirror.clock.live = False
    assert mirror.now_ns(0) == (events[1_299].at_ns if now == "facts" else late_ns)
    assert (mirror.next_seq, mirror.state and mirror.state.seq) == (2_300, 2_300)
    assert (mirror.log_total, sum(mirror.density.counts)) == (700, 700)


@pytest.mark.asyncio
async def test_warnings_are_those_of_doctor_over_all_that_the_daemon_remembers(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "PAST", 700)
    tape = Recording.open(RECORDINGS / "thrash.mcap")
    past = [EventsArrived(events) for events in tape.events(tape.first_seq)]
    beat = Heartbeat(tape.last_seq, past[-1].events[-1].at_ns, None, None, None, None, 0, 1)
    daemon = Told(tape.last_seq + 1, [SnapshotTaken(tape.state_at(tape.first_seq - 1)), *past, beat])
    text = "\n".join(drawn(await fold(daemon)))  # type: ignore[arg-type]
    found = [one for one in diagnose(evidence_of(tape)).findings if one.level <= Level.CAUTION]
    assert found
    assert f" NEEDS YOU   {len(found)} caution" in text
    for finding in found:
        assert finding.what in text
