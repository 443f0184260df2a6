"""``python -m kvbm_console.sanitize``: the planted faults on this machine, in an environment that has the engine.

The program needs numpy alone, because the environment of an engine lacks our command line. With torch it uses tensors.

Law of this file: exit 1 unless each fault is named and the same play without it is silent.
"""

import argparse
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kvbm_console.sanitize.planted import FAULTS, named, play


def tensors() -> dict[str, dict[str, Any]]:
    """Names of the ways to hold the bytes, each with the options of its plays. Torch counts as host and as device."""
    if find_spec("torch") is None:
        return {"numpy arrays": {}}
    make = import_module("torch").from_numpy
    return {"torch tensors, read by numpy": {"make": make},
            "torch tensors, read by torch": {"make": make, "on_device": True}}


def main(arguments: list[str] | None = None) -> int:
    """Print a table; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvbm_console.sanitize", description="Name twelve planted faults.")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="Plays of each fault; 20.")
    options = parser.parse_args(arguments)
    if not 1 <= options.seeds <= 10_000:
        parser.error(f"--seeds must be from 1 to 10000, and not {options.seeds}.")
    wrong = 0
    for way, library in tensors().items():
        print(f"{way}, {options.seeds} plays each")
        print(f"  {'fault':<20} {'named':>6} {'false':>6} {'ms':>6}")
        for fault in FAULTS:
            began = time.perf_counter()
            hits = false = 0
            for seed in range(options.seeds):
                wanted, findings = play(fault, seed=seed, **library)
                hits += bool(findings) and named(wanted, findings[0], fault)
                false += bool(play(fault, seed=seed, planted=False, **library)[1])
            wrong += options.seeds - hits + false
            spent_ms = (time.perf_counter() - began) / options.seeds * 1_000
            print(f"  {fault:<20} {hits:>6} {false:>6} {spent_ms:>6.1f}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
