"""On requests of a real service, what is copied down in time loses next to nothing against copying every block.

Law of this file: it runs where the shared trace is at hand.
"""

from pathlib import Path
from typing import Any

import pytest

from kvbm_console.simulation.options import SimulateOptions
from kvbm_console.simulation.run import simulate


def document(shared: Path, **changes: Any) -> dict[str, Any]:
    """The report on 300 requests, of blocks of 512 tokens."""
    fields: dict[str, Any] = {
        "trace": f"mooncake:{shared / 'traces' / 'mooncake_conversation_trace.jsonl'}", "limit": 300, "block_size": 512,
        "total_kv_blocks": 512, "kv_cpu_blocks": 1_000, "kv_disk_blocks": 20_000, "stats_every": 0, **changes,
    }
    return simulate(SimulateOptions(**fields)).report.document


@pytest.mark.slow
def test_the_default_hits_as_much_as_write_through_with_no_more_preemptions(shared: Path) -> None:
    default, through = document(shared), document(shared, kv_offload_threshold=0.0)
    assert default["prefix_hit_rate"] > through["prefix_hit_rate"] - 0.005
    bare = document(shared, kv_cpu_blocks=0, kv_disk_blocks=0)
    assert default["preemptions"] <= bare["preemptions"]
