"""The operator's verbs: ``reset`` and ``drain``.

Law of this file: both end in a reset, which forgets the content of every tier. The target's record names the user.
"""

import time
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kvbm_console.cli.output import duration, number, print_json, print_result, warn
from kvbm_console.cli.params import Duration, format_option, resolve_target, target_option

if TYPE_CHECKING:
    from kvbm_console.client.draining import DrainProgress, DrainReport

FOR: Final = Duration(1, 24 * 3_600 * 10**9, "above 0 and at most 24h")
TELL_EVERY_S: Final = 1.0
"""Between two lines of progress."""
NAMED_MAX: Final = 10
"""Requests that a line names."""


@click.command()
@click.option("--physical", is_flag=True, help="Also overwrite the bytes of every tier.")
@target_option
@format_option("text", "json")
def reset(physical: bool, target: str | None, form: str) -> None:
    """Forget the content of all tiers at once, and end every request.

    The epoch rises by 1. Places that a running copy touches stay quarantined until the copy has ended. New requests
    are taken again at once. A drain that is under way ends with this, too.
    """
    from kvbm_console.cli.ask import carry_out
    from kvbm_console.core.ids import ResetMode
    from kvbm_console.stream.verbs import Reset

    mode = ResetMode.PHYSICAL if physical else ResetMode.LOGICAL
    answer = carry_out(resolve_target(None, target), Reset(mode))
    if form == "json":
        print_json({"mode": mode.label, **msgspec.structs.asdict(answer)})
        return
    quarantined = answer.quarantined_blocks
    kept = f"; {number(quarantined)} blocks are quarantined until their copies end" if quarantined else ""
    click.echo(f"reset, epoch {answer.epoch}: {_requests(answer.aborted_requests)} ended{kept}")


@click.command()
@click.option("--for", "for_ns", type=FOR, metavar="DURATION", default="30s", show_default=True,
              help="Longest wait, of the engine's time, at most 24h.")
@target_option
@format_option("text", "json")
@click.pass_context
def drain(ctx: click.Context, for_ns: int, target: str | None, form: str) -> None:
    """Take no new request, wait until nothing is in flight, then reset.

    Requests that are live after --for are ended. The engine's time stands still while the target is frozen.
    New requests are taken again when the drain has ended. Ctrl-c only stops waiting: the daemon goes on draining, and
    `kvbm-console reset` ends that at once.

    Exit status: 0 nothing was in flight any more, 1 the time was over before.
    """
    from kvbm_console.cli.ask import ask, who
    from kvbm_console.client.draining import drain as drain_target

    told = _Told()
    try:
        report = ask(
            resolve_target(None, target), lambda client: drain_target(client, who(), for_ns, told.tell)
        )
    except KeyboardInterrupt:
        warn("not waiting any longer; the daemon goes on draining, and kvbm-console reset ends that at once")
        raise
    print_result(form, msgspec.to_builtins(report), lambda: [_sentence(report)])
    ctx.exit(0 if report.drained else 1)


class _Told:
    """Lines of progress on stderr."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def tell(self, progress: "DrainProgress") -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= TELL_EVERY_S:
            self._last_s = now_s
            left = "" if progress.left_ns is None else f", {duration(progress.left_ns)} left"
            warn(f"draining: {_requests(progress.live_requests)} live, {_copies(progress.copies)} in flight{left}")


def _sentence(report: "DrainReport") -> str:
    begun = f"after {duration(report.waited_ns)}, epoch {report.epoch}"
    if report.remaining is None or report.remaining_copies is None:
        return f"the drain ended {begun}: events were lost, so the remaining requests are not known"
    if report.drained:
        return f"drained {begun}: {_requests(report.live_requests)} ended by themselves"
    names = [f"{row.request} ({row.state})" for row in report.remaining]
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    named = f": {', '.join(names[:NAMED_MAX])}{more}" if names else ""
    return (
        f"the time was over {begun}, with {_requests(len(names))} live and {_copies(report.remaining_copies)} in "
        f"flight{named}"
    )


def _requests(count: int) -> str:
    return f"{number(count)} request{'s' if count != 1 else ''}"


def _copies(count: int) -> str:
    return f"{number(count)} {'copies' if count != 1 else 'copy'}"
