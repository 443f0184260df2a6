"""``kvbm-console serve``: the daemon.

Law of this file: the start-up line goes to stderr once the daemon can be connected to, the summary to stdout at its
end.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvbm_console.addresses import DEFAULT_SOCKET, socket_address
from kvbm_console.cli.machine import daemon_options, machine_line, recording_flags, workload_options
from kvbm_console.cli.output import print_result, warn
from kvbm_console.cli.params import FilePath, FloatRange, Listen, Name, Shard, format_option
from kvbm_console.cli.summary import carried_well, summary_text

if TYPE_CHECKING:
    from kvbm_console.engines.kv_events.address import Publisher
    from server.daemon import Daemon

THREADS_GRACE_S: Final = 0.2
"""For threads that are about to end, behind the summary."""


@click.command()
@click.option("--workload", metavar="SPEC",
              help="mooncake:FILE or multiturn[:key=value,...]; without it, engines connect by Feed.")
@click.option("--engine", "engines", metavar="ADDRESS", multiple=True,
              help="Follow a real engine's KV events: zmq:HOST:PORT[?replay=PORT&topic=NAME&ranks=N&bind=1], or "
                   "http://HOST:PORT to find them, or lmcache://HOST:PORT?model=NAME. May be given several times.")
@click.option("--shard", type=Shard(), metavar="K/N",
              help="With --engine: follow every N-th publisher of these engines, from the K-th on. N daemons, with K "
                   "from 1 to N, follow all of them, each in a process of its own.")
@click.option("--metrics", metavar="HOST:PORT",
              help="Serve Prometheus metrics at http://HOST:PORT/metrics: totals only, no request is named. Beyond the "
                   "loopback by https, for scrapers that show the token (Authorization: Bearer).")
@click.option("--otlp", metavar="ENDPOINT",
              help="Send the timelines of requests as OpenTelemetry spans to http://HOST:PORT (OTLP over HTTP).")
@click.option("--fleet", "broker", metavar="nats://HOST:PORT",
              help="Publish a summary of this daemon at a NATS broker, for kvbm-console fleet nats://HOST:PORT. The "
                   "form is nats://[USER:PASSWORD@]HOST[:PORT][/CLUSTER][?creds=FILE].")
@click.option("--fleet-events", is_flag=True,
              help="With --fleet: publish the events there, too, for rec dump when the daemon is gone.")
@click.option("--lake", type=FilePath(file_okay=False, path_type=Path), metavar="DIR",
              help="With --record DIR: add rows of the recording to this lake while it is written (kvbm-console lake).")
@click.option("--listen", type=Listen(), metavar="ADDRESS",
              help="unix:PATH, or HOST:PORT of the loopback (of any interface with TLS and a token).  "
                   "[default: the default socket]")
@click.option("--name", type=Name(), metavar="NAME", default="",
              help="Name of this daemon on screens and in status; the workload's or the engines' without it.")
@click.option("--tls-cert", type=FilePath(path_type=Path), metavar="FILE",
              help="Certificate chain in PEM form; with --tls-key, HOST:PORT speaks TLS.")
@click.option("--tls-key", type=FilePath(path_type=Path), metavar="FILE",
              help="Its private key, readable by its owner alone.")
@click.option("--token-file", type=FilePath(path_type=Path), metavar="FILE",
              help="Holds the token that grants control over TCP, readable by its owner alone.")
@click.option("--read-only", is_flag=True, help="No client may set breakpoints, continue, feed or record.")
@click.option("--breakpoints", type=FilePath(path_type=Path), metavar="FILE",
              help="Set the breakpoints of this file at the start, and keep those set with --persist in it.")
@click.option("--healthy-without-recorder", is_flag=True,
              help="The health service says SERVING though the recorder ended.")
@click.option("--hosts", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N",
              help="Deciders, each but the first in a process of its own, compared after every stimulus. A difference "
                   "ends the daemon and is told.")
@click.option("--exit-when-done", is_flag=True, help="End when the workload has ended.")
@click.option("--seconds", type=FloatRange(0, 1e7, min_open=True), metavar="N", help="End after N seconds.")
@format_option("text", "json")
@recording_flags
@workload_options
def serve(
    workload: str | None, engines: tuple[str, ...], listen: str | None, exit_when_done: bool, form: str,
    segment_size: str | None, segment_time: str | None, keep: str | None, sync: str, seconds: float | None, name: str,
    broker: str | None, shard: tuple[int, int] | None, **flags: Any,
) -> int:
    """The daemon: leader, engine, recorder and stream.

    With --workload it runs a simulated engine, with --engine it follows real ones, else engines connect by Feed.

    A recording loses nothing up to its written watermark when the process is killed, and nothing up to its synced
    watermark when the power fails. An end in order seals the last segment. The first SIGTERM or ctrl-c ends in order,
    within five seconds; the second ends at once. A terminal that is closed ends it in order, too, unless nohup is used.
    """
    if exit_when_done and workload is None:
        raise click.UsageError("--exit-when-done needs --workload: otherwise the daemon serves engines until stopped")
    if engines and workload is not None:
        raise click.UsageError("--engine follows a real engine, --workload runs a simulated engine: give only one flag")
    if shard is not None and not engines:
        raise click.UsageError("--shard needs --engine: it divides the publishers of engines")
    from kvbm_console.cli.streams import find_publishers
    from kvbm_console.client.broker import broker_address
    from kvbm_console.recording.options import recording_options

    publishers = tuple(
        publisher for address in engines for publisher in find_publishers(address, wait=True, seconds=seconds)
    )
    if shard is not None:
        publishers = _part(publishers, *shard)
    recording = recording_options(segment_size=segment_size, segment_time=segment_time, keep=keep, sync=sync)
    options = daemon_options(
        workload=workload, listen=listen or socket_address(DEFAULT_SOCKET), exit_when_done=exit_when_done,
        recording=recording, publishers=publishers, target=name,
        fleet=None if broker is None else broker_address(broker, "--fleet"), **flags,
    )
    import msgspec

    from kvbm_console.cli.ask import run
    from server.daemon import run_daemon

    def ready(daemon: "Daemon") -> None:
        warn(f"serving on {daemon.address}: {machine_line(options)}")
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, daemon.stop)

    before = threading.enumerate()
    summary = msgspec.to_builtins(run(run_daemon(options, on_ready=ready)))
    print_result(form, summary, lambda: summary_text(summary).split("\n"))
    status = 0 if carried_well(summary["carried"]) else 1
    _end_without_stuck_threads(before, status)
    return status


def _part(publishers: "tuple[Publisher, ...]", part: int, parts: int) -> "tuple[Publisher, ...]":
    """The publishers of this shard. Raises ``UsageError`` if it has none."""
    if parts > len(publishers):
        raise click.UsageError(f"--shard must have at most {len(publishers)} parts, one a publisher, got {parts}")
    return publishers[part - 1 :: parts]


def _end_without_stuck_threads(before: Collection[threading.Thread], status: int) -> None:
    """End the process at once if threads of this command still wait for a disk; Python would wait for them for ever."""
    until = time.monotonic() + THREADS_GRACE_S
    begun = [thread for thread in threading.enumerate() if not thread.daemon and thread not in before]
    for thread in begun:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in begun):
        sys.stdout.flush()
        os._exit(status)
