"""Flags of the cache that ``simulate``, ``compare``, ``serve`` and ``demo`` share, and the progress bar of long runs.

Law of this file: flags only become fields here, because the parts that own a value check it. Progress goes to stderr,
and only to a terminal.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from kvbm_console.cli.output import duration, warn
from kvbm_console.cli.params import Duration, FilePath, options
from kvbm_console.core.config import SECOND_NS, OffloadLinkBusy, Prefetch, PrefetchStop
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import DEFAULT_POLICY, POLICIES, PRESETS, PolicyConfig
from kvbm_console.planning.options import (
    BLOCK_TOKENS,
    COMPAT_BANDWIDTH,
    OFFLOAD_PRESETS,
    OFFLOAD_THRESHOLD,
    STEP_NS,
    THRASH_STEPS,
    Geometry,
    SimulateOptions,
    Transfers,
    blocks_of_size,
    check,
    check_bandwidth,
    check_latency,
    parse_size,
)
from kvbm_console.planning.profile import MachineProfile, read_profile
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.link_settings import LinkSetting, links_text, read_links

if TYPE_CHECKING:
    from kvbm_console.simulator.workloads import Workload

_LINES_CHUNK: Final = 1 << 20
STEP_NS_MAX: Final = 2 * SECOND_NS
"""Bound of each part of a step, because the engine keeps the part in 31 bits."""


trace_options = options(
    click.option("--trace", metavar="SPEC",
                 help="FILE, whose first line shows its format, or mooncake:FILE, azure:FILE, burstgpt:FILE, "
                      "dynamo:FILE, lmcache:FILE.lct, recording:DIR|FILE.mcap, multiturn[:key=value,...]."),
    click.option("--limit", type=int, metavar="N", help="At most this many requests."),
    click.option("--seed", type=int, metavar="N", help="Seed of a generated trace."),
)
"""Which trace, and how much of it."""


policy_options = options(
    click.option("--frequency-weight", type=float, metavar="W",
                 help="adaptive_lru: 0 is pure recency, 1 pure frequency.  [default: 0.3]"),
    click.option("--frequency-credit-s", type=float, metavar="S",
                 help="adaptive_lru: seconds that an unpopular block is set back.  [default: 1000]"),
    click.option("--half-life-s", type=float, metavar="S",
                 help="lrfu: a touch counts half after this.  [default: 300]"),
    click.option("--pin-tail-tokens", type=int, metavar="N",
                 help="Pin N more tokens of each sequence that finishes, behind its pinned prefix.  "
                      "[default: 0]"),
    click.option("--pin-ttl-s", type=float, metavar="S", help="How long a pin lasts.  [default: 60]"),
    click.option("--priority-ttl-s", type=float, metavar="S",
                 help="How long the blocks of a request with a priority are kept before others.  [default: 60]"),
    click.option("--disk-admission", type=int, metavar="K",
                 help="Write a block to disk only when K requests have used it.  [default: 0, at once]"),
    click.option("--used-at-end", is_flag=True, default=None,
                 help="A request's end uses its blocks once more. With simple_lru, lower tiers follow vLLM's rules."),
)
"""The parameters of the policies."""


offload_preset_option: Final = click.option(
    "--offload-preset", type=click.Choice(list(OFFLOAD_PRESETS)),
    help="Copy down as others do: vllm each block of a prompt, by the rules of its OffloadingConnector unless a flag "
         "asks for what that has not; lmcache each block; original below 0.9 as BC-2 has it.",
)


_ENGINE: Final = EngineConfig(g1_blocks=1)
_PART: Final = Duration(0, STEP_NS_MAX, "from 0ns to 2s")
engine_options = options(
    click.option("--step-base", metavar="TIME", type=Duration(1, STEP_NS_MAX, "from 1ns to 2s"),
                 help="Time of an iteration before its requests add theirs; calibrate fits it.  "
                      f"[default: {duration(_ENGINE.step_base_ns)}]"),
    click.option("--step-prefill-token", metavar="TIME", type=_PART,
                 help="Time that each prompt token adds to an iteration.  "
                      f"[default: {duration(_ENGINE.prefill_token_ns)}]"),
    click.option("--step-decode-request", metavar="TIME", type=_PART,
                 help="Time that each decoding request adds to an iteration.  "
                      f"[default: {duration(_ENGINE.decode_request_ns)}]"),
    click.option("--max-num-batched-tokens", type=int, metavar="N",
                 help=f"Most tokens of one iteration.  [default: {_ENGINE.max_batch_tokens}, in serve and demo that "
                      "of the workload]"),
    click.option("--max-num-seqs", type=int, metavar="N",
                 help=f"Most requests that run at once.  [default: {_ENGINE.max_running}]"),
    click.option("--max-waiting", type=int, metavar="N",
                 help="Most requests that wait; a later arrival is refused and counted.  "
                      f"[default: {_ENGINE.max_waiting}]"),
)
"""The step model and the limits of an iteration of the simulated engine."""
class LinkParam(click.ParamType):  # type: ignore[type-arg]
    """``disk-read=3GB/s,100us``: a ``LinkSetting``."""

    name = "link"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> LinkSetting:
        """The setting; refuses what has no such form."""
        try:
            return value if isinstance(value, LinkSetting) else LinkSetting.parse(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


class MachineFile(FilePath):
    """A file of ``bench links`` or of ``calibrate``: what ``read`` makes of it."""

    def __init__(self, read: Callable[[Path], Any]) -> None:
        super().__init__(path_type=Path)
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The settings; refuses a file that has none."""
        try:
            return self._read(Path(str(super().convert(value, param, ctx)))) if isinstance(value, str | Path) else value
        except UsageError as error:
            self.fail(str(error), param, ctx)


