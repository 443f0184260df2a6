"""The console as a person meets it: on a terminal, drawn and left again."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvbm_console.analysis.fleet import DaemonRow
from kvbm_console.cli.main import cli
from tests.cli.programs import on_terminal, serving

THRASH = Path(__file__).resolve().parents[2] / "recordings" / "thrash.mcap"


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


@pytest.mark.parametrize("status", [0, 1, 143])
def test_replay_ends_with_the_status_of_its_console(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm_console.cli.output.require_terminal", lambda *_: None)
    monkeypatch.setattr("tui.app.run_console", lambda session, **_: status)
    assert CliRunner().invoke(cli, ["replay", str(THRASH)]).exit_code == status


@pytest.mark.parametrize("status", [0, 1, 143])
def test_a_fleet_ends_with_a_console_that_did_not_end_well(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = [DaemonRow("unix:one.sock"), None]

    async def shown(app: object, **_: Any) -> DaemonRow | None:
        return opened.pop(0)

    async def console(addresses: list[str]) -> int:
        return status

    monkeypatch.setattr("kvbm_console.cli.fleet.on_terminal", lambda: True)
    monkeypatch.setattr("tui.fleet.FleetApp.run_async", shown)
    monkeypatch.setattr("kvbm_console.cli.attach.console", console)
    assert CliRunner().invoke(cli, ["fleet", "unix:one.sock"]).exit_code == status
    assert opened == ([None] if status else []), "only who left a console comes back to the fleet"
