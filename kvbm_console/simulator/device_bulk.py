"""Many places of an engine's pool at once: the state of each, see ``device_pool``, and its hash, through numpy.

Law of this file: as of ``bulk``: it changes columns exactly as the loops of ``device_pool`` do, or it changes nothing
and says so. Nothing of numpy leaves it but its views of the columns.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from kvbm_console.core.bulk import Places, numpy, places_of
from kvbm_console.core.columns import HASH_BYTES, ID_BYTES, read_hashes

_ONE: Final = array("q", [1]).tobytes()
"""One holder, as a state: bytes are compared five times as fast as numbers."""


class DeviceColumns:
    """numpy's views of the columns of a pool."""

    __slots__ = ("hash_of", "state")

    def __init__(self, state: "array[int]", hash_of: "array[int]") -> None:
        self.state = numpy().frombuffer(state, "i8")
        self.hash_of = numpy().frombuffer(hash_of, "u8")


def _known(places: Places, views: DeviceColumns) -> bool:
    return places.distinct and places.low >= 0 and places.top < len(views.state)


def take(views: DeviceColumns, packed: bytes) -> list[int] | None:
    """One more holder for each; how many have now those that had one. None, and nothing done, when one of these is free
    and not in the ring."""
    places = places_of(packed)
    if not _known(places, views):
        return None
    np = numpy()
    at, every = places.at, views.state
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


def give(views: DeviceColumns, entry: int, packed: bytes) -> int | tuple[bytes, bytes, list[int]] | None:
    """One holder less for each, the last one first; without a holder those with a hash get states from ``entry`` down.

    Returns how many of the last ones have no hash, when all before have one and nobody else holds any; otherwise a byte
    for each, the last one first, whether it is free without a hash, and with one, and the former holders of the others.
    None, and nothing done, when one has no holder to give back.
    """
    places = places_of(packed)
    if not _known(places, views):
        return None
    np = numpy()
    at, every, names = places.at, views.state, views.hash_of[places.at]
    before, full = every[at], int(np.count_nonzero(names))
    loose_from = len(at) - full
    if before.tobytes() == _ONE * len(at) and (not loose_from or np.count_nonzero(names[:full]) == full):
        every[at[:full]] = np.arange(entry - full + 1, entry + 1)
        if loose_from:
            every[at[full:]] = 0
        return loose_from
    if before.min() <= 0:
        return None
    every[at] = before - 1
    free = before == 1
    loose, queued = free & (names == 0), free & (names != 0)
    at = at[queued]
    every[at] = np.arange(entry - len(at) + 1, entry + 1)
    return loose[::-1].tobytes(), queued[::-1].tobytes(), before[~free].tolist()


def live(views: DeviceColumns, first: int, packed: bytes) -> bytes:
    """Which of these entries of a ring, that begin with entry ``first``, are live: a byte each, empty when all are."""
    np = numpy()
    at = places_of(packed).at
    states, entries = views.state[at], np.arange(~first, ~first - len(at), -1)
    found: bytes = b"" if states.tobytes() == entries.tobytes() else (states == entries).tobytes()
    return found


def hold(views: DeviceColumns, packed: bytes) -> Sequence[int] | None:
    """Free places get a holder and lose their hashes; these. None, and nothing done, when only some have one."""
    at, names = places_of(packed).at, views.hash_of
    held = names[at]
    full = numpy().count_nonzero(held)
    if full and full != len(at):
        return None
    views.state[at] = 1
    if not full:
        return ()
    names[at] = 0
    return read_hashes(held.astype("<u8", copy=False).tobytes())


def in_order(views: DeviceColumns) -> list[int]:
    """The places that are in the ring, in its order."""
    np, every = numpy(), views.state
    at = np.flatnonzero(every < 0)
    order: list[int] = at[np.argsort(-every[at])].tolist()
    return order


def name(views: DeviceColumns, packed: bytes, packed_hashes: bytes) -> bool:
    """Each gets its hash; False, and nothing done, when one has one, or no holder, or is named twice."""
    places = places_of(packed)
    if not _known(places, views) or len(packed) * HASH_BYTES != ID_BYTES * len(packed_hashes):
        return False
    np = numpy()
    at, names, hashes = places.at, views.hash_of, np.frombuffer(packed_hashes, "<u8")
    if np.count_nonzero(names[at]) or np.count_nonzero(hashes) != len(at):
        return False
    states = views.state[at]
    if states.tobytes() != _ONE * len(at) and np.count_nonzero(states > 0) != len(at):
        return False
    names[at] = hashes
    return True
