"""The life of each slot, folded from events: its states, holds and copies with their times, and its story.

Facts tell how a slot stands now; a life tells how it came there. The console's screens, the exports and ``why`` read
lives. The console folds them while it follows a target, also from events that it skims while its facts are older.
For that reason the fold reads events alone, and no facts:

    SlotOpened a             lives[7] = Life of a, in ``initialized``
    CandidatePlanned 3 of 7  transfers[3] = Transfer, also in the life
    SlotMoved 7 onboarding   a Move; the Move before ends where this Move begins
    CandidateEnded 3         the transfer leaves ``transfers`` with its end and status

``FOLD`` maps a kind of event to its function, which is called before the facts change.

Law of this file: every list of a life is bounded, dropped entries are counted, and times are the target's.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvbm_console.analysis import request_times
from kvbm_console.analysis.request_times import LiveTimes
from kvbm_console.core import events as ev
from kvbm_console.core.columns import HASH_BYTES
from kvbm_console.core.events import Event
from kvbm_console.core.ids import CandidateStatus, Route, SkipReason, SlotState, WaitPoint
from kvbm_console.core.slots import SlotFacts

MOVES_MAX: Final = 1_024
"""Moves kept of one life; a request that is skipped in every other iteration would otherwise grow without end."""
HOLDS_MAX: Final = 64
STORY_MAX: Final = 96
"""Events kept of one story, newest first on the screen; the log and a recording have the rest."""
TRANSFERS_MAX: Final = 48
"""Transfers kept of one life."""


class Move:
    """One stretch of a life: the state entered at ``start_ns`` by event ``seq``."""

    __slots__ = ("cause", "computed_tokens", "detail", "entry", "iteration", "seq", "start_ns", "state", "unseen_ns")

    def __init__(
        self, start_ns: int, state: SlotState, seq: int | None, entry: int = 0, iteration: int = 0, detail: int = 0,
        cause: int | None = None, unseen_ns: int | None = None, computed_tokens: int = 0,
    ) -> None:
        self.start_ns = start_ns
        self.state = state
        self.seq = seq
        """None when the move itself was not seen, only the state in a snapshot."""
        self.entry = entry
        self.iteration = iteration
        self.detail = detail
        self.cause = cause
        self.computed_tokens = computed_tokens
        self.unseen_ns = unseen_ns
        """Begin of the unknown stretch that ends at ``start_ns``; None without such a stretch."""


class Stay:
    """One hold: from ``start_ns`` to ``end_ns``, None while it lasts."""

    __slots__ = ("breakpoints", "end_ns", "hold", "point", "seq", "start_ns")

    def __init__(
        self, hold: int, start_ns: int, point: WaitPoint, breakpoints: tuple[int, ...], seq: int | None = None
    ) -> None:
        self.hold = hold
        self.start_ns = start_ns
        self.end_ns: int | None = None
        self.point = point
        self.breakpoints = breakpoints
        self.seq = seq
        """The event of its beginning; None when that was not seen."""


class Transfer:
    """One candidate with its stamps and, once promoted, its operation; None for a stamp that is not there yet."""

    __slots__ = (
        "asked", "batch", "blocks", "candidate", "ended_ns", "enqueued_ns", "error", "error_rank", "evaluated_ns",
        "found", "held_ns", "held_since_ns", "lost", "operation", "planned_ns", "promoted_ns", "ranks", "reason",
        "request", "route", "seq", "slot", "started_ns", "status", "thrash",
    )

    def __init__(
        self, candidate: int, slot: int | None, request: str, route: Route, asked: int, planned_ns: int, seq: int = 0
    ) -> None:
        self.candidate = candidate
        self.slot = slot
        self.request = request
        """Empty when no slot owns the blocks."""
        self.route = route
        self.asked = asked
        self.blocks = asked
        self.planned_ns = planned_ns
        self.seq = seq
        """The event of its planning, or of the snapshot that showed it first."""
        self.enqueued_ns: int | None = None
        self.evaluated_ns: int | None = None
        self.promoted_ns: int | None = None
        self.started_ns: int | None = None
        self.ended_ns: int | None = None
        self.status = CandidateStatus.PENDING_EVALUATION
        self.reason: SkipReason | None = None
        self.operation: int | None = None
        self.batch: int | None = None
        self.thrash = 0
        """Blocks that came back within the window after their offload."""
        self.found: int | None = None
        self.ranks: set[int] = set()
        """Ranks that have reported."""
        self.lost = False
        """True if it ended unseen: how is not known, and not before ``ended_ns``."""
        self.error = ""
        """The reason that the rank ``error_rank`` gave for its failure."""
        self.error_rank: int | None = None
        self.held_ns = 0
        """Time during which its slot was held; no latency counts it."""
        self.held_since_ns: int | None = None

    @property
    def label(self) -> str:
        """The operation's number, or ``c`` and the candidate's number while no operation exists."""
        return str(self.operation) if self.operation is not None else f"c{self.candidate}"

    @property
    def open(self) -> bool:
        """True if it has not ended."""
        return self.ended_ns is None

    def age(self, now_ns: int) -> int:
        """Since it was planned, or how long it took, without held time."""
        return (self.ended_ns if self.ended_ns is not None else now_ns) - self.planned_ns - self.held(now_ns)

    def held(self, now_ns: int) -> int:
        """Held time up to now."""
        return self.held_ns + (now_ns - self.held_since_ns if self.held_since_ns is not None else 0)


class Life:
    """The history of one slot. ``closed_ns`` is None while it is live."""

    __slots__ = (
        "cause_seq", "changes", "closed_ns", "dropped", "lost", "moves", "moves_max", "opened_ns", "receives",
        "request", "scored", "sends", "slot", "source", "starts", "stays", "story", "times", "transfers",
    )

    def __init__(self, slot: int, request: str, opened_ns: int, moves_max: int = MOVES_MAX) -> None:
        self.slot = slot
        self.request = request
        self.opened_ns = opened_ns
        self.moves_max = moves_max
        self.closed_ns: int | None = None
        self.lost = False
        """True if its end was not seen (a gap, or passed over), so that how it ended is not known."""
        self.moves: list[Move] = []
        self.starts: list[int] = []
        """``moves[i].start_ns``, for bisection."""
        self.stays: deque[Stay] = deque(maxlen=HOLDS_MAX)
        self.transfers: deque[Transfer] = deque(maxlen=TRANSFERS_MAX)
        self.story: deque[Event] = deque(maxlen=STORY_MAX)
        self.changes = 0
        """Grows with every change: the key of cached pictures."""
        self.dropped = 0
        self.source: int | None = None
        """The engine that the slot belongs to; None while that is not known."""
        self.scored: ev.PrefixScored | None = None
        """Its last admission."""
        self.sends: str | None = None
        """See ``SlotOpened``."""
        self.receives: str | None = None
        self.times: LiveTimes = request_times.unseen(opened_ns)

    @property
    def state(self) -> SlotState:
        """Its last known state."""
        return self.moves[-1].state if self.moves else SlotState.INITIALIZED

    def add(self, move: Move) -> None:
        """Append a move; the oldest quarter goes when there are too many."""
        self.changes += 1
        if len(self.moves) >= self.moves_max:
            cut = self.moves_max // 4
            del self.moves[:cut], self.starts[:cut]
            self.dropped += cut
        self.moves.append(move)
        self.starts.append(move.start_ns)

    def close(self, at_ns: int, *, lost: bool = False) -> None:
        """It ended."""
        self.changes += 1
        self.closed_ns = at_ns
        self.lost = lost
        for stay in self.stays:
            if stay.end_ns is None:
                stay.end_ns = at_ns

    def held_now(self) -> Stay | None:
        """The hold that lasts, if any."""
        return self.stays[-1] if self.stays and self.stays[-1].end_ns is None else None

    def held_ns(self, start_ns: int, end_ns: int) -> int:
        """Held time within a stretch."""
        total = 0
        for stay in self.stays:
            stop = end_ns if stay.end_ns is None else min(stay.end_ns, end_ns)
            total += max(0, stop - max(stay.start_ns, start_ns))
        return total

    def at(self, at_ns: int) -> int | None:
        """Index of the move whose stretch covers ``at_ns``; None outside the known life."""
        index = bisect_right(self.starts, at_ns) - 1
        if index < 0 or (self.closed_ns is not None and at_ns > self.closed_ns):
            return None
        return index

    def seen_at(self, at_ns: int) -> bool:
        """True if the state of the slot at that time is known."""
        index = self.at(at_ns)
        if index is None or index + 1 >= len(self.moves):
            return index is not None
        unseen_ns = self.moves[index + 1].unseen_ns
        return unseen_ns is None or at_ns < unseen_ns

    def first_known_ns(self) -> int:
        """The time at which its picture begins."""
        return self.starts[0] if self.starts else self.opened_ns


class Lives:
    """The lives of live slots, and the open transfers. A reader that keeps them when they end overrides the
    hooks."""

    def __init__(self, moves_max: int = MOVES_MAX) -> None:
        self.moves_max = moves_max
        """Moves kept of each life."""
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.lives: dict[int, Life] = {}
        """Slot to its life."""
        self.transfers: dict[int, Transfer] = {}
        """Open candidate to its transfer."""
        self.by_operation: dict[int, Transfer] = {}
        self.ranks = 1
        """Ranks seen so far."""

    def life_begun(self, life: Life) -> None:
        """Called with each life that begins."""

    def life_ended(self, life: Life) -> None:
        """Called with each life that ends."""

    def transfer_ended(self, transfer: Transfer) -> None:
        """Called with each transfer that ends."""

    def found(self, slot: SlotFacts) -> Life:
        """A life that began unseen, as far as the facts tell it. It has no moves."""
        life = self.lives[slot.slot] = Life(slot.slot, slot.request, slot.opened_ns, self.moves_max)
        life.source, life.sends, life.receives = slot.source, slot.sends, slot.receives
        parent = None if slot.parent is None else self.lives.get(slot.parent)
        life.times = request_times.found(slot, None if parent is None else parent.times)
        self.life_begun(life)
        return life

    def tell(self, slot: int | None, event: Event) -> Life | None:
        """Add the event to the story of its slot; the slot's life, None when that is not known."""
        life = self.lives.get(slot) if slot is not None else None
        if life is not None:
            life.story.append(event)
        return life


