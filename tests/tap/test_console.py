"""The console on an engine with a tap: its name, its blocks, and what watching costs it."""

from itertools import islice
from typing import Any

import pytest

from kvbm_console.analysis.lints import Level
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.core.events import Event, SourceLost
from kvbm_console.core.state import CacheState
from kvbm_console.metrics.collect import collect, scrape_of
from kvbm_console.metrics.exposition import render
from kvbm_console.stream.feed import EventsArrived, FeedItem, SnapshotTaken
from tests.analysis.deadlocks import stands_still
from tests.metrics.test_exposition import parse
from tests.tap.kept import kept, steps, watching
from tests.tui.desks import desk_of, everything
from tests.tui.script import Mono, ScriptedFeed, connected
from tui.app import ConsoleApp
from tui.desk import SLOTS, TIERS, WARNINGS
from tui.source import TargetSession

COST = {"calls": 2_000, "dropped": 0, "errors": 0, "call_ns": 3_000_000, "steps": 100, "step_ns": 1_000_000_000}


def told(**changed: int) -> dict[str, Any]:
    """As ``Accounting.accounts`` answers."""
    return {"engines": [{"source": "1", "name": "vllm-a", **COST, **changed}], "publishers": []}


@pytest.fixture(scope="module")
def events() -> list[Event]:
    """vLLM's own scheduler with a host tier, half way through what it did."""
    watch = watching("offload")
    for _ in islice(steps("offload", watch), len(kept("offload")["steps"]) // 2):
        pass
    return watch.events


def items(events: list[Event]) -> list[FeedItem]:
    return [connected(), SnapshotTaken(CacheState()), EventsArrived(events)]


def test_requests_and_blocks_are_there_and_the_cost_is_said_when_told(events: list[Event]) -> None:
    one = desk_of(items=items(events), late_ns=0)
    for view in range(9):
        one.go(view)
        assert "(level 1)" not in everything(one)
    one.go(TIERS)
    state = one.mirror.state
    assert state is not None
    assert state.slots
    assert "tap: the daemon has not told its cost" in everything(one)
    row = next(line.split() for line in everything(one, 120, 40).splitlines() if line.startswith("   G1"))
    assert row[2] == f"{state.pools[0].resident_blocks}/{state.pools[0].info.capacity_blocks}"
    assert row[3] == str(100 * len(state.pools[0].by_hash) // state.pools[0].resident_blocks)
    one.mirror.sources.tell(told())
    text = everything(one, 80, 24)
    assert " vllm-a   rank 0" in text
    assert "tap: 1.5 µs a call, 0.30 % of a step" in text
    assert "step 10 ms" in text
    assert "2,000 calls" in text
    assert "0 dropped   0 errors" in text


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_a_deadlock_is_one_fault_and_every_request_tells_its_place_in_it(size: tuple[int, int]) -> None:
    one = desk_of(items=items(stands_still().all_events))
    (warning,) = one.warnings
    assert (warning.level, warning.lint, warning.what) == (Level.FAULT, "deadlock", "deadlock 12s")
    assert warning.because.startswith("0 running, 8 waiting: head wants 13 G1 blocks, 7 free")
    one.go(SLOTS)
    text = everything(one, *size)
    assert "13 G1 blocks, 7 free" in text
    assert "head, which wants 13 G1" in text
    one.go(WARNINGS)
    assert "1 fault" in everything(one, *size)
    still = desk_of(items=items(stands_still(loads=True).all_events))
    assert [(each.lint, each.who) for each in still.warnings] == [("stuck", "8 requests"), ("slow", "↑ G2→G1")]
    still.go(WARNINGS)
    assert "2 cautions" in everything(still, *size)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_an_audit_that_differs_is_a_fault_with_its_place_and_a_count(size: tuple[int, int]) -> None:
    watch = watching("offload")
    for _ in islice(steps("offload", watch), 40):
        pass
    pool = watch.leader.state.pools[0]
    places, before = len(pool), watch.translator.audited
    watch.take([["audit", watch.now, 0, [77, *pool.hash_of[1:]], list(pool.refs), None, None, []]])
    assert (watch.translator.audited - before, watch.translator.differing) == (places, 1)
    assert watch.translator.wants_all
    one = desk_of(items=items(watch.events))
    (warning,) = [each for each in one.warnings if each.lint == "audit"]
    assert (warning.level, warning.because) == (Level.FAULT, "place 0 holds 4d in the engine, 0 here")
    one = desk_of(items=items(watch.events), late_ns=0)
    one.go(TIERS)
    one.mirror.sources.tell(told(audited_places=places, differing_places=1))
    spans = [span for line in one.draw(*size) for span in line.spans]
    assert next(span.role for span in spans if "1 differed" in span.text) == "fault"
    assert f"{places} places audited" in everything(one, *size)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_calls_into_a_connector_and_its_figures_stand_below_its_engine(size: tuple[int, int]) -> None:
    watch = watching("offload")
    for _ in islice(steps("offload", watch), 40):
        pass
    rows = [["Offloading", "ask", 4, 8_000_000, 5_000_000], ["Offloading", "take", 4, 4_000_000, 1_000_000],
            ["LMCache", "ask", 2, 3_100_000_000, 3_000_000_000]]
    watch.take([["measured", watch.now, rows, {"bytes_stored": 4_096.0, "rule": 0.25, "odd": float("nan")}]])
    one = desk_of(items=items(watch.events), late_ns=0)
    one.go(TIERS)
    text = everything(one, *size)
    assert "Offloading: 8 calls, 1.5 ms each   longest 5.0 ms in ask" in text
    assert "LMCache: 2 calls, 1.55 s each   longest 3.00 s in ask" in text
    assert "bytes_stored 4,096   rule 0.25" in text
    assert "odd" not in text
    spans = [span for line in one.draw(*size) for span in line.spans]
    assert next(span.role for span in spans if "longest 3.00 s" in span.text) == "caution"
    assert next(span.role for span in spans if "longest 5.0 ms" in span.text) != "caution"
    scrape = scrape_of(watch.leader, at_ns=watch.now, subscribers=0, ring_bytes=0, recorder=None, streams=())
    found = parse(render(collect(scrape)))
    longest = found["kvbm_connector_longest_call_seconds"]
    assert [value for labels, value in longest if labels["connector"] == "LMCache"] == [3.0]
    assert sum(value for _, value in found["kvbm_connector_calls_total"]) == 10
    assert sum(value for _, value in found["kvbm_connector_call_seconds_total"]) == pytest.approx(3.112)
    assert [(labels["figure"], value) for labels, value in found["kvbm_connector_figure"]] == [
        ("bytes_stored", 4_096.0), ("rule", 0.25)
    ]


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_what_a_tap_dropped_stands_out(events: list[Event], size: tuple[int, int]) -> None:
    one = desk_of(items=items(events), late_ns=0)
    one.go(TIERS)
    one.mirror.sources.tell(told(dropped=7))
    spans = [span for line in one.draw(*size) for span in line.spans]
    assert next(span.role for span in spans if "7 dropped" in span.text) == "caution"


def test_before_the_first_call_nothing_is_divided(events: list[Event]) -> None:
    one = desk_of(items=items(events), late_ns=0)
    one.go(TIERS)
    one.mirror.sources.tell(told(calls=0, call_ns=0, steps=0, step_ns=0))
    assert "tap: – a call, – of a step   0 dropped   0 errors   step –" in everything(one, 80, 24)


def test_a_recording_says_that_it_has_no_cost(events: list[Event]) -> None:
    one = desk_of(items=[connected(recording=True), *items(events)[1:]], late_ns=0)
    one.go(TIERS)
    assert "tap: a recording does not hold its cost" in everything(one)


def test_a_tap_that_ended_stays_grey(events: list[Event]) -> None:
    state = CacheState()
    for event in events:
        state.apply(event)
    over = SourceLost(state.seq, state.at_ns, 0, 1, 0, 0, False, True)
    one = desk_of(items=[*items(events), EventsArrived([over])], late_ns=0)
    one.go(TIERS)
    text = everything(one, 120, 40)
    assert "ended, nothing more is heard of it" in text
    assert "its engine ended" in text
    roles = {
        span.role for line in one.draw(120, 40) if line.text.startswith((" engine 1", "   G1"))
        for span in line.spans if span.text.strip()
    }
    assert roles == {"stale"}
    assert "title" in {span.role for line in one.shown for span in line.spans}


class TellingFeed(ScriptedFeed):
    """Answers for its engines; the first question finds no connection."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(items(events))
        self.asked = 0

    async def accounts(self) -> dict[str, Any]:
        """As ``LiveFeed.accounts``."""
        self.asked += 1
        if self.asked == 1:
            raise ConnectionLost("not connected")
        return told(dropped=3)


@pytest.mark.asyncio
async def test_a_live_console_asks_for_the_costs(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.source.ACCOUNTS_EVERY_S", 0.01)
    feed = TellingFeed(events)
    app = ConsoleApp(TargetSession(feed, mono=Mono()))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("6")
        while 1 not in app.session.mirror.sources.told:
            await pilot.pause()
        app.draw()
        assert "3 dropped" in "\n".join(line.text for line in app.canvas.lines)
    assert feed.asked >= 2


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_wrong_bytes_are_a_fault_a_line_of_the_log_and_a_count(size: tuple[int, int]) -> None:
    watch = watching("offload")
    for _ in islice(steps("offload", watch), 20):
        pass
    events = list(watch.events)
    slot = next(iter(watch.leader.state.slots.values()))
    for copy in (4, 5):
        watch.recorder.put(("sanitized", 1, [
            "lost-flush", "copy", slot.request, 0, 0, 0xDB691978 << 32, 33, 32, copy,
            "step 107 of request s2t2 overwrote place 33, and store 24",
            "step 107 of request s2t2 did not wait for store 24, whose flush was ordered in step 107",
            "store 24 took from place 33 in step 104", "",
        ]))
    watch.pump()
    one = desk_of(items=items(events + watch.events))
    (warning,) = [each for each in one.warnings if each.lint == "wrong_bytes"]
    assert (warning.level, warning.who) == (Level.FAULT, slot.request)
    one.go(WARNINGS)
    text = everything(one, *size)
    assert "1 fault" in text
    assert "lost-flush: step 107 of request s2t2 did not wait for store 24" in " ".join(text.split())
    one.go(TIERS)
    one.mirror.sources.tell(told(checked_blocks=40, mismatched_blocks=2))
    text = everything(one, *size)
    assert "bytes of 40 blocks checked" in text
    assert "2 wrong" in text
