"""A fleet of real daemons over real sockets: their sum, the dead among them, where a block lies, and the screen.

Law of this file: the fleet's figures are those that the daemons' own facts count, and no daemon is ever missing.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvbm_console.analysis.digest import Digest, MissedFrom
from kvbm_console.analysis.fleet import DaemonRow, DaemonSummary, Elsewhere, FleetReport, Located, Problem, report_of
from kvbm_console.client import Client
from kvbm_console.client.fleet import Fleet, FleetView, targets_of
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import SlotState, Tier
from kvbm_console.stream.verbs import Disarm, SetBreakpoint
from server import lints, servicer
from tests.server.daemons import daemon_at, finished, published, socket_directory
from tui.fleet import FleetApp, FleetDesk

LOAD = "multiturn:requests=40,sessions=6,system=64,turns=3"


@pytest.mark.asyncio
async def test_a_fleet_is_the_sum_of_its_daemons_and_the_dead_keep_their_row() -> None:
    async with AsyncExitStack() as stack:
        inner = await stack.enter_async_context(AsyncExitStack())
        daemons = [
            await each.enter_async_context(daemon_at(LOAD, speed=None, target=f"prod-{at}"))
            for at, each in ((1, stack), (2, inner))
        ]
        for daemon in daemons:
            await published(daemon, lambda daemon=daemon: finished(daemon) == 40)  # type: ignore[misc]
        place = stack.enter_context(socket_directory())
        dead = f"unix:{place}/none.sock"
        async with Fleet([*(daemon.address for daemon in daemons), dead]) as fleet:
            report = await fleet.first_look()
            assert [(row.name, row.stands) for row in report.rows if row.error] == [(dead, "gone")]
            assert {row.name for row in report.rows} == {"prod-1", "prod-2", dead}
            totals = [daemon.service.state.totals for daemon in daemons]
            assert report.digest.prompt_blocks == sum(each.prompt_blocks for each in totals) > 0
            assert report.digest.hits == [sum(each.hit_blocks[tier] for each in totals) for tier in range(4)]
            assert report.digest.finished == report.digest.latency.count == 80
            assert report.digest.preemptions == sum(each.preemptions for each in totals)
            for row in report.rows:
                if row.summary is not None:
                    state = next(each.service.state for each in daemons if each.address == row.target)
                    device = next(pool for pool in state.pools if pool.info.tier is Tier.G1)
                    assert row.summary.tiers["g1"] == (device.resident_blocks, len(device))
            for each in report.missing:
                holders = {
                    daemon.address for daemon in daemons
                    if any(int(each.hash, 16) in pool.by_hash for pool in daemon.service.state.pools)
                }
                assert each.lies_at.keys() == holders
            here = daemons[0].service.state
            device = next(pool for pool in here.pools if pool.info.tier is Tier.G1)
            key = next(iter(device.by_hash))
            found = await fleet.find([key, 1], "nobody")
            assert found.keys() == {daemon.address for daemon in daemons}
            first, none, nobody = found[daemons[0].address]
            assert ("g1" in first.tiers, none.tiers, nobody.slot) == (True, [], None)
            gone = daemons.pop()
            await inner.aclose()
            await fleet.look()
            row = next(row for row in fleet.rows if row.target == gone.address)
            assert row.summary is not None
            assert (row.stands, row.summary.digest.finished) == ("gone", 40), "the last that it told stays"
            assert row.silent_s > 0


@pytest.mark.asyncio
async def test_a_daemon_with_a_hold_stands_held_and_says_who_waits() -> None:
    async with (
        daemon_at() as daemon, Client(daemon.address) as client, client.control("me") as me,
        Fleet([daemon.address]) as fleet,
    ):
        assert (await fleet.look()).stands["held"] == 0
        await me.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.INITIALIZED)))
        for name in ("one", "two"):
            daemon.service.dispatcher.submit_from(1, None, st.RequestArrived, name, pack_hashes([1]), 20, 1, 0, None)
        row, = (await fleet.first_look()).rows
        assert row.summary is not None
        assert (row.stands, row.summary.holds) == ("held", 2)
        assert [(each.level, each.request) for each in row.summary.problems] == [("held", "one"), ("held", "two")]
        assert "at breakpoint 1; resumes by itself" in row.summary.problems[0].because
        await me.ask(Disarm())
        assert (await fleet.look()).stands["fine"] == 1


@pytest.mark.asyncio
async def test_a_sum_may_be_old_and_rows_are_not() -> None:
    class Three(FleetView):
        rows = fleet_of(3).rows
        finds = 0

        async def __aexit__(self, *_: object) -> None: ...

        async def refresh(self) -> None:
            for row in self.rows:
                if row.summary is not None:
                    row.summary.seq += 1
                    row.summary.digest.finished += 1
                    row.digest.missing.add(1, 5, "evicted")

        async def find(self, hashes: Sequence[int], request: str = "") -> dict[str, list[Located]]:
            self.finds += 1
            return {row.target: [Located(["g2"])] for row in self.rows}

    fleet = Three()
    assert [(await fleet.look()).digest.finished for _ in range(3)] == [2, 4, 6]
    told = await fleet.look(3_600.0)
    assert (told.digest.finished, fleet.finds) == (6, 3)
    assert [row.summary.seq for row in told.rows if row.summary is not None] == [5, 5]
    assert told.missing[0].lies_at == {row.target: ["g2"] for row in told.rows}
    fleet.rows[1].summary = fleet_of(1_000).rows[-1].summary
    assert (await fleet.look(3_600.0)).digest.finished == 11, "a daemon more tells a digest"


@pytest.mark.asyncio
async def test_a_daemon_that_does_not_say_what_it_holds_is_counted_as_it_stands() -> None:
    class Slow(FleetView):
        rows = fleet_of(3).rows

        async def __aexit__(self, *_: object) -> None: ...

        async def refresh(self) -> None:
            self.rows[-1].error = ""
            self.rows[-1].digest.missing.add(1, 5, "evicted")

        async def find(self, hashes: Sequence[int], request: str = "") -> dict[str, list[Located]]:
            self.rows[-1].error = "it did not answer in 2 s"
            return {}

    report = await Slow().look()
    assert report.missing
    assert report.stands["gone"] == sum(row.stands == "gone" for row in report.rows) > 0
    assert report.rows == report_of(report.rows).rows, "those that need a person stand first"


@pytest.mark.asyncio
async def test_a_daemon_that_nobody_asks_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lints, "EVERY_S", 0.0)
    async with daemon_at(LOAD, speed=None) as daemon:
        await published(daemon, lambda: finished(daemon) == 40)
        assert daemon.lints.turns == 0
        async with Fleet([daemon.address]) as fleet:
            (row,) = (await fleet.look()).rows
            assert row.summary is not None
            assert (row.summary.watching, row.summary.digest.prompt_blocks) == (False, 0)
            assert (await fleet.first_look()).digest.finished == 40
        assert daemon.lints.turns
        monkeypatch.setattr(lints, "ASKED_S", 0.0)
        while daemon.lints.turns:  # noqa: ASYNC110  nothing tells that the watch rests
            await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_the_first_figures_are_those_of_the_whole_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lints, "TURN_EVENTS", 64)
    async with daemon_at(LOAD, speed=None) as daemon:
        await published(daemon, lambda: finished(daemon) == 40)
        async with Fleet([daemon.address]) as fleet:
            report = await fleet.first_look()
            assert daemon.lints.turns > 3
            assert (report.digest.finished, report.digest.prompt_blocks) == (
                40, daemon.service.state.totals.prompt_blocks
            )


@pytest.mark.asyncio
async def test_a_daemon_that_answers_another_question_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "find", lambda *_: [Located()])
    async with daemon_at(None) as daemon, Fleet([daemon.address]) as fleet:
        assert await fleet.find([1, 2]) == {}
        assert "something that is not ours" in fleet.rows[0].error


@pytest.mark.asyncio
async def test_a_name_stands_for_all_its_addresses() -> None:
    assert "127.0.0.1:7" in await targets_of("dns:localhost:7")
    for wrong in ("dns:localhost", "dns::7", "dns:localhost:0", "dns:localhost:70000", "dns:localhost:x"):
        with pytest.raises(UsageError, match="TARGET must be dns:HOST:PORT with a port from 1 to 65535"):
            await targets_of(wrong)


def fleet_of(count: int) -> FleetReport:
    words = ["fault", "caution", "held"]
    rows = [
        DaemonRow(f"10.0.{at // 250}.{at % 250}:7", DaemonSummary(
            f"prod-{at:04}-聊天", "kvbm", "x", 1, 1, True, 0, slots={"decoding": at % 9},
            tiers={"g1": (at, 2 * at + 1)},
            problems=[Problem(words[at % 3], "stuck", f"chat-{at}", "rank 3 is silent", "")] if at % 100 < 3 else [],
            digest=Digest(prompt_blocks=10, hits=[at % 10, 0, 0, 0]),
        )) for at in range(count)
    ]
    rows[1] = DaemonRow("10.9.9.9:7", None, "no daemon listens on 10.9.9.9:7")
    report = report_of(rows)
    report.missing = [Elsewhere("ab" * 8, MissedFrom(40, 0, 3, "evicted"), {rows[0].target: ["g2"]})]
    return report


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (40, 8)])
@pytest.mark.parametrize("count", [3, 1_000, 9_000])
def test_every_daemon_has_a_cell_and_the_list_reaches_all(size: tuple[int, int], count: int) -> None:
    desk = FleetDesk()
    assert "asking" in desk.draw(*size)[0].text
    desk.report = fleet_of(count)
    lines = desk.draw(*size)
    assert len(lines) == size[1]
    assert max(line.width for line in lines) <= size[0]
    text = "\n".join(line.text for line in lines)
    assert lines[0].text.split()[2:5] == ["▲", str(fleet_of(count).stands["fault"]), "fault"]
    cells = sum("".join(line.text for line in lines[1:]).count(glyph) for glyph in desk.glyphs.values())
    told = next((int(line.split()[3]) for line in text.splitlines() if line.startswith(" a cell is")), 1)
    assert (cells - 1) * told < count <= cells * told, "the last cell may stand for fewer"
    if size[0] >= 80:
        assert "1 gone" in text
        assert "chat-" in text
        assert ("abababababababab" in text) == (size[1] >= 16)
    for key, at in (("end", count - 1), ("up", count - 2), ("home", 0), ("down", 1)):
        assert desk.press(key) is None
        shown = [line for line in desk.draw(*size) if line.ground == "sel"]
        assert desk.at == at
        assert len(shown) == 1, "the selected daemon is on the screen"


def test_columns_stay_apart_whatever_their_figures() -> None:
    summary = DaemonSummary("one", "kvbm", "x", 7, 1, True, 0, slots={"decoding": 6_810_177}, holds=1_234,
                            tiers={"g1": (5, 10), "g2": (1_234_567, None), "g3": (10**12, None)})
    desk = FleetDesk()
    desk.take(report_of([DaemonRow("one", summary)]))
    (line,) = [line.text for line in desk.draw(120, 24) if line.text.startswith(" one")]
    assert line.split() == ["one", "fine", "–", "50", "%", "1.23M", "1.00T", "6.81M", "1,234"]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_narrowest_screen_is_drawn(width: int) -> None:
    desk = FleetDesk()
    desk.take(fleet_of(30))
    assert len(desk.draw(width, 24)) == 24


def test_a_selected_daemon_stays_selected_wherever_it_stands() -> None:
    def report(*rates: int) -> FleetReport:
        return report_of([
            DaemonRow(f"prod-{at}", DaemonSummary("", "kvbm", "x", 1, 1, True, 0, digest=Digest(10, [rate, 0, 0, 0])))
            for at, rate in enumerate(rates)
        ])

    desk = FleetDesk()
    desk.take(report(1, 2, 3))
    desk.press("down")
    assert (desk.at, desk.selected and desk.selected.target) == (1, "prod-1")
    desk.take(report(1, 4, 3))
    assert (desk.at, desk.selected and desk.selected.target) == (2, "prod-1")
    desk.press("home")
    desk.take(report(5, 2, 3))
    assert (desk.at, desk.selected and desk.selected.target) == (0, "prod-1"), "the first is whoever needs you most"
    desk.press("end")
    desk.take(report(5, 2))
    assert desk.selected is not None


def test_a_problem_is_told_with_its_reason_and_how_many_more_there_are() -> None:
    problems = [Problem("caution", "never_loaded", "G2", "2,074 blocks stored", "0 blocks of them loaded")] * 2
    desk = FleetDesk()
    desk.take(report_of([DaemonRow("x", DaemonSummary("one", "kvbm", "x", 1, 1, True, 0, problems=problems))]))
    for size in ((80, 24), (200, 60)):
        line = next(line.text for line in desk.draw(*size) if " one " in line.text)
        assert "G2  2,074 blocks stored" in line
        assert ("0 blocks of them loaded" in line) == (size[0] == 200)
        assert line.rstrip().endswith("  +1")


@pytest.mark.asyncio
async def test_who_comes_back_from_a_console_finds_what_was_searched_and_selected() -> None:
    desk, targets = FleetDesk(), [f"unix:/nowhere/{at}.sock" for at in range(30)]
    for keys in (("/", "1", "enter", "down"), ()):
        async with Fleet(targets) as fleet:
            app = FleetApp(fleet, desk)
            async with app.run_test(size=(100, 30)) as pilot:
                while not app.looks:
                    await pilot.pause()
                await pilot.press(*keys)
                await pilot.press("enter")
            assert app.return_value is not None
            assert app.return_value.target == "unix:/nowhere/10.sock"


@pytest.mark.asyncio
async def test_a_key_opens_the_console_of_the_daemon_that_was_searched() -> None:
    async with Fleet([f"unix:/nowhere/{at}.sock" for at in range(30)]) as fleet:
        app = FleetApp(fleet)
        async with app.run_test(size=(100, 30)) as pilot:
            while not app.looks:
                await pilot.pause()
            assert "no daemon listens on" in "\n".join(line.text for line in app.canvas.lines)
            await pilot.press("/", "1", "7", ".", "s", "backspace", "enter")
            assert [row.target for row in app.desk.rows] == ["unix:/nowhere/17.sock"]
            await pilot.press("enter")
        assert app.return_value is not None
        assert app.return_value.opens == "unix:/nowhere/17.sock"


@pytest.mark.asyncio
async def test_a_request_is_found_where_it_lives() -> None:
    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(daemon_at(LOAD, speed=0.01, target=f"prod-{at}")) for at in (1, 2)
        ]
        await published(one, lambda: bool(one.service.state.slots))
        request = next(iter(one.service.state.slots.values())).request
        fleet = await stack.enter_async_context(Fleet([one.address, two.address]))
        app = FleetApp(fleet)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("/", *request, "enter")
            while not app.desk.lives_on or not app.looks:
                await pilot.pause()
            holders = {
                target for target, answers in (await fleet.find([], request)).items() if answers[0].slot is not None
            }
            assert app.desk.lives_on.keys() == holders
            assert {row.target for row in app.desk.rows} == holders
            assert f"{request} lives here: slot" in "\n".join(line.text for line in app.canvas.lines)
            await pilot.press("/", "x")
            assert not app.desk.lives_on


def test_a_file_of_targets_and_its_mistakes(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from kvbm_console.cli.main import cli

    listed = tmp_path / "fleet"
    listed.write_text("# ours\n\nunix:/nowhere/a.sock\nunix:/nowhere/b.sock\nunix:/nowhere/a.sock\n")
    done = CliRunner().invoke(cli, ["fleet", f"@{listed}", "--once"], prog_name="kvbm-console")
    assert done.exit_code == 3
    assert "none of the 2 daemons answers; the first: no daemon listens on unix:/nowhere/a.sock" in done.stderr
    listed.write_text("# none\n")
    for words, sentence in (([f"@{listed}"], "no TARGET stands in"), (["@/nowhere/list"], "cannot be read"),
                            (["nonsense"], "TARGET must be unix:PATH or HOST:PORT"),
                            (["unix:/x", "--who-has", ""], "--who-has must be a hash or the name of a request")):
        done = CliRunner().invoke(cli, ["fleet", *words, "--once"], prog_name="kvbm-console")
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert sentence in done.stderr


@pytest.mark.parametrize(("count", "width", "told"), [
    (1, 80, "inference…est-0 G2 G3"), (3, 80, "infere…st-0 G2 G3, +2"),
    (2, 120, "inference-west-0 G2 G3, inference-west-1 G2 G3"),
    (4, 120, "inference-west-0 G2 G3, inference-west-1 G2 G3, +2"),
])
def test_the_places_of_a_block_keep_their_tiers(count: int, width: int, told: str) -> None:
    desk = FleetDesk()
    rows = [DaemonRow(f"inference-west-{at}") for at in range(count)]
    report = report_of(rows)
    report.missing = [Elsewhere("a3f1", MissedFrom(41, 0, 1, "evicted"), {row.target: ["g2", "g3"] for row in rows})]
    desk.take(report)
    (line,) = [line.text for line in desk.draw(width, 24) if line.text.startswith(" a3f1")]
    assert line[58:].rstrip() == told
