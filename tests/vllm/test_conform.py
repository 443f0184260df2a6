"""The events that vLLM's own scheduler publishes, judged by the rules of a stream. Run by ``make test-vllm``.

Law of this file: the broken rules of a run are named, and REFERENCE.md of the engines has the reason of each.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from tests.vllm.engine import Engine, offloading
from tests.vllm.serving import free_ports
from tests.vllm.test_tap import workload

pytestmark = pytest.mark.timeout(300)

PROGRAM = str(Path(sys.executable).with_name("kvbm-console"))
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str], set[str]]] = {
    "offloading": (offloading(40), {}, set(), {"described"}),
    "placeholders": (offloading(40, self_describing_kv_events=False), {}, {"described"}, set()),
    "hybrid": (offloading(40), {"groups": ("full", "window"), "blocks": 200},
               {"described", "parent", "tokens"}, {"stored-once"}),
    "two block sizes": (offloading(40), {"groups": ("wide", "full"), "blocks": 200}, {"block-size"},
                        {"stored-once", "described"}),
}
"""Name to connector, options of the engine, the broken rules, and the rules that the workload may break."""


def judged(engine: Engine, ports: list[int], *, capacity: int) -> dict[str, Any]:
    """The report of ``kvbm-console conform`` on an engine that has finished its work."""
    address = f"zmq://127.0.0.1:{ports[0]}?topic=kv&replay={ports[1]}"
    done = subprocess.run(
        [PROGRAM, "conform", address, "--batches", str(len(engine.batches)), "--capacity", f"GPU={capacity}",
         "--format", "json"],
        capture_output=True, text=True, timeout=120,
    )
    assert done.returncode in (0, 1), done.stderr
    (report,) = json.loads(done.stdout)
    report["broken"] = {each["rule"] for each in report["verdicts"] if each["verdict"] == "fail"}
    report["kept"] = {each["rule"] for each in report["verdicts"] if each["verdict"] == "pass"}
    return report  # type: ignore[no-any-return]


def publishing(tmp_path: Path, connector: dict[str, Any], **options: Any) -> tuple[Engine, list[int]]:
    ports = free_ports(2)
    places = f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}"
    return Engine(tmp_path, connector, publish=places, **options), ports


def run(engine: Engine, seed: int) -> None:
    requests = [(engine.steps + at, f"{seed} {name}", *rest) for at, name, *rest in workload(seed, 8, 4)]
    for _ in engine.run(requests):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("name", list(RUNS))
def test_its_stream_keeps_the_rules_but_these(name: str, tmp_path: Path) -> None:
    connector, options, broken, may_break = RUNS[name]
    engine, ports = publishing(tmp_path, connector, **options)
    run(engine, 3)
    report = judged(engine, ports, capacity=options.get("blocks", 96) - 1)
    assert broken <= report["broken"] <= broken | may_break
    assert {"message", "event", "sequence", "parent", "removed", "capacity", "hash-form", "replay", "replay-end",
            "replay-topic", "rank"} - broken <= report["kept"]
    engine.scheduler.shutdown()


def test_hits_that_are_told_again_are_restatements(tmp_path: Path) -> None:
    engine, ports = publishing(tmp_path, offloading(40))
    engine.extra = {"kv_cache_report_mode": "full"}
    run(engine, 3)
    report = judged(engine, ports, capacity=95)
    assert report["broken"] <= {"described"}
    assert report["restatements"] > 10
    engine.scheduler.shutdown()


def test_a_prompt_that_two_requests_compute_at_once(tmp_path: Path) -> None:
    """Two blocks of the device may then have the same hash, and both are told to be stored and removed."""
    engine, ports = publishing(tmp_path, offloading(8), tokens=512)
    for _ in engine.run([(0, "a", list(range(100)), 4), (0, "b", list(range(100)), 4)]):
        pass
    run(engine, 3)
    report = judged(engine, ports, capacity=95)
    assert report["broken"] <= {"stored-once", "described"}
    engine.scheduler.shutdown()


def test_a_reset_of_the_device_leaves_blocks_of_the_host(tmp_path: Path) -> None:
    """AllBlocksCleared names no medium, and vLLM clears the device alone, so the host's blocks are named later."""
    engine, ports = publishing(tmp_path, offloading(40))
    run(engine, 3)
    assert engine.scheduler.reset_prefix_cache()
    run(engine, 4)
    report = judged(engine, ports, capacity=95)
    assert report["clears"] == 1
    assert {"cleared"} <= report["broken"] <= {"cleared", "described"}
    engine.scheduler.shutdown()
