"""``kvbm-console compare``: policies and capacities side by side on one trace.

Law of this file: everything is checked before any cell runs, and the table on stdout depends on the settings alone.
"""

import csv
import importlib
import importlib.util
import io
import time
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kvbm_console.cli.cache_options import (
    cache_settings,
    device_blocks,
    machine_options,
    progress_bar,
    recorded_fields,
    require_trace,
    sized,
    taken,
    trace_options,
)
from kvbm_console.cli.main import terminable
from kvbm_console.cli.output import ABSENT, number, print_json, table, warn
from kvbm_console.cli.params import FilePath, format_option
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import POLICIES, PRESETS
from kvbm_console.extras import missing
from kvbm_console.files import replacing
from kvbm_console.planning.options import BLOCKS_MAX, SimulateOptions

if TYPE_CHECKING:
    from kvbm_console.planning.compare import Cell, Setting

SCHEMA: Final = "kvbm-console.compare/1"
BELADY: Final = "belady"
ALL: Final = ",".join((*POLICIES, BELADY))
REQUEST_KEYS: Final = ("request", "blocks", "hits_a", "hits_b", "why_a", "why_b")
SHOWN_REQUESTS: Final = 20
"""Requests that ``--per-request`` lists: a screen full."""


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """``0,1000,4000``: capacities within bounds, each once, in the order given."""

    name = "numbers"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers; refuses an empty list and anything else."""
        if isinstance(value, tuple):
            return value
        found: dict[int, None] = {}
        for part in str(value).split(","):
            text = part.strip().replace("_", "")
            if not (text.isascii() and text.isdigit() and self.least <= int(text) <= BLOCKS_MAX):
                self.fail(f"must be numbers from {self.least} to {BLOCKS_MAX} with commas between, got {part!r}",
                          param, ctx)
            found[int(text)] = None
        return tuple(found)


@click.command()
@trace_options
@click.option("--policies", default=ALL, show_default=True, metavar="LIST", help="Policies, with commas between.")
@click.option("--presets", is_flag=False, flag_value=",".join(PRESETS), default="", metavar="[LIST]",
              help=f"Also these presets; without a list all of {', '.join(PRESETS)}.")
@click.option("--total-kv-blocks", type=Numbers(1), metavar="LIST",
              help="Capacities of the device; with --cache-only of the pool.  [default: that of the workload]")
@click.option("--kv-cpu-blocks", type=Numbers(0), metavar="LIST",
              help="Capacities of the host tier.  [default: 0, or that of the recording]")
@machine_options
@click.option("--instances", type=int, default=1, show_default=True, metavar="N", help="Engines, fed round robin.")
@click.option("--cache-only", is_flag=True, help="Leave the engine out: one pool, in the trace's own blocks.")
@click.option("--workers", type=click.IntRange(1, 1024), metavar="N", help="Processes.  [default: as many as cores]")
@click.option("--plot", type=FilePath(path_type=Path, dir_okay=False), metavar="FILE",
              help="Draw hit rate against capacity as .svg or .png; needs the extra 'plot'.")
@click.option("--per-request", nargs=2, metavar="A B",
              help="List the requests whose hits differ most between two settings, each POLICY or POLICY@BLOCKS.")
@format_option("text", "csv", "json")
@terminable()
def compare(
    trace: str | None, limit: int | None, seed: int | None, policies: str, presets: str,
    total_kv_blocks: tuple[int, ...] | None, kv_cpu_blocks: tuple[int, ...] | None, instances: int,
    cache_only: bool, workers: int | None,
    plot: Path | None, per_request: tuple[str, str] | None, form: str, **parameters: Any,
) -> int:
    """Run policies and capacities side by side on one trace, next to belady, which knows the future.

    With --cache-only belady is the optimum. With an engine it is a reference: one pool as large as all tiers
    together, requests one after the other, no time. A machine can have more hits than that, because it admits
    requests in another order; "to reference" has a sign. A policy is best among those of the same capacities; gap
    closed is the way from simple_lru to belady. Each setting with a host or disk tier is also run without that tier,
    and the text says where first tokens come later with it.
    """
    from kvbm_console.planning.compare import grid, lru_curve

    named = require_trace(trace)
    said = cache_settings(parameters | {"total_kv_blocks": total_kv_blocks, "kv_cpu_blocks": kv_cpu_blocks})
    for capacities in ("total_kv_blocks", "kv_cpu_blocks"):
        said.pop(capacities, None)
    recorded = recorded_fields(named)
    if cache_only and recorded:
        recorded |= {"kv_cpu_blocks": 0, "kv_disk_blocks": 0}
    options = SimulateOptions(
        trace=named, limit=limit, seed=seed, instances=instances, **sized(said, **{"total_kv_blocks": 1, **recorded})
    )
    if total_kv_blocks is None and not recorded and "total_kv_size" not in said:
        totals: tuple[int, ...] = (device_blocks(options, cache_only=cache_only),)
    else:
        totals = total_kv_blocks or (options.total_kv_blocks,)
    hosts = (options.kv_cpu_blocks,) if kv_cpu_blocks is None else kv_cpu_blocks
    options = msgspec.structs.replace(options, total_kv_blocks=totals[0], kv_cpu_blocks=hosts[0])
    settings = grid(options, _words(policies), _words(presets), totals, hosts, cache_only=cache_only)
    wanted = _wanted(per_request, settings)
    if plot is not None:
        require_plot(plot)
    started = time.perf_counter()
    cells, slower, runs = _run(settings, workers, keep_requests=wanted is not None, bare=form == "text")
    if form == "text":
        for line in taken(trace, options, sized=total_kv_blocks is not None, cache_only=cache_only):
            click.echo(line)
    curve = lru_curve(options) if cache_only else []
    pair_wanted = None if wanted is None else (cells[wanted[0]], cells[wanted[1]])
    _print(cells, pair_wanted, options, cache_only, form, curve, slower)
    if plot is not None:
        draw(plot, cells, trace_name(options.trace), curve, options.block_bytes, _machine(recorded))
        warn(f"drawn into {plot}")
    warn(f"{runs} runs in {time.perf_counter() - started:.2f} s")
    return 0


def _run(
    settings: "list[Setting]", workers: int | None, *, keep_requests: bool, bare: bool
) -> "tuple[list[Cell], list[str], int]":
    """The cells of the settings, the sentences of ``slower_with`` if ``bare`` is set, and the number of runs."""
    from kvbm_console.planning.compare import run_grid, without_a_tier

    less = [without_a_tier(setting) if bare else {} for setting in settings]
    runs = [*settings]
    for pair in less:
        runs += [setting for setting in pair.values() if setting not in runs]
    with progress_bar("compare", len(runs)) as progress:
        done = run_grid(runs, workers=workers, keep_requests=keep_requests, progress=progress)
    slower = [
        line for setting, cell, pair in zip(settings, done, less, strict=False)
        for tier, without in pair.items() for line in slower_with(tier, setting, cell, done[runs.index(without)])
    ]
    return done[: len(settings)], slower, len(runs)


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))


def _wanted(named: tuple[str, str] | None, settings: "list[Setting]") -> tuple[int, int] | None:
    """The cells that ``--per-request`` names."""
    if named is None:
        return None
    found = []
    for text in named:
        label, _, blocks = text.partition("@")
        matching = [
            at for at, setting in enumerate(settings)
            if setting.label == label and (not blocks or str(sum(setting.capacity)) == blocks)
        ]
        if len(matching) != 1:
            raise UsageError(
                f"--per-request {text} must name one setting of the grid as POLICY or POLICY@BLOCKS (device and host "
                f"together), it names {len(matching)}"
            )
        found.append(matching[0])
    return found[0], found[1]


# --- printing ---


def _print(
    cells: "list[Cell]", pair: "tuple[Cell, Cell] | None", options: SimulateOptions, cache_only: bool, form: str,
    curve: list[tuple[int, float]], slower: list[str],
) -> None:
    """Print the grid, then the requests of ``pair``: as one JSON document, or as CSV with an empty line between."""
    from kvbm_console.planning.compare import rows_of

    rows = rows_of(cells)
    requests = None if pair is None else _requests(*pair)
    if form == "json":
        print_json({
            "schema": SCHEMA, "trace": options.trace, "limit": options.limit, "seed": options.seed,
            "cache_only": cache_only, "block_size": None if cache_only else options.block_size,
            "kv_disk_blocks": options.kv_disk_blocks, "cells": rows,
            "lru_curve": [{"blocks": blocks, "hit_rate": rate} for blocks, rate in curve] if cache_only else None,
            "per_request": None if pair is None else {"a": _named(pair[0]), "b": _named(pair[1]), "requests": requests},
        })
    elif form == "csv":
        click.echo("\n".join(map(_csv, [rows] if requests is None else [rows, requests])), nl=False)
    else:
        headings = ("device", "host", "policy", "hits", "hit rate", "",
                    "below optimum" if cache_only else "to reference", "gap closed", "ttft ms", "thrash")
        shown = [_text_row(row, cache_only) for row in rows]
        click.echo("\n".join(table(headings, shown, right=(0, 1, 3, 4, 6, 7, 8, 9))))
        for line in slower:
            click.echo(line)
        if curve:
            click.echo("\n" + _curve_line(curve))
        if pair is not None and requests is not None:
            click.echo("\n" + "\n".join(_requests_table(pair, requests)))


def slower_with(tier: str, setting: "Setting", cell: "Cell", less: "Cell") -> list[str]:
    """A sentence if first tokens come later with this tier than in ``less``, which is without; else nothing."""
    if cell.ttft_ms_mean is None or less.ttft_ms_mean is None or cell.ttft_ms_mean <= less.ttft_ms_mean:
        return []
    more_ms = cell.ttft_ms_mean - less.ttft_ms_mean
    points = 100 * ((cell.hit_rate or 0.0) - (less.hit_rate or 0.0))
    sizes = [(cell.total_kv_blocks, "device"), (cell.kv_cpu_blocks, "host"), (setting.options.kv_disk_blocks, "disk")]
    blocks = ", ".join(f"{count:,} {name}" for count, name in sizes if count)
    return [
        f"{cell.label} with {blocks} blocks is slower than without the {tier} tier: mean ttft "
        f"{cell.ttft_ms_mean:,.1f} ms, {more_ms:,.1f} ms more, for {points:+.2f} points of hit rate"
    ]


def _curve_line(curve: list[tuple[int, float]]) -> str:
    """The capacities at which the exact LRU curve passes each quarter of its end, and its end."""
    most = curve[-1][1]
    quarters = [next(point for point in curve if point[1] >= most * part / 4) for part in (1, 2, 3)] if most else []
    words = ", ".join(f"{_percent(rate)} with {number(blocks)} blocks" for blocks, rate in dict.fromkeys(quarters))
    end = next(blocks for blocks, rate in curve if rate >= most)
    return f"lru curve  {words + ', ' if words else ''}and never more than {_percent(most)}, with {number(end)}"


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else REQUEST_KEYS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return text.getvalue()


def _text_row(row: dict[str, Any], cache_only: bool) -> list[str]:
    below, name = row["below_belady"], row["policy"]
    if name == BELADY:
        name += " (optimum)" if cache_only else " (reference)"
    distance = _percent(below) if below is None or cache_only else f"{-100 * below + 0.0:+.2f} %"
    return [
        number(row["total_kv_blocks"]), number(row["kv_cpu_blocks"]), name, number(row["hits"]),
        _percent(row["hit_rate"]), "best" if row["best"] else "", distance,
        _percent(row["gap_closed"]), ABSENT if row["ttft_ms_mean"] is None else f"{row['ttft_ms_mean']:,.1f}",
        _percent(row["thrash_rate"]),
    ]


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.2f} %"


def _named(cell: "Cell") -> str:
    return f"{cell.label}@{cell.total_kv_blocks + cell.kv_cpu_blocks}"


def _requests(cell: "Cell", other: "Cell") -> list[dict[str, Any]]:
    """The requests whose hits differ most, with the keys of ``REQUEST_KEYS``."""
    from kvbm_console.planning.compare import differences

    return [
        dict(zip(
            REQUEST_KEYS, (mine.request, mine.blocks, mine.hits, theirs.hits, mine.why, theirs.why), strict=True
        ))
        for mine, theirs in differences(cell, other, SHOWN_REQUESTS)
    ]


def _requests_table(pair: "tuple[Cell, Cell]", requests: list[dict[str, Any]]) -> list[str]:
    names = [_named(cell) for cell in pair]
    headings = ("request", "blocks", *names, *(f"why no more in {name}" for name in names))
    rows = [
        [number(value) if isinstance(value, int) else value for value in request.values()] for request in requests
    ]
    return list(table(headings, rows, right=(1, 2, 3)))

# --- a picture ---


LIBRARY: Final = "matplotlib"
TICKS_MAX: Final = 12
"""Capacities that have a label of their own; more would overlap."""
SUFFIXES: Final = (".svg", ".png")
FIGURE_INCHES: Final = (12.8, 7.2)
"""The shape of a slide."""
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195", "#8c6d31")
"""Colours that stay apart for eyes that see no red or green."""
LABEL_SHARE: Final = 0.055
"""Share of the height between two labels."""
LABELS_AT: Final = 1.12
"""Labels stand at this many times the largest capacity."""
NEAR: Final = 4
"""The LRU curve is drawn from this part of the smallest machine on."""


def require_plot(path: Path) -> None:
    """Refuse a file that cannot be drawn, before any work."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot must name a file that ends in {' or '.join(SUFFIXES)}, got {path}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path} must be in a directory that exists")
    if importlib.util.find_spec(LIBRARY) is None:
        raise missing("--plot", "plot", LIBRARY)


