"""Laws of the core's tables: transitions, apply, handlers, descriptions, columns, bounds, snapshots.

Law of this file: every table is walked whole, so a new member that somebody forgets fails here.
"""

import math
import tracemalloc
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core import events as ev
from kvbm_console.core import instructions as ins
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes, unpack_ids
from kvbm_console.core.config import MAX_HOLD_NS_MAX, BreakpointSpec, LeaderConfig
from kvbm_console.core.describe import describe, kind
from kvbm_console.core.errors import FoldError, InvalidTransition, UsageError
from kvbm_console.core.folding import APPLY
from kvbm_console.core.holds import POINT_OF_SITE, POINT_OF_STATE, wait_point
from kvbm_console.core.ids import Authority, Route, Site, SlotState, Tier, WaitPoint, Word
from kvbm_console.core.leader import HANDLERS
from kvbm_console.core.slots import TRANSITIONS, check_move
from kvbm_console.core.snapshots import decode_facts, digest, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.dispatch import _CARRY_OUT

from .script import Script

MOVES = [(old, new) for old in SlotState for new in SlotState]
EVENTS = typing.get_args(ev.AnyEvent)
STIMULI = typing.get_args(st.AnyStimulus)


def opened(state: SlotState) -> CacheState:
    """A state with one slot that is put into ``state``: tests alone may do that."""
    facts = CacheState()
    facts.apply(ev.SlotOpened(0, 0, 0, 0, "a", 1, pack_hashes([7]), 18, 4, 0, None))
    facts.slots[0].state = state
    return facts


def moved(old: SlotState, new: SlotState) -> ev.SlotMoved:
    return ev.SlotMoved(1, 0, 1, 0, old, new, 2, 0, 0, 0, (0, 0, 0, 0), 0)


@pytest.mark.parametrize(("old", "new"), MOVES, ids=lambda state: state.label)
def test_the_table_alone_says_which_moves_there_are(old: SlotState, new: SlotState) -> None:
    facts = opened(old)
    before = digest(facts)
    if new in TRANSITIONS[old]:
        facts.apply(moved(old, new))
        assert facts.slots[0].state is new
    else:
        with pytest.raises(InvalidTransition, match=f"no transition from {old.label} to {new.label}"):
            facts.apply(moved(old, new))
        assert digest(facts) == before
        with pytest.raises(InvalidTransition):
            check_move(old, new)


def test_every_state_is_in_the_table_and_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(SlotState)
    reached = {new for moves in TRANSITIONS.values() for new in moves}
    assert reached == set(SlotState)
    assert [state for state in SlotState if not TRANSITIONS[state]] == [SlotState.FINISHED]
    assert all(SlotState.FINISHED in moves for state, moves in TRANSITIONS.items() if state is not SlotState.FINISHED)


def test_a_move_from_another_state_than_the_slots_is_refused() -> None:
    facts = opened(SlotState.DECODING)
    before = digest(facts)
    with pytest.raises(FoldError, match="slot 0 is decoding, not prefilling"):
        facts.apply(moved(SlotState.PREFILLING, SlotState.DECODING))
    assert digest(facts) == before


def test_every_event_has_one_handler_and_every_stimulus_too() -> None:
    assert {one for one in APPLY if one.__struct_config__.tag >= 0} == set(EVENTS), "below 0: kinds of newer programs"
    assert set(HANDLERS) == set(STIMULI)
    assert set(st.ENTRY_POINTS) == set(STIMULI)
    assert len(set(st.ENTRY_NAMES.values())) == len(STIMULI)
    assert set(_CARRY_OUT) == set(typing.get_args(ins.AnyInstruction))
    for union in (EVENTS, STIMULI):
        tags = [one.__struct_config__.tag for one in union]
        assert len(set(tags)) == len(tags)
    assert set(EVENTS) == {one for one in vars(ev).values() if isinstance(one, type) and issubclass(one, ev.Event)
                           and one not in (ev.Event, ev.UnknownKind)}


