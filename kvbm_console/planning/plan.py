"""``plan``: which change of a machine pays most for a workload, in points of hit rate and milliseconds to first token.

Each change of one setting is a run of the whole workload, beside a run without it. The figures are those of the later
half of the requests, when the tiers are warm, because that is what comes next. A machine of the first half promises so
for the second: ``check`` plans from the first half alone and states what then happened.

The later half is cut into ``STRETCHES``. The spread of a figure among them gives its error, which is two standard
errors. A session has many turns, so neighbouring stretches are alike and their spread alone tells too little. It is
also taken among stretches that are two and four times as long, and the largest counts. A change is compared stretch by
stretch, so what both runs have in common does not count as error.

A hit rate on a cliff of the LRU curve depends on whether the working set just fits, which can change by ``DRIFT`` from
one half to the next. The error of a hit rate is at least what the curve gains or loses by that, and from ``CLIFF`` on
the plan says so.

Beside the runs stands the exact LRU curve: one pool as large as all tiers together, one request after the other, no
time. Where it ends, more memory pays nothing, because all other blocks are asked for the first time.

Law of this file: the figures are of runs. A capacity that is recommended was run, and so was the combination.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any, Final

import msgspec

from kvbm_console.analysis.nearest_rank import nearest_rank
from kvbm_console.core.curves import LruCurve
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import POLICIES
from kvbm_console.planning.cache_only import in_order
from kvbm_console.planning.compare import run_all
from kvbm_console.planning.connector import refusal
from kvbm_console.planning.meter import RequestRecord
from kvbm_console.planning.options import BLOCKS_MAX, SimulateOptions
from kvbm_console.planning.run import open_trace, simulate

SCHEMA: Final = "kvbm-console.plan/1"
STRETCHES: Final = 16
DRIFT: Final = 1.25
"""The working set of what comes next is as large as that of the past within this factor."""
CLIFF: Final = 0.05
"""A hit rate that can change so much with the working set is on a cliff; a plan for other days is off by points."""
NEAR: Final = 0.01
"""A hit rate this near to that of memory without end is on no cliff."""
GROUPS_MIN: Final = 4
"""A spread of fewer stretches is itself a matter of chance."""
REQUESTS_MIN: Final = 4 * STRETCHES
"""With fewer requests a stretch of a quarter of them has none."""
FLAT: Final = 0.001
"""Memory pays nothing when it brings less than a tenth of a point."""
ROUNDS: Final = 12
"""Runs in search of the least capacity: doublings, then halvings of the interval."""
CURVE_POINTS: Final = 48
TIERS: Final = {"device": "total_kv_blocks", "host": "kv_cpu_blocks", "disk": "kv_disk_blocks"}
"""Tier to the option of its capacity."""
THRESHOLDS: Final = (0.0, 0.5, 0.75, 0.9)
PREDICTORS: Final = ("none", "chain", "ngram", "session")


class Change(msgspec.Struct, frozen=True):
    """A change of a machine: its flags, and the options with it."""

    flags: str
    options: SimulateOptions
    memory: bool
    """True if it is bought with memory."""


class Answered(msgspec.Struct, frozen=True):
    """A request of a run: its full prompt blocks, those that were found, and its time to the first token."""

    request: str
    blocks: int
    hits: int
    ttft_ns: int


class Figure(msgspec.Struct, frozen=True):
    """A value with two standard errors."""

    value: float
    error: float


class ChangeRow(msgspec.Struct, frozen=True):
    """The outcome of a change. Rates are shares, points are shares too, times are milliseconds."""

    flags: str
    hit_rate: Figure
    points: Figure
    """Gain of hit rate."""
    ttft_ms: float
    """Mean."""
    ttft_limit_ms: float
    """The percentile of the report."""
    ttft_gain_ms: Figure
    """Mean time saved."""
    blocks: tuple[int, int, int]
    """Capacities of device, host and disk."""
    memory_bytes: int
    """Bytes of all tiers more than without the change."""
    happened: float | None = None
    """With ``check``: the hit rate of the half that was held back."""
    cliff: bool = False
    """True if the LRU curve is so steep at this capacity that the hit rate depends on whether the working set fits."""

    @property
    def kept(self) -> bool | None:
        """True if what happened is within the error of the hit rate; None without ``check``."""
        return None if self.happened is None else abs(self.hit_rate.value - self.happened) <= self.hit_rate.error

    @property
    def sure(self) -> bool:
        """True if the gain of hit rate is larger than its error."""
        return self.points.value > self.points.error


class Goal(msgspec.Struct, frozen=True):
    """The wish of a user; a field that is None is no wish."""

    hit_rate: float | None = None
    budget: dict[str, int] | None = None
    """Tier to bytes."""
    percent: int = 95
    """Percentile of the time to the first token."""
    ttft_ns: int | None = None

    def met(self, row: ChangeRow) -> bool:
        """True if this outcome is what is wished."""
        return (self.hit_rate is None or row.hit_rate.value >= self.hit_rate) and (
            self.ttft_ns is None or row.ttft_limit_ms * 1e6 <= self.ttft_ns
        )


class CurvePoint(msgspec.Struct, frozen=True):
    """The exact LRU curve at one capacity."""

    blocks: int
    hit_rate: float


class MachinePlan(msgspec.Struct, frozen=True):
    """The document of ``plan``."""

    schema: str
    trace: str
    note: str | None
    requests: int
    judged: int
    """Requests behind the figures: the later half, when tiers are warm."""
    percent: int
    """Percentile of ``ttft_limit_ms``."""
    block_bytes: int
    today: ChangeRow
    changes: list[ChangeRow]
    """A row for each change of today's machine, or of the one with the budget. The largest gain of hit rate comes
    first."""
    together: ChangeRow | None
    """All changes without memory that surely gain, run together."""
    most: float
    """Hit rate of an LRU cache without end: more memory never brings more."""
    enough_blocks: int
    """An LRU cache of so many blocks is within a tenth of a point of that."""
    curve: list[CurvePoint]
    answers: list[ChangeRow]
    """The least machines that were found for the goal; empty if none was found, or without a goal."""
    answer: str
    """The answer to the goal as a sentence, empty without a goal."""
    checked: float | None
    """With ``check``: the largest difference between a promised hit rate and what happened, as a share."""
    promises: int = 0
    """With ``check``: hit rates that were promised."""
    broken: int = 0
    """Of these, what happened was not within the error."""
    budget: ChangeRow | None = None
    """The machine with all of the budget as a change of today's, None if that is today's."""


# --- runs ---


def run_one(options: SimulateOptions) -> list[Answered]:
    """The requests of a run that were answered, by arrival."""
    found: list[tuple[int, int, Answered]] = []
    size = options.block_size

    def ended(instance: int, record: RequestRecord) -> None:
        if record.first_token_ns is not None:
            hits = min(sum(record.hits), record.prompt_tokens // size)
            found.append((record.arrived_ns, len(found), Answered(
                record.request, record.prompt_tokens // size, hits, record.first_token_ns - record.arrived_ns
            )))

    simulate(options, ended=ended)
    return [row[2] for row in sorted(found, key=lambda row: row[:2])]


class RunJudge:
    """Judges runs by one part of the requests, cut into stretches that are the same for all runs."""

    def __init__(self, options: SimulateOptions, today: Sequence[Answered], goal: Goal, *, check: bool) -> None:
        names = [answered.request for answered in today]
        if len(names) < REQUESTS_MIN:
            raise UsageError(f"{options.trace} must have at least {REQUESTS_MIN} answered requests, got {len(names)}")
        known = len(names) // 2 if check else len(names)
        self.options = options
        self.goal = goal
        self.requests = len(names)
        self.judged = names[known // 2 : known]
        self._held_back = frozenset(names[known:])
        self._stretch = {name: at * STRETCHES // len(self.judged) for at, name in enumerate(self.judged)}
        self.curve: Curves | None = None
        """The exact LRU curve of the judged requests, which shows cliffs."""
        self._today = self._parts(today)
        self._ttft = self._times(today)

    def _parts(self, run: Sequence[Answered]) -> list[tuple[int, int]]:
        """Hits and blocks of each stretch."""
        parts = [[0, 0] for _ in range(STRETCHES)]
        for answered in run:
            at = self._stretch.get(answered.request)
            if at is not None:
                parts[at][0] += answered.hits
                parts[at][1] += answered.blocks
        return [(hits, blocks) for hits, blocks in parts]

    def _drift(self, rate: float, blocks: tuple[int, int, int]) -> float:
        """The change of the LRU curve around the capacity of all tiers, or the one at which it has this hit rate."""
        curve, total = self.curve, sum(blocks)
        if curve is None:
            return 0.0
        if total > blocks[0] and rate < curve.most - NEAR:  # a block in two tiers fills two places
            total = min(total, curve.least(rate) or total)
        return curve.drift(total)

    def _times(self, run: Sequence[Answered]) -> list[tuple[int, int]]:
        """Sum of times to the first token, and their number, of each stretch."""
        parts = [[0, 0] for _ in range(STRETCHES)]
        for answered in run:
            at = self._stretch.get(answered.request)
            if at is not None:
                parts[at][0] += answered.ttft_ns
                parts[at][1] += 1
        return [(total, number) for total, number in parts]

    def row(self, change: Change, run: Sequence[Answered]) -> ChangeRow:
        """The figures of a run."""
        parts, times = self._parts(run), self._times(run)
        rate, ttft = ratio(parts), ratio(times)
        judged = sorted(answered.ttft_ns for answered in run if answered.request in self._stretch)
        limit_ns = nearest_rank(judged, self.goal.percent) if judged else 0
        later = [answered for answered in run if answered.request in self._held_back]
        options = change.options
        blocks = options.total_kv_blocks, options.kv_cpu_blocks, options.kv_disk_blocks
        before = sum(getattr(self.options, field) for field in TIERS.values())
        drift = self._drift(rate.value, blocks)
        rate = Figure(rate.value, max(rate.error, drift))
        return ChangeRow(
            change.flags, rate, gain(parts, self._today), ttft.value / 1e6, limit_ns / 1e6,
            _milliseconds(gain(self._ttft, times)),
            blocks, (sum(blocks) - before) * options.block_bytes,
            None if not later else sum(row.hits for row in later) / max(1, sum(row.blocks for row in later)),
            drift >= CLIFF,
        )


def ratio(parts: Sequence[tuple[float, float]]) -> Figure:
    """The sum of the first over the sum of the second, with two standard errors by the spread of the parts, or of pairs
    or fours of them if that is larger.

    >>> ratio([(1, 2), (1, 2)]), ratio([(1, 2), (0, 2)])
    (Figure(value=0.5, error=0.0), Figure(value=0.25, error=0.5))
    """
    whole = sum(part[1] for part in parts)
    if not whole:
        return Figure(0.0, 0.0)
    value, largest = sum(part[0] for part in parts) / whole, 0.0
    while True:
        spread = sum((mine - value * size) ** 2 for mine, size in parts) * len(parts) / max(1, len(parts) - 1)
        largest = max(largest, 2 * sqrt(spread) / whole)
        if len(parts) < 2 * GROUPS_MIN:
            return Figure(value, largest)
        parts = [
            (sum(mine for mine, _ in parts[at : at + 2]), sum(size for _, size in parts[at : at + 2]))
            for at in range(0, len(parts), 2)
        ]


def gain(parts: Sequence[tuple[float, float]], base: Sequence[tuple[float, float]]) -> Figure:
    """The ratio of the parts less that of the base, with two standard errors by the spread of their differences."""
    differences = [
        (mine - theirs * size / whole if whole else 0.0, size)
        for (mine, size), (theirs, whole) in zip(parts, base, strict=True)
    ]
    return Figure(ratio(parts).value - ratio(base).value, ratio(differences).error)


def _milliseconds(figure: Figure) -> Figure:
    return Figure(figure.value / 1e6, figure.error / 1e6)


# --- changes ---


def changes_of(options: SimulateOptions) -> list[Change]:
    """One change for each value of each setting that this machine has."""
    changes = [*_of_memory(options), *_of_rules(options)]
    return [change for change in changes if refusal(change.options) is None]


def _of_memory(options: SimulateOptions) -> Iterator[Change]:
    usual = {"device": 0, "host": options.total_kv_blocks, "disk": options.total_kv_blocks + options.kv_cpu_blocks}
    for tier, field in TIERS.items():
        now = getattr(options, field)
        sizes = (now // 2, 2 * now, 4 * now) if now else (2 * usual[tier], 8 * usual[tier])
        for blocks in sizes:
            if 0 < blocks <= BLOCKS_MAX:
                yield with_fields(options, memory=True, **{field: blocks})


def _of_rules(options: SimulateOptions) -> Iterator[Change]:
    if not options.tiered:
        return
    for threshold in THRESHOLDS:
        if threshold != options.kv_offload_threshold:
            yield with_fields(options, kv_offload_threshold=threshold)
    for policy in POLICIES:
        if policy != options.policy.policy:
            yield with_fields(options, policy=msgspec.structs.replace(options.policy, policy=policy))
    tail = 8 * options.block_size
    if options.policy.pin_tail_tokens < tail:
        yield with_fields(options, policy=msgspec.structs.replace(options.policy, pin_tail_tokens=tail))
    if options.kv_disk_blocks:
        admission = 0 if options.policy.disk_admission else 2
        yield with_fields(options, policy=msgspec.structs.replace(options.policy, disk_admission=admission))
    if options.kv_cpu_blocks and options.kv_disk_blocks:
        for prefetch in PREDICTORS:
            if prefetch != options.prefetch:
                yield with_fields(options, prefetch=prefetch)


def with_fields(options: SimulateOptions, *, memory: bool = False, **fields: Any) -> Change:
    """The change of these options, and its flags."""
    changed = msgspec.structs.replace(options, **fields)
    flags: list[str] = []
    for name, value in fields.items():
        if name != "policy":
            flags.append(f"--{name.replace('_', '-')} {value}")
            continue
        before = options.policy
        flags += [
            f"--{part.replace('_', '-')} {getattr(value, part)}" for part in value.__struct_fields__
            if getattr(value, part) != getattr(before, part)
        ]
    return Change(" ".join(flags), changed, memory)


# --- the plan ---


def plan(
    options: SimulateOptions, goal: Goal, *, check: bool = False, workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> MachinePlan:
    """Run the workload on the machine and on each changed machine, and answer the goal. ``progress`` gets the runs so
    far."""
    base = _within(options, goal.budget)
    changes = [Change("", base, memory=False), *changes_of(base)]
    if goal.budget is not None:
        changes = [change for change in changes if not change.memory or _fits(change.options, base)]
    asked = [change.options for change in changes]
    if base != options:
        asked.insert(0, options)
    runs = run_all(run_one, asked, workers=workers, progress=progress)
    judge = RunJudge(options, runs[0], goal, check=check)
    curve = lru_curves(base, judge.requests // 2 if check else judge.requests)
    judge.curve = curve
    today, budget = judge.row(Change("", options, memory=False), runs[0]), None
    if base != options:
        spend = with_fields(options, memory=True, **{field: getattr(base, field) for field in TIERS.values()
                                                     if getattr(base, field) != getattr(options, field)})
        budget, runs = judge.row(spend, runs[1]), runs[1:]
        judge = RunJudge(base, runs[0], goal, check=check)
        judge.curve = curve
    rows = [judge.row(change, run) for change, run in zip(changes, runs, strict=True)]
    whole, found = rows[0], sorted(rows[1:], key=lambda row: (-row.points.value, row.ttft_ms))
    together = _together(base, changes[1:], rows[1:], judge)
    answers, answer = _answer(base, goal, judge, [whole, *found, *([together] if together else [])], curve)
    tried = [row for row in (today, budget, *found, together, *answers) if row is not None and row.happened is not None]
    broken = sum(row.kept is False for row in tried)
    return MachinePlan(
        SCHEMA, options.trace, open_note(options), judge.requests, len(judge.judged), goal.percent, base.block_bytes,
        today, found, together, curve.most, curve.enough, curve.points(), answers, answer,
        max((abs(row.hit_rate.value - (row.happened or 0.0)) for row in tried), default=None) if check else None,
        len(tried), broken, budget,
    )


def open_note(options: SimulateOptions) -> str | None:
    """The limits of the trace, for the user."""
    from kvbm_console.planning.traces import note_of

    return note_of(open_trace(options))


def _within(options: SimulateOptions, budget: dict[str, int] | None) -> SimulateOptions:
    """The machine with all memory of the budget, and no more of a tier without one."""
    if budget is None:
        return options
    fields = {TIERS[tier]: min(BLOCKS_MAX, size // options.block_bytes) for tier, size in budget.items()}
    for tier, field in TIERS.items():
        if fields.get(field) == 0:
            raise UsageError(f"--budget must hold a block of {options.block_bytes} bytes of {tier}")
    return msgspec.structs.replace(options, **fields)


def _fits(options: SimulateOptions, whole: SimulateOptions) -> bool:
    return all(getattr(options, field) <= getattr(whole, field) for field in TIERS.values())


def _together(
    base: SimulateOptions, changes: Sequence[Change], rows: Sequence[ChangeRow], judge: RunJudge
) -> ChangeRow | None:
    """The best sure change of each setting without memory, run together; None for fewer than two."""
    best: dict[str, tuple[float, Change]] = {}
    for change, row in zip(changes, rows, strict=True):
        if change.memory or not row.sure:
            continue
        setting = change.flags.partition(" ")[0]
        if setting not in best or row.points.value > best[setting][0]:
            best[setting] = row.points.value, change
    if len(best) < 2:
        return None
    options, policy = base, base.policy
    for _, change in best.values():
        mine = change.options.policy
        policy = msgspec.structs.replace(policy, **{
            part: getattr(mine, part) for part in mine.__struct_fields__
            if getattr(mine, part) != getattr(base.policy, part)
        })
        options = msgspec.structs.replace(options, **{
            field: getattr(change.options, field) for field in ("kv_offload_threshold", "prefetch")
            if getattr(change.options, field) != getattr(base, field)
        })
    options = msgspec.structs.replace(options, policy=policy)
    flags = " ".join(change.flags for _, change in best.values())
    return judge.row(Change(flags, options, memory=False), run_one(options))


# --- the curve ---


class Curves:
    """The exact LRU curve of the judged requests, in a pool that the earlier requests have warmed."""

    def __init__(self) -> None:
        self._all = LruCurve()
        self._earlier = LruCurve()

    def add(self, keys: Sequence[int], asked: int, *, judged: bool) -> None:
        """The next request, which asks for the first ``asked`` of its keys and stores all."""
        self._all.add(keys, asked=asked)
        if not judged:
            self._earlier.add(keys, asked=asked)

    def hit_rate(self, capacity: int) -> float:
        """Hits per reference of the judged requests; 0 without references."""
        references = self._all.references - self._earlier.references
        return (self._all.hits(capacity) - self._earlier.hits(capacity)) / references if references else 0.0

    def drift(self, capacity: int) -> float:
        """The most by which the hit rate changes if the working set grows or shrinks by ``DRIFT``."""
        here = self.hit_rate(capacity)
        return max(here - self.hit_rate(int(capacity / DRIFT)), self.hit_rate(int(capacity * DRIFT)) - here)

    @property
    def most(self) -> float:
        """The hit rate of a cache without end."""
        return self.hit_rate(2**62)

    @property
    def enough(self) -> int:
        """The least capacity from which on the curve is flat."""
        return self.least(self.most - FLAT) or 0

    def least(self, rate: float) -> int | None:
        """The least capacity at a bend of the curve with this hit rate, None if none has it."""
        return next((blocks for blocks in self._all.capacities if self.hit_rate(blocks) >= rate), None)

    def points(self) -> list[CurvePoint]:
        """The curve at capacities that are evenly spread on a logarithmic scale."""
        last = max(2, self._all.capacities[-1])
        sizes = sorted({round(last ** (at / (CURVE_POINTS - 1))) for at in range(CURVE_POINTS)})
        return [CurvePoint(blocks, self.hit_rate(blocks)) for blocks in sizes]


def lru_curves(options: SimulateOptions, requests: int) -> Curves:
    """The curve of the later half of the first ``requests`` requests, with blocks and hits as an engine counts them."""
    curves, size = Curves(), options.block_size
    for number, request in enumerate(in_order(open_trace(options), size)):
        if number >= requests:
            break
        curves.add(request.hashes + request.output_hashes, (request.prompt_tokens - 1) // size,
                   judged=number >= requests // 2)
    return curves


# --- answers ---


def _answer(
    base: SimulateOptions, goal: Goal, judge: RunJudge, rows: Sequence[ChangeRow], curve: Curves
) -> tuple[list[ChangeRow], str]:
    """The least machines for the goal, and the answer as a sentence."""
    today = rows[0]
    if goal.budget is not None:
        return _least_of_budget(base, goal, judge, today)
    if goal.hit_rate is None and goal.ttft_ns is None:
        return [], ""
    wish = " and ".join(
        ([f"{100 * goal.hit_rate:g} % of hits"] if goal.hit_rate is not None else [])
        + ([f"p{goal.percent} of ttft within {goal.ttft_ns / 1e6:g} ms"] if goal.ttft_ns is not None else [])
    )
    if goal.met(today):
        return [today], f"{wish}: the machine has that without a change"
    if goal.hit_rate is not None and curve.most < goal.hit_rate:
        least = f"{wish}: no memory reaches that, because {100 * (1 - curve.most):.1f} % of the blocks are asked for "
        return [], least + "the first time"
    met = [row for row in rows if goal.met(row) and row.memory_bytes <= 0]
    for tier in TIERS:
        row = _least_capacity(base, tier, goal, judge, curve)
        if row is not None:
            met.append(row)
    met.sort(key=lambda row: row.memory_bytes)
    if not met:
        best = max(rows, key=lambda row: row.hit_rate.value) if goal.hit_rate is not None else min(
            rows, key=lambda row: row.ttft_limit_ms
        )
        return [], (
            f"{wish}: no single change reaches that; {best.flags or 'no change'} comes nearest, with "
            f"{100 * best.hit_rate.value:.1f} % and {best.ttft_limit_ms:,.1f} ms"
        )
    return met, f"{wish}: the least change is {met[0].flags}"


def _least_capacity(base: SimulateOptions, tier: str, goal: Goal, judge: RunJudge, curve: Curves) -> ChangeRow | None:
    """The least capacity of a tier that meets the goal, within a sixteenth; None if none does."""
    field = TIERS[tier]
    now = getattr(base, field)

    def tried(blocks: int) -> ChangeRow:
        change = with_fields(base, memory=True, **{field: blocks})
        return judge.row(change, run_one(change.options))

    guess = None if goal.hit_rate is None else curve.least(goal.hit_rate)
    low, high = now, min(BLOCKS_MAX, max(guess or 0, now + now // 4, base.total_kv_blocks // 2, 16))
    best: ChangeRow | None = None
    flat = 0
    previous = -1.0
    for _ in range(ROUNDS):
        if best is None:
            row = tried(high)
            if goal.met(row):
                best = row
            elif high >= min(BLOCKS_MAX, 4 * max(1, curve.enough)) or flat > 1:
                return None
            else:
                flat = flat + 1 if abs(row.ttft_limit_ms - previous) < FLAT else 0
                previous = row.ttft_limit_ms
                low, high = high, min(BLOCKS_MAX, 2 * high)
            continue
        if (high - low) * 16 <= high:
            break
        middle = (low + high) // 2
        row = tried(middle)
        if goal.met(row):
            best, high = row, middle
        else:
            low = middle
    return best


def _least_of_budget(
    base: SimulateOptions, goal: Goal, judge: RunJudge, whole: ChangeRow
) -> tuple[list[ChangeRow], str]:
    """The smallest part of the budget that is within a tenth of a point of all of it."""
    assert goal.budget is not None
    options, best = base, whole
    for tier in sorted(goal.budget, key=list(TIERS).index, reverse=True):
        field = TIERS[tier]
        least = 1 if tier == "device" else 0
        for shift in range(1, ROUNDS // 2):
            blocks = max(least, getattr(base, field) >> shift)
            change = with_fields(options, memory=True, **{field: blocks})
            row = judge.row(change, run_one(change.options))
            if row.hit_rate.value < whole.hit_rate.value - FLAT:
                break
            options, best = change.options, row
    sizes = ", ".join(f"--{field.replace('_', '-')} {getattr(options, field)}" for field in TIERS.values())
    if best is whole:
        return [whole], f"all of the budget pays: {100 * whole.hit_rate.value:.1f} % with {sizes}"
    saved = -best.memory_bytes
    return [msgspec.structs.replace(best, flags=sizes.replace(",", ""))], (
        f"{saved:,} bytes of the budget pay nothing: {100 * best.hit_rate.value:.1f} % with {sizes}, and "
        f"{100 * whole.hit_rate.value:.1f} % with all of it"
    )


def knee_of(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """The points of a curve at which its hit rate passes a whole ten percent, and its last point."""
    knees = [after for before, after in pairwise(points) if int(10 * after.hit_rate) > int(10 * before.hit_rate)]
    return [*knees, points[-1]] if points and points[-1] not in knees else knees
