"""Live console, debugger and flight recorder for the tiered KV cache of LLM inference engines.

Law of this file: importing it loads nothing else of the package, because engines import it, too.
"""

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm_console.analysis.notebook import RecordedRun

__version__ = "0.1.0"


def open(path: "str | PathLike[str]", run: str | None = None) -> "RecordedRun":
    """A recording for a notebook or a script: a file, or a directory with its last run or the named run.

    Raises ``RecordingError``, and ``NotFound`` when it holds no such run.
    """
    from pathlib import Path

    try:
        from kvbm_console.analysis.notebook import RecordedRun
    except ModuleNotFoundError as error:
        raise ImportError("kvbm-console-tap reads no recordings; install kvbm-console in its place") from error
    return RecordedRun(Path(path), run)
