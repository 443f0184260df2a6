"""``simulate --vectors``: replay a file of scenarios and say how each came out.

Law of this file: a line for each vector on stdout, exit 1 when one came out wrong.
"""

import shlex
from pathlib import Path

import click

from kvbm_console.cli.output import print_json
from kvbm_console.core.errors import UsageError
from kvbm_console.planning.vectors import check_vectors, read_vectors


def replay_vectors(path: Path, form: str) -> int:
    """Check every vector of a file; the exit status."""
    lines = list(check_vectors(read_vectors(path), _refusal))
    failed = sum(not line.ok for line in lines)
    if form == "json":
        print_json({
            "file": str(path), "vectors": len(lines), "failed": failed,
            "lines": [{"name": line.name, "kind": line.kind, "ok": line.ok, "why": line.why} for line in lines],
        })
    else:
        for line in lines:
            click.echo(f"{'ok  ' if line.ok else 'FAIL'} {line.kind:<10} {line.name}"
                       + (f": {line.why}" if line.why else ""))
        click.echo(f"{len(lines)} vectors, {failed} failed")
    return 1 if failed else 0


def _refusal(arguments: str) -> str:
    """Empty when the command line is refused with one sentence that names its flag, before any work."""
    from kvbm_console.cli.simulate import simulate

    words = shlex.split(arguments)
    try:
        simulate.main(words, standalone_mode=False)
    except (click.ClickException, UsageError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        flags = [word for word in words if word.startswith("--")]
        if "\n" in message or not any(flag in message for flag in flags):
            return f"it was refused with {message!r}"
        return ""
    return "it was not refused"
