"""Events written by hand, for what a leader does not do by itself.

Law of this file: every event is folded when it is told, so a tale that could not have happened does not get far.
"""

from typing import Any

from kvbm_console.analysis.walk import Evidence
from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Authority, CandidateStatus, Note, ReleaseReason, Route, SlotState, Tier
from kvbm_console.core.state import CacheState
from tests.analysis.evidence import evidence

MS = 1_000_000
S = 1_000 * MS


class Tale:
    """A G1, a G2 and a G3 pool (0, 1, 2) of 2,000 places, and whatever is told."""

    def __init__(self) -> None:
        self.state = CacheState()
        self.events: list[ev.Event] = []
        self.at_ns = 0
        self.next_hash = 1
        for index, tier in enumerate((Tier.G1, Tier.G2, Tier.G3)):
            authority = Authority.ENGINE if tier is Tier.G1 else Authority.LEADER
            self.tell(ev.PoolKnown, index, int(tier is Tier.G1), 0, 0, tier, "", 2_000, 16, authority)

    def tell(self, kind: Any, *fields: Any, **named: Any) -> int:
        """One more event, now; its number."""
        event = kind(self.state.seq, self.at_ns, self.state.seq, *fields, **named)
        self.state.apply(event)
        self.events.append(event)
        return int(event.seq)

    def wait(self, ns: int) -> None:
        """Time passes, and something happens at the end of it."""
        self.at_ns += ns
        self.tell(ev.Noted, Note.ENGINE_SUMMARY, "")

    def slot(self, name: str, state: SlotState | None = None) -> int:
        """A request with a prompt of 10 tokens; moved on if asked."""
        number = self.state.next_slot
        self.tell(ev.SlotOpened, number, name, 1, b"", 10, 0, 0, None)
        if state is not None:
            self.move(number, state)
        return number

    def queued(self, name: str, ns: int) -> int:
        """A request that waited so long for its turn."""
        slot = self.slot(name)
        self.wait(ns)
        self.move(slot, SlotState.PREFILLING)
        return slot

    def move(self, slot: int, state: SlotState) -> int:
        """A move to another state."""
        return self.tell(
            ev.SlotMoved, slot, self.state.slots[slot].state, state, 1, 0, 0, 0, (0, 0, 0, 0),
            len(self.state.slots[slot].outstanding),
        )

    def plan(self, route: Route, blocks: int = 1, slot: int | None = None) -> int:
        """A candidate for new blocks."""
        number = self.state.next_candidate
        hashes = range(self.next_hash, self.next_hash + blocks)
        self.next_hash += blocks
        self.tell(ev.CandidatePlanned, number, slot, route, pack_hashes(hashes), b"", None)
        return number

    def promote(self, candidate: int, batch: int | None = None) -> int:
        """It becomes an operation between the first free places; the operation's number."""
        facts = self.state.candidates[candidate]
        source, target = facts.route.source - 1, facts.route.target - 1
        number = self.state.next_operation
        self.tell(ev.CandidateEnqueued, candidate)
        self.tell(ev.CandidateEvaluated, candidate, len(facts.hashes), None)
        content = self.state.pools[target].content
        free = [place for place in range(2_000) if not content[place]][: len(facts.hashes)]
        self.tell(ev.BlocksReserved, target, number, pack_ids(free), pack_hashes(facts.hashes))
        self.tell(
            ev.CandidatePromoted, candidate, number, candidate if batch is None else batch, source, target,
            pack_ids(range(len(free))), pack_ids(free),
        )
        return number

    def start(self, operation: int) -> int:
        """The mover begins."""
        return self.tell(ev.OperationStarted, operation)

    def end(self, operation: int, status: CandidateStatus = CandidateStatus.COMPLETED) -> None:
        """It arrives and ends, alone in its batch or not."""
        facts = self.state.operations[operation]
        self.tell(ev.OperationReported, operation, 0, status is CandidateStatus.COMPLETED, "", b"")
        if status is CandidateStatus.COMPLETED:
            self.tell(ev.BlocksReady, facts.target_pool, operation, pack_ids(facts.targets))
        else:
            self.tell(ev.BlocksDropped, facts.target_pool, operation, pack_ids(facts.targets), ReleaseReason.FAILED)
        self.tell(ev.CandidateEnded, facts.candidate, status)
        if not self.state.batches[facts.batch]:
            self.tell(ev.BatchEnded, facts.batch)

    def copy(self, route: Route, blocks: int, took_ns: int) -> None:
        """A whole copy."""
        operation = self.promote(self.plan(route, blocks))
        self.start(operation)
        self.at_ns += took_ns
        self.end(operation)

    def evidence(self, **options: Any) -> Evidence:
        """All of it."""
        return evidence(self.events, LeaderConfig(), **options)
