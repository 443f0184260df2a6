"""A worker whose disk fails: EIO, no space, short reads and writes, and bytes that change on their way."""

import errno
import os
import random
from collections.abc import Sequence
from typing import Any

from kvbm_console.bytes import worker


def main(share: float, size: int) -> None:
    """Serve, with faults in this share of the reads and writes of one or more blocks of ``size`` bytes."""
    dice = random.Random(os.getpid())
    write, read = os.pwritev, os.preadv

    def pwritev(fd: int, buffers: Sequence[Any], at: int) -> int:
        fault = dice.random() / share if len(buffers[0]) == size else 1.0
        if fault < 0.25:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault < 0.5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault < 0.75:
            return write(fd, [*buffers[:-1], memoryview(buffers[-1])[: size // 2]], at)
        written = write(fd, buffers, at)
        if fault < 1.0:  # another page in its place
            write(fd, [memoryview(buffers[0])[size // 2 :]], at)
        return written

    def preadv(fd: int, buffers: Sequence[Any], at: int) -> int:
        fault = dice.random() / share if len(buffers[0]) == size else 1.0
        if fault < 0.5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = read(fd, buffers, at)
        return count // 2 if fault < 1.0 else count

    os.pwritev, os.preadv = pwritev, preadv  # type: ignore[assignment]
    worker.main()
