"""``kvbm-console attach``: the console on one or more running daemons.

Law of this file: every target is asked once before the screen changes, so a wrong address is one sentence. The console
itself deals with a target that is lost later.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvbm_console.addresses import socket_address
from kvbm_console.cli.output import on_terminal, print_result, require_terminal, warn
from kvbm_console.cli.params import LOOK, FilePath, FloatRange, access_options, look_options, resolve_target, typed
from kvbm_console.cli.summary import live_line, recorder_text, summary_text
from kvbm_console.cli.web import RUN_MAIN, in_browser, leave_with_server, serve
from kvbm_console.core.errors import KvbmConsoleError, UsageError

if TYPE_CHECKING:
    from kvbm_console.analysis.explain import Explanation
    from kvbm_console.cli.keep import SeenKeeper
    from kvbm_console.client.broker import BrokerAddress
    from kvbm_console.planning.what_if import Counterfactual
    from server.daemon import Daemon
    from server.options import DaemonOptions
    from server.summary import Summary
    from tui.source import Search, TargetSession

TARGETS_MAX: Final = 16
"""Targets of one console: each costs a connection and the folding of its events."""
ENGINES: Final = ("http://", "https://", "zmq:", "tcp://", "lmcache:")
"""Prefixes of the address of a real engine's event stream."""
UNATTENDED_SECONDS: Final = 30.0
"""Default run time of a demo without a terminal, because no person is there to stop the demo."""
LINE_EVERY_S: Final = 1.0


@click.command()
@click.argument("targets", metavar="[TARGET]...", nargs=-1)
@click.option("--target", "flags", multiple=True, metavar="T",
              help="unix:PATH or HOST:PORT, several times for several; default KVBM_CONSOLE_TARGET, else the default "
                   "socket.")
@click.option("--read-only", is_flag=True, help="Never set a breakpoint or continue a hold from this console.")
@click.option("--record", type=FilePath(path_type=Path), metavar="PLACE",
              help="Record what the console sees into this new file (*.mcap) or directory, each target on its own.")
@click.option("--serve-web", is_flag=False, flag_value=8000, default=None, type=click.IntRange(1, 65_535),
              metavar="[PORT]", help="Offer the console to a browser on this machine instead; needs the extra `web`.")
@click.option("--seconds", type=FloatRange(0, 1e6, min_open=True), metavar="N",
              help="End after N seconds, on an event stream.  [default: 30 without a terminal]")
@access_options
@look_options
def attach(
    targets: tuple[str, ...], flags: tuple[str, ...], read_only: bool, record: Path | None, serve_web: int | None,
    seconds: float | None, **look: Any,
) -> None:
    """The console on a running daemon, or on several as tabs.

    With http:// or zmq:// it follows a real engine's KV events in a daemon of its own. With
    nats://HOST:PORT/CLUSTER?daemon=NAME it follows the events that a daemon publishes at a broker
    (serve --fleet-events). It reconnects by itself when a daemon comes back; what was lost is counted and shown.
    """
    from kvbm_console.cli.ask import access_flags, check_target, run

    named = [*targets, *((typed("flags", flags) or ()) if targets else flags)]
    engines = [name for name in named if name.startswith(ENGINES)]
    if engines:
        if len(engines) < len(named):
            raise UsageError(f"attach follows engines or daemons, not both at once: {', '.join(named)}")
        follow_engines(engines, record, seconds, look)
        return
    if typed("seconds", seconds) is not None:
        raise click.UsageError("--seconds needs the address of an event stream: zmq://HOST:PORT or http://HOST:PORT")
    addresses = addresses_of(named)
    for address in addresses:
        run(check_target(address) if isinstance(address, str) else check_published(address))
    if serve_web is not None and not in_browser():
        if record is not None:
            raise click.UsageError("--record does not go with --serve-web: all visitors would write into it")
        serve(serve_web, [
            *named, *access_flags(), *(["--read-only"] if read_only else []), "--theme", look["theme"] or "dark",
            *(f"--{name}" for name in LOOK if look[name.replace("-", "_")] is True),
        ])
        return
    if in_browser():
        leave_with_server()
    else:
        require_terminal("attach", "status or tail")
    if record is not None:
        from kvbm_console.cli.keep import place_of, require_place

        for number in range(1, len(addresses) + 1):
            require_place(place_of(record, number, len(addresses)))
    load_console()
    raise SystemExit(run(console(addresses, read_only=read_only, record=record, **look)))


