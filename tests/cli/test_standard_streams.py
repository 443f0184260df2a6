"""Standard streams that are closed, full or read by nobody end a command in one sentence, and never a daemon.

Law of this file: real processes behind a shell's redirections. No output has a traceback, wherever it may lead.
"""

import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.cli.programs import DEADLINE_S, PROGRAM, environment

TAPE: Final = str(Path(__file__).resolve().parents[2] / "recordings" / "thrash.mcap")
FULL: Final = "kvbm-console: the output could not be written: No space left on device\n"
SERVE: Final = "serve --listen unix:s.sock --workload multiturn:requests=3 --speed max --exit-when-done --record run"
COMMANDS: Final = {
    "help": "serve --help", "version": "--version", "lines": f"rec info {TAPE}",
    "json": f"rec info {TAPE} --format json", "bytes": f"rec export {TAPE} --to jsonl", "summary": SERVE,
}


def shell(directory: Path, line: str) -> tuple[int, str, str]:
    """Run a line of a shell: (exit status, stdout, stderr)."""
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          timeout=DEADLINE_S, check=False, cwd=directory, env=environment(directory))
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> str:
    return f"{PROGRAM} {COMMANDS[request.param]}"


def test_stdout_without_space_ends_in_one_sentence(command: str, tmp_path: Path) -> None:
    status, _, errors = shell(tmp_path, f"{command} >/dev/full")
    assert status == 2
    assert errors.endswith(FULL)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lead_nowhere(command: str, closed: str, tmp_path: Path) -> None:
    status, _, _ = shell(tmp_path, f"{command} {closed}")
    assert status == 0


@pytest.mark.parametrize("unread", ["2>/dev/full", "2>&-", "2> >(true)"])
def test_a_daemon_serves_whether_its_messages_can_be_written_or_not(unread: str, tmp_path: Path) -> None:
    status, told, _ = shell(tmp_path, f"{PROGRAM} {SERVE} {unread}")
    assert status == 0
    assert "3 finished" in told
    status, told, _ = shell(tmp_path, f"{PROGRAM} rec verify run")
    assert (status, told.splitlines()[-1]) == (0, "equal")


def test_a_demo_whose_reader_has_gone_ends_quietly(tmp_path: Path) -> None:
    line = f"set -o pipefail; {PROGRAM} demo --seconds 3 2>errors | head -1; cat errors >&2"
    status, told, errors = shell(tmp_path, line)
    assert status == 0
    assert len(told.splitlines()) == 1
    assert len(errors.splitlines()) == 1


def test_a_file_without_space_is_refused_in_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    status, _, errors = shell(tmp_path, f"ulimit -f 16; {PROGRAM} rec cut {TAPE} out.mcap")
    assert (status, errors) == (2, "kvbm-console: the output could not be written: File too large\n")
    assert list(tmp_path.iterdir()) == []
