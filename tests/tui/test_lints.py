"""Warnings: they show after two seconds of truth, leave five seconds after, fold, and never count held time."""

from pathlib import Path

from kvbm_console.analysis.lints import LINTS, Level
from kvbm_console.analysis.lints.lint import UNKNOWN_LIMIT_NS
from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.ids import Route, SlotState
from kvbm_console.parts import Parts
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken
from tests.tui.script import MS, S, Script, opening, story
from tui.model.lints import DRAWN, LEAVE_AFTER_NS, SHOW_AFTER_NS, Lints, Warning, ended_text
from tui.model.mirror import Mirror

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


def folded(script: Script) -> Mirror:
    mirror = Mirror()
    for item in opening(script):
        mirror.take(item, 0)
    return mirror


def checked(mirror: Mirror, *monos: int) -> list[Warning]:
    lints = Lints()
    for mono in monos:
        lints.check(mirror, mono)
    return lints.warnings(monos[-1])


def test_a_hold_shows_at_once_and_tells_when_it_resumes() -> None:
    (warning,) = checked(folded(story()), 5 * S)
    assert (warning.level, warning.who, warning.what) == (Level.HELD, "agent-0003.2", "held 5.00s")
    assert warning.because == "at breakpoint 1; resumes by itself in 25 s"


def test_nothing_wrong_is_no_warning() -> None:
    script = Script()
    script.pools()
    script.run("a", 4)
    assert checked(folded(script), 0, 3 * S) == []


def test_a_stuck_slot_shows_only_after_two_seconds_of_truth() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 4)
    script.plan(slot, 2)
    script.move(slot, SlotState.FINISHING)
    script.wait(UNKNOWN_LIMIT_NS + S)
    mirror = folded(script)
    assert checked(mirror, 0, SHOW_AFTER_NS - 1) == []
    (warning, pending) = checked(mirror, 0, SHOW_AFTER_NS)
    assert warning.level is Level.FAULT, "nobody takes a finishing request back"
    assert warning.what == "finishing 12s"
    assert (pending.kind, pending.what) == ("pending", "1 waiting candidate")


def test_held_time_does_not_count_against_a_slot() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 4)
    script.plan(slot, 2)
    script.move(slot, SlotState.FINISHING)
    hold = script.hold(slot, 120 * S)
    script.wait(100 * S)
    script.release(hold, 100 * S)
    script.wait(S)
    assert checked(folded(script), 0, SHOW_AFTER_NS) == []


def test_a_warning_that_ended_stays_grey_for_five_seconds() -> None:
    mirror = folded(story())
    assert mirror.state is not None
    lints = Lints()
    mirror.take(GapSeen(mirror.state.seq, mirror.state.seq, "reader too slow"), 0)
    lints.check(mirror, 0)
    lost = [w for w in lints.warnings(0) if w.kind == "lost"]
    assert lost[0].because == "reader too slow; waiting for a snapshot"
    mirror.gaps.clear()
    lints.check(mirror, 3 * S)
    (ended,) = [w for w in lints.warnings(3 * S) if w.kind == "lost"]
    assert ended_text(ended) == "ended 3.00 s ago"
    lints.check(mirror, LEAVE_AFTER_NS + 1)
    assert [w for w in lints.warnings(LEAVE_AFTER_NS + 1) if w.kind == "lost"] == []


def test_what_was_true_at_the_last_look_is_not_over_before_the_next() -> None:
    mirror, lints = folded(story()), Lints()
    lints.check(mirror, 5 * S)
    (held,) = lints.unfolded(5 * S + 200 * MS)
    assert (held.kind, held.ended_ns) == ("held", None)
    mirror.take(GapSeen(1, 1, "reader too slow"), 6 * S)
    lints.check(mirror, 6 * S)
    assert [w.ended_ns for w in lints.unfolded(6 * S + 200 * MS) if w.kind == "lost"] == [None]


def test_requests_with_the_same_trouble_are_one_problem() -> None:
    script = Script()
    script.pools()
    for index in range(5):
        script.open(f"r{index}", 2)
        script.wait(10 * MS)
    script.wait(UNKNOWN_LIMIT_NS + S)
    (warning,) = checked(folded(script), 0, SHOW_AFTER_NS)
    assert warning.who == "5 requests"
    assert warning.because.startswith("worst r0: waits for ")
    assert warning.level is Level.CAUTION
    script.wait(200 * S)
    (warning,) = checked(folded(script), 0, SHOW_AFTER_NS)
    assert warning.level is Level.FAULT, "a stay that is many times over its limit"


