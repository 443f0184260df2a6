"""The bridge from commands to the asynchronous client library and to the console.

Law of this file: grpc and textual are imported inside the functions, and an error inside a task group comes out as
itself. A session of a command has no lease, so its breakpoints belong to the daemon and outlive the command.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvbm_console.cli.params import FilePath, resolve_target, typed
from kvbm_console.stream.feed import Disconnected, FeedItem

if TYPE_CHECKING:
    from kvbm_console.analysis.walk import Evidence
    from kvbm_console.client import Access, Client, ControlSession
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
                                  type=FilePath(exists=True, path_type=Path))
RUN: Final = click.option("--run", metavar="ID",
                          help="The run of a recording, by its incarnation.  [default: the last]")


def check_one_source(path: Path | None, target: str | None, run: str | None) -> None:
    """Refuse a recording beside a target, and a run without a recording."""
    if path is None and typed("run", run) is not None:
        raise click.UsageError("--run names a run of a recording, and none is given")
    if path is not None and typed("target", target) is not None:
        raise click.UsageError(f"give a recording or --target, not both: {path} and {target!r}")


def evidence_from(path: Path | None, target: str | None, run: str | None = None) -> "Evidence":
    """The recording at ``path``, else what the target's ring holds. Raises ``UsageError`` or ``ConnectionLost``."""
    check_one_source(path, target, run)
    if path is None:
        return live_evidence(resolve_target(None, target))
    from kvbm_console.analysis.walk import evidence_of
    from kvbm_console.recording.reader import Recording

    return evidence_of(Recording.open(path, run))


def live_evidence(target: str) -> "Evidence":
    """The part of a daemon's past that its ring still holds."""
    from kvbm_console.client.past import live_evidence as evidence

    return ask(target, evidence)
