"""The records of one rank: copies, the contents that stores took, and the last writer of each place.

Contents are keyed by (hash, rank, group). A store replaces the content of its hash: the engine may compute a block
twice, and the second result may be rounded differently.

Law of this file: every table is bounded. A forgotten content is not checked; it is never called wrong.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvbm_console.sanitize.fingerprint import Array, Values, join

CONTENTS_MAX: Final = 65_536
"""Contents that are kept: eight bytes for each layer and some hundred bytes beside them."""
RECENT_MAX: Final = 1_024
"""Copies that are kept after their end, so that a late write is still known."""
FLYING_MAX: Final = 16_384
"""Copies in flight; beyond this the oldest copy counts as lost."""
Pair = tuple[int, int, int]
"""(device place, host slot, group) of one block of a copy."""


@dataclass(slots=True)
class Orders:
    """The scheduler's knowledge for one step, which a worker lacks. It travels with the connector's metadata."""

    step: int = 0
    blocks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Each ordered copy to its sampled blocks: (index among its blocks, content hash)."""
    known: dict[tuple[int, int], int] = field(default_factory=dict)
    """Each sampled (hash, group) that a load brings, to the last store that was ordered for the hash."""
    given: list[tuple[int, str]] = field(default_factory=list)
    """(place, request): places that a store still reads, and that a request got in this step."""
    flush: list[int] = field(default_factory=list)
    """Copies that must end before this step."""


@dataclass(slots=True)
class Copy:
    """A store or a load of one rank."""

    number: int
    store: bool
    request: str
    step: int
    pairs: list[Pair]
    sampled: list[tuple[int, int]] = field(default_factory=list)
    """(index into ``pairs``, content hash)"""
    taken: list[tuple[list[int], Values]] = field(default_factory=list)
    """For a store, rows of ``sampled`` with the fingerprints of their places at the order."""
    submitted: int = 0
    """The moment of the order to copy; 0 before the order."""
    ended: int = 0
    """The moment at which the end was reported; 0 before that report."""
    flushed: bool = False
    """True if a step had to wait for the copy."""
    handed: bool = False
    """For a load, true if the model may read its blocks."""
    wanted: dict[tuple[int, int], int] = field(default_factory=dict)
    """For a load, ``Orders.known`` of its step."""
    given: dict[int, tuple[int, str]] = field(default_factory=dict)
    """For a store, source places that another request got before the copy's end, to (step, request)."""

    def __str__(self) -> str:
        return f"{'store' if self.store else 'load'} {self.number}"

    @property
    def text(self) -> str:
        """The copy's name with its request's name."""
        return f"{self} of request {self.request}" if self.request else str(self)


@dataclass(slots=True)
class Content:
    """A block with the bytes that a store took."""

    hash: int
    group: int
    parts: Array
    """Fingerprint of each layer."""
    copy: Copy
    place: int
    slot: int

    @property
    def whole(self) -> int:
        """A single fingerprint of all layers."""
        return int(join(self.parts[None])[0])


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A difference of bytes with its cause, as the daemon and the screens show it."""

    kind: str
    """A key of ``verdict.KINDS``."""
    stage: str
    """``copy``: at the end of a store. ``load``: when a load handed the block to the model."""
    request: str
    rank: int
    group: int
    hash: int
    place: int
    slot: int
    copy: int
    """The number of the store or load."""
    writer: str
    edge: str
    """The missing order between two operations."""
    taken: str
    """The store whose bytes should lie there."""
    sentence: str


class CopyLedger:
    """The copies, contents and writers of one rank."""

    def __init__(self, rank: int = 0, contents_max: int = CONTENTS_MAX) -> None:
        self.rank = rank
        self.contents_max = contents_max
        self.contents: OrderedDict[tuple[int, int, int], Content] = OrderedDict()
        self.by_whole: dict[int, Content] = {}
        self.flying: dict[int, Copy] = {}
        self.recent: deque[Copy] = deque(maxlen=RECENT_MAX)
        self.slot_store: dict[int, Copy] = {}
        """Host slot to the last store that was ordered into the slot."""
        self.slot_content: dict[int, Content] = {}
        """Host slot to the last sampled content that was found correct there."""
        self.place_load: dict[int, Copy] = {}
        """Device place to the last load that was ordered into the place."""
        self.bad: dict[int, Mismatch] = {}
        """Host slot to the finding at the end of its last store."""
        self.moment = 0

    def content(self, key: int, group: int) -> Content | None:
        """The content that a store took under this hash."""
        return self.contents.get((key, self.rank, group))

    def keep(self, content: Content) -> None:
        """Keep a content that a store took, and forget the oldest beyond the limit."""
        key = content.hash, self.rank, content.group
        self._forget(self.contents.pop(key, None))
        self.contents[key] = content
        self.by_whole[content.whole] = content
        while len(self.contents) > self.contents_max:
            self._forget(self.contents.popitem(last=False)[1])

    def _forget(self, content: Content | None) -> None:
        if content is not None and self.by_whole.get(content.whole) is content:
            del self.by_whole[content.whole]

    def submit(self, copy: Copy) -> None:
        """A copy begins to move bytes."""
        self.moment += 1
        copy.submitted = self.moment
        self.flying[copy.number] = copy
        if len(self.flying) > FLYING_MAX:
            self.recent.append(self.flying.pop(next(iter(self.flying))))
        if copy.store:
            for _, slot, _ in copy.pairs:
                self.slot_store[slot] = copy
        else:
            for place, _, _ in copy.pairs:
                self.place_load[place] = copy

    def end(self, number: int) -> Copy | None:
        """Take the report of a copy's end; None for an unknown copy."""
        self.moment += 1
        copy = self.flying.pop(number, None)
        if copy is not None:
            copy.ended = self.moment
            self.recent.append(copy)
        return copy

    def parts_in(self, copy: Copy, slot: int) -> Array | None:
        """The fingerprints of the sampled block that a store took for a slot, before or after the store's end."""
        for rows, values in copy.taken:
            for row, parts in zip(rows, values.get(), strict=True):
                if copy.pairs[copy.sampled[row][0]][1] == slot:
                    return parts  # type: ignore[no-any-return]
        for at, key in copy.sampled:
            content = self.content(key, copy.pairs[at][2])
            if copy.pairs[at][1] == slot and content is not None and content.copy is copy:
                return content.parts
        return None

    def stores_into(self, slot: int) -> list[Copy]:
        """Stores that were ordered into a slot, as far as they are kept, in their order."""
        return self._copies(lambda copy: copy.store and any(slot == other for _, other, _ in copy.pairs))

    def loads_into(self, place: int) -> list[Copy]:
        """Loads that were ordered into a place, as far as they are kept, in their order."""
        return self._copies(lambda copy: not copy.store and any(place == other for other, _, _ in copy.pairs))

    def _copies(self, chosen: Callable[[Copy], bool]) -> list[Copy]:
        copies = filter(chosen, (*self.recent, *self.flying.values()))
        return sorted(copies, key=lambda copy: copy.submitted)


def short(key: int) -> str:
    """The first eight hexadecimal digits of a hash, as screens show it."""
    return f"{key:016x}"[:8]
