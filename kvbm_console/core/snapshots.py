"""Snapshots: facts as canonical bytes, and their digest.

Law of this file: two states with equal facts have equal bytes. ``decode_facts(encode_facts(state))`` equals ``state``
in everything, also in the order of copies of a hash, so a leader goes on from it as it would have.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec
import xxhash

from kvbm_console.core.chains import LIVES, BlockMark, Chains
from kvbm_console.core.columns import MAPPED_FROM_BYTES, Column, SparseBytes, copied, used
from kvbm_console.core.errors import FoldError
from kvbm_console.core.holds import BreakpointFacts, FreezeFacts, HoldFacts
from kvbm_console.core.ids import EMPTY_HASH, Authority, Measure, Tier, WaitPoint
from kvbm_console.core.slots import CandidateFacts, ConnectorFacts, OperationFacts, SlotFacts
from kvbm_console.core.state import CacheState, Totals
from kvbm_console.core.tiers import EngineFacts, PoolFacts, PoolInfo

T = TypeVar("T", bound=msgspec.Struct)
FACTS_VERSION: Final = 1
PACKED_VERSION: Final = 2
"""The number in the place of packed facts; programs that cannot unpack refuse a snapshot by it."""
_NUMBERS: Final = (
    "seq", "n", "at_ns", "epoch", "iteration", "running", "waiting", "draining",
    "next_slot", "next_candidate", "next_operation", "next_hold", "next_breakpoint",
)


class _Chains(msgspec.Struct, array_like=True):
    parent_of: memoryview
    marks: list[tuple[int, BlockMark]]
    lived: list[int]
    again: list[tuple[tuple[int, int], int]]
    stored_blocks: int = 0


class _Pool(msgspec.Struct, array_like=True):
    info: tuple[int, int, int, int, int, str, int | None, int, int]
    hash_of: memoryview
    content: memoryview
    refs: memoryview
    stored_at: memoryview
    copies: list[tuple[int, list[int]]]
    quarantined: list[tuple[int, list[int]]]
    chains: _Chains | None = None
    silent: bool = False
    first_place: int = 0
    window: int | None = None


class _Facts(msgspec.Struct, array_like=True):
    version: int
    numbers: tuple[int, ...]
    pools: list[_Pool]
    slots: list[SlotFacts]
    candidates: list[CandidateFacts]
    operations: list[OperationFacts]
    batches: list[tuple[int, set[int]]]
    late: list[tuple[int, set[int]]]
    holds: list[HoldFacts]
    breakpoints: list[BreakpointFacts]
    leases: dict[str, bool]
    lost_sources: list[tuple[int, int]]
    totals: Totals
    frozen: FreezeFacts | None = None
    measured: list[tuple[int, int, list[tuple[Measure, int]], int, list[tuple[Measure, int]]]] = []
    connectors: list[tuple[int, ConnectorFacts]] = []


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODER: Final = msgspec.msgpack.Decoder(_Facts)


def _column(code: Literal["B", "I", "q", "Q"], data: memoryview) -> Column:
    try:
        return copied(data.cast(code))
    except TypeError as error:  # no whole number of places
        raise FoldError(f"not a column of facts: {error}") from None


def _pack_pool(pool: PoolFacts) -> _Pool:
    info = pool.info
    return _Pool(
        (info.pool, info.source, info.dp_rank, info.group, info.tier, info.medium, info.capacity_blocks,
         info.block_tokens, info.authority),
        pool.hash_of, pool.content, pool.refs, pool.stored_at,
        [(key, pool.places_of(key)) for key in sorted(pool.copies)], sorted(pool.quarantined.items()),
        _pack_chains(pool), pool.silent, info.first_place, info.window,
    )


def _pack_chains(pool: PoolFacts) -> _Chains | None:
    chains = pool.chains
    return None if chains is None else _Chains(
        chains.parent_of, sorted(chains.marks.items()), chains.lived, sorted(chains.again.items()),
        chains.stored_blocks,
    )


def _unpack_pool(packed: _Pool) -> PoolFacts:
    index, source, dp_rank, group, tier, medium, capacity, block_tokens, authority = packed.info
    pool = PoolFacts(
        PoolInfo(
            index, source, dp_rank, group, Tier(tier), medium, capacity, block_tokens, Authority(authority),
            packed.first_place, packed.window,
        )
    )
    pool.hash_of = _column("Q", packed.hash_of)
    pool.content = _column("B", packed.content)
    pool.refs = _column("I", packed.refs)
    pool.stored_at = _column("q", packed.stored_at)
    if not len(pool.hash_of) == len(pool.content) == len(pool.refs) == len(pool.stored_at):
        raise FoldError(f"pool {index} of the snapshot has columns of different lengths")
    for at in used(pool.hash_of):
        pool.by_hash.update(zip(pool.hash_of[at].tolist(), range(at.start, at.stop), strict=True))
    pool.by_hash.pop(EMPTY_HASH, None)
    for key, places in packed.copies:
        pool.by_hash[key] = places[0]
        pool.copies[key] = places[1:]
    pool.quarantined = dict(packed.quarantined)
    pool.silent = packed.silent
    pool.counts = pool.walk()
    if pool.chains is not None:
        _unpack_chains(pool, pool.chains, packed.chains)
    return pool


def _unpack_chains(pool: PoolFacts, chains: Chains, packed: _Chains | None) -> None:
    if packed is None:  # written before the parents of blocks were kept
        chains.grow(len(pool))
        return
    if len(packed.parent_of) != 8 * len(pool) or len(packed.lived) != LIVES:
        raise FoldError(f"pool {pool.info.pool} of the snapshot has columns of different lengths")
    chains.parent_of = _column("Q", packed.parent_of)
    chains.marks, chains.lived, chains.again = dict(packed.marks), packed.lived, dict(packed.again)
    chains.stored_blocks = packed.stored_blocks


def _pack(state: CacheState) -> _Facts:
    return _Facts(
        FACTS_VERSION, tuple(int(getattr(state, name)) for name in _NUMBERS),
        [_pack_pool(pool) for pool in state.pools], list(state.slots.values()), list(state.candidates.values()),
        list(state.operations.values()), sorted(state.batches.items()), sorted(state.late.items()),
        list(state.holds.values()),
        list(state.breakpoints.values()), state.leases,
        sorted(state.lost_sources.items()), state.totals, state.frozen,
        [(source, known.at_ns, list(known.values.items()), known.first_ns, list(known.first.items()))
         for source, known in sorted(state.measured.items())],
        sorted(state.connectors.items()),
    )


def encode_facts(state: CacheState) -> bytes:
    """The facts as canonical msgpack; columns are copied, nothing is shared with the state."""
    return b"".join(_pieces(_pack(state)))


def sparse_facts(state: CacheState) -> memoryview:
    """The same bytes, of which long stretches of zeros take no memory."""
    pieces = list(_pieces(_pack(state)))
    facts = SparseBytes(sum(memoryview(piece).nbytes for piece in pieces))
    for piece in pieces:
        facts.write(piece)
    return facts.view


def _pieces(part: Any) -> Iterator[bytes | Column]:
    """The canonical msgpack of this part of the facts. Mapped columns are the state's own, so a digest copies none."""
    if isinstance(part, memoryview):
        yield _head(part.nbytes, (0xC4, 1), (0xC5, 2), (0xC6, 4))
        yield part
        return
    if not _mapped(part):
        yield _ENCODER.encode(part)
        return
    items = part if isinstance(part, list) else [getattr(part, name) for name in part.__struct_fields__]
    yield bytes([0x90 + len(items)]) if len(items) < 16 else _head(len(items), (0xDC, 2), (0xDD, 4))
    for item in items:
        yield from _pieces(item)


