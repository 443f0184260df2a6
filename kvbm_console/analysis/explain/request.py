"""The explanation of a request, made from evidence.

Law of this file: an explanation takes two passes, of which the first only finds the request, and two more for the slots
that the request has in other engines.
"""

from typing import Final

import msgspec

from kvbm_console.analysis.explain.contexts import ContextMarks, twins
from kvbm_console.analysis.explain.course import Course, Looked
from kvbm_console.analysis.explain.ledger import BlockLedger
from kvbm_console.analysis.explain.misses import Judge
from kvbm_console.analysis.explain.model import Admission, Explanation, Half, Missed, MissedRun
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.waits import serves
from kvbm_console.analysis.walk import Evidence, Progress, walk
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.errors import NotFound, UsageError
from kvbm_console.core.events import HitsLost, SlotCloned, SlotOpened
from kvbm_console.core.ids import Authority, Tier, is_called, sampled
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken

NAMES_SHOWN: Final = 3
"""Requests named as near misses when the evidence lacks the request."""


class _Found(msgspec.Struct):
    """Requests by name, in order of their first slot: those called so, and others that are near misses."""

    named: dict[str, tuple[list[int], list[int], int]] = {}
    """Request to its slots, and the prompt hashes and the engine of the last slot."""
    near: list[str] = []


class _Lower(Visitor):
    """The tiers below G1 that the leader copies to, as of the end, and the leader's memory."""

    def __init__(self, evidence: Evidence, wanted: set[int], source: int) -> None:
        super().__init__()
        self._evidence = evidence
        self._wanted = wanted
        self._source = source
        self.tiers: list[Tier] = []
        self.remembered: list[tuple[int, dict[int, int]]] = []

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        memory = self._evidence.remembered(state.seq)
        self.remembered.append((state.seq, {
            key: memory[key] for key in self._wanted
            if key in memory and not any(key in pool.by_hash for pool in self._pools(state))
        }))

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        pools = [] if state is None else self._pools(state)
        self.tiers = sorted({pool.info.tier for pool in pools if pool.info.authority is Authority.LEADER})

    def _pools(self, state: CacheState) -> list[PoolFacts]:
        return [pool for pool in state.pools if serves(state, pool, self._source)]


class _Streams(Visitor):
    """True if some pool is described by an event stream."""

    seen = False

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        self.seen = state is not None and not state.totals.slots_opened and any(
            pool.info.authority is Authority.STREAM for pool in state.pools
        )


class _Halves(Visitor):
    """Finds the slots in other engines that send what a slot receives, and receive what it sends."""

    def __init__(self, sends: str | None, receives: str | None) -> None:
        super().__init__()
        self._sends, self._receives = sends, receives
        self.prefill: int | None = None
        self.decode: int | None = None
        self.after = {SlotOpened: self._opened}

    def resumed(self, state: CacheState, gap: GapSeen | None) -> None:
        for slot in state.slots.values():
            self._meet(slot.slot, slot.sends, slot.receives)

    def _opened(self, e: SlotOpened, state: CacheState) -> None:
        self._meet(e.slot, e.sends, e.receives)

    def _meet(self, number: int, sends: str | None, receives: str | None) -> None:
        if sends is not None and sends == self._receives:
            self.prefill = number
        if receives is not None and receives == self._sends:
            self.decode = number


def _halves(evidence: Evidence, slot: SlotFacts) -> tuple[Half, ...]:
    """The other slots of a request over several engines: two more passes, which an ordinary request does not need."""
    if slot.sends is None and slot.receives is None:
        return ()
    finder = _Halves(slot.sends, slot.receives)
    walk(evidence, (finder,))
    courses = {
        role: Course(number, evidence.now_ns)
        for role, number in (("prefill", finder.prefill), ("decode", finder.decode)) if number is not None
    }
    walk(evidence, courses.values())
    return tuple(
        Half(
            role=role, request=course.slot.request, slot=str(course.slot.slot), engine=course.slot.source,
            state=(course.state or course.slot.state).label, spent=course.spent(),
        )
        for role, course in courses.items() if course.slot is not None
    )


def _only_streams(evidence: Evidence) -> bool:
    visitor = _Streams()
    walk(evidence, (visitor,))
    return visitor.seen


