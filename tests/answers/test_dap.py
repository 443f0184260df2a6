"""An editor debugs requests: on a recording forward and back, on a daemon one request while the rest goes on.

Law of this file: the real program answers over pipes, and what it says is compared with the recording itself.
"""

import asyncio
import json
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.analysis.walk import evidence_of, walk
from kvbm_console.answers.chronicle import Chronicle
from kvbm_console.answers.dap import read_message
from kvbm_console.cases import case_named
from kvbm_console.client import Client
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import SlotMoved
from kvbm_console.core.ids import SlotState
from kvbm_console.recording.reader import Recording
from tests.answers.editor import Editor, Mistake, editor
from tests.cli.programs import PROGRAM
from tests.server.daemons import daemon_at

ROOT = Path(__file__).resolve().parents[2]
STUCK = case_named("stuck-rank").path
CHAT = 7
"""The thread of ``chat.1``, slot 5, in ``stuck-rank``."""


async def launched(ide: Editor, path: str, **more: Any) -> None:
    await ide.ask("initialize", adapterID="kvbm-console")
    await ide.ask("launch", recording=path, **more)
    await ide.event("initialized")


async def frames(ide: Editor, thread: int) -> list[Any]:
    return list((await ide.ask("stackTrace", threadId=thread)).stackFrames)


async def facts(ide: Editor, frame: int) -> dict[str, str]:
    scope = next(one for one in (await ide.ask("scopes", frameId=frame)).scopes if one.name == "facts")
    rows = (await ide.ask("variables", variablesReference=scope.variablesReference)).variables
    return {row.name: row.value for row in rows}


async def position(ide: Editor) -> int:
    (frame,) = await frames(ide, 1)
    return int(frame.name.split()[1].replace(",", ""))


@pytest.mark.asyncio
async def test_a_recording_is_walked_forward_and_back_by_its_breakpoints() -> None:
    events = [event for batch in Recording.open(Path(STUCK)).events() for event in batch]
    loads = [event.seq for event in events if isinstance(event, SlotMoved) and event.new is SlotState.ONBOARDING]
    ends = [event.seq for event in events if isinstance(event, SlotMoved) and event.new is SlotState.FINISHED]
    async with editor() as ide:
        await launched(ide, STUCK)
        (one, two) = (await ide.ask("setFunctionBreakpoints", breakpoints=[
            {"name": "onboarding of chat.*"}, {"name": "nowhere"}])).breakpoints
        assert (one.verified, two.verified) == (True, False)
        assert "a function is a state" in two.message
        await ide.ask("configurationDone")
        assert (await ide.event("stopped")).reason == "entry"
        await ide.ask("continue", threadId=1)
        stop = await ide.event("stopped")
        assert (stop.reason, stop.threadId, stop.hitBreakpointIds) == ("function breakpoint", CHAT, [1])
        assert await position(ide) == loads[0]
        threads = {thread.id: thread.name for thread in (await ide.ask("threads")).threads}
        assert threads[CHAT] == "chat.1 (onboarding)"
        stack = await frames(ide, CHAT)
        assert [frame.name.split()[0] for frame in stack] == ["onboarding", "onboard_staged", "initialized"]
        assert f"event {loads[0]}" in stack[0].name
        assert (await facts(ide, stack[0].id))["tokens.computed"] == "160"
        assert (await facts(ide, stack[2].id))["state"] == "initialized"
        assert (await ide.ask("evaluate", expression="outstanding", frameId=stack[0].id)).result == "1"
        assert (await ide.ask("evaluate", expression="blocks > 100", frameId=stack[0].id)).result == "no"
        await ide.ask("setFunctionBreakpoints", breakpoints=[{"name": "finished", "hitCondition": "2"}])
        await ide.ask("reverseContinue", threadId=CHAT)
        await ide.event("stopped")
        assert await position(ide) == ends[1]
        await ide.ask("reverseContinue", threadId=1)
        assert (await ide.event("stopped")).description == "the beginning of the recording"
        await ide.ask("disconnect")
        await ide.event("terminated")


@pytest.mark.asyncio
async def test_steps_follow_one_request_or_everybody_and_go_back() -> None:
    recording = Recording.open(Path(STUCK))
    async with editor() as ide:
        await launched(ide, STUCK, at="224")
        await ide.ask("configurationDone")
        await ide.event("stopped")
        story = (await ide.ask("source", sourceReference=CHAT)).content.splitlines()
        assert len(story) == 1
        walked = []
        for _ in range(6):
            await ide.ask("next", threadId=CHAT)
            await ide.event("stopped")
            walked.append(await position(ide))
        assert walked == [225, 226, 227, 229, 230, 231]  # 228 is about another request's blocks
        await ide.ask("stepBack", threadId=CHAT)
        await ide.event("stopped")
        assert await position(ide) == 230
        await ide.ask("stepOut", threadId=CHAT)
        await ide.event("stopped")
        assert await position(ide) == 232
        await ide.ask("stepIn", threadId=CHAT)
        await ide.event("stopped")
        assert await position(ide) == 233
        lines = (await ide.ask("source", sourceReference=CHAT)).content.splitlines()
        (target,) = (await ide.ask("gotoTargets", source={"sourceReference": CHAT}, line=len(lines)))["targets"]
        assert "CandidateEnqueued" in target["label"]
        await ide.ask("goto", threadId=CHAT, targetId=target["id"])
        assert (await ide.event("stopped")).reason == "goto"
        await ide.ask("evaluate", expression="goto end", context="repl")
        await ide.event("stopped")
        assert await position(ide) == recording.last_seq


