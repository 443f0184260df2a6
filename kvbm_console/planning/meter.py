"""Measures of a simulated machine: its requests, its device blocks over time, and the times between tokens.

``Timings`` has the figures over virtual time. ``Meter`` reports the begin and end of iterations from the events of a
leader. ``ledger.MachineLedger`` does the same from the calls of an engine without a leader.

An engine samples one token of each decoding request at the end of an iteration, so nearly all gaps of an iteration are
equal. ``TokenGaps`` therefore counts requests instead of visiting them. It keeps the time of the last token only for
requests that were left out since: after a preemption, or because they found no block. For example, two requests decode,
and iterations end at 10 ms and at 15 ms: two gaps of 5 ms. Let a request be left out of the second iteration and sample
again at 20 ms. Its gap is 10 ms, and the other request has two gaps of 5 ms.

Several equal iterations may be reported at once, with the blocks of all of them. A block that only a later iteration
needs is ``early``. The area under the blocks in use and the stats lines exclude the block until then.

Law of this file: it observes and never decides, so a run with a meter makes the same events as a run without.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.ids import Condition, FinishReason, SlotState, Tier
from kvbm_console.core.leader import Outcome
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import IterationFinished, Stimulus
from kvbm_console.core.tiers import PoolFacts

_BYTE_MAX: Final = 255
"""With fewer holders than this, no ref count needs a second byte."""
COMPLETED: Final = (FinishReason.STOP, FinishReason.LENGTH)
_SKIPPED: Final = (SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE)
_REFERENCED, _WRITING = int(Condition.REFERENCED), int(Condition.WRITING)


class RequestRecord(msgspec.Struct):
    """A request in flight or ended."""

    request: str
    arrived_ns: int
    prompt_blocks: int = 0
    hits: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Prompt blocks found in G1 to G4 at the first admission, those of failed loads taken back."""
    first_miss: int | None = None
    """The first prompt block that the last lookup missed in all tiers."""
    why_missed: str = ""
    preemptions: int = 0
    first_token_ns: int | None = None
    finished_ns: int | None = None
    reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0


class Readmitted(msgspec.Struct):
    """Prompt blocks of admissions after a preemption, which mostly find what the request has computed itself.

    No hit rate has them, as in vLLM's metrics: a machine would else have the higher hit rate, the more it preempts.
    """

    prompt_blocks: int = 0
    hit_blocks: int = 0
    """Of these, found in any tier when they were admitted."""


