"""The console as a person meets it: on a terminal, drawn and left again."""

from pathlib import Path

from tests.cli.programs import on_terminal, serving


def test_demo_draws_the_console_and_ends_by_itself(tmp_path: Path) -> None:
    status, drawn = on_terminal(tmp_path, "demo", "--seconds", "3", "--speed", "4")
    assert status == 0, drawn[-2_000:]
    assert "LIVE" in drawn
    assert "incident" in drawn
    assert "Traceback" not in drawn
    state = tmp_path / "state" / "kvbm-console" / "demo"
    for command in ("attach http://HOST:8000", f"doctor {state}", f"replay {state}"):
        assert f"kvbm-console {command}" in drawn[-900:]


def test_attach_draws_a_running_daemon_and_q_leaves_it(tmp_path: Path) -> None:
    with serving(tmp_path, "--workload", "multiturn", "--speed", "4") as daemon:
        status, drawn = on_terminal(tmp_path, "attach", keys=b"q")
        assert status == 0, drawn[-2_000:]
        assert "LIVE" in drawn
        assert daemon.json("status")["stream"]["head_seq"] > 0


def test_attach_to_nobody_is_one_sentence(tmp_path: Path) -> None:
    status, drawn = on_terminal(tmp_path, "attach", "unix:nobody.sock")
    assert status == 3
    assert drawn.strip() == "kvbm-console: no daemon listens on unix:nobody.sock"