def example(annotation: Any) -> Any:
    """Some value of a field."""
    origin = typing.get_origin(annotation)
    if origin is tuple:
        arguments = typing.get_args(annotation)
        return () if arguments[-1] is Ellipsis else tuple(example(one) for one in arguments)
    if origin is not None:  # a union: its first member
        return example(typing.get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, Word):
        return next(iter(annotation))
    return {int: 1, str: "a", bytes: bytes(8), bool: True, float: 1.0}.get(annotation)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_every_event_is_described_in_one_line_with_and_without_facts(event: type[ev.Event]) -> None:
    values = [example(hint) for name, hint in typing.get_type_hints(event).items() if name in event.__struct_fields__]
    one = event(*values)
    assert kind(one) == event.__name__
    for state in (None, CacheState()):
        text = describe(one, state)
        assert text
        assert "\n" not in text
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=ev.AnyEvent)
    assert again == one


@given(some.lists(some.integers(-(2**31), 2**31 - 1)), some.lists(some.integers(0, 2**64 - 1)))
def test_columns_round_trip(ids: list[int], hashes: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert len(pack_ids(ids)) == 4 * len(ids)
    assert unpack_hashes(pack_hashes(hashes)) == hashes
    assert pack_hashes([1]) == b"\x01" + bytes(7)


def test_columns_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"123")
    with pytest.raises(ValueError, match="multiple"):
        unpack_hashes(b"1234567")


