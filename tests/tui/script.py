"""Hand-made events and feeds for the tests of the console.

Law of this file: every event is folded when it is made, so a script that could not happen fails where it is written;
times are given, never read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import (
    Authority,
    BreakpointAction,
    CandidateStatus,
    FinishReason,
    HoldEnd,
    ReleaseReason,
    Route,
    Site,
    SlotState,
    Tier,
    WaitPoint,
)
from kvbm_console.core.instructions import BreakpointVerdict
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import (
    Connected,
    Disconnected,
    EventsArrived,
    FeedItem,
    GapSeen,
    Heartbeat,
    SnapshotTaken,
)
from kvbm_console.stream.verbs import ContinueHold, SetBreakpoint, StepSlot, Verb

MS = 1_000_000
S = 1_000_000_000
BLOCK = 16


class Mono:
    """The local monotonic clock of a test."""

    def __init__(self, at_ns: int = 1_000 * S) -> None:
        self.at_ns = at_ns

    def __call__(self) -> int:
        return self.at_ns


class Script:
    """Events of one leader, made one by one."""

    def __init__(self) -> None:
        self.state = CacheState()
        self.events: list[ev.Event] = []
        self.at_ns = 0
        self.free = list(range(64))
        self.next_hash = 1

    def emit(self, kind: type[ev.Event], *fields: Any, **named: Any) -> ev.Event:
        """One more event now."""
        event = kind(self.state.seq, self.at_ns, len(self.events), *fields, **named)
        self.state.apply(event)
        self.events.append(event)
        return event

    def wait(self, ns: int) -> None:
        """Time passes."""
        self.at_ns += ns

    def pools(self) -> None:
        """G1 of 64 places with the engine, G2 of 128 with the leader."""
        self.emit(ev.PoolKnown, 0, 0, 0, 0, Tier.G2, "CPU_PINNED", 128, BLOCK, Authority.LEADER)
        self.emit(ev.PoolKnown, 1, 1, 0, 0, Tier.G1, "GPU", 64, BLOCK, Authority.ENGINE)

    def open(self, request: str, blocks: int = 4, rest: int = 5, *, source: int = 1, **named: Any) -> int:
        """A request with this many full prompt blocks."""
        hashes = list(range(self.next_hash, self.next_hash + blocks))
        self.next_hash += blocks
        slot = self.state.next_slot
        self.emit(
            ev.SlotOpened, slot, request, source, pack_hashes(hashes), blocks * BLOCK + rest, 32, 0, None, **named)
        return slot

    def move(self, slot: int, new: SlotState, **named: Any) -> None:
        """A move of the table; the fields that tests do not look at are what the facts say."""
        facts = self.state.slots[slot]
        entry = named.pop("entry", 5)
        computed = named.pop("computed", facts.computed_tokens(self.state.iteration))
        self.emit(
            ev.SlotMoved, slot, facts.state, new, entry, self.state.iteration, computed, facts.evaluated_blocks,
            named.pop("cached", facts.cached), len(facts.outstanding), **named,
        )

    def admit(self, slot: int, hits: tuple[int, int, int, int] = (0, 0, 0, 0)) -> list[int]:
        """Device blocks for the whole prompt, scored."""
        facts = self.state.slots[slot]
        need = -(-facts.prompt_tokens // BLOCK)
        ids, self.free = self.free[:need], self.free[need:]
        self.emit(ev.DeviceBlocksAssigned, 1, (slot,), (need,), pack_ids(ids), 0, hits[1] * BLOCK)
        self.emit(ev.PrefixScored, slot, facts.prompt_blocks, hits)
        return ids

    def iterate(self, *progress: tuple[int, int], count: int = 1) -> None:
        """An iteration was formed."""
        slots = tuple(slot for slot, _ in progress)
        positions = tuple(position for _, position in progress)
        self.emit(ev.IterationAdvanced, self.state.iteration + count, count, len(self.state.slots), 0, slots, positions)

    def run(self, request: str, blocks: int = 4) -> int:
        """A request up to its first token: opened, prefilled, decoding."""
        slot = self.open(request, blocks)
        self.wait(5 * MS)
        ids = self.admit(slot)
        self.move(slot, SlotState.PREFILLING)
        facts = self.state.slots[slot]
        self.iterate((slot, facts.prompt_tokens))
        self.wait(20 * MS)
        self.emit(ev.BlocksFilled, 1, (slot,), (blocks,), pack_ids(ids[:blocks]), pack_hashes(facts.hashes[:blocks]))
        self.move(slot, SlotState.DECODING)
        return slot

    def plan(self, slot: int, blocks: int = 2) -> int:
        """An offload of the first blocks, waiting for its evaluation."""
        candidate = self.state.next_candidate
        facts = self.state.slots[slot]
        self.emit(ev.CandidatePlanned, candidate, slot, Route.G1_G2, pack_hashes(facts.hashes[:blocks]), b"", 0)
        self.emit(ev.CandidateEnqueued, candidate)
        return candidate

    def promote(self, candidate: int) -> int:
        """The candidate becomes an operation into the next empty places of G2."""
        facts = self.state.candidates[candidate]
        assert facts.slot is not None
        sources = self.state.slots[facts.slot].device_blocks[: len(facts.hashes)]
        taken = self.state.pools[0].resident_blocks
        targets = list(range(taken, taken + len(sources)))
        operation = self.state.next_operation
        self.emit(ev.CandidateEvaluated, candidate, len(sources), None)
        self.emit(ev.BlocksReserved, 0, operation, pack_ids(targets), pack_hashes(facts.hashes))
        self.emit(ev.CandidatePromoted, candidate, operation, operation, 1, 0, pack_ids(sources), pack_ids(targets))
        return operation

    def start(self, operation: int) -> None:
        """The copy begins."""
        self.emit(ev.OperationStarted, operation)

    def complete(self, operation: int) -> None:
        """The copy arrived."""
        facts = self.state.operations[operation]
        self.emit(ev.OperationReported, operation, 0, True, "", b"")
        self.emit(ev.BlocksReady, 0, operation, pack_ids(facts.targets))
        self.emit(ev.CandidateEnded, facts.candidate, CandidateStatus.COMPLETED)
        self.emit(ev.BatchEnded, facts.batch)

    def offload(self, slot: int, blocks: int = 2, queue_ns: int = MS, wire_ns: int = 3 * MS) -> int:
        """A whole offload."""
        operation = self.promote(self.plan(slot, blocks))
        self.wait(queue_ns)
        self.start(operation)
        self.wait(wire_ns)
        self.complete(operation)
        return operation

    def finish(self, slot: int) -> None:
        """The request ends with nothing outstanding."""
        facts = self.state.slots[slot]
        blocks = facts.device_blocks
        self.emit(ev.DeviceBlocksReleased, slot, pack_ids(blocks), ReleaseReason.FINISHED)
        self.move(slot, SlotState.FINISHED, reason=FinishReason.STOP)
        self.emit(ev.SlotClosed, slot)

    def set_breakpoint(self, spec: BreakpointSpec, owner: str = "ops") -> None:
        """One breakpoint."""
        self.emit(ev.BreakpointsChanged, owner, (spec,))

    def hold(self, slot: int, max_hold_ns: int = 30 * S, point: WaitPoint = WaitPoint.SCHEDULE) -> int:
        """A hit of breakpoint 1 that holds the slot."""
        hold = self.state.next_hold
        if 1 in self.state.breakpoints:
            self.emit(ev.BreakpointHit, (1,), slot, Site.TRANSITION_DID, BreakpointAction.HOLD)
        self.emit(ev.SlotHeld, hold, slot, Site.TRANSITION_DID, point, (1,), "ops", max_hold_ns)
        self.emit(ev.HoldParked, hold)
        return hold

    def release(self, hold: int, held_ns: int) -> None:
        """The hold is continued."""
        self.emit(ev.HoldReleased, hold, self.state.holds[hold].slot, HoldEnd.CONTINUED, "ops", held_ns)

    def snapshot(self) -> SnapshotTaken:
        """The facts now, as a copy of their own."""
        return SnapshotTaken(decode_facts(encode_facts(self.state)))

    def heartbeat(self, **named: Any) -> Heartbeat:
        """A heartbeat that tells the newest event."""
        fields: dict[str, Any] = {
            "head_seq": self.state.seq - 1, "at_ns": self.at_ns, "recorder": "recording",
            "written_seq": self.state.seq - 1, "synced_seq": self.state.seq - 1, "synced_age_ns": 400 * MS,
            "not_recorded": 0, "subscribers": 1,
        }
        return Heartbeat(**{**fields, **named})


def connected(**named: Any) -> Connected:
    """The first item of a feed."""
    fields: dict[str, Any] = {
        "target": "chat-prod", "incarnation": "one", "run": 7, "control": True, "block_bytes": 163_840,
    }
    return Connected(**{**fields, **named})


class ScriptedFeed:
    """Yields items, then whatever a test hands to ``send``."""

    def __init__(self, items: Sequence[FeedItem]) -> None:
        self.first = list(items)
        self.over = asyncio.Event()
        """Everything so far has been taken."""
        self.subscriptions = 0
        self._more: asyncio.Queue[FeedItem] = asyncio.Queue()

    async def items(self) -> AsyncIterator[FeedItem]:
        """As ``stream.feed.Feed``."""
        self.subscriptions += 1
        for item in self.first:
            yield item
        while True:
            if self._more.empty():
                self.over.set()
            item = await self._more.get()
            yield item

    async def send(self, *items: FeedItem) -> None:
        """Hand over items and wait until they are taken."""
        self.over.clear()
        for item in items:
            self._more.put_nowait(item)
        await self.over.wait()


_DONE = {ContinueHold: "continued", StepSlot: "stepped"}


class RecordedControls:
    """Controls that remember what was asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.called = asyncio.Event()
        self.fails: Exception | None = None

    def _note(self, call: Any) -> None:
        self.calls.append(call)
        self.called.set()
        if self.fails is not None:
            raise self.fails

    def saw(self, enabled: Mapping[int, bool]) -> None:
        self._note(("saw", dict(enabled)))

    async def ask(self, verb: Verb[Any]) -> Any:
        self._note(verb)
        return BreakpointVerdict(3, True, "") if isinstance(verb, SetBreakpoint) else _DONE[type(verb)]

    async def retry_now(self) -> None:
        self._note(("retry",))


def story() -> Script:
    """A small busy target: one held, one finished, one waiting, transfers of all kinds."""
    script = Script()
    script.pools()
    done = script.run("chat-0001.1", 6)
    script.offload(done, 4)
    script.wait(200 * MS)
    script.finish(done)
    script.free = list(range(20, 64))
    busy = script.run("rag-0002.7", 5)
    script.offload(busy, 3)
    held = script.run("agent-0003.2", 7)
    script.set_breakpoint(BreakpointSpec(id=1, to_state=SlotState.DECODING))
    script.hold(held)
    script.wait(300 * MS)
    script.start(script.promote(script.plan(busy, 2)))
    script.open("chat-0004.1", 9)
    script.wait(700 * MS)
    for _ in range(10):
        script.iterate(count=5)
        script.wait(100 * MS)
    return script


def opening(script: Script, **named: Any) -> list[FeedItem]:
    """Connected, empty facts, all events of the script, a heartbeat."""
    return [
        connected(**named), SnapshotTaken(CacheState()), EventsArrived(list(script.events)), script.heartbeat(),
    ]


__all__ = ["Callable", "Disconnected", "GapSeen"]
