"""Attention windows of the simulated engine, against a rule that asks of each token which tokens it sees.

Law of this file: the witness keeps places and contents of its own, from the calls of the engine alone. It has no
formula of the engine: a block is needed if the next token sees a token of it.
"""

import os
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

FULL = bool(os.environ.get("KVBM_FULL"))
TOGETHER = 20
CAPACITIES = Capacities(16, 8, 0, 0, 64)


class Witness(MachineLedger):
    """A ledger that keeps what stands in which place, and checks each call."""

    def __init__(self, config: EngineConfig, load: Load, block: int) -> None:
        self.windows, self.size, self.early = config.groups, block, config.early_steps
        self.live: dict[str, Work] = {}
        """Requests with blocks."""
        self.content: dict[int, tuple[int, int]] = {}
        """Place to the group and the hash of its full block."""
        self.gone = self.behind = self.shorter = self.clones = self.named_blocks = 0
        """Blocks that windows passed, admissions behind blocks without a place, those that a group beside the first
        made shorter, clones, and blocks that were found before they were computed."""
        super().__init__(config, load, block)

    def take(self, work: Work, first: int) -> None:
        """Forget what stood in the places of a request from this block on."""
        self.live[work.name] = work
        for table in work.tables:
            for place in table.blocks[first:]:
                self.content.pop(place, None)

    def sees(self, group: int, position: int, at: int) -> bool:
        """True if the token at a position sees a token of this block in this group, or one behind it."""
        window = self.windows[group]
        return not window or (at + 1) * self.size - 1 > position - window

    def found(self, work: Work, groups: int) -> int:
        """The most leading blocks of which the next token sees none that is not here, in so many groups."""
        here, most = set(self.content.values()), min(len(work.hashes), (work.total - 1) // self.size)
        return next(
            count for count in range(most, -1, -1) if all(
                (group, work.hashes[at]) in here for group in range(groups) for at in range(count)
                if self.sees(group, count * self.size, at)
            )
        )

    def admitted(self, work: Work, prefix: int, found_tokens: int) -> None:
        for other in self.live.values():  # ``named`` is told of blocks that are found in the first group
            self.fill(other, other.stored, other.named, 1)
        assert prefix == self.found(work, len(self.windows))
        self.shorter += prefix < self.found(work, 1)
        for group, table in enumerate(work.tables):
            for at, place in enumerate(table.blocks[:prefix]):
                assert self.sees(group, prefix * self.size, at) == (place != NO_PLACE)
                assert place == NO_PLACE or self.content[place] == (group, work.hashes[at])
            self.behind += NO_PLACE in table.blocks
        self.take(work, prefix)
        super().admitted(work, prefix, found_tokens)

    def named(self, work: Work, count: int) -> None:
        assert self.engine.config.named_early
        self.named_blocks += count
        self.fill(work, work.stored, work.stored + count)
        super().named(work, count)

    def fill(self, work: Work, first: int, end: int, group_from: int = 0) -> None:
        """Note what stands in these blocks of a request from now on."""
        for group, table in enumerate(work.tables):
            for at in range(first, end):
                if group >= group_from and table.blocks[at] != NO_PLACE:
                    self.content[table.blocks[at]] = group, work.hashes[at]

    def appended(self, work: Work, ids: list[int]) -> None:
        assert work.blocks[-len(ids) :] == ids
        self.take(work, len(work.blocks) - len(ids))
        super().appended(work, ids)

    def cloned(self, work: Work, clones: Sequence[Work], ids: list[int]) -> None:
        full = work.computed // self.size
        for clone in clones:
            assert [table.blocks[:full] for table in clone.tables] == [table.blocks[:full] for table in work.tables]
            self.take(clone, full)
        self.clones += len(clones)
        super().cloned(work, clones, ids)

    def scheduled(self, plan: Plan, iteration: int, running: int, waiting: int) -> None:
        assert not plan.appended
        counts = [(work, 1) for work in self.engine.scheduler.running[: plan.steady]]
        for work, count in [*counts, *plan.tokens]:
            end = -(-(work.computed + count) // self.size)
            known = work.settled if self.early else work.computed
            for group, table in enumerate(work.tables):
                needed = [at for at in range(end) if self.sees(group, known, at)]
                assert [at for at, place in enumerate(table.blocks) if place != NO_PLACE] == needed
                assert len(table.blocks) == end
                self.gone += end - len(needed)
        self.check_places()
        super().scheduled(plan, iteration, running, waiting)

    def check_places(self) -> None:
        """Two requests, or two groups, have the same place only for the same full block."""
        stands: dict[int, tuple[object, ...]] = {}
        for name, work in self.live.items():
            for group, table in enumerate(work.tables):
                full = max(work.stored, work.named) if group else work.stored
                for at, place in enumerate(table.blocks):
                    mine = (group, work.hashes[at]) if at < full else (group, name, at)
                    assert place == NO_PLACE or stands.setdefault(place, mine) == mine
                    assert place == NO_PLACE or at >= work.stored or self.content[place] == mine
        assert len(stands) == self.engine.config.g1_blocks - self.engine.scheduler.pool.free_blocks

    def filled(
        self, iteration: int, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        assert ids == [place for work, count in zip(works, counts, strict=True)
                       for place in work.blocks[work.stored - count : work.stored]]
        for work, count in zip(works, counts, strict=True):
            self.fill(work, work.stored - count, work.stored)
        super().filled(iteration, works, counts, ids, hashes)

    def preempted(self, work: Work) -> list[int]:
        del self.live[work.name]
        return super().preempted(work)

    def finished(self, name: str, ids: list[int], reason: FinishReason) -> bool:
        work = self.live.pop(name, None)
        assert ids == ([] if work is None else work.held)
        return super().finished(name, ids, reason)


def witness_of(seed: int, groups: int) -> Witness:
    dice = random.Random(seed)
    block = dice.choice([1, 4, 16, 16])
    load = load_of(dice, block)
    if seed % 3 == 0:
        load = cloned(dice, load)
    engine = engine_of(dice, load, block)
    windows = [
        max(2, dice.choice([2, block + 1, 4 * block, 4 * block + 1, dice.randint(2, 300)])) for _ in range(groups)
    ]
    if groups > 1:
        windows[dice.randrange(groups)] = 0
    early = dice.random() < 0.4
    config = msgspec.structs.replace(
        engine, groups=tuple(windows), whole_sequences=dice.random() < 0.5, early_steps=early,
        fenced_steps=early and dice.random() < 0.5, named_early=dice.random() < 0.5, passes_at_end=dice.random() < 0.5,
    )
    least = max(config.most_held(one.prompt_tokens + one.output_tokens, block) for one in load.requests)
    if dice.random() < 0.7:  # else all requests fit at once
        config = msgspec.structs.replace(config, g1_blocks=least + dice.randint(0, 8))
    return Witness(config, load, block)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("first", range(1, 61 if FULL else 21, TOGETHER))
def test_a_request_holds_the_blocks_that_its_next_token_sees_and_finds_by_them(first: int, groups: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + TOGETHER):
        witness = witness_of(seed, groups)
        witness.run_to_end()
        seen.update(
            gone=witness.gone, behind=witness.behind, preempted=witness.totals.preemptions, clones=witness.clones,
            shorter=witness.shorter, named=witness.named_blocks,
        )
    assert min(seen[name] for name in seen if name != "shorter" or groups > 1) > 0


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
    config = EngineConfig(g1_blocks=8, max_batch_tokens=64)
    for groups, served in (((32,), 1), ((0,), 0), ((32, 32), 0)):
        config = msgspec.structs.replace(config, groups=groups)
        rig = build(LeaderConfig(), config, GivenRequests("load", [request], CAPACITIES), check=True, audit_every=1)
        rig.run_to_end()
        assert (rig.engine.totals.finished, rig.engine.totals.too_large) == (served, 1 - served)


@pytest.mark.parametrize("whole", [True, False])
def test_a_request_waits_for_room_for_its_whole_prompt_if_the_engine_asks_for_that(whole: bool) -> None:
    """The first request grows to five blocks, the second needs eight, and the device has ten."""
    requests = [
        Request("a", 0, (1, 2, 3, 4), (), 64, 10, None), Request("b", 1, tuple(range(11, 19)), (), 8 * 16, 2, None)
    ]
    config = EngineConfig(g1_blocks=10, max_batch_tokens=64, whole_sequences=whole)
    ledger = MachineLedger(config, GivenRequests("load", requests, CAPACITIES), 16)
    ledger.run_to_end()
    assert (ledger.totals.preemptions > 0) is not whole


@pytest.mark.parametrize("early", [True, False])
def test_a_seat_is_free_an_iteration_later_if_iterations_are_formed_early(early: bool) -> None:
    """The first request takes two iterations of 5 ms, and then the second is alone."""
    requests = [Request("a", 0, (), (), 5, 2, None), Request("b", 1, (), (), 5, 1, None)]
    config = EngineConfig(
        g1_blocks=4, max_running=1, early_steps=early, step_base_ns=5_000_000, prefill_token_ns=0, decode_request_ns=0
    )
    ended: dict[str, int] = {}
    load = GivenRequests("load", requests, CAPACITIES)
    ledger = MachineLedger(config, load, 16, ended=lambda record: ended.update({record.request: record.finished_ns}))
    ledger.run_to_end()
    assert ended == {"a": 10_000_000, "b": 15_000_000}
    assert ledger.engine.totals.iterations == 3 + 2 * early


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("groups", [(0,), (32,), (0, 32)])
def test_a_prompt_is_found_in_the_iteration_that_computes_it_if_its_blocks_are_named_early(
    groups: tuple[int, ...], early: bool
) -> None:
    """Three requests with the same beginning of four blocks are admitted in one iteration. The third goes on as the
    second does, which has two further blocks."""
    prompts = ((1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6, 7))
    requests = [
        Request(name, 0, hashes, (), len(hashes) * 16 + 1, 2, None) for name, hashes in zip("abc", prompts, strict=True)
    ]
    config = EngineConfig(g1_blocks=64, max_batch_tokens=512, groups=groups, named_early=early)
    load = GivenRequests("load", requests, CAPACITIES)
    rig = build(LeaderConfig(g2_blocks=8), config, load, check=True, audit_every=1)
    rig.run_to_end()
    ledger = MachineLedger(config, load, 16)
    ledger.run_to_end()
    found = 4 + 6 if early else 0
    assert rig.leader.state.totals.hit_blocks[0] == ledger.totals.hit_blocks[0] == found
    assert ledger.engine.totals.prefill_tokens == sum(len(hashes) * 16 + 1 for hashes in prompts) - found * 16


@pytest.mark.parametrize("window", [-1, 1, 2**31])
def test_a_window_of_no_token_is_refused(window: int) -> None:
    with pytest.raises(UsageError, match="groups must be"):
        EngineConfig(g1_blocks=1, groups=(0, window))


def test_steps_that_are_not_early_need_no_fence() -> None:
    with pytest.raises(UsageError, match="fenced_steps must be false without early_steps"):
        EngineConfig(g1_blocks=1, fenced_steps=True)


@pytest.mark.parametrize("groups", [(0,), (64,), (0, 64)])
def test_the_label_of_a_recording_has_the_groups(groups: tuple[int, ...]) -> None:
    machine = SimulatedMachine(leader=LeaderConfig(), engine=EngineConfig(g1_blocks=8, groups=groups))
    labels: dict[str, Any] = machine.labels()
    assert SimulatedMachine.of_labels(machine.leader, labels) == machine
    assert ("groups" in labels["machine"]) is (groups != (0,))


def sequences(requests: Sequence[tuple[str, int, int]]) -> GivenRequests:
    """Requests of these prompts and answers that arrive together and share no block."""
    made = [
        Request(name, 0, tuple(range(1000 * at + 1, 1000 * at + 1 + prompt // 16)),
                tuple(range(1000 * at + 500, 1000 * at + 500 + (prompt + output) // 16 - prompt // 16)), prompt, output,
                None)
        for at, (name, prompt, output) in enumerate(requests)
    ]
    return GivenRequests("sequences", made, CAPACITIES)


def test_a_request_fits_by_the_blocks_that_it_holds_while_it_decodes() -> None:
    """Its windows pass the blocks that it would need all at once."""
    config = EngineConfig(g1_blocks=20, groups=(0, 32), max_batch_tokens=512, whole_sequences=True)
    ledger = MachineLedger(config, sequences([("a", 100, 120)]), 16)
    ledger.run_to_end()
    assert (ledger.engine.totals.finished, ledger.engine.totals.too_large) == (1, 0)


def test_a_preempted_request_that_no_empty_device_holds_ends() -> None:
    """It needs 22 blocks to begin anew, and 17 to go on; vLLM would keep it waiting for ever."""
    config = EngineConfig(g1_blocks=20, groups=(0, 32), max_batch_tokens=512, whole_sequences=True)
    ledger = MachineLedger(config, sequences([("a", 1, 100), ("b", 100, 120), ("c", 20, 5)]), 16)
    ledger.run_to_end()
    totals = ledger.engine.totals
    assert (totals.finished, totals.too_large) == (2, 1)


@pytest.mark.parametrize(("retention", "kept"), [(None, {0, 1, 2, 3, 4}), (0, {2, 3, 4}), (32, {0, 1, 2, 3, 4})])
def test_a_window_keeps_the_end_of_a_prompt_and_not_all_of_it(retention: int | None, kept: set[int]) -> None:
    config = EngineConfig(g1_blocks=40, groups=(0, 48), retention=retention, whole_sequences=True)
    ledger = MachineLedger(config, sequences([("a", 81, 40)]), 16)
    ledger.run_to_end()
    hashes = {key & 0xFFFF for key in ledger._pool.hash_of if key >> 64 == 1}
    assert {key - 1 for key in hashes if key < 500} == kept
    assert any(key >= 500 for key in hashes) is (retention != 0)


def test_the_end_of_a_shared_prefix_is_kept_too() -> None:
    """Two prompts share three blocks. The second finds them in the group that sees all tokens, and computes them."""
    config = EngineConfig(g1_blocks=60, groups=(0, 32), retention=0, whole_sequences=True, max_running=1)
    shared = (1, 2, 3)
    requests = [
        Request(name, 0, (*shared, *rest), (), 16 * (3 + len(rest)) + 1, 2, None)
        for name, rest in (("a", (11, 12, 13)), ("b", (21, 22)), ("c", (31, 32, 33)))
    ]
    ledger = MachineLedger(config, GivenRequests("shared", requests, CAPACITIES), 16)
    ledger.run_to_end()
    hashes = {key & 0xFFFF for key in ledger._pool.hash_of if key >> 64 == 1}
    assert hashes == {12, 13, 2, 3, 21, 22, 32, 33}
    assert ledger.totals.hit_blocks[0] == 3, "the third prompt finds what the second has kept"
