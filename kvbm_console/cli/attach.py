"""``kvbm-console attach``: the console on a running daemon."""

import click

from kvbm_console.cli.params import resolve_target, target_argument


@click.command()
@target_argument
@click.option("--read-only", is_flag=True, help="Never set a breakpoint or continue a hold from this console.")
def attach(positional: str | None, target: str | None, read_only: bool) -> None:
    """The console on a running daemon."""
    from kvbm_console.cli.ask import run_live_console

    run_live_console(resolve_target(positional, target), read_only=read_only)
