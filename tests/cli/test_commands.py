"""The command line without a daemon: help, versions, and one sentence with exit 2 for whatever is wrong."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli.main import COMMANDS, cli
from kvbm_console.cli.params import resolve_target


def invoke(*args: str) -> Result:
    """Run the program in this process."""
    return CliRunner().invoke(cli, list(args), prog_name="kvbm-console")


def all_commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and subcommand as words."""
    context = click.Context(group)
    found: list[tuple[str, ...]] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        found.append((*path, name))
        if isinstance(command, click.Group):
            found += all_commands(command, (*path, name))
    return found


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_help_everywhere(words: tuple[str, ...]) -> None:
    result = invoke(*words, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: kvbm-console")
    assert result.stderr == ""


def test_help_lists_all_commands_with_a_sentence() -> None:
    lines = invoke("--help").stdout.splitlines()
    for name in COMMANDS:
        assert any(re.match(rf"  {name}\s+\S", line) for line in lines), name


def test_version_names_protocol_and_recording_format() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"kvbm-console \S+, protocol \d+\.\d+, recording format \d+(\.\d+)?\n", result.stdout)


def test_no_command_shows_the_help_and_fails() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert "Commands:" in result.output


BAD = [
    (("nonsense",), "No such command 'nonsense'"),
    (("serve", "--nonsense"), "--nonsense"),
    (("serve", "--speed", "fast"), "--speed"),
    (("serve", "--speed", "-1"), "--speed"),
    (("serve", "--g2-blocks", "16777216", "--g3-blocks", "16777216", "--workload", "multiturn"), "at most 33554432"),
    (("serve", "--limit", "0"), "--limit"),
    (("serve", "--listen", "nowhere"), "--listen"),
    (("serve", "--listen", "localhost:70000"), "70000"),
    (("serve", "--listen", "0.0.0.0:7000"), "0.0.0.0"),
    (("serve", "--format", "xml"), "--format"),
    (("serve", "--workload", "nothing:here"), "nothing:here"),
    (("serve", "--workload", "mooncake:/does/not/exist"), "/does/not/exist"),
    (("serve", "--workload", "multiturn:sessions=-1"), "sessions"),
    (("serve", "--workload", "multiturn:colour=red"), "colour"),
    (("status", "http://x"), "http://x"),
    (("status", "--format", "yaml"), "--format"),
    (("status", "unix:/a.sock", "--target", "unix:/b.sock"), "two addresses"),
    (("tail", "--since", "-4"), "--since"),
    (("tail", "--count", "0"), "--count"),
    (("tail", "localhost"), "localhost"),
    (("break", "set"), "--to"),
    (("break", "set", "--to", "sleeping"), "onboarding"),
    (("break", "set", "--to", "onboarding", "--max-hold", "1h"), "120s"),
    (("break", "set", "--to", "onboarding", "--max-hold", "30"), "30s"),
    (("break", "set", "--to", "onboarding", "--request", "x" * 300), "--request must be a pattern of 1 to 256"),
    (("break", "clear", "x"), "'x'"),
    (("continue", "3", "--all"), "--all"),
    (("step", "1", "--pipeline"), "--pipeline"),
    (("skip",), "HOLD"),
    (("run-for", "2h"), "at most 1h"),
    (("freeze", "--max-hold", "3m"), "at most 120s"),
    (("continue", "1", "--until", "deocding"), "decoding"),
    (("break", "set", "--when", "tokns > 1"), "--when, column 1: a condition has no field `tokns`"),
    (("break", "set", "--to", "decoding", "--log", "{requst}"), "--log, column 2"),
    (("break", "set", "--to", "decoding", "--hits", "3"), "--hits must be ==N, >=N or %N"),
    (("break", "set", "--when", "held or " * 200 + "held"), "--when must be at most 1024"),
    (("break", "set", "--to", "decoding", "--name", "n" * 65), "--name must be at most"),
    (("break", "set", "--to", "decoding", "--ignore", str(2**60)), "'--ignore'"),
    (("break", "set", "--to", "decoding", "--after", str(2**60)), "'--after'"),
    (("break", "clear", str(2**60)), "1<=x<="),
    (("break", "disable", str(2**60)), "1<=x<="),
    (("continue", str(2**60)), "1<=x<="),
    (("step", str(2**60)), "1<=x<="),
    (("skip", str(2**60)), "1<=x<="),
    (("tail", "--since", str(2**60)), "'--since'"),
    (("break", "set", "--to", "decoding", "--log", "x" * 300), "--log must be at most"),
    (("break", "set", "--to", "decoding", "--expires", "2d"), "--expires"),
    (("break", "set", "--to", "decoding", "--action", "stop"), "hold, log, snapshot, freeze"),
    (("break", "set", "--once"), "--when"),
    (("status", "--filter", "state = onbording"), "--filter, column 9: `onbording` is no state; the nearest is"),
    (("tail", "--filter", "kind = SlotMovd"), "the nearest is `SlotMoved`"),
    (("replay", "/does/not/exist"), "/does/not/exist"),
    (("rec", "info", "/does/not/exist"), "/does/not/exist"),
    (("status", "--health", "--format", "json"), "--health prints one word"),
    (("case", "--open"), "--open needs the NAME of a case"),
    (("rec", "verify", "/does/not/exist"), "/does/not/exist"),
    (("demo", "--seconds", "0"), "--seconds"),
]


@pytest.mark.parametrize(("args", "names"), BAD, ids=[" ".join(args)[:60] for args, _ in BAD])
def test_bad_input_is_one_sentence_and_exit_2(args: tuple[str, ...], names: str, monkeypatch: pytest.MonkeyPatch,
                                              tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("kvbm-console: ")
    assert names in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert "Usage:" not in result.stderr


def test_target_comes_from_argument_flag_environment_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVBM_CONSOLE_TARGET", raising=False)
    assert resolve_target(None, None) == f"unix:{tmp_path}/kvbm-console/default.sock"
    monkeypatch.setenv("KVBM_CONSOLE_TARGET", "localhost:9000")
    assert resolve_target(None, None) == "localhost:9000"
    assert resolve_target(None, "unix:/run/x.sock") == "unix:/run/x.sock"
    assert resolve_target("/run/y.sock", None) == "unix:/run/y.sock"
    monkeypatch.setenv("KVBM_CONSOLE_TARGET", "nonsense")
    with pytest.raises(click.UsageError, match="KVBM_CONSOLE_TARGET must be unix:PATH or HOST:PORT"):
        resolve_target(None, None)


def test_shell_completion_offers_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_WORDS", "kvbm-console break set --to onb")
    monkeypatch.setenv("COMP_CWORD", "4")
    monkeypatch.setenv("_KVBM_CONSOLE_COMPLETE", "bash_complete")
    result = CliRunner().invoke(cli, [], prog_name="kvbm-console")
    assert "onboard_staged" in result.output
    assert "onboarding" in result.output
