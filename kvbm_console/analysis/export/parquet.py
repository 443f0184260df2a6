"""Parquet: a directory with one table for each kind of row, for SQL.

``requests``, ``states``, ``holds``, ``transfers``, ``tiers``, ``engine``, ``events``, ``gaps``. Columns have the names
of the rows; times are nanoseconds of the engine.

Law of this file: rows are written in groups as they come, so that memory does not grow with the recording.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvbm_console.analysis.export.tables import TableRows
from kvbm_console.extras import need


class ParquetTables(TableRows):
    """Writes rows as tables into a directory. Raises ``UsageError`` when the library is missing."""

    def __init__(self, directory: Path) -> None:
        super().__init__("--to parquet")
        parquet: Any = need("pyarrow.parquet", "parquet", "pyarrow", "--to parquet")
        self._writers = {
            name: parquet.ParquetWriter(str(directory / f"{name}.parquet"), schema, compression="zstd")
            for name, schema in self.schemas.items()
        }

    def take(self, name: str, table: Any) -> None:
        """Append the rows to the table's file."""
        self._writers[name].write_table(table)

    def close(self) -> None:
        """Write the waiting rows and end the files."""
        with ExitStack() as files:  # each file is closed, also beside one that fails
            for writer in self._writers.values():
                files.callback(_close, writer)
            super().close()


def _close(writer: Any) -> None:
    try:
        writer.close()
    finally:
        writer.is_open = False  # it would try again when it is collected, and print a traceback
