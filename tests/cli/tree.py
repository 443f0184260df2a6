"""The commands of the program, walked as click knows them.

Law of this file: a command that exists is found; nothing is listed by hand but the commands that talk to no daemon.
"""

from typing import Final

import click

from kvbm_console.cli.main import cli

LOCAL: Final = frozenset({
    ("demo",), ("serve",), ("replay",), ("simulate",), ("compare",), ("plan",), ("calibrate",), ("bench", "links"),
    ("conform",), ("explore", "vllm"), ("explore", "leader"),
    ("config", "init"), ("config", "show"), ("case",), ("dap",),
    ("break", "test"), ("rec", "info"), ("rec", "verify"), ("rec", "recover"), ("rec", "index"), ("rec", "cut"),
    ("rec", "merge"), ("rec", "diff"), ("rec", "export"), ("rec", "capture"), ("rec", "import", "kv-events"),
    ("rec", "import", "dynamo"), ("lake", "add"), ("lake", "ask"),
})
"""Commands that work on files, on an engine, or are the daemon; every other command is a client of a daemon."""


def leaves(group: click.Group = cli, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    """Words to command, for each command that has no further commands below it."""
    context = click.Context(group)
    found: dict[tuple[str, ...], click.Command] = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        words = (*path, name)
        if isinstance(command, click.Group):
            found |= leaves(command, words)
        else:
            found[words] = command
    return found


def clients() -> dict[tuple[str, ...], click.Command]:
    """The commands that talk to a daemon."""
    return {words: command for words, command in leaves().items() if words not in LOCAL}


def flags_of(command: click.Command) -> set[str]:
    """Every long flag that a command takes."""
    return {name for option in command.params if isinstance(option, click.Option) for name in option.opts}
