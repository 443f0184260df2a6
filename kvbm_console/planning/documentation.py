"""The text of kvbm_console/planning/REFERENCE.md: what ``simulate`` and ``compare`` print, key by key.

Law of this file: generated from the same tables that the documents are made from, so it cannot be stale; a test
compares the file with it (``python -m kvbm_console.planning.documentation`` writes it).
"""

from pathlib import Path
from typing import Final

from kvbm_console.planning import cache_only, report, rows, store

FILE: Final = Path(__file__).parents[2] / "kvbm_console" / "planning" / "REFERENCE.md"

HEAD: Final = """# What `kvbm-console simulate` reports

A trace runs through engine and tiers in virtual time; the same options give the same bytes on stdout, and how long it
took is told on stderr. Without a lower tier (`--kv-cpu-blocks 0 --kv-disk-blocks 0`, the default) nothing about tiers,
links and policies is printed, whatever else was said.

Stats lines go to stderr too: after the reset, the first prefill, the last decode and the clean-up, and every
`--stats-every` iterations. `--cleanup` says how long records of finished requests stand (`incremental`: as long as they
live, `end`: to the end of the run, `none`: for ever) and whether the tiers are cleared at the end; the report is the
same. Iterations between two decisions of the engine (an arrival that could be admitted, an end, a copy) are taken at
once; report and stats lines are those of iterations taken one by one. [example.toml](example.toml) is a
configuration file with the flags of `simulate`, `compare` and `serve`.

This file is generated: `python -m kvbm_console.planning.documentation`.
"""


def text() -> str:
    """The whole file."""
    compatible = (store.__doc__ or "").split("The compatibility configuration:")[1].strip()
    return "\n".join([
        HEAD,
        "## Keys of `simulate --format json`",
        "",
        *_table(report.KEYS),
        "",
        "Figures by tier stand under `G1` to `G3`, figures by route under `G1>G2` and so on. Inside the other objects:",
        "",
        *_table({f"{key}.{inner}": words for key, keys in report.INNER.items() for inner, words in keys.items()}),
        "",
        "## Columns of `simulate --requests-out`",
        "",
        "A row stands for each request that has ended, in the order of their ends; one that was refused has none.",
        "",
        *_table(rows.COLUMNS),
        "",
        "## Keys of `simulate --cache-only --format json`",
        "",
        *_table(cache_only.KEYS),
        "",
        "## The compatibility configuration of `simulate --vectors`",
        "",
        f"The vectors are replayed in a configuration of its own: {compatible}",
        "",
        "A scenario that is `normative` must be reproduced exactly; one that is `bug_compat` shows a defect and must",
        "come out differently. In both the contracts are checked after every operation by walking the blocks.",
        "",
    ])


def _table(keys: dict[str, str]) -> list[str]:
    return ["| key | definition |", "|---|---|", *(f"| `{key}` | {words} |" for key, words in keys.items())]


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
