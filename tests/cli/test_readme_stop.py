"""README's block "Stop a request", pasted whole into a shell as a reader would."""

import os
import re
import subprocess
from pathlib import Path

from kvbm_console.cli.ask import who
from tests.cli.programs import DEADLINE_S, PROGRAM, environment

README = Path(__file__).resolve().parents[2] / "README.md"


def block() -> str:
    """The commands behind "Stop a request"."""
    found = re.search(r"^Stop a request.*?```\n(.*?)```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_block_that_stops_a_request_passes_when_it_is_pasted_whole(tmp_path: Path) -> None:
    surroundings = environment(tmp_path)
    surroundings["PATH"] = f"{Path(PROGRAM).parent}{os.pathsep}{surroundings['PATH']}"
    commands = block()
    assert commands.startswith("kvbm-console serve")
    assert "--wait" in commands
    done = subprocess.run(
        ["bash", "-e"], input=commands, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False,
        cwd=tmp_path, env=surroundings,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    said = done.stdout
    assert said.startswith("breakpoint 1: transition.did * → onboarding\n")
    assert said.count("stands still") == 2, "once when the breakpoint was set, once from holds"
    assert "\ncontinued\n" in said
    assert f"continued by {who()}" in said, "the list of ended holds tells who continued it"
    assert said.endswith("\nequal\n"), "the recording tells the same story again"
