"""``why`` and ``doctor`` on a merged recording: they say of each daemon what they say of its own recording.

Law of this file: daemons that stand side by side have the same hashes and numbers, and share nothing.
"""

import re
from collections.abc import Callable, Iterator, Set
from itertools import islice
from pathlib import Path

import pytest

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.waits import below, serves
from kvbm_console.analysis.walk import Evidence, evidence_of
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import SlotOpened
from kvbm_console.core.ids import Authority, Route, SkipReason
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording.merge import MergedSource, SharedNumbers, merge, side_by_side, sources_of
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.writer import Recorder
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from kvbm_console.wire.batches import pack_events
from tests.analysis.tale import MS, Tale
from tests.analysis.test_lints import (
    FEW,
    duplicated,
    failed,
    pending,
    planned_for_nothing,
    slow,
    staged_in_vain,
    straggling,
)
from tests.recording.test_rec_merge_file import ANCHOR_NS, machine, recorded
from tests.server import hostile

NAMES = ("a", "b", "c")
SECOND_NS = 1_000_000_000


@pytest.fixture(scope="module")
def evidences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evidence]:
    """Three daemons with the same prompts and tiers of other sizes, and their merge under the name "". The second
    begins first."""
    place = tmp_path_factory.mktemp("merged")
    for at, name in enumerate(NAMES):
        rig, tape = machine(7, g2_blocks=(16, 56, 24)[at], g3_blocks=(0, 0, 40)[at], thrash_window_ns=1_000 * SECOND_NS)
        rig.run_to_end()
        recorded(place / name, tape, ANCHOR_NS + (2, 0, 3)[at] * SECOND_NS)
    merge(sources_of([place / name for name in NAMES]), place / "all.mcap")
    found = {name: evidence_of(Recording.open(place / name)) for name in NAMES}
    return {**found, "": evidence_of(Recording.open(place / "all.mcap"))}


def requests_of(evidence: Evidence) -> Iterator[str]:
    for item in evidence.items():
        yield from (event.request for event in getattr(item, "events", ()) if isinstance(event, SlotOpened))


def told(text: str, name: str) -> str:
    """A sentence without numbers that a merge gives anew, and without the daemon's name."""
    return re.sub(r"\b(event|operation|op|candidate) [\d,]+", r"\1 N", text.replace(f"{name}/", ""))


@pytest.mark.parametrize("name", NAMES)
def test_why_says_the_same_of_each_request(evidences: dict[str, Evidence], name: str) -> None:
    own, merged = evidences[name], evidences[""]
    for request in requests_of(own):
        mine, theirs = explain(own, request), explain(merged, f"{name}/{request}")
        assert [
            (run.first, run.reason, run.tier, run.filter, told(run.text, name))
            for admission in theirs.admissions for run in admission.misses
        ] == [
            (run.first, run.reason, run.tier, run.filter, told(run.text, name))
            for admission in mine.admissions for run in admission.misses
        ], request


