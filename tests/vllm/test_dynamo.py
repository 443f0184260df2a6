"""Dynamo's mocker behind its own frontend, driven over HTTP, its KV events captured. Run by ``make test-vllm``.

Both are processes of their own that find each other through a directory, so neither etcd nor NATS is needed, and the
mocker publishes as vLLM does. Its events are counted a second time here, from its replay socket, without our decoder.
"""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

pytest.importorskip("vllm", reason="make test-vllm runs these")
pytest.importorskip("dynamo", reason="make test-vllm runs these")

from tests.vllm.serving import complete, engine, free_ports, make_model

pytestmark = pytest.mark.timeout(300)

PROGRAM = str(Path(sys.executable).with_name("kvbm-console"))
BLOCK, BLOCKS = 16, 40


def replayed(port: int) -> list[Any]:
    """Every batch that the publisher still has, as it is on the wire."""
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.rcvtimeo = 30_000
            socket.connect(f"tcp://127.0.0.1:{port}")
            socket.send_multipart([b"", bytes(8)])
            found = []
            while True:
                *_, number, payload = socket.recv_multipart()
                if int.from_bytes(number, "big", signed=True) < 0:
                    return found
                found.append(msgspec.msgpack.decode(payload))
    finally:
        context.term()


def recounted(batches: list[Any]) -> tuple[int, int, int]:
    """(stored, removed, resident) blocks of all batches."""
    stored: Counter[int] = Counter()
    removed: Counter[int] = Counter()
    for _, events, *_ in batches:
        for event in events:
            kind, hashes = (event["type"], event["block_hashes"]) if isinstance(event, dict) else event[:2]
            assert kind in ("BlockStored", "BlockRemoved")
            (stored if kind == "BlockStored" else removed).update(hashes)
    return stored.total(), removed.total(), len(stored - removed)


def test_the_mockers_events_are_those_of_what_it_answered(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    ports = free_ports(3)
    url = f"http://127.0.0.1:{ports[2]}"
    planes = ("--discovery-backend", "file", "--event-plane", "zmq", "--request-plane", "tcp")
    around = {"DYN_FILE_KV": str(tmp_path / "found"), "HOME": str(tmp_path)}
    dice = random.Random(1)
    system = [dice.randrange(2, 1000) for _ in range(50)]
    expected = cached = 0
    with (
        engine("-m", "dynamo.mocker", "--model-path", str(model), "--model-name", "m", *planes, "--speedup-ratio", "50",
               "--zmq-kv-events-ports", str(ports[0]), "--zmq-replay-ports", str(ports[1]),
               "--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK),
               ready="Metrics background tasks started", **around),
        engine("-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(ports[2]), *planes,
               "--router-mode", "round-robin", ready="completion endpoints enabled", **around),
    ):
        for number in range(12):
            prompt = [*system, *(dice.randrange(2, 1000) for _ in range(dice.randrange(20, 120)))]
            usage = complete(url, f"r{number}", prompt, 30)["usage"]
            found = usage["prompt_tokens_details"]["cached_tokens"]
            assert found == (len(system) // BLOCK * BLOCK if number else 0)
            cached += found
            expected += (usage["total_tokens"] - found) // BLOCK
        stored, removed, resident = recounted(batches := replayed(ports[1]))
        print(len(batches), stored, removed, resident, expected, cached, batches[0])
        subprocess.run(
            [PROGRAM, "rec", "capture", f"zmq://127.0.0.1:{ports[0]}?replay={ports[1]}", "--out", tmp_path / "capture",
             "--batches", str(len(batches))],
            check=True, timeout=120,
        )
        heard = subprocess.run(
            [PROGRAM, "conform", f"zmq://127.0.0.1:{ports[0]}?replay={ports[1]}", "--batches", str(len(batches)),
             "--capacity", f"GPU={BLOCKS}", "--format", "json"],
            capture_output=True, text=True, timeout=120,
        )
        print(heard.stdout)
    assert {each["rule"] for each in json.loads(heard.stdout)[0]["verdicts"] if each["verdict"] == "fail"} == set()
    assert stored == expected
    assert removed > 0
    made = subprocess.run(
        [PROGRAM, "rec", "import", "kv-events", tmp_path / "capture", "--out", tmp_path / "made", "--format", "json"],
        capture_output=True, text=True, timeout=120, check=True,
    )
    told = json.loads(made.stdout)
    assert (told["unknown_events"], told["malformed_events"], told["lost_batches"]) == (0, 0, 0)
    assert (told["stored_blocks"], told["removed_blocks"]) == (stored, removed)
    assert told["resident_blocks"] == {"GPU": resident}
    assert subprocess.run([PROGRAM, "rec", "verify", tmp_path / "made"], timeout=120).returncode == 0
