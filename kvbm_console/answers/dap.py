"""The Debug Adapter Protocol: an editor debugs requests as it debugs threads.

A slot is a thread. Its stack is its life, the newest state on top, each with its event and cause. Its variables are the
fields of the expression language. ``launch`` with ``recording`` opens a recording, on which one can go back. ``attach``
with ``target`` joins a daemon, where a breakpoint holds one request and the rest goes on.

    Content-Length: 58\\r\\n\\r\\n{"seq":3,"type":"request","command":"threads"}

Law of this file: an answer is made of facts at the place where the debuggee stands, and a mistake is one sentence.
"""

import asyncio
import glob
import os
import re
import select
import stat
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, NoReturn

import anyio
import msgspec

from kvbm_console.addresses import parse_address
from kvbm_console.answers.debuggee import (
    EditorBreakpoint,
    LiveDebuggee,
    RecordedDebuggee,
    Stop,
    data_spec,
    function_spec,
    hold_ns,
)
from kvbm_console.client import Access, Client
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError, UsageError
from kvbm_console.core.expression import SLOT, compile_slot_filter, variables
from kvbm_console.core.expression.closures import value_text
from kvbm_console.core.state import CacheState
from kvbm_console.recording.positions import parse_position, seq_of
from kvbm_console.stream.document import status_document

MESSAGE_BYTES_MAX: Final = 1_000_000
LENGTH: Final = re.compile(r"[0-9]{1,9}")
SLOT_NUMBER: Final = re.compile(r"[0-9]{1,18}")
PATH_SHOWN: Final = 200
"""Characters of a path in a sentence; an editor shows sentences in a small box."""
ENGINE: Final = 1
"""The thread of the engine itself; a slot's thread is its number + 2."""
NOW: Final = -1
FRAMES_MAX: Final = 200
REFERENCES_MAX: Final = 10_000
"""Frames and lists of variables that an editor may ask about at a daemon."""
SNAPSHOT_S: Final = 20.0
"""A daemon answers within a fraction of a second; without an end an adapter whose editor went would wait for ever."""
CAPABILITIES: Final = {
    "supportsConfigurationDoneRequest": True, "supportsFunctionBreakpoints": True,
    "supportsConditionalBreakpoints": True, "supportsHitConditionalBreakpoints": True,
    "supportsDataBreakpoints": True, "supportsStepBack": True, "supportsGotoTargetsRequest": True,
    "supportsEvaluateForHovers": True, "supportsTerminateRequest": True,
}
Body = dict[str, Any]
Debuggee = RecordedDebuggee | LiveDebuggee
MISTAKES: Final = (KvbmConsoleError, OSError, LookupError, ValueError, TypeError, ArithmeticError)
"""Raised for arguments that are missing, have another type or name a file that cannot be read."""


