"""Batches of KV-cache events, and the registry of the schemas in which engines send events.

A schema is a module of ``schemas``. It has ``BEGINS``, the first bytes of its payloads, and ``decode``, which makes
batches of a payload. ``decode`` of this file finds the schema by the first byte, so a stream may carry any schema. To
add an engine's schema, add a module and a capture to ``recordings/kv-events``; tests decode and fold every capture.

Law of this file: a payload raises ``BadPayload`` or nothing, and takes no more memory than a small multiple of its
size. An event that could not be read is counted, never guessed.
"""

import pkgutil
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from typing import Final, NamedTuple

import msgspec
import xxhash

from kvbm_console.core.errors import KvbmConsoleError
from kvbm_console.core.ids import EMPTY_HASH, Tier

PAYLOAD_BYTES_MAX: Final = 16 * 2**20
"""One batch is one engine step: a prefill of a million tokens takes 5 MB with its token ids."""
EVENTS_MAX: Final = 65_536
"""Events of one batch: a step that evicts a million tokens sends one removal for each block of 16."""
BLOCKS_MAX: Final = 1_000_000
"""Blocks of one batch, the limit of a report to the leader."""
FIELDS_MAX: Final = 64
"""Fields of one event, a few times what the newest engine sends."""
MEDIUM_BYTES_MAX: Final = 64
GROUP_MAX: Final = 1_024
RANK_MAX: Final = 65_535
BLOCK_TOKENS_MAX: Final = 65_536
DEFAULT_MEDIUM: Final = "GPU"
"""The medium of engines that name none."""
FAILURES: Final = (msgspec.DecodeError, ValueError, RecursionError)
"""Everything that decoding can raise: another format, other types, too deep nesting."""
_MASK: Final = 2**64 - 1
_INT_BYTES: Final = bytes({0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}.get(first, 1)
                          for first in range(256))
"""First byte of an integer to the bytes that it takes."""
_REPLACED_EMPTY: Final = 1
"""The form of a real hash of 0, because the core writes 0 for a place without content."""

TIER_OF_MEDIUM: Final[dict[str, Tier]] = {
    "GPU": Tier.G1, "CPU": Tier.G2, "CPU_PINNED": Tier.G2, "CPU_TIER1": Tier.G2, "CPU_TIER2": Tier.G2,
    "DISK": Tier.G3, "STORAGE": Tier.G4, "EXTERNAL": Tier.G4,
}
"""Medium to tier. An unknown medium is kept verbatim and shown with G4, the least known tier."""
EMPTIED_MEDIA: Final = frozenset({"GPU", "CPU_PINNED"})
"""The device, and SGLang's host memory."""
REMOTE: Final = "REMOTE"
"""The second word of a medium that is shared by engines and belongs to none of them."""


class BadPayload(KvbmConsoleError):
    """Raised when a payload is no batch, so that its whole content is lost."""


class StoredMark(NamedTuple):
    """More facts of a block in a chain: its position, a digest of its tokens alone (0 if unknown), and its context.

    The context has words ``lora=``, ``salt=#``, ``image=``, ``embeds=#`` and ``session=``. A salt is a secret of its
    tenant, so only a digest of it is kept. The words of a block hold for all blocks behind it, except the session.
    """

    at: int
    content: int
    context: str


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A chain of blocks was stored. ``block_tokens`` is 0 in a placeholder, which only names blocks."""

    hashes: list[int]
    parent: int | None
    block_tokens: int
    medium: str
    group: int
    marks: tuple[StoredMark, ...] = ()
    tokens: msgspec.Raw | None = None
    """The undecoded tokens of a chain that begins a prompt and has no context."""

    def opening(self) -> tuple[StoredMark, ...]:
        """The mark of the first block of such a chain, made only where it is of use."""
        digests = {} if self.tokens is None else token_digests(self.tokens, self.block_tokens, [0])
        return tuple(StoredMark(at, digest, "") for at, digest in digests.items())


class Removed(msgspec.Struct, frozen=True, gc=False):
    """A copy of each of these blocks is gone from the medium."""

    hashes: list[int]
    medium: str
    group: int


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The publisher holds no block any more: on any medium if ``everywhere``, else on those of ``EMPTIED_MEDIA``.

    vLLM's ``AllBlocksCleared`` means the device. A reset of its connector is silent (OffloadingConnector) or publishes
    the same event (SimpleCPUOffloadConnector), so nothing is known of its tiers below. SGLang's means device and host.
    """

    everywhere: bool = True