def explain(evidence: Evidence, request: str, progress: Progress | None = None) -> Explanation:
    """Why ``request`` missed, and where its time went. Raises ``UsageError`` when it is not in the evidence."""
    found = _find(evidence, request)
    if not found.named:
        near = f"; it has {', '.join(found.near)}" if found.near else ""
        if not near and _only_streams(evidence):
            near = "; an engine's event stream names blocks and no requests"
        raise NotFound(f"{evidence.name} has no request {request!r}{near}")
    samples = found.named if len(set(map(sampled, found.named))) == 1 and request not in found.named else ()
    if len(found.named) > 1 and request not in found.named and not samples:
        names = [*list(found.named)[:NAMES_SHOWN], *(["..."] if len(found.named) > NAMES_SHOWN else [])]
        raise UsageError(f"{request} is {len(found.named)} requests: name one of {', '.join(names)}")
    slots, hashes, source = found.named[request if request in found.named else next(iter(found.named))]
    wanted = set(hashes)
    ledger, lower = BlockLedger(wanted, source), _Lower(evidence, wanted, source)
    course = Course(slots[-1], evidence.now_ns)
    marks = ContextMarks(wanted)
    walk(evidence, (ledger, course, lower, marks), progress=progress, what="explain")
    slot = course.slot
    assert slot is not None, "the request was found before"
    tiers = lower.tiers or _configured(evidence)
    judge = Judge(
        ledger, slot.hashes, slot.prompt_tokens, course.block_tokens or 1, tiers, evidence.config, lower.remembered,
        twins(evidence, slot.source, marks.found),
    )
    return Explanation(
        evidence=evidence.name, request=slot.request, slot=str(slot.slot), occurrences=len(slots),
        state=(course.state or slot.state).label, prompt_tokens=slot.prompt_tokens,
        prompt_blocks=slot.prompt_blocks, block_tokens=course.block_tokens,
        admissions=tuple(_admissions(course, judge)), spent=course.spent(), clone=course.clone,
        clones=tuple(course.clones), wrong_bytes=tuple(course.wrong_bytes), engine=slot.source,
        receives=slot.receives, sends=slot.sends, halves=_halves(evidence, slot),
        samples=tuple(name for name in samples if name != slot.request),
    )


def only_block(explanation: Explanation, block: int) -> Explanation:
    """The explanation with the misses of one prompt block alone. Raises ``UsageError`` for an unknown block."""
    tail = explanation.prompt_tokens % (explanation.block_tokens or 1)
    last = explanation.prompt_blocks - 1 + (tail > 0)
    if not 0 <= block <= last:
        raise UsageError(f"block must be from 0 to {last} for {explanation.request}, got {block}")
    return msgspec.structs.replace(explanation, admissions=tuple(
        msgspec.structs.replace(admission, misses=tuple(
            _cut(run, block) for run in admission.misses
            if (block >= explanation.prompt_blocks if run.first is None else run.first <= block <= (run.last or 0))
        ))
        for admission in explanation.admissions
    ))


