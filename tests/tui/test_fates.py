"""Fates, blame, curve and worth against recounts of every committed recording.

Law of this file: a recount reads events alone. It keeps sets, lists and plain LRU orders, and asks no facts.
"""

import re
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.ids import CandidateStatus, EvictRule, Route, SlotState, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from tests.tui.desks import desk_of, everything, screen
from tests.tui.script import connected
from tui.desk import OVERVIEW, TIERS
from tui.keys import press
from tui.model.fates import Fate
from tui.model.mirror import Mirror
from tui.model.numbers import brief, duration
from tui.model.worth import TierWorth, worth_of
from tui.views.worth import evictions_row, points_of

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
PATHS = [path for path in [*sorted(RECORDINGS.glob("*.mcap")), RECORDINGS / "screens" / "run.mcap"]
         if not Recording.open(path).gaps]


def folded(path: Path) -> tuple[Mirror, list[ev.Event]]:
    events = [event for batch in Recording.open(path).events() for event in batch]
    mirror = Mirror()
    mirror.take(connected(recording=True), 0)
    mirror.take(SnapshotTaken(CacheState()), 0)
    mirror.take(EventsArrived(events), 0)
    assert mirror.broken is None
    return mirror, events


class Lost(NamedTuple):
    """A block that an admission missed after its eviction."""

    key: int
    tier: Tier
    request: str | None
    stay_ns: int
    depth: int


