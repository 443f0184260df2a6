"""A client's id names what its engine made of it, in breakpoints, filters and ``why``, and names nothing else."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.analysis.explain import explain
from kvbm_console.core import events as ev
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.expression import compile_slot_filter
from kvbm_console.core.ids import SlotState, is_called, request_globs, request_match, sampled
from tests.analysis.evidence import evidence
from tests.core.script import Script

NAMES = some.from_regex(r"(chat)?cmpl-[a-z0-9-]{1,12}", fullmatch=True)
DIGITS = some.from_regex(r"[0-9a-f]{8}", fullmatch=True)


@given(NAMES, DIGITS, some.none() | some.integers(0, 99))
def test_the_id_of_a_client_names_what_an_engine_appends_to_it(name: str, digits: str, prompt: int | None) -> None:
    engine = f"{name}-{digits}" if prompt is None else f"{name}-{prompt}-{digits}"
    assert is_called(engine, name)
    assert request_match(name)(engine) is not None
    assert is_called(name, name)
    assert request_match(name)(name) is not None


@given(NAMES, some.text("abcdef0123456789-", max_size=14))
def test_what_matches_a_breakpoint_is_what_is_called_so(name: str, more: str) -> None:
    request = name + more
    appended = more == "" or re.fullmatch(r"(-[0-9]{1,2})?-[0-9a-f]{8}", more) is not None
    assert (request_match(name)(request) is not None) is appended
    assert not appended or is_called(request, name)


@given(NAMES, DIGITS, some.none() | some.integers(0, 99), some.integers(0, 99))
def test_the_id_of_a_client_names_its_samples(name: str, digits: str, prompt: int | None, sample: int) -> None:
    engine = f"{sample}_{name}-{digits}" if prompt is None else f"{sample}_{name}-{prompt}-{digits}"
    for pattern in (name, engine[len(f"{sample}_") :]):
        assert is_called(engine, pattern)
        assert request_match(pattern)(engine) is not None
    assert request_match(f"{name}*")(engine) is not None
    assert sampled(engine) == engine.partition("_")[2]
    assert not is_called(f"1{sample}x_{name}-{digits}", name)


def test_a_glob_matches_samples_and_appends_nothing() -> None:
    for pattern in ("chatcmpl-*", "r?", "[ab]"):
        assert request_globs(pattern) == (pattern, f"[0-9]_{pattern}", f"[0-9][0-9]_{pattern}")
    assert request_globs("*7") == ("*7",)


def test_why_of_a_request_with_samples_explains_the_first_and_names_the_others() -> None:
    names = [f"{sample}_chatcmpl-7-1a2b3c4d" for sample in range(3)]
    told = evidence(arrived(*names, "chatcmpl-8-1a2b3c4d").events, LeaderConfig())
    explanation = explain(told, "chatcmpl-7")
    assert (explanation.request, explanation.samples) == (names[0], (names[1], names[2]))
    assert explanation.remarks[0] == f"one of 3 samples; the others are {names[1]}, {names[2]}"
    assert explain(told, names[1]).samples == ()


def arrived(*names: str) -> Script:
    script = Script(twin=False, checks=False)
    for name in names:
        script.arrive(name, "wxyz")
    return script


def test_why_finds_the_request_of_a_client() -> None:
    script = arrived("chatcmpl-7-1a2b3c4d", "chatcmpl-70-1a2b3c4d", "cmpl-8-0-1a2b3c4d", "cmpl-8-1-1a2b3c4e", "exact")
    told = evidence(script.events, LeaderConfig())
    assert explain(told, "chatcmpl-7").request == "chatcmpl-7-1a2b3c4d"
    assert explain(told, "exact").request == "exact"
    with pytest.raises(UsageError, match="cmpl-8 is 2 requests: name one of cmpl-8-0-1a2b3c4d, cmpl-8-1-1a2b3c4e"):
        explain(told, "cmpl-8")
    with pytest.raises(UsageError, match="has no request 'chatcmp'"):
        explain(told, "chatcmp")


def test_a_breakpoint_on_the_id_of_a_client_holds_its_request() -> None:
    script = Script(twin=False, checks=False)
    script.stop_at(to=SlotState.PREFILLING, request="chatcmpl-7")
    for name in ("chatcmpl-7-1a2b3c4d", "chatcmpl-70-1a2b3c4d"):
        script.arrive(name, "wxyz")
        assert script.admit(name)
    script.step()
    held = [event.slot for event in script.events if isinstance(event, ev.SlotHeld)]
    assert [script.leader.state.slots[slot].request for slot in held] == ["chatcmpl-7-1a2b3c4d"]


def test_a_filter_on_the_id_of_a_client_finds_its_request() -> None:
    script = arrived("chatcmpl-7-1a2b3c4d", "chatcmpl-70-1a2b3c4d")
    one = compile_slot_filter("request = chatcmpl-7")
    other = compile_slot_filter("request != chatcmpl-7")
    slots = list(script.leader.state.slots.values())
    assert [slot.request for slot in slots if one(script.leader.state, slot)] == ["chatcmpl-7-1a2b3c4d"]
    assert [slot.request for slot in slots if other(script.leader.state, slot)] == ["chatcmpl-70-1a2b3c4d"]


