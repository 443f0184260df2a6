"""Request timelines as OpenTelemetry spans: a trace per request, a span per state, copy and hold.

The span of a request begins with its arrival, or where a clone was opened, and ends with it. Its attributes are the
request's summary. States, holds and copies are spans below it with the engine's own times, moved to the wall's clock by
the daemon's anchor. Copies that belong to no request are no part of a timeline and are left out.

Law of this file: every span ends, and no time is made up. A request that was seen from its middle on says so
(``kvbm.complete``), and a request with lost events carries the gap as an event.
"""

from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode, Tracer

from kvbm_console.analysis.export.rows import Consumer, HoldSpan, StateSpan, TransferSpan
from kvbm_console.analysis.requests import RequestSummary
from kvbm_console.core.ids import FinishReason
from kvbm_console.stream.feed import GapSeen

SPANS_PER_REQUEST_MAX: Final = 1_000
"""A request that is left out of iterations in turn has thousands of states; no trace viewer shows that many. The spans
left out are counted in ``kvbm.spans_left_out`` of its span."""
_FAILED: Final = (FinishReason.TOO_LARGE.label, FinishReason.ERROR.label)
_NOWHERE: Final = Context()
Value = str | int | float | bool


class _Trace:
    """A request that is live."""

    __slots__ = ("children", "context", "left_out", "root")

    def __init__(self, root: Span) -> None:
        self.root = root
        self.context = trace.set_span_in_context(root, _NOWHERE)
        self.children = 0
        self.left_out = 0


class SpanConsumer(Consumer):
    """Rows into spans. ``wall_ns`` is the wall's time at 0 of the engine's clock."""

    def __init__(self, tracer: Tracer, wall_ns: int) -> None:
        self._tracer = tracer
        self._wall_ns = wall_ns
        self._live: dict[int, _Trace] = {}
        self.ended = 0
        """Spans that ended, hence were given to the exporter."""

    def opened(self, slot: int, request: str, at_ns: int) -> None:
        """The span of the request begins."""
        if slot not in self._live:
            self._live[slot] = _Trace(self._tracer.start_span(
                "request", _NOWHERE, attributes={"kvbm.request": request, "kvbm.slot": slot},
                start_time=self._wall_ns + at_ns,
            ))

    def state(self, row: StateSpan) -> None:
        """A span of the state, below the request's."""
        self._child(self._live[row.slot], row.state, row.begin_ns, row.end_ns, {
            "kvbm.seq": row.seq, "kvbm.cause": row.cause, "kvbm.iteration": row.iteration,
            "kvbm.computed_tokens": row.computed_tokens, **_open(row.open),
        })

    def hold(self, row: HoldSpan) -> None:
        """A span of the hold."""
        self._child(self._live[row.slot], f"held at {row.site}", row.begin_ns, row.end_ns, {
            "kvbm.hold": row.hold, "kvbm.seq": row.seq, "kvbm.why": row.why or "not ended",
        })

    def transfer(self, row: TransferSpan) -> None:
        """A span of the copy, with its stamps as events."""
        if row.slot is None or row.slot not in self._live:
            return
        attributes: dict[str, Value] = {
            "kvbm.candidate": row.candidate, "kvbm.route": row.route, "kvbm.blocks": row.blocks,
            "kvbm.status": row.status, "kvbm.seq": row.seq, "kvbm.thrash_blocks": row.thrash_blocks,
            **_open(row.ended_ns is None),
        }
        if row.reason is not None:
            attributes["kvbm.reason"] = row.reason
        stamps = {
            "enqueued": row.enqueued_ns, "evaluated": row.evaluated_ns, "promoted": row.promoted_ns,
            "started": row.started_ns,
        }
        self._child(
            self._live[row.slot], f"copy {row.route}", row.planned_ns, row.until_ns, attributes,
            {name: at for name, at in stamps.items() if at is not None},
        )

    def gap(self, gap: GapSeen, at_ns: int) -> None:
        """An event on every request that was live in front of it."""
        for live in self._live.values():
            live.root.add_event(
                "events lost", {"first": gap.first, "last": gap.last, "reason": gap.reason}, self._wall_ns + at_ns
            )

    def request(self, summary: RequestSummary, until_ns: int) -> None:
        """The request ended: its span has the summary."""
        live = self._live.pop(summary.slot)
        root = live.root
        root.set_attributes(_attributes(summary))
        if live.left_out:
            root.set_attribute("kvbm.spans_left_out", live.left_out)
        if summary.first_token_ns is not None:
            root.add_event("first token", timestamp=self._wall_ns + summary.first_token_ns)
        if summary.reason in _FAILED:
            root.set_status(StatusCode.ERROR, summary.reason)
        end_ns = until_ns if summary.ended_ns is None else summary.ended_ns
        root.end(self._wall_ns + end_ns)
        self.ended += 1

    def _child(
        self, live: _Trace, name: str, begin_ns: int, end_ns: int, attributes: Mapping[str, Value],
        stamps: Mapping[str, int] = {},
    ) -> None:
        if live.children >= SPANS_PER_REQUEST_MAX:
            live.left_out += 1
            return
        live.children += 1
        span = self._tracer.start_span(
            name, live.context, attributes=attributes, start_time=self._wall_ns + begin_ns
        )
        for stamp, at_ns in stamps.items():
            span.add_event(stamp, timestamp=self._wall_ns + at_ns)
        span.end(self._wall_ns + end_ns)
        self.ended += 1


def _open(still: bool) -> dict[str, Value]:
    return {"kvbm.open": True} if still else {}


def _attributes(summary: RequestSummary) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "kvbm.complete": summary.complete, "kvbm.prompt_tokens": summary.prompt_tokens,
        "kvbm.prompt_blocks": summary.prompt_blocks, "kvbm.scored_blocks": summary.scored_blocks,
        "kvbm.admissions": summary.admissions, "kvbm.preemptions": summary.preemptions,
        "kvbm.lost_blocks": summary.lost_blocks, "kvbm.held_ms": summary.held_ns / 1e6,
        **{f"kvbm.hit_blocks.g{tier}": blocks for tier, blocks in enumerate(summary.hits, 1)},
        **_open(summary.ended_ns is None),
    }
    if summary.session is not None:
        attributes["kvbm.session"] = summary.session
    if summary.reason is not None:
        attributes["kvbm.finish_reason"] = summary.reason
    if summary.first_token_ns is not None:
        attributes["kvbm.time_to_first_token_ms"] = (summary.first_token_ns - summary.arrived_ns) / 1e6
    return attributes