CacheEvent = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """An engine step. ``unknown`` counts events of unknown kinds, ``malformed`` broken events of known kinds."""

    ts: float | None
    """Seconds since 1970; None if the engine sends no time."""
    dp_rank: int | None
    events: list[CacheEvent]
    unknown: int = 0
    malformed: int = 0
    pool: str = ""
    """The shared pool that sent the batch, empty for an engine. The messages of a shared pool are numbered from 1."""
    lost: bool = False
    """The publisher says that it has lost events before these."""

    @property
    def blocks(self) -> int:
        """Blocks stored and removed: the measure of flow, because an event may hold a chain."""
        return sum(len(event.hashes) for event in self.events if not isinstance(event, Cleared))


PoolKey = tuple[int, int, str]
"""(data-parallel rank, group, medium) of a pool."""


def decode(payload: bytes) -> list[Batch]:
    """The batches in a payload, one for each run of events of a data-parallel rank. Raises only ``BadPayload``."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise BadPayload(f"a payload of {len(payload)} bytes is above {PAYLOAD_BYTES_MAX}")
    schema = _schemas().get(payload[0]) if payload else None
    if schema is None:
        raise BadPayload(f"not a batch of KV events: it begins with {payload[:1]!r}")
    try:
        batches = schema(payload)
    except FAILURES as error:
        raise BadPayload(f"not a batch of KV events: {error}") from None
    if len(payload) > BLOCKS_MAX:  # a block takes a byte or more
        blocks = sum(batch.blocks for batch in batches)
        if blocks > BLOCKS_MAX:
            raise BadPayload(f"a batch of {blocks} blocks is above {BLOCKS_MAX}")
    return batches


@cache
def _schemas() -> dict[int, Callable[[bytes], list[Batch]]]:
    """First byte of a payload to the decoder of its schema."""
    decoders: dict[int, Callable[[bytes], list[Batch]]] = {}
    package = import_module("kvbm_console.engines.kv_events.schemas")
    for module in pkgutil.iter_modules(package.__path__):
        schema = import_module(f"{package.__name__}.{module.name}")
        decoders.update(dict.fromkeys(schema.BEGINS, schema.decode))
    return decoders


def token_digests(tokens: msgspec.Raw, block_tokens: int, wanted: list[int]) -> dict[int, int]:
    """Digests of the tokens of these blocks, in ascending order; empty if the tokens are no array in msgpack."""
    size, data = block_tokens, memoryview(tokens)
    if not size or not len(data) or not is_array(data[0]):
        return {}
    found: dict[int, int] = {}
    at, token, sizes = {0xDC: 3, 0xDD: 5}.get(data[0], 1), 0, _INT_BYTES
    try:
        for block in wanted:
            for _ in range(block * size - token):
                at += sizes[data[at]]
            begin = at
            for _ in range(size):
                at += sizes[data[at]]
            token = (block + 1) * size
            found[block] = xxhash.xxh3_64_intdigest(data[begin:at]) or 1
    except IndexError:
        pass  # fewer tokens than the blocks have
    return found


def is_array(first: int) -> bool:
    """True for the first byte of an array in msgpack."""
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def check_count(events: int) -> None:
    """Raise ``BadPayload`` for more events than a batch may have."""
    if events > EVENTS_MAX:
        raise BadPayload(f"a batch of {events} events is above {EVENTS_MAX}")


@lru_cache(256)
def tier_of(medium: str) -> Tier:
    """The tier of a medium. A medium with the second word ``REMOTE`` is G4, whatever it consists of."""
    first, _, owner = medium.partition(" ")
    return Tier.G4 if owner.partition(" ")[0] == REMOTE else TIER_OF_MEDIUM.get(first, Tier.G4)


def known_medium(medium: str) -> str:
    """The medium in capitals if its tier is known then, else verbatim: some publishers write ``cpu``."""
    return medium.upper() if medium.upper() in TIER_OF_MEDIUM else medium


def normal_hash(value: int | bytes) -> int:
    """The same form for three forms: unsigned, signed, and the last eight raw bytes, big-endian. Raises ValueError.

    >>> normal_hash(-1) == normal_hash(b"\\xff" * 32) == normal_hash(2**64 - 1)
    True
    """
    if isinstance(value, bytes):
        if len(value) < 8:
            raise ValueError(f"a hash of {len(value)} bytes is below 8")
        number = int.from_bytes(value[-8:], "big")
    else:
        number = value & _MASK
    return _REPLACED_EMPTY if number == EMPTY_HASH else number
