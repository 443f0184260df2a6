"""The reel: what this console keeps of a live target, so that it can look back without asking anyone.

The events are kept as the bytes that came, and now and then the facts and the spine of the history with them. A reel
is a tape (``stream.tape``): the transport of a recording moves along it, and every view draws it as a recording. A view
that was paused catches up from it.

    | facts, spine | events events events | facts, spine | events events ...   <- add, look
      ^ first_seq: the oldest group goes when the bytes are too many

Pieces are compressed for at most 1 / ``PACK_SHARE`` of the time, the newest first. In a flood most stay as they came,
so that the console costs less and its past is shorter.

Law of this file: the memory is bounded by ``bytes_max``. A group begins with facts and has no hole behind them; missing
events are a gap between two groups.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import zstandard

from kvbm_console.core.columns import SparseBytes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import FoldError, RecordingError
from kvbm_console.core.events import Event
from kvbm_console.core.snapshots import decode_facts, sparse_facts
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import BatchArrived, Connected, EventsArrived, FeedItem, GapSeen, SnapshotTaken
from kvbm_console.wire.batches import pack_events, unpack_events

from .mirror import Mirror
from .spine import EVERY_EVENTS, spine_of

REEL_BYTES_MAX: Final = 64 * 1024 * 1024
"""Memory for looking back: a quarter of the console's. About 12 minutes at 2,000 events a second."""
PIECE_BYTES: Final = 256 * 1024
"""Bytes of events that are compressed together: 29 bytes an event are left of 100, and 40 with a quarter of it."""
LEVEL: Final = 1
"""Of zstd: half the time of level 3, for a thirtieth more bytes."""
PACK_SHARE: Final = 200
"""After a piece was compressed, this many times the time that it took goes by: all of them up to 35,000 events a
second."""
COST_SHARE: Final = 200
"""Facts and spine are kept only after this many times the time that keeping the last ones took."""
NOT_DELIVERED: Final = "not delivered"
"""Reason of a gap for which the target gave none."""

_lists: Final = msgspec.msgpack.Decoder(list[bytes])
_compress: Final = zstandard.ZstdCompressor(LEVEL).compress


class _Piece(msgspec.Struct):
    """Events ``first_seq`` to ``end_seq - 1``, as the batches that came, or these compressed."""

    first_seq: int
    end_seq: int
    first_ns: int
    last_ns: int
    data: list[bytes] | bytes
    size: int

    def pack(self) -> int:
        """Compress it; returns the number of bytes that it takes less."""
        before = self.size
        if isinstance(self.data, list):
            self.data = _compress(msgspec.msgpack.encode(self.data))
            self.size = len(self.data)
        return before - self.size

    def events(self) -> Iterator[list[Event]]:
        """The events, as they came."""
        data = self.data
        for batch in data if isinstance(data, list) else _lists.decode(zstandard.decompress(data)):
            yield unpack_events(batch)


class _Group(msgspec.Struct):
    """The facts and the spine before event ``seq``, and the events behind them."""

    seq: int
    at_ns: int
    facts: bytes
    spine: bytes
    key_bytes: int
    pieces: list[_Piece] = []
    bytes: int = 0


