"""Lives: the history of a slot, which the facts do not keep: moves, holds, transfers and its story.

Law of this file: everything of one life is bounded, dropped entries are counted, and times are the target's. The
archive of finished lives is bounded, too: the oldest goes, with every name under which it could be found.
"""

from bisect import bisect_right
from collections import deque
from itertools import islice
from typing import Final

from kvbm_console.core.events import CandidatePlanned, CandidatePromoted, Event, SlotCloned, SlotOpened
from kvbm_console.core.ids import CandidateStatus, Route, SkipReason, SlotState, WaitPoint
from kvbm_console.core.state import CacheState

MOVES_MAX: Final = 1_024
"""Moves kept of one life; a request that is skipped in every other iteration would otherwise grow without end."""
HOLDS_MAX: Final = 64
STORY_MAX: Final = 96
"""Events kept of one story, newest first on the screen; the log and a recording have the rest."""
TRANSFERS_MAX: Final = 48
"""Transfers kept of one life."""


class Move:
    """One stretch of a life: the state entered at ``start_ns`` by event ``seq``."""

    __slots__ = ("cause", "detail", "entry", "iteration", "seq", "start_ns", "state", "unseen_ns")

    def __init__(
        self, start_ns: int, state: SlotState, seq: int | None, entry: int = 0, iteration: int = 0, detail: int = 0,
        cause: int | None = None, unseen_ns: int | None = None,
    ) -> None:
        self.start_ns = start_ns
        self.state = state
        self.seq = seq
        """None when the move itself was not seen, only the state in a snapshot."""
        self.entry = entry
        self.iteration = iteration
        self.detail = detail
        self.cause = cause
        self.unseen_ns = unseen_ns
        """Since when, up to ``start_ns``, it is not known what the slot did; None when that is known."""


class Stay:
    """One hold: from ``start_ns`` to ``end_ns``, None while it lasts."""

    __slots__ = ("breakpoints", "end_ns", "hold", "point", "start_ns")

    def __init__(self, hold: int, start_ns: int, point: WaitPoint, breakpoints: tuple[int, ...]) -> None:
        self.hold = hold
        self.start_ns = start_ns
        self.end_ns: int | None = None
        self.point = point
        self.breakpoints = breakpoints


class Transfer:
    """One candidate with its stamps and, once promoted, its operation; None for a stamp that is not there yet."""

    __slots__ = (
        "asked", "blocks", "candidate", "ended_ns", "enqueued_ns", "error", "evaluated_ns", "found", "held_ns",
        "held_since_ns", "lost", "operation", "planned_ns", "promoted_ns", "ranks", "reason", "request", "route",
        "slot", "started_ns", "status",
    )

    def __init__(
        self, candidate: int, slot: int | None, request: str, route: Route, asked: int, planned_ns: int
    ) -> None:
        self.candidate = candidate
        self.slot = slot
        self.request = request
        """Empty when no slot owns the blocks."""
        self.route = route
        self.asked = asked
        self.blocks = asked
        self.planned_ns = planned_ns
        self.enqueued_ns: int | None = None
        self.evaluated_ns: int | None = None
        self.promoted_ns: int | None = None
        self.started_ns: int | None = None
        self.ended_ns: int | None = None
        self.status = CandidateStatus.PENDING_EVALUATION
        self.reason: SkipReason | None = None
        self.operation: int | None = None
        self.found: int | None = None
        self.ranks: set[int] = set()
        """Ranks that have reported."""
        self.lost = False
        """Whether it ended unseen: how is not known, and not before ``ended_ns``."""
        self.error = ""
        self.held_ns = 0
        """Time during which its slot was held; no latency counts it."""
        self.held_since_ns: int | None = None

    @property
    def label(self) -> str:
        """The operation's number, or the candidate's with a ``c`` before there is one."""
        return str(self.operation) if self.operation is not None else f"c{self.candidate}"

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
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
        "cause_seq", "changes", "closed_ns", "dropped", "lost", "moves", "opened_ns", "request", "slot", "starts",
        "stays", "story", "transfers",
    )

    def __init__(self, slot: int, request: str, opened_ns: int) -> None:
        self.slot = slot
        self.request = request
        self.opened_ns = opened_ns
        self.closed_ns: int | None = None
        self.lost = False
        """Whether its end was not seen (a gap, or passed over), so that how it ended is not known."""
        self.moves: list[Move] = []
        self.starts: list[int] = []
        """``moves[i].start_ns``, for bisection."""
        self.stays: deque[Stay] = deque(maxlen=HOLDS_MAX)
        self.transfers: deque[Transfer] = deque(maxlen=TRANSFERS_MAX)
        self.story: deque[Event] = deque(maxlen=STORY_MAX)
        self.changes = 0
        """Grows with every change: the key of cached pictures."""
        self.dropped = 0

    @property
    def state(self) -> SlotState:
        """Its last known state."""
        return self.moves[-1].state if self.moves else SlotState.INITIALIZED

    def add(self, move: Move) -> None:
        """Append a move; the oldest quarter goes when there are too many."""
        self.changes += 1
        if len(self.moves) >= MOVES_MAX:
            cut = MOVES_MAX // 4
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
        """Whether it is known what the slot did then."""
        index = self.at(at_ns)
        if index is None or index + 1 >= len(self.moves):
            return index is not None
        unseen_ns = self.moves[index + 1].unseen_ns
        return unseen_ns is None or at_ns < unseen_ns

    def first_known_ns(self) -> int:
        """Where its picture begins."""
        return self.starts[0] if self.starts else self.opened_ns


