"""The text format of Prometheus (version 0.0.4), written by hand: families of samples with help and type.

Law of this file: any Prometheus can read the page, because names and labels are checked and values escaped.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_ESCAPED: Final = re.compile(r"\\[\\rtuUx]")
"""A text in which ``_readable`` has escaped something, or one that looks so."""


class Family(msgspec.Struct):
    """One metric. ``help`` says what a bad value means."""

    name: str
    help: str
    samples: list[tuple[tuple[tuple[str, str], ...], float]] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name} is no name for a metric")

    @property
    def kind(self) -> str:
        """``counter`` for a name that ends in ``_total``, else ``gauge``."""
        return "counter" if self.name.endswith("_total") else "gauge"

    def add(self, value: float | None, labels: Mapping[str, str] | None = None) -> None:
        """Add a sample. None, an unknown value, is left out rather than shown as a number."""
        if value is not None:
            self.samples.append((tuple((labels or {}).items()), float(value)))


def render(families: Iterable[Family]) -> str:
    """The exposition: families without a sample still show their help and type.

    >>> print(render([Family("up", "1 while it runs.", [((("a", 'x"y'),), 1.0)])]), end="")
    # HELP up 1 while it runs.
    # TYPE up gauge
    up{a="x\\\\"y"} 1
    """
    lines = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escape(family.help, quotes=False)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            inner = ",".join(f'{name}="{_escape(text)}"' for name, text in labels)
            lines.append(f"{family.name}{f'{{{inner}}}' if inner else ''} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str, *, quotes: bool = True) -> str:
    escaped = _readable(text).replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quotes else escaped


def _readable(text: str) -> str:
    """The text with escapes for what does not print, since people read the page on terminals, too.

    Different texts stay different: no Prometheus takes a page on which two samples have the same labels.
    """
    if text.replace("\n", "").isprintable() and not _ESCAPED.search(text):
        return text
    return "".join(
        each if each == "\n" or (each.isprintable() and each != "\\") else each.encode("unicode_escape").decode()
        for each in text
    )


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
