"""The slot tier beside vLLM's fs tier: processor time and rate of a block, and what is found after a restart.

``python -m tests.vllm.slots [DIR]`` prints the table. Both tiers have four threads for loads and as many for stores.
They take turns in one process, on the memory of vLLM's own host tier.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvbm_console.explore.connectors import PAGE
from kvbm_console.explore.scenario import BLOCK
from tests.vllm.tiered import Below, key

TOTAL_BYTES = 2**28
ROUNDS = 3
JOB_BYTES = 2**22


def entries(directory: Path, size: int) -> dict[str, dict[str, Any]]:
    """Both tiers, with room for all rounds."""
    return {
        "fs": {"type": "fs", "root_dir": str(directory / "files"), "n_read_threads": 4, "n_write_threads": 4},
        "slots": {"type": "KvbmSlots", "module_path": "kvbm_console.tap.vllm_slots",
                  "root_dir": str(directory / "slots"), "bytes_to_use": (ROUNDS + 1) * TOTAL_BYTES * (1 + 64 / size)},
    }


def opened(directory: Path, size: int) -> Below:
    """A manager with both tiers, whose blocks have so many bytes."""
    return Below(directory, list(entries(directory, size).values()), chunks=TOTAL_BYTES // PAGE,
                 extra={"block_size": size // PAGE * BLOCK})


def run(tier: Any, numbers: range, size: int, promotion: bool) -> tuple[float, float]:
    """Copy these blocks in jobs; processor time and wall time of one, in microseconds."""
    each = max(1, JOB_BYTES // size)
    cpu, wall = time.process_time(), time.perf_counter()
    for number in range(0, len(numbers), each):
        part = numbers[number : number + each]
        places = np.arange(number, number + len(part), dtype=np.int32)
        job = TransferJob(number, [key(one) for one in part], places, promotion, ReqContext(f"r{numbers[0]}"))
        (tier.submit_load if promotion else tier.submit_store)(job)
    tier.drain_jobs()
    results = list(tier.get_finished_jobs())
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert all(result.success for result in results)
    return cpu / len(numbers) * 1e6, wall / len(numbers) * 1e6


def measured(directory: Path, size: int) -> dict[str, Any]:
    """Medians of the rounds by tier, and the blocks that the slot tier found, lost and got wrong after a restart."""
    count = TOTAL_BYTES // size
    below = opened(directory, size)
    memory = np.frombuffer(below.view.cast("B"), np.uint8)[: count * size]
    truth = np.random.default_rng(1).integers(0, 256, count * size, np.uint8)
    seen: dict[str, list[tuple[float, ...]]] = {"fs": [], "slots": []}
    wrong = 0
    for turn in range(ROUNDS):
        for name, tier in zip(seen, below.tiers, strict=True):
            memory[:] = truth
            numbers = range(1 + turn * count, 1 + (turn + 1) * count)
            stored = run(tier, numbers, size, False)
            memory[:] = 0
            loaded = run(tier, numbers, size, True)
            wrong += int((memory != truth).any())
            seen[name].append((*stored, *loaded))
    del memory
    below.close()
    again = opened(directory, size)
    tier = again.tiers[1]
    found = tier.gauges()["found_blocks"]
    memory = np.frombuffer(again.view.cast("B"), np.uint8)[: count * size]
    run(tier, range(1, 1 + count), size, True)
    wrong += int((memory != truth).any())
    del memory
    again.close()
    rows: dict[str, Any] = {name: [statistics.median(column) for column in zip(*each, strict=True)]
                            for name, each in seen.items()}
    return rows | {"found": found, "stored": ROUNDS * count, "wrong": wrong}


def main() -> None:
    """Print the table."""
    sys.stdout.write("| block | tier | store, us CPU | us | load, us CPU | us | found after a restart | wrong |\n"
                     "|---|---|---|---|---|---|---|---|\n")
    for size in (2**16, 2**21):
        with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as directory:
            rows = measured(Path(directory), size)
        for name in ("fs", "slots"):
            cells = " | ".join(f"{cell:.0f}" for cell in rows[name])
            more = f"{rows['found']} of {rows['stored']} | {rows['wrong']}" if name == "slots" else "– | –"
            sys.stdout.write(f"| {size // 1024} KiB | {name} | {cells} | {more} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