def _mapped(part: Any) -> bool:
    """True if this part of the facts has a column that may be mapped."""
    if isinstance(part, _Facts):
        return _mapped(part.pools)
    if isinstance(part, list):
        return bool(part) and isinstance(part[0], _Pool) and any(map(_mapped, part))
    return isinstance(part, _Chains) or (isinstance(part, _Pool) and part.hash_of.nbytes >= MAPPED_FROM_BYTES)


def _head(size: int, *forms: tuple[int, int]) -> bytes:
    """The head of a msgpack value of this size, in the first form (code, bytes of the size) that can hold it."""
    code, width = next(form for form in forms if size < 256 ** form[1])
    return bytes([code]) + size.to_bytes(width, "big")


def decode_facts(data: bytes | memoryview) -> CacheState:
    """The state of a snapshot. Raises ``FoldError`` when this version cannot read the bytes."""
    try:
        facts = _DECODER.decode(data)
        if facts.version != FACTS_VERSION:
            raise FoldError(f"snapshot version {facts.version} is not {FACTS_VERSION}")
        return _unpack(facts)
    except (msgspec.DecodeError, ValueError, IndexError) as error:
        raise FoldError(f"not a snapshot of facts: {error}") from None


def copied_facts(state: CacheState) -> CacheState:
    """A copy of the facts."""
    return decode_facts(sparse_facts(state))


