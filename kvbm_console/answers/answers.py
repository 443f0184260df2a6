"""The questions that a program may ask, each answered by a small document.

Every answer has ``seq`` and ``at_ms``, the place that it speaks of, and names the events that show what it says. A
place is taken as ``replay --at`` takes it, so ``"237"`` and ``"700ms"`` go there.

Law of this file: a question is a walk over evidence or a look at facts, and the words are those of the commands.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvbm_console.analysis.diff import diff
from kvbm_console.analysis.explain import Explanation, explain, grouped, only_block
from kvbm_console.analysis.export.rows import Consumer, Rows, TierSample
from kvbm_console.analysis.lints import LINTS
from kvbm_console.analysis.lints.lint import plural
from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.walk import walk
from kvbm_console.answers.pages import Answer, PageRows, ms, paged
from kvbm_console.answers.source import AnswerSource, Facts
from kvbm_console.core import events as ev
from kvbm_console.core.describe import describe, kind, request_of, slot_of, slots_of
from kvbm_console.core.errors import NotFound, UsageError
from kvbm_console.core.expression import ExpressionError, compile_event_filter, compile_slot_filter
from kvbm_console.core.state import CacheState
from kvbm_console.recording.positions import parse_position
from kvbm_console.stream.feed import GapSeen, why_lost

T = TypeVar("T")
CURVE_POINTS: Final = 16
"""Samples of a tier's curve in an answer."""
FINDINGS_BRIEF: Final = 6
"""Findings in an overview; ``doctor`` tells all."""
EVENT_COLUMNS: Final = ("seq", "at_ms", "kind", "request", "text")


async def overview(source: AnswerSource, at: str | None = None) -> Answer:
    """Extent, slots by state, tiers, holds, gaps and the worst findings in brief."""
    facts = await source.facts(at)
    diagnosis = await source.diagnosis()
    evidence = await source.evidence()
    config = evidence.config
    settings = None if config is None else {
        name: getattr(config, name)
        for name in ("block_tokens", "g2_blocks", "g3_blocks", "offload_threshold", "prefetch", "ranks")
    }
    answer = {
        **_place(facts), "source": source.name, "live": source.live, "events": diagnosis.events,
        "lost_events": diagnosis.lost_events, "requests": diagnosis.requests,
        "from_ms": ms(diagnosis.from_ns), "until_ms": ms(diagnosis.until_ns), "settings": settings,
        "slots_by_state": dict(Counter(slot["state"] for slot in facts.document["slots"])),
        "tiers": {
            name: [tier["resident_blocks"], tier["capacity_blocks"]]
            for name, tier in facts.document["tiers"].items() if tier["capacity_blocks"] or tier["resident_blocks"]
        },
        "holds": len(facts.document["holds"]), "open_copies": len(facts.document["transfers"]),
        "prefetch": facts.document["prefetch"] if facts.document["prefetch"]["fetched_blocks"] else None,
        "findings": len(diagnosis.findings),
    }
    rows = [
        [finding.lint, finding.level.label, finding.who, finding.what, finding.seq]
        for finding in diagnosis.findings[:FINDINGS_BRIEF]
    ]
    return paged(answer, ("lint", "level", "who", "what", "seq"), rows)


async def slots(source: AnswerSource, filter: str = "", at: str | None = None, offset: int = 0) -> Answer:
    """The live slots at a place, those for which the expression holds."""
    facts = await source.facts(at)
    shown = compile_slot_filter(filter, now=lambda: facts.at_ns) if filter else lambda state, slot: True
    wanted = {str(slot.slot) for slot in facts.state.slots.values() if shown(facts.state, slot)}
    columns = ("slot", "request", "state", "for_ms", "computed_tokens", "prompt_tokens", "open_copies", "hold")
    rows = [
        [row["slot"], row["request"], row["state"], ms(row["age_ns"]), row["computed_tokens"], row["prompt_tokens"],
         row["outstanding"], row["hold"]]
        for row in facts.document["slots"] if row["slot"] in wanted
    ]
    return paged(_place(facts), columns, rows, offset)


