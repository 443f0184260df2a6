"""``kvbm-console bench links``: the speed of this machine's memory and disk, for ``--links``.

Law of this file: a file is never overwritten, and what was measured is printed with its error.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from kvbm_console.cli.output import duration, print_result
from kvbm_console.cli.params import Duration, FilePath, format_option
from kvbm_console.core.errors import UsageError

if TYPE_CHECKING:
    from kvbm_console.planning.links import LinkBench


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command("links")
@click.option("--disk", type=FilePath(path_type=Path), metavar="DIR",
              help="Also measure the disk of this directory, with a file that is removed.")
@click.option("--for", "for_ns", type=Duration(10**8, 30 * 10**9, "from 100ms to 30s"), default="8s",
              show_default=True, metavar="TIME", help="How long to measure.")
@click.option("--out", type=FilePath(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write the links for --links of simulate, compare, serve and demo; the file must not exist.")
@format_option("text", "json")
def links(disk: Path | None, for_ns: int, out: Path | None, form: str) -> None:
    """Measure copies in memory and reads and writes of a disk, and fit latency and bandwidth.

    A copy of n bytes takes the latency and n divided by the bandwidth. The error is that of the worst size. The file
    gets the fits at depth 4, and copies in memory as a bound for those of a device. A fit that is wrong by half is not
    written.
    """
    from kvbm_console.planning.links import file_of, measure_links

    if out is not None and out.exists():
        raise UsageError(f"--out must name a new file, got {str(out)!r}, which exists")
    done = measure_links(disk, for_ns / 1e9)
    if out is not None:
        out.write_text(file_of(done), encoding="utf-8")
        done = msgspec.structs.replace(done, out=str(out))
    print_result(form, msgspec.to_builtins(done), lambda: _lines(done))


def _lines(done: "LinkBench") -> list[str]:
    lines = [f"{'link':<12}{'depth':>6}{'latency':>10}{'bandwidth':>14}{'error':>8}{'p90/p50':>9}"]
    for link in done.links:
        rows = [row for row in done.times if (row.kind, row.depth) == (link.name, link.depth)]
        spread = max(row.p90_ns / row.p50_ns for row in rows)
        cached = "" if link.direct or link.name == "memcpy" else "  through the page cache"
        lines.append(
            f"{link.name:<12}{link.depth:>6}{duration(link.base_latency_ns):>10}{link.bytes_per_s / 1e9:>9.2f} GB/s"
            f"{link.error:>8.0%}{spread:>9.1f}{cached}"
        )
    return [*lines, *([] if done.out is None else [f"written to {done.out}"])]
