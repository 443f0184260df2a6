"""Feeds that lie: stimuli of every fed kind, plausible and impossible, in any order and from several engines.

A field is drawn by its name, mostly from what the facts and the other stimuli speak of, and rarely from far outside. A
kind with a field of a new name needs a line in ``FIELDS``.

Law of this file: all choices come from the ``Random`` that is given, so a seed, or Hypothesis, repeats a run.
"""

from collections.abc import Callable
from random import Random
from typing import Any, Final

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import Event
from kvbm_console.core.ids import (
    Authority,
    CandidateStatus,
    FinishReason,
    Measure,
    Note,
    ResetMode,
    Site,
    Suspend,
    Tier,
)
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.snapshots import digest
from kvbm_console.core.state import CacheState
from kvbm_console.dispatch import Dispatcher, start_leader
from server.feeding import FEED_KINDS, INT_MAX, RequestNames, abandon, check_stimulus, given_fields

PLACES: Final = 12
"""Blocks of a declared pool: so few that requests compete for them."""
HASHES: Final = 9
BLOCK: Final = 16
MOST: Final = 32
"""Entries of a column, also where the stimulus claims more."""
REQUESTS: Final = 6
FEEDS: Final = 3
ODD: Final = 0.03
"""Share of the fields whose value is drawn from far outside."""
KINDS: Final = sorted(FEED_KINDS, key=lambda kind: kind.__name__)
WEIGHTS: Final = {
    st.PoolDeclared: 4, st.RequestArrived: 12, st.MatchRequested: 6, st.LookupObserved: 6, st.BlocksAllocated: 14,
    st.IterationScheduled: 14, st.IterationFinished: 12, st.RequestFinished: 6, st.BlocksReported: 8,
    st.TransferFinished: 8, st.CopiesObserved: 6, st.CopyBegun: 6, st.CopyEnded: 4, st.SourceRestarted: 1,
}
"""Kinds that lead far; the others have 2."""


class Liar:
    """An engine in another process that tells anything."""

    def __init__(self, dice: Random, state: Callable[[], CacheState], source: int, authority: Authority) -> None:
        self.dice = dice
        self.state = state
        self.source = source
        self.authority = authority
        self.names = RequestNames(source)
        self.iteration = 0

    def stimulus(self, kind: type[st.Stimulus] | None = None) -> st.Stimulus:
        """A stimulus of this kind or of any."""
        kind = kind or self.dice.choices(KINDS, [WEIGHTS.get(kind, 2) for kind in KINDS])[0]
        self.iteration += kind is st.IterationScheduled
        told: dict[str, Any] = {}
        for field in kind.__struct_fields__[4:]:
            draw = ODDITIES.get(field) if self.rarely() else None
            told[field] = (draw or OF_KIND.get((kind, field)) or FIELDS[field])(self, told)
        return kind(0, 0, 0, None, **told)

    # --- what values are drawn from ---

    def rarely(self) -> bool:
        return self.dice.random() < ODD

    def one(self, *values: Any) -> Any:
        return self.dice.choice(values)

    def some(self, draw: Callable[["Liar"], Any], *, most: int = 3) -> tuple[Any, ...]:
        return tuple(draw(self) for _ in range(self.dice.choice(range(most + 1))))

    def slot(self, told: dict[str, Any]) -> SlotFacts | None:
        """The slot of the request that the stimulus names."""
        name = told.get("request", "")
        return self.state().slot_named(name) or self.state().slot_named(f"{name}@{self.source}")

    def slots(self) -> list[SlotFacts]:
        return [slot for slot in self.state().slots.values() if slot.source == self.source]

    def request(self) -> str:
        mine = [slot.request.partition("@")[0] for slot in self.slots()]
        return self.one(*mine) if mine and self.dice.random() < 0.7 else f"q{self.dice.randrange(REQUESTS)}"

    def prefix(self, slot: SlotFacts) -> list[int]:
        """The places of the blocks that a request says it reuses."""
        by_hash = next((pool.by_hash for pool in self.state().pools if pool.info.source == self.source), {})
        return [by_hash[key] for key in slot.hashes[: slot.local_blocks] if key in by_hash]

    def tokens(self) -> int:
        return BLOCK * self.one(0, 0, 1, 1, 2, 3, 4) + self.one(0, 0, 0, 0, 1, 15)

    def ids(self, count: int | None = None) -> bytes:
        count = self.dice.randrange(5) if count is None else min(max(0, count), MOST)
        whole = count <= PLACES and not self.rarely()
        return pack_ids(self.dice.sample(range(PLACES), count) if whole else [
            self.one(*range(-1, PLACES + 2), -(2**31), 2**31 - 1) for _ in range(count)])

    def hashes(self, count: int | None = None) -> bytes:
        """Chains that begin alike: block i of a chain is one of few."""
        count = self.dice.randrange(5) if count is None else min(max(0, count), MOST)
        first = self.dice.randrange(HASHES)
        hashes = [1 + (first + at) % HASHES for at in range(count)]
        return pack_hashes(hashes if not self.rarely() else [self.dice.randrange(HASHES) for _ in hashes])

    def filled(self) -> list[tuple[SlotFacts, int, int]]:
        """The next blocks of some slots, with their places and hashes."""
        found = []
        for slot in self.slots():
            at = slot.filled_blocks
            if at < len(slot.device_blocks) and self.dice.random() < 0.7:
                key = slot.hashes[at] if at < len(slot.hashes) else 100 + self.dice.randrange(HASHES)
                found.append((slot, slot.device_blocks[at], key))
        return found


