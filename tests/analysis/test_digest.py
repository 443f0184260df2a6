"""The digest of a daemon: its figures against those of the requests, and the laws of adding digests up.

Law of this file: what is added up is what one digest of all events would be, and a bound that is told holds.
"""

import math
import random
import re
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvbm_console.analysis import digest as analysis_digest
from kvbm_console.analysis.digest import GAMMA, MISSING_MAX, Digest, DigestFold, DurationSketch, Missing, total
from kvbm_console.analysis.fleet import (
    DaemonRow,
    DaemonSummary,
    Elsewhere,
    Problem,
    Reuse,
    by_need,
    not_captured,
    report_of,
)
from kvbm_console.analysis.fleet_metrics import exposition
from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.walk import evidence_of, walk
from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
KEYS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 50)), max_size=400)
DURATIONS = st.lists(st.integers(0, 10**13), min_size=1, max_size=60)


def digest_of(path: Path) -> Digest:
    fold = DigestFold()
    walk(evidence_of(Recording.open(path)), [fold])
    return fold.digest


@pytest.mark.parametrize("name", ["local-only", "stuck-slot", "screens/run", "clone"])
def test_the_digest_counts_what_the_requests_met(name: str) -> None:
    path = RECORDINGS / f"{name}.mcap"
    digest, requests = digest_of(path), Requests()
    walk(evidence_of(Recording.open(path)), [requests])
    assert digest.prompt_blocks == sum(each.scored_blocks for each in requests.all) > 0
    assert digest.hits == [sum(each.hits[tier] for each in requests.all) for tier in range(4)]
    assert digest.preemptions == sum(each.preemptions for each in requests.all)
    ended = [each for each in requests.all if each.ended_ns is not None]
    assert digest.finished == len(ended)
    whole = [each.time_ns(0) for each in ended if each.complete]
    assert digest.latency.count == len(whole)
    first = sorted(
        each.first_token_ns - each.arrived_ns for each in requests.all
        if each.first_token_ns is not None and each.arrived_seq
    )
    for share in (0.5, 0.9, 0.99) if len(first) == digest.first_token.count else ():
        exact = first[max(1, math.ceil(share * len(first))) - 1]
        told = digest.first_token.quantile(share)
        assert told is not None
        assert exact <= told <= exact * GAMMA + 1


def test_a_load_that_failed_costs_no_hits_that_were_not_counted() -> None:
    """Also where the daemon no longer remembers the admission."""
    fold, lost = DigestFold(), []

    class Late(Visitor):
        def __init__(self) -> None:
            super().__init__()
            self.before = {ev.HitsLost: self._before}
            self.after = {ev.HitsLost: self._after}

        def _before(self, e: ev.HitsLost, state: CacheState) -> None:
            fold.resumed(state, None)

        def _after(self, e: ev.HitsLost, state: CacheState) -> None:
            fold.after[ev.HitsLost](e, state)
            lost.append(e.blocks)

    walk(evidence_of(Recording.open(RECORDINGS / "failed-load.mcap")), [Late()])
    assert sum(lost) > 0
    assert (fold.digest.told().hits, fold.digest.lost_blocks) == ([0, 0, 0, 0], 0)


def test_missing_prefixes_are_those_of_the_events() -> None:
    """Counted again from the events alone: the block behind the hits of each admission, if a cache could hold it."""
    path = RECORDINGS / "screens" / "run.mcap"
    hashes: dict[int, list[int]] = {}
    why: dict[int, str] = {}
    missed: Counter[int] = Counter()
    for events in Recording.open(path).events():
        for event in events:
            if isinstance(event, ev.SlotOpened):
                hashes[event.slot] = list(unpack_hashes(event.hashes))
            elif isinstance(event, ev.LookupAnswered):
                why[event.slot] = event.why.label
            elif isinstance(event, ev.PrefixScored) and event.slot in hashes:
                at = sum(event.hits)
                if at < min(event.prompt_blocks, len(hashes[event.slot])) and (
                    why.get(event.slot) not in ("none", "boundary", "too_short")
                ):
                    missed[hashes[event.slot][at]] += event.prompt_blocks - at
    digest = digest_of(path)
    assert digest.missed_blocks == missed.total() > 0
    for key, entry in digest.missing.of.items():
        assert entry.blocks - entry.error <= missed[key] <= entry.blocks


