"""Many places at once: the columns of a pool read and written through numpy, where a loop would take a place each.

Law of this file: it changes columns exactly as the loops of ``tiers`` and ``device_pool`` do, or it changes nothing and
says so; then the loop decides, and names the place that is wrong. Nothing of numpy leaves it: what it returns are plain
integers and bytes.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core.columns import HASH_BYTES, ID_BYTES, pack_hashes, unpack_hashes
from kvbm_console.core.ids import Condition

if TYPE_CHECKING:
    from array import array

    from kvbm_console.core.tiers import PoolFacts

_WRITING: Final = int(Condition.WRITING)
BULK_MIN: Final = 96
"""From this many places on; for fewer, making the views costs more than the loop."""
_SEEN_MAX: Final = 32
_SEEN_BYTES: Final = 16_384
"""What was found out about the last columns is kept: the same one is refused or taken, filled, read and given back."""


@cache
def _numpy() -> ModuleType:
    """Imported with the first long prompt, a tenth of a second: many a process never meets one."""
    import numpy

    return numpy


def warm() -> None:
    """Import now what a long prompt would import, where nobody waits yet."""
    _numpy()


class Places:
    """A column of ids, as an index of other columns, with its lowest and its highest number."""

    __slots__ = ("at", "distinct", "low", "top")

    def __init__(self, packed: bytes) -> None:
        np = _numpy()
        ids = np.frombuffer(packed, "<i4")
        in_order = np.sort(ids)
        self.low, self.top = int(in_order[0]), int(in_order[-1])
        self.distinct = not np.count_nonzero(in_order[1:] == in_order[:-1])
        self.at = ids.astype("i8")  # numpy gathers and scatters by these in a third of the time


_seen: dict[bytes, Places] = {}


def places_of(packed: bytes) -> Places:
    """The places of a column of ids."""
    known = _seen.get(packed)
    if known is None:
        known = Places(packed)
        if len(_seen) >= _SEEN_MAX:
            _seen.clear()
        if len(packed) <= _SEEN_BYTES:
            _seen[packed] = known
    return known


def _index_of(pool: "PoolFacts", packed: bytes) -> Any | None:
    """The places as an index; None when some place is away, named twice, or none of the pool's."""
    places = places_of(packed)
    if pool.quarantined or not places.distinct or places.low < 0 or places.top >= len(pool.content):
        return None
    return places.at


def may_give(pool: "PoolFacts", packed: bytes, prefix: Sequence[int], ready: int) -> bool:
    """Whether these places may be given to a slot: the leading ones can be read and hold ``prefix``, the others have
    no holder. False also when somebody else has to say what is wrong."""
    count = len(prefix)
    at = _index_of(pool, packed) if len(packed) >= ID_BYTES * count else None
    if at is None or pool.counts[_WRITING]:
        return False
    np = _numpy()
    if np.count_nonzero(np.frombuffer(pool.refs, "i4")[at[count:]]):
        return False
    if not count:
        return True
    own = at[:count]
    contents: bytes = np.frombuffer(pool.content, "u1")[own].tobytes()
    return contents.count(ready) == count and _hashes(pool, own) == pack_hashes(prefix)


def with_content(pool: "PoolFacts", packed: bytes) -> int | None:
    """How many of these places have content; None when not all of them are known, or one is named twice."""
    places = places_of(packed)
    if not places.distinct or places.low < 0 or places.top >= len(pool.content):
        return None
    np = _numpy()
    return int(np.count_nonzero(np.frombuffer(pool.content, "u1")[places.at]))


def hashes_at(pool: "PoolFacts", packed: bytes) -> bytes:
    """What stands at these places of the pool, as a column."""
    return _hashes(pool, places_of(packed).at)


def _hashes(pool: "PoolFacts", at: Any) -> bytes:
    held: bytes = _numpy().frombuffer(pool.hash_of, "u8")[at].astype("<u8", copy=False).tobytes()
    return held


def take_holder(pool: "PoolFacts", packed: bytes, ready: int) -> tuple[int, int] | None:
    """One more holder for each; how many of those that had none are (empty, cached)."""
    at = _index_of(pool, packed)
    if at is None:
        return None
    np = _numpy()
    refs, content = np.frombuffer(pool.refs, "i4"), np.frombuffer(pool.content, "u1")
    before = refs[at]
    if np.count_nonzero(before):
        refs[at] = before + 1
        at = at[before == 0]
    else:
        refs[at] = 1
    contents: bytes = content[at].tobytes()
    return contents.count(0), contents.count(ready)


def give_holder(pool: "PoolFacts", packed: bytes, ready: int) -> tuple[int, int] | None:
    """One holder less for each; how many of those that have none now are (empty, cached)."""
    at = _index_of(pool, packed)
    if at is None:
        return None
    np = _numpy()
    refs, content = np.frombuffer(pool.refs, "i4"), np.frombuffer(pool.content, "u1")
    before = refs[at]
    if np.count_nonzero(before) != len(before):
        return None
    left = before - 1
    refs[at] = left
    if np.count_nonzero(left):
        at = at[left == 0]
    contents: bytes = content[at].tobytes()
    return contents.count(0), contents.count(ready)


