"""The meter: what is measured while a simulated machine runs, from its stream of events alone.

Law of this file: it looks and never decides; a run with a meter makes the same events as one without. Times are
nanoseconds of virtual time.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.ids import Condition, FinishReason, SlotState, Tier
from kvbm_console.core.leader import Outcome
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import IterationFinished, Stimulus
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.planning.tokens import TokenGaps, per_token_ns

_BYTE_MAX: Final = 255
"""With fewer holders than this no ref count needs a second byte."""
COMPLETED: Final = (FinishReason.STOP, FinishReason.LENGTH)
_SKIPPED: Final = (SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE)
_REFERENCED, _WRITING = int(Condition.REFERENCED), int(Condition.WRITING)


class RequestRecord(msgspec.Struct):
    """One request that has ended or is under way."""

    request: str
    arrived_ns: int
    prompt_blocks: int = 0
    hits: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Prompt blocks found in G1 to G4 at its last admission."""
    first_miss: int | None = None
    """The first prompt block that its last lookup found nowhere."""
    why_missed: str = ""
    preemptions: int = 0
    first_token_ns: int | None = None
    finished_ns: int | None = None
    reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0


class StatsLine(msgspec.Struct, frozen=True):
    """The device at one moment."""

    point: str
    iteration: int
    active_slots: int
    blocks_used: int
    blocks_free: int
    max_ref_count: int
    passing: bool = False
    """Whether it is one of those that come every few iterations."""

    def document(self) -> dict[str, Any]:
        """The line as it stands in the report."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "passing"}

    def text(self) -> str:
        """One line for people."""
        return (
            f"stats {self.point}: iteration {self.iteration}, {self.active_slots} active slots, "
            f"{self.blocks_used} blocks used, {self.blocks_free} free, max ref count {self.max_ref_count}"
        )


def stats_of(state: CacheState, point: str, *, passing: bool = False) -> StatsLine:
    """The stats line of a state, by walking the device pool."""
    pool = device_of(state)
    used = pool.counts[Condition.REFERENCED] + pool.counts[Condition.WRITING] + pool.counts[Condition.QUARANTINED]
    return StatsLine(
        point, state.iteration, len(state.slots), used, len(pool) - used, _most_refs(state, pool), passing
    )


def _most_refs(state: CacheState, pool: PoolFacts) -> int:
    """The largest ref count. ``max`` of a column of 64 Ki places takes a millisecond and this a tenth of it, so that a
    line every few iterations does not slow a run down."""
    if sys.byteorder != "little" or len(state.slots) + len(state.operations) >= _BYTE_MAX:
        return max(pool.refs, default=0)
    low = pool.refs.tobytes()[:: pool.refs.itemsize]
    shared = low.translate(None, b"\0\1")
    return max(shared) if shared else int(1 in low)


def device_of(state: CacheState) -> PoolFacts:
    """The only G1 pool of a simulated machine."""
    return next(pool for pool in state.pools if pool.info.tier is Tier.G1)


class Meter:
    """Called for every stimulus with what it led to (``Dispatcher.publish``).

    ``ttft_ns``, ``latency_ns`` and ``per_token_ns`` have one entry for each completed request, ``gaps`` counts the
    times between tokens. ``ended`` is told the record of every request that has ended. With ``keep_records`` every
    request keeps its ``RequestRecord`` until ``free_finished``; otherwise only live ones do. ``stats`` is told a line
    after every ``stats_every`` iterations.
    """

    def __init__(
        self, *, keep_records: bool = False, stats_every: int = 0, stats: Callable[[StatsLine], None] | None = None,
        ended: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.ttft_ns = array("q")
        self.latency_ns = array("q")
        self.per_token_ns = array("q")
        self.gaps = TokenGaps()
        self.records: list[RequestRecord] = []
        self.last_finish_ns = 0
        self.peak_used = 0
        self.points: list[StatsLine] = []
        self.keep_records = keep_records
        self.after_prefill: Callable[[], None] = lambda: None
        """Called once, when the stats line of the first decoding iteration was taken."""
        self._live: dict[int, RequestRecord] = {}
        self._state: CacheState | None = None
        self._device: PoolFacts | None = None
        self._at_ns = 0
        self._used = 0
        self._area = 0
        self._assigned: ev.DeviceBlocksAssigned | None = None
        self._prefilled: list[RequestRecord] = []
        """Requests whose prompt the iteration that runs computes to its end: it samples their first token."""
        self._totals: dict[int, int] = {}
        """Tokens that a slot which was preempted computes before it samples again."""
        self._decoding: set[int] = set()
        self._back: list[int] = []
        """Slots of the iteration that runs which may have been left out of the one before."""
        self._sampling: tuple[int, int, int, int] = (0, 1, 0, 0)
        """Of the iterations that run: begin, number, requests that sample a token in each, and how many of these are
        first tokens."""
        self._ended = ended
        self._window: tuple[int, int, int] = (0, 0, 0)
        """Of iterations that were told at once: begin, number, and by how many iterations altogether their blocks were
        told of before they were given."""
        self._stats = stats
        self._stats_every = stats_every if stats is not None else 0
        self._iterations = 0

    def watch(self, state: CacheState) -> None:
        """The machine stands: its device pool is declared and nothing has arrived."""
        self._state = state
        self._device = device_of(state)
        self.point("reset")

    def free_finished(self) -> None:
        """Give up the records of the requests that have ended."""
        live = {id(record) for record in self._live.values()}
        self.records = [record for record in self.records if id(record) in live]

    def point(self, name: str) -> None:
        """Take the stats line of this moment."""
        assert self._state is not None
        line = stats_of(self._state, name)
        self.points.append(line)
        if self._stats is not None:
            self._stats(line)

    @property
    def mean_used(self) -> float:
        """Device blocks held by requests or copies, averaged over virtual time."""
        return self._area / self._at_ns if self._at_ns else 0.0

    def __call__(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """Look at one stimulus and what it led to."""
        if self._window[2] and type(stimulus) is IterationFinished:
            since_ns, count, early = self._window
            self._area -= early * ((stimulus.at_ns - since_ns) // count)  # they last equally long
            self._window = (0, 0, 0)
        if type(stimulus) is IterationFinished:
            begun_ns, steps, requests, first_tokens = self._sampling
            self.gaps.sampled(begun_ns, stimulus.at_ns, steps, requests, first_tokens, self._back)
            self._back = []
        if self._prefilled and type(stimulus) is IterationFinished:
            for record in self._prefilled:
                if record.first_token_ns is None:
                    record.first_token_ns = stimulus.at_ns
            self._prefilled = []
        for event in outcome.events:
            look = _LOOK_AT(type(event))
            if look is not None:
                look(self, event)
        device = self._device
        if device is not None:
            at_ns = stimulus.at_ns
            if at_ns != self._at_ns:
                self._area += self._used * (at_ns - self._at_ns)
                self._at_ns = at_ns
            counts = device.counts
            self._used = used = counts[_REFERENCED] + counts[_WRITING]
            if used > self.peak_used:
                self.peak_used = used

    # --- one method for each kind of event ---

    def _opened(self, event: ev.SlotOpened) -> None:
        record = RequestRecord(event.request, event.at_ns, prompt_tokens=event.prompt_tokens)
        self._live[event.slot] = record
        if self.keep_records:
            self.records.append(record)

    def _cloned(self, event: ev.SlotCloned) -> None:
        parent = self._live[event.parent]
        record = RequestRecord(event.request, parent.arrived_ns, parent.prompt_blocks, parent.hits)
        record.first_token_ns = parent.first_token_ns  # each sequence samples its own from the same prompt
        record.prompt_tokens = parent.prompt_tokens
        self.gaps.cloned(event.parent, event.slot)
        self._live[event.slot] = record
        if self.keep_records:
            self.records.append(record)

    def _answered(self, event: ev.LookupAnswered) -> None:
        record = self._live[event.slot]
        record.first_miss, record.why_missed = event.first_miss, event.why.label

    def _scored(self, event: ev.PrefixScored) -> None:
        record = self._live[event.slot]
        record.prompt_blocks, record.hits = event.prompt_blocks, event.hits

    def _lost(self, event: ev.HitsLost) -> None:
        record = self._live[event.slot]
        hits = list(record.hits)
        hits[event.tier - 1] -= event.blocks
        record.hits = (hits[0], hits[1], hits[2], hits[3])

    def _moved(self, event: ev.SlotMoved) -> None:
        record = self._live.get(event.slot)
        if record is None:
            return
        if event.old is SlotState.DECODING:
            self._decoding.discard(event.slot)
        if event.new is SlotState.DECODING:
            self._decoding.add(event.slot)
            self._back.append(event.slot)
            if len(self.points) == 1:
                self.point("prefill")
                self.after_prefill()
        elif event.new is SlotState.PREEMPTED:
            record.preemptions += 1
            self._totals[event.slot] = max(self._totals.get(event.slot, 0), event.computed_tokens + 1)
            self._leave_out(event.slot, record)
        elif event.new in _SKIPPED:
            self._leave_out(event.slot, record)
        elif event.reason is not None and record.finished_ns is None:
            self._finished(event, record, event.reason)

    def _leave_out(self, slot: int, record: RequestRecord) -> None:
        if record.first_token_ns is not None:
            self.gaps.left_out(slot)

    def _finished(self, event: ev.SlotMoved, record: RequestRecord, reason: FinishReason) -> None:
        record.finished_ns = event.at_ns
        record.reason = reason.label
        self.gaps.gone(event.slot)
        if record.first_token_ns is not None:
            record.output_tokens = event.computed_tokens - record.prompt_tokens + 1
        if reason in COMPLETED:
            if record.first_token_ns is None:
                record.first_token_ns = event.at_ns
            self.ttft_ns.append(record.first_token_ns - record.arrived_ns)
            self.latency_ns.append(event.at_ns - record.arrived_ns)
            self.per_token_ns.append(per_token_ns(record.first_token_ns, event.at_ns, record.output_tokens))
            self.last_finish_ns = event.at_ns
        if self._ended is not None:
            self._ended(record)

    def _closed(self, event: ev.SlotClosed) -> None:
        self._live.pop(event.slot, None)
        self._totals.pop(event.slot, None)

    def _given(self, event: ev.DeviceBlocksAssigned) -> None:
        self._assigned = event

    def _advanced(self, event: ev.IterationAdvanced) -> None:
        first_tokens = 0
        for number, position in zip(event.slots, event.positions, strict=True):
            record = self._live[number]
            if position >= max(record.prompt_tokens, self._totals.get(number, 0)):
                self._prefilled.append(record)
                self._back.append(number)
                first_tokens += record.first_token_ns is None
        self._sampling = (
            event.at_ns, event.count, len(self._decoding) + len(self._prefilled), first_tokens
        )
        early = self._early(event) if event.count > 1 else []
        if event.count > 1:
            self._window = (event.at_ns, event.count, sum(early))
        if self._stats_every:
            every, before = self._stats_every, self._iterations
            self._iterations = after = before + event.count
            first = (before // every + 1) * every
            if first <= after:
                self._pass(event, range(first - before - 1, after - before, every), early)

    def _pass(self, event: ev.IterationAdvanced, offsets: range, early: list[int]) -> None:
        """The stats lines of these iterations, counted from the first that the event tells of: exactly those that the
        same iterations one by one would have had."""
        assert self._stats is not None
        assert self._state is not None
        line = stats_of(self._state, "decode", passing=True)
        early.sort()
        for offset in offsets:
            later = len(early) - bisect_right(early, offset)
            self._stats(msgspec.structs.replace(
                line, iteration=event.iteration - event.count + 1 + offset, blocks_used=line.blocks_used - later,
                blocks_free=line.blocks_free + later,
            ))

    def _early(self, event: ev.IterationAdvanced) -> list[int]:
        """For each block that was told of for several iterations at once: how many of them begin before it is needed.

        Block b of a decoding slot is needed by the iteration that begins with b blocks of computed tokens.
        """
        if self._assigned is None or self._assigned.cause != event.cause:
            return []
        assert self._state is not None
        assert self._device is not None
        size, first = self._device.info.block_tokens, event.iteration - event.count + 1
        early: list[int] = []
        counts: dict[int, int] = {}
        for number, count in zip(self._assigned.slots, self._assigned.counts, strict=True):
            counts[number] = counts.get(number, 0) + count
        for number, count in counts.items():
            slot = self._state.slots[number]
            begun = slot.computed_tokens(first - 1)
            blocks = len(slot.device_blocks)
            early += [block * size - begun for block in range(blocks - count, blocks)]
        return early


_LOOK: Final[dict[type[ev.Event], Callable[[Meter, Any], None]]] = {
    ev.SlotOpened: Meter._opened,
    ev.SlotCloned: Meter._cloned,
    ev.LookupAnswered: Meter._answered,
    ev.PrefixScored: Meter._scored,
    ev.HitsLost: Meter._lost,
    ev.SlotMoved: Meter._moved,
    ev.SlotClosed: Meter._closed,
    ev.DeviceBlocksAssigned: Meter._given,
    ev.IterationAdvanced: Meter._advanced,
}
"""Event type to the method that looks at it; the others say nothing that is measured."""
_LOOK_AT: Final = _LOOK.get


def percentile(ordered: "array[int]", share: float) -> int | None:
    """The smallest value that at least this share of an ordered column does not exceed; None for an empty one.

    >>> percentile(array("q", [1, 2, 3, 4]), 0.5)
    2
    """
    if not ordered:
        return None
    rank = -(-len(ordered) * round(share * 1_000) // 1_000)
    return ordered[max(0, rank - 1)]
