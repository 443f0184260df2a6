"""The console on an engine's event stream: every view draws at every level of knowledge, and doubt is on screen."""

from functools import partial

import pytest

from kvbm_console.core import stimuli as st
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import Authority, Measure, SlotState, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.debug.leases import Leases
from kvbm_console.debug.sessions import Sessions
from kvbm_console.engines.kv_events.stream import EventStream
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from tests.engines.payloads import batch, cleared, removed, stored
from tests.engines.test_stream import SOURCE, House
from tests.tui.desks import desk_of, everything
from tests.tui.script import Script, connected
from tui.desk import BREAKS, MISSES, OVERVIEW, RECORD, SLOT, SLOTS, TIERS, TIMELINE, TRANSFERS, WHY, Desk
from tui.keys import press
from tui.model.sources import SOURCES_MAX


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


def line(one: Desk, word: str, *size: int) -> list[str]:
    """The words of the row that begins with this."""
    rows = [row.split() for row in everything(one, *size).splitlines()]
    return next(row for row in rows if row[: len(word.split())] == word.split())


@pytest.mark.parametrize("view", [0, 5])
def test_doubt_is_on_screen_until_the_publisher_clears(view: int) -> None:
    house = House(snapshots=False)
    house.send(stored(*range(1, 41)), stored(1, 2, medium="CPU_PINNED"))
    house.send(removed(3), removed(4))
    one = desk(house)
    one.go(view)
    assert line(one, "G1 GPU", 120, 40)[2:5] == ["38", "100", "%"]
    house.stream.accept(9, batch(stored(50)))
    one = desk(house)
    one.go(view)
    assert line(one, "G1 GPU", 120, 40)[2:5] == ["39?", "100", "%?"]
    assert "reports lost or unclear" in everything(one, 120, 40)
    assert "1 gap seen" in everything(one, 80, 24)
    house.stream.accept(10, batch(cleared(), stored(8)))
    one = desk(house)
    one.go(view)
    assert line(one, "G1 GPU", 120, 40)[2] == "1"
    assert not any("?" in row for row in everything(one, 120, 40).splitlines() if row.startswith("   G"))
    assert "cleared 1 ×" in everything(one, 120, 40)


def test_doubt_needs_somebody_also_of_who_came_after_the_loss(house: House) -> None:
    """The facts know it, though no event of this console says so."""
    assert "NEEDS YOU   nothing" in everything(desk(house), 120, 40)
    house.stream.accept(9, batch(stored(50)))
    script = Script()
    script.state = house.dispatcher.leader.state
    one = desk_of(items=[connected(), script.snapshot()])
    rows = everything(one, 120, 40)
    assert "NEEDS YOU   1 caution" in rows
    assert "engine 1  1 gap in its reports  " in rows
    blocks = sum(pool.resident_blocks for pool in house.dispatcher.leader.state.pools)
    assert f"its {blocks} blocks may be wrong" in rows
    one.mirror.sources.tell({"publishers": [
        {"source": "1", "name": "10.0.0.1:5557", "connected": True, "batches": 4, "gaps": 1, "lost_batches": 3,
         "restarts": 0, "last_batch_ns": None}]})
    one.lints.check(one.mirror, one.mono())
    one.warnings = one.lints.warnings(one.mono())
    assert "10.0.0.1:5557  1 gap in its reports" in everything(one, 120, 40)
    press(one, "enter")
    assert one.current == TIERS
    press(one, "!")
    words = " ".join(everything(one, 120, 40).split())
    assert "counts may be wrong until it clears its whole cache or restarts" in words


def test_a_share_counts_each_hash_once_and_what_no_nearer_medium_has(house: House) -> None:
    house.send(stored(100, 100, 101, 1, medium="CPU"))
    one = desk(house)
    one.go(TIERS)
    # on the host 1, 2, 1 again, 100 twice, 101: four hashes in six places, of which 100 and 101 are nowhere nearer
    assert line(one, "G2 CPU", 120, 40)[2:7] == ["6", "66", "%", "33.3", "%"]
    flows = one.mirror.flows
    assert [flows.stored[pool].total(60, 0) for pool in (0, 1, 2)] == [40, 6, 1]