@pytest.mark.asyncio
async def test_a_breakpoint_on_data_stops_where_the_value_changes() -> None:
    path = str(ROOT / "recordings" / "preempt-and-resume.mcap")
    async with editor() as ide:
        await launched(ide, path, at="40")
        await ide.ask("configurationDone")
        await ide.event("stopped")
        thread = next(one.id for one in (await ide.ask("threads")).threads if one.name.startswith("long-b"))
        stack = await frames(ide, thread)
        (scope, *_) = (await ide.ask("scopes", frameId=stack[0].id)).scopes
        found = await ide.ask("dataBreakpointInfo", variablesReference=scope.variablesReference, name="preemptions")
        assert found.description == "preemptions of long-b"
        (set_,) = (await ide.ask("setDataBreakpoints", breakpoints=[{"dataId": found.dataId}])).breakpoints
        assert set_.verified
        await ide.ask("continue", threadId=thread)
        stop = await ide.event("stopped")
        assert (stop.reason, stop.threadId) == ("data breakpoint", thread)
        assert stop.description == "preemptions of long-b: 0 to 1"
        event = next(event for batch in Recording.open(Path(path)).events(await position(ide)) for event in batch)
        assert isinstance(event, SlotMoved)
        assert event.new is SlotState.PREEMPTED


@pytest.mark.asyncio
async def test_a_daemon_holds_one_request_for_the_editor_and_no_longer() -> None:
    async with daemon_at("multiturn:sessions=6", speed=1.0) as daemon, editor() as ide:
        await ide.ask("initialize", adapterID="kvbm-console")
        await ide.ask("attach", target=daemon.address, maxHold="20s")
        (set_,) = (await ide.ask("setFunctionBreakpoints", breakpoints=[{"name": "decoding"}])).breakpoints
        assert set_.verified
        await ide.ask("configurationDone")
        stop = await ide.event("stopped")
        assert (stop.reason, stop.allThreadsStopped, stop.hitBreakpointIds) == ("function breakpoint", False, [1])
        async with Client(daemon.address) as client:
            held = (await client.status())["holds"]
            assert str(stop.threadId - 2) in {one["slot"] for one in held}
            assert all(one["deadline_ns"] - one["since_ns"] == 20 * 10**9 for one in held)
            stack = await frames(ide, stop.threadId)
            assert (await facts(ide, stack[0].id))["held"] == "yes"
            await ide.ask("setFunctionBreakpoints", breakpoints=[])
            await ide.ask("next", threadId=stop.threadId)
            again = await ide.event("stopped")
            assert again.threadId >= 2
            with pytest.raises(Mistake, match="a daemon goes forward only"):
                await ide.ask("stepBack", threadId=stop.threadId)
            await ide.ask("continue", threadId=again.threadId)
            await ide.ask("disconnect")
            await ide.event("terminated")
            status = await client.status()
            assert [one for one in status["breakpoints"] if one["enabled"]] == []


def test_the_examples_of_the_document_are_of_this_adapter() -> None:
    text = (ROOT / "docs" / "editors.md").read_text(encoding="utf-8")
    launch, extension = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL))
    source = (ROOT / "kvbm_console" / "answers" / "dap.py").read_text(encoding="utf-8")
    for one in launch["configurations"]:
        assert not [key for key in one.keys() - {"type", "request", "name"} if f'"{key}"' not in source]
    (contributed,) = extension["contributes"]["debuggers"]
    assert (contributed["program"], contributed["args"]) == ("kvbm-console", ["dap"])
    assert {one["type"] for one in launch["configurations"]} == {contributed["type"]}


