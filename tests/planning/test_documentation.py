"""Every key of the documents is in the tables that kvbm_console/planning/REFERENCE.md is made from."""

import json

import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.core.ids import SkipReason
from kvbm_console.planning import report

COMPAT = {"kv_transfer_bandwidth", "kv_transfer_base_latency"}
"""Keys of a run with --compat, in place of its links."""
CONNECTED = {"connector"}
"""Keys of a run in which vLLM's connector decides."""


@pytest.mark.parametrize("flags", [
    (), ("--kv-cpu-blocks", "30", "--kv-disk-blocks", "60", "--prefetch-stop", "timeout"),
    ("--kv-disk-blocks", "60", "--policy", "lrfu_auto"),
])
def test_every_key_that_is_printed_is_documented_and_no_other(flags: tuple[str, ...]) -> None:
    """Inside the objects too; what goes by tier or route is documented once for all."""
    result = CliRunner().invoke(cli, [
        "simulate", "--trace", "multiturn:requests=24,sessions=4,system=64,user=48,output=24,turns=3",
        "--total-kv-blocks", "40", "--stats-every", "0", "--format", "json", *flags,
    ])
    shown = json.loads(result.stdout)
    assert list(shown) == list(report.KEYS)
    tiers = {"G1", *(("G2",) if "--kv-cpu-blocks" in flags else ()), *(("G3",) if flags else ())}
    for key, value in shown.items():
        if key in report.INNER and value is not None:
            if key == "thrash":
                assert set(value) == tiers
                value = list(value.values())
            for one in value if isinstance(value, list) else [value]:
                assert set(one) <= set(report.INNER[key]), key
                if key != "settings" or "--kv-cpu-blocks" in flags:
                    elsewhere = COMPAT | CONNECTED if key == "settings" else set()
                    assert set(one) == set(report.INNER[key]) - elsewhere, key
        elif key in ("hit_blocks", "evicted_blocks"):
            assert set(value) == tiers
        elif key in ("moved_blocks", "moved_bytes"):
            assert all(set(route.split(">")) <= tiers for route in value)
        elif key == "skipped_copies":
            assert set(value) <= {reason.label for reason in SkipReason}
        elif isinstance(value, dict):
            assert key == "policy", f"{key} has keys that are documented nowhere"
