"""``kvbm-console case``: recordings of trouble to learn on, each with a question and its answer."""

from typing import TYPE_CHECKING

import click

from kvbm_console.cli.output import number, print_result, table
from kvbm_console.cli.params import format_option
from kvbm_console.core.errors import UsageError

if TYPE_CHECKING:
    from kvbm_console.cases import RecordedCase


@click.command()
@click.argument("name", required=False)
@click.option("--answer", "answered", is_flag=True, help="Print the answer and the event that decides it, too.")
@click.option("--open", "opened", is_flag=True, help="Open the console on it, at its beginning.")
@format_option("text", "json")
def case(name: str | None, answered: bool, opened: bool, form: str) -> None:
    """Recordings of trouble to learn on: a question, a recording, and the right answer.

    Without NAME every case is listed. The recording of a case is an example for every command that reads one.
    """
    from kvbm_console.cases import all_cases, case_named

    found = all_cases() if name is None else [case_named(name)]
    if opened:
        if name is None:
            raise UsageError("--open needs the NAME of a case")
        from kvbm_console.cli.replay import replay

        replay.main([found[0].path, "--at", "0"], prog_name="kvbm-console replay")
    print_result(form, found, lambda: _listed(found) if name is None else _told(found[0], answered=answered))


def _listed(cases: "list[RecordedCase]") -> list[str]:
    return table(("CASE", "QUESTION"), [(case.name, case.question) for case in cases])


def _told(case: "RecordedCase", *, answered: bool) -> list[str]:
    lines = [case.question, "", f"recording  {case.path}", f"from       {case.origin}"]
    lines += [f"try        kvbm-console {words}" for words in _tries(case)]
    if answered:
        event = case.event
        lines += ["", f"answer     {case.answer}",
                  f"decided by event {number(event.seq)}, {event.kind}, at {event.at_ns / 1e9:.3f} s"]
    return lines


def _tries(case: "RecordedCase") -> list[str]:
    about = [] if case.request is None else [f"why {case.request} {case.path}"]
    return [f"doctor {case.path}", *about, f"case {case.name} --open", f"case {case.name} --answer"]
