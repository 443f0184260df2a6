"""The file of ``simulate --requests-out``: a row for each request that has ended.

Law of this file: the columns are exactly ``COLUMNS``, in that order, and the file depends on the options alone.
"""

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.planning.meter import RequestRecord

COLUMNS: Final[dict[str, str]] = {
    "instance": "the engine that it ran on, from 0",
    "request": "its name",
    "arrived_ns": "nanoseconds of virtual time at its arrival",
    "first_token_ns": "the same of its first token; null, in CSV empty, without one",
    "finished_ns": "the same of its end",
    "reason": "why it ended: length, or too_large for a request that can never fit",
    "prompt_tokens": "tokens of its prompt",
    "cached_g1_tokens": "of these, in full blocks that its last admission found on the device",
    "cached_g2_tokens": "the same of the host tier, those of failed loads taken back",
    "cached_g3_tokens": "the same of the disk tier",
    "output_tokens": "tokens that it sampled",
    "preemptions": "times that the scheduler took its blocks back",
}
"""Column to its definition."""
SUFFIXES: Final = (".jsonl", ".csv")


def row_of(instance: int, record: RequestRecord, block_tokens: int) -> dict[str, Any]:
    """The row of a request that has ended."""
    g1, g2, g3, _ = record.hits
    values = (
        instance, record.request, record.arrived_ns, record.first_token_ns, record.finished_ns, record.reason,
        record.prompt_tokens, g1 * block_tokens, g2 * block_tokens, g3 * block_tokens, record.output_tokens,
        record.preemptions,
    )
    return dict(zip(COLUMNS, values, strict=True))


@contextmanager
def writer(path: Path | None, block_tokens: int) -> Iterator[Callable[[int, RequestRecord], None] | None]:
    """Writes what it is told into a new file in place of the one that is there; None without a path.

    Raises ``UsageError`` for another suffix and for a file that cannot be written.
    """
    if path is None:
        yield None
        return
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--requests-out must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    try:
        file = path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"--requests-out cannot be written: {error.strerror}, got {str(path)!r}") from None
    with file:
        if path.suffix == ".csv":
            rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            rows.writeheader()
            yield lambda instance, record: rows.writerow(row_of(instance, record, block_tokens))
        else:
            encode = msgspec.json.Encoder().encode

            def write(instance: int, record: RequestRecord) -> None:
                file.write(encode(row_of(instance, record, block_tokens)).decode() + "\n")

            yield write
