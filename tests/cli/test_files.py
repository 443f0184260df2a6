"""Files that commands read, and files that they write in place of others.

Law of this file: a file that cannot be read is refused with one sentence that names it. What was there stays until the
new file is complete.
"""

import os
import resource
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbm_console.cli.fleet import FLEET_BYTES_MAX
from kvbm_console.cli.main import cli
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.debug.files import read_specs, write_specs
from kvbm_console.files import replacing
from kvbm_console.planning.measured import TABLE_BYTES_MAX
from kvbm_console.planning.vectors import FILE_BYTES_MAX as VECTORS_BYTES_MAX
from tests.cli.programs import PROGRAM

SPECS = [BreakpointSpec(id=3, condition="waiting > 2")]


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write_specs(link, SPECS)
    assert link.is_symlink()
    assert (read_specs(real), real.stat().st_mode & 0o777) == (SPECS, 0o600)


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=f"^{pipe} is no regular file, and would be replaced$"):
        write_specs(pipe, SPECS)
    assert pipe.is_fifo()


def test_a_directory_that_is_missing_is_named_as_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "nope" / "x"
    with pytest.raises(OSError, match="No such file") as caught:
        write_specs(path, SPECS)
    assert caught.value.filename == str(path)


def test_a_block_that_fails_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ValueError, match="why"), replacing(path) as draft:  # noqa: PT012
        draft.write_text("half")
        raise ValueError("why")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_a_configuration_outlives_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("# mine\n")
    environment = {**os.environ, "KVBM_CONSOLE_CONFIG": str(path)}
    done = subprocess.run(
        [PROGRAM, "config", "init", "--force"], env=environment, capture_output=True,
        text=True, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kvbm-console: {path}: File too large\n")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("# mine\n", [path])


def test_the_configuration_is_written_with_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text("# mine\n")
    monkeypatch.setenv("KVBM_CONSOLE_CONFIG", str(path))
    assert CliRunner().invoke(cli, ["config", "init", "--force"]).exit_code == 0
    assert path.read_text().startswith("# Defaults")


# --- input ---

DEEP = 100_000


@pytest.mark.parametrize(("name", "content", "args"), [
    ("trace.csv", "x" * 200_000, ("simulate", "--trace", "{}")),
    ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "1" * 200_000, ("simulate", "--trace", "azure:{}")),
    ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n\udcff", ("simulate", "--trace", "azure:{}")),
    ("trace.jsonl", '{"a":' + "[" * DEEP, ("simulate", "--trace", "{}")),
    ("trace.jsonl", '{"a":' + "[" * DEEP, ("simulate", "--trace", "mooncake:{}")),
    ("trace.jsonl", '{"a":' + "[" * DEEP, ("simulate", "--trace", "dynamo:{}")),
    ("steps.jsonl", "[" * DEEP, ("calibrate", "{}")),
    ("steps.csv", "x" * 200_000, ("calibrate", "{}")),
    ("profile.toml", "a = " + "[" * DEEP, ("simulate", "--profile", "{}")),
    ("links.toml", "a = " + "[" * DEEP, ("simulate", "--links", "{}")),
    ("vectors.json", '{"schema":' + "[" * DEEP, ("simulate", "--vectors", "{}")),
    ("dynamo.jsonl", '{"a":' + "[" * DEEP + "\n", ("rec", "import", "dynamo", "{}", "--out", "{}.mcap")),
    ("targets", "\udcff", ("fleet", "--once", "@{}")),
], ids=lambda value: None if isinstance(value, tuple) else value[:24])
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, content: str, args: tuple[str, ...]) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode(errors="surrogateescape"))
    done = CliRunner().invoke(cli, [arg.format(path) for arg in args])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.output
    assert str(path) in done.stderr


