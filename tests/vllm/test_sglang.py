"""SGLang's own publisher, with its own structs, captured by another process. Run by ``make test-vllm``.

Its package asks for GPU kernels when it is imported; the publisher does not. So only its own files are loaded.
"""

import importlib.util
import json
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)


def publisher_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``sglang.srt.disaggregation.kv_events``, with the two names that it takes from the rest of its package."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("make test-vllm runs these")
    root = Path(found.submodule_search_locations[0])
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    return importlib.import_module("sglang.srt.disaggregation.kv_events")


def test_its_publisher_is_captured_and_folds_to_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events = publisher_module(monkeypatch)
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    publisher = events.ZmqEventPublisher(
        0, endpoint=f"tcp://*:{ports[0]}", replay_endpoint=f"tcp://*:{ports[1]}", topic="kv-events"
    )
    left: dict[str, set[int]] = {"GPU": set(), "CPU_PINNED": set()}
    batches = 0
    for at in range(60):
        medium = "GPU" if at % 3 else "CPU_PINNED"
        hashes = [(-1) ** at * (at * 10**15 + key) for key in range(1, 5)]  # SGLang's are signed
        told = [events.BlockStored(block_hashes=hashes, parent_block_hash=None, token_ids=list(range(64)),
                                   block_size=16, lora_id=None, medium=medium)]
        left[medium].update(hashes)
        if at > 10:
            gone = sorted(left[medium])[:2]
            told.append(events.BlockRemoved(block_hashes=gone, medium=medium))
            left[medium].difference_update(gone)
        publisher.publish(events.KVEventBatch(ts=float(at), events=told))
        batches += 1
    program = Path(sys.executable).with_name("kvbm-console")
    address = f"zmq://127.0.0.1:{ports[0]}?replay={ports[1]}&topic=kv-events"
    heard = subprocess.run([program, "conform", address, "--batches", str(batches)], capture_output=True, text=True,
                           timeout=120)
    assert heard.returncode == 0, heard.stdout
    assert "replay-topic  pass" in heard.stdout
    subprocess.run([program, "rec", "capture", address, "--out", tmp_path / "capture", "--batches", str(batches)],
                   check=True, timeout=120)
    made = subprocess.run(
        [program, "rec", "import", "kv-events", tmp_path / "capture", "--out", tmp_path / "made", "--format", "json"],
        capture_output=True, text=True, timeout=120, check=True,
    )
    found = json.loads(made.stdout)
    assert (found["frames"], found["lost_batches"], found["unknown_events"], found["malformed_events"]) == (60, 0, 0, 0)
    assert found["resident_blocks"] == {medium: len(hashes) for medium, hashes in left.items()}
    assert subprocess.run([program, "rec", "verify", tmp_path / "made"], timeout=120).returncode == 0
    publisher.shutdown()
