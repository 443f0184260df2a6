"""How a console looks: the flags that every command with a console has.

Law of this file: a flag wins over the environment, the environment over the terminal's own word.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
LOOK: Final = ("theme", "ascii", "no-color", "utc")
"""The flags, as the section ``console`` of the configuration file names them."""
THEMES: Final = ("dark", "light", "ansi", "ansi-light", "none")
"""What the console knows; a test compares it with ``tui.theme``, which is not imported for a help text."""


def look_options(command: F) -> F:
    """``--theme``, ``--ascii``, ``--no-color``, ``--utc``; the command gets them by these names."""
    for option in (
        click.option("--utc", is_flag=True, help="Times of day in UTC, with a Z, instead of this machine's zone."),
        click.option("--no-color", is_flag=True, help="No colour at all; NO_COLOR in the environment says the same."),
        click.option("--ascii", is_flag=True, help="Only ASCII characters."),
        click.option("--theme", type=click.Choice(THEMES), help="Colours; without it what the terminal can show."),
    ):
        command = option(command)
    return command
