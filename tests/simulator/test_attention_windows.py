"""Attention windows of the simulated engine, against a rule that asks of each token which tokens it sees.

Law of this file: the witness keeps places and contents of its own, from the calls of the engine alone. It has no
formula of the engine: a block is needed if the next token sees a token of it.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import FinishReason
from kvbm_console.planning.ledger import MachineLedger
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.device_pool import NO_PLACE, DevicePool
from kvbm_console.simulator.embedded import build
from kvbm_console.simulator.machine import SimulatedMachine
from kvbm_console.simulator.work import Plan, Work
from kvbm_console.simulator.workloads import Capacities, GivenRequests, Request
from tests.simulator.loads import Load, cloned, engine_of, load_of

TOGETHER = 20
CAPACITIES = Capacities(16, 8, 0, 0, 64)


def sees(position: int, window: int, block: int, size: int) -> bool:
    """True if the token at a position sees the last token of this block, or a token behind it."""
    return (block + 1) * size - 1 > position - window


class Witness(MachineLedger):
    """A ledger that keeps who holds which place, and checks each call."""

    def __init__(self, config: EngineConfig, load: Load, block: int) -> None:
        self.window, self.size = config.window_tokens, block
        self.mine: dict[str, dict[int, int]] = {}
        """Request to its blocks with their places."""
        self.content: dict[int, int] = {}
        self.held: Counter[int] = Counter()
        self.gone = self.behind = self.shared = 0
        """Blocks that windows passed, admissions behind blocks without a place, and clones."""
        super().__init__(config, load, block)

    def take(self, name: str, first: int, places: Sequence[int]) -> None:
        mine = self.mine.setdefault(name, {})
        for at, place in enumerate(places, first):
            assert not self.held[place], f"{place} of {name} has a holder"
            self.content.pop(place, None)
            mine[at] = place
            self.held[place] += 1

    def found(self, work: Work) -> int:
        """The most leading blocks of which the next token sees none that is not here."""
        here, most = set(self.content.values()), min(len(work.hashes), (work.total - 1) // self.size)
        return next(
            count for count in range(most, -1, -1) if all(
                work.hashes[at] in here for at in range(count) if sees(count * self.size, self.window, at, self.size)
            )
        )

    def admitted(self, work: Work, prefix: int, found_tokens: int) -> None:
        assert prefix == self.found(work)
        mine = self.mine[work.name] = {}
        for at, place in enumerate(work.blocks[:prefix]):
            assert sees(prefix * self.size, self.window, at, self.size) == (place != NO_PLACE)
            if place != NO_PLACE:
                assert self.content[place] == work.hashes[at]
                mine[at] = place
                self.held[place] += 1
        self.behind += NO_PLACE in work.blocks
        self.take(work.name, prefix, work.blocks[prefix:])
        super().admitted(work, prefix, found_tokens)

    def appended(self, work: Work, ids: list[int]) -> None:
        self.take(work.name, len(work.blocks) - len(ids), ids)
        super().appended(work, ids)

    def passed(self, work: Work) -> list[int]:
        mine = self.mine[work.name]
        for at in [at for at in mine if not sees(work.computed, self.window, at, self.size)]:
            self.held[mine.pop(at)] -= 1
            self.gone += 1
        return super().passed(work)

    def cloned(self, work: Work, clones: Sequence[Work], ids: list[int]) -> None:
        full, at = work.computed // self.size, 0
        for clone in clones:
            self.mine[clone.name] = {block: place for block, place in self.mine[work.name].items() if block < full}
            self.held.update(self.mine[clone.name].values())
            tail = len(clone.blocks) - full
            self.take(clone.name, full, ids[at : at + tail])
            at += tail
        self.shared += len(clones)
        super().cloned(work, clones, ids)

    def scheduled(self, plan: Plan, iteration: int, running: int, waiting: int) -> None:
        assert not plan.appended
        counts = [(work, 1) for work in self.engine.scheduler.running[: plan.steady]]
        for work, count in [*counts, *plan.tokens]:
            end = -(-(work.computed + count) // self.size)
            needed = [at for at in range(end) if sees(work.computed, self.window, at, self.size)]
            assert sorted(self.mine[work.name]) == needed
            assert [self.mine[work.name].get(at, NO_PLACE) for at in range(end)] == work.blocks
        super().scheduled(plan, iteration, running, waiting)

    def filled(
        self, iteration: int, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        self.content.update(zip(ids, hashes, strict=True))
        super().filled(iteration, works, counts, ids, hashes)

    def preempted(self, work: Work) -> list[int]:
        self.held.subtract(self.mine.pop(work.name).values())
        return super().preempted(work)

    def finished(self, name: str, ids: list[int], reason: FinishReason) -> bool:
        mine = self.mine.pop(name, {})
        assert sorted(ids) == sorted(mine.values())
        self.held.subtract(mine.values())
        return super().finished(name, ids, reason)


def witness_of(seed: int) -> Witness:
    dice = random.Random(seed)
    block = dice.choice([1, 4, 16, 16])
    load = load_of(dice, block)
    if seed % 3 == 0:
        load = cloned(dice, load)
    engine = engine_of(dice, load, block)
    window = dice.choice([2, block + 1, 4 * block, 4 * block + 1, dice.randint(2, 300)])
    config = msgspec.structs.replace(engine, window_tokens=max(2, window))
    least = max(config.most_held(one.prompt_tokens + one.output_tokens, block) for one in load.requests)
    if dice.random() < 0.7:  # else all requests fit at once
        config = msgspec.structs.replace(config, g1_blocks=least + dice.randint(0, 8))
    return Witness(config, load, block)


@pytest.mark.parametrize("first", range(1, 61, TOGETHER))
def test_a_request_holds_the_blocks_that_its_next_token_sees_and_finds_by_them(first: int) -> None:
    gone = behind = preempted = shared = 0
    for seed in range(first, first + TOGETHER):
        witness = witness_of(seed)
        witness.run_to_end()
        gone, behind = gone + witness.gone, behind + witness.behind
        preempted, shared = preempted + witness.totals.preemptions, shared + witness.shared
    assert min(gone, behind, preempted, shared) > 0


@given(st.data(), st.integers(1, 6), st.integers(0, 12))
def test_the_longest_prefix_whose_last_blocks_are_here_is_found(data: st.DataObject, blocks: int, limit: int) -> None:
    hashes = list(range(1, 11))
    here = data.draw(st.lists(st.sampled_from(hashes), unique=True, min_size=1))
    pool = DevicePool(10)
    places = pool.allocate(len(here)) or []
    pool.store(places, here)
    place_of = dict(zip(here, places, strict=True))
    longest = max(
        count for count in range(min(limit, 10) + 1) if set(hashes[max(0, count - blocks) : count]) <= set(here)
    )
    found = pool.match_window(hashes, blocks, limit)
    assert len(found) == longest
    needed = max(0, longest - blocks)
    assert found == [NO_PLACE] * needed + [place_of[key] for key in hashes[needed:longest]]


def test_a_prompt_longer_than_the_device_is_computed_when_its_window_fits() -> None:
    """The device has eight blocks of 16 tokens, and the request 40."""
    request = Request("a", 0, tuple(range(1, 39)), (39, 40), 38 * 16, 33, None)
    config = EngineConfig(g1_blocks=8, window_tokens=32, max_batch_tokens=64)
    for window, served in ((32, 1), (0, 0)):
        config = msgspec.structs.replace(config, window_tokens=window)
        rig = build(LeaderConfig(), config, GivenRequests("load", [request], CAPACITIES), check=True, audit_every=1)
        rig.run_to_end()
        assert (rig.engine.totals.finished, rig.engine.totals.too_large) == (served, 1 - served)


@pytest.mark.parametrize("window", [-1, 1, 2**31])
def test_a_window_of_no_token_is_refused(window: int) -> None:
    with pytest.raises(UsageError, match="window_tokens must be"):
        EngineConfig(g1_blocks=1, window_tokens=window)


@pytest.mark.parametrize("window", [0, 64])
def test_the_label_of_a_recording_has_the_window(window: int) -> None:
    machine = SimulatedMachine(leader=LeaderConfig(), engine=EngineConfig(g1_blocks=8, window_tokens=window))
    labels: dict[str, Any] = machine.labels()
    assert SimulatedMachine.of_labels(machine.leader, labels) == machine
    assert ("window_tokens" in labels["machine"]) is (window > 0)
