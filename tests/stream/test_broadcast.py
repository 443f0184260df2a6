"""The flush rule and the wake-ups, on a clock of the test's own."""

import asyncio
from collections.abc import Callable

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core.events import Event, SlotClosed
from kvbm_console.core.ids import Note
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.stream.broadcast import (
    BUSY_STIMULI,
    CREDIT_NS,
    FLUSH_EVENTS_MAX,
    GAP_NS_MAX,
    GAP_NS_MIN,
    GAP_NS_PER_READER,
    Broadcaster,
)
from kvbm_console.stream.ring import Lost, Ring
from kvbm_console.wire.batches import EventChunk, StimulusChunk, unpack_events, unpack_stimuli
from kvbm_console.wire.frames import batch_of

MS = 1_000_000


class Bench:
    """A broadcaster with a clock and timers that the test moves."""

    def __init__(self, ring: Ring | None = None) -> None:
        self.now = 10_000 * MS
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.flushed: list[tuple[StimulusChunk | None, EventChunk | None]] = []
        self.broadcaster = Broadcaster(
            ring or Ring(), lambda: self.now, on_flush=lambda s, e: self.flushed.append((s, e)),
            later=lambda seconds, callback: self.timers.append((seconds, callback)),
        )
        self.n = self.seq = 0

    def publish(self, count: int = 1) -> None:
        """One stimulus with this many events."""
        events: list[Event] = [SlotClosed(self.seq + i, self.n, self.n, 0) for i in range(count)]
        self.broadcaster.publish(NoteReported(self.n, self.n, 0, None, Note.CLOCK_STEPPED, ""), events)
        self.n += 1
        self.seq += count

    def fire(self) -> None:
        """Let the timers come."""
        timers, self.timers = self.timers, []
        for seconds, callback in timers:
            self.now += round(seconds * 1e9)
            callback()


def test_an_event_after_a_pause_is_flushed_at_once() -> None:
    bench = Bench()
    bench.publish()
    assert len(bench.flushed) == 1
    assert bench.timers == []
    bench.now += GAP_NS_MIN
    bench.publish()
    assert len(bench.flushed) == 2


def busy(bench: Bench) -> None:
    """A flush under load, now."""
    bench.publish()
    for _ in range(BUSY_STIMULI):
        bench.publish()
    bench.fire()
    assert not bench.timers


def test_what_comes_within_the_gap_under_load_is_flushed_together_at_its_end() -> None:
    bench = Bench()
    bench.publish()
    for _ in range(10):
        bench.publish(3)
    bench.fire()
    bench.now += GAP_NS_MAX // 4
    for _ in range(10):
        bench.publish(3)
    assert len(bench.flushed) == 2
    ((seconds, _),) = bench.timers
    assert seconds == pytest.approx(0.75 * GAP_NS_MAX / 1e9)
    bench.fire()
    stimuli, events = bench.flushed[2]
    assert stimuli is not None
    assert events is not None
    assert (stimuli.first_n, stimuli.count) == (11, 10)
    assert (events.first_seq, events.count) == (31, 30)
    assert [s.n for s in unpack_stimuli(stimuli.data)] == list(range(11, 21))
    assert [e.seq for e in unpack_events(events.data)] == list(range(31, 61))


def test_within_the_gap_few_events_after_a_pause_wait_for_the_loops_next_turn_alone() -> None:
    bench = Bench()
    bench.publish()
    for _ in range(BUSY_STIMULI):
        bench.publish()
    assert len(bench.flushed) == 1, "a turn of the loop is flushed as one"
    assert [seconds for seconds, _ in bench.timers] == [0.0]
    bench.fire()
    assert [events.count for _, events in bench.flushed if events] == [1, BUSY_STIMULI]


def test_a_thousand_a_second_are_flushed_one_by_one_however_late_timers_come() -> None:
    """A loop's timers come on a grid of its own, and who publishes by them comes directly behind a flush by them."""
    bench = Bench()
    busy(bench)
    bench.publish()
    assert bench.timers
    waited = 0
    for _ in range(1_000):
        bench.now += 1_150_000  # the publisher's timer; one of ours that is due by then comes in the same turn
        timers, bench.timers = bench.timers, []
        for _, callback in timers:
            callback()
        bench.publish()
        if bench.timers and bench.timers[0][0] == 0.0:
            bench.fire()
        waited += bool(bench.timers)
    assert waited <= 3


