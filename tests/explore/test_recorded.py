"""A finding's recording is what the tap told, ends with the verdict, opens there, and is named first."""

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.lints import Level
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.cli import output
from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core.ids import Note
from kvbm_console.explore.recorded import STEP_NS, record
from kvbm_console.explore.search import Search, SearchReport
from kvbm_console.recording.positions import verdict_seq
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from kvbm_console.testing import assert_invariants, assert_replays
from tests.explore.test_search import search
from tests.tap.kept import kept
from tui import app
from tui.model.lints import Lints
from tui.model.mirror import Mirror
from tui.source import TargetSession


def answers(steps: int, name: str = "alone") -> list[dict[str, Any]]:
    """The answers of a worker that recorded this many steps of vLLM's own scheduler."""
    run = kept(name)
    told: list[dict[str, Any]] = [{"settings": run["settings"]}]
    for number, (messages, _) in enumerate(run["steps"][:steps]):
        told.append({"step": number, "messages": base64.b64encode(msgspec.msgpack.encode(messages)).decode()})
    return json.loads(json.dumps(told))  # a worker writes lines of JSON


def live_request(steps: int) -> str:
    """A request that is live after so many steps."""
    return next(iter(kept("alone")["steps"][steps - 1][1]["requests"]))


def test_the_verdict_is_the_last_event_the_first_finding_and_the_place_where_it_opens(tmp_path: Path) -> None:
    name = live_request(40)
    sentence = f"request {name} reads block 1 and finds nothing"
    path = record(answers(40), {"monitor": "right content", "sentence": sentence}, tmp_path / "x.mcap", "content")
    recording = Recording.open(path)
    events = [event for batch in recording.events() for event in batch]
    last = events[-1]
    assert isinstance(last, ev.Noted)
    assert (last.note, last.detail) == (Note.VERDICT, f"right content: {sentence}")
    assert verdict_seq(recording) == last.seq == recording.last_seq
    assert any(isinstance(event, ev.SlotOpened) and event.request == name for event in events)
    assert {event.at_ns % STEP_NS for event in events} == {0}
    assert all(one.at_ns <= other.at_ns for one, other in pairwise(events))
    first = diagnose(evidence_of(recording)).findings[0]
    assert (first.lint, first.level, first.who, first.what, first.because) == (
        "verdict", Level.FAULT, name, "right content", sentence)
    mirror = Mirror()
    mirror.take(SnapshotTaken(recording.state_at(recording.first_seq - 1)), 0)
    mirror.take(EventsArrived(events), 0)
    lints = Lints()
    lints.check(mirror, 0)
    warning = lints.warnings(0)[0]
    assert (warning.kind, warning.who, warning.what, warning.seq) == ("verdict", name, "right content", last.seq)
    assert_replays(path)
    assert_invariants(path)


def test_the_same_answers_are_the_same_recording(tmp_path: Path) -> None:
    verdict = {"monitor": "progress", "sentence": "nothing was scheduled"}
    one, other = (record(answers(30), verdict, tmp_path / f"{at}.mcap", "x").read_bytes() for at in range(2))
    assert one == other


def test_a_finding_of_a_model_with_several_groups_is_recorded(tmp_path: Path) -> None:
    path = record(answers(20, "hybrid"), {"monitor": "right content", "sentence": "x"}, tmp_path / "x.mcap", "content")
    assert len(Recording.open(path).state_at(Recording.open(path).last_seq).pools) > 1
    assert_replays(path)


def test_a_recording_without_a_verdict_has_no_place_for_one() -> None:
    assert verdict_seq(Recording.open(Path("recordings/stuck-slot.mcap"))) is None


@pytest.mark.parametrize("how", ["ends", "dies"])
def test_a_search_records_its_findings_also_when_the_process_dies(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "tap.jsonl"
    told.write_text("".join(json.dumps(answer) + "\n" for answer in answers(20)))
    monkeypatch.setenv("FAKE_ENGINE_TAP", str(told))
    monkeypatch.setenv("FAKE_ENGINE", how)
    one, report = recorded(tmp_path)
    (finding,) = report.findings.values()
    assert finding.recording == tmp_path / "recording.mcap"
    one.record(report, {finding.signature: tmp_path / "recording.mcap"})  # once more, over the old one
    done = CliRunner().invoke(cli, ["doctor", str(finding.recording), "--brief"])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0] == "!! engine  progress  nothing was scheduled"
    opened: list[TargetSession] = []
    monkeypatch.setattr(output, "require_terminal", lambda *_: None)
    monkeypatch.setattr(app, "run_console", lambda session, **_: opened.append(session))
    assert CliRunner().invoke(cli, ["replay", str(finding.recording)]).exit_code == 0
    (session,) = opened
    assert session.playback is not None
    assert session.playback.position_seq == Recording.open(finding.recording).last_seq


def test_where_the_tap_does_not_fit_the_reason_is_told(tmp_path: Path) -> None:
    _, report = recorded(tmp_path)
    (finding,) = report.findings.values()
    assert (finding.recording, finding.unrecorded) == (None, "the tap does not fit here")


def recorded(place: Path) -> tuple[Search, SearchReport]:
    """A search that found seed 3, and recorded it."""
    one = search(seeds=range(4))
    report = one.run()
    one.record(report, dict.fromkeys(report.findings, place / "recording.mcap"))
    return one, report
