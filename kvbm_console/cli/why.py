"""``kvbm-console why``: why a request missed a block, and where its time went.

Law of this file: it prints the library's explanation and adds nothing, and the JSON is the library's document.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvbm_console.cli.ask import RECORDING, RUN, evidence_from
from kvbm_console.cli.output import (
    ABSENT,
    duration,
    number,
    print_result,
    progress,
    progress_line,
    share,
    table,
)
from kvbm_console.cli.params import Duration, format_option, target_option, typed
from kvbm_console.cli.recorder import replayable
from kvbm_console.core.errors import UsageError

if TYPE_CHECKING:
    from kvbm_console.analysis.explain import Admission, Explanation, MissedRun, Spent
    from kvbm_console.planning.what_if import Counterfactual
    from kvbm_console.recording.reader import Recording

RUNS_SHOWN: Final = 24
"""Runs of blocks that the text of an admission shows; ``--block`` and the JSON show all."""


@click.command()
@click.argument("request")
@RECORDING
@RUN
@target_option
@click.option("--what-if", "counterfactual", is_flag=True,
              help="Search the least change that would have spared the request a miss, a preemption or a long wait.")
@click.option("--within", type=Duration(1, 86_400 * 10**9, "from 1ns to 24h"), metavar="TIME",
              help="With --what-if: a later first token is a long wait.  [default: twice the median]")
@click.option("--block", type=click.IntRange(0), metavar="I", help="Only this block of the prompt, from 0, in full.")
@format_option("text", "json")
def why(
    request: str, path: Path | None, run: str | None, target: str | None, block: int | None, counterfactual: bool,
    within: int | None, form: str,
) -> None:
    """Why REQUEST missed each block of its prompt, and where its time went.

    Reads a recording, or the events that a live daemon still holds. Names the deciding event, or says that it cannot be
    known. With --what-if the recording is replayed with one change at a time, so each answer was run. Of a live daemon
    its own recording is replayed where that lies on this machine, else the events that it still holds.
    """
    from kvbm_console.analysis.explain import explain, grouped, only_block

    if typed("within", within) is not None and not counterfactual:
        raise UsageError("--within needs --what-if")
    if counterfactual:
        with replayable(path, target, run) as recording:
            found = _search(recording, request, within)
        print_result(form, found, lambda: _what_if_lines(found))
        return
    explanation = explain(evidence_from(path, target, run), request, progress())
    explanation = grouped(explanation) if block is None else only_block(explanation, block)
    print_result(form, explanation, lambda: _lines(explanation, block))


def _search(recording: "Recording", request: str, within: int | None) -> "Counterfactual":
    """Explain a request of a recording, then replay it with one change at a time."""
    from kvbm_console.analysis.explain import explain
    from kvbm_console.analysis.walk import evidence_of
    from kvbm_console.planning.recorded import read_run
    from kvbm_console.planning.what_if import what_if

    explanation = explain(evidence_of(recording), request, progress())
    engine = "" if explanation.engine is None else f",engine={explanation.engine}"
    say = progress_line()

    def tell(replay: int, flags: str) -> None:
        say(lambda: f"replay {number(replay)}: {flags or 'as recorded'}")

    return what_if(read_run(f"{recording.path}{engine},run={recording.incarnation}"), explanation, within, tell)


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


def _what_if_lines(found: "Counterfactual") -> list[str]:
    replayed = found.replayed
    ttft = ABSENT if replayed.ttft_ms is None else f"{replayed.ttft_ms:,.1f} ms"
    lines = [f"{found.request}   replayed as recorded: {number(replayed.hits)} blocks found, "
             f"{number(replayed.preemptions)} preemptions, first token after {ttft}"]
    if not found.alike:
        lines[0] = lines[0].replace("as recorded", f"otherwise (recorded: {number(found.recorded_hits)} blocks found)")
    lines += [f"note: {note}" for note in found.notes]
    if not found.troubles:
        return [*lines, "it missed nothing that had been stored, was not preempted, and did not wait long"]
    for trouble in found.troubles:
        lines += ["", f"{trouble.kind}: {trouble.text}"]
        lines += [f"  {line}" for line in table(
            ("WOULD HAVE AVOIDED IT", "MORE BLOCKS", "MEMORY", "FOUND", "FIRST TOKEN", "STILL IN TIME"),
            [(
                remedy.flags, number(remedy.more_blocks), f"{remedy.memory_bytes / 2**20:,.0f} MiB",
                number(remedy.outcome.hits),
                ABSENT if remedy.outcome.ttft_ms is None else f"{remedy.outcome.ttft_ms:,.1f} ms",
                "from the beginning" if remedy.latest_ns is None else f"until {_at(remedy.latest_ns)}",
            ) for remedy in trouble.remedies], right=(1, 2, 3, 4),
        )] if trouble.remedies else [f"  nothing that was tried avoids it ({number(trouble.tried)} replays)"]
        lines.append(f"  inevitable: {trouble.inevitable}")
    return lines


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