class DebugAdapter:
    """One session with an editor. ``send`` takes each message to it."""

    def __init__(self, send: Callable[[Body], None], who: str) -> None:
        self._send = send
        self._who = who
        self._seq = 0
        self._debuggee: Debuggee | None = None
        self._open = AsyncExitStack()
        self._tasks: Any = None
        self._max_hold_ns = BreakpointSpec().max_hold_ns
        self._functions: list[Body] = []
        self._data: list[Body] = []
        self._references: list[tuple[str, int | None, int]] = []
        self._start_seq: int | None = None
        self._arrived: Stop | None = None
        self._told_end = False
        self.ended = anyio.Event()
        self._does: dict[str, Callable[[Body], Awaitable[Body | None]]] = {
            "initialize": self._initialize, "launch": self._launch, "attach": self._attach,
            "setFunctionBreakpoints": self._set_functions, "setDataBreakpoints": self._set_data,
            "dataBreakpointInfo": self._data_info, "setBreakpoints": self._set_lines,
            "setExceptionBreakpoints": self._nothing, "configurationDone": self._configured, "threads": self._threads,
            "stackTrace": self._stack, "scopes": self._scopes, "variables": self._variables, "source": self._source,
            "evaluate": self._evaluate, "continue": self._continue, "reverseContinue": self._reverse,
            "next": self._stepper("next"), "stepIn": self._stepper("in"), "stepOut": self._stepper("out"),
            "stepBack": self._stepper("back"), "pause": self._pause, "gotoTargets": self._goto_targets,
            "goto": self._goto, "disconnect": self._disconnect, "terminate": self._terminate,
        }

    async def run(self, messages: "asyncio.StreamReader") -> None:
        """Answer requests until the editor goes."""
        # The session closes behind the tasks: inside their scope, which is cancelled, it could not wait for its own.
        async with self._open, anyio.create_task_group() as self._tasks:
            while not self.ended.is_set() and (message := await read_message(messages)) is not None:
                await self.take(message)
            self._tasks.cancel_scope.cancel()

    async def take(self, message: Body) -> None:
        """One request of the editor."""
        command = str(message.get("command"))
        answer: Body = {"type": "response", "request_seq": message.get("seq", 0), "command": command, "success": True}
        try:
            does = self._does.get(command)
            if does is None:
                raise UsageError(f"this adapter has no request {command!r}")
            arguments = message.get("arguments") or {}
            if not isinstance(arguments, dict):
                raise UsageError(f"the arguments of {command} must be an object")
            answer["body"] = await does(arguments) or {}
        except MISTAKES as error:
            why = _sentence(command, error)
            answer |= {"success": False, "message": why, "body": {"error": {"id": 1, "format": why}}}
        self._say(answer)
        if command in ("launch", "attach") and answer["success"]:
            self._event("initialized", {})  # not earlier: only now can breakpoints be set
        stop, self._arrived = self._arrived, None
        if stop is not None:
            self._stopped(stop)

    # --- beginning and end ---

    async def _initialize(self, said: Body) -> Body:
        return dict(CAPABILITIES)

    async def _launch(self, said: Body) -> None:
        self._need_none()
        if not isinstance(said.get("recording"), str):
            raise UsageError("launch needs recording, the path of a recording; attach needs target")
        path = Path(said["recording"])
        debuggee = RecordedDebuggee(path)
        place = said.get("at")
        self._start_seq = debuggee.recording.first_seq if place is None else seq_of(
            debuggee.recording, parse_position(str(place)))
        debuggee.playback.seek(self._start_seq)
        self._debuggee = debuggee

    async def _attach(self, said: Body) -> None:
        self._need_none()
        if not isinstance(said.get("target"), str):
            raise UsageError("attach needs target, unix:PATH or HOST:PORT; launch needs recording")
        self._max_hold_ns = hold_ns(str(said.get("maxHold", "30s")))
        BreakpointSpec(max_hold_ns=self._max_hold_ns)
        files = [None if said.get(name) is None else Path(str(said[name])) for name in ("tlsCa", "tokenFile")]
        address = parse_address(said["target"], _refuse)
        client = await self._open.enter_async_context(Client(address, name=self._who, access=Access.load(*files)))
        session = await self._open.enter_async_context(client.control(self._who, lease=True))
        debuggee = LiveDebuggee(client, session, self._stopped, self._goes_on, self._remark)
        self._tasks.start_soon(self._follow, debuggee)
        with anyio.move_on_after(SNAPSHOT_S):
            await debuggee.ready.wait()
        if not debuggee.ready.is_set():
            self._end()
            raise ConnectionLost(f"{said['target']} sent no snapshot within {SNAPSHOT_S:g} s")
        if self._told_end:
            raise ConnectionLost(f"{said['target']} ended")
        self._debuggee = debuggee

    async def _follow(self, debuggee: LiveDebuggee) -> None:
        try:
            await debuggee.follow()
        except KvbmConsoleError as error:
            self._event("output", {"category": "important", "output": f"{error}\n"})
            self._end()
            debuggee.ready.set()

    async def _configured(self, said: Body) -> None:
        self._need()
        if self._start_seq is not None:
            self._arrived = Stop("entry")

    async def _terminate(self, said: Body) -> None:
        """End the session with the debuggee. The editor answers with ``disconnect``, so the adapter stays for it."""
        debuggee, self._debuggee = self._debuggee, None
        if debuggee is not None:
            await debuggee.close()
        self._end()

    async def _disconnect(self, said: Body) -> None:
        await self._terminate(said)
        self.ended.set()

    def _end(self) -> None:
        if not self._told_end:
            self._told_end = True
            self._event("terminated", {})

    async def _nothing(self, said: Body) -> Body:
        return {"breakpoints": []}

    # --- breakpoints ---

    async def _set_functions(self, said: Body) -> Body:
        self._functions = _objects(said, "breakpoints")
        return {"breakpoints": (await self._set())[: len(self._functions)]}

    async def _set_data(self, said: Body) -> Body:
        self._data = _objects(said, "breakpoints")
        return {"breakpoints": (await self._set())[len(self._functions) :]}

    async def _set_lines(self, said: Body) -> Body:
        why = "a story has no line to stop at; set a function breakpoint on a state or a site"
        return {"breakpoints": [{"verified": False, "message": why} for _ in _objects(said, "breakpoints")]}

    async def _set(self) -> list[Body]:
        """Set all breakpoints of the editor anew; a verdict for each."""
        debuggee, wanted, told = self._need(), list[EditorBreakpoint](), dict[int, Body]()
        # Functions have odd ids and data even ones, so a new list of one kind leaves the ids of the other as they are.
        functions = [(2 * at + 1, self._wanted_function, said) for at, said in enumerate(self._functions)]
        data = [(2 * at + 2, self._wanted_data, said) for at, said in enumerate(self._data)]
        for number, make, said in (*functions, *data):
            told[number] = {"id": number, "verified": True}
            try:
                wanted.append(make(number, said))
            except UsageError as error:
                told[number] |= {"verified": False, "message": str(error)}
        sentences = await debuggee.set_breakpoints(wanted)
        for asked, sentence in zip(wanted, sentences, strict=True):
            if sentence:
                told[asked.number] |= {"verified": False, "message": sentence}
        return list(told.values())

    def _wanted_function(self, number: int, said: Body) -> EditorBreakpoint:
        name, condition, hits = (str(said.get(key) or "") for key in ("name", "condition", "hitCondition"))
        return EditorBreakpoint(number, function_spec(name, condition, hits, self._max_hold_ns))

    def _wanted_data(self, number: int, said: Body) -> EditorBreakpoint:
        known, condition, hits = (str(said.get(key) or "") for key in ("dataId", "condition", "hitCondition"))
        slot, _, field = known.partition(" ")
        name = self._need().chronicle.names.get(int(slot)) if SLOT_NUMBER.fullmatch(slot) else None
        if name is None or field not in SLOT.fields:
            raise UsageError(f"dataId must be an answer of dataBreakpointInfo, got {known[:80]!r}")
        if self._need().live and not condition:
            raise UsageError(f"on a daemon a breakpoint on {field} needs a condition, as '{field} > 100'")
        spec = data_spec(glob.escape(name), condition, hits, self._max_hold_ns)
        return EditorBreakpoint(number, spec, int(slot), field)

    async def _data_info(self, said: Body) -> Body:
        at = int(said.get("variablesReference") or 0) - 1
        name = str(said["name"])
        if not 0 <= at < len(self._references) or name not in SLOT.fields:
            return {"dataId": None, "description": f"{name} is no field of a request"}
        _, slot, _ = self._references[at]
        if slot is None:
            return {"dataId": None, "description": "a breakpoint on data belongs to a request"}
        return {"dataId": f"{slot} {name}", "description": f"{name} of {self._name(slot)}", "accessTypes": ["write"]}

    # --- looking ---

    async def _threads(self, said: Body) -> Body:
        state = self._need().state
        threads = [{"id": ENGINE, "name": f"engine, iteration {state.iteration:,}"}]
        for slot in state.slots.values():
            held = ", held" if slot.hold is not None else ""
            threads.append({"id": slot.slot + 2, "name": f"{slot.request} ({slot.state.label}{held})"})
        return {"threads": threads}

    async def _stack(self, said: Body) -> Body:
        debuggee = self._need()
        thread = int(said["threadId"])
        if thread == ENGINE:
            name = f"event {debuggee.position:,} at {debuggee.state.at_ns / 1e6:.3f} ms"
            return {"stackFrames": [{"id": self._frame(None, self._now()), "name": name, "line": 0, "column": 0}],
                    "totalFrames": 1}
        slot = thread - 2
        story = debuggee.chronicle.story(slot, debuggee.position)
        moves = [(line, row) for line, row in enumerate(story, 1) if row.state is not None][::-1]
        first = max(int(said.get("startFrame") or 0), 0)
        last = first + min(int(said.get("levels") or FRAMES_MAX), FRAMES_MAX)
        source = {"name": f"story of {self._name(slot)}", "sourceReference": slot + 2}
        frames = []
        for at, (line, row) in enumerate(moves[first:last], first):
            seq = self._now() if at == 0 else row.seq
            frames.append({
                "id": self._frame(slot, seq), "line": len(story) if at == 0 else line, "column": 1, "source": source,
                "name": f"{row.state} since {row.at_ns / 1e6:.3f} ms, event {row.seq:,}, by stimulus {row.cause:,}",
            })
        return {"stackFrames": frames, "totalFrames": len(moves)}

    async def _source(self, said: Body) -> Body:
        reference = said.get("sourceReference") or _source_reference(said)
        debuggee = self._need()
        story = debuggee.chronicle.story(int(reference) - 2, debuggee.position)
        lines = [f"{row.seq:>8,}  {row.at_ns / 1e6:>12.3f} ms  {row.kind:<22} {row.text}" for row in story]
        return {"content": "\n".join(lines), "mimeType": "text/plain"}

    async def _scopes(self, said: Body) -> Body:
        slot, seq = self._framed(int(said["frameId"]))
        names = ["tiers"] if slot is None else ["facts", "tiers"]
        return {"scopes": [{"name": name, "variablesReference": self._refer(name, slot, seq), "expensive": False}
                           for name in names]}

    async def _variables(self, said: Body) -> Body:
        at = int(said["variablesReference"]) - 1
        if not 0 <= at < len(self._references) or self._references[at][0] == "frame":
            raise UsageError("these variables belong to an earlier stop")
        name, slot, seq = self._references[at]
        state = self._facts(seq)
        if name == "facts":
            held = None if slot is None else state.slots.get(slot)
            found = [] if held is None else zip(*variables(held, state, None, SLOT), strict=True)
            rows = [(field, text) for field, text in found if not field.startswith("tiers.")]
        else:
            document = status_document(state, at_ns=state.at_ns, incarnation="", subscribers=0, recorder=None)
            rows = [(f"{tier}.{key}", str(value)) for tier, row in document["tiers"].items() if row["capacity_blocks"]
                    for key, value in row.items() if value is not None]
        return {"variables": [{"name": field, "value": text, "variablesReference": 0} for field, text in rows]}

    async def _evaluate(self, said: Body) -> Body:
        text = str(said["expression"]).strip()
        if text.startswith("goto "):
            await self._go(text.removeprefix("goto "))
            return {"result": f"at event {self._need().position:,}", "variablesReference": 0}
        slot, seq = self._framed(int(said["frameId"])) if said.get("frameId") else (None, self._now())
        state = self._facts(seq)
        held = None if slot is None else state.slots.get(slot)
        if held is None:
            raise UsageError("choose a frame of a live request: an expression is about a request")
        field = SLOT.fields.get(text)
        result = value_text(field, field.get(held, state, None)) if field is not None else (
            "yes" if compile_slot_filter(text)(state, held) else "no")
        return {"result": result, "variablesReference": 0}

    # --- going on ---

    async def _continue(self, said: Body) -> Body:
        self._arrived = await self._need().resume(self._slot(said))
        return {"allThreadsContinued": not self._need().live}

    async def _reverse(self, said: Body) -> None:
        self._arrived = await self._need().resume(self._slot(said), back=True)

    def _stepper(self, how: str) -> Callable[[Body], Awaitable[None]]:
        async def step(said: Body) -> None:
            self._arrived = await self._need().step(self._slot(said), how)

        return step

    async def _pause(self, said: Body) -> None:
        if self._need().live:
            raise UsageError("a daemon goes on; a function breakpoint holds one of its requests")
        self._arrived = Stop("pause", self._slot(said))

    async def _goto_targets(self, said: Body) -> Body:
        story = self._need().chronicle.stories.get(_source_reference(said) - 2, [])
        line = int(said["line"])
        if not 1 <= line <= len(story):
            raise UsageError(f"line must be from 1 to {len(story)}, got {line}")
        row = story[line - 1]
        return {"targets": [{"id": row.seq, "label": f"event {row.seq:,}, {row.kind}", "line": line}]}

    async def _goto(self, said: Body) -> None:
        await self._go(str(int(said["targetId"])), self._slot(said))

    async def _go(self, place: str, slot: int | None = None) -> None:
        debuggee = self._need()
        if isinstance(debuggee, LiveDebuggee):
            raise UsageError("a daemon goes forward only; record it, and debug the recording")
        debuggee.playback.seek(seq_of(debuggee.recording, parse_position(place)))
        self._arrived = Stop("goto", slot)

    # --- inside ---

    def _remark(self, sentence: str) -> None:
        self._event("output", {"category": "console", "output": f"{sentence}\n"})

    def _goes_on(self, slot: int) -> None:
        self._event("continued", {"threadId": slot + 2, "allThreadsContinued": False})

    def _stopped(self, stop: Stop) -> None:
        debuggee = self._need()
        if not debuggee.live or len(self._references) > REFERENCES_MAX:
            self._references.clear()  # threads of a daemon stop one by one, and keep their frames
        thread = stop.slot + 2 if stop.slot is not None and stop.slot in debuggee.state.slots else ENGINE
        body: Body = {
            "reason": stop.reason, "threadId": thread,
            "allThreadsStopped": not debuggee.live, "description": stop.text or f"event {debuggee.position:,}",
        }
        if stop.breakpoints:
            body["hitBreakpointIds"] = list(stop.breakpoints)
        self._event("stopped", body)

    def _need(self) -> Debuggee:
        if self._debuggee is None:
            raise UsageError("nothing is debugged yet: launch a recording or attach to a daemon first")
        return self._debuggee

    def _need_none(self) -> None:
        if self._debuggee is not None:
            raise UsageError("this session debugs something already: end it, and begin another")

    def _slot(self, said: Body) -> int | None:
        thread = int(said.get("threadId") or ENGINE)
        return None if thread == ENGINE else thread - 2

    def _name(self, slot: int) -> str:
        return self._need().chronicle.names.get(slot) or f"slot {slot}"

    def _facts(self, seq: int) -> CacheState:
        debuggee = self._need()
        return debuggee.state if seq in (NOW, debuggee.position) else debuggee.facts(seq)

    def _now(self) -> int:
        """The place of the newest frame; a daemon goes on, so its newest frame is as of whenever it is looked at."""
        return NOW if self._need().live else self._need().position

    def _refer(self, name: str, slot: int | None, seq: int) -> int:
        self._references.append((name, slot, seq))
        return len(self._references)

    def _frame(self, slot: int | None, seq: int) -> int:
        return self._refer("frame", slot, seq)

    def _framed(self, frame: int) -> tuple[int | None, int]:
        if not 0 < frame <= len(self._references) or self._references[frame - 1][0] != "frame":
            raise UsageError("this frame belongs to an earlier stop")
        return self._references[frame - 1][1:]

    def _event(self, name: str, body: Body) -> None:
        self._say({"type": "event", "event": name, "body": body})

    def _say(self, message: Body) -> None:
        self._seq += 1
        self._send({"seq": self._seq, **message})


