"""The debugger from a shell, on a real daemon and on a recording.

Law of this file: real processes; nothing waits for time, what happens later is read from ``tail``.
"""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from kvbm_console.cli.ask import who
from kvbm_console.cli.attach import explainer
from kvbm_console.cli.replay import hit_finder
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import SlotState
from tests.cli.programs import output, run, serving

SERVE = ("--workload", "multiturn", "--speed", "8")
RECORDINGS = Path(__file__).parent.parent.parent / "recordings"


def test_a_breakpoint_with_everything_and_its_file(tmp_path: Path) -> None:
    file = tmp_path / "breakpoints.json"
    with serving(tmp_path, *SERVE) as daemon:
        daemon.output("break", "set", "--to", "decoding", "--action", "log", "--request", "nobody")
        said = daemon.json(
            "break", "set", "--site", "transition.did", "--from", "decoding", "--to", "preempted", "--request", "*",
            "--when", "tokens.computed > 16 and tiers.g1.available < 400", "--hits", ">=2", "--ignore", "1",
            "--action", "snapshot", "--suspend", "pipeline", "--once", "--after", "1", "--max-hold", "20s",
            "--on-timeout", "skip-candidate", "--expires", "2h", "--name", "mine",
        )
        assert said["verified"] is True
        first, second = daemon.json("break", "list")
        assert (first["action"], first["request"]) == ("log", "nobody")
        assert second["condition"] == "tokens.computed > 16 and tiers.g1.available < 400"
        assert (second["hit_condition"], second["ignore_count"], second["depends_on"]) == (">=2", 1, "1")
        assert (second["on_timeout"], second["suspend"], second["expires_ns"]) == (
            "skip_candidate", "pipeline", 2 * 3_600 * 10**9)
        assert daemon.output("break", "list").endswith(
            "mine; tokens.computed > 16 and tiers.g1.available < 400; hits >=2; ignore 1; after 1; once; "
            "suspends pipeline\n")
        assert daemon.output("break", "save", str(file)) == "saved 2\n"
        assert daemon.output("break", "disable", "2") == "breakpoint 2 muted\n"
        daemon.output("break", "clear")
        assert daemon.output("break", "load", str(file)) == "loaded 2\n"
        again = daemon.json("break", "list")
        runtime = {"id", "hits", "depends_on"}
        strip = [{key: value for key, value in entry.items() if key not in runtime} for entry in (first, second)]
        assert [{key: value for key, value in entry.items() if key not in runtime} for entry in again] == strip
        assert again[1]["depends_on"] == again[0]["id"]
        missing = run(tmp_path, "break", "set", "--to", "decoding", "--after", "99")
        assert missing.returncode == 1
        assert "breakpoint 99, on which it depends, does not exist" in missing.stderr


def test_log_points_freeze_and_the_other_verbs(tmp_path: Path) -> None:
    with serving(tmp_path, *SERVE) as daemon:
        daemon.output("break", "set", "--to", "decoding", "--log", "{request} decodes after {age}", "--once")
        hit = daemon.until("BreakpointHit")
        assert hit["action"] == "log"
        assert " decodes after " in hit["message"]

        assert daemon.output("freeze", "--max-hold", "100s") == "frozen\n"
        frozen = daemon.json("status")
        assert frozen["frozen"]["max_hold_ns"] == 100 * 10**9
        refused = run(tmp_path, "freeze")
        assert (refused.returncode, f"already frozen by {who()}" in refused.stderr) == (3, True)
        assert daemon.json("status")["stream"]["head_seq"] - frozen["stream"]["head_seq"] <= 1, "but for the refusal"
        assert daemon.output("run-for", "200ms") == "running\n"
        froze = [json.loads(line) for line in daemon.output(
            "tail", "--format", "jsonl", "--since", str(frozen["stream"]["head_seq"] + 1), "--filter",
            "kind = Frozen or kind = Thawed", "--count", "2").splitlines()]
        assert [event["kind"] for event in froze] == ["Thawed", "Frozen"]
        assert froze[1]["at_ns"] - froze[0]["at_ns"] == 200_000_000, "of the engine's time, to the nanosecond"
        assert daemon.output("thaw") == "thawed\n"
        assert daemon.output("thaw") == "nothing is frozen\n"
        assert daemon.output("holds", "--ended") == "no hold has ended or was refused\n"
        late = run(tmp_path, "holds", "--wait", "50ms")
        assert (late.returncode, late.stdout, late.stderr.strip()) == (1, "", "nothing stood still within 0.05 s")

        daemon.output("break", "set", "--site", "evaluate.will", "--suspend", "all", "--once", "--max-hold", "100s")
        (waited,) = daemon.json("holds", "--wait", "60s")
        hold = daemon.until("SlotHeld")
        assert (waited["id"], waited["pending"]) == (hold["hold"], False)
        assert hold["suspend"] == "all", "time stands still: the hold is there for as long as the test needs"
        (held,) = daemon.json("status", "--filter", "held and outstanding > 0")["slots"]
        assert daemon.output("holds").split()[-3:-1] == ["all", "2"], "what it suspends, and which breakpoint did it"
        assert held["slot"] == hold["slot"]
        assert daemon.json("status", "--filter", "held and not held")["slots"] == []
        assert daemon.output("skip", hold["hold"]) == "skipped\n"
        skipped = json.loads(daemon.output(
            "tail", "--format", "jsonl", "--since", str(hold["seq"]), "--filter", "reason = operator", "--count", "1"))
        assert skipped["kind"] == "CandidateSkipped"
        reason = f"its copies were skipped by {who()}"
        assert daemon.output("skip", hold["hold"]) == f"it has ended already: {reason}\n"
        (ended,) = daemon.json("holds", "--ended")
        assert (ended["id"], ended["why"], ended["by"], ended["text"]) == (hold["hold"], "skipped", who(), reason)
        assert (ended["request"], ended["site"], ended["times"]) == (held["request"], "evaluate.will", 1)
        assert daemon.output("holds", "--ended").splitlines()[1].endswith(reason)
        refused = run(tmp_path, "break", "set", "--to", "decoding", "--log", "{request}", "--wait", "1s")
        assert refused.returncode == 2
        assert "--wait needs a breakpoint that holds, got --action log" in refused.stderr


