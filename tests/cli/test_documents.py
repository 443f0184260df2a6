"""The JSON of every command, run for real, has exactly the keys and kinds of values of its type (``JSON.md``).

Law of this file: the commands come from the click tree; a command without a call here fails.
"""

import json
import shlex
import signal
import subprocess
import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import pytest
from click.testing import CliRunner

from kvbm_console.cli import documents
from kvbm_console.cli.main import cli
from tests.cli.programs import DEADLINE_S, PROGRAM, environment
from tests.cli.test_targets import _one_loop, serving_on  # noqa: F401
from tests.cli.tree import leaves
from tests.engines.payloads import stored
from tests.engines.test_dynamo import written
from tests.engines.test_zmq_source import Engine

ROOT: Final = Path(__file__).resolve().parents[2]
TAPES: Final = ROOT / "recordings"
TAPE: Final = str(TAPES / "thrash.mcap")
CHATS: Final = "multiturn:requests=12,sessions=3"
FILES: Final[dict[str, str]] = {
    "replay": f"{TAPES}/breakpoint-hold.mcap --at 200", "break test": f"--to onboarding --on {TAPES}/thrash.mcap",
    "rec info": f"{TAPES}/gap.mcap", "rec verify": TAPE, "rec cut": f"{TAPE} cut.mcap --from 5",
    "rec merge": f"{TAPE} {TAPES}/gap.mcap --out merged.mcap", "rec diff": f"{TAPE} {TAPES}/gap.mcap",
    "rec export": f"{TAPE} --to jsonl --out events.jsonl", "rec recover": "left", "rec index": "left",
    "rec import dynamo": "records.jsonl --out dynamo.mcap --block-tokens 16",
    "rec import kv-events": f"{TAPES}/kv-events/multiturn.bin --out frames.mcap",
    "rec capture": "zmq://127.0.0.1:1 --out captured --seconds 0.2",
    "compare": f"--trace {CHATS} --total-kv-blocks 40 --workers 1 --policies simple_lru,lfu,belady "
               "--per-request simple_lru lfu",
    "plan": "multiturn:requests=64,sessions=8 --total-kv-blocks 200 --workers 1 --target-hit 99% --check",
    "calibrate": f"{TAPES}/local-only.mcap", "bench links": "--for 200ms",
    "explore leader": "--seeds 0:2 --profile press --workers 1 --fault swapped-blocks --out found-leader",
    "explore vllm": f"--python {ROOT}/tests/explore/fake_engine.py --seeds 0:4 --profile press --workers 1 --out found",
    "why": f"chat-0.0 {TAPE}", "doctor": f"{TAPES}/stuck-slot.mcap",
    "conform": f"{TAPES}/kv-events/offload_arc_placeholder.bin", "config init": "", "config show": "",
    "case": "stuck-rank", "lake add": f"{TAPES}/stuck-slot.mcap --lake lake", "lake ask": "lake hit-rate",
    "demo": "--seconds 1 --speed max", "serve": "--workload multiturn:requests=5 --speed max --exit-when-done "
                                               "--record served --listen unix:served.sock",
}
"""Command to its arguments, for those that talk to no daemon."""
LIVE: Final[list[tuple[str, str]]] = [
    ("status", ""), ("break set", "--to onboarding --max-hold 100s --wait 60s"), ("status", ""), ("holds", ""),
    ("break list", ""), ("break disable", "1"), ("break enable", "1"), ("break save", "saved.json"),
    ("break load", "saved.json"), ("freeze", ""), ("status", ""), ("thaw", ""), ("disarm", ""), ("continue", ""),
    ("break clear", ""), ("break set", "--to decoding --max-hold 100s --wait 60s"), ("step", "HOLD"),
    ("skip", "HOLD"), ("disarm", ""), ("run-for", "1ms"), ("thaw", ""), ("rec status", ""), ("rec start", "run"),
    ("rec rotate", ""), ("rec status", ""), ("rec stop", ""), ("rec dump", "dumped.mcap"), ("reset", ""),
    ("drain", "--for 1s"), ("holds --ended", ""), ("fleet", ""), ("fleet", "--who-has 0123456789abcdef"),
]
"""What is asked of one daemon, in this order."""