def draw(
    path: Path, cells: "list[Cell]", title: str, curve: list[tuple[int, float]], block_bytes: int,
    here: int | None = None,
) -> None:
    """A curve for each policy over device and host memory together, in the band between LRU and the optimum.

    The same cells give the same picture. ``curve`` is the exact LRU curve, or empty, and ``here`` the blocks of the
    recorded machine.
    """
    figure, axes = _figure()
    curves: dict[str, list[tuple[float, float]]] = {}
    sizes = [cell.total_kv_blocks + cell.kv_cpu_blocks for cell in cells if cell.hit_rate is not None]
    if curve and sizes and curve[-1][0] < max(sizes):
        curve = [*curve, (max(sizes), curve[-1][1])]  # it ends where nothing is evicted any more
    shown = [(_gib(x, block_bytes), 100 * y) for x, y in curve if x * NEAR >= min(sizes, default=0)]
    if shown:
        curves["LRU, exact"] = shown
    for cell in cells:
        if cell.hit_rate is not None:
            point = (_gib(cell.total_kv_blocks + cell.kv_cpu_blocks, block_bytes), 100 * cell.hit_rate)
            curves.setdefault(cell.label, []).append(point)
    colours = iter(COLOURS)
    ends = []
    for label, points in curves.items():
        points.sort()
        optimum = label == "belady"
        colour = "black" if optimum else "grey" if label == "LRU, exact" else next(colours, "grey")
        marker = "" if label == "LRU, exact" else "o"
        axes.plot([x for x, _ in points], [y for _, y in points], marker=marker, markersize=5, color=colour,
                  linewidth=2, linestyle="--" if optimum else "-")
        ends.append((*points[-1], "the optimum (belady)" if optimum else label, colour))
    lru, best = dict(curves.get("simple_lru", ())), dict(curves.get("belady", ()))
    both = sorted(lru.keys() & best.keys())
    axes.fill_between(both, [lru[x] for x in both], [best[x] for x in both], color="black", alpha=0.07)
    if here is not None:
        axes.axvline(_gib(here, block_bytes), color="black", linewidth=1.5, linestyle=":")
        axes.annotate("you are here", xy=(_gib(here, block_bytes), 0.02), xycoords=("data", "axes fraction"),
                      xytext=(6, 0), textcoords="offset points", fontweight="bold")
    ticks = sorted({x for label, points in curves.items() if label != "LRU, exact" for x, _ in points})[:TICKS_MAX]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [_size(tick) for tick in ticks])
    axes.minorticks_off()
    _save(path, figure, axes, title, ends, [y for points in curves.values() for _, y in points])


