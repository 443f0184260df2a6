"""The events of vLLM's own scheduler, folded by an event stream and compared with its pools after every step.

Law of this file: a count without doubt is the engine's own, on the device and on the host. Doubt begins only where the
events leave two readings.
"""

import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.kv_offload.base import get_offload_block_hash

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Tier
from kvbm_console.core.leader import Leader
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events.stream import EventStream
from tests.vllm.engine import Engine, offloading
from tests.vllm.features import workload
from tests.vllm.test_copies import simple
from tests.vllm.truth import cached, short

pytestmark = pytest.mark.timeout(300)

SOURCE = 1


class Follower:
    """An engine and the stream that follows it. ``clears`` are the clears of the events taken."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.dispatcher = Dispatcher(Leader(LeaderConfig()), lambda: 0)
        self.stream = EventStream(self.dispatcher, SOURCE)
        self.clears = 0
        self._taken = 0

    def pump(self) -> None:
        """Take what was published since."""
        for seq in range(self._taken, len(self.engine.batches)):
            batch = self.engine.batches[seq]
            self.clears += sum(isinstance(event, AllBlocksCleared) for event in batch.events)
            self.stream.accept(seq, msgspec.msgpack.encode(batch))
        self._taken = len(self.engine.batches)

    @property
    def certain(self) -> bool:
        return SOURCE not in self.dispatcher.leader.state.lost_sources

    def shown(self) -> dict[Tier, Counter[int]]:
        found = {Tier.G1: Counter[int](), Tier.G2: Counter[int]()}
        for pool in self.dispatcher.leader.state.pools:
            found[pool.info.tier].update({key: len(pool.places_of(key)) for key in pool.by_hash})
        return found

    def held(self) -> dict[Tier, Counter[int]]:
        """The content of the engine's own pools."""
        pools = {Tier.G1: self.engine.scheduler.kv_cache_manager.block_pool}
        connector = self.engine.connector
        if hasattr(connector, "scheduler_manager"):
            pools[Tier.G2] = connector.scheduler_manager.cpu_block_pool
        found = {
            tier: Counter(cached(block)[1] for block in pool.blocks if block.block_hash is not None)
            for tier, pool in pools.items()
        }
        if connector is not None and Tier.G2 not in pools:
            chunks = connector.connector_scheduler.manager._policy.chunks
            found[Tier.G2] = Counter(short(get_offload_block_hash(key)) for key, one in chunks.items() if one.is_ready)
        return found


CONNECTORS: dict[str, dict[str, Any] | None] = {
    "alone": None, "OffloadingConnector": offloading(40), "SimpleCPUOffloadConnector": simple(60),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(CONNECTORS))
def test_a_count_without_doubt_is_the_engines(name: str, seed: int, tmp_path: Path) -> None:
    """Resets of device and connector come at any time. The device refuses a reset while requests run."""
    engine = Engine(tmp_path, CONNECTORS[name], blocks=48, running=4)
    follower, dice = Follower(engine), random.Random(seed)
    compared = Counter[bool]()

    def look() -> None:
        """Between two steps: everything that happened is published."""
        follower.pump()
        if follower.certain:
            shown, held = follower.shown(), follower.held()
            assert {tier: shown[tier] for tier in held} == held
            compared[follower.clears > 0] += 1
        if engine.steps > 20 and dice.random() < 0.06:
            below = dice.random() < 0.5
            # A connector's reset of which no event tells cannot be shown: OffloadingConnector's, if the device refuses.
            surely = dice.random() < 0.5 or (below and name == "OffloadingConnector")
            with suppress(RuntimeError):  # requests wait for loads, so nothing was reset
                engine.scheduler.reset_prefix_cache(reset_running_requests=surely, reset_connector=below)

    for _ in engine.run(workload(seed, 6, 4), before=look):
        pass
    assert compared[False] > 10
    assert follower.clears > 0
    assert bool(compared[True]) is (name == "alone"), "with a tier below, nothing is certain behind a clear"
    engine.scheduler.shutdown()
