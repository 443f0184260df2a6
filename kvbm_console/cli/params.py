"""Types of flags (durations, speeds, targets, states, formats of output), and the flags that several commands share.

Law of this file: a refused value is named with its bound, and every flag that appears in several commands is defined
here once.
"""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from kvbm_console.addresses import TARGET_VARIABLE, default_target, parse_address
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import NUMBER_MAX, Word

F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")

DEMO_SOCKET: Final = "demo.sock"
"""``demo`` listens on a socket of its own name, so that it never stands in the way of a daemon."""
_UNITS_NS: Final = {
    "ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "m": 60 * 10**9, "h": 3_600 * 10**9,
}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s|m|h)", re.ASCII)

_SHARD: Final = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")

_HASH: Final = re.compile(r"[0-9a-fA-F]{16}")

NUMBER: Final = click.IntRange(1, NUMBER_MAX)
"""Highest id of a hold or breakpoint that the protocol can carry."""

NAME_MAX: Final = 64
"""Characters of a name: the console shows about 40 of them, cut in the middle."""


def options(*flags: Callable[[Any], Any]) -> Callable[[F], F]:
    """A decorator that applies several flags, in the order of the help."""
    def add(command: F) -> F:
        for flag in reversed(flags):
            command = flag(command)
        return command

    return add


class FilePath(click.Path):
    """A path. An empty one, as of a variable that is not set, would be the current directory."""

    def convert(
        self, value: "str | os.PathLike[str]", param: click.Parameter | None, ctx: click.Context | None
    ) -> "str | bytes | os.PathLike[str]":
        """The path; refuses an empty text."""
        if not os.fspath(value):
            self.fail("must be a path, got ''", param, ctx)
        return super().convert(value, param, ctx)


class FloatRange(click.FloatRange):
    """A number within bounds. ``nan`` is within none, although it is neither above nor below."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; refuses what is out of bounds."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class Duration(click.ParamType):  # type: ignore[type-arg]
    """``30s``, ``200ms``, ``1.5m``: nanoseconds as an int, within bounds that are inclusive."""

    name = "duration"

    def __init__(self, least_ns: int, most_ns: int, bound: str) -> None:
        self.least_ns = least_ns
        self.most_ns = most_ns
        self.bound = bound

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Nanoseconds; refuses a number without a unit or out of bounds."""
        if isinstance(value, int):
            return value
        match = _DURATION.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"must be a duration with a unit such as 30s or 200ms, got {value!r}", param, ctx)
        nanoseconds = round(float(match[1]) * _UNITS_NS[match[2]])
        if not self.least_ns <= nanoseconds <= self.most_ns:
            self.fail(f"must be {self.bound}, got {value!r}", param, ctx)
        return nanoseconds


class Shard(click.ParamType):  # type: ignore[type-arg]
    """``K/N``: the K-th of N parts."""

    name = "shard"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """K and N; refuses a part that there is not."""
        if isinstance(value, tuple):
            return value
        match = _SHARD.fullmatch(str(value))
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"must be K/N with K from 1 to N, such as 1/4, got {value!r}", param, ctx)
        return int(match[1]), int(match[2])


class Speed(click.ParamType):  # type: ignore[type-arg]
    """How fast virtual time may pass: a factor of the wall's, or ``max`` (None) to never wait."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        """The factor, None for ``max``."""
        if value is None or isinstance(value, float):
            return value
        if value == "max":
            return None
        try:
            factor = float(value)
        except ValueError:
            factor = 0.0
        if not 0.001 <= factor <= 1_000_000:
            self.fail(f"must be a factor from 0.001 to 1000000, or max, got {value!r}", param, ctx)
        return factor


class Labelled(click.ParamType):  # type: ignore[type-arg]
    """An enum member of the core, given by its label."""

    def __init__(self, kind: type[Word], name: str) -> None:
        self.kind = kind
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The member; a refusal lists all labels."""
        if isinstance(value, self.kind):
            return value
        try:
            return self.kind.labelled(str(value))
        except KeyError:
            labels = ", ".join(member.label for member in self.kind)
            self.fail(f"must be one of {labels}, got {value!r}", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter,
                       incomplete: str) -> list[CompletionItem]:
        """The labels that begin with ``incomplete``."""
        return [CompletionItem(member.label) for member in self.kind if member.label.startswith(incomplete)]


