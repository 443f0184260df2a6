"""``python -m tests.benchmarks.peers``: requests a second of ``simulate`` beside those of other simulators.

Run it with the environment of ``make test-vllm``, where NVIDIA's DynoSim is installed. ``--blis PATH`` adds a binary of
BLIS inside its own repository (``go build -o blis .`` of inference-sim/inference-sim).

The load is prompts of one length, evenly spaced, whose first 512 tokens are those of one of 50 tenants. It runs with
16-token blocks, with and without a host tier. BLIS makes its requests itself, with one prefix for all of them, and each
program has a step model of its own. Compared is the processor's time of a run. BLIS is a process of its own, so the
time of the same command with one request is subtracted.

Law of this file: the programs take turns, and the best of the rounds counts.
"""

import argparse
import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.planning.options import COMPAT_BANDWIDTH, SimulateOptions
from kvbm_console.planning.run import simulate

BLOCK: Final = 16
TRACE_BLOCK: Final = 512
TENANTS: Final = 50


class PeerLoad(msgspec.Struct, frozen=True):
    """Requests of one shape; lengths in tokens, pools in blocks."""

    requests: int
    prompt: int
    output: int
    per_second: float
    device: int
    host: int


LOADS: Final = (
    PeerLoad(300, 1_280, 64, 20.0, 4_096, 16_384),
    PeerLoad(60, 16_384, 64, 5.0, 16_384, 65_536),
)


def write(load: PeerLoad, path: Path) -> None:
    """The load in Mooncake's format."""
    count = -(-load.prompt // TRACE_BLOCK)
    rows = []
    for at in range(load.requests):
        own = range(TENANTS + at * count, TENANTS + at * count + count - 1)
        rows.append({
            "timestamp": round(at * 1_000 / load.per_second), "input_length": load.prompt,
            "output_length": load.output, "hash_ids": [at * 7 % TENANTS, *own],
        })
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(load: PeerLoad, path: Path, host: int) -> float:
    """Processor seconds of ``simulate``."""
    options = SimulateOptions(
        trace=f"mooncake:{path}", total_kv_blocks=load.device, kv_cpu_blocks=host, block_size=BLOCK, stats_every=0,
        kv_transfer_bandwidth=COMPAT_BANDWIDTH,  # the default of BLIS
    )
    began = time.process_time()
    document = simulate(options).document
    took = time.process_time() - began
    assert document["requests_completed"] == load.requests
    return took


def dynosim(load: PeerLoad, path: Path, host: int) -> float | None:
    """The same of DynoSim, all of its threads; None where it is not installed."""
    try:
        replay: Any = importlib.import_module("dynamo.replay.api")
    except ImportError:
        return None
    engine: dict[str, Any] = {
        "num_gpu_blocks": load.device, "block_size": BLOCK, "max_num_seqs": 256, "max_num_batched_tokens": 8_192,
        "timing_model": {"type": "fixed", "prefill_ms": 8.0, "decode_ms": 5.0},
    }
    if host:
        engine |= {"native_host_offload": {"num_host_blocks": host}, "kv_cache_bytes_per_token": 131_072}
    began = time.process_time()
    report = replay.run_trace_replay(
        str(path), extra_engine_args={"engine": engine}, trace_block_size=TRACE_BLOCK, capture_per_request=True,
    )
    took = time.process_time() - began
    assert len(report.per_request) == load.requests
    return took


def blis(binary: Path | None, load: PeerLoad, path: Path, host: int) -> float | None:
    """The same of BLIS, without its start; None without a binary."""
    if binary is None:
        return None
    program = binary.resolve()

    def run(requests: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        length = load.prompt - TRACE_BLOCK
        command: list[object] = [
            program, "run", "--model", "qwen/qwen3-14b", "--num-requests", requests, "--rate", load.per_second,
            "--prefix-tokens", TRACE_BLOCK, "--total-kv-blocks", load.device, "--block-size-in-tokens", BLOCK,
            "--max-num-batched-tokens", 8_192, "--kv-cpu-blocks", host, "--log", "error",
        ]
        for kind, tokens in (("prompt", length), ("output", load.output)):
            command += [f"--{kind}-tokens", tokens, f"--{kind}-tokens-stdev", 0, f"--{kind}-tokens-min", tokens,
                        f"--{kind}-tokens-max", tokens]
        subprocess.run(list(map(str, command)), check=True, cwd=program.parent, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return run(load.requests) - run(1)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers")
    parser.add_argument("--blis", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    print(f"{'load':<28}{'ours':>12}{'DynoSim':>12}{'BLIS':>12}   requests a second")
    programs: tuple[Callable[[PeerLoad, Path, int], float | None], ...] = ours, dynosim, partial(blis, chosen.blis)
    for load in LOADS:
        for host in (0, load.host):
            with tempfile.TemporaryDirectory() as place:
                path = Path(place) / "load.jsonl"
                write(load, path)
                rounds = [[program(load, path, host) for program in programs] for _ in range(chosen.rounds)]
            cells = []
            for column in zip(*rounds, strict=True):
                taken = [seconds for seconds in column if seconds is not None]
                cells.append(f"{load.requests / min(taken):,.0f}" if taken else "–")
            name = f"{load.prompt:,} / {load.output} tokens, " + ("host tier" if host else "device")
            print(f"{name:<28}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
