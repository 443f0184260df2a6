"""Many places at once: the columns of a pool read and written through numpy, where a loop would take a place each.

Law of this file: it changes columns exactly as the loops of ``tiers`` do, or it changes nothing and says so; then the
loop decides, and names the place that is wrong. Nothing of numpy leaves it: what it returns are plain integers.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core.columns import HASH_BYTES, ID_BYTES
from kvbm_console.core.ids import Condition

if TYPE_CHECKING:
    from kvbm_console.core.tiers import PoolFacts

_WRITING: Final = int(Condition.WRITING)
BULK_MIN: Final = 96
"""From this many places on; for fewer, making the views costs more than the loop."""


@cache
def _numpy() -> ModuleType:
    """Imported with the first long prompt, a tenth of a second: many a process never meets one."""
    import numpy

    return numpy


def warm() -> None:
    """Import now what a long prompt would import, where nobody waits yet."""
    _numpy()


def ends(packed: bytes) -> tuple[int, int]:
    """The lowest and the highest number of a column of ids."""
    places = _numpy().frombuffer(packed, "<i4")
    return int(places.min()), int(places.max())


def _views(pool: "PoolFacts", packed: bytes) -> tuple[Any, Any, Any] | None:
    """The places, the holders and the content; None when some place is away, named twice, or none of the pool's."""
    if pool.quarantined:
        return None
    np = _numpy()
    places = np.frombuffer(packed, "<i4")
    in_order = np.sort(places)
    if in_order[0] < 0 or in_order[-1] >= len(pool) or (in_order[1:] == in_order[:-1]).any():
        return None
    return places, np.frombuffer(pool.refs, "i4"), np.frombuffer(pool.content, "u1")


def _split(contents: Any, ready: int) -> tuple[int, int]:
    """How many are without content, and how many are readable."""
    np = _numpy()
    return len(contents) - int(np.count_nonzero(contents)), int(np.count_nonzero(contents == ready))


def may_give(pool: "PoolFacts", packed: bytes, prefix: Sequence[int], ready: int) -> bool:
    """Whether these places may be given to a slot: the leading ones can be read and hold ``prefix``, the others have
    no holder. False also when somebody else has to say what is wrong."""
    if len(packed) < ID_BYTES * len(prefix):
        return False
    views = _views(pool, packed)
    if views is None or pool.counts[_WRITING]:
        return False
    np = _numpy()
    places, refs, content = views
    own, others = places[: len(prefix)], places[len(prefix) :]
    if refs[others].any() or not (content[own] == ready).all():
        return False
    hashes: list[int] = np.frombuffer(pool.hash_of, "u8")[own].tolist()
    return hashes == prefix


def take_holder(pool: "PoolFacts", packed: bytes, ready: int) -> tuple[int, int] | None:
    """One more holder for each; how many of those that had none are (empty, cached)."""
    views = _views(pool, packed)
    if views is None:
        return None
    places, refs, content = views
    before = refs[places]
    refs[places] = before + 1
    return _split(content[places] if not before.any() else content[places[before == 0]], ready)


def give_holder(pool: "PoolFacts", packed: bytes, ready: int) -> tuple[int, int] | None:
    """One holder less for each; how many of those that have none now are (empty, cached)."""
    views = _views(pool, packed)
    if views is None:
        return None
    places, refs, content = views
    left = refs[places] - 1
    if int(left.min()) < 0:
        return None
    refs[places] = left
    return _split(content[places] if not left.any() else content[places[left == 0]], ready)


def fill(pool: "PoolFacts", packed: bytes, packed_hashes: bytes, content: int, at_ns: int) -> int | None:
    """Empty places get hash, content and time; how many of them have holders."""
    views = _views(pool, packed) if len(packed) * HASH_BYTES == ID_BYTES * len(packed_hashes) else None
    if views is None:
        return None
    np = _numpy()
    places, refs, contents = views
    hash_of, hashes = np.frombuffer(pool.hash_of, "u8"), np.frombuffer(packed_hashes, "<u8")
    if hash_of[places].any() or not hashes.all():
        return None
    hash_of[places] = hashes
    contents[places] = content
    np.frombuffer(pool.stored_at, "i8")[places] = at_ns
    return int(np.count_nonzero(refs[places]))


def empty(pool: "PoolFacts", packed: bytes, ready: int) -> list[int] | None:
    """Cached places without a copy lose hash, content and time; their hashes."""
    views = _views(pool, packed)
    if views is None:
        return None
    np = _numpy()
    places, refs, contents = views
    hash_of = np.frombuffer(pool.hash_of, "u8")
    if refs[places].any() or not (contents[places] == ready).all():
        return None
    hashes: list[int] = hash_of[places].tolist()
    if pool.copies and not pool.copies.keys().isdisjoint(hashes):
        return None
    hash_of[places] = 0
    contents[places] = 0
    np.frombuffer(pool.stored_at, "i8")[places] = 0
    return hashes
