"""``kvbm-console mcp``: the answers of a recording or a daemon as tools for an agent.

Law of this file: stdout carries the protocol alone, and HTTP listens on this machine alone.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbm_console.cli.output import program_version, warn
from kvbm_console.cli.params import FilePath, resolve_target, target_option
from kvbm_console.core.errors import UsageError

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from kvbm_console.answers.source import AnswerSource


@click.command()
@click.argument("source", metavar="[TARGET|RECORDING]", required=False)
@click.option("--beside", type=FilePath(exists=True, path_type=Path), metavar="RECORDING",
              help="Another recording, to compare with (the tool diff).")
@click.option("--control", is_flag=True,
              help="Offer verbs that change a daemon, too: breakpoints, holds, continue, step.")
@click.option("--http", metavar="HOST:PORT",
              help="Serve streamable HTTP at this address of this machine, path /mcp, instead of stdio.")
@target_option
def mcp(source: str | None, target: str | None, beside: Path | None, control: bool, http: str | None) -> None:
    """Tools for agents: overview, doctor, why, story, events, when, slots and tiers of a recording or a daemon.

    Speaks the Model Context Protocol on stdin and stdout. Each answer is small, names its events, and says how to go
    on. Needs the extra mcp.
    """
    from kvbm_console.extras import need

    need("mcp.server", "mcp", "mcp", "mcp")
    import anyio

    from kvbm_console.answers.control import LiveControl
    from kvbm_console.answers.mcp import server_of
    from kvbm_console.answers.source import LiveSource, RecordingSource
    from kvbm_console.cli.ask import access, check_target, run, who

    address = None if http is None else _loopback(http)
    asked: AnswerSource
    verbs = None
    if source is not None and Path(source).exists():
        if control or target is not None:
            raise UsageError(f"--control and --target go with a daemon, and {source} is a recording")
        asked = RecordingSource(Path(source))
    else:
        daemon = resolve_target(source, target)
        run(check_target(daemon))
        asked = LiveSource(daemon, access(), who())
        verbs = LiveControl(asked, who()) if control else None
    other = None if beside is None else RecordingSource(beside)
    server = server_of(asked, other, verbs, program_version())
    if address is None:
        anyio.run(server.run_stdio_async)
        return
    _serve_http(server, address, asked.name)


def _serve_http(server: "MCPServer[Any]", address: tuple[str, int], name: str) -> None:
    """Serve until a signal; the line on stderr says that the address takes connections."""
    import socket

    import uvicorn

    host, port = address
    try:
        listening = socket.create_server(address, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UsageError(f"--http {host}:{port}: {error.strerror}") from None
    port = listening.getsockname()[1]
    warn(f"serving {name} on http://{f'[{host}]' if ':' in host else host}:{port}/mcp")
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(host=host), log_level="warning")).run([listening])


def _loopback(address: str) -> tuple[str, int]:
    """Host and port. Raises ``UsageError`` for an address that others could reach."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]") or not port.isdecimal() or int(port) >= 65_536:
        raise UsageError(f"--http must be 127.0.0.1:PORT, localhost:PORT or [::1]:PORT, got {address!r}")
    return host.strip("[]"), int(port)
