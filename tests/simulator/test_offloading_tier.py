"""The host tier of an engine with several groups of layers, over random requests and against a search of all prefixes.

Law of this file: what is found is the longest prefix that every group has, and a copy is whole or not made.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm_console.core.eviction import make_policy
from kvbm_console.core.eviction.policy import POLICIES, PolicyConfig, TierPolicy
from kvbm_console.core.eviction.request_lru import RequestLru
from kvbm_console.core.tiers import window_blocks
from kvbm_console.simulator.config import is_kept, passed_blocks
from kvbm_console.simulator.device_pool import NO_PLACE, in_group
from kvbm_console.simulator.offloading_tier import Formed, HostCopy, OffloadingTier
from kvbm_console.simulator.work import Table

BLOCK = 16
GROUPS = ((0,), (0, 32), (0, 64, 0), (48, 32), (0, 2**31 - 1))


def table(places: Sequence[int]) -> Table:
    """A group's blocks in these places."""
    found = Table(())
    found.blocks = list(places)
    return found


def stored(tier: OffloadingTier, name: str, computed: int, first_place: int = 1) -> list[HostCopy]:
    """A step in which a request without blocks computes so many tokens; each group has places of its own."""
    groups, blocks = len(tier._windows), -(-computed // BLOCK)
    tables = [
        table(range(first_place + group * blocks, first_place + (group + 1) * blocks)) for group in range(groups)
    ]
    tier.admitted(name, tables, 0)
    return tier.formed([Formed(name, tables, True, computed, computed + 1, 0)], (), ())


def test_a_prompt_that_was_stored_is_found_by_another_request() -> None:
    tier = OffloadingTier(20, BLOCK, (0, 32))
    tier.arrived("a", (1, 2, 3, 4), 65)
    (copy,) = stored(tier, "a", 65)
    assert copy.hashes == [1, 2, 3, 4, 1, 2, 3, 4]
    tier.arrived("b", (1, 2, 3, 9), 65)
    assert tier.looked_up("b", 0, 65) is None, "the blocks are being written"
    tier.ended(copy)
    assert tier.looked_up("b", 0, 65) == 48
    assert tier.looked_up("b", 2, 65) == 16
    load = tier.admitted("b", [table(range(40, 44)), table(range(50, 54))], 16)
    assert load is not None
    assert (load.is_load, load.hashes) == (True, [3, 3])
    tier.arrived("c", (1, 2, 3, 9), 65)
    assert tier.looked_up("c", 0, 65) is None, "another request loads a block of it"
    tier.ended(load)
    assert tier.looked_up("c", 0, 65) == 48


def test_the_window_at_the_end_of_a_prompt_is_enough() -> None:
    """With ``retention`` 0 the group with a window has the two blocks before the last token of the prompt."""
    tier = OffloadingTier(20, BLOCK, (0, 32), retention=0)
    tier.arrived("a", (1, 2, 3, 4, 5), 81)
    (copy,) = stored(tier, "a", 81)
    assert copy.hashes == [1, 2, 3, 4, 5, 4, 5]
    tier.ended(copy)
    for hashes, found in ((1, 2, 3, 4, 5, 6), 80), ((1, 2, 3, 4, 9), 0):
        name = str(hashes)
        tier.arrived(name, hashes, 16 * len(hashes) + 1)
        assert tier.looked_up(name, 0, 16 * len(hashes) + 1) == found


def test_a_prompt_whose_last_token_ends_a_block_is_loaded_up_to_that_token() -> None:
    tier = OffloadingTier(20, BLOCK, (0, 32))
    tier.arrived("a", (1, 2, 3, 4), 65)
    (copy,) = stored(tier, "a", 65)
    tier.ended(copy)
    tier.arrived("b", (1, 2, 3, 4), 64)
    assert tier.looked_up("b", 0, 64) == 63
    load = tier.admitted("b", [table(range(40, 44)), table(range(50, 54))], 63)
    assert load is not None
    assert load.hashes == [1, 2, 3, 4, 1, 2, 3, 4]


def test_a_copy_down_stores_all_of_its_blocks_or_none() -> None:
    tier = OffloadingTier(7, BLOCK, (0, 0))
    tier.arrived("a", (1, 2, 3), 49)
    tier.arrived("b", (5, 6), 33)
    (copy,) = stored(tier, "a", 49)
    assert stored(tier, "b", 33, 90) == [], "one place is left, and those that are written cannot go"
    tier.ended(copy)
    (second,) = tier.formed([Formed("b", [table((90, 91)), table((92, 93))], True, 33, 34, 0)], (), ())
    assert second.hashes == [5, 6, 5, 6]
    assert (len(tier), tier.evicted) == (7, 3)


def test_a_request_may_have_the_name_of_one_that_has_ended() -> None:
    """vLLM's own API numbers requests from 0 each time, and copies of the last ``0`` may still run."""
    tier = OffloadingTier(20, BLOCK, (0,))
    tier.arrived("0", (1, 2), 33)
    (first,) = stored(tier, "0", 33)
    tier.finished("0", 33)
    tier.formed([], (), ())
    tier.arrived("0", (5, 6), 33)
    (second,) = stored(tier, "0", 33, 90)
    tier.ended(first)
    tier.finished("0", 33)
    tier.arrived("0", (5, 6), 33)
    assert tier.looked_up("0", 0, 33) is None, "the second copy runs"
    tier.ended(second)
    assert tier.looked_up("0", 0, 33) == 32


def test_places_that_are_given_out_again_end_the_copy_that_reads_them() -> None:
    """A window passes its blocks while they are copied, and nobody holds them."""
    tier = OffloadingTier(20, BLOCK, (0, 32))
    tier.arrived("a", (1, 2, 3, 4), 65)
    (copy,) = stored(tier, "a", 65)
    tier.arrived("b", (7,), 17)
    stored(tier, "b", 17, first_place=copy.places[1][0])
    assert tier.flushed == [copy]


def test_a_place_with_other_content_is_not_stored() -> None:
    """The tier has no room for the blocks at first. A window then passes one, and another request gets its place."""
    tier = OffloadingTier(4, BLOCK, (0, 32))
    tier.arrived("a", (1, 2), 33)
    tier.arrived("b", (5, 6), 33)
    (copy,) = stored(tier, "a", 33)
    assert stored(tier, "b", 33, 90) == []
    tier.ended(copy)
    tier.arrived("c", (9,), 17)
    tables = [table((90, 91, 92)), table((93, 94, 95))]
    tier.admitted("c", [table((93,)), table((99,))], 0)
    copies = tier.formed([Formed("b", tables, False, 34, 35, 0)], (), ())
    assert [sorted(copy.hashes) for copy in copies] == [[5, 6, 6]]


# --- the longest prefix ---


def has_all(tier: OffloadingTier, name: str, local: int, blocks: int) -> bool:
    """True if every group has what a prefix of so many blocks needs behind ``local`` blocks."""
    request = tier._requests[name]
    for keys, window in zip(request.keys, tier._windows, strict=True):
        need = -(-window // BLOCK) if window else blocks
        if any(key not in tier._here for key in keys[max(local, blocks - need) : blocks]):
            return False
    return True


@settings(max_examples=300)
@given(
    st.sampled_from(GROUPS), st.integers(1, 9), st.integers(0, 4), st.randoms(use_true_random=False),
    st.floats(0.3, 1.0),
)
def test_the_longest_prefix_is_found(
    windows: tuple[int, ...], blocks: int, local: int, dice: Any, share: float
) -> None:
    tier = OffloadingTier(1_000, BLOCK, windows)
    hashes = tuple(range(1, blocks + 1))
    tier.arrived("a", hashes, blocks * BLOCK + 1)
    for group in range(len(windows)):
        tier._here.update(key for key in in_group(group, hashes) if dice.random() < share)
    local = min(local, blocks)
    longest = max(end for end in range(local, blocks + 1) if has_all(tier, "a", local, end))
    assert tier.looked_up("a", local, blocks * BLOCK + 1) == (longest - local) * BLOCK


@given(
    st.integers(0, 30), st.lists(st.integers(0, 30), max_size=2), st.integers(2, 200),
    st.none() | st.sampled_from([0, 16, 64, 128]),
)
def test_a_kept_block_lies_in_a_window_that_ends_where_a_prefix_can(
    at: int, tails: list[int], window: int, retention: int | None
) -> None:
    need = window_blocks(window, BLOCK)
    ends = set(tails)
    if retention:
        ends |= set(range(0, 60, retention // BLOCK))
    expected = retention is None or any(end - need <= at < end for end in ends)
    assert is_kept(at, tails, need, retention, BLOCK) is expected


# --- random lives ---


class Lives(RuleBasedStateMachine):
    """Requests arrive, load, compute, are preempted and end, and copies end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = OffloadingTier(12, BLOCK, (0, 48), retention=0, make_order=self.make_order)
        self.tables: dict[str, list[Table]] = {}
        self.computed: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.running: list[HostCopy] = []
        self.place = 1
        self.named = 0

    make_order: Callable[[], TierPolicy] = staticmethod(RequestLru)

    def _tables(self, blocks: int) -> list[Table]:
        tables = []
        for _ in range(2):
            tables.append(table(range(self.place, self.place + blocks)))
            self.place += blocks
        return tables

    @rule(prompt=st.lists(st.integers(1, 3), min_size=1, max_size=4), odd=st.integers(1, BLOCK))
    def arrive(self, prompt: list[int], odd: int) -> None:
        """Prompts share beginnings: a hash tells all blocks up to it."""
        hashes = [int("".join(map(str, prompt[: end + 1]))) for end in range(len(prompt))]
        name = f"r{self.named}"
        self.named += 1
        tokens = len(prompt) * BLOCK + odd
        self.tier.arrived(name, (*hashes, 1000 + self.named), tokens)
        self.waiting[name] = tokens

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: Any) -> None:
        """A request looks up, and loads what it finds."""
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        found = self.tier.looked_up(name, 0, self.waiting[name])
        if found is None:
            return
        tables = self._tables(max(1, -(-found // BLOCK)))
        for mine, window in zip(tables, self.tier._windows, strict=True):
            mine.passed = passed_blocks(window, found, BLOCK)
            mine.blocks[: mine.passed] = [NO_PLACE] * mine.passed
        load = self.tier.admitted(name, tables, found)
        self.tables[name], self.computed[name] = tables, found
        if load is not None:
            assert all(self.tier._readers[key] > 0 for key in load.keys)
            self.running.append(load)
        tokens = self.waiting.pop(name)
        self.computed[name] = min(found, tokens - 1)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(1, 40))
    def step(self, data: Any, more: int) -> None:
        """A step of some requests without a load."""
        free = [name for name in self.tables if not any(copy.request == name and copy.is_load for copy in self.running)]
        names = data.draw(st.lists(st.sampled_from(sorted(free)), unique=True)) if free else []
        parts = []
        for name in names:
            computed = min(self.computed[name] + more, 5 * BLOCK)
            need = -(-computed // BLOCK) - len(self.tables[name][0].blocks)
            for mine, fresh in zip(self.tables[name], self._tables(max(0, need)), strict=True):
                mine.blocks += fresh.blocks
            anew = self.computed[name] == 0 or not self.tier._requests[name].held[0]
            self.computed[name] = computed
            parts.append(Formed(name, self.tables[name], anew, computed, computed + 1, 0))
        self.running += self.tier.formed(parts, (), ())

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_copy(self, data: Any) -> None:
        """A copy ends, and a second time without effect."""
        copy = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.tier.ended(copy)
        before = dict(self.tier._readers), set(self.tier._idle)
        self.tier.ended(copy)
        assert (self.tier._readers, self.tier._idle) == before

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        """A request without a load ends."""
        free = [name for name in self.tables if not any(copy.request == name and copy.is_load for copy in self.running)]
        if free:
            name = data.draw(st.sampled_from(sorted(free)))
            del self.tables[name]
            self.tier.finished(name, self.computed.pop(name))

    @invariant()
    def holds(self) -> None:
        """The tier has no more blocks than places, and knows the readers of each."""
        tier = self.tier
        assert len(tier) <= tier.blocks
        assert set(tier.order.resident) == tier._here
        loads = [key for copy in self.running if copy.is_load for key in copy.keys]
        writes = {key for copy in self.running if not copy.is_load for key in copy.keys}
        assert tier._readers == Counter(loads)
        assert tier._writing == writes
        assert tier._idle == tier._here - writes - set(loads)


class LivesOfLearned(Lives):
    """As above, with a policy that hears of whole prompts."""

    make_order = staticmethod(lambda: make_policy(PolicyConfig(policy="learned"), 12))


TestLives = Lives.TestCase
TestLivesOfLearned = LivesOfLearned.TestCase


@pytest.mark.parametrize("policy", POLICIES)
def test_any_policy_rules_the_order(policy: str) -> None:
    tier = OffloadingTier(8, BLOCK, (0, 0), make_order=lambda: make_policy(PolicyConfig(policy=policy), 8))
    for number in range(6):
        name = f"r{number}"
        tier.arrived(name, (number + 1, number + 101), 33)
        for copy in stored(tier, name, 33, 1 + 4 * number):
            tier.ended(copy)
        tier.finished(name, 33)
    assert (len(tier), tier.evicted) == (8, 16)
