"""The bridge from commands to the asynchronous client library and to the console.

Law of this file: grpc and textual are imported inside the functions, and an error inside a task group comes out as
itself. A session of a command has no lease, so its breakpoints belong to the daemon and outlive the command.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvbm_console.cli.params import resolve_target
from kvbm_console.stream.feed import Disconnected, FeedItem

if TYPE_CHECKING:
    from kvbm_console.analysis.walk import Evidence
    from kvbm_console.client import Access, Client, ControlSession
    from kvbm_console.core.config import LeaderConfig
    from kvbm_console.recording.reader import Item
    from kvbm_console.stream.verbs import Verb

T = TypeVar("T")

SHELL: Final = "shell"
"""The name of clients that ask a single question."""
WHO_CHARS_MAX: Final = 48
"""Bytes of a client's name on the record. The daemon takes 64, and a console appends a number."""


def who() -> str:
    """``user@host``: the name under which the target records this user's verbs."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = "somebody"
    name = f"{user}@{socket.gethostname()}"[:WHO_CHARS_MAX]
    return "".join(character if character.isascii() and character.isprintable() else "?" for character in name)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on an event loop of its own."""
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as group:
        raise alone(group) from None


def alone(error: BaseException) -> BaseException:
    """The error inside groups that hold a single error, else the group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def access() -> "Access":
    """The access that the command's ``--tls-ca`` and ``--token-file`` state."""
    import click

    from kvbm_console.cli.params import TLS_CA, TOKEN_FILE
    from kvbm_console.client import Access

    context = click.get_current_context(silent=True)
    said = {} if context is None else context.meta
    return Access.load(said.get(TLS_CA), said.get(TOKEN_FILE))


def access_flags() -> list[str]:
    """The same flags again, for a command that this command starts."""
    import click

    from kvbm_console.cli.params import TLS_CA, TOKEN_FILE

    context = click.get_current_context(silent=True)
    said = {} if context is None else context.meta
    flags = (("--tls-ca", said.get(TLS_CA)), ("--token-file", said.get(TOKEN_FILE)))
    return [part for flag, file in flags if file is not None for part in (flag, str(file))]


def ask(target: str, question: "Callable[[Client], Awaitable[T]]") -> T:
    """Open a connection, ask one question, close."""
    from kvbm_console.client import Client

    async def work() -> T:
        async with Client(target, name=SHELL, access=access()) as client:
            return await question(client)

    return run(work())


def fetch_status(target: str, slot_filter: str = "") -> dict[str, Any]:
    """The status document, with the slots for which the expression holds (empty: all)."""
    return ask(target, lambda client: client.status(slot_filter))


def control(target: str, request: "Callable[[ControlSession], Awaitable[T]]") -> T:
    """Requests of a session without a lease."""

    async def work(client: "Client") -> T:
        async with client.control(who(), lease=False) as session:
            return await request(session)

    return ask(target, work)


def carry_out(target: str, verb: "Verb[T]") -> T:
    """One verb of a session without a lease; its answer."""
    return control(target, lambda session: session.ask(verb))


async def standing_still(client: "Client", breakpoint_id: int | None = None) -> list[dict[str, Any]]:
    """Wait until a slot stands still, for this breakpoint if it is named. Returns the rows of the holds that stand
    still."""
    from kvbm_console.client import Ended
    from kvbm_console.core.errors import ConnectionLost
    from kvbm_console.core.events import HoldParked
    from kvbm_console.stream.feed import BatchArrived, Heartbeat

    async def held() -> tuple[list[dict[str, Any]], int, str]:
        status = await client.status()
        rows = [
            row for row in status["holds"]
            if not row["pending"] and (breakpoint_id is None or str(breakpoint_id) in row["breakpoints"])
        ]
        return rows, status["stream"]["head_seq"], status["stream"]["incarnation"]

    rows, head_seq, incarnation = await held()
    if rows:
        return rows
    async with client.subscribe(after_seq=head_seq, incarnation=incarnation) as items:
        items.unread = True
        async for item in items:
            if isinstance(item, Ended):
                raise ConnectionLost(f"{client.target} ended after event {item.last_seq}: {item.reason}")
            if isinstance(item, Heartbeat) or (
                isinstance(item, BatchArrived) and not item.batch.may_have([HoldParked])
            ):
                continue
            rows, _, _ = await held()
            if rows:
                return rows
    raise ConnectionLost(f"{client.target} ended the stream")


RETRY_S: Final = 0.1
"""Pause between two attempts to reach a daemon that has just been started; a person does not notice the delay."""


