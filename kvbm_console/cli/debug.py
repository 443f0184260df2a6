"""The debugger from a shell: ``holds``, ``continue``, ``step``, ``skip``, ``run-for``, ``freeze``, ``thaw`` and more.

Law of this file: a verb acts on what it names; a lost race is answered and is no error.
"""

from typing import Any, Final, NoReturn

import click

from kvbm_console.cli.output import answer, print_json, print_lines, warn
from kvbm_console.cli.params import NUMBER, Duration, format_option, resolve_target, target_option
from kvbm_console.core.config import MAX_HOLD_NS_MAX
from kvbm_console.core.errors import UsageError
from kvbm_console.core.holds import answer_text
from kvbm_console.core.ids import Site, SlotState

MAX_HOLD: Final = Duration(1, MAX_HOLD_NS_MAX, "above 0 and at most 120s")
RUN_FOR: Final = Duration(1, 3_600 * 10**9, "above 0 and at most 1h")


class Until(click.ParamType):  # type: ignore[type-arg]
    """A state or a site: their labels have nothing in common."""

    name = "until"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> SlotState | Site:
        """The member with this label."""
        if isinstance(value, SlotState | Site):
            return value
        for kind in (SlotState, Site):
            for member in kind:
                if member.label == str(value).lower().replace("-", "_"):
                    return member
        labels = ", ".join(member.label for kind in (SlotState, Site) for member in kind)
        raise click.BadParameter(f"must be one of {labels}, got {value!r}", ctx, param)


WAIT_MAX_NS: Final = 3_600 * 10**9
WAIT: Final = Duration(1, WAIT_MAX_NS, "above 0 and at most 1h")


@click.command()
@click.option("--ended", is_flag=True, help="Instead the last holds that ended or were refused, and why.")
@click.option("--wait", "wait_ns", type=WAIT, metavar="DURATION",
              help="Block until something stands still, as 10s; exit 1 when the time is over.")
@target_option
@format_option("text", "json")
def holds(ended: bool, wait_ns: int | None, target: str | None, form: str) -> None:
    """Slots that stand still, or will at their next waitable point."""
    from kvbm_console.cli.status import ended_lines, hold_lines

    if ended and wait_ns is not None:
        raise click.UsageError("holds takes --ended or --wait, got both")
    if ended:
        print_part(target, form, "ended_holds", ended_lines, "no hold has ended or was refused")
    elif wait_ns is None:
        print_part(target, form, "holds", hold_lines, "nothing is held")
    else:
        from kvbm_console.cli.ask import standing_still, wait

        found = wait(resolve_target(None, target), wait_ns / 1e9, standing_still)
        if form == "json":
            print_json(found or [])
        elif found:
            print_lines(hold_lines(found))
        if not found:
            time_is_over(wait_ns)


def time_is_over(wait_ns: int) -> NoReturn:
    """Nothing stood still in this time: exit 1."""
    warn(f"nothing stood still within {wait_ns / 1e9:g} s")
    raise click.exceptions.Exit(1)


def print_part(target: str | None, form: str, part: str, lines: Any, nothing: str) -> None:
    """One list of the status document, as text or JSON."""
    from kvbm_console.cli.ask import fetch_status

    found = fetch_status(resolve_target(None, target))[part]
    if form == "json":
        print_json(found)
    else:
        print_lines(lines(found) if found else (nothing,))


@click.command(name="continue")
@click.argument("hold", required=False, type=NUMBER)
@click.option("--all", "everything", is_flag=True, help="Release every hold.")
@click.option("--until", type=Until(), metavar="STATE|SITE", help="Stop the same slot once more there.")
@target_option
@format_option("text", "json")
def continue_command(
    hold: int | None, everything: bool, until: SlotState | Site | None, target: str | None, form: str
) -> None:
    """Let a held slot go on; without HOLD the only one there is."""
    from kvbm_console.cli.ask import control

    if hold is not None and everything:
        raise click.UsageError(f"continue takes HOLD or --all, got both {hold} and --all")
    address = resolve_target(None, target)
    if not everything:
        hold = _only_hold(address, hold, "continue needs HOLD or --all")
        if hold is None:
            answer(form, "nothing", "nothing is held")
            return
    state = until if isinstance(until, SlotState) else None
    site = until if isinstance(until, Site) else None
    _tell(form, address, hold, control(address, lambda controls: controls.continue_hold(hold, state, site)))