async def story(source: AnswerSource, request: str, offset: int = 0) -> Answer:
    """Every event of the last slot of a request, in order: its states, copies, blocks and holds."""
    evidence = await source.evidence()
    told = _Story(request, offset)
    await _walked(lambda: walk(evidence, (told,)))
    if told.slot is None:
        raise NotFound(f"{evidence.name} has no request {request!r}")
    return paged({**_first(told.window), "request": request, "slot": str(told.slot)}, EVENT_COLUMNS, told.window)


async def why(source: AnswerSource, request: str, block: int | None = None, offset: int = 0) -> Answer:
    """Why a request missed blocks of its prompt, and where its time went; each reason names its deciding event."""
    evidence = await source.evidence()
    found: Explanation = await _walked(lambda: explain(evidence, request))
    found = grouped(found) if block is None else only_block(found, block)
    rows = [
        [admission.seq, "tokens" if miss.first is None else f"{miss.first}-{miss.last}", miss.reason.value, miss.text,
         miss.seq, miss.event, list(miss.also)]
        for admission in found.admissions for miss in admission.misses
    ]
    last = found.admissions[-1] if found.admissions else None
    answer = {
        "seq": None if last is None else last.seq, "at_ms": ms(None if last is None else last.at_ns),
        "request": request, "slot": found.slot, "state": found.state, "prompt_blocks": found.prompt_blocks,
        "remarks": found.remarks,
        "admissions": [{"seq": one.seq, "admitted": one.admitted, "hits_g1_to_g4": list(one.hits),
                        "missed": one.missed, "asked_again": one.asked_again} for one in found.admissions[-4:]],
        "time_ms": {part.what: ms(part.ns) for part in found.spent.parts},
        "waits": [[wait.operation, wait.route, wait.blocks, wait.status, wait.seq, ms(wait.queue_ns), ms(wait.wire_ns)]
                  for wait in found.spent.waits[-6:]],
    }
    return paged(answer, ("admission", "blocks", "reason", "text", "seq", "event", "also"), rows, offset)


async def doctor(source: AnswerSource, offset: int = 0) -> Answer:
    """Everything that needs a person, worst first, with its events and the remedy."""
    diagnosis = await source.diagnosis()
    rows = [
        [one.lint, one.level.label, one.who, one.what, one.because, one.seq, list(one.evidence), one.request,
         ms(one.since_ns), ms(one.until_ns), LINTS[one.lint].do]
        for one in diagnosis.findings
    ]
    facts = await source.facts(None)
    columns = ("lint", "level", "who", "what", "because", "seq", "evidence", "request", "since_ms", "until_ms", "do")
    return paged({**_place(facts), "ok": diagnosis.ok}, columns, rows, offset)


async def events(
    source: AnswerSource, first: str | None = None, last: str | None = None, filter: str = "", offset: int = 0
) -> Answer:
    """The events from one place to another, those for which the expression holds, with gaps between them."""
    evidence = await source.evidence()
    wanted = compile_event_filter(filter) if filter else None
    found = _Between(_bound(first), _bound(last), wanted, offset)
    await _walked(lambda: walk(evidence, (found,)))
    return paged(_first(found.window), EVENT_COLUMNS, found.window)


async def when(source: AnswerSource, expression: str, offset: int = 0) -> Answer:
    """When an expression became true: of slots for each slot, of events for each event that matches."""
    evidence = await source.evidence()
    found: _Becoming | _Between
    try:
        found = _Becoming(expression, offset)
        columns: tuple[str, ...] = ("seq", "at_ms", "slot", "request", "became", "event")
    except ExpressionError as of_slots:
        try:
            found = _Between(None, None, compile_event_filter(expression), offset)
        except ExpressionError:
            raise of_slots from None
        columns = EVENT_COLUMNS
    await _walked(lambda: walk(evidence, (found,)))
    return paged({**_first(found.window), "expression": expression}, columns, found.window)


