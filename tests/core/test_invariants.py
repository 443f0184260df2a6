"""I1 to I17, one by one: sound facts pass, and facts (or an event) that break the invariant are found by its name.

Law of this file: what breaks an invariant is done to a copy of the facts, past ``apply``, or is an event that ``apply``
must refuse. That sound leaders never break one is the business of the state machine and of ``Script``.
"""

from collections import deque
from collections.abc import Callable

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import RULES, audit, quick_audit
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import FoldError, InvariantViolation, KvbmConsoleError
from kvbm_console.core.ids import Authority, CandidateStatus, EvictRule, ResetMode, SkipReason, SlotState, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import decode_facts, digest, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import FREE, READY, WRITING
from kvbm_console.dispatch import Dispatcher, start_leader

from . import oracle
from .engine_model import BLOCK, hash_of
from .scenes import forget_g1, serve, stored
from .script import Script


@pytest.fixture
def script() -> Script:
    """``a`` loads its prefix from G2, ``b`` decodes and is held at its schedule point."""
    script = stored("abcd", g1=16)
    script.arrive("b", "mn")
    script.admit("b")
    script.step(2)
    script.stop_at(to=SlotState.SKIPPED_DECODE, request="b")
    script.schedule(only=())
    script.arrive("a", "abcd")
    script.admit("a")
    script.start(script.operation_of("a"))
    assert script.state.holds
    return script


def facts_of(script: Script) -> CacheState:
    """A copy that may be broken."""
    facts = decode_facts(encode_facts(script.state))
    assert audit(facts) == [] == quick_audit(facts.pools)
    return facts


def rules(facts: CacheState) -> set[str]:
    return {found.rule for found in audit(facts)}


def test_i1_the_conditions_add_up_to_the_capacity(script: Script) -> None:
    for change in (-1, 1):
        facts = facts_of(script)
        facts.pools[0].counts[0] += change
        assert "I1" in rules(facts)
        assert [found.rule for found in quick_audit(facts.pools)] == ["I1"], "the cheap part sees it too"


def test_i1_the_cheap_part_is_always_on() -> None:
    """A leader that nobody told to check itself notices within sixteen stimuli."""
    leader = Leader(LeaderConfig(g2_blocks=4))
    dispatcher = Dispatcher(leader, lambda: 0)
    start_leader(dispatcher)
    for _ in range(40):
        dispatcher.submit(st.LeaseLost, "nobody")
    leader.state.pools[0].counts[0] -= 1
    with pytest.raises(InvariantViolation, match="I1"):
        deque((dispatcher.submit(st.LeaseLost, "nobody") for _ in range(16)), maxlen=0)


def test_i1_the_cheap_part_reaches_every_pool_in_turn() -> None:
    """With more pools than one look has, a wrong count in any of them is noticed."""
    for wrong in (0, 8, 20):
        leader = Leader(LeaderConfig())
        dispatcher = Dispatcher(leader, lambda: 0)
        for source in range(1, 22):
            dispatcher.submit_from(
                source, None, st.PoolDeclared, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM,
            )
        leader.state.pools[wrong].counts[0] -= 1
        with pytest.raises(InvariantViolation, match=f"pool {wrong}:"):
            deque((dispatcher.submit(st.LeaseLost, "nobody") for _ in range(16 * 3)), maxlen=0)


def test_i2_a_ref_count_is_the_number_of_references_and_is_never_clamped(script: Script) -> None:
    for change in (-1, 1):
        facts = facts_of(script)
        held = next(at for at, refs in enumerate(facts.pools[1].refs) if refs)
        facts.pools[1].refs[held] += change
        assert "I2" in rules(facts)
    facts = facts_of(script)
    free = next(at for at, refs in enumerate(facts.pools[1].refs) if not refs)
    with pytest.raises(FoldError):
        facts.pools[1].unref([free])


def test_i3_what_is_referenced_or_not_ready_is_not_evicted(script: Script) -> None:
    for index, pool in enumerate(script.state.pools):
        for place in range(len(pool)):
            if pool.refs[place] or pool.content[place] == WRITING:
                facts = facts_of(script)
                ids, hashes = pack_ids([place]), pack_hashes([pool.hash_of[place]])
                gone = ev.BlocksEvicted(facts.seq, script.now, 99, index, ids, hashes, None, EvictRule.RECENCY)
                with pytest.raises(FoldError):
                    facts.apply(gone)


