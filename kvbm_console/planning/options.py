"""The options of ``simulate``, checked before any work.

Law of this file: a value out of bounds is refused with one sentence that names the flag, the bound and the value. An
option without effect is checked too, but never shown: the report of a run without a lower tier names no tiers.
"""

import math
import re
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvbm_console.core.config import (
    RANKS_MAX,
    SECOND_NS,
    LeaderConfig,
    OffloadLaw,
    OffloadLinkBusy,
    Prefetch,
    PrefetchStop,
    batch_blocks,
)
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import DEFAULT_POLICY, PolicyConfig
from kvbm_console.simulator.config import OF_ENGINES, EngineConfig
from kvbm_console.simulator.link import DEFAULT_LINKS, LinkSpec
from kvbm_console.simulator.link_settings import LinkSetting, links_of
from kvbm_console.simulator.machine import SimulatedMachine

Transfers = Literal["async", "sync"]
Cleanup = Literal["end", "none", "incremental"]

BLOCKS_MAX: Final = 2**24
"""16 million blocks, as for the daemon: far beyond what a host has."""
BLOCK_TOKENS: Final = 16
"""Tokens in a block by default, as engines have."""
TICK_NS: Final = 1_000
"""``kv_transfer_bandwidth`` and base latency are given per tick of 1 us."""
COMPAT_BANDWIDTH: Final = 100.0
"""Tokens per tick with ``--compat``: 13.1 TB/s with the default geometry, on every link."""
BANDWIDTH_MIN: Final = 1e-9
"""A token in a quarter of an hour: so slow that no copy ever arrives, and still finite in nanoseconds."""
BANDWIDTH_MAX: Final = 1e12
"""Above this a copy takes no measurable time."""
STEP_NS: Final = EngineConfig(g1_blocks=1).step_base_ns
THRASH_STEPS: Final = 250
"""The default thrash window in steps of an engine: about the time to decode an answer. Within this time the request
that caused an eviction cannot have ended, so an eviction was useless if its block comes back so soon."""
BATCH_MAX: Final = 2**20
"""Tokens or requests of an iteration: a million is more than any engine takes."""
OFFLOAD_THRESHOLD: Final = 0.9
"""The default; see the table in ``docs/offloading.md``."""
OFFLOAD_PRESETS: Final[dict[str, dict[str, Any]]] = {
    "vllm": {
        "kv_offload_law": "order", "kv_offload_threshold": 0.0, "kv_offload_prompt_only": True,
        "kv_offload_link_busy": "queue", "own_connector": True,
        "policy": PolicyConfig(policy="simple_lru", used_at_end=True),
    },
    "lmcache": {"kv_offload_law": "order", "kv_offload_threshold": 0.0, "kv_offload_link_busy": "queue"},
    "original": {"kv_offload_law": "total", "kv_offload_threshold": 0.9, "kv_offload_link_busy": "queue"},
}
"""Rules of other programs for offloads. LMCache stores each full block, vLLM's OffloadingConnector each of a prompt,
with rules of its own for lookups and evictions. By the original wording of BC-2 all saved blocks are safe, at any
place in the order of eviction."""
INSTANCES_MAX: Final = 256
HOSTS_MAX: Final = 16
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE | re.ASCII)
_UNITS: Final = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}


def check(ok: bool, field: str, bound: str, value: object) -> None:
    """Raise a ``UsageError`` of one sentence that names the flag of this field, unless ``ok``."""
    if not ok:
        shown = value if isinstance(value, (int, float)) else repr(value)
        raise UsageError(f"--{field.replace('_', '-')} must be {bound}, got {shown}")


