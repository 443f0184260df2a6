"""LMCache's storage trace (``.lct``) as a workload.

An LMCache server with ``--trace-level storage --trace-output FILE`` writes its storage calls: frames of a big-endian
length of four bytes and a msgpack map, first a header, then calls. ``submit_prefetch_task`` is the lookup of a request
and has the keys of its prompt's chunks in their order, once for each rank and group of layers. They are its argument
``keys`` before LMCache 0.5.4, ``spec.keys`` in 0.5.4, and ``spec.key_groups[].keys`` in later releases.

The trace has no answers and no rest of a prompt behind its last whole chunk, so each request has one token more than
its chunks, and makes one. The salt of a cache is not in its keys, so prompts under different salts share their chunks.

Law of this file: a frame is used whole or refused, naming file, frame and mistake. A frame that the end of the file
cuts, which a killed server leaves, is left out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.errors import UsageError
from kvbm_console.core.unreadable import UNREADABLE
from kvbm_console.simulator.hashing import generated_hashes
from kvbm_console.simulator.traces import TOKENS_MAX, TraceFile
from kvbm_console.simulator.workloads import Capacities, Request

MAGIC: Final = b"LMCT"
LMCACHE_NOTE: Final = "the trace has no answers, so every request makes one token"
FRAME_BYTES_MAX: Final = 64 << 20
"""A lookup of ten million tokens is below it."""
_LENGTH: Final = 4
_LOOKUP: Final = "StorageManager.submit_prefetch_task"
_CHUNK_TOKENS_MAX: Final = 65_536


class _Header(msgspec.Struct, tag="header"):
    magic: bytes
    format_version: int
    level: str
    trace_schema_version: int


class _Call(msgspec.Struct, tag="record"):
    t_mono: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    qualname: str
    args: dict[str, Any]


class _Key(msgspec.Struct):
    chunk_hash: Annotated[bytes, msgspec.Meta(min_length=1)]
    model_name: str


class _TaggedKey(msgspec.Struct):
    v: _Key


class _Layout(msgspec.Struct):
    shapes: Annotated[list[Annotated[list[int], msgspec.Meta(min_length=2)]], msgspec.Meta(min_length=1)]


class _TaggedLayout(msgspec.Struct):
    v: _Layout


class _TaggedMode(msgspec.Struct):
    v: str


class _Spec(msgspec.Struct):
    """What a lookup asks for: keys with their layout, or rows of them."""

    keys: list[_TaggedKey] = []
    layout_desc: _TaggedLayout | None = None
    group_layout_descs: dict[str, _TaggedLayout] = {}
    key_groups: list["_TaggedSpec"] = []
    mode: _TaggedMode | None = None
    lock_mode: _TaggedMode | None = None

    def rows(self) -> list["_Spec"]:
        """The rows, one per rank and group of layers."""
        return [row.v for row in self.key_groups] or [self]

    def warms(self) -> bool:
        """True if it only brings objects up and belongs to no request."""
        return any(mode is not None and mode.v in ("WARM", "NO_LOCK") for mode in (self.mode, self.lock_mode))

    def chunk_tokens(self) -> int:
        """Tokens of a chunk: the last dimension but one of its tensors. 0 if no layout is given."""
        layouts = [self.layout_desc, *self.group_layout_descs.values()]
        return next((layout.v.shapes[0][-2] for layout in layouts if layout is not None), 0)


class _TaggedSpec(msgspec.Struct):
    v: _Spec


class _Arguments(_Spec):
    """The arguments of ``submit_prefetch_task``; before LMCache 0.5.4 they are the specification itself."""

    external_request_id: str = ""
    spec: _TaggedSpec | None = None


class _Lookup(msgspec.Struct):
    at_ns: int
    model: str
    chunk_tokens: int
    hashes: tuple[int, ...]


_HEADER: Final = msgspec.msgpack.Decoder(_Header)
_CALL: Final = msgspec.msgpack.Decoder(_Call)


class LMCacheTrace(TraceFile):
    """A ``Workload`` of the prompts that LMCache looked up. The block is LMCache's chunk, or a multiple of it.

    A request that was looked up again, as after a preemption, is one request, at its first lookup.
    """

    def __init__(self, path: Path, limit: int | None = None) -> None:
        super().__init__("lmcache", path, limit)
        self._lookups = self._read()
        for what, found in (
            ("model", {lookup.model for lookup in self._lookups}),
            ("size of chunks", {str(lookup.chunk_tokens) for lookup in self._lookups}),
        ):
            if len(found) != 1:
                got = ", ".join(sorted(found)) or "no lookup"
                raise UsageError(f"trace {path} must have lookups of one {what}, got {got}")
        self.block_tokens = self._lookups[0].chunk_tokens
        self._together = 1
        self.capacities = Capacities(
            self.block_tokens, 16_384 * 16 // self.block_tokens or 1, 65_536 * 16 // self.block_tokens or 1, 0, 8_192
        )

    def begin(self, block_tokens: int) -> None:
        """Take blocks of a multiple of the chunk."""
        if block_tokens % self.block_tokens:
            raise UsageError(
                f"--block-size must be a multiple of {self.block_tokens}, the chunk of {self.name}, got {block_tokens}"
            )
        self._together = block_tokens // self.block_tokens

    def arrivals(self) -> Iterator[Request]:
        """The requests by their lookup; the first one arrives at 0."""
        many, since_ns = self._together, self._lookups[0].at_ns
        for index, lookup in enumerate(self._lookups):
            hashes, prompt = lookup.hashes[many - 1 :: many], len(lookup.hashes) * self.block_tokens + 1
            own = (prompt + 1) // (self.block_tokens * many) - len(hashes)
            yield Request(
                f"r{index:05d}", lookup.at_ns - since_ns, hashes,
                tuple(generated_hashes(hashes[-1] if hashes else 0, index, own)), prompt, 1,
            )

    def _read(self) -> list[_Lookup]:
        """The first lookup of each request, by time."""
        lookups: list[_Lookup] = []
        seen: set[str] = set()
        for number, frame in self._frames():
            try:
                if number == 1:
                    self._check(_HEADER.decode(frame))
                    continue
                call = _CALL.decode(frame)
                if not call.qualname.endswith(_LOOKUP):
                    continue
                arguments = msgspec.convert(call.args, _Arguments)
                spec = arguments if arguments.spec is None else arguments.spec.v
                request = arguments.external_request_id
                if spec.warms() or request in seen:
                    continue
                lookup = _lookup(round(call.t_mono * SECOND_NS), spec)
            except UNREADABLE as error:
                raise self.bad(number, str(error)) from error
            if lookup.hashes:
                seen |= {request} - {""}
                lookups.append(lookup)
        return sorted(lookups, key=lambda lookup: lookup.at_ns)[: self.limit]

    def bad(self, number: int, mistake: str) -> UsageError:
        """The error of frame ``number``."""
        return UsageError(f"{self.path} frame {number}: {mistake}")

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        with self.path.open("rb") as file:
            while len(head := file.read(_LENGTH)) == _LENGTH:
                number += 1
                length = int.from_bytes(head, "big")
                if length > FRAME_BYTES_MAX:
                    raise self.bad(number, f"must have at most {FRAME_BYTES_MAX} bytes, got {length}")
                frame = file.read(length)
                if len(frame) < length and number > 1:
                    return
                yield number, frame
        if not number:
            raise UsageError(f"trace {self.path} must be a storage trace of LMCache, got a file without a frame")

    def _check(self, header: _Header) -> None:
        if header.magic != MAGIC:
            raise self.bad(1, f"must begin with {MAGIC!r}, got {header.magic[:8]!r}")
        if (header.format_version, header.trace_schema_version) != (1, 1):
            raise self.bad(
                1, f"must have format 1 and schema 1, got {header.format_version} and {header.trace_schema_version}"
            )
        if header.level != "storage":
            raise self.bad(1, f"level must be storage (--trace-level storage), got {header.level!r}")


def _lookup(at_ns: int, spec: _Spec) -> _Lookup:
    """The prompt of a lookup. Raises ``msgspec.ValidationError``."""
    rows = spec.rows()
    keys = [key.v for row in rows for key in row.keys]
    models = {key.model_name for key in keys}
    if len(models) > 1:
        raise msgspec.ValidationError(f"a lookup must have keys of one model, got {', '.join(sorted(models))}")
    chunk_tokens = rows[0].chunk_tokens()
    if keys and not 1 <= chunk_tokens <= _CHUNK_TOKENS_MAX:
        raise msgspec.ValidationError(f"a chunk must have from 1 to {_CHUNK_TOKENS_MAX} tokens, got {chunk_tokens}")
    hashes = dict.fromkeys(int.from_bytes(key.chunk_hash[:8], "big") or 1 for key in keys)
    if len(hashes) * chunk_tokens >= TOKENS_MAX:
        raise msgspec.ValidationError(
            f"a prompt must have fewer than {TOKENS_MAX} tokens, got {len(hashes)} chunks of {chunk_tokens}"
        )
    return _Lookup(at_ns, min(models, default=""), chunk_tokens, tuple(hashes))
