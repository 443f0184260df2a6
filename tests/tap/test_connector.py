"""The tap's class: everything goes through unchanged, nothing of ours reaches the engine, nothing heavy is imported."""

import random
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from kvbm_console.analysis.explain import explain
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Authority, SlotState
from kvbm_console.tap.connector import TAPPED, arguments_of, make_tap
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import ASK_NS, ERRORS_MAX, QUEUE_MAX, TapRecorder
from kvbm_console.tap.sender import TapSettings
from tests.analysis.evidence import evidence
from tests.recording.helpers import Run
from tests.tap.fake_engine import BLOCK, Base, Inner, Request, Scheduler, Status
from tests.tap.watching import Watching


class Binding:
    """The engine's side of a tap, for the fake base class."""

    def __init__(self, inner: type[Any] = Inner) -> None:
        self.kind = inner
        self.made = TapRecorder()

    def inner(self, tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.kind(*args, **kwargs)

    def inner_class(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[type, Any, Any]:
        return self.kind, args, kwargs

    def recorder(self, tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TapRecorder | None:
        return self.made


def made(inner: type[Any] = Inner, base: type[Any] = Base) -> tuple[Any, TapRecorder]:
    binding = Binding(inner)
    return make_tap("Tap", (base,), binding)("config", "role", "cache"), binding.made


def watching(recorder: TapRecorder, blocks: int, medium: str = "") -> Watching:
    return Watching(recorder, Flattener(block_tokens=BLOCK), TapSettings("", "fake", BLOCK, blocks, medium=medium))


def test_everything_nobody_has_seen_goes_through_unchanged() -> None:
    tap, _ = made()
    inner = tap._tapped
    assert tap.predict_the_weather("here", 1, 2, wind=3) == (inner, "here", (1, 2), {"wind": 3})
    assert tap.nobody_has_seen_this(1) == ("base", 1, 3)
    assert tap.likes_rain is True
    tap.likes_rain = False
    assert inner.rain is False
    assert type(tap).layout_of("x") == ("Inner", "x")
    assert tap.number_of("four") == 4
    assert tap.extra == "mine"
    assert isinstance(tap, Base)
    with pytest.raises(AttributeError):
        _ = tap.nothing_of_the_kind


def test_an_engine_whose_connectors_take_two_arguments() -> None:
    """So it was before vLLM 0.11."""

    class Old(Base):
        def __init__(self, vllm_config: Any, role: Any) -> None:
            self.given = vllm_config, role

    tap = make_tap("Tap", (Old,), Binding())("config", "role")
    assert tap.given == ("config", "role")
    assert arguments_of(Old, (1, 2, 3)) == (1, 2)
    assert arguments_of(Base, (1, 2, 3)) == arguments_of(Inner, (1, 2, 3)) == (1, 2, 3)


@given(some.lists(some.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True), unique=True, max_size=20), some.integers())
def test_any_base_class_is_forwarded_whole(names: list[str], value: int) -> None:
    """Methods of any name, results and errors: what the inner connector does is what the engine sees."""

    def answering(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if value % 2:
                raise LookupError(name, args)
            return name, args, kwargs

        return method

    free = [name for name in names if name not in TAPPED and name not in dir(Base)]
    base = type("Other", (Base,), {name: answering("base " + name) for name in free})
    inner = type("OtherInner", (Inner, base), {name: answering(name) for name in free})
    tap, _ = made(inner, base)
    for name in free:
        if value % 2:
            with pytest.raises(LookupError) as raised:
                getattr(tap, name)(value, more=1)
            assert raised.value.args == (name, (value,))
        else:
            assert getattr(tap, name)(value, more=1) == (name, (value,), {"more": 1})


@pytest.mark.parametrize("name", sorted(set(TAPPED) - {"bind_kv_cache_manager"}))
def test_an_error_of_the_inner_connector_is_the_engines_and_one_of_ours_is_not(name: str) -> None:
    """Whatever the recorded calls are given, the inner connector is called once, and its own error goes on."""

    class Broken(Inner):
        pass

    def broken(self: Any, *args: Any) -> Any:
        self.calls.append(name)
        raise KeyError("of the connector")

    setattr(Broken, name, broken)
    tap, recorder = made(Broken)
    recorder.on = True
    arguments: list[Any] = {"take_events": [], "reset_cache": [], "shutdown": [],
                            "get_num_new_matched_tokens": [object(), 0], "request_finished": [object(), []],
                            "request_finished_all_groups": [object(), [[]]],
                            "update_state_after_alloc": [object(), object(), 0]}.get(name, [object()])
    if name == "request_finished_all_groups":
        return  # the fake base class has one group of blocks
    with pytest.raises(KeyError, match="of the connector"):
        getattr(tap, name)(*arguments)
    assert tap._tapped.calls == [name]


def test_errors_of_ours_are_swallowed_counted_and_in_the_end_the_tap_is_off() -> None:
    tap, recorder = made()
    recorder.on = True
    for _ in range(ERRORS_MAX + 5):
        assert tap.build_connector_meta(type("Odd", (), {"num_scheduled_tokens": {}, "preempted_req_ids": 7})()) == (
            "metadata", 0,
        )
        recorder.want_full = False
    assert recorder.errors == ERRORS_MAX
    assert not recorder.on
    recorder.listen()
    assert not recorder.on


@pytest.mark.parametrize("listening", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_the_engine_gets_every_event_of_a_connector_that_yields_them(follows: bool, listening: bool) -> None:
    """A generator can be read once. The tap reads it even while no daemon listens, to know the tier's content."""
    class Yielding(Inner):
        def take_events(self) -> Any:
            yield from stored

    stored = [type("BlockStored", (), {"medium": "CPU", "block_hashes": [number]})() for number in (7, 8)]
    tap, recorder = made(Yielding)
    recorder.on, recorder.below = listening, {} if follows else None
    assert list(tap.take_events()) == stored
    assert recorder.below == ({"CPU": {7: 1, 8: 1}} if follows else None)


def test_a_full_queue_drops_and_counts() -> None:
    recorder = TapRecorder()
    recorder.on = True
    for number in range(QUEUE_MAX + 100):
        recorder.put(("reset", number))
    assert (len(recorder.queue), recorder.dropped, recorder.want_full) == (QUEUE_MAX, 100, True)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [("kvbm_console.tap.connector", ("grpc", "google", "textual", "anyio", "msgspec", "asyncio")),
     ("kvbm_console.tap.sender", ("grpc", "google", "textual", "anyio", "asyncio", "kvbm_console.core"))],
)
def test_nothing_heavy_is_imported_into_the_engine(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*[name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


# --- holds, in the scheduler's thread ---


def test_a_held_lookup_asks_again_until_released_or_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    tap, recorder = made()
    now = [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    recorder.on = True
    one, other = Request("one", [1] * 9, 1), Request("other", [2] * 9, 1)
    recorder.obey({}, ["on*"], [])
    assert tap.get_num_new_matched_tokens(one, 0) == (None, False)  # asked for
    assert tap.get_num_new_matched_tokens(other, 0) == (0, False)
    assert [record[2] for record in recorder.queue if record[0] == "will"] == ["one"]
    recorder.obey({"one": now[0] + 500}, ["on*"], [])
    assert tap.get_num_new_matched_tokens(one, 0) == (None, False)
    now[0] += 500
    assert tap.get_num_new_matched_tokens(one, 0) == (0, False)  # the daemon is dead: its time is over
    recorder.obey({"one": now[0] + 500}, ["on*"], [])
    recorder.obey({}, ["on*"], [])
    assert tap.get_num_new_matched_tokens(one, 0) == (0, False)  # released: this lookup is not asked for again
    assert not any(call[1] == "one" for call in tap._tapped.calls[:1])


def test_without_a_verdict_a_lookup_goes_on_after_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    tap, recorder = made()
    now = [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    recorder.on = True
    recorder.obey({}, ["*"], [])
    request = Request("one", [1] * 9, 1)
    assert tap.get_num_new_matched_tokens(request, 0) == (None, False)
    now[0] += ASK_NS - 1
    assert tap.get_num_new_matched_tokens(request, 0) == (None, False)
    now[0] += 1
    assert tap.get_num_new_matched_tokens(request, 0) == (0, False)
    recorder.off()
    assert tap.get_num_new_matched_tokens(Request("two", [1] * 9, 1), 0) == (0, False)


# --- the whole way, in one process ---


def compare(engine: Scheduler, watch: Watching) -> None:
    """Blocks, holders, contents, positions and states, read where each side keeps them."""
    state = watch.leader.state
    slots = {slot.request: slot for slot in state.slots.values()}
    assert slots.keys() == engine.requests.keys()
    for name, request in engine.requests.items():
        slot = slots[name]
        assert slot.device_blocks == engine.owned.get(name, []), name
        if request.status is Status.RUNNING:
            assert slot.computed_tokens(state.iteration) == request.num_computed_tokens, name
        else:
            waits = {Status.WAITING: SlotState.INITIALIZED, Status.PREEMPTED: SlotState.PREEMPTED}
            assert slot.state is waits[request.status]
    (pool,) = (one for one in state.pools if one.info.authority is Authority.OBSERVED)
    for block in range(1, engine.size):
        theirs = engine.hash_of.get(block)
        assert pool.hash_of[block] == (0 if theirs is None else int.from_bytes(theirs[-8:], "big")), block
        assert pool.refs[block] == engine.refs[block], block


def arrivals(dice: random.Random) -> list[list[int]]:
    system = [dice.randrange(100) for _ in range(10)]
    return [system[: dice.randrange(11)] + [dice.randrange(100) for _ in range(dice.randrange(1, 40))]
            for _ in range(dice.randrange(1, 14))]


def with_longer(prompts: list[list[int]], dice: random.Random) -> list[list[int]]:
    """The prompts with others behind them that begin alike: a request may share blocks that the one before it is still
    computing."""
    return [one for prompt in prompts
            for one in ([*prompt, *(dice.randrange(100) for _ in range(dice.randrange(1, 20)))], prompt)]


EXAMPLES = max(25, settings.default.max_examples // 4)
"""An example is a whole run of an engine, compared after every step."""


@settings(max_examples=EXAMPLES)
@given(some.integers(0, 2**32), some.integers(16, 60), some.integers(4, 40), some.sampled_from(["", "CPU"]))
@example(3_354_266_702, 33, 21, "")  # a prompt shares the answer of a request whose block this step makes full
def test_what_the_leader_knows_is_what_the_engine_does(seed: int, blocks: int, budget: int, medium: str) -> None:
    dice = random.Random(seed)
    tap, recorder = made()
    engine = Scheduler(tap, blocks=blocks, budget=budget)
    watch = watching(recorder, blocks, medium)
    prompts = with_longer(arrivals(dice), dice)
    for step in range(400):
        while prompts and dice.random() < 0.4:
            prompt = prompts.pop()
            engine.add(Request(f"r{step}-{len(prompts)}", prompt, dice.randrange(1, 20)))
        if engine.requests and dice.random() < 0.02:
            engine.end(dice.choice(list(engine.requests.values())), Status.FINISHED_ABORTED)
        if dice.random() < 0.03:
            engine.reset()
        output = engine.step()
        names = {slot.slot: slot.request for slot in watch.leader.state.slots.values()}
        watch.pump()
        names.update((slot.slot, slot.request) for slot in watch.leader.state.slots.values())
        # In which order of a step they went is the engine's alone: allocations and steps are told apart.
        theirs = [(int.from_bytes(key[-8:], "big"), name) for key, name in engine.evicted]
        engine.evicted.clear()
        assert sorted(_evictions(watch, names)) == sorted(theirs)
        compare(engine, watch)
        engine.sample(output)
        if not prompts and not engine.requests:
            break
    watch.pump()
    assert watch.rejected == []
    assert watch.leader.state.lost_sources == {}
    assert recorder.errors == 0


def _evictions(watch: Watching, names: dict[int, str]) -> list[tuple[int, str]]:
    from kvbm_console.core import events as ev
    from kvbm_console.core.columns import unpack_hashes

    return [(key, names[event.for_slot]) for event in watch.events if isinstance(event, ev.BlocksEvicted)
            and event.for_slot is not None for key in unpack_hashes(event.hashes)]


@settings(max_examples=EXAMPLES)
@given(some.integers(0, 2**32), some.integers(20, 60))
@example(9_758_635, 20)  # a new request shares what one that is resumed was given in the same step
@example(1_297_312_086, 34)  # ... and what one that is computed in parts was given in the same step
def test_after_dropped_records_what_is_held_is_known_again_and_what_is_cached_is_not_certain(
    seed: int, blocks: int
) -> None:
    dice = random.Random(seed)
    tap, recorder = made()
    engine = Scheduler(tap, blocks=blocks)
    watch = watching(recorder, blocks)
    prompts = arrivals(dice)
    dropped = False
    for step in range(200):
        while prompts and dice.random() < 0.4:
            engine.add(Request(f"r{step}-{len(prompts)}", prompts.pop(), dice.randrange(1, 20)))
        output = engine.step()
        if recorder.queue and dice.random() < 0.1:
            for _ in range(dice.randrange(1, 4)):
                if recorder.queue:
                    recorder.queue.pop()
                    recorder.dropped += 1
            recorder.want_full = True
            dropped = bool(recorder.stepped_ns)  # before its first step an engine has nothing to lose
        watch.pump_gently()
        if not recorder.want_full and dropped:
            state = watch.leader.state
            assert 1 in state.lost_sources
            slots = {slot.request: slot for slot in state.slots.values()}
            assert slots.keys() == engine.requests.keys()
            for name in engine.requests:
                assert slots[name].device_blocks == engine.owned.get(name, []), name
        engine.sample(output)


def test_a_listener_that_comes_late_is_told_of_what_lives_and_says_what_it_cannot_know() -> None:
    tap, recorder = made()
    engine = Scheduler(tap)
    for number in range(4):
        engine.add(Request(f"r{number}", [number] * 14, 30))
    for _ in range(6):
        engine.sample(engine.step())
    watch = watching(recorder, engine.size)
    engine.sample(engine.step())
    watch.pump()
    assert 1 in watch.leader.state.lost_sources
    for _ in range(5):
        output = engine.step()
        watch.pump()
        state = watch.leader.state
        for slot in state.slots.values():
            assert slot.device_blocks == engine.owned[slot.request]
            assert slot.computed_tokens(state.iteration) == engine.requests[slot.request].num_computed_tokens
        engine.sample(output)
    assert {slot.state for slot in watch.leader.state.slots.values()} == {SlotState.DECODING}


def test_a_reset_of_the_prefix_cache_empties_the_device_and_why_names_it() -> None:
    tap, recorder = made()
    engine = Scheduler(tap, blocks=40)
    watch = watching(recorder, 40)
    for name in ("before", "after"):
        engine.add(Request(name, list(range(14)), 3))
        while engine.requests:
            engine.sample(engine.step())
        watch.pump()
        assert watch.leader.state.pools[0].resident_blocks > 0
        if name == "before":
            engine.reset()
            watch.pump()
            assert watch.leader.state.pools[0].resident_blocks == 0
    assert watch.leader.state.lost_sources == {}
    run = Run(LeaderConfig(), watch.stimuli, watch.outcomes)
    (admission,) = explain(evidence(run.all_events, run.config), "after").admissions
    first = admission.misses[0]
    assert (first.reason, first.text) == ("reset", "a prefix cache reset cleared it")
