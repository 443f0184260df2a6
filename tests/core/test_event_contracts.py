"""The contracts of the tiered cache on the leader's own events, over random machines with tiers.

Law of this file: ``ContractShadow`` reads events alone, and its counts must be those of the leader.
"""

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.eviction.policy import POLICIES, PolicyConfig
from kvbm_console.core.ids import Route, Tier
from kvbm_console.core.leader import Outcome
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.explore.contracts import Broken, ContractShadow
from kvbm_console.simulator.embedded import Rig, build
from kvbm_console.simulator.link import DEFAULT_LINKS, Fault
from tests.simulator.loads import cloned, engine_of, load_of

WALK_EVERY = 20


class Machine:
    """The machine of a seed, run to its end, with its shadow and its events."""

    def __init__(self, seed: int, **changes: object) -> None:
        dice = random.Random(f"contracts {seed}")
        block = dice.choice([4, 16, 16])
        load = load_of(dice, block)
        if dice.random() < 0.25:
            load = cloned(dice, load)
        leader = LeaderConfig(
            block_tokens=block, g2_blocks=dice.choice([0, 20, 60, 300]), g3_blocks=dice.choice([0, 0, 80, 400]),
            offload_law="order", offload_threshold=dice.choice([0.0, 0.0, 0.5, 0.9]),
            asynchronous=dice.random() < 0.75, offload_batch_blocks=dice.choice([2, 64]),
            eviction=PolicyConfig(policy=dice.choice(POLICIES), disk_admission=dice.choice([0, 0, 2])),
            prefetch=dice.choice(["none", "chain"]),
        )
        leader = msgspec.structs.replace(leader, **changes)
        if not (leader.g2_blocks and leader.g3_blocks):
            leader = msgspec.structs.replace(leader, prefetch="none")
        engine = engine_of(dice, load, block)
        if dice.random() < 0.6:
            engine = msgspec.structs.replace(engine, g1_blocks=max(40, engine.g1_blocks // 4))
        links = DEFAULT_LINKS if leader.asynchronous else ()
        self.leader = leader
        self.shadow = ContractShadow(block, engine.token_bytes * block, links, WALK_EVERY)
        self.events: list[ev.Event] = []
        self.rig: Rig = build(leader, engine, load, publish=self._publish, links=DEFAULT_LINKS)
        fails = dice.choice([0.0, 0.0, 0.1])

        def fault(order: object) -> Fault | None:
            return Fault(blocks=(0,)) if dice.random() < fails else None

        self.rig.mover.faults = fault
        self.rig.run_to_end()
        self.shadow.finished()

    def _publish(self, stimulus: Stimulus, outcome: Outcome) -> None:
        self.events += outcome.events
        self.shadow.take(outcome.events)


def judge(seed: int) -> Machine:
    """The machine of a seed keeps the contracts, and the leader's totals are the shadow's."""
    machine = Machine(seed)
    shadow, totals = machine.shadow, machine.rig.leader.state.totals
    assert list(totals.hit_blocks) == shadow.hits
    assert totals.prompt_blocks == shadow.prompt_blocks
    assert totals.lost_blocks == shadow.lost
    assert dict(totals.moved_blocks) == dict(shadow.moved)
    assert [totals.evicted_blocks[tier - 1] for tier in Tier] == [shadow.evicted[tier] for tier in Tier]
    assert (totals.preemptions, totals.requests_preempted) == (shadow.preemptions, shadow.preempted_requests)
    assert machine.rig.engine.totals.preemptions == shadow.preemptions
    return machine


def judge_all(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        shadow = judge(seed).shadow
        seen += shadow.checked
        seen["moved"] += bool(shadow.moved)
        seen["loads"] += any(route[1] > route[4] for route in shadow.moved)
        seen["lost"] += bool(shadow.lost)
        seen["preempted"] += bool(shadow.preemptions)
        seen["evicted below"] += bool(shadow.evicted[Tier.G2])
    return seen


def test_random_machines_keep_the_contracts() -> None:
    seen = judge_all(range(14))
    assert min(seen[name] for name in ("moved", "loads", "preempted", "evicted below")) > 2, seen
    assert min(seen[f"BC-{number}"] for number in (2, 3, 4, 5, 7, 9, 10)) > 20, seen


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 1_200, 25))
def test_hundreds_of_random_machines_keep_the_contracts(first: int) -> None:
    judge_all(range(first, first + 25))


@pytest.mark.parametrize("seed", range(4))
def test_without_a_lower_tier_nothing_is_said_of_tiers_and_two_runs_are_the_same(seed: int) -> None:
    """BC-1: byte for byte, whatever else is configured of tiers."""
    runs = [
        Machine(seed, g2_blocks=0, g3_blocks=0, prefetch="none", offload_threshold=threshold)
        for threshold in (0.0, 0.9)
    ]
    tiers = (ev.BlocksStaged, ev.CandidatePlanned, ev.CandidatePromoted, ev.BlocksReserved, ev.OperationStarted)
    assert not any(isinstance(event, tiers) for event in runs[0].events)
    assert {event.tier for event in runs[0].events if isinstance(event, ev.PoolKnown)} == {Tier.G1}
    texts = [msgspec.msgpack.encode(run.events) for run in runs]
    assert texts[0] == texts[1]
    again = [msgspec.msgpack.encode(Machine(seed).events) for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.parametrize("seed", range(4))
def test_a_threshold_of_one_copies_nothing_and_of_zero_every_filled_block(seed: int) -> None:
    """BC-2: with 0, a block that became full is copied down, is there already, or is skipped with a reason."""
    assert not Machine(seed, g2_blocks=60, offload_threshold=1.0).shadow.moved
    machine = Machine(seed, g2_blocks=2_000, g3_blocks=0, prefetch="none", offload_threshold=0.0)
    filled, planned = set[int](), set[int]()
    for event in machine.events:
        if isinstance(event, ev.BlocksFilled):
            filled.update(unpack_hashes(event.hashes))
        elif isinstance(event, ev.CandidatePlanned) and event.route is Route.G1_G2:
            planned.update(unpack_hashes(event.hashes))
    assert filled == planned
    assert filled


# --- the shadow sees what is broken ---


def refold(events: list[ev.Event], machine: Machine) -> None:
    """Judge these events of a machine, stimulus by stimulus."""
    shadow = ContractShadow(machine.leader.block_tokens, machine.shadow.block_bytes, machine.shadow.links, WALK_EVERY)
    for _, together in groupby(events, lambda event: event.cause):
        shadow.take(list(together))
    shadow.finished()


def changed(machine: Machine, kind: type[ev.Event], change: Callable[[Any], ev.Event | None]) -> list[ev.Event]:
    """The events with the last one of a kind changed, up to a few behind it."""
    at = max(at for at, event in enumerate(machine.events) if isinstance(event, kind))
    made = change(machine.events[at])
    assert made is not None
    return [*machine.events[:at], made, *machine.events[at + 1 :]]


MUTANTS: dict[str, tuple[type[ev.Event], str, Callable[[Any], ev.Event]]] = {
    "a hit too many": (ev.PrefixScored, "BC-5", lambda event: replace(
        event, hits=(event.hits[0] + 1, *event.hits[1:])
    )),
    "another hash is evicted": (ev.BlocksEvicted, "BC-9", lambda event: replace(
        event, hashes=pack_hashes([key ^ 1 for key in unpack_hashes(event.hashes)])
    )),
    "a copy from another place": (ev.CandidatePromoted, "BC-", lambda event: replace(
        event, sources=event.targets, targets=event.sources
    )),
    "a release of a block that is not held": (ev.DeviceBlocksReleased, "BC-9", lambda event: replace(
        event, ids=event.ids[:4] * 2
    )),
    "a report a nanosecond late": (ev.OperationReported, "BC-4", lambda event: replace(event, at_ns=event.at_ns + 1)),
    "a place beyond the pool": (ev.BlocksReserved, "BC-10", lambda event: replace(
        event, ids=pack_ids([1_000_000] * (len(event.ids) // 4))
    )),
}


@cache
def small_machine() -> Machine:
    """A machine that every kind of event comes from; its tests change copies of its list."""
    return Machine(2, g2_blocks=60, g3_blocks=0, offload_threshold=0.0, asynchronous=True, prefetch="none")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_changed_event_breaks_its_contract(name: str) -> None:
    kind, contract, change = MUTANTS[name]
    machine = small_machine()
    with pytest.raises(Broken, match=contract):
        refold(changed(machine, kind, change), machine)


@pytest.mark.parametrize("kind", [
    ev.BlocksReady, ev.DeviceBlocksReleased, ev.CandidateEnded, ev.BlocksReserved, ev.SlotClosed, ev.BlocksEvicted,
])
def test_an_event_that_is_left_out_is_missed(kind: type[ev.Event]) -> None:
    machine = small_machine()
    at = next(at for at, event in enumerate(machine.events) if isinstance(event, kind))
    kept = machine.events[:at] + machine.events[at + 1 :]
    with pytest.raises(Broken):
        refold([replace(event, seq=number) for number, event in enumerate(kept)], machine)