link_options = options(
    click.option("--profile", type=MachineFile(read_profile), metavar="FILE",
                 help="Step times and links as calibrate --out has found them; other flags win."),
    click.option("--links", type=MachineFile(read_links), metavar="FILE",
                 help="Links as bench links has measured them, in place of those of --link's default."),
    click.option("--link", multiple=True, type=LinkParam(), metavar="NAME=RATE[,TIME]",
                 help="A link, for example disk-read=3GB/s or G3>G1=1GB/s,50us; again for others.  "
                      f"[default: {links_text()}, or those of the recording]"),
)
"""Links by name, for machines whose links differ."""
chosen_options = options(
    click.option("--total-kv-blocks", "--g1-blocks", "total_kv_blocks", type=int, metavar="N",
                 help="Capacity of the device; with --cache-only of the pool.  [default: that of the workload]"),
    click.option("--kv-cpu-blocks", "--g2-blocks", "kv_cpu_blocks", type=int, metavar="N",
                 help="Capacity of the host tier; 0 for none.  [default: 0, or that of the workload]"),
    click.option("--policy", metavar="NAME",
                 help=f"Policy of the lower tiers, {', '.join(POLICIES)}; with --cache-only also belady.  "
                      f"[default: {DEFAULT_POLICY}]"),
    click.option("--preset", type=click.Choice(list(PRESETS)),
                 help="Policy and parameters for a kind of work."),
)
"""Flags of which ``compare`` takes several values."""
machine_options = options(
    click.option("--block-size", "--block-tokens", "block_size", type=int, metavar="N",
                 help="Tokens in one block.  [default: 16, or that of the workload]"),
    click.option("--kv-disk-blocks", "--g3-blocks", "kv_disk_blocks", type=int, metavar="N",
                 help="Capacity of the disk tier; 0 for none.  [default: 0, or that of the workload]"),
    click.option("--total-kv-size", metavar="SIZE", help="The device in bytes, for example 40GiB."),
    click.option("--kv-cpu-size", metavar="SIZE", help="The host tier in bytes, for example 64GiB."),
    click.option("--kv-disk-size", metavar="SIZE", help="The disk tier in bytes, for example 2TB."),
    click.option("--kv-geometry", metavar="L,H,D,B",
                 help="Layers, K/V heads, head dimension, bytes of an element.  [default: 32,8,128,2]"),
    click.option("--kv-offload-threshold", type=float, metavar="T",
                 help="Copy down until the next 1 - T of a pool to be evicted has a copy below; 0 copies every new "
                      f"block.  [default: {OFFLOAD_THRESHOLD}]"),
    click.option("--kv-offload-prompt-only", is_flag=True, default=None,
                 help="Copy down only blocks that a prompt has, as vLLM's OffloadingConnector does."),
    click.option("--kv-offload-link-busy", type=click.Choice(get_args(OffloadLinkBusy)),
                 help="A copy down that its link cannot end in time is skipped, or waits in the link's queue as in "
                      "vLLM and LMCache.  [default: skip]"),
    offload_preset_option,
    link_options,
    click.option("--compat", is_flag=True, default=None,
                 help="All links alike, in the unit of the contract vectors: copies take next to no time."),
    click.option("--kv-transfer-bandwidth", type=float, metavar="B",
                 help=f"With --compat: tokens per microsecond and link.  [default: {COMPAT_BANDWIDTH:g}]"),
    click.option("--kv-transfer-base-latency", type=float, metavar="US",
                 help="With --compat: microseconds before a copy begins.  [default: 0]"),
    click.option("--transfers", type=click.Choice(get_args(Transfers)),
                 help="Loads run beside the engine, or lengthen the step that asked for them.  [default: async]"),
    policy_options,
    click.option("--prefetch", type=click.Choice(get_args(Prefetch)),
                 help="Predictor that stages blocks of the disk tier in the host tier.  [default: chain]"),
    click.option("--prefetch-stop", type=click.Choice(get_args(PrefetchStop)),
                 help="Let a lookup wait for blocks that are being fetched for it, or not.  [default: best_effort]"),
    click.option("--prefetch-timeout-s", type=float, metavar="S",
                 help="With --prefetch-stop timeout: seconds from the arrival.  [default: 1]"),
    click.option("--thrash-window", metavar="TIME",
                 type=Duration(1, 3_600 * SECOND_NS, "from 1ns to 1h"),
                 help="A block that comes back this soon after its eviction is thrash.  "
                      f"[default: {THRASH_STEPS} steps of the simulated engine, "
                      f"{THRASH_STEPS * STEP_NS / 1e9:g}s]"),
    engine_options,
)
"""Tiers, links, parameters of policies, prefetch and engine; None without the flag."""
cache_options = options(chosen_options, machine_options)
"""All of the machine, the same for ``simulate``, ``plan``, ``serve`` and ``demo``."""
rank_options = options(
    click.option("--bytes", "with_bytes", type=FilePath(path_type=Path, file_okay=False), metavar="DIR",
                 help="Give every block bytes, the disk tier's in this directory: a process of each rank moves them, "
                      "and every load and reused prefix is compared. The recording stays the same."),
    click.option("--ranks", type=click.IntRange(1, 1024), default=1, show_default=True, metavar="N",
                 help="Worker ranks of the engine, each with its share of every block."),
)
"""Flags of a simulated engine whose blocks have bytes."""


