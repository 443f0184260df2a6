"""Pools that an event stream describes: whatever it says, the leader stays sound (a lint, never an exception)."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core import tiers
from kvbm_console.core.chains import BlockMark
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.ids import Authority, Measure, ResetMode, Tier
from kvbm_console.core.snapshots import decode_facts, digest, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import UNKNOWN_NS

from .engine_model import BLOCK, hashes_of
from .script import Script

STREAM = 2


def followed(tier: Tier = Tier.G2, capacity: int | None = 4) -> tuple[Script, int]:
    """A leader that follows the stream of another engine; the index of its pool."""
    script = Script(g2=0)
    script.tell(st.PoolDeclared, 0, 0, tier, "CPU", capacity, BLOCK, Authority.STREAM, source=STREAM)
    script.checks = False  # the oracles know nothing of what other engines hold
    return script, len(script.state.pools) - 1


def report(script: Script, pool: int, stored: str = "", removed: str = "", *, cleared: bool = False) -> None:
    script.tell(st.BlocksReported, pool, pack_hashes(hashes_of(stored)), pack_hashes(hashes_of(removed)), cleared,
                source=STREAM)


DETAILS: dict[str, Any] = {
    "chains": b"", "parents": b"", "marked": b"", "contents": b"", "contexts": (), "again_within_ns": (),
    "again_within_blocks": (), "again_blocks": (), "age_ns": 0,
}
"""The columns of a report beside the hashes, in their order."""


def store(script: Script, pool: int, hashes: list[int], details: dict[str, Any]) -> None:
    script.tell(st.BlocksReported, pool, pack_hashes(hashes), b"", False, b"", "", *(DETAILS | details).values(),
                source=STREAM)


def test_more_than_the_pool_holds_makes_what_was_known_void() -> None:
    script, pool = followed()
    report(script, pool, "abc")
    report(script, pool, "xyz")
    assert not script.rejected
    assert set(script.state.pools[pool].by_hash) == set(hashes_of("xyz"))
    assert [type(event) for event in script.last] == [ev.BlocksSeen, ev.SourceLost]
    assert script.state.lost_sources[STREAM] == 1


def test_what_is_removed_in_the_same_report_makes_room() -> None:
    script, pool = followed()
    report(script, pool, "abc")
    report(script, pool, "xyz", "abc")
    assert set(script.state.pools[pool].by_hash) == set(hashes_of("xyz"))
    assert not script.state.lost_sources
    report(script, pool, "mnop", cleared=True)
    assert set(script.state.pools[pool].by_hash) == set(hashes_of("mnop"))
    assert not script.state.lost_sources


def test_removals_of_what_is_not_there_make_no_room() -> None:
    script, pool = followed()
    report(script, pool, "abc")
    report(script, pool, "xyz", "mnopq")
    assert script.state.lost_sources[STREAM] == 1


def test_a_pool_of_unknown_capacity_grows() -> None:
    script, pool = followed(capacity=None)
    for word in ("abc", "xyz", "mnop"):
        report(script, pool, word)
    assert script.state.pools[pool].resident_blocks == 10


def test_parents_marks_and_lives_are_facts_and_survive_a_snapshot() -> None:
    script, pool = followed(capacity=None)
    a, b, d = hashes_of("abd")
    told = {"chains": pack_ids([2, 1]), "parents": pack_hashes([0, a]), "marked": pack_ids([0, 2]),
            "contents": pack_hashes([7, 0]), "contexts": ("lora=x", "image=#1"),
            "again_within_ns": (10**9,), "again_within_blocks": (64,), "again_blocks": (2,)}
    store(script, pool, [a, b, d], told)
    facts = script.state.pools[pool]
    assert facts.chains is not None
    parents = {facts.hash_of[place]: facts.chains.parent_of[place] for place in facts.by_hash.values()}
    assert parents == {a: 0, b: a, d: a}
    assert facts.chains.marks == {a: BlockMark(7, "lora=x"), d: BlockMark(0, "image=#1")}
    assert (facts.chains.again_within(10**9), facts.chains.again_within(10**6)) == (2, 0)
    script.tell(st.BlocksReported, pool, b"", pack_hashes([d]), False, source=STREAM)
    assert d not in facts.chains.marks
    assert sum(facts.chains.lived) == 1
    assert digest(decode_facts(encode_facts(script.state))) == digest(script.state)
    report(script, pool, cleared=True)
    assert not facts.chains.marks
    assert not any(facts.chains.parent_of)
    assert sum(facts.chains.lived) == 1, "counts of earlier lives stay"


def test_a_life_is_the_time_between_the_steps_of_the_engine() -> None:
    """A replay tells of a store a minute late, and the eviction is told as it happens."""
    script, pool = followed(capacity=None)
    a, b, d = hashes_of("abd")
    facts = script.state.pools[pool]
    for key, age_ns in ((a, 60 * 10**9), (b, None), (d, -(10**9))):
        store(script, pool, [key], {"age_ns": age_ns})
        stored_ns = UNKNOWN_NS if age_ns is None else script.state.at_ns - age_ns
        assert facts.stored_at[facts.by_hash[key]] == stored_ns
    assert digest(decode_facts(encode_facts(script.state))) == digest(script.state)
    script.tell(st.BlocksReported, pool, b"", pack_hashes([a, b]), False, source=STREAM)
    chains = facts.chains
    assert chains is not None
    assert {bound: count for bound, count in enumerate(chains.lived) if count} == {(60 * 10**9).bit_length(): 1}
    removal = DETAILS | {"age_ns": None}
    script.tell(st.BlocksReported, pool, b"", pack_hashes([d]), False, b"", "", *removal.values(), source=STREAM)
    assert sum(chains.lived) == 1, "an eviction of unknown time ends no life"
    assert not facts.by_hash


REPORTS = some.lists(some.tuples(
    some.lists(some.integers(1, 40), unique=True, max_size=25), some.lists(some.integers(1, 40), max_size=25),
    some.sampled_from([None, -5, 0, 1, 2**20 - 1, 2**20, 2**40]),
), max_size=12)
"""Reports: the hashes that each stores and removes, and how long ago."""


@settings(max_examples=60, deadline=None)
@given(REPORTS)
def test_a_report_of_many_blocks_leaves_the_facts_of_one_that_is_taken_block_by_block(
    reports: list[tuple[list[int], list[int], int | None]]
) -> None:
    facts = []
    for least in (1, 1_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiers, "BULK_LEAST", least)
            script, pool = followed(capacity=None)
            for stored, removed, age_ns in reports:
                told = DETAILS | {
                    "chains": pack_ids([1] * len(stored)), "parents": pack_hashes([key // 2 for key in stored]),
                    "age_ns": age_ns,
                }
                script.tell(st.BlocksReported, pool, pack_hashes(stored), pack_hashes(removed), False, b"", "",
                            *told.values(), source=STREAM)
            assert not script.rejected
            facts.append(encode_facts(script.state))
    assert facts[0] == facts[1]


@pytest.mark.parametrize(("told", "why"), [
    ({"age_ns": 2**62 + 1}, "age_ns must be"),
    ({"chains": pack_ids([1]), "parents": pack_hashes([0])}, "not fit"),
    ({"chains": pack_ids([3, -1]), "parents": pack_hashes([0, 0])}, "not fit"),
    ({"chains": pack_ids([2]), "parents": b""}, "not fit"),
    ({"marked": pack_ids([2]), "contents": pack_hashes([0]), "contexts": ("",)}, "marked must be"),
    ({"marked": pack_ids([1]), "contents": b"", "contexts": ("",)}, "one entry"),
    ({"marked": pack_ids([1]), "contents": pack_hashes([0]), "contexts": ("x" * 257,)}, "256 characters"),
    ({"again_within_ns": (5,), "again_within_blocks": (2,), "again_blocks": (1,)}, "AGE_BOUNDS_NS"),
    ({"again_within_ns": (10**9,), "again_within_blocks": (), "again_blocks": (1,)}, "one length"),
])
def test_columns_that_do_not_fit_the_blocks_are_refused(told: dict[str, Any], why: str) -> None:
    script, pool = followed()
    store(script, pool, hashes_of("ab"), told)
    assert why in script.why
    assert not script.state.pools[pool].by_hash


def test_the_last_metrics_of_an_engine_are_facts_until_it_ends() -> None:
    script, _ = followed()
    script.tell(st.MeasuresReported, (Measure.RUNNING, Measure.WAITING), (3, 0), source=STREAM)
    assert script.state.measured[STREAM].values == {Measure.RUNNING: 3, Measure.WAITING: 0}
    assert digest(decode_facts(encode_facts(script.state))) == digest(script.state)
    script.tell(st.MeasuresReported, (Measure.RUNNING,), (2,), source=STREAM)
    assert script.state.measured[STREAM].values == {Measure.RUNNING: 2}, "a number that is not told is unknown"
    script.tell(st.MeasuresReported, (), (), source=STREAM)
    assert not script.state.measured
    script.tell(st.MeasuresReported, (), (), source=STREAM)
    assert not script.last, "unknown stays unknown"
    script.tell(st.MeasuresReported, (Measure.RUNNING,), (2,), source=STREAM)
    script.tell(st.SourceRestarted, True, source=STREAM)
    assert not script.state.measured


def test_a_streams_device_pool_takes_no_requests() -> None:
    script, pool = followed(Tier.G1)
    script.tell(st.RequestArrived, "a", pack_hashes(hashes_of("ab")), 9, 9, 0, None, source=STREAM)
    script.tell(st.BlocksAllocated, "a", pack_ids([0, 1, 2]), 0, source=STREAM)
    assert "no G1 pool of its own" in script.why
    report(script, pool, "abcd")
    script.tell(st.ResetRequested, ResetMode.LOGICAL, source=0)
    assert script.state.pools[pool].resident_blocks == 4, "its engine still holds them"


def test_a_tap_and_a_stream_of_one_engine_are_counted_once() -> None:
    state = CacheState()

    def emit(kind: Any, *fields: Any) -> None:
        state.apply(kind(state.seq, 1, 0, *fields))

    stream, lower, tapped = range(3)
    for pool, (tier, authority) in enumerate([
        (Tier.G1, Authority.STREAM), (Tier.G2, Authority.STREAM), (Tier.G1, Authority.OBSERVED),
    ]):
        source = 3 if authority is Authority.OBSERVED else STREAM
        emit(ev.PoolKnown, pool, source, 0, 0, tier, "CPU", 100, BLOCK, authority)
    hashes = list(range(1, 41))

    def counted() -> list[int]:
        return [pool.info.pool for pool in state.counted(state.pools)]

    emit(ev.BlocksSeen, stream, pack_hashes(hashes[:38]), b"", False)
    emit(ev.BlocksSeen, lower, pack_hashes(hashes[:4]), b"", False)
    assert counted() == [stream, lower, tapped]
    assert state.tapped_as(STREAM) is None
    emit(ev.BlocksFilled, tapped, (), (), pack_ids(range(40)), pack_hashes(hashes))
    assert state.tapped_as(STREAM) == 3
    assert state.tapped_as(3) is None, "a tapped engine is no stream of itself"
    assert counted() == [lower, tapped], "the tap has no such tier, so the stream's is the only one"
    emit(ev.BlocksSeen, stream, pack_hashes([key + 1_000 for key in hashes]), b"", True)
    assert counted() == [stream, lower, tapped], "another engine with other blocks"


def test_a_shared_pool_is_counted_by_its_own_publisher() -> None:
    script, device = followed(Tier.G1, None)
    for source in (STREAM, 3):
        script.tell(st.PoolDeclared, 0, 0, Tier.G4, "CPU REMOTE kv", None, BLOCK, Authority.STREAM, source=source)
    part, whole = len(script.state.pools) - 2, len(script.state.pools) - 1
    store(script, part, [1, 2], {})
    store(script, whole, [1, 2, 3], {})
    remote = [script.state.pools[part], script.state.pools[whole]]
    assert [pool.info.pool for pool in script.state.counted(remote)] == [whole]
    assert script.state.counted([script.state.pools[device]])
    script.tell(st.SourceRestarted, True, source=3)
    assert [pool.info.pool for pool in script.state.counted(remote)] == [part], "the publisher of the pool has ended"


def test_a_figure_of_a_connector_that_is_no_number_is_left_out() -> None:
    """It would differ from itself, so that a rerun of the stimuli told of a difference."""
    script, _ = followed()
    script.tell(
        st.ConnectorReported, ("Nixl",), ("get",), (2,), (30,), (20,), ("mean", "sum", "rate"),
        (float("nan"), 3.0, float("inf")), source=STREAM,
    )
    assert (script.state.connectors[STREAM].stats, script.state.connectors[STREAM].values) == (
        ("sum", "rate"), (3.0, float("inf"))
    )
