"""Dynamo's request trace (``dynamo.request.trace.v1``) as a workload.

A line of the JSON lines is a record, or an envelope with the record under ``event``. A ``request_end`` record has the
arrival, the answer's length and, under ``replay``, the prompt as sequence hashes. Other records are passed over. The
file may be compressed with gzip. Answers have no hashes, so their blocks are used by nobody else.

Law of this file: a record is used whole or refused, naming file, line and mistake. Requests come by their arrival.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.core.unreadable import UNREADABLE
from kvbm_console.simulator.hashing import generated_hashes
from kvbm_console.simulator.traces import LINE_BYTES_MAX, MILLISECOND_NS, TOKENS_MAX, TraceFile
from kvbm_console.simulator.workloads import Capacities, Request

RECORD: Final = "dynamo.request.trace.v1"
GZIP: Final = b"\x1f\x8b"
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]
_Hash = Annotated[int, msgspec.Meta(ge=0)]


class _Replay(msgspec.Struct):
    trace_block_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    input_length: _Tokens
    input_sequence_hashes: list[_Hash]


class _Ended(msgspec.Struct):
    request_received_ms: Annotated[float, msgspec.Meta(ge=0, le=1e14)]
    replay: _Replay
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] = 0
    request_id: str = ""


class _Context(msgspec.Struct):
    session_id: str | None = None


class _Record(msgspec.Struct):
    request: _Ended
    agent_context: _Context | None = None


class DynamoRequestTrace(TraceFile):
    """A ``Workload`` of the requests that Dynamo traced. The block is that of the trace, or a multiple of it."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        super().__init__("dynamo", path, limit)
        self._records = sorted(self._read(), key=lambda record: record.request.request_received_ms)[:limit]
        sizes = {record.request.replay.trace_block_size for record in self._records}
        if len(sizes) != 1:
            found = "no request" if not sizes else f"blocks of {', '.join(map(str, sorted(sizes)))} tokens"
            raise UsageError(f"trace {path} must have requests with blocks of one size, got {found}")
        self.block_tokens = sizes.pop()
        self._together = 1
        self.capacities = Capacities(
            self.block_tokens, 16_384 * 16 // self.block_tokens or 1, 65_536 * 16 // self.block_tokens, 0, 8_192
        )

    def begin(self, block_tokens: int) -> None:
        """Take blocks of a multiple of the traced size."""
        if block_tokens % self.block_tokens:
            raise UsageError(
                f"--block-size must be a multiple of {self.block_tokens}, the block of {self.name}, got {block_tokens}"
            )
        self._together = block_tokens // self.block_tokens

    def arrivals(self) -> Iterator[Request]:
        """The requests by their arrival; the first one arrives at 0."""
        size, many = self.block_tokens * self._together, self._together
        since_ms = self._records[0].request.request_received_ms
        for index, record in enumerate(self._records):
            ended = record.request
            prompt, output = ended.replay.input_length, max(1, ended.output_tokens)
            full = prompt // self.block_tokens
            hashes = tuple(key or 1 for key in ended.replay.input_sequence_hashes[:full][many - 1 :: many])
            own = (prompt + output) // size - len(hashes)
            yield Request(
                f"r{index:05d}", round((ended.request_received_ms - since_ms) * MILLISECOND_NS), hashes,
                tuple(generated_hashes(hashes[-1] if hashes else 0, index, own)), prompt, output,
                None if record.agent_context is None else record.agent_context.session_id,
            )

    def _read(self) -> Iterator[_Record]:
        with self.path.open("rb") as file:
            packed = file.read(2) == GZIP
        with gzip.open(self.path) if packed else self.path.open("rb") as lines:
            number = 0
            try:
                while text := lines.readline(LINE_BYTES_MAX + 1):
                    number += 1
                    if len(text) > LINE_BYTES_MAX:
                        raise self.bad(number, f"longer than {LINE_BYTES_MAX} bytes")
                    record = self._record(number, text) if text.strip() else None
                    if record is not None:
                        yield record
            except (OSError, EOFError, zlib.error) as error:
                raise self.bad(number + 1, f"cannot be unpacked: {error}") from None

    def _record(self, number: int, text: bytes) -> _Record | None:
        """The record of a line, None for another kind."""
        try:
            found: Any = msgspec.json.decode(text)
            found = found.get("event", found) if isinstance(found, dict) else found
            if not isinstance(found, dict) or found.get("schema") != RECORD:
                raise self.bad(number, f"must be a record of {RECORD}")
            if found.get("event_type") != "request_end" or "replay" not in (found.get("request") or {}):
                return None
            record = msgspec.convert(found, _Record)
        except UNREADABLE as error:
            raise self.bad(number, str(error)) from error
        replay = record.request.replay
        if max(replay.input_sequence_hashes, default=0) >= 2**64:
            raise self.bad(number, "input_sequence_hashes must be below 2^64")
        full = replay.input_length // replay.trace_block_size
        if len(replay.input_sequence_hashes) not in (full, -(-replay.input_length // replay.trace_block_size)):
            raise self.bad(
                number, f"input_sequence_hashes must have {full} hashes for input_length {replay.input_length}, got "
                        f"{len(replay.input_sequence_hashes)}"
            )
        return record