def cache_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``CacheOptions`` that these flags set, parsed; sizes stay bytes (``sized``).

    Raises ``UsageError`` naming the flag. ``policy`` is present when a flag sets the policy, a preset or a parameter.
    """
    settings = {name: value for name, value in flags.items() if value is not None}
    rule = {name: settings.pop(name) for name in POLICY_FLAGS if name in settings}
    settings |= offload_settings(settings.pop("kv_offload_threshold", None), settings.pop("offload_preset", None))
    if rule:
        settings["policy"] = policy_config(rule.pop("policy", None), rule.pop("preset", None), **rule)
    profile: MachineProfile | None = settings.pop("profile", None)
    if profile is not None:
        settings = {**profile.settings(), **settings, "links": (*profile.links, *settings.get("links", ()))}
    settings |= _links(settings)
    if "kv_geometry" in settings:
        settings["kv_geometry"] = Geometry.parse(settings["kv_geometry"])
    for size, blocks in SIZES.items():
        if size not in settings:
            continue
        named = f"--{size.replace('_', '-')}"
        if blocks in settings:
            raise UsageError(
                f"{named} and --{blocks.replace('_', '-')} say the same, got {settings[size]} and {settings[blocks]}"
            )
        settings[size] = parse_size(settings[size], named)
    return settings


def _links(settings: dict[str, Any]) -> dict[str, Any]:
    """The fields that set the links; their flags are taken out of ``settings``."""
    link = (*settings.pop("links", ()), *settings.pop("link", ()))
    alike = settings.pop("compat", False)
    said = {name: settings.pop(name) for name in COMPAT_FLAGS if name in settings}
    for name, value in said.items():
        COMPAT_FLAGS[name](value)
        if not alike:
            raise UsageError(f"--{name.replace('_', '-')} needs --compat, got {value:g} without it")
    if alike and link:
        raise UsageError(f"--compat makes all links alike, so it takes no --link, got {link[0].text}")
    if alike:
        return {"kv_transfer_bandwidth": COMPAT_BANDWIDTH, **said}
    return {"link": link} if link else {}


def offload_settings(threshold: float | None, preset: str | None) -> dict[str, Any]:
    """The options of a preset of offloading, with the threshold of the command line in place of its own."""
    said = {} if preset is None else dict(OFFLOAD_PRESETS[preset])
    return said if threshold is None else {**said, "kv_offload_threshold": threshold}


def sized(said: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The given fields in front of the defaults, all tiers in blocks."""
    fields = {**defaults, **said}
    for name, blocks in SIZES.items():
        size = fields.pop(name, None)
        if size is not None:
            block = fields.get("block_size", BLOCK_TOKENS)
            check(block >= 1, "block_size", "at least 1", block)
            token_bytes = fields.get("kv_geometry", Geometry()).token_bytes
            fields[blocks] = blocks_of_size(size, block * token_bytes, f"--{name.replace('_', '-')}")
    return fields


