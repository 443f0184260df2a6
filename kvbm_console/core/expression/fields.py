"""The fields of the three contexts: a slot in a list, a slot at a site (a condition), an event.

Law of this file: a getter reads facts, costs no more than a walk over one event, and returns a value or None.
"""

from collections.abc import Callable
from typing import Any, Final

from kvbm_console.core.expression.schema import YES_NO, Field, Getter, Kind, Schema, Test
from kvbm_console.core.ids import CandidateStatus, Condition, Route, Site, SlotState, Tier, WaitPoint, Word

_EMPTY, _CACHED = int(Condition.EMPTY), int(Condition.CACHED)
assert (_EMPTY, _CACHED) == (0, 1), "written out below"
_DECODING = SlotState.DECODING
_REFERENCED, _WRITING = int(Condition.REFERENCED), int(Condition.WRITING)


def words(kind: type[Word]) -> dict[str, Any]:
    """Labels of an enum with their members."""
    return {member.label: member for member in kind}


def _count(name: str, get: Getter, about: str) -> Field:
    return Field(name, Kind.COUNT, get, about)


def _available(name: str, tier: Tier) -> Field:
    """The commonest fields of conditions, written out three times because a call would cost as much as the sum."""
    def get(_item: Any, state: Any, _moment: Any) -> int:
        found = 0
        for pool in state.pools:
            if pool.info.tier is tier:
                counts = pool.counts
                found += counts[0] + counts[1]
        return found

    def less(value: int) -> Test:
        def test(_item: Any, state: Any, _moment: Any) -> bool:
            found = 0
            for pool in state.pools:
                if pool.info.tier is tier:
                    counts = pool.counts
                    found += counts[0] + counts[1]
            return found < value

        return test

    def greater(value: int) -> Test:
        def test(_item: Any, state: Any, _moment: Any) -> bool:
            found = 0
            for pool in state.pools:
                if pool.info.tier is tier:
                    counts = pool.counts
                    found += counts[0] + counts[1]
            return found > value

        return test

    about = f"Places of {tier.name} that are empty or cached."
    return Field(name, Kind.COUNT, get, about, less=less, greater=greater)


def _computed() -> Field:
    """``SlotFacts.computed_tokens``, written out as well."""
    def less(value: int) -> Test:
        def test(item: Any, state: Any, _moment: Any) -> bool:
            if item.state is _DECODING:
                return item.anchor_tokens + state.iteration - item.anchor_iteration < value  # type: ignore[no-any-return]
            return item.anchor_tokens < value  # type: ignore[no-any-return]

        return test

    def greater(value: int) -> Test:
        def test(item: Any, state: Any, _moment: Any) -> bool:
            if item.state is _DECODING:
                return item.anchor_tokens + state.iteration - item.anchor_iteration > value  # type: ignore[no-any-return]
            return item.anchor_tokens > value  # type: ignore[no-any-return]

        return test

    return Field(
        "tokens.computed", Kind.COUNT, lambda i, s, m: i.computed_tokens(s.iteration), "Tokens whose K/V exist.",
        less=less, greater=greater,
    )


def _tier_counts(tier: Tier) -> list[Field]:
    """Fields like ``tiers.g2.available`` are sums over the pools of a tier, and 0 for a tier without a pool."""
    name = f"tiers.{tier.label}."

    def total(*conditions: int) -> Getter:
        def get(_item: Any, state: Any, _moment: Any) -> int:
            return sum(
                pool.counts[condition] for pool in state.pools if pool.info.tier is tier for condition in conditions
            )

        return get

    def capacity(_item: Any, state: Any, _moment: Any) -> int:
        return sum(pool.capacity for pool in state.pools if pool.info.tier is tier)

    label = tier.name
    return [
        _count(name + "capacity", capacity, f"Places of {label}."),
        _available(name + "available", tier),
        _count(name + "resident", total(_CACHED, _REFERENCED, _WRITING), f"Places of {label} with content."),
        _count(name + "empty", total(_EMPTY), f"Empty places of {label}."),
        _count(name + "cached", total(_CACHED), f"Places of {label} with content and no holder."),
        _count(name + "referenced", total(_REFERENCED), f"Places of {label} with a holder."),
        _count(name + "writing", total(_WRITING), f"Places of {label} that a copy writes."),
    ]


def _point(item: Any, state: Any, _moment: Any) -> WaitPoint | None:
    hold = None if item.hold is None else state.holds.get(item.hold)
    return None if hold is None else hold.point


