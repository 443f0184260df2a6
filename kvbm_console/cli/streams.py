"""``rec capture`` and ``rec import``: event streams to files, and files to recordings.

Law of this file: an import reports unreadable and missing data, and writes only into an empty directory.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kvbm_console.cli.output import number, print_result, progress, share, table, warn
from kvbm_console.cli.params import FilePath, FloatRange, format_option
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import ConnectionLost, UsageError

if TYPE_CHECKING:
    from kvbm_console.engines.dynamo import DynamoImported
    from kvbm_console.engines.kv_events.address import Publisher
    from kvbm_console.engines.kv_events.capture import Listener
    from kvbm_console.engines.kv_events.zmq_source import AnySource
    from kvbm_console.service import LeaderService

SETTLE_BYTES: Final = 8 * 2**20
"""Bytes handed to the recorder between two waits: an eighth of its queue."""
LINE_EVERY_S: Final = 1.0
ASK_AGAIN_S: Final = 0.5
"""Pause between two attempts to reach an engine, which takes a minute to load a model."""


class Imported(msgspec.Struct, frozen=True):
    """The document of ``rec import kv-events``: a stable contract."""

    frames: int
    publishers: int
    stored_blocks: int
    removed_blocks: int
    resident_blocks: dict[str, int]
    """By medium, at the end."""
    unknown_events: int
    malformed_events: int
    bad_payloads: int
    lost_batches: int
    restarts: int
    refused_blocks: int
    events: int
    path: str


@click.command(name="kv-events")
@click.argument("path", metavar="FILE", type=FilePath(path_type=Path, exists=True))
@click.option("--out", metavar="FILE.mcap|DIR", required=True, type=FilePath(path_type=Path),
              help="The recording to write: a new file, or a new or empty directory.")
@format_option("text", "json")
def import_kv_events(path: Path, out: Path, form: str) -> None:
    """A capture of KV events (frames.bin, or the directory that holds it) as a recording."""
    found = import_capture(path, out)
    print_result(form, found, lambda: _imported_lines(found))


def _imported_lines(report: Imported) -> list[str]:
    lines = [f"{number(report.frames)} frames of {report.publishers} publishers: {number(report.stored_blocks)} blocks "
             f"stored, {number(report.removed_blocks)} removed; {number(report.events)} events in {report.path}"]
    lines += [f"{medium:<12} {number(blocks)} blocks at the end" for medium, blocks in report.resident_blocks.items()]
    counts = (
        (report.unknown_events, "events of kinds that this version does not know"),
        (report.malformed_events, "events that could not be read"),
        (report.bad_payloads, "frames that could not be read"),
        (report.lost_batches, "batches are missing"), (report.restarts, "restarts of a publisher"),
        (report.refused_blocks, "blocks beyond this program's limits"),
    )
    return lines + [f"{number(count)} {noun}" for count, noun in counts if count]


@click.command()
@click.argument("address", metavar="zmq://HOST:PORT[?replay=PORT&topic=NAME&ranks=N]")
@click.option("--out", metavar="DIR", required=True, type=FilePath(path_type=Path, file_okay=False),
              help="Directory of frames.bin; with several publishers it has a directory for each rank.")
@click.option("--seconds", type=FloatRange(0, 1e7, min_open=True), metavar="N", help="End after N seconds.")
@click.option("--batches", type=click.IntRange(1), metavar="N", help="End after N batches.")
@format_option("text", "json")
def capture(address: str, out: Path, seconds: float | None, batches: int | None, form: str) -> None:
    """Write an engine's event stream to a file, without a console, until ctrl-c.

    Make a recording of it with rec import kv-events.
    """
    from kvbm_console.cli.ask import run

    if out.suffix == ".mcap":
        raise UsageError(f"--out must be a directory, got {out}; rec import kv-events makes a recording of a capture")
    listeners = run(_capture(find_publishers(address), out, seconds, batches))
    for listener in listeners:
        listener.writer.close()
    print_result(form, [_captured(listener) for listener in listeners], lambda: [
        f"{listener.writer.path}  {number(listener.writer.frames)} frames, {number(listener.writer.bytes)} bytes, "
        f"{_blocks(listener)}" for listener in listeners
    ])


class Captured(msgspec.Struct, frozen=True):
    """One publisher of ``rec capture``."""

    path: str
    frames: int
    bytes: int
    resident_blocks: dict[str, int]
    """By medium, at the end."""
    lost_batches: int
    unreadable: int


def _captured(listener: "Listener") -> Captured:
    return Captured(
        str(listener.writer.path), listener.writer.frames, listener.writer.bytes, listener.resident_blocks(),
        listener.counts.lost_batches, _unread(listener),
    )


def find_publishers(address: str, *, wait: bool = False, seconds: float | None = None) -> "list[Publisher]":
    """The publishers of a ``zmq://`` address, or of the engine at an ``http://`` address. Raises ``UsageError``.

    With ``wait`` an engine that does not answer yet is asked again until it does, or for so many seconds.
    """
    if address.startswith(("http://", "https://")):
        from kvbm_console.engines.discovery import advice, discover

        ends = None if seconds is None else time.monotonic() + seconds
        said = False
        while True:
            try:
                publishers = discover(address)
                break
            except ConnectionLost as error:
                if not wait or (ends is not None and time.monotonic() >= ends):
                    raise
                if not said:
                    warn(f"{error}; asking again until it does, ctrl-c ends it")
                    said = True
            time.sleep(ASK_AGAIN_S)
        if note := advice(publishers):
            warn(f"note: {note}")
        return publishers
    from kvbm_console.engines.kv_events.address import parse_publishers

    return parse_publishers(address)


# --- import ---


def import_capture(path: Path, out: Path) -> Imported:
    """Feed a capture to a leader and record the outcome in a new file or directory. Raises ``UsageError``."""
    from kvbm_console.cli.output import program_version
    from kvbm_console.engines.kv_events.capture import CaptureStreams, read_frames
    from kvbm_console.recording.output import RecordingPath, require_new
    from kvbm_console.recording.writer import Recorder
    from kvbm_console.service import LeaderService

    require_new(out, "--out")
    place = RecordingPath(out)
    frames = read_frames(path)
    first = next(frames, None)
    if first is None:
        raise UsageError(f"{path} holds no frame")
    streams = CaptureStreams()
    service = LeaderService(LeaderConfig(), lambda: streams.now_ns)
    count = pending = 0

    def take(frame: Any) -> None:
        streams.take(frame, service.dispatcher, service.new_source)

    recorder = Recorder(
        place.directory, config=service.config, incarnation=service.incarnation, keyframe=service.keyframe,
        facts=service.facts, program=program_version(), labels={"target": f"capture {path.name}"}, sync_interval_s=None,
        clock_anchor_ns=_anchor(first.received), **place.settings,
    )
    service.recorder = recorder
    try:
        service.start()
        take(first)
        for count, frame in enumerate(frames, start=1):  # noqa: B007
            take(frame)
            pending += len(frame.payload)
            if pending > SETTLE_BYTES:
                service.broadcaster.flush()
                recorder.settle()
                pending = 0
        service.close()
    finally:
        recorder.close()
    return _imported(service, streams, count + 1, place.finish() or place.directory)


def _anchor(received: float) -> int | None:
    return round(received * 1e9) if 0 < received < 1e10 else None


def _imported(service: "LeaderService", streams: Any, frames: int, directory: Path) -> Imported:
    counts = [stream.counts for stream in streams.streams.values()]
    resident: dict[str, int] = {}
    for pool in service.state.pools:
        resident[pool.info.medium] = resident.get(pool.info.medium, 0) + pool.resident_blocks
    names = ("stored_blocks", "removed_blocks", "unknown_events", "malformed_events", "bad_payloads", "lost_batches",
             "restarts", "refused_blocks")
    sums = {name: sum(getattr(one, name) for one in counts) for name in names}
    return Imported(
        frames=frames, publishers=len(counts), resident_blocks=resident, events=service.state.seq,
        path=str(directory), **sums,
    )


# --- capture ---


async def _capture(
    publishers: "list[Publisher]", out: Path, seconds: float | None, batches: int | None
) -> "list[Listener]":
    import anyio

    from kvbm_console.engines.kv_events.address import names_of
    from kvbm_console.engines.kv_events.capture import Listener
    from kvbm_console.engines.kv_events.zmq_source import new_context, source_of

    listeners: list[Listener] = []
    sources: list[AnySource] = []
    for publisher in publishers:
        listener = Listener(out if len(publishers) == 1 else out / f"rank{publisher.dp_rank}")
        listeners.append(listener)
        sources.append(source_of(publisher, _always(listener), on_frame=listener.writer.write))
    context = new_context(len(sources))
    try:
        for source in sources:
            source.open(context)
        async with anyio.create_task_group() as group, ended_by_signal() as stopped:
            for source in sources:
                group.start_soon(source.run)
            warn(f"capturing {names_of(publishers)} to {out}; ctrl-c ends it")
            await until_over(
                stopped, seconds,
                lambda: batches is not None and sum(listener.writer.frames for listener in listeners) >= batches,
                lambda: _tell(listeners, sources),
            )
            group.cancel_scope.cancel()
    finally:
        context.destroy(linger=0)
    return listeners


@asynccontextmanager
async def ended_by_signal() -> AsyncIterator[asyncio.Event]:
    """An event that ctrl-c, SIGTERM and a closed terminal set, in place of their usual effect."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
               if signal.getsignal(one) is not signal.SIG_IGN]
    for each in numbers:
        loop.add_signal_handler(each, stopped.set)
    try:
        yield stopped
    finally:
        for each in numbers:
            loop.remove_signal_handler(each)