SIZES: Final = {
    "total_kv_size": "total_kv_blocks", "kv_cpu_size": "kv_cpu_blocks", "kv_disk_size": "kv_disk_blocks",
}
"""Parameter of a tier in bytes to that in blocks."""


POLICY_FLAGS: Final[tuple[str, ...]] = (
    "policy", "preset", "frequency_weight", "frequency_credit_s", "half_life_s", "pin_tail_tokens", "pin_ttl_s",
    "priority_ttl_s", "disk_admission", "used_at_end",
)
"""Flags that together make a ``PolicyConfig``."""
ENGINE_FLAGS: Final[tuple[str, ...]] = (
    "step_base", "step_prefill_token", "step_decode_request", "max_num_batched_tokens", "max_num_seqs",
    "max_waiting",
)
"""The parameters that ``engine_options`` adds to a command."""
CACHE_FLAGS: Final[tuple[str, ...]] = (
    "total_kv_blocks", "block_size", "kv_cpu_blocks", "kv_disk_blocks", *SIZES, "kv_geometry",
    "kv_offload_threshold", "kv_offload_prompt_only", "kv_offload_link_busy", "offload_preset", "profile", "links",
    "link", "compat", "kv_transfer_bandwidth", "kv_transfer_base_latency", "transfers", *POLICY_FLAGS, "prefetch",
    "prefetch_stop", "prefetch_timeout_s", "thrash_window", *ENGINE_FLAGS,
)
"""The parameters that ``cache_options`` adds to a command."""


COMPAT_FLAGS: Final[dict[str, Callable[[float], None]]] = {
    "kv_transfer_bandwidth": check_bandwidth, "kv_transfer_base_latency": check_latency,
}
"""Parameters that need ``--compat``, with their bounds."""