Draw = Callable[[Liar, dict[str, Any]], Any]


def _requests(liar: Liar, told: dict[str, Any]) -> tuple[str, ...]:
    return liar.some(Liar.request)


def _few_requests(liar: Liar, told: dict[str, Any]) -> tuple[str, ...]:
    return liar.some(Liar.request, most=2) if liar.dice.random() < 0.25 else ()


def _counts(of: str) -> Draw:
    return lambda liar, told: tuple(liar.one(0, 1, 1, 1, 2) for _ in told[of])


def _positions(liar: Liar, told: dict[str, Any]) -> tuple[int, ...]:
    positions = []
    for name in told["progressed"]:
        slot = liar.slot({"request": name})
        room = 0 if slot is None else BLOCK * len(slot.device_blocks)
        positions.append(liar.one(room, room, room - 1, liar.tokens()))
    return tuple(positions)


def _allocated(liar: Liar, told: dict[str, Any]) -> bytes:
    """Places of an allocation: a watched engine repeats all, another adds to them and begins with the prefix."""
    slot = liar.slot(told)
    if slot is None or liar.dice.random() < 0.3:
        return liar.ids()
    known = list(slot.device_blocks) if liar.authority is Authority.OBSERVED else liar.prefix(slot)
    if known and liar.rarely():
        known[liar.dice.randrange(len(known))] = liar.one(-(2**31), -1, 2**31 - 1)
    return pack_ids(known) + liar.ids()


def _external(liar: Liar, told: dict[str, Any]) -> int:
    slot = liar.slot(told)
    answer = slot.last_answer[0] if slot is not None and slot.last_answer is not None else 0
    return liar.one(answer or 0, answer or 0, 0, liar.tokens())


def _finished_requests(liar: Liar, told: dict[str, Any]) -> tuple[str, ...]:
    told["_filled"] = liar.filled() if liar.dice.random() < 0.8 else None
    if told["_filled"] is None:
        return _requests(liar, told)
    return tuple(slot.request.partition("@")[0] for slot, _, _ in told["_filled"])


def _finished_counts(liar: Liar, told: dict[str, Any]) -> tuple[int, ...]:
    return _counts("requests")(liar, told) if told["_filled"] is None else (1,) * len(told["_filled"])


def _finished_ids(liar: Liar, told: dict[str, Any]) -> bytes:
    filled = told["_filled"]
    return liar.ids(sum(told["counts"])) if filled is None else pack_ids(place for _, place, _ in filled)


