"""One debugger session on one stream, with the heartbeat that keeps its lease.

Law of this file: a request ends with its own reply or with an exception. The stream is read by one task and written by
one coroutine at a time, and no timeout ever cuts a read or a write: what is bounded is the wait for the reply.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from google.protobuf.message import DecodeError

from kvbm_console.client.errors import END, translating
from kvbm_console.client.questions import require_role
from kvbm_console.core.config import SECOND_NS, BreakpointSpec
from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError, Refused
from kvbm_console.core.ids import ResetMode, Site, SlotState
from kvbm_console.core.instructions import BreakpointVerdict, DrainAnswer, ResetAnswer
from kvbm_console.debug.leases import LEASE_RENEW_S
from kvbm_console.wire.convert import spec_to_message
from kvbm_console.wire.protocol import method_path
from kvbm_console.wire.v1 import console_pb2 as pb

MAX_FREEZE_NS: Final = 30 * SECOND_NS
"""As long as a hold lasts by default."""
REPLY_S: Final = 10.0
"""A request is answered within milliseconds by a daemon that lives."""


class ControlSession:
    """A session, as an asynchronous context manager; implements the requests of ``stream.feed.Controls``.

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
        """Whether requests can be made."""
        return self._call is not None and self._ended is None

    async def open(self) -> None:
        """Begin the session. ``Refused`` when this endpoint does not control, ``UsageError`` for a bad name."""
        await require_role(self._channel, self._target, self._name, "Control")
        self._call = self._channel.stream_stream(method_path("Control"), None, None)()
        self._tasks.append(asyncio.create_task(self._read(), name="kvbm-control-read"))
        try:
            reply = await self._request(open=pb.OpenSession(name=self._name, lease=self._lease, owner=self.owner))
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

    async def add_breakpoint(self, spec: BreakpointSpec) -> BreakpointVerdict:
        """Set one more breakpoint of this session (of the daemon, without a lease)."""
        reply = await self._request(set=pb.SetBreakpoint(spec=spec_to_message(spec)))
        return BreakpointVerdict(reply.verdict.id, reply.verdict.verified, reply.verdict.message)

    async def replace_breakpoints(self, specs: Sequence[BreakpointSpec]) -> list[BreakpointVerdict]:
        """All breakpoints of this session are now these; saying it twice changes nothing."""
        verb = pb.ReplaceBreakpoints(specs=[spec_to_message(spec) for spec in specs])
        reply = await self._request(replace=verb)
        return [BreakpointVerdict(one.id, one.verified, one.message) for one in reply.verdicts.verdicts]

    async def remove_breakpoint(self, breakpoint_id: int) -> None:
        """Remove one breakpoint, whoever owns it."""
        await self._request(remove=pb.RemoveBreakpoint(breakpoint=breakpoint_id))

    async def remove_all_breakpoints(self) -> str:
        """Remove all breakpoints of all owners."""
        return (await self._request(remove=pb.RemoveBreakpoint())).done

    async def enable_breakpoint(self, breakpoint_id: int, enabled: bool) -> None:
        """Arm or mute one breakpoint, whoever owns it."""
        await self._request(enable=pb.EnableBreakpoint(breakpoint=breakpoint_id, enabled=enabled))

    async def continue_hold(
        self, hold: int | None, until: SlotState | None = None, until_site: Site | None = None
    ) -> str:
        """Release one hold, or all when None; a lost race answers ``already_continued``.

        With ``until`` the slot stops once more when it enters the state, with ``until_site`` when it passes the site.
        """
        verb = pb.ContinueHold()
        if hold is not None:
            verb.hold = hold
        if until is not None:
            verb.until = int(until)  # type: ignore[assignment]
        if until_site is not None:
            verb.until_site = int(until_site)  # type: ignore[assignment]
        return (await self._request(continue_hold=verb)).done

    async def step(self, hold: int) -> str:
        """Release the hold and stop the same slot at its next site."""
        return (await self._request(step=pb.StepSlot(hold=hold))).done

    async def step_pipeline(self) -> str:
        """Let one candidate through its evaluation, while the pipeline is closed."""
        return (await self._request(step_pipeline=pb.StepPipeline())).done

    async def skip(self, hold: int) -> str:
        """Resolve the held slot's candidates to no work, and release the hold."""
        return (await self._request(skip=pb.SkipCandidate(hold=hold))).done

    async def freeze(self, max_hold_ns: int = MAX_FREEZE_NS) -> str:
        """Close the pipeline and pause the engines, for this long at most."""
        return (await self._request(freeze=pb.Freeze(max_hold_ns=max_hold_ns))).done

    async def thaw(self) -> str:
        """End a freeze; a lost race answers ``already_thawed``."""
        return (await self._request(thaw=pb.Thaw())).done

    async def run_for(self, duration_ns: int, max_hold_ns: int = MAX_FREEZE_NS) -> str:
        """Go on for this much engine time, then freeze for ``max_hold_ns`` at most."""
        verb = pb.RunFor(duration_ns=duration_ns, max_hold_ns=max_hold_ns)
        return (await self._request(run_for=verb)).done

    async def disarm(self) -> None:
        """Mute every breakpoint and release every hold."""
        await self._request(disarm=pb.Disarm())

    async def reset(self, mode: ResetMode = ResetMode.LOGICAL) -> ResetAnswer:
        """Forget everything in all tiers at once; ``physical`` also overwrites the bytes."""
        told = (await self._request(reset=pb.Reset(mode=int(mode)))).reset  # type: ignore[arg-type]
        return ResetAnswer(told.epoch, told.aborted_requests, told.quarantined_blocks)

    async def drain(self, deadline_ns: int) -> DrainAnswer:
        """Take no new request until all that is in flight has ended or ``deadline_ns`` of engine time are over.

        Then everything is reset and requests are taken again. Answered at once; see ``client.draining`` for the end.
        """
        told = (await self._request(drain=pb.Drain(deadline_ns=deadline_ns))).drain
        return DrainAnswer(told.seq, told.live_requests)

    async def renew(self) -> None:
        """Show that this session is alive; done every second by itself."""
        await self._request(renew=pb.RenewLease())

    # --- the stream ------------------------------------------------------------------------------------------------

    async def _request(self, **verb: Any) -> pb.ControlReply:
        if self._ended is not None:
            raise self._ended
        number, self._next_id = self._next_id, self._next_id + 1
        future: asyncio.Future[pb.ControlReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with self._writing:
                with translating(self._target):
                    await self._call.write(pb.ControlRequest(id=number, **verb).SerializeToString())
            reply = await asyncio.wait_for(future, REPLY_S)
        except TimeoutError:
            raise ConnectionLost(f"{self._target} did not answer within {REPLY_S:g} s") from None
        except ConnectionLost:
            # The reader knows why the stream ended; the writer only that it did.
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
                future.exception()  # seen here: the waiter may be gone

    async def _renew(self) -> None:
        every_s = min(LEASE_RENEW_S, self.lease_ttl_ns / 5e9)  # four may be late
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.renew()
            except KvbmConsoleError as error:
                self._end(error)
                return