def test_ranks_are_told_apart_by_name(house: House) -> None:
    other = EventStream(house.dispatcher, 2, dp_rank=1)
    other.accept(0, batch(stored(*range(1, 6)), dp_rank=1))
    one = desk(house)
    one.go(TIERS)
    assert "rank 0" in " ".join(line(one, "engine 1", 80, 24))
    assert "rank 1" in " ".join(line(one, "engine 2", 80, 24))
    one.mirror.sources.tell({"publishers": [
        {"source": str(number), "name": f"10.0.0.1:{5556 + number}", "connected": number == 1, "batches": 4,
         "gaps": number - 1, "lost_batches": 3 * (number - 1), "restarts": 2 * (number - 1), "last_batch_ns": None}
        for number in (1, 2)
    ]})
    first, second = " ".join(line(one, "10.0.0.1:5557", 200, 60)), " ".join(line(one, "10.0.0.1:5558", 200, 60))
    assert "rank 0 no gap incarnation 1" in first
    assert "not connected" not in first
    assert "rank 1 1 gap, 3 reports lost incarnation 3 not connected" in second


def test_one_publisher_of_several_ranks_names_them_with_its_pools(house: House) -> None:
    house.send(stored(1, 2, 3), dp_rank=3)
    one = desk(house)
    one.go(TIERS)
    assert line(one, "G1 GPU rank 3", 80, 24)[4] == "3"
    assert "engine 1   rank" not in everything(one, 80, 24)


def test_a_restart_is_seen(house: House) -> None:
    house.stream.accept(0, batch(stored(1)))
    one = desk(house)
    one.go(TIERS)
    assert "1 restart seen" in everything(one, 80, 24)


@pytest.mark.parametrize("view", [0, 5])
def test_an_engine_that_ended_is_grey_and_said_to_be(house: House, view: int) -> None:
    house.dispatcher.submit_from(1, None, st.SourceRestarted, True)
    one = desk(house)
    one.go(view)
    lines = one.draw(120, 40)
    rows = [row for row in lines if row.text.startswith((" engine 1  ", "   G"))]
    assert len(rows) == 4
    assert "ended, nothing more is heard of it" in rows[0].text
    assert {span.role for row in rows for span in row.spans if span.text.strip()} == {"stale"}
    assert "title" in {span.role for row in lines for span in row.spans}
    assert all(row.text.split()[2:] == ["–"] * 5 for row in rows[1:])
    assert "doubtful" not in everything(one, 120, 40)
    assert "restart seen" not in everything(one, 120, 40)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
@pytest.mark.parametrize("view", [SLOTS, SLOT, TIMELINE, TRANSFERS, WHY, MISSES])
def test_a_view_of_requests_says_which_level_has_them(house: House, view: int, size: tuple[int, int]) -> None:
    one = desk(house)
    one.go(view)
    text = everything(one, *size)
    assert "An event stream names no request" in text
    assert "The tap in the engine does" in text
    assert ("KVBM_TAP=unix:PATH vllm serve MODEL" in text) == (view in (WHY, MISSES))
    assert all(row.text.rstrip()[-1:] != "…" for row in one.shown)
    if view in (WHY, MISSES):
        words = " ".join(row.text.strip() for row in one.shown)
        for sentence in (one.view.needs_requests, "they name blocks and no request.", "9 Log and p Prefixes."):
            assert sentence in words


def test_totals_of_requests_are_unknown_in_a_stream(house: House) -> None:
    one = desk(house)
    one.go(RECORD)
    numbers = " ".join(everything(one, 120, 40).partition("TOTALS")[2].split())
    for name in ("requests", "finished", "preemptions", "prompt blocks", "hit blocks", "lost hits", "moved", "thrash"):
        assert f"{name} –" in numbers
    assert "evicted 2 " in numbers
    assert "holds 0 " in numbers


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_breakpoints_say_that_a_stream_cannot_be_held(house: House, size: tuple[int, int]) -> None:
    one = desk(house)
    one.go(BREAKS)
    words = " ".join(everything(one, *size).split())
    assert "A stream names no request, so nothing can be held. With the tap in the engine, breakpoints" in words
    assert "EXAMPLES" not in words


