"""Names from outside that would steer a terminal: whatever a command prints, they stay text on their line.

Law of this file: every printed line is printable, no name begins a line of its own, and JSON keeps the name whole.
"""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from kvbm_console.client import Client
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import Authority, Site, Tier
from kvbm_console.core.printable import json_text, safe
from kvbm_console.metrics.exposition import Family, render
from kvbm_console.stream.verbs import SetBreakpoint
from tests.cli.programs import run, serving
from tui.canvas import Canvas
from tui.draw.spans import Row
from tui.theme import Theme

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
HOSTILE = "\x1b]0;PWNED\x07\x1b[31m\x9b2J\u202egnp\u2066\nFORGED line\r\x00\u200b\x85\x08\x7f\U000e0001"
COMMANDS = (
    ["status"], ["tail", "--since", "0", "--count", "12"], ["break", "list"], ["holds"], ["doctor"], ["why", HOSTILE],
    ["explain-nothing\x1b[2J"],
)
ON_FILES = (["why", HOSTILE], ["doctor"], ["rec", "info"], ["rec", "verify"], ["rec", "merge", "."],
            ["rec", "export", "--to", "jsonl"])


async def hostile_engine(target: str) -> None:
    """An engine, a pool, requests, a session and breakpoints of hostile names; what they leave stays in the facts."""
    async with (
        Client(target) as client, client.feed(HOSTILE) as engine, client.control("shell", lease=False) as shell,
    ):
        await engine.submit(st.PoolDeclared, 0, 0, Tier.G1, HOSTILE, 24, 16, Authority.ENGINE)
        for number, request in enumerate((HOSTILE, HOSTILE + "2")):
            spec = BreakpointSpec(site=Site.TRANSITION_DID, request=request, name=HOSTILE[:40], max_hold_ns=10**11)
            await shell.ask(SetBreakpoint(spec))
            await engine.submit(st.RequestArrived, request, pack_hashes([number + 1, 50]), 40, 8, 0, HOSTILE)
            await engine.submit(st.MatchRequested, request, 0)
        await engine.tell_cost(1, 1, 1, 1, 1, 0)
        await asyncio.to_thread(looked_at, Path(target.removeprefix("unix:")).parents[1])


def looked_at(directory: Path) -> None:
    """Every command, as text and as JSON."""
    for command in COMMANDS:
        check(command, run(directory, *(part.replace("\0", "") for part in command)).stdout)
    documents = [
        json.loads(run(directory, *command, "--format", "json").stdout) for command in (["status"], ["break", "list"])
    ]
    assert documents[0]["slots"][0]["request"] == HOSTILE
    assert documents[1][0]["request"] == HOSTILE


def check(command: list[str], text: str) -> None:
    assert "PWNED" in text or command[0] not in ("status", "tail", "break", "holds"), f"{command} shows no name"
    for line in text.split("\n"):
        assert line.isprintable(), f"{command}: {line!r}"
        assert not line.startswith("FORGED"), command


def test_no_command_lets_a_name_steer_the_terminal(tmp_path: Path) -> None:
    with serving(tmp_path, "--record", "rec") as daemon:
        target = next(tmp_path.rglob("*.sock"))
        asyncio.run(hostile_engine(f"unix:{target}"))
        daemon.process.terminate()
        daemon.process.wait(20)
    for command in ON_FILES:
        words = [part.replace("\0", "") for part in command]
        at = 1 if words[0] != "rec" else 2
        done = run(tmp_path, *words[:at], *(["rec", "rec"] if words[-1] == "." else [*words[at:], "rec"]))
        check(["on a file", *command], done.stdout + done.stderr)
    run(tmp_path, "rec", "export", "rec", "--to", "chrome", "--out", "trace.json")
    trace = (tmp_path / "trace.json").read_text()
    check(["a trace"], trace)
    assert HOSTILE in {row["args"].get("name") for row in json.loads(trace)["traceEvents"] if row["ph"] == "M"}


@pytest.mark.parametrize("text", [HOSTILE, "plain", "naïve – 日本"])
def test_what_is_written_for_people_and_programs(text: str) -> None:
    assert safe(text).isprintable()
    assert len(safe(text)) == len(text)
    assert json_text({"name": text}).isprintable()
    assert json.loads(json_text({"name": text})) == {"name": text}
    family = Family("kvbm_x", "help")
    family.add(1, {"engine": text})
    assert all(line.isprintable() for line in render([family]).split("\n"))


@pytest.mark.parametrize("words", [
    ("rec", "info"), ("rec", "verify"), ("doctor",), ("rec", "info", "--format", "json"),
    ("rec", "verify", "--format", "json"), ("doctor", "--format", "json"),
])
def test_a_file_whose_name_is_no_utf_8_is_read_as_any_other(tmp_path: Path, words: tuple[str, ...]) -> None:
    name = os.fsdecode(b"a\xff.mcap")
    shutil.copy(RECORDINGS / "reset.mcap", tmp_path / name)
    done = run(tmp_path, *words, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("\n", "").isprintable()
    if "json" in words:
        assert name in json.dumps(json.loads(done.stdout), ensure_ascii=False)


def test_an_address_that_is_no_utf_8_is_refused_in_a_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, "status", os.fsdecode(b"./a\xff.sock"))
    assert done.returncode == 2
    assert "must be UTF-8" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_row_of_the_console_is_text_whatever_a_view_put_there() -> None:
    canvas = Canvas(Theme("dark"))
    row = canvas.row(Row().put(HOSTILE, "text").line(), 80)
    assert "PWNED" in row
    for hostile in ("\x1b]", "\x07", "\x9b", "\u202e", "\n", "\r", "\0"):
        assert hostile not in row
    strip = canvas._strip(Row().put(HOSTILE, "text").line(), 80)
    assert all(segment.text.isprintable() for segment in strip)