def opened(lives: Lives, e: ev.SlotOpened) -> None:
    """A life begins."""
    life = Life(e.slot, e.request, e.at_ns, lives.moves_max)
    life.source, life.sends, life.receives = e.source, e.sends, e.receives
    life.times = request_times.arrived(e)
    _begin(lives, life, e, SlotState.INITIALIZED)


def cloned(lives: Lives, e: ev.SlotCloned) -> SlotState:
    """A life begins in the state of its parent, which is returned."""
    parent = lives.lives.get(e.parent)
    state = parent.state if parent is not None else SlotState.INITIALIZED
    life = Life(e.slot, e.request, e.at_ns, lives.moves_max)
    life.source = None if parent is None else parent.source
    life.times = request_times.cloned(e, None if parent is None else parent.times)
    _begin(lives, life, e, state)
    return state


def _begin(lives: Lives, life: Life, e: ev.SlotOpened | ev.SlotCloned, state: SlotState) -> None:
    lives.lives[e.slot] = life
    life.add(Move(e.at_ns, state, e.seq, cause=e.cause))
    life.story.append(e)
    lives.life_begun(life)


def moved(lives: Lives, e: ev.SlotMoved) -> None:
    """A life goes on in another state."""
    life = lives.tell(e.slot, e)
    if life is not None:
        life.times.moved(e)
        life.add(Move(e.at_ns, e.new, e.seq, e.entry, e.iteration, e.detail, e.cause, None, e.computed_tokens))


