"""``kvbm-console demo``: leader, simulated engine and console in one command and one process.

Law of this file: daemon and console share one event loop and meet over the demo's own socket, as they would in two
processes. The engine runs in slices of at most 2 ms, so it never stalls the screen.
"""

from typing import Any, Final

import click

from kvbm_console.addresses import socket_address
from kvbm_console.cli.attach import show
from kvbm_console.cli.machine import daemon_options, workload_options
from kvbm_console.cli.params import DEMO_SOCKET, format_option, look_options

GOODBYE: Final = (
    "to watch your own engine:  kvbm-console attach http://HOST:8000",
    "to record a run:           kvbm-console serve --workload multiturn --record run/",
    "to go back in time in it:  kvbm-console replay run/",
)
"""Three commands to try after the demo, told when its console is left."""


@click.command()
@click.option("--workload", metavar="SPEC", default="multiturn", show_default=True,
              help="mooncake:FILE or multiturn[:key=value,...].")
@click.option("--seconds", type=click.FloatRange(0, 1e6, min_open=True), metavar="N",
              help="End after N seconds.  [default: 30 without a terminal]")
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
    show(options, seconds, form, "demo", GOODBYE, theme=theme, ascii=ascii, no_color=no_color, utc=utc)
