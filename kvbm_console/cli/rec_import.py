"""``kvbm-console rec import``: recordings of others become ours.

Law of this file: how the two leaders compare is printed with what was written.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvbm_console.cli.output import number, print_json, share, table
from kvbm_console.cli.params import format_option
from kvbm_console.cli.progress import progress
from kvbm_console.cli.streams import import_kv_events

if TYPE_CHECKING:
    from kvbm_console.engines.dynamo import Imported


@click.group("import")
def import_group() -> None:
    """Make a recording of ours from somebody else's."""


import_group.add_command(import_kv_events)


@import_group.command()
@click.argument("path", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE.mcap|DIR",
              help="The recording to write: a new file, or a new or empty directory.")
@click.option("--block-tokens", type=click.IntRange(1, 65_536), metavar="N",
              help="Tokens in a block; without it found from the recording.")
@click.option("--g2-blocks", type=click.IntRange(0, 2**31 - 1), default=8_192, show_default=True, metavar="N",
              help="Capacity of our host tier.")
@click.option("--g3-blocks", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, metavar="N",
              help="Capacity of our disk tier.")
@format_option("text", "json")
def dynamo(path: Path, out: Path, block_tokens: int | None, g2_blocks: int, g3_blocks: int, form: str) -> None:
    """Drive our leader with a Dynamo leader recording (JSON lines).

    The engine's calls are theirs, every decision is ours: look-ups and finishes that were answered otherwise are
    counted and listed. Copies arrive at once, since the recording does not tell when they did.
    """
    from kvbm_console.core.config import LeaderConfig
    from kvbm_console.core.errors import UsageError
    from kvbm_console.engines.dynamo import import_dynamo, infer_block_tokens

    size = block_tokens or infer_block_tokens(path)
    if size is None:
        raise UsageError(f"the block size of {path} cannot be found; say it with --block-tokens")
    config = LeaderConfig(block_tokens=size, g2_blocks=g2_blocks, g3_blocks=g3_blocks, offload_threshold=0.0)
    imported = import_dynamo(path, out, config, progress=progress())
    if form == "json":
        print_json(imported)
    else:
        for line in _lines(imported):
            click.echo(line)


def _lines(one: "Imported") -> list[str]:
    report = one.report
    lines = [
        f"{one.made.path}  {number(one.made.events)} events from {number(report.lines)} calls of "
        f"{number(report.requests)} requests, blocks of {one.block_tokens}",
        f"look-ups  {number(report.lookups_equal)} of {number(report.lookups)} answered alike "
        f"({share(report.lookups_equal, report.lookups)}); matched {number(report.theirs_matched_tokens)} tokens "
        f"there, {number(report.ours_matched_tokens)} here",
        f"finishes  {number(report.finishes_equal)} of {number(report.finishes)} answered alike",
    ]
    if report.preempted:
        lines.append(f"preempted {number(report.preempted)} requests that the recording shows only by what followed")
    if report.refused:
        lines.append(f"refused   {number(report.refused)} calls")
    if report.passed_over:
        told = ", ".join(f"{number(times)} {action}" for action, times in sorted(report.passed_over.items()))
        lines.append(f"passed    {told}")
    if report.others:
        lines += ["", *table(
            ("LINE", "CALL", "REQUEST", "THERE", "HERE"),
            [(number(other.line), other.action, other.request, other.theirs, other.ours) for other in report.others],
            right=(0,),
        )]
    return lines
