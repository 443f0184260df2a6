"""``kvbm-console doctor``: findings that need a person, in a recording or on a live target.

Law of this file: a finding exits 1, and a note alone exits 0.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvbm_console.cli.ask import RUN, evidence_from
from kvbm_console.cli.output import duration, number, print_result, progress, share, table
from kvbm_console.cli.params import FilePath, FloatRange, format_option, target_option, typed
from kvbm_console.core.errors import UsageError

if TYPE_CHECKING:
    from kvbm_console.analysis.diagnosis import Diagnosis
    from kvbm_console.analysis.lints import Finding
    from kvbm_console.engines.witness import WitnessCheck, WitnessReport

MARKS: Final = ("!!", " ‖", " !", " ·")
"""Level to the mark that the console's screens show, too."""
WORDS: Final = ("fault", "hold", "caution", "note")
SHOWN: Final = 5
"""Findings of one problem that the text names beside the worst; the others are counted."""
WIDTH: Final = 100
"""Columns of an explanation, for comfortable reading."""


SETTLE_S: Final = 1.0
"""An engine tells its metrics within this time after the step that it published."""


class Evidenced(FilePath):
    """A recording, or the ``http://`` address of an engine."""

    def convert(
        self, value: "str | os.PathLike[str]", param: click.Parameter | None, ctx: click.Context | None
    ) -> "str | bytes | os.PathLike[str]":
        """The text of an address, or the path of a file that exists."""
        if str(value).startswith(("http://", "https://")):
            return str(value)
        return super().convert(value, param, ctx)


@click.command()
@click.argument("place", metavar="[DIR-or-FILE|http://HOST:PORT]", required=False,
                type=Evidenced(exists=True, path_type=Path))
@RUN
@target_option
@click.option("--brief", is_flag=True, help="One line for each problem, without explanation.")
@click.option("--seconds", type=FloatRange(0, 3600, min_open=True), metavar="N",
              help="Follow an engine's event stream for N seconds before it is compared.  [default: 3]")
@format_option("text", "json")
@click.pass_context
def doctor(
    ctx: click.Context, place: Path | str | None, run: str | None, target: str | None, brief: bool,
    seconds: float | None, form: str,
) -> None:
    """Find problems that need a person: stuck requests, silent copies, full tiers, thrash, lost events and more.

    Reads a whole recording, or the events that a live daemon still holds. Findings are listed worst first, each with
    its event, its meaning and a remedy. Exit 0 without a finding, 1 otherwise.

    With the address of an engine, compares what its event stream says with its own /metrics, and names the side that
    is wrong. Exit 0 without a difference, 1 otherwise.
    """
    if isinstance(place, str):
        if typed("run", run) is not None or typed("target", target) is not None:
            raise UsageError(f"--run and --target go with recordings and daemons, and {place} is an engine")
        from kvbm_console.cli.ask import run as run_task

        reports = run_task(_compare(place, 3.0 if seconds is None else seconds))
        print_result(form, reports, lambda: [line for report in reports for line in _compared(report, brief=brief)])
        ctx.exit(0 if all(report.ok for report in reports) else 1)
    if typed("seconds", seconds) is not None:
        raise UsageError("--seconds needs the http:// address of an engine")
    from kvbm_console.analysis.diagnosis import diagnose, document

    diagnosis = diagnose(evidence_from(place, target, run), progress())
    print_result(form, document(diagnosis), lambda: _lines(diagnosis, brief=brief))
    ctx.exit(0 if diagnosis.ok else 1)


def _lines(diagnosis: "Diagnosis", *, brief: bool) -> list[str]:
    lines: list[str] = []
    by_lint: dict[str, list[list[Finding]]] = {}
    for alike in problems(diagnosis):
        by_lint.setdefault(alike[0].lint, []).append(alike)
    for lint, found in by_lint.items():
        rows = [_row(alike) for alike in found]
        who, what = (max(len(row[at]) for row in rows) for at in (0, 1))
        for alike, row in zip(found, rows, strict=True):
            lines.append(f"{MARKS[alike[0].level]} {row[0]:<{who}}  {row[1]:<{what}}  {row[2]}")
            if not brief:
                lines += _wrapped("seen", _seen(alike[0], diagnosis.until_ns))
                lines += _wrapped("also", _others(alike[1:])) if len(alike) > 1 else []
        if not brief:
            lines += [*_explained(lint), ""]
    if brief and lines:
        lines.append("")
    return [*lines, _summary(diagnosis)]


def problems(diagnosis: "Diagnosis") -> list[list["Finding"]]:
    """Findings by problem, each problem's worst first: requests with the same lint and level are one problem.

    Each hold stays a problem of its own, because each waits for a person. So does a finding that names no request.
    """
    from kvbm_console.analysis.lints import LINTS

    groups: dict[tuple[str, int, int], list[Finding]] = {}
    for at, finding in enumerate(diagnosis.findings):
        alike = finding.request is not None and not LINTS[finding.lint].one_by_one
        groups.setdefault((finding.lint, finding.level, -1 if alike else at), []).append(finding)
    return list(groups.values())


def _row(alike: list["Finding"]) -> tuple[str, str, str]:
    worst = alike[0]
    if len(alike) == 1:
        return worst.who, worst.what, worst.because
    return f"{number(len(alike))} requests", worst.what, f"worst {worst.who}: {worst.because}"


def _others(findings: list["Finding"]) -> str:
    shown = ", ".join(f"{one.who} {one.what}" for one in findings[:SHOWN])
    rest = len(findings) - SHOWN
    return f"{shown} and {number(rest)} more; --format json tells them all" if rest > 0 else shown


