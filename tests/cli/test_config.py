"""The configuration file: every key is a flag, what is not one is refused by name, the command line wins."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbm_console.cli.config import WITH_CONSOLE, defaults, options_of, sections
from kvbm_console.cli.main import cli
from kvbm_console.cli.params import THEMES
from kvbm_console.core.errors import UsageError
from tui import theme


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file is looked for."""
    path = tmp_path / "config.toml"
    monkeypatch.setenv("KVBM_CONSOLE_CONFIG", str(path))
    return path


def test_the_template_names_every_flag_and_is_read_back(file: Path) -> None:
    done = CliRunner().invoke(cli, ["config", "init"])
    assert done.exit_code == 0, done.output
    text = file.read_text()
    for name, options in sections().items():
        assert f"[{name}]" in text
        for key in options:
            assert f"# {key} = " in text
    assert all(values == {} for values in tomllib.loads(text).values())
    assert defaults() == {} or all(values == {} for values in defaults().values())


def test_every_example_of_a_flag_is_valid_toml() -> None:
    done = CliRunner().invoke(cli, ["config", "init", "--stdout"])
    lines = [line[2:] if " = " in line and not line.endswith(".") else line for line in done.output.splitlines()]
    assert tomllib.loads("\n".join(line for line in lines if not line.startswith("#")))["console"]["ascii"] is False


@pytest.mark.parametrize(("text", "said"), [
    ("[console]\nasci = true\n", "[console] has no key 'asci'; the nearest is 'ascii'"),
    ("[atach]\n", "no section [atach]; the nearest is 'attach'"), ("theme = \"dark\"\n", "no section [theme]"),
    ("[console]\nascii = \"yes\"\n", "[console] ascii must be true or false, got 'yes'"),
    ("[console]\ntheme = \"pink\"\n", "[console] theme: 'pink' is not one of"),
    ("[serve]\nspeed = \"fast\"\n", "[serve] speed: must be a factor"),
    ("[attach]\ntarget = \"a:1\"\n", "[attach] target must be a list"),
    ("[demo]\nlimit = true\n", "must be text or a number"),
    ("[demo\n", "config.toml: "), ("[attach]\nhelp = true\n", "has no key 'help'"),
])
def test_a_mistake_is_one_sentence_that_names_the_key(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        defaults()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_console_applies_to_every_console_and_a_command_says_more(file: Path) -> None:
    file.write_text('[console]\ntheme = "light"\n[demo]\ntheme = "dark"\ntotal-kv-blocks = 64\n'
                    '[attach]\ntarget = ["a:1", "b:2"]\n')
    found = defaults()
    assert found["attach"] == {"theme": "light", "flags": ["a:1", "b:2"]}
    assert found["demo"] == {"theme": "dark", "total_kv_blocks": 64}
    assert set(found) == set(WITH_CONSOLE)


def test_what_it_says_becomes_the_default_and_the_flag_wins(file: Path) -> None:
    file.write_text('[status]\nformat = "nonsense"\n')
    assert "not one of" in CliRunner().invoke(cli, ["status"]).output
    file.write_text('[status]\ntarget = "unix:/nowhere/at.sock"\n')
    assert "/nowhere/at.sock" in CliRunner().invoke(cli, ["status"]).output
    assert "/other.sock" in CliRunner().invoke(cli, ["status", "--target", "unix:/other.sock"]).output


def test_show_prints_what_is_in_effect(file: Path) -> None:
    done = CliRunner().invoke(cli, ["config", "show"])
    assert done.exit_code != 0
    file.write_text('[console]\nno-color = true\n')
    done = CliRunner().invoke(cli, ["config", "show", "--format", "json"])
    assert json.loads(done.output)["config"] == {"console": {"no-color": True}}
    done = CliRunner().invoke(cli, ["config", "init"])
    assert "--force overwrites it" in done.output


def test_every_console_has_the_flags_of_the_section() -> None:
    for name in WITH_CONSOLE:
        assert {"theme", "ascii", "no-color"} <= set(options_of(name))
    assert THEMES == theme.THEMES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a program as another user")
def test_a_home_of_another_user_is_no_mistake(tmp_path: Path) -> None:
    """An image whose ``HOME`` is root's, run with the id of another user."""
    home = tmp_path / "root"
    home.mkdir(mode=0o700)
    asked = """
import os, sys
from kvbm_console.cli.config import defaults
import platformdirs  # in front of the change of user, who may not read this checkout
os.setuid(65534)
print(defaults())
"""
    environment = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": ""}
    environment.pop("KVBM_CONSOLE_CONFIG", None)
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{}\n", "")
