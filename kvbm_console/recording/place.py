"""Where a new recording goes: a path that ends in ``.mcap`` is one sealed file, any other path a directory of segments.

A recorder writes a file as the only segment of ``FILE.mcap.parts`` beside it; the file takes its name when the segment
is sealed. A killed process leaves the parts, which ``rec recover`` makes whole.

Law of this file: nothing is overwritten.
"""

import shutil
from pathlib import Path
from typing import Any, Final

from kvbm_console.core.errors import UsageError
from kvbm_console.recording import format as fmt

FILE_SUFFIX: Final = ".mcap"
_SEGMENT_BYTES: Final = 1 << 50
_SEGMENT_NS: Final = 1 << 62
"""A file is one segment, however large and long."""


def require_new(path: Path, flag: str = "") -> None:
    """Raise ``UsageError``, which begins with the flag, unless a recording can get this name."""
    said = f"{flag} " if flag else ""
    if path.suffix != FILE_SUFFIX:
        if path.exists() and not path.is_dir():
            raise UsageError(f"{said}{path} is a file: a recording is a new file *.mcap or a directory")
        if path.is_dir() and any(path.iterdir()):
            raise UsageError(f"{said}{path} is not empty; nothing is overwritten")
    else:
        for one in (path, path.with_name(f"{path.name}.parts")):
            if one.exists():
                raise UsageError(f"{said}{one} exists already; nothing is overwritten")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{said}{path} must be in a directory that exists")


def segment_file(path: Path, first_seq: int) -> Path:
    """The file of a recording that is written at once; its directory is made."""
    if path.suffix == FILE_SUFFIX:
        return path
    path.mkdir(parents=True, exist_ok=True)
    return path / f"{fmt.segment_name(1, first_seq)}{FILE_SUFFIX}"


class Place:
    """Where a recorder writes, for a path that a person named."""

    def __init__(self, path: Path) -> None:
        self.file = path if path.suffix == FILE_SUFFIX else None
        self.directory = path.with_name(f"{path.name}.parts") if self.file is not None else path

    @property
    def settings(self) -> dict[str, Any]:
        """What a ``Recorder`` is told besides: the parts of a file are one segment."""
        return {} if self.file is None else {"segment_bytes": _SEGMENT_BYTES, "segment_ns": _SEGMENT_NS}

    def finish(self, number: int = 1) -> Path | None:
        """The recorder is closed: name the file, the second one of a place ``FILE-2.mcap``.

        Returns where the recording is; None when the parts stay, because they are not one sealed segment.
        """
        if self.file is None:
            return self.directory
        segments = sorted(self.directory.glob(f"*{FILE_SUFFIX}"))
        if len(segments) != 1 or any(self.directory.glob("*.active")):
            return None
        file = self.file if number == 1 else self.file.with_stem(f"{self.file.stem}-{number}")
        segments[0].rename(file)
        shutil.rmtree(self.directory)
        return file
