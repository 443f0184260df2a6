"""The wheel holds the library, the daemon and the console, and nothing of the tests."""

import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent.parent


def test_wheel_holds_all_packages(tmp_path: Path) -> None:
    (built,) = list(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(built) as wheel:
        names = set(wheel.namelist())
        scripts = next(wheel.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert "kvbm-console = kvbm_console.cli.main:main" in scripts
    for needed in (
        "kvbm_console/cli/main.py", "kvbm_console/core/events.py", "kvbm_console/wire/v1/console_pb2.py",
        "kvbm_console/py.typed", "server/daemon.py", "tui/app.py", "kvbm_console/case_files/cases.json",
        "kvbm_console/case_files/deadlock.mcap",
    ):
        assert needed in names, needed
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"kvbm_console", "server", "tui"}
