"""``kvbm-console rec export``: a recording for other programs.

Law of this file: stdout carries either the export or the one line that says where it is.
"""

import sys
from pathlib import Path

import click

from kvbm_console.cli.evidence import RUN
from kvbm_console.cli.output import number, print_json
from kvbm_console.cli.params import compiled, filter_option, format_option
from kvbm_console.cli.progress import progress


@click.command("export")
@click.argument("path", metavar="DIR-or-FILE", type=click.Path(exists=True, path_type=Path))
@click.option("--to", "to", type=click.Choice(["jsonl", "chrome", "perfetto", "parquet"]), required=True,
              help="jsonl: events for scripts; chrome, perfetto: traces for a viewer; parquet: tables for SQL.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Where to; parquet makes a directory. jsonl goes to stdout without it.")
@RUN
@filter_option("With --to jsonl: only events for which this holds, as 'kind = SlotMoved and to = preempted'.")
@format_option("text", "json")
def export_command(path: Path, to: str, out: Path | None, run: str | None, expression: str, form: str) -> None:
    """Write a recording for other programs.

    perfetto opens in ui.perfetto.dev: a track for each slot with its states, lanes for copies, flows from plan to
    copy to end, counters for tiers. parquet is a directory of tables: requests, states, holds, transfers, tiers,
    engine, events, gaps. Both need an extra of the package, chrome and jsonl need none.
    """
    from kvbm_console.analysis.export import export, write_lines
    from kvbm_console.analysis.walk import evidence_of
    from kvbm_console.recording.reader import Recording

    wanted = None
    if expression:
        from kvbm_console.core.expression import compile_event_filter

        if to != "jsonl":
            raise click.UsageError(f"--filter chooses events for --to jsonl, not for {to}; rec cut --where cuts")
        wanted = compiled("--filter", compile_event_filter, expression)
    evidence = evidence_of(Recording.open(path, run))
    if out is None:
        if to != "jsonl":
            raise click.UsageError(f"--to {to} needs --out")
        write_lines(evidence, sys.stdout.buffer, progress(), wanted)
        sys.stdout.buffer.flush()
        return
    made = export(evidence, to, out, progress(), wanted)
    if form == "json":
        print_json(made)
    else:
        what = {"jsonl": "lines", "chrome": "trace events", "perfetto": "packets", "parquet": "rows"}[to]
        click.echo(f"{made.path}  {number(made.items)} {what}, {number(made.bytes)} bytes")
