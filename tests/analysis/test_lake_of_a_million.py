"""Every question to a lake of a million events of 64 engines; ``python -m tests.benchmarks.lake 100`` asks one of 100.

Law of this file: no question takes ten seconds, and sums over the lake are those of its rows.
"""

import time
from pathlib import Path

from kvbm_console.analysis.lake_questions import QUESTIONS, ask
from tests.benchmarks.lake import ENGINES, SECONDS_MAX, RowsOfRun, write

COPIES = 62


def test_every_question_is_answered_in_time(tmp_path: Path) -> None:
    rows = RowsOfRun(tmp_path / "once")
    write(rows, tmp_path / "many", COPIES)
    assert COPIES * rows.events > 1_000_000
    key = rows.copy("lookups", 0, 0, 0).column("miss_hash").drop_null()[0].as_py()
    for question in QUESTIONS:
        block = key if question == "who-has" else None
        began = time.monotonic()
        many = ask(tmp_path / "many", question, block).rows
        assert time.monotonic() - began < SECONDS_MAX
        once = ask(tmp_path / "once", question, block).rows
        if question in ("hit-rate", "times"):  # the first row is the sum over all engines
            assert many[0][1] == COPIES * once[0][1]
            assert len(many) == 1 + min(COPIES, ENGINES)
        elif question == "copies":
            assert {row[0]: row[1] for row in many} == {row[0]: COPIES * row[1] for row in once}
        elif question in ("waste", "evict-then-miss"):
            assert sum(row[2] for row in many) == COPIES * sum(row[2] for row in once)
        elif question == "reuse":
            assert many[0][4] > 0, "engines that meet the same prompts later could have had them"
            assert once[0][4] == 0
        else:
            assert many
