"""The ``Control`` method: one debugger session on one stream.

Law of this file: the session lives exactly as long as its stream. However the stream ends, the lease ends with it.
"""

from collections.abc import AsyncIterator
from typing import Final

from kvbm_console.core.errors import Refused, UsageError
from kvbm_console.debug.sessions import Session
from kvbm_console.service import LeaderService
from kvbm_console.stream import verbs
from kvbm_console.wire import convert
from kvbm_console.wire.v1 import console_pb2 as pb

from .guard import END, Context, Malformed, parse

VERBS: Final = {kind.verb: kind for kind in verbs.VERBS if kind is not verbs.OpenSession}
"""Field of a control message to the verb that it asks for."""


class ControlMethod:
    """Serves sessions; every request is answered by one reply, in order."""

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
