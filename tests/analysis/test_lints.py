"""Every lint is brought about once, with its evidence, and is silent just below its threshold and in a healthy run."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvbm_console.analysis.diagnosis import Diagnosis, diagnose, document
from kvbm_console.analysis.lints import LINTS, Finding, Level, Lint, LintFold, all_lints
from kvbm_console.analysis.lints.lint import FEW, Histogram, limit_of
from kvbm_console.analysis.lints.process import audited
from kvbm_console.analysis.lints.tiers import Thrashing
from kvbm_console.analysis.walk import Evidence, evidence_of
from kvbm_console.core import events as ev
from kvbm_console.core.columns import ID_BYTES, pack_hashes, pack_ids
from kvbm_console.core.config import SECOND_NS, LeaderConfig
from kvbm_console.core.ids import (
    Authority,
    CandidateStatus,
    EvictRule,
    Note,
    ReleaseReason,
    Route,
    SkipReason,
    SlotState,
    Tier,
)
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import TransferFinished
from kvbm_console.planning.traces import parse_trace
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import build
from kvbm_console.stream.feed import EventsArrived
from kvbm_console.stream.publishers import queue_note
from tests.analysis.deadlocks import deadlocked
from tests.analysis.evidence import evidence
from tests.analysis.tale import MS, S, Tale
from tests.core.script import Script
from tests.recording.helpers import real_run

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
TROUBLED = {
    "stuck-slot": {"stuck", "silent", "polled"}, "thrash": {"thrash"}, "gap": {"lost"},
    "failed-load": {"failed_copies"},
}


def recorded(name: str) -> Evidence:
    return evidence_of(Recording.open(RECORDINGS / f"{name}.mcap"))


def script(**options: Any) -> Script:
    return Script(twin=False, checks=False, **{"offload_threshold": 0.0, **options})


def told(s: Script) -> Evidence:
    return evidence(s.events, s.config)


# --- how each lint is brought about ----------------------------------------------------------------------------------


def held() -> Evidence:
    s = script()
    s.stop_at(to=SlotState.PREFILLING, request="a")
    s.arrive("a", "wxyz")
    s.admit("a")
    s.step()
    return told(s)


def preempted_three_times(times: int = 3) -> Evidence:
    s = script(g2=0)
    s.arrive("a", "wxyz")
    for _ in range(times):
        assert s.admit("a")
        s.step()
        s.preempt("a")
    return told(s)


def leaking() -> Evidence:
    tale = Tale()
    slot = tale.slot("a", SlotState.PREFILLING)
    tale.tell(ev.DeviceBlocksAssigned, 0, (slot,), (2,), pack_ids([0, 1]), 0, 0)
    tale.move(slot, SlotState.FINISHING)
    tale.wait(3 * S)
    return tale.evidence()


def pending(wait_ns: int = 11 * S) -> Evidence:
    tale = Tale()
    tale.plan(Route.G1_G2)
    tale.wait(wait_ns)
    return tale.evidence()


def queued(wait_ns: int = 11 * S) -> Evidence:
    """Promoted at once, and its link never begins."""
    tale = Tale()
    tale.promote(tale.plan(Route.G1_G2))
    tale.wait(wait_ns)
    return tale.evidence()


def slow(took_ns: int = S, before: int = FEW) -> Evidence:
    tale = Tale()
    for _ in range(before):
        tale.copy(Route.G1_G2, 1, MS)
    tale.copy(Route.G1_G2, 1, took_ns)
    return tale.evidence()


def failed() -> Evidence:
    tale = Tale()
    operation = tale.promote(tale.plan(Route.G1_G2))
    tale.start(operation)
    tale.end(operation, CandidateStatus.FAILED)
    return tale.evidence()


def straggling(late_ns: int = 500 * MS) -> Evidence:
    tale = Tale()
    first, second = tale.plan(Route.G2_G1), tale.plan(Route.G3_G1)
    operations = [tale.promote(first, batch=first), tale.promote(second, batch=first)]
    for operation in operations:
        tale.start(operation)
    tale.at_ns += 10 * MS
    tale.end(operations[0])
    tale.at_ns += late_ns
    tale.end(operations[1])
    return tale.evidence()


def duplicated(blocks: int = 64) -> Evidence:
    tale = Tale()
    for _ in range(2):
        tale.next_hash = 1
        operation = tale.promote(tale.plan(Route.G2_G1, blocks))
        tale.start(operation)
        tale.end(operation)
    return tale.evidence()


def staged_in_vain(times: int = 3) -> Evidence:
    s = script(g1=6, g2=8)
    s.arrive("a", "wxyz")
    assert s.admit("a")
    s.step(2)
    s.move_all()
    s.finish("a")
    s.arrive("b", "klmno")
    assert s.admit("b")
    s.arrive("c", "wxyz")
    for _ in range(times):
        assert s.lookup("c")
        s.pass_deadline(next(iter(s.deadlines)))
    return told(s)


def stored_for_nothing(blocks: int = 1_000, gone: int = 1_000) -> Evidence:
    tale = Tale()
    tale.copy(Route.G1_G2, blocks, MS)
    tale.next_hash = 5_000
    tale.copy(Route.G3_G1, gone, MS)
    tale.tell(
        ev.BlocksEvicted, 0, pack_ids(range(gone)), pack_hashes(range(5_000, 5_000 + gone)), None, EvictRule.RECENCY
    )
    return tale.evidence()


def planned_for_nothing(times: int = 100, reason: SkipReason = SkipReason.ALREADY_CACHED) -> Evidence:
    tale = Tale()
    for _ in range(times):
        candidate = tale.plan(Route.G1_G2)
        tale.tell(ev.CandidateSkipped, candidate, reason)
    return tale.evidence()


def full(lasts_ns: int = 3 * S, *, over: bool = False) -> Evidence:
    tale = Tale()
    slot = tale.slot("a", SlotState.PREFILLING)
    tale.tell(ev.DeviceBlocksAssigned, 0, (slot,), (2_000,), pack_ids(range(2_000)), 0, 0)
    tale.wait(lasts_ns)
    if over:
        tale.tell(ev.DeviceBlocksReleased, slot, pack_ids(range(2_000)), ReleaseReason.FINISHED)
        tale.move(slot, SlotState.FINISHED)
    return tale.evidence()


def noted(note: Note) -> Callable[[], Evidence]:
    def tell() -> Evidence:
        tale = Tale()
        tale.tell(ev.Noted, note, "detail")
        return tale.evidence()

    return tell


def violated() -> Evidence:
    tale = Tale()
    tale.tell(ev.InvariantViolated, "I2", "a place has two holders too many", ())
    return tale.evidence()


def wrong_bytes(times: int = 3) -> Evidence:
    tale = Tale()
    slot = tale.slot("a")
    for number in range(times):
        tale.tell(
            ev.ContentMismatched, slot, 0, "a", 0, 0, pack_hashes([7]), "lost-flush", "copy", 3, 9, number,
            "step 9 of request b", "step 9 of request b did not wait for store 4, whose flush was ordered",
            "store 4 took from place 3 in step 7",
        )
    return tale.evidence()


def damaged_below(times: int = 3) -> Evidence:
    tale = Tale()
    slot = tale.slot("a")
    for number in range(times):
        tale.tell(
            ev.ContentMismatched, slot, 0, "a", 0, 0, pack_hashes([7]), "damaged-block", "tier", -1, 9, number, "fs",
            "xxh3 0000000000000009", "xxh3 0000000000000007",
        )
    return tale.evidence()


def differed(times: int = 3) -> Evidence:
    tale = Tale()
    tale.slot("a")
    for _ in range(times):
        tale.tell(ev.AuditDiffered, 0, pack_ids([3]), pack_hashes([7]), "place 3 holds 7 in the engine, 0 here")
    return tale.evidence()


def late(times: int = 10) -> Evidence:
    s = script()
    for _ in range(times):
        s.tell(TransferFinished, 999, 0, 0)
    return told(s)


def reports_lost(*, cleared: bool = False) -> Evidence:
    """An engine's event stream with a hole, and maybe a clear behind it."""
    tale = Tale()
    pool = len(tale.state.pools)
    tale.tell(ev.PoolKnown, pool, 9, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM)
    tale.tell(ev.BlocksSeen, pool, pack_hashes([1, 2]), b"", False)
    tale.tell(ev.SourceLost, 9, 5, 8, False)
    tale.tell(ev.SourceLost, 9, 10, 10, False)
    if cleared:
        tale.tell(ev.BlocksSeen, pool, b"", b"", True)
    return tale.evidence()


