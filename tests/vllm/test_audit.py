"""Audits of the tap in vLLM's real scheduler: a difference that is planted is found, told, and mended."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from kvbm_console.core import events as ev
from kvbm_console.tap import vllm as binding
from kvbm_console.tap.connector import AUDIT_NS, AUDIT_STRIDE
from kvbm_console.tap.recorder import AUDIT_EVERY
from tests.tap.watching import Watching
from tests.vllm.engine import Engine, offloading, tap
from tests.vllm.features import Kept, workload
from tests.vllm.test_tap import watching
from tests.vllm.truth import compare

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["scheduler", "connector"])
def observed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Engine, Watching]]:
    """Makes an engine with the tap at its scheduler or its connector, and a leader that watches it."""
    monkeypatch.setattr(binding, "Sender", Kept)

    def made(inside: dict[str, Any] | None = None, **options: Any) -> tuple[Engine, Watching]:
        at_scheduler = request.param == "scheduler"
        engine = Engine(tmp_path, inside if at_scheduler else tap(inside), hook={} if at_scheduler else None, **options)
        return engine, watching(engine.tap)

    return made


def forget_unseen(engine: Engine, watch: Watching) -> bool:
    """A free block leaves the prefix cache by a method that no tap knows."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    block = next((block for block in pool.blocks if block.block_hash is not None and not block.ref_cnt), None)
    return block is not None and bool(pool._maybe_evict_cached_block(block))


def hear_nothing_of_a_name(engine: Engine, watch: Watching) -> bool:
    """A report of blocks that got their hashes is lost, as a report that this program would not know."""
    named = next((record for record in watch.recorder.queue if record[0] == "named"), None)
    if named is not None:
        watch.recorder.queue.remove(named)
    return named is not None


def hear_nothing_of_an_allocation(engine: Engine, watch: Watching) -> bool:
    """A step that gave blocks to a running request is lost."""
    queue = watch.recorder.queue
    lost = next((record for record in queue if record[0] == "step" and any(
        record[2].scheduled_cached_reqs.new_block_ids)), None)
    if lost is not None:
        queue.remove(lost)
    return lost is not None


@pytest.mark.parametrize("plant", [forget_unseen, hear_nothing_of_a_name, hear_nothing_of_an_allocation])
@pytest.mark.parametrize("groups", [("full",), ("full", "window")], ids=str)
def test_a_planted_difference_is_found_told_and_mended(
    observed: Callable[..., tuple[Engine, Watching]], plant: Callable[[Engine, Watching], bool],
    groups: tuple[str, ...],
) -> None:
    engine, watch = observed(blocks=60, groups=groups)
    watch.recorder.audit_every = 1
    planted = found_at = 0
    told: list[ev.AuditDiffered] = []
    equal = 0
    for output in engine.run(workload(9, 6, 4)):
        if not planted and engine.steps > 40 and plant(engine, watch):
            planted = engine.steps
        watch.pump_gently()
        told += [event for event in watch.events if isinstance(event, ev.AuditDiffered)]
        if told and not found_at:
            found_at = engine.steps
        elif found_at and engine.steps > found_at + 1:
            compare(engine, watch.leader.state, set(output.num_scheduled_tokens))
            equal += 1
    assert planted
    assert planted <= found_at <= planted + 1
    assert equal > 20
    assert told[0].detail
    assert watch.translator.differing == len(told) or watch.translator.differing >= len(told)
    assert max(event.at_ns for event in told) <= told[0].at_ns + 2_000  # none after the whole report
    assert watch.leader.state.lost_sources  # what happened meanwhile is not certain
    assert watch.recorder.errors == 0


def test_a_holder_that_no_request_explains_is_found(observed: Callable[..., tuple[Engine, Watching]]) -> None:
    """Places are compared by their number of holders, too, if no connector can hold one."""
    engine, watch = observed(blocks=60)
    watch.recorder.audit_every = 1
    pool = engine.scheduler.kv_cache_manager.block_pool
    held = None
    for _ in engine.run(workload(9, 4, 2)):
        watch.pump_gently()
        if held is not None:
            break
        assert watch.translator.differing == 0
        if engine.steps > 20:
            held = next(block for block in pool.blocks if block.ref_cnt and not block.is_null)
            held.ref_cnt += 1
    assert held is not None
    assert watch.recorder.alone is bool(watch.translator.differing)


def test_the_whole_pool_is_compared_at_once_and_then_a_part_now_and_then(
    observed: Callable[..., tuple[Engine, Watching]]
) -> None:
    engine, watch = observed(offloading(40), blocks=2_000, running=4)
    audits: list[tuple[int, int, int]] = []
    for _ in engine.run(workload(2, 8, 6)):
        audits += [(engine.steps, record[2], len(record[3])) for record in watch.recorder.queue if record[0] == "audit"]
        watch.pump()
    first = next(at for at, (_, begin, size) in enumerate(audits) if begin + size == 2_000)
    steps = [step for step, _, _ in audits]
    assert steps[: first + 1] == list(range(steps[0], steps[0] + first + 1))  # one in each step, from the first on
    assert [begin for _, begin, _ in audits[: first + 1]] == [
        1 + sum(size for _, _, size in audits[:at]) for at in range(first + 1)]  # without the null block
    later = [step for step, _, _ in audits[first + 1 :]]
    assert later
    assert all(after - before == AUDIT_EVERY for before, after in zip(steps[first:], later, strict=False))
    assert watch.translator.differing == 0


def test_an_audit_stops_when_its_time_is_over(
    observed: Callable[..., tuple[Engine, Watching]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, watch = observed(blocks=2_000)
    from kvbm_console.tap import connector
    now = iter(range(0, 10**12, AUDIT_NS))
    monkeypatch.setattr(connector, "_now", lambda: next(now))
    engine.add("a", [1] * 40, 4)
    engine.step()
    (record,) = (record for record in watch.recorder.queue if record[0] == "audit")
    assert len(record[3]) <= AUDIT_STRIDE