def closed(lives: Lives, e: ev.SlotClosed) -> None:
    """A life ends."""
    life = lives.lives.pop(e.slot, None)
    if life is not None:
        life.story.append(e)
        life.close(e.at_ns)
        lives.life_ended(life)


def held(lives: Lives, e: ev.SlotHeld) -> None:
    """A hold begins."""
    life = lives.tell(e.slot, e)
    if life is None:
        return
    life.changes += 1
    life.stays.append(Stay(e.hold, e.at_ns, e.point, e.breakpoints, e.seq))
    for transfer in life.transfers:
        if transfer.open:
            transfer.held_since_ns = e.at_ns


def released(lives: Lives, e: ev.HoldReleased) -> None:
    """A hold ends."""
    life = lives.tell(e.slot, e)
    if life is None:
        return
    life.changes += 1
    for stay in life.stays:
        if stay.hold == e.hold:
            stay.end_ns = e.at_ns
    for transfer in life.transfers:
        if transfer.held_since_ns is not None:
            transfer.held_ns += e.at_ns - transfer.held_since_ns
            transfer.held_since_ns = None


def planned(lives: Lives, e: ev.CandidatePlanned) -> Transfer:
    """A transfer begins. A connector's copy that no slot waits for belongs to the slot whose blocks are copied."""
    slot = e.for_slot if e.slot is None else e.slot
    life = lives.tell(slot, e)
    transfer = Transfer(
        e.candidate, slot, life.request if life is not None else e.request, e.route, len(e.hashes) // HASH_BYTES,
        e.at_ns, e.seq,
    )
    lives.transfers[e.candidate] = transfer
    if life is not None:
        life.transfers.append(transfer)
        life.changes += 1
        if life.held_now() is not None:
            transfer.held_since_ns = e.at_ns
    return transfer


