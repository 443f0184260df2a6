"""The debugger from a shell: ``holds``, ``continue``, ``step``, ``skip``, ``run-for``, ``freeze``, ``thaw`` and more.

Law of this file: a verb acts on the hold or breakpoint that it names, and a lost race is answered and is no error.
"""

from collections.abc import Callable
from typing import Any, Final, NoReturn

import click

from kvbm_console.cli.output import answer, print_json, print_lines, print_result, warn
from kvbm_console.cli.params import NUMBER, Duration, format_option, resolve_target, target_option
from kvbm_console.core.config import MAX_HOLD_NS_MAX
from kvbm_console.core.errors import UsageError
from kvbm_console.core.holds import answer_text
from kvbm_console.core.ids import Site, SlotState
from kvbm_console.stream.verbs import (
    ContinueHold,
    Disarm,
    Freeze,
    RunFor,
    SkipCandidate,
    StepPipeline,
    StepSlot,
    Thaw,
    Verb,
)


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


WAIT: Final = Duration(1, 3_600 * 10**9, "above 0 and at most 1h")


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
        from kvbm_console.cli.ask import wait
        from kvbm_console.client.standing import standing_still

        found = wait(resolve_target(None, target), wait_ns / 1e9, standing_still)
        if form == "json":
            print_json(found or [])
        elif found:
            print_lines(hold_lines(found))
        if not found:
            time_is_over(wait_ns)


def time_is_over(wait_ns: int) -> NoReturn:
    """Warn that no slot stood still in this time, and exit 1."""
    warn(f"nothing stood still within {wait_ns / 1e9:g} s")
    raise click.exceptions.Exit(1)


def print_part(target: str | None, form: str, part: str, lines: Any, nothing: str) -> None:
    """One list of the status document, as text or JSON."""
    from kvbm_console.cli.ask import fetch_status

    found = fetch_status(resolve_target(None, target))[part]
    print_result(form, found, lambda: lines(found) if found else (nothing,))


@click.command(name="continue")
@click.argument("hold", required=False, type=NUMBER)
@click.option("--all", "everything", is_flag=True, help="Release every hold.")
@click.option("--until", type=Until(), metavar="STATE|SITE", help="Stop the same slot once more there.")
@target_option
@format_option("text", "json")
def continue_command(
    hold: int | None, everything: bool, until: SlotState | Site | None, target: str | None, form: str
) -> None:
    """Let a held slot go on; without HOLD the only hold there is."""
    if hold is not None and everything:
        raise click.UsageError(f"continue takes HOLD or --all, got both {hold} and --all")
    address = resolve_target(None, target)
    if not everything:
        hold = _only_hold(address, hold, "continue needs HOLD or --all")
        if hold is None:
            answer(form, "nothing", "nothing is held")
            return
    state = until if isinstance(until, SlotState) else None
    _carry_out(address, ContinueHold(hold, state, until if isinstance(until, Site) else None), form)


def _carry_out(address: str, verb: Verb[str], form: str) -> None:
    """Carry out a verb and print the answer; for a hold that has ended already, also the reason."""
    from kvbm_console.cli.ask import carry_out, fetch_status

    done, hold, reason = carry_out(address, verb).partition(",")[0], getattr(verb, "hold", None), ""
    if done == "already_continued":
        ended = fetch_status(address)["ended_holds"]
        reason = next((entry["text"] for entry in ended if entry["id"] == str(hold)), "")
    answer(form, done, answer_text(done, reason), id=None if hold is None else str(hold))


def _only_hold(address: str, hold: int | None, needs: str) -> int | None:
    """The hold that was named, else the only hold; None when there is none."""
    from kvbm_console.cli.ask import fetch_status

    if hold is not None:
        return hold
    waiting = [int(entry["id"]) for entry in fetch_status(address)["holds"]]
    if len(waiting) > 1:
        raise UsageError(f"{needs}: {len(waiting)} slots are held, the first by {waiting[0]}")
    return waiting[0] if waiting else None


@click.command()
@click.argument("hold", required=False, type=NUMBER)
@click.option("--pipeline", is_flag=True, help="Evaluate one candidate instead, while the pipeline is closed.")
@target_option
@format_option("text", "json")
def step(hold: int | None, pipeline: bool, target: str | None, form: str) -> None:
    """Let a held slot go on to its next site, and stop it there again; without HOLD the only hold there is."""
    address = resolve_target(None, target)
    if pipeline:
        if hold is not None:
            raise click.UsageError(f"step takes HOLD or --pipeline, got both {hold} and --pipeline")
        _carry_out(address, StepPipeline(), form)
        return
    hold = _only_hold(address, hold, "step needs HOLD")
    if hold is None:
        answer(form, "nothing", "nothing is held")
    else:
        _carry_out(address, StepSlot(hold), form)


_PARAMETERS: Final[dict[str, Callable[[Any], Any]]] = {
    "hold": click.argument("hold", type=NUMBER),
    "duration_ns": click.argument("duration_ns", metavar="DURATION", type=WAIT),
    "max_hold_ns": click.option(
        "--max-hold", "max_hold_ns", type=Duration(1, MAX_HOLD_NS_MAX, "above 0 and at most 120s"), default="30s",
        show_default=True, metavar="DURATION", help="Longest freeze, at most 120s."),
}
"""The option with which the shell states a field of a verb."""


def _command(verb: type[Verb[str]]) -> click.Command:
    """The command of a verb, made from the verb's fields; its help is the verb's docstring."""

    def carry_out(target: str | None, form: str, **fields: Any) -> None:
        _carry_out(resolve_target(None, target), verb(**fields), form)

    command = target_option(format_option("text", "json")(carry_out))
    for field in reversed(verb.__struct_fields__):
        command = _PARAMETERS[field](command)
    return click.command(name=verb.verb.replace("_", "-"), help=verb.__doc__)(command)


skip = _command(SkipCandidate)
run_for = _command(RunFor)
freeze = _command(Freeze)
thaw = _command(Thaw)
disarm = _command(Disarm)
