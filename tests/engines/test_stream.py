"""One publisher as a source of a leader: residency, loss, restart, limits; and the facts against a recount."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core.audit import audit
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import BlocksSeen, Event, SourceLost, StimulusRejected
from kvbm_console.core.ids import AGE_BOUNDS_NS, EMPTY_HASH, ResetMode, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import decode_facts, digest, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import ResetRequested
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events import stream as stream_module
from kvbm_console.engines.kv_events.stream import EventStream
from tests.engines.payloads import Recount, batch, cleared, removed, stored

SOURCE = 1


class House:
    """A leader with one publisher; every event is folded by a mirror that now and then goes on from a snapshot."""

    def __init__(self, *, snapshots: bool = True, check: bool = True) -> None:
        self.events: list[Event] = []
        self.mirror = CacheState()
        self.snapshots = snapshots
        self.dispatcher = Dispatcher(Leader(LeaderConfig(), check=check), self.clock, publish=self._publish)
        self.stream = EventStream(self.dispatcher, SOURCE, wall=lambda: 1.0)
        self.recount = Recount()
        self.seq = 0

    def clock(self) -> int:
        return 0

    def _publish(self, _stimulus: Any, outcome: Any) -> None:
        self.events += outcome.events
        for event in outcome.events:
            self.mirror.apply(event)
        if self.snapshots:
            self.mirror = decode_facts(encode_facts(self.mirror))

    def send(self, *events: Any, dp_rank: int | None = 0) -> None:
        payload = batch(*events, dp_rank=dp_rank)
        self.recount.take(payload)
        self.stream.accept(self.seq, payload)
        self.seq += 1

    def check(self) -> None:
        state = self.dispatcher.leader.state
        assert digest(state) == digest(self.mirror)
        assert audit(state) == []
        assert facts_of(state) == self.recount.nonempty()

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if type(event) is kind]


def facts_of(state: CacheState) -> dict[tuple[int, int, str], dict[int, int]]:
    """Copies by place and hash, counted by walking the columns."""
    found: dict[tuple[int, int, str], dict[int, int]] = {}
    for pool in state.pools:
        for key in pool.hash_of:
            if key != EMPTY_HASH:
                here = found.setdefault((pool.info.dp_rank, pool.info.group, pool.info.medium), {})
                here[key] = here.get(key, 0) + 1
    return found


def test_media_groups_and_ranks_are_pools_of_their_own() -> None:
    house = House()
    house.send(stored(1, 2), stored(1, medium="CPU"), stored(1, medium="CPU_PINNED"), stored(3, medium="TAPE"))
    house.send(stored(1, group_idx=1, size=64), dp_rank=2)
    house.send(removed(1, medium="CPU"))
    house.check()
    pools = [pool.info for pool in house.dispatcher.leader.state.pools]
    assert [(info.medium, info.tier, info.group, info.dp_rank, info.block_tokens) for info in pools] == [
        ("GPU", Tier.G1, 0, 0, 16), ("CPU", Tier.G2, 0, 0, 16), ("CPU_PINNED", Tier.G2, 0, 0, 16),
        ("TAPE", Tier.G4, 0, 0, 16), ("GPU", Tier.G1, 1, 2, 64),
    ]
    assert not house.of(StimulusRejected)


def test_a_placeholder_store_takes_the_block_size_of_the_same_group() -> None:
    house = House()
    house.send(stored(1, size=32), stored(2, size=64, group_idx=1), stored(2, size=0, medium="CPU", group_idx=1))
    house.check()
    assert [pool.info.block_tokens for pool in house.dispatcher.leader.state.pools] == [32, 64, 64]


def test_a_hash_that_was_stored_twice_is_gone_after_two_removals() -> None:
    house = House()
    house.send(stored(5), stored(5), stored(5, 6))
    house.send(removed(5))
    house.send(removed(5), removed(7))
    house.check()
    assert house.recount.nonempty() == {(0, 0, "GPU"): {5: 1, 6: 1}}


def test_lives_and_returns_of_a_replay_are_in_the_time_of_the_engine() -> None:
    """An engine that has run for an hour is attached to: each message tells its own time, all come at once."""
    house = House()
    for seq, (ts, events) in enumerate([
        (-3600.0, [stored(1), stored(2)]), (-3536.0, [removed(1)]), (-3530.0, [stored(1)]), (-10.0, [removed(2)]),
    ]):
        house.stream.accept(seq, batch(*events, ts=10_000.0 + ts), replayed=True)
    chains = house.dispatcher.leader.state.pools[0].chains
    assert chains is not None
    lives = {bound: blocks for bound, blocks in enumerate(chains.lived) if blocks}
    assert lives == {(64 * 10**9).bit_length(): 1, (3590 * 10**9).bit_length(): 1}
    assert {within: blocks for (within, _), blocks in chains.again.items()} == {10 * 10**9: 1}


@pytest.mark.parametrize("replayed", [True, False])
def test_a_message_without_a_time_tells_of_now_unless_it_is_replayed(replayed: bool) -> None:
    house = House()
    for seq, events in enumerate([[stored(1)], [removed(1)], [stored(1)]]):
        house.stream.accept(seq, batch(*events, ts=0.0), replayed=replayed)
    chains = house.dispatcher.leader.state.pools[0].chains
    assert chains is not None
    assert sum(chains.lived) == (not replayed)
    assert [within for within, _ in chains.again] == [AGE_BOUNDS_NS[-1 if replayed else 0]]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_prefix_that_is_announced_again_leaves_doubt(at_once: bool) -> None:
    """As vLLM does it for requests with ``kv_cache_report_mode`` full: the same blocks, and no further copies."""
    house = House()
    told = [stored(1, 2), stored(3, parent_block_hash=2), stored(1, 2)]
    for events in [told] if at_once else [[one] for one in told]:
        assert house.dispatcher.leader.state.lost_sources == {}
        house.send(*events)
    assert SOURCE in house.dispatcher.leader.state.lost_sources


def test_a_removal_behind_its_store_in_one_batch_is_kept_in_order() -> None:
    house = House()
    house.send(stored(1, 2), removed(9), removed(1), stored(1), removed(2), stored(2), removed(1))
    house.check()


@pytest.mark.parametrize("host", ["", "CPU_PINNED"])
def test_a_clear_empties_the_device_and_the_host_memory_of_sglang_and_ends_doubt(host: str) -> None:
    house = House()
    house.stream.accept(4, batch(stored(1), *([stored(2, medium=host)] if host else [])))
    state = house.dispatcher.leader.state
    assert state.lost_sources == {SOURCE: 1}
    house.stream.accept(5, batch(stored(3), cleared(), stored(8)))
    assert state.lost_sources == {}
    assert facts_of(state) == {(0, 0, "GPU"): {8: 1}}
    assert digest(state) == digest(house.mirror)


@pytest.mark.parametrize("host", ["CPU", "STORAGE", "CPU REMOTE pool"])
def test_a_clear_leaves_the_tiers_below_vllms_device_and_makes_them_doubtful(host: str) -> None:
    """vLLM publishes AllBlocksCleared for the device, and no event tells if its connector was reset, too."""
    house = House()
    house.send(stored(1, 2), stored(1, 2, medium=host.partition(" ")[0],
                                    **({"locality": "REMOTE", "ownership": "pool"} if " " in host else {})))
    state = house.dispatcher.leader.state
    assert state.lost_sources == {}
    house.send(*[cleared()] * 100)
    assert facts_of(state) == {(0, 0, host): {1: 1, 2: 1}}
    assert state.lost_sources == {SOURCE: 1}, "counted once, however often the same is told"


def test_after_a_loss_a_clear_tells_nothing_of_tiers_that_were_not_named_yet() -> None:
    house = House()
    house.stream.accept(4, batch(stored(1)))
    house.stream.accept(5, batch(cleared(), stored(2)))
    state = house.dispatcher.leader.state
    assert state.lost_sources == {}, "as far as is known this engine has a device alone"
    house.stream.accept(6, batch(stored(2, medium="CPU")))
    assert SOURCE in state.lost_sources
    house.stream.restart()
    house.stream.accept(0, batch(stored(3), stored(3, medium="CPU")))
    assert state.lost_sources == {}


def test_a_clear_empties_the_pools_of_its_rank_alone() -> None:
    house = House()
    house.send(stored(1), dp_rank=0)
    house.send(stored(2), dp_rank=1)
    house.send(cleared(), dp_rank=1)
    house.check()
    house.send(cleared(), dp_rank=0)
    house.check()
    assert house.dispatcher.leader.state.lost_sources == {}


def test_a_clear_is_heard_before_anything_was_stored() -> None:
    house = House()
    house.stream.accept(7, batch(cleared()))
    assert house.dispatcher.leader.state.lost_sources == {}
    assert len(house.of(SourceLost)) == 1


def test_a_gap_leaves_doubt_until_a_clear() -> None:
    house = House()
    house.send(stored(1))
    house.stream.accept(5, batch(stored(2)))
    (lost,) = house.of(SourceLost)
    assert (lost.first, lost.last, lost.restarted) == (1, 4, False)
    assert house.dispatcher.leader.state.lost_sources == {SOURCE: 1}
    assert (house.stream.counts.lost_batches, house.stream.counts.gaps) == (4, 1)


def test_a_number_that_goes_back_is_a_new_incarnation() -> None:
    house = House()
    house.send(stored(1, 2))
    house.send(stored(3, medium="CPU"))
    house.stream.accept(0, batch(stored(9)))
    state = house.dispatcher.leader.state
    assert facts_of(state) == {(0, 0, "GPU"): {9: 1}}
    assert (house.stream.counts.restarts, state.lost_sources) == (1, {})
    house.stream.accept(0, batch(stored(9)))
    house.stream.accept(3, batch(stored(4)))
    assert state.lost_sources == {SOURCE: 1}
    house.stream.accept(2, batch(stored(7)))  # back again, and what came before 2 is not known
    assert (facts_of(state), state.lost_sources) == ({(0, 0, "GPU"): {7: 1}}, {SOURCE: 1})
    assert digest(state) == digest(house.mirror)


@pytest.mark.parametrize("payload", [b"", b"garbage", batch(stored(1), {"type": "BlockStored"})])
def test_what_cannot_be_read_is_a_gap(payload: bytes) -> None:
    house = House()
    house.send(stored(5))
    house.stream.accept(1, payload)
    assert [(lost.first, lost.last) for lost in house.of(SourceLost)] == [(1, 1)]
    assert house.stream.counts.bad_payloads + house.stream.counts.malformed_events == 1


def test_kinds_that_we_do_not_know_are_counted_and_no_gap() -> None:
    house = House()
    house.send(stored(5))
    house.stream.accept(1, batch({"type": "BlockTouched", "block_hashes": [5]}))
    assert house.stream.counts.unknown_events == 1
    assert not house.of(SourceLost)


def test_too_many_pools_and_too_many_blocks_are_refused_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "POOLS_MAX", 2)
    monkeypatch.setattr(stream_module, "POOL_BLOCKS_MAX", 4)
    house = House()
    house.stream.accept(0, batch(stored(1), stored(1, group_idx=1), stored(1, 2, group_idx=2)))
    assert (house.stream.counts.refused_blocks, len(house.of(SourceLost))) == (2, 1)
    house.stream.accept(1, batch(stored(2, 3, 4, 5)))
    assert (house.stream.counts.refused_blocks, len(house.of(SourceLost))) == (6, 2)
    assert house.dispatcher.leader.state.pools[0].resident_blocks == 1


def test_a_number_that_no_stream_reaches_is_refused() -> None:
    house = House()
    house.stream.accept(2**64 - 1, batch(stored(1)))
    assert house.stream.counts.bad_payloads == 1
    assert house.stream.next_seq == 0


def test_a_reset_of_ours_leaves_what_the_engine_holds() -> None:
    house = House()
    house.send(stored(1, 2))
    house.dispatcher.submit(ResetRequested, ResetMode.LOGICAL)
    house.check()


def test_removals_count_as_evictions_of_their_tier() -> None:
    house = House()
    house.send(stored(1, 2), stored(1, medium="CPU"))
    house.send(removed(1), removed(99), removed(1, medium="CPU"))
    assert house.dispatcher.leader.state.totals.evicted_blocks == [1, 1, 0, 0]


EVENT = some.one_of(
    some.builds(lambda keys, medium: stored(*keys, medium=medium), some.lists(some.integers(1, 6), max_size=4),
                some.sampled_from(["GPU", "CPU"])),
    some.builds(lambda key, medium: removed(key, medium=medium), some.integers(1, 6),
                some.sampled_from(["GPU", "CPU"])),
    some.just(cleared()),
)


@given(some.lists(some.lists(EVENT, max_size=8), max_size=8))
def test_the_facts_are_the_recount_whatever_the_order(batches: list[list[Any]]) -> None:
    house = House()
    for events in batches:
        house.send(*events)
        house.check()
    left: Counter[str] = Counter()
    for (_, _, medium), here in house.recount.nonempty().items():
        left[medium] += sum(here.values())
    assert {medium: count for medium, count in house.stream.resident_blocks().items() if count} == left


MESSAGE = some.tuples(
    some.lists(EVENT, max_size=6), some.sampled_from([0.0, 0.02, 0.06]), some.sampled_from([1, 1, 1, 2]),
    some.integers(0, 1), some.booleans(),
)
"""Events, seconds behind the message before, step of the number, rank, and whether another message waits."""


def _heard(messages: list[Any], *, together: bool) -> House:
    house, ts = House(snapshots=False), 1.0
    for events, later_s, step, rank, more in messages:
        ts += later_s
        house.seq += step
        payload = batch(*events, ts=ts, dp_rank=rank)
        house.recount.take(payload)
        house.stream.accept(house.seq, payload, more=together and more)
    house.stream.flush()
    house.check()
    return house


def _stays(house: House) -> dict[tuple[int, int], list[bool]]:
    """For each block of each pool, whether it came or went, in order."""
    found: dict[tuple[int, int], list[bool]] = {}
    for event in house.of(BlocksSeen):
        for keys, came in ((unpack_hashes(event.removed), False), (unpack_hashes(event.stored), True)):
            for key in keys:
                found.setdefault((event.pool, key), []).append(came)
    return found


@given(some.lists(MESSAGE, max_size=10))
def test_messages_that_wait_together_tell_what_they_tell_one_by_one(messages: list[Any]) -> None:
    apart, joined = _heard(messages, together=False), _heard(messages, together=True)
    assert _stays(joined) == _stays(apart)
    assert joined.stream.counts == apart.stream.counts
    mine, theirs = joined.dispatcher.leader.state, apart.dispatcher.leader.state
    assert [pool.info for pool in mine.pools] == [pool.info for pool in theirs.pools]
    assert (mine.lost_sources, mine.totals.evicted_blocks) == (theirs.lost_sources, theirs.totals.evicted_blocks)
    for one, other in zip(mine.pools, theirs.pools, strict=True):
        assert one.chains is not None
        assert other.chains is not None
        assert (one.chains.marks, one.chains.stored_blocks) == (other.chains.marks, other.chains.stored_blocks)
        assert sum(one.chains.again.values()) == sum(other.chains.again.values())


def _joined(*messages: list[Any], apart_s: float = 0.01) -> list[list[int]]:
    """The stored blocks of each event that these messages become."""
    house = House()
    for at, events in enumerate(messages):
        house.stream.accept(at, batch(*events, ts=1.0 + at * apart_s), more=True)
    house.stream.flush()
    return [unpack_hashes(event.stored) for event in house.of(BlocksSeen)]


def test_messages_of_one_pool_within_50_ms_are_one_event() -> None:
    assert _joined([stored(1)], [stored(2, 3, parent_block_hash=1)], [stored(4)]) == [[1, 2, 3, 4]]
    assert _joined([stored(1)], [stored(2)], [stored(3)], apart_s=0.03) == [[1, 2], [3]]
    assert _joined([stored(1)], [removed(1)], [stored(1)]) == [[1], [], [1]]
    assert _joined([stored(1)], [stored(2)], [stored(2, medium="CPU")], [stored(3)]) == [[1, 2], [2], [3]]
    assert _joined([stored(1)], [stored(2), stored(2, medium="CPU")], [stored(3)]) == [[1, 2], [2], [3]]


def test_a_report_tells_the_time_of_its_last_message() -> None:
    house = House()
    for seq, ts in enumerate((1.0, 1.03)):
        house.stream.accept(seq, batch(stored(seq + 1), ts=ts), more=True)
    assert not house.of(BlocksSeen)
    house.stream.lose(2, 2)
    (seen,) = house.of(BlocksSeen)
    assert (seen.age_ns, unpack_hashes(seen.stored)) == (-30_000_000, [1, 2])
    assert [type(event) for event in house.events[-2:]] == [BlocksSeen, SourceLost]


def test_a_large_pool_costs_no_more_per_report_than_a_small_one() -> None:
    """Counted, not timed: reports to a pool of 100,000 blocks touch as many places as they name."""
    rng = random.Random(5)
    house = House(snapshots=False, check=False)
    house.send(stored(*range(1, 100_001)))
    pool = house.dispatcher.leader.state.pools[0]
    content = CountingColumn(pool.content)
    pool.content = content  # type: ignore[assignment]
    keys = list(range(1, 100_001))
    for at in range(200):
        gone = keys.pop(rng.randrange(len(keys)))
        new = 200_000 + at
        keys.append(new)
        house.send(removed(gone), stored(new))
    assert content.reads < 200 * 20
    assert pool.resident_blocks == 100_000
    assert len(pool) < 2 * 100_000 + 1
    assert house.of(BlocksSeen)


class CountingColumn(bytearray):
    """A column that counts how often it is read."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        self.reads += 1
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        self.reads += len(self)
        return super().__iter__()

    def find(self, *args: Any) -> int:
        self.reads += len(self)
        return super().find(*args)

    def rstrip(self, *args: Any) -> bytearray:
        self.reads += len(self)
        return super().rstrip(*args)


def test_a_clear_is_told_once_until_something_else_is_told() -> None:
    """65,536 of them in one message stopped a daemon for 27 s, with a million blocks in its facts before them."""
    house = House(check=False)
    house.send(stored(1, 2), *[cleared()] * 500, stored(3), *[cleared()] * 500)
    assert [event.cleared for event in house.of(BlocksSeen)] == [False, True, False, True]
    assert house.stream.counts.clears == 1_000
    house.stream.lose(house.seq, house.seq)
    house.seq += 1
    state = house.dispatcher.leader.state
    assert state.lost_sources
    house.send(cleared())
    assert not state.lost_sources, "a clear makes certain again what a loss made doubtful"
    house.check()