@given(some.lists(some.tuples(some.integers(0, 2 * GAP_NS_MAX), some.integers(0, 2_000_000)), max_size=60))
def test_flushes_keep_the_gap_on_average_and_nothing_waits_longer_than_it(turns: list[tuple[int, int]]) -> None:
    """However publishing is spread and timers are late: ``turns`` are distance to the last one, lateness of a timer."""
    bench = Bench()
    at, counts = [], 0
    for distance, late in turns:
        bench.now += distance
        bench.publish()
        for seconds, _ in bench.timers:
            assert seconds * 1e9 <= GAP_NS_MAX + 1, "an event waits for a gap at most"
        if bench.timers and distance > late:
            bench.fire()
        at += [bench.now] * (len(bench.flushed) - counts)
        counts = len(bench.flushed)
    for first, begin in enumerate(at):
        for last in range(first, len(at)):
            assert last - first <= 1 + (at[last] - begin + CREDIT_NS) // GAP_NS_MIN, "more than one a gap, on average"


def test_a_full_batch_is_flushed_at_once() -> None:
    bench = Bench()
    bench.publish()
    for _ in range(FLUSH_EVENTS_MAX // 16):
        bench.publish(16)
    assert [events.count for _, events in bench.flushed if events] == [1, FLUSH_EVENTS_MAX]


def test_a_stimulus_without_events_is_offered_too() -> None:
    bench = Bench()
    bench.publish(0)
    stimuli, events = bench.flushed[0]
    assert stimuli is not None
    assert (stimuli.count, events) == (1, None)
    assert bench.broadcaster.ring.next_seq == 0


def test_stimuli_without_events_are_bounded_too_while_a_flush_is_scheduled() -> None:
    bench = Bench()
    bench.publish(0)
    for _ in range(FLUSH_EVENTS_MAX):
        bench.publish(0)
    assert [stimuli.count for stimuli, _ in bench.flushed if stimuli] == [1, FLUSH_EVENTS_MAX]


def test_one_stimulus_with_more_events_than_a_chunk_is_split_for_the_ring_and_whole_for_the_recorder() -> None:
    bench = Bench(Ring(64))
    bench.publish(100)
    assert [e.count for _, e in bench.flushed if e] == [100]
    ring = bench.broadcaster.ring
    assert ring.next_seq == 100
    assert ring.events == 52  # chunks of 16, the oldest ones forgotten
    reader = ring.cursor(0)
    assert ring.read(reader) == Lost(0, 47)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("count", "took_ns", "gap_ns"),
    [(3, 0, GAP_NS_MIN), (1, 2 * MS, 8 * MS), (2, 2 * MS, 16 * MS), (2, 3 * MS, GAP_NS_MAX), (1, 50 * MS, GAP_NS_MAX),
     (3, 2 * MS, 3 * GAP_NS_PER_READER), (10, 2 * MS, 10 * GAP_NS_PER_READER)],
)
async def test_the_gap_follows_what_the_fan_out_costs_and_to_how_many(count: int, took_ns: int, gap_ns: int) -> None:
    bench = Bench()
    readers = [bench.broadcaster.subscribe(0) for _ in range(count)]
    waiting = [asyncio.create_task(reader.wait()) for reader in readers]
    await anyio.wait_all_tasks_blocked()
    bench.publish()
    await asyncio.gather(*waiting)
    bench.now += took_ns
    for reader in readers:
        assert bench.broadcaster.gap_ns == GAP_NS_MIN
        while reader.read() is not None:
            pass
    assert bench.broadcaster.gap_ns == gap_ns


@pytest.mark.asyncio
async def test_a_reader_that_stops_does_not_hold_the_rule_up() -> None:
    bench = Bench()
    quick, stopped = bench.broadcaster.subscribe(0), bench.broadcaster.subscribe(0)
    waiting = [asyncio.create_task(reader.wait()) for reader in (quick, stopped)]
    await anyio.wait_all_tasks_blocked()
    bench.publish()
    await asyncio.gather(*waiting)
    bench.now += 30 * MS
    bench.publish()
    assert bench.broadcaster.gap_ns == GAP_NS_MAX  # as far as is known the first fan-out took at least that
    while quick.read() is not None:
        pass
    task = asyncio.create_task(quick.wait())
    await anyio.wait_all_tasks_blocked()
    bench.now += 30 * MS
    bench.publish()
    await task
    while quick.read() is not None:
        pass
    assert bench.broadcaster.gap_ns == GAP_NS_MIN  # from then on only the quick one counts


