"""The commands and queries of recordings/ASKING.md are run as they are printed; its tables name all that there is."""

import re
import shlex
import shutil
from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner

from kvbm_console.analysis.explain import Missed
from kvbm_console.analysis.explain import course as times
from kvbm_console.cli.main import cli
from tests.engines.test_dynamo import written

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "recordings" / "ASKING.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_commands_and_queries_run_as_they_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "recordings", tmp_path / "recordings", ignore=shutil.ignore_patterns("screens", "*.py"))
    (tmp_path / "records.jsonl").write_text(written("chats").text())
    monkeypatch.chdir(tmp_path)
    for command in (line for block in blocks("sh") for line in block.splitlines()):
        program, *arguments = shlex.split(command)
        assert program == "kvbm-console"
        result = CliRunner().invoke(cli, arguments)
        finds = arguments[0] == "doctor" or arguments[:2] == ["rec", "diff"]
        assert result.exit_code == int(finds), (command, result.output)
    answers = [duckdb.sql(query).fetchall() for query in blocks("sql")]
    assert len(answers) == 3
    assert all(answers), answers
    assert {route for route, *_ in answers[1]} == {"G1>G2", "G2>G1"}
    assert sum(share for _, share in answers[2]) == pytest.approx(1)


def test_every_reason_and_every_part_of_time_is_described() -> None:
    for reason in Missed:
        assert f"| `{reason.value}` |" in TEXT
    for what in (times.QUEUE, times.LOOKUP, times.HOLD, times.TRANSFER_QUEUE, times.WIRE, times.COMPUTE, times.SKIPPED,
                 times.RELEASE, times.UNKNOWN):
        assert f"`{what}`" in TEXT
