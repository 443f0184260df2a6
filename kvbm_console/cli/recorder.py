"""``kvbm-console rec start, stop, rotate, status, dump``: the recorder of a running daemon.

Law of this file: paths that the daemon writes to are made absolute here, in the user's directory. This process writes
``dump``, from events that any observer may read.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from kvbm_console.cli.machine import recording_flags
from kvbm_console.cli.output import duration, number, print_result
from kvbm_console.cli.params import Duration, FilePath, format_option, resolve_target, target_option

if TYPE_CHECKING:
    from kvbm_console.client import Client
    from kvbm_console.client.broker import BrokerAddress
    from kvbm_console.recording.options import RecorderStatus
    from kvbm_console.recording.output import Made
    from kvbm_console.recording.reader import Recording

LAST_NS_MAX = 24 * 3_600 * 10**9
"""Longest past to ask for. A daemon's ring covers minutes, so a day is ample."""


@click.command()
@click.argument("place", metavar="FILE.mcap-or-DIR", type=FilePath(path_type=Path))
@recording_flags
@target_option
@format_option("text", "json")
def start(
    place: Path, segment_size: str | None, segment_time: str | None, keep: str | None, sync: str,
    target: str | None, form: str,
) -> None:
    """Let a running daemon record into a new file or a directory on its own machine.

    A file is one segment, sealed and named when the recording ends; until then its parts are in FILE.mcap.parts.
    """
    from kvbm_console.cli.ask import ask
    from kvbm_console.recording.options import recording_options

    options = recording_options(segment_size=segment_size, segment_time=segment_time, keep=keep, sync=sync)
    path = str(place.absolute())
    _tell(ask(resolve_target(None, target), lambda client: client.record_start(path, options)), form)


def _verb(name: str, text: str, request: "Callable[[Client], Awaitable[RecorderStatus | None]]") -> click.Command:
    """A command that asks the recorder of a daemon and prints its status."""

    def carry_out(target: str | None, form: str) -> None:
        from kvbm_console.cli.ask import ask

        _tell(ask(resolve_target(None, target), request), form)

    return click.command(name=name, help=text)(target_option(format_option("text", "json")(carry_out)))


stop = _verb("stop", "End the recording: everything that was published until now is in it, written and synced.",
             lambda client: client.record_stop())
rotate = _verb("rotate", "Begin a new segment; the old segment is sealed.", lambda client: client.record_rotate())
status = _verb("status", "The daemon's recording: its place, its progress, and the events that it had to drop.",
               lambda client: client.record_status())


@click.command()
@click.argument("path", metavar="FILE.mcap-or-DIR", type=FilePath(path_type=Path))
@click.option("--last", type=Duration(10**6, LAST_NS_MAX, "from 1ms to 24h"), default="60s", show_default=True,
              metavar="TIME", help="How much of the engine's time.")
@target_option
@format_option("text", "json")
def dump(path: Path, last: int, target: str | None, form: str) -> None:
    """Write the events that a daemon still holds to a new file or directory; it need not have recorded.

    The file has facts and events only, so the state replays and decisions do not. A busy daemon may hold less than
    --last asks for; the command prints the range that it wrote. With --target nats://HOST:PORT/CLUSTER?daemon=NAME the
    events come from a broker, also when the daemon is gone (serve --fleet-events).
    """
    from kvbm_console.cli.ask import ask, run
    from kvbm_console.client.broker import SCHEMES, broker_address
    from kvbm_console.recording.output import require_new

    require_new(path)
    if target is not None and target.startswith(SCHEMES):
        made = run(_dump_published(broker_address(target, "--target", daemon=True), path, last))
    else:
        made = ask(resolve_target(None, target), lambda client: _dump(client, path, last))
    print_made(form, made)


def print_made(form: str, made: "Made", note: str = "; state replay only", *, clock: str = " of the engine") -> None:
    """The file or directory that a command has written; ``clock`` says whose time the duration is."""
    print_result(form, made, lambda: [
        f"{made.path}  events {number(made.first_seq)} to {number(made.last_seq)}, "
        f"{duration(made.last_ns - made.first_ns)}{clock}, {number(made.bytes)} bytes{note}"
    ])


