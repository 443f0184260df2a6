"""``kvbm-console doctor``: what needs a person, in a recording or on a live target.

Law of this file: exit 1 when something is wrong; a note alone is not.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvbm_console.cli.evidence import RECORDING, evidence_from
from kvbm_console.cli.output import duration, number, print_json
from kvbm_console.cli.params import format_option
from kvbm_console.cli.progress import progress

if TYPE_CHECKING:
    from kvbm_console.recording.lints import Diagnosis, Finding

MARKS: Final = ("!!", " ‖", " !", " ·")
"""By level, as on the console's screens."""
WORDS: Final = ("fault", "hold", "caution", "note")
WIDTH: Final = 100
"""Of explanations: what people read with comfort."""


@click.command()
@RECORDING
@click.option("--target", metavar="T", help="A live daemon instead of a recording: unix:PATH or HOST:PORT.")
@click.option("--brief", is_flag=True, help="One line for each finding, without explanation.")
@format_option("text", "json")
@click.pass_context
def doctor(ctx: click.Context, path: Path | None, target: str | None, brief: bool, form: str) -> None:
    """Find what needs a person: stuck requests, silent copies, full tiers, thrash, lost events and more.

    Looks at a whole recording, or at what a live daemon still holds. Worst first, each with its event, why it is bad
    and what to do. Exit 0 when nothing is wrong, 1 otherwise.
    """
    from kvbm_console.recording.lints import diagnose, document

    diagnosis = diagnose(evidence_from(path, target), progress())
    if form == "json":
        print_json(document(diagnosis))
    else:
        for line in _lines(diagnosis, brief=brief):
            click.echo(line)
    ctx.exit(0 if diagnosis.ok else 1)


def _lines(one: "Diagnosis", *, brief: bool) -> list[str]:
    lines: list[str] = []
    who = max((len(finding.who) for finding in one.findings), default=0)
    what = max((len(finding.what) for finding in one.findings), default=0)
    for finding in one.findings:
        over = "" if finding.until_ns is None or finding.until_ns == one.until_ns else \
            f" (until {finding.until_ns / 1e9:.3f} s)"
        lines.append(
            f"{MARKS[finding.level]} {finding.who:<{who}}  {finding.what:<{what}}  {finding.because}{over}"
        )
        if not brief:
            lines += [*_explained(finding), ""]
    if brief and lines:
        lines.append("")
    return [*lines, _summary(one)]


def _explained(finding: "Finding") -> list[str]:
    import textwrap

    from kvbm_console.recording.lints import ABOUT

    about = ABOUT[finding.lint]
    events = [f"event {number(finding.seq)}"]
    more = [seq for seq in finding.evidence if seq != finding.seq]
    if more:
        events.append("then " + ", ".join(number(seq) for seq in more))
    rows = (
        ("seen", f"{', '.join(events)}; since {finding.since_ns / 1e9:.3f} s"), ("rule", about.threshold),
        ("bad", about.bad), ("do", about.do),
    )
    return [
        line for name, text in rows
        for line in textwrap.wrap(text, WIDTH, initial_indent=f"   {name:<5} ", subsequent_indent=" " * 9)
    ]


def _summary(one: "Diagnosis") -> str:
    looked = f"{number(one.events)} events of {number(one.requests)} requests, " \
             f"{duration(one.until_ns - one.from_ns)} of the engine"
    counts = [sum(finding.level == level for finding in one.findings) for level in range(len(WORDS))]
    found = [f"{count} {word}{'s' if count > 1 else ''}" for count, word in zip(counts, WORDS, strict=True) if count]
    return f"{', '.join(found) if found else 'nothing wrong'} in {looked}"
