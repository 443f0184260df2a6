"""SGLang's own publishers of several releases against the reader of streams: ``python -m tests.vllm.sglang_releases``.

Each release is installed without its requirements into ``.releases/`` once. Its publisher runs in a process of its
own, beside ``rec capture`` and ``conform``. A row tells what the import of the capture has found, and which methods the
tap would lack. The rows replace the section of SGLang in ``docs/matrix.md``, unless releases are named.

Law of this file: a row is printed only for messages that this run has captured.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from kvbm_console.tap.sglang import NEEDED
from tests.vllm.matrix import DOCUMENT, SGLANG_TITLE
from tests.vllm.releases import ROOT, beside, path_of
from tests.vllm.serving import free_ports

SGLANG: Final = ("0.4.9", "0.5.3", "0.5.5", "0.5.8", "0.5.12", "0.5.16", "0.5.20", "0.5.22", "0.5.23")
BATCHES: Final = 60
RUN: Final = {"workload": [1, 8, 2, 160], "aborts": 0.01, "engine": {
    "page": 16, "tokens": 768, "tree": "python", "schedule_conservativeness": 0.1}}
"""What the tap is compared in: a pool that is too small for the answers."""
CHILD: Final = """
import importlib, json, sys, types
from pathlib import Path
root, ports, batches = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
    package = types.ModuleType(name)
    package.__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules[name] = package
sys.modules["sglang.srt.runtime_context"] = context = types.ModuleType("sglang.srt.runtime_context")
context.get_parallel = lambda: None
events = importlib.import_module("sglang.srt.disaggregation.kv_events")
endpoints = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
publisher = events.ZmqEventPublisher(0, **endpoints, topic="kv")
tiers = "medium" in events.BlockStored.__struct_fields__
left = {}
for at in range(batches):
    medium = {"medium": "GPU" if at % 3 else "CPU_PINNED"} if tiers else {}
    held = left.setdefault(medium.get("medium", "GPU"), set())
    hashes = [(-1) ** at * (at * 10**15 + key) for key in range(1, 5)]
    told = [events.BlockStored(block_hashes=hashes, parent_block_hash=None, token_ids=list(range(64)), block_size=16,
                               lora_id=None, **medium)]
    held.update(hashes)
    if at > 10:
        gone = sorted(held)[:2]
        told.append(events.BlockRemoved(block_hashes=gone, **medium))
        held.difference_update(gone)
    publisher.publish(events.KVEventBatch(ts=float(at), events=told))
print(json.dumps({medium: len(hashes) for medium, hashes in left.items()}), flush=True)
sys.stdin.read()
"""


def row(release: str, place: Path) -> dict[str, Any]:
    """Blocks that its publisher told and that were found, by medium, and what else differs between releases."""
    root = path_of(f"sglang-{release}", f"sglang=={release}")
    ports = free_ports(2)
    program = Path(sys.executable).with_name("kvbm-console")
    address = f"zmq://127.0.0.1:{ports[0]}?replay={ports[1]}&topic=kv"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, root, json.dumps(ports), str(BATCHES)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=beside(""),
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        told = json.loads(child.stdout.readline())
        heard = subprocess.run([program, "conform", address, "--batches", str(BATCHES), "--format", "json"],
                               capture_output=True, text=True, timeout=120, check=False)
        subprocess.run([program, "rec", "capture", address, "--out", place / "capture", "--batches", str(BATCHES)],
                       check=True, timeout=120, capture_output=True)
        child.stdin.close()
        child.kill()
    made = subprocess.run(
        [program, "rec", "import", "kv-events", place / "capture", "--out", place / "made", "--format", "json"],
        capture_output=True, text=True, timeout=120, check=True,
    )
    sources = "".join(path.read_text() for room in ("managers", "mem_cache") for path in
                      (root / "sglang" / "srt" / room).rglob("*.py"))
    lacks = [name for names in NEEDED.values() for name in names if f"def {name}(" not in sources]
    return {
        "told": told, "found": json.loads(made.stdout)["resident_blocks"],
        "broken": [rule["rule"] for rule in json.loads(heard.stdout)[0]["verdicts"] if rule["verdict"] == "fail"],
        "plugins": (root / "sglang" / "srt" / "plugins").is_dir(),
        "lacks": lacks, "steps": None if lacks else steps_of(root),
    }


def steps_of(root: Path) -> int:
    """Steps of the release's own scheduler, each equal to what the tap told. Another one ends the program."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.vllm.sglang_oracle"], input=json.dumps(RUN), text=True,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(root)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        timeout=600, check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise SystemExit(f"{root.name}: {answer['error']}")
    return int(answer["steps"])


HEAD: Final = """
Made by `make matrix` (`python -m tests.vllm.sglang_releases`). The publisher of each release sends blocks, and the
reader of streams follows it. The tap needs the methods that the last column names. In a release that lacks none it runs
in SGLang's own scheduler, with aborts, retractions and evictions. Each step is compared with the engine's own state.

| release | blocks found | media | rules of `conform` broken | plugins | equal steps | methods that the tap lacks |
|---|---|---|---|---|---|---|
"""


def line_of(release: str, found: dict[str, Any]) -> str:
    """The row of a release; a count that differs from what its publisher told is bold."""
    told, heard = (sum(found[part].values()) for part in ("told", "found"))
    blocks = str(heard) if found["told"] == found["found"] else f"**{heard} of {told}**"
    names = ["`" + "`, `".join(found[part]) + "`" if found[part] else "–" for part in ("broken", "lacks")]
    plugins = "yes" if found["plugins"] else "no"
    media, steps = ", ".join(sorted(found["told"])), found["steps"] or "–"
    return f"| {release} | {blocks} | {media} | {names[0]} | {plugins} | {steps} | {names[1]} |"


def main() -> None:
    """Print the rows, and write them when all releases ran."""
    rows = []
    for release in sys.argv[1:] or SGLANG:
        with tempfile.TemporaryDirectory() as place:
            rows.append(line_of(release, row(release, Path(place))))
        print(rows[-1], flush=True)
    if not sys.argv[1:]:
        before, _, _ = DOCUMENT.read_text().partition(SGLANG_TITLE)
        DOCUMENT.write_text(before + SGLANG_TITLE + HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
