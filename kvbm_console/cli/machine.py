"""From flags to the options of a daemon: workload, capacities, speed, address, recording.

Law of this file: everything is checked here or by the part that owns it, before a daemon starts; what is not said takes
the workload's own defaults, sized so that something is seen.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvbm_console.cli.params import Speed
from kvbm_console.cli.versions import program_version
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError

if TYPE_CHECKING:
    from kvbm_console.engines.kv_events.address import Publisher
    from kvbm_console.recording.options import RecordingOptions
    from server.options import DaemonOptions

F = TypeVar("F", bound=Callable[..., Any])
BLOCKS_MAX: Final = 2**24
"""16 million blocks: the most that a recording may hold, far beyond what a host has."""


def workload_options(command: F) -> F:
    """The flags that ``demo`` and ``serve`` share."""
    for option in (
        click.option("--check", is_flag=True, help="Verify the invariants after every stimulus; a bug ends the run."),
        click.option("--block-tokens", type=click.IntRange(1, 65_536), metavar="N", help="Tokens in one block."),
        click.option("--g3-blocks", type=click.IntRange(0, BLOCKS_MAX), metavar="N", help="Capacity of the disk tier."),
        click.option("--g2-blocks", type=click.IntRange(0, BLOCKS_MAX), metavar="N", help="Capacity of the host tier."),
        click.option("--g1-blocks", type=click.IntRange(1, BLOCKS_MAX), metavar="N", help="Capacity of the device."),
        click.option("--speed", type=Speed(), default="1", show_default=True, metavar="FACTOR|max",
                     help="Virtual seconds per second; max never waits. The events are the same at any speed."),
        click.option("--record", type=click.Path(path_type=Path), metavar="DIR", help="Record into this directory."),
        click.option("--limit", type=click.IntRange(1), metavar="N", help="At most this many requests."),
    ):
        command = option(command)
    return command


def recording_flags(command: F) -> F:
    """The flags of ``serve`` and ``rec start``: how a run is recorded."""
    for option in (
        click.option("--sync", type=click.Choice(["1s", "always", "never"]), default="1s", show_default=True,
                     help="How often what was written is made to survive a power loss: every second, after every "
                          "flush, or only at the end of a segment."),
        click.option("--keep", metavar="SIZE|TIME", help="Remove the oldest sealed segments when the directory is "
                     "larger (20GB) or they are older (7d); without it nothing is removed."),
        click.option("--segment-time", metavar="TIME", help="Begin a new segment after this time, 1s to 24h; "
                     "10m without it."),
        click.option("--segment-size", metavar="SIZE", help="Begin a new segment at this size, 1MB to 4GB; "
                     "256MB without it."),
    ):
        command = option(command)
    return command


def daemon_options(
    *, workload: str | None, limit: int | None, speed: float | None, record: Path | None, listen: str,
    g1_blocks: int | None, g2_blocks: int | None, g3_blocks: int | None, block_tokens: int | None, check: bool,
    exit_when_done: bool = False, recording: "RecordingOptions | None" = None,
    publishers: "tuple[Publisher, ...]" = (), metrics: str | None = None, **access: Any,
) -> "DaemonOptions":
    """The options of a daemon; raises ``UsageError`` with one sentence."""
    from server.options import DaemonOptions

    lower = {"g2_blocks": g2_blocks, "g3_blocks": g3_blocks, "block_tokens": block_tokens}
    said: dict[str, Any] = {field: value for field, value in lower.items() if value is not None}
    common: dict[str, Any] = {
        "listen": listen, "speed": speed, "record": record, "check": check, "exit_when_done": exit_when_done,
        "program": program_version(), "publishers": publishers, "metrics": metrics, **access,
    }
    if recording is not None:
        common["recording"] = recording
    if workload is None:
        _only_with_workload({"--limit": limit, "--g1-blocks": g1_blocks})
        if publishers:  # every tier is the engines' own
            return DaemonOptions(config=LeaderConfig(**said), **common)
        return DaemonOptions(config=LeaderConfig(**{"g2_blocks": 8_192, "g3_blocks": 32_768, **said}), **common)
    from kvbm_console.engines.embedded import default_engine_config, default_leader_config
    from kvbm_console.engines.workloads import parse_workload

    requests = parse_workload(workload, limit)
    config = default_leader_config(requests, **said)
    device = {} if g1_blocks is None else {"g1_blocks": g1_blocks}
    engine = default_engine_config(requests, **device)
    return DaemonOptions(
        config=config, workload=requests, engine=engine, target=requests.name,
        block_bytes=config.block_tokens * engine.token_bytes, **common,
    )


def _only_with_workload(flags: dict[str, object]) -> None:
    for flag, value in flags.items():
        if value is not None:
            raise UsageError(f"{flag} needs --workload, got {value} without one")


def machine_line(options: "DaemonOptions") -> str:
    """Capacities, geometry and step model, for the start-up line."""
    config, engine = options.config, options.engine
    if options.publishers:
        return f"following the KV events of {', '.join(publisher.label for publisher in options.publishers)}"
    tiers = f"G2 {config.g2_blocks:,}, G3 {config.g3_blocks:,} blocks of {config.block_tokens} tokens"
    if engine is None:
        return f"{tiers}; engines connect by Feed"
    speed = "max" if options.speed is None else f"{options.speed:g}"
    return (
        f"{options.target}; G1 {engine.g1_blocks:,}, {tiers} ({engine.token_bytes // 1024} KiB per token); "
        f"step {engine.step_base_ns / 1e6:g} ms + {engine.prefill_token_ns / 1e3:g} us per prefill token "
        f"+ {engine.decode_request_ns / 1e3:g} us per decoding request; speed {speed}"
    )