def engine_ended(*, back: bool = False) -> Evidence:
    """An engine whose event stream is followed, killed and maybe started again."""
    tale = Tale()
    pool = len(tale.state.pools)
    tale.tell(ev.PoolKnown, pool, 9, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM)
    tale.tell(ev.BlocksSeen, pool, pack_hashes([1, 2]), b"", False)
    tale.tell(ev.SourceLost, 9, 0, 0, True, True)
    if back:
        tale.tell(ev.SourceLost, 9, 0, 0, True)
    return tale.evidence()


def unfinished() -> Evidence:
    return msgspec.structs.replace(Tale().evidence(), finished=False)


def dropped(blocks: int = 100, saved: int = 0) -> Evidence:
    """A host tier that evicts blocks, most of them never copied to the disk tier, which is empty."""
    tale = Tale()
    tale.copy(Route.G1_G2, blocks + saved, MS)
    hashes = list(range(1, blocks + saved + 1))
    if saved:
        tale.next_hash = blocks + 1
        tale.copy(Route.G2_G3, saved, MS)
        tale.tell(
            ev.BlocksEvicted, 2, pack_ids(range(saved)), pack_hashes(hashes[blocks:]), None, EvictRule.RECENCY
        )
    tale.tell(ev.BlocksEvicted, 1, pack_ids(range(blocks + saved)), pack_hashes(hashes), None, EvictRule.RECENCY)
    return tale.evidence()


