"""``kvbm-console dap``: an editor debugs requests, on a recording or a daemon.

Law of this file: stdout carries the protocol alone, and the editor says what is debugged.
"""

import click


@click.command()
def dap() -> None:
    """A debug adapter for editors: requests are threads, their lives are stacks, the way back is open on a recording.

    Speaks the Debug Adapter Protocol on stdin and stdout. The editor launches a recording or attaches to a daemon.
    """
    from kvbm_console.answers.dap import serve_stdio
    from kvbm_console.cli.ask import run, who

    run(serve_stdio(who()))
