"""The blocks of the tutorials that need vLLM work as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
MARKED = re.compile(r"^<!-- needs vLLM -->\n```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(400)
def test_what_needs_vllm_works_as_it_is_written(tmp_path: Path) -> None:
    blocks = [text for path in sorted(TUTORIALS.glob("*.md")) for text in MARKED.findall(path.read_text("utf-8"))]
    assert blocks
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-e"], input="\n".join(blocks), capture_output=True, text=True, timeout=300,
                          cwd=tmp_path, env={**os.environ, "PATH": path}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FOUND" in done.stdout, "the planted fault is found"
    assert list((tmp_path / "planted").glob("*/recording.mcap"))