def test_a_full_tier_and_a_degraded_recorder() -> None:
    script = Script()
    script.pools()
    script.admit(script.open("big", 64, 0))
    script.wait(2 * S)
    mirror = folded(script)
    ended = (
        "recorder sync ended: RuntimeError: no", "leases ended and was restarted: KeyError: 7",
        "fleet: another daemon publishes as a: b", "lake runs as it should again: no room ended it",
    )
    mirror.take(script.heartbeat(recorder="degraded", not_recorded=12_204, warnings=ended), 0)
    warnings = {warning.kind: warning for warning in checked(mirror, 0, SHOW_AFTER_NS)}
    assert warnings["full"].because == "64 referenced, nothing to evict; lower the batch"
    assert warnings["recorder"].because == "12,204 events not recorded; look at the disk"
    assert warnings["recorder"].level is Level.FAULT
    told = {
        (each.kind, each.who, each.what, each.because) for each in checked(mirror, 0, SHOW_AFTER_NS)
        if each.kind in ("part", "trouble")
    }
    assert told == {
        ("part", "recorder sync", "ended", "RuntimeError: no"), ("part", "leases", "restarted", "KeyError: 7"),
        ("trouble", "fleet", "in trouble", "another daemon publishes as a: b"),
        ("trouble", "lake", "runs again", "no room ended it"),
    }


def test_parts_are_told_in_the_words_of_the_daemon() -> None:
    parts = Parts(lambda *_: None, lambda: 0)
    for name in ("sealer", "leases"):
        parts.ended(name, "KeyError: 7")
    for name in ("fleet", "lake"):
        parts.troubled(name, "no room")
    for name in ("leases", "lake"):
        parts.begun(name)
    mirror = folded(Script())
    mirror.take(Script().heartbeat(warnings=tuple(parts.warnings())), 0)
    assert [(each.kind, each.who, each.what, each.because) for each in sorted(
        checked(mirror, 0, SHOW_AFTER_NS), key=lambda each: each.key
    )] == [
        ("part", "sealer", "ended", "KeyError: 7"), ("part", "leases", "restarted", "KeyError: 7"),
        ("trouble", "fleet", "in trouble", "no room"), ("trouble", "lake", "runs again", "no room"),
    ]


def test_slow_transfers_are_those_older_than_four_times_p99() -> None:
    script = Script()
    script.pools()
    slot = script.run("a", 44)
    for index in range(20):
        wanted = pack_hashes(script.state.slots[slot].hashes[index : index + 1])
        script.emit(ev.CandidatePlanned, script.state.next_candidate, slot, Route.G1_G2, wanted, b"", index)
        candidate = script.state.next_candidate - 1
        script.emit(ev.CandidateEnqueued, candidate)
        operation = script.promote(candidate)
        script.start(operation)
        script.wait(MS)
        script.complete(operation)
    candidate = script.plan(slot, 2)
    script.start(script.promote(candidate))
    script.wait(150 * MS)
    mirror = folded(script)
    mirror.take(EventsArrived([]), 0)
    (warning,) = checked(mirror, 0, SHOW_AFTER_NS)
    assert (warning.who, warning.what, warning.kind) == ("↓ G1→G2", "1 slow copy", "slow")
    assert warning.because.endswith("limit 100ms")
    assert warning.action == ("enter", "show them")


def test_what_the_library_finds_in_the_stream_is_drawn() -> None:
    """A recording of a request whose end is asked for again and again: the library's lint, on the console's feed."""
    recording = Recording.open(RECORDINGS / "stuck-slot.mcap")
    mirror = Mirror()
    mirror.take(SnapshotTaken(recording.state_at(recording.first_seq - 1)), 0)
    for events in recording.events():
        mirror.take(EventsArrived(events), 0)
    found = {warning.kind: warning for warning in checked(mirror, 0, SHOW_AFTER_NS)}
    assert found["polled"].what == "refused 124 times"
    assert found["polled"].request == "agent-0093"
    assert found["polled"].seq is not None
    assert "stuck finishing" in found
    assert "silent" not in found, "the stuck slot says it already"
    assert set(LINTS) - set(DRAWN) == {"held", "lost", "recorder", "clock", "unfinished"}


def test_equal_findings_of_the_library_fold() -> None:
    script = Script()
    script.pools()
    for name in ("a", "b", "c"):
        slot = script.run(name, 4)
        for _ in range(3):
            script.move(slot, SlotState.PREEMPTED)
            script.move(slot, SlotState.PREFILLING)
    warnings = [one for one in checked(folded(script), 0, SHOW_AFTER_NS) if one.kind == "preempt_loop"]
    assert [(one.who, one.what) for one in warnings] == [("3 requests", "preempted 3 times")]
