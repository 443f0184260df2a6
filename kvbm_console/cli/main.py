"""The program ``kvbm-console``: its list of commands, and the exit status of each error.

Law of this file: a mistake on the command line or in a file ends as one sentence on stderr and exit 2. A daemon that
does not listen or refuses, and a thing that does not exist, end as one sentence and exit 3. So does output for which
there is no space, with exit 2. Ctrl-c ends with 130, SIGTERM with 143, a terminal that was closed with 129, and a
reader that closed the pipe ends quietly; anything else is a bug and keeps its traceback.
"""

import errno
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TextIO

import click

from kvbm_console.cli import COMMANDS, command_named
from kvbm_console.core.errors import ConnectionLost, NotFound, Refused, UsageError
from kvbm_console.files import NO_SPACE

PROGRAM: Final = "kvbm-console"
EXIT_USAGE: Final = 2
"""The command line or an input file is wrong."""
EXIT_ABSENT: Final = 3
"""No daemon listens on the target, the target refuses, or there is no such request, hold, breakpoint or run."""
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""
EXIT_TERMINATED: Final = 143
"""128 + SIGTERM, of commands that end in order then; without a handler the system reports the same."""
EXIT_HANGUP: Final = 129
"""128 + SIGHUP: the terminal was closed before the end was printed."""


class _Terminated(KeyboardInterrupt):
    """Raised in a ``terminable`` command at SIGTERM."""


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the block as ctrl-c does: its processes and unfinished files go, and its findings are told."""
    def end(_number: int, _frame: object) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _ReaderGone(Exception):
    """Raised when the reader of our output closed the pipe."""


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command, or the list of all, is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name or alias, None if there is none."""
        return command_named(cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a closed pipe raises before click can turn it into an exit status of its own."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderGone from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = PROGRAM,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and end the process with the exit status that the outcome deserves."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        sys.exit(self._run(args, prog_name, complete_var, **extra))

    def _run(self, args: Sequence[str] | None, prog_name: str | None, complete_var: str | None, **extra: Any) -> int:
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            return EXIT_USAGE
        except click.ClickException as error:
            return complain(error.format_message())
        except (NotFound, ConnectionLost, Refused) as error:
            return complain(str(error), EXIT_ABSENT)
        except UsageError as error:
            return complain(str(error))
        except (_ReaderGone, BrokenPipeError):
            _print_no_more(sys.stdout)  # the reader of our output went away (`| head`)
            return 0
        except OSError as error:
            if error.filename is None and error.errno == errno.EIO:
                _print_no_more(sys.stdout, sys.stderr)
                return EXIT_HANGUP
            if error.filename is None and error.errno in NO_SPACE:
                _print_no_more(sys.stdout)
                return complain(f"the output could not be written: {os.strerror(error.errno)}")
            if error.filename is None or error.strerror is None:
                raise
            return complain(f"{error.filename}: {error.strerror}")
        except (KeyboardInterrupt, click.Abort) as error:  # click makes an Abort of either signal
            return EXIT_TERMINATED if isinstance(error.__cause__, _Terminated) else EXIT_INTERRUPTED
        return status if isinstance(status, int) else 0


def complain(message: str, status: int = EXIT_USAGE) -> int:
    """Print one sentence on stderr; returns the exit status that goes with it."""
    from kvbm_console.cli.output import warn

    warn(f"{PROGRAM}: {' '.join(message.split())}")
    return status


def _print_no_more(*streams: TextIO) -> None:
    """Let these streams lead nowhere. Python would write what is left of them at its end, and complain once more."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_standard_streams() -> None:
    """Let closed standard streams (``>&-``) lead nowhere; else the next file or socket would take their numbers.

    A library that writes to stderr would then write into a recording.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, and those below are taken
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from kvbm_console.cli.output import version_line

    click.echo(version_line())
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, callback=_print_version, expose_value=False, is_eager=True,
              help="Versions of program, protocol and recording format.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Show, stop and replay what a tiered KV cache is doing.

    Exit status: 0 fine, 1 a check found something, 2 the command line or an input file is wrong. 3 no daemon
    listens, the daemon refuses, or there is no such request, hold, breakpoint or run.
    """
    from kvbm_console.cli.config import defaults

    if ctx.invoked_subcommand != "config":
        ctx.default_map = defaults()


def main() -> NoReturn:
    """Entry point of the console script."""
    _open_standard_streams()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # we report errors ourselves, in one sentence
    cli.main()
    raise AssertionError("unreachable")
