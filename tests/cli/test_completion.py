"""Shell completion as the README says it, in the shells themselves.

Law of this file: what is asserted is what a shell would offer, not what our code returns.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.programs import DEADLINE_S, PROGRAM, environment

ASK = '''
eval "$(_KVBM_CONSOLE_COMPLETE=bash_source kvbm-console)"
COMP_WORDS=({words}); COMP_CWORD={at}
_kvbm_console_completion kvbm-console
printf '%s\\n' "${{COMPREPLY[@]}}"
'''


def shell(name: str, text: str, directory: Path) -> str:
    """What a shell prints that has the program on its path."""
    surroundings = environment(directory)
    surroundings["PATH"] = f"{Path(PROGRAM).parent}:{surroundings['PATH']}"
    done = subprocess.run(
        [name, "-c", text], capture_output=True, text=True, timeout=DEADLINE_S, env=surroundings, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(("words", "wanted"), [
    ("kvbm-console att", ["attach"]), ("kvbm-console s", ["serve", "status", "step", "skip", "simulate"]),
    ("kvbm-console attach --th", ["--theme"]), ("kvbm-console attach --theme l", ["light"]),
    ("kvbm-console config i", ["init"]), ("kvbm-console break set --to onb", ["onboard_staged", "onboarding"]),
])
def test_bash_offers_commands_flags_and_values(words: str, wanted: list[str], tmp_path: Path) -> None:
    said = shell("bash", ASK.format(words=words, at=len(words.split()) - 1), tmp_path)
    assert said.split() == wanted


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_the_other_shells_take_the_script(name: str, tmp_path: Path) -> None:
    script = shell("sh", f"_KVBM_CONSOLE_COMPLETE={name}_source kvbm-console", tmp_path)
    assert "_KVBM_CONSOLE_COMPLETE" in script
    if shutil.which(name) is not None:
        (tmp_path / "script").write_text(script)
        shell(name, f"{name} -n {tmp_path}/script", tmp_path)
