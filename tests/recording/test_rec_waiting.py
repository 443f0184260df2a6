"""What waits for the writing thread: everything once and in order, in few writes."""

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.recording import writer
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.threads import BATCH_MAX, HURRY_SHARE, Chunks, Item, Key, WriteQueue
from tests.recording.helpers import Disk, Log, recorder_of

BYTES_MAX = 1_000


def flush_of(size: int) -> Chunks:
    return Chunks(None, None, size)


def key_of(size: int) -> Key:
    return Key(0, 0, bytes(size), b"", 0, False)


@given(some.lists(some.one_of(some.integers(0, 50).map(flush_of), some.integers(0, 50).map(key_of),
                              some.builds(threading.Event)), max_size=3 * BATCH_MAX))
def test_what_is_put_is_taken_once_in_order_and_counted_until_it_is_done(items: list[Item]) -> None:
    waiting = WriteQueue(BYTES_MAX, 0.0)
    for item in items:
        waiting.put(item)
    left, taken = waiting.bytes, list[Item]()
    assert left == sum(item.bytes for item in items if isinstance(item, Chunks))
    while len(taken) < len(items):
        some_of_it = waiting.take(None)
        assert 0 < len(some_of_it) <= BATCH_MAX
        assert all(isinstance(item, Chunks) for item in some_of_it[:-1])
        assert waiting.bytes == left
        waiting.done(some_of_it)
        left -= sum(item.bytes for item in some_of_it if isinstance(item, Chunks))
        taken += some_of_it
    assert all(one is other for one, other in zip(taken, items, strict=True))
    assert waiting.bytes == 0


@pytest.mark.parametrize(
    ("item", "ends"),
    [(None, True), (threading.Event(), True), (flush_of(1), False), (key_of(1), False),
     (flush_of(BYTES_MAX // HURRY_SHARE), False), (flush_of(BYTES_MAX // HURRY_SHARE + 1), True)],
)
def test_a_rest_is_ended_by_whoever_waits_and_by_much_that_does(item: Item, ends: bool) -> None:
    waiting = WriteQueue(BYTES_MAX, 3_600.0)
    waiting.put(item)
    assert waiting._hurry.is_set() == ends
    waiting.take(None)
    if ends:
        waiting.done([item])  # returns: the rest is over before it began


def test_flushes_that_come_while_the_thread_rests_are_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WRITE_GAP_S", 3_600.0)
    disk, log = Disk(), Log()
    recorder = recorder_of(log, tmp_path, open_file=disk.open)
    assert recorder.settle()
    before = disk.writes
    flushes = [log.flush(3) for _ in range(BATCH_MAX // 2)]
    for flush in flushes:  # within a switch interval
        recorder.offer(*flush)
    assert recorder.settle()
    assert 1 <= disk.writes - before <= 3, "the first ones may come before the rest begins"
    recorder.close()
    assert Recording.open(tmp_path).last_seq == 3 * len(flushes) - 1
