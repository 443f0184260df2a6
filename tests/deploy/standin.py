"""A small image that stands in for vLLM's: the real API server with a made-up device (``tests.vllm.executor``).

``python -m tests.deploy.standin DIRECTORY`` in the environment of ``make test-vllm`` writes the image's context, and
prints the directories that its containers mount. The packages are mounted and not copied, because they have gigabytes.

Law of this file: kvbm-console is no package of the image, so only the pod can bring the tap.
"""

import json
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Final

from tests.vllm.serving import make_model

EXECUTOR: Final = Path(__file__).resolve().parents[1] / "vllm" / "executor.py"
CONTAINERFILE: Final = """\
FROM docker.io/library/python:3.12-slim-bookworm
COPY engine /engine
ENV HF_HUB_OFFLINE=1 LD_LIBRARY_PATH=/python/lib VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1
ENTRYPOINT ["/engine/bin/python", "-m", "vllm.entrypoints.cli.main", "serve"]
"""
NO_COPIES: Final = '''\
"""An engine without a connector copies nothing."""


class Copies:
    def step(self, *_):
        return None
'''


def make_context(directory: Path) -> dict[str, str]:
    """Write the context of the image. Returns the directories that its containers mount, to those of this machine."""
    engine = directory / "engine"
    packages = Path(sysconfig.get_path("purelib"))
    inside = engine / packages.relative_to(sys.prefix)
    inside.mkdir(parents=True)
    for package in packages.iterdir():
        if "kvbm_console" not in package.name:
            (inside / package.name).symlink_to(Path("/packages", package.name))
    (engine / "bin").mkdir()
    (engine / "bin" / "python").symlink_to(Path("/python/bin", Path(sys.executable).resolve().name))
    (engine / "pyvenv.cfg").write_text("home = /python/bin\n", encoding="utf-8")
    (inside / "tests" / "vllm").mkdir(parents=True)
    shutil.copy(EXECUTOR, inside / "tests" / "vllm")
    (inside / "tests" / "vllm" / "copies.py").write_text(NO_COPIES, encoding="utf-8")
    make_model(engine / "model")
    (directory / "Containerfile").write_text(CONTAINERFILE, encoding="utf-8")
    return {"/python": sys.base_prefix, "/packages": str(packages.resolve())}


if __name__ == "__main__":
    print(json.dumps(make_context(Path(sys.argv[1]))))