def test_i4_a_place_has_a_hash_exactly_when_it_has_content(script: Script) -> None:
    pool = script.state.pools[0]
    full = next(at for at in range(len(pool)) if pool.content[at] == READY)
    empty = next(at for at in range(len(pool)) if not pool.content[at])
    for place, key in ((full, 0), (empty, hash_of("zz"))):
        facts = facts_of(script)
        facts.pools[0].hash_of[place] = key
        assert "I4" in rules(facts)
    facts = facts_of(script)
    facts.pools[0].by_hash[hash_of("zz")] = full
    assert "I4" in rules(facts)


def test_i5_no_place_twice_in_a_slot_and_only_full_blocks_in_two(script: Script) -> None:
    facts = facts_of(script)
    blocks = facts.slots[script.slot("b").slot].device_blocks
    blocks[0] = blocks[1]
    assert "I5" in rules(facts)
    facts = facts_of(script)
    partial = script.slot("b").device_blocks[-1]
    facts.slots[script.slot("a").slot].device_blocks[-1] = partial
    assert "I5" in rules(facts)


def test_i6_a_candidate_ends_once(script: Script) -> None:
    facts = facts_of(script)
    (number,) = facts.slots[script.slot("a").slot].outstanding
    facts.candidates[number].status = CandidateStatus.COMPLETED
    assert "I6" in rules(facts)
    ended = next(event for event in script.events if isinstance(event, ev.CandidateEnded))
    facts = facts_of(script)
    for again in (
        ev.CandidateEnded(facts.seq, script.now, 99, ended.candidate, CandidateStatus.COMPLETED),
        ev.CandidateSkipped(facts.seq, script.now, 99, ended.candidate, SkipReason.NO_CAPACITY),
    ):
        with pytest.raises(FoldError, match=f"no open candidate {ended.candidate}"):
            facts_of(script).apply(again)


def test_i7_an_unfinished_load_belongs_to_a_slot_that_waits_for_it(script: Script) -> None:
    facts = facts_of(script)
    facts.slots[script.slot("a").slot].state = SlotState.DECODING
    assert "I7" in rules(facts)


def test_i8_a_finished_slot_owns_nothing_and_finished_is_final(script: Script) -> None:
    number = script.slot("b").slot
    facts = facts_of(script)
    facts.slots[number].state = SlotState.FINISHED
    assert "I8" in rules(facts)
    with pytest.raises(FoldError, match="still owns something"):
        facts.apply(ev.SlotClosed(facts.seq, script.now, 99, number))
    move = ev.SlotMoved(
        facts.seq, script.now, 99, number, SlotState.FINISHED, SlotState.DECODING, 0, 1, 0, 0, (0, 0, 0, 0), 0
    )
    with pytest.raises(KvbmConsoleError, match="no transition from finished"):
        facts.apply(move)


def test_i9_seq_is_contiguous_and_time_never_goes_back(script: Script) -> None:
    facts = facts_of(script)
    for seq, at_ns in ((facts.seq + 1, script.now), (facts.seq - 1, script.now), (facts.seq, facts.at_ns - 1)):
        with pytest.raises(FoldError):
            facts_of(script).apply(ev.LeaseChanged(seq, at_ns, 99, "x", True))
    facts.apply(ev.LeaseChanged(facts.seq, script.now, 99, "x", True))


def test_i10_folding_the_events_gives_the_leaders_digest_and_leaving_one_out_does_not(script: Script) -> None:
    facts = CacheState()
    for event in script.events:
        facts.apply(event)
    assert digest(facts) == script.leader.digest()
    facts = CacheState()
    for event in script.events[:5]:
        facts.apply(event)
    with pytest.raises(FoldError):
        facts.apply(script.events[6])


@pytest.mark.parametrize("mode", ResetMode)
def test_i11_a_reset_leads_to_the_initial_state_by_the_same_path(script: Script, mode: ResetMode) -> None:
    script.done(script.operation_of("a"))
    script.reset(mode)
    fresh = Script(g1=16, g2=16, offload_threshold=0.0)
    for mine, theirs in zip(script.state.pools, fresh.state.pools, strict=True):
        assert (mine.hash_of, mine.content, mine.refs, mine.counts) == (
            theirs.hash_of, theirs.content, theirs.refs, theirs.counts
        )
    for left in (script.state.slots, script.state.candidates, script.state.operations, script.state.holds):
        assert not left
    told = [type(event) for event in script.last]
    assert (told[0], told[-1]) == (ev.ResetBegun, ev.ResetDone)
    for made in (script, fresh):
        serve(made, "again", "abmn")
    assert [pool.hash_of for pool in script.state.pools] == [pool.hash_of for pool in fresh.state.pools]


