"""Each tutorial works as it is written: its commands run in a shell, and print what it shows.

A block ``sh`` is run, and a block ``text`` behind it shows lines of its output in their order, in which an ellipsis
stands for anything. ``vllm`` is a small engine with the real tap, which serves requests until it is ended. Blocks that
need vLLM itself are marked, and ``make test-vllm`` runs them.

Law of this file: nothing else in a tutorial is left out, and the shell stops at the first command that fails.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.cli.programs import DEADLINE_S, PROGRAM, environment
from tests.server.daemons import socket_directory

ROOT: Final = Path(__file__).resolve().parents[2]
TUTORIALS: Final = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK: Final = re.compile(r"^(<!-- needs vLLM -->\n)?```(sh|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
END: Final = "--- end of block "
ENGINE: Final = f"""#!{sys.executable}
import itertools, json, os, signal, subprocess, sys

assert sys.argv[1] == "serve"
settings = json.dumps({{"target": os.environ["KVBM_TAP"], "serve": False}})
child = subprocess.Popen([sys.executable, "-m", "tests.tap.engine_child", settings], cwd={str(ROOT)!r}, text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit(0)))
prompt = list(range(40))
for number in itertools.count():
    name = f"chat-{{number}}"
    orders = [{{"listened": True}}, {{"add": [[name, prompt[: 20 + number % 20], 4]], "until": name}}]
    for order in orders:
        child.stdin.write(json.dumps(order) + "\\n")
        child.stdin.flush()
        child.stdout.readline()
"""
"""Stands in for ``vllm serve``: the same tap, in a process of its own, with an engine that needs no model."""


def blocks(path: Path) -> list[tuple[str, str]]:
    """The commands of a tutorial, each with the lines that they should print."""
    found: list[tuple[str, str]] = []
    for needs_vllm, kind, text in BLOCK.findall(path.read_text(encoding="utf-8")):
        if kind == "sh":
            found += [] if needs_vllm else [(text, "")]
        else:
            found[-1] = (found[-1][0], text)
    return found


def as_shown(said: str, shown: str) -> str | None:
    """The first shown line that is not among the output, in order; None when all are."""
    lines = iter(said.splitlines())
    for wanted in shown.splitlines():
        pattern = re.compile(".*".join(map(re.escape, wanted.strip().split("…"))))
        if not any(pattern.fullmatch(line.strip()) for line in lines):
            return wanted
    return None


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_works_as_it_is_written(path: Path) -> None:
    with socket_directory() as place:
        (place / "recordings").symlink_to(ROOT / "recordings")
        (place / "bin").mkdir()
        (place / "bin" / "vllm").write_text(ENGINE)
        (place / "bin" / "vllm").chmod(0o755)
        surroundings = environment(place)
        surroundings["PATH"] = f"{place / 'bin'}{os.pathsep}{Path(PROGRAM).parent}{os.pathsep}{surroundings['PATH']}"
        parts = blocks(path)
        assert parts
        script = "set -e\n" + "".join(f"{text}\necho '{END}{at}'\n" for at, (text, _) in enumerate(parts))
        said, complained = place / "said", place / "complained"
        with said.open("w") as out, complained.open("w") as errors:
            shell = subprocess.Popen(["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
                                     cwd=place, env=surroundings, start_new_session=True)
            try:
                status = shell.wait(DEADLINE_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)  # what the tutorial left running, if it failed
        printed = said.read_text(encoding="utf-8")
        assert status == 0, (printed[-3000:], complained.read_text(encoding="utf-8")[-3000:])
    outputs = re.split(rf"{END}\d+\n", printed)
    for (text, shown), output in zip(parts, outputs, strict=False):
        missing = as_shown(output, shown)
        assert missing is None, f"{missing!r} is not in the output of\n{text}\n{output}"


def test_there_are_four_tutorials() -> None:
    assert len(TUTORIALS) == 4


def test_a_line_that_is_not_printed_is_told() -> None:
    assert as_shown("a b\nc d\n", "a…\n…d\n") is None
    assert as_shown("c d\na b\n", "a…\n…d\n") == "…d"
