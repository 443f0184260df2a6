"""Every numeric flag of ``simulate``, ``compare`` and ``serve`` acts: two values in its range, two reports.

Law of this file: flags are read from the commands themselves. A flag that takes a value is text (``WORDS``), or it has
a case here, made of a load and of two values, or it says which test shows what it does (``ELSEWHERE``). What a report
repeats of its flags does not count as a difference.
"""

import importlib
import json
from functools import cache
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

import server.daemon
from kvbm_console.cli.main import cli
from kvbm_console.simulator.embedded import build

SMALL = "multiturn:requests=18,sessions=8,prompts=2,system=96,user=64,output=32,turns=4,think=0.3,ramp=0.005"
"""Chats that come back after a third of a second, more of them than fit."""
MACHINE: dict[str, Any] = {
    "total_kv_blocks": 40, "kv_cpu_blocks": 48, "kv_disk_blocks": 400, "kv_offload_threshold": 0.0, "block_size": 16,
}
"""Flags of ``simulate`` and ``serve`` that a case does not name."""
SLOW_DISK = {"compat": True, "kv_transfer_bandwidth": 0.003}
"""A copy of a block takes 5 ms: longer than a request queues."""
SPARE = {"kv_cpu_blocks": 40, "kv_disk_blocks": 0}
"""A host tier that holds a part of the chats."""

Case = tuple[Any, Any, dict[str, Any]]
"""Two values, and the flags that make a load on which they differ."""
CACHE: dict[str, Case] = {
    "limit": (10, 20, {}),
    "total_kv_blocks": (40, 60, {}),
    "block_size": (16, 32, {}),
    "kv_cpu_blocks": (48, 96, {}),
    "kv_disk_blocks": (50, 400, {}),
    "total_kv_size": ("80MiB", "120MiB", {"total_kv_blocks": None}),
    "kv_cpu_size": ("96MiB", "192MiB", {"kv_cpu_blocks": None}),
    "kv_disk_size": ("100MiB", "800MiB", {"kv_disk_blocks": None}),
    "kv_geometry": ("32,8,128,2", "32,8,128,4", {}),
    "kv_offload_threshold": (0.0, 0.9, {}),
    "kv_transfer_bandwidth": (0.01, 100, {"compat": True}),
    "kv_transfer_base_latency": (0, 10_000, {"compat": True}),
    "frequency_weight": (0, 1, {"policy": "adaptive_lru"}),
    "frequency_credit_s": (0, 1_000, {"policy": "adaptive_lru"}),
    "half_life_s": (0.01, 1_000, {"policy": "lrfu"}),
    "pin_tail_tokens": (16, 128, SPARE),
    "pin_ttl_s": (0.01, 60, {**SPARE, "pin_tail_tokens": 128}),
    "priority_ttl_s": (0, 60, {**SPARE, "trace": f"{SMALL},priority=0.5"}),
    "disk_admission": (0, 2, {}),
    "thrash_window": ("1ms", "10s", {}),
    "step_base": ("4ms", "8ms", {}),
    "step_prefill_token": ("8us", "80us", {}),
    "step_decode_request": ("40us", "400us", {}),
    "max_num_batched_tokens": (32, 8_192, {}),
    "max_num_seqs": (1, 256, {}),
    "max_waiting": (1, 256, {"max_num_seqs": 1}),
    "prefetch_timeout_s": (0.005, 0.2, {**SLOW_DISK, "prefetch_stop": "timeout", "trace": f"{SMALL},seed=7"}),
}
"""Of the cache, the same for ``simulate``, ``compare`` and ``serve`` where they have the flag."""
OF_COMMAND: dict[str, dict[str, Case]] = {
    "simulate": {
        "seed": (1, 2, {}), "instances": (1, 2, {}), "stats_every": (1, 10, {}), "slo_ttft": ("1ms", "1s", {}),
        "slo_itl": ("1ms", "1s", {}),
    },
    "compare": {
        "seed": (1, 2, {}), "instances": (1, 2, {}), "total_kv_blocks": ("40", "60", {}),
        "kv_cpu_blocks": ("48", "96", {}),
    },
    "serve": {},
}
ELSEWHERE: dict[str, dict[str, str]] = {
    "simulate": {
        "hosts": "tests.planning.test_simulate.test_hosts_that_agree_and_checked_invariants_change_no_output",
        "ranks": "tests.planning.test_simulate.test_ranks_that_all_copy_change_no_output",
    },
    "compare": {"workers": "tests.planning.test_compare.test_all_cores_give_the_same_as_one"},
    "serve": {
        "hosts": "tests.server.test_hosts.test_two_hosts_agree_to_the_end",
        "ranks": "tests.cli.test_cache_flags.test_the_same_flags_make_the_same_cache",
        "seconds": "tests.cli.test_end_to_end.test_an_end_in_order_leaves_no_active_segment",
        "speed": "tests.simulator.test_driver.test_the_events_are_the_same_at_any_speed",
        "segment_size": "tests.recording.test_rec_writer.test_segments_rotate_by_size_without_a_hole",
        "segment_time": "tests.recording.test_rec_writer.test_segments_rotate_by_time",
        "keep": "tests.recording.test_rec_retain.test_bytes_take_the_oldest_sealed_segments_and_what_is_left_reads",
        "shard": "tests.engines.test_commands.test_shards_follow_each_publisher_once",
    },
}
"""Flags that must not change the report (how many look, how many work, how fast), or shape files and no report."""
WORDS = {
    "trace", "workload", "engines", "metrics", "otlp", "listen", "name", "policy", "policies", "presets", "per_request",
    "link", "broker",
}
"""Flags that take words."""
REPEATED = {
    "schema", "settings", "trace", "limit", "seed", "total_kv_blocks", "kv_cpu_blocks", "kv_disk_blocks", "block_size",
    "slo_ttft_ms", "slo_itl_ms",
    "blocks_total", "token_bytes", "kv_geometry", "stop", "predictor", "policy_settings", "free",
}
"""Keys under which a report repeats its flags, or what follows from them without a run."""