class Listen(click.ParamType):  # type: ignore[type-arg]
    """``unix:PATH`` or ``HOST:PORT``."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address in its canonical form."""
        return parse_address(str(value), lambda why: self.fail(why, param, ctx))


class Name(click.ParamType):  # type: ignore[type-arg]
    """A name for people."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name, unchanged."""
        text = str(value)
        if not text.isprintable() or len(text) > NAME_MAX:
            self.fail(f"must be at most {NAME_MAX} printable characters, got {text!r}", param, ctx)
        return text


def typed(name: str, value: V) -> V | None:
    """The value of a flag, None if it is a default of the configuration file: what is typed beside it wins."""
    context = click.get_current_context(silent=True)
    by_file = context is not None and context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
    return None if by_file else value


def resolve_target(positional: str | None, flag: str | None) -> str:
    """The address to talk to: the argument, the flag, the environment, else the default socket."""
    if positional is not None and typed("target", flag) not in (None, positional):
        raise click.UsageError(f"TARGET and --target name two addresses, {positional!r} and {flag!r}")
    text = positional or flag
    where = "TARGET" if positional is not None else "--target"
    if not text:
        text, where = default_target(), TARGET_VARIABLE

    def refuse(why: str) -> None:
        raise click.UsageError(f"{where} {why}")

    return parse_address(text, refuse)


TLS_CA: Final = "kvbm_console.tls_ca"
TOKEN_FILE: Final = "kvbm_console.token_file"
"""Keys of click's context under which the access options are stored."""


def _remembered(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(ctx: click.Context, _param: click.Parameter, value: Any) -> None:
        ctx.meta[key] = value

    return keep


access_options = options(
    click.option("--tls-ca", type=FilePath(path_type=Path), metavar="FILE", expose_value=False,
                 callback=_remembered(TLS_CA), envvar="KVBM_CONSOLE_TLS_CA",
                 help="PEM certificate of the authority that signed the daemon's."),
    click.option("--token-file", type=FilePath(path_type=Path), metavar="FILE", expose_value=False,
                 callback=_remembered(TOKEN_FILE), envvar="KVBM_CONSOLE_TOKEN_FILE",
                 help="Holds the token that grants control over TCP."),
)
"""``--tls-ca`` and ``--token-file``, for every command that may talk to another machine; see ``ask.access``."""
target_option = options(
    click.option("--target", metavar="T", default=None,
                 help=f"unix:PATH or HOST:PORT; default {TARGET_VARIABLE}, else the default socket."),
    access_options,
)
"""``--target``, for every command that talks to a daemon."""
target_argument = options(click.argument("positional", metavar="[TARGET]", required=False), target_option)
"""``[TARGET]`` beside ``--target``, where a command takes nothing else."""


def format_option(*choices: str) -> Callable[[F], F]:
    """``--format``; the first choice is the default."""
    return click.option("--format", "form", type=click.Choice(choices), default=choices[0], show_default=True,
                        help="Form of the result on stdout.")


def filter_option(help_text: str) -> Callable[[F], F]:
    """``--filter``: an expression of ``core.expression``, as ``expression``."""
    return click.option("--filter", "expression", metavar="EXPR", default="", help=help_text)


def block_hash(text: str) -> int | None:
    """The block that 16 hexadecimal digits name; None for another text."""
    return int(text, 16) if _HASH.fullmatch(text) else None


def compiled(flag: str, compile_one: Callable[[str], Any], text: str) -> Any:
    """The compiled expression. A wrong expression is a usage error that names the flag and the column."""
    try:
        return compile_one(text)
    except UsageError as error:
        raise click.UsageError(f"{flag}, {error}") from None

# --- the look of a console ---


LOOK: Final = ("theme", "ascii", "no-color", "utc")
"""The flags, as the section ``console`` of the configuration file names them."""
THEMES: Final = ("dark", "light", "ansi", "ansi-light", "none")
"""The console's themes. A test compares them with ``tui.theme``, which is not imported for a help text."""


look_options = options(
    click.option("--theme", type=click.Choice(THEMES), help="Colours.  [default: the most that the terminal can show]"),
    click.option("--ascii", is_flag=True, help="Only ASCII characters."),
    click.option("--no-color", is_flag=True, help="No colour at all; NO_COLOR in the environment says the same."),
    click.option("--utc", is_flag=True, help="Times of day in UTC, with a Z, instead of this machine's zone."),
)
"""``--theme``, ``--ascii``, ``--no-color``, ``--utc``; the command gets them by these names."""
