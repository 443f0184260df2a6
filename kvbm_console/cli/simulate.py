"""``kvbm-console simulate``: a trace through the tiered cache in virtual time.

Law of this file: everything is checked before any work. The report on stdout depends on the options alone, and the time
that it took goes to stderr.
"""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click
import msgspec

from kvbm_console.cli.cache_options import (
    CACHE_FLAGS,
    cache_options,
    cache_settings,
    device_blocks,
    expected_requests,
    progress_bar,
    rank_options,
    recorded_fields,
    require_trace,
    sized,
    taken,
    trace_options,
)
from kvbm_console.cli.main import terminable
from kvbm_console.cli.output import print_json, print_result, warn
from kvbm_console.cli.params import Duration, FilePath, format_option
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.errors import UsageError
from kvbm_console.planning.options import Cleanup, SimulateOptions
from kvbm_console.planning.vectors import check_vectors, read_vectors

if TYPE_CHECKING:
    from kvbm_console.bytes.ranks import BytesReport
    from kvbm_console.planning.meter import StatsLine
    from kvbm_console.planning.profile import MachineProfile

SLO_NS_MAX: Final = 86_400 * SECOND_NS
"""A day: no answer is waited for longer."""


@click.command()
@trace_options
@rank_options
@cache_options
@click.option("--instances", type=int, default=1, show_default=True, metavar="N", help="Engines, fed round robin.")
@click.option("--hosts", type=int, default=1, show_default=True, metavar="N",
              help="Deciders of each engine, which must decide alike in every step; with --check, in equal states.")
@click.option("--cleanup", type=click.Choice(get_args(Cleanup)), default="end", show_default=True,
              help="When the blocks of finished requests are given up: at the end, never, or with each request. "
                   "The output is the same.")
@click.option("--stats-every", type=int, default=0, metavar="N",
              help="A stats line on stderr every N iterations, and after reset, prefill, decode and clean-up.  "
                   "[default: none]")
@click.option("--slo-ttft", type=Duration(1, SLO_NS_MAX, "from 1ns to 24h"), metavar="TIME",
              help="Goodput counts requests whose first token comes within this.")
@click.option("--slo-itl", type=Duration(1, SLO_NS_MAX, "from 1ns to 24h"), metavar="TIME",
              help="Goodput counts requests whose mean time for each further token is within this.")
