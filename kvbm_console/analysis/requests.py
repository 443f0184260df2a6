"""The course of each request in one line: arrival, states, hits per tier, time.

Law of this file: figures are counted from events, so a recording that begins in the middle tells its own part alone.
"""

from collections.abc import Callable
from typing import Final

import msgspec
import xxhash

from kvbm_console.analysis import lives
from kvbm_console.analysis.lives import Life, Lives, Move
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.ids import SlotState
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen

PATH_MAX: Final = 10_000
"""Moves kept per request; a request that is left out of every other iteration has thousands."""


class RequestSummary(msgspec.Struct):
    """One request. Times are the engine's; ``ended_ns`` is None for a request that is live at the end of the
    evidence."""

    slot: int
    request: str
    session: str | None
    arrived_ns: int
    """Of a clone the arrival of its first sequence."""
    arrived_seq: int
    """Of a clone the event that opened it."""
    complete: bool
    """True if its arrival is in the evidence, and its end if it has ended."""
    prompt: int
    """Digest of its prompt's hashes and length: equal prompts are equal."""
    prompt_tokens: int
    prompt_blocks: int
    life: Life
    """Its states with their times."""
    hits: list[int]
    """Prompt blocks found in G1 to G4 at the first admission; those of failed loads are taken back."""
    scored_blocks: int = 0
    """Prompt blocks of the first admission."""
    admissions: int = 0
    preemptions: int = 0
    lost_blocks: int = 0
    held_ns: int = 0
    first_token_ns: int | None = None
    ended_ns: int | None = None
    reason: str | None = None

    @property
    def states(self) -> list[str]:
        """The states in their order."""
        return [move.state.label for move in self.life.moves]

    def time_ns(self, until_ns: int) -> int:
        """The time from its arrival to its end, or to ``until_ns`` while the request is live."""
        return (until_ns if self.ended_ns is None else self.ended_ns) - self.arrived_ns


def prompt_digest(hashes: bytes, prompt_tokens: int) -> int:
    """One number for a prompt's hashes (a column) and length."""
    return xxhash.xxh3_64_intdigest(hashes, seed=prompt_tokens & 0xFFFF_FFFF)


class Requests(Visitor):
    """Summaries of all requests, in the order of their arrival.

    ``on_end`` takes each summary when the request ends, or at the end of the gap in which the request ended. ``all``
    then stays empty.
    """

    def __init__(self, on_end: Callable[[RequestSummary, int], None] | None = None) -> None:
        super().__init__()
        self.all: list[RequestSummary] = []
        self._on_end = on_end
        self.from_ns = self.until_ns = 0
        self.evicted_blocks: dict[str, int] = {}
        """Tier to the blocks that it gave up in the evidence, its gaps included; known at the end."""
        self.moved_blocks: dict[str, int] = {}
        """The same of routes and copied blocks."""
        self._state: CacheState | None = None
        self._of: dict[int, RequestSummary] = {}
        self._lives = Lives(PATH_MAX)
        self._evicted_before: list[int] = []
        self._moved_before: dict[str, int] = {}
        self.after = {
            ev.SlotOpened: self._opened, ev.SlotCloned: self._opened, ev.SlotMoved: self._moved,
            ev.PrefixScored: self._scored, ev.HitsLost: self._lost, ev.HoldReleased: self._released,
        }
        self.before = {ev.SlotClosed: self._closed}

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        """Requests that are there already, and the end of those that went in a gap."""
        if self._state is None:
            self.from_ns, totals = state.at_ns, state.totals
            self._evicted_before, self._moved_before = totals.evicted_blocks[:], totals.moved_blocks.copy()
        self._state = state
        for number in [number for number in self._of if number not in state.slots]:
            summary = self._of.pop(number)
            summary.ended_ns, summary.complete = state.at_ns, False
            del self._lives.lives[summary.slot]
            self._tell(summary, state.at_ns)
        for slot in state.slots.values():
            life = self._lives.lives.get(slot.slot) or self._lives.found(slot)
            life.times.resumed(slot, state.iteration)
            if slot.slot not in self._of:
                life.add(Move(slot.since_ns, slot.state, None))
                self._take(slot, state.seq)
        self.until_ns = state.at_ns

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        """Tell the live requests, which have no end."""
        if state is not None:
            self.until_ns = state.at_ns
        for summary in self._of.values():
            self._tell(summary, self.until_ns)
        if self._state is not None:  # the facts as far as they are known
            totals, before = self._state.totals, self._moved_before
            evicted = zip(totals.evicted_blocks, self._evicted_before, strict=True)
            self.evicted_blocks = {f"G{at}": now - then for at, (now, then) in enumerate(evicted, 1) if now > then}
            self.moved_blocks = {
                route: blocks - before.get(route, 0) for route, blocks in totals.moved_blocks.items()
                if blocks > before.get(route, 0)
            }

    def _tell(self, summary: RequestSummary, until_ns: int) -> None:
        if self._on_end is not None:
            self._on_end(summary, until_ns)

    def _take(self, slot: SlotFacts, seq: int) -> None:
        prompt = pack_hashes(slot.hashes[: slot.prompt_blocks])
        life = self._lives.lives[slot.slot]
        times = life.times
        summary = RequestSummary(
            slot.slot, slot.request, slot.session, times.arrived_ns, seq, times.seen,
            prompt_digest(prompt, slot.prompt_tokens), slot.prompt_tokens, slot.prompt_blocks,
            life, [0, 0, 0, 0], first_token_ns=times.first_token_ns,
        )
        if self._on_end is None:
            self.all.append(summary)
        self._of[slot.slot] = summary

    def _opened(self, e: ev.SlotOpened | ev.SlotCloned, state: CacheState) -> None:
        lives.FOLD[type(e)](self._lives, e)
        self._take(state.slots[e.slot], e.seq)

    def _moved(self, e: ev.SlotMoved, state: CacheState) -> None:
        summary = self._of[e.slot]
        lives.moved(self._lives, e)
        summary.first_token_ns = summary.life.times.first_token_ns
        if e.new is SlotState.PREEMPTED:
            summary.preemptions += 1
        if e.reason is not None and summary.reason is None:
            summary.reason = e.reason.label

    def _closed(self, e: ev.SlotClosed, state: CacheState) -> None:
        summary = self._of.pop(e.slot)
        lives.closed(self._lives, e)
        summary.life.story.clear()  # thousands of ended lives are kept, for their states alone
        summary.ended_ns = e.at_ns
        self._tell(summary, e.at_ns)

    def _scored(self, e: ev.PrefixScored, state: CacheState) -> None:
        summary = self._of[e.slot]
        summary.admissions += 1
        if e.readmitted:
            return
        summary.scored_blocks += e.prompt_blocks
        for tier, blocks in enumerate(e.hits):
            summary.hits[tier] += blocks

    def _lost(self, e: ev.HitsLost, state: CacheState) -> None:
        summary = self._of[e.slot]
        if not e.readmitted:
            summary.hits[e.tier - 1] -= e.blocks
            summary.lost_blocks += e.blocks

    def _released(self, e: ev.HoldReleased, state: CacheState) -> None:
        self._of[e.slot].held_ns += e.held_ns
