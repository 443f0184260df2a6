"""Going back ten minutes at 2,000 events a second: a part of ``make bench-tui``, without a wait of ten minutes.

A recorded run goes through a session as a live target sends it. Its times are divided so that 2,000 events fall into a
second, and the session's clock is the time of the last event. The session therefore works as after ten such minutes.
Then it goes back, and the wall's clock runs from the key until the past is drawn.

Law of this file: nothing is kept that a live session would not keep, and every figure is of a first look: the console
returns to live in between.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Final

from kvbm_console.core.config import SECOND_NS
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import BatchArrived, Connected, FeedItem, SnapshotTaken
from kvbm_console.wire.batches import UnreadBatch, pack_events
from kvbm_console.wire.v1 import console_pb2 as pb
from tui.desk import Desk
from tui.source import TargetSession
from tui.views import all_views

RATE: Final = 2_000
BATCH_EVENTS: Final = 50
"""Events that arrive as one: 40 batches a second."""
BACK_S: Final = 600
ROUNDS: Final = 5
SIZE: Final = (160, 50)


class Past:
    """A recorded run as a live feed, at ``RATE`` events a second of ``now_ns``."""

    def __init__(self, tape: Recording) -> None:
        self.tape = tape
        self.scale = (tape.last_seq - tape.first_seq + 1) * SECOND_NS / (RATE * (tape.last_ns - tape.first_ns))
        self.now_ns = 0
        self.unread = True
        self.ended = asyncio.Event()

    def refresh(self) -> None:
        """Facts are never sampled at this rate."""
        raise AssertionError("the console sampled")

    async def items(self) -> AsyncIterator[FeedItem]:
        """The run, then nothing more."""
        tape = self.tape
        yield Connected(tape.name, tape.incarnation, 1, False, tape.block_bytes, config=tape.config)
        yield SnapshotTaken(tape.state_at(tape.first_seq - 1))
        for events in tape.events():
            for event in events:
                event.at_ns = round(event.at_ns * self.scale)
            for first in range(0, len(events), BATCH_EVENTS):
                some = events[first : first + BATCH_EVENTS]
                self.now_ns = some[-1].at_ns
                yield BatchArrived(UnreadBatch(pb.EventBatch.FromString(pack_events(some).data)))
        self.ended.set()
        await asyncio.Event().wait()


async def look_back_figures(path: Path) -> None:
    """The time from a key to the past on the screen, by how far it lies back, and the memory of the past."""
    feed = Past(Recording.open(path))
    session = TargetSession(feed, mono=lambda: feed.now_ns)
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Awaitable[None], name: str) -> None:
        tasks.add(asyncio.ensure_future(work))

    desk = Desk(session.mirror, session, session.mono, all_views())
    session.attach(spawn, desk.tell, lambda: None, lambda text: None, lambda name, table, picture: None)
    spawn(session.run(), "feed")
    await feed.ended.wait()
    reel, mirror = session.reel, session.mirror
    assert reel is not None
    assert mirror.coverage.passed == 0
    kept_s, events = (reel.last_ns - reel.first_ns) / SECOND_NS, reel.last_seq - reel.first_seq + 1
    print(f"past kept: {events:,} events of {kept_s:,.0f} s in {reel.bytes / 2**20:.0f} MiB", flush=True)
    for back_s in (10, 60, BACK_S):
        found, cpu = [], []
        for _ in range(ROUNDS):
            stands = asyncio.Event()

            def show(past: TargetSession, stands: asyncio.Event = stands) -> None:
                desk.show(past)
                stands.set()

            wall, used = time.perf_counter(), time.process_time()
            session.go_back(back_s * SECOND_NS, show)
            await stands.wait()
            desk.draw(*SIZE)
            found.append(time.perf_counter() - wall)
            cpu.append(time.process_time() - used)
            away_s = (mirror.facts.at_ns - desk.mirror.facts.at_ns) / SECOND_NS
            if abs(away_s - back_s) > 1:
                raise AssertionError(f"stands {away_s} s back, not {back_s}")
            desk.to_live()
        wanted = f"  (wanted {1:g} s)" if back_s == BACK_S else ""
        print(f"going back {back_s:>3} s at {RATE:,} events/s: median {statistics.median(found):.2f} s, worst of "
              f"{ROUNDS} {max(found):.2f} s, {statistics.median(cpu):.2f} s of CPU{wanted}", flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
