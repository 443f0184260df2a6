"""What the tap said of vLLM's own scheduler, against the truth that was kept beside it, and what we say of it.

The runs hold loads, failed loads, aborts and preemptions.
"""

from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.diff import diff
from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.explain.model import Missed
from kvbm_console.analysis.export import export
from kvbm_console.analysis.export.rows import Consumer, Rows, TransferSpan
from kvbm_console.analysis.lake import TABLES, FileRows, LakeRows, TableRows
from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.walk import evidence_of, walk
from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.ids import CandidateStatus, FinishReason, SlotState, Tier
from kvbm_console.core.tiers import WRITING
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from tests.analysis.evidence import evidence
from tests.tap.kept import NAMES, kept, run_of, steps, watching


@pytest.mark.parametrize("name", NAMES)
def test_the_leader_comes_to_the_schedulers_own_truth_after_every_step(name: str) -> None:
    watch = watching(name)
    state = watch.leader.state
    loads = passed = 0
    for truth in steps(name, watch):
        slots = {slot.request: slot for slot in state.slots.values() if slot.state is not SlotState.FINISHING}
        assert slots.keys() == truth["requests"].keys()
        coming: set[int] = set()
        for slot in state.slots.values():
            if slot.state in (SlotState.ONBOARDING, SlotState.FINISHING):
                coming |= set(slot.device_blocks)
                loads += slot.state is SlotState.ONBOARDING
        for request, (blocks, computed, runs) in truth["requests"].items():
            slot = slots[request]
            assert [0] * slot.passed_blocks + slot.device_blocks == blocks
            passed += slot.passed_blocks
            if runs:
                assert slot.computed_tokens(state.iteration) == computed
        pool = state.pools[0]
        known = {
            place: key for place, key in enumerate(pool.hash_of)
            if key and place not in coming and pool.content[place] != WRITING
        }
        assert known == {place: key for place, key in truth["hashes"].items() if place not in coming}
        windows = [key for other in state.pools[1:] if other.info.tier is Tier.G1 for key in other.by_hash]
        assert sorted(windows) == truth.get("windows", [])
    assert watch.rejected == []
    assert state.lost_sources == {}
    assert not state.slots
    assert state.totals.hit_blocks[0] > 0
    assert (passed > 0) is (name in ("window", "passed", "below"))
    tiered = name not in ("alone", "hybrid", "kept", "window", "passed", "early", "twins")
    assert (loads > 0) is tiered is (state.totals.hit_blocks[Tier.G2 - 1] > 0)
    assert watch.mirror.totals == state.totals


def test_the_kept_runs_hold_loads_failed_loads_aborts_and_preemptions() -> None:
    """So that the laws here are about all of them."""
    found: Counter[str] = Counter()
    for name in NAMES:
        for event in run_of(name).all_events:
            match event:
                case ev.SlotMoved(new=SlotState.PREEMPTED):
                    found["preempted"] += 1
                case ev.SlotMoved(reason=FinishReason.ABORTED | FinishReason.ERROR as reason):
                    found[reason.label] += 1
                case ev.CandidateEnded(status=CandidateStatus.COMPLETED | CandidateStatus.FAILED as status):
                    found[status.label] += 1
                case ev.HitsLost():
                    found["hits lost"] += 1
    assert found.keys() == {"preempted", "aborted", "error", "completed", "failed", "hits lost"}


@pytest.mark.parametrize(("name", "group"), [("kept", 1), ("mixed", 0)])
def test_a_prefix_that_another_group_of_layers_lacks_is_explained_by_that_group(name: str, group: int) -> None:
    """vLLM kept the windows at the ends of prompts alone, so a prefix in between misses although its blocks are there.

    One block was given out earlier in the step, which is told at its end.
    """
    run = run_of(name)
    told = evidence(run.all_events, run.config)
    found = [
        missed for event in run.all_events if isinstance(event, ev.SlotOpened)
        for admission in explain(told, event.request).admissions for missed in admission.misses
        if missed.reason is Missed.FILTERED and missed.tier == "G1"
    ]
    told_by_group = [missed for missed in found if missed.filter == "layer_groups"]
    assert len(told_by_group) >= max(3, len(found) - 1)
    for missed in told_by_group:
        assert missed.text.startswith(f"it was in G1, but group {group} of the layers, which sees 64 tokens, had ")


def test_a_block_that_an_engine_does_not_keep_is_explained() -> None:
    run = run_of("below")
    told = evidence(run.all_events, run.config)
    reasons = Counter(
        missed.reason for event in run.all_events if isinstance(event, ev.SlotOpened)
        for admission in explain(told, event.request).admissions for missed in admission.misses
    )
    assert reasons[Missed.NOT_KEPT] > 0
    assert reasons[Missed.COPY_FAILED] == 0