def followed(size: int | None) -> Evidence:
    """An engine whose event stream is followed, with what it told of the queue of its publisher."""
    tale = Tale()
    if size is not None:
        tale.tell(ev.Noted, Note.ENGINE_SUMMARY, queue_note(9, size))
    pool = len(tale.state.pools)
    tale.tell(ev.PoolKnown, pool, 9, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM)
    tale.tell(ev.BlocksSeen, pool, pack_hashes([1, 2]), b"", False)
    return tale.evidence()


def stored_again(of_100: int = 26, *, within_ns: int = 50 * S, stored: int = 100) -> Evidence:
    """A followed engine that stores blocks of which this many were evicted lately, and as many long ago."""
    tale = Tale()
    pool = len(tale.state.pools)
    tale.tell(ev.PoolKnown, pool, 9, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM)
    tale.tell(
        ev.BlocksSeen, pool, pack_hashes(range(1, stored + 1)), b"", False, b"", b"", b"", b"", (),
        (within_ns, 1_000 * S), (128, 4_096), (of_100, 50),
    )
    return tale.evidence()


BROUGHT_ABOUT: dict[str, Callable[[], Evidence]] = {
    "stuck": lambda: recorded("stuck-slot"), "polled": lambda: recorded("stuck-slot"),
    "silent": lambda: recorded("stuck-slot"), "pin_leak": leaking, "held": held,
    "preempt_loop": preempted_three_times, "pending": pending, "slow": slow, "failed_copies": failed,
    "straggler": straggling, "duplicate": duplicated, "staged": staged_in_vain, "never_loaded": stored_for_nothing,
    "already_cached": planned_for_nothing,
    "link_busy": lambda: planned_for_nothing(20, SkipReason.LINK_BUSY),
    "full": full, "thrash": lambda: recorded("thrash"),
    "lost": lambda: recorded("gap"), "recorder": noted(Note.RECORDER_DEGRADED), "clock": noted(Note.CLOCK_STEPPED),
    "blocked": noted(Note.LOOP_BLOCKED), "violation": violated, "wrong_bytes": wrong_bytes,
    "damaged_blocks": damaged_below,
    "audit": differed,
    "verdict": noted(Note.VERDICT), "late_reports": late, "reports_lost": reports_lost,
    "unfinished": unfinished, "deadlock": deadlocked, "engine_ended": engine_ended,
    "publisher_queue": lambda: followed(100), "dropped_with_room": dropped, "stored_again": stored_again,
}


def test_an_engine_is_doubtful_until_it_clears() -> None:
    (open_,) = found(reports_lost(), "reports_lost")
    (over,) = found(reports_lost(cleared=True), "reports_lost")
    assert (open_.until_ns, open_.count, len(open_.evidence)) == (None, 2, 1)
    assert over.until_ns is not None


@pytest.mark.parametrize(("size", "level"), [
    (1, Level.CAUTION), (9_999, Level.CAUTION), (10_000, None), (0, None), (None, Level.NOTE),
])
def test_a_publishers_queue_is_a_caution_where_it_is_small_and_a_note_where_nobody_knows_it(
    size: int | None, level: Level | None
) -> None:
    told = found(followed(size), "publisher_queue")
    assert [one.level for one in told] == ([] if level is None else [level])
    assert diagnose(followed(size)).ok == (level is not Level.CAUTION)
    assert "max_queue_size of kv_events_config to its default of 100,000" in LINTS["publisher_queue"].do


