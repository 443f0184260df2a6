"""``kvbm-console doctor``: findings that need a person, in a recording or on a live target.

Law of this file: a finding exits 1, and a note alone exits 0.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvbm_console.cli.ask import RECORDING, RUN, evidence_from
from kvbm_console.cli.output import duration, number, print_result, progress, share
from kvbm_console.cli.params import format_option, target_option

if TYPE_CHECKING:
    from kvbm_console.analysis.diagnosis import Diagnosis
    from kvbm_console.analysis.lints import Finding

MARKS: Final = ("!!", " ‖", " !", " ·")
"""Level to the mark that the console's screens show, too."""
WORDS: Final = ("fault", "hold", "caution", "note")
SHOWN: Final = 5
"""Findings of one problem that the text names beside the worst; the others are counted."""
WIDTH: Final = 100
"""Columns of an explanation, for comfortable reading."""


@click.command()
@RECORDING
@RUN
@target_option
@click.option("--brief", is_flag=True, help="One line for each problem, without explanation.")
@format_option("text", "json")
@click.pass_context
def doctor(
    ctx: click.Context, path: Path | None, run: str | None, target: str | None, brief: bool, form: str
) -> None:
    """Find problems that need a person: stuck requests, silent copies, full tiers, thrash, lost events and more.

    Reads a whole recording, or the events that a live daemon still holds. Findings are listed worst first, each with
    its event, its meaning and a remedy. Exit 0 without a finding, 1 otherwise.
    """
    from kvbm_console.analysis.diagnosis import diagnose, document

    diagnosis = diagnose(evidence_from(path, target, run), progress())
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
        thrash = share(diagnosis.thrash_blocks, diagnosis.evicted_blocks)
        looked += f", thrash {thrash} of {number(diagnosis.evicted_blocks)} evicted blocks"
    return f"{', '.join(found) if found else 'nothing wrong'} in {looked}"
