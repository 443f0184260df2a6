"""``kvbm-console why``: why a request missed a block, and where its time went.

Law of this file: it prints the library's explanation and adds nothing, and the JSON is the library's document.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvbm_console.cli.ask import RECORDING, RUN, evidence_from
from kvbm_console.cli.output import duration, number, print_result, progress, share, table
from kvbm_console.cli.params import format_option, target_option

if TYPE_CHECKING:
    from kvbm_console.analysis.explain import Admission, Explanation, MissedRun, Spent

RUNS_SHOWN: Final = 24
"""Runs of blocks that the text of an admission shows; ``--block`` and the JSON show all."""


@click.command()
@click.argument("request")
@RECORDING
@RUN
@target_option
@click.option("--block", type=click.IntRange(0), metavar="I", help="Only this block of the prompt, from 0, in full.")
@format_option("text", "json")
def why(
    request: str, path: Path | None, run: str | None, target: str | None, block: int | None, form: str
) -> None:
    """Why REQUEST missed each block of its prompt, and where its time went.

    Reads a recording, or the events that a live daemon still holds. Names the deciding event, or says that it cannot be
    known.
    """
    from kvbm_console.analysis.explain import explain, grouped, only_block

    explanation = explain(evidence_from(path, target, run), request, progress())
    explanation = grouped(explanation) if block is None else only_block(explanation, block)
    print_result(form, explanation, lambda: _lines(explanation, block))


def _lines(explanation: "Explanation", block: int | None) -> list[str]:
    tail = explanation.prompt_tokens - explanation.prompt_blocks * explanation.block_tokens
    size = f"{number(explanation.prompt_blocks)} full blocks of {explanation.block_tokens}"
    size += f" and {tail} tokens" if tail else ""
    lines = [f"{explanation.request}   slot {explanation.slot}, {explanation.state}; prompt of "
             f"{number(explanation.prompt_tokens)} tokens: {size}"]
    if explanation.occurrences > 1:
        lines.append(f"{explanation.occurrences} slots had this name; this is the last slot")
    lines += explanation.remarks
    if not explanation.admissions and explanation.clone is None:
        lines.append("no look-up and no admission is in the evidence")
    for admission in explanation.admissions:
        lines += ["", *_admission(admission, block)]
    if explanation.receives is None and explanation.sends is None:
        return [*lines, "", *_spent(explanation.spent)]
    return [*lines, *_halves(explanation)]


def _halves(explanation: "Explanation") -> list[str]:
    """The time of the request in each engine, in the order in which they worked on it."""
    halves = {half.role: half for half in explanation.halves}
    lines: list[str] = []
    for role, name in (("prefill", explanation.receives), ("", ""), ("decode", explanation.sends)):
        if not role:
            lines += ["", f"this half, {_engine(explanation.engine)}", *_spent(explanation.spent)]
        elif role in halves:
            half = halves[role]
            lines += ["", f"{role} half, {_engine(half.engine)}: {half.request}, slot {half.slot}, {half.state}",
                      *_spent(half.spent)]
        elif name is not None:
            lines += ["", f"{role} half: not in the evidence; its blocks go by the name {name}"]
    return lines


def _engine(number: int | None) -> str:
    return "unknown engine" if number is None else f"engine {number}"


def _admission(admission: "Admission", block: int | None) -> list[str]:
    in_full = block is not None
    found = ", ".join(f"G{at + 1} {number(count)}" for at, count in enumerate(admission.hits) if count) or "nothing"
    total = sum(admission.hits) + admission.missed
    action = "admitted again after a preemption" if admission.after_preemption else "admitted"
    if not admission.admitted:
        action = "not admitted yet; looked up"
    lines = [f"{action} at event {number(admission.seq)}, {_at(admission.at_ns)}: found {found}; "
             f"{number(admission.missed)} of {number(total)} blocks missed"]
    if admission.asked_again:
        lines.append(f"  the look-up answered \"ask again\" {admission.asked_again} times before")
    if block is not None and block < sum(admission.hits):
        lines.append(f"  {f'block {block}':<18} {'found':<14} it is one of the first {number(sum(admission.hits))}")
    for run in admission.misses if in_full else admission.misses[:RUNS_SHOWN]:
        lines += _run(run, in_full=in_full)
    hidden = len(admission.misses) - RUNS_SHOWN
    if hidden > 0 and not in_full:
        lines.append(f"  {hidden} more; --block I tells admission, --format json all")
    return lines


def _run(run: "MissedRun", *, in_full: bool) -> list[str]:
    if run.first is None:
        which = f"{run.tokens} tokens"
    elif run.blocks == 1:
        which = f"block {run.first}"
    else:
        which = f"blocks {run.first} to {run.last}"
    event = ""
    if run.seq is not None:
        at = "" if run.at_ns is None else f", {_at(run.at_ns)}"
        many = run.last_seq is not None and run.last_seq != run.seq
        event = f"   events {number(run.seq)} … {number(run.last_seq)}" if many else f"   event {number(run.seq)}{at}"
    lines = [f"  {which:<18} {run.reason.replace('_', ' '):<14} {run.text}{event}"]
    if in_full:
        lines += [f"  {'':<18} {'':<14} {earlier}" for earlier in run.also]
    return lines


def _spent(spent: "Spent") -> list[str]:
    total = spent.until_ns - spent.from_ns
    head = f"time   {duration(total)} from {_at(spent.from_ns)} to {_at(spent.until_ns)}"
    if not spent.ended:
        head += ", not ended"
    if not spent.complete:
        head += ", the beginning is not in the evidence"
    lines = [head]
    lines += [
        f"  {line}" for line in table(
            ("", "", ""), [(part.what, duration(part.ns), share(part.ns, total)) for part in spent.parts], right=(1, 2)
        )[1:]
    ]
    if spent.waits:
        lines.append("waited for")
        lines += [f"  {line}" for line in table(
            ("OPERATION", "ROUTE", "BLOCKS", "QUEUE", "WIRE", "STATUS"),
            [
                (wait.operation or "–", wait.route, number(wait.blocks), duration(wait.queue_ns),
                 duration(wait.wire_ns), wait.status)
                for wait in spent.waits
            ],
            right=(0, 2, 3, 4),
        )]
    return lines


def _at(at_ns: int) -> str:
    return f"{at_ns / 1e9:.3f} s"
