"""Bad values of the cache: on every command that takes the flag and in every section of the configuration file.

Law of this file: one sentence that names the flag, its bound and the value, exit 2, and nothing was begun (BC-11,
BC-12). The tables name every flag of the cache; one that is added to the options and not here fails.
"""

import json
from pathlib import Path
from typing import Any, Final

import click
import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli.cache_options import CACHE_FLAGS
from kvbm_console.cli.config import options_of, read
from kvbm_console.cli.main import cli
from kvbm_console.core.errors import UsageError
from tests.cli.tree import leaves

ROOT: Final = Path(__file__).resolve().parents[2]
BLOCKS: Final = "16777216"
CHATS: Final = "multiturn:requests=24,sessions=4"
USUAL: Final[dict[str, tuple[str, ...]]] = {
    "simulate": ("--trace", CHATS, "--total-kv-blocks", "40"),
    "compare": ("--trace", CHATS, "--total-kv-blocks", "40"),
    "serve": ("--workload", "multiturn"), "demo": (),
}
"""Command to what it needs to run."""

CACHE: Final[list[tuple[str, Any, str]]] = [
    ("total-kv-blocks", 0, f"from 1 to {BLOCKS}"), ("total-kv-blocks", 2**24 + 1, f"from 1 to {BLOCKS}"),
    ("total-kv-blocks", "many", "integer"),
    ("block-size", 0, "from 1 to 65536"), ("block-size", 65_537, "from 1 to 65536"),
    ("kv-cpu-blocks", -1, f"from 0 to {BLOCKS}"), ("kv-cpu-blocks", 2**24 + 1, f"from 0 to {BLOCKS}"),
    ("kv-disk-blocks", -1, f"from 0 to {BLOCKS}"), ("kv-disk-blocks", 2**24 + 1, f"from 0 to {BLOCKS}"),
    ("kv-cpu-size", "lots", "a size such as 64GiB"), ("kv-cpu-size", "-3GiB", "a size such as 64GiB"),
    ("kv-cpu-size", "1KiB", "hold a block of"), ("kv-disk-size", "lots", "a size such as 64GiB"),
    ("kv-disk-size", "1KiB", "hold a block of"), ("total-kv-size", "1KiB", "--total-kv-size"),
    ("kv-geometry", "32,8,128", "LAYERS,KV_HEADS,HEAD_DIM,ELEMENT_BYTES"),
    ("kv-geometry", "0,8,128,2", "of 1 to 1048576 layers"),
    ("kv-geometry", "1048576,1048576,128,2", "less than 2 GiB per token"),
    ("kv-offload-threshold", 1.01, "from 0 to 1"), ("kv-offload-threshold", -0.01, "from 0 to 1"),
    ("kv-offload-threshold", "nan", "from 0 to 1"), ("offload-preset", "trtllm", "'vllm', 'lmcache', 'original'"),
    ("kv-transfer-bandwidth", 0, "from 0.000000001 to"), ("kv-transfer-bandwidth", -1, "from 0.000000001 to"),
    ("kv-transfer-bandwidth", "nan", "from 0.000000001 to"), ("kv-transfer-bandwidth", "inf", "to 1000000000000"),
    ("kv-transfer-base-latency", -1, "from 0 to 1000000000"), ("kv-transfer-base-latency", "inf", "from 0 to"),
    ("kv-transfer-base-latency", "nan", "from 0 to 1000000000"),
    ("profile", "/nowhere", "a file that can be read"),
    ("links", "/nowhere", "a file that can be read"), ("link", "dsk=3GB/s", "one of pcie, disk, net"),
    ("link", "disk=3", "NAME=BANDWIDTH[,LATENCY]"),
    ("transfers", "later", "'async', 'sync'"),
    ("policy", "fifo", "one of simple_lru"),
    ("preset", "fast", "'chat', 'document', 'batch'"),
    ("frequency-weight", 1.5, "from 0 to 1"), ("frequency-weight", "nan", "from 0 to 1"),
    ("frequency-credit-s", -1, "from 0 to 1000000000"), ("frequency-credit-s", "inf", "from 0 to 1000000000"),
    ("half-life-s", 0, "from 0.000001 to 1000000000"), ("half-life-s", "nan", "from 0.000001 to"),
    ("pin-tail-tokens", -1, "from 0 to 2147483647"), ("pin-ttl-s", -1, "from 0 to 1000000000"),
    ("priority-ttl-s", -1, "from 0 to 1000000000"), ("disk-admission", -1, "from 0 to 255"),
    ("disk-admission", 256, "from 0 to 255"),
    ("kv-offload-link-busy", "wait", "'queue', 'skip'"),
    ("prefetch", "magic", "'chain', 'ngram'"), ("prefetch-stop", "never", "'best_effort', 'wait_complete', 'timeout'"),
    ("prefetch-timeout-s", 0, "above 0 and at most 3600"), ("prefetch-timeout-s", 3_601, "above 0 and at most 3600"),
    ("prefetch-timeout-s", "nan", "above 0 and at most 3600"),
    ("thrash-window", "0s", "from 1ns to 1h"), ("thrash-window", "1", "a duration with a unit"),
    ("step-base", "0ns", "from 1ns to 2s"), ("step-base", "3s", "from 1ns to 2s"),
    ("step-base", "4", "a duration with a unit"), ("step-prefill-token", "3s", "from 0ns to 2s"),
    ("step-prefill-token", "8", "a duration with a unit"), ("step-decode-request", "-1ms", "a duration with a unit"),
    ("step-decode-request", "1h", "from 0ns to 2s"),
    ("max-num-batched-tokens", 0, "from 1 to 1048576"), ("max-num-batched-tokens", 2**20 + 1, "from 1 to 1048576"),
    ("max-waiting", 0, "from 1 to 1048576"), ("max-waiting", 2**20 + 1, "from 1 to 1048576"),
    ("max-num-seqs", 0, "from 1 to 1048576"), ("max-num-seqs", 2**20 + 1, "from 1 to 1048576"),
]
"""Flag of the cache, a value that it refuses, and words of the bound."""
OWN: Final[dict[str, list[tuple[str, Any, str]]]] = {
    "simulate": [
        ("limit", 0, "at least 1"), ("seed", -1, "from 0 to"), ("instances", 0, "from 1 to 256"),
        ("instances", 257, "from 1 to 256"), ("hosts", 0, "from 1 to 16"), ("hosts", 17, "from 1 to 16"),
        ("slo-ttft", "0ns", "from 1ns to 24h"), ("slo-ttft", "200", "a duration with a unit"),
        ("slo-itl", "25h", "from 1ns to 24h"),
        ("ranks", 0, "1<=x<=1024"), ("ranks", 1_025, "1<=x<=1024"),
        ("cleanup", "never", "'end', 'none', 'incremental'"), ("stats-every", -1, "at least 0"),
        ("format", "csv", "'text', 'json'"),
    ],
    "compare": [
        ("limit", 0, "at least 1"), ("seed", -1, "from 0 to"), ("total-kv-blocks", "0", f"from 1 to {BLOCKS}"),
        ("total-kv-blocks", "9,x", f"from 1 to {BLOCKS}"), ("kv-cpu-blocks", "-1", f"from 0 to {BLOCKS}"),
        ("instances", 0, "from 1 to 256"), ("instances", 257, "from 1 to 256"),
        ("policies", "fifo", "of simple_lru"), ("presets", "fast", "of chat, document, batch"),
        ("workers", 0, "1<=x<=1024"), ("format", "xml", "'text', 'csv', 'json'"),
    ],
    "serve": [("name", "x" * 65, "at most 64 printable"), ("limit", 0, "x>=1"), ("ranks", 0, "1<=x<=1024"),
              ("hosts", 0, "1<=x<=16"), ("speed", "0", "a factor from 0.001"), ("format", "csv", "'text', 'json'")],
    "demo": [("limit", 0, "x>=1"), ("ranks", 0, "1<=x<=1024"),
             ("speed", "0", "a factor from 0.001"), ("format", "csv", "'text', 'json'")],
}
"""Command to the further flags that it has, in the same form."""


