"""The lints of a daemon as metrics: what they find in its stream, bounded in time, and nothing of it in a scrape."""

import anyio
import anyio.lowlevel
import pytest

from kvbm_console.analysis.lints import LINTS, LintFold, current, stream_lints
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Note
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.engines.kv_events.stream import EventStream
from kvbm_console.metrics.collect import collect, scrape_of
from kvbm_console.metrics.exposition import render
from kvbm_console.service import LeaderService
from kvbm_console.stream.ring import Ring
from kvbm_console.wire.batches import unpack_events
from server.lints import LintWatch
from tests.engines.payloads import batch, cleared, stored
from tests.metrics.test_exposition import page, parse
from tests.server.daemons import daemon_at, finished, published


class Followed:
    """A daemon's service that follows an event stream, and its clock."""

    def __init__(self, ring: Ring | None = None) -> None:
        self.now_ns = 0
        self.service = LeaderService(LeaderConfig(), lambda: self.now_ns, check=True, ring=ring)
        self.service.start()
        self.stream = EventStream(self.service.dispatcher, self.service.new_source())
        self.seq = 0

    def publish(self, *blocks: int, lost: int = 0, clear: bool = False) -> None:
        self.seq += lost
        self.stream.accept(self.seq, batch(*map(stored, blocks), *([cleared()] if clear else [])))
        self.seq += 1
        self.service.broadcaster.flush()


@pytest.mark.asyncio
async def test_a_finding_is_active_for_as_long_as_it_is_true() -> None:
    followed = Followed()
    watch = LintWatch(followed.service)
    followed.publish(1, 2)
    await watch.turn()
    assert not any(watch.active.values())
    followed.publish(3, lost=4)
    await watch.turn()
    assert {lint: count for lint, count in watch.active.items() if count} == {"reports_lost": 1}
    text = render(collect(scrape_of(
        followed.service.leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=(), lints=watch.active,
        lints_passed_over=watch.passed_over)))
    shown = {labels["lint"]: value for labels, value in parse(text)["kvbm_lint_active"]}
    assert shown == dict(watch.active)
    assert LINTS.keys() - shown.keys() == {"held", "lost", "unfinished"}
    followed.publish(5, clear=True)
    followed.now_ns += 1
    await watch.turn()
    assert not any(watch.active.values())
    assert watch.passed_over == 0


@pytest.mark.asyncio
async def test_what_lasts_is_found_behind_events_that_were_passed_over_and_those_are_counted() -> None:
    followed = Followed(Ring(events_max=40))
    watch = LintWatch(followed.service)
    followed.publish(1, lost=3)
    for block in range(200):
        followed.publish(10 + block)
    await watch.turn()
    assert watch.passed_over > 100
    assert watch.active["reports_lost"] == 1, "the facts know it"
    seen = watch.passed_over
    followed.publish(999)
    await watch.turn()
    assert watch.passed_over == seen


@pytest.mark.asyncio
async def test_a_turn_waits_for_the_turn_before_it() -> None:
    followed = Followed()
    watch = LintWatch(followed.service)
    for block in range(4000):
        followed.publish(block)
    async with anyio.create_task_group() as turns:
        turns.start_soon(watch.turn)
        await anyio.lowlevel.checkpoint()
        followed.publish(4000, lost=1)
        turns.start_soon(watch.turn)
    assert watch.turns == 2
    assert watch.active["reports_lost"] == 1


@pytest.mark.asyncio
async def test_an_instant_is_active_for_a_minute() -> None:
    followed = Followed()
    watch = LintWatch(followed.service)
    followed.service.submit(NoteReported, Note.LOOP_BLOCKED, "the event loop stood still for 2.0 s")
    followed.service.broadcaster.flush()
    await watch.turn()
    assert watch.active["blocked"] == 1
    followed.now_ns = 61 * 10**9
    await watch.turn()
    assert watch.active["blocked"] == 0


@pytest.mark.asyncio
async def test_facts_that_are_behind_are_judged_as_of_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that begins with an hour of events must not call everything late that goes on in the first of them."""
    followed = Followed()
    followed.service.submit(NoteReported, Note.LOOP_BLOCKED, "the event loop stood still for 2.0 s")
    followed.service.broadcaster.flush()
    for minute in range(1, 4):
        followed.now_ns = minute * 61 * 10**9
        followed.publish(minute)
    monkeypatch.setattr("server.lints.TURN_EVENTS", 1)
    watch = LintWatch(followed.service)
    found = []
    for _ in range(4):
        await watch.turn()
        found.append(watch.active["blocked"])
    assert found[0] == 1, "it was a moment ago"
    assert found[-1] == 0, "it was three minutes ago"


@pytest.mark.asyncio
async def test_a_daemon_with_metrics_finds_what_a_watch_on_its_whole_stream_finds() -> None:
    async with daemon_at("multiturn:requests=60,sessions=8", speed=None, metrics="127.0.0.1:0") as daemon:
        await published(daemon, lambda: finished(daemon) == 60)
        daemon.service.broadcaster.flush()
        lints = daemon.lints
        assert lints is not None
        await lints.turn()
        watch, state = LintFold(stream_lints()), CacheState()
        assert daemon.service.ring.first_seq == 0
        for data in daemon.service.ring.data_since(0):
            for event in unpack_events(data):
                watch.apply(state, event)
        at_ns = daemon.service.at_ns
        wanted = [finding.lint for finding in current(watch.findings(state, at_ns), at_ns)]
        assert {lint: count for lint, count in lints.active.items() if count} == {
            lint: wanted.count(lint) for lint in wanted
        }
        assert daemon.metrics is not None
        _, text = await page(daemon.metrics.port)
        assert parse(text)["kvbm_lint_passed_over_events_total"] == [({}, 0.0)]
