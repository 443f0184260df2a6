"""The command line: one module per command group, each imported only when it is used.

Law of this package: importing ``cli.main`` loads neither grpc nor textual, because a command imports its needs inside
its function. Machine output goes to stdout, messages to stderr; an error that a user can mend is one sentence and exit
2 or 3.
"""

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import click

COMMANDS: Final[dict[str, str]] = {
    "demo": "kvbm_console.cli.demo:demo",
    "serve": "kvbm_console.cli.serve:serve",
    "attach": "kvbm_console.cli.attach:attach",
    "status": "kvbm_console.cli.status:status",
    "fleet": "kvbm_console.cli.fleet:fleet",
    "tail": "kvbm_console.cli.tail:tail",
    "break": "kvbm_console.cli.breaks:break_group",
    "holds": "kvbm_console.cli.debug:holds",
    "continue": "kvbm_console.cli.debug:continue_command",
    "step": "kvbm_console.cli.debug:step",
    "skip": "kvbm_console.cli.debug:skip",
    "run-for": "kvbm_console.cli.debug:run_for",
    "freeze": "kvbm_console.cli.debug:freeze",
    "thaw": "kvbm_console.cli.debug:thaw",
    "disarm": "kvbm_console.cli.debug:disarm",
    "reset": "kvbm_console.cli.operate:reset",
    "drain": "kvbm_console.cli.operate:drain",
    "replay": "kvbm_console.cli.replay:replay",
    "case": "kvbm_console.cli.case:case",
    "rec": "kvbm_console.cli.rec:rec",
    "lake": "kvbm_console.cli.lake:lake",
    "simulate": "kvbm_console.cli.simulate:simulate",
    "compare": "kvbm_console.cli.compare:compare",
    "plan": "kvbm_console.cli.plan:plan",
    "calibrate": "kvbm_console.cli.calibrate:calibrate",
    "bench": "kvbm_console.cli.bench:bench",
    "why": "kvbm_console.cli.why:why",
    "doctor": "kvbm_console.cli.doctor:doctor",
    "conform": "kvbm_console.cli.conform:conform",
    "mcp": "kvbm_console.cli.mcp:mcp",
    "dap": "kvbm_console.cli.dap:dap",
    "explore": "kvbm_console.cli.explore:explore",
    "config": "kvbm_console.cli.config:config",
}
"""Command to ``module:attribute``, in the order of ``--help``."""
ALIASES: Final = {"resume": "continue"}
"""Other words for the same command, accepted and not listed."""


def command_named(name: str) -> "click.Command | None":
    """The command of this name or alias, imported now; None if there is none."""
    place = COMMANDS.get(ALIASES.get(name, name))
    if place is None:
        return None
    module, _, attribute = place.partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command
