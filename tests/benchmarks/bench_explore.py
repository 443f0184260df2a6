"""The speed of ``explore``: a scheduler step of vLLM with connector, worker and monitors, beside the scheduler alone.

Law of this file: vLLM is measured in its own environment, which ``make test-vllm`` makes. Without it the row says so.
"""

import json
import subprocess
from pathlib import Path
from typing import Final

from tests.benchmarks.harness import Figure, Skipped, Target

ROOT: Final = Path(__file__).resolve().parents[2]
PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
RATIO_MAX: Final = 3.9
"""A quarter above the 3.12 that was measured with 0.33.0 on a busy machine of two cores."""
STEP_NS: Final = 250_000
"""4,000 scheduler steps a second and core."""


def step() -> Figure:
    """A step of the scheduler. Raises ``Skipped`` without an environment with vLLM."""
    if not PYTHON.exists():
        raise Skipped("vLLM is not installed (make test-vllm installs it)")
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-m", "tests.vllm.explore_speed"], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    return Figure("explore vllm, a step", told["ns"], "the scheduler alone", told["alone_ns"], told["ratio"],
                  Target(ratio=RATIO_MAX, ns=STEP_NS))


BENCHES: Final = {"explore vllm": step}
"""Name to figure."""
