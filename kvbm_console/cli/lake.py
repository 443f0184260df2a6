"""``kvbm-console lake``: recordings of many engines as Parquet files, and questions to them.

Law of this file: adding a recording again changes nothing, and a question only reads.
"""

from pathlib import Path
from typing import Any

import click

from kvbm_console.analysis.lake_questions import QUESTIONS, ask
from kvbm_console.cli.output import number, print_result, progress, table
from kvbm_console.cli.params import FilePath, block_hash, format_option


@click.group()
def lake() -> None:
    """Many recordings as tables, for questions in SQL."""


@lake.command("add")
@click.argument("paths", metavar="DIR-or-FILE...", nargs=-1, required=True,
                type=FilePath(exists=True, path_type=Path))
@click.option("--lake", "place", type=FilePath(file_okay=False, path_type=Path), required=True, metavar="DIR",
              help="The lake, made if it does not exist.")
@click.option("--engine", metavar="NAME", help="The engine's name in the lake.  [default: the recording's]")
@format_option("text", "json")
def add_command(paths: tuple[Path, ...], place: Path, engine: str | None, form: str) -> None:
    """Add recordings: every run of each. A recording that is added again replaces its own rows."""
    from kvbm_console.analysis.lake_files import add
    from kvbm_console.analysis.walk import evidence_of
    from kvbm_console.recording.reader import Recording

    if engine is not None and len(paths) > 1:
        raise click.UsageError(f"--engine names one engine, and there are {len(paths)} recordings")
    added = []
    for path in paths:
        for run in Recording.open(path).runs:
            recording = Recording.open(path, run)
            name = engine or recording.name.removesuffix(".mcap")
            added.append(add(evidence_of(recording), place, name, run, recording.clock_anchor_ns, progress()))
    print_result(form, added, lambda: [
        f"{each.path}  engine {each.engine}  " + "  ".join(f"{number(rows)} {name}" for name, rows in each.rows.items())
        + f"  {number(each.files)} files, {number(each.bytes)} bytes" for each in added
    ])


@lake.command("ask")
@click.argument("place", metavar="DIR", type=FilePath(exists=True, file_okay=False, path_type=Path))
@click.argument("question", type=click.Choice(list(QUESTIONS)))
@click.option("--hash", "block", metavar="HASH", help="With who-has: the block, 16 hexadecimal digits.")
@click.option("--sql", is_flag=True, help="Print the SQL of the question and ask nothing.")
@format_option("text", "json")
def ask_command(place: Path, question: str, block: str | None, sql: bool, form: str) -> None:
    """Ask a lake.

    hit-rate by engine; top-misses, the blocks from which most prompt blocks had to be computed; evict-then-miss, the
    misses of blocks that the same engine had evicted; waste, the blocks of lower tiers that were never loaded; copies,
    the queue and wire time of each route; times, the requests with their first token and latency; reuse, the prompt
    blocks that were reused, and those that another engine held; who-has, the engines that hold a block.
    """
    if (block is not None) != (question == "who-has"):
        raise click.UsageError(f"--hash goes with who-has, and who-has needs it; the question is {question}")
    if sql and form == "json":
        raise click.UsageError("--format json tells of an answer: it has no meaning with --sql")
    if sql:
        click.echo(" ".join(QUESTIONS[question].split()))
        return
    answer = ask(place, question, None if block is None else _hash(block))
    print_result(form, answer, lambda: table(
        [name.upper().replace("_", " ") for name in answer.columns],
        [[_cell(value) for value in row] for row in answer.rows],
        right=[at for at in range(len(answer.columns)) if all(not isinstance(row[at], str) for row in answer.rows)],
    ))


def _hash(text: str) -> int:
    found = block_hash(text)
    if found is None:
        raise click.UsageError(f"--hash must be 16 hexadecimal digits, got {text!r}")
    return found


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return number(value) if isinstance(value, int) else str(value)
