"""The text of kvbm_console/planning/REFERENCE.md: the output of ``simulate``, key by key.

Law of this file: it is made from the same tables as the output; ``make docs`` writes it and ``make check`` compares it.
"""

from pathlib import Path
from typing import Final

from kvbm_console.planning import cache_only, report, store

FILE: Final = Path(__file__).parents[2] / "kvbm_console" / "planning" / "REFERENCE.md"

HEAD: Final = """# The output of `kvbm-console simulate`

A trace runs through engine and tiers in virtual time. The same options give the same bytes on stdout; the wall time
goes to stderr. Without a lower tier (`--kv-cpu-blocks 0 --kv-disk-blocks 0`, the default) nothing about tiers, links
and policies is printed, whatever the other flags say.

On a terminal a bar on stderr shows how far the run is and when it will end. With `--stats-every N` stats lines go to
stderr, too: after the reset, the first prefill, the last decode and the clean-up, and every N iterations. `--cleanup`
chooses when the records of finished requests are given up: `incremental` as soon as a request ends, `end` at the end of
the run, `none` never. Unless it is `none`, the tiers are cleared at the end. The report is the same in each case.

Iterations between two decisions of the engine are simulated together: decisions follow an arrival that could be
admitted, an end, or a copy. Report and stats lines are those of iterations simulated one by one.
[example.toml](example.toml) is a configuration file with the flags of `simulate`, `compare` and `serve`.

This file is generated: `make docs`.
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
        "A row stands for each request that has ended, in the order of their ends. A refused request has none.",
        "",
        *_table(report.COLUMNS),
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