def test_until_and_step_from_a_shell(tmp_path: Path) -> None:
    with serving(tmp_path, *SERVE) as daemon:
        daemon.output("break", "set", "--to", "onboarding", "--once", "--max-hold", "100s", "--suspend", "all")
        first = daemon.until("SlotHeld")
        assert daemon.output("continue", first["hold"], "--until", "decoding") == "continued\n"
        second = daemon.until("SlotHeld", "--filter", f"kind = SlotHeld and slot = {first['slot']} and hold > "
                              f"{first['hold']}")
        assert (second["site"], second["owner"], second["breakpoints"]) == ("transition.did", who(), [])
        assert daemon.output("step", second["hold"]) == "stepped\n"


@pytest.mark.parametrize(
    ("arguments", "hits"),
    [
        (["--to", "decoding"], 6), (["--to", "decoding", "--request", "other-*"], 4),
        (["to = decoding and request ~ other-*"], 4), (["--to", "decoding", "--hits", "%2"], 3),
        (["--to", "decoding", "--ignore", "4"], 2), (["--to", "decoding", "--once"], 1),
        (["tiers.g2.resident > 0", "--site", "promote.will", "--route", "G2>G1"], 1),
    ],
)
def test_a_breakpoint_is_tried_on_a_recording(tmp_path: Path, arguments: list[str], hits: int) -> None:
    recording = str(RECORDINGS / "onboard-from-host.mcap")
    found = json.loads(output(tmp_path, "break", "test", *arguments, "--on", recording, "--format", "json"))
    assert found["hits"] == hits
    assert found["failed"] is None
    events = found["first"]
    assert [event["seq"] for event in events] == sorted(event["seq"] for event in events)
    text = output(tmp_path, "break", "test", *arguments, "--on", recording)
    assert text.startswith(f"{hits} hits, ")


def test_of_several_runs_the_last_one_or_the_one_that_was_named(tmp_path: Path) -> None:
    """On the shell, and in the console on a recording, which shows one run and asks about that one."""
    both = tmp_path / "runs"
    both.mkdir()
    for name, run_of in (("a", "preempt-and-resume"), ("b", "onboard-from-host")):
        shutil.copy(RECORDINGS / f"{run_of}.mcap", both / f"{name}.mcap")
    preempted = ("break", "test", "--to", "preempted", "--on", str(both))
    last = run(tmp_path, *preempted)
    assert (last.returncode, last.stderr) == (1, "")
    assert last.stdout.startswith("0 hits, ")
    assert last.stdout.endswith(" stimuli of run onboard-from-host, one of 2 (--run ID looks into another)\n")
    named = json.loads(output(tmp_path, *preempted, "--run", "preempt-and-resume", "--format", "json"))
    alone = json.loads(output(
        tmp_path, *preempted[:-1], str(RECORDINGS / "preempt-and-resume.mcap"), "--format", "json"))
    assert (named.pop("runs"), alone.pop("runs")) == (2, 1)
    assert named == alone
    assert named["hits"]
    wrong = run(tmp_path, *preempted, "--run", "nobody")
    assert (wrong.returncode, wrong.stdout) == (3, "")
    assert "holds no run 'nobody', but preempt-and-resume, onboard-from-host" in wrong.stderr

    specs = [BreakpointSpec(to_state=SlotState.PREEMPTED)]
    seqs = [hit["seq"] - 1 for hit in named["first"]]
    assert asyncio.run(hit_finder(both, "preempt-and-resume")(specs)) == seqs
    assert asyncio.run(hit_finder(both, "onboard-from-host")(specs)) == []
    request = named["first"][0]["request"]
    explained = asyncio.run(explainer("--run", "preempt-and-resume", path=both)(request))
    assert explained.request == request


def test_a_file_holds_one_run(tmp_path: Path) -> None:
    recording = str(RECORDINGS / "onboard-from-host.mcap")
    output(tmp_path, "rec", "info", recording, "--run", "onboard-from-host")
    wrong = run(tmp_path, "rec", "info", recording, "--run", "other")
    assert (wrong.returncode, wrong.stdout) == (3, "")
    assert "onboard-from-host.mcap holds the run 'onboard-from-host' and not 'other'" in wrong.stderr


def test_one_that_never_hits_is_exit_1(tmp_path: Path) -> None:
    recording = str(RECORDINGS / "local-only.mcap")
    done = run(tmp_path, "break", "test", "blocks > 1M", "--on", recording)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("0 hits, 0 matches in ")
    wrong = run(tmp_path, "break", "test", "blocks > 1 ms", "--on", recording)
    assert wrong.returncode == 2
    assert "column 12: `ms` is a unit of a duration" in wrong.stderr
