"""Files that commands write in place of others.

Law of this file: what was there stays until the new file is complete, and a refusal names the path that the user gave.
"""

import os
import resource
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.debug.files import read_specs, write_specs
from kvbm_console.files import replacing
from tests.cli.programs import PROGRAM

SPECS = [BreakpointSpec(id=3, condition="waiting > 2")]


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write_specs(link, SPECS)
    assert link.is_symlink()
    assert (read_specs(real), real.stat().st_mode & 0o777) == (SPECS, 0o600)


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=f"^{pipe} is no regular file, and would be replaced$"):
        write_specs(pipe, SPECS)
    assert pipe.is_fifo()


def test_a_directory_that_is_missing_is_named_as_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "nope" / "x"
    with pytest.raises(OSError, match="No such file") as caught:
        write_specs(path, SPECS)
    assert caught.value.filename == str(path)


def test_a_block_that_fails_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ValueError, match="why"), replacing(path) as draft:  # noqa: PT012
        draft.write_text("half")
        raise ValueError("why")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_a_configuration_outlives_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("# mine\n")
    environment = {**os.environ, "KVBM_CONSOLE_CONFIG": str(path)}
    done = subprocess.run(
        [PROGRAM, "config", "init", "--force"], env=environment, capture_output=True,
        text=True, check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kvbm-console: {path}: File too large\n")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("# mine\n", [path])


def test_the_configuration_is_written_with_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text("# mine\n")
    monkeypatch.setenv("KVBM_CONSOLE_CONFIG", str(path))
    assert CliRunner().invoke(cli, ["config", "init", "--force"]).exit_code == 0
    assert path.read_text().startswith("# Defaults")
