"""``kvbm-console plan``: which change of a machine pays most for a recorded or generated workload.

Law of this file: everything is checked before any run. The report on stdout depends on the settings alone, and the time
that it took goes to stderr.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kvbm_console.cli.cache_options import (
    CACHE_FLAGS,
    cache_options,
    cache_settings,
    device_blocks,
    progress_bar,
    recorded_fields,
    require_trace,
    sized,
)
from kvbm_console.cli.compare import draw_curve, require_plot
from kvbm_console.cli.main import terminable
from kvbm_console.cli.output import number, print_result, table, warn
from kvbm_console.cli.params import Duration, FilePath, format_option
from kvbm_console.core.errors import UsageError
from kvbm_console.planning.options import SimulateOptions, parse_size

if TYPE_CHECKING:
    from kvbm_console.planning.plan import ChangeRow, Figure, Goal, MachinePlan

_SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(%?)", re.ASCII)
_PART: Final = re.compile(r"(.+)-(device|host|disk)")
_SLO: Final = re.compile(r"ttft-p(\d{1,2})=(.+)", re.ASCII)
DAY_NS: Final = 86_400 * 10**9
_TIME: Final = Duration(1, DAY_NS, "from 1ns to 24h")


@click.command()
@click.argument("trace", metavar="RUN|TRACE", required=False)
@click.option("--limit", type=int, metavar="N", help="At most this many requests.")
@click.option("--seed", type=int, metavar="N", help="Seed of a generated trace.")
@click.option("--target-hit", metavar="SHARE", help="The hit rate to reach, for example 60%.")
@click.option("--budget", metavar="LIST", help="Memory to spend, for example 2TB-disk,512GB-host; also -device.")
@click.option("--slo", metavar="ttft-pN=TIME", help="A time to the first token to keep, for example ttft-p95=800ms.")
@click.option("--check", "checked", is_flag=True,
              help="Plan from the first half of the requests, and state what then happened in the second.")
@click.option("--workers", type=click.IntRange(1, 1024), metavar="N", help="Processes.  [default: as many as cores]")
@click.option("--plot", type=FilePath(path_type=Path, dir_okay=False), metavar="FILE",
              help="Draw the LRU curve and the runs as .svg or .png; needs the extra 'plot'.")
@cache_options
@format_option("text", "json")
@terminable()
def plan(
    trace: str | None, limit: int | None, seed: int | None, target_hit: str | None, budget: str | None,
    slo: str | None, checked: bool, workers: int | None, plot: Path | None, form: str, **flags: Any,
) -> int:
    """Which change of a machine pays most: capacity of a tier, offload threshold, policy, retention, prefetch.

    RUN is a recording, and TRACE any trace of simulate. The machine is that of the recording, with other flags taking
    precedence. Each change is a run of the whole workload. Figures are those of the later half of the requests, with
    two standard errors.
    """
    from kvbm_console.planning.plan import plan as make

    goal = _goal(target_hit, budget, slo)
    said = cache_settings({name: flags[name] for name in CACHE_FLAGS})
    with _argument_named():
        options = _machine(require_trace(trace), limit, seed, said)
    if plot is not None:
        require_plot(plot)
    started = time.perf_counter()
    with _argument_named(), progress_bar("plan", None) as progress:
        found = make(options, goal, check=checked, workers=workers, progress=progress)
    print_result(form, found, lambda: _lines(found))
    if plot is not None:
        rows = [("today", found.today), *([("budget", found.budget)] if found.budget is not None else []),
                *((row.flags, row) for row in found.changes)]
        draw_curve(plot, found.trace, [(point.blocks, point.hit_rate) for point in found.curve], [
            (label, sum(row.blocks), row.hit_rate.value) for label, row in rows
        ], options.block_bytes)
        warn(f"drawn into {plot}")
    warn(f"{len(found.changes) + 1} runs in {time.perf_counter() - started:.2f} s")
    return 0


@contextmanager
def _argument_named() -> Iterator[None]:
    """Name the argument in a refusal of the trace, for which other commands have a flag."""
    try:
        yield
    except UsageError as error:
        if not str(error).startswith("--trace "):
            raise
        raise UsageError(f"RUN|TRACE {str(error).removeprefix('--trace ')}") from None


def _goal(target_hit: str | None, budget: str | None, slo: str | None) -> "Goal":
    from kvbm_console.planning.plan import Goal

    share: float | None = None
    if target_hit is not None:
        match = _SHARE.fullmatch(target_hit.strip())
        share = None if match is None else float(match[1]) / (100 if match[2] else 1)
        if share is None or not 0 < share <= 1:
            raise UsageError(f"--target-hit must be a share above 0 and up to 100%, got {target_hit!r}")
    sizes: dict[str, int] | None = None
    if budget is not None:
        sizes = {}
        for part in budget.split(","):
            named = _PART.fullmatch(part.strip())
            if named is None:
                raise UsageError(f"--budget must be sizes of tiers such as 2TB-disk,512GB-host, got {budget!r}")
            sizes[named[2]] = parse_size(named[1], "--budget")
    percent, limit_ns = 95, None
    if slo is not None:
        wish = _SLO.fullmatch(slo.strip())
        if wish is None or not int(wish[1]):
            raise UsageError(f"--slo must be of the form ttft-p95=800ms, got {slo!r}")
        percent, limit_ns = int(wish[1]), _TIME.convert(wish[2], None, None)
    if sizes is not None and (share is not None or limit_ns is not None):
        raise UsageError("--budget finds the best machine for its memory; it takes no --target-hit and no --slo")
    return Goal(share, sizes, percent, limit_ns)


def _machine(trace: str, limit: int | None, seed: int | None, said: dict[str, Any]) -> SimulateOptions:
    """The machine of the recording, or that of the flags."""
    fields = recorded_fields(trace) or {"total_kv_blocks": 1}
    options = SimulateOptions(trace=trace, limit=limit, seed=seed, **sized(said, **fields))
    if {"total_kv_blocks", "total_kv_size"} & said.keys() or fields["total_kv_blocks"] != 1:
        return options
    return msgspec.structs.replace(options, total_kv_blocks=device_blocks(options, cache_only=False))


# --- text ---


def _lines(plan: "MachinePlan") -> list[str]:
    from kvbm_console.planning.plan import CLIFF

    half = f"of {number(plan.judged)} of them, with tiers that the earlier ones warmed"
    rows = [
        ("workload", f"{plan.trace}{f' ({plan.note})' if plan.note else ''}"),
        ("requests", f"{number(plan.requests)}; the figures are {half}"),
        ("today", _machine_line(plan.today, plan)),
        *([("budget", f"{_machine_line(plan.budget, plan)}; the changes below are changes of this machine")]
          if plan.budget is not None else []),
        ("memory", f"an LRU cache without end has {100 * plan.most:.1f} %; from {number(plan.enough_blocks)} blocks "
                   f"({_size(plan.enough_blocks * plan.block_bytes)}) in all tiers on, more memory pays nothing"),
    ]
    lines = [f"{name:<10} {words}" for name, words in rows]
    headings = ["change", "hit rate", "points", f"ttft p{plan.percent} ms", "mean saved ms", "memory"]
    shown = [_row(row) for row in plan.changes]
    if plan.together is not None:
        shown.append(_row(plan.together))
    if plan.checked is not None:
        headings.append("happened")
        for cells, row in zip(shown, [*plan.changes, *([plan.together] if plan.together else [])], strict=True):
            cells.append("" if row.happened is None else f"{100 * row.happened:.1f} %")
    lines += ["", *table(headings, shown, right=(1, 2, 3, 4, 5, 6))]
    if any(row is not None and row.cliff for row in (plan.today, plan.budget, *plan.changes, *plan.answers)):
        lines += ["", f"cliff: the working set just fits, so a quarter more or less of it changes the hit rate by "
                      f"{100 * CLIFF:.0f} points or more"]
    if plan.answer:
        lines += ["", plan.answer]
        for row in plan.answers:
            lines.append(f"  {row.flags or 'as it is'}: {_rate(row)}, ttft p{plan.percent} "
                         f"{row.ttft_limit_ms:,.1f} ms, {_memory(row)} of memory")
    if plan.checked is not None:
        within = f"{plan.promises - plan.broken} of {plan.promises} promises are within their error"
        lines += ["", f"promised and happened differ by at most {100 * plan.checked:.1f} points; {within}"]
    return lines


def _machine_line(row: "ChangeRow", plan: "MachinePlan") -> str:
    device, host, disk = row.blocks
    return (
        f"{_share(row.hit_rate)}{', on a cliff,' if row.cliff else ''} of the prompt blocks found, ttft mean "
        f"{row.ttft_ms:,.1f} ms, p{plan.percent} {row.ttft_limit_ms:,.1f} ms, with {number(device)} device, "
        f"{number(host)} host and {number(disk)} disk blocks of {number(plan.block_bytes)} bytes"
    )


def _row(row: "ChangeRow") -> list[str]:
    doubt = "" if row.sure or row.points.value < 0 else " (unsure)"
    return [
        row.flags + doubt, _rate(row),
        f"{100 * row.points.value:+.1f} ± {100 * row.points.error:.1f}", f"{row.ttft_limit_ms:,.1f}",
        f"{row.ttft_gain_ms.value:+,.1f} ± {row.ttft_gain_ms.error:,.1f}", _memory(row),
    ]


def _rate(row: "ChangeRow") -> str:
    return _share(row.hit_rate) + (", cliff" if row.cliff else "")


def _share(figure: "Figure") -> str:
    return f"{100 * figure.value:.1f} ± {100 * figure.error:.1f} %"


def _memory(row: "ChangeRow") -> str:
    if not row.memory_bytes:
        return "no more" if not row.flags else "+0"
    return ("+" if row.memory_bytes > 0 else "-") + _size(abs(row.memory_bytes))


def _size(size_bytes: int) -> str:
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1_024:
            break
        value, unit = value / 1_024, larger
    return f"{value:,.1f} {unit}"