@pytest.mark.asyncio
@pytest.mark.parametrize("waiting", [0, 1, 9])
async def test_readers_that_lag_and_take_frames_lengthen_the_gap_as_those_that_wait(waiting: int) -> None:
    """Ten readers of which none waited kept the gap at its least, and took a quarter of an engine's time."""
    bench = Bench()
    readers = [bench.broadcaster.subscribe(0) for _ in range(10)]
    bench.publish()
    for _ in range(3):
        for reader in readers[:waiting]:
            while reader.read() is not None:
                pass
        tasks = [asyncio.create_task(reader.wait()) for reader in readers[:waiting]]
        await anyio.wait_all_tasks_blocked()
        bench.now += 100 * MS
        for reader in readers[waiting:]:
            assert reader.read() is not None
        bench.publish()
        await asyncio.gather(*tasks)
    bench.now += 2 * MS
    for reader in readers[:waiting]:
        while reader.read() is not None:
            pass
    assert bench.broadcaster.gap_ns == 10 * GAP_NS_PER_READER


@pytest.mark.asyncio
@pytest.mark.parametrize(("count", "strain", "gap_ns"), [
    (0, 1.0, GAP_NS_MAX), (1, 1.0, GAP_NS_MAX), (10, 1.0, 10 * GAP_NS_PER_READER), (10, 3.0, 30 * GAP_NS_PER_READER),
])
async def test_under_load_the_gap_is_at_its_bound_which_follows_the_loops_own_time(
    count: int, strain: float, gap_ns: int
) -> None:
    """A loop with a third of a processor paid three times the share of its time for its readers."""
    bench = Bench()
    bench.broadcaster.strain = lambda: strain
    readers = [bench.broadcaster.subscribe(0) for _ in range(count)]
    for _ in range(2):
        waiting = [asyncio.create_task(reader.wait()) for reader in readers]
        await anyio.wait_all_tasks_blocked()
        bench.now += 1_000 * MS
        for _ in range(BUSY_STIMULI + 2):
            bench.publish()
        bench.fire()
        await asyncio.gather(*waiting)
        for reader in readers:
            while reader.read() is not None:
                pass
    bench.publish()
    ((seconds, _),) = bench.timers
    assert seconds == pytest.approx(gap_ns / 1e9)


@pytest.mark.asyncio
async def test_readers_that_take_nothing_do_not_lengthen_the_gap() -> None:
    bench = Bench()
    reader, *_frozen = (bench.broadcaster.subscribe(0) for _ in range(10))
    for _ in range(3):
        waiting = asyncio.create_task(reader.wait())
        await anyio.wait_all_tasks_blocked()
        bench.now += 60 * MS
        bench.publish()
        await waiting
        bench.now += 2 * MS
        while reader.read() is not None:
            pass
    assert bench.broadcaster.gap_ns == 8 * MS


@pytest.mark.asyncio
async def test_the_gap_of_many_readers_ends_when_they_leave() -> None:
    """The gap of 64 readers stayed at a quarter of a second until a later fan-out was measured."""
    bench = Bench()
    readers = [bench.broadcaster.subscribe(0) for _ in range(10)]
    waiting = [asyncio.create_task(reader.wait()) for reader in readers]
    await anyio.wait_all_tasks_blocked()
    bench.publish()
    await asyncio.gather(*waiting)
    bench.now += 60 * MS
    for reader in readers:
        while reader.read() is not None:
            pass
    for left in range(9, -1, -1):
        bench.broadcaster.unsubscribe(readers[left])
        assert bench.broadcaster.gap_ns == max(GAP_NS_MAX, left * GAP_NS_PER_READER)


@pytest.mark.asyncio
async def test_a_waiting_reader_is_woken_by_events_heartbeats_and_the_end() -> None:
    bench = Bench()
    reader = bench.broadcaster.subscribe(0)
    for wake in (bench.publish, bench.broadcaster.beat, bench.broadcaster.close):
        task = asyncio.create_task(reader.wait())
        await anyio.wait_all_tasks_blocked()
        bench.now += GAP_NS_MAX
        wake()
        await task
        item = reader.read()
        assert (item is not None) == (wake == bench.publish)
        if isinstance(item, bytes):
            assert len(unpack_events(batch_of(item))) == 1
        reader.beats = 0
    bench.broadcaster.unsubscribe(reader)
    assert not bench.broadcaster.subscribers