@contextmanager
def replayable(path: Path | None, target: str | None, run: str | None) -> "Iterator[Recording]":
    """The recording at ``path``, else that of the target's own recorder where it lies on this machine, else the events
    that the target still holds, in a file that is removed behind the block."""
    from kvbm_console.cli.ask import ask, check_one_source
    from kvbm_console.recording.reader import Recording

    check_one_source(path, target, run)
    if path is not None:
        yield Recording.open(path, run)
        return

    async def own(client: "Client") -> Recording | None:
        recorder = await client.record_status()
        incarnation = (await client.hello()).incarnation
        return None if recorder is None else Recording.of_daemon(Path(recorder.path), incarnation)

    address = resolve_target(None, target)
    recording = ask(address, own)
    if recording is not None:
        yield recording
        return
    with TemporaryDirectory(prefix="kvbm-") as place:
        file = Path(place) / "ring.mcap"
        ask(address, lambda client: _dump(client, file, LAST_NS_MAX))
        yield Recording.open(file)


async def _dump(client: "Client", path: Path, last_ns: int) -> "Made":
    from kvbm_console.cli.keep import config_of
    from kvbm_console.cli.output import program_version
    from kvbm_console.core.errors import ConnectionLost
    from kvbm_console.core.events import Event
    from kvbm_console.core.state import CacheState
    from kvbm_console.recording.format import About
    from kvbm_console.recording.output import write_dump
    from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken

    hello = await client.hello()
    next_seq, _ = await client.digest()
    state: CacheState | None = None
    batches: list[list[Event]] = []
    async with client.subscribe(history=True) as items:
        async for item in items:
            if isinstance(item, SnapshotTaken):
                state, batches = item.state, []
            elif isinstance(item, EventsArrived):
                batches.append(item.events)
            elif isinstance(item, GapSeen):
                state = None  # the ring dropped these events while we read, so a newer snapshot follows
            reached = state.seq if state is not None else 0
            if state is not None and (batches[-1][-1].seq + 1 if batches else reached) >= next_seq:
                break
    if state is None:
        raise ConnectionLost(f"{client.target} ended before it had told its facts")
    about = About(
        program=program_version(), incarnation=hello.incarnation, config=hello.leader_config or config_of(state),
        clock_anchor_ns=hello.clock_anchor_ns, labels={"target": hello.target, "made_by": "rec dump"},
    )
    return write_dump(path, about, state, batches, last_ns)


async def _dump_published(address: "BrokerAddress", path: Path, last_ns: int) -> "Made":
    from kvbm_console.cli.keep import config_of
    from kvbm_console.cli.output import program_version
    from kvbm_console.client.broker import Broker
    from kvbm_console.client.event_stream import PublishedEvents
    from kvbm_console.core.errors import ConnectionLost
    from kvbm_console.core.events import Event
    from kvbm_console.core.state import CacheState
    from kvbm_console.recording.format import About
    from kvbm_console.recording.output import write_dump
    from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken

    state: CacheState | None = None
    batches: list[list[Event]] = []
    async with Broker(address, "rec dump") as broker:
        events = PublishedEvents(broker, address.daemon)
        async for item in events.items():
            if isinstance(item, SnapshotTaken):
                state, batches = item.state, []
            elif isinstance(item, EventsArrived):
                batches.append(item.events)
            elif isinstance(item, GapSeen):
                state = None  # a newer snapshot follows
    if state is None:
        raise ConnectionLost(f"{address.shown} has no events of a daemon {address.daemon}")
    about = About(
        program=program_version(), incarnation=events.incarnation, config=config_of(state),
        clock_anchor_ns=events.clock_anchor_ns, labels={"target": address.daemon, "made_by": "rec dump"},
    )
    return write_dump(path, about, state, batches, last_ns)


def _tell(status: "RecorderStatus | None", form: str) -> None:
    print_result(form, status, lambda: ["nothing is being recorded"] if status is None else _status_lines(status))


def _status_lines(status: "RecorderStatus") -> list[str]:
    line = (f"{status.state}  segment {status.segment}  {number(status.bytes)} bytes  written up to event "
            f"{number(status.written_seq)}  synced up to {number(status.synced_seq)}")
    if status.not_recorded:
        line += f"  {number(status.not_recorded)} events not recorded"
    if status.reason:
        line += f"  ({status.reason})"
    if status.removed_segments:
        line += f"  {number(status.removed_segments)} old segments removed"
    return [line, status.path]
