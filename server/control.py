"""The ``Control`` method: one debugger session on one stream.

Law of this file: the session lives exactly as long as its stream. However the stream ends, the lease ends with it.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from kvbm_console.core.errors import Refused, UsageError
from kvbm_console.core.ids import ResetMode, Site, SlotState
from kvbm_console.core.instructions import BreakpointVerdict, DrainAnswer, ResetAnswer
from kvbm_console.debug.sessions import Session
from kvbm_console.service import LeaderService
from kvbm_console.wire import convert
from kvbm_console.wire.v1 import console_pb2 as pb

from .guard import END, Context, Malformed, parse

Answer = BreakpointVerdict | tuple[BreakpointVerdict, ...] | ResetAnswer | DrainAnswer | str


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
        verb = request.WhichOneof("verb")
        carry_out = _VERBS.get(verb or "")
        if carry_out is None:
            raise Malformed(f"the control message asks for nothing that is known ({verb})")
        try:
            answer = carry_out(self._service, session, getattr(request, verb or ""))
        except Refused as error:
            return pb.ControlReply(id=request.id, refused=str(error))
        except (UsageError, ValueError) as error:
            raise Malformed(str(error)) from None
        if isinstance(answer, BreakpointVerdict):
            return pb.ControlReply(id=request.id, verdict=_verdict(answer))
        if isinstance(answer, tuple):
            verdicts = pb.BreakpointVerdicts(verdicts=[_verdict(one) for one in answer])
            return pb.ControlReply(id=request.id, verdicts=verdicts)
        if isinstance(answer, ResetAnswer):
            return pb.ControlReply(id=request.id, reset=pb.ResetAnswer(**msgspec.structs.asdict(answer)))
        if isinstance(answer, DrainAnswer):
            return pb.ControlReply(id=request.id, drain=pb.DrainAnswer(**msgspec.structs.asdict(answer)))
        return pb.ControlReply(id=request.id, done=answer)


def _verdict(answer: BreakpointVerdict) -> pb.BreakpointVerdict:
    return pb.BreakpointVerdict(id=answer.id, verified=answer.verified, message=answer.message)


def _renew(service: LeaderService, session: Session, _: Any) -> Answer:
    service.sessions.renew(session)
    return "renewed"


def _set(service: LeaderService, session: Session, verb: pb.SetBreakpoint) -> Answer:
    return service.sessions.set(session, convert.spec_from_message(verb.spec))


def _replace(service: LeaderService, session: Session, verb: pb.ReplaceBreakpoints) -> Answer:
    return service.sessions.replace(session, [convert.spec_from_message(spec) for spec in verb.specs])


def _remove(service: LeaderService, session: Session, verb: pb.RemoveBreakpoint) -> Answer:
    return service.sessions.remove(session, verb.breakpoint if verb.HasField("breakpoint") else None)


def _enable(service: LeaderService, session: Session, verb: pb.EnableBreakpoint) -> Answer:
    return service.sessions.enable(session, verb.breakpoint, verb.enabled)


def _continue(service: LeaderService, session: Session, verb: pb.ContinueHold) -> Answer:
    until = SlotState(verb.until) if verb.HasField("until") else None
    until_site = Site(verb.until_site) if verb.HasField("until_site") else None
    return service.sessions.continue_hold(session, verb.hold if verb.HasField("hold") else None, until, until_site)


def _step(service: LeaderService, session: Session, verb: pb.StepSlot) -> Answer:
    return service.sessions.step(session, verb.hold)


def _step_pipeline(service: LeaderService, session: Session, _: Any) -> Answer:
    return service.sessions.step_pipeline(session)


def _run_for(service: LeaderService, session: Session, verb: pb.RunFor) -> Answer:
    return service.sessions.run_for(session, verb.duration_ns, verb.max_hold_ns)


def _skip(service: LeaderService, session: Session, verb: pb.SkipCandidate) -> Answer:
    return service.sessions.skip(session, verb.hold)


def _freeze(service: LeaderService, session: Session, verb: pb.Freeze) -> Answer:
    return service.sessions.freeze(session, verb.max_hold_ns)


def _thaw(service: LeaderService, session: Session, _: Any) -> Answer:
    return service.sessions.thaw(session)


def _reset(service: LeaderService, session: Session, verb: pb.Reset) -> Answer:
    return service.sessions.reset(session, ResetMode(verb.mode))


def _drain(service: LeaderService, session: Session, verb: pb.Drain) -> Answer:
    return service.sessions.drain(session, verb.deadline_ns)


def _disarm(service: LeaderService, session: Session, _: Any) -> Answer:
    return service.sessions.disarm(session)


_VERBS: Final[dict[str, Callable[[LeaderService, Session, Any], Answer]]] = {
    "renew": _renew, "set": _set, "remove": _remove, "enable": _enable, "continue_hold": _continue, "step": _step,
    "disarm": _disarm, "step_pipeline": _step_pipeline, "run_for": _run_for, "skip": _skip, "freeze": _freeze,
    "thaw": _thaw, "replace": _replace, "reset": _reset, "drain": _drain,
}
"""Verb of a control message to what carries it out; complete but for ``open`` (a test)."""