def enqueued(lives: Lives, e: ev.CandidateEnqueued) -> None:
    """It stands in the queue of its route."""
    lives.transfers[e.candidate].enqueued_ns = e.at_ns


def evaluated(lives: Lives, e: ev.CandidateEvaluated) -> None:
    """Its blocks were looked up."""
    transfer = lives.transfers[e.candidate]
    transfer.evaluated_ns = e.at_ns
    transfer.found = e.found
    lives.tell(transfer.slot, e)


def promoted(lives: Lives, e: ev.CandidatePromoted) -> None:
    """It became an operation."""
    transfer = lives.transfers[e.candidate]
    transfer.status = CandidateStatus.PROMOTED
    transfer.promoted_ns = e.at_ns
    transfer.operation, transfer.batch = e.operation, e.batch
    transfer.blocks, transfer.thrash = e.blocks or transfer.blocks, e.thrash  # a connector's copy names no places
    lives.by_operation[e.operation] = transfer
    lives.tell(transfer.slot, e)


def started(lives: Lives, e: ev.OperationStarted) -> None:
    """Its mover began to copy."""
    transfer = lives.by_operation[e.operation]
    transfer.started_ns = e.at_ns
    transfer.blocks = e.blocks or transfer.blocks
    life = lives.tell(transfer.slot, e)
    if life is not None:
        life.changes += 1


def reported(lives: Lives, e: ev.OperationReported) -> None:
    """A rank of its mover reported."""
    transfer = lives.by_operation[e.operation]
    transfer.ranks.add(e.rank)
    if e.wire_ns is not None:
        transfer.started_ns = max(transfer.started_ns or 0, e.at_ns - e.wire_ns)
    lives.ranks = max(lives.ranks, e.rank + 1)
    if not e.ok:
        transfer.error, transfer.error_rank = e.error, e.rank
        lives.tell(transfer.slot, e)


def skipped(lives: Lives, e: ev.CandidateSkipped) -> Transfer:
    """It ended without work."""
    transfer = _end(lives, e, CandidateStatus.SKIPPED)
    transfer.reason = e.reason
    lives.tell(transfer.slot, e)
    return transfer


def ended(lives: Lives, e: ev.CandidateEnded) -> Transfer:
    """It ended."""
    transfer = _end(lives, e, e.status)
    if transfer.operation is not None:
        lives.by_operation.pop(transfer.operation, None)
    lives.tell(transfer.slot, e)
    return transfer


def _end(lives: Lives, e: ev.CandidateSkipped | ev.CandidateEnded, status: CandidateStatus) -> Transfer:
    transfer = lives.transfers.pop(e.candidate)
    if transfer.held_since_ns is not None:
        transfer.held_ns += e.at_ns - transfer.held_since_ns
        transfer.held_since_ns = None
    transfer.ended_ns = e.at_ns
    transfer.status = status
    lives.transfer_ended(transfer)
    life = lives.lives.get(transfer.slot) if transfer.slot is not None else None
    if life is not None:
        life.changes += 1
    return transfer


def reset(lives: Lives, e: ev.ResetDone) -> None:
    """No transfer outlives a reset."""
    lives.transfers.clear()
    lives.by_operation.clear()


FOLD: Final[dict[type[Event], Callable[[Any, Any], Any]]] = {
    ev.SlotOpened: opened, ev.SlotCloned: cloned, ev.SlotMoved: moved, ev.SlotClosed: closed, ev.SlotHeld: held,
    ev.HoldReleased: released, ev.CandidatePlanned: planned, ev.CandidateEnqueued: enqueued,
    ev.CandidateEvaluated: evaluated, ev.CandidatePromoted: promoted, ev.OperationStarted: started,
    ev.OperationReported: reported, ev.CandidateSkipped: skipped, ev.CandidateEnded: ended, ev.ResetDone: reset,
}
"""Kind of event to the function that folds it into ``Lives``; other kinds change no life."""
