"""A fleet at a real NATS broker: summaries, questions, rights, and every fault of the broker.

Law of this file: the fleet at a broker has the figures that its daemons tell directly, and no fault of the broker
reaches a daemon.
"""

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.analysis.digest import Counts, Digest, total
from kvbm_console.analysis.fleet import OTHER_VERSION, DaemonSummary, Located, Problem, report_of
from kvbm_console.analysis.fleet_metrics import exposition
from kvbm_console.cli.fleet import report_document, report_lines
from kvbm_console.cli.main import cli
from kvbm_console.client import broker as brokers
from kvbm_console.client import brokered
from kvbm_console.client.broker import Broker, BrokerAddress, FleetAnswer, PublishedSummary, broker_address, named
from kvbm_console.client.brokered import BrokeredFleet
from kvbm_console.client.event_stream import PublishedEvents
from kvbm_console.client.fleet import Fleet
from kvbm_console.core.errors import ConnectionLost, Refused, UsageError
from kvbm_console.core.ids import Tier
from kvbm_console.stream.feed import SnapshotTaken
from server import publisher
from server.daemon import Daemon
from tests.server.brokers import Partition, nats_server
from tests.server.daemons import ROOT, certificate_in, daemon_at, finished, published
from tui.fleet import FleetDesk

LOAD = "multiturn:requests=40,sessions=6,system=64,turns=3"
def rights() -> str:
    """The rights that docs/fleet.md tells, and a user who may do everything."""
    _, _, text = (ROOT / "docs/fleet.md").read_text().partition("authorization {")
    told = text.partition("```")[0].replace("...", "1")
    return "authorization {" + told.replace("users = [", 'users = [ { user: "maker", password: "1" },')


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits for what never comes, and summaries as often as a test wants them."""
    monkeypatch.setattr(publisher, "QUIET_S", 0.05)
    monkeypatch.setattr(publisher, "LOOKED_S", 0.05)
    monkeypatch.setattr(publisher, "RETRY_S", (0.01, 0.02))
    monkeypatch.setattr(brokers, "ANSWER_S", 0.3)
    monkeypatch.setattr(brokers, "CLOSE_S", 0.1)


def at(server: Any, user: str = "", cluster: str = "") -> BrokerAddress:
    return broker_address(f"nats://{user and f'{user}@'}{server.address}/{cluster}", "fleet")


@asynccontextmanager
async def member(broker: BrokerAddress, name: str, load: str | None = LOAD, **changes: Any) -> AsyncIterator[Daemon]:
    async with daemon_at(load, speed=None, target=name, fleet=broker, **changes) as daemon:
        if load is not None:
            await published(daemon, lambda: finished(daemon) == 40)
        yield daemon


async def keep_summaries(broker: BrokerAddress) -> None:
    """Make the stream, for a fleet that is opened before a daemon has made it."""
    async with Broker(broker, "test") as raw:
        await brokers.keep_summaries(raw)


async def seen(fleet: BrokeredFleet, condition: Callable[[], bool]) -> None:
    """Look until it is so; the test's own timeout is the bound."""
    while not condition():
        await fleet.look()
        await asyncio.sleep(0.01)


async def warned(daemon: Daemon, word: str) -> str:
    """The daemon's warning about its fleet, once it has the word."""
    while True:
        for text in daemon.service.parts.warnings():
            if text.startswith("fleet") and word in text:
                return text
        await daemon.service.changed.wait()


