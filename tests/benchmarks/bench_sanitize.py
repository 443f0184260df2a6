"""Figures of ``sanitize``: a fingerprint beside a copy of the same bytes, and all checks of a store and its load.

Law of this file: the copies move real bytes between two sides of host memory; the checker does all its worker's part.
"""

from functools import partial
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from kvbm_console.sanitize.checker import Checker
from kvbm_console.sanitize.fingerprint import PageSide, Region, fold_page
from kvbm_console.sanitize.ledger import Orders
from tests.benchmarks.harness import Figure, Target, measure

LAYERS: Final = 16
PAGE_BYTES: Final = 32 * 1024
"""Of one layer of a block of 16 tokens of a model of 8 B parameters on one rank of two."""
BLOCKS: Final = 100
AT_ONE_PERCENT: Final = 0.1
"""Checks at a sample of 1 % may take a tenth of the copies' own time on one core of the host."""


class Copies:
    """A store of all blocks and a load of all of them, with the checker told of both."""

    def __init__(self, sampled: int) -> None:
        dice = np.random.default_rng(1)
        self.device = [dice.integers(-128, 127, (BLOCKS, PAGE_BYTES), dtype=np.int8) for _ in range(LAYERS)]
        self.host = [np.zeros((BLOCKS, PAGE_BYTES), dtype=np.int8) for _ in range(LAYERS)]
        self.pairs = [(at, at, 0) for at in range(BLOCKS)]
        sample = [(at, 1_000 + at) for at in range(0, BLOCKS, max(1, BLOCKS // sampled))][:sampled]
        self.orders = Orders(1, {1: sample, 2: sample})
        self.checker = Checker(
            PageSide([[Region(layer) for layer in self.device]]), PageSide([[Region(layer) for layer in self.host]]))

    def copy(self) -> None:
        """Both ways."""
        for device, host in zip(self.device, self.host, strict=True):
            np.copyto(host, device)
        for device, host in zip(self.device, self.host, strict=True):
            np.copyto(device, host)

    def checks(self) -> None:
        """What a worker adds to the two copies, which were made once."""
        checker = self.checker
        checker.begin(self.orders)
        checker.order(1, "a", self.pairs)
        checker.submit_store(1, "a", self.pairs)
        checker.end(1)
        checker.submit_load(2, "b", self.pairs)
        checker.end(2)
        assert not checker.mismatches


def fingerprint(size: int) -> Figure:
    """A page, beside copying it."""
    page = np.random.default_rng(1).integers(-128, 127, size, dtype=np.int8)
    target = np.zeros_like(page)
    return measure(
        f"sanitize, a fingerprint of {size // 1024} KiB", partial(fold_page, page), 1, "copying the bytes",
        partial(np.copyto, target, page), 1, Target(ratio=16),
    )


def beside_xxh3(size: int) -> Figure:
    """A page, beside xxh3 of the same bytes, which no device computes."""
    page = np.random.default_rng(1).integers(-128, 127, size, dtype=np.int8)
    return measure(f"sanitize, a fingerprint of {size // 1024} KiB, by xxh3", partial(fold_page, page), 1, "xxh3",
                   partial(xxh3_64_intdigest, page), 1, Target(ratio=16))


def checks(sampled: int) -> Figure:
    """Per block that is stored and loaded."""
    copies = Copies(sampled)
    copies.copy()
    return measure(
        f"sanitize, a block stored and loaded, {sampled} %", copies.checks, BLOCKS, "its two copies", copies.copy,
        BLOCKS, Target(ratio={1: AT_ONE_PERCENT}.get(sampled, 16)), rounds=5,
    )


BENCHES: Final = {
    "sanitize 32 KiB": partial(fingerprint, 32 * 1024), "sanitize 1 MiB": partial(fingerprint, 2**20),
    "sanitize 32 KiB xxh3": partial(beside_xxh3, 32 * 1024), "sanitize 1 MiB xxh3": partial(beside_xxh3, 2**20),
    "sanitize 1 %": partial(checks, 1), "sanitize 10 %": partial(checks, 10), "sanitize 100 %": partial(checks, 100),
}
"""Name to figure."""