def slot_fields(now: Callable[[], int] | None = None, block_bytes: int | None = None) -> list[Field]:
    """Fields of a slot. ``now`` is the engine's clock (None: the time of the last event)."""
    def age(since: str) -> Getter:
        read = _SINCE[since]
        if now is None:
            return lambda item, state, moment: state.at_ns - read(item)
        return lambda item, state, moment: max(now(), state.at_ns) - read(item)

    fields = [
        Field("request", Kind.TEXT, lambda i, s, m: i.request, "The request's id.", ordered=False),
        Field("slot", Kind.ID, lambda i, s, m: i.slot, "The slot's number."),
        Field("state", Kind.WORD, lambda i, s, m: i.state, "The slot's state.", words(SlotState), ordered=False),
        Field("age", Kind.DURATION, age("since_ns"), "How long it has been in its state."),
        Field("lifetime", Kind.DURATION, age("opened_ns"), "How long it has existed."),
        _computed(),
        _count("tokens.prompt", lambda i, s, m: i.prompt_tokens, "Tokens of the prompt."),
        _count("tokens.limit", lambda i, s, m: i.output_limit, "Tokens that may be generated."),
        _count("cached.g1", lambda i, s, m: s.found_tokens(i)[0], "Prompt tokens that its last admission found in G1."),
        _count("cached.g2", lambda i, s, m: s.found_tokens(i)[1], "Prompt tokens that its last admission found in G2."),
        _count("cached.g3", lambda i, s, m: s.found_tokens(i)[2], "Prompt tokens that its last admission found in G3."),
        _count("cached.g4", lambda i, s, m: s.found_tokens(i)[3], "Prompt tokens that its last admission found in G4."),
        _count("blocks", lambda i, s, m: len(i.device_blocks), "Device blocks of the slot."),
        _count("blocks.staged", lambda i, s, m: sum(len(ids) for _, ids in i.staged), "Blocks staged for it."),
        _count("outstanding", lambda i, s, m: len(i.outstanding), "Its candidates that are not terminal."),
        Field("held", Kind.WORD, lambda i, s, m: i.hold is not None, "Yes if the slot is held.", YES_NO, ordered=False),
        Field("hold", Kind.ID, lambda i, s, m: i.hold, "The number of its hold.", optional=True),
        Field("point", Kind.WORD, _point, "Where its hold stands still.", words(WaitPoint), ordered=False,
              optional=True),
        Field("session", Kind.TEXT, lambda i, s, m: i.session, "The session it belongs to.", ordered=False,
              optional=True),
        _count("priority", lambda i, s, m: i.priority, "Its priority."),
        _count("preemptions", lambda i, s, m: i.preemptions, "How often it was preempted."),
        _count("skipped", lambda i, s, m: i.skipped_iterations, "Iterations that left it out."),
        Field("parent", Kind.ID, lambda i, s, m: i.parent, "The slot it was cloned from.", optional=True),
        Field("source", Kind.ID, lambda i, s, m: i.source, "The engine it belongs to."),
        _count("live", lambda i, s, m: len(s.slots), "Live slots."),
        _count("running", lambda i, s, m: s.running, "Requests of the last iteration."),
        _count("waiting", lambda i, s, m: s.waiting, "Requests that wait for the engine."),
        _count("iteration", lambda i, s, m: s.iteration, "The last iteration."),
    ]
    if block_bytes is not None:
        fields.append(Field("bytes", Kind.SIZE, lambda i, s, m: len(i.device_blocks) * block_bytes,
                            "Bytes of its device blocks."))
    return fields + [field for tier in Tier for field in _tier_counts(tier)]


_SINCE: Final[dict[str, Callable[[Any], int]]] = {
    "since_ns": lambda item: int(item.since_ns), "opened_ns": lambda item: int(item.opened_ns),
}


def moment_fields() -> list[Field]:
    """Fields of a site that is passed, beside those of the slot that passes it."""
    return [
        Field("site", Kind.WORD, lambda i, s, m: m.site, "The site.", words(Site), ordered=False),
        Field("from", Kind.WORD, lambda i, s, m: m.old, "The state before the move.", words(SlotState), ordered=False),
        Field("to", Kind.WORD, lambda i, s, m: m.new, "The state after the move.", words(SlotState), ordered=False),
        Field("route", Kind.WORD, lambda i, s, m: m.route, "The route of the candidate.", words(Route), ordered=False,
              optional=True),
        Field("tier", Kind.WORD, lambda i, s, m: m.tier, "The tier that the candidate writes.", words(Tier),
              optional=True),
        Field("candidate", Kind.ID, lambda i, s, m: m.candidate, "The candidate.", optional=True),
        Field("status", Kind.WORD, lambda i, s, m: m.status, "The candidate's status.", words(CandidateStatus),
              ordered=False, optional=True),
    ]


def _age_at(item: Any, state: Any, moment: Any) -> int:
    since_ns = moment.since_ns
    return int(state.at_ns - (item.since_ns if since_ns is None else since_ns))


def condition_fields() -> list[Field]:
    """Fields of a slot that passes a site. At a move its age is that in the state it leaves: it is 0 in the other."""
    fields = [field for field in slot_fields() if field.name != "age"]
    age = Field("age", Kind.DURATION, _age_at, "Time since the slot entered its state; at a move, the old state.")
    return [*fields[:3], age, *fields[3:], *moment_fields()]


SLOT: Final = Schema("a slot", slot_fields())
CONDITION: Final = Schema("a condition", condition_fields())