def follow_engines(
    addresses: Sequence[str], record: Path | None, seconds: float | None, look: dict[str, Any]
) -> None:
    """A daemon of our own on the event streams of real engines, and the console on it, as ``demo`` does."""
    from kvbm_console.cli.machine import daemon_options
    from kvbm_console.cli.streams import find_publishers

    publishers = tuple(publisher for address in addresses for publisher in find_publishers(address))
    show(daemon_options(
        workload=None, limit=None, speed=1.0, record=record, listen=socket_address(f"attach-{os.getpid()}.sock"),
        check=False, publishers=publishers,
    ), seconds, "text", "attached", **look)


def show(
    options: "DaemonOptions", seconds: float | None, form: str, name: str, goodbye: Sequence[str] = (), **look: Any
) -> None:
    """Daemon and console in one process; without a terminal a line each second and a summary.

    ``goodbye`` is told when the console is left, ``look`` are the values of ``look_options``.
    """
    import msgspec

    from kvbm_console.cli.ask import run

    if on_terminal():
        options.handle_signals = False
        status = run(_with_console(options, seconds, look))
        for line in goodbye if not status else ():  # else the terminal may be gone
            warn(line)
        raise SystemExit(status)
    summary = msgspec.to_builtins(run(_with_lines(options, seconds or UNATTENDED_SECONDS, form, name)))
    print_result(form, summary, lambda: summary_text(summary).split("\n"))


async def _with_lines(options: "DaemonOptions", seconds: float, form: str, name: str) -> "Summary":
    """Run for this long and print a line each second (on stderr when stdout is for JSON).

    A line that cannot be written ends the run, and raises why behind its end.
    """
    from kvbm_console.cli.machine import machine_line
    from server.daemon import run_daemon

    options.exit_when_done = True
    loop = asyncio.get_running_loop()
    unwritten: list[OSError] = []

    def ready(daemon: "Daemon") -> None:
        warn(f"{name} on {daemon.address}: {machine_line(options)}")
        loop.call_later(seconds, daemon.stop)
        loop.call_later(LINE_EVERY_S, tick, daemon)

    def tick(daemon: "Daemon") -> None:
        try:
            click.echo(live_line(daemon.service.state), err=form == "json")
        except OSError as error:
            unwritten.append(error)
            daemon.stop(soon=True)
        else:
            loop.call_later(LINE_EVERY_S, tick, daemon)

    summary = await run_daemon(options, on_ready=ready)
    for error in unwritten:
        raise error
    return summary


async def _with_console(options: "DaemonOptions", seconds: float | None, look: dict[str, Any]) -> int:
    """Daemon and console on one loop; the daemon ends in order when the console is left.

    The console is loaded before the daemon begins: it takes some tenths of a second, in which a loop would stand still.
    """
    import msgspec

    from server.daemon import run_daemon

    load_console()
    ready: asyncio.Future[Daemon] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(run_daemon(options, on_ready=ready.set_result))
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving  # raises the reason why the daemon could not start
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


def addresses_of(named: Sequence[str]) -> "list[str | BrokerAddress]":
    """The addresses, each once, in order; the default address when none is named."""
    from kvbm_console.client.broker import SCHEMES, broker_address

    found: list[str | BrokerAddress] = list(dict.fromkeys(
        broker_address(name, "TARGET", daemon=True) if name.startswith(SCHEMES) else resolve_target(name, None)
        for name in named
    )) or [resolve_target(None, None)]
    if len(found) > TARGETS_MAX:
        raise UsageError(f"attach takes at most {TARGETS_MAX} targets, got {len(found)}")
    return found


async def check_published(address: "BrokerAddress") -> None:
    """Raise ``ConnectionLost`` or ``Refused`` unless a broker answers and knows the daemon."""
    from kvbm_console.client.brokered import BrokeredFleet
    from kvbm_console.core.errors import ConnectionLost

    async with BrokeredFleet(address) as fleet:
        if not fleet.rows:
            raise ConnectionLost(f"{address.shown} knows no daemon {address.daemon}")


def load_console() -> None:
    """Import what a console needs, without collections: they would find nothing, and take a sixth of the time."""
    gc.disable()
    try:
        import kvbm_console.client  # noqa: F401
        import tui.app
        import tui.source  # noqa: F401
    finally:
        gc.freeze()  # loaded modules stay, so no collection needs to walk them later either
        gc.enable()