def rows(command: str) -> list[tuple[str, Any, str]]:
    """All rows of a command: those of the cache whose flag it has and does not take as a list, and its own."""
    own = {flag for flag, _, _ in OWN[command]}
    return [row for row in CACHE if row[0] in options_of(command) and row[0] not in own] + OWN[command]


CASES: Final = [(command, *row) for command in USUAL for row in rows(command)]
KEYS: Final = [case for case in CASES if case[1] not in ("policies", "presets")]
"""Those that the file is refused for; lists of words are checked when the grid is made."""


def run(command: str, *args: str) -> Result:
    return CliRunner().invoke(cli, [command, *args], prog_name="kvbm-console")


@pytest.mark.parametrize(("command", "flag", "value", "bound"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_a_bad_flag_is_one_sentence_before_any_work(command: str, flag: str, value: Any, bound: str) -> None:
    usual = USUAL[command]
    kept = [part for at in range(0, len(usual), 2) if usual[at] != f"--{flag}" for part in usual[at : at + 2]]
    result = run(command, *kept, f"--{flag}", str(value))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert result.stderr.startswith("kvbm-console: ")
    assert f"--{flag}" in result.stderr
    assert bound in result.stderr
    said = str(value).split(",")[-1] if flag in ("total-kv-blocks", "kv-cpu-blocks") else str(value)
    assert flag == "kv-geometry" or flag.endswith("-size") or said in result.stderr


@pytest.mark.parametrize(("command", "flag", "value", "bound"), KEYS, ids=lambda value: str(value).replace(" ", ""))
def test_a_bad_key_is_one_sentence_that_names_file_and_section(
    tmp_path: Path, command: str, flag: str, value: Any, bound: str
) -> None:
    path = tmp_path / "config.toml"
    numeric = isinstance(value, float | int) or value in ("nan", "inf")
    text = str(value) if numeric else repr(str(value))
    path.write_text(f"[{command}]\n{flag} = {f'[{text}]' if flag == 'link' else text}\n")
    with pytest.raises(UsageError) as caught:
        read(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: [{command}] ")
    assert flag in said
    assert bound in said
    assert "\n" not in said


def test_the_tables_name_every_flag_of_the_cache() -> None:
    named = {flag.replace("-", "_") for flag, _, _ in CACHE}
    assert named == set(CACHE_FLAGS) - {"compat", "kv_offload_prompt_only", "used_at_end"}, "a switch has no bad value"
    for command in ("simulate", "serve", "demo"):
        assert named <= {flag.replace("-", "_") for flag in options_of(command)}, "one definition for all of them"
    numbers = (click.types.IntParamType, click.types.FloatParamType)
    for command in USUAL:
        bounded = {key for key, option in options_of(command).items() if isinstance(option.type, numbers)}
        assert bounded <= {flag for flag, _, _ in rows(command)} | {"seconds"}, command


@pytest.mark.parametrize("command", ["simulate", "serve", "demo"])
def test_two_ways_to_say_the_host_tier_contradict_each_other(command: str) -> None:
    result = run(command, *USUAL[command], "--kv-cpu-size", "64GiB", "--kv-cpu-blocks", "3")
    assert result.exit_code == 2
    assert "--kv-cpu-size and --kv-cpu-blocks say the same, got 64GiB and 3" in result.stderr


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_no_range_holds_what_is_no_number(words: tuple[str, ...]) -> None:
    for option in leaves()[words].params:
        if isinstance(option.type, click.FloatRange):
            with pytest.raises(click.BadParameter, match="nan is not in the range"):
                option.type.convert("nan", option, None)


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_an_empty_path_is_not_the_current_directory(words: tuple[str, ...]) -> None:
    for param in leaves()[words].params:
        if isinstance(param.type, click.Path):
            with pytest.raises(click.BadParameter, match="must be a path, got ''"):
                param.type.convert("", param, None)


@pytest.mark.parametrize("text", ["٣ms", "3٣ms"])
def test_a_duration_has_digits_of_ascii(text: str) -> None:
    result = run("simulate", *USUAL["simulate"], "--step-base", text)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"must be a duration with a unit such as 30s or 200ms, got '{text}'" in result.stderr


# --- files of the repository ---


def config_files() -> list[Path]:
    """Every configuration file that the repository ships."""
    return sorted(
        path for path in ROOT.glob("[!.]*/**/*.toml")
        if "tests" not in path.relative_to(ROOT).parts and path.name != "pyproject.toml"
    )


def test_every_configuration_file_of_the_repository_is_loaded() -> None:
    files = config_files()
    assert ROOT / "kvbm_console" / "planning" / "example.toml" in files
    for path in files:
        assert read(path), path


def test_a_stale_file_fails(tmp_path: Path) -> None:
    """A key that is not a flag any more is refused by its name, whichever line it stands in."""
    for path in config_files():
        lines = path.read_text(encoding="utf-8").splitlines()
        for at, line in enumerate(lines):
            if "=" not in line or line.startswith("#"):
                continue
            stale = tmp_path / "stale.toml"
            stale.write_text("\n".join([*lines[:at], f"old-{line}", *lines[at + 1 :]]), encoding="utf-8")
            with pytest.raises(UsageError, match=f"has no key 'old-{line.split()[0]}'"):
                read(stale)


def test_a_file_rules_a_run_and_the_command_line_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[simulate]\ntotal-kv-blocks = 40\nkv-cpu-blocks = 30\npolicy = "lfu"\nstats-every = 0\n')
    monkeypatch.setenv("KVBM_CONSOLE_CONFIG", str(path))
    trace = ("--trace", "multiturn:requests=12,sessions=3")
    said = ("--total-kv-blocks", "40", "--kv-cpu-blocks", "30", "--policy", "lfu", "--stats-every", "0")
    by_file = run("simulate", *trace, "--format", "json").stdout
    over = run("simulate", *trace, "--policy", "simple_lru", "--format", "json").stdout
    monkeypatch.setenv("KVBM_CONSOLE_CONFIG", "")
    assert by_file == run("simulate", *trace, *said, "--format", "json").stdout
    assert (json.loads(by_file)["policy"]["policy"], json.loads(over)["policy"]["policy"]) == ("lfu", "simple_lru")
