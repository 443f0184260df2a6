"""Two runs side by side: the first event in which they differ, and the course of each request in both.

Requests are paired by their id: the k-th of a name with the k-th of that name. The rest are paired by their prompt, in
the order of arrival.

Law of this file: runs are equal when their events are, and every request is in exactly one pair or on one side alone.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvbm_console.analysis.nearest_rank import nearest_rank
from kvbm_console.analysis.requests import Requests, RequestSummary
from kvbm_console.analysis.walk import Evidence, Progress, walk
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.describe import describe, request_of
from kvbm_console.core.events import Event, PoolKnown
from kvbm_console.core.state import CacheState
from kvbm_console.stream.document import field_text
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken

VALUE_CHARS_MAX: Final = 80
"""Characters of a value in the text of a difference."""


class FirstDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first event that is not the same; a side that has none there has None."""

    seq_a: int | None
    seq_b: int | None
    at_ns: int
    request: str | None
    """The request of the event in A, else of the event in B."""
    field: str | None
    """None when the kinds differ or a side ends."""
    a: str
    b: str


class ChangedField(msgspec.Struct, frozen=True):
    """A field of the configuration with both values, as text."""

    field: str
    a: str
    b: str


class PairSide(msgspec.Struct, frozen=True, kw_only=True):
    """A request on one side."""

    request: str
    states: list[str]
    hits: list[int]
    """Prompt blocks in G1 to G4, of its first admission."""
    scored_blocks: int
    preemptions: int
    lost_blocks: int
    time_ns: int
    first_token_ns: int | None
    """The time from its arrival to its first token."""
    reason: str | None
    """None: live where the evidence ends."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One request on both sides."""

    by: str
    """``id`` or ``prompt``."""
    same: bool
    """True if states, hits and time are equal."""
    states_differ: str | None
    """The first difference of their states, in words."""
    a: PairSide
    b: PairSide


