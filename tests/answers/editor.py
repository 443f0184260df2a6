"""An editor for tests, over the pipes of the real program.

Requests are encoded, and answers and events are checked, by the client library ``dap-python``, which others maintain.
Its own reader expects a body in acknowledgements, which the protocol leaves out, so the envelopes are read here. The
protocol answers all kinds of breakpoints with the same body, of which the library has one right model.

Its targets of ``goto`` have texts for ids, where the protocol has numbers, so that model is not used.

Law of this file: every other body that the protocol defines is validated by the library's model of it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from dap import Client
from dap import events as event_models
from dap import responses as answer_models

from tests.cli.programs import PROGRAM

ANSWER_S: Final = 30
ANSWERS: Final = {
    "initialize": answer_models.Initialized, "threads": answer_models.ThreadsResponse,
    "stackTrace": answer_models.StackTraceResponse, "scopes": answer_models.ScopesResponse,
    "variables": answer_models.VariablesResponse, "source": answer_models.SourceResponse,
    "evaluate": answer_models.EvaluateResponse, "continue": answer_models.Continued,
    "dataBreakpointInfo": answer_models.DataBreakpointInfoResponse,
    "setFunctionBreakpoints": answer_models.SetBreakpointsResponse,
    "setDataBreakpoints": answer_models.SetBreakpointsResponse,
}


class Stopped(event_models.StoppedEvent):
    """The library's model, with numbers for the breakpoints as in the protocol."""

    hitBreakpointIds: list[int] | None = None  # type: ignore[assignment]


EVENTS: Final = {
    "initialized": event_models.InitializedEvent, "stopped": Stopped,
    "terminated": event_models.TerminatedEvent, "continued": event_models.ContinuedEvent,
    "output": event_models.OutputEvent,
}


class Mistake(Exception):
    """A request was refused, with the sentence that the editor shows."""


class Editor:
    """Sends requests, and waits for answers and events in their order."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._to, self._from = process, process.stdin, process.stdout
        self._client = Client("kvbm-console")
        self._client.send()  # the library initializes by itself; the tests do it where they look at the answer
        self._events: list[dict[str, Any]] = []

    @property
    def unread(self) -> list[str]:
        """The names of the events that came with answers and were not asked for yet."""
        return [message["event"] for message in self._events]

    async def hang_up(self) -> tuple[int | None, str]:
        """The editor is gone; exit status and stderr of the adapter."""
        self._to.close()
        _, complaint = await asyncio.wait_for(self._process.communicate(), ANSWER_S)
        return self._process.returncode, complaint.decode()

    async def _message(self) -> dict[str, Any]:
        header = await asyncio.wait_for(self._from.readuntil(b"\r\n\r\n"), ANSWER_S)
        message: dict[str, Any] = json.loads(await self._from.readexactly(int(header.split(b":")[1])))
        return message

    async def ask(self, command: str, **arguments: Any) -> Any:
        """A request; the body of its answer. Raises ``Mistake``."""
        number = self._client.send_request(command, arguments)
        self._to.write(bytes(self._client.send()))
        await self._to.drain()
        while (message := await self._message())["type"] == "event":
            self._events.append(message)
        assert (message["type"], message["request_seq"], message["command"]) == ("response", number, command)
        if not message["success"]:
            raise Mistake(message["message"])
        return message["body"] if command not in ANSWERS else ANSWERS[command].model_validate(message["body"])

    async def event(self, name: str) -> Any:
        """The next event of this name; others before it are passed over."""
        while True:
            message = self._events.pop(0) if self._events else await self._message()
            assert message["type"] == "event"
            body = EVENTS[message["event"]].model_validate(message["body"])
            if message["event"] == name:
                return body


@asynccontextmanager
async def editor() -> AsyncIterator[Editor]:
    """The program as an editor starts it."""
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "dap", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    try:
        yield Editor(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