def _finished_hashes(liar: Liar, told: dict[str, Any]) -> bytes:
    filled = told.pop("_filled")
    return liar.hashes(sum(told["counts"])) if filled is None else pack_hashes(key for _, _, key in filled)


def _operation(liar: Liar, told: dict[str, Any]) -> int:
    running = [*liar.state().operations, *liar.state().late]
    return liar.one(*running) if running and liar.dice.random() < 0.8 else liar.dice.randrange(20)


def _epoch(liar: Liar, told: dict[str, Any]) -> int:
    now = liar.state().epoch
    return liar.one(now, now, now, now - 1, now + 1)


def _pool(liar: Liar, told: dict[str, Any]) -> int:
    mine = [pool.info.pool for pool in liar.state().pools if pool.info.source == liar.source]
    return liar.one(*mine) if mine and liar.dice.random() < 0.9 else liar.dice.randrange(-1, 9)


def _stored(liar: Liar, told: dict[str, Any]) -> bytes:
    return liar.hashes()


def _places(liar: Liar, told: dict[str, Any]) -> bytes:
    return liar.ids(len(told["stored"]) // 8) if liar.dice.random() < 0.8 else liar.ids()


def _chains(liar: Liar, told: dict[str, Any]) -> bytes:
    blocks = len(told["stored"]) // 8
    return pack_ids([blocks]) if blocks and liar.dice.random() < 0.5 else b""


def _parents(liar: Liar, told: dict[str, Any]) -> bytes:
    return liar.hashes(len(told["chains"]) // 4)


def _authority(liar: Liar, told: dict[str, Any]) -> Authority:
    if told["tier"] is not Tier.G1:
        return liar.one(Authority.STREAM, Authority.STREAM, liar.authority)  # type: ignore[no-any-return]
    return liar.one(liar.authority, liar.authority, liar.authority, *Authority)  # type: ignore[no-any-return]


def _text(liar: Liar, told: dict[str, Any]) -> str:
    return liar.one("a", "b", "")  # type: ignore[no-any-return]


def _row(of: str, draw: Callable[[Liar], Any]) -> Draw:
    return lambda liar, told: tuple(draw(liar) for _ in told[of])


FIELDS: Final[dict[str, Draw]] = {
    "request": lambda liar, told: liar.request(),
    "hashes": _stored,
    "prompt_tokens": lambda liar, told: len(told["hashes"]) // 8 * BLOCK + liar.one(0, 1, 15),
    "output_limit": lambda liar, told: liar.one(0, 0, 8, 100),
    "priority": lambda liar, told: liar.one(0, 0, 1, -3),
    "session": lambda liar, told: liar.one(None, "s"),
    "sends": lambda liar, told: liar.one(None, None, "x"), "receives": lambda liar, told: liar.one(None, None, "x"),
    "age_ns": lambda liar, told: liar.one(0, 0, None, 5, liar.dice.randrange(10_000)),
    "computed_tokens": lambda liar, told: BLOCK * liar.one(0, 0, 0, 1, 2, 6),
    "external_tokens": _external,
    "awaits_start": lambda liar, told: liar.one(False, True),
    "found": lambda liar, told: liar.some(Liar.tokens),
    "iteration": lambda liar, told: liar.iteration,
    "count": lambda liar, told: liar.one(1, 1, 1, 1, 2, 3, 0),
    "new": _requests, "resumed": _few_requests, "preempted": _few_requests, "skipped": _few_requests,
    "measures": lambda liar, told: liar.some(lambda liar: liar.one(*Measure)),
    "unskipped": _few_requests, "ended": _few_requests, "first_tokens": _few_requests, "progressed": _requests,
    "positions": _positions,
    "appended": _few_requests,
    "appended_counts": _counts("appended"),
    "appended_ids": lambda liar, told: liar.ids(sum(told["appended_counts"])),
    "running": lambda liar, told: liar.dice.randrange(4),
    "waiting": lambda liar, told: liar.dice.randrange(4),
    "requests": _finished_requests,
    "counts": _finished_counts,
    "clones": lambda liar, told: liar.some(lambda liar: f"q{liar.dice.randrange(REQUESTS)}", most=2),
    "partial_ids": lambda liar, told: liar.ids(liar.one(0, len(told["clones"]))),
    "reason": lambda liar, told: liar.one(*FinishReason),
    "delayed": lambda liar, told: liar.one(False, True),
    "operation": _operation, "epoch": _epoch,
    "rank": lambda liar, told: liar.one(0, 0, 0, 1),
    "error": _text, "failed_ids": lambda liar, told: liar.ids(),
    "loaded": _requests, "sent": _requests, "failed": _few_requests,
    "pool": _pool, "source_pool": _pool, "target_pool": _pool,
    "stored": _stored,
    "removed": lambda liar, told: liar.hashes() if liar.one(True, False) else b"",
    "cleared": lambda liar, told: liar.dice.random() < 0.1,
    "places": _places, "chains": _chains, "parents": _parents,
    "marked": lambda liar, told: b"", "contents": lambda liar, told: b"", "contexts": lambda liar, told: (),
    "again_within_ns": lambda liar, told: (), "again_within_blocks": lambda liar, told: (),
    "again_blocks": lambda liar, told: (),
    "first": lambda liar, told: liar.dice.randrange(9), "last": lambda liar, told: liar.dice.randrange(9),
    "gone": lambda liar, told: liar.rarely(), "replaceable": lambda liar, told: liar.rarely(),
    "entry": lambda liar, told: liar.one(2, 3, 4, 9, 42),
    "tokens": lambda liar, told: liar.one(None, 0, BLOCK, 2 * BLOCK),
    "asynchronous": lambda liar, told: liar.one(False, True),
    "tier": lambda liar, told: liar.one(Tier.G1, Tier.G1, *Tier),
    "references": lambda liar, told: pack_ids(liar.one(0, 0, 1, 2) for _ in range(len(told["hashes"]) // 8)),
    "free": lambda liar, told: liar.one(None, 0, PLACES), "cached": lambda liar, told: liar.one(None, 0, 3),
    "copy": lambda liar, told: liar.dice.randrange(8),
    "blocks": lambda liar, told: len(told["hashes"]) // 8 + liar.one(0, 0, 1),
    "size_bytes": lambda liar, told: liar.one(None, 0, 4096),
    "asks": lambda liar, told: liar.one(False, True),
    "wire_ns": lambda liar, told: liar.one(None, 0, 1_000, 2**53, -1),
    "status": lambda liar, told: liar.one(*CandidateStatus),
    "connectors": _requests, "methods": _row("connectors", Liar.request),
    "calls": _row("connectors", Liar.tokens), "total_ns": _row("connectors", Liar.tokens),
    "longest_ns": _row("connectors", Liar.tokens),
    "stats": _requests, "values": _row("stats", lambda liar: liar.one(0.0, 1.5, float("inf"), float("nan"))),
    "connector": _text, "method": _text, "took_ns": lambda liar, told: liar.tokens(),
    "group": lambda liar, told: liar.one(0, 0, 0, 1, -1),
    "kind": _text, "stage": _text, "place": lambda liar, told: liar.dice.randrange(PLACES),
    "below": lambda liar, told: liar.dice.randrange(PLACES), "writer": _text, "edge": _text, "taken": _text,
    "dp_rank": lambda liar, told: liar.one(0, 0, 0, 1, -1),
    "medium": _text,
    "capacity_blocks": lambda liar, told: liar.one(PLACES, PLACES, PLACES, None, 1),
    "block_tokens": lambda liar, told: liar.one(BLOCK, BLOCK, BLOCK, BLOCK, 8, 0),
    "authority": _authority,
    "silent": lambda liar, told: liar.one(False, False, True),
    "passed_blocks": lambda liar, told: liar.one(0, 0, 0, 1, 3, -1),
    "passed_hashes": lambda liar, told: liar.hashes(liar.one(0, 0, 1, 3)),
    "first_place": lambda liar, told: liar.one(0, 0, 1, 64, 65, -1),
    "unkept": lambda liar, told: liar.ids(0) if liar.one(1, 1, 0) else liar.ids(),
    "window": lambda liar, told: liar.one(None, None, 0, 64, 2**31 - 1, 2**31, 1, -1),
}
"""Field to what it is drawn from, given the fields in front of it."""
OF_KIND: Final[dict[tuple[type[st.Stimulus], str], Draw]] = {
    (st.BlocksAllocated, "block_ids"): _allocated,
    (st.RequestFinished, "block_ids"): lambda liar, told: liar.ids(0) if liar.one(1, 1, 0) else liar.ids(),
    (st.IterationFinished, "block_ids"): _finished_ids,
    (st.IterationFinished, "hashes"): _finished_hashes,
    (st.TransferFailed, "failed"): lambda liar, told: liar.ids(),
    (st.MeasuresReported, "values"): lambda liar, told: tuple(
        liar.one(0, 1, 400, -1) for _ in range(len(told["measures"]) + liar.one(0, 0, 1))
    ),
    (st.MismatchReported, "hashes"): lambda liar, told: liar.hashes(liar.one(1, 1, 0, 2)),
}
"""Fields that one kind draws otherwise."""


def _number(liar: Liar, told: dict[str, Any]) -> int:
    return liar.one(-1, -(2**31), 2**31 - 1, 2**31, INT_MAX, -INT_MAX, 10**9)  # type: ignore[no-any-return]


def _column(liar: Liar, told: dict[str, Any]) -> bytes:
    return liar.one(  # type: ignore[no-any-return]
        b"\x01", b"\0" * 8, b"\xff" * 8, pack_ids([-1]), pack_ids([3, 3]), pack_ids([-(2**31), 3]), pack_hashes([5, 5])
    )


def _names(liar: Liar, told: dict[str, Any]) -> tuple[str, ...]:
    return liar.one(("q1", "q1"), ("",), ("nobody",), ("q0", "q1@1", "q2@2"))  # type: ignore[no-any-return]


ODDITIES: Final[dict[str, Draw]] = {
    **dict.fromkeys((
        "prompt_tokens", "output_limit", "priority", "computed_tokens", "external_tokens", "iteration", "count",
        "running", "waiting", "operation", "epoch", "rank", "pool", "source_pool", "target_pool", "first", "last",
        "entry", "tokens", "copy", "blocks", "size_bytes", "took_ns", "group", "place", "below", "dp_rank",
        "capacity_blocks", "first_place", "window", "block_tokens", "age_ns", "free", "cached",
    ), _number),
    **dict.fromkeys((
        "block_ids", "partial_ids", "appended_ids", "unkept", "stored", "removed", "places", "chains", "parents",
        "marked", "contents", "references",
    ), _column),
    **dict.fromkeys((
        "new", "resumed", "preempted", "skipped", "unskipped", "first_tokens", "progressed", "appended", "clones",
        "loaded", "sent",
    ), _names),
    **dict.fromkeys(("positions", "appended_counts", "found", "calls"), lambda liar, told: (_number(liar, told),)),
    "request": lambda liar, told: liar.one("", "x" * 256, "\x1b[2J", "nobody", "q1@1", "ü"),
}
"""Field to values that no honest engine tells."""


class World:
    """A leader that checks everything, its feeds, and a mirror that folds what is published."""

    def __init__(self, dice: Random, *, feeds: int = FEEDS) -> None:
        self.dice = dice
        self.watched = dice.random() < 0.6
        self.config = LeaderConfig(
            block_tokens=BLOCK, g2_blocks=dice.choice([0, 8, 16]), g3_blocks=dice.choice([0, 0, 16]),
            offload_threshold=dice.choice([0.0, 0.9]), asynchronous=dice.random() < 0.7, hold_budget_min=2,
        )
        self.now = 0
        self.deadlines: dict[int, int] = {}
        self.told: list[st.Stimulus] = []
        self.last: list[Event] = []
        """The events of the last stimulus."""
        self.mirror = CacheState()
        self.dispatcher = Dispatcher(
            Leader(self.config, check=True), lambda: self.now, publish=self._published,
        )
        self.dispatcher.wall_deadlines = self.dispatcher.engine_deadlines = self
        self.sources = 0
        start_leader(self.dispatcher)
        self.feeds: list[Liar] = []
        for _ in range(feeds):
            self._feed()

    def _published(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        self.told.append(stimulus)
        self.last = outcome.events
        for event in outcome.events:
            self.mirror.apply(event)

    def set(self, deadline: int, after_ns: int) -> None:
        """A deadline that passes when the dice say so."""
        self.deadlines[deadline] = after_ns

    def clear(self, deadline: int) -> None:
        self.deadlines.pop(deadline, None)

    def open(self, authority: Authority) -> Liar:
        """A feed that has told nothing yet."""
        self.sources += 1
        self.feeds.append(Liar(self.dice, lambda: self.dispatcher.leader.state, self.sources, authority))
        return self.feeds[-1]

    def _feed(self) -> None:
        authority = Authority.OBSERVED if self.watched else Authority.ENGINE
        feed = self.open(authority)
        if self.dice.random() < 0.9:
            self.submit(feed, st.PoolDeclared(0, 0, 0, None, 0, 0, Tier.G1, "GPU", PLACES, BLOCK, authority))
        if self.watched and self.dice.random() < 0.7:
            self.submit(feed, st.PoolDeclared(0, 0, 0, None, 0, 0, Tier.G2, "CPU", None, BLOCK, Authority.STREAM))

    def submit(self, feed: Liar, stimulus: st.Stimulus) -> None:
        """As ``server.feeding`` does for a stimulus of a batch."""
        try:
            check_stimulus(stimulus)
        except UsageError:
            return
        stimulus = feed.names.translated(stimulus, self.dispatcher.leader.state)
        self.dispatcher.submit_from(feed.source, None, type(stimulus), *given_fields(stimulus))

    def tell(self, feed: Liar, kind: type[st.Stimulus] | None = None) -> None:
        """The feed tells a stimulus of this kind or of any."""
        self.submit(feed, feed.stimulus(kind))

    def step(self) -> None:
        """A feed tells something, or a feed is replaced, or a person or the shell does something."""
        self.now += self.dice.randrange(1_000)
        at = self.dice.randrange(200)
        if at < 190:
            self.tell(self.dice.choice(self.feeds))
        elif at < 193:
            lost = self.feeds.pop(self.dice.randrange(len(self.feeds)))
            abandon(self.dispatcher, lost.source)
            self._feed()
        else:
            self._from_inside()

    def _from_inside(self) -> None:
        submit, dice = self.dispatcher.submit, self.dice
        match dice.randrange(6):
            case 0:
                submit(st.ResetRequested, dice.choice(list(ResetMode)))
            case 1:
                spec = BreakpointSpec(site=dice.choice(list(Site)), suspend=dice.choice(list(Suspend)))
                submit(st.BreakpointsReplaced, "me", (spec,) if dice.random() < 0.7 else ())
            case 2 | 3 if self.deadlines:
                submit(st.DeadlinePassed, self.deadlines.popitem()[0])
            case 4:
                submit(st.HoldContinued, None, "me", None)
            case _:
                submit(st.NoteReported, Note.CLOCK_STEPPED, "1 s")

    def check(self) -> None:
        """The fold of the published events has the leader's facts, and the stimuli lead to the same events again."""
        leader = self.dispatcher.leader
        assert digest(self.mirror) == leader.digest()
        again = Leader(self.config)
        events: list[Event] = []
        for stimulus in self.told:
            events += again.handle(stimulus).events
        assert again.digest() == leader.digest()
        assert again.memory_digest() == leader.memory_digest()


def run(seed: int, steps: int) -> World:
    """A world after so many steps, or the first exception."""
    world = World(Random(seed))
    for _ in range(steps):
        world.step()
    world.check()
    return world
