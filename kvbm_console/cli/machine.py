"""Turns flags into the options of a daemon: workload, capacities, speed, address, recording.

Law of this file: everything is checked here or by the part that owns it, before a daemon starts. A flag that is not
given takes the workload's own default, which is sized so that tiers fill.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbm_console.cli.cache_options import (
    CACHE_FLAGS,
    ENGINE_FLAGS,
    cache_options,
    cache_settings,
    rank_options,
    sized,
)
from kvbm_console.cli.output import duration, program_version
from kvbm_console.cli.params import FilePath, Speed, options
from kvbm_console.core.errors import UsageError
from kvbm_console.planning.options import CacheOptions

if TYPE_CHECKING:
    from kvbm_console.engines.kv_events.address import Publisher
    from kvbm_console.recording.options import RecordingOptions
    from kvbm_console.simulator.incident import Incident
    from server.options import DaemonOptions


workload_options = options(
    click.option("--limit", type=click.IntRange(1), metavar="N", help="At most this many requests."),
    click.option("--record", type=FilePath(path_type=Path), metavar="FILE.mcap|DIR",
                 help="Record into this new file or this directory."),
    click.option("--speed", type=Speed(), default="1", show_default=True, metavar="FACTOR|max",
                 help="Virtual seconds per second; max never waits. The events are the same at any speed."),
    click.option("--check", is_flag=True, help="Verify the invariants after every stimulus; a bug ends the run."),
    rank_options,
    cache_options,
)
"""The flags that ``demo`` and ``serve`` share: how the machine runs, and its cache (``cache_options``)."""


recording_flags = options(
    click.option("--segment-size", metavar="SIZE", help="Begin a new segment at this size, 1MB to 4GB; "
                 "256MB without it."),
    click.option("--segment-time", metavar="TIME", help="Begin a new segment after this time, 1s to 24h; "
                 "10m without it."),
    click.option("--keep", metavar="SIZE|TIME", help="Remove the oldest sealed segments when the directory is "
                 "larger (20GB) or they are older (7d); without it nothing is removed."),
    click.option("--sync", type=click.Choice(["1s", "always", "never"]), default="1s", show_default=True,
                 help="How often the file is synced, so that it survives a power loss: every second, after every "
                      "flush, or only at the end of a segment."),
)
"""The flags of ``serve`` and ``rec start``: how a run is recorded."""


def daemon_options(
    *, workload: str | None, limit: int | None, speed: float | None, record: Path | None, listen: str, check: bool,
    exit_when_done: bool = False, recording: "RecordingOptions | None" = None,
    publishers: "tuple[Publisher, ...]" = (), metrics: str | None = None, with_bytes: Path | None = None,
    ranks: int = 1, scenario: "Incident | None" = None, **flags: Any,
) -> "DaemonOptions":
    """The options of a daemon; ``flags`` are those of ``cache_options`` and of its access. A ``scenario`` stands in
    place of a workload.

    Raises ``UsageError`` with one sentence.
    """
    from server.options import DaemonOptions

    flags_said = {name: flags.pop(name) for name in CACHE_FLAGS if name in flags}
    said = cache_settings(flags_said)
    common: dict[str, Any] = {
        "listen": listen, "speed": speed, "record": record, "check": check, "exit_when_done": exit_when_done,
        "program": program_version(), "publishers": publishers, "metrics": metrics, **flags,
    }
    if recording is not None:
        common["recording"] = recording
    if workload is None and scenario is None:
        _only_with_workload({"--limit": limit, "--bytes": with_bytes} | {
            f"--{name.replace('_', '-')}": flags_said.get(name)
            for name in ("total_kv_blocks", "total_kv_size", *ENGINE_FLAGS)
        })
        # Real engines own every tier.
        sizes = {} if publishers else {"kv_cpu_blocks": 8_192, "kv_disk_blocks": 32_768}
        cache = CacheOptions(**sized(said, total_kv_blocks=1, ranks=ranks, **sizes))
        block_bytes = cache.block_bytes if "kv_geometry" in said else None
        return DaemonOptions(
            config=cache.leader_config(), links=cache.links(), block_bytes=block_bytes, **common
        )
    from kvbm_console.simulator.embedded import default_engine_config, parse_workload

    usual: dict[str, Any] = {}
    if scenario is not None:
        from kvbm_console.simulator.incident import MACHINE, RANKS
        from kvbm_console.stream.ring import Ring

        _only_with_workload({"--bytes": with_bytes})
        usual = {**MACHINE, **scenario.machine, "ranks": max(RANKS, ranks)}
        common["stage"] = scenario.stage
        if scenario.ring_events is not None:
            common["ring"] = Ring(events_max=scenario.ring_events)
    requests = parse_workload(workload or "", limit) if scenario is None else scenario.workload(limit)
    own = requests.capacities
    cache = CacheOptions(**sized(said, **{
        "total_kv_blocks": own.g1_blocks, "block_size": own.block_tokens, "kv_cpu_blocks": own.g2_blocks,
        "kv_disk_blocks": own.g3_blocks, "ranks": ranks, **usual,
    }))
    return DaemonOptions(
        config=cache.leader_config(), workload=requests,
        engine=default_engine_config(requests, **cache.engine_fields()),
        links=cache.links(), block_bytes=cache.block_bytes, with_bytes=with_bytes, **common,
    )


def _only_with_workload(flags: dict[str, object]) -> None:
    for flag, value in flags.items():
        if value is not None:
            raise UsageError(f"{flag} needs --workload, got {value} without one")


def machine_line(options: "DaemonOptions") -> str:
    """Capacities, geometry and step model, for the start-up line."""
    config, engine = options.config, options.engine
    if options.publishers:
        from kvbm_console.engines.kv_events.address import names_of

        return f"following the KV events of {names_of(options.publishers)}"
    tiers = f"G2 {config.g2_blocks:,}, G3 {config.g3_blocks:,} blocks of {config.block_tokens} tokens"
    thrash = f"thrash window {duration(config.thrash_window_ns)}"
    if engine is None:
        return f"{tiers}; {thrash}; engines connect by Feed"
    assert options.workload is not None, "a simulated engine has a workload"
    speed = "max" if options.speed is None else f"{options.speed:g}"
    return (
        f"{options.workload.name}; G1 {engine.g1_blocks:,}, {tiers} ({engine.token_bytes // 1024} KiB per token); "
        f"step {engine.step_base_ns / 1e6:g} ms + {engine.prefill_token_ns / 1e3:g} µs per prefill token "
        f"+ {engine.decode_request_ns / 1e3:g} µs per decoding request; {thrash} "
        f"({config.thrash_window_ns / engine.step_base_ns:.0f} steps); speed {speed}"
    )