def wait(target: str, seconds: float, work: "Callable[[Client], Awaitable[T]]") -> T | None:
    """Run ``work`` on a connection for at most ``seconds``; None when the time is over.

    A daemon that does not listen yet has the same time to begin; then ``ConnectionLost`` says that there is none.
    """
    from kvbm_console.client import Client
    from kvbm_console.core.errors import ConnectionLost

    async def patient() -> T | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            async with Client(target, name=SHELL, access=access()) as client:
                try:
                    await client.hello()
                except ConnectionLost:
                    if loop.time() + RETRY_S >= until:
                        raise
                    await asyncio.sleep(RETRY_S)
                    continue
                try:
                    async with asyncio.timeout_at(until):
                        return await work(client)
                except TimeoutError:
                    return None

    return run(patient())


async def follow(target: str, after_seq: int | None, incarnation: str) -> AsyncIterator[FeedItem]:
    """The items of a subscription behind ``after_seq``; the last item says why it ended.

    None begins with a snapshot, which may be some thousand events old.
    """
    from kvbm_console.client import Client, Ended

    async with (
        Client(target, name="tail", access=access()) as client,
        client.subscribe(after_seq=after_seq, incarnation=incarnation) as items,
    ):
        async for item in items:
            if isinstance(item, Ended):
                yield Disconnected(f"{target} ended after event {item.last_seq}: {item.reason}", None)
                return
            yield item


async def check_target(target: str) -> None:
    """Raise ``ConnectionLost`` or ``Refused`` unless a daemon of our version answers."""
    from kvbm_console.client import Client

    async with Client(target, access=access()) as client:
        await client.hello()

# --- evidence of why and doctor ---


RECORDING: Final = click.argument("path", metavar="[DIR-or-FILE]", required=False,
                                  type=click.Path(exists=True, path_type=Path))
RUN: Final = click.option("--run", metavar="ID",
                          help="The run of a recording, by its incarnation.  [default: the last]")


def evidence_from(path: Path | None, target: str | None, run: str | None = None) -> "Evidence":
    """The recording at ``path``, else what the target's ring holds. Raises ``UsageError`` or ``ConnectionLost``."""
    if path is None and run is not None:
        raise click.UsageError("--run names a run of a recording, and none is given")
    if path is not None and target is not None:
        raise click.UsageError(f"give a recording or --target, not both: {path} and {target!r}")
    if path is None:
        return live_evidence(resolve_target(None, target))
    from kvbm_console.analysis.walk import evidence_of
    from kvbm_console.recording.reader import Recording

    return evidence_of(Recording.open(path, run))


def live_evidence(target: str) -> "Evidence":
    """The part of a daemon's past that its ring still holds."""
    from kvbm_console.analysis.walk import Evidence

    items, config, now_ns = ask(target, _collect)
    count = sum(len(getattr(item, "events", ())) for item in items)
    return Evidence(target, config, count, _copies(items), lambda _seq: {}, now_ns=now_ns)


def _copies(items: "list[Item]") -> "Callable[[], Iterator[Item]]":
    """The items for each walk anew, because a walk changes the facts of a snapshot."""
    from kvbm_console.core.snapshots import decode_facts, encode_facts
    from kvbm_console.stream.feed import SnapshotTaken

    kept = [encode_facts(item.state) if isinstance(item, SnapshotTaken) else item for item in items]

    def again() -> "Iterator[Item]":
        for item in kept:
            yield SnapshotTaken(decode_facts(item)) if isinstance(item, bytes) else item

    return again


async def _collect(client: "Client") -> "tuple[list[Item], LeaderConfig | None, int]":
    """The items from the daemon's oldest facts up to its next heartbeat, and the engine's time of that heartbeat."""
    from kvbm_console.core.errors import ConnectionLost
    from kvbm_console.stream.feed import EventsArrived, GapSeen, Heartbeat, SnapshotTaken

    hello = await client.hello()
    next_seq, _ = await client.digest()
    items: list[Item] = []
    reached = 0
    async with client.subscribe(history=True) as stream:
        async for item in stream:
            if isinstance(item, SnapshotTaken):
                items, reached = [item], item.state.seq
            elif isinstance(item, EventsArrived):
                items.append(item)
                reached = item.events[-1].seq + 1
            elif isinstance(item, GapSeen):
                items = []  # the daemon forgot more while we read: the evidence begins with its newer snapshot
            elif isinstance(item, Heartbeat) and items and reached >= next_seq:
                return items, hello.leader_config, item.at_ns
    raise ConnectionLost(f"{client.target} ended before it had told its past")
