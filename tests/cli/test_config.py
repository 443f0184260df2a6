"""The configuration file: every key is a flag, what is not one is refused by name, the command line wins."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbm_console.cli.config import WITH_CONSOLE, defaults, options_of, sections, template
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


def test_a_number_that_is_uncommented_is_a_number(file: Path) -> None:
    """An example of a number or a time is one that its flag takes."""
    file.write_text(
        '[simulate]\ntotal-kv-blocks = 1\nlimit = 1\nkv-offload-threshold = 1\nstep-base = "1s"\n[why]\nwithin = "1s"\n'
    )
    assert defaults()["simulate"]["limit"] == 1
    text = template()
    for line in file.read_text().splitlines():
        assert line.startswith("[") or f"\n# {line}\n" in text


@pytest.mark.parametrize(("key", "value"), [
    ("total-kv-blocks", '"512"'), ("limit", '"5"'), ("kv-offload-threshold", '"0.5"'), ("half-life-s", '"300"'),
    ("kv-cpu-size", "1000000000"), ("step-base", '"12ms"'), ("link", '["disk=3GB/s"]'),
])
def test_a_number_is_the_same_with_quotes_and_a_size_without(file: Path, key: str, value: str) -> None:
    bare = value.strip('["]')
    file.write_text(f"[simulate]\n{key} = {value}\n")
    trace = ("--trace", "multiturn:requests=3,sessions=1", "--format", "json")
    by_file = CliRunner().invoke(cli, ["simulate", *trace])
    file.write_text("")
    by_flag = CliRunner().invoke(cli, ["simulate", *trace, f"--{key}", bare])
    assert (by_file.exit_code, by_file.stdout) == (0, by_flag.stdout)


@pytest.mark.parametrize(("text", "said"), [
    ("[console]\nasci = true\n", "[console] has no key 'asci'; the nearest is 'ascii'"),
    ("[atach]\n", "no section [atach]; the nearest is 'attach'"), ("theme = \"dark\"\n", "no section [theme]"),
    ("[console]\nascii = \"yes\"\n", "[console] ascii must be true or false, got 'yes'"),
    ("[console]\ntheme = \"pink\"\n", "[console] theme: 'pink' is not one of"),
    ("[serve]\nspeed = \"fast\"\n", "[serve] speed: must be a factor"),
    ("[attach]\ntarget = \"a:1\"\n", "[attach] target must be a list"),
    ("[demo]\nlimit = true\n", "must be text or a number"),
    ("[simulate]\nkv-cpu-size = 64\n", "[simulate] --kv-cpu-size must hold a block of 2097152 bytes, got 64"),
    ("[simulate]\nkv-geometry = 5\n",
     "[simulate] --kv-geometry must be LAYERS,KV_HEADS,HEAD_DIM,ELEMENT_BYTES, got '5'"),
    ("[simulate]\ncompat = true\nlink = [\"disk=3GB/s\"]\n", "so it takes no --link, got disk="),
    ("[simulate]\ng1-blocks = 5\n", "has no key 'g1-blocks'; the flag's key is 'total-kv-blocks'"),
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


TAPE = str(Path(__file__).parents[2] / "recordings" / "thrash.mcap")


@pytest.mark.parametrize(("text", "args", "says"), [
    ('[why]\ntarget = "unix:/nowhere.sock"\n', ("why", "chat-0.0", TAPE), ""),
    ('[why]\nwithin = "5s"\n', ("why", "chat-0.0", TAPE), ""),
    ('[why]\ntarget = "unix:/nowhere.sock"\n', ("why", "chat-0.0", TAPE, "--what-if"), ""),
    ('[why]\nrun = "x"\n', ("why", "chat-0.0", "--target", "unix:/nowhere.sock"), "no daemon listens"),
    ('[doctor]\ntarget = "unix:/nowhere.sock"\n', ("doctor", TAPE), ""),
    ("[doctor]\nseconds = 5\n", ("doctor", TAPE), ""),
    ('[doctor]\ntarget = "unix:/nowhere.sock"\n', ("doctor", "http://127.0.0.1:1"), "127.0.0.1:1"),
    ('[status]\ntarget = "unix:/nowhere.sock"\n', ("status", "unix:/other.sock"), "/other.sock"),
    ('[attach]\ntarget = ["unix:/nowhere.sock"]\nseconds = 5\n', ("attach", "unix:/other.sock"), "/other.sock"),
])
def test_a_default_loses_to_what_is_typed_beside_it(file: Path, text: str, args: tuple[str, ...], says: str) -> None:
    file.write_text(text)
    done = CliRunner().invoke(cli, args)
    assert says in done.stderr
    assert "/nowhere.sock" not in done.stderr or says == "no daemon listens"
    assert says or done.exit_code < 2, done.stderr


@pytest.mark.parametrize(("args", "says"), [
    (("why", "chat-0.0", TAPE, "--target", "unix:/a"), "give a recording or --target, not both"),
    (("why", "chat-0.0", TAPE, "--within", "5s"), "--within needs --what-if"),
    (("doctor", TAPE, "--seconds", "5"), "--seconds needs the http:// address"),
    (("status", "unix:/a", "--target", "unix:/b"), "name two addresses"),
])
def test_two_typed_values_still_contradict_each_other(file: Path, args: tuple[str, ...], says: str) -> None:
    file.write_text("")
    done = CliRunner().invoke(cli, args)
    assert (done.exit_code, says in done.stderr) == (2, True)
