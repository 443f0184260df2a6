"""The ``Feed`` method: an engine in another process.

Its calls come as batches of stimuli and are checked, stamped, handled and answered in their order. The leader's orders
(wake, release, clear, copies, held requests) go into an outbox. One writer empties it, so the leader never waits for
the engine's socket.

Several engines may use the same name for a request at the same time: vLLM's ``LLM.generate`` numbers its requests from
0. The second engine's request "0" is called "0@2" here, after the number of its source, for as long as it lives. A
request whose name is free keeps it.

Law of this file: the outbox is bounded, and an engine that does not read it is disconnected and its requests aborted.
A stimulus of one engine never reaches a slot of another, and an engine is asked by its own names.
"""

import asyncio
import logging
import typing
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import anyio
import grpc
import msgspec

from kvbm_console.core import instructions as ins
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_ids
from kvbm_console.core.config import REQUEST_ID_BYTES_MAX, BreakpointSpec, require
from kvbm_console.core.errors import Refused
from kvbm_console.core.events import StimulusRejected
from kvbm_console.core.holds import points_of
from kvbm_console.core.ids import Authority, BreakpointAction, FinishReason, Site, SlotState, WaitPoint, request_globs
from kvbm_console.core.leader import Outcome
from kvbm_console.core.state import CacheState
from kvbm_console.dispatch import Dispatcher, Mover
from kvbm_console.service import LeaderService
from kvbm_console.wire.batches import MalformedBatch, stimuli_of
from kvbm_console.wire.convert import feed_answer
from kvbm_console.wire.protocol import NAME_BYTES_MAX
from kvbm_console.wire.v1 import console_pb2 as pb

from .access import Context
from .guard import END, Malformed, parse, refuse, require_text
from .movers import LostMover, MoverProcess, RankMovers

log = logging.getLogger("kvbm_console.server")

OUTBOX_MAX: Final = 65_536
"""Messages that an engine may leave unread: minutes of an ordinary engine, and at most some tens of megabytes."""
LAST_WRITES_S: Final = 1.0
"""Time for the messages to an engine that says no more."""


class FeedSink:
    """The leader's orders to an engine, as messages for its writer. Also a ``Mover`` for engines that move bytes."""

    def __init__(
        self, service: LeaderService, source: int, *, name: str = "", pausable: bool = False,
        points: frozenset[WaitPoint] = frozenset(WaitPoint), ranks: frozenset[int] = frozenset(),
    ) -> None:
        self._service = service
        self._source = source
        self.ranks = ranks
        """The ranks whose bytes it moves."""
        self.pausable = pausable
        """True if the engine can be paused as a whole."""
        self.points = points
        """The points at which the engine can let a request stand still."""
        self._outbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._standing: frozenset[str] = frozenset()
        self._lookups: frozenset[str] = frozenset()
        self._copies: frozenset[str] = frozenset()
        self.name = name
        self.names = RequestNames(source)
        self.cost: pb.FeedCost | None = None
        """The cost of the reporting to an engine that is watched."""
        self._held: frozenset[int] = frozenset()
        self.overflowed = False
        self.closing = False
        self._ended = False
        self.copies_stopped = False
        """True if the mover has said that none of its copies runs any more."""

    @property
    def cost_row(self) -> dict[str, Any] | None:
        """The cost of watching this engine (``stream.document``); None when the engine has reported nothing."""
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
        """The next message; None when the engine has fallen too far behind, or the feed or the daemon ends."""
        while not (self._outbox or self.overflowed or self.closing or self._ended):
            self._wake.clear()
            await self._wake.wait()
        return None if self.overflowed or not self._outbox else self._outbox.popleft()

    def close(self) -> None:
        """End the feed with the daemon; the writer sends its pending messages."""
        self.closing = True
        self._wake.set()

    def end(self) -> None:
        """The engine says no more; the writer sends its pending messages."""
        self._ended = True
        self._wake.set()

    def look(self) -> None:
        """Report changes of standing and held requests to the engine; called after every publication."""
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
        """Report the breakpoints of lookups and copies to a watched engine, which then asks before those."""
        leader = self._service.leader
        known = leader.state.breakpoints
        if self._source not in leader.watched or not (known or self._lookups or self._copies):
            return
        stops = (BreakpointAction.HOLD, BreakpointAction.FREEZE)  # what logs or records lets the engine go on
        armed = [one.spec for one in known.values() if one.enabled and one.spec.action in stops]
        lookups = _globs(spec for spec in armed if WaitPoint.LOOKUP in points_of(spec))
        copies = _globs(spec for spec in armed if spec.site is Site.DISPATCH_WILL)
        if lookups != self._lookups:
            self._lookups = lookups
            self.put(pb.FeedReply(lookups=pb.LookupGlobs(globs=sorted(lookups))))
        if copies != self._copies:
            self._copies = copies
            self.put(pb.FeedReply(copies=pb.LookupGlobs(globs=sorted(copies))))

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
            source_pool=order.source_pool, target_pool=order.target_pool, hashes=order.hashes,
        )))

    def cancel(self, operation: int) -> None:
        """Do not start that copy."""
        self.put(pb.FeedReply(cancel=pb.CancelTransfer(operation=operation)))

    def zero(self, pool: int) -> None:
        """Overwrite a pool, over there."""
        self.put(pb.FeedReply(zero=pb.ZeroBlocks(pool=pool)))