def takes_value(option: click.Parameter) -> bool:
    return not (isinstance(option.type, (click.Choice, click.Path)) or getattr(option, "is_flag", False))


@pytest.mark.parametrize("command", OF_COMMAND)
def test_every_flag_that_takes_a_value_is_known_here(command: str) -> None:
    options = {str(option.name) for option in cli.get_command(click.Context(cli), command).params  # type: ignore[union-attr]
               if takes_value(option)}
    assert options - WORDS == {name for name, _ in cases(command)} | set(ELSEWHERE[command])
    for where in ELSEWHERE[command].values():
        module, _, name = where.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def cases(command: str) -> list[tuple[str, Case]]:
    known = {str(option.name) for option in cli.get_command(click.Context(cli), command).params}  # type: ignore[union-attr]
    return sorted(({name: case for name, case in CACHE.items() if name in known} | OF_COMMAND[command]).items())


@pytest.mark.parametrize(
    ("command", "flag"), [(command, flag) for command in OF_COMMAND for flag, _ in cases(command)]
)
def test_two_values_of_a_flag_give_two_reports(command: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.daemon, "run_daemon", run_machine)
    one, other, load = dict(cases(command))[flag]
    known = {option.name for option in cli.get_command(click.Context(cli), command).params}  # type: ignore[union-attr]
    flags = {name: value for name, value in {"trace": SMALL, **MACHINE, **load}.items() if value is not None}
    flags["workload" if command == "serve" else "trace"] = flags.pop("trace")
    if command == "compare":
        flags["policies"] = flags.pop("policy", "simple_lru")
        flags["workers"] = 1
    flags = {name: value for name, value in flags.items() if name in known}
    reports = [report(command, tuple(sorted((flags | {flag: value}).items()))) for value in (one, other)]
    assert reports[0] != reports[1]


@cache
def report(command: str, flags: tuple[tuple[str, Any], ...]) -> str:
    """The answer of the command, without the flags that it repeats."""
    arguments = [
        part for name, value in flags
        for part in (f"--{name.replace('_', '-')}", *(() if value is True else (str(value),)))
    ]
    result = CliRunner().invoke(cli, [command, *arguments, "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    stats = [line for line in result.stderr.splitlines() if line.startswith("stats")]
    return json.dumps([told(document), stats if dict(flags).get("stats_every") else None])


def told(document: Any) -> Any:
    if isinstance(document, list):
        return [told(each) for each in document]
    if not isinstance(document, dict):
        return document
    if "gauges" in document:  # a policy: its name and parameters are the flags
        return document["gauges"]
    return {key: told(value) for key, value in document.items() if key not in REPEATED}


async def run_machine(options: Any, on_ready: Any = None) -> Any:
    """The machine of a daemon without its sockets: what it came to, to the last request."""
    rig = build(options.config, options.engine, options.workload, links=options.links)
    rig.run_to_end()
    return {**msgspec.structs.asdict(rig.leader.state.totals), "now_ns": rig.now_ns, "carried": None}