class Recount:
    """The place of each block; the order of last uses; what each admission met."""

    def __init__(self, events: list[ev.Event]) -> None:
        self.tier: dict[int, Tier] = {}
        self.at: dict[tuple[int, int], tuple[int, bool, int]] = {}
        """Place to (hash, ready, since)."""
        self.prompts: dict[int, list[int]] = {}
        self.names: dict[int, str] = {}
        self.gone: dict[int, tuple[Tier, str | None, int]] = {}
        self.order: list[int] = []
        self.asked: list[list[int]] = []
        self.fates: Counter[Fate] = Counter()
        self.lost: list[Lost] = []
        self.depths: list[int] = []
        for event in events:
            self.take(event)

    def states(self, key: int) -> list[bool]:
        return [ready for found, ready, _ in self.at.values() if found == key]

    def use(self, keys: list[int]) -> None:
        self.order = [*dict.fromkeys([*keys, *self.order])]

    def take(self, e: ev.Event) -> None:
        match e:
            case ev.PoolKnown():
                self.tier[e.pool] = e.tier
            case ev.SlotOpened():
                self.prompts[e.slot], self.names[e.slot] = unpack_hashes(e.hashes), e.request
            case ev.SlotCloned():
                self.prompts[e.slot], self.names[e.slot] = list(self.prompts[e.parent]), e.request
            case ev.BlocksFilled():
                keys, at = unpack_hashes(e.hashes), 0
                self.at.update(((e.pool, place), (key, True, e.at_ns))
                               for place, key in zip(unpack_ids(e.ids), keys, strict=True))
                for slot, count in zip(e.slots, e.counts, strict=True):
                    self.prompts[slot] += [key for key in keys[at : at + count] if key not in self.prompts[slot]]
                    at += count
            case ev.BlocksReserved():
                self.at.update(((e.pool, place), (key, False, e.at_ns))
                               for place, key in zip(unpack_ids(e.ids), unpack_hashes(e.hashes), strict=True))
            case ev.BlocksReady():
                for place in unpack_ids(e.ids):
                    self.at[e.pool, place] = (self.at[e.pool, place][0], True, e.at_ns)
            case ev.BlocksEvicted():
                who = None if e.for_slot is None else self.names[e.for_slot]
                for place in unpack_ids(e.ids):
                    key, _, since = self.at.pop((e.pool, place))
                    self.gone[key] = self.tier[e.pool], who, e.at_ns - since
            case ev.BlocksDropped():
                for place in unpack_ids(e.ids):
                    self.at.pop((e.pool, place), None)
            case ev.ResetDone():
                self.at.clear()
                self.gone.clear()
            case ev.SlotClosed():
                self.use(self.prompts[e.slot])
            case ev.PrefixScored():
                self.admit(e)
            case _:
                pass

    def admit(self, e: ev.PrefixScored) -> None:
        prompt = self.prompts[e.slot][: e.prompt_blocks]
        if e.readmitted:
            self.use(prompt)
            return
        self.fates.update({Fate(index): blocks for index, blocks in enumerate(e.hits)})
        deepest = 0
        for index, key in enumerate(prompt):
            depth = self.order.index(key) + 1 if key in self.order else 10**9
            deepest = max(deepest, depth)
            self.depths.append(deepest)
            if index < sum(e.hits):
                continue
            states = self.states(key)
            if states:
                self.fates[Fate.UNUSABLE if any(states) else Fate.LATE] += 1
            elif key in self.gone:
                tier, who, stay_ns = self.gone[key]
                self.fates[Fate.NOT_OFFLOADED if tier is Tier.G1 else Fate.EVICTED] += 1
                self.lost.append(Lost(key, tier, who, stay_ns, depth))
            else:
                self.fates[Fate.UNSEEN] += 1
        self.use(prompt)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_fates_blame_and_curve_are_those_of_a_recount(path: Path) -> None:
    mirror, events = folded(path)
    recount = Recount(events)
    fates = mirror.fates
    assert {fate: fates.blocks[fate] for fate in Fate if fates.blocks[fate]} == {
        fate: blocks for fate, blocks in recount.fates.items() if blocks}
    admitted = [e for e in events if isinstance(e, ev.PrefixScored)]
    assert fates.asked == sum(e.prompt_blocks for e in admitted if not e.readmitted)
    now_ns = mirror.facts.at_ns
    assert [int(series.total(600, now_ns)) for series in fates.series.values()] == fates.blocks
    assert fates.curve.share == 1.0, "so few blocks are not sampled"
    for capacity in (1, 3, 10, 30, 100):
        estimate = fates.curve.at(capacity)
        hits = sum(depth <= capacity for depth in recount.depths)
        if recount.depths:
            assert estimate is not None
            assert estimate.hit_rate == pytest.approx(hits / len(recount.depths))
    for fate in (Fate.NOT_OFFLOADED, Fate.EVICTED):
        groups: dict[tuple[str | None, Tier], list[Lost]] = defaultdict(list)
        for lost in recount.lost:
            if (lost.tier is Tier.G1) == (fate is Fate.NOT_OFFLOADED):
                groups[lost.request, lost.tier].append(lost)
        blamed = {(blame.request, blame.tier): blame for blame in fates.blamed(fate, mirror.prefixes)}
        last = {lost.key: lost for lost in recount.lost}
        for group, blame in blamed.items():
            keys = {lost.key for lost in last.values() if (lost.request, lost.tier) == group}
            assert blame.blocks == len(keys)
            stays = sorted(last[key].stay_ns for key in keys)
            assert blame.stay_ns == stays[(len(stays) - 1) // 2]
            assert blame.kept_by == max(last[key].depth for key in keys)
        assert sum(blame.times for blame in blamed.values()) == sum(
            1 for lost in recount.lost if (last[lost.key].tier is Tier.G1) == (fate is Fate.NOT_OFFLOADED))


def test_the_run_of_the_pictures_has_losses() -> None:
    mirror, _ = folded(RECORDINGS / "screens" / "run.mcap")
    assert mirror.fates.blocks[Fate.EVICTED] + mirror.fates.blocks[Fate.NOT_OFFLOADED] > 10
    assert mirror.fates.blocks[Fate.G2] > 100


class Spent:
    """Blocks and times of copies by route, times of prefills."""

    def __init__(self, events: list[ev.Event]) -> None:
        self.route_of: dict[int, Route] = {}
        self.blocks_of: dict[int, int] = {}
        self.started: dict[int, int] = {}
        self.candidate_of: dict[int, int] = {}
        self.failed: dict[int, set[int]] = defaultdict(set)
        self.moved: Counter[Route] = Counter()
        self.timed: Counter[Route] = Counter()
        self.wire: Counter[Route] = Counter()
        self.begun: dict[int, tuple[int, int]] = {}
        self.prefills: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.closed: Counter[str] = Counter()
        for event in events:
            self.take(event)

    def take(self, e: ev.Event) -> None:
        match e:
            case ev.CandidatePlanned():
                self.route_of[e.candidate] = e.route
            case ev.CandidatePromoted():
                self.candidate_of[e.operation] = e.candidate
                self.blocks_of[e.candidate] = e.blocks
            case ev.OperationStarted():
                self.started[self.candidate_of[e.operation]] = e.at_ns
            case ev.OperationReported():
                self.failed[self.candidate_of[e.operation]].update(unpack_ids(e.failed))
            case ev.CandidateEnded():
                self.ended(e)
            case ev.SlotMoved():
                if e.slot in self.begun and e.new is SlotState.DECODING:
                    at_ns, tokens = self.begun[e.slot]
                    if e.computed_tokens > tokens:
                        self.prefills[e.slot].append((e.at_ns - at_ns, e.computed_tokens - tokens))
                self.begun.pop(e.slot, None)
                if e.new is SlotState.PREFILLING:
                    self.begun[e.slot] = e.at_ns, e.computed_tokens
            case ev.SlotClosed():
                of_slot = self.prefills[e.slot]
                self.closed.update(ns=sum(ns for ns, _ in of_slot), tokens=sum(tokens for _, tokens in of_slot))
            case _:
                pass

    def ended(self, e: ev.CandidateEnded) -> None:
        route = self.route_of[e.candidate]
        if e.status is CandidateStatus.COMPLETED:
            self.timed[route] += self.blocks_of[e.candidate]
            self.wire[route] += e.at_ns - self.started[e.candidate]
        if e.status in (CandidateStatus.COMPLETED, CandidateStatus.FAILED):
            self.moved[route] += self.blocks_of[e.candidate] - len(self.failed[e.candidate])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_worth_is_that_of_a_recount(path: Path) -> None:
    mirror, events = folded(path)
    spent = Spent(events)
    [size] = {e.block_tokens for e in events if isinstance(e, ev.PoolKnown)}
    for worth in worth_of(mirror.facts, mirror.prices):
        down = [route for route in spent.moved if route.target is worth.tier > route.source]
        back = [route for route in spent.moved if route.source is worth.tier > route.target]
        assert worth.down_blocks == sum(spent.moved[route] for route in down)
        assert worth.back_blocks == sum(spent.moved[route] for route in back)
        assert worth.found_tokens == size * spent.moved[Route.of(worth.tier, Tier.G1)]
        if spent.closed["tokens"]:
            saved_ns = worth.found_tokens * spent.closed["ns"] / spent.closed["tokens"]
            assert worth.saved_ns == pytest.approx(saved_ns)
        mine = [route for route in (*down, *back) if spent.moved[route]]
        if all(spent.timed[route] for route in mine):
            assert worth.copying_ns == pytest.approx(
                sum(spent.wire[route] * spent.moved[route] / spent.timed[route] for route in mine))
        else:
            assert worth.copying_ns is None
        assert worth.verdict


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("path", [path for path in PATHS if path.stem in ("run", "thrash", "offload-pressure")],
                         ids=lambda path: path.stem)
def test_the_screen_tells_what_a_tier_took_and_gave(path: Path, size: tuple[int, int]) -> None:
    mirror, events = folded(path)
    spent = Spent(events)
    desk = desk_of(items=[], late_ns=0)
    desk.mirror = mirror
    desk.current = OVERVIEW
    rows = everything(desk, *size).splitlines()
    at = next((at for at, row in enumerate(rows) if row.startswith((" DOES IT PAY", " PAYS"))), None)
    if at is None:
        assert not any(event.tier is not Tier.G1 for event in events if isinstance(event, ev.PoolKnown))
        return
    for worth in worth_of(mirror.facts, mirror.prices):
        if rows[at].startswith(" PAYS"):
            assert f"{worth.tier.name} {worth.verdict}" in rows[at]
            continue
        row = next(row for row in rows[at:] if row.startswith(f" {worth.tier.name} "))
        down = sum(n for route, n in spent.moved.items() if route.target is worth.tier > route.source)
        back = sum(n for route, n in spent.moved.items() if route.source is worth.tier > route.target)
        assert f"{worth.verdict}   {brief(down)} down {brief(back)} back" in row
        block = next(e.block_tokens for e in events if isinstance(e, ev.PoolKnown))
        saved = spent.moved[Route.of(worth.tier, Tier.G1)] * block
        if saved and spent.closed["tokens"]:
            assert duration(int(saved * spent.closed["ns"] / spent.closed["tokens"])) in row


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_reasons_of_misses_add_up_to_the_misses(path: Path) -> None:
    """A console that saw the whole run knows every reason, but that a load failed later."""
    desk = desk_of(items=[], late_ns=0)
    desk.mirror, _ = folded(path)
    if desk.mirror.facts.totals.lost_blocks:
        return
    rows = everything(desk, 100, 24).splitlines()
    row = next((row for row in rows if row.startswith(" misses ")), None)
    miss = next((found[1] for row in rows if (found := re.search(r"miss (\d+\.\d)", row))), None)
    if row is not None and miss is not None and "–" not in row:
        assert sum(map(Decimal, re.findall(r"\d+\.\d", row))) == Decimal(miss), row


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_who_saw_the_whole_run_knows_every_price(path: Path) -> None:
    """The time of a copy that failed is no price, so its blocks have none."""
    mirror, _ = folded(path)
    assert any(worth.about for worth in worth_of(mirror.facts, mirror.prices)) == bool(mirror.facts.totals.lost_blocks)


def test_the_curve_says_what_doubling_a_tier_would_bring() -> None:
    mirror, events = folded(RECORDINGS / "screens" / "run.mcap")
    desk = desk_of(items=[], late_ns=0)
    desk.mirror = mirror
    depths = Recount(events).depths
    capacities = {e.tier: e.capacity_blocks or 0 for e in events if isinstance(e, ev.PoolKnown)}
    total = 0
    points = points_of(desk, mirror.facts)
    assert [point.tier for point in points] == sorted(capacities)
    for point in points:
        total += capacities[point.tier]
        for size, estimate in ((total, point.rate), (total + capacities[point.tier], point.doubled)):
            # Depths above 128 blocks are kept in classes of 1/64, and this many may be on either side.
            low, high = (sum(depth <= size * share for depth in depths) / len(depths) for share in (63 / 64, 65 / 64))
            assert low <= estimate.hit_rate <= high
    measured = sum(mirror.fates.blocks[: Fate.UNUSABLE]) / mirror.fates.asked
    assert points[-1].rate.hit_rate == pytest.approx(measured, abs=0.01), "the tiers of this run keep by recency, too"
    desk.current = TIERS
    text = everything(desk, 120, 40)
    assert f"measured {int(1000 * measured) / 10}" in text
    assert "you are here: all tiers" in text


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_evictions_are_told_by_cause_and_by_how_soon_they_were_missed(path: Path) -> None:
    mirror, events = folded(path)
    tier = {e.pool: e.tier for e in events if isinstance(e, ev.PoolKnown)}
    causes: Counter[tuple[Tier, EvictRule]] = Counter()
    again: Counter[Tier] = Counter()
    for e in events:
        if isinstance(e, ev.BlocksEvicted):
            causes[tier[e.pool], e.rule] += len(unpack_hashes(e.hashes))
        elif isinstance(e, ev.PrefixScored):
            for one, blocks in zip(e.again_tiers, e.again_blocks, strict=True):
                again[Tier(one)] += blocks
    assert {(one, rule): n for one, rules in mirror.fates.evicted.items() for rule, n in rules.items()} == dict(causes)
    desk = desk_of(items=[], late_ns=0)
    desk.mirror = mirror
    for one in tier.values():
        row = evictions_row(desk, mirror.facts, one, 200).text
        assert f"evicted {sum(n for (other, _), n in causes.items() if other is one):,}" in row
        assert (f"asked again {again[one]:,}" in row) if again[one] else ("asked again –" in row)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_a_curve_that_begins_in_the_middle_begins_with_what_the_tiers_hold(share: float) -> None:
    """As after an attach or a seek: an empty cache would have missed all that was stored before."""
    _, events = folded(RECORDINGS / "screens" / "run.mcap")
    middle = int(share * len(events))
    state, mirror = CacheState(), Mirror()
    for event in events[:middle]:
        state.apply(event)
    mirror.take(connected(recording=True), 0)
    mirror.take(SnapshotTaken(state), 0)
    mirror.take(EventsArrived(events[middle:]), 0)
    desk = desk_of(items=[], late_ns=0)
    desk.mirror = mirror
    fates = mirror.fates
    measured = sum(fates.blocks[fate] for fate in (Fate.G1, Fate.G2, Fate.G3)) / fates.asked
    whole = points_of(desk, mirror.facts)[-1].rate
    assert abs(whole.hit_rate - measured) <= 0.02 + whole.error


def test_a_low_screen_tells_causes_and_ages_where_it_has_room() -> None:
    desk = desk_of(items=[], late_ns=0)
    desk.mirror, _ = folded(RECORDINGS / "screens" / "run.mcap")
    press(desk, "6")
    rows = screen(desk, 80, 24)
    told = [row for row in rows if row.startswith(" evicted ")]
    assert len(told) == len(desk.mirror.facts.pools)
    assert "asked again" in told[1]
    assert any(row.startswith(" CURVE") for row in rows), "and what it had before"
    assert not any(row.startswith(" evicted ") for row in screen(desk, 80, 20))


def test_a_band_opens_on_its_culprits() -> None:
    mirror, _ = folded(RECORDINGS / "screens" / "run.mcap")
    desk = desk_of(items=[], late_ns=0)
    desk.mirror = mirror
    press(desk, "M")
    text = everything(desk, 120, 40)
    for fate in Fate:
        if mirror.fates.blocks[fate]:
            assert f"{mirror.fates.blocks[fate]:,}" in text
    for _ in Fate:
        press(desk, "enter")
        if "KEPT BY" in everything(desk, 120, 40):
            break
        press(desk, "escape")
        press(desk, "down")
    fate = desk.view.open  # type: ignore[attr-defined]
    blamed = mirror.fates.blamed(fate, mirror.prefixes)
    table = desk.view.rows(desk)
    assert table is not None
    assert len(table[1]) == len(blamed)
    assert f"{blamed[0].blocks}" in everything(desk, 120, 40)


def test_a_tier_that_gave_blocks_back_took_some_before_it_was_watched() -> None:
    one = TierWorth(Tier.G2, down_blocks=0, back_blocks=25, found_tokens=400, saved_ns=374.0, copying_ns=805.0)
    assert one.verdict == "costs more"
    assert msgspec.structs.replace(one, back_blocks=0, found_tokens=0).verdict == "took nothing"
