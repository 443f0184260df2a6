"""``kvbm-console attach``: the console on a running daemon."""

import click

from kvbm_console.cli.output import require_terminal
from kvbm_console.cli.params import resolve_target, target_argument


@click.command()
@target_argument
@click.option("--read-only", is_flag=True, help="Never set a breakpoint or continue a hold from this console.")
def attach(positional: str | None, target: str | None, read_only: bool) -> None:
    """The console on a running daemon.

    It reconnects by itself when the daemon comes back; what was lost is counted and shown.
    """
    from kvbm_console.cli.ask import check_target, live_console, run

    address = resolve_target(positional, target)
    run(check_target(address))
    require_terminal("attach", "status or tail")
    raise SystemExit(run(live_console(address, read_only=read_only)))
