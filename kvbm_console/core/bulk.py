"""Many places at once: the columns of a pool read and written through numpy, where a loop would take a place each.

Law of this file: it changes columns exactly as the loops of ``tiers`` and ``device_pool`` do, or it changes nothing and
says so; then the loop decides, and names the place that is wrong. Nothing of numpy leaves it: what it returns are plain
integers and bytes.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core.columns import HASH_BYTES, ID_BYTES, pack_hashes, read_hashes
from kvbm_console.core.ids import Condition

if TYPE_CHECKING:
    from kvbm_console.core.tiers import PoolFacts

_WRITING: Final = int(Condition.WRITING)
BULK_MIN: Final = 96
"""From this many places on; for fewer, making the views costs more than the loop."""
_ONE: Final = array("I", [1]).tobytes()
_SEEN_MAX: Final = 32
_SEEN_BYTES: Final = 16_384
"""What was found out about the last columns is kept: the same one is refused or taken, filled, read and given back."""


@cache
def numpy() -> ModuleType:
    """Imported with the first long prompt, a tenth of a second: many a process never meets one."""
    import numpy

    return numpy


def warm() -> None:
    """Import now what a long prompt would import, where nobody waits yet."""
    numpy()


class Places:
    """A column of ids, as an index of other columns, with its lowest and its highest number."""

    __slots__ = ("at", "distinct", "low", "top")

    def __init__(self, packed: bytes) -> None:
        np = numpy()
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


class Columns:
    """numpy's views of the columns of a pool; while there are any, the columns keep their length."""

    __slots__ = ("content", "hash_of", "refs", "stored_at")

    def __init__(self, pool: "PoolFacts") -> None:
        np = numpy()
        self.refs = np.frombuffer(pool.refs, "i4")
        self.content = np.frombuffer(pool.content, "u1")
        self.hash_of = np.frombuffer(pool.hash_of, "u8")
        self.stored_at = np.frombuffer(pool.stored_at, "i8")


def _columns(pool: "PoolFacts") -> Columns:
    views = pool.views
    if views is None:
        views = pool.views = Columns(pool)
    return views


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
    views = _columns(pool)
    if numpy().count_nonzero(views.refs[at[count:]]):
        return False
    if not count:
        return True
    own = at[:count]
    contents: bytes = views.content[own].tobytes()
    return contents.count(ready) == count and _hashes(pool, own) == pack_hashes(prefix)


def contents_at(pool: "PoolFacts", packed: bytes) -> bytes | None:
    """The column of what stands at these places, empty when nothing does; None when they are not all full, or empty, or
    known, or one is named twice."""
    places = places_of(packed)
    if not places.distinct or places.low < 0 or places.top >= len(pool.content):
        return None
    names = _columns(pool).hash_of[places.at]
    full = numpy().count_nonzero(names)
    if full and full != len(names):
        return None
    held: bytes = names.astype("<u8", copy=False).tobytes() if full else b""
    return held


def _hashes(pool: "PoolFacts", at: Any) -> bytes:
    held: bytes = _columns(pool).hash_of[at].astype("<u8", copy=False).tobytes()
    return held


def take_holder(pool: "PoolFacts", packed: bytes, ready: int) -> tuple[int, int] | None:
    """One more holder for each; how many of those that had none are (empty, cached)."""
    at = _index_of(pool, packed)
    if at is None:
        return None
    views = _columns(pool)
    refs = views.refs
    before = refs[at]
    if numpy().count_nonzero(before):
        refs[at] = before + 1
        at = at[before == 0]
    else:
        refs[at] = 1
    contents: bytes = views.content[at].tobytes()
    return contents.count(0), contents.count(ready)


def give_holder(pool: "PoolFacts", packed: bytes, ready: int) -> tuple[int, int] | None:
    """One holder less for each; how many of those that have none now are (empty, cached)."""
    at = _index_of(pool, packed)
    if at is None:
        return None
    np, views = numpy(), _columns(pool)
    refs = views.refs
    before = refs[at]
    if before.tobytes() == _ONE * len(at):  # compared as numbers it takes five times as long
        refs[at] = 0
    elif np.count_nonzero(before) != len(at):
        return None
    else:
        refs[at] = before - 1
        at = at[before == 1]
    contents: bytes = views.content[at].tobytes()
    return contents.count(0), contents.count(ready)


def fill(pool: "PoolFacts", packed: bytes, packed_hashes: bytes, content: int, at_ns: int) -> int | None:
    """Empty places get hash, content and time; how many of them have holders."""
    at = _index_of(pool, packed) if len(packed) * HASH_BYTES == ID_BYTES * len(packed_hashes) else None
    if at is None:
        return None
    np, views = numpy(), _columns(pool)
    contents, hashes = views.content, np.frombuffer(packed_hashes, "<u8")
    if np.count_nonzero(contents[at]) or np.count_nonzero(hashes) != len(hashes):
        return None
    views.hash_of[at] = hashes
    contents[at] = content
    views.stored_at[at] = at_ns
    return int(np.count_nonzero(views.refs[at]))


def empty(pool: "PoolFacts", packed: bytes, ready: int, told: bytes | None = None) -> Sequence[int] | None:
    """Cached places without a copy lose hash, content and time; their hashes, of which ``told`` may be the column."""
    at = _index_of(pool, packed)
    if at is None:
        return None
    views = _columns(pool)
    contents = views.content
    if numpy().count_nonzero(views.refs[at]) or contents[at].tobytes().count(ready) != len(at):
        return None
    held = _hashes(pool, at)
    hashes = read_hashes(told if told == held else held)
    if pool.copies and not pool.copies.keys().isdisjoint(hashes):
        return None
    views.hash_of[at] = 0
    contents[at] = 0
    views.stored_at[at] = 0
    return hashes