@pytest.mark.parametrize(("most", "args"), [
    (TABLE_BYTES_MAX, ("calibrate", "{}")), (1 << 20, ("simulate", "--profile", "{}")),
    (1 << 20, ("simulate", "--links", "{}")), (VECTORS_BYTES_MAX, ("simulate", "--vectors", "{}")),
    (FLEET_BYTES_MAX, ("fleet", "--once", "@{}")),
])
def test_a_file_without_an_end_is_read_up_to_a_bound(tmp_path: Path, most: int, args: tuple[str, ...]) -> None:
    path = tmp_path / "endless"
    with path.open("wb") as file:
        file.truncate(most + 1)
    done = CliRunner().invoke(cli, [arg.format(path) for arg in args])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.output
    assert f"{path} must have at most {most:,} bytes" in done.stderr


def test_a_configuration_of_many_brackets_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text("a = " + "[" * DEEP)
    monkeypatch.setenv("KVBM_CONSOLE_CONFIG", str(path))
    done = CliRunner().invoke(cli, ["status"])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert str(path) in done.stderr


# --- recordings ---

TAPE = str(Path(__file__).parents[2] / "recordings" / "thrash.mcap")


def test_parquet_on_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [PROGRAM, "rec", "export", TAPE, "--to", "parquet", "--out", str(tmp_path / "out")], capture_output=True,
        text=True, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvbm-console: the output could not be written: File too large\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("args", "says"), [
    (("rec", "cut", TAPE, "out.mcap", "--where", "kind ="), "--where, "),
    (("rec", "cut", TAPE, "out.mcap", "--where", "nonsense = 3"), "--where, "),
    (("rec", "cut", TAPE, "out.mcap", "--from", "noon"), "--from, a place is a number"),
    (("rec", "cut", TAPE, "out.mcap", "--to", "noon"), "--to, a place is a number"),
    (("rec", "cut", TAPE, "out.mcap", "--request", ""), "--request must be a pattern of names, got ''"),
    (("rec", "merge", TAPE, "--where", "kind ="), "--where, "),
    (("replay", TAPE, "--format", "json", "--at", "noon"), "--at, a place is a number"),
])
def test_a_wrong_place_or_condition_names_its_flag(args: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, [str(tmp_path / arg) if arg == "out.mcap" else arg for arg in args])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.output
    assert says in done.stderr
    assert "request ~" not in done.stderr


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_search_begins_with_its_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / name
    done = CliRunner().invoke(cli, ["explore", "leader", "--out", str(out), "--workers", "1"])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.output
    assert "--out" in done.stderr
    assert str(out) in done.stderr


@pytest.mark.parametrize(("args", "says"), [
    (("hit-rate", "--sql", "--format", "json"), "--format json tells of an answer: it has no meaning with --sql"),
    (("who-has", "--hash", "+000000000000001"), "--hash must be 16 hexadecimal digits, got '+000000000000001'"),
    (("who-has", "--hash", "0x00000000000001"), "--hash must be 16 hexadecimal digits"),
    (("who-has", "--hash", "0000_0000_000001"), "--hash must be 16 hexadecimal digits"),
])
def test_a_wrong_question_to_a_lake_is_one_sentence(args: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["lake", "ask", str(tmp_path), *args])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.output
    assert says in done.stderr


@pytest.mark.parametrize(("base_ns", "says"), [
    ("-5", "step_base_ns must be from 1 to 2147483647, got -5"), ('"x"', "Expected `int`, got `str`"),
])
def test_a_profile_out_of_bounds_is_named(base_ns: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(f"[step]\nbase_ns = {base_ns}\nprefill_token_ns = 1\ndecode_request_ns = 1\n"
                    "prefill_tokens_max = 1\ndecode_requests_max = 1\n")
    done = CliRunner().invoke(cli, ["simulate", "--profile", str(path), "--trace", "multiturn:requests=3"])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.output
    for part in ("--profile", str(path), says):
        assert part in done.stderr


@pytest.mark.parametrize("args", [
    ("nope",), ("nope", "--total-kv-blocks", "40"), (), ("multiturn",), ("mooncake:",), ("recording:",),
])
def test_plan_names_its_own_argument(args: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["plan", *args])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.output
    assert done.stderr.startswith("RUN|TRACE ") or ": RUN|TRACE " in done.stderr
    assert "--trace" not in done.stderr
