"""``why`` and ``doctor`` on a running daemon: the same answers as on its recording, from what its ring still holds."""

import json
from pathlib import Path

from tests.cli.programs import run, serving


def test_why_and_doctor_on_a_daemon_that_ended_its_work(tmp_path: Path) -> None:
    with serving(tmp_path, "--workload", "multiturn:requests=30", "--speed", "max", "--record", "run") as daemon:
        daemon.until("SlotClosed")
        opened = daemon.until("SlotOpened")
        live = daemon.json("why", opened["request"])
        assert live["request"] == opened["request"]
        assert live["slot"] == opened["slot"]
        assert live["admissions"][0]["misses"][0]["reason"] == "never_stored"
        found = run(tmp_path, "doctor", "--format", "json")
        assert found.returncode in (0, 1), found.stderr
        diagnosis = json.loads(found.stdout)
        assert found.returncode == (not diagnosis["ok"])
        assert diagnosis["requests"] >= 1
        assert diagnosis["lost_events"] == 0
        unknown = run(tmp_path, "why", "nobody")
        assert unknown.returncode == 3
        assert "has no request 'nobody'" in unknown.stderr
        assert daemon.stop()[0] == 0
    recorded = json.loads(run(tmp_path, "why", opened["request"], "run", "--format", "json").stdout)
    for one in (live, recorded):
        for key in ("evidence", "spent", "state"):
            one.pop(key)
    assert live["admissions"][:1] == recorded["admissions"][:1]


def test_without_a_daemon_it_is_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor")
    assert done.returncode == 3
    assert len(done.stderr.strip().splitlines()) == 1
