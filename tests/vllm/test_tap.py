"""The tap in vLLM's real scheduler: every transition against the scheduler's own truth. Run by ``make test-vllm``."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from kvbm_console.core.ids import SlotState, Tier
from kvbm_console.tap import vllm as binding
from tests.tap.watching import Watching
from tests.vllm.engine import Engine, offloading, tap
from tests.vllm.truth import compare, evicted, removed_by_engine

pytestmark = pytest.mark.timeout(600)


class _Kept:
    """Stands for the sender: keeps what it was made of, and starts nothing."""

    def __init__(self, recorder: Any, flattener: Any, settings: Any, **_: Any) -> None:
        self.recorder, self.flattener, self.settings = recorder, flattener, settings

    def start(self) -> None:
        return


@pytest.fixture
def unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps start no thread and no process."""
    monkeypatch.setattr(binding, "Sender", _Kept)


def watching(connector: Any) -> Watching:
    sender = connector.sender
    return Watching(sender.recorder, sender.flattener, sender.settings)


def workload(seed: int, sessions: int, turns: int) -> list[tuple[int, str, list[int], int]]:
    """(step of arrival, name, prompt, output): sessions whose prompts grow and share a system prompt."""
    dice = random.Random(seed)
    system = [dice.randrange(1000) for _ in range(40)]
    found = []
    for session in range(sessions):
        prompt = system + [dice.randrange(1000) for _ in range(dice.randrange(20, 90))]
        at = session * 2
        for turn in range(turns):
            found.append((at, f"s{session}t{turn}", list(prompt), dice.randrange(4, 40)))
            prompt += [dice.randrange(1000) for _ in range(dice.randrange(10, 60))]
            at += dice.randrange(20, 50)
    return sorted(found)


def drive(engine: Engine, watch: Watching, requests: list[Any], *, every: int = 1) -> dict[str, Any]:
    """Run to the end, comparing after each step; what was seen on the way."""
    seen: dict[str, Any] = {"states": Counter(), "evicted": [], "prompts": {}}
    waiting = list(requests)
    while waiting or engine.busy:
        while waiting and waiting[0][0] <= engine.steps:
            _, name, prompt, output = waiting.pop(0)
            engine.add(name, prompt, output)
        output = engine.schedule()
        watch.pump()
        seen["evicted"] += evicted(watch.events, watch.leader.state)
        seen["states"].update(slot.state for slot in watch.leader.state.slots.values())
        if engine.steps % every == 0:
            compare(engine, watch.leader.state, set(output.num_scheduled_tokens))
        engine.finish(output)
        watch.pump()
        assert engine.steps < 5_000
    assert watch.rejected == []
    assert watch.leader.state.lost_sources == {}
    assert watch.recorder.errors == 0
    return seen


def test_alone_under_reuse_and_pressure(unsent: None, tmp_path: Path) -> None:
    engine = Engine(tmp_path, tap(), blocks=36)
    watch = watching(engine.connector)
    requests = workload(1, 6, 4)
    seen = drive(engine, watch, requests)
    state = watch.leader.state
    totals = state.totals
    assert totals.slots_opened == len(requests) == len(engine.finished)
    assert totals.preemptions > 0
    assert totals.hit_blocks[0] > 0
    # Each eviction is one that the engine's own events tell, and names who caused it.
    assert sorted(key for key, _ in seen["evicted"]) == sorted(removed_by_engine(engine, "GPU"))
    assert all(slot is not None for _, slot in seen["evicted"])
    assert watch.mirror.totals == totals


def test_around_the_offloading_connector(unsent: None, tmp_path: Path) -> None:
    engine = Engine(tmp_path, tap(offloading(40)), blocks=48, running=4)
    watch = watching(engine.connector)
    requests = workload(2, 6, 4)
    seen = drive(engine, watch, requests)
    totals = watch.leader.state.totals
    assert totals.slots_opened == len(requests)
    assert seen["states"][SlotState.ONBOARDING] > 0
    assert totals.hit_blocks[Tier.G2 - 1] > 0
    assert totals.moved_blocks["G2>G1"] > 0
    assert sorted(key for key, _ in seen["evicted"]) == sorted(removed_by_engine(engine, "GPU"))
    (host,) = (pool for pool in watch.leader.state.pools if pool.info.medium == "CPU")
    stored: Counter[int] = Counter()
    for batch in engine.batches:
        for event in batch.events:
            if getattr(event, "medium", None) == "CPU":
                for key in event.block_hashes:
                    short = int.from_bytes(key[-8:], "big") if isinstance(key, bytes) else key & (2**64 - 1)
                    stored[short] += 1 if type(event).__name__ == "BlockStored" else -1
    assert Counter({key: len(host.places_of(key)) for key in host.by_hash}) == +stored


def test_inside_multi_connector(unsent: None, tmp_path: Path) -> None:
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"connectors": [offloading(40), tap()]}}
    engine = Engine(tmp_path, multi, blocks=48, running=4)
    (mine,) = (one for one in engine.connector.sub_connectors if type(one).__name__ == "KvbmTap")
    watch = watching(mine)
    requests = workload(3, 5, 3)
    waiting = list(requests)
    while waiting or engine.busy:
        while waiting and waiting[0][0] <= engine.steps:
            _, name, prompt, output = waiting.pop(0)
            engine.add(name, prompt, output)
        engine.step()
        watch.pump()
        assert engine.steps < 5_000
    assert watch.rejected == []
    assert watch.leader.state.totals.slots_opened == len(requests) == len(engine.finished)


def test_the_same_tokens_with_and_without(unsent: None, tmp_path: Path) -> None:
    """The engine decides as it would alone: the same steps, the same blocks, the same events."""
    plain, tapped = [], []
    for connector, log in ((offloading(40), plain), (tap(offloading(40)), tapped)):
        directory = tmp_path / str(len(log) + id(log))
        directory.mkdir()
        engine = Engine(directory, connector, blocks=48, running=4)
        waiting = workload(4, 5, 3)
        while waiting or engine.busy:
            while waiting and waiting[0][0] <= engine.steps:
                _, name, prompt, output = waiting.pop(0)
                engine.add(name, prompt, output)
            output = engine.step()
            log.append((dict(output.num_scheduled_tokens),
                        {name: engine.scheduler.kv_cache_manager.get_block_ids(name)
                         for name in engine.scheduler.requests if not engine.scheduler.requests[name].is_finished()}))
    assert plain == tapped
