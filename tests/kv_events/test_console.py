"""The console on an engine's event stream: every view draws at every level of knowledge, and doubt is on screen."""

import pytest

from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from tests.kv_events.payloads import batch, cleared, removed, stored
from tests.kv_events.test_stream import House
from tests.tui.desks import desk_of, everything
from tui.desk import Desk


def desk(house: House) -> Desk:
    """The console behind what this leader has published."""
    return desk_of(items=[SnapshotTaken(CacheState()), EventsArrived(list(house.events))])


@pytest.fixture
def house() -> House:
    one = House(snapshots=False)
    one.send(stored(*range(1, 41)), stored(1, 2, medium="CPU"), stored(7, medium="TAPE"))
    one.send(removed(3), removed(4))
    return one


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
@pytest.mark.parametrize("lost", [False, True])
def test_every_view_draws_what_a_stream_tells(house: House, size: tuple[int, int], lost: bool) -> None:
    if lost:
        house.stream.accept(9, batch(stored(50)))
    one = desk(house)
    for view in range(9):
        one.go(view)
        assert everything(one, *size)


@pytest.mark.parametrize("view", [0, 5])
def test_doubt_is_on_screen_until_the_publisher_clears(house: House, view: int) -> None:
    one = desk(house)
    one.go(view)
    assert "38/" in everything(one, 120, 40)
    house.stream.accept(9, batch(stored(50)))
    one = desk(house)
    one.go(view)
    assert "39?/" in everything(one, 120, 40)
    house.stream.accept(10, batch(cleared(), stored(8)))
    one = desk(house)
    one.go(view)
    assert "1/" in everything(one, 120, 40)
    assert "?/" not in everything(one, 120, 40)


def test_evictions_that_a_stream_tells_are_a_flow(house: House) -> None:
    assert desk(house).mirror.flows.evicted[0].total(60, 0) == 2
