"""``kvbm-console simulate``: a trace through the tiered cache in virtual time.

Law of this file: everything is checked before any work; the report on stdout depends on the options alone, how long it
took goes to stderr.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from kvbm_console.cli.cache_options import (
    expected_requests,
    policy_config,
    policy_options,
    progress_bar,
    require_trace,
    trace_options,
)
from kvbm_console.cli.output import print_json, warn
from kvbm_console.cli.params import format_option
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import POLICIES, PRESETS
from kvbm_console.simulation.options import (
    Cleanup,
    Geometry,
    Prefetch,
    SimulateOptions,
    Transfers,
    blocks_of_size,
    check,
    parse_size,
)

if TYPE_CHECKING:
    from kvbm_console.simulation.meter import StatsLine


@click.command()
@trace_options
@click.option("--total-kv-blocks", type=int, metavar="N", help="Capacity of the device; with --cache-only of the pool.")
@click.option("--block-size", type=int, default=16, show_default=True, metavar="N", help="Tokens in one block.")
@click.option("--kv-cpu-blocks", type=int, metavar="N", help="Capacity of the host tier; 0 for none.  [default: 0]")
@click.option("--kv-disk-blocks", type=int, metavar="N", help="Capacity of the disk tier; 0 for none.  [default: 0]")
@click.option("--kv-cpu-size", metavar="SIZE", help="The host tier in bytes, for example 64GiB.")
@click.option("--kv-geometry", default="32,8,128,2", show_default=True, metavar="L,H,D,B",
              help="Layers, K/V heads, head dimension, bytes of an element.")
@click.option("--kv-offload-threshold", type=float, default=0.9, show_default=True, metavar="T",
              help="Copy down when less than 1 - T of a pool is safe; 0 copies every new block.")
@click.option("--kv-transfer-bandwidth", type=float, default=100.0, show_default=True, metavar="B",
              help="Tokens per microsecond and link.")
@click.option("--kv-transfer-base-latency", type=float, default=0.0, show_default=True, metavar="US",
              help="Microseconds before a copy begins.")
@click.option("--transfers", type=click.Choice(get_args(Transfers)), default="async", show_default=True,
              help="Loads run beside the engine, or lengthen the step that asked for them.")
@click.option("--policy", metavar="NAME", help=f"Of the lower tiers: {', '.join(POLICIES)}; with --cache-only also "
              "belady.")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Policy and parameters for a kind of work.")
@policy_options
@click.option("--prefetch", type=click.Choice(get_args(Prefetch)), default="chain", show_default=True,
              help="Predictor that stages blocks of the disk tier in the host tier.")
@click.option("--instances", type=int, default=1, show_default=True, metavar="N", help="Engines, fed round robin.")
@click.option("--hosts", type=int, default=1, show_default=True, metavar="N",
              help="Deciders of each engine, compared after every step.")
@click.option("--cleanup", type=click.Choice(get_args(Cleanup)), default="end", show_default=True,
              help="When the state of finished requests is given up; the output is the same.")
@click.option("--stats-every", type=int, metavar="N",
              help="A stats line on stderr every N iterations, 0 for none.  [default: 10 with --stats]")
@click.option("--stats", is_flag=True, help="Print stats lines on stderr.")
@click.option("--check", "checked", is_flag=True, help="Verify the invariants after every step; a bug ends the run.")
@click.option("--cache-only", is_flag=True,
              help="Leave the engine out: lookups and inserts in one pool, in the trace's own blocks.")
@click.option("--vectors", type=click.Path(path_type=Path), metavar="FILE",
              help="Replay a file of scenarios of a tiered cache instead; exit 1 when one differs.")
@format_option("text", "json")
def simulate(
    trace: str | None, total_kv_blocks: int | None, kv_cpu_blocks: int | None, kv_disk_blocks: int | None,
    kv_cpu_size: str | None, kv_geometry: str, policy: str | None, preset: str | None, checked: bool,
    cache_only: bool, vectors: Path | None, stats_every: int | None, stats: bool, form: str,
    frequency_weight: float | None, frequency_credit_s: float | None, half_life_s: float | None,
    pin_tail_tokens: int | None, pin_ttl_s: float | None, **run: Any,
) -> int:
    """Run a trace through engine and tiers in virtual time and report what the cache did.

    What depends on the machine (how long it took) goes to stderr; the same options give the same bytes on stdout. The
    keys of --format json and their formulas are listed in kvbm_console/simulation/REFERENCE.md.
    """
    future = policy == "belady"
    rule = policy_config(
        None if future else policy, preset, frequency_weight=frequency_weight, frequency_credit_s=frequency_credit_s,
        half_life_s=half_life_s, pin_tail_tokens=pin_tail_tokens, pin_ttl_s=pin_ttl_s,
    )
    geometry = Geometry.parse(kv_geometry)
    if kv_cpu_size is not None:
        if kv_cpu_blocks is not None:
            raise UsageError(f"--kv-cpu-size and --kv-cpu-blocks say the same, got {kv_cpu_size} and {kv_cpu_blocks}")
        check(run["block_size"] >= 1, "block_size", "at least 1", run["block_size"])
        size = parse_size(kv_cpu_size, "--kv-cpu-size")
        kv_cpu_blocks = blocks_of_size(size, run["block_size"] * geometry.token_bytes, "--kv-cpu-size")
    options = SimulateOptions(
        trace=trace or "", total_kv_blocks=1 if total_kv_blocks is None else total_kv_blocks,
        kv_cpu_blocks=kv_cpu_blocks or 0, kv_disk_blocks=kv_disk_blocks or 0, kv_geometry=geometry, policy=rule,
        stats_every=10 if stats_every is None else stats_every, check=checked, **run,
    )
    if vectors is not None:
        from kvbm_console.cli.vectors import replay_vectors

        return replay_vectors(vectors, form)
    require_trace(trace)
    if total_kv_blocks is None:
        raise click.UsageError("--total-kv-blocks must say how many blocks the device has")
    if cache_only:
        return _cache_only(options, "belady" if future else rule.policy, form)
    if future:
        raise UsageError("--policy belady needs --cache-only: only there is the future known")
    return _with_engine(options, form, stats or stats_every is not None)


def _with_engine(options: SimulateOptions, form: str, stats: bool) -> int:
    from kvbm_console.simulation.report import text_of
    from kvbm_console.simulation.run import open_trace
    from kvbm_console.simulation.run import simulate as run_simulation

    workload = open_trace(options)

    def line(stats_line: "StatsLine") -> None:
        warn(stats_line.text())

    started = time.perf_counter()
    with progress_bar("simulate", expected_requests(workload, options.limit)) as progress:
        run = run_simulation(options, progress=progress, stats=line if stats else None)
    document = run.report.document
    if form == "json":
        print_json(document)
    else:
        click.echo(text_of(document))
    _took(time.perf_counter() - started, document["requests_arrived"])
    return 0


def _cache_only(options: SimulateOptions, policy: str, form: str) -> int:
    from kvbm_console.simulation.cache_only import document_of, policy_named, replay, text_of
    from kvbm_console.simulation.references import references_of
    from kvbm_console.simulation.run import open_trace

    if options.tiered:
        raise UsageError("--cache-only has one pool; it takes neither --kv-cpu-blocks nor --kv-disk-blocks above 0")
    started = time.perf_counter()
    references = references_of(open_trace(options), options.block_size)
    capacity = options.total_kv_blocks
    rule = policy_named(policy, options.policy, capacity, references)
    with progress_bar("simulate", len(references.names)) as progress:
        result = replay(references, rule, capacity, progress=progress)
    document = document_of(references, result)
    if form == "json":
        print_json(document)
    else:
        click.echo(text_of(document))
    _took(time.perf_counter() - started, result.requests)
    return 0


def _took(seconds: float, requests: int) -> None:
    warn(f"{requests:,} requests in {seconds:.2f} s, {requests / max(seconds, 1e-9):,.0f} a second")
