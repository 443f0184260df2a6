"""The ``Feed`` method: an engine in another process.

Its calls come as batches of stimuli and are stamped, handled and answered in their order. What the leader asks of the
engine outside its calls (wake, release, clear, copies, held requests) goes into an outbox that one writer empties, so
that nothing the leader does waits for the engine's socket.

Law of this file: the outbox is bounded; an engine that does not read it is disconnected, and its requests are aborted.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import anyio
import grpc
import msgspec

from kvbm_console.core import instructions as ins
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_ids
from kvbm_console.core.errors import Refused
from kvbm_console.core.events import StimulusRejected
from kvbm_console.core.holds import points_of
from kvbm_console.core.ids import FinishReason, SlotState, WaitPoint, request_globs
from kvbm_console.core.leader import Outcome
from kvbm_console.service import LeaderService
from kvbm_console.stream.ingest import check_stimulus
from kvbm_console.wire.batches import MalformedBatch, stimuli_of
from kvbm_console.wire.protocol import NAME_BYTES_MAX
from kvbm_console.wire.v1 import console_pb2 as pb

from .guard import END, Context, Malformed, parse, refuse, require_text
from .names import RequestNames

log = logging.getLogger("kvbm_console.server")

OUTBOX_MAX: Final = 65_536
"""Messages an engine may leave unread: minutes of an ordinary one, and at most some tens of megabytes."""


class FeedSink:
    """What the leader asks of one engine, as messages for its writer. Also a ``Mover`` for engines that move bytes."""

    def __init__(
        self, service: LeaderService, source: int, *, name: str = "", pausable: bool = False,
        points: frozenset[WaitPoint] = frozenset(WaitPoint),
    ) -> None:
        self._service = service
        self._source = source
        self.pausable = pausable
        """Whether the engine can be paused as a whole."""
        self.points = points
        """Where the engine can let a request stand still."""
        self._outbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._standing: frozenset[str] = frozenset()
        self._lookups: frozenset[str] = frozenset()
        self.name = name
        self.names = RequestNames(source)
        self.cost: pb.FeedCost | None = None
        """What the reporting has cost the engine, of one that is watched."""
        self._held: frozenset[int] = frozenset()
        self.overflowed = False
        self.closing = False

    @property
    def cost_row(self) -> dict[str, Any] | None:
        """What watching has cost this engine (``stream.document``); None when it has told nothing."""
        if self.cost is None:
            return None
        counts = {
            field.name: getattr(self.cost, field.name) for field in pb.FeedCost.DESCRIPTOR.fields
            if not field.has_presence or self.cost.HasField(field.name)
        }
        return {"source": str(self._source), "name": self.name, **counts}

    def put(self, reply: pb.FeedReply) -> None:
        """Leave a message for the writer."""
        if len(self._outbox) >= OUTBOX_MAX:
            self.overflowed = True
        else:
            self._outbox.append(reply.SerializeToString())
        self._wake.set()

    async def take(self) -> bytes | None:
        """The next message; None when the engine has fallen too far behind or the daemon ends."""
        while not self._outbox and not self.overflowed and not self.closing:
            self._wake.clear()
            await self._wake.wait()
        return None if self.overflowed or not self._outbox else self._outbox.popleft()

    def close(self) -> None:
        """The daemon ends: the writer finishes with what is there."""
        self.closing = True
        self._wake.set()

    def look(self) -> None:
        """After every publication: tell the engine when other requests of it must stand still, or are held."""
        self._look_at_holds()
        self._look_at_breakpoints()
        standing = self._service.state.standing
        if not standing and not self._standing:
            return
        mine = frozenset(request for request in standing if self._is_mine(request))
        if mine != self._standing:
            self._standing = mine
            theirs = sorted(map(self.names.there, mine))
            self.put(pb.FeedReply(standing=pb.StandingRequests(requests=theirs)))

    def _look_at_breakpoints(self) -> None:
        """An engine that is watched must ask before a lookup that somebody may want to hold."""
        leader = self._service.leader
        if self._source not in leader.watched or not (leader.state.breakpoints or self._lookups):
            return
        globs = frozenset(
            glob for known in leader.state.breakpoints.values()
            if known.enabled and WaitPoint.LOOKUP in points_of(known.spec)
            for glob in request_globs(known.spec.request)
        )
        if globs != self._lookups:
            self._lookups = globs
            self.put(pb.FeedReply(lookups=pb.LookupGlobs(globs=sorted(globs))))

    def _look_at_holds(self) -> None:
        state = self._service.state
        if not state.holds and not self._held:
            return
        mine = [hold for hold in state.holds.values() if state.slots[hold.slot].source == self._source]
        numbers = frozenset(hold.hold for hold in mine)
        if numbers != self._held:
            self._held = numbers
            held = pb.HeldRequests()
            for hold in mine:
                held.held.add(
                    request=self.names.there(state.slots[hold.slot].request), hold=hold.hold, site=int(hold.site),
                    max_hold_ns=hold.max_hold_ns,
                )
            self.put(pb.FeedReply(held=held))

    def _is_mine(self, request: str) -> bool:
        slot = self._service.state.slot_named(request)
        return slot is not None and slot.source == self._source

    # --- EngineSink ---

    def wake(self, request: str) -> None:
        """The request's load ended."""
        computed = self._service.dispatcher.port(self._source).computed_tokens(request)
        self.put(pb.FeedReply(wake=pb.WakeRequest(request=self.names.there(request), computed_tokens=computed)))

    def release(self, request: str, ids: bytes) -> None:
        """Blocks that may be reused."""
        self.put(pb.FeedReply(release=pb.ReleaseDeviceBlocks(request=self.names.there(request), ids=ids)))

    def pin(self, ids: bytes) -> None:
        """Blocks that must not be reused for now."""
        self.put(pb.FeedReply(pin=pb.PinDeviceBlocks(ids=ids)))

    def pause(self) -> None:
        """Form no iteration; an engine that cannot is not asked (``pausable``)."""
        if self.pausable:
            self.put(pb.FeedReply(pause=pb.PauseEngine()))

    def resume(self) -> None:
        """Go on."""
        if self.pausable:
            self.put(pb.FeedReply(resume=pb.ResumeEngine()))

    def clear(self, keep: bytes) -> None:
        """The leader was reset."""
        self.put(pb.FeedReply(clear=pb.ClearDevicePool(keep=keep)))

    # --- Mover ---

    def start(self, order: ins.StartTransfer) -> None:
        """Copy, over there."""
        self.put(pb.FeedReply(start=pb.StartTransfer(
            operation=order.operation, epoch=order.epoch, route=int(order.route),  # type: ignore[arg-type]
            sources=order.sources, targets=order.targets, blocks=order.blocks, batch=order.batch, ranks=order.ranks,
        )))

    def cancel(self, operation: int) -> None:
        """Do not start that copy."""
        self.put(pb.FeedReply(cancel=pb.CancelTransfer(operation=operation)))

    def zero(self, pool: int) -> None:
        """Bytes of another process are its own; a physical reset there follows from ``clear``."""