@pytest.mark.asyncio
async def test_the_fleet_at_a_broker_is_the_fleet_that_is_asked_directly(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        broker = at(server, cluster="blue")
        async with member(broker, "prod.1") as one, member(broker, "prod 聊") as two:
            daemons = {"prod.1": one, "prod 聊": two}
            async with (
                BrokeredFleet(broker) as fleet, Fleet([each.address for each in daemons.values()]) as direct,
                BrokeredFleet(at(server)) as other,
            ):
                assert not other.rows, "another cluster"
                await fleet.first_look()
                theirs = await direct.first_look()
                await seen(fleet, lambda: all(row.summary is not None and row.summary.watching for row in fleet.rows))
                mine = await fleet.look()
                assert {row.name: row.opens for row in mine.rows} == {
                    name: daemon.address for name, daemon in daemons.items()
                }
                assert mine.digest == theirs.digest
                assert mine.stands == theirs.stands
                places = {row.opens: row.target for row in mine.rows}
                assert {each.hash: set(each.lies_at) for each in mine.missing} == {
                    each.hash: {places[target] for target in each.lies_at} for each in theirs.missing
                }
                pool = next(pool for pool in one.service.state.pools if pool.info.tier is Tier.G1)
                key = next(iter(pool.by_hash))
                found = await fleet.find([key, 1], "nobody")
                assert found.keys() == daemons.keys()
                assert found["prod.1"] == (await direct.find([key, 1], "nobody"))[one.address]
        async with BrokeredFleet(broker) as fleet:
            assert not fleet.rows, "daemons that ended in order have left"


@pytest.mark.asyncio
async def test_a_daemon_that_died_keeps_its_row_and_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokered, "OVERDUE_S", 0.1)
    with nats_server(tmp_path) as server:
        broker = at(server)
        async with member(broker, "one", None), Broker(broker, "test") as raw:
            await brokers.keep_summaries(raw)
            dead = PublishedSummary(DaemonSummary("dead", "kvbm", "x", 7, 1, True, 0, holds=3), "unix:/d", "host", 0.05)
            await raw.jetstream.publish(broker.subject("dead", "sum"), msgspec.msgpack.encode(dead))
            await raw.jetstream.publish(broker.subject("strange", "sum"), b"\xc1 not ours")
            await raw.client.publish(broker.questions, b"\xc1 not ours")
            async with BrokeredFleet(broker) as fleet:
                await seen(fleet, lambda: sum(row.stands == "gone" for row in fleet.rows) == 2)
                await asyncio.sleep(0.2)
                rows = {row.target: row for row in (await fleet.look()).rows}
                assert (rows["dead"].summary, rows["dead"].error) == (dead.summary, "summary overdue")
                assert rows["dead"].silent_s > 0.2
                assert rows["strange"].error == OTHER_VERSION
                assert rows["one"].stands != "gone"
                assert rows["one"].silent_s < rows["dead"].silent_s
                assert (await fleet.find([1])).keys() == {"one"}


def test_a_digest_is_decoded_for_a_sum_and_never_breaks_it() -> None:
    def told(digest: Any, incarnation: str = "x") -> bytes:
        summary = DaemonSummary("one", "kvbm", incarnation, 7, 1, True, 0, digest=digest)
        return msgspec.msgpack.encode(PublishedSummary(summary, "unix:/d", "host", 2.0))

    fleet = BrokeredFleet(brokers.broker_address("nats://127.0.0.1", "broker"))
    whole, broken = Digest(8, [1, 2, 0, 0], finished=3), {"prompt_blocks": 5, "missing": "no table"}
    whole.missing.add(2**64 - 1, 5, "evicted")
    whole.latency.add(10**9)
    for incarnation in ("x", "y"):  # the first of an incarnation is read whole
        fleet._take("one", told(broken, incarnation), 0.0)
        fleet._catch_up()
        (row,) = fleet.rows
        assert (row.stands, row.error, row.digest) == ("gone", OTHER_VERSION, whole if incarnation == "y" else Digest())
        for _ in range(2):
            fleet._take("one", told(whole, incarnation), 0.0)
        assert row.summary is not None
        assert type(row.summary.digest) is Counts
        assert (row.error, row.hit_rate) == ("", 3 / 8)
        assert report_of(fleet.rows).digest == total([whole])
        assert row.digest == whole
    fleet._take("one", told(broken, "y"), 0.0)
    assert row.hit_rate == 0
    assert report_of(fleet.rows).stands["gone"] == 1
    assert (row.error, row.digest) == (OTHER_VERSION, Digest())


