"""One debugger session on one stream, with the heartbeat that keeps its lease.

Law of this file: a request ends with its own reply or with an exception. One task reads the stream, and one coroutine
at a time writes it. No timeout ever cuts a read or a write, so only the wait for the reply is bounded.
"""

import asyncio
from types import TracebackType
from typing import Any, Final, Self

from google.protobuf.message import DecodeError

from kvbm_console.client.questions import END, require_role, translating
from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError, Refused
from kvbm_console.debug.leases import LEASE_RENEW_S
from kvbm_console.stream.verbs import A, OpenSession, RenewLease, Verb
from kvbm_console.wire.convert import control_answer, struct_to_message
from kvbm_console.wire.protocol import method_path
from kvbm_console.wire.v1 import console_pb2 as pb

REPLY_S: Final = 10.0
"""Bound of the wait for a reply. A living daemon answers within milliseconds."""


class ControlSession:
    """A session, as an asynchronous context manager; its requests are the verbs of ``stream.verbs``.

    ``owner`` is the name under which its breakpoints and holds appear. Requests may be made from several tasks.
    """

    def __init__(self, channel: Any, target: str, name: str, *, lease: bool, owner: str = "") -> None:
        self.owner = owner
        self.lease_ttl_ns = 0
        self._channel = channel
        self._target = target
        self._name = name
        self._lease = lease
        self._call: Any = None
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[pb.ControlReply]] = {}
        self._writing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: KvbmConsoleError | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def alive(self) -> bool:
        """True if requests can be made."""
        return self._call is not None and self._ended is None

    async def open(self) -> None:
        """Begin the session. ``Refused`` when this endpoint does not control, ``UsageError`` for a bad name."""
        await require_role(self._channel, self._target, self._name, "Control")
        self._call = self._channel.stream_stream(method_path("Control"), None, None)()
        self._tasks.append(asyncio.create_task(self._read(), name="kvbm-control-read"))
        try:
            reply = await self._request(OpenSession(self._name, self._lease, self.owner))
        except BaseException:
            await self.close()
            raise
        self.owner = reply.opened.owner
        self.lease_ttl_ns = reply.opened.lease_ttl_ns
        if self._lease:
            self._tasks.append(asyncio.create_task(self._renew(), name="kvbm-lease"))

    async def close(self) -> None:
        """End the session, and with it its lease."""
        self._end(ConnectionLost(f"the session with {self._target} is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._call is not None:
            self._call.cancel()
            self._call = None

    # --- requests --------------------------------------------------------------------------------------------------

    async def ask(self, verb: Verb[A]) -> A:
        """Carry out a verb; returns its answer, raises ``Refused`` with the daemon's sentence."""
        answer: A = control_answer(await self._request(verb))
        return answer

    # --- the stream ------------------------------------------------------------------------------------------------

    async def _request(self, verb: Verb[Any]) -> pb.ControlReply:
        if self._ended is not None:
            raise self._ended
        number, self._next_id = self._next_id, self._next_id + 1
        fields: dict[str, Any] = {verb.verb: struct_to_message(verb)}
        future: asyncio.Future[pb.ControlReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with self._writing:
                with translating(self._target):
                    await self._call.write(pb.ControlRequest(id=number, **fields).SerializeToString())
            reply = await asyncio.wait_for(future, REPLY_S)
        except TimeoutError:
            raise ConnectionLost(f"{self._target} did not answer within {REPLY_S:g} s") from None
        except ConnectionLost:
            # The reader knows the reason for the end of the stream; the writer knows only the end.
            await asyncio.wait([future], timeout=1.0)
            if future.done() and not future.cancelled() and (known := future.exception()) is not None:
                raise known from None
            raise
        finally:
            self._waiting.pop(number, None)
        if reply.WhichOneof("answer") == "refused":
            raise Refused(reply.refused)
        return reply

    async def _read(self) -> None:
        try:
            with translating(self._target):
                while (data := await self._call.read()) is not END:
                    reply = pb.ControlReply.FromString(data)
                    future = self._waiting.get(reply.id)
                    if future is not None and not future.done():
                        future.set_result(reply)
            self._end(ConnectionLost(f"{self._target} ended the session"))
        except DecodeError:
            self._end(ConnectionLost(f"{self._target} answers something that is not ours"))
        except KvbmConsoleError as error:
            self._end(error)

    def _end(self, why: KvbmConsoleError) -> None:
        if self._ended is None:
            self._ended = why
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._ended)
                future.exception()  # marks the error as seen, because the waiter may be gone

    async def _renew(self) -> None:
        every_s = min(LEASE_RENEW_S, self.lease_ttl_ns / 5e9)  # four may be late
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.ask(RenewLease())
            except KvbmConsoleError as error:
                self._end(error)
                return
