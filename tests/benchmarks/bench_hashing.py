"""Figures of the hashing of prompts: blocks of 16 tokens, from a list of tokens to sequence hashes.

Law of this file: the references chain sha256 over the same list of tokens: once over bare bytes, converted at once, and
once as vLLM's default hasher does it, which pickles the tuple (previous digest, tokens, extra keys) of each block.
"""

import hashlib
import pickle
from array import array
from random import Random
from typing import Final

from kvbm_console.simulator.hashing import sequence_hashes
from tests.benchmarks.harness import Figure, Target, measure

BLOCK_TOKENS: Final = 16
PROMPT: Final = 8_192
LONG: Final = 131_072
VOCABULARY: Final = 150_000


def _tokens(count: int) -> list[int]:
    rng = Random(1)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _bare(tokens: list[int]) -> bytes:
    data, digest, size = array("I", tokens).tobytes(), b"", 4 * BLOCK_TOKENS
    for at in range(0, len(data), size):
        digest = hashlib.sha256(digest + data[at : at + size]).digest()
    return digest


def _pickled(tokens: list[int]) -> bytes:
    digest = b""
    for at in range(0, len(tokens), BLOCK_TOKENS):
        block = (digest, tuple(tokens[at : at + BLOCK_TOKENS]), None)
        digest = hashlib.sha256(pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL)).digest()
    return digest


def bare() -> Figure:
    """An 8 k prompt."""
    tokens = _tokens(PROMPT)
    blocks = PROMPT // BLOCK_TOKENS
    return measure(
        "hash a block", lambda: sequence_hashes(tokens, BLOCK_TOKENS), blocks, "bare sha256 chain",
        lambda: _bare(tokens), blocks, Target(ratio=1 / 1.3),
    )


def like_vllm() -> Figure:
    """The same beside vLLM's way, which has been seen at 688,000 blocks a second."""
    tokens = _tokens(PROMPT)
    blocks = PROMPT // BLOCK_TOKENS
    return measure(
        "hash a block, beside vLLM's way", lambda: sequence_hashes(tokens, BLOCK_TOKENS), blocks,
        "sha256 of pickled blocks", lambda: _pickled(tokens), blocks, Target(ratio=1 / 3),
    )


def linear() -> Figure:
    """A block of one prompt of 128 k tokens costs what one of sixteen prompts of 8 k costs: as many tokens to read."""
    tokens = _tokens(LONG)
    prompts = [_tokens(LONG)[at : at + PROMPT] for at in range(0, LONG, PROMPT)]
    blocks = LONG // BLOCK_TOKENS

    def sixteen() -> None:
        for prompt in prompts:
            sequence_hashes(prompt, BLOCK_TOKENS)

    return measure(
        "hash a block of 128 k tokens", lambda: sequence_hashes(tokens, BLOCK_TOKENS), blocks,
        "a block of sixteen of 8 k", sixteen, blocks, Target(ratio=1.2),
    )


BENCHES: Final = {"hash a block": bare, "hash a block, beside vLLM": like_vllm, "hash a block of 128 k": linear}