class FeedMethod:
    """Serves engines, each on one stream."""

    def __init__(self, service: LeaderService) -> None:
        self._service = service

    async def serve(self, _: AsyncIterator[bytes], context: Context) -> None:
        """One engine, from its ``open`` to the end of its stream."""
        data = await context.read()
        if data is END:
            return
        request = parse("Feed", pb.FeedRequest, data)
        if request.WhichOneof("item") != "open":
            raise Malformed("the first feed message must be open")
        require_text("name", request.open.name, NAME_BYTES_MAX)
        service = self._service
        modelled = service.dispatcher.mover
        if request.open.moves and isinstance(modelled, FeedSink):
            raise Refused("the bytes are moved by another feed already")
        source = service.new_source()
        points = frozenset(WaitPoint(point) for point in request.open.points if point in tuple(WaitPoint))
        sink = FeedSink(
            service, source, name=request.open.name, pausable=request.open.pauses,
            points=points or frozenset(WaitPoint),
        )
        service.dispatcher.engines[source] = sink
        service.listeners.add(sink.look)
        service.feeds.add(sink)
        if request.open.moves:
            service.dispatcher.mover = sink
        sink.put(pb.FeedReply(opened=pb.FeedOpened(source=source, incarnation=service.incarnation)))
        log.info("engine %r feeds source %d", request.open.name, source)
        try:
            await self._exchange(sink, source, context)
        finally:
            service.feeds.discard(sink)
            service.listeners.discard(sink.look)
            del service.dispatcher.engines[source]
            if service.dispatcher.mover is sink:
                service.dispatcher.mover = modelled
                self._end_copies()
            self._abandon(source)

    async def _exchange(self, sink: FeedSink, source: int, context: Context) -> None:
        reader = asyncio.ensure_future(self._read(sink, source, context))
        writer = asyncio.ensure_future(self._write(sink, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        for task in (reader, writer):
            error = None if task.cancelled() else task.exception()
            if error is not None:
                raise error
        if sink.overflowed:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{OUTBOX_MAX} messages were left unread")

    async def _read(self, sink: FeedSink, source: int, context: Context) -> None:
        service = self._service
        while (data := await context.read()) is not END:
            request = parse("Feed", pb.FeedRequest, data)
            if request.WhichOneof("item") == "cost":
                sink.cost = request.cost
                continue
            if request.WhichOneof("item") != "batch":
                raise Malformed("a feed message behind open must be a batch")
            try:
                stimuli = stimuli_of(request.batch)
            except MalformedBatch as error:
                raise Malformed(str(error)) from None
            for stimulus in stimuli:
                check_stimulus(stimulus)
            answers = pb.Answers(first_n=request.batch.first_n)
            for stimulus in stimuli:
                if sink.names.differ or len(service.dispatcher.engines) > 1:
                    stimulus = sink.names.translated(stimulus, service.state)
                answers.answers.append(answer_of(self._submit(source, stimulus)))
            sink.put(pb.FeedReply(answers=answers))
            await anyio.lowlevel.checkpoint()

    async def _write(self, sink: FeedSink, context: Context) -> None:
        while (message := await sink.take()) is not None:
            await context.write(message)

    def _submit(self, source: int, stimulus: st.Stimulus) -> Outcome:
        kind = type(stimulus)
        fields = [getattr(stimulus, name) for name in kind.__struct_fields__[4:]]
        origin_ns = stimulus.at_ns if stimulus.origin_ns is None else stimulus.origin_ns
        return self._service.dispatcher.submit_from(source, origin_ns, kind, *fields)

    def _end_copies(self) -> None:
        """The mover is gone: what it has not reported has failed, so nothing waits for it for ever."""
        service, state = self._service, self._service.state
        for number in list(state.operations):
            for rank in range(service.config.ranks):
                operation = state.operations.get(number)
                if operation is not None and rank not in operation.reported:
                    service.submit(st.TransferFailed, number, operation.epoch, rank, "the mover is gone", b"")
        for number in list(state.late):
            for rank in set(range(service.config.ranks)) - state.late.get(number, set()):
                service.submit(st.TransferFailed, number, state.epoch - 1, rank, "the mover is gone", b"")

    def _abandon(self, source: int) -> None:
        """The engine is gone: nobody will finish its requests, and what its pool holds is unknown."""
        service = self._service
        live = [slot for slot in service.state.slots.values() if slot.source == source]
        for slot in live:
            if slot.state not in (SlotState.FINISHING, SlotState.FINISHED) and source not in service.leader.watched:
                service.dispatcher.submit_from(
                    source, None, st.RequestFinished, slot.request, pack_ids(slot.device_blocks), FinishReason.ABORTED
                )
        service.dispatcher.submit_from(source, None, st.SourceRestarted, True, True)


def answer_of(outcome: Outcome) -> pb.Answer:
    """The result of a call as the contract states it."""
    answer = pb.Answer()
    for event in outcome.events:
        if isinstance(event, StimulusRejected):
            answer.rejected = event.why
            return answer
    result: Any = outcome.result
    if isinstance(result, ins.MatchAnswer):
        answer.match.SetInParent()
        if result.tokens is not None:
            answer.match.tokens = result.tokens
        answer.match.asynchronous = result.asynchronous
    elif isinstance(result, ins.FencedBlocks):
        answer.fenced.ids = result.ids
        answer.fenced.SetInParent()
    elif isinstance(result, ins.FinishAnswer):
        answer.finish.delay_free = result.delay_free
        answer.finish.SetInParent()
    elif isinstance(result, ins.IterationMetadata):
        answer.metadata.iteration = result.iteration
        answer.metadata.operations.extend(result.operations)
        answer.metadata.SetInParent()
    elif isinstance(result, ins.PoolAnswer):
        answer.pool = result.pool
    elif isinstance(result, ins.CloneAnswer):
        answer.clones.slots.extend(result.slots)
        answer.clones.SetInParent()
    elif isinstance(result, msgspec.Struct):
        raise TypeError(f"a feed has no answer of kind {type(result).__name__}")
    return answer