def _tell(form: str, address: str, hold: int | None, said: str) -> None:
    """Print a daemon's answer to a verb; for a hold that has ended already, also why."""
    from kvbm_console.cli.ask import fetch_status

    reason = ""
    if said == "already_continued":
        ended = fetch_status(address)["ended_holds"]
        reason = next((entry["text"] for entry in ended if entry["id"] == str(hold)), "")
    answer(form, said, answer_text(said, reason), id=None if hold is None else str(hold))


def _only_hold(address: str, hold: int | None, needs: str) -> int | None:
    """The hold that was named, else the only one there is; None when there is none."""
    from kvbm_console.cli.ask import fetch_status

    if hold is not None:
        return hold
    waiting = [int(entry["id"]) for entry in fetch_status(address)["holds"]]
    if len(waiting) > 1:
        raise UsageError(f"{needs}: {len(waiting)} slots are held, the first by {waiting[0]}")
    return waiting[0] if waiting else None


@click.command()
@click.argument("hold", required=False, type=NUMBER)
@click.option("--pipeline", is_flag=True, help="Instead let one candidate through its evaluation, while it is closed.")
@target_option
@format_option("text", "json")
def step(hold: int | None, pipeline: bool, target: str | None, form: str) -> None:
    """Let a held slot go on to its next site, and stop it there again; without HOLD the only one there is."""
    from kvbm_console.cli.ask import control

    address = resolve_target(None, target)
    if pipeline:
        if hold is not None:
            raise click.UsageError(f"step takes HOLD or --pipeline, got both {hold} and --pipeline")
        answer(form, control(address, lambda controls: controls.step_pipeline()))
        return
    hold = _only_hold(address, hold, "step needs HOLD")
    if hold is None:
        answer(form, "nothing", "nothing is held")
        return
    number = hold
    _tell(form, address, number, control(address, lambda controls: controls.step(number)))


@click.command()
@click.argument("hold", type=NUMBER)
@target_option
@format_option("text", "json")
def skip(hold: int, target: str | None, form: str) -> None:
    """Resolve the candidates of a held slot to no work, and let it go on."""
    from kvbm_console.cli.ask import control

    address = resolve_target(None, target)
    _tell(form, address, hold, control(address, lambda controls: controls.skip(hold)))


def max_hold_option(command: Any) -> Any:
    """``--max-hold`` of a freeze."""
    return click.option("--max-hold", "max_hold_ns", type=MAX_HOLD, default="30s", show_default=True,
                        metavar="DURATION", help="Longest freeze, at most 120s.")(command)


@click.command(name="run-for")
@click.argument("duration_ns", metavar="DURATION", type=RUN_FOR)
@max_hold_option
@target_option
@format_option("text", "json")
def run_for(duration_ns: int, max_hold_ns: int, target: str | None, form: str) -> None:
    """Go on for this much of the engine's time, as 200ms, and freeze again."""
    from kvbm_console.cli.ask import control

    answer(form, control(resolve_target(None, target), lambda controls: controls.run_for(duration_ns, max_hold_ns)))


@click.command()
@max_hold_option
@target_option
@format_option("text", "json")
def freeze(max_hold_ns: int, target: str | None, form: str) -> None:
    """Let everything stand still: no candidate is evaluated, the engines are paused."""
    from kvbm_console.cli.ask import control

    answer(form, control(resolve_target(None, target), lambda controls: controls.freeze(max_hold_ns)))


@click.command()
@target_option
@format_option("text", "json")
def thaw(target: str | None, form: str) -> None:
    """End a freeze."""
    from kvbm_console.cli.ask import control

    said = control(resolve_target(None, target), lambda controls: controls.thaw())
    answer(form, said, answer_text(said))


@click.command()
@target_option
@format_option("text", "json")
def disarm(target: str | None, form: str) -> None:
    """Mute every breakpoint, release every hold, end a freeze."""
    from kvbm_console.cli.ask import control

    control(resolve_target(None, target), lambda controls: controls.disarm())
    answer(form, "disarmed")