def _always(listener: "Listener") -> "Callable[[str], Listener]":
    return lambda _topic: listener


async def until_over(
    stopped: asyncio.Event, seconds: float | None, done: Callable[[], bool], tell: Callable[[], None]
) -> None:
    """Wait until ``stopped``, until ``seconds`` are over or until ``done``; call ``tell`` each second."""
    ends = None if seconds is None else time.monotonic() + seconds
    told = time.monotonic()
    while not stopped.is_set() and not done():
        left = 0.05 if ends is None else min(0.05, ends - time.monotonic())
        if left <= 0:
            return
        try:
            async with asyncio.timeout(left):
                await stopped.wait()
        except TimeoutError:
            pass
        if time.monotonic() - told >= LINE_EVERY_S:
            told = time.monotonic()
            tell()


def _tell(listeners: "list[Listener]", sources: "list[AnySource]") -> None:
    """Print the progress of a capture on stderr."""
    for listener, source in zip(listeners, sources, strict=True):
        listener.writer.flush()
        state = "connected" if source.status.connected else "not connected"
        warn(f"{source.publisher.label}  {state}, {number(listener.writer.frames)} frames, {_blocks(listener)}")


def _unread(listener: "Listener") -> int:
    """Messages and events that could not be read."""
    return listener.counts.bad_payloads + listener.counts.malformed_events


