"""vLLM's server with the command lines of docs/engines.md for tiers below its host tier. Run by ``make test-vllm``.

The server, its engine process, its scheduler, its connector and the tiers are real. Only the device is not
(``tests.vllm.executor``), so the host tier's bytes are what it had before, and sums are taken of those.
"""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from kvbm_console.explore.connectors import PAGE
from tests.vllm.serving import ROOT, complete, engine, free_ports, make_model
from tests.vllm.test_server import metrics, serve_arguments

pytestmark = pytest.mark.timeout(900)
READY = "startup complete"
CPU = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}
HOST_BLOCKS, TIER_BLOCKS = 60, 400
PROMPT = [2 + number % 900 for number in range(400)]
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*vllm serve MODEL --kv-transfer-config '(\{.*?\})'$", re.DOTALL | re.MULTILINE)


def documented(kind: str) -> dict[str, Any]:
    """The connector's entry in the documented command line that has this tier."""
    entries = [json.loads(text) for text in COMMAND.findall((ROOT / "docs" / "engines.md").read_text())]
    (found,) = [entry for entry in entries if kind in json.dumps(entry)]
    return found  # type: ignore[no-any-return]


def fitted(entry: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The same entry with a directory and sizes of this test."""
    extra = entry["kv_connector_extra_config"]
    extra["cpu_bytes_to_use"] = HOST_BLOCKS * PAGE
    (tier,) = extra["secondary_tiers"]
    for settings in (tier, tier.get("inner", {})):
        for name, value in {"root_dir": str(directory), "bytes_to_use": TIER_BLOCKS * (PAGE + 64)}.items():
            if name in settings:
                settings[name] = value
    return entry


def cached(url: str, name: str) -> int:
    """Tokens of the prompt that the server found."""
    usage = complete(url, name, PROMPT, 4)["usage"]
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0  # type: ignore[no-any-return]


def test_the_documented_tap_around_a_tier_serves(tmp_path: Path) -> None:
    ports = free_ports(3)
    arguments = serve_arguments(make_model(tmp_path / "m"), ports, fitted(documented("KvbmTier"), tmp_path / "kv"))
    with engine(*arguments, ready=READY, **CPU) as server:
        url = f"http://127.0.0.1:{ports[0]}"
        assert cached(url, "a") == 0
        assert cached(url, "b") > 0
        server.printed("blocks of tier fs are checked (integrity fail, 1 of 1, xxh3)")
        written = metrics(url)["vllm:kv_offload_tiering_write_bytes_total"]
    stored = list((tmp_path / "kv").rglob("*.bin"))
    assert len(stored) * PAGE == written > 0


def test_the_documented_slot_tier_of_a_killed_server_is_found_again_by_the_next(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    found = []
    for name in ("first", "second"):
        ports = free_ports(3)
        entry = fitted(documented("KvbmSlots"), tmp_path / "kv")
        with engine(*serve_arguments(model, ports, entry), ready=READY, **CPU) as server:
            url = f"http://127.0.0.1:{ports[0]}"
            found.append(cached(url, name))
            metrics(url)
            if name == "first":
                os.killpg(server.child.pid, signal.SIGKILL)
        (line,) = [line for line in server.lines if "blocks were found" in line]
        blocks = re.search(r"has (\d+) slots of (\d+) bytes, (\d+) blocks were found", line)
        assert blocks is not None
        assert (int(blocks[1]), int(blocks[2])) == (TIER_BLOCKS, PAGE)
        assert (int(blocks[3]) > 0) == (name == "second")
    assert found[0] == 0
    assert found[1] > len(PROMPT) // 2
