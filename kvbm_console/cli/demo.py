"""``kvbm-console demo``: leader, simulated engine and console in one command and one process.

Law of this file: daemon and console share one event loop and meet over the demo's own socket, as they would in two
processes; the engine runs in slices of at most 2 ms, so it never stalls the screen.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Final

import click

from kvbm_console.cli.look import look_options
from kvbm_console.cli.machine import daemon_options, machine_line, workload_options
from kvbm_console.cli.output import on_terminal, print_json, warn
from kvbm_console.cli.params import DEMO_SOCKET, format_option, socket_address
from kvbm_console.cli.summary import live_line, recorder_text, summary_text

if TYPE_CHECKING:
    from server.daemon import Daemon
    from server.options import DaemonOptions
    from server.summary import Summary

UNATTENDED_SECONDS: Final = 30.0
"""How long a demo without a terminal runs when nobody said: nobody is there to stop it."""
LINE_EVERY_S: Final = 1.0


@click.command()
@click.option("--workload", metavar="SPEC", default="multiturn", show_default=True,
              help="mooncake:FILE or multiturn[:key=value,...].")
@click.option("--seconds", type=click.FloatRange(0, 1e6, min_open=True), metavar="N",
              help="End by itself after N seconds; without a terminal 30 by default.")
@format_option("text", "json")
@workload_options
@look_options
def demo(
    workload: str, seconds: float | None, form: str, theme: str | None, ascii: bool, no_color: bool, utc: bool,
    **machine: Any,
) -> None:
    """The console on a simulated engine, all in one command.

    Without a terminal it prints a line each second and a summary at the end. Other commands reach it at
    --target unix:.../demo.sock, which is shown.
    """
    options = daemon_options(workload=workload, listen=socket_address(DEMO_SOCKET), **machine)
    show(options, seconds, form, "demo", theme=theme, ascii_only=ascii, no_color=no_color, utc=utc)


def show(options: "DaemonOptions", seconds: float | None, form: str, name: str, **look: Any) -> None:
    """Daemon and console in one process; without a terminal a line each second and a summary.

    ``look`` is what ``attach.console`` takes: ``theme``, ``ascii_only``, ``no_color``, ``utc``.
    """
    import msgspec

    from kvbm_console.cli.ask import run

    if on_terminal():
        options.handle_signals = False
        raise SystemExit(run(_with_console(options, seconds, look)))
    summary = msgspec.to_builtins(run(_with_lines(options, seconds or UNATTENDED_SECONDS, form, name)))
    if form == "json":
        print_json(summary)
    else:
        click.echo(summary_text(summary))


async def _with_lines(options: "DaemonOptions", seconds: float, form: str, name: str) -> "Summary":
    """Run for this long and print a line each second (on stderr when stdout is for JSON)."""
    from server.daemon import run_daemon

    options.exit_when_done = True
    loop = asyncio.get_running_loop()

    def ready(daemon: "Daemon") -> None:
        warn(f"{name} on {daemon.address}: {machine_line(options)}")
        loop.call_later(seconds, daemon.stop)
        loop.call_later(LINE_EVERY_S, tick, daemon)

    def tick(daemon: "Daemon") -> None:
        click.echo(live_line(daemon.service.state), err=form == "json")
        loop.call_later(LINE_EVERY_S, tick, daemon)

    return await run_daemon(options, on_ready=ready)


async def _with_console(options: "DaemonOptions", seconds: float | None, look: dict[str, Any]) -> int:
    """Daemon and console on one loop; the daemon ends in order when the console is left.

    The console is loaded before the daemon begins: it takes some tenths of a second, in which a loop would stand still.
    """
    import msgspec

    from kvbm_console.cli.attach import console, load_console
    from server.daemon import run_daemon

    load_console()
    ready: asyncio.Future[Daemon] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(run_daemon(options, on_ready=ready.set_result))
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving  # raises why it could not start
        return 0
    daemon = ready.result()
    try:
        status = await console([daemon.address], seconds=seconds, **look)
    finally:
        daemon.stop(soon=True)
        recorder = (await serving).recorder
    if recorder is not None and not status:  # else the terminal may be gone, or take nothing
        warn(f"recorder: {recorder_text(msgspec.to_builtins(recorder))}")
    return status