def trace_name(trace: str) -> str:
    """The trace as a title has it: without the directory of its file.

    >>> trace_name("mooncake:/data/chats.jsonl"), trace_name("multiturn:requests=9"), trace_name("a/b.jsonl")
    ('mooncake:chats.jsonl', 'multiturn:requests=9', 'b.jsonl')
    """
    kind, colon, place = trace.partition(":")
    return f"{kind}{colon}{Path(place).name}" if colon and kind != "multiturn" else trace if colon else Path(trace).name


def _machine(recorded: dict[str, Any]) -> int | None:
    """Blocks of device and host of the machine that made the recording; None for another trace."""
    blocks = recorded.get("total_kv_blocks")
    return None if blocks is None else int(blocks) + int(recorded.get("kv_cpu_blocks") or 0)


def draw_curve(
    path: Path, title: str, curve: list[tuple[int, float]], runs: list[tuple[str, int, float]], block_bytes: int
) -> None:
    """The exact LRU curve, and a point for each run: its label, the blocks of all tiers, its hit rate. The first run
    is the machine of today."""
    figure, axes = _figure()
    least = min(blocks for _, blocks, _ in runs) / NEAR
    most = max(blocks for _, blocks, _ in runs)
    if curve and curve[-1][0] < most:
        curve = [*curve, (most, curve[-1][1])]  # it ends where nothing is evicted any more
    shown = [(_gib(x, block_bytes), 100 * y) for x, y in curve if x >= least]
    axes.plot([x for x, _ in shown], [y for _, y in shown], color="grey", linewidth=2)
    ends = [(*shown[-1], "LRU, all tiers as one", "grey")] if shown else []
    colours = iter(COLOURS)
    for at, (label, blocks, rate) in enumerate(runs):
        x, y = _gib(blocks, block_bytes), 100 * rate
        colour = next(colours, "grey") if at else "black"
        axes.plot([x], [y], linestyle="", marker="o" if at else "D", markersize=8 if at else 11, color=colour)
        ends.append((x, y, label if at else "you are here", colour))
    axes.set_xscale("log")
    powers = [2.0**power for power in range(-10, 20)]
    low, high = min(x for x, *_ in ends) / NEAR, max(x for x, *_ in ends)
    ticks = [power for power in powers if low <= power <= high]
    axes.set_xticks(ticks, [_size(tick) for tick in ticks])
    axes.minorticks_off()
    _save(path, figure, axes, title, ends, [y for _, y in shown])


