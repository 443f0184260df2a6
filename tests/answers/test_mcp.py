"""The tools for agents: each case is solved in a few small answers, and a daemon is held only by who may.

Law of this file: the protocol is spoken by the official client, in this process, over pipes and over HTTP.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from mcp import Client, StdioServerParameters

from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.answers import pages
from kvbm_console.answers.control import LiveControl
from kvbm_console.answers.mcp import QUESTIONS, REPLAYS, VERBS, server_of
from kvbm_console.answers.source import LiveSource, RecordingSource
from kvbm_console.cases import RecordedCase, all_cases, case_named
from kvbm_console.cli.main import cli
from kvbm_console.client import Access
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import Event, SlotOpened
from kvbm_console.recording.reader import Recording
from recordings import case_scenarios
from tests.answers.solver import rows, solve
from tests.cli.programs import PROGRAM
from tests.server.daemons import daemon_at

ROOT = Path(__file__).resolve().parents[2]
CALLS_MAX = 8
TOKENS_MAX = 2_000


class Tools:
    """Calls tools over a client, and counts."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.calls = 0
        self.longest = 0

    async def __call__(self, name: str, **arguments: Any) -> dict[str, Any]:
        self.calls += 1
        result = await self._client.call_tool(name, arguments)
        (content,) = result.content
        assert content.type == "text"
        assert not result.is_error, content.text
        self.longest = max(self.longest, pages.tokens_at_most(content.text))
        answer: dict[str, Any] = json.loads(content.text)
        return answer


async def refused(client: Client, name: str, **arguments: Any) -> str:
    """The sentence with which a tool refuses."""
    result = await client.call_tool(name, arguments)
    assert result.is_error
    (content,) = result.content
    assert content.type == "text"
    return content.text


def recorded(path: str) -> Any:
    return server_of(RecordingSource(Path(path)), None, None, "test")


@pytest.mark.asyncio
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
async def test_a_script_without_a_model_finds_the_deciding_event(case: RecordedCase) -> None:
    async with Client(recorded(case.path)) as client:
        call = Tools(client)
        assert await solve(case.question, call) == case.event.seq
        assert call.calls <= CALLS_MAX
        assert call.longest <= TOKENS_MAX


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "question", "decides"), [
    ("stuck-slot", "agent-0093 never ends. Which part never answered?", case_scenarios.never_reported),
    ("gap", "Is this recording whole?", case_scenarios.before_the_gap),
    ("offload-pressure", "chat.1 was gone from host memory. Which event took it?", case_scenarios.evicted(True)),
    ("failed-load", "Why was chat.1 computed again?", case_scenarios.failed_report),
    ("onboard-from-host", "Why did nobody wait?", None),
])
async def test_the_same_script_finds_it_in_recordings_that_are_no_case(
    name: str, question: str, decides: Callable[[list[Event]], Event] | None
) -> None:
    path = ROOT / "recordings" / f"{name}.mcap"
    events = [event for batch in Recording.open(path).events() for event in batch]
    async with Client(recorded(str(path))) as client:
        call = Tools(client)
        assert await solve(question, call) == (None if decides is None else decides(events).seq)
        assert call.calls <= CALLS_MAX


@pytest.mark.asyncio
async def test_every_answer_is_small_pages_on_and_names_its_place() -> None:
    path = case_named("prefetch-waste").path
    async with Client(recorded(path)) as client:
        call = Tools(client)
        found: list[int] = []
        answer = await call("events")
        while True:
            assert {"seq", "at_ms", "total"} <= answer.keys()
            found += [row["seq"] for row in rows(answer)]
            if "next_offset" not in answer:
                break
            answer = await call("events", offset=answer["next_offset"])
        opened = RecordingSource(Path(path)).run
        assert found == opened.events["seq"].to_pylist()
        for name in ("overview", "doctor", "slots", "tiers"):
            assert {"seq", "at_ms"} <= (await call(name)).keys()
        assert (await call("overview", at="1000"))["seq"] == 1000
        assert call.longest <= TOKENS_MAX


def test_a_page_holds_at_least_a_row_however_long_its_names_are() -> None:
    row = ["n" * 256, *(["☃" * 2_000] * 10)]
    page = pages.paged({"seq": 1}, [str(at) for at in range(11)], [row] * 3, 1)
    assert len(page["rows"]) == 1
    assert page["next_offset"] == 2
    with pytest.raises(UsageError, match="offset must be from 0 to 3, got 4"):
        pages.paged({}, (), [row] * 3, 4)


@pytest.mark.asyncio
async def test_a_wrong_question_is_one_sentence() -> None:
    async with Client(recorded(case_named("stuck-rank").path)) as client:
        assert "has no request 'nobody'" in await refused(client, "story", request="nobody")
        wrong = await refused(client, "when", expression="stat = 1")
        assert "a slot has no field `stat`; the nearest is `state`" in wrong
        assert "not 'yesterday'" in await refused(client, "events", first="yesterday")
        assert "offset must be from 0 to" in await refused(client, "doctor", offset=9)
        assert {tool.name for tool in (await client.list_tools()).tools} == set(QUESTIONS) | set(REPLAYS)


