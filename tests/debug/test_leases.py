"""Leases and deadlines on a clock of the test's own."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.debug.leases import Leases, WallDeadlines

OWNERS = st.sampled_from(["a", "b", "c"])


@given(st.lists(st.one_of(
    st.tuples(st.just("renew"), OWNERS), st.tuples(st.just("drop"), OWNERS),
    st.tuples(st.just("pass"), st.integers(1, 12)),
)))
def test_a_lease_lives_exactly_as_long_as_it_is_renewed(steps: list[tuple[str, object]]) -> None:
    now, said = [0], list[tuple[str, str]]()
    leases = Leases(
        lambda: now[0], granted=lambda owner, _: said.append(("granted", owner)),
        lost=lambda owner: said.append(("lost", owner)), ttl_ns=10,
    )
    renewed: dict[str, int] = {}
    for verb, value in steps:
        if verb == "renew":
            leases.renew(str(value))
            renewed[str(value)] = now[0]
        elif verb == "drop":
            leases.drop(str(value))
            renewed.pop(str(value), None)
        else:
            assert isinstance(value, int)
            now[0] += value
            leases.expire()
            renewed = {owner: at for owner, at in renewed.items() if now[0] - at < 10}
        assert leases.owners == set(renewed)
    for owner in "abc":  # granted and lost take turns, so the core never hears either twice
        turns = [word for word, who in said if who == owner]
        assert turns == ["granted", "lost"] * (len(turns) // 2) + ["granted"] * (len(turns) % 2)


class Timers:
    """A loop's ``call_later`` that the test fires."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[float, Callable[[], None]]] = {}
        self._made = 0

    def later(self, seconds: float, callback: Callable[[], None]) -> "Timers.Timer":
        self._made += 1
        self.waiting[self._made] = (seconds, callback)
        return Timers.Timer(self, self._made)

    class Timer:
        def __init__(self, owner: "Timers", number: int) -> None:
            self._owner, self._number = owner, number

        def cancel(self) -> None:
            self._owner.waiting.pop(self._number, None)

    def fire(self) -> None:
        for number in list(self.waiting):
            self.waiting.pop(number)[1]()


def test_a_deadline_is_sent_once_unless_it_was_cleared() -> None:
    timers, passed = Timers(), list[int]()
    deadlines = WallDeadlines(timers.later, passed.append)
    deadlines.set(1, 2_000_000_000)
    deadlines.set(2, 1)
    deadlines.set(2, 500_000_000)
    deadlines.set(3, 1)
    deadlines.clear(3)
    deadlines.clear(99)
    assert sorted(seconds for seconds, _ in timers.waiting.values()) == [0.5, 2.0]
    timers.fire()
    timers.fire()
    assert sorted(passed) == [1, 2]
    assert len(deadlines) == 0
    deadlines.set(4, 1)
    deadlines.close()
    assert timers.waiting == {}
