"""The law of the stream: received + lost = published, under any sizes, slow readers and resumptions."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.core.events import Event, SlotClosed
from kvbm_console.stream.ring import Cursor, Lost, Ring
from kvbm_console.wire.batches import MSGPACK, PROTOBUF, pack_events, unpack_events
from kvbm_console.wire.frames import batch_of

READ, APPEND, RESUME = "read", "append", "resume"


def events(first: int, count: int) -> list[Event]:
    return [SlotClosed(seq, seq * 10, seq, seq % 7) for seq in range(first, first + count)]


def drain(ring: Ring, cursor: Cursor, most: int = 1_000_000) -> tuple[list[int], list[int]]:
    """(received, lost) event numbers of at most ``most`` reads."""
    received: list[int] = []
    lost: list[int] = []
    for _ in range(most):
        item = ring.read(cursor)
        if item is None:
            break
        if isinstance(item, Lost):
            lost.extend(range(item.first, item.last + 1))
        else:
            received.extend(event.seq for event in unpack_events(batch_of(item)))
    return received, lost


@settings(deadline=None)
@given(
    st.integers(1, 64), st.integers(60, 4000),
    st.lists(st.one_of(
        st.tuples(st.just(APPEND), st.integers(1, 20)),
        st.tuples(st.just(READ), st.integers(1, 4)),
        st.tuples(st.just(RESUME), st.integers(0, 30)),
    ), max_size=60),
    st.sampled_from([MSGPACK, PROTOBUF]),
)
def test_received_and_lost_are_exactly_what_was_published(
    events_max: int, bytes_max: int, steps: list[tuple[str, int]], encoding: int
) -> None:
    ring = Ring(events_max, bytes_max)
    cursor = ring.cursor(0, encoding)
    seen: list[int] = []
    for action, amount in steps:
        if action == APPEND:
            ring.append(pack_events(events(ring.next_seq, amount)))
        elif action == READ:
            received, lost = drain(ring, cursor, amount)
            seen.extend(sorted(received + lost))
        else:  # a reconnect that asks again for events it has already had
            position = max(0, cursor.position - amount)
            cursor = ring.cursor(position, encoding)
            seen = seen[:position]
        assert ring.first_seq <= ring.next_seq
        assert len(ring._entries) <= 1 or (ring.events <= events_max and ring.bytes <= bytes_max)
    start = cursor.start
    received, lost = drain(ring, cursor)
    seen.extend(sorted(received + lost))
    assert seen == list(range(ring.next_seq))
    assert cursor.received + cursor.lost == ring.next_seq - start


def test_each_encoding_is_made_once_for_all_readers() -> None:
    ring = Ring()
    ring.append(pack_events(events(0, 10)))
    readers = [ring.cursor(0, encoding) for encoding in (MSGPACK, PROTOBUF) for _ in range(20)]
    frames = {ring.read(reader) for reader in readers}
    assert len(frames) == 2
    assert ring.encodes == {MSGPACK: 1, PROTOBUF: 1}


def test_a_cursor_inside_a_chunk_gets_the_rest_of_it() -> None:
    ring = Ring()
    ring.append(pack_events(events(0, 10)))
    ring.append(pack_events(events(10, 5)))
    assert drain(ring, ring.cursor(7)) == (list(range(7, 15)), [])


def test_skipping_over_a_snapshot_counts_as_lost() -> None:
    ring = Ring(events_max=8)
    for first in range(0, 40, 2):
        ring.append(pack_events(events(first, 2)))
    cursor = ring.cursor(0)
    assert ring.read(cursor) == Lost(0, 31)
    ring.skip_to(cursor, 36)
    assert drain(ring, cursor) == ([36, 37, 38, 39], [])
    assert cursor.received + cursor.lost == 40
