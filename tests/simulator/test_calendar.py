"""Virtual time: order, cancelling, deadlines, and the clock while a driver sleeps."""

import pytest

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import InternalError
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.stimuli import DeadlinePassed, Stimulus
from kvbm_console.dispatch import Dispatcher
from kvbm_console.simulator.calendar import Calendar, EngineDeadlines


def test_entries_run_by_time_and_then_by_order_of_entering() -> None:
    calendar = Calendar()
    seen: list[tuple[int, str]] = []

    def note(name: str) -> None:
        seen.append((calendar.now_ns, name))

    calendar.at(20, lambda: note("late"))
    calendar.at(10, lambda: (note("first"), calendar.at(10, lambda: note("meanwhile"))))  # type: ignore[func-returns-value]
    calendar.at(10, lambda: note("second"))
    while calendar.run_next():
        pass
    assert seen == [(10, "first"), (10, "second"), (10, "meanwhile"), (20, "late")]
    assert calendar.next_ns is None


def test_a_cancelled_entry_does_not_run_and_time_does_not_stop_at_it() -> None:
    calendar = Calendar()
    ticket = calendar.at(10, lambda: pytest.fail("cancelled"))
    calendar.at(20, lambda: None)
    calendar.cancel(ticket)
    calendar.cancel(999)
    assert (calendar.next_ns, len(calendar)) == (20, 1)
    assert calendar.run_next()
    calendar.cancel(ticket)
    assert not calendar.run_next()
    assert calendar.now_ns == 20


def test_the_past_is_refused() -> None:
    calendar = Calendar()
    calendar.at(10, lambda: None)
    calendar.run_next()
    with pytest.raises(InternalError, match="an entry at 9 ns lies before now, 10 ns"):
        calendar.at(9, lambda: None)


def test_the_clock_follows_the_wall_only_while_nothing_runs_and_never_past_the_next_entry() -> None:
    calendar = Calendar()
    inside: list[int] = []
    calendar.at(100, lambda: inside.append(calendar.clock()))
    assert calendar.clock() == 0
    wall = [40]
    calendar.pace = lambda: wall[0]
    assert calendar.clock() == 40
    wall[0] = 20
    assert calendar.clock() == 40, "never backwards"
    wall[0] = 500
    assert calendar.clock() == 100, "never past the next entry"
    calendar.run_next()
    assert inside == [100]
    assert calendar.clock() == 100, "with nothing to come, time stands still"


def test_deadlines_pass_once_can_be_moved_and_cleared() -> None:
    calendar = Calendar()
    passed: list[tuple[int, int]] = []

    def keep(stimulus: Stimulus, _: Outcome) -> None:
        if isinstance(stimulus, DeadlinePassed):
            passed.append((stimulus.deadline, stimulus.at_ns))

    dispatcher = Dispatcher(Leader(LeaderConfig()), calendar.clock, publish=keep)
    deadlines = EngineDeadlines(calendar, dispatcher)
    deadlines.set(1, 50)
    deadlines.set(2, 30)
    deadlines.set(3, 10)
    deadlines.set(1, 70)
    deadlines.clear(2)
    deadlines.clear(99)
    while calendar.run_next():
        pass
    assert passed == [(3, 10), (1, 70)]
    assert len(deadlines) == 0


def test_what_has_passed_is_not_kept_though_nobody_asks_what_is_felt() -> None:
    calendar = Calendar()
    for at in range(10_000):
        calendar.at(at + 1, lambda: None)
        assert calendar.run_next()
        assert calendar.remembered == len(calendar) == 0


def test_an_entry_that_was_cancelled_is_let_go_of_when_its_time_has_come() -> None:
    calendar = Calendar()
    calendar.cancel(calendar.at(10, lambda: None))
    calendar.at(20, lambda: None)
    assert calendar.run_next()
    assert calendar.remembered == 0
