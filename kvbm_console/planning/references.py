"""The references of a trace: which blocks each prompt names, in the trace's own unit, without an engine.

Law of this file: all ids of a prompt count, the partial last one included where the trace has one; file order, or for
generated workloads the order of arrival when every answer takes no time.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import count as numbers
from typing import Annotated, Final

import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.planning.traces import note_of
from kvbm_console.simulator.hashing import TRACE_BLOCK_TOKENS
from kvbm_console.simulator.traces import LINE_BYTES_MAX, MILLISECOND_NS, TOKENS_MAX, MooncakeTrace
from kvbm_console.simulator.workloads import Request, Workload


class References(msgspec.Struct, frozen=True):
    """``keys[i]`` are the blocks that request i names, in prompt order, at ``at_ns[i]``, which never goes backwards."""

    trace: str
    block_tokens: int
    names: Sequence[str]
    at_ns: Sequence[int]
    keys: Sequence[Sequence[int]]
    note: str | None = None

    @property
    def total(self) -> int:
        """All references: the denominator of the hit rate."""
        return sum(map(len, self.keys))


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]


_MILLISECONDS: Final = MILLISECOND_NS


def references_of(workload: Workload, block_tokens: int | None = None) -> References:
    """The references of a workload; ``block_tokens`` is the block of those that have no unit of their own.

    Raises ``UsageError`` naming file, line and what is wrong; and for a workload that never ends.
    """
    if isinstance(workload, MooncakeTrace):
        return _mooncake(workload)
    if workload.endless:
        raise UsageError(f"{workload.name} never ends; say how many requests with --limit")
    return _generated(workload, block_tokens or workload.capacities.block_tokens)


def _mooncake(trace: MooncakeTrace) -> References:
    decoder = msgspec.json.Decoder(_Line)
    at_ns: list[int] = []
    keys: list[list[int]] = []
    earliest = 0.0
    number = 0
    with trace.path.open("rb") as lines:
        while trace.limit is None or len(keys) < trace.limit:
            line = lines.readline(LINE_BYTES_MAX + 1)
            number += 1
            if not line:
                break
            if len(line) <= 1 and not line.strip():
                continue
            try:
                entry = decoder.decode(line)
            except msgspec.DecodeError as error:
                what = f"longer than {LINE_BYTES_MAX} bytes" if len(line) > LINE_BYTES_MAX else str(error)
                raise UsageError(f"{trace.path} line {number}: {what}") from error
            if entry.timestamp < earliest:
                raise UsageError(f"{trace.path} line {number}: timestamp is before that of the line above")
            wanted = -(-entry.input_length // TRACE_BLOCK_TOKENS)
            if len(entry.hash_ids) != wanted:
                raise UsageError(
                    f"{trace.path} line {number}: hash_ids must have {wanted} ids for input_length "
                    f"{entry.input_length}, got {len(entry.hash_ids)}"
                )
            earliest = entry.timestamp
            at_ns.append(round(earliest * _MILLISECONDS))
            keys.append(entry.hash_ids)
    names = [f"r{index:05d}" for index in range(len(keys))]
    return References(trace.name, TRACE_BLOCK_TOKENS, names, at_ns, keys)


def _generated(workload: Workload, block_tokens: int) -> References:
    requests = list(in_order(workload, block_tokens))
    return References(
        workload.name, block_tokens, [request.request for request in requests],
        [request.arrival_ns for request in requests], [request.hashes for request in requests], note_of(workload),
    )


def in_order(workload: Workload, block_tokens: int) -> Iterator[Request]:
    """The requests of a workload by arrival, when every answer takes no time."""
    workload.begin(block_tokens)
    order = numbers()
    arrivals = workload.arrivals()
    coming: list[tuple[int, int, Request]] = []
    following = next(arrivals, None)
    while following is not None or coming:
        if following is not None and (not coming or following.arrival_ns <= coming[0][0]):
            request, following = following, next(arrivals, None)
        else:
            request = heapq.heappop(coming)[2]
        yield request
        later = workload.finished(request, request.arrival_ns)
        if later is not None:
            heapq.heappush(coming, (later.arrival_ns, next(order), later))
