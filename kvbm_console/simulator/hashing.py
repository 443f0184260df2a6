"""Sequence hashes: the identity of content, computed at the edge from tokens or from the ids of a trace.

Law of this file: hashing is pure and linear in the prompt. A hash is never 0, the value of a place without a full
block, so a real 0 becomes 1. The core itself sees the results only; tokens stay on this side.

Three algorithms, all chained over the whole prefix and the salt:

``dynamo``  xxh3_64, compatible with Dynamo's tokens: ``block_hash = H(le_u32 tokens, seed = salt_hash)``, the first
            sequence hash is the first block hash, then ``H(le_u64 previous || le_u64 block_hash, seed = salt_hash)``.

``sha256``  like vLLM's: sha256 over the previous digest (32 bytes), the salt and the tokens. Its integer is the last
            eight bytes, big-endian, which is vLLM's own integer form.

``blis``    like inference-sim's: sha256 over the previous hex digest and ``"token|"`` for each token, with the same
            integer form.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec
import xxhash

from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.errors import UsageError

Algorithm = Literal["dynamo", "sha256", "blis"]
ALGORITHMS: Final[tuple[Algorithm, ...]] = ("dynamo", "sha256", "blis")

TRACE_BLOCK_TOKENS: Final = 512
"""Tokens that one id of a Mooncake trace stands for."""

_TRACE_SEED: Final = 0x6D6F6F6E63616B65
"""Seed of the hashes of trace ids ("mooncake"), so that they never meet those of tokens."""
_GENERATED_SEED: Final = 0x67656E6572617465
"""Seed of the hashes of generated blocks that have no ids in a trace ("generate")."""
_FIRST_DIGEST: Final = bytes(32)
_TOKEN_BYTES: Final = 4
_pair: Final = struct.Struct("<QQ").pack
_triple: Final = struct.Struct("<QQQ").pack


def salt_hash(salt: str | None = None, lora: str | None = None) -> int:
    """The seed of a chain, xxh3_64 (seed 0) of the canonical JSON of salt and LoRA name. Absent values are null.

    >>> salt_hash() == salt_hash(None, None) != salt_hash("tenant")
    True
    """
    return xxhash.xxh3_64_intdigest(msgspec.json.encode({"salt": salt, "lora_name": lora}, order="sorted"), 0)


def dynamo_block_hash(tokens: Sequence[int], salt: int) -> int:
    """Hash of one block's tokens alone.

    >>> dynamo_block_hash([1, 2, 3, 4], 1337)
    14643705804678351452
    """
    return xxhash.xxh3_64_intdigest(_token_bytes(tokens), salt)


def _token_bytes(tokens: Sequence[int]) -> bytes:
    column = array("I", tokens)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def as_hash(digest: bytes) -> int:
    """The integer form of a raw digest, its last eight bytes, big-endian, and never 0."""
    return int.from_bytes(digest[-8:], "big") or 1


def blis_hash(previous: str, tokens: Iterable[int]) -> str:
    """inference-sim's block hash in hex; ``previous`` is "" for the first block."""
    return hashlib.sha256((previous + "".join(f"{token}|" for token in tokens)).encode()).hexdigest()


