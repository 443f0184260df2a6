"""``why`` and ``doctor`` on a merged recording: they say of each daemon what they say of its own recording.

Law of this file: daemons that stand side by side have the same hashes and numbers, and share nothing.
"""

import re
from collections.abc import Iterator
from itertools import islice

import pytest

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.waits import below, serves
from kvbm_console.analysis.walk import Evidence, evidence_of
from kvbm_console.core.events import SlotOpened
from kvbm_console.core.ids import Authority
from kvbm_console.recording.merge import MergedSource, SharedNumbers, merge, side_by_side, sources_of
from kvbm_console.recording.reader import Recording
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