@click.option("--requests-out", type=FilePath(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a row for each request that ends: .jsonl or .csv.")
@click.option("--check", "checked", is_flag=True, help="Verify the invariants after every step; a bug ends the run.")
@click.option("--cache-only", is_flag=True,
              help="Leave the engine out: lookups and inserts in one pool, in the trace's own blocks.")
@click.option("--vectors", type=FilePath(path_type=Path), metavar="FILE",
              help="Replay a file of scenarios of a tiered cache instead; exit 1 when a scenario differs.")
@format_option("text", "json")
@terminable()
def simulate(
    trace: str | None, checked: bool, cache_only: bool, vectors: Path | None, form: str,
    requests_out: Path | None, **flags: Any,
) -> int:
    """Run a trace through engine and tiers in virtual time and report the cache's work.

    The time that the run took goes to stderr, and so do the stats lines, so the same options give the same bytes on
    stdout. The keys of --format json and their formulas are listed in kvbm_console/planning/REFERENCE.md.
    """
    future = flags["policy"] == "belady"
    if future:
        flags["policy"] = None
    profile: MachineProfile | None = flags["profile"]
    said = cache_settings({name: flags.pop(name) for name in CACHE_FLAGS})
    options = SimulateOptions(trace=trace or "", check=checked, **sized(said, total_kv_blocks=1), **flags)
    if vectors is not None:

        return replay_vectors(vectors, form)
    named = require_trace(trace)
    recorded = recorded_fields(named)
    if cache_only and recorded:
        recorded |= {"kv_cpu_blocks": 0, "kv_disk_blocks": 0}
    options = SimulateOptions(trace=named, check=checked, **sized(said, **{"total_kv_blocks": 1, **recorded}), **flags)
    if future and not cache_only:
        raise UsageError("--policy must not be belady with an engine: only --cache-only knows the future, got belady")
    capacity = bool(recorded) or bool({"total_kv_blocks", "total_kv_size"} & said.keys())
    if not capacity:
        options = msgspec.structs.replace(options, total_kv_blocks=device_blocks(options, cache_only=cache_only))
    head = taken(trace, options, sized="total_kv_blocks" in said, cache_only=cache_only)
    if cache_only:
        _only_with_engine(options, requests_out)
        return _cache_only(options, "belady" if future else options.policy.policy, form, head)
    return _with_engine(options, form, head, requests_out, profile)


def _only_with_engine(options: SimulateOptions, requests_out: Path | None) -> None:
    for flag, value in (
        ("--slo-ttft", options.slo_ttft), ("--slo-itl", options.slo_itl), ("--requests-out", requests_out),
        ("--bytes", options.with_bytes),
    ):
        if value is not None:
            raise UsageError(f"{flag} needs an engine, which has a clock: --cache-only has none, got both")


def _with_engine(
    options: SimulateOptions, form: str, head: list[str], requests_out: Path | None, profile: "MachineProfile | None"
) -> int:
    from kvbm_console.planning.report import text_of, writer
    from kvbm_console.planning.run import open_trace
    from kvbm_console.planning.run import simulate as run_simulation

    workload = open_trace(options)
    started = time.perf_counter()
    with (
        writer(requests_out, options.block_size) as ended,
        progress_bar("simulate", expected_requests(workload, options.limit)) as progress,
    ):

        def line(stats_line: "StatsLine") -> None:
            progress.say(stats_line.text(), passing=stats_line.passing)

        run = run_simulation(
            options, progress=progress, stats=line if options.stats_every else None, ended=ended
        )
    document = run.document
    print_result(form, document, lambda: [*head, *text_of(document).split("\n")])
    _took(time.perf_counter() - started, document["requests_arrived"])
    for sentence in [] if profile is None else profile.beyond(run.prefill_tokens_most, run.decode_requests_most):
        warn(sentence)
    return 0 if run.carried is None else _tell_bytes(run.carried, options.ranks)


def _tell_bytes(done: "BytesReport", ranks: int) -> int:
    """Tell on stderr what happened to the bytes; the exit status."""
    from kvbm_console.cli.summary import carried_text

    warn(f"{ranks} rank{'s' * (ranks > 1)} {carried_text(msgspec.to_builtins(done))}")
    return 0 if done.sound else 1


def _cache_only(options: SimulateOptions, policy: str, form: str, head: list[str]) -> int:
    from kvbm_console.planning.cache_only import document_of, policy_named, references_of, replay, text_of
    from kvbm_console.planning.run import open_trace

    if options.tiered:
        raise UsageError("--cache-only has one pool; it takes neither --kv-cpu-blocks nor --kv-disk-blocks above 0")
    started = time.perf_counter()
    references = references_of(open_trace(options), options.block_size)
    capacity = options.total_kv_blocks
    rule = policy_named(policy, options.policy, capacity, references)
    with progress_bar("simulate", len(references.names)) as progress:
        result = replay(references, rule, capacity, progress=progress)
    document = document_of(references, result)
    print_result(form, document, lambda: [*head, *text_of(document).split("\n")])
    _took(time.perf_counter() - started, result.requests)
    return 0


def _took(seconds: float, requests: int) -> None:
    warn(f"{requests:,} requests in {seconds:.2f} s, {requests / max(seconds, 1e-9):,.0f} a second")

# --- scenarios ---


def replay_vectors(path: Path, form: str) -> int:
    """Check every vector of a file; the exit status."""
    lines = list(check_vectors(read_vectors(path), _refusal))
    failed = sum(not line.ok for line in lines)
    if form == "json":
        print_json({
            "file": str(path), "vectors": len(lines), "failed": failed,
            "lines": [{"name": line.name, "kind": line.kind, "ok": line.ok, "why": line.why} for line in lines],
        })
    else:
        for line in lines:
            click.echo(f"{'ok  ' if line.ok else 'FAIL'} {line.kind:<10} {line.name}"
                       + (f": {line.why}" if line.why else ""))
        click.echo(f"{len(lines)} vectors, {failed} failed")
    return 1 if failed else 0


def _refusal(arguments: str) -> str:
    """Run a command line that must be refused. Empty when the refusal is one sentence that names the flag, else why."""

    words = shlex.split(arguments)
    try:
        simulate.main(words, standalone_mode=False)
    except (click.ClickException, UsageError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        flags = [word for word in words if word.startswith("--")]
        if "\n" in message or not any(flag in message for flag in flags):
            return f"it was refused with {message!r}"
        return ""
    return "it was not refused"
