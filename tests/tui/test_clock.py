"""Ages: from the target's clock, advanced locally only while there is news; lag from heartbeats not applied yet."""

from tui.model.clock import AHEAD_MAX_NS, FeedProgress, TargetClock

S = 1_000_000_000


def test_between_heartbeats_local_time_advances_it() -> None:
    clock = TargetClock()
    clock.live = True
    clock.beat(10 * S, 100 * S)
    assert clock.now(100 * S + S // 4) == 10 * S + S // 4


def test_it_stops_without_news() -> None:
    clock = TargetClock()
    clock.live = True
    clock.beat(10 * S, 100 * S)
    assert clock.now(900 * S) == 10 * S + AHEAD_MAX_NS


def test_it_does_not_run_ahead_of_a_simulated_engine() -> None:
    clock = TargetClock()
    clock.live = True
    clock.beat(0, 0)
    clock.beat(5 * S, S // 2)
    assert clock.now(S // 2 + S // 10) == 5 * S + S // 10
    clock.event(7 * S, S)
    assert clock.now(S) == 7 * S


def test_it_is_as_slow_as_the_target() -> None:
    clock = TargetClock()
    clock.live = True
    clock.beat(0, 0)
    clock.beat(S // 4, S // 2)
    assert clock.now(S) == S // 2


def test_a_target_that_stands_still_does_not_age() -> None:
    clock = TargetClock()
    clock.live = True
    clock.beat(7 * S, 0)
    clock.beat(7 * S, S // 2)
    shown = clock.now(S // 2)
    assert clock.now(S) == shown


def test_it_never_goes_back() -> None:
    clock = TargetClock()
    clock.live = True
    clock.beat(10 * S, 0)
    shown = clock.now(S)
    clock.beat(10 * S + S // 10, S)
    assert clock.now(S) >= shown


def test_on_a_recording_local_time_means_nothing() -> None:
    clock = TargetClock()
    clock.event(3 * S)
    assert clock.now(10**18) == 3 * S


def test_lag_is_the_age_of_the_oldest_head_that_is_not_applied() -> None:
    progress = FeedProgress()
    progress.beat(9, 0)
    progress.applied(10)
    progress.beat(100, S)
    progress.beat(200, 2 * S)
    assert progress.lag_events(10) == 191
    assert progress.lag_ns(10, 3 * S) == 2 * S
    progress.applied(150)
    assert progress.lag_ns(150, 3 * S) == S
    progress.applied(201)
    assert progress.lag_events(201) == 0
    assert progress.lag_ns(201, 3 * S) == 0
    assert progress.silence_ns(5 * S) == 3 * S


def test_rate_counts_the_last_two_seconds() -> None:
    progress = FeedProgress()
    progress.arrived(1_000, S)
    progress.arrived(3_000, 3 * S)
    assert progress.rate(4 * S) == 1_500


def test_a_target_that_stops_before_its_first_heartbeat_is_silent() -> None:
    progress = FeedProgress()
    assert progress.silence_ns(5 * S) is None
    progress.reset(5 * S)
    assert progress.silence_ns(8 * S) == 3 * S
    progress.beat(1, 7 * S)
    assert progress.silence_ns(8 * S) == S