async def tiers(source: AnswerSource, at: str | None = None) -> Answer:
    """The tiers at a place with their totals, and the course of their occupancy over the run."""
    facts = await source.facts(at)
    evidence = await source.evidence()
    curves = _Curves()
    requests = Requests()
    await _walked(lambda: walk(evidence, (requests, Rows(curves, requests))))
    columns = ("tier", "capacity", "resident", "referenced", "writing", "hits", "lookups", "evicted", "came_back")
    rows = [
        [name, tier["capacity_blocks"], tier["resident_blocks"], tier["referenced_blocks"], tier["writing_blocks"],
         tier["hits"], tier["lookups"], tier["evicted_blocks"], tier["thrash_blocks"]]
        for name, tier in facts.document["tiers"].items() if tier["capacity_blocks"] or tier["resident_blocks"]
    ]
    answer = {**_place(facts), "prefetch": facts.document["prefetch"], "curve_columns": ["at_ms", "resident", "held"],
              "curves": curves.thinned()}
    return paged(answer, columns, rows)


async def difference(source: AnswerSource, beside: AnswerSource, offset: int = 0) -> Answer:
    """This run beside another: the first event that differs, figures, and the requests that went another way."""
    a, b = await source.evidence(), await beside.evidence()
    found = await _walked(lambda: diff(a, b))
    first = found.first
    answer = {
        "seq": None if first is None else first.seq_a, "at_ms": None if first is None else ms(first.at_ns),
        "equal": found.equal,
        "first": None if first is None else {
            "seq_a": first.seq_a, "seq_b": first.seq_b, "request": first.request, "field": first.field,
            "a": first.a[:200], "b": first.b[:200],
        },
        "settings": [[one.field, one.a, one.b] for one in found.config[:8]],
        "figures": [[one.name, one.unit, one.a, one.b] for one in found.metrics if one.a != one.b][:16],
        "only_a": found.only_a[:8], "only_b": found.only_b[:8],
    }
    rows = [
        [pair.a.request, pair.b.request, pair.states_differ, pair.a.hits, pair.b.hits, ms(pair.a.time_ns),
         ms(pair.b.time_ns)]
        for pair in found.pairs if not pair.same
    ]
    return paged(answer, ("a", "b", "states_differ", "hits_a", "hits_b", "a_ms", "b_ms"), rows, offset)


# --- walks -----------------------------------------------------------------------------------------------------------


async def _walked(work: Callable[[], T]) -> T:
    """Long work beside the loop, which answers others meanwhile."""
    return await asyncio.to_thread(work)


def _place(facts: Facts) -> Answer:
    return {"seq": facts.seq, "at_ms": ms(facts.at_ns)}


def _first(window: PageRows) -> Answer:
    """The place of the first row of a page."""
    seq, at_ms = window.rows[0][:2] if window.rows else (None, None)
    return {"seq": seq, "at_ms": at_ms}


def _gap(gap: GapSeen, state: CacheState) -> list[Any]:
    return [gap.first, ms(state.at_ns), "Gap", None, f"lost {plural(gap.count, 'event')}: {why_lost(gap.reason)}"]


def _row(event: ev.Event, state: CacheState) -> list[Any]:
    return [event.seq, ms(event.at_ns), kind(event), request_of(event, state), describe(event, state)]


class _Story(Visitor):
    """The events of the last slot of a request."""

    def __init__(self, request: str, offset: int) -> None:
        super().__init__()
        self._request = request
        self.slot: int | None = None
        self.window = PageRows(offset)
        self.every = self._event

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        if gap is not None and self.slot is not None:
            self.window.add(lambda: _gap(gap, state))
        self.slot = state.slot_of.get(self._request, self.slot)

    def _event(self, event: ev.Event, state: CacheState) -> None:
        if isinstance(event, ev.SlotOpened | ev.SlotCloned) and event.request == self._request:
            self.slot, self.window = event.slot, PageRows(self.window.offset)
        if self.slot is None or isinstance(event, ev.IterationAdvanced):
            return
        if self.slot in slots_of(event) or slot_of(event, state) == self.slot:
            self.window.add(lambda: _row(event, state))


