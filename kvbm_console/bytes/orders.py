"""Messages between a daemon and the worker of a rank, over a socket that keeps the bounds of messages.

Law of this file: an order has a number, larger than those before, and is answered by one reply with that number. A
worker carries out its orders in their order, except copies from and to the disk, which run beside the others. Columns
are those of ``core.columns``.
"""

from typing import Final

import msgspec

from kvbm_console.core.columns import Hashes, Ids
from kvbm_console.core.ids import Tier

MESSAGE_BYTES: Final = 64 * 1024
"""A message is closed when it is this long: well below the 208 KiB that a socket takes by default."""
RECEIVE_BYTES: Final = 256 * 1024
"""Longer than any message."""
PART_BLOCKS: Final = 1024
"""Most blocks of an order; longer copies are ordered in parts."""


class RankPool(msgspec.Struct, array_like=True, frozen=True):
    """A pool as a worker knows it: the leader's number, its tier and its places."""

    pool: int
    tier: Tier
    places: int

    @property
    def in_memory(self) -> bool:
        """True if the pool is an arena, false if it is a file."""
        return self.tier in (Tier.G1, Tier.G2)


class RankIdentity(msgspec.Struct, array_like=True, frozen=True):
    """The meaning of the blocks in a slot file; see ``slot_file.SlotIdentity``."""

    layout: str
    block_tokens: int
    ranks: int


class RankSetup(msgspec.Struct, array_like=True, frozen=True):
    """The first message to a worker; the descriptors of the arenas come with it, in the order of their pools."""

    rank: int
    shard_bytes: int
    pools: tuple[RankPool, ...]
    fresh: bool
    """True if the arenas are new: the worker has the system give them their memory before it replies."""
    directory: str
    """Of the slot file, if a pool is on disk."""
    identity: RankIdentity


class RankOrder(msgspec.Struct, array_like=True, gc=False, tag=0):
    """Base of all orders."""

    number: int


class CopyOrder(RankOrder, tag=1):
    """Copy ``sources[i]``, which holds ``keys[i]``, to ``targets[i]``; with ``compare`` look whether it arrived."""

    source_pool: int
    target_pool: int
    sources: Ids
    targets: Ids
    keys: Hashes
    compare: bool


class FillOrder(RankOrder, tag=2):
    """These places have been computed: they hold the contents of ``keys`` from now on."""

    pool: int
    places: Ids
    keys: Hashes


class CheckOrder(RankOrder, tag=3):
    """Compare these places with what ``keys`` must be."""

    pool: int
    places: Ids
    keys: Hashes


class SpoilOrder(RankOrder, tag=4):
    """These places were given away: whoever reads them before they are filled finds garbage."""

    pool: int
    places: Ids


class ZeroOrder(RankOrder, tag=5):
    """Overwrite every place of a pool with zeroes, behind all copies that have begun."""

    pool: int


AnyOrder = CopyOrder | FillOrder | CheckOrder | SpoilOrder | ZeroOrder


class RankFound(msgspec.Struct, array_like=True, gc=False, tag=1):
    """Blocks that a rank's slot file has from before, the least recently used first. It comes before the reply to the
    setup of a fresh worker, in parts of at most ``PART_BLOCKS``."""

    pool: int
    places: Ids
    keys: Hashes


class RankReply(msgspec.Struct, array_like=True, gc=False, tag=2):
    """An order was carried out. Number 0 answers the setup, ``LAST_WORDS`` comes before a worker ends by itself."""

    number: int
    error: str
    """The reason why blocks failed; empty if none did."""
    failed: Ids
    """Positions of blocks in the order that did not arrive, or are not what they must be."""
    took_ns: int


LAST_WORDS: Final = -1