def renamed_facts(state: CacheState, rename: Callable[[str, Any], Any]) -> CacheState:
    """A copy of the facts in which ``rename(field, value)`` stands for each field that may hold a name or a text."""

    def renamed(part: T) -> T:
        changes = {field: rename(field, getattr(part, field)) for field in part.__struct_fields__}
        return msgspec.structs.replace(part, **changes)

    facts = _DECODER.decode(encode_facts(state))
    return _unpack(msgspec.structs.replace(
        facts, slots=list(map(renamed, facts.slots)), candidates=list(map(renamed, facts.candidates)),
        operations=list(map(renamed, facts.operations)), holds=list(map(renamed, facts.holds)),
        breakpoints=list(map(renamed, facts.breakpoints)),
        leases={rename("owner", owner): live for owner, live in facts.leases.items()},
        frozen=None if facts.frozen is None else renamed(facts.frozen),
        connectors=[(source, renamed(known)) for source, known in facts.connectors],
    ))


def grown_facts(state: CacheState, more: Mapping[int, int]) -> CacheState:
    """A copy of the facts in which each of these pools, of known capacity, has so many further empty places."""
    facts = _DECODER.decode(encode_facts(state))
    return _unpack(msgspec.structs.replace(facts, pools=[
        _grown(pool, more.get(index, 0)) for index, pool in enumerate(facts.pools)
    ]))


def _grown(pool: _Pool, places: int) -> _Pool:
    capacity = pool.info[6]
    if not places or capacity is None:
        return pool

    def column(data: memoryview) -> memoryview:
        return memoryview(bytes(data) + bytes(places * len(data) // (pool.first_place + capacity)))

    return msgspec.structs.replace(
        pool, info=(*pool.info[:6], capacity + places, *pool.info[7:]), hash_of=column(pool.hash_of),
        content=column(pool.content), refs=column(pool.refs), stored_at=column(pool.stored_at),
    )


def _unpack(facts: _Facts) -> CacheState:
    state = CacheState()
    values: dict[str, Any] = dict(zip(_NUMBERS, facts.numbers, strict=True))
    for name, value in values.items():
        setattr(state, name, bool(value) if name == "draining" else value)
    state.pools = [_unpack_pool(pool) for pool in facts.pools]
    state.slots = {slot.slot: slot for slot in facts.slots}
    state.candidates = {candidate.candidate: candidate for candidate in facts.candidates}
    state.operations = {operation.operation: operation for operation in facts.operations}
    state.batches = dict(facts.batches)
    state.late = dict(facts.late)
    state.holds = {hold.hold: hold for hold in facts.holds}
    state.breakpoints = {known.spec.id: known for known in facts.breakpoints}
    state.leases = facts.leases
    state.lost_sources = dict(facts.lost_sources)
    state.totals = facts.totals
    state.measured = {
        source: EngineFacts(at_ns, dict(values), first_ns, dict(first))
        for source, at_ns, values, first_ns, first in facts.measured
    }
    state.frozen = facts.frozen
    state.connectors = dict(facts.connectors)
    state.slot_of = {slot.request: slot.slot for slot in state.slots.values()}
    state.standing = {
        state.slots[hold.slot].request for hold in state.holds.values() if hold.point is WaitPoint.SCHEDULE
    }
    return state


def packed_elsewhere() -> bytes:
    """A stand-in for facts that are packed apart: every reader refuses it by its version."""
    facts = _DECODER.decode(encode_facts(CacheState()))
    return _ENCODER.encode(msgspec.structs.replace(facts, version=PACKED_VERSION))


def digest(state: CacheState) -> int:
    """xxh3_64 of the canonical encoding: equal facts, equal digest, on any host."""
    whole = xxhash.xxh3_64()
    for piece in _pieces(_pack(state)):
        whole.update(piece)
    return whole.intdigest()
