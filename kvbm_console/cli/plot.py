"""Drawing hit rate against capacity, with the plot library that is an extra.

Law of this file: the library is imported only to draw, and its absence is one sentence before any work. A picture has
its name only when it is whole.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core.errors import UsageError
from kvbm_console.extras import missing

if TYPE_CHECKING:
    from kvbm_console.planning.compare import Cell

LIBRARY: Final = "matplotlib"
TICKS_MAX: Final = 12
"""Capacities that have a label of their own; more would overlap."""
SUFFIXES: Final = (".svg", ".png")


def require_plot(path: Path) -> None:
    """Refuse a file that cannot be drawn, before any work."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot must name a file that ends in {' or '.join(SUFFIXES)}, got {path}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path} must be in a directory that exists")
    if importlib.util.find_spec(LIBRARY) is None:
        raise missing("--plot", "plot", LIBRARY)


def draw(path: Path, cells: "list[Cell]", title: str) -> None:
    """A curve for each policy over device and host blocks together; the same cells give the same picture."""
    matplotlib: Any = importlib.import_module(LIBRARY)
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvbm-console"
    figure = importlib.import_module(f"{LIBRARY}.figure").Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    curves: dict[str, list[tuple[int, float]]] = {}
    for cell in cells:
        if cell.hit_rate is not None:
            point = (cell.total_kv_blocks + cell.kv_cpu_blocks, 100 * cell.hit_rate)
            curves.setdefault(cell.label, []).append(point)
    for label, points in curves.items():
        points.sort()
        style: dict[str, Any] = {"linestyle": "--", "color": "black"} if label == "belady" else {}
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=label, **style)
    axes.set_xscale("log")
    ticks = sorted({x for points in curves.values() for x, _ in points})[:TICKS_MAX]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("blocks")
    axes.set_ylabel("prefix hit rate, %")
    axes.set_title(title, fontsize=9)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
    form = path.suffix.lower()[1:]
    draft = path.with_name(path.name + ".tmp")
    try:
        figure.savefig(draft, format=form, metadata={"Date": None} if form == "svg" else None)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