async def console(
    addresses: "Sequence[str | BrokerAddress]", *, read_only: bool = False, record: Path | None = None,
    seconds: float | None = None, theme: str | None = None, ascii: bool = False, no_color: bool = False,
    utc: bool = False, tour: bool = False,
) -> int:
    """The console on these targets, on the running event loop; ``tour`` explains the demo's incident."""
    from tui.app import ConsoleApp, choose_ascii, choose_theme

    keepers: list[SeenKeeper] = []
    sessions: list[TargetSession] = []
    for number, address in enumerate(addresses):
        keeper = None
        if record is not None:
            from kvbm_console.cli import keep  # loads the writer of recordings, and with it the leader

            keeper = keep.SeenKeeper(keep.place_of(record, number + 1, len(addresses)))
            keepers.append(keeper)
        sessions.append(live_session(address, keeper=keeper))
    app = ConsoleApp(
        sessions[0], theme=choose_theme(theme, no_color), ascii_only=choose_ascii(ascii), read_only=read_only,
        more=sessions[1:], utc=utc, tour=tour,
    )
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, app.exit, 0)
    try:
        result = await app.run_async()
    finally:
        for keeper in keepers:
            keeper.close()
    status = result if result is not None else (app.return_code or 0)
    if not status:  # else the terminal may be gone, or take nothing
        for keeper in keepers:
            warn(keeper.told())
    return status


def live_session(address: "str | BrokerAddress", *, keeper: "object | None" = None) -> "TargetSession":
    """A session on a daemon, or on the events that a daemon publishes at a broker."""
    from kvbm_console.cli.ask import access, access_flags, who
    from kvbm_console.client import LiveControls, LiveFeed
    from tui.model.history import PAST_EVENTS
    from tui.source import TargetSession

    if not isinstance(address, str):
        from kvbm_console.client.published_feed import PublishedFeed

        return TargetSession(PublishedFeed(address, PAST_EVENTS), keeper=keeper)  # type: ignore[arg-type]
    shown = access()
    feed = LiveFeed(address, access=shown, past=PAST_EVENTS)
    return TargetSession(
        feed, LiveControls(address, name=who(), feed=feed, access=shown), socket=address,
        explain=explainer("--target", address, *access_flags()),
        what_if=what_if_searcher("--target", address, *access_flags()),
        keeper=keeper,  # type: ignore[arg-type]
    )


def explainer(*flags: str, path: Path | None = None) -> "Callable[[str], Awaitable[Explanation]]":
    """Runs ``why`` in a process of its own, because walking the evidence must not stop the screen."""
    async def explain(request: str) -> "Explanation":
        import msgspec

        from kvbm_console.analysis.explain import Explanation

        source = [] if path is None else [str(path)]
        said = await document_of("why", "--format", "json", *flags, "--", request, *source)
        return msgspec.convert(said, type=Explanation)

    return explain


def what_if_searcher(*flags: str, path: Path | None = None) -> "Search":
    """Runs ``why --what-if`` in a process of its own, which is killed when the search is cancelled."""
    async def search(request: str, tell: Callable[[str], None]) -> "Counterfactual":
        import msgspec

        from kvbm_console.planning.what_if import Counterfactual

        source = [] if path is None else [str(path)]
        said = await document_of("why", "--what-if", "--format", "json", *flags, "--", request, *source, tell=tell)
        return msgspec.convert(said, type=Counterfactual)

    return search


async def document_of(
    *arguments: str, statuses: tuple[int, ...] = (0,), tell: Callable[[str], None] | None = None
) -> Any:
    """The JSON that a command of ours prints, run in a process of its own. ``tell`` gets its lines of progress. Raises
    its last sentence."""
    import msgspec

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN_MAIN, *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    last = ""

    async def listen(lines: asyncio.StreamReader) -> None:
        nonlocal last
        async for line in lines:
            last = line.decode(errors="replace").strip() or last
            if tell is not None:
                tell(last)

    try:
        said, _, _ = await asyncio.gather(process.stdout.read(), listen(process.stderr), process.wait())
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode not in statuses:
        raise KvbmConsoleError(last or f"{arguments[0]} ended with status {process.returncode}")
    return msgspec.json.decode(said)