def test_an_engine_that_stores_again_what_it_just_evicted_is_told_with_the_share() -> None:
    (told,) = found(stored_again(40), "stored_again")
    assert (told.who, told.what, told.count, told.until_ns) == ("engine 9", "G1 stored again 40 %", 40, None)
    assert told.because.startswith("40 of 100 blocks had just been evicted")
    silent = (stored_again(25), stored_again(99, within_ns=100 * S), stored_again(60, stored=99))
    assert not any(found(one, "stored_again") for one in silent)


def test_an_engine_has_ended_until_it_is_back() -> None:
    (open_,) = found(engine_ended(), "engine_ended")
    (over,) = found(engine_ended(back=True), "engine_ended")
    assert (open_.until_ns, over.until_ns is None) == (None, False)


def test_blocks_whose_copy_was_evicted_below_are_not_dropped() -> None:
    (finding,) = found(dropped(200, 50), "dropped_with_room")
    assert (finding.who, finding.count, finding.what) == ("G2", 200, "200 blocks dropped")
    assert finding.because == "never copied, with room below; 200 of 250 evicted"


@pytest.mark.parametrize(("law", "lints"), [("order", set()), ("total", {"dropped_with_room"})])
def test_the_original_law_drops_blocks_beside_room_and_the_law_of_order_does_not(law: str, lints: set[str]) -> None:
    events: list[ev.Event] = []
    config = LeaderConfig(g2_blocks=200, g3_blocks=2_000, offload_law=law)  # type: ignore[arg-type]
    build(
        config, EngineConfig(g1_blocks=200), parse_trace("multiturn:requests=200,sessions=20,user=120"),
        publish=lambda _, outcome: events.extend(outcome.events),
    ).run_to_end()
    assert {one.lint for one in diagnose(evidence(events, config)).findings} >= lints
    assert bool(found(evidence(events, config), "dropped_with_room")) == bool(lints)


def found(what: Evidence, lint: str) -> list[Finding]:
    return [finding for finding in diagnose(what).findings if finding.lint == lint]


def test_a_promoted_copy_whose_link_does_not_begin_it_waits_as_well() -> None:
    (finding,) = found(queued(), "pending")
    assert (finding.who, finding.what) == ("↓ G1→G2", "1 waiting candidate")
    assert finding.because.startswith("longest 11s")


def test_every_lint_is_brought_about() -> None:
    assert set(BROUGHT_ABOUT) == set(LINTS)


@pytest.mark.parametrize("missing", ["name", "threshold", "bad", "do"])
def test_a_lint_without_a_text_cannot_be_defined(missing: str) -> None:
    texts = {"name": "torn", "threshold": "any", "bad": "it is torn", "do": "mend it"}
    with pytest.raises(TypeError, match=f"lint Torn has no {missing}"):
        type("Torn", (Lint,), {name: text for name, text in texts.items() if name != missing})
    with pytest.raises(TypeError, match="lint Torn has the name of Thrashing: thrash"):
        type("Torn", (Lint,), {**texts, "name": "thrash"})
    assert "torn" not in LINTS


@pytest.mark.parametrize("lint", sorted(LINTS))
def test_a_lint_speaks_with_evidence(lint: str) -> None:
    what = BROUGHT_ABOUT[lint]()
    diagnosis = diagnose(what)
    findings = [finding for finding in diagnosis.findings if finding.lint == lint]
    assert findings, diagnosis
    finding = findings[0]
    assert len(finding.what) + len(finding.because) <= 110
    assert finding.who
    last = max(item.events[-1].seq for item in what.items() if isinstance(item, EventsArrived))
    assert all(0 <= seq <= last for seq in (finding.seq, *finding.evidence))
    assert diagnosis.ok == all(one.level is Level.NOTE for one in diagnosis.findings)