def _seen(finding: "Finding", until_ns: int) -> str:
    more = [number(seq) for seq in finding.evidence if seq != finding.seq]
    events = f"event {number(finding.seq)}" + (f", then {', '.join(more)}" if more else "")
    if finding.until_ns is None:
        return f"{events}; since {finding.since_ns / 1e9:.3f} s"
    until = "" if finding.until_ns == until_ns else f" to {finding.until_ns / 1e9:.3f} s"
    return f"{events}; from {finding.since_ns / 1e9:.3f} s{until}"


def _explained(lint: str) -> list[str]:
    from kvbm_console.analysis.lints import LINTS

    about = LINTS[lint]
    return [
        line for name, text in (("rule", about.threshold), ("bad", about.bad), ("do", about.do))
        for line in _wrapped(name, text)
    ]


def _wrapped(name: str, text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, WIDTH, initial_indent=f"   {name:<5} ", subsequent_indent=" " * 9)


def _summary(diagnosis: "Diagnosis") -> str:
    looked = f"{number(diagnosis.events)} events of {number(diagnosis.requests)} requests, " \
             f"{duration(diagnosis.until_ns - diagnosis.from_ns)} of the engine"
    levels = [alike[0].level for alike in problems(diagnosis)]
    counts = [levels.count(level) for level in range(len(WORDS))]  # type: ignore[arg-type]
    found = [f"{count} {word}{'s' if count > 1 else ''}" for count, word in zip(counts, WORDS, strict=True) if count]
    if diagnosis.evicted_blocks:
        back, evicted = diagnosis.thrash_blocks, diagnosis.evicted_blocks
        thrash = "unknown" if back is None else share(back, evicted)
        looked += f", thrash {thrash} of {number(evicted)} evicted blocks"
    return f"{', '.join(found) if found else 'nothing wrong'} in {looked}"


# --- an engine ---


async def _compare(address: str, seconds: float) -> "list[WitnessReport]":
    """Follow the publishers of an engine for a while, then compare each rank with the engine's page."""
    import itertools
    import time

    import anyio
    import anyio.to_thread
    import msgspec

    from kvbm_console.cli.streams import find_publishers
    from kvbm_console.core.config import LeaderConfig
    from kvbm_console.core.leader import Leader
    from kvbm_console.core.snapshots import copied_facts
    from kvbm_console.dispatch import Dispatcher
    from kvbm_console.engines.exposition import read_page
    from kvbm_console.engines.kv_events.zmq_source import Streams
    from kvbm_console.engines.witness import COUNTED, Heard, compare

    found = find_publishers(address)
    page = next((publisher.metrics for publisher in found if publisher.metrics is not None), None)
    if page is None:
        raise UsageError(f"{address} has no metrics that can be read beside its events")
    publishers = [msgspec.structs.replace(publisher, metrics=None) for publisher in found]
    dispatcher = Dispatcher(Leader(LeaderConfig()), time.monotonic_ns)
    sources = itertools.count(1)
    streams = Streams(publishers, dispatcher, lambda: next(sources))
    streams.open()
    async with anyio.create_task_group() as group:
        group.start_soon(streams.run)
        await anyio.sleep(seconds)
        before = await anyio.to_thread.run_sync(read_page, page, COUNTED)
        await anyio.sleep(SETTLE_S)
        state = copied_facts(dispatcher.leader.state)
        heard = [
            Heard(
                taker.source, taker.label, taker.dp_rank, taker.counts.batches,
                not (taker.counts.gaps or taker.counts.doubts or taker.counts.restarts), taker.counts.clears > 0,
            )
            for source in streams.sources for taker in source.takers
        ]
        await anyio.sleep(SETTLE_S)
        after = await anyio.to_thread.run_sync(read_page, page, COUNTED)
        group.cancel_scope.cancel()
    return [compare(address, before, after, state, each) for each in heard]


def _compared(report: "WitnessReport", *, brief: bool) -> list[str]:
    """The checks of a rank as text."""
    part = "all messages since the engine began" if report.complete else "not all messages since the engine began"
    held = "no block" if report.resident_blocks is None else f"{number(report.resident_blocks)} blocks on the device"
    lines = [f"{report.publisher} rank {report.rank}: {number(report.messages)} messages, {part}, {held}"]
    shown = [check for check in report.checks if not brief or check.verdict == "differs"]
    if shown:
        rows = [(check.check, _said(check, check.ours), _engines(check), check.verdict) for check in shown]
        lines += table(("check", "stream", "metrics", ""), rows)
    for check in report.checks:
        if check.verdict == "differs":
            who = "the engine's event stream" if check.culprit == "stream" else "this reader"
            lines.append(f"{MARKS[2]} {check.check}: {who} is wrong, because {check.because}")
        elif check.verdict == "unknown" and not brief:
            lines.append(f"{MARKS[3]} {check.check}: unknown, because {check.because}")
    differing = sum(check.verdict == "differs" for check in report.checks)
    agreeing = sum(check.verdict == "agrees" for check in report.checks)
    lines.append(f"{differing} of {differing + agreeing} checks differ" if differing else f"{agreeing} checks agree")
    return lines


def _said(check: "WitnessCheck", value: int | None) -> str:
    return "–" if value is None else f"{number(value)} {check.unit}"


def _engines(check: "WitnessCheck") -> str:
    least, most = check.least, check.most
    if least is None and most is None:
        return "–"
    if least == most:
        return _said(check, least)
    if most is None:
        return f"at least {_said(check, least)}"
    if not least:
        return f"at most {_said(check, most)}"
    return f"{number(least)} to {_said(check, most)}"
