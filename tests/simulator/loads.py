"""Loads for the simulated engine: short and long requests that share beginnings, steady or in bursts.

Law of this file: a load is a function of its dice.
"""

import random
from collections.abc import Iterator

import msgspec

from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.hashing import clone_hashes
from kvbm_console.simulator.workloads import Capacities, Request


class Load:
    """Requests of families that share the beginning of their prompts; some follow the end of another."""

    name = "load"
    endless = False
    capacities = Capacities(16, 64, 0, 0, 256)

    def __init__(self, dice: random.Random, requests: list[Request], follow: float) -> None:
        self.requests = requests
        self._followers = [at for at in range(len(requests)) if dice.random() < follow]
        self._left: list[Request] = []

    def begin(self, block_tokens: int) -> None:
        """From the beginning."""
        self._left = [self.requests[at] for at in reversed(self._followers)]

    def arrivals(self) -> Iterator[Request]:
        """Those that follow nobody."""
        later = set(self._followers)
        return iter([request for at, request in enumerate(self.requests) if at not in later])

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """The next follower, a few milliseconds later."""
        if not self._left:
            return None
        following = self._left.pop()
        return msgspec.structs.replace(following, arrival_ns=at_ns + following.prompt_tokens * 100_000)


def load_of(dice: random.Random, block: int) -> Load:
    """Bursts or a steady stream of requests, short and long, odd and even."""
    families = dice.randint(1, 6)
    longest = dice.choice([40, 200, 700])
    output = dice.choice([3, 20, 64, 200])
    gap_ns = dice.choice([0, 100_000, 4_040_000, 12_000_000, 50_000_000, 300_000_000])
    even = dice.random() < 0.2
    requests = []
    at_ns, key = 0, 10_000_000
    for number in range(dice.randint(5, 40)):
        prompt, produced = dice.randint(1, longest), dice.randint(1, output)
        if even:
            prompt, produced = -(-prompt // block) * block, -(-produced // block) * block
        full, total = prompt // block, (prompt + produced) // block
        shared = dice.randint(0, full)
        family = dice.randrange(families) * 100_000 + 1
        hashes = [*range(family, family + shared), *range(key, key + total - shared)]
        key += total
        requests.append(
            Request(
                f"r{number}", at_ns, tuple(hashes[:full]), tuple(hashes[full:]), prompt, produced, f"s{number % 5}"
            )
        )
        if dice.random() < 0.7:
            at_ns += dice.randint(0, 2 * gap_ns) if dice.random() < 0.8 else gap_ns
    return Load(dice, requests, dice.choice([0.0, 0.0, 0.3, 0.8]))


def cloned(dice: random.Random, load: Load) -> Load:
    """The same load, in which some requests ask for several sequences."""
    for at, request in enumerate(load.requests):
        if dice.random() < 0.4:
            last = request.hashes[-1] if request.hashes else 0
            clones = clone_hashes(last, at, len(request.output_hashes), dice.choice([2, 2, 3, 5]))
            load.requests[at] = msgspec.structs.replace(request, clone_hashes=clones)
    return load


def engine_of(dice: random.Random, load: Load, block: int) -> EngineConfig:
    """Pools from tiny to large, budgets that chunk prompts, queues that overflow."""
    biggest = max(-(-(one.prompt_tokens + one.output_tokens) // block) for one in load.requests)
    return EngineConfig(
        g1_blocks=max(dice.choice([60, 100, 200, 2_000]), biggest if dice.random() < 0.9 else 1),
        max_batch_tokens=dice.choice([8, 32, 100, 256, 8_192]), max_running=dice.choice([2, 5, 16, 64]),
        max_waiting=dice.choice([3, 100_000, 100_000]), patience_ns=dice.choice([0, 20_000_000]),
        token_bytes=dice.choice([1_000, 131_072, 2_000_000]),
    )
