"""``make bench``: one table of figures, compared with ``baseline.json``.

Exit 1 when a figure of a whole program (``DECIDING``) is worse by over 25 %. The other figures are guidance: their
verdict is printed and fails nothing.

Law of this file: it measures nothing itself. ``--write-baseline`` makes this run the committed one, ``--only WORD``
measures the figures with that word in their name.
"""

import argparse
import importlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from tests.benchmarks.harness import Figure, Skipped, human

BASELINE: Final = Path(__file__).with_name("baseline.json")
WORSE: Final = 1.25
"""Medians of ratios move by up to a tenth between runs on a shared machine; a quarter is a change of the code."""
MODULES: Final = ("bench_core", "bench_hashing", "bench_pool", "bench_leader", "bench_fold", "bench_stream",
                  "bench_publish", "bench_recorder", "bench_tape", "bench_machine", "bench_scaling", "bench_kv_events",
                  "bench_debug", "bench_tap", "bench_sanitize", "bench_explore", "bench_cache", "bench_whole",
                  "bench_bytes", "bench_hosts", "bench_programs")
DECIDING: Final = ("bench_programs", "bench_whole")


def all_benches() -> Iterator[tuple[str, Callable[[], Figure], bool]]:
    """Every benchmark with its name, and whether it decides."""
    for module in MODULES:
        for name, bench in importlib.import_module(f"tests.benchmarks.{module}").BENCHES.items():
            yield name, bench, module in DECIDING


def all_tables() -> Iterator[tuple[str, Callable[[], list[list[str]]]]]:
    """Every table of points that figures stand for."""
    for module in MODULES:
        yield from getattr(importlib.import_module(f"tests.benchmarks.{module}"), "TABLES", {}).items()


def show(rows: list[list[str]]) -> None:
    """Print cells in columns."""
    widths = [max(len(line[column]) for line in rows) for column in range(len(rows[0]))]
    for line in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def row(figure: Figure, baseline: dict[str, float]) -> tuple[list[str], bool]:
    """Cells of one line, and whether the ratio became worse."""
    before = baseline.get(figure.name) if figure.compared else None
    extra = f" (+ {figure.extra_ns:.0f})" if figure.target.extra_ns is not None else ""
    half = f" ({figure.half[0]:.2f} to {figure.half[1]:.2f})" if figure.half else ""
    worse = before is not None and figure.ratio > before * WORSE
    cells = [
        figure.name, human(figure.ns, figure.unit), figure.reference, human(figure.reference_ns, figure.unit),
        f"{figure.ratio:.3g}x{half}", "–" if before is None else f"{before:.3g}x",
        figure.target.words(figure.unit) + extra,
        "WORSE" if worse else "met" if figure.target.met(figure) else "missed",
    ]
    return cells, worse


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--write-baseline", action="store_true")
    parser.add_argument("--only", default="")
    chosen = parser.parse_args()
    baseline: dict[str, float] = msgspec.json.decode(BASELINE.read_bytes())["ratios"] if BASELINE.exists() else {}
    headings = ["figure", "per item", "reference", "per item", "ratio", "committed", "target", ""]
    ratios = dict(baseline) if chosen.only else {}
    rows, any_worse = [headings], False
    for name, bench, decides in list(all_benches()):  # all are imported before the first one takes its time
        if chosen.only not in name:
            continue
        print(f"measuring {name}", file=sys.stderr, end="", flush=True)
        began = time.monotonic()
        try:
            figure = bench()
        except Skipped as reason:
            print(f": skipped: {reason}", file=sys.stderr)
            rows.append([name, *["–"] * 6, f"skipped: {reason}"])
            continue
        cells, worse = row(figure, baseline)
        took = time.monotonic() - began
        print(f": {cells[1]}, {cells[4]} of {cells[2]}, {cells[-1]} ({took:.0f} s)", file=sys.stderr)
        rows.append(cells)
        if figure.compared:
            ratios[figure.name] = round(figure.ratio, 4)
        any_worse |= worse and decides
    show(rows)
    for name, table in all_tables():
        if chosen.only in name:
            print()
            show(table())
    machine = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    print(f"medians, {machine}; ratios are compared with {BASELINE.name}")
    if chosen.write_baseline:
        document = {"machine": machine, "ratios": ratios}
        BASELINE.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        return 0
    return int(any_worse)


if __name__ == "__main__":
    sys.exit(main())
