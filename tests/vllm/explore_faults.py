"""Each planted fault of the worker and the connector with the first run that finds it.

``python -m tests.vllm.explore_faults`` in the environment of ``make test-vllm`` prints the table of ``explore``'s
reference.

Law of this file: a hit is a verdict that the same run does not have without the fault, and that is not known.
"""

import sys
import time
from dataclasses import dataclass
from typing import Final

from kvbm_console.explore.connector_faults import CONNECTOR_FAULTS
from kvbm_console.explore.scenario import PROFILES, generate
from kvbm_console.explore.shadow import FAULTS
from kvbm_console.explore.vllm import Machine, Release, RunVerdict
from tests.vllm.explore_known import OFFLOADING, SYNC, known

CPU_S: Final = 60.0
"""The most CPU time to find a fault."""
MEANINGS: Final = {**FAULTS, **{name: text for name, (text, _) in CONNECTOR_FAULTS.items()}}
"""Fault to what it does: those of the worker, then those of the connector."""


@dataclass(frozen=True)
class PlantedHit:
    """The first run that finds a fault."""

    verdict: RunVerdict
    runs: int
    cpu_s: float


def first_hit(release: Release, fault: str) -> PlantedHit | None:
    """The first hit, seed by seed over all profiles; None after ``CPU_S`` of CPU time without a hit."""
    connector = SYNC if fault == "late-sync-load" else OFFLOADING
    began, runs, seed = time.process_time(), 0, 0
    while time.process_time() - began < CPU_S:
        for profile in PROFILES:
            scenario, runs = generate(profile, seed), runs + 1
            verdict = Machine(release, connector, scenario, (fault,)).play().verdict
            if verdict is None or verdict.signature in known("lru", profile):
                continue
            spent = time.process_time() - began
            if Machine(release, connector, scenario).play().verdict != verdict:
                return PlantedHit(verdict, runs, spent)
        seed += 1
    return None


def main() -> int:
    """Print the table. Returns 1 if a fault was not found."""
    release, missed = Release(), 0
    print(f"| fault in {release.version} | | verdict | runs | CPU s |\n|---|---|---|---|---|")
    for fault, meaning in MEANINGS.items():
        hit = first_hit(release, fault)
        missed += hit is None
        shown = "not found | |" if hit is None else f"{hit.verdict.signature} | {hit.runs} | {hit.cpu_s:.2f}"
        print(f"| `{fault}` | {meaning} | {shown} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
