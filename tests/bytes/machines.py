"""Simulated machines whose blocks have bytes, and what happens to their workers."""

import mmap
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvbm_console.bytes.memory import arena_bytes
from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.ids import Tier
from kvbm_console.core.leader import Outcome
from kvbm_console.simulator.embedded import Rig, build, default_engine_config, default_leader_config, parse_workload
from kvbm_console.simulator.link import DEFAULT_LINKS

ROOT = Path(__file__).resolve().parents[2]
CHATS = "multiturn:sessions=10,turns=3,think=0.1,ramp=0.02,user=120,output=40"
"""More than the pools below hold, so that copies go up and down all the time."""
BLOCKS = {"g1": 160, "g2": 240, "g3": 480}
SHARD_BYTES = 4096


class Taken:
    """Everything that a leader heard and said; ``each`` is called with the number of events so far."""

    def __init__(self, each: Callable[[int], None] | None = None) -> None:
        self.stimuli: list[st.Stimulus] = []
        self.events: list[ev.Event] = []
        self.each = each

    def keep(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        self.stimuli.append(stimulus)
        self.events += outcome.events
        if self.each is not None:
            self.each(len(self.events))

    @property
    def encoded(self) -> bytes:
        return msgspec.msgpack.encode([self.stimuli, self.events])

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def machine(
    taken: Taken, directory: Path | None, *, requests: int = 40, ranks: int = 2, seed: int = 0, blocks: int = 1,
    sizes: dict[str, int] = BLOCKS, links: Any = DEFAULT_LINKS, check: bool = True, warm: bool = False, **changes: Any,
) -> Rig:
    """A machine with little memory. ``blocks`` tells how many pages a block has on each rank."""
    workload = parse_workload(f"{CHATS},requests={requests},seed={seed}")
    config = default_leader_config(
        workload, ranks=ranks, g2_blocks=sizes["g2"], g3_blocks=sizes["g3"], **changes
    )
    token_bytes = SHARD_BYTES * blocks * ranks // config.block_tokens
    engine = default_engine_config(workload, g1_blocks=sizes["g1"], token_bytes=token_bytes)
    return build(config, engine, workload, publish=taken.keep, check=check, links=links, with_bytes=directory,
                 warm=warm)


class Killer:
    """Kills a random worker whenever so many events have come."""

    def __init__(self, every: int, seed: int, most: int = 10**9, number: int = signal.SIGKILL) -> None:
        self.rig: Rig | None = None
        self.every, self.most, self.number = every, most, number
        self.random = random.Random(seed)
        self.next = every
        self.kills = 0

    def __call__(self, events: int) -> None:
        if self.rig is None or self.rig.ranks is None or events < self.next or self.kills >= self.most:
            return
        self.next = events + self.every
        running = [process for process in self.rig.ranks.processes if process is not None]
        if running:
            os.kill(self.random.choice(running), self.number)
            self.kills += 1


def arena_of(rig: Rig, rank: int, tier: Tier) -> tuple[mmap.mmap, int]:
    """The memory of a pool on a rank, and where its places begin."""
    assert rig.ranks is not None
    (pool,) = (pool for pool in rig.ranks.pools.values() if pool.tier is tier)
    size = arena_bytes(pool.places, rig.ranks.shard_bytes)
    return mmap.mmap(rig.ranks.arena(rank, pool.pool), size), size - pool.places * rig.ranks.shard_bytes
