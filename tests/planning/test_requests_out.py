"""``simulate --requests-out`` and goodput, as the command runs them.

Law of this file: what the report says of all requests follows from the rows of the file.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli.main import cli

CHATS = (
    "simulate", "--trace",
    "multiturn:requests=40,sessions=8,prompts=2,system=96,user=64,output=40,turns=3,think=0.3,ramp=0.005",
    "--total-kv-blocks", "40", "--stats-every", "0",
)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, [*CHATS, *args], prog_name="kvbm-console")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows, numbers as numbers."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return [
            {key: int(value) if value.isdigit() else value or None for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize("more", [(), ("--kv-cpu-blocks", "200", "--kv-offload-threshold", "0"), ("--instances", "2")])
def test_the_report_follows_from_the_rows(tmp_path: Path, more: tuple[str, ...]) -> None:
    found = []
    for suffix in ("jsonl", "csv"):
        path = tmp_path / f"rows.{suffix}"
        limits = ("--slo-ttft", "60ms", "--slo-itl", "4500us")
        result = run(*more, *limits, "--requests-out", str(path), "--format", "json")
        assert result.exit_code == 0, result.output
        found.append((json.loads(result.stdout), rows_of(path)))
    assert found[0] == found[1]
    document, rows = found[0]
    assert len(rows) == document["requests_completed"] == 40
    good = [
        row for row in rows if row["first_token_ns"] - row["arrived_ns"] <= 60_000_000
        and row["finished_ns"] - row["first_token_ns"] <= 4_500_000 * (row["output_tokens"] - 1)
    ]
    assert 0 < len(good) < 40
    duration_s = max(row["finished_ns"] for row in rows) / 1e9
    assert document["goodput"] == {
        "slo_ttft_ms": 60.0, "slo_itl_ms": 4.5, "requests": len(good), "share": len(good) / 40,
        "requests_per_s": len(good) / duration_s,
    }
    assert document["ttft_ms"]["max"] == max(row["first_token_ns"] - row["arrived_ns"] for row in rows) / 1e6
    assert document["output_tokens"] == sum(row["output_tokens"] for row in rows)
    assert document["preemptions"] == sum(row["preemptions"] for row in rows) > 0


def test_without_a_limit_there_is_no_goodput() -> None:
    assert json.loads(run("--format", "json").stdout)["goodput"] is None
    assert "goodput" not in run().stdout
    assert "requests within ttft 60 ms: " in run("--slo-ttft", "60ms").stdout


@pytest.mark.parametrize(("args", "said"), [
    (("--requests-out", "rows.txt"), "--requests-out must end in .jsonl or .csv, got 'rows.txt'"),
    (("--requests-out", "/nowhere/rows.csv"), "--requests-out cannot be written: No such file or directory"),
    (("--cache-only", "--slo-ttft", "1s"), "--slo-ttft needs an engine"),
    (("--cache-only", "--requests-out", "rows.csv"), "--requests-out needs an engine"),
])
def test_what_cannot_be_is_one_sentence(args: tuple[str, ...], said: str) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert said in result.stderr


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_an_earlier_file_outlives_a_run_that_fails(tmp_path: Path, suffix: str) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 5, "output_length": 4, "hash_ids": [1]}\n'
    trace.write_text(line + "no request\n")
    path = tmp_path / f"precious.{suffix}"
    path.write_text("precious")
    result = CliRunner().invoke(cli, ["simulate", "--trace", str(trace), "--requests-out", str(path)])
    assert (result.exit_code, f"{trace} line 2" in result.stderr) == (2, True)
    assert path.read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == [path, trace]