@pytest.mark.asyncio
async def test_mistakes_are_sentences(tmp_path: Path) -> None:
    async with editor() as ide:
        for said, command, arguments in (
            ("nothing is debugged yet", "threads", {}), ("launch needs recording", "launch", {}),
            ("attach needs target", "attach", {}),
            ("does not exist", "launch", {"recording": str(tmp_path / "x.mcap")}),
            ("no daemon listens", "attach", {"target": f"unix:{tmp_path}/x.sock"}),
            ("maxHold must be seconds", "attach", {"target": f"unix:{tmp_path}/x.sock", "maxHold": "long"}),
            ("this adapter has no request 'fly'", "fly", {}),
        ):
            with pytest.raises(Mistake, match=said):
                await ide.ask(command, **arguments)
        await ide.ask("launch", recording=STUCK)
        for said, command, arguments in (
            ("stackTrace lacks an argument or has a wrong one: 'threadId'", "stackTrace", {}),
            ("breakpoints must be a list of objects", "setFunctionBreakpoints", {"breakpoints": [None]}),
            ("breakpoints must be a list of objects", "setBreakpoints", {"breakpoints": "all"}),
            ("source must be an object", "source", {"source": "story"}),
            ("this session debugs something already", "launch", {"recording": STUCK}),
            ("this session debugs something already", "attach", {"target": f"unix:{tmp_path}/x.sock"}),
        ):
            with pytest.raises(Mistake, match=said):
                await ide.ask(command, **arguments)
        assert await ide.hang_up() == (0, "")
    async with editor() as ide:
        with pytest.raises(Mistake, match="xxx: File name too long"):
            await ide.ask("launch", recording="x" * 5000)


@pytest.mark.asyncio
@pytest.mark.parametrize("data", [b"\r\n", b"Content-Length: 9999999\r\n\r\n", b"Content-Length: 3\r\n\r\n{}",
                                  b"Content-Length: 2\r\n\r\n[]", b"Content-Length: -5\r\n\r\n",
                                  b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", b"x" * 70_000 + b"\r\n\r\n",
                                  b'Content-Length: 400005\r\n\r\n{"a":' + b"[" * 200_000 + b"]" * 199_999 + b"}"])
async def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    with pytest.raises(UsageError):
        await read_message(reader)


@pytest.mark.parametrize(("said", "stdin"), [
    ("a message is no JSON object", b"Content-Length: 3\r\n\r\n{a}"), ("stdin must be a pipe or a socket", None)])
def test_a_peer_that_is_no_editor_is_told_so_in_one_sentence(said: str, stdin: bytes | None) -> None:
    source = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    done = subprocess.run([PROGRAM, "dap"], capture_output=True, timeout=60, check=False, **source)  # type: ignore[call-overload]
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().startswith(f"kvbm-console: {said}")
    assert done.stderr.count(b"\n") == 1


def test_a_socket_that_is_stdin_and_stdout_takes_long_answers() -> None:
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen([PROGRAM, "dap"], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE) as process:
        theirs.close()
        ours.settimeout(60)
        body = json.dumps({"seq": 1, "type": "request", "command": "x" * 900_000}).encode()
        ours.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        with ours.makefile("rb") as answers:
            length = int(answers.readline().split(b":")[1])
            answers.readline()
            assert json.loads(answers.read(length))["success"] is False
        ours.shutdown(socket.SHUT_WR)
        assert process.communicate(timeout=60) == (None, b"")


@pytest.mark.asyncio
async def test_an_editor_is_asked_for_breakpoints_when_they_can_be_set() -> None:
    async with editor() as ide:
        await ide.ask("initialize", adapterID="kvbm-console")
        with pytest.raises(Mistake, match="nothing is debugged yet"):
            await ide.ask("setFunctionBreakpoints", breakpoints=[{"name": "decoding"}])
        assert ide.unread == []
        await ide.ask("launch", recording=STUCK)
        await ide.event("initialized")
        await ide.ask("terminate")
        assert ide.unread == ["terminated"]
        await ide.ask("disconnect")  # the editor's answer to the end of the debuggee
        assert ide.unread == ["terminated"]


@pytest.mark.asyncio
async def test_breakpoints_of_both_kinds_keep_their_ids_and_stop_together() -> None:
    async with editor() as ide:
        await launched(ide, STUCK, at="224")
        await ide.ask("configurationDone")
        await ide.event("stopped")
        data = {"dataId": f"{CHAT - 2} state"}
        (changes,) = (await ide.ask("setDataBreakpoints", breakpoints=[data])).breakpoints
        (loads,) = (await ide.ask("setFunctionBreakpoints", breakpoints=[{"name": "onboarding of chat.*"}])).breakpoints
        assert changes.id != loads.id
        hits = []
        while not hits or "end of the recording" not in hits[-1].description:
            await ide.ask("continue", threadId=CHAT)
            hits.append(await ide.event("stopped"))
        assert {tuple(hit.hitBreakpointIds) for hit in hits[:-1]} == {(changes.id,), (loads.id, changes.id)}
        moves = [hit.description for hit in hits if hit.hitBreakpointIds and changes.id in hit.hitBreakpointIds]
        await ide.ask("setFunctionBreakpoints", breakpoints=[])
        await ide.ask("setDataBreakpoints", breakpoints=[{**data, "hitCondition": "2"}])
        await ide.ask("reverseContinue", threadId=CHAT)
        assert (await ide.event("stopped")).description == moves[1].split("; ")[-1]
        await ide.ask("reverseContinue", threadId=CHAT)
        assert "the beginning" in (await ide.event("stopped")).description
        for wrong in ("5", "5 nothing", "99999 state", "x state"):
            (told,) = (await ide.ask("setDataBreakpoints", breakpoints=[{"dataId": wrong}])).breakpoints
            assert not told.verified
            assert "dataId must be an answer of dataBreakpointInfo" in told.message
        (told,) = (await ide.ask("setDataBreakpoints", breakpoints=[{**data, "hitCondition": "often"}])).breakpoints
        assert not told.verified