@pytest.mark.parametrize("height", [24, 40, 60])
def test_engines_without_room_for_their_charts_are_counted(house: House, height: int) -> None:
    for number in range(2, 13):
        EventStream(house.dispatcher, number, dp_rank=number).accept(0, batch(stored(1, 2), dp_rank=number))
    one = desk(house)
    one.go(TIMELINE)
    rows = everything(one, 80, height).splitlines()
    shown = sum(row.startswith(" engine ") for row in rows)
    assert 1 <= shown < 12
    assert f" +{12 - shown} engines without room" in rows


def test_a_share_of_the_engines_own_metrics_is_the_same_in_every_view(house: House) -> None:
    numbers = {Measure.QUERY_TOKENS: 100_000, Measure.HIT_TOKENS: 55_790, Measure.USED_PPM: 999_990}
    house.dispatcher.submit_from(SOURCE, None, st.MeasuresReported, tuple(numbers), tuple(numbers.values()))
    one = desk(house)
    for view, hits, used in ((TIERS, "hit rate 55.7 %", "in use 99.9 %"), (SLOTS, "55.7 %", "99.9 %"),
                             (TIMELINE, "HIT RATE   55.7 %", "IN USE   99.9 %")):
        one.go(view)
        text = everything(one, 120, 40)
        assert hits in text
        assert used in text


def test_a_breakpoint_that_no_stream_can_meet_is_told_so_by_the_daemon(house: House) -> None:
    dispatcher = house.dispatcher
    leases = Leases(
        house.clock, granted=lambda owner, back: dispatcher.submit(st.LeaseGranted, owner, back),
        lost=lambda owner: dispatcher.submit(st.LeaseLost, owner))
    sessions = Sessions(dispatcher, leases)
    me = sessions.open("me", lease=False)
    spec = BreakpointSpec(to_state=SlotState.ONBOARDING)
    alone = sessions.set(me, spec)
    assert (alone.verified, alone.message) == (
        False, "only event streams report here and they name no request; a tap in an engine lets it take effect")
    (again,) = sessions.replace(me, [spec])
    assert (again.verified, again.message) == (alone.verified, alone.message)
    dispatcher.submit_from(7, 0, st.PoolDeclared, 0, 0, Tier.G1, "GPU", 64, 16, Authority.OBSERVED)
    assert sessions.set(me, spec).verified


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_the_console_refuses_a_breakpoint_that_no_stream_can_meet(house: House, size: tuple[int, int]) -> None:
    one = desk(house)
    press(one, "b")
    assert "A stream names no request, so nothing can be held." in everything(one, *size)
    press(one, "enter")
    assert one.prompt is not None


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_blocks_that_are_stored_again_and_again_need_somebody(size: tuple[int, int]) -> None:
    house = House(snapshots=False)
    for first in range(0, 400, 100):
        keys = range(first + 1, first + 101)
        for _ in range(2):
            house.send(stored(*keys))
            house.send(*(removed(key) for key in keys))
    one = desk(house)
    overview = everything(one, *size)
    assert "NEEDS YOU   1 caution" in overview
    assert "engine 1  G1 stored again 50 %" in overview
    assert "stored again 50 % of 800, 400 within 50 s" in overview, "the overview answers, and lists no raw events"
    assert "BlocksSeen" not in overview
    one.go(TIERS)
    assert "stored again 50 %" in everything(one, *size), "the figure of the screen"


def test_shares_of_blocks_that_are_stored_again_are_not_cut_at_80_columns() -> None:
    house = House(snapshots=False)
    for first in range(0, 40_000, 2_000):
        keys = range(first + 1, first + 2_001)
        for _ in range(2):
            house.send(stored(*keys))
            house.send(*(removed(key) for key in keys))
    one = desk(house)
    one.go(TRANSFERS)
    assert "of 80,000, 40,000 within 50 s " in everything(one, 80, 24).replace("\n", " \n")
    assert "within 50 s of the eviction" in everything(one, 120, 40)


