"""Recorded workloads: the JSON lines of Mooncake traces.

Law of this file: a line is used whole or refused, naming file, line number and mistake. The file is read one
line at a time, so its length does not matter.

A line is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``: one id for each
512 tokens of the prompt, the last block possibly partial, ids chained over the prefix. Output tokens have none. A line
may have a ``"priority"``, an ``"n"`` from 1 to 64 for so many sequences, and ``"output_hash_ids"`` of the blocks that
become full while the answer is generated. The published traces do not.
"""

import stat
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, TypeVar

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


class PromptLine(msgspec.Struct):
    """The prompt of a line: all that a replay without an engine reads."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    """Milliseconds."""
    input_length: _Tokens
    hash_ids: list[_TraceId]


class _Line(PromptLine, kw_only=True):
    output_length: _Tokens
    priority: Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)] = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=SEQUENCES_MAX)] = 1
    output_hash_ids: list[_TraceId] = []


def check_file(path: Path) -> None:
    """Raise ``UsageError`` if the trace cannot be opened, or is a pipe or device, which can be read only once."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            with path.open("rb"):
                return
    except OSError as error:
        raise UsageError(f"trace {path} cannot be read: {error.strerror}") from error
    raise UsageError(f"trace {path} must be a regular file, because it is read more than once")


class TraceFile:
    """A file of requests with arrival times; ``limit`` is the most requests, None for all.

    Raises ``UsageError`` at construction as ``check_file`` does.
    """

    endless = False

    def __init__(self, kind: str, path: Path, limit: int | None = None) -> None:
        self.path = path
        self.limit = limit
        self.name = f"{kind}:{path}"
        check_file(path)

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """None: the trace has its own arrival times."""
        return None

    def bad(self, number: int, mistake: str) -> UsageError:
        """The error of line ``number``."""
        return UsageError(f"{self.path} line {number}: {mistake}")


L = TypeVar("L", bound=PromptLine)


class MooncakeTrace(TraceFile):
    """A ``Workload`` that replays a Mooncake trace."""

    capacities = Capacities(
        block_tokens=TRACE_BLOCK_TOKENS, g1_blocks=512, g2_blocks=8_192, g3_blocks=32_768, batch_tokens=8_192
    )

    def __init__(self, path: Path, limit: int | None = None) -> None:
        super().__init__("mooncake", path, limit)
        self._block_tokens = TRACE_BLOCK_TOKENS

    def begin(self, block_tokens: int) -> None:
        """Check that ids of 512 tokens can be expressed in blocks of this size."""
        check_trace_block_tokens(block_tokens)
        self._block_tokens = block_tokens

    def arrivals(self) -> Iterator[Request]:
        """The requests in file order, which must be the order of their timestamps."""
        for index, line in self.lines(_Line):
            yield self._request(line, index)

    def lines(self, kind: type[L]) -> Iterator[tuple[int, L]]:
        """Index and line of each request. Raises ``UsageError`` at a line that is wrong or out of order."""
        decode = msgspec.json.Decoder(kind).decode
        earliest = 0.0
        number = index = 0
        with self.path.open("rb") as lines:
            while self.limit is None or index < self.limit:
                text = lines.readline(LINE_BYTES_MAX + 1)
                number += 1
                if number == 1:
                    text = text.removeprefix(BOM_UTF8)
                if not text:
                    return
                if len(text) > LINE_BYTES_MAX:
                    raise self.bad(number, f"longer than {LINE_BYTES_MAX} bytes")
                if not text.strip():
                    continue
                try:
                    line = decode(text)
                except (msgspec.DecodeError, RecursionError) as error:
                    raise self.bad(number, str(error)) from error
                wanted = -(-line.input_length // TRACE_BLOCK_TOKENS)
                if len(line.hash_ids) != wanted:
                    raise self.bad(
                        number,
                        f"hash_ids must have {wanted} ids for input_length {line.input_length}, got "
                        f"{len(line.hash_ids)}",
                    )
                if line.timestamp < earliest:
                    raise self.bad(number, "timestamp is before that of the line above")
                earliest = line.timestamp
                yield index, line
                index += 1

    def _request(self, line: _Line, index: int) -> Request:
        prompt, output, size = line.input_length, line.output_length, self._block_tokens
        hashes = hashes_of_trace_ids(line.hash_ids, prompt, size)
        own = (prompt + output) // size - len(hashes)
        known: list[int] = []
        if line.output_hash_ids:
            ids = line.hash_ids[: prompt // TRACE_BLOCK_TOKENS] + line.output_hash_ids
            known = hashes_of_trace_ids(ids, len(ids) * TRACE_BLOCK_TOKENS, size)[len(hashes) :][:own]
        last = [*hashes, *known][-1:]
        return Request(
            request=f"r{index:05d}", arrival_ns=round(line.timestamp * MILLISECOND_NS), hashes=tuple(hashes),
            output_hashes=(*known, *generated_hashes(last[0] if last else 0, index, own - len(known))),
            prompt_tokens=prompt, output_tokens=output, priority=line.priority,
            clone_hashes=clone_hashes(hashes[-1] if hashes else 0, index, own, line.n),
        )
