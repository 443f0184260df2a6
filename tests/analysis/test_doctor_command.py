"""``doctor``: exit 1 when something is wrong, 0 when not, 2 for mistakes; its text says what to do."""

import json
import shutil
from pathlib import Path

from click.testing import CliRunner, Result

from kvbm_console.cli.main import cli
from tests.analysis.deadlocks import stands_still

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, arguments)])


def test_the_stuck_slot_is_found() -> None:
    result = run(RECORDINGS / "stuck-slot.mcap")
    assert result.exit_code == 1
    assert "!! agent-0093  finishing 1m03s" in result.output
    assert "silent on rank 1" in result.output
    assert "refused 124 times  request_finished: request 'agent-0093' is finishing already" in result.output
    assert "\n   do    " in result.output
    assert "2 faults, 1 caution in 457 events of 13 requests" in result.output


def test_a_healthy_recording_is_fine() -> None:
    result = run(RECORDINGS / "onboard-from-host.mcap")
    assert result.exit_code == 0
    assert result.output.startswith("nothing wrong in ")


def test_thrash_is_unknown_where_only_streams_report() -> None:
    stream = RECORDINGS / "kv-events" / "multiturn.mcap"
    document = json.loads(run(stream, "--format", "json").output)
    assert (document["evicted_blocks"], document["thrash_blocks"], document["thrash_rate"]) == (50, None, None)
    assert run(stream).output.endswith(", thrash unknown of 50 evicted blocks\n")


def test_brief_is_one_line_each() -> None:
    lines = run(RECORDINGS / "stuck-slot.mcap", "--brief").output.splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith("2 faults, 1 caution")


def test_requests_with_the_same_trouble_are_one_problem_with_its_worst_and_their_number(tmp_path: Path) -> None:
    stands_still(loads=True).record(tmp_path, [7])
    lines = run(tmp_path, "--brief").output.splitlines()
    assert " ! 8 requests  onboarding 12s  worst loaded: waits for op 0 on G2→G1" in lines
    assert lines[-1].startswith("2 cautions in ")
    told = run(tmp_path).output
    assert "   also  head preempted 12s, other-0 initialized 12s" in told
    document = json.loads(run(tmp_path, "--format", "json").output)
    assert [one["lint"] for one in document["findings"]].count("stuck") == 8


def test_a_deadlock_is_one_fault_and_nothing_else(tmp_path: Path) -> None:
    stands_still().record(tmp_path, [7])
    result = run(tmp_path, "--brief")
    assert result.exit_code == 1
    (line, _, summary) = result.output.splitlines()
    assert line == (
        "!! engine 1  deadlock 12s  0 running, 8 waiting: head wants 13 G1 blocks, 7 free; "
        "behind it wait loaded (holds 9) and 6 more"
    )
    assert summary.startswith("1 fault in ")


def test_the_document() -> None:
    result = run(RECORDINGS / "gap.mcap", "--format", "json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert not document["ok"]
    assert document["lost_events"] == document["findings"][0]["count"] > 0
    assert document["requests"] == 6
    assert document["findings"][0]["lint"] == "lost"


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.mcap"
    damaged.write_bytes((RECORDINGS / "gap.mcap").read_bytes()[:400])
    for arguments in ((damaged,), (tmp_path,), (tmp_path / "none",), (damaged, "--target", "unix:/x")):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output


def test_one_of_several_runs(tmp_path: Path) -> None:
    for number, name in enumerate(("stuck-slot", "local-only"), 1):
        shutil.copy(RECORDINGS / f"{name}.mcap", tmp_path / f"{number:06}-000000000000.mcap")
    assert run(tmp_path).exit_code == 0
    assert run(tmp_path, "--run", "stuck-slot").exit_code == 1
    unknown = run(tmp_path, "--run", "nobody")
    assert unknown.exit_code == 3
    assert "holds no run 'nobody', but stuck-slot, local-only" in unknown.output
    assert run("--run", "nobody").exit_code == 2
