"""The sub-commands of ``rec`` that look at recordings from outside: compare, export, import.

Law of this file: only a list; each command stands in a file of its own.
"""

from typing import Final

import click

from kvbm_console.cli.rec_diff import diff_command
from kvbm_console.cli.rec_export import export_command
from kvbm_console.cli.rec_import import import_group

MORE: Final[tuple[click.Command, ...]] = (diff_command, export_command, import_group)
"""What ``rec`` has beside its own commands."""