class StatsLine(msgspec.Struct, frozen=True):
    """The device at one moment."""

    point: str
    iteration: int
    active_slots: int
    blocks_used: int
    blocks_free: int
    max_ref_count: int
    passing: bool = False
    """True for a line that comes every few iterations."""

    def document(self) -> dict[str, Any]:
        """The line as an object of the report."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "passing"}

    def text(self) -> str:
        """The line as a sentence."""
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
    """The largest ref count."""
    # ``max`` of a column of 64 Ki places takes a millisecond, ten times as long, and would slow down frequent lines.
    if sys.byteorder != "little" or len(state.slots) + len(state.operations) >= _BYTE_MAX:
        return max(pool.refs, default=0)
    low = pool.refs.tobytes()[:: pool.refs.itemsize]
    shared = low.translate(None, b"\0\1")
    return max(shared) if shared else int(1 in low)


def device_of(state: CacheState) -> PoolFacts:
    """The only G1 pool of a simulated machine."""
    return next(pool for pool in state.pools if pool.info.tier is Tier.G1)


class TokenGaps:
    """Gaps between tokens. ``counts`` maps nanoseconds between two tokens of a request to the number of such gaps."""

    __slots__ = ("_away", "_last_ns", "counts")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._away: dict[Hashable, int] = {}
        """Requests that sampled no token in the last iteration, to the time of their last token."""
        self._last_ns = 0
        """The end of the last iteration."""

    def left_out(self, request: Hashable) -> None:
        """Note that a request with a token takes no part in the next iteration."""
        self._away.setdefault(request, self._last_ns)

    def cloned(self, parent: Hashable, clone: Hashable) -> None:
        """A clone goes on from the last token of its parent."""
        if parent in self._away:
            self._away[clone] = self._away[parent]

    def gone(self, request: Hashable) -> None:
        """A request has ended."""
        self._away.pop(request, None)

    def sampled(
        self, begun_ns: int, at_ns: int, steps: int, requests: int, first: int, back: Iterable[Hashable]
    ) -> None:
        """``steps`` iterations of equal length ended, and ``requests`` requests sampled a token in each of them.

        In the first iteration, ``first`` tokens are the first of their requests; ``back`` names all requests that
        may have been left out of the iteration before.
        """
        lasts_ns = (at_ns - begun_ns) // steps
        ends_ns = begun_ns + lasts_ns
        together = requests - first
        for request in back:
            last_ns = self._away.pop(request, None)
            if last_ns is not None:
                together -= 1
                self._count(ends_ns - last_ns, 1)
        self._count(ends_ns - self._last_ns, together)
        self._count(lasts_ns, (steps - 1) * requests)
        self._last_ns = at_ns

    def _count(self, gap_ns: int, requests: int) -> None:
        if requests:
            self.counts[gap_ns] = self.counts.get(gap_ns, 0) + requests


class Timings:
    """Times of completed requests, device blocks in use, and stats lines; nanoseconds of virtual time.

    ``stats`` is called with a line after every ``stats_every`` iterations, and at each ``point``.
    """

    def __init__(self, stats_every: int = 0, stats: Callable[[StatsLine], None] | None = None) -> None:
        self.ttft_ns = array("q")
        self.latency_ns = array("q")
        self.per_token_ns = array("q")
        """``per_token_ns`` of the same requests, -1 for a request without a second token."""
        self.gaps = TokenGaps()
        self.last_finish_ns = 0
        self.peak_used = 0
        self.points: list[StatsLine] = []
        self._stats = stats
        self._stats_every = stats_every if stats is not None else 0
        self._at_ns = self._area = 0
        """``_area`` is the sum of used device blocks over time, up to ``_at_ns``."""
        self._running: tuple[int, int, int, int, Iterable[Hashable], int] = (0, 1, 0, 0, (), 0)
        """The arguments of the last ``begin``."""

    @property
    def mean_used(self) -> float:
        """Device blocks held by requests or copies, averaged over virtual time."""
        return self._area / self._at_ns if self._at_ns else 0.0

    def completed(self, arrived_ns: int, first_token_ns: int, finished_ns: int, output_tokens: int) -> None:
        """A request has produced all its tokens."""
        self.ttft_ns.append(first_token_ns - arrived_ns)
        self.latency_ns.append(finished_ns - arrived_ns)
        self.per_token_ns.append(per_token_ns(first_token_ns, finished_ns, output_tokens))
        self.last_finish_ns = finished_ns

    def begin(
        self, at_ns: int, steps: int, requests: int, first: int, back: Iterable[Hashable], early: int
    ) -> None:
        """``steps`` iterations begin; see ``TokenGaps.sampled``. ``early`` is the sum of iterations by which all early
        blocks are early."""
        self._running = (at_ns, steps, requests, first, back, early)

    def end(self, at_ns: int) -> None:
        """The iterations that began last have ended."""
        begun_ns, steps, requests, first, back, early = self._running
        self.gaps.sampled(begun_ns, at_ns, steps, requests, first, back)
        self._area -= early * ((at_ns - begun_ns) // steps)  # all iterations have the same length
        self._running = (begun_ns, steps, requests, first, (), 0)

    def passed(self, at_ns: int, used: int) -> None:
        """Add the time in which ``used`` device blocks were in use, up to now."""
        if at_ns != self._at_ns:
            self._area += used * (at_ns - self._at_ns)
            self._at_ns = at_ns

    def point(self, line: StatsLine) -> None:
        """Take the stats line of a moment."""
        self.points.append(line)
        if self._stats is not None:
            self._stats(line)

    def tell(self, before: int, last: int, early: Sequence[int], line: Callable[[], StatsLine]) -> None:
        """Report the stats lines after iteration ``before`` up to ``last``, which end together.

        ``line`` makes the present line, which has all blocks. ``early`` has, in ascending order, the number of these
        iterations that begin before each early block is needed.
        """
        every = self._stats_every
        if self._stats is None or not every or before // every == last // every:
            return
        now = line()
        for iteration in range((before // every + 1) * every, last + 1, every):
            later = len(early) - bisect_right(early, iteration - before - 1)
            self._stats(msgspec.structs.replace(
                now, iteration=iteration, blocks_used=now.blocks_used - later, blocks_free=now.blocks_free + later,
            ))


class Meter:
    """The publisher of a dispatcher: called with every stimulus and its outcome (``Dispatcher.publish``).

    ``ended`` is called with the record of every request that has ended. With ``keep_records`` every request keeps its
    ``RequestRecord`` until ``free_finished``; otherwise only live requests do. ``stats`` is called as in ``Timings``.
    """

    def __init__(
        self, *, keep_records: bool = False, stats_every: int = 0, stats: Callable[[StatsLine], None] | None = None,
        ended: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.times = Timings(stats_every, stats)
        self.readmitted = Readmitted()
        self.records: list[RequestRecord] = []
        self.keep_records = keep_records
        self.after_prefill: Callable[[], None] = lambda: None
        """Called once, when the stats line of the first decoding iteration was taken."""
        self._live: dict[int, RequestRecord] = {}
        self._state: CacheState | None = None
        self._device: PoolFacts | None = None
        self._used = 0
        self._assigned: ev.DeviceBlocksAssigned | None = None
        self._prefilled: list[RequestRecord] = []
        """Requests whose prompt the running iteration completes, so it samples their first token."""
        self._totals: dict[int, int] = {}
        """Preempted slots, to the tokens that they compute before they sample again."""
        self._decoding: set[int] = set()
        self._back: list[int] = []
        """Slots of the running iteration that may have been left out of the iteration before."""
        self._ended = ended

    def watch(self, state: CacheState) -> None:
        """Watch a machine whose device pool is declared, before the first request arrives."""
        self._state = state
        self._device = device_of(state)
        self.point("reset")

    def free_finished(self) -> None:
        """Drop the records of the requests that have ended."""
        live = {id(record) for record in self._live.values()}
        self.records = [record for record in self.records if id(record) in live]

    def point(self, name: str) -> None:
        """Take the stats line of this moment."""
        assert self._state is not None
        self.times.point(stats_of(self._state, name))

    def __call__(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """Measure a stimulus and its outcome."""
        times = self.times
        if type(stimulus) is IterationFinished:
            times.end(stimulus.at_ns)
            for record in self._prefilled:
                if record.first_token_ns is None:
                    record.first_token_ns = stimulus.at_ns
            self._prefilled, self._back = [], []
        for event in outcome.events:
            look = _LOOK_AT(type(event))
            if look is not None:
                look(self, event)
        device = self._device
        if device is not None:
            times.passed(stimulus.at_ns, self._used)
            counts = device.counts
            self._used = used = counts[_REFERENCED] + counts[_WRITING]
            if used > times.peak_used:
                times.peak_used = used

    # --- one method for each kind of event ---

    def _opened(self, event: ev.SlotOpened) -> None:
        record = RequestRecord(event.request, event.at_ns, prompt_tokens=event.prompt_tokens)
        self._live[event.slot] = record
        if self.keep_records:
            self.records.append(record)

    def _cloned(self, event: ev.SlotCloned) -> None:
        parent = self._live[event.parent]
        record = RequestRecord(event.request, parent.arrived_ns, parent.prompt_blocks, parent.hits)
        record.first_token_ns = parent.first_token_ns  # each sequence samples its own token from the same prompt
        record.prompt_tokens = parent.prompt_tokens
        self.times.gaps.cloned(event.parent, event.slot)
        self._live[event.slot] = record
        if self.keep_records:
            self.records.append(record)

    def _answered(self, event: ev.LookupAnswered) -> None:
        record = self._live[event.slot]
        record.first_miss, record.why_missed = event.first_miss, event.why.label

    def _scored(self, event: ev.PrefixScored) -> None:
        if event.readmitted:
            self.readmitted.prompt_blocks += event.prompt_blocks
            self.readmitted.hit_blocks += sum(event.hits)
            return
        record = self._live[event.slot]
        record.prompt_blocks, record.hits = event.prompt_blocks, event.hits

    def _lost(self, event: ev.HitsLost) -> None:
        if event.readmitted:
            return
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
            if len(self.times.points) == 1:
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
            self.times.gaps.left_out(slot)

    def _finished(self, event: ev.SlotMoved, record: RequestRecord, reason: FinishReason) -> None:
        record.finished_ns = event.at_ns
        record.reason = reason.label
        self.times.gaps.gone(event.slot)
        if record.first_token_ns is not None:
            record.output_tokens = event.computed_tokens - record.prompt_tokens + 1
        if reason in COMPLETED:
            if record.first_token_ns is None:
                record.first_token_ns = event.at_ns
            self.times.completed(record.arrived_ns, record.first_token_ns, event.at_ns, record.output_tokens)
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
        early = sorted(self._early(event)) if event.count > 1 else []
        requests = len(self._decoding) + len(self._prefilled)
        self.times.begin(event.at_ns, event.count, requests, first_tokens, self._back, sum(early))
        state = self._state
        assert state is not None
        self.times.tell(
            event.iteration - event.count, event.iteration, early, lambda: stats_of(state, "decode", passing=True)
        )

    def _early(self, event: ev.IterationAdvanced) -> list[int]:
        """For each block of several iterations, the number of iterations that begin before the block is needed.

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
"""Event type to the method that measures it; other events have no part in the figures."""
_LOOK_AT: Final = _LOOK.get


def per_token_ns(first_token_ns: int, finished_ns: int, tokens: int) -> int:
    """Nanoseconds for each token after the first, rounded down; -1 for a request without a second token.

    >>> per_token_ns(100, 400, 4), per_token_ns(100, 100, 1)
    (100, -1)
    """
    return (finished_ns - first_token_ns) // (tokens - 1) if tokens > 1 else -1


def spread_of(counts: Mapping[int, int]) -> dict[str, Any]:
    """Mean, percentiles and maximum of counted values; all None without values.

    >>> spread_of({1: 9, 11: 1})
    {'mean': 2.0, 'p50': 1, 'p90': 1, 'p99': 11, 'max': 11}
    """
    number = sum(counts.values())
    if not number:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    ordered = sorted(counts)
    spread: dict[str, Any] = {"mean": sum(value * count for value, count in counts.items()) / number}
    at = seen = 0
    for name, share in (("p50", 500), ("p90", 900), ("p99", 990)):
        rank = -(-number * share // 1_000)
        while seen + counts[ordered[at]] < rank:
            seen += counts[ordered[at]]
            at += 1
        spread[name] = ordered[at]
    spread["max"] = ordered[-1]
    return spread