@pytest.mark.parametrize(("field", "value"), [
    ("block_tokens", 0), ("block_tokens", 65_537), ("g2_blocks", -1), ("g2_blocks", 2**31), ("g3_blocks", -1),
    ("offload_threshold", -0.1), ("offload_threshold", 1.1), ("offload_threshold", math.nan),
    ("offload_threshold", math.inf), ("offload_hysteresis", -1.0), ("offload_batch_blocks", 0),
    ("staging_share", 1.5), ("staging_deadline_ns", 0), ("ranks", 0), ("ranks", 1_025), ("thrash_window_ns", -1),
    ("hold_budget_min", 0), ("hold_budget_share", math.nan), ("pressure_share", 2.0),
])
def test_a_configuration_out_of_bounds_is_one_sentence_with_field_bound_and_value(field: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        LeaderConfig(**{field: value})
    text = str(caught.value)
    assert text.startswith(f"{field} must be ")
    assert text.endswith(f", got {value!r}")
    assert "\n" not in text


@pytest.mark.parametrize("fields", [{}, {"g2_blocks": 2**31 - 1}, {"offload_threshold": 0.0}, {"ranks": 1024}])
def test_bounds_are_included(fields: dict[str, Any]) -> None:
    assert LeaderConfig(**fields).digest() == LeaderConfig(**fields).digest()


def test_configurations_differ_in_their_digest() -> None:
    assert LeaderConfig().digest() != LeaderConfig(g2_blocks=1).digest()


@pytest.mark.parametrize("fields", [
    {"request": ""}, {"request": "x" * 300}, {"max_hold_ns": 0}, {"max_hold_ns": MAX_HOLD_NS_MAX + 1},
    {"ignore_count": -1},
])
def test_a_breakpoint_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        BreakpointSpec(**fields)


def test_words_have_labels_that_lead_back() -> None:
    for word in (SlotState.ONBOARD_STAGED, Site.TRANSITION_DID, Route.G2_G1):
        assert type(word).labelled(word.label) is word
    for route in Route:
        assert Route.of(route.source, route.target) is route
        assert route.is_load == (route.target < route.source)
    assert Route.labelled("G3→G1") is Route.G3_G1
    assert {tier.name for tier in Tier} == {"G1", "G2", "G3", "G4"}


def test_every_site_and_state_leads_to_a_waitable_point() -> None:
    assert set(POINT_OF_STATE) == set(SlotState)
    for site in Site:
        for state in SlotState:
            point = wait_point(site, state)
            assert (point is None) == (state is SlotState.FINISHED and site not in POINT_OF_SITE)
    reached = {point for point in (*POINT_OF_STATE.values(), *POINT_OF_SITE.values()) if point is not None}
    assert reached == set(WaitPoint) - {WaitPoint.CALL}


def busy() -> Script:
    """A leader with something of everything."""
    script = Script(g1=10, g2=8, g3=8, offload_threshold=0.0, ranks=2)
    script.arrive("a", "abcd")
    script.admit("a")
    script.step(2)
    script.clone("a", "a2")
    script.move_all()
    script.finish("a")
    script.arrive("b", "abxy")
    script.admit("b")
    script.step()
    script.stop_at(to=SlotState.PREEMPTED)
    script.tell(st.LeaseGranted, "me", source=0)
    script.preempt("b")
    for operation in list(script.mover.queued):
        script.start(operation)
        script.done(operation, 1)
    script.arrive("c", "abcd")
    script.lookup("c")
    return script


def attributes(thing: Any) -> Any:
    """Everything that a state remembers, derived indexes included, as plain values."""
    if isinstance(thing, CacheState):
        return {name: attributes(value) for name, value in vars(thing).items()}
    if isinstance(thing, (list, tuple)):
        return [attributes(one) for one in thing]
    if isinstance(thing, dict):
        return {key: attributes(value) for key, value in sorted(thing.items(), key=lambda item: str(item[0]))}
    if hasattr(type(thing), "__slots__") and not isinstance(thing, (msgspec.Struct, int)):
        names = [name for name in type(thing).__slots__ if name[0] != "_" and name != "views"]
        return {name: attributes(getattr(thing, name)) for name in names}
    return thing


def test_a_snapshot_brings_back_everything_derived_indexes_included() -> None:
    script = busy()
    for state in (CacheState(), script.state, script.mirror):
        again = decode_facts(encode_facts(state))
        assert attributes(again) == attributes(state)
        assert encode_facts(again) == encode_facts(state)
        assert digest(again) == digest(state)


def test_a_snapshot_shares_nothing_with_the_state() -> None:
    script = busy()
    data = encode_facts(script.state)
    before = digest(decode_facts(data))
    script.finish("c")
    assert digest(decode_facts(data)) == before != script.leader.digest()


def test_a_digest_holds_no_second_copy_of_a_pools_columns() -> None:
    """A recording of a few kB may declare a pool of 16.7 M blocks: the peak is the encoder's buffer, which grows by
    half, beside the columns of 21 bytes a place."""
    state, places = CacheState(), 200_000
    state.apply(ev.PoolKnown(0, 0, 0, 0, 1, 0, 0, Tier.G2, "CPU", places, 16, Authority.ENGINE))
    tracemalloc.start()
    digest(state)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.6 * 21 * places


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x91\x02", encode_facts(CacheState())[:-1]])
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(FoldError):
        decode_facts(data)


def test_an_event_out_of_order_is_refused() -> None:
    facts = opened(SlotState.INITIALIZED)
    with pytest.raises(FoldError, match="event 5 does not follow event 0"):
        facts.apply(ev.IterationAdvanced(5, 0, 1, 1, 1, 0, 0, (), ()))
    facts.apply(ev.IterationAdvanced(1, 9, 1, 1, 1, 0, 0, (), ()))
    with pytest.raises(FoldError, match="is at 3 ns, before 9 ns"):
        facts.apply(ev.IterationAdvanced(2, 3, 2, 2, 1, 0, 0, (), ()))


@pytest.mark.parametrize(("slots", "text"), [((7,), "1 block of 1 slot"), ((7, 8), "1 block of 2 slots")])
def test_one_slot_is_not_several(slots: tuple[int, ...], text: str) -> None:
    filled = ev.BlocksFilled(1, 0, 0, pool=0, slots=slots, counts=(1,), ids=bytes(4), hashes=bytes(8))
    assert describe(filled, None).endswith(text)
