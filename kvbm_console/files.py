"""Files that users name: read within a bound, or written in place of others.

Law of this file: the file that was there stays as it is until the new one is complete.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvbm_console.core.errors import UsageError

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write without room: on the disk, in the user's quota, under ``ulimit -f``."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside the file, at which the block writes what then takes the file's place. Nothing stays of a block that
    fails.

    A symbolic link leads to the file. Raises ``UsageError`` for a device, a pipe or a directory, and ``OSError`` with
    the name ``path``.
    """
    target = Path(os.path.realpath(path))
    there = target.exists()
    if there and not target.is_file():
        raise UsageError(f"{path} is no regular file, and would be replaced")
    if there and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        yield draft
        if there:
            shutil.copymode(target, draft)
        draft.replace(target)
    except OSError as error:
        if error.filename == str(draft) or (error.filename is None and error.errno in NO_SPACE):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    finally:
        draft.unlink(missing_ok=True)


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a file. Raises ``UsageError`` above ``most`` bytes, also of a device that never ends."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UsageError(f"{path} must have at most {most:,} bytes")
    return data