def policy_config(policy: str | None, preset: str | None, **parameters: Any) -> PolicyConfig:
    """The configuration of a preset, with the flags of the command line taking precedence."""
    said = {"policy": DEFAULT_POLICY} if preset is None else dict(PRESETS[preset])
    if policy is not None:
        said["policy"] = policy
    said |= {name: value for name, value in parameters.items() if value is not None}
    try:
        return PolicyConfig(**said)
    except UsageError as error:
        field, space, rest = str(error).partition(" ")
        raise UsageError(f"--{field.replace('_', '-')}{space}{rest}") from None


def require_trace(trace: str | None) -> str:
    """``--trace`` with its format; a run has nothing to run without a trace."""
    if trace is None:
        raise UsageError("--trace must name a trace, for example FILE or multiturn:requests=1000")
    from kvbm_console.planning.traces import named_trace

    return named_trace(trace)


def device_blocks(options: SimulateOptions, *, cache_only: bool) -> int:
    """The device capacity when no flag sets it: that of the workload, in blocks of this run."""
    from kvbm_console.planning.run import open_trace

    own = open_trace(options).capacities
    return own.g1_blocks if cache_only else max(1, own.g1_blocks * own.block_tokens // options.block_size)


def taken(trace: str | None, options: SimulateOptions, *, sized: bool, cache_only: bool) -> list[str]:
    """The line for stdout that names the values taken by default or from a recording; no line when flags set all of
    them.

    ``trace`` is the given trace, and ``sized`` says that the capacity was given.
    """
    if options.machine is not None:
        return [
            f"taken        the machine of the recording, --total-kv-blocks {options.total_kv_blocks}, --block-size "
            f"{options.block_size}, --kv-cpu-blocks {options.kv_cpu_blocks}, --kv-disk-blocks {options.kv_disk_blocks}"
        ]
    parts = [] if trace == options.trace else [f"the format {options.trace.partition(':')[0]}, found in the file"]
    if not sized:
        parts.append(f"--total-kv-blocks {options.total_kv_blocks}")
        if not cache_only:
            parts += [f"--block-size {options.block_size}", f"--kv-cpu-blocks {options.kv_cpu_blocks}"]
    return [f"taken        {', '.join(parts)}"] if parts else []


def recorded_fields(trace: str) -> dict[str, Any]:
    """The machine of the recording that ``trace`` names, as fields of ``SimulateOptions``; empty for another trace."""
    kind, _, rest = trace.partition(":")
    if kind != "recording":
        return {}
    from kvbm_console.planning.recorded import read_run

    return read_run(rest).option_fields()


def expected_requests(workload: "Workload", limit: int | None) -> int | None:
    """The number of requests of a run, for the progress bar; None when only the run itself can tell."""
    from kvbm_console.planning.recorded import RecordedWorkload
    from kvbm_console.simulator.multiturn import Multiturn

    if isinstance(workload, Multiturn):
        return workload.settings.requests or None
    if isinstance(workload, RecordedWorkload):
        return len(workload)
    path = getattr(workload, "path", None)
    if path is None:
        return limit
    lines = 0
    with path.open("rb") as file:
        while chunk := file.read(_LINES_CHUNK):
            lines += chunk.count(b"\n")
    return lines if limit is None else min(lines, limit)


class Progress:
    """Shows progress and messages on stderr. Without a terminal it prints each line. On a terminal a passing line
    stands in front of the bar until the next passing line."""

    def __init__(self, bar: Any = None) -> None:
        self._bar = bar

    def __call__(self, done: int) -> None:
        """Report ``done`` items since the start."""
        if self._bar is not None:
            self._bar.update(max(0, done - self._bar.pos))

    def say(self, text: str, *, passing: bool = False) -> None:
        """Print a line. Of many ``passing`` lines only the last needs to stay visible."""
        if self._bar is None:
            warn(text)
        elif passing:
            self._bar.label = text
        else:
            click.echo(f"\r\033[K{text}", err=True)


@contextmanager
def progress_bar(label: str, length: int | None) -> Iterator[Progress]:
    """A bar on stderr; none when stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield Progress()
        return
    with click.progressbar(length=length or 1, label=label, file=sys.stderr, show_pos=True) as bar:
        yield Progress(bar)