def wrong(value: Any, kind: Any, where: str = "") -> list[str]:
    """What of a JSON value is not as the type says."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return []
    if origin in (types.UnionType, typing.Union):
        found = [wrong(value, one, where) for one in args if one is not msgspec.UnsetType]
        return min(found, key=len)
    if origin in (list, tuple):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        kinds = args if origin is tuple and args[-1] is not Ellipsis else [args[0]] * len(value)
        if len(kinds) != len(value):
            return [f"{where}: {len(value)} values, not {len(kinds)}"]
        return [line for at, (one, its) in enumerate(zip(value, kinds, strict=True))
                for line in wrong(one, its, f"{where}[{at}]")]
    if origin is dict:
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no object"]
        return [line for key, one in value.items() for line in wrong(one, args[1], f"{where}.{key}")]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _wrong_object(value, kind, where)
    if origin is typing.Annotated:
        return wrong(value, args[0], where)
    if origin is typing.Literal:
        return [] if value in args else [f"{where}: {value!r} is none of {args}"]
    expected = {float: (int, float), type(None): (type(None),)}.get(kind, (kind,))
    if isinstance(kind, type) and issubclass(kind, Enum):
        expected = (type(next(iter(kind)).value), str)
    fits = isinstance(value, expected) and not (isinstance(value, bool) and bool not in expected)
    return [] if fits else [f"{where}: {value!r} is no {kind}"]


def _wrong_object(value: Any, kind: Any, where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no {kind.__name__}"]
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    optional = {name for name, field in fields.items() if field.default is msgspec.UNSET}
    config = kind.__struct_config__
    if config.tag_field is not None and value.get(config.tag_field) == config.tag:
        value = {key: one for key, one in value.items() if key != config.tag_field}
    lines = [f"{where}.{key}: not in {kind.__name__}" for key in value.keys() - fields.keys()]
    lines += [f"{where}.{key}: missing" for key in fields.keys() - optional - value.keys()]
    hints = typing.get_type_hints(kind)
    return lines + [
        line for key, one in value.items() if key in fields
        for line in wrong(one, hints[fields[key].name], f"{where}.{key}")
    ]


def agrees(command: str, text: str) -> Any:
    """The document, which must be as its type says."""
    document = json.loads(text)
    found = wrong(document, documents.documents()[command], command)
    assert not found, "\n".join(found)
    return document


def run(command: str, arguments: str) -> str:
    """The JSON that a command of this process prints; exit 0 or 1."""
    words = [*command.split(), *shlex.split(arguments), "--format", "json"]
    done = CliRunner().invoke(cli, words, prog_name="kvbm-console")
    assert done.exit_code in (0, 1), (words, done.output)
    return done.stdout


def test_every_command_has_a_document_or_a_reason() -> None:
    named = {" ".join(words) for words in leaves()}
    groups = (documents.documents().keys(), documents.INTERACTIVE.keys(), documents.ELSEWHERE.keys())
    assert set().union(*groups) == named
    assert sum(map(len, groups)) == len(named)
    assert set(FILES) | {command for command, _ in LIVE} - {"holds --ended"} == set(documents.documents())
    for words, command in leaves().items():
        choices = next((one.type.choices for one in command.params
                        if isinstance(one.type, click.Choice) and "--format" in one.opts), ())
        wanted = "jsonl" if words == ("tail",) else "json"
        assert (wanted in choices) == (" ".join(words) not in documents.INTERACTIVE), words


def test_a_type_that_does_not_fit_is_told() -> None:
    one = {"segment": "a", "outcome": "b", "torn_bytes": 1, "first_seq": 1, "last_seq": 2, "gaps": []}
    assert wrong(one, documents.RecoveredRow) == []
    assert wrong({**one, "more": 1}, documents.RecoveredRow) == [".more: not in RecoveredRow"]
    assert wrong({**one, "gaps": [{"first": "1"}]}, documents.RecoveredRow)
    assert wrong({**one, "torn_bytes": True}, documents.RecoveredRow) == [".torn_bytes: True is no <class 'int'>"]
    assert wrong({**one, "torn_bytes": None}, documents.RecoveredRow)


@pytest.mark.parametrize("command", FILES)
def test_a_command_prints_its_document(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if command == "lake ask":
        run("lake add", FILES["lake add"])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if command.startswith("config"):
        monkeypatch.setenv("KVBM_CONSOLE_CONFIG", str(tmp_path / "config.toml"))
    if command == "config show":
        (tmp_path / "config.toml").write_text('[tail]\ncount = 3\n')
    elif command == "rec import dynamo":
        (tmp_path / "records.jsonl").write_text(written("chats").text())
    elif command in ("rec index", "rec recover"):
        left_active(tmp_path / "left")
    if command in ("demo", "serve", "rec capture"):
        done = subprocess.run(
            [PROGRAM, *command.split(), *shlex.split(FILES[command]), "--format", "json"], cwd=tmp_path, text=True,
            capture_output=True, timeout=DEADLINE_S, env=environment(tmp_path), check=False, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        document = agrees(command, done.stdout)
    else:
        document = agrees(command, run(command, FILES[command]))
    assert document, "an empty document shows no keys"


def left_active(directory: Path) -> None:
    """A recording whose daemon was killed."""
    with subprocess.Popen(
        [PROGRAM, "serve", "--workload", "multiturn", "--speed", "max", "--record", str(directory), "--listen",
         "unix:left.sock"], stderr=subprocess.PIPE, text=True, env=environment(directory.parent), cwd=directory.parent,
    ) as process:
        assert process.stderr is not None
        assert "serving" in process.stderr.readline()
        process.send_signal(signal.SIGKILL)


@pytest.mark.usefixtures("_one_loop")
def test_what_a_daemon_is_asked_prints_its_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving_on(tmp_path, "--workload", "multiturn", "--speed", "4", "--listen", "unix:d.sock") as address:
        monkeypatch.setenv("KVBM_CONSOLE_TARGET", address)
        hold = ""
        for command, arguments in LIVE:
            text = run(command, arguments.replace("HOLD", hold))
            document = agrees("holds", "[]") if command == "holds --ended" else agrees(command, text)
            if command == "break set":
                hold = document["holds"][0]["id"]
            elif command == "holds":
                assert document, "something stands still"
            elif command == "holds --ended":
                assert json.loads(text)
                assert wrong(json.loads(text), list[documents.EndedHoldRow]) == []


@pytest.mark.usefixtures("_one_loop")
def test_what_taps_and_event_streams_cost_and_bring_is_in_the_document_of_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with a tap and a publisher of an event stream, each a process of its own, and a stream of nobody."""
    monkeypatch.chdir(tmp_path)
    publisher = Engine()
    streams = (f"zmq:127.0.0.1:{publisher.port}?replay={publisher.replay_port}", "zmq:127.0.0.1:9")
    flags = [part for stream in streams for part in ("--engine", stream)]
    try:
        with serving_on(tmp_path, *flags, "--listen", "unix:d.sock") as address, subprocess.Popen(
            [sys.executable, "-m", "tests.tap.engine_child", json.dumps({"target": address})], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as engine:
            monkeypatch.setenv("KVBM_CONSOLE_TARGET", address)

            def step(**order: Any) -> None:
                assert engine.stdin is not None
                assert engine.stdout is not None
                engine.stdin.write(json.dumps(order) + "\n")
                engine.stdin.flush()
                assert engine.stdout.readline()

            step(listened=True)
            step(add=[["one", list(range(30)), 4]], until="one")
            document: Any = {"engines": [], "publishers": []}
            while not document["engines"] or not any(row["batches"] for row in document["publishers"]):
                publisher.publish([stored(1, 2)])
                step(steps=1)  # a tap tells once a second
                document = agrees("status", run("status", ""))
            step(end=True)
    finally:
        publisher.end()
    (row,) = document["engines"]
    assert row["name"] == "child"
    followed, silent = document["publishers"]
    assert followed["connected"]
    assert followed["last_batch_ns"] is not None
    assert (silent["batches"], silent["last_batch_ns"]) == (0, None)
