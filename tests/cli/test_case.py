"""Each case shows what its answer says: the event that decides it is in its recording, and its request exists."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kvbm_console
from kvbm_console.cases import RecordedCase, all_cases
from kvbm_console.cli.main import cli
from kvbm_console.core.describe import kind
from recordings.case_scenarios import CASES
from recordings.regenerate import answer_of

BYTES_MAX = 2_000_000


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, ["case", *words], prog_name="kvbm-console")


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_the_answer_names_an_event_of_the_recording(case: RecordedCase) -> None:
    opened = kvbm_console.open(case.path)
    events = {event.seq: event for batch in opened.recording.events() for event in batch}
    event = events[case.event.seq]
    assert (kind(event), event.at_ns) == (case.event.kind, case.event.at_ns)
    assert case.request is None or case.request in opened.requests["request"].to_pylist()
    (made,) = (one for one in CASES if one.name == case.name)
    assert answer_of(made)["event"] == {"seq": case.event.seq, "at_ns": case.event.at_ns, "kind": case.event.kind}


def test_there_are_ten_cases_of_two_megabytes_together() -> None:
    cases = all_cases()
    assert len(cases) >= 10
    assert sum(Path(case.path).stat().st_size for case in cases) < BYTES_MAX
    assert [case.name for case in cases] == [case.name for case in CASES]


def test_a_case_is_told_with_its_answer_only_when_asked() -> None:
    listed, told, answered = run(), run("failed-load"), run("failed-load", "--answer")
    assert all(case.question in listed.stdout for case in all_cases())
    assert "checksum" not in told.stdout
    assert "checksum" in answered.stdout
    assert "OperationReported" in answered.stdout
    assert json.loads(run("failed-load", "--format", "json").stdout)[0]["event"]["kind"] == "OperationReported"
    assert run("--open").exit_code == 2
    wrong = run("nothing")
    assert wrong.exit_code == 3
    assert "there is no case 'nothing', but stuck-rank" in wrong.stderr
