"""The configuration file, which holds defaults for the flags of every command in TOML, and ``kvbm-console config``.

The file has a section for each command, named like the command, with a key for each flag, named like the flag. The
section ``console`` says how every console looks. There is no other schema: a flag that changes changes here at once.
The command line wins over the file.

Law of this file: a key that is no flag is refused by name, with the nearest flag, and no key is ever ignored. ``show``
prints the values that the other commands take, and a file is overwritten only with --force.
"""

import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import click

from kvbm_console.cli import command_named
from kvbm_console.cli.output import answer, print_json
from kvbm_console.cli.params import Duration, format_option
from kvbm_console.core.errors import UsageError
from kvbm_console.files import read_bounded, replacing

HEADER: Final = """\
# Defaults of kvbm-console: one section for each command, one key for each flag. The command line wins over this file.
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
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
    answer(form, "written", f"written: {path}", path=str(path))


@config.command()
@format_option("text", "json")
def show(form: str) -> None:
    """Print the settings in effect, and their file."""
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
    """The content of the file that ``init`` writes."""
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
    """A value of the right kind, which is the default if there is a default."""
    default: Any = option.default
    if option.is_flag:
        return _toml(default is True)
    if option.multiple:
        return "[]"
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        return _toml(default)
    if isinstance(option.type, click.Choice):
        return _toml(str(next(iter(option.type.choices))))
    if isinstance(option.type, Duration):
        return _toml("1s")
    return "1" if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType) else '""'


def _toml(value: Any) -> str:
    """A value as TOML: strings and lists are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)


PATH_VARIABLE: Final = "KVBM_CONSOLE_CONFIG"
FILE_BYTES_MAX: Final = 1 << 20
"""Far above the size of a file with every flag of every command."""
SECTIONS: Final = (
    "demo", "serve", "attach", "status", "tail", "replay", "simulate", "compare", "plan", "why", "doctor",
)
"""Commands that take defaults: those without further commands below them."""
WITH_CONSOLE: Final = ("demo", "attach", "replay")
CONSOLE: Final = "console"


def config_path() -> Path:
    """The path of the file: ``KVBM_CONSOLE_CONFIG``, else in the user's configuration directory."""
    named = os.environ.get(PATH_VARIABLE)
    if named:
        return Path(named)
    import platformdirs

    return platformdirs.user_config_path("kvbm-console") / "config.toml"


def options_of(command: str) -> dict[str, click.Option]:
    """Flag, without its dashes, to the option of a command; empty for a command that does not exist."""
    found = command_named(command)
    return {
        _flag(option): option for option in (found.params if found is not None else [])
        if isinstance(option, click.Option) and not option.is_eager and not option.hidden
    }


def console_options() -> dict[str, click.Option]:
    """The flags of the section ``console``."""
    from kvbm_console.cli.params import LOOK

    return {name: option for name, option in options_of("attach").items() if name in LOOK}


def _flag(option: click.Option) -> str:
    return next(name for name in option.opts if name.startswith("--")).removeprefix("--")


def sections() -> dict[str, dict[str, click.Option]]:
    """Every section with its keys."""
    found = {CONSOLE: console_options()}
    found.update({name: options for name in SECTIONS if (options := options_of(name))})
    return found


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The checked content, section to key to value; empty without a file. Raises ``UsageError`` naming file and key."""
    import tomllib

    try:
        data = read_bounded(path, FILE_BYTES_MAX)
    except FileNotFoundError:
        if os.environ.get(PATH_VARIABLE):
            raise UsageError(f"{PATH_VARIABLE} names {path}, which does not exist") from None
        return {}
    try:
        content = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from None
    return {name: _section(path, name, values) for name, values in content.items()}


def _section(path: Path, name: str, values: Any) -> dict[str, Any]:
    known = console_options() if name == CONSOLE else options_of(name) if name in SECTIONS else {}
    if not known:
        raise UsageError(f"{path}: no section [{name}]; {_nearest(name, (CONSOLE, *SECTIONS))}")
    if not isinstance(values, dict):
        raise UsageError(f"{path}: {name} must be a section [{name}], got {values!r}")
    converted: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            other = next((first for first, option in known.items() if f"--{key}" in option.opts), None)
            nearest = _nearest(key, known) if other is None else f"the flag's key is {other!r}"
            raise UsageError(f"{path}: [{name}] has no key {key!r}; {nearest}")
        converted[str(known[key].name)] = _converted(f"{path}: [{name}] {key}", known[key], value)
    try:
        _check_together(name, converted)
    except UsageError as error:
        raise UsageError(f"{path}: [{name}] {error}") from None
    return values


def _check_together(command: str, values: dict[str, Any]) -> None:
    """Check bounds and contradictions between values, as the cache's own options do when a command runs."""
    from kvbm_console.cli.cache_options import CACHE_FLAGS, cache_settings, sized
    from kvbm_console.planning.options import SimulateOptions

    by_flag = {"profile", "links"} | ({"total_kv_blocks", "kv_cpu_blocks"} if command == "compare" else set())
    flags = {name: values[name] for name in CACHE_FLAGS if name in values and name not in by_flag}
    if flags.get("policy") == "belady":
        del flags["policy"]  # for --cache-only, which knows the future
    others = ("limit", "instances", "hosts", "cleanup", "stats_every", "seed")
    more = {name: values[name] for name in others if name in values}
    SimulateOptions(trace="", **sized(cache_settings(flags), total_kv_blocks=1), **more)


def _nearest(word: str, known: Any) -> str:
    found = get_close_matches(word, list(known), 1)
    return f"the nearest is {found[0]!r}" if found else f"there are {', '.join(known)}"


def _converted(where: str, option: click.Option, value: Any) -> Any:
    """The value as the command gets it. Refuses a value of another kind, and one that the flag itself would refuse."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{where} must be true or false, got {value!r}")
        return value
    several = option.multiple
    if several != isinstance(value, list):
        raise UsageError(f"{where} must be {'a list' if several else 'one value'}, got {value!r}")
    items = []
    for item in value if several else [value]:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise UsageError(f"{where} must be text or a number, got {item!r}")
        try:
            items.append(option.type.convert(str(item), option, click.Context(click.Command("config"))))
        except click.BadParameter as error:
            raise UsageError(f"{where}: {error.message}") from None
    return tuple(items) if several else items[0]


def _is_there(path: Path) -> bool:
    """False, too, where it may not be looked for, as in a container whose ``HOME`` is another user's."""
    try:
        return path.exists()
    except PermissionError:
        return False


def defaults() -> dict[str, Any]:
    """The default map of the command line. Raises ``UsageError`` for a file with a mistake."""
    path = config_path()
    if not os.environ.get(PATH_VARIABLE) and not _is_there(path):
        return {}
    content = read(path)
    console = content.pop(CONSOLE, {})
    found: dict[str, Any] = {}
    for name in {*content, *(WITH_CONSOLE if console else ())}:
        known = options_of(name)
        values = {**{key: value for key, value in console.items() if key in known and name in WITH_CONSOLE},
                  **content.get(name, {})}
        found[name] = {str(known[key].name): value for key, value in values.items()}
    return found