def _globs(specs: Iterable[BreakpointSpec]) -> frozenset[str]:
    return frozenset(glob for spec in specs for glob in request_globs(spec.request))


class FeedMethod:
    """Serves engines, each on a stream of its own."""

    def __init__(self, service: LeaderService) -> None:
        self._service = service
        self._movers = RankMovers(service.config.ranks, self._fail)
        self._modelled: Mover | None = None
        """The mover of copies while no feed moves any."""
        self._lost: list[LostMover] = []

    def close(self) -> None:
        """The daemon ends: nothing is waited for any more."""
        for lost in self._lost:
            lost.process.close()

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
        ranks = self._ranks_of(request.open)
        process = MoverProcess(request.open.process, request.open.process_began) if request.open.moves else None
        source = service.new_source()
        points = frozenset(WaitPoint(point) for point in request.open.points if point in tuple(WaitPoint))
        sink = FeedSink(
            service, source, name=request.open.name, pausable=request.open.pauses,
            points=points or frozenset(WaitPoint), ranks=ranks,
        )
        service.dispatcher.engines[source] = sink
        service.listeners.append(sink.look)
        service.feeds.append(sink)
        if ranks:
            if not self._movers:
                self._modelled, service.dispatcher.mover = service.dispatcher.mover, self._movers
            self._movers.add(ranks, sink)
        sink.put(pb.FeedReply(opened=pb.FeedOpened(source=source, incarnation=service.incarnation)))
        log.info("engine %r feeds source %d", request.open.name, source)
        try:
            await self._exchange(sink, source, context)
        finally:
            service.feeds.remove(sink)
            service.listeners.remove(sink.look)
            del service.dispatcher.engines[source]
            if process is None:
                abandon(service.dispatcher, source)
            else:
                self._movers.remove(sink)
                if not self._movers:
                    service.dispatcher.mover = self._modelled
                self._mover_left(sink, source, process)

    def _ranks_of(self, opening: pb.OpenFeed) -> frozenset[int]:
        """The ranks that a feed is to move, none if it moves nothing.

        Refused while another feed moves one of them, and while copies of an earlier one may run, unless this feed
        promises that they do not."""
        if not opening.moves:
            return frozenset()
        ranks = self._movers.ranks
        if opening.HasField("rank"):
            require(opening.rank in ranks, "rank", f"from 0 to {len(ranks) - 1}", opening.rank)
            ranks = frozenset({opening.rank})
        if taken := self._movers.taken(ranks):
            raise Refused(f"the bytes of rank {taken[0]} are moved by another feed already")
        earlier = [lost for lost in self._lost if lost.ranks & ranks]
        for lost in earlier:
            if not (lost.settled or (opening.settled and opening.name == lost.name)):
                raise Refused(f"the mover {lost.name!r} may still copy: {lost.why}")
        for lost in earlier:
            lost.settle()
            self._lost.remove(lost)
        return ranks

    def _mover_left(self, sink: FeedSink, source: int, process: MoverProcess) -> None:
        """The stream of a mover has ended: fail what it has not reported, as soon as none of it can still write."""
        parts, part = self._service.parts, f"mover {sink.name}"

        def finish() -> None:
            for number, epoch, rank in self._unreported(sink.ranks):
                self._fail(number, epoch, rank, "the mover is gone")
            abandon(self._service.dispatcher, source)

        def settled() -> None:
            finish()
            parts.begun(part)

        if sink.copies_stopped or sink.closing or not self._unreported(sink.ranks):
            process.close()
            finish()
            return
        lost = LostMover(sink.name, sink.ranks, process, settled)
        self._lost.append(lost)
        parts.troubled(part, lost.why)

    async def _exchange(self, sink: FeedSink, source: int, context: Context) -> None:
        reader = asyncio.ensure_future(self._read(sink, source, context))
        writer = asyncio.ensure_future(self._write(sink, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            sink.end()
            # While a write runs, the RPC library cannot end the call with a status: its caller would wait for ever.
            await asyncio.wait((writer,), timeout=LAST_WRITES_S)
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
            if request.WhichOneof("item") == "stopped":
                sink.copies_stopped = True
                return
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
                answers.answers.append(self._answer(sink, source, stimulus))
            sink.put(pb.FeedReply(answers=answers))
            await anyio.lowlevel.checkpoint()

    async def _write(self, sink: FeedSink, context: Context) -> None:
        while (message := await sink.take()) is not None:
            await context.write(message)

    def _submit(self, source: int, stimulus: st.Stimulus) -> Outcome:
        origin_ns = stimulus.at_ns if stimulus.origin_ns is None else stimulus.origin_ns
        return self._service.dispatcher.submit_from(source, origin_ns, type(stimulus), *given_fields(stimulus))

    def _answer(self, sink: FeedSink, source: int, stimulus: st.Stimulus) -> pb.Answer:
        """The leader's answer to a call. A mover of some ranks reports those alone, and the first that begins a copy
        tells the leader."""
        if sink.ranks and sink.ranks != self._movers.ranks:
            if isinstance(stimulus, st.TransferFinished | st.TransferFailed) and stimulus.rank not in sink.ranks:
                return pb.Answer(rejected=f"rank must be {min(sink.ranks)} on this feed, got {stimulus.rank}")
            if isinstance(stimulus, st.TransferStarted):
                operation = self._service.state.operations.get(stimulus.operation)
                if operation is not None and operation.started:
                    return feed_answer(None)
        return answer_of(self._submit(source, stimulus))

    def _unreported(self, ranks: frozenset[int]) -> list[tuple[int, int, int]]:
        """Operation, epoch and rank of the parts of copies that these ranks have not reported."""
        state = self._service.state
        return [
            (operation.operation, operation.epoch, rank) for operation in state.operations.values()
            for rank in sorted(ranks - operation.reported)
        ] + [(number, state.epoch - 1, rank) for number, told in state.late.items() for rank in sorted(ranks - told)]

    def _fail(self, number: int, epoch: int, rank: int, why: str) -> None:
        """A rank can no longer copy its part, which may have been reported meanwhile."""
        state = self._service.state
        operation = state.operations.get(number)
        told = state.late.get(number) if operation is None else operation.reported
        if told is not None and rank not in told:
            self._service.submit(st.TransferFailed, number, epoch, rank, why, b"")


def given_fields(stimulus: st.Stimulus) -> list[Any]:
    """The fields of a stimulus that its sender fills, behind the head that is stamped here."""
    return [getattr(stimulus, name) for name in type(stimulus).__struct_fields__[4:]]


def abandon(dispatcher: Dispatcher, source: int) -> None:
    """Abort the requests of a lost engine and clear its pools, because their content is unknown."""
    leader = dispatcher.leader
    for slot in [slot for slot in leader.state.slots.values() if slot.source == source]:
        if slot.state not in (SlotState.FINISHING, SlotState.FINISHED) and source not in leader.watched:
            dispatcher.submit_from(
                source, None, st.RequestFinished, slot.request, pack_ids(slot.device_blocks), FinishReason.ABORTED
            )
    dispatcher.submit_from(source, None, st.SourceRestarted, True, True)


def answer_of(outcome: Outcome) -> pb.Answer:
    """The result of a call as the contract states it."""
    refused = next((event.why for event in outcome.events if isinstance(event, StimulusRejected)), None)
    return feed_answer(outcome.result) if refused is None else pb.Answer(rejected=refused)


# --- limits of a feed ---


INT_MAX: Final = 2**53
"""Larger than any count or nanosecond stamp, and exact in every language that reads the stream."""
TEXT_BYTES_MAX: Final = REQUEST_ID_BYTES_MAX
"""Request ids, sessions, media, error texts."""
COLUMN_BYTES_MAX: Final = 4 * 1024 * 1024
"""Half a million hashes: a prompt of eight million tokens in blocks of 16."""
LIST_ITEMS_MAX: Final = 65_536
"""Items of a list: requests of an iteration, clones, ranks."""
CAPACITY_BLOCKS_MAX: Final = 16_777_216
"""A declared pool costs 17 bytes of columns a place at once: at most 285 MB."""

FEED_KINDS: Final[frozenset[type[st.Stimulus]]] = frozenset({
    st.PoolDeclared, st.RequestArrived, st.MatchRequested, st.BlocksAllocated, st.IterationScheduled,
    st.IterationFinished, st.RequestPreempted, st.RequestCloned, st.RequestFinished, st.TransferStarted,
    st.TransferFinished, st.TransferFailed, st.BlocksReported, st.SourceGapped, st.SourceRestarted,
    st.CallAnnounced, st.LookupObserved, st.CopiesObserved, st.MismatchReported, st.CopyBegun, st.CopyEnded,
    st.ConnectorReported, st.CallReported, st.PlacesAudited, st.MeasuresReported,
})
"""The stimuli that engines and movers may send. The rest belongs to control sessions and to the daemon itself."""


def check_stimulus(stimulus: st.Stimulus) -> None:
    """Raise ``UsageError`` naming field, bound and value unless the stimulus may come from another process.

    >>> check_stimulus(st.MatchRequested(0, 0, 1, None, "r-1", 16))
    """
    kind = type(stimulus)
    require(kind in FEED_KINDS, "stimulus", "an entry point of engines or movers", kind.__name__)
    for field in kind.__struct_fields__[1:]:
        _check(field, getattr(stimulus, field))
    if isinstance(stimulus, st.PoolDeclared):
        capacity = stimulus.capacity_blocks
        require(capacity is None or 0 <= capacity <= CAPACITY_BLOCKS_MAX, "capacity_blocks",
                f"from 0 to {CAPACITY_BLOCKS_MAX}", capacity)
        require(stimulus.authority is not Authority.LEADER, "authority", "engine, stream or observed",
                stimulus.authority.label)
    elif isinstance(stimulus, st.SourceRestarted):
        require(not (stimulus.gone or stimulus.replaceable), "gone", "told by the end of the feed", stimulus.gone)


def _check(field: str, value: object) -> None:
    if isinstance(value, int):
        require(-INT_MAX <= value <= INT_MAX, field, f"from -{INT_MAX} to {INT_MAX}", value)
    elif isinstance(value, str):
        require(len(value.encode()) <= TEXT_BYTES_MAX, field, f"at most {TEXT_BYTES_MAX} bytes", value[:80])
    elif isinstance(value, bytes):
        require(len(value) <= COLUMN_BYTES_MAX, field, f"at most {COLUMN_BYTES_MAX} bytes", len(value))
    elif isinstance(value, tuple):
        require(len(value) <= LIST_ITEMS_MAX, field, f"at most {LIST_ITEMS_MAX} items", len(value))
        for item in value:
            _check(field, item)

# --- names of requests ---


ONE: Final = ("request",)
MANY: Final = (
    "requests", "clones", "new", "resumed", "preempted", "skipped", "unskipped", "first_tokens", "progressed",
    "appended", "ended", "loaded", "sent", "failed",
)
"""Fields of stimuli that name requests. A field of ``MANY`` is a list of names in some kinds only: ``TransferFailed``
has block ids in ``failed``."""
_LISTS: Final = {
    kind: [field for field in MANY if typing.get_type_hints(kind).get(field) == tuple[str, ...]] for kind in FEED_KINDS
}


class RequestNames:
    """Maps the names of an engine's requests: its own names and ours."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._here: dict[str, str] = {}
        self._there: dict[str, str] = {}

    @property
    def differ(self) -> bool:
        """True if our name of any request differs from the engine's."""
        return bool(self._here)

    def translated(self, stimulus: st.Stimulus, state: CacheState) -> st.Stimulus:
        """The stimulus with the names that are used here; the same object where they are the engine's own."""
        if isinstance(stimulus, st.RequestArrived):
            self._arrives(stimulus.request, state)
        elif isinstance(stimulus, st.RequestCloned):
            for clone in stimulus.clones:
                self._arrives(clone, state)
        changed: dict[str, Any] = {}
        for field in ONE:
            name = getattr(stimulus, field, None)
            if name is not None and (here := self._name(name, state)) is not name:
                changed[field] = here
        for field in _LISTS[type(stimulus)]:
            names = getattr(stimulus, field)
            mapped = tuple(self._name(name, state) for name in names)
            if mapped != names:
                changed[field] = mapped
        return msgspec.structs.replace(stimulus, **changed) if changed else stimulus

    def there(self, name: str) -> str:
        """The engine's own name of a request."""
        return self._there.get(name, name)

    def _name(self, name: str, state: CacheState) -> str:
        here = self._here.get(name)
        if here is not None:
            return here
        slot = state.slot_named(name)
        return name if slot is None or slot.source == self._source else self._other(name)

    def _arrives(self, name: str, state: CacheState) -> None:
        """Choose the name of a new request, and forget those of requests that have ended."""
        if self._here:
            self._here = {there: here for there, here in self._here.items() if state.slot_named(here) is not None}
        if name not in self._here and (here := self._name(name, state)) is not name:
            self._here[name] = here
        self._there = {here: there for there, here in self._here.items()}

    def _other(self, name: str) -> str:
        return f"{name}@{self._source}"