@given(DURATIONS, DURATIONS)
def test_sketches_of_durations_add_up_exactly(one: list[int], other: list[int]) -> None:
    parts = []
    for durations in (one, other, one + other):
        sketch = DurationSketch()
        for ns in durations:
            sketch.add(ns)
        parts.append(sketch)
    mine, theirs, both = parts
    mine.add_all(theirs)
    assert mine.buckets == both.buckets
    ordered = sorted(one + other)
    for share in (0.01, 0.5, 0.99, 1.0):
        exact = ordered[max(1, math.ceil(share * len(ordered))) - 1]
        told = both.quantile(share)
        assert told is not None
        assert exact <= told <= exact * GAMMA + 1


@given(st.lists(KEYS, max_size=4))
def test_missing_prefixes_keep_their_bound_when_they_are_added_up(parts: list[list[tuple[int, int]]]) -> None:
    true: Counter[int] = Counter()
    tables = []
    for part in parts:
        missing = Missing()
        with patch.object(analysis_digest, "COUNTED_MAX", MISSING_MAX + 8):  # no list exceeds the real one
            for key, blocks in part:
                missing.add(key, blocks, "evicted")
                true[key] += blocks
        tables.append(missing.largest())
    added = Missing()
    added.add_all(tables)
    assert len(added.of) <= MISSING_MAX
    for key, entry in added.of.items():
        assert entry.blocks - entry.error <= true[key] <= entry.blocks
    heavy = {key for key, blocks in true.items() if blocks > true.total() * (len(parts) + 1) / MISSING_MAX}
    assert heavy <= added.of.keys()


@pytest.mark.parametrize("daemons", [1, 4, 16])
@pytest.mark.parametrize("prefixes", [200, 2_000])
@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
def test_the_largest_missing_prefixes_are_named(exponent: float, prefixes: int, daemons: int) -> None:
    """Of loads with a popularity like that of documents, nineteen of the twenty largest and more on average."""
    found = 0
    for seed in range(3):
        chance, true = random.Random(seed), Counter[int]()
        tables, added = [Missing() for _ in range(daemons)], Missing()
        weights = [(rank + 1) ** -exponent for rank in range(prefixes)]
        for key in chance.choices(range(prefixes), weights, k=20_000):
            blocks = chance.randint(1, 50)
            true[key] += blocks
            chance.choice(tables).add(key, blocks, "evicted")
        added.add_all(table.largest() for table in tables)
        largest = {key for key, _ in true.most_common(20)}
        found += len(largest & {key for key, _ in added.most(20)})
    assert found >= 57


@given(st.lists(KEYS, max_size=4).flatmap(lambda parts: st.tuples(st.just(parts), st.permutations(parts))))
def test_the_order_of_adding_changes_nothing(
    orders: tuple[list[list[tuple[int, int]]], list[list[tuple[int, int]]]]
) -> None:
    def digest(part: list[tuple[int, int]]) -> Digest:
        made = Digest(prompt_blocks=len(part))
        for key, blocks in part:
            made.missing.add(key, blocks, "evicted" if blocks % 2 else "never_stored")
            made.latency.add(blocks)
        return made

    here, there = (total(map(digest, parts)) for parts in orders)
    assert msgspec.to_builtins(here) == msgspec.to_builtins(there)


def test_daemons_stand_in_the_order_of_need() -> None:
    def row(name: str, *levels: str, error: str = "") -> DaemonRow:
        problems = [Problem(level, "lint", "who", "what", "because") for level in levels]
        return DaemonRow(name, DaemonSummary(name, "", "", 0, 0, True, 0, problems=problems), error)

    rows = [row("d"), row("c", "caution"), row("a", "held", "fault"), row("b", error="no daemon listens on b"),
            DaemonRow("never", error="no daemon listens on never")]
    assert [each.target for each in by_need(rows)] == ["a", "b", "never", "c", "d"]
    report = report_of(rows)
    assert report.stands == {"fault": 1, "gone": 2, "held": 0, "caution": 1, "fine": 1}


