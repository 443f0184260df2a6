"""``kvbm-console doctor``: what needs a person, in a recording or on a live target.

Law of this file: exit 1 when something is wrong; a note alone is not.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvbm_console.cli.evidence import RECORDING, RUN, evidence_from
from kvbm_console.cli.output import duration, number, print_json
from kvbm_console.cli.params import format_option, target_option
from kvbm_console.cli.progress import progress

if TYPE_CHECKING:
    from kvbm_console.recording.lints import Diagnosis, Finding

MARKS: Final = ("!!", " ‖", " !", " ·")
"""By level, as on the console's screens."""
WORDS: Final = ("fault", "hold", "caution", "note")
SHOWN: Final = 5
"""Findings of one lint in the text; the others are counted."""
WIDTH: Final = 100
"""Of explanations: what people read with comfort."""


@click.command()
@RECORDING
@RUN
@target_option
@click.option("--brief", is_flag=True, help="One line for each finding, without explanation.")
@format_option("text", "json")
@click.pass_context
def doctor(
    ctx: click.Context, path: Path | None, run: str | None, target: str | None, brief: bool, form: str
) -> None:
    """Find what needs a person: stuck requests, silent copies, full tiers, thrash, lost events and more.

    Looks at a whole recording, or at what a live daemon still holds. Worst first, each with its event, why it is bad
    and what to do. Exit 0 when nothing is wrong, 1 otherwise.
    """
    from kvbm_console.recording.lints import diagnose, document

    diagnosis = diagnose(evidence_from(path, target, run), progress())
    if form == "json":
        print_json(document(diagnosis))
    else:
        for line in _lines(diagnosis, brief=brief):
            click.echo(line)
    ctx.exit(0 if diagnosis.ok else 1)


def _lines(one: "Diagnosis", *, brief: bool) -> list[str]:
    lines: list[str] = []
    groups: dict[str, list[Finding]] = {}
    for finding in one.findings:
        groups.setdefault(finding.lint, []).append(finding)
    for lint, findings in groups.items():
        shown = findings[:SHOWN]
        who = max(len(finding.who) for finding in shown)
        what = max(len(finding.what) for finding in shown)
        for finding in shown:
            lines.append(f"{MARKS[finding.level]} {finding.who:<{who}}  {finding.what:<{what}}  {finding.because}")
            if not brief:
                lines += _wrapped("seen", _seen(finding, one.until_ns))
        if len(findings) > SHOWN:
            lines.append(f"   and {number(len(findings) - SHOWN)} more like it; --format json tells them all")
        if not brief:
            lines += [*_explained(lint), ""]
    if brief and lines:
        lines.append("")
    return [*lines, _summary(one)]


def _seen(finding: "Finding", until_ns: int) -> str:
    more = [number(seq) for seq in finding.evidence if seq != finding.seq]
    events = f"event {number(finding.seq)}" + (f", then {', '.join(more)}" if more else "")
    if finding.until_ns is None:
        return f"{events}; since {finding.since_ns / 1e9:.3f} s"
    until = "" if finding.until_ns == until_ns else f" to {finding.until_ns / 1e9:.3f} s"
    return f"{events}; from {finding.since_ns / 1e9:.3f} s{until}"


def _explained(lint: str) -> list[str]:
    from kvbm_console.recording.lints import ABOUT

    about = ABOUT[lint]
    return [
        line for name, text in (("rule", about.threshold), ("bad", about.bad), ("do", about.do))
        for line in _wrapped(name, text)
    ]


def _wrapped(name: str, text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, WIDTH, initial_indent=f"   {name:<5} ", subsequent_indent=" " * 9)


def _summary(one: "Diagnosis") -> str:
    looked = f"{number(one.events)} events of {number(one.requests)} requests, " \
             f"{duration(one.until_ns - one.from_ns)} of the engine"
    counts = [sum(finding.level == level for finding in one.findings) for level in range(len(WORDS))]
    found = [f"{count} {word}{'s' if count > 1 else ''}" for count, word in zip(counts, WORDS, strict=True) if count]
    return f"{', '.join(found) if found else 'nothing wrong'} in {looked}"