def _refuse(why: str) -> NoReturn:
    raise UsageError(f"target {why}")


def _sentence(command: str, error: Exception) -> str:
    if isinstance(error, KvbmConsoleError):
        return str(error)
    if isinstance(error, OSError):
        return f"{str(error.filename)[:PATH_SHOWN]}: {error.strerror}"
    return f"{command} lacks an argument or has a wrong one: {error}"


def _objects(said: Body, name: str) -> list[Body]:
    found = said.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UsageError(f"{name} must be a list of objects")
    return found


def _source_reference(said: Body) -> int:
    source = said.get("source") or {}
    if not isinstance(source, dict):
        raise UsageError("source must be an object")
    return int(source.get("sourceReference") or 0)


# --- the wire ---


async def read_message(reader: "asyncio.StreamReader") -> Body | None:
    """The next message; None at the end. Raises ``UsageError`` for bytes that are none."""
    length = None
    while line := await _header(reader):
        if line in (b"\r\n", b"\n"):
            if length is None:
                raise UsageError("a message has no Content-Length")
            try:
                message: Body = msgspec.json.decode(await reader.readexactly(length), type=dict[str, Any])
            except (msgspec.DecodeError, asyncio.IncompleteReadError, RecursionError) as error:
                raise UsageError(f"a message is no JSON object: {error}") from None
            return message
        name, _, value = line.decode("latin-1").partition(":")
        if name.strip().lower() == "content-length":
            length = _length(value.strip())
    return None


