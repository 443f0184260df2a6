"""Questions to a lake, as SQL over its tables.

Law of this file: a question only reads, and names each of its figures.
"""

import glob
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.core.errors import RecordingError, UsageError
from kvbm_console.extras import need

TABLES: Final[dict[str, tuple[str, ...]]] = {
    "blocks": ("seq", "at_ns", "op", "tier", "hash", "slot"),
    "lookups": ("seq", "at_ns", "slot", "request", "prompt_blocks", "g1", "g2", "g3", "g4", "miss_hash",
                "missed_blocks", "why"),
    "transfers": ("seq", "at_ns", "slot", "request", "route", "blocks", "queue_ns", "wire_ns", "status"),
    "requests": ("seq", "at_ns", "slot", "request", "opened_ns", "first_token_ns", "prompt_tokens", "prompt_blocks",
                 "preemptions", "lost_blocks", "reason"),
}
"""Table to its columns. Times are the wall's, in nanoseconds since 1970; a hash is a number of 64 bits. A question also
has ``engine`` and ``run``, which stand in the path of a file."""
TEXTS: Final = frozenset(("op", "tier", "request", "why", "route", "status", "reason"))
"""Columns of text; the others are numbers."""
_RUN: Final = "regexp_extract(filename, '([^/]*)-[0-9]+.parquet$', 1)"
"""The incarnation in the name of a file (``LakeFiles``)."""
NO_NAME: Final = "__HIVE_DEFAULT_PARTITION__"
"""The folder of rows without a name, for all that read partitions of Hive. Here it is an engine's name in old lakes."""
MEMORY: Final = "1536MB"
"""DuckDB's share of the 2 GB that a question takes at most; what needs more goes to temporary files."""
QUESTIONS: Final[dict[str, str]] = {
    "hit-rate": """
        with found as (select engine, sum(prompt_blocks) as prompt_blocks, sum(g1) as g1, sum(g2) as g2, sum(g3) as g3,
                              sum(g4) as g4 from lookups group by engine),
             lost as (select engine, sum(lost_blocks) as lost from requests group by engine)
        select engine, sum(prompt_blocks) as prompt_blocks, sum(g1) as g1, sum(g2) as g2, sum(g3) as g3, sum(g4) as g4,
               coalesce(sum(lost), 0) as lost,
               round(100.0 * (sum(g1 + g2 + g3 + g4) - coalesce(sum(lost), 0)) / sum(prompt_blocks), 2) as hit_percent
        from found left join lost using (engine) group by rollup (engine) order by engine nulls first""",
    "top-misses": """
        select printf('%016x', miss_hash) as hash, sum(missed_blocks) as missed_blocks, count(*) as requests,
               count(distinct engine) as engines, mode(why) as why
        from lookups where miss_hash is not null
        group by miss_hash order by missed_blocks desc, hash limit 20""",
    "evict-then-miss": """
        with missed as (select engine, at_ns, (at_ns, seq) as at, miss_hash as hash, missed_blocks from lookups
                        where miss_hash is not null),
             gone as (select engine, at_ns, (at_ns, seq) as at, hash, tier from blocks
                      where op = 'evicted' and hash in (select hash from missed)),
             pairs as (select missed.engine, gone.tier, missed.missed_blocks, missed.at_ns - gone.at_ns as age_ns
                       from missed asof join gone
                       on missed.engine = gone.engine and missed.hash = gone.hash and missed.at >= gone.at)
        select engine, tier, count(*) as misses, sum(missed_blocks) as missed_blocks,
               round(median(age_ns) / 1e9, 3) as median_age_s
        from pairs group by engine, tier order by missed_blocks desc, engine, tier""",
    "waste": """
        with stored as (select engine, tier, count(*) as blocks from blocks
                        where op = 'stored' and tier <> 'g1' group by all),
             loaded as (select engine, lower(left(route, 2)) as tier, sum(blocks) as blocks from transfers
                        where status = 'completed' and left(route, 2) > right(route, 2) group by all)
        select engine, tier, stored.blocks as stored_blocks, coalesce(loaded.blocks, 0)::bigint as loaded_blocks,
               round(100.0 * coalesce(loaded.blocks, 0) / stored.blocks, 2) as loaded_percent
        from stored left join loaded using (engine, tier) order by engine, tier""",
    "copies": """
        select route, count(*) as copies, sum(blocks) as blocks,
               round(quantile_cont(queue_ns, 0.99) / 1e6, 3) as queue_p99_ms,
               round(quantile_cont(wire_ns, 0.99) / 1e6, 3) as wire_p99_ms
        from transfers where wire_ns is not null group by route order by blocks desc, route""",
    "times": """
        select engine, count(*) as requests, sum(preemptions)::bigint as preemptions,
               round(quantile_cont(first_token_ns - opened_ns, 0.5) / 1e6, 3) as first_token_p50_ms,
               round(quantile_cont(first_token_ns - opened_ns, 0.99) / 1e6, 3) as first_token_p99_ms,
               round(quantile_cont(at_ns - opened_ns, 0.5) / 1e6, 3) as latency_p50_ms,
               round(quantile_cont(at_ns - opened_ns, 0.99) / 1e6, 3) as latency_p99_ms
        from requests group by rollup (engine) order by engine nulls first""",
    "reuse": """
        with missed as (select engine, at_ns, miss_hash as hash, missed_blocks from lookups
                        where miss_hash is not null),
             runs as (select engine, run, lead(min(at_ns)) over (partition by engine order by min(at_ns)) as ends_ns
                      from blocks group by engine, run qualify ends_ns is not null),
             ended as (select engine, hash, ends_ns, sum(if(op = 'stored', -1, 1)) as change
                       from blocks join runs using (engine, run) where hash in (select hash from missed) group by all),
             moved as (select engine, hash, at_ns, sum(change) as change from (
                           select engine, hash, at_ns, if(op = 'stored', 1, -1) as change from blocks
                           where hash in (select hash from missed) union all from ended) group by all),
             placed as (select *, sum(change) over (partition by engine, hash order by at_ns) as places from moved),
             held as materialized (select engine, hash, at_ns, places > 0 as holds from placed
                                   where (places > 0) <> (places - change > 0)),
             fleet as (select hash, at_ns, sum(sum(if(holds, 1, -1))) over (partition by hash order by at_ns)
                       as engines from held group by hash, at_ns),
             held_by as (select missed.engine, missed_blocks, missed.hash, missed.at_ns, engines
                         from missed asof join fleet on missed.hash = fleet.hash and missed.at_ns >= fleet.at_ns
                         where engines > 0),
             elsewhere as (select held_by.engine, sum(missed_blocks) as blocks
                           from held_by asof left join held on held_by.engine = held.engine
                           and held_by.hash = held.hash and held_by.at_ns >= held.at_ns
                           where engines > coalesce(holds, false)::int group by all),
             scored as (select engine, sum(prompt_blocks) as prompt_blocks, sum(g1 + g2 + g3 + g4) as captured
                        from lookups group by engine),
             lost as (select engine, sum(lost_blocks) as blocks from requests group by engine),
             summed as (select engine, sum(prompt_blocks) as prompt_blocks,
                               sum(captured - coalesce(lost.blocks, 0)) as delivered,
                               sum(coalesce(lost.blocks, 0)) as not_delivered,
                               sum(coalesce(elsewhere.blocks, 0)) as not_captured
                        from scored left join lost using (engine) left join elsewhere using (engine)
                        group by rollup (engine))
        select engine, prompt_blocks::bigint as prompt_blocks,
               round(100.0 * delivered / prompt_blocks, 2) as delivered_percent,
               round(100.0 * not_delivered / prompt_blocks, 2) as not_delivered_percent,
               round(100.0 * not_captured / prompt_blocks, 2) as not_captured_percent,
               round(100.0 * (prompt_blocks - delivered - not_delivered - not_captured) / prompt_blocks, 2)
               as not_held_percent
        from summed order by engine nulls first""",
    "who-has": """
        with runs as (select engine, run, min(at_ns) as begins_ns from blocks group by all),
             last as (select engine, arg_max(run, begins_ns) as run from runs group by engine)
        select engine, tier, sum(if(op = 'stored', 1, -1)) as places from blocks join last using (engine, run)
        where hash = $hash group by engine, tier having places > 0 order by engine, tier""",
}
"""Question to its SQL over the tables of a lake."""