def _cut(run: MissedRun, block: int) -> MissedRun:
    if run.first is None or run.blocks == 1:
        return run
    return msgspec.structs.replace(run, first=block, last=block, blocks=1, tokens=run.tokens // run.blocks)


def grouped(explanation: Explanation) -> Explanation:
    """The explanation with neighbouring blocks that missed alike in one run."""
    return msgspec.structs.replace(explanation, admissions=tuple(
        msgspec.structs.replace(admission, misses=tuple(_grouped(admission.misses)))
        for admission in explanation.admissions
    ))


def _grouped(misses: tuple[MissedRun, ...]) -> list[MissedRun]:
    runs: list[MissedRun] = []
    for run in misses:
        before = runs[-1] if runs else None
        if before is not None and before.first is not None and run.first is not None and _alike(before, run):
            runs[-1] = msgspec.structs.replace(
                before, last=run.last, blocks=before.blocks + run.blocks, tokens=before.tokens + run.tokens,
                last_seq=run.last_seq,
            )
        else:
            runs.append(run)
    return runs


def _alike(run: MissedRun, other: MissedRun) -> bool:
    return (
        run.reason, run.text, run.tier, run.for_request, run.operation, run.candidate, run.remembered,
    ) == (other.reason, other.text, other.tier, other.for_request, other.operation, other.candidate, other.remembered)


# --- the first pass --------------------------------------------------------------------------------------------------


def _find(evidence: Evidence, request: str) -> _Found:
    """Slots of the requests that a client knows by this name."""
    found = _Found()
    prompts: dict[int, list[int]] = {}
    engines: dict[int, int] = {}
    for item in evidence.items():
        if isinstance(item, SnapshotTaken):
            for slot in item.state.slots.values():
                prompts[slot.slot], engines[slot.slot] = slot.hashes[: slot.prompt_blocks], slot.source
                _meet(found, slot.slot, slot.request, prompts[slot.slot], slot.source, request)
        elif isinstance(item, EventsArrived):
            for event in item.events:
                if type(event) is SlotOpened:
                    hashes = unpack_hashes(event.hashes) if is_called(event.request, request) else []
                    engines[event.slot] = event.source
                    _meet(found, event.slot, event.request, hashes, event.source, request)
                elif type(event) is SlotCloned:
                    engine = engines[event.slot] = engines.get(event.parent, 0)
                    _meet(found, event.slot, event.request, prompts.get(event.parent, []), engine, request)
    return found


def _meet(found: _Found, slot: int, name: str, hashes: list[int], engine: int, wanted: str) -> None:
    if is_called(name, wanted):
        known = found.named.get(name, ([], hashes, engine))
        found.named[name] = known if slot in known[0] else ([*known[0], slot], hashes, engine)
    elif len(found.near) < NAMES_SHOWN and name not in found.near:
        found.near.append(name)


def _configured(evidence: Evidence) -> list[Tier]:
    config = evidence.config
    if config is None:
        return []
    return [tier for tier, blocks in ((Tier.G2, config.g2_blocks), (Tier.G3, config.g3_blocks)) if blocks]


# --- admissions ------------------------------------------------------------------------------------------------------


def _admissions(course: Course, judge: Judge) -> list[Admission]:
    admissions = []
    for scored in course.scored:
        event = scored.event
        first_miss = sum(event.hits)
        misses = _lost_loads(scored.lost, judge)
        misses += _misses(course, judge, first_miss, scored.looked, event.seq)
        admissions.append(Admission(
            admitted=True, seq=event.seq, at_ns=event.at_ns, after_preemption=scored.after_preemption,
            lookup_seq=None if scored.looked is None else scored.looked.event.seq, asked_again=scored.asked_again,
            hits=(scored.hits[0], scored.hits[1], scored.hits[2], scored.hits[3]),
            missed=event.prompt_blocks - sum(scored.hits), misses=tuple(misses),
        ))
    waiting = course.looked[-1] if course.looked else None
    last_seq = course.scored[-1].event.seq if course.scored else -1
    if waiting is not None and waiting.event.seq > last_seq and course.ended_ns is None:
        admissions.append(_waiting(course, judge, waiting))
    return admissions


def _waiting(course: Course, judge: Judge, looked: Looked) -> Admission:
    event = looked.event
    hits = (event.local_blocks, *event.matched)
    slot = course.slot
    assert slot is not None
    return Admission(
        admitted=False, seq=event.seq, at_ns=event.at_ns, after_preemption=bool(course.scored), lookup_seq=event.seq,
        asked_again=course.asked_again, hits=hits, missed=slot.prompt_blocks - sum(hits),
        misses=tuple(_misses(course, judge, sum(hits), looked, event.seq)),
    )


def _misses(
    course: Course, judge: Judge, first_miss: int, looked: Looked | None, seq: int
) -> list[MissedRun]:
    slot = course.slot
    assert slot is not None
    runs = [judge.missed(block, first_miss, looked, seq) for block in range(first_miss, slot.prompt_blocks)]
    tail = slot.prompt_tokens - slot.prompt_blocks * judge.block_tokens
    if tail > 0:
        if slot.prompt_blocks == 0 and slot.prompt_tokens < judge.block_tokens:
            text = f"the whole prompt is shorter than a block of {judge.block_tokens} tokens"
        else:
            text = f"they do not fill a block of {judge.block_tokens}"
        runs.append(MissedRun(
            first=None, last=None, blocks=0, tokens=tail, reason=Missed.TOO_SHORT, text=text,
        ))
    return runs


def _lost_loads(lost: list[tuple[HitsLost, str, int | None]], judge: Judge) -> list[MissedRun]:
    runs = []
    for event, failure, operation in lost:
        first = event.position // (judge.block_tokens or 1)
        for block in range(first, first + event.blocks):
            runs.append(MissedRun(
                first=block, last=block, blocks=1, tokens=judge.block_tokens, reason=Missed.COPY_FAILED,
                text=f"found in {event.tier.name}, but its load did not arrive"
                + ("" if operation is None else f" (operation {operation})") + (f": {failure}" if failure else ""),
                seq=event.seq, last_seq=event.seq, at_ns=event.at_ns, event="HitsLost", tier=event.tier.name,
                operation=None if operation is None else str(operation),
            ))
    return runs