def _blocks(listener: "Listener") -> str:
    """Residency by medium, and the reasons to doubt the counts."""
    media = listener.resident_blocks()
    resident = ", ".join(f"{medium} {number(count)}" for medium, count in media.items()) or "no block"
    counts, unreadable = listener.counts, _unread(listener)
    lost = f"; {number(counts.lost_batches)} batches lost, so counts are not certain" if counts.lost_batches else ""
    if not lost and counts.doubts:
        lost = "; the publisher was away for a while, so counts are not certain"
    unread = f"; {number(unreadable)} could not be read" if unreadable else ""
    return f"{resident} resident{lost}{unread}"


@click.group("import")
def import_group() -> None:
    """Convert another tool's recording."""


import_group.add_command(import_kv_events)


@import_group.command()
@click.argument("path", metavar="FILE", type=FilePath(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=FilePath(path_type=Path), metavar="FILE.mcap|DIR",
              help="The recording to write: a new file, or a new or empty directory.")
@click.option("--block-tokens", type=click.IntRange(1, 65_536), metavar="N",
              help="Tokens in a block; without it found from the recording.")
@click.option("--g2-blocks", type=click.IntRange(0, 2**31 - 1), default=8_192, show_default=True, metavar="N",
              help="Capacity of our host tier.")
@click.option("--g3-blocks", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, metavar="N",
              help="Capacity of our disk tier.")
@format_option("text", "json")
def dynamo(path: Path, out: Path, block_tokens: int | None, g2_blocks: int, g3_blocks: int, form: str) -> None:
    """Drive our leader with a Dynamo leader recording (JSON lines).

    The engine's calls are theirs, every decision is ours: look-ups and finishes that were answered otherwise are
    counted and listed. Copies arrive at once, since the recording does not tell when they did.
    """
    from kvbm_console.core.config import LeaderConfig
    from kvbm_console.core.errors import UsageError
    from kvbm_console.engines.dynamo import import_dynamo, infer_block_tokens

    size = block_tokens or infer_block_tokens(path)
    if size is None:
        raise UsageError(f"the block size of {path} cannot be found; say it with --block-tokens")
    config = LeaderConfig(block_tokens=size, g2_blocks=g2_blocks, g3_blocks=g3_blocks, offload_threshold=0.0)
    imported = import_dynamo(path, out, config, progress=progress())
    print_result(form, imported, lambda: _lines(imported))


def _lines(imported: "DynamoImported") -> list[str]:
    report = imported.report
    lines = [
        f"{imported.made.path}  {number(imported.made.events)} events from {number(report.lines)} calls of "
        f"{number(report.requests)} requests, blocks of {imported.block_tokens}",
        f"look-ups  {number(report.lookups_equal)} of {number(report.lookups)} answered alike "
        f"({share(report.lookups_equal, report.lookups)}); matched {number(report.theirs_matched_tokens)} tokens "
        f"there, {number(report.ours_matched_tokens)} here",
        f"finishes  {number(report.finishes_equal)} of {number(report.finishes)} answered alike",
    ]
    if report.preempted:
        lines.append(f"preempted {number(report.preempted)} requests that the recording shows only by what followed")
    if report.refused:
        lines.append(f"refused   {number(report.refused)} calls")
    if report.passed_over:
        told = ", ".join(f"{number(times)} {action}" for action, times in sorted(report.passed_over.items()))
        lines.append(f"passed    {told}")
    if report.others:
        lines += ["", *table(
            ("LINE", "CALL", "REQUEST", "THERE", "HERE"),
            [(number(other.line), other.action, other.request, other.theirs, other.ours) for other in report.others],
            right=(0,),
        )]
    return lines