@pytest.mark.parametrize("name", NAMES)
def test_why_answers_for_requests_and_agrees_with_the_engines_own_count(name: str) -> None:
    run = run_of(name)
    told, size = evidence(run.all_events, run.config), kept(name)["settings"]["block_tokens"]
    names = [event.request for event in run.all_events if isinstance(event, ev.SlotOpened)]
    cached = kept(name)["cached"]
    assert cached.keys() <= set(names)
    for request in names[:: 1 + len(names) // 100]:  # of a long recording some
        one = explain(told, request)
        assert one.spent.complete
        assert one.spent.ended
        assert sum(part.ns for part in one.spent.parts) == one.spent.total_ns
        for admission in one.admissions:
            assert sum(admission.hits) + admission.missed == one.prompt_blocks
        if request not in cached:
            continue  # it ended before its first token, and then the engine tells no count
        local, external = cached[request]
        first = [admission for admission in one.admissions if not admission.after_preemption][-1]
        failed = sum(run.blocks for run in first.misses if run.reason == "copy_failed")
        assert (first.hits[0], sum(first.hits[1:]) + failed) == (local // size, -(-external // size))


class Copies(Consumer):
    """Blocks of ended copies by route."""

    def __init__(self) -> None:
        self.blocks: Counter[str] = Counter()

    def transfer(self, row: TransferSpan) -> None:
        if row.ended_ns is not None:
            self.blocks[row.route] += row.blocks


@pytest.mark.parametrize("part", [0.0, 0.4])
@pytest.mark.parametrize("name", NAMES)
def test_copies_of_an_export_and_a_lake_have_the_blocks_of_all_groups_of_layers(name: str, part: float) -> None:
    run = run_of(name)
    begin = int(len(run.all_events) * part)
    told, requests, exported = evidence(run.all_events, run.config, begin=begin), Requests(), Copies()
    in_lake: Counter[str] = Counter()

    def write(table: str, chunk: int, day: int, rows: TableRows) -> None:
        if table == "transfers" and isinstance(rows, FileRows):
            routes, blocks = (rows.columns[TABLES[table].index(column)] for column in ("route", "blocks"))
            for route, count in zip(routes, blocks, strict=True):
                in_lake[route] += count

    walk(told, (requests, Rows(exported, requests), LakeRows(0, write, lambda chunk: None)))
    state, truth = run.state_after(begin - 1), Counter[str]()
    for event in run.all_events[begin:]:
        if isinstance(event, ev.CandidateEnded):
            copy = state.candidates[event.candidate]
            truth[copy.route.label] += 0 if copy.operation is None else state.operations[copy.operation].told_blocks
        state.apply(event)
    assert exported.blocks == in_lake == truth
    if name == "mixed" and not begin:
        assert truth == {"G1>G2": 895, "G2>G1": 76}


@pytest.mark.parametrize("name", NAMES)
def test_every_question_is_answered_of_its_recording(name: str, tmp_path: Path) -> None:
    """Verification, diagnosis, comparison and export of the file that a daemon would have written."""
    run_of(name).record(tmp_path / "run", [7])
    (path,) = (tmp_path / "run").glob("*.mcap")
    report = verify(path)
    assert report.ok, report.first_difference
    recorded = evidence_of(Recording.open(path))
    diagnosis = diagnose(recorded)
    assert [one for one in diagnosis.findings if one.lint in ("reports_lost", "violation", "pin_leak", "stuck")] == []
    assert diff(recorded, evidence_of(Recording.open(path))).equal
    assert export(recorded, "chrome", tmp_path / "trace.json")


def test_why_answers_for_a_recording_of_before(shared: Path) -> None:
    """A tap of before wrote it, around a connector whose loads name no places below."""
    recording = Recording.open(shared / "recordings" / "vllm-0.33-loads")
    found: dict[str, tuple[int, int]] = {}
    loads: dict[str, int] = {}
    for batch in recording.stimuli():
        for stimulus in batch:
            match stimulus:
                case st.LookupObserved():
                    found[stimulus.request] = stimulus.computed_tokens, stimulus.tokens or 0
                case st.BlocksAllocated(external_tokens=external) if external:
                    loads[stimulus.request] = external
    assert loads
    told = evidence_of(recording)
    for request, (local, external) in found.items():
        one = explain(told, request)
        hits = one.admissions[-1].hits
        assert (hits[0], sum(hits[1:])) == (local // one.block_tokens, external // one.block_tokens), request


def test_rec_info_says_that_a_tap_told_the_run(tmp_path: Path) -> None:
    run_of("window").record(tmp_path, [64])
    told = CliRunner().invoke(cli, ["rec", "info", str(tmp_path)]).output
    assert "1: 29 blocks of 16 tokens, its tap" in told
