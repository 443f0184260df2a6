"""``status`` for people: the console's overview without a terminal, and then the tables.

Law of this file: what is asserted is what the command prints.
"""

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbm_console.cli.glance import drawn, fold
from kvbm_console.client.subscription import StreamItem
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, Heartbeat, SnapshotTaken
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
    assert text[0].startswith(" NEEDS YOU   1 caution")
    assert "held" in text[1]
    assert "at breakpoint" in text[1]
    assert [name for name in SECTIONS if any(line.startswith(f" {name}") for line in text)] == list(SECTIONS)


def test_status_has_the_overview_and_the_tables(tmp_path: Path) -> None:
    with serving(tmp_path, "--workload", "multiturn", "--speed", "max") as daemon:
        daemon.until("PrefixScored")
        text = daemon.output("status")
        plain = subprocess.run(
            [PROGRAM, "status"], capture_output=True, cwd=tmp_path, timeout=DEADLINE_S, check=True,
            env={**environment(tmp_path), "PYTHONIOENCODING": "ascii:replace"},
        ).stdout
    for name in SECTIONS:
        assert f"\n {name}" in f"\n{text}"
        assert f"\n {name}".encode() in b"\n" + plain
    assert "\nstream " in text
    assert "HIT RATE" in text
    assert plain.isascii()


class Slow:
    """A daemon that is far ahead of whoever asks it."""

    target = "here"

    def __init__(self, items: list[StreamItem], next_seq: int) -> None:
        self.told, self.next_seq = items, next_seq

    async def hello(self) -> object:
        """Who it is."""
        return SimpleNamespace(target="here", incarnation="one", run=1, block_bytes=None)

    async def digest(self) -> tuple[int, int]:
        """Where it stood when it was asked."""
        return self.next_seq, 0

    @asynccontextmanager
    async def subscribe(self, *, history: bool) -> AsyncIterator[AsyncIterator[StreamItem]]:
        """What it still has."""
        assert history

        async def items() -> AsyncIterator[StreamItem]:
            for item in self.told:
                yield item

        yield items()


@pytest.mark.asyncio
@pytest.mark.parametrize(("head", "now"), [(2_500, "events"), (1_999, "heartbeat")])
async def test_rates_are_those_of_what_was_folded_however_long_that_took(head: int, now: str) -> None:
    tape = Recording.open(RECORDINGS / "screens" / "run.mcap")
    events = [event for batch in tape.events(tape.first_seq) for event in batch][:2_000]
    late_ns = events[-1].at_ns + 60_000_000_000
    beat = Heartbeat(head, late_ns, None, None, None, None, 0, 1)
    early = Heartbeat(head, late_ns, None, None, None, None, 0, 1)
    daemon = Slow([
        SnapshotTaken(tape.state_at(tape.first_seq - 1)), EventsArrived(events[:1_000]), early,
        EventsArrived(events[1_000:]), beat,
    ], 2_000)
    mirror = await fold(daemon)  # type: ignore[arg-type]
    mirror.clock.live = False
    assert mirror.now_ns(0) == (events[-1].at_ns if now == "events" else late_ns)
    assert mirror.next_seq == 2_000