def tables_of(question: str) -> list[str]:
    """The tables that a question reads."""
    return [table for table in TABLES if re.search(rf"(from|join) {table}\b", QUESTIONS[question])]


class LakeAnswer(msgspec.Struct, frozen=True):
    """The answer to a question: a name for each column, and the rows."""

    question: str
    columns: list[str]
    rows: list[list[Any]]


def ask(lake: Path, question: str, block: int | None = None) -> LakeAnswer:
    """Ask a lake one of ``QUESTIONS``. Raises ``UsageError`` when duckdb is missing or the lake has no rows,
    and ``RecordingError`` when a file of it cannot be read."""
    duckdb: Any = need("duckdb", "lake", "DuckDB", "lake ask")
    for table in tables_of(question):
        if table != "requests" and not _has(lake, table):  # no request may have ended yet
            raise UsageError(f"{lake} holds no {table}; kvbm-console lake add RUN --lake {lake} adds a recording")
    try:
        return _answer(duckdb, lake, question, block)
    except duckdb.Error as error:
        raise RecordingError(f"{lake} cannot be read: {str(error).splitlines()[0]}") from None


def _has(lake: Path, table: str, engine: str = "*") -> bool:
    return any((lake / table).glob(f"day=*/engine={engine}/*.parquet"))


def _answer(duckdb: Any, lake: Path, question: str, block: int | None) -> LakeAnswer:
    connection = duckdb.connect(config={
        "memory_limit": MEMORY, "temp_directory": str(Path(tempfile.gettempdir(), f"kvbm-lake-{os.getpid()}")),
    })
    connection.execute("set enable_progress_bar = false")  # it would be drawn into the answer
    for table in tables_of(question):
        if not _has(lake, table):
            empty = (f"null::{'varchar' if name in TEXTS else 'bigint'} as {name}" for name in TABLES[table])
            connection.execute(f"create view {table} as select {', '.join(empty)}, '' as engine where false")
            continue
        place = glob.escape(str(lake / table)).replace("'", "''")
        # Computed for every row, a name costs who-has ten times as much, so only lakes that need it pay for it.
        named = f" replace (coalesce(engine, '{NO_NAME}') as engine)" if _has(lake, table, NO_NAME) else ""
        connection.execute(
            f"create view {table} as select * exclude (filename){named}, {_RUN} as run from read_parquet("
            f"'{place}/*/*/*.parquet', filename = true, hive_partitioning = true, "
            "hive_types = {'day': date, 'engine': varchar})"
        )
    result = connection.execute(QUESTIONS[question], {"hash": block} if "$hash" in QUESTIONS[question] else None)
    columns = [column[0] for column in result.description]
    return LakeAnswer(question, columns, [list(row) for row in result.fetchall()])