class Metric(msgspec.Struct, frozen=True):
    """One figure of both runs. ``unit`` is ``""`` for a count, ``ns``, or ``share`` for 0 to 1; a side without data is
    None."""

    name: str
    unit: str
    a: float | None
    b: float | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The document of ``rec diff``: a stable contract."""

    a: str
    b: str
    equal: bool
    """True if all events are the same."""
    first: FirstDifference | None
    config: list[ChangedField]
    lost_events_a: int
    lost_events_b: int
    metrics: list[Metric]
    pairs: list[Pair]
    only_a: list[str]
    only_b: list[str]


def diff(a: Evidence, b: Evidence, progress: Progress | None = None) -> Difference:
    """Compare two runs. Raises ``RecordingError`` when a run cannot be read."""
    first = _first_difference(a, b)
    mine, theirs = Requests(), Requests()
    walk(a, (mine,), progress=progress, what=f"read {a.name}")
    walk(b, (theirs,), progress=progress, what=f"read {b.name}")
    pairs, only_a, only_b = _paired(mine, theirs)
    return Difference(
        a=a.name, b=b.name, equal=first is None, first=first, config=_config(a.config, b.config),
        lost_events_a=_lost(a), lost_events_b=_lost(b), metrics=_metrics(mine, theirs), pairs=pairs,
        only_a=[summary.request for summary in only_a], only_b=[summary.request for summary in only_b],
    )


# --- the first difference --------------------------------------------------------------------------------------------


def _lost(evidence: Evidence) -> int:
    return sum(item.count for item in evidence.items() if isinstance(item, GapSeen))


def _events(evidence: Evidence) -> Iterator[Event]:
    for item in evidence.items():
        if isinstance(item, EventsArrived):
            yield from item.events


def _first_difference(a: Evidence, b: Evidence) -> FirstDifference | None:
    ours, theirs = _events(a), _events(b)
    mine, other = next(ours, None), next(theirs, None)
    # A side cut from a longer run may begin later; the earlier events of the other side are no difference.
    begin = max((event.seq for event in (mine, other) if event is not None), default=0)
    while mine is not None and mine.seq < begin:
        mine = next(ours, None)
    while other is not None and other.seq < begin:
        other = next(theirs, None)
    pools: tuple[Event, Event] | None = None
    while mine is not None and other is not None:
        if mine != other or type(mine) is not type(other):
            if not isinstance(mine, PoolKnown) or not isinstance(other, PoolKnown) or mine.seq != other.seq:
                return _described(a, b, mine, other)
            pools = pools or (mine, other)  # the size is reported only if no event behind it differs
        mine, other = next(ours, None), next(theirs, None)
    if mine is None and other is None:
        return None if pools is None else _described(a, b, *pools)
    return _described(a, b, mine, other)


def _described(a: Evidence, b: Evidence, mine: Event | None, other: Event | None) -> FirstDifference:
    state_a, state_b = _state_before(a, mine), _state_before(b, other)
    field = None
    if mine is not None and other is not None and type(mine) is type(other):
        field = next(name for name in mine.__struct_fields__ if getattr(mine, name) != getattr(other, name))
    sides = ((mine, state_a), (other, state_b))
    requests = (request_of(event, state) for event, state in sides if event is not None)
    return FirstDifference(
        seq_a=None if mine is None else mine.seq, seq_b=None if other is None else other.seq,
        at_ns=min(event.at_ns for event in (mine, other) if event is not None), field=field,
        request=next(filter(None, requests), None),
        a=_text(mine, state_a, field), b=_text(other, state_b, field),
    )


def _state_before(evidence: Evidence, event: Event | None) -> CacheState | None:
    """The facts in front of the event; None when no snapshot stands in front of the event."""
    state: CacheState | None = None
    for item in evidence.items() if event is not None else ():
        if isinstance(item, SnapshotTaken):
            state = item.state
        elif isinstance(item, EventsArrived) and state is not None and event is not None:
            for earlier in item.events:
                if earlier.seq >= event.seq:
                    return state
                state.apply(earlier)
    return state


def _text(event: Event | None, state: CacheState | None, field: str | None) -> str:
    if event is None:
        return "ends"
    text = f"{type(event).__name__} {describe(event, state)}"
    if field is not None and field not in ("seq", "cause"):
        text += f" [{field} {field_text(field, getattr(event, field), VALUE_CHARS_MAX)}]"
    return text


# --- the configuration -----------------------------------------------------------------------------------------------


def _config(a: LeaderConfig | None, b: LeaderConfig | None) -> list[ChangedField]:
    if a is None or b is None:
        return []
    mine, other = _flat(msgspec.to_builtins(a)), _flat(msgspec.to_builtins(b))
    return [
        ChangedField(name, str(mine.get(name, "–")), str(other.get(name, "–"))) for name in {**mine, **other}
        if mine.get(name) != other.get(name)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


# --- requests --------------------------------------------------------------------------------------------------------


def _paired(a: Requests, b: Requests) -> tuple[list[Pair], list[RequestSummary], list[RequestSummary]]:
    pairs: list[tuple[str, RequestSummary, RequestSummary]] = []
    left_a, left_b = _match(a.all, b.all, "id", pairs)
    left_a, left_b = _match(left_a, left_b, "prompt", pairs)
    pairs.sort(key=lambda pair: pair[1].arrived_seq)
    return [_pair(by, mine, other, a.until_ns, b.until_ns) for by, mine, other in pairs], left_a, left_b


def _match(
    a: list[RequestSummary], b: list[RequestSummary], by: str, pairs: list[tuple[str, RequestSummary, RequestSummary]]
) -> tuple[list[RequestSummary], list[RequestSummary]]:
    def key(summary: RequestSummary) -> object:
        return summary.request if by == "id" else summary.prompt

    waiting: dict[object, list[RequestSummary]] = {}
    for other in reversed(b):
        waiting.setdefault(key(other), []).append(other)
    unpaired: list[RequestSummary] = []
    for mine in a:
        candidates = waiting.get(key(mine))
        if candidates:
            pairs.append((by, mine, candidates.pop()))
        else:
            unpaired.append(mine)
    alone = {id(other) for others in waiting.values() for other in others}
    return unpaired, [other for other in b if id(other) in alone]


def _pair(by: str, mine: RequestSummary, other: RequestSummary, until_a: int, until_b: int) -> Pair:
    a, b = _side(mine, until_a), _side(other, until_b)
    part = _states_differ(a.states, b.states)
    same = part is None and (a.hits, a.time_ns, a.reason) == (b.hits, b.time_ns, b.reason)
    return Pair(by=by, same=same, states_differ=part, a=a, b=b)


def _side(summary: RequestSummary, until_ns: int) -> PairSide:
    first = None if summary.first_token_ns is None else summary.first_token_ns - summary.arrived_ns
    return PairSide(
        request=summary.request, states=summary.states, hits=summary.hits, scored_blocks=summary.scored_blocks,
        preemptions=summary.preemptions, lost_blocks=summary.lost_blocks, time_ns=summary.time_ns(until_ns),
        first_token_ns=first, reason=summary.reason,
    )


def _states_differ(a: list[str], b: list[str]) -> str | None:
    for at, (mine, other) in enumerate(zip(a, b, strict=False)):
        if mine != other:
            return f"after {a[at - 1]}: {mine}, {other}" if at else f"{mine}, {other}"
    if len(a) == len(b):
        return None
    longer, side = (a, "A") if len(a) > len(b) else (b, "B")
    at = min(len(a), len(b))
    return f"after {longer[at - 1] if at else 'nothing'}: {longer[at]} in {side} alone"


# --- figures ---------------------------------------------------------------------------------------------------------


def _metrics(a: Requests, b: Requests) -> list[Metric]:
    mine, other = _figures(a), _figures(b)
    return [
        Metric(name, unit, mine.get((name, unit), none), other.get((name, unit), none))
        for name, unit in {**mine, **other} for none in (None if unit else 0.0,)
    ]


def _figures(run: Requests) -> dict[tuple[str, str], float | None]:
    ended = [summary for summary in run.all if summary.ended_ns is not None and summary.complete]
    times = sorted(summary.time_ns(run.until_ns) for summary in ended)
    first = sorted(summary.first_token_ns - summary.arrived_ns for summary in run.all
                   if summary.first_token_ns is not None and summary.complete)
    scored = sum(summary.scored_blocks for summary in run.all)
    figures: dict[tuple[str, str], float | None] = {
        ("requests", ""): len(run.all), ("ended", ""): len(ended),
        ("duration", "ns"): run.until_ns - run.from_ns,
        ("prompt blocks", ""): scored,
        ("hit rate", "share"): sum(sum(summary.hits) for summary in run.all) / scored if scored else None,
    }
    for tier in range(4):
        hits = sum(summary.hits[tier] for summary in run.all)
        if hits or tier < 2:
            figures[f"hit rate G{tier + 1}", "share"] = hits / scored if scored else None
    figures |= {
        ("hits lost", ""): sum(summary.lost_blocks for summary in run.all),
        ("preemptions", ""): sum(summary.preemptions for summary in run.all),
    }
    figures |= {
        (f"{name} p{percent}", "ns"): nearest_rank(ordered, percent) if ordered else None
        for name, ordered in (("time", times), ("first token", first)) for percent in (50, 99)
    }
    figures |= {(f"evicted {tier}", ""): blocks for tier, blocks in sorted(run.evicted_blocks.items())}
    figures |= {(f"moved {route}", ""): blocks for route, blocks in sorted(run.moved_blocks.items())}
    return figures