class Chain:
    """Sequence hashes of a growing sequence of tokens; each token is hashed once.

    ``hashes`` holds one number per full block so far. ``salt`` is the number of ``salt_hash``.

    >>> chain = Chain(4, salt=1337)
    >>> chain.extend([1, 2, 3, 4, 5]), chain.extend([6, 7, 8])
    ([14643705804678351452], [4945711292740353085])
    """

    def __init__(self, block_tokens: int, *, algorithm: Algorithm = "dynamo", salt: int = 0) -> None:
        if block_tokens < 1:
            raise UsageError(f"block_tokens must be at least 1, got {block_tokens}")
        if algorithm not in ALGORITHMS:
            raise UsageError(f"hash algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        self.block_tokens = block_tokens
        self.salt = salt
        self.hashes: list[int] = []
        self._partial: list[int] = []
        self._append: Callable[[Sequence[int]], list[int]] = {
            "dynamo": self._dynamo, "sha256": self._sha256, "blis": self._blis,
        }[algorithm]
        self._raw: int | None = None
        self._digest = _FIRST_DIGEST
        self._hex = ""

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self.hashes) * self.block_tokens + len(self._partial)

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens; returns the sequence hashes of the blocks that became full."""
        pending = [*self._partial, *tokens] if self._partial else tokens
        size = self.block_tokens
        full = len(pending) // size * size
        new = self._append(pending[:full]) if full else []
        self._partial = list(pending[full:])
        self.hashes.extend(new)
        return new

    def _blocks(self, tokens: Sequence[int]) -> Iterator[tuple[bytes]]:
        """Whole blocks of tokens as bytes, converted at once."""
        return struct.iter_unpack(f"{_TOKEN_BYTES * self.block_tokens}s", _token_bytes(tokens))

    def _dynamo(self, tokens: Sequence[int]) -> list[int]:
        digest, salt, raw = xxhash.xxh3_64_intdigest, self.salt, self._raw
        blocks = [digest(block, salt) for (block,) in self._blocks(tokens)]
        new: list[int] = []
        for block in blocks:
            raw = block if raw is None else digest(_pair(raw, block), salt)
            new.append(raw or 1)
        self._raw = raw
        return new

    def _sha256(self, tokens: Sequence[int]) -> list[int]:
        salt, sha256, digest = self.salt.to_bytes(8, "little"), hashlib.sha256, self._digest
        new: list[int] = []
        for (block,) in self._blocks(tokens):
            digest = sha256(digest + salt + block).digest()
            new.append(as_hash(digest))
        self._digest = digest
        return new

    def _blis(self, tokens: Sequence[int]) -> list[int]:
        new: list[int] = []
        for at in range(0, len(tokens), self.block_tokens):
            self._hex = blis_hash(self._hex, tokens[at : at + self.block_tokens])
            new.append(as_hash(bytes.fromhex(self._hex)))
        return new


def sequence_hashes(
    tokens: Sequence[int], block_tokens: int, *, algorithm: Algorithm = "dynamo", salt: int = 0
) -> list[int]:
    """One sequence hash for each full block of ``tokens``."""
    return Chain(block_tokens, algorithm=algorithm, salt=salt).extend(tokens)


def hashes_of_trace_ids(ids: Sequence[int], tokens: int, block_tokens: int) -> list[int]:
    """Sequence hashes of the full blocks of a prompt that a trace describes by one id per 512 tokens.

    The last id may stand for a partial block, so ``len(ids)`` is ``ceil(tokens / 512)``. ``block_tokens`` divides 512
    (an id becomes several blocks) or is a multiple of it (several ids become one block). Chained: two prompts have
    equal hashes exactly as far as their ids are equal.

    >>> a, b = hashes_of_trace_ids([7, 8], 1024, 256), hashes_of_trace_ids([7, 9], 1024, 256)
    >>> a[:2] == b[:2], a[2] == b[2]
    (True, False)
    """
    check_trace_block_tokens(block_tokens)
    full = tokens // block_tokens
    hashes: list[int] = []
    value = 0
    digest = xxhash.xxh3_64_intdigest
    if block_tokens >= TRACE_BLOCK_TOKENS:
        step = block_tokens // TRACE_BLOCK_TOKENS
        for at in range(0, full * step, step):
            value = digest(pack_hashes((value, *ids[at : at + step])), _TRACE_SEED) or 1
            hashes.append(value)
        return hashes
    parts, left = TRACE_BLOCK_TOKENS // block_tokens, full
    for key in ids:
        for part in range(min(parts, left)):
            value = digest(_triple(value, key, part), _TRACE_SEED) or 1
            hashes.append(value)
        left -= parts
        if left <= 0:
            break
    return hashes


def check_trace_block_tokens(block_tokens: int) -> None:
    """Raise ``UsageError`` unless a trace of 512-token ids can be expressed in blocks of this size."""
    if block_tokens < 1 or (TRACE_BLOCK_TOKENS % block_tokens and block_tokens % TRACE_BLOCK_TOKENS):
        raise UsageError(
            f"block_tokens must divide {TRACE_BLOCK_TOKENS} or be a multiple of it for a trace, got {block_tokens}"
        )


def clone_hashes(previous: int, owner: int, count: int, n: int) -> tuple[tuple[int, ...], ...]:
    """Hashes of ``count`` blocks for each of the sequences 2 to n of a request, as ``generated_hashes``.

    ``owner`` is below 2**56.
    """
    return tuple(tuple(generated_hashes(previous, owner + (index << 56), count)) for index in range(1, n))


def generated_hashes(previous: int, owner: int, count: int) -> list[int]:
    """Hashes of ``count`` blocks that follow ``previous`` (0: none) and that only ``owner`` generates."""
    hashes: list[int] = []
    value = previous
    for block in range(count):
        value = xxhash.xxh3_64_intdigest(_triple(value, owner, block), _GENERATED_SEED) or 1
        hashes.append(value)
    return hashes