@pytest.mark.asyncio
async def test_a_recording_is_run_again_for_a_remedy_and_for_the_curve() -> None:
    """The remedy is that of ``why --what-if``, and the curve reaches what an unbounded cache finds."""
    path = case_named("tier-too-small").path
    async with Client(recorded(path)) as client:
        call = Tools(client)
        answer = await call("what_if", request="chat.1")
        told = json.loads(CliRunner().invoke(cli, ["why", "chat.1", path, "--what-if", "--format", "json"]).stdout)
        assert [row["flags"] for row in rows(answer)] == [
            remedy["flags"] for trouble in told["troubles"] for remedy in trouble["remedies"]]
        assert any(row["flags"].startswith("--kv-cpu-blocks") for row in rows(answer))
        assert answer["seq"] == told["troubles"][0]["inevitable_seq"]
        curve = await call("curve")
        found = rows(curve)
        assert found[0]["hit_rate"] < found[-1]["hit_rate"] == curve["most"]
        assert found[-1]["blocks"] >= curve["enough_blocks"] > curve["capacities_now"]["G2"]
        assert call.longest <= TOKENS_MAX


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["preempt-and-resume", "failed-load"])
async def test_the_rate_beside_the_curve_is_that_of_its_requests(name: str) -> None:
    path = ROOT / "recordings" / f"{name}.mcap"
    evidence = evidence_of(Recording.open(path))
    opened = [event for item in evidence.items() for event in getattr(item, "events", ())
              if isinstance(event, SlotOpened)]
    hits = asked = preempted = 0
    for event in opened[len(opened) // 2 :]:
        first, *again = explain(evidence, event.request).admissions
        hits, preempted = hits + sum(first.hits), preempted + len(again)
        asked += (event.prompt_tokens - 1) // 16
    assert preempted or name != "preempt-and-resume"
    async with Client(recorded(str(path))) as client:
        curve = await Tools(client)("curve")
    assert curve["measured_hit_rate"] == round(hits / asked, 4)


@pytest.mark.asyncio
async def test_two_recordings_are_compared() -> None:
    server = server_of(
        RecordingSource(ROOT / "recordings" / "offload-pressure.mcap"),
        RecordingSource(ROOT / "recordings" / "two-hosts.mcap"), None, "test",
    )
    async with Client(server) as client:
        answer = await Tools(client)("diff")
        assert answer["equal"] is False
        assert answer["first"]["seq_a"] == answer["seq"] > 0


@pytest.mark.asyncio
async def test_a_daemon_is_debugged_by_tools_of_control() -> None:
    async with daemon_at("multiturn:sessions=4", speed=1.0) as daemon:
        source = LiveSource(daemon.address, Access(), "agent")
        server = server_of(source, None, LiveControl(source, "agent"), "test")
        async with Client(server) as client:
            call = Tools(client)
            assert {tool.name for tool in (await client.list_tools()).tools} == set(QUESTIONS) | set(VERBS)
            set_ = await call("break_set", to_state="decoding", max_hold_s=20, once=True)
            assert set_["verified"]
            (held,) = rows(await call("holds", wait_s=20))
            assert held["breakpoints"] == [set_["id"]]
            overview = await call("overview")
            assert overview["live"] is True
            assert overview["holds"] == 1
            (finding,) = [row for row in rows(await call("doctor")) if row["lint"] == "held"]
            assert finding["request"] == held["request"]
            assert rows(await call("story", request=held["request"]))[-1]["seq"] > 0
            assert (await call("continue_hold", hold=int(held["hold"])))["done"] == "continued"
            assert (await call("break_clear", breakpoint=int(set_["id"])))["done"]
            assert rows(await call("break_list")) == []
            assert "would hold every request" in await refused(client, "break_set")
            assert "to_state must be one of" in await refused(client, "break_set", to_state="x")
            assert "needs a recording" in await refused(client, "slots", at="3")
            assert "wait_s must be from 0 to 30" in await refused(client, "holds", wait_s=31)


@pytest.mark.asyncio
async def test_a_client_starts_the_program_over_pipes() -> None:
    case = case_named("failed-load")
    started = StdioServerParameters(command=PROGRAM, args=["mcp", case.path])
    async with Client(started) as client:
        call = Tools(client)
        assert await solve(case.question, call) == case.event.seq


@contextmanager
def over_http(*words: str) -> Iterator[str]:
    """The address of the program serving HTTP."""
    process = subprocess.Popen([PROGRAM, "mcp", *words, "--http", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield process.stderr.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.asyncio
async def test_the_same_tools_are_served_over_http_on_this_machine() -> None:
    case = case_named("corrupt-read")
    with over_http(case.path) as address:
        async with Client(address) as client:
            assert await solve(case.question, Tools(client)) == case.event.seq


def test_the_document_lists_every_tool() -> None:
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    assert not [name for name in (*QUESTIONS, *REPLAYS, "diff", *VERBS) if f"`{name}`" not in text]


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    def told(*words: str) -> str:
        done = CliRunner().invoke(cli, ["mcp", *words], prog_name="kvbm-console")
        assert done.exit_code in (2, 3)
        return done.stderr

    path = case_named("stuck-rank").path
    assert "--http must be 127.0.0.1:PORT" in told(path, "--http", "0.0.0.0:80")
    assert "--control and --target go with a daemon" in told(path, "--control")
    assert "no daemon" in told(f"unix:{tmp_path}/none.sock")
