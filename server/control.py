"""The ``Control`` method, a debugger session on a stream, and the breakpoints that a file keeps from run to run.

Law of this file: the session lives exactly as long as its stream. However the stream ends, the lease ends with it. The
file of breakpoints is written anew, whole, whenever a breakpoint that persists changes. A disk that refuses is reported
in the log and stops nothing.
"""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import Refused, UsageError
from kvbm_console.debug.files import read_specs, renumbered, write_specs
from kvbm_console.debug.sessions import Session
from kvbm_console.service import LeaderService
from kvbm_console.stream import verbs
from kvbm_console.wire import convert
from kvbm_console.wire.v1 import console_pb2 as pb

from .access import Context
from .guard import END, Malformed, parse

VERBS: Final = {kind.verb: kind for kind in verbs.VERBS if kind is not verbs.OpenSession}
"""Field of a control message to the verb that it asks for."""


class ControlMethod:
    """Serves sessions; every request gets one reply, in order."""

    def __init__(self, service: LeaderService) -> None:
        self._service = service

    async def serve(self, _: AsyncIterator[bytes], context: Context) -> None:
        """One session, from its ``open`` to the end of the stream."""
        session: Session | None = None
        try:
            while (data := await context.read()) is not END:
                request = parse("Control", pb.ControlRequest, data)
                if session is None:
                    session, reply = self._open(request)
                else:
                    reply = self._answer(session, request)
                await context.write(reply.SerializeToString())
        finally:
            if session is not None:
                self._service.sessions.close(session)

    def _open(self, request: pb.ControlRequest) -> tuple[Session, pb.ControlReply]:
        if request.WhichOneof("verb") != "open":
            raise Malformed("the first control message must be open")
        try:
            session = self._service.sessions.open(
                request.open.name, lease=request.open.lease, owner=request.open.owner
            )
        except Refused as error:
            raise Malformed(str(error)) from None
        ttl_ns = self._service.leases.ttl_ns if session.lease else 0
        opened = pb.SessionOpened(owner=session.owner, lease_ttl_ns=ttl_ns)
        return session, pb.ControlReply(id=request.id, opened=opened)

    def _answer(self, session: Session, request: pb.ControlRequest) -> pb.ControlReply:
        name = request.WhichOneof("verb")
        kind = VERBS.get(name or "")
        if kind is None:
            raise Malformed(f"the control message asks for nothing that is known ({name})")
        try:
            verb = convert.struct_from_message(kind, getattr(request, kind.verb))
            answer = self._service.sessions.carry_out(session, verb)
        except Refused as error:
            return pb.ControlReply(id=request.id, refused=str(error))
        except (UsageError, ValueError) as error:
            raise Malformed(str(error)) from None
        return convert.control_reply(request.id, answer)

# --- breakpoints that are kept in a file ---


log = logging.getLogger("kvbm_console.server")


class KeptBreakpoints:
    """Sets the breakpoints of a file at the start, and keeps those that persist in it."""

    def __init__(self, path: Path, service: LeaderService) -> None:
        self._path = path
        self._service = service
        self._seen: object = None
        self._gate: object = None
        self._written: list[BreakpointSpec] = []

    def load(self) -> int:
        """Set them, as the daemon's; how many. Raises ``UsageError`` for a file that is not understood."""
        if not self._path.exists():
            return 0
        sessions = self._service.sessions
        session = sessions.open("file", lease=False)
        numbers: dict[int, int] = {}
        specs = read_specs(self._path)
        for spec in specs:
            try:
                verdict = sessions.set(session, msgspec.structs.replace(renumbered(spec, numbers), persist=True))
            except Refused as error:
                raise UsageError(f"{self._path}: breakpoint {spec.id}: {error}") from None
            numbers[spec.id] = verdict.id
        self._written = self._kept()
        return len(specs)

    def look(self) -> None:
        """Write the file when a kept breakpoint has changed; called after every publication."""
        leader = self._service.leader
        if leader.state.breakpoints is self._seen and leader.gate is self._gate:
            return  # every change of a breakpoint replaces one of the two objects
        self._seen, self._gate = leader.state.breakpoints, leader.gate
        kept = self._kept()
        if kept == self._written:
            return
        self._written = kept
        try:
            write_specs(self._path, kept)
        except OSError as error:
            log.warning("breakpoints are not kept: %s: %s", self._path, error.strerror)

    def _kept(self) -> list[BreakpointSpec]:
        return [
            msgspec.structs.replace(known.spec, enabled=known.enabled)
            for known in self._service.state.breakpoints.values() if known.spec.persist
        ]
