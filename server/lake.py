"""``serve --lake``: a process beside the daemon that makes rows of its recording.

Law of this file: the process never delays the daemon. A process that died is started again; one that outlives the
daemon adds the rest of the recording and ends by itself.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvbm_console.extras import need

_CHILD: Final = "import sys; from kvbm_console.analysis.lake_files import main; sys.exit(main(*sys.argv[1:]))"
LOOK_S: Final = 0.2
ERRORS_MAX: Final = 4_096


class LakeWriter:
    """Keeps the process from ``run`` on; ``finish`` ends it in order."""

    def __init__(self, incarnation: str, recording: Path, lake: Path, engine: str) -> None:
        need("pyarrow.parquet", "lake", "pyarrow", "--lake")
        # -P: the working directory is not searched for modules.
        self._command = [
            sys.executable, "-P", "-c", _CHILD, str(recording), incarnation, str(lake), engine,
        ]
        self._child: subprocess.Popen[bytes] | None = None

    async def run(self) -> None:
        """Raises ``RuntimeError`` with its last words when the process ends before the recording does."""
        child = self._begin()
        while child.poll() is None:  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(LOOK_S)
        assert child.stderr is not None
        said = child.stderr.read(ERRORS_MAX).decode(errors="replace").strip().splitlines()
        self._close(child)
        raise RuntimeError(said[-1] if said else f"it ended with status {child.returncode}")

    async def finish(self, until_s: Callable[[], float]) -> None:
        """The recording is closed: wait for the rest of the rows, at most until this time of the monotonic clock.

        A process that died and was not started again yet is started for the rest.
        """
        child = self._child
        if child is None:
            return
        if child.poll() is not None:
            self._close(child)
            child = self._begin()
        assert child.stdin is not None
        child.stdin.close()
        while child.poll() is None and time.monotonic() < until_s():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        if child.poll() is not None:
            self._close(child)

    def _begin(self) -> "subprocess.Popen[bytes]":
        self._child = subprocess.Popen(  # asyncio's own kills its child when the loop ends
            self._command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )
        return self._child

    def _close(self, child: "subprocess.Popen[bytes]") -> None:
        for pipe in (child.stdin, child.stderr):
            if pipe is not None:
                pipe.close()