def test_reuse_is_held_captured_and_delivered() -> None:
    def row(name: str, hits: int, lost: int, misses: dict[int, int]) -> DaemonRow:
        made = Digest(prompt_blocks=100, hits=[hits, 0, 0, 0], lost_blocks=lost)
        for key, blocks in misses.items():
            made.missing.add(key, blocks, "evicted")
        return DaemonRow(name, DaemonSummary(name, "", "", 0, 0, True, 0, digest=made))

    report = report_of([row("a", 60, 5, {1: 20, 2: 10}), row("b", 90, 0, {1: 3}), row("c", 0, 0, {2: 40})])
    assert report.reuse == Reuse(300, 150, 5, 0), "nobody was asked where the prefixes lie"
    entries = dict(report.digest.missing.most(9))
    report.missing = [
        Elsewhere(f"{1:016x}", entries[1], {"a": ["g2"]}),  # of b alone: a missed its own block before it had it
        Elsewhere(f"{2:016x}", entries[2], {"a": ["g1"], "c": ["g1"]}),
    ]
    report.not_captured = not_captured(report.rows, report.missing)
    assert report.reuse == Reuse(300, 150, 5, 3 + 10 + 40)
    assert (report.reuse.held, report.reuse.captured, report.reuse.delivered) == (208, 155, 150)


def test_daemons_of_one_name_have_metrics_of_their_own() -> None:
    """Prometheus refuses a page that has a sample twice."""
    problem = Problem("fault", "stuck", "a", "b", "c")
    report = report_of([
        DaemonRow(target, DaemonSummary(name, "", "", 0, 0, True, 0, problems=[problem]))
        for target, name in (("unix:/a", "prod"), ("unix:/b", "prod"), ("unix:/c", "other"))
    ])
    told = [
        (sample.name, tuple(sample.labels.items()))
        for family in text_string_to_metric_families(exposition(report)) for sample in family.samples
    ]
    assert len(told) == len(set(told))
    assert ("kvbm_fleet_daemon_up", (("daemon", "other"),)) in told
    assert ("kvbm_fleet_daemon_up", (("daemon", "prod"), ("target", "unix:/b"))) in told


def test_the_metrics_of_a_fleet_are_its_figures() -> None:
    times = DurationSketch()
    for ns in (10**9, 2 * 10**9):
        times.add(ns)
    digest = Digest(prompt_blocks=100, hits=[50, 10, 0, 0], lost_blocks=5, finished=2, latency=times)
    problem = Problem("fault", "stuck", "a", "b", "c")
    report = report_of([
        DaemonRow('one"', DaemonSummary('one"', "", "", 0, 0, True, 0, holds=1, problems=[problem] * 2, digest=digest)),
        DaemonRow("two", None, "no daemon listens on two", 12.5),
    ])
    told = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(exposition(report)) for sample in family.samples
    }
    assert told["kvbm_fleet_daemons", "gone"] == told["kvbm_fleet_daemons", "fault"] == 1
    assert told["kvbm_fleet_daemon_up", 'one"'] == 1
    assert told["kvbm_fleet_daemon_up", "two"] == 0
    assert told["kvbm_fleet_daemon_silent_seconds", "two"] == 12.5
    assert told["kvbm_fleet_daemon_problems", 'one"', "fault", "stuck"] == 2
    assert told["kvbm_fleet_daemon_hit_ratio", 'one"'] == 0.6
    assert ("kvbm_fleet_daemon_hit_ratio", "two") not in told
    assert told["kvbm_fleet_captured_blocks",] == 65
    assert told["kvbm_fleet_delivered_blocks",] == 60
    assert 1 <= told["kvbm_fleet_latency_seconds", "0.5"] <= 1.02
    _, _, documented = (RECORDINGS.parent / "docs/fleet.md").read_text().partition("```yaml\n")
    (group,) = yaml.safe_load(documented.partition("```")[0])["groups"]
    named = {name for rule in group["rules"] for name in re.findall(r"kvbm_\w+", rule["expr"])}
    assert named <= {name for name, *_ in told}
    assert len(named) >= 4
