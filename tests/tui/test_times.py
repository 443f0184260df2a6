"""Times of day: told while the target's clock is one, and never a guess."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.stream.feed import EventsArrived, Heartbeat, SnapshotTaken
from tests.tui.script import S, Script, connected
from tui.desk import Desk
from tui.model.clock import APART_NS, BEATS_LATE, DRIFT_NS, Times
from tui.model.mirror import Mirror
from tui.views import all_views

from .desks import FakeActions

ANCHOR = 1_795_000_000 * S + 345_678_901
"""A wall's time that is no whole second."""


@given(at_ns=st.integers(0, 10**17), utc=st.booleans())
def test_a_time_of_day_is_that_of_the_standard_library(at_ns: int, utc: bool) -> None:
    times = Times(utc=utc)
    times.look(ANCHOR, True, None, 0, 0)
    wall = ANCHOR + at_ns
    local = datetime.fromtimestamp(wall // S).astimezone()
    expected = local.astimezone(tz=UTC) if utc else local
    text = times.text(at_ns, millis=True)
    assert text == f"{expected:%H:%M:%S}.{wall // 1_000_000 % 1000:03}" + ("Z" if utc else "")
    whole = times.whole(at_ns).split(", engine ")[0].removesuffix(" UTC")
    parsed = datetime.strptime(whole + ("+0000" if utc else ""), "%Y-%m-%d %H:%M:%S.%f" + ("%z" if utc else " %z"))
    assert int(parsed.timestamp()) == wall // S
    assert parsed.microsecond == wall // 1000 % 1_000_000


def test_before_the_first_heartbeat_a_live_target_tells_no_time_of_day() -> None:
    times = Times(utc=True)
    times.look(ANCHOR, False, None, 0, ANCHOR)
    assert times.head(S) == "engine +00:00:01"


def test_without_an_anchor_it_is_the_engines_own_time_and_says_so() -> None:
    times = Times()
    times.look(None, False, None, 0, 5 * S)
    assert times.head(3_723 * S) == "engine +01:02:03"
    assert times.text(3_723 * S, millis=True) == "+01:02:03.000"
    assert times.whole(3 * S + 4_000) == "engine 3.000004 s"


@pytest.mark.parametrize(("factor", "told"), [(1, True), (4, False), (0, False)])
def test_a_clock_that_does_not_run_with_the_wall_tells_no_time_of_day(factor: int, told: bool) -> None:
    times = Times(utc=True)
    for half in range(20):
        times.look(ANCHOR, False, object(), factor * half * S // 2, ANCHOR + half * S // 2)
    assert times.wall is told
    assert times.text(0).endswith("Z") is told


@given(st.integers(-3 * APART_NS, 3 * APART_NS), st.integers(-2 * DRIFT_NS, 2 * DRIFT_NS))
def test_walls_may_differ_a_little_and_drift_hardly(apart: int, drift: int) -> None:
    times = Times(utc=True)
    times.look(ANCHOR, False, object(), 0, ANCHOR - apart)
    assert times.wall is (abs(apart) <= APART_NS)
    for _ in range(BEATS_LATE):  # a single late heartbeat is no drift
        times.look(ANCHOR, False, object(), S, ANCHOR - apart + S - drift)
    assert times.wall is (abs(apart + drift) <= APART_NS and abs(drift) <= DRIFT_NS)


def test_late_heartbeats_do_not_change_the_clock_and_a_change_is_final() -> None:
    times = Times(utc=True)
    for second in range(60):  # three of four come ten seconds late
        times.look(ANCHOR, False, object(), second * S, ANCHOR + second * S + (10 * S if second % 4 else 0))
        assert times.wall
    for second in range(60, 90):  # the engine runs at half the speed, then at the full speed
        times.look(ANCHOR, False, object(), 60 * S + (second - 60) * S // 2, ANCHOR + second * S)
    assert not times.wall
    for second in range(90, 120):
        times.look(ANCHOR, False, object(), second * S, ANCHOR + second * S)
        assert not times.wall


def test_one_heartbeat_is_compared_once_however_long_it_stays_the_last() -> None:
    """A daemon that is gone does not drift."""
    times, beat = Times(utc=True), object()
    times.look(ANCHOR, False, beat, 0, ANCHOR)
    times.look(ANCHOR, False, beat, 0, ANCHOR + 1_000 * S)
    assert times.wall


def desk_at(anchor_ns: int | None, wall_ns: int, size: tuple[int, int], *, recording: bool = False) -> list[str]:
    """The rows of a log whose last event is at 40 s."""
    script, mirror = Script(), Mirror()
    script.pools()
    script.wait(40 * S)
    script.open("chat-1")
    mirror.take(connected(clock_anchor_ns=anchor_ns, recording=recording), S)
    mirror.take(SnapshotTaken(decode_facts(encode_facts(type(script.state)()))), S)
    mirror.take(EventsArrived(script.events), S)
    mirror.take(Heartbeat(2, 40 * S, None, None, None, None, 0, 1), S)
    desk = Desk(mirror, FakeActions(), lambda: S, all_views(),  # type: ignore[arg-type]
                wall=lambda: wall_ns, utc=True)
    desk.current = 8
    return [line.text.rstrip() for line in desk.draw(*size)]


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_the_log_and_the_head_tell_the_same_wall(size: tuple[int, int]) -> None:
    at = datetime.fromtimestamp((ANCHOR + 40 * S) // S, tz=UTC)
    rows = desk_at(ANCHOR, ANCHOR + 40 * S, size)
    assert f"{at:%H:%M:%S}.345Z" in next(row for row in rows if "slot opened" in row)
    if size[0] >= 120:
        assert f"{at:%H:%M:%S}Z" in rows[0]
    rows = desk_at(ANCHOR, ANCHOR + 4_000 * S, size)
    assert "+00:00:40.000 " in next(row for row in rows if "slot opened" in row)
    if size[0] >= 120:
        assert "engine +00:00:40" in rows[0]
