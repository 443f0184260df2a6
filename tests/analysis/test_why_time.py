"""Where the time of a request went: each cause of waiting, brought about by hand, gets the time that it took."""

from typing import Any

from kvbm_console.analysis.explain import Spent, explain
from kvbm_console.core.ids import SlotState
from tests.analysis.evidence import evidence
from tests.core.script import Script

LONG = 1_000_000
"""Nanoseconds that one cause takes here; everything else takes a tick of 1,000 between two stimuli."""


def script(**options: Any) -> Script:
    return Script(twin=False, checks=False, **{"offload_threshold": 0.0, **options})


def spent(s: Script, name: str) -> Spent:
    found = explain(evidence(s.events, s.config), name).spent
    assert sum(part.ns for part in found.parts) == found.total_ns
    return found


def slowest(s: Script, name: str) -> str:
    """What took the one long time."""
    first = spent(s, name).parts[0]
    assert LONG <= first.ns < 2 * LONG
    return first.what


def loaded_again() -> Script:
    """Request c stands in front of the load of four blocks."""
    s = script(g1=6, g2=8)
    s.arrive("a", "wxyz")
    assert s.admit("a")
    s.step(2)
    s.move_all()
    s.finish("a")
    s.arrive("b", "klmno")
    assert s.admit("b")
    s.abort("b")
    s.arrive("c", "wxyz")
    return s


def test_waiting_for_admission_is_queue() -> None:
    s = loaded_again()
    s.now += LONG
    assert s.admit("c")
    s.move_all()
    assert slowest(s, "c") == "queue"


def test_a_copy_that_has_not_started_is_transfer_queue_and_named() -> None:
    s = loaded_again()
    assert s.admit("c")
    s.now += LONG
    s.move_all()
    assert slowest(s, "c") == "transfer queue"
    (wait,) = spent(s, "c").waits
    assert wait.route == "G2>G1"
    assert wait.blocks == 4
    assert wait.queue_ns >= LONG > (wait.wire_ns or 0)


def test_a_copy_that_runs_is_wire() -> None:
    s = loaded_again()
    assert s.admit("c")
    operation = s.operation_of("c")
    s.start(operation)
    s.now += LONG
    s.done(operation)
    assert slowest(s, "c") == "wire"
    (wait,) = spent(s, "c").waits
    assert (wait.operation, wait.status) == (str(operation), "completed")
    assert (wait.wire_ns or 0) >= LONG


def test_a_copy_that_runs_still_counts_up_to_the_end_of_the_evidence() -> None:
    s = loaded_again()
    assert s.admit("c")
    s.start(s.operation_of("c"))
    s.now += LONG
    s.arrive("d", "z")
    found = spent(s, "c")
    assert not found.ended
    assert found.parts[0].what == "wire"
    assert found.waits[0].status == "promoted"


def test_iterations_are_compute_and_those_that_leave_it_out_are_not() -> None:
    s = loaded_again()
    assert s.admit("c")
    s.move_all()
    s.schedule()
    s.now += LONG
    s.complete()
    s.schedule(only=[])
    assert slowest(s, "c") == "compute"
    s.now += 5 * LONG
    s.arrive("d", "z")
    assert spent(s, "c").parts[0].what == "skipped"


def test_a_hold_is_hold() -> None:
    s = loaded_again()
    s.stop_at(to=SlotState.ONBOARDING, request="c")
    assert s.admit("c")
    s.now += LONG
    s.go_on()
    s.move_all()
    assert slowest(s, "c") == "hold"


def test_a_look_up_that_has_to_ask_again_is_lookup() -> None:
    s = script(g1=16, g2=8)
    s.arrive("a", "wxyz")
    assert s.admit("a")
    s.step()
    s.start(s.operation_of("a"))
    s.preempt("a")
    assert s.lookup("a") is None
    s.now += LONG
    s.move_all()
    assert s.admit("a")
    assert slowest(s, "a") == "lookup"
    assert explain(evidence(s.events, s.config), "a").admissions[-1].asked_again == 1


def test_after_the_end_it_waits_for_its_last_copy() -> None:
    s = script(g1=16, g2=8)
    s.arrive("a", "wxyz")
    assert s.admit("a")
    s.step()
    operation = s.operation_of("a")
    s.start(operation)
    assert s.finish("a")
    s.now += LONG
    s.done(operation)
    found = spent(s, "a")
    assert found.ended
    assert found.parts[0].what == "wire"
    assert [wait.operation for wait in found.waits] == [str(operation)]


def test_a_gap_is_unknown() -> None:
    s = loaded_again()
    assert s.admit("c")
    before = s.state.seq
    s.now += LONG
    s.move_all()
    found = explain(evidence(s.events, s.config, gap=(before, s.state.seq - 2)), "c").spent
    assert found.parts[0].what == "unknown"
    assert found.parts[0].ns >= LONG
