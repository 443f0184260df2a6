"""A small engine for tests: requests made of letters, a device pool, and nothing that is shared with the leader.

Law of this file: it believes what the leader answers (fences, withheld blocks, pins), so a wrong answer ends in two
writers of one place, which the oracle of bytes sees.

A prompt is a word: each letter is one full block, and the sequence hash of a block is the hash of the word up to it.
"""

from typing import Final

import msgspec
import xxhash

from kvbm_console.simulator.device_pool import DevicePool

BLOCK: Final = 4
"""Tokens in a block: small, so that a few decode steps fill one."""
PARENT: Final[dict[int, int]] = {}
"""Hash of a word to the hash of the word without its last letter."""
WORD: Final[dict[int, str]] = {}
"""Hash to word, for messages."""


def hash_of(word: str) -> int:
    """The sequence hash of the last letter of ``word``."""
    key = xxhash.xxh3_64_intdigest(word.encode()) or 1
    if key not in WORD:
        WORD[key] = word
        if len(word.split("/")) > 1 or len(word) > 1:
            parent = word.rsplit("/", 1)[0] if "/" in word else word[:-1]
            PARENT[key] = hash_of(parent)
    return key


def hashes_of(word: str) -> list[int]:
    """The sequence hashes of all letters of ``word``."""
    return [hash_of(word[: at + 1]) for at in range(len(word))]


class Request(msgspec.Struct):
    """One request as the engine sees it. ``total`` tokens are known, ``computed`` of them have K/V or will."""

    name: str
    word: str
    hashes: list[int]
    prompt: int
    total: int
    ids: list[int] = []
    reused: int = 0
    computed: int = 0
    stored: int = 0
    external: int | None = None
    """Tokens of the last lookup's answer; None: ask again, or never asked."""
    loading: bool = False
    announced: bool = False
    """Whether it was scheduled since it got its blocks."""
    preempted: bool = False
    decoding: bool = False
    skipped: bool = False

    @property
    def running(self) -> bool:
        return self.announced

    def hash_at(self, block: int) -> int:
        """The hash of this block of its sequence; blocks of generated tokens are named after the request."""
        while len(self.hashes) <= block:
            self.hashes.append(hash_of(f"{WORD[self.hashes[-1]] if self.hashes else ''}/{self.name}"))
        return self.hashes[block]


class Plan(msgspec.Struct):
    """An iteration that was formed and not finished."""

    iteration: int
    members: dict[str, int] = {}
    """Request to its computed tokens at the end of the iteration."""


class EngineModel:
    """Requests and places of one engine."""

    def __init__(self, blocks: int) -> None:
        self.pool = DevicePool(blocks)
        self.requests: dict[str, Request] = {}
        self.withheld: dict[str, list[int]] = {}
        """Places by request ("": pinned cached ones) that may not be reused before the leader says so."""
        self.iteration = 0
        self.plan: Plan | None = None

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // BLOCK)

    def local_prefix(self, request: Request) -> list[int]:
        """Places of its longest prefix here; one token is left to compute."""
        return self.pool.match(request.hashes, (request.total - 1) // BLOCK)

    def withhold(self, name: str, ids: list[int]) -> None:
        self.withheld.setdefault(name, []).extend(ids)

    def give_back(self, name: str, ids: list[int]) -> None:
        """The leader released these: they must be withheld, each once."""
        kept = self.withheld.get(name, [])
        for block in ids:
            assert block in kept, f"block {block} of {name!r} was released but is not withheld"
            kept.remove(block)
        self.pool.release(ids)
        if not kept:
            self.withheld.pop(name, None)

    def woken(self, request: Request, computed: int) -> None:
        """Its load ended; ``computed`` tokens are there."""
        assert request.loading, f"{request.name} was woken and does not load"
        request.loading = False
        request.computed = computed
        good = computed // BLOCK
        self.pool.store(request.ids[request.reused : good], request.hashes[request.reused : good])
        request.stored = good

    def preempted(self, request: Request) -> None:
        """Its blocks are gone; tokens are kept."""
        request.ids = []
        request.computed = request.stored = request.reused = 0
        request.external = None
        request.loading = request.announced = request.decoding = request.skipped = False
        request.preempted = True
        if self.plan is not None:
            self.plan.members.pop(request.name, None)

    def forget(self, name: str) -> None:
        self.requests.pop(name, None)
        if self.plan is not None:
            self.plan.members.pop(name, None)

    def clear(self, keep: list[int]) -> None:
        """The leader was reset."""
        self.requests.clear()
        self.withheld.clear()
        self.plan = None
        self.pool.clear()
        self.pool.touch(keep)
        if keep:
            self.withhold("", keep)

    def holders(self) -> list[list[int]]:
        """The block lists of everybody who holds a place."""
        return [request.ids for request in self.requests.values()] + list(self.withheld.values())
