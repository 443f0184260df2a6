"""Recorded workloads: the JSON lines of Mooncake traces.

Law of this file: a line is used whole or refused, naming file, line number and what is wrong. The file is read one
line at a time, so its length does not matter.

A line is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``: one id for each
512 tokens of the prompt, the last one possibly partial, ids chained over the prefix. Output tokens have no ids. A line
may have a ``"priority"``, and an ``"n"`` from 1 to 64 for so many sequences, which the published traces do not.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.simulator.hashing import (
    TRACE_BLOCK_TOKENS,
    check_trace_block_tokens,
    clone_hashes,
    generated_hashes,
    hashes_of_trace_ids,
)
from kvbm_console.simulator.workloads import SEQUENCES_MAX, Capacities, Request

LINE_BYTES_MAX: Final = 4 * 1024 * 1024
"""A prompt of a million tokens has 2,000 ids, about 16 kB; a longer line is not a trace."""
TOKENS_MAX: Final = 16_777_216
"""Far above any context window; keeps a corrupt length from growing the core."""
PRIORITY_MAX: Final = 2**31 - 1
MILLISECOND_NS: Final = 1_000_000

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]
_TraceId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[_TraceId]
    priority: Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)] = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=SEQUENCES_MAX)] = 1


class MooncakeTrace:
    """A ``Workload`` that replays a Mooncake trace; ``limit`` is the most requests, None for all.

    Raises ``UsageError`` when the file cannot be opened, at construction.
    """

    endless = False
    capacities = Capacities(
        block_tokens=TRACE_BLOCK_TOKENS, g1_blocks=512, g2_blocks=8_192, g3_blocks=32_768, batch_tokens=8_192
    )

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.path = path
        self.limit = limit
        self.name = f"mooncake:{path}"
        self._block_tokens = TRACE_BLOCK_TOKENS
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise UsageError(f"trace {path} cannot be read: {error.strerror}") from error

    def begin(self, block_tokens: int) -> None:
        """Check that ids of 512 tokens can be expressed in blocks of this size."""
        check_trace_block_tokens(block_tokens)
        self._block_tokens = block_tokens

    def arrivals(self) -> Iterator[Request]:
        """The requests in file order, which must be the order of their timestamps."""
        decoder = msgspec.json.Decoder(_Line)
        earliest_ns = 0
        count = 0
        with self.path.open("rb") as lines:
            number = 0
            while self.limit is None or count < self.limit:
                line = lines.readline(LINE_BYTES_MAX + 1)
                number += 1
                if not line:
                    return
                if len(line) > LINE_BYTES_MAX:
                    raise self._bad(number, f"longer than {LINE_BYTES_MAX} bytes")
                if not line.strip():
                    continue
                request = self._request(decoder, line, number, count)
                if request.arrival_ns < earliest_ns:
                    raise self._bad(number, "timestamp is before that of the line above")
                earliest_ns = request.arrival_ns
                count += 1
                yield request

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """Nothing: the trace has its own arrival times."""
        return None

    def _bad(self, number: int, what: str) -> UsageError:
        return UsageError(f"{self.path} line {number}: {what}")

    def _request(self, decoder: "msgspec.json.Decoder[_Line]", line: bytes, number: int, index: int) -> Request:
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise self._bad(number, str(error)) from error
        prompt, output = entry.input_length, entry.output_length
        wanted = -(-prompt // TRACE_BLOCK_TOKENS)
        if len(entry.hash_ids) != wanted:
            raise self._bad(
                number, f"hash_ids must have {wanted} ids for input_length {prompt}, got {len(entry.hash_ids)}"
            )
        size = self._block_tokens
        hashes = hashes_of_trace_ids(entry.hash_ids, prompt, size)
        own = (prompt + output) // size - len(hashes)
        return Request(
            request=f"r{index:05d}", arrival_ns=round(entry.timestamp * MILLISECOND_NS), hashes=tuple(hashes),
            output_hashes=tuple(generated_hashes(hashes[-1] if hashes else 0, index, own)),
            prompt_tokens=prompt, output_tokens=output, priority=entry.priority,
            clone_hashes=clone_hashes(hashes[-1] if hashes else 0, index, own, entry.n),
        )
