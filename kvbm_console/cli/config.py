"""``kvbm-console config``: the configuration file, made and shown.

Law of this file: what ``show`` prints is what the other commands take; a file is never overwritten unasked.
"""

import json
from typing import Any, Final

import click

from kvbm_console.cli.configuration import config_path, read, sections
from kvbm_console.cli.output import answer, print_json
from kvbm_console.cli.params import format_option
from kvbm_console.core.errors import UsageError

HEADER: Final = """\
# Defaults of kvbm-console: one section for each command, one key for each flag. What the command line says wins.
# A key that is not a flag is refused by name. `kvbm-console config show` prints what is in effect.
"""


@click.group()
def config() -> None:
    """The configuration file: defaults for the flags of every command."""


@config.command()
@click.option("--force", is_flag=True, help="Overwrite the file that is there.")
@click.option("--stdout", is_flag=True, help="Print it instead of writing it.")
@format_option("text", "json")
def init(force: bool, stdout: bool, form: str) -> None:
    """Write a configuration file in which every key is explained and commented out."""
    text = template()
    if stdout and form == "json":
        raise UsageError("--format json tells of a file that is written: it has no meaning with --stdout")
    if stdout:
        click.echo(text, nl=False)
        return
    path = config_path()
    if path.exists() and not force:
        raise UsageError(f"{path} exists; --force overwrites it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    answer(form, "written", f"written: {path}", path=str(path))


@config.command()
@format_option("text", "json")
def show(form: str) -> None:
    """Print what is in effect, and where it comes from."""
    path = config_path()
    content = read(path)
    if form == "json":
        print_json({"path": str(path), "exists": path.exists(), "config": content})
        return
    click.echo(f"# {path}" + ("" if path.exists() else " (does not exist; config init writes it)"))
    for name, values in content.items():
        click.echo(f"[{name}]")
        for key, value in values.items():
            click.echo(f"{key} = {_toml(value)}")


def template() -> str:
    """The file that ``init`` writes."""
    lines = [HEADER]
    for name, options in sections().items():
        lines.append(f"[{name}]")
        for key, option in options.items():
            about = " ".join((option.help or "").split())
            if about:
                lines.append(f"# {about}")
            lines.append(f"# {key} = {_example(option)}")
        lines.append("")
    return "\n".join(lines)


def _example(option: click.Option) -> str:
    """A value of the right kind: the default where there is one."""
    default: Any = option.default
    if option.is_flag:
        return _toml(default is True)
    if option.multiple:
        return "[]"
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        return _toml(default)
    if isinstance(option.type, click.Choice):
        return _toml(str(next(iter(option.type.choices))))
    return '""' if not isinstance(option.type, click.IntRange | click.FloatRange) else "1"


def _toml(value: Any) -> str:
    """A value as TOML: strings and lists are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)