IMPOSSIBLE: list[dict[str, Any]] = [
    {"problems": [{"level": "doom", "lint": "l", "who": "w", "what": "x", "because": "b"}]},
    {"problems": [{"level": "fault\n", "lint": "l", "who": "w", "what": "x", "because": "b"}]},
    {"slots": {"decoding": -1}}, {"holds": -1}, {"tiers": {"g1": (-1, 4)}}, {"passed_over": -1},
    {"digest": {"prompt_blocks": -1}}, {"digest": {"hits": [1]}}, {"digest": {"hits": [1] * 5}},
    {"digest": {"hits": [-1, 0, 0, 0]}}, {"digest": {"latency": {"buckets": {10**9: 1}}}},
    {"digest": {"first_token": {"buckets": {-1: 1}}}}, {"digest": {"first_token": {"buckets": {1: -1}}}},
    {"digest": {"missing": {"of": {-1: {"blocks": 1}}}}}, {"digest": {"missing": {"of": {1: {"error": -1}}}}},
    {"every_s": math.nan}, {"every_s": math.inf}, {"every_s": -1.0}, {"keyframe": -5},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_a_summary_that_no_daemon_tells_is_one_sentence(changes: dict[str, Any]) -> None:
    fleet = BrokeredFleet(brokers.broker_address("nats://127.0.0.1", "broker"))
    told = msgspec.to_builtins(PublishedSummary(DaemonSummary("one", "kvbm", "x", 7, 1, True, 0), "unix:/d", "h", 2.0))
    fleet._take("whole", msgspec.msgpack.encode(told), 0.0)
    for name, value in changes.items():
        (told if name in told else told["summary"])[name] = value
    fleet._take("one", msgspec.msgpack.encode(told), 0.0)
    fleet._catch_up()
    report = report_of(fleet.rows)
    assert [(row.target, row.stands, row.error) for row in report.rows if row.error] == [("one", "gone", OTHER_VERSION)]
    assert list(report_lines(report))


def told_by(name: str, why: str = "") -> bytes:
    """A living daemon's summary; ``why`` makes it large."""
    problems = [Problem("fault", "lint", "who", "what", why)] if why else []
    return msgspec.msgpack.encode(
        PublishedSummary(DaemonSummary(name, "kvbm", "x", 7, 1, True, 0, problems=problems), "unix:/d", "host", 2.0)
    )


class Heard:
    """A view without a broker, which hears what a test says."""

    def __init__(self) -> None:
        self.fleet = BrokeredFleet(broker_address("nats://127.0.0.1", "broker"))
        self.fleet._summaries = brokered._Summaries(Broker(self.fleet._address, "test"), self.fleet._fresh_at)

    def hear(self, name: str, data: bytes | None = None, ago_s: float = 0.0) -> tuple[set[str], int]:
        """The rows and the number of dropped daemons after this message of a daemon."""
        subject = self.fleet._address.subject(name, "sum")
        self.fleet._fresh_at(subject, told_by(name) if data is None else data, time.monotonic() - ago_s)
        self.fleet._catch_up()
        return {row.target for row in self.fleet.rows}, self.fleet.dropped


class Line:
    """A broker's client on a slow line: each message of a part comes when the time for the one before is over."""

    def __init__(self, *parts: list[SimpleNamespace]) -> None:
        self.parts = iter(parts)
        self.hear: Callable[[Any], Any] | None = None
        self.brings: asyncio.Task[None] | None = None

    def new_inbox(self) -> str:
        return "inbox"

    async def publish(self, *_: object) -> None:
        self.brings = asyncio.create_task(self._bring(next(self.parts)))

    async def _bring(self, part: list[SimpleNamespace]) -> None:
        assert self.hear is not None
        for message in part:
            await self.hear(message)
            await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.parametrize("whole", [True, False])
async def test_a_large_fleet_on_a_slow_line_comes_up_as_long_as_messages_come(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokered, "ANSWER_S", 0.0)
    heard: list[str] = []
    messages = [SimpleNamespace(reply="$JS.ACK.S.C.1.2.3.0.0", subject=f"s{at}", data=b"") for at in range(100)]
    more = SimpleNamespace(reply="", headers={"Status": "409", "Description": "Message Size Exceeds MaxBytes"})
    end = SimpleNamespace(reply="", headers={"Status": "404", "Description": "No Messages"})
    broker = Broker(broker_address("nats://127.0.0.1", "broker"), "test")
    line = broker.client = Line([*messages[:60], more], [*messages[60:], end] if whole else messages[60:])
    summaries = brokered._Summaries(broker, lambda subject, *_: heard.append(subject))
    line.hear = summaries.hear
    if whole:
        await summaries.fetch()
    else:
        with pytest.raises(ConnectionLost, match="does not answer"):
            await summaries.fetch()
    assert len(heard) == 100


@pytest.mark.asyncio
async def test_a_fleet_is_fetched_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker closes the connection of a reader for whom 64 MB wait, as the summaries of 20,000 daemons would."""
    monkeypatch.setattr(brokered, "_PART", brokered._PART.replace(b"16777216", b"4096"))
    with nats_server(tmp_path / "broker") as server:
        await keep_summaries(at(server))
        async with Broker(at(server), "daemons") as daemons:
            for number in range(100):
                await daemons.client.publish(at(server).subject(f"d{number}", "sum"), told_by(f"d{number}"))
            await daemons.client.flush()
        async with BrokeredFleet(at(server)) as fleet:
            assert len(fleet.rows) == 100


@pytest.mark.asyncio
async def test_those_that_are_gone_for_the_longest_time_make_way_and_are_counted(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokered, "ROWS_MAX", 4)
    view = Heard()
    for name, ago_s in (("gone", 90.0), ("one", 0.0), ("gone longer", 100.0), ("two", 0.0)):
        view.hear(name, ago_s=ago_s)
    assert view.hear("three") == ({"gone", "one", "two", "three"}, 1)
    assert view.hear("four") == ({"one", "two", "three", "four"}, 2)
    assert view.hear("five") == ({"one", "two", "three", "four"}, 3), "no living daemon makes way for another"
    report = report_of(view.fleet.rows, dropped=view.fleet.dropped)
    desk = FleetDesk()
    desk.take(report)
    assert next(report_lines(report)) == "4 daemons  4 fine  3 dropped, more than a view keeps"
    assert "+3 dropped" in desk.draw(120, 30)[0].text
    assert "kvbm_fleet_dropped_daemons 3" in exposition(report)
    assert report_document(report)["dropped_daemons"] == 3
    assert view.hear("two", b"") == ({"one", "three", "four"}, 3)
    assert view.hear("five") == ({"one", "three", "four", "five"}, 2)


@pytest.mark.asyncio
async def test_memory_is_bounded_whatever_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokered, "ROWS_MAX", 80)
    monkeypatch.setattr(brokered, "ROWS_BYTES_MAX", 40_000)
    monkeypatch.setattr(brokered, "DROPPED_MAX", 200)
    view = Heard()
    fleet = view.fleet
    for number in range(1_000):  # many in one fetch
        fleet._fresh_at(fleet._address.subject(f"d{number}", "sum"), told_by(f"d{number}"), time.monotonic())
        assert len(fleet._of) <= 80
        assert len(fleet._fresh) <= 10
    view.hear("another")
    assert (len(fleet.rows), fleet.dropped, fleet._bytes <= 40_000) == (80, 200, True)
    for row in fleet.rows:  # those that end leave nothing
        view.hear(row.target, b"")
    assert (fleet._of, fleet._bytes) == ({}, 0)
    for name in "abcdefgh":  # a message that cannot be read does not hide how large the one before was
        view.hear(name, told_by(name, "x" * 9_000))
        view.hear(name, b"\xc1")
    assert {row.target for row in fleet.rows} == set("efgh")
    assert sum(len(row.summary.problems[0].because) for row in fleet.rows if row.summary is not None) == 36_000


NESTED = b"\x81\xa5extra" + b"\x91" * 100_000 + b"\xc0"


@pytest.mark.asyncio
async def test_strangers_at_the_broker_neither_end_a_fleet_nor_get_into_it(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        broker = at(server)
        async with member(broker, "one") as daemon, Broker(broker, "stranger") as raw:
            async def answer(message: Any) -> None:
                found = [Located(tiers=["g1"])] * len(msgspec.msgpack.decode(message.data)["hashes"])
                for data in (NESTED, b"\xc1", b"", msgspec.msgpack.encode(FleetAnswer("stranger", found))):
                    await message.respond(data)

            await raw.jetstream.publish(broker.subject("nested", "sum"), NESTED)
            async with BrokeredFleet(broker) as fleet:
                await fleet.first_look()
                await raw.client.subscribe(broker.questions, cb=answer)
                await raw.client.publish(broker.questions, NESTED)
                await raw.client.flush()
                fleet._summed = None
                report = await fleet.look()
                assert {row.target: row.error for row in report.rows} == {"one": "", "nested": OTHER_VERSION}
                assert report.missing
                assert {target for each in report.missing for target in each.lies_at} <= {"one"}
                assert list(report_lines(report))
            assert daemon.service.parts.warnings() == []


@pytest.mark.asyncio
async def test_an_age_counts_from_the_brokers_clock() -> None:
    heard: list[float] = []
    address = broker_address("nats://127.0.0.1", "broker")
    here = brokered._Summaries(Broker(address, "test"), lambda subject, data, heard_s: heard.append(heard_s))
    there = datetime(2031, 5, 1, tzinfo=UTC)  # years away from our clock
    began = time.monotonic()
    here.made(there)
    for tail in ("S.C.1.1.1.{at}.0", "_.hash.S.C.1.1.1.{at}.0.token"):
        at_ns = int((there.timestamp() - 12) * 1e9)
        await here.hear(SimpleNamespace(reply="$JS.ACK." + tail.format(at=at_ns), subject="s", data=b""))
    assert [round(began - heard_s) for heard_s in heard] == [12, 12]


@pytest.mark.asyncio
async def test_two_daemons_of_one_name_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first look: whoever looks as seldom as they publish may see the summaries of one alone."""
    both = "another daemon publishes as twin"
    with nats_server(tmp_path) as server:
        broker = at(server)
        async with member(broker, "twin", None) as stays:
            async with member(broker, "twin", None) as one:
                for daemon in (stays, one):
                    assert both in await warned(daemon, both)
                async with BrokeredFleet(broker) as fleet:
                    assert [row.error for row in fleet.rows] == [
                        "two daemons publish as twin; give each its own --name"
                    ]
            monkeypatch.setattr(publisher, "SHARED_S", 0.0)
            await warned(stays, "runs as it should again")
            async with BrokeredFleet(broker) as fleet:
                await seen(fleet, lambda: [row.error for row in fleet.rows] == [""])


@pytest.mark.asyncio
async def test_one_message_of_another_is_a_farewell_and_the_second_is_not(tmp_path: Path) -> None:
    summaries: asyncio.Queue[bool] = asyncio.Queue()

    async def heard(message: Any) -> None:
        if message.data:
            summaries.put_nowait(msgspec.msgpack.decode(message.data, type=PublishedSummary).name_shared)

    with nats_server(tmp_path) as server:
        broker = at(server)
        subject = broker.subject("one", "sum")
        await keep_summaries(broker)
        async with Broker(broker, "test") as raw:
            await raw.client.subscribe(subject, cb=heard)
            async with member(broker, "one", None):
                assert not await summaries.get()
                await raw.jetstream.publish(subject, b"")
                assert not any([await summaries.get() for _ in range(3)])
                await raw.jetstream.publish(subject, b"")
                while not await summaries.get():
                    pass


@pytest.mark.asyncio
@pytest.mark.fault
async def test_a_daemon_goes_on_beside_a_broker_that_is_killed_frozen_and_restarted_empty(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        broker = at(server)
        async with member(broker, "one") as daemon, BrokeredFleet(broker) as fleet:
            await seen(fleet, lambda: [row.stands for row in fleet.rows] != ["gone"])
            server.kill()
            assert "broker" in await warned(daemon, "fleet: ")
            assert "no broker listens" in await warned(daemon, "no broker listens")
            await seen(fleet, lambda: "no broker listens" in fleet.rows[0].error)
            async with Fleet([daemon.address]) as direct:
                assert (await direct.first_look()).digest.finished == 40, "the daemon itself answers"
            server.start("empty")
            await warned(daemon, "runs as it should again")
            await seen(fleet, lambda: not fleet.rows[0].error)
            server.send(signal.SIGSTOP)
            assert "does not answer" in await warned(daemon, "does not answer")
            async with Fleet([daemon.address]) as direct:
                assert (await direct.first_look()).digest.finished == 40
            server.send(signal.SIGCONT)
            await seen(fleet, lambda: not fleet.rows[0].error)


@pytest.mark.asyncio
@pytest.mark.fault
async def test_a_daemon_behind_a_partition_is_gone_alone_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokered, "OVERDUE_S", 0.5)
    with nats_server(tmp_path) as server:
        await keep_summaries(at(server))
        async with (
            Partition(server) as between, member(at(server), "near", None) as near,
            member(at(between), "far", None) as far, BrokeredFleet(at(server)) as fleet,
        ):
            await seen(fleet, lambda: len(fleet.rows) == 2 and not any(row.error for row in fleet.rows))
            between.whole.clear()
            assert "does not answer" in await warned(far, "does not answer")
            while (await fleet.find([1])).keys() != {"near"}:
                await seen(fleet, lambda: [row.target for row in fleet.rows if row.error] == ["far"])
            async with Fleet([near.address, far.address]) as direct:
                assert not (await direct.look()).stands["gone"], "the daemon itself answers"
            between.whole.set()
            await seen(fleet, lambda: not any(row.error for row in fleet.rows))
            assert "runs as it should again" in await warned(far, "again")


async def filled(broker: Broker) -> None:
    """Publish summaries of daemons until the broker takes no more."""
    with broker.asking("fill it"):
        for number in count():
            await broker.jetstream.publish(broker.address.subject(f"dead-{number}", "sum"), bytes(100))


@pytest.mark.asyncio
@pytest.mark.fault
async def test_a_broker_whose_disk_is_full_costs_the_daemon_nothing(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        server.kill()
        server.room = "1KB"
        server.start("small")
        async with Broker(at(server), "test") as raw:
            await brokers.keep_summaries(raw)
            with pytest.raises(Refused, match="has no room left to fill it"):
                await filled(raw)
        async with member(at(server), "one") as daemon:
            assert "has no room left to publish summaries" in await warned(daemon, "no room")
            async with Fleet([daemon.address]) as direct:
                assert (await direct.first_look()).digest.finished == 40, "the daemon itself answers"
            server.kill()
            server.room = "1GB"
            server.start("small")
            await warned(daemon, "runs as it should again")
            async with BrokeredFleet(at(server)) as fleet:
                await seen(fleet, lambda: any(row.target == "one" and not row.error for row in fleet.rows))


@pytest.mark.asyncio
@pytest.mark.fault
async def test_a_clock_that_jumps_by_minutes_changes_no_age_and_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall's clock of the daemon and of the one who looks jumps; the broker's does not."""
    true_s, true_ns = time.time, time.time_ns
    with nats_server(tmp_path) as server:
        broker = at(server)
        for minutes in (10, -20):
            monkeypatch.setattr(time, "time", lambda: true_s() + 60 * minutes)  # noqa: B023
            monkeypatch.setattr(time, "time_ns", lambda: true_ns() + 60_000_000_000 * minutes)  # noqa: B023
            async with member(broker, "one", fleet_events=True) as daemon, BrokeredFleet(broker) as fleet:
                await seen(fleet, lambda: bool(fleet.rows) and fleet.rows[0].stands not in ("gone",))
                monkeypatch.setattr(time, "time", lambda: true_s() - 60 * minutes)  # noqa: B023
                monkeypatch.setattr(time, "time_ns", lambda: true_ns() - 60_000_000_000 * minutes)  # noqa: B023
                heard = daemon.service.state.seq
                await seen(fleet, lambda: (row := fleet.rows[0].summary) is not None and row.seq >= heard)  # noqa: B023
                assert fleet.rows[0].silent_s < 10
                assert not fleet.rows[0].error
            async with Broker(broker, "test") as raw:
                events = PublishedEvents(raw, "one")
                items = [item async for item in events.items()]
                assert isinstance(items[0], SnapshotTaken)
                assert events.lost == 0
                assert events.ended is not None
                assert events.ended.last_seq == daemon.service.state.seq - 1
                assert abs(events.clock_anchor_ns - (true_ns() - daemon.service.at_ns)) < 60_000_000_000


@pytest.mark.asyncio
async def test_rights_are_per_daemon_and_a_view_only_reads(tmp_path: Path) -> None:
    with nats_server(tmp_path, rights()) as server:
        async with Broker(at(server, "maker:1"), "maker") as raw:
            await brokers.keep_summaries(raw)
            await brokers.keep_events(raw)
        async with (
            member(at(server, "prod-1:1", "blue"), "prod-1", None, fleet_events=True) as one,
            member(at(server, "prod-1:1", "blue"), "two", None) as two,
            member(at(server, "prod-1:2"), "three", None) as three,
        ):
            text = await warned(two, "gives no right to publish summaries")
            assert '(permissions violation for publish to "kvbm.v1.blue.two.sum")' in text
            assert "refuses this user or password" in await warned(three, "refuses")
            async with BrokeredFleet(at(server, "eye:1", "blue")) as fleet:
                await seen(fleet, lambda: [row.target for row in fleet.rows] == ["prod-1"])
                assert "prod-1" in await fleet.find([1])
                assert not one.service.parts.warnings()
            async with Broker(at(server, "eye:1", "blue"), "eye") as raw:
                events = PublishedEvents(raw, "prod-1")
                assert [type(item) async for item in events.items()][:1] == [SnapshotTaken]
            async with Broker(at(server, "eye:1", "blue"), "eye") as raw:
                for what in (
                    raw.jetstream.publish("kvbm.v1.blue.prod-1.sum", b""), raw.jetstream.purge_stream("KVBM_SUM"),
                    raw.jetstream.delete_stream("KVBM_SUM"), raw.jetstream.purge_stream("KVBM_EV"),
                    raw.jetstream.publish("kvbm.v1.blue.prod-1.ev", b""), raw.jetstream.delete_stream("KVBM_EV"),
                ):
                    with pytest.raises(Refused, match="gives no right to do it"), raw.asking("do it"):
                        await what
            with pytest.raises(Refused, match="refuses this user or password"):
                await BrokeredFleet(at(server, "eye:wrong")).__aenter__()


@pytest.mark.asyncio
async def test_a_broker_without_streams_is_one_sentence(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        with pytest.raises(Refused, match="keeps no messages: JetStream is off there, or its stream is missing"):
            await BrokeredFleet(at(server)).__aenter__()
        server.kill()
        with pytest.raises(ConnectionLost, match=f"no broker listens on nats://{server.address}"):
            await BrokeredFleet(at(server)).__aenter__()


@pytest.mark.asyncio
async def test_no_password_is_shown_without_the_tls_that_the_address_wants() -> None:
    shown = b""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal shown
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"auth_required":true}\r\n')
        shown += await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Refused, match="does not speak TLS; write nats:// if"):
            await Broker(broker_address(f"tls://one:secret@127.0.0.1:{port}", "fleet"), "test").__aenter__()
    assert not shown


@pytest.mark.asyncio
async def test_a_broker_whose_certificate_is_not_trusted_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = certificate_in(tmp_path)
    with nats_server(tmp_path / "broker", f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}') as server:
        address = broker_address(f"tls://{server.address}", "fleet")
        with pytest.raises(Refused, match=r"shows no certificate that this machine trusts .*SSL_CERT_FILE names"):
            await Broker(address, "test").__aenter__()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        await keep_summaries(address)
    assert not caplog.records, "nothing is printed beside the sentence"


@given(some.text(min_size=1), some.text(min_size=1))
def test_every_name_has_a_subject_of_its_own(name: str, other: str) -> None:
    address = BrokerAddress("nats://x", "nats://x")
    subject = address.subject(name, "sum")
    assert (named(subject), len(subject.split("."))) == (name, 5)
    assert not set(subject) & set(" *>\t\r\n")
    assert (subject == address.subject(other, "sum")) == (name == other)


def test_addresses_and_their_mistakes() -> None:
    told = broker_address("nats://u:p%40@h/blue%20one?creds=/run/n.creds", "fleet")
    assert (told.url, told.shown, told.cluster, told.creds) == (
        "nats://u:p%40@h:4222", "nats://h:4222", "blue one", "/run/n.creds"
    )
    for wrong in ("nats://", "http://h", "nats://h:x", "nats://h:0", "nats://u:secret@h/a/b", "nats://h?x=1", "nats://h#x"):
        with pytest.raises(UsageError, match="fleet must be nats://") as found:
            broker_address(wrong, "fleet")
        assert "secret" not in str(found.value)
    for command in (["fleet", "nats://h:x", "--once"], ["fleet", "nats://h", "unix:/x", "--once"],
                    ["serve", "--fleet", "http://h"]):
        done = CliRunner().invoke(cli, command, prog_name="kvbm-console")
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.stderr