def test_i12_a_hold_and_its_slot_name_each_other_and_the_slot_stands(script: Script) -> None:
    facts = facts_of(script)
    facts.slots[script.slot("b").slot].hold = None
    assert "I12" in rules(facts)
    before = decode_facts(encode_facts(script.state))
    (hold,) = before.holds.values()
    assert hold.parked
    slot = before.slots[hold.slot]
    passed = ev.SlotMoved(
        before.seq, script.now, 99, slot.slot, slot.state, SlotState.DECODING, 0, 1, 0, 0, (0, 0, 0, 0), 0
    )
    with pytest.raises(AssertionError):
        oracle.check_holds(before, script.state, [passed], [])


def test_i13_a_parent_is_not_evicted_before_its_child() -> None:
    script = Script(g1=16, g2=5, offload_threshold=0.0)
    for number, word in enumerate(("abcd", "abxy", "mnop", "abcd", "qrst")):
        serve(script, f"r{number}", word)
        forget_g1(script, f"f{number}")
    assert [event for event in script.ever(ev.BlocksEvicted) if event.pool == 0], "each of them was looked at"
    pool = script.state.pools[0]
    child = next(key for key in pool.by_hash if oracle.PARENT.get(key) in pool.by_hash)
    parent = oracle.PARENT[child]
    gone = ev.BlocksEvicted(
        script.state.seq, script.now, script.state.n, 0, pack_ids([pool.by_hash[parent]]), pack_hashes([parent]), None,
        EvictRule.RECENCY,
    )
    script.state.apply(gone)
    (broken,) = script.lineage.saw([gone], script.state)
    assert (broken.rule, broken.detail) == (
        "I13", f"pool 0 gave up {parent:016x} before {child:016x}, which continues it",
    )


def test_i14_hits_less_what_was_lost_and_what_is_computed_are_the_tokens_of_the_request() -> None:
    script = stored("abcd", g1=12)
    script.arrive("b", "abcd", tail=2)
    script.admit("b")
    operation = script.operation_of("b")
    script.start(operation)
    script.fail(operation, [2])
    script.step()
    lost = sum(event.blocks for event in script.ever(ev.HitsLost))
    scored = script.ever(ev.PrefixScored)[-1]
    computed = script.slot("b").prompt_tokens - sum(script.slot("b").hits) * BLOCK
    assert (sum(scored.hits), lost, computed) == (4, 2, 2 * BLOCK + 2)
    assert (sum(scored.hits) - lost) * BLOCK + computed == script.slot("b").prompt_tokens


@pytest.mark.parametrize("tokens", [-1, 99, 10**9])
def test_i15_computed_tokens_are_within_the_sequence_and_have_places(script: Script, tokens: int) -> None:
    facts = facts_of(script)
    facts.slots[script.slot("a").slot].anchor_tokens = tokens
    assert rules(facts) == {"I15"}


def test_i16_what_a_copy_reads_is_ready(script: Script) -> None:
    facts = facts_of(script)
    operation = facts.operations[script.operation_of("a")]
    facts.pools[operation.source_pool].content[operation.sources[0]] = WRITING
    assert "I16" in rules(facts)


def test_i17_a_tier_has_a_hash_once_and_a_copy_a_place_once(script: Script) -> None:
    facts = facts_of(script)
    (lower,) = [pool for pool in facts.pools if pool.info.authority is Authority.LEADER]
    lower.store([lower.content.tolist().index(FREE)], [next(iter(lower.by_hash))], READY, 0)
    assert rules(facts) == {"I17"}
    facts = facts_of(script)
    operation = facts.operations[script.operation_of("a")]
    operation.sources.append(operation.sources[0])
    facts.pools[operation.source_pool].ref(operation.sources[-1:])
    assert rules(facts) == {"I17"}


def test_every_rule_of_the_audit_is_broken_here() -> None:
    tests: dict[str, Callable[..., object]] = {
        name: value for name, value in globals().items() if name.startswith("test_i")
    }
    numbers = {f"I{name.split('_')[1][1:]}" for name in tests}
    assert numbers == {f"I{number}" for number in range(1, 18)} >= set(RULES)
