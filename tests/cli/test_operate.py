"""``reset`` and ``drain`` as users run them: real processes, exit statuses, ctrl-c."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.programs import DEADLINE_S, PROGRAM, environment, output, run, serving

BUSY = ("--workload", "multiturn:sessions=10,ramp=0.05,think=0.1")


@pytest.mark.slow
def test_reset_and_drain_in_text_and_json_and_a_rerun_is_equal(tmp_path: Path) -> None:
    with serving(tmp_path, *BUSY, "--record", "run") as daemon:
        daemon.output("break", "set", "--to", "decoding", "--max-hold", "100s")
        daemon.until("SlotHeld")
        over = run(tmp_path, "drain", "--for", "1ns", "--format", "json")
        assert over.returncode == 1, over.stderr
        report = json.loads(over.stdout)
        assert (report["drained"], report["epoch"]) == (False, 1)
        assert {"request", "state", "copies"} == set(report["remaining"][0])
        found = daemon.json("reset", "--physical")
        assert (found["mode"], found["epoch"]) == ("physical", 2)
        assert set(found) == {"mode", "epoch", "aborted_requests", "quarantined_blocks"}
        cleared = daemon.until("ResetDone")["seq"]
        daemon.until("SlotHeld", "--filter", f"kind = SlotHeld and seq > {cleared}")
        waiting = subprocess.Popen(
            [PROGRAM, "drain", "--for", "1h"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(tmp_path),
        )
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("draining: ")
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=DEADLINE_S)
        assert (waiting.returncode, out) == (130, "")
        assert "the daemon goes on draining" in err
        again = run(tmp_path, "drain")
        assert again.returncode == 3
        assert "the leader drains already" in again.stderr
        daemon.output("continue", "--all")
        status, _, err = daemon.stop()
        assert status == 0, err
    assert output(tmp_path, "rec", "verify", "run").endswith("equal\n")


def test_a_bound_that_makes_no_sense_is_one_sentence(tmp_path: Path) -> None:
    for value in ("0s", "25h", "soon"):
        done = run(tmp_path, "drain", "--for", value)
        assert done.returncode == 2
        assert "--for" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