Bound = tuple[str, int] | None


class _Between(Visitor):
    """The events between two bounds for which a filter holds."""

    def __init__(
        self, first: Bound, last: Bound, wanted: Callable[[ev.Event, CacheState | None], bool] | None, offset: int
    ) -> None:
        super().__init__()
        self._first, self._last, self._wanted = first, last, wanted
        self.window = PageRows(offset)
        self.every = self._event

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        if gap is not None and self._inside(gap.last, state.at_ns, 1) and self._inside(gap.first, state.at_ns, -1):
            self.window.add(lambda: _gap(gap, state))

    def _inside(self, seq: int, at_ns: int, sign: int) -> bool:
        """True if this place is not before the first bound (``sign`` 1), or not behind the last one (-1)."""
        bound = self._first if sign == 1 else self._last
        return bound is None or sign * ((seq if bound[0] == "seq" else at_ns) - bound[1]) >= 0

    def _event(self, event: ev.Event, state: CacheState) -> None:
        if (
            self._inside(event.seq, event.at_ns, 1) and self._inside(event.seq, event.at_ns, -1)
            and (self._wanted is None or self._wanted(event, state))
        ):
            self.window.add(lambda: _row(event, state))


def _bound(place: str | None) -> Bound:
    """A place as a bound of seq or time, None for no bound. Raises ``UsageError`` for a place that is neither."""
    if place is None or place == "end":
        return None
    position = parse_position(place)
    if position.kind not in ("seq", "engine"):
        raise UsageError(f"a bound is an event's number or a time such as 700ms, not {place!r}")
    return position.kind, position.value


class _Becoming(Visitor):
    """The moments at which an expression of slots became true or false. Raises ``ExpressionError``.

    Every live slot is looked at after each event. Time and tiers may change the answer for a slot that the event is
    not about.
    """

    def __init__(self, expression: str, offset: int) -> None:
        super().__init__()
        self._holds = compile_slot_filter(expression)
        self._true: dict[int, str] = {}
        self._before: ev.Event | None = None
        self.window = PageRows(offset)
        self.every = self._event

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        self._before = None
        self._look(state, state.seq - 1, "its first facts")

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        if state is not None:
            self._event(None, state)

    def _event(self, event: ev.Event | None, state: CacheState) -> None:
        if self._before is not None:
            self._look(state, self._before.seq, kind(self._before))
        self._before = event

    def _look(self, state: CacheState, seq: int, event: str) -> None:
        now = {number: slot.request for number, slot in state.slots.items() if self._holds(state, slot)}
        known = {**self._true, **now}
        for number in sorted(now.keys() ^ self._true.keys()):
            row = [seq, ms(state.at_ns), str(number), known[number], number in now, event]
            self.window.add(lambda row=row: row)  # type: ignore[misc]
        self._true = now


class _Curves(Consumer):
    """The occupancy of each pool over time."""

    def __init__(self) -> None:
        self._samples: dict[str, list[list[Any]]] = {}

    def tier(self, row: TierSample) -> None:
        self._samples.setdefault(f"{row.tier} pool {row.pool}", []).append(
            [ms(row.at_ns), row.cached + row.referenced + row.writing, row.referenced])

    def thinned(self) -> dict[str, list[list[Any]]]:
        """At most ``CURVE_POINTS`` samples of each pool, with the first and the last."""
        return {
            name: [rows[at * (len(rows) - 1) // max(1, min(CURVE_POINTS, len(rows)) - 1)]
                   for at in range(min(CURVE_POINTS, len(rows)))]
            for name, rows in list(self._samples.items())[:4]
        }