def test_w_at_level_1_says_what_why_would_need(house: House) -> None:
    one = desk(house)
    press(one, "w")
    assert one.current == WHY
    assert "Why explains the misses of a request." in everything(one)


def test_a_target_with_requests_is_not_told_of_levels() -> None:
    one = desk_of()
    for view in (SLOTS, SLOT, TIMELINE, TRANSFERS):
        one.go(view)
        assert "An event stream names no request" not in everything(one)


@pytest.mark.parametrize(
    ("gauges", "words", "more"),
    [
        ({"half_life_s": 0, "changes": 0}, "host tier evicts by recency", "0 changes"),
        ({"half_life_s": 30, "changes": 1}, "host tier evicts by uses, which count half after 30 s", "1 change"),
        ({"half_life_s": 1e8, "changes": 2}, "host tier evicts by uses", "2 changes"),
        ({"weight": 0.3, "changes": 2}, "host tier evicts by recency and uses, of which uses weigh 0.3", "2 changes"),
        ({"weight": 1.0, "changes": 2}, "host tier evicts by uses", "2 changes"),
        ({"fits": 0, "nodes": 1}, "host tier evicts by recency, until it has learned", "of 65,536"),
        ({"fits": 3, "nodes": 812}, "host tier evicts as learned in 3 fits", "of 65,536"),
    ],
)
@pytest.mark.parametrize("width", [80, 200])
def test_the_choice_of_our_policy_in_an_engines_host_tier_is_on_screen(
    gauges: dict[str, float], words: str, more: str, width: int
) -> None:
    house = House(snapshots=False)
    stats = {"stores": 7.0, **{f"eviction {name}": value for name, value in gauges.items()},
             "eviction ghosts": 1_204, "eviction ghosts_max": 65_536}
    submit = partial(house.dispatcher.submit_from, 2, None)
    submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 50, 16, Authority.OBSERVED)
    submit(st.ConnectorReported, ("OffloadingConnector",), ("get_num_new_matched_tokens",), (3,), (30,), (20,),
         tuple(stats), tuple(map(float, stats.values())))
    one = desk(house)
    one.go(TIERS)
    text = " ".join(everything(one, width, 60).split())
    assert words in text
    assert more in text
    assert "1,204 of 65,536 evicted remembered" in text
    assert "stores 7" in text
    assert "eviction" not in text


def test_many_ranks_are_scrolled(house: House) -> None:
    for rank in range(1, 12):
        EventStream(house.dispatcher, 1 + rank, dp_rank=rank).accept(0, batch(stored(rank), dp_rank=rank))
    one = desk(house)
    one.go(TIERS)
    assert "engine 12" not in everything(one, 80, 24)
    press(one, "G")
    assert "engine 12" in everything(one, 80, 24)
    press(one, "g")
    assert "ENGINES" in everything(one, 80, 24)


def test_what_does_not_fit_of_an_answer_is_left_out_and_counted(house: House) -> None:
    sources = desk(house).mirror.sources
    sources.tell({"engines": [{"source": "x"}, {}, {"source": "1", "name": "n", "calls": "many"}], "publishers": None})
    assert (sources.told, sources.left_out) == ({}, 3)
    row = {"calls": 1, "dropped": 0, "errors": 0, "call_ns": 5, "steps": 1, "step_ns": 9}
    sources.tell({"engines": [{"source": str(at), "name": "n", **row} for at in range(SOURCES_MAX + 2)]})
    assert len(sources.told) == SOURCES_MAX
    assert sources.left_out == 5


def test_evictions_that_a_stream_tells_are_a_flow(house: House) -> None:
    assert desk(house).mirror.flows.evicted[0].total(60, 0) == 2


@pytest.mark.parametrize("view", [OVERVIEW, TRANSFERS, TIERS])
def test_the_legend_of_larger_tiers_stands_where_a_row_tells_of_them(house: House, view: int) -> None:
    for again in (False, True):
        if again:
            house.send(stored(3, 4))
        one = desk(house)
        one.go(view)
        text = everything(one, 120, 60)
        assert "half lived under" in text
        assert ("larger: an LRU tier" in text) == again
        assert ("larger  1.25x" in text) == again