@pytest.mark.parametrize(("lint", "below"), [
    ("preempt_loop", lambda: preempted_three_times(2)), ("pending", lambda: pending(9 * S)),
    ("pending", lambda: queued(9 * S)),
    ("slow", lambda: slow(90 * MS)), ("slow", lambda: slow(9 * S, before=FEW - 1)),
    ("straggler", lambda: straggling(90 * MS)), ("duplicate", lambda: duplicated(63)),
    ("staged", lambda: staged_in_vain(2)), ("never_loaded", lambda: stored_for_nothing(999)),
    ("never_loaded", lambda: stored_for_nothing(gone=999)),
    ("already_cached", lambda: planned_for_nothing(99)),
    ("link_busy", lambda: planned_for_nothing(19, SkipReason.LINK_BUSY)), ("full", lambda: full(1_900 * MS)),
    ("dropped_with_room", lambda: dropped(99)),
    ("late_reports", lambda: late(9)), ("deadlock", lambda: deadlocked(4_900 * MS)),
])
def test_below_its_threshold_a_lint_is_silent(lint: str, below: Callable[[], Evidence]) -> None:
    assert found(below(), lint) == []


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDINGS.glob("*.mcap")))
def test_shipped_recordings_have_the_trouble_that_they_show_and_no_other(name: str) -> None:
    diagnosis = diagnose(recorded(name))
    assert {finding.lint for finding in diagnosis.findings} == TROUBLED.get(name, set())
    assert diagnosis.ok == (name not in TROUBLED)


@pytest.mark.parametrize("sizes", [(48, 96), (64, 0)])
def test_a_healthy_run_has_no_finding(sizes: tuple[int, int]) -> None:
    run = real_run(18, *sizes)
    assert diagnose(evidence(run.all_events, run.config)).findings == ()


# --- what findings say -----------------------------------------------------------------------------------------------


def test_the_stuck_slot_names_operation_and_rank_and_every_event_on_the_way() -> None:
    what = recorded("stuck-slot")
    stuck = next(one for one in diagnose(what).findings if one.lint == "stuck")
    assert stuck.level is Level.FAULT
    assert stuck.request == "agent-0093"
    assert stuck.until_ns is None
    events = {event.seq: event for batch in Recording.open(RECORDINGS / "stuck-slot.mcap").events() for event in batch}
    moved = events[stuck.seq]
    assert isinstance(moved, ev.SlotMoved)
    assert moved.new is SlotState.FINISHING
    started = [events[seq] for seq in stuck.evidence if isinstance(events[seq], ev.OperationStarted)]
    assert stuck.because == f"waits for op {started[0].operation} silent on rank 1"


def test_a_stay_that_ended_is_told_with_its_end() -> None:
    tale = Tale()
    slot = tale.slot("a")
    tale.wait(40 * S)
    tale.move(slot, SlotState.PREFILLING)
    (finding,) = found(tale.evidence(), "stuck")
    assert finding.until_ns == 40 * S
    assert finding.what == "initialized 40s"
    assert "went on to prefilling" in finding.because


def test_a_stay_is_judged_against_what_was_usual_before_it() -> None:
    tale = Tale()
    for at in range(FEW):
        tale.queued(f"quick-{at}", MS)
    tale.queued("long", 3 * S)
    assert [finding.request for finding in found(tale.evidence(), "stuck")] == ["long"]


def test_held_time_never_counts_against_a_slot() -> None:
    s = script(g1=6, g2=8)
    s.stop_at(to=SlotState.ONBOARD_STAGED, request="c")
    s.arrive("a", "wxyz")
    assert s.admit("a")
    s.step(2)
    s.move_all()
    s.finish("a")
    s.arrive("b", "klmno")
    assert s.admit("b")
    s.abort("b")
    s.arrive("c", "wxyz")
    s.lookup("c")
    assert s.slot("c").hold is not None
    s.now += 60 * S
    s.go_on()
    s.now += S
    s.arrive("d", "z")
    assert found(told(s), "stuck") == []
    s.now += 10 * S
    s.arrive("e", "z")
    assert [finding.request for finding in found(told(s), "stuck")] == ["c", "d"]


def test_a_tier_that_was_full_and_is_not_any_more() -> None:
    (finding,) = found(full(3 * S, over=True), "full")
    assert finding.until_ns == 3 * S
    assert finding.what == "full 3s"


def test_a_gap_forgets_what_was_full_before_it() -> None:
    tale = Tale()
    slot = tale.slot("a", SlotState.PREFILLING)
    first = tale.tell(ev.DeviceBlocksAssigned, 0, (slot,), (2_000,), pack_ids(range(2_000)), 0, 0)
    tale.wait(1_900 * MS)
    tale.wait(1_900 * MS)
    assert found(tale.evidence(), "full")
    assert found(tale.evidence(gap=(first + 1, first + 1)), "full") == []


