"""``kvbm-console rec diff``: two recordings side by side.

Law of this file: it prints the library's comparison, and exits 0 when the runs are equal, 1 when they are not.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvbm_console.cli.output import ABSENT, duration, number, print_result, progress, table
from kvbm_console.cli.params import FilePath, format_option

if TYPE_CHECKING:
    from kvbm_console.analysis.diff import Difference, FirstDifference, Metric, Pair

PATHS: Final = FilePath(exists=True, path_type=Path)


@click.command("diff")
@click.argument("a", type=PATHS)
@click.argument("b", type=PATHS)
@click.option("--top", type=click.IntRange(0), default=20, show_default=True, metavar="N",
              help="Requests to list, the largest change of time first.")
@format_option("text", "json")
@click.pass_context
def diff_command(ctx: click.Context, a: Path, b: Path, top: int, form: str) -> None:
    """Compare two recordings: the first event that differs, and each request's states, hits and time.

    Requests are paired by id, else by prompt in the order of arrival. Exit 0 when all events are equal, 1 otherwise.
    """
    from kvbm_console.analysis.diff import diff
    from kvbm_console.analysis.walk import evidence_of
    from kvbm_console.recording.reader import Recording

    result = diff(evidence_of(Recording.open(a)), evidence_of(Recording.open(b)), progress())
    print_result(form, result, lambda: difference_lines(result, top))
    ctx.exit(0 if result.equal else 1)


def difference_lines(difference: "Difference", top: int) -> list[str]:
    """The lines that the command prints, with at most ``top`` requests."""
    lines = [f"A  {difference.a}" + _lost(difference.lost_events_a),
             f"B  {difference.b}" + _lost(difference.lost_events_b)]
    lines += [f"   {change.field}  {change.a} → {change.b}" for change in difference.config]
    if difference.equal:
        return [*lines, f"equal: every event of {number(len(difference.pairs))} requests"]
    if difference.first is not None:
        lines += ["", *_first(difference.first)]
    lines += ["", *_metrics(difference.metrics), "", *_winners(difference)]
    changed = sorted((pair for pair in difference.pairs if not pair.same), key=lambda pair: -abs(_delta(pair)))
    if changed and top:
        lines += ["", *_pairs(changed[:top])]
        if len(changed) > top:
            lines.append(f"{number(len(changed) - top)} more; --top N or --format json")
    return lines


def _lost(events: int) -> str:
    return f"   {number(events)} events are not in it" if events else ""


def _first(difference: "FirstDifference") -> list[str]:
    where = " and ".join(
        f"{number(seq)} of {side}" for side, seq in (("A", difference.seq_a), ("B", difference.seq_b))
        if seq is not None
    )
    if difference.seq_a == difference.seq_b:
        where = number(difference.seq_a)
    request = f" of {difference.request}" if difference.request else ""
    field = f" in {difference.field}" if difference.field else ""
    return [f"first difference{field}: event {where}{request}, {difference.at_ns / 1e9:.6f} s", f"  A  {difference.a}",
            f"  B  {difference.b}"]


def _metrics(metrics: "list[Metric]") -> list[str]:
    return table(("", "A", "B", "CHANGE"), [
        (metric.name, _figure(metric.a, metric.unit), _figure(metric.b, metric.unit), _change(metric))
        for metric in metrics
    ], right=(1, 2, 3))


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ABSENT
    if unit == "ns":
        return duration(int(value))
    return f"{100 * value:.1f} %" if unit == "share" else number(int(value))


def _change(metric: "Metric") -> str:
    if metric.a is None or metric.b is None or metric.a == metric.b:
        return ""
    change = metric.b - metric.a
    if metric.unit == "share":
        return f"{100 * change:+.1f}".replace("-", "−")
    if metric.unit == "ns":
        return _signed(int(change))
    return f"{int(change):+,}".replace("-", "−")


def _signed(ns: int) -> str:
    return ("+" if ns >= 0 else "−") + duration(abs(ns))


def _delta(pair: "Pair") -> int:
    return pair.b.time_ns - pair.a.time_ns


def _winners(difference: "Difference") -> list[str]:
    faster = sum(_delta(pair) < 0 for pair in difference.pairs)
    slower = sum(_delta(pair) > 0 for pair in difference.pairs)
    more = sum(sum(pair.b.hits) > sum(pair.a.hits) for pair in difference.pairs)
    fewer = sum(sum(pair.b.hits) < sum(pair.a.hits) for pair in difference.pairs)
    lines = [
        f"requests  {number(len(difference.pairs))} in both: B faster for {faster}, slower for {slower}; "
        f"more hits for {more}, fewer for {fewer}"
    ]
    lines += [
        f"          only in {side}: {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for side, names in (("A", difference.only_a), ("B", difference.only_b)) if names
    ]
    return lines


def _pairs(pairs: "list[Pair]") -> list[str]:
    rows = [
        (
            pair.a.request if pair.a.request == pair.b.request else f"{pair.a.request} = {pair.b.request}",
            duration(pair.a.time_ns), duration(pair.b.time_ns), _signed(_delta(pair)) if _delta(pair) else "",
            *(f"{pair.a.hits[tier]} → {pair.b.hits[tier]}" if pair.a.hits[tier] != pair.b.hits[tier]
              else str(pair.a.hits[tier]) for tier in range(3)),
            pair.states_differ or "",
        )
        for pair in pairs
    ]
    return table(("REQUEST", "TIME A", "TIME B", "CHANGE", "G1", "G2", "G3", "STATES A, B"), rows, right=range(1, 7))
