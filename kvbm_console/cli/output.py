"""How results look on stdout: JSON documents, aligned tables, human durations.

Law of this file: formatting only. Numbers keep their digits in JSON and are grouped in text; a value that is absent is
``null`` in JSON and ``–`` in text.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import click
import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.core.printable import json_text, safe

ABSENT: Final = "–"
_STEPS: Final = ((60 * 10**9, "m", 10**9, "s"), (3_600 * 10**9, "h", 60 * 10**9, "m"),
                 (24 * 3_600 * 10**9, "d", 3_600 * 10**9, "h"))


def print_json(document: Any) -> None:
    """One JSON value on one line."""
    click.echo(json_text(document))


def print_lines(lines: Iterable[str]) -> None:
    """Lines that may hold names from outside."""
    for line in lines:
        click.echo(safe(line))


def print_result(form: str, document: Any, lines: Callable[[], Iterable[str]]) -> None:
    """Print a result as one JSON value, or as the lines that people read."""
    if form == "json":
        print_json(document)
    else:
        print_lines(lines())


class Answer(msgspec.Struct, frozen=True):
    """The JSON document that reports the outcome of a verb."""

    done: str
    """One word, as ``continued``, ``frozen``, ``removed`` or ``nothing``; ``already_continued`` is a lost race."""
    text: str
    """The same for a person."""
    id: str | None = None
    """The hold or breakpoint that was named or found, else null."""
    count: int | None = None
    """How many holds, breakpoints or files, else null."""
    path: str | None = None
    """The file that was written or read, else null."""


def answer(form: str, done: str, text: str = "", **more: Any) -> None:
    """Print the outcome of a verb; ``done`` may end in a count, as ``removed 3``."""
    word, _, rest = done.partition(" ")
    if rest.isdigit():
        more.setdefault("count", int(rest))
    told = Answer(word, text or done, **more)
    print_result(form, told, lambda: told.text.split("\n"))


def warn(message: str) -> None:
    """Print a message, which is no result, on stderr.

    A message that stderr does not take, because its disk is full or its reader is gone, is dropped: the work goes on.
    """
    with contextlib.suppress(OSError):
        click.echo("\n".join(map(safe, message.split("\n"))), err=True)


def number(value: int | None) -> str:
    """Digits in groups of three, or the sign for "no data"."""
    return ABSENT if value is None else f"{value:,}"


def duration(nanoseconds: int | None) -> str:
    """A duration in at most two units.

    >>> duration(271_000), duration(1_500_000), duration(12_340_000_000), duration(130 * 10**9)
    ('271µs', '1.5ms', '12.3s', '2m10s')
    """
    if nanoseconds is None:
        return ABSENT
    for below, unit, size in ((1_000, "ns", 1), (10**6, "µs", 10**3), (10**9, "ms", 10**6), (60 * 10**9, "s", 10**9)):
        if nanoseconds < below:
            return f"{nanoseconds / size:.3g}{unit}"
    for big, big_name, small, small_name in reversed(_STEPS):
        if nanoseconds >= big:
            return f"{nanoseconds // big}{big_name}{nanoseconds % big // small}{small_name}"
    raise AssertionError("unreachable: below a minute is handled above")


def share(part: int, whole: int) -> str:
    """A percentage with one decimal, the sign for "no data" when there is no whole."""
    return ABSENT if not whole else f"{100 * part / whole:.1f} %"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Lines with aligned columns, two spaces apart; the columns in ``right`` are aligned to the right."""
    lines = [list(headings), *([safe(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    aligned = set(right)
    return [
        "  ".join(
            cell.rjust(width) if column in aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def on_terminal() -> bool:
    """True when stdin and stdout are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def require_terminal(command: str, instead: str) -> None:
    """Refuse to draw a console without a terminal."""
    if not on_terminal():
        raise UsageError(f"{command} needs a terminal on stdin and stdout; {instead} prints without one")

# --- versions ---


def program_version() -> str:
    """The version of the installed distribution, ``0+unknown`` in a tree that was never installed."""
    from importlib import metadata  # with the modules of email, a hundredth of a second

    try:
        return metadata.version("kvbm-console")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def version_line() -> str:
    """Program, protocol and recording format, on one line."""
    from kvbm_console.core.events import FORMAT_MINOR, PROTOCOL_MINOR
    from kvbm_console.recording.format import FORMAT_MAJOR
    from kvbm_console.wire.protocol import PROTOCOL_MAJOR

    return (
        f"kvbm-console {program_version()}, protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}, "
        f"recording format {FORMAT_MAJOR}.{FORMAT_MINOR}"
    )

# --- progress of long work, on stderr ---


AFTER_S: Final = 1.0
"""Work that ends sooner needs no progress."""
EVERY_S: Final = 0.2


def progress() -> Callable[[str, int, int], None]:
    """Shows the progress of long work: a line rewritten in place on a terminal, else a line a second."""
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
        with contextlib.suppress(OSError):
            click.echo(f"\r{line()} " if terminal else line(), err=True, nl=not terminal)

    return say