def draw_residuals(path: Path, title: str, shown: dict[str, list[tuple[float, float]]]) -> None:
    """How far measurements are from their fit: for each name the fitted times in milliseconds and the errors in
    percent."""
    figure, axes = _figure()
    for colour, (name, points) in zip(cycle(COLOURS), shown.items(), strict=False):
        axes.plot([x for x, _ in points], [y for _, y in points], linestyle="", marker=".", color=colour, label=name)
    axes.axhline(0.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("time by the fit, ms")
    axes.set_ylabel("measured time is longer by, %")
    axes.legend(frameon=False)
    _write(path, figure, axes, title)


def _gib(blocks: int, block_bytes: int) -> float:
    return blocks * block_bytes / 2**30


def _size(gib: float) -> str:
    return f"{gib:.0f}" if gib >= 10 else f"{gib:.2g}"


def _figure() -> tuple[Any, Any]:
    matplotlib: Any = importlib.import_module(LIBRARY)
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvbm-console"
    matplotlib.rcParams["font.size"] = 13
    figure = importlib.import_module(f"{LIBRARY}.figure").Figure(figsize=FIGURE_INCHES, layout="constrained", dpi=150)
    return figure, figure.subplots()


def _save(
    path: Path, figure: Any, axes: Any, title: str, ends: list[tuple[float, float, str, str]], drawn: Iterable[float],
) -> None:
    """Write the picture of these values, with a label (x, y, text, colour) beside each end, none over another."""
    values = [*drawn, *(y for _, y, *_ in ends)] or [0.0, 100.0]
    low, high = max(0.0, min(values) - 3), min(105.0, max(values) + 3)
    axes.set_ylim(low, high)
    right = max((x for x, *_ in ends), default=1.0)
    gap = LABEL_SHARE * (high - low)
    ends = sorted(ends, key=lambda end: (end[1], -end[0]))
    places: list[float] = []
    for _, y, *_ in ends:
        places.append(max(y, places[-1] + gap) if places else y)
    above = high + gap
    for index in range(len(places) - 1, -1, -1):  # labels above the picture come down, and push those below them
        above = places[index] = min(places[index], above - gap)
    for (x, y, label, colour), at in zip(ends, places, strict=True):
        axes.annotate(
            label, xy=(x, y), xytext=(right * LABELS_AT, at), color=colour, va="center", fontweight="bold",
            annotation_clip=False, arrowprops={
                "arrowstyle": "-", "color": colour, "alpha": 0.35, "shrinkB": 6, "relpos": (0, 0.5)})
    axes.set_xlabel("memory for K/V, GiB")
    axes.set_ylabel("prompt blocks found, %")
    _write(path, figure, axes, title)


def _write(path: Path, figure: Any, axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(visible=True, alpha=0.25)
    axes.spines.top.set_visible(False)
    axes.spines.right.set_visible(False)
    form = path.suffix.lower()[1:]
    with replacing(path) as draft:
        figure.savefig(draft, format=form, metadata={"Date": None} if form == "svg" else None)