PAST_MAX: Final = 512
"""Finished lives kept for the timeline: ten screens of them."""
ENDED_MAX: Final = 2_048
"""Transfers that ended, kept for the transfers view and its percentiles."""


class Archive:
    """``lives`` and ``transfers`` in the order in which they ended."""

    def __init__(self) -> None:
        self.lives: deque[Life] = deque()
        """PAST_MAX at most."""
        self.transfers: deque[Transfer] = deque()
        """ENDED_MAX at most."""
        self.forgotten = 0
        """Lives that had to go."""
        self._slots: dict[int, Life] = {}
        self._requests: dict[str, Life] = {}
        self._candidates: dict[int, Transfer] = {}
        self._operations: dict[int, Transfer] = {}

    def bury(self, life: Life) -> None:
        """Keep a finished life."""
        self.lives.append(life)
        self._slots[life.slot] = life
        self._requests[life.request] = life
        if len(self.lives) > PAST_MAX:
            oldest = self.lives.popleft()
            self.forgotten += 1
            self._slots.pop(oldest.slot, None)
            if self._requests.get(oldest.request) is oldest:
                del self._requests[oldest.request]

    def keep(self, transfer: Transfer) -> None:
        """Keep a transfer that ended."""
        self.transfers.append(transfer)
        self._candidates[transfer.candidate] = transfer
        if transfer.operation is not None:
            self._operations[transfer.operation] = transfer
        if len(self.transfers) > ENDED_MAX:
            oldest = self.transfers.popleft()
            self._candidates.pop(oldest.candidate, None)
            if oldest.operation is not None:
                self._operations.pop(oldest.operation, None)

    def of_slot(self, slot: int) -> Life | None:
        """The life that a slot had."""
        return self._slots.get(slot)

    def of_request(self, request: str) -> Life | None:
        """The last finished life of a request."""
        return self._requests.get(request)

    def of_candidate(self, candidate: int) -> Transfer | None:
        """The transfer that a candidate was."""
        return self._candidates.get(candidate)

    def of_operation(self, operation: int) -> Transfer | None:
        """The transfer that an operation was."""
        return self._operations.get(operation)


NAMES_MAX: Final = 50_000
"""Requests, candidates and operations that are kept by number, each."""


class Names:
    """The slots that numbers of candidates and operations stand for, and the requests of slots, learnt from events."""

    def __init__(self, state: CacheState | None = None) -> None:
        self.requests: dict[int, str] = {}
        """Slot to request."""
        self._slots: dict[int, int | None] = {}
        """Candidate to slot."""
        self._candidates: dict[int, int] = {}
        """Operation to candidate."""
        if state is not None:
            self._slots = {number: known.slot for number, known in state.candidates.items()}
            self._candidates = {number: copy.candidate for number, copy in state.operations.items()}

    def learn(self, events: list[Event]) -> None:
        """Take over the names in these events; the oldest names go when there are too many."""
        for event in events:
            if isinstance(event, SlotOpened | SlotCloned):
                self.requests[event.slot] = event.request
            elif isinstance(event, CandidatePlanned):
                self._slots[event.candidate] = event.slot
            elif isinstance(event, CandidatePromoted):
                self._candidates[event.operation] = event.candidate
        for known in (self.requests, self._slots, self._candidates):
            for number in list(islice(known, max(0, len(known) - NAMES_MAX))):
                del known[number]

    def slot_of(self, candidate: int | None, operation: int | None) -> int | None:
        """The slot of a candidate or an operation; None where it is not known, or where no slot owns the blocks."""
        if candidate is None and operation is not None:
            candidate = self._candidates.get(operation)
        return None if candidate is None else self._slots.get(candidate)