def test_doctor_says_the_same_of_each_tier(evidences: dict[str, Evidence], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm_console.analysis.lints.tiers.DROPPED_BLOCKS", 1)
    monkeypatch.setattr("kvbm_console.analysis.lints.tiers.THRASH_BLOCKS", 1)
    monkeypatch.setattr("kvbm_console.analysis.lints.tiers.THRASH_PERCENT", 0)
    monkeypatch.setattr("kvbm_console.analysis.lints.worth.NEVER_LOADED_BLOCKS", 1)
    monkeypatch.setattr("kvbm_console.analysis.lints.worth.NEVER_LOADED_PERCENT", 100)
    lints = {"thrash", "dropped_with_room", "never_loaded"}

    def findings(name: str) -> list[tuple[str, str, str, str]]:
        # A merge ends later than its parts, so what is counted lasts longer there.
        return [(one.lint, one.who, one.what, re.sub(r" in \d+ s\b", "", one.because))
                for one in diagnose(evidences[name]).findings if one.lint in lints]

    parts = [one for name in NAMES for one in findings(name)]
    assert {lint for lint, *_ in parts} == lints
    assert sorted(findings("")) == sorted(parts)


def kept(what: Evidence, directory: Path, anchor_ns: int) -> None:
    """The evidence as a recording."""
    began: list[CacheState] = [item.state for item in what.items() if isinstance(item, SnapshotTaken)]
    recorder = Recorder(
        directory, config=LeaderConfig(), incarnation=directory.name, clock_anchor_ns=anchor_ns, sync_interval_s=None,
        keyframe=lambda: (began[0].seq, encode_facts(began[0]), b""),
    )
    for item in what.items():
        if isinstance(item, EventsArrived):
            recorder.offer(None, pack_events(item.events))
    recorder.close()


def merged_of(place: Path, *evidences: Evidence) -> tuple[list[Evidence], Evidence]:
    """The recordings of daemons that begin one after the other, and their merge."""
    for at, what in enumerate(evidences):
        kept(what, place / NAMES[at], ANCHOR_NS + at)
    names = [place / NAMES[at] for at in range(len(evidences))]
    merge(sources_of(names), place / "all.mcap")
    return [evidence_of(Recording.open(each)) for each in names], evidence_of(Recording.open(place / "all.mcap"))


def said(what: Evidence, lints: Set[str]) -> list[tuple[str, str, str, int]]:
    """The findings of these lints, without the numbers that a merge gives anew."""
    return sorted(
        (one.lint, re.sub(r"\b(batch|op) \d+", r"\1 N", one.who), f"{one.what}; {told(one.because, '')}", one.count)
        for one in diagnose(what).findings if one.lint in lints
    )


def waited() -> Evidence:
    """A copy that began after 9 s, a second before it would have been too late."""
    tale = Tale()
    operation = tale.promote(tale.plan(Route.G1_G2))
    tale.wait(9 * SECOND_NS)
    tale.start(operation)
    tale.end(operation)
    return tale.evidence()


OF_COPIES: dict[str, tuple[Callable[[], Evidence], Callable[[], Evidence]]] = {
    "pending": (pending, waited),
    "slow": (lambda: slow(SECOND_NS), lambda: slow(SECOND_NS, before=FEW - 1)),
    "failed_copies": (failed, straggling),
    "straggler": (straggling, lambda: straggling(100 * MS)),
    "duplicate": (duplicated, lambda: duplicated(63)),
    "staged": (staged_in_vain, lambda: staged_in_vain(2)),
    "already_cached": (planned_for_nothing, lambda: planned_for_nothing(99)),
    "link_busy": (
        lambda: planned_for_nothing(20, SkipReason.LINK_BUSY), lambda: planned_for_nothing(19, SkipReason.LINK_BUSY)),
}
"""Lint to evidence in which it speaks, and evidence that is just below its threshold."""


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("lint", OF_COPIES)
def test_doctor_judges_the_copies_of_each_daemon_by_themselves(lint: str, silent: bool, tmp_path: Path) -> None:
    """Also if the sum over the daemons would be above a threshold that none of them is above."""
    speaks, below_it = OF_COPIES[lint]
    first, second = (below_it() if silent else speaks()), below_it()
    parts, whole = merged_of(tmp_path, first, second)
    expected = [each for part in parts for each in said(part, {lint})]
    assert bool(expected) is not silent
    assert said(whole, {lint}) == expected
    if not silent:
        place = tmp_path / "both"
        place.mkdir()
        parts, whole = merged_of(place, speaks(), speaks())
        assert said(whole, {lint}) == sorted(each for part in parts for each in said(part, {lint}))


def test_doctor_judges_the_stays_of_each_daemon_by_themselves(tmp_path: Path) -> None:
    """A stay that is far too long for one daemon is usual for another."""
    slow, fast = Tale(), Tale()
    for tale, ns in ((slow, 9 * SECOND_NS), (fast, 200 * MS)):
        for number in range(FEW):
            tale.queued(f"r{number}", ns)
        tale.queued("late", 30 * SECOND_NS)
    parts, whole = merged_of(tmp_path, slow.evidence(), fast.evidence())
    assert said(parts[0], {"stuck"}) == []
    assert said(whole, {"stuck"}) == [
        (lint, f"b/{who}", what, count) for lint, who, what, count in said(parts[1], {"stuck"})
    ] != []


def test_doctor_judges_a_share_of_each_daemon_by_itself(tmp_path: Path) -> None:
    """One daemon skips half of its copies as busy; beside the copies of the other that would be a few percent."""
    others = Tale()
    for _ in range(300):
        others.copy(Route.G1_G2, 1, MS)
    parts, whole = merged_of(tmp_path, planned_for_nothing(20, SkipReason.LINK_BUSY), others.evidence())
    assert said(whole, {"link_busy"}) == said(parts[0], {"link_busy"}) != []


@pytest.mark.parametrize("seed", range(8))
def test_engines_that_share_a_leader_share_its_tiers_in_a_merge_too(seed: int) -> None:
    worlds = (hostile.run(100 * seed + at, 60) for at in range(100))
    states = [world.mirror for world in islice((each for each in worlds if each.config.g2_blocks), 3)]
    shared = SharedNumbers()
    parts = [MergedSource(at, 3, NAMES[at], 0, shared) for at in range(3)]
    for part, state in zip(parts, states, strict=True):
        part.begin(state)
    whole = side_by_side(parts, shared)
    for part, state in zip(parts, states, strict=True):
        for source in {pool.info.source for pool in state.pools} - {0}:
            own = {part.pools[pool.info.pool] for pool in state.pools if serves(state, pool, source)}
            assert {pool.info.pool for pool in whole.pools if serves(whole, pool, part.source(source))} == own
        for pool in state.pools:
            lower, merged = below(state, pool), below(whole, whole.pools[part.pools[pool.info.pool]])
            assert (lower and part.pools[lower.info.pool]) == (merged and merged.info.pool)


def test_no_engine_finds_blocks_in_the_device_of_another() -> None:
    state = hostile.run(1, 60).mirror
    devices = [pool for pool in state.pools if pool.info.authority in (Authority.ENGINE, Authority.OBSERVED)]
    assert len({pool.info.source for pool in devices}) > 1
    for pool in devices:
        for other in devices:
            assert serves(state, pool, other.info.source) == (pool.info.source == other.info.source)
