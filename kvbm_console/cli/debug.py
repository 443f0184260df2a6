"""The debugger from a shell: ``break``, ``holds``, ``continue``, ``step``, ``disarm``.

Law of this file: a breakpoint set here belongs to the daemon, so it outlives the command, and only its ``--max-hold``,
a continue or a disarm ends what it holds.
"""

from typing import TYPE_CHECKING, Any, Final

import click

from kvbm_console.cli.output import print_json, warn
from kvbm_console.cli.params import Duration, Labelled, format_option, resolve_target, target_option
from kvbm_console.core.config import MAX_HOLD_NS_MAX, BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import BreakpointAction, Route, Site, SlotState, Tier

if TYPE_CHECKING:
    from kvbm_console.client import ControlSession

MAX_HOLD: Final = Duration(1, MAX_HOLD_NS_MAX, "above 0 and at most 120s")
_STATE: Final = Labelled(SlotState, "state")


@click.group(name="break")
def break_group() -> None:
    """Set, list and clear breakpoints."""


@break_group.command(name="set")
@click.option("--to", "to_state", type=_STATE, metavar="STATE", help="The state that the slot enters.")
@click.option("--from", "from_state", type=_STATE, metavar="STATE", help="The state that it leaves.")
@click.option("--request", metavar="GLOB", default="*", show_default=True, help="Which requests, by id.")
@click.option("--site", type=Labelled(Site, "site"), metavar="SITE", default=Site.TRANSITION_DID,
              show_default="transition.did", help="Where to look.")
@click.option("--tier", type=Labelled(Tier, "tier"), metavar="TIER", help="Only for this tier.")
@click.option("--route", type=Labelled(Route, "route"), metavar="ROUTE", help="Only copies along this route, as G2>G1.")
@click.option("--once", is_flag=True, help="Disable it by its first hit.")
@click.option("--ignore", "ignore_count", type=click.IntRange(0), default=0, metavar="N",
              help="Let the first N matches through.")
@click.option("--log", is_flag=True, help="Only say that it happened; hold nothing.")
@click.option("--max-hold", "max_hold_ns", type=MAX_HOLD, default="30s", show_default=True, metavar="DURATION",
              help="Longest hold, at most 120s.")
@target_option
@format_option("text", "json")
def break_set(to_state: SlotState | None, from_state: SlotState | None, request: str, site: Site, tier: Tier | None,
              route: Route | None, once: bool, ignore_count: int, log: bool, max_hold_ns: int, target: str | None,
              form: str) -> None:
    """Stop a slot when it gets somewhere.

    A slot that is stopped stands still at its next waitable point; everything else goes on.
    """
    narrowed = any(value is not None for value in (to_state, from_state, tier, route))
    if not narrowed and request == "*" and site is Site.TRANSITION_DID:
        raise click.UsageError("break set needs at least one of --to, --from, --request, --site, --tier, --route")
    spec = BreakpointSpec(
        site=site, request=request, from_state=from_state, to_state=to_state, tier=tier, route=route,
        action=BreakpointAction.LOG if log else BreakpointAction.HOLD, one_shot=once, ignore_count=ignore_count,
        max_hold_ns=max_hold_ns,
    )
    from kvbm_console.cli.ask import control

    verdict = control(resolve_target(None, target), lambda controls: controls.add_breakpoint(spec))
    if form == "json":
        print_json({"id": str(verdict.id), "verified": verdict.verified, "message": verdict.message})
    elif verdict.verified:
        click.echo(f"breakpoint {verdict.id}: {spec.describe()}")
    if not verdict.verified:
        warn(f"breakpoint {verdict.id} cannot work: {verdict.message}")
        raise click.exceptions.Exit(1)


@break_group.command(name="list")
@target_option
@format_option("text", "json")
def break_list(target: str | None, form: str) -> None:
    """The breakpoints of all owners."""
    from kvbm_console.cli.status import breakpoint_lines

    _print_part(target, form, "breakpoints", breakpoint_lines, "no breakpoints")


@break_group.command(name="clear")
@click.argument("ids", metavar="[BREAKPOINT]...", nargs=-1, type=click.IntRange(1))
@target_option
def break_clear(ids: tuple[int, ...], target: str | None) -> None:
    """Remove breakpoints: these, or all of all owners."""
    from kvbm_console.cli.ask import control

    async def clear(session: "ControlSession") -> str:
        if not ids:
            return await session.remove_all_breakpoints()
        for number in ids:
            await session.remove_breakpoint(number)
        return f"removed {len(ids)}"

    click.echo(control(resolve_target(None, target), clear))


@break_group.command(name="enable")
@click.argument("number", metavar="BREAKPOINT", type=click.IntRange(1))
@target_option
def break_enable(number: int, target: str | None) -> None:
    """Arm a breakpoint again."""
    _enable(number, True, target)


@break_group.command(name="disable")
@click.argument("number", metavar="BREAKPOINT", type=click.IntRange(1))
@target_option
def break_disable(number: int, target: str | None) -> None:
    """Mute a breakpoint without removing it."""
    _enable(number, False, target)


def _enable(number: int, enabled: bool, target: str | None) -> None:
    from kvbm_console.cli.ask import control

    control(resolve_target(None, target), lambda controls: controls.enable_breakpoint(number, enabled))
    click.echo(f"breakpoint {number} {'armed' if enabled else 'muted'}")


@click.command()
@target_option
@format_option("text", "json")
def holds(target: str | None, form: str) -> None:
    """Slots that stand still, or will at their next waitable point."""
    from kvbm_console.cli.status import hold_lines

    _print_part(target, form, "holds", hold_lines, "nothing is held")


def _print_part(target: str | None, form: str, part: str, lines: Any, nothing: str) -> None:
    from kvbm_console.cli.ask import fetch_status

    found = fetch_status(resolve_target(None, target))[part]
    if form == "json":
        print_json(found)
    else:
        click.echo("\n".join(lines(found)) if found else nothing)


@click.command(name="continue")
@click.argument("hold", required=False, type=click.IntRange(1))
@click.option("--all", "everything", is_flag=True, help="Release every hold.")
@target_option
def continue_command(hold: int | None, everything: bool, target: str | None) -> None:
    """Let a held slot go on; without HOLD the only one there is."""
    from kvbm_console.cli.ask import control, fetch_status

    if hold is not None and everything:
        raise click.UsageError(f"continue takes HOLD or --all, got both {hold} and --all")
    address = resolve_target(None, target)
    if hold is None and not everything:
        waiting = [int(entry["id"]) for entry in fetch_status(address)["holds"]]
        if not waiting:
            click.echo("nothing is held")
            return
        if len(waiting) > 1:
            raise UsageError(f"continue needs HOLD or --all: {len(waiting)} slots are held, the first by {waiting[0]}")
        hold = waiting[0]
    click.echo(control(address, lambda controls: controls.continue_hold(hold)))


@click.command()
@click.argument("hold", type=click.IntRange(1))
@target_option
def step(hold: int, target: str | None) -> None:
    """Let a held slot go on to its next site, and stop it there again."""
    from kvbm_console.cli.ask import control

    click.echo(control(resolve_target(None, target), lambda controls: controls.step(hold)))


@click.command()
@target_option
def disarm(target: str | None) -> None:
    """Mute every breakpoint and release every hold."""
    from kvbm_console.cli.ask import control

    control(resolve_target(None, target), lambda controls: controls.disarm())
    click.echo("disarmed")