def fill(pool: "PoolFacts", packed: bytes, packed_hashes: bytes, content: int, at_ns: int) -> int | None:
    """Empty places get hash, content and time; how many of them have holders."""
    at = _index_of(pool, packed) if len(packed) * HASH_BYTES == ID_BYTES * len(packed_hashes) else None
    if at is None:
        return None
    np = _numpy()
    contents, hashes = np.frombuffer(pool.content, "u1"), np.frombuffer(packed_hashes, "<u8")
    if np.count_nonzero(contents[at]) or np.count_nonzero(hashes) != len(hashes):
        return None
    np.frombuffer(pool.hash_of, "u8")[at] = hashes
    contents[at] = content
    np.frombuffer(pool.stored_at, "i8")[at] = at_ns
    return int(np.count_nonzero(np.frombuffer(pool.refs, "i4")[at]))


def empty(pool: "PoolFacts", packed: bytes, ready: int) -> list[int] | None:
    """Cached places without a copy lose hash, content and time; their hashes."""
    at = _index_of(pool, packed)
    if at is None:
        return None
    np = _numpy()
    contents = np.frombuffer(pool.content, "u1")
    if np.count_nonzero(np.frombuffer(pool.refs, "i4")[at]) or contents[at].tobytes().count(ready) != len(at):
        return None
    hashes = unpack_hashes(_hashes(pool, at))
    if pool.copies and not pool.copies.keys().isdisjoint(hashes):
        return None
    np.frombuffer(pool.hash_of, "u8")[at] = 0
    contents[at] = 0
    np.frombuffer(pool.stored_at, "i8")[at] = 0
    return hashes


# --- the pool of an engine: a state of each place, see ``device_pool``, and its hash ---


def _known(places: Places, state: "array[int]") -> bool:
    return places.distinct and places.low >= 0 and places.top < len(state)


def take(state: "array[int]", packed: bytes) -> list[int] | None:
    """One more holder for each; how many have now those that had one. None, and nothing done, when one of these is free
    and not in the ring."""
    places = places_of(packed)
    if not _known(places, state):
        return None
    np = _numpy()
    at, every = places.at, np.frombuffer(state, "i8")
    before = every[at]
    if np.count_nonzero(before) != len(at):
        return None
    held = before > 0
    if not np.count_nonzero(held):
        every[at] = 1
        return []
    now = np.where(held, before, 0) + 1
    every[at] = now
    more: list[int] = now[held].tolist()
    return more


def give(
    state: "array[int]", hash_of: "array[int]", entry: int, packed: bytes
) -> int | tuple[bytes, bytes, list[int]] | None:
    """One holder less for each, the last one first; without a holder those with a hash get states from ``entry`` down.

    Returns how many of the last ones have no hash, when all before have one and nobody else holds any; otherwise a byte
    for each, the last one first, whether it is free without a hash, and with one, and the former holders of the others.
    None, and nothing done, when one has no holder to give back.
    """
    places = places_of(packed)
    if not _known(places, state):
        return None
    np = _numpy()
    at, every, names = places.at, np.frombuffer(state, "i8"), np.frombuffer(hash_of, "u8")[places.at]
    before, full = every[at], int(np.count_nonzero(names))
    free = before == 1
    if np.count_nonzero(free) == len(at) and np.count_nonzero(names[:full]) == full:
        every[at[:full]] = np.arange(entry - full + 1, entry + 1)
        every[at[full:]] = 0
        return len(at) - full
    if before.min() <= 0:
        return None
    every[at] = before - 1
    loose, queued = free & (names == 0), free & (names != 0)
    at = at[queued]
    every[at] = np.arange(entry - len(at) + 1, entry + 1)
    return loose[::-1].tobytes(), queued[::-1].tobytes(), before[~free].tolist()


def live(state: "array[int]", first: int, packed: bytes) -> bytes:
    """Which of these entries of a ring, that begin with entry ``first``, are live: a byte each, empty when all are."""
    np = _numpy()
    at = places_of(packed).at
    alive = np.frombuffer(state, "i8")[at] == np.arange(~first, ~first - len(at), -1)
    found: bytes = b"" if np.count_nonzero(alive) == len(at) else alive.tobytes()
    return found


def hold(state: "array[int]", hash_of: "array[int]", packed: bytes) -> list[int] | None:
    """Free places get a holder and lose their hashes; these. None, and nothing done, when only some have one."""
    np = _numpy()
    at, names = places_of(packed).at, np.frombuffer(hash_of, "u8")
    held = names[at]
    full = np.count_nonzero(held)
    if full and full != len(at):
        return None
    np.frombuffer(state, "i8")[at] = 1
    if not full:
        return []
    names[at] = 0
    return unpack_hashes(held.astype("<u8", copy=False).tobytes())


def in_order(state: "array[int]") -> list[int]:
    """The places that are in the ring, in its order."""
    np = _numpy()
    every = np.frombuffer(state, "i8")
    at = np.flatnonzero(every < 0)
    order: list[int] = at[np.argsort(-every[at])].tolist()
    return order


def name(state: "array[int]", hash_of: "array[int]", packed: bytes, packed_hashes: bytes) -> bool:
    """Each gets its hash; False, and nothing done, when one has one, or no holder, or is named twice."""
    places = places_of(packed)
    if not _known(places, state) or len(packed) * HASH_BYTES != ID_BYTES * len(packed_hashes):
        return False
    np = _numpy()
    at, names, hashes = places.at, np.frombuffer(hash_of, "u8"), np.frombuffer(packed_hashes, "<u8")
    if np.count_nonzero(names[at]) or np.count_nonzero(hashes) != len(at):
        return False
    if np.count_nonzero(np.frombuffer(state, "i8")[at] > 0) != len(at):
        return False
    names[at] = hashes
    return True
