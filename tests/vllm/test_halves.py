"""A request that one engine prefills and another decodes: two of vLLM's schedulers with NIXL, under one leader."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from kvbm_console.analysis.explain import explain
from kvbm_console.core import events as ev
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import Event
from kvbm_console.tap import vllm as binding
from tests.analysis.evidence import evidence
from tests.tap.watching import Watching
from tests.vllm.engine import BLOCK, Engine
from tests.vllm.features import Kept
from tests.vllm.truth import compare

FIRST, SECOND = "chatcmpl-7-aaaaaaaa", "chatcmpl-7-bbbbbbbb"
"""The server adds a random end to the id that the router has chosen."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps start no thread and no process."""
    monkeypatch.setattr(binding, "Sender", Kept)


def engine_in(directory: Path, name: str) -> Engine:
    """An engine with NIXL's connector, whose ``extra`` are the parameters of the next request."""
    directory.mkdir()
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": name}
    return Engine(directory, connector, hook={}, blocks=64)


def until(engine: Engine, watch: Watching, name: str) -> None:
    """Step until a request has ended; every step equals the engine's own state."""
    while name not in engine.finished:
        output = engine.step()
        watch.pump()
        compare(engine, watch.leader.state, set(output.num_scheduled_tokens), source=watch.source)
        assert engine.steps < 200


def told(watch: Watching) -> list[Event]:
    """All events of its leader."""
    return [event for outcome in watch.outcomes for event in outcome]


def opened(events: list[Event]) -> dict[str, tuple[str | None, str | None]]:
    return {event.request: (event.sends, event.receives) for event in events if isinstance(event, ev.SlotOpened)}


def watching(engine: Engine, source: int, beside: Watching | None = None) -> Watching:
    sender = engine.tap.sender
    return Watching(sender.recorder, sender.flattener, sender.settings, source=source, beside=beside)


def test_both_halves_of_a_request_know_each_other(tmp_path: Path) -> None:
    prefill, decode = engine_in(tmp_path / "p", "prefill"), engine_in(tmp_path / "d", "decode")
    first = watching(prefill, 1)
    second = watching(decode, 2, beside=first)
    prompt = list(range(5 * BLOCK + 3))
    prefill.extra = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    prefill.add(FIRST, prompt, 1)
    until(prefill, first, FIRST)
    decode.extra = {"kv_transfer_params": prefill.transfers[FIRST]}
    decode.add(SECOND, prompt, 8)
    until(decode, second, SECOND)
    assert first.rejected == second.rejected == []
    events = told(first)
    assert opened(events) == {FIRST: (FIRST, None), SECOND: (None, FIRST)}
    decoded = explain(evidence(events, LeaderConfig()), SECOND)
    assert (decoded.engine, decoded.receives) == (2, FIRST)
    (half,) = decoded.halves
    assert (half.role, half.request, half.engine, half.state) == ("prefill", FIRST, 1, "finishing")
    for _ in range(4):  # the decode engine has read the blocks, and the prefill engine gives them back
        prefill.step()
        first.pump()
    events = told(first)
    (half,) = explain(evidence(events, LeaderConfig()), SECOND).halves
    assert half.state == "finished"
    (half,) = explain(evidence(events, LeaderConfig()), FIRST).halves
    assert (half.role, half.request, half.engine, half.state) == ("decode", SECOND, 2, "finished")


def test_a_request_of_one_engine_has_no_other_half(tmp_path: Path) -> None:
    engine = engine_in(tmp_path / "p", "alone")
    watch = watching(engine, 1)
    engine.add(FIRST, list(range(40)), 2)
    until(engine, watch, FIRST)
    assert opened(told(watch)) == {FIRST: (None, None)}


def test_an_engine_that_is_attached_late_tells_what_a_request_received(tmp_path: Path) -> None:
    """The connector has cleared the mark of the load by then."""
    engine = engine_in(tmp_path / "d", "decode")
    engine.extra = {"kv_transfer_params": {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "prefill", "remote_host": "there",
        "remote_request_id": FIRST, "remote_port": 1, "remote_block_ids": ([4, 5],), "tp_size": 1,
    }}
    engine.add(SECOND, list(range(2 * BLOCK + 1)), 50)
    for _ in range(8):
        engine.step()
    watch = watching(engine, 1)
    engine.step()
    watch.pump_gently()
    assert opened(watch.events) == {SECOND: (None, FIRST)}
