"""A recording opened for a notebook says what the commands say, and the notebook of the documents runs."""

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow
import pytest
from click.testing import CliRunner

import kvbm_console
from kvbm_console.analysis.notebook import RecordedRun
from kvbm_console.cli.main import cli
from kvbm_console.core.errors import NotFound, RecordingError, UsageError
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.recording.reader import Recording

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
TABLES = ("requests", "states", "holds", "copies", "tiers", "engine", "gaps", "events")


def opened(name: str) -> RecordedRun:
    return kvbm_console.open(ROOT / "recordings" / f"{name}.mcap")


def command(*arguments: Any) -> Any:
    done = CliRunner().invoke(cli, [*map(str, arguments), "--format", "json"])
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["thrash", "gap", "breakpoint-hold", "local-only"])
def test_tables_are_the_tables_of_the_export(name: str, tmp_path: Path) -> None:
    path = ROOT / "recordings" / f"{name}.mcap"
    command("rec", "export", path, "--to", "parquet", "--out", tmp_path / "out")
    run = opened(name)
    for table in TABLES:
        file = "transfers" if table == "copies" else table
        exported = duckdb.sql(f"select * from '{tmp_path}/out/{file}.parquet'").to_arrow_table()
        ours: pyarrow.Table = getattr(run, table)
        assert ours.to_pylist() == exported.to_pylist(), table
        assert getattr(run, table) is ours, "it is read once"


def test_facts_at_a_place_are_those_of_the_recording() -> None:
    run = opened("breakpoint-hold")
    recording = Recording.open(run.recording.path)
    seq = recording.first_seq + 100
    found = run.at(seq)
    assert encode_facts(found.state) == encode_facts(recording.state_at(seq))
    assert {slot["request"] for slot in found.slots} == {slot.request for slot in found.state.slots.values()}
    assert run.at("end").seq == run.last_seq == recording.last_seq
    with pytest.raises(RecordingError):
        run.at(run.last_seq + 1)
    with pytest.raises(UsageError):
        run.at("yesterday")


def test_questions_are_answered_as_by_the_commands() -> None:
    run = opened("offload-pressure")
    told = command("why", "chat.1", run.recording.path)
    assert [part["ns"] for part in told["spent"]["parts"]] == [part.ns for part in run.why("chat.1").spent.parts]
    assert command("doctor", run.recording.path)["events"] == run.doctor().events
    other = opened("two-hosts")
    assert command("rec", "diff", run.recording.path, other.recording.path)["first"]["seq_a"] == \
        (run.diff(other).first.seq_a if run.diff(other).first else None)
    with pytest.raises(NotFound):
        run.why("nobody")


def test_the_notebook_of_the_documents_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells are executed in order in one namespace, as a kernel does."""
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) >= 5
    for number, source in enumerate(sources):
        exec(compile(source, f"cell {number}", "exec"), names)
    assert names["slowest"][0][2] > 0
    assert names["run"].doctor().findings[0].lint == "thrash"
    assert any(part.what == "compute" for part in names["told"].spent.parts)


def test_the_document_lists_every_public_name() -> None:
    text = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    public = [name for name in vars(RecordedRun) if not name.startswith("_")]
    assert not [name for name in public if f"`run.{name}" not in text]
