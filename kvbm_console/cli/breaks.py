"""Breakpoints from a shell: ``break set | list | clear | enable | disable | load | save | test``.

Law of this file: a breakpoint set here belongs to the daemon, so it outlives the command. Only its ``--max-hold``, a
continue or a disarm ends its holds. A breakpoint that cannot work is reported when it is set.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvbm_console.cli.debug import WAIT, time_is_over
from kvbm_console.cli.output import answer, print_json, print_lines, warn
from kvbm_console.cli.params import (
    NUMBER,
    Duration,
    FilePath,
    Labelled,
    compiled,
    format_option,
    options,
    resolve_target,
    target_option,
)
from kvbm_console.core.config import EXPIRES_MAX_NS, MAX_HOLD_NS_MAX, BreakpointSpec
from kvbm_console.core.errors import ConnectionLost, Refused, UsageError
from kvbm_console.core.ids import (
    NUMBER_MAX,
    BreakpointAction,
    CandidateStatus,
    OnTimeout,
    Route,
    Site,
    SlotState,
    Suspend,
    Tier,
)
from kvbm_console.stream.verbs import EnableBreakpoint, RemoveBreakpoint, SetBreakpoint

if TYPE_CHECKING:
    from kvbm_console.analysis.hits import Hit, HitReport
    from kvbm_console.client import Client, ControlSession
    from kvbm_console.core.instructions import BreakpointVerdict

_STATE: Final = Labelled(SlotState, "state")
_FLAGS: Final = {"condition": "--when", "hit_condition": "--hits", "ignore_count": "--ignore", "log": "--log",
                 "name": "--name", "request": "--request", "depends_on": "--after"}
"""Field to flag, for fields whose bounds the specification checks."""
SILENT: Final = "\x00"
"""The value of ``--log`` without a template."""
SHOWN_HITS: Final = 20
"""Hits that ``break test`` prints unless more are asked for."""


spec_options = options(
    click.option("--to", "to_state", type=_STATE, metavar="STATE", help="The state that the slot enters."),
    click.option("--from", "from_state", type=_STATE, metavar="STATE", help="The state that it leaves."),
    click.option("--request", metavar="GLOB", default="*", show_default=True, help="Only these requests, by id."),
    click.option("--site", type=Labelled(Site, "site"), metavar="SITE", default=Site.TRANSITION_DID,
                 show_default="transition.did", help="Only at this site."),
    click.option("--tier", type=Labelled(Tier, "tier"), metavar="TIER", help="Only for this tier."),
    click.option("--route", type=Labelled(Route, "route"), metavar="ROUTE",
                 help="Only copies along this route, as G2>G1."),
    click.option("--status", type=Labelled(CandidateStatus, "status"), metavar="STATUS",
                 help="Only candidates of this status."),
    click.option("--when", "condition", metavar="EXPR", default="",
                 help="Only when this holds, as 'tokens.computed > 4096 and tiers.g1.available < 16'."),
    click.option("--hits", "hit_condition", metavar="N", default="",
                 help="Matches that count: ==N, >=N or every %N-th."),
    click.option("--ignore", "ignore_count", type=click.IntRange(0, NUMBER_MAX), default=0, metavar="N",
                 help="Let the first N matches through; --hits counts from there."),
    click.option("--action", type=Labelled(BreakpointAction, "action"), metavar="ACTION",
                 help="hold (default), log, snapshot or freeze."),
    click.option("--suspend", type=Labelled(Suspend, "suspend"), default=Suspend.SLOT, show_default="slot",
                 metavar="WHAT", help="The part that stands still with a hold: slot, pipeline or all."),
    click.option("--log", is_flag=False, flag_value=SILENT, metavar="[TEMPLATE]",
                 help="The text of a hit, as 'preempted {request} after {age}'; without --action it holds nothing."),
    click.option("--once", is_flag=True, help="Disable the breakpoint at its first hit."),
    click.option("--name", default="", metavar="TEXT", help="A name, for lists and files."),
)
"""The flags that state a breakpoint; ``spec_of`` reads them."""


def spec_of(given: dict[str, Any]) -> BreakpointSpec:
    """The breakpoint that the flags state; raises ``UsageError`` naming the flag that is out of bounds."""
    given = dict(given)
    log, action = given.pop("log"), given.pop("action")
    if action is None:
        action = BreakpointAction.HOLD if log is None else BreakpointAction.LOG
    try:
        return BreakpointSpec(
            action=action, log="" if log in (None, SILENT) else log, one_shot=given.pop("once"),
            expires_ns=given.pop("expires_ns", None) or BreakpointSpec().expires_ns, **given,
        )
    except UsageError as error:
        field, _, bound = str(error).partition(" ")
        raise UsageError(f"{_FLAGS.get(field, field)} {bound}") from None


def check(spec: BreakpointSpec) -> BreakpointSpec:
    """Refuse a wrong expression here, with the flag that holds it, before a daemon is asked."""
    from kvbm_console.core.expression import compile_condition, compile_log

    if spec.condition:
        compiled("--when", compile_condition, spec.condition)
    if spec.log:
        compiled("--log", compile_log, spec.log)
    return spec


@click.group(name="break")
def break_group() -> None:
    """Set, list, clear, keep and try out breakpoints."""


@break_group.command(name="set")
@spec_options
@click.option("--after", "depends_on", type=NUMBER, default=None, metavar="BREAKPOINT",
              help="Only after that breakpoint has hit.")
@click.option("--max-hold", "max_hold_ns", type=Duration(1, MAX_HOLD_NS_MAX, "above 0 and at most 120s"),
              default="30s", show_default=True, metavar="DURATION", help="Longest hold, at most 120s.")
@click.option("--on-timeout", type=Labelled(OnTimeout, "on-timeout"), default=OnTimeout.CONTINUE,
              show_default="continue", metavar="WHAT", help="When a hold expires: continue or skip-candidate.")
@click.option("--expires", "expires_ns", type=Duration(1, EXPIRES_MAX_NS, "above 0 and at most 24h"), default="1h",
              show_default=True, metavar="DURATION", help="Time until the breakpoint is disabled, at most 24h.")
@click.option("--persist", is_flag=True, help="Keep the breakpoint in the daemon's file (serve --breakpoints).")
@click.option("--wait", "wait_ns", type=WAIT, metavar="DURATION",
              help="Block until the breakpoint has stopped a slot, as 10s; exit 1 when the time is over.")
@target_option
@format_option("text", "json")
def break_set(target: str | None, form: str, depends_on: int | None, wait_ns: int | None, **given: Any) -> None:
    """Set a breakpoint on a state, a site or a condition.

    A slot that is stopped stands still at its next waitable point; everything else goes on. With --wait a daemon that
    was started just before has the same time to listen.
    """
    spec = check(spec_of({**given, "depends_on": depends_on or 0}))
    if not spec.narrowed:
        raise click.UsageError(
            "break set needs at least one of --to, --from, --request, --site, --tier, --route, --status, --when"
        )
    if wait_ns is not None and spec.action is not BreakpointAction.HOLD:
        raise click.UsageError(f"--wait needs a breakpoint that holds, got --action {spec.action.label}")
    from kvbm_console.cli.ask import carry_out, wait, who
    from kvbm_console.cli.status import hold_lines

    address = resolve_target(None, target)
    if wait_ns is None:
        verdict, held = carry_out(address, SetBreakpoint(spec)), None
    else:
        told: list[BreakpointVerdict] = []
        held = wait(address, wait_ns / 1e9, lambda client: _set_and_wait(client, who(), spec, told))
        if not told:
            raise ConnectionLost(f"{address} did not answer within {wait_ns / 1e9:g} s")
        verdict = told[0]
    if form == "json":
        document = {"id": str(verdict.id), "verified": verdict.verified, "message": verdict.message}
        print_json(document if wait_ns is None else {**document, "holds": held or []})
    elif verdict.verified:
        print_lines([f"breakpoint {verdict.id}: {spec.describe()}", *(hold_lines(held) if held else ())])
    if not verdict.verified:
        warn(f"breakpoint {verdict.id} cannot work: {verdict.message}")
        raise click.exceptions.Exit(1)
    if wait_ns is not None and not held:
        time_is_over(wait_ns)


async def _set_and_wait(
    client: "Client", by: str, spec: BreakpointSpec, told: "list[BreakpointVerdict]"
) -> list[dict[str, Any]]:
    """Set the breakpoint, print the verdict at once, and wait for the first slot that stands still."""
    from kvbm_console.client.standing import standing_still

    async with client.control(by, lease=False) as session:
        told.append(await session.ask(SetBreakpoint(spec)))
    return await standing_still(client, told[0].id) if told[0].verified else []


@break_group.command(name="list")
@target_option
@format_option("text", "json")
def break_list(target: str | None, form: str) -> None:
    """The breakpoints of all owners."""
    from kvbm_console.cli.debug import print_part
    from kvbm_console.cli.status import breakpoint_lines

    print_part(target, form, "breakpoints", breakpoint_lines, "no breakpoints")


@break_group.command(name="clear")
@click.argument("ids", metavar="[BREAKPOINT]...", nargs=-1, type=NUMBER)
@target_option
@format_option("text", "json")
def break_clear(ids: tuple[int, ...], target: str | None, form: str) -> None:
    """Remove the named breakpoints, or without an id those of all owners."""
    from kvbm_console.cli.ask import control

    async def clear(session: "ControlSession") -> str:
        if not ids:
            return await session.ask(RemoveBreakpoint())
        for number in ids:
            await session.ask(RemoveBreakpoint(number))
        return f"removed {len(ids)}"

    answer(form, control(resolve_target(None, target), clear))


def _switch(name: str, text: str, enabled: bool) -> click.Command:
    @click.argument("number", metavar="BREAKPOINT", type=NUMBER)
    @target_option
    @format_option("text", "json")
    def switch(number: int, target: str | None, form: str) -> None:
        from kvbm_console.cli.ask import carry_out

        done = carry_out(resolve_target(None, target), EnableBreakpoint(number, enabled))
        answer(form, done, f"breakpoint {number} {done}", id=str(number))

    return click.command(name=name, help=text)(switch)


break_group.add_command(_switch("enable", "Arm a breakpoint again.", True))
break_group.add_command(_switch("disable", "Mute a breakpoint without removing it.", False))


# --- files ---


@break_group.command(name="save")
@click.argument("file", type=FilePath(dir_okay=False, writable=True, path_type=Path))
@target_option
@format_option("text", "json")
def break_save(file: Path, target: str | None, form: str) -> None:
    """Write all breakpoints of a daemon into a file that `break load` reads."""
    from kvbm_console.cli.ask import fetch_status
    from kvbm_console.debug.files import spec_from_document, write_specs

    found = fetch_status(resolve_target(None, target))["breakpoints"]
    write_specs(file, [spec_from_document(entry) for entry in found])
    answer(form, f"saved {len(found)}", path=str(file))


@break_group.command(name="load")
@click.argument("file", type=FilePath(exists=True, dir_okay=False, path_type=Path))
@target_option
@format_option("text", "json")
def break_load(file: Path, target: str | None, form: str) -> None:
    """Add the breakpoints of a file to those of the daemon."""
    from kvbm_console.cli.ask import control
    from kvbm_console.debug.files import read_specs, renumbered

    specs = read_specs(file)

    async def load(session: "ControlSession") -> list[str]:
        numbers: dict[int, int] = {}
        wrong: list[str] = []
        for spec in specs:
            verdict = await session.ask(SetBreakpoint(renumbered(spec, numbers)))
            numbers[spec.id] = verdict.id
            if not verdict.verified:
                wrong.append(f"breakpoint {verdict.id} cannot work: {verdict.message}")
        return wrong

    wrong = control(resolve_target(None, target), load)
    answer(form, f"loaded {len(specs)}", path=str(file))
    for sentence in wrong:
        warn(sentence)
    if wrong:
        raise click.exceptions.Exit(1)


# --- on a recording ---


@break_group.command(name="test")
@click.argument("expression", metavar="[EXPR]", default="")
@click.option("--on", "recording", required=True, type=FilePath(exists=True, path_type=Path), metavar="RECORDING",
              help="A recording: a directory or a file.")
@click.option("--file", "file", type=FilePath(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Try the breakpoints of a file that `break save` wrote, all at once.")
@click.option("--run", metavar="ID",
              help="Incarnation of the run to try the breakpoint on.  [default: the last run]")
@click.option("--show", type=click.IntRange(0), default=SHOWN_HITS, show_default=True, metavar="N",
              help="Print the first N hits.")
@spec_options
@format_option("text", "json")
def break_test(
    expression: str, recording: Path, file: Path | None, run: str | None, show: int, form: str, condition: str,
    **given: Any,
) -> None:
    """Count and locate the hits that a breakpoint would have had in a run of a recording. Exit 1 without a hit."""
    if expression and condition:
        raise click.UsageError("break test takes EXPR or --when, got both")
    from kvbm_console.analysis.hits import find_hits
    from kvbm_console.debug.files import read_specs

    spec = check(spec_of({**given, "condition": expression or condition}))
    if file is not None and spec != BreakpointSpec():
        raise click.UsageError(f"break test takes a breakpoint or --file, got both {spec.describe()} and {file}")
    try:
        report = find_hits(recording, [spec] if file is None else read_specs(file), run)
    except Refused as error:
        raise click.UsageError(str(error)) from None
    if form == "json":
        print_json({
            "run": report.run, "runs": report.runs,
            "hits": len(report.hits), "matches": report.matches, "failed": report.failed or None,
            "first": [_hit_document(hit) for hit in report.hits[:show]],
        })
    else:
        print_lines(_hit_lines(report, show))
    if not report.hits:
        raise click.exceptions.Exit(1)


def _hit_document(hit: "Hit") -> dict[str, Any]:
    return {
        "seq": hit.seq, "at_ns": hit.at_ns, "n": hit.n, "slot": str(hit.slot), "request": hit.request,
        "site": hit.site.label, "from_state": hit.old.label, "to_state": hit.new.label, "message": hit.message,
    }


def _hit_lines(report: "HitReport", show: int) -> list[str]:
    from kvbm_console.cli.output import number, table

    lines = [f"{number(len(report.hits))} hits, {number(report.matches)} matches in {number(report.stimuli)} stimuli"]
    if report.runs > 1:
        lines[0] += f" of run {report.run}, one of {report.runs} (--run ID looks into another)"
    if report.failed:
        lines.append(f"the condition failed: {report.failed}")
    if not report.hits or not show:
        return lines
    by_move: dict[str, int] = {}
    for hit in report.hits:
        move = f"{hit.site.label} {hit.old.label} → {hit.new.label}"
        by_move[move] = by_move.get(move, 0) + 1
    lines += [f"{number(count):>9}  {move}" for move, count in sorted(by_move.items(), key=lambda item: -item[1])]
    rows = [
        (number(hit.seq), f"{hit.at_ns / 1e9:.6f}s", hit.request, hit.site.label, hit.new.label, hit.message)
        for hit in report.hits[:show]
    ]
    return [*lines, "", *table(("EVENT", "TIME", "REQUEST", "SITE", "STATE", ""), rows, right=(0, 1))]
