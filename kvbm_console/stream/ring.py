"""The ring: the last events as encoded chunks, and cursors that read them.

A subscriber is a cursor, not a queue: it costs a few numbers, and a reader that stops costs nothing more. The ring
forgets its oldest chunks when it exceeds its bounds. A cursor that stood there has lost exactly the events between its
position and the oldest event left, and learns of it.

Law of this file: for every cursor, received + lost = last published - start, always (``Cursor.received``, ``.lost``).
"""

from collections import Counter, deque
from typing import Final

import msgspec

from kvbm_console.wire.batches import MSGPACK, EventChunk, pack_events, recoded, unpack_events
from kvbm_console.wire.frames import batch_frame, batch_of

RING_EVENTS_MAX: Final = 262_144
"""About a quarter of a second at a million events a second, some minutes of an ordinary engine."""
RING_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes that a daemon may spend on history. At 40 bytes an event this is above the bound in events."""
CHUNKS_PER_RING: Final = 4
"""A chunk holds at most this part of the ring, so that forgetting a chunk never forgets nearly everything."""


class Lost(msgspec.Struct, frozen=True):
    """Events ``first`` to ``last`` were forgotten before they were read."""

    first: int
    last: int

    @property
    def count(self) -> int:
        """How many."""
        return self.last - self.first + 1


class _Entry:
    """One chunk as the frame that is sent. Other encodings are made when first read, once for all readers."""

    __slots__ = ("bytes", "count", "first_seq", "frame", "others")

    def __init__(self, chunk: EventChunk) -> None:
        self.first_seq = chunk.first_seq
        self.count = chunk.count
        self.frame = batch_frame(chunk.data)
        self.others: dict[int, bytes] | None = None
        self.bytes = len(self.frame)


class Cursor:
    """One reader's position. ``position`` is the number of the next event that it wants."""

    __slots__ = ("_index", "encoding", "lost", "position", "received", "start")

    def __init__(self, position: int, encoding: int, index: int) -> None:
        self.start = position
        self.position = position
        self.encoding = encoding
        self.received = 0
        self.lost = 0
        self._index = index
        """Absolute number of the chunk that holds ``position``; only a hint."""


class Ring:
    """Encoded chunks, contiguous, bounded in events and in bytes; always at least the newest chunk.

    ``first_seq`` to ``next_seq - 1`` are kept. ``forgotten`` counts events that left, ``encodes`` encodings by kind.
    """

    def __init__(self, events_max: int = RING_EVENTS_MAX, bytes_max: int = RING_BYTES_MAX, next_seq: int = 0) -> None:
        self.events_max = events_max
        self.bytes_max = bytes_max
        self.next_seq = next_seq
        self.first_seq = next_seq
        self.bytes = 0
        self.appended_bytes = 0
        """Bytes of all chunks that ever came."""
        self.forgotten = 0
        self.encodes: Counter[int] = Counter()
        self._entries: deque[_Entry] = deque()
        self._base = 0

    @property
    def chunk_events_max(self) -> int:
        """Most events of a chunk in this ring."""
        return max(1, self.events_max // CHUNKS_PER_RING)

    @property
    def events(self) -> int:
        """Events kept."""
        return self.next_seq - self.first_seq

    def append(self, chunk: EventChunk) -> None:
        """Keep a chunk that follows the last chunk, and forget the oldest chunks beyond the bounds."""
        if chunk.first_seq != self.next_seq:
            raise ValueError(f"chunk {chunk.first_seq} does not follow event {self.next_seq - 1}")
        entry = _Entry(chunk)
        self._entries.append(entry)
        self.encodes[MSGPACK] += 1
        self.next_seq += chunk.count
        self.bytes += entry.bytes
        self.appended_bytes += entry.bytes
        self._forget()

    def _forget(self) -> None:
        while len(self._entries) > 1 and (self.events > self.events_max or self.bytes > self.bytes_max):
            gone = self._entries.popleft()
            self._base += 1
            self.bytes -= gone.bytes
            self.forgotten += gone.count
            self.first_seq = self._entries[0].first_seq

    def cursor(self, position: int, encoding: int = MSGPACK) -> Cursor:
        """A reader that starts at ``position``, at most ``next_seq``; an older position starts with a loss."""
        if not 0 <= position <= self.next_seq:
            raise ValueError(f"position must be from 0 to {self.next_seq}, got {position}")
        return Cursor(position, encoding, self._find(position))

    def pending(self, cursor: Cursor) -> bool:
        """True if there is something to read."""
        return cursor.position < self.next_seq

    def read(self, cursor: Cursor) -> bytes | Lost | None:
        """The next frame for this cursor, its loss, or None when it has everything."""
        if cursor.position >= self.next_seq:
            return None
        if cursor.position < self.first_seq:
            lost = Lost(cursor.position, self.first_seq - 1)
            cursor.lost += lost.count
            cursor.position = self.first_seq
            cursor._index = self._base
            return lost
        index = max(cursor._index, self._base)
        entry = self._entries[index - self._base]
        if cursor.position != entry.first_seq:
            return self._read_inside(cursor)
        cursor.position += entry.count
        cursor.received += entry.count
        cursor._index = index + 1
        return self._frame(entry, cursor.encoding)

    def skip_to(self, cursor: Cursor, position: int) -> None:
        """Let a cursor continue at ``position``. The skipped events, which a snapshot replaces, count as lost."""
        if position < cursor.position:
            raise ValueError(f"a cursor does not go back from {cursor.position} to {position}")
        cursor.lost += position - cursor.position
        cursor.position = position
        cursor._index = self._find(position)

    def made_up(self, cursor: Cursor, count: int) -> None:
        """So many events that the cursor lost came to its reader from elsewhere."""
        cursor.lost -= count
        cursor.received += count

    def data_since(self, position: int) -> list[bytes]:
        """The encoded batches from the chunk that holds ``position`` on."""
        return [batch_of(entry.frame) for entry in self._entries if entry.first_seq + entry.count > position]

    def _find(self, position: int) -> int:
        """Absolute number of the chunk that holds ``position``; the next chunk when there is none yet."""
        low, high = 0, len(self._entries)
        while low < high:
            middle = (low + high) // 2
            entry = self._entries[middle]
            if entry.first_seq + entry.count <= position:
                low = middle + 1
            else:
                high = middle
        return self._base + low

    def _read_inside(self, cursor: Cursor) -> bytes:
        """The rest of a chunk for a cursor inside of the chunk: only after a resume, so encoded for it alone."""
        index = self._find(cursor.position)
        entry = self._entries[index - self._base]
        events = [e for e in unpack_events(batch_of(entry.frame)) if e.seq >= cursor.position]
        cursor.position += len(events)
        cursor.received += len(events)
        cursor._index = index + 1
        return batch_frame(pack_events(events, encoding=cursor.encoding).data)

    def _frame(self, entry: _Entry, encoding: int) -> bytes:
        if encoding == MSGPACK:
            return entry.frame
        if entry.others is None:
            entry.others = {}
        frame = entry.others.get(encoding)
        if frame is None:
            self.encodes[encoding] += 1
            frame = entry.others[encoding] = batch_frame(recoded(batch_of(entry.frame), encoding).data)
            entry.bytes += len(frame)
            self.bytes += len(frame)
            self._forget()  # readers of another encoding shorten the history, the bound stays
        return frame