def test_pins_without_a_holder_are_found_by_walking() -> None:
    tale = Tale()
    tale.state.pools[0].refs[7] += 1
    findings = list(audited(tale.state, 0))
    assert {finding.lint for finding in findings} == {"pin_leak"}
    assert any("place 7" in finding.because for finding in findings)


def test_the_document_carries_threshold_explanation_and_what_to_do() -> None:
    told_ = document(diagnose(recorded("thrash")))
    (finding,) = told_["findings"]
    assert isinstance(told_["findings"], list)
    assert finding["level"] == "caution"
    assert finding["threshold"] == LINTS["thrash"].threshold
    assert finding["do"] == LINTS["thrash"].do
    assert msgspec.json.decode(msgspec.json.encode(told_)) == told_
    assert set(told_) == set(Diagnosis.__struct_fields__)


def test_ranking_is_worst_first_then_what_lasts_then_longest() -> None:
    levels = [finding.level for finding in diagnose(recorded("stuck-slot")).findings]
    assert levels == sorted(levels)
    tale = Tale()
    one, other = tale.slot("one"), tale.slot("other")
    tale.wait(11 * S)
    tale.move(one, SlotState.PREFILLING)
    tale.wait(20 * S)
    assert [finding.request for finding in found(tale.evidence(), "stuck")] == ["other", "one"]
    assert other == 1


def test_a_live_target_that_stands_still_grows_older() -> None:
    tale = Tale()
    tale.slot("a")
    assert diagnose(tale.evidence()).ok
    later = msgspec.structs.replace(tale.evidence(), now_ns=11 * S)
    assert [finding.what for finding in diagnose(later).findings] == ["initialized 11s"]


def test_a_watch_on_a_stream_finds_what_a_diagnosis_finds() -> None:
    watch, state = LintFold(all_lints()), CacheState()
    watch.resumed(state)
    events = [event for batch in Recording.open(RECORDINGS / "stuck-slot.mcap").events() for event in batch]
    half = len(events) // 2
    for event in events[:half]:
        watch.apply(state, event)
    assert {finding.lint for finding in watch.findings(state, state.at_ns)} <= {"stuck", "silent", "slow"}
    for event in events[half:]:
        watch.apply(state, event)
    found_ = watch.findings(state, state.at_ns)
    assert {finding.lint for finding in found_} == TROUBLED["stuck-slot"]
    assert sorted(map(repr, found_)) == sorted(map(repr, diagnose(recorded("stuck-slot")).findings))


def test_limits_come_from_what_is_usual() -> None:
    stays = Histogram()
    assert limit_of(None, 2 * S) == 10 * S
    for _ in range(FEW):
        stays.add(S)
    assert 4 * S <= limit_of(stays, 2 * S) <= 4.4 * S
    assert limit_of(stays, 60 * S) == 60 * S


def test_lints_do_not_share_anything() -> None:
    one, other = all_lints(), all_lints()
    assert [type(lint) for lint in one] == [type(lint) for lint in other]
    assert all(mine.past is not yours.past for mine, yours in zip(one, other, strict=True))


def test_a_tier_that_thrashes_is_told_with_the_figure_of_the_screens() -> None:
    """The worst moment of a run's beginning is no figure of now: it is told when the thrashing has ended."""
    state: Any = SimpleNamespace(pools=[
        SimpleNamespace(info=SimpleNamespace(tier=Tier.G2, source=0, authority=Authority.LEADER)),
    ])
    lint = Thrashing()

    def evicted(blocks: int, at_ns: int) -> None:
        event: Any = SimpleNamespace(pool=0, ids=bytes(ID_BYTES * blocks), at_ns=at_ns)
        lint.after[ev.BlocksEvicted](event, state)

    def back(blocks: int, at_ns: int) -> None:
        event: Any = SimpleNamespace(source_pool=0, returned=(0, blocks, 0, 0), at_ns=at_ns, seq=at_ns)
        lint.after[ev.CandidatePromoted](event, state)

    evicted(100, 1)
    back(98, 2)
    evicted(900, 3)
    back(52, 4)
    (live,) = lint.findings(state, 5)
    assert (live.what, live.until_ns, live.seq) == ("thrash 15 %", None, 2)
    assert live.because.startswith("150 of 1,000 blocks evicted in 1 s came back")
    (later,) = lint.findings(state, 31 * SECOND_NS)
    assert later.because.startswith("150 of 1,000 blocks evicted in 31 s came back")
    (ended,) = lint.findings(state, 5 + 60 * SECOND_NS)
    assert (ended.what, ended.until_ns) == ("thrash 98 %", 2)
