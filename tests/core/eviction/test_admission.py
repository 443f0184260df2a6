"""Admission to the disk tier by count: what was used too rarely is not written there, and offered again when used."""

import pytest

from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import BlocksReserved
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.ids import SkipReason, Tier
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.leader import memory as memory_module
from kvbm_console.core.leader.memory import LeaderMemory
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.planning.traces import parse_trace
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig, build

CHATS = "multiturn:requests={requests},sessions=6,prompts=2,system=96,user=64,output=32,turns=3,think=0.2,seed=5"


class Written:
    """Checks every block that is written to the disk tier against a count of its own."""

    def __init__(self) -> None:
        self.leader: Leader | None = None
        self.blocks = 0
        self.events = 0

    def __call__(self, stimulus: Stimulus, outcome: Outcome) -> None:
        self.events += len(outcome.events)
        for event in outcome.events:
            if self.leader is None or not isinstance(event, BlocksReserved):
                continue
            if self.leader.state.pools[event.pool].info.tier is Tier.G3:
                hashes = unpack_hashes(event.hashes)
                self.blocks += len(hashes)
                least = self.leader.config.eviction.disk_admission
                assert least <= 1 or all(self.leader.memory.named[key] >= least for key in hashes)


def run(least: int, *, hosts: int = 1, requests: int = 36) -> tuple[Rig, Written]:
    written = Written()
    config = LeaderConfig(
        g2_blocks=60, g3_blocks=300, offload_threshold=0.0,
        eviction=PolicyConfig(policy="lrfu_auto", disk_admission=least),
    )
    rig = build(
        config, EngineConfig(g1_blocks=48), parse_trace(CHATS.format(requests=requests)), publish=written, check=True,
        audit_every=20, hosts=hosts,
    )
    written.leader = rig.leader
    rig.run_to_end()
    assert rig.engine.totals.finished == requests
    return rig, written


def refused(rig: Rig) -> int:
    return sum(policy.not_admitted for policy in rig.leader.live_memory.policies)


def test_only_what_was_used_often_enough_is_written() -> None:
    everything, all_written = run(0)
    rig, written = run(2)
    assert 0 < written.blocks < all_written.blocks
    assert refused(rig) > 0 == refused(everything)
    assert rig.leader.state.totals.skipped[SkipReason.BELOW_FREQUENCY] > 0
    assert rig.leader.state.totals.hit_blocks[Tier.G3 - 1] > 0, "what comes back is admitted, and found"
    stricter, less = run(3)
    assert less.blocks < written.blocks
    assert refused(stricter) > 0


def test_one_use_is_no_filter() -> None:
    (none, all_written), (one, as_many) = run(0), run(1)
    assert (one.leader.digest(), as_many.events) == (none.leader.digest(), all_written.events)
    assert not one.leader.memory.named


def test_hosts_agree_on_what_is_admitted() -> None:
    run(2, hosts=2, requests=10)


def test_counts_are_halved_at_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "NAMED_MAX", 10)
    memory = LeaderMemory()
    for key in range(100):
        memory.name([1, 2, 2 + key % 7, 1_000 + key])
        assert len(memory.named) <= 10
    assert memory.named[1] >= 2, "what is popular stays"