class Geometry(msgspec.Struct, frozen=True):
    """The shape of K and V of one token, from which bytes follow."""

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "element_bytes"):
            value = getattr(self, field)
            check(1 <= value <= 2**20, "kv_geometry", f"of 1 to 1048576 {field}", value)
        check(self.token_bytes < 2**31, "kv_geometry", "of less than 2 GiB per token", self.token_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token: layers x heads x head dim x 2 x element bytes."""
        return self.layers * self.kv_heads * self.head_dim * 2 * self.element_bytes

    @classmethod
    def of_token_bytes(cls, token_bytes: int) -> "Geometry":
        """The default shape if it has so many bytes, else one layer with elements of a byte.

        >>> Geometry.of_token_bytes(131072).text, Geometry.of_token_bytes(1000).token_bytes
        ('32,8,128,2', 1000)
        """
        usual = cls()
        if token_bytes == usual.token_bytes:
            return usual
        layers = next(layers for layers in range(1, token_bytes + 1) if token_bytes // (2 * layers) <= 2**20)
        return cls(layers, 1, max(1, token_bytes // (2 * layers)), 1)

    @property
    def text(self) -> str:
        """The text that ``parse`` reads."""
        return f"{self.layers},{self.kv_heads},{self.head_dim},{self.element_bytes}"

    @classmethod
    def parse(cls, text: str) -> "Geometry":
        """``32,8,128,2``: layers, K/V heads, head dimension, bytes of an element.

        >>> Geometry.parse("32,8,128,2").token_bytes
        131072
        """
        parts = text.split(",")
        if len(parts) != 4 or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            raise UsageError(f"--kv-geometry must be LAYERS,KV_HEADS,HEAD_DIM,ELEMENT_BYTES, got {text!r}")
        return cls(*(int(part) for part in parts))


WITHOUT_FLAG: Final = ("patience_ns", *OF_ENGINES)
"""Fields of ``EngineConfig`` that a recorded machine alone has."""


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The tiered cache of a machine and the step model of its engine. Field names are the flags' names, the same for
    ``simulate``, ``compare``, ``serve`` and ``demo``. Capacities are in blocks, times of links in ticks of 1 us,
    bandwidth in tokens per tick."""

    total_kv_blocks: int
    block_size: int = BLOCK_TOKENS
    kv_cpu_blocks: int = 0
    kv_disk_blocks: int = 0
    kv_geometry: Geometry = Geometry()
    kv_offload_threshold: float = OFFLOAD_THRESHOLD
    kv_offload_law: OffloadLaw = "order"
    kv_offload_prompt_only: bool = False
    kv_offload_link_busy: OffloadLinkBusy = "skip"
    own_connector: bool = False
    """True if the host tier follows the rules of vLLM's OffloadingConnector; see ``SimulateOptions.connects``."""
    kv_transfer_bandwidth: float | None = None
    """Tokens per tick of every link, the unit of the contract vectors (``--compat``); None for links of a machine."""
    kv_transfer_base_latency: float = 0.0
    """Ticks, with a ``kv_transfer_bandwidth``."""
    link: tuple[LinkSetting, ...] = ()
    """Links by name, in place of those of the machine."""
    transfers: Transfers = "async"
    ranks: int = 1
    """Worker ranks of the engine, each with its share of every block."""
    policy: PolicyConfig = PolicyConfig(policy=DEFAULT_POLICY)
    prefetch: Prefetch = "chain"
    prefetch_stop: PrefetchStop = "best_effort"
    prefetch_timeout_s: float = 1.0
    thrash_window: int | None = None
    """Nanoseconds; None for ``THRASH_STEPS`` steps of the simulated engine."""
    step_base: int | None = None
    step_prefill_token: int | None = None
    step_decode_request: int | None = None
    """Nanoseconds; None for the times of ``EngineConfig``, which checks all times."""
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_waiting: int | None = None
    """None for the limits of ``EngineConfig`` or of the workload."""
    machine: SimulatedMachine | None = None
    """The machine of a recording, for the numbers without a flag."""

    def __post_init__(self) -> None:
        whole = f"from 0 to {BLOCKS_MAX}"
        check(1 <= self.total_kv_blocks <= BLOCKS_MAX, "total_kv_blocks", f"from 1 to {BLOCKS_MAX}",
              self.total_kv_blocks)
        check(1 <= self.block_size <= 65_536, "block_size", "from 1 to 65536", self.block_size)
        check(0 <= self.kv_cpu_blocks <= BLOCKS_MAX, "kv_cpu_blocks", whole, self.kv_cpu_blocks)
        check(0 <= self.kv_disk_blocks <= BLOCKS_MAX, "kv_disk_blocks", whole, self.kv_disk_blocks)
        check_threshold(self.kv_offload_threshold)
        if self.kv_transfer_bandwidth is not None:
            check_bandwidth(self.kv_transfer_bandwidth)
        check_latency(self.kv_transfer_base_latency)
        check(1 <= self.ranks <= RANKS_MAX, "ranks", f"from 1 to {RANKS_MAX}", self.ranks)
        timeout = self.prefetch_timeout_s
        check(math.isfinite(timeout) and 1e-9 <= timeout <= 3_600, "prefetch_timeout_s", "above 0 and at most 3600",
              timeout)
        for field in ("max_num_batched_tokens", "max_num_seqs", "max_waiting"):
            value = getattr(self, field)
            check(value is None or 1 <= value <= BATCH_MAX, field, f"from 1 to {BATCH_MAX}", value)

    def engine_fields(self) -> dict[str, Any]:
        """The fields of ``EngineConfig`` that these options set."""
        fields: dict[str, Any] = {
            "g1_blocks": self.total_kv_blocks, "token_bytes": self.kv_geometry.token_bytes,
            "max_batch_tokens": self.max_num_batched_tokens, "max_running": self.max_num_seqs,
            "max_waiting": self.max_waiting,
            "step_base_ns": self.step_base, "prefill_token_ns": self.step_prefill_token,
            "decode_request_ns": self.step_decode_request,
        }
        if self.machine is not None:
            fields |= {name: getattr(self.machine.engine, name) for name in WITHOUT_FLAG}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def thrash_window_ns(self) -> int:
        """Nanoseconds within which a block that comes back after its eviction counts as thrash."""
        step_ns = STEP_NS if self.step_base is None else self.step_base
        return THRASH_STEPS * step_ns if self.thrash_window is None else self.thrash_window

    @property
    def prefetches(self) -> bool:
        """True if blocks can be fetched ahead from disk to host."""
        return self.prefetch != "none" and self.kv_cpu_blocks > 0 and self.kv_disk_blocks > 0

    @property
    def tiered(self) -> bool:
        """True if there is a tier below the device."""
        return self.kv_cpu_blocks > 0 or self.kv_disk_blocks > 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_size * self.kv_geometry.token_bytes

    def links(self) -> tuple[LinkSpec, ...]:
        """A queue for each direction of PCIe, disk and network: ``DEFAULT_LINKS`` or those of the recorded machine,
        changed by ``link``. With ``kv_transfer_bandwidth`` all are alike."""
        if self.kv_transfer_bandwidth is None:
            return links_of(self.link, DEFAULT_LINKS if self.machine is None else self.machine.links)
        bytes_per_s = self.kv_transfer_bandwidth * self.kv_geometry.token_bytes * (SECOND_NS / TICK_NS)
        base_ns = round(self.kv_transfer_base_latency * TICK_NS)
        return tuple(
            msgspec.structs.replace(link, base_latency_ns=base_ns, bytes_per_s=bytes_per_s, grain_ns=TICK_NS)
            for link in DEFAULT_LINKS
        )

    def leader_config(self, **more: Any) -> LeaderConfig:
        """The leader's configuration; ``more`` are fields that have no flag."""
        if self.machine is None:
            usual = LeaderConfig(offload_batch_blocks=batch_blocks(self.block_size))
        else:
            usual = self.machine.leader
        return msgspec.structs.replace(
            usual, block_tokens=self.block_size, g2_blocks=self.kv_cpu_blocks, g3_blocks=self.kv_disk_blocks,
            offload_law=self.kv_offload_law, offload_threshold=self.kv_offload_threshold,
            offload_prompt_only=self.kv_offload_prompt_only, offload_link_busy=self.kv_offload_link_busy,
            asynchronous=self.transfers == "async", ranks=self.ranks,
            eviction=self.policy, prefetch=self.prefetch if self.prefetches else "none",
            prefetch_stop=self.prefetch_stop, prefetch_timeout_ns=round(self.prefetch_timeout_s * SECOND_NS),
            thrash_window_ns=self.thrash_window_ns, **more,
        )


class SimulateOptions(CacheOptions, frozen=True, kw_only=True):
    """The options of a run of ``simulate``."""

    trace: str
    limit: int | None = None
    instances: int = 1
    hosts: int = 1
    cleanup: Cleanup = "end"
    """Time at which records of finished requests are dropped: at their end (``incremental``), at the end of the run
    (``end``), or never (``none``). Except for ``none``, the tiers are cleared at the end. The output is the same."""
    stats_every: int = 0
    seed: int | None = None
    with_bytes: Path | None = None
    """Directory of the disk tier of an engine whose blocks have bytes."""
    check: bool = False
    slo_ttft: int | None = None
    slo_itl: int | None = None
    """Nanoseconds: limits of goodput."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.limit is None or self.limit >= 1, "limit", "at least 1", self.limit)
        check(1 <= self.instances <= INSTANCES_MAX, "instances", f"from 1 to {INSTANCES_MAX}", self.instances)
        check(1 <= self.hosts <= HOSTS_MAX, "hosts", f"from 1 to {HOSTS_MAX}", self.hosts)
        check(self.with_bytes is None or self.instances == 1, "bytes", "given for one instance alone", self.instances)
        check(self.stats_every >= 0, "stats_every", "at least 0", self.stats_every)
        check(self.seed is None or 0 <= self.seed < 2**63, "seed", f"from 0 to {2**63 - 1}", self.seed)

    @property
    def leader_flag(self) -> str | None:
        """A flag that asks for what a leader has and vLLM's connector has not."""
        asked = (
            ("--kv-disk-blocks", self.kv_disk_blocks), ("--kv-offload-threshold", self.kv_offload_threshold),
            ("--pin-tail-tokens", self.policy.pin_tail_tokens), ("--hosts", self.hosts > 1),
            ("--ranks", self.ranks > 1), ("--check", self.check), ("--bytes", self.with_bytes is not None),
        )
        return next((flag for flag, value in asked if value), None)

    @property
    def has_connector(self) -> bool:
        """True if there is a tier below the device and the engine has a connector of its own."""
        return self.tiered and (self.own_connector or (self.machine is not None and self.machine.own_connector))

    @property
    def connects(self) -> bool:
        """True if vLLM's connector decides about the host tier, and no leader."""
        return self.has_connector and self.leader_flag is None


def check_threshold(value: float) -> None:
    """``--kv-offload-threshold`` (BC-11)."""
    check(math.isfinite(value) and 0.0 <= value <= 1.0, "kv_offload_threshold", "from 0 to 1", value)


def check_bandwidth(value: float) -> None:
    """``--kv-transfer-bandwidth`` (BC-11)."""
    bound = f"from {BANDWIDTH_MIN:.9f} to {BANDWIDTH_MAX:.0f}"
    check(math.isfinite(value) and BANDWIDTH_MIN <= value <= BANDWIDTH_MAX, "kv_transfer_bandwidth", bound, value)


def check_latency(value: float) -> None:
    """``--kv-transfer-base-latency`` (BC-11)."""
    check(math.isfinite(value) and 0.0 <= value <= 1e9, "kv_transfer_base_latency", "from 0 to 1000000000", value)


def parse_size(text: str, flag: str) -> int:
    """``64GiB``, ``500 MB`` or a number of bytes.

    >>> parse_size("64GiB", "--kv-cpu-size")
    68719476736
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{flag} must be a size such as 64GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def blocks_of_size(size_bytes: int, block_bytes: int, flag: str) -> int:
    """Whole blocks that fit into a size; at least one."""
    if size_bytes < block_bytes:
        raise UsageError(f"{flag} must hold a block of {block_bytes} bytes, got {size_bytes}")
    return size_bytes // block_bytes