class Reel:
    """One target's past, as a tape that grows. An ``eager`` reel keeps facts and compresses whatever that costs."""

    def __init__(self, bytes_max: int = REEL_BYTES_MAX, *, eager: bool = False) -> None:
        self.bytes_max = bytes_max
        self._eager = eager
        self.connected: Connected | None = None
        self._clear()

    def _clear(self) -> None:
        self.bytes = 0
        self.gaps: list[GapSeen] = []
        self._groups: list[_Group] = []
        self._loose: deque[tuple[_Group, _Piece]] = deque()
        """Pieces that wait to be compressed, the newest last."""
        self.next_seq = 0
        self.last_ns = 0
        self._due = True
        """True if events are not kept until there are facts."""
        self._rest_ns = self._pack_ns = 0
        """Local times before which no facts are kept, and nothing is compressed."""
        self._since_bytes = 0
        """Bytes that came since facts were kept."""
        self._told = (-1, -1)
        self._reason = NOT_DELIVERED

    # --- taking ------------------------------------------------------------------------------------------------------

    def add(self, item: FeedItem, clock: Callable[[], int]) -> None:
        """Keep an item before it is folded."""
        match item:
            case Connected():
                if self.connected is None or self.connected.incarnation != item.incarnation:
                    self._clear()
                self.connected = item
            case SnapshotTaken(state):
                self._snapshot(state)
            case GapSeen():
                self._reason = item.reason
            case BatchArrived(batch):
                self._append(batch.first_seq, batch.count, batch.base_ns, batch.last_ns, batch.data)
            case EventsArrived(events) if events and not self._due:
                chunk = pack_events(events)
                self._append(chunk.first_seq, chunk.count, chunk.base_ns, chunk.last_ns, chunk.data)
        self._pack(clock)

    def _snapshot(self, state: CacheState) -> None:
        if not self._groups or state.seq == self.next_seq:
            return
        if state.seq < self.next_seq:
            self._clear()
            return
        self.gaps.append(GapSeen(self.next_seq, state.seq - 1, self._reason))
        self._reason, self._due = NOT_DELIVERED, True

    def _append(self, first_seq: int, count: int, first_ns: int, last_ns: int, data: bytes) -> None:
        if self._due or first_seq != self.next_seq:
            return
        group = self._groups[-1]
        piece = group.pieces[-1] if group.pieces else None
        if piece is None or not isinstance(piece.data, list) or piece.size >= PIECE_BYTES:
            piece = _Piece(first_seq, first_seq, first_ns, last_ns, [], 0)
            group.pieces.append(piece)
        assert isinstance(piece.data, list)
        piece.data.append(data)
        piece.size += len(data)
        group.bytes += len(data)
        self.bytes += len(data)
        self._since_bytes += len(data)
        piece.end_seq = self.next_seq = first_seq + count
        piece.last_ns = self.last_ns = last_ns
        if piece.size >= PIECE_BYTES:
            self._loose.append((group, piece))
        self._forget()

    def _pack(self, clock: Callable[[], int]) -> None:
        """Compress the newest piece that is full, if there is time."""
        if self._loose and clock() >= self._pack_ns:
            began = time.thread_time_ns()
            group, piece = self._loose.pop()
            saved = piece.pack()
            group.bytes -= saved
            self.bytes -= saved
            self._pack_ns = clock() + (not self._eager) * PACK_SHARE * (time.thread_time_ns() - began)

    def _forget(self) -> None:
        """Keep to the bound: the oldest groups go."""
        while self.bytes > self.bytes_max and len(self._groups) > 1:
            oldest = self._groups.pop(0)
            self.bytes -= oldest.bytes
            while self._loose and self._loose[0][0] is oldest:
                self._loose.popleft()
            self.gaps = [gap for gap in self.gaps if gap.last >= self._groups[0].seq]
        if self.bytes > self.bytes_max:
            self._clear()  # a flood for which there were no facts: it begins anew with the next facts

    def look(self, mirror: Mirror, clock: Callable[[], int]) -> None:
        """Keep facts and spine when they are due; the mirror has folded everything that was added."""
        state = mirror.state
        if mirror.broken is not None:
            self._clear()  # an event that does not fit would not fit later either
        if state is None or mirror.broken is not None or mirror.sampled:
            return
        if not self._due and not self._rested(state, clock):
            return
        last = self._groups[-1].pieces[-1:] if self._groups else []
        self._loose += [(self._groups[-1], piece) for piece in last if piece.size < PIECE_BYTES]
        began = time.thread_time_ns()
        facts, spine = zstandard.compress(sparse_facts(state), 1), spine_of(mirror)
        self._rest_ns = clock() + (not self._eager) * COST_SHARE * (time.thread_time_ns() - began)
        size = len(facts) + len(spine)
        self._groups.append(_Group(state.seq, state.at_ns, facts, spine, size, [], size))
        self.bytes += size
        self.next_seq, self.last_ns, self._due, self._since_bytes = state.seq, state.at_ns, False, 0
        self._forget()

    def _rested(self, state: CacheState, clock: Callable[[], int]) -> bool:
        """True if enough events, bytes and time lie behind the last facts."""
        return (
            state.seq == self.next_seq and self.next_seq - self._groups[-1].seq >= EVERY_EVENTS
            and self._since_bytes >= 2 * self._groups[-1].key_bytes
            and (clock() >= self._rest_ns or 4 * self._since_bytes > self.bytes_max)
        )

    # --- the tape ----------------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """True if there is something to look back at."""
        return bool(self._groups) and self.next_seq > self._groups[0].seq

    @property
    def path(self) -> Path:
        """A name for errors."""
        return Path("the past that this console keeps")

    @property
    def name(self) -> str:
        """The name of the target."""
        return self.connected.target if self.connected is not None else ""

    @property
    def incarnation(self) -> str:
        """The run of the target."""
        return self.connected.incarnation if self.connected is not None else ""

    @property
    def runs(self) -> Sequence[str]:
        """The run alone."""
        return [self.incarnation]

    @property
    def config(self) -> LeaderConfig | None:
        """The leader's configuration."""
        return self.connected.config if self.connected is not None else None

    @property
    def clock_anchor_ns(self) -> int | None:
        """The wall clock at the engine's time 0."""
        return self.connected.clock_anchor_ns if self.connected is not None else None

    @property
    def block_bytes(self) -> int | None:
        """Bytes of one block."""
        return self.connected.block_bytes if self.connected is not None else None

    @property
    def first_seq(self) -> int:
        """The first event behind the oldest facts."""
        return self._groups[0].seq if self._groups else self.next_seq

    @property
    def last_seq(self) -> int:
        """The newest event."""
        return self.next_seq - 1

    @property
    def kept_events(self) -> int:
        """Events from the first to the newest without those that were lost between them."""
        return sum(piece.end_seq - piece.first_seq for piece in self._pieces())

    @property
    def first_ns(self) -> int:
        """The time of the oldest facts."""
        return self._groups[0].at_ns if self._groups else 0

    def follows(self, seq: int) -> bool:
        """True if event ``seq`` is kept, or is the next one to come."""
        inside = self.first_seq <= seq <= self.next_seq and bool(self._groups) and not self._due
        return inside and not any(gap.last >= seq for gap in self.gaps)

    def refresh(self) -> bool:
        """True if events came or went since the last call."""
        told, self._told = self._told, (self.first_seq, self.last_seq)
        return told != self._told

    def _pieces(self, first_seq: int = 0) -> Iterator[_Piece]:
        """All pieces from the piece with ``first_seq`` on."""
        start = max(0, self._group_before(first_seq))
        pieces = [piece for group in self._groups[start:] for piece in group.pieces]
        yield from (piece for piece in pieces if piece.end_seq > first_seq)

    def _group_before(self, seq: int) -> int:
        return bisect_right(self._groups, seq, key=lambda group: group.seq) - 1

    def seq_at(self, at_ns: int) -> int:
        """The last event not later than ``at_ns``."""
        found = self.first_seq - 1
        for piece in self._pieces(self._seq_near(at_ns)):
            if piece.last_ns <= at_ns:
                found = piece.end_seq - 1
                continue
            if piece.first_ns <= at_ns:
                early = [event.seq for events in piece.events() for event in events if event.at_ns <= at_ns]
                found = early[-1] if early else found
            break
        return found

    def _seq_near(self, at_ns: int) -> int:
        """The number of the first event of the group of this time."""
        index = bisect_right(self._groups, at_ns, key=lambda group: group.at_ns) - 1
        return self._groups[index].seq if index >= 0 else 0

    def density(self, cells: int) -> list[int]:
        """Events in each of ``cells`` equal parts of the time, those of a piece evenly over its own time."""
        counts = [0] * cells
        begin, span = self.first_ns, max(1, self.last_ns - self.first_ns + 1)
        for piece in self._pieces() if cells else ():
            low, high = (
                min(cells - 1, max(0, (at_ns - begin) * cells // span)) for at_ns in (piece.first_ns, piece.last_ns))
            events, over = piece.end_seq - piece.first_seq, max(1, high - low + 1)  # a clock may step back
            for part in range(over):
                counts[low + part] += (part + 1) * events // over - part * events // over
        return counts

    def events(self, first_seq: int | None = None) -> Iterator[list[Event]]:
        """Events from ``first_seq`` on, by default all."""
        first_seq = self.first_seq if first_seq is None else first_seq
        for piece in self._pieces(first_seq):
            for events in piece.events():
                if events[-1].seq >= first_seq:
                    yield events[max(0, first_seq - events[0].seq) :]

    def spine_before(self, seq: int) -> tuple[int, bytes] | None:
        """The spine kept with the facts in front of event ``seq``."""
        index = self._group_before(seq)
        return (self._groups[index].seq, self._groups[index].spine) if index >= 0 else None

    def keyframe_before(self, seq: int) -> int | None:
        """The event that the last facts not behind event ``seq`` precede."""
        index = self._group_before(seq)
        return self._groups[index].seq if index >= 0 else None

    def next_keyframe(self, seq: int) -> int | None:
        """The first event at or behind ``seq`` that kept facts precede."""
        return next((group.seq for group in self._groups if group.seq >= seq), None)

    def state_at(self, seq: int, visit: Callable[[CacheState], None] | None = None) -> CacheState:
        """The facts after event ``seq``."""
        index = self._group_before(seq + 1)
        if index < 0 or seq > self.last_seq:
            raise RecordingError(f"this console keeps events {self.first_seq} to {self.last_seq}, not {seq}")
        packed = self._groups[index].facts
        facts = SparseBytes(zstandard.frame_content_size(packed))
        zstandard.ZstdDecompressor().stream_writer(facts).write(packed)  # type: ignore[arg-type]  # it writes and no more
        return self.advance(decode_facts(facts.view), seq, visit)

    def advance(self, state: CacheState, seq: int, visit: Callable[[CacheState], None] | None = None) -> CacheState:
        """Fold ``state`` forward to event ``seq``."""
        for events in self.events(state.seq) if state.seq <= seq else ():
            if events[0].seq != state.seq:
                break
            try:
                for event in events if events[-1].seq <= seq else events[: seq + 1 - events[0].seq]:
                    state.apply(event)
            except FoldError as error:
                raise RecordingError(f"event {state.seq} does not fit: {error}") from None
            if visit is not None:
                visit(state)
            if state.seq > seq:
                break
        if state.seq != seq + 1:
            raise RecordingError(f"the facts at event {seq} are unknown: it lies in a gap, or behind one")
        return state

