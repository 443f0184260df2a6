"""Progress of long work, on stderr.

Law of this file: what ends within a second shows nothing, and stdout is never touched.
"""

import sys
import time
from collections.abc import Callable
from typing import Final

import click

from kvbm_console.cli.output import number

AFTER_S: Final = 1.0
"""What ends sooner needs no progress."""
EVERY_S: Final = 0.2


def progress() -> Callable[[str, int, int], None]:
    """Tells how far something has come: rewritten in place on a terminal, else a line a second."""
    say = progress_line()

    def tell(what: str, done: int, total: int) -> None:
        part = f" {100 * done // total} %" if total > 0 else ""
        say(lambda: f"{what}: {number(done)} of {number(total)}{part}")

    return tell


def progress_line() -> Callable[[Callable[[], str]], None]:
    """As ``progress``, with any line; it is made only when it is shown."""
    began = time.monotonic()
    last = began
    terminal = sys.stderr.isatty()

    def say(line: Callable[[], str]) -> None:
        nonlocal last
        now = time.monotonic()
        if now - began < AFTER_S or now - last < (EVERY_S if terminal else 1.0):
            return
        last = now
        click.echo(f"\r{line()} " if terminal else line(), err=True, nl=not terminal)

    return say
