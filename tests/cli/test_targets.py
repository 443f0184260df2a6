"""Every client command reaches a daemon in the same way, and says in its exit status that no daemon is there.

Law of this file: the commands come from the click tree, so a new command is tested or fails here.
"""

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli import ask
from kvbm_console.cli.main import cli
from tests.cli.programs import PROGRAM, environment
from tests.cli.tree import LOCAL, clients, flags_of, leaves
from tests.server.daemons import certificate_in

ACCESS: Final = ("--target", "--tls-ca", "--token-file")
POSITIONAL: Final = {("attach",), ("status",), ("tail",), ("mcp",), ("fleet",)}
"""Commands whose row in the product's table shows TARGET as an argument."""
TOKEN: Final = "0123456789abcdef0123456789abcdef"


class Call(NamedTuple):
    """How a client command is tried: its arguments, its exit status, and whether it needs the role control."""

    arguments: tuple[str, ...] = ()
    status: int = 0
    control: bool = True


CALLS: Final[dict[tuple[str, ...], Call]] = {
    ("attach",): Call(status=2, control=False), ("status",): Call(("--format", "json"), control=False),
    ("tail",): Call(("--count", "3"), control=False), ("fleet",): Call(("--once",), control=False),
    ("break", "set"): Call(("--to", "decoding", "--request", "none", "--name", "mine")),
    ("break", "list"): Call(control=False), ("break", "disable"): Call(("1",)), ("break", "enable"): Call(("1",)),
    ("break", "save"): Call(("saved.json",), control=False), ("break", "load"): Call(("saved.json",)),
    ("break", "clear"): Call(), ("holds",): Call(control=False), ("continue",): Call(("--all",)),
    ("skip",): Call(("999",), 3), ("freeze",): Call(), ("step",): Call(("999",), 3), ("thaw",): Call(),
    ("run-for",): Call(("1ms",)), ("disarm",): Call(), ("why",): Call(("REQUEST",), control=False),
    ("doctor",): Call(("--brief",), -1, control=False), ("rec", "start"): Call(("run",)),
    ("rec", "rotate"): Call(), ("rec", "status"): Call(control=False), ("rec", "stop"): Call(),
    ("rec", "dump"): Call(("dumped.mcap",), control=False), ("drain",): Call(("--for", "5s"), -1),
    ("reset",): Call(("--physical",)), ("mcp",): Call(control=False),
}
"""Words to the call, in an order in which all of them work; status -1: 0 or 1, as the run goes."""
ABSENT: Final[tuple[tuple[str, ...], ...]] = (
    ("continue", "999"), ("step", "999"), ("skip", "999"), ("break", "enable", "999"), ("break", "disable", "999"),
    ("break", "clear", "999"), ("why", "nobody"), ("rec", "stop"), ("rec", "rotate"),
)
"""Commands that name a thing which does not exist."""


@pytest.fixture
def _one_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All commands of a test share one event loop: grpc's poller outlives a command, and a process has one command."""
    with asyncio.Runner() as runner:
        def run(work: Any) -> Any:
            try:
                return runner.run(work)
            except BaseExceptionGroup as group:
                raise ask.alone(group) from None

        monkeypatch.setattr(ask, "run", run)
        yield


def invoke(*words: str) -> Result:
    """Run the program in this process."""
    return CliRunner().invoke(cli, list(words), prog_name="kvbm-console")