async def _header(reader: "asyncio.StreamReader") -> bytes:
    try:
        return await reader.readline()
    except ValueError:  # the reader's way to say that a line is longer than its buffer
        raise UsageError("a line of a message's header is too long") from None


def _length(text: str) -> int:
    # Longer numbers are too large, and Python refuses to read those of thousands of digits.
    if not LENGTH.fullmatch(text) or int(text) > MESSAGE_BYTES_MAX:
        raise UsageError(f"Content-Length must be from 0 to {MESSAGE_BYTES_MAX}, got {text[:20]!r}")
    return int(text)


def _write(descriptor: int, data: bytes) -> None:
    """Write everything, and wait for the reader where the pipe is full."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # stdin does not block, and a socket may be stdin and stdout at once
            select.select([], [descriptor], [])


async def serve_stdio(who: str) -> None:
    """A session over stdin and stdout. Raises ``UsageError`` for a stdin from which no editor speaks."""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or sys.stdin.isatty()):
        raise UsageError("stdin must be a pipe or a socket, because an editor starts this command and speaks to it")
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    def send(message: Body) -> None:
        data = msgspec.json.encode(message)
        _write(sys.stdout.fileno(), b"Content-Length: %d\r\n\r\n%s" % (len(data), data))

    await DebugAdapter(send, who).run(reader)