@pytest.mark.asyncio
async def test_as_many_frames_are_told_as_were_asked_for() -> None:
    async with editor() as ide:
        await launched(ide, STUCK, at="end")
        whole = await frames(ide, CHAT)
        part = await ide.ask("stackTrace", threadId=CHAT, startFrame=1, levels=1)
        assert [frame.name for frame in part.stackFrames] == [whole[1].name]
        assert part.totalFrames == len(whole)
        with pytest.raises(Mistake, match="these variables belong to an earlier stop"):
            await ide.ask("variables", variablesReference=part.stackFrames[0].id)


@pytest.mark.asyncio
async def test_an_editor_hears_that_a_hold_ended_and_may_go_without_a_word() -> None:
    async with daemon_at("multiturn:sessions=6", speed=1.0) as daemon, editor() as ide:
        await ide.ask("initialize", adapterID="kvbm-console")
        await ide.ask("attach", target=daemon.address, maxHold="1s")
        await ide.ask("setFunctionBreakpoints", breakpoints=[{"name": "decoding", "hitCondition": "1"}])
        stop = await ide.event("stopped")
        goes_on = await ide.event("continued")
        assert (goes_on.threadId, goes_on.allThreadsContinued) == (stop.threadId, False)
        await ide.ask("setFunctionBreakpoints", breakpoints=[{"name": "decoding"}])
        await ide.event("stopped")
        assert await ide.hang_up() == (0, "")


@pytest.mark.asyncio
async def test_two_editors_at_a_daemon_stop_at_a_hold_of_both_and_leave_each_others_breakpoints() -> None:
    async with daemon_at("multiturn:sessions=6", speed=1.0) as daemon, editor() as one, editor() as two, \
            Client(daemon.address) as client:
        for ide in (one, two):
            await ide.ask("initialize", adapterID="kvbm-console")
            await ide.ask("attach", target=daemon.address, maxHold="20s")
            await ide.ask("setFunctionBreakpoints", breakpoints=[{"name": "decoding"}])
        stops = {ide: await ide.event("stopped") for ide in (one, two)}
        both = next(hold for hold in (await client.status())["holds"] if hold["slot"] == str(stops[two].threadId - 2))
        assert len(both["breakpoints"]) == 2
        assert [stop.hitBreakpointIds for stop in stops.values()] == [[1], [1]]
        await two.ask("continue", threadId=stops[two].threadId)
        assert (await one.event("continued")).threadId == stops[two].threadId
        assert await two.hang_up() == (0, "")
        left = [found for found in (await client.status())["breakpoints"] if found["enabled"]]
        assert len(left) == 1
        await one.event("stopped")


@pytest.mark.asyncio
async def test_an_editor_hears_why_a_breakpoint_does_not_hold() -> None:
    async with daemon_at("multiturn:sessions=6", speed=1.0) as daemon, editor() as ide:
        await ide.ask("initialize", adapterID="kvbm-console")
        await ide.ask("attach", target=daemon.address)
        await ide.ask("setFunctionBreakpoints", breakpoints=[{"name": "finished"}])
        said = await ide.event("output")
        assert said.output.endswith("at transition.did and does not hold: a finished slot cannot wait\n")
        await ide.ask("setFunctionBreakpoints", breakpoints=[{"name": "decoding"}])
        await ide.event("stopped")
        assert ide.unread.count("output") == 0


def test_a_chronicle_of_a_daemon_keeps_the_stories_of_the_last_requests() -> None:
    recording = Recording.open(Path(STUCK))
    whole, kept = Chronicle(), Chronicle(ended_max=1)
    state = walk(evidence_of(recording), (whole, kept))
    assert state is not None
    ended = [slot for slot in whole.stories if slot not in state.slots]
    assert len(ended) > 3
    assert not kept.seqs
    assert kept.stories.keys() == kept.names.keys()
    assert len(kept.stories) <= len(state.slots) + 3
    assert all(whole.stories[slot] == story for slot, story in kept.stories.items())
    assert state.slots.keys() & whole.stories.keys() <= kept.stories.keys()
