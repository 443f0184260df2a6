"""One environment for vLLM, LMCache and the tap: an independent resolver finds versions of all their requirements.

Law of this file: the same resolver refuses the whole program there, so its answer for the tap is not vacuous.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BESIDE = "lmcache==0.5.6\nvllm==0.33.0\n"


def resolved(tmp_path: Path, requirement: str) -> subprocess.CompletedProcess[str]:
    """``uv pip compile`` of this requirement beside vLLM and LMCache."""
    pytest.importorskip("uv")
    (tmp_path / "all.in").write_text(f"{requirement}\n{BESIDE}")
    # vLLM asks for the newest certificates of its day, which a mirror of the index may not have yet.
    (tmp_path / "override").write_text("certifi>=2026.1\n")
    return subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--python-version", "3.12", "--override",
         tmp_path / "override", tmp_path / "all.in"], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.timeout(320)
def test_the_tap_installs_beside_vllm_and_lmcache(tmp_path: Path) -> None:
    done = resolved(tmp_path, f"kvbm-console-tap @ file://{ROOT}/kvbm_console/tap")
    assert done.returncode == 0, done.stderr
    found = {line.partition("==")[0] for line in done.stdout.splitlines() if "==" in line}
    assert {"vllm", "lmcache", "msgspec", "protobuf"} <= found


@pytest.mark.timeout(320)
def test_the_whole_program_does_not(tmp_path: Path) -> None:
    done = resolved(tmp_path, f"kvbm-console @ file://{ROOT}")
    assert done.returncode != 0
    assert "protobuf" in done.stderr