@contextlib.contextmanager
def serving_on(directory: Path, *flags: str) -> Iterator[str]:
    """The address of a daemon with these flags."""
    process = subprocess.Popen(
        [PROGRAM, "serve", *flags], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=directory, env=environment(directory),
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving on "), line
        yield line.split()[2].removesuffix(":")
    finally:
        process.kill()
        process.communicate()


def test_every_command_is_a_client_with_the_same_access_or_a_local_command() -> None:
    found = leaves()
    assert found.keys() >= LOCAL
    for words, command in clients().items():
        assert flags_of(command) >= set(ACCESS), words
        positional = any(
            isinstance(one, click.Argument) and "TARGET" in (one.metavar or "") for one in command.params)
        assert positional == (words in POSITIONAL), words
        told = {one.name: one.help for one in command.params if isinstance(one, click.Option)}
        assert all(told[name] for name in told), words
    for words in LOCAL:
        assert "--tls-ca" not in flags_of(found[words]), words


def test_every_client_is_tried() -> None:
    assert CALLS.keys() == clients().keys()


@pytest.mark.usefixtures("_one_loop")
def test_every_client_reaches_a_daemon_with_tls_and_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cert, key = certificate_in(tmp_path)
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    with serving_on(tmp_path, "--workload", "multiturn", "--listen", "127.0.0.1:0", "--tls-cert",
                    str(cert), "--tls-key", str(key), "--token-file", str(token)) as address:
        observer = ("--tls-ca", str(cert))
        access = (*observer, "--token-file", str(token))
        first = invoke("tail", address, *access, "--format", "jsonl", "--since", "0", "--count", "40").stdout
        request = next(line.split('"request":"')[1].split('"')[0] for line in first.splitlines() if '"request"' in line)
        for words, call in CALLS.items():
            arguments = [request if part == "REQUEST" else part for part in call.arguments]
            blind = invoke(*words, *arguments, "--target", address)
            assert blind.exit_code == 3, (words, blind.output)
            assert "--tls-ca" in blind.stderr, (words, blind.stderr)
            if call.control:
                refused = invoke(*words, *arguments, "--target", address, *observer)
                assert refused.exit_code == 3, (words, refused.output)
                assert "needs the role control" in refused.stderr, (words, refused.stderr)
            ways = [("--target", address)] + ([(address,)] if words in POSITIONAL else [])
            for way in ways:
                done = invoke(*words, *arguments, *way, *access)
                said = (words, way, done.exit_code, done.output)
                assert done.exit_code == call.status or (call.status == -1 and done.exit_code in (0, 1)), said
                assert words != ("attach",) or "attach needs a terminal" in done.stderr
        for arguments in ABSENT:
            absent = invoke(*arguments, "--target", address, *access)
            assert (absent.exit_code, absent.stdout) == (3, ""), (arguments, absent.output)
            assert len(absent.stderr.splitlines()) == 1


@pytest.mark.usefixtures("_one_loop")
@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_nobody_listens_is_3_and_a_typo_is_2(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("saved.json").write_text('{"breakpoints": []}')
    arguments = CALLS[words].arguments
    for target, status in (("unix:nobody.sock", 3), ("127.0.0.1:1", 3), ("nonsense", 2)):
        done = invoke(*words, *arguments, "--target", target)
        assert (done.exit_code, done.stdout) == (status, ""), (target, done.output)
        assert len(done.stderr.splitlines()) == 1
        assert target in done.stderr
    assert invoke(*words, *arguments, "--targt", "unix:nobody.sock").exit_code == 2


def test_an_engine_that_is_not_there_is_3() -> None:
    done = invoke("rec", "capture", "http://127.0.0.1:1", "--out", "never")
    assert (done.exit_code, done.stdout) == (3, "")
    assert "http://127.0.0.1:1 does not answer" in done.stderr


def test_a_request_or_a_run_that_a_recording_lacks_is_3_and_a_missing_file_is_2() -> None:
    recording = str(Path(__file__).resolve().parents[2] / "recordings" / "gap.mcap")
    for words in (("why", "nobody", recording), ("doctor", recording, "--run", "none"),
                  ("replay", recording, "--run", "none", "--format", "json")):
        done = invoke(*words)
        assert (done.exit_code, done.stdout) == (3, ""), done.output
        assert done.stderr.startswith("kvbm-console: ")
    for words in (("why", "nobody", "/no/file"), ("doctor", "/no/file"), ("rec", "info", "/no/file")):
        assert invoke(*words).exit_code == 2




@pytest.mark.parametrize("runtime", ["", "/run/user/7"])
def test_serve_clients_and_the_tap_mean_the_same_socket(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a runtime directory the tap once asked a library, and never met a daemon of ``serve``."""
    from kvbm_console.addresses import DEFAULT_SOCKET, TARGET_VARIABLE, socket_address
    from kvbm_console.cli import params
    from kvbm_console.reporter import __main__ as reporter

    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)
    assert reporter.default_target() == params.default_target() == socket_address(DEFAULT_SOCKET)
