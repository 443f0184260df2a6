"""Puts the documents of the project where mkdocs finds them, and makes the pages of all commands.

``python docs/site.py build`` writes ``build/docs`` and ``build/man``. The first has each document at its own path, with
the files that it links to and ``docs/commands.md``. The second has a man page for each command. ``make site`` then runs
``mkdocs build --strict``.

Law of this file: texts are copied and never changed. The pages of commands come from the commands themselves, so a man
page, the site and ``--help`` say the same.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from kvbm_console import __version__
from kvbm_console.cli.main import cli

ROOT: Final = Path(__file__).resolve().parents[1]
PLACES: Final = ("*.md", "docs/**/*.md", "kvbm_console/**/*.md", "recordings/*.md", "tests/*.md")
LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^)#\s]+)")
OWN: Final = Path("docs/commands.md")


def commands(command: click.Command = cli, words: tuple[str, ...] = ("kvbm-console",)) -> Iterator[tuple[str, str]]:
    """(name, text of ``--help``) of the program and of every command, in the order of ``--help``."""
    context = click.Context(command, info_name=words[-1], max_content_width=100, terminal_width=100)
    context.command_path_words = words  # type: ignore[attr-defined]
    usage = "Usage: " + " ".join((*words, *command.collect_usage_pieces(context)))
    yield " ".join(words), command.get_help(context).replace(command.get_usage(context), usage, 1)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from commands(inner, (*words, name))


def page() -> str:
    """The page of all commands."""
    parts = ["# Commands", "", "`kvbm-console COMMAND --help` prints the same.", ""]
    for name, text in commands():
        parts += [f"## {name}", "", "```text", text, "```", ""]
    return "\n".join(parts)


def man(name: str, text: str) -> str:
    """A man page in roff, section 1."""
    safe = text.replace("\\", "\\e").replace("-", "\\-")
    lines = [line if not line.startswith((".", "'")) else "\\&" + line for line in safe.splitlines()]
    words = text.split("\n\n")
    about = re.sub(r"\s+", " ", words[1]).strip().replace("\\", "\\e").replace("-", "\\-") if len(words) > 1 else ""
    title = name.replace(" ", "-")
    return "\n".join([
        f'.TH "{title.upper()}" "1" "" "kvbm-console {__version__}" "kvbm-console"', ".SH NAME",
        f"{title} \\- {about.split('. ')[0]}", ".SH SYNOPSIS", ".nf", lines[0].removeprefix("Usage: "), ".fi",
        ".SH DESCRIPTION", ".nf", *lines[1:], ".fi", "",
    ])


def assemble(target: Path) -> None:
    """Write the documents with the files that they link to, and the pages of commands."""
    pages = target / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    documents = sorted({path for place in PLACES for path in ROOT.glob(place)})
    linked = {
        (path.parent / link).resolve() for path in documents for link in LINK.findall(path.read_text(encoding="utf-8"))
        if "://" not in link
    }
    for path in {*documents, *linked}:
        if path.is_file() and path.is_relative_to(ROOT):
            place = pages / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    (pages / OWN).write_text(page(), encoding="utf-8")
    manuals = target / "man"
    shutil.rmtree(manuals, ignore_errors=True)
    manuals.mkdir(parents=True)
    for name, text in commands():
        (manuals / f"{name.replace(' ', '-')}.1").write_text(man(name, text), encoding="utf-8")


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
