"""The pytest plugin: fixtures that record a leader and keep the recording of a test that fails.

``kvbm_run``     runs requests through a leader with a simulated engine around it.
``kvbm_leader``  a leader that the test calls like a connector does.
``kvbm_open``    opens a recording.
``--kvbm-record [DIR]``  records every leader of every test.

Law of this file: importing it costs nothing, because fixtures and the option import the package.
"""

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from kvbm_console.core.config import LeaderConfig
    from kvbm_console.recording.reader import Recording
    from kvbm_console.simulator.config import EngineConfig
    from kvbm_console.simulator.embedded import Rig
    from kvbm_console.simulator.workloads import Request, Workload
    from kvbm_console.testing import Driven, Run, Taped
    from kvbm_console.testing.run import Tapes

DEFAULT_DIRECTORY: Final = "kvbm-recordings"
"""Directory of ``--kvbm-record``, below the directory where pytest was started."""
_TAPED: Final = pytest.StashKey[list["Taped"]]()
_TAPES: Final = pytest.StashKey["Tapes"]()
"""Of ``--kvbm-record``: the leaders of the test and its fixtures."""


class _Fixture:
    """Makes leaders for the test of ``request``; their recordings go to ``directory``."""

    def __init__(self, request: pytest.FixtureRequest, directory: Path) -> None:
        self._name, self._directory = request.node.nodeid, directory
        self._taped: list[Taped] = request.node.stash.setdefault(_TAPED, [])


class RunRequests(_Fixture):
    """The fixture ``kvbm_run``."""

    def __call__(
        self, requests: "Sequence[Request] | Workload", *, config: "LeaderConfig | None" = None,
        engine: "EngineConfig | None" = None, drive: "Callable[[Rig], object] | None" = None, **fields: Any,
    ) -> "Run":
        """Run requests, or a workload, to their end, and return the run.

        ``fields`` are fields of ``LeaderConfig`` where no ``config`` is given. ``drive`` gets the machine
        (``simulator.embedded.Rig``) and runs it in its own way: it may set breakpoints, inject faults, stop early.
        """
        from kvbm_console.core.config import LeaderConfig
        from kvbm_console.simulator.embedded import default_engine_config
        from kvbm_console.testing import Prompts, Run

        config = _one_config(config, fields) or LeaderConfig(**fields)
        workload = Prompts(requests, config.block_tokens) if isinstance(requests, Sequence) else requests
        made = Run(self._name, self._directory, workload, config, engine or default_engine_config(workload))
        self._taped.append(made)  # before the run, so that a failing leader is recorded, too
        made.go(drive)
        return made


class DriveLeader(_Fixture):
    """The fixture ``kvbm_leader``."""

    def __call__(
        self, config: "LeaderConfig | None" = None, *, g1_blocks: int = 64, **fields: Any
    ) -> "Driven":
        """A leader with its pools declared; ``fields`` are fields of ``LeaderConfig`` where no ``config`` is given."""
        from kvbm_console.core.config import LeaderConfig
        from kvbm_console.testing import Driven

        made = Driven(self._name, self._directory, _one_config(config, fields) or LeaderConfig(**fields), g1_blocks)
        self._taped.append(made)
        return made


def _one_config(config: "LeaderConfig | None", fields: dict[str, Any]) -> "LeaderConfig | None":
    if config is not None and fields:
        raise TypeError(f"give config or fields of a LeaderConfig, not both: {', '.join(fields)} would be ignored")
    return config


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--kvbm-record``."""
    group = parser.getgroup("kvbm-console")
    group.addoption(
        "--kvbm-record", nargs="?", const=DEFAULT_DIRECTORY, default=None, metavar="DIR",
        help=f"record every leader of every test into DIR (default {DEFAULT_DIRECTORY})",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a ``--kvbm-record`` that cannot be a directory, before tests run for nothing."""
    directory = _record_directory(config)
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"--kvbm-record needs a directory, and {directory} is none: {error.strerror}"
            raise pytest.UsageError(why) from None


def _record_directory(config: pytest.Config) -> Path | None:
    """The directory of ``--kvbm-record``; a relative one is below the directory where pytest was started."""
    named = config.getoption("--kvbm-record")
    return None if named is None else config.invocation_params.dir / named


@pytest.fixture
def kvbm_open(request: pytest.FixtureRequest) -> "Callable[[Path | str], Recording]":
    """Opens a recording; a relative path is relative to the test's file."""
    from kvbm_console.recording.reader import Recording

    beside = request.path.parent

    def open_recording(path: Path | str) -> Recording:
        place = Path(path)
        return Recording.open(place if place.is_absolute() or place.exists() else beside / place)

    return open_recording


@pytest.fixture
def kvbm_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunRequests:
    """Runs requests through a leader with a simulated engine, in virtual time, and records the leader."""
    return RunRequests(request, _directory(tmp_path_factory))


@pytest.fixture
def kvbm_leader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DriveLeader:
    """A leader that the test calls like a connector does, and that is recorded."""
    return DriveLeader(request, _directory(tmp_path_factory))


def _directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "kvbm-recordings"


# --- keeping ---------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With ``--kvbm-record``: tape every leader of the test and its fixtures, then write the tapes."""
    directory = _record_directory(item.config)
    if directory is None:
        return (yield)
    from kvbm_console.testing import taping

    with taping() as tapes:
        item.stash[_TAPES] = tapes
        try:
            return (yield)
        finally:
            _write_all(tapes, directory, item.nodeid)


def _write_all(tapes: "Tapes", directory: Path, name: str) -> list[str]:
    """Write the tapes in place of the recordings of an earlier run of the same test."""
    from kvbm_console.testing.run import safe_name

    stem = safe_name(name)
    for old in directory.glob(f"{stem}-*.mcap"):
        if old.stem.removeprefix(f"{stem}-").isdecimal():  # others are of tests whose names begin alike
            old.unlink()
    kept = []
    for number, tape in enumerate(tape for tape in tapes.all if tape.events):
        kept.append(str(tape.save(directory / f"{stem}-{number}.mcap", name)))
    if tapes.not_taped:
        kept.append(f"{tapes.not_taped} more leaders were not recorded")
    return kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed keeps its recordings, and its report says where they are."""
    report = yield
    if report.failed:
        tapes, directory = item.stash.get(_TAPES, None), _record_directory(item.config)
        if tapes is not None and directory is not None:
            lines = _write_all(tapes, directory, item.nodeid)
        else:
            lines = [_keep(taped) for taped in item.stash.get(_TAPED, [])]
        if lines:
            report.sections.append(("kvbm-console", "\n".join(_told(line) for line in lines)))
    return report


def _keep(taped: "Taped") -> str:
    try:
        return str(taped.path)
    except Exception as error:
        return f"not recorded: {error}"


def _told(line: str) -> str:
    if not line.endswith(".mcap"):
        return line
    return f"recording kept: {line}\n  kvbm-console replay {line}\n  kvbm-console doctor {line}"
