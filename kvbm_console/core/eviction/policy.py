"""The interface of eviction policies, their names and their parameters.

Law of this file: a policy ranks keys and nothing else. The caller tells it which keys may go (``evictable``,
``protected``), and it gives all victims that were asked for or none. Ranks are static between touches and ties are
broken totally, so the same calls always lead to the same victims.

A key is a number that names a block for as long as it is remembered. It is a sequence hash in the leader and the id of
a trace in ``simulate --cache-only``. One touch covers one prefix in prompt order. Within a touch the deeper block
counts as the older. A touch of a block is a touch of its whole prefix. So every policy whose rank grows with recency
and frequency keeps a parent at least as long as its children.

Without an engine a touch is both: a request asks for these blocks, and stores them. A tier of the leader distinguishes
the two. ``use`` says that a request asks for its prompt, once, and ``insert`` that a copy is stored, which uses no
block.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any, Final, Protocol

import msgspec

from kvbm_console.core.errors import UsageError

POLICIES: Final = ("simple_lru", "lfu", "frequency_based", "adaptive_lru", "lrfu", "lrfu_auto", "learned")
"""Policies that need no knowledge of the future; ``belady`` exists only where the future is known."""
DEFAULT_POLICY: Final = "lrfu_auto"
"""The policy of ``simulate``, ``serve`` and ``demo``. ``python -m tests.benchmarks.policies`` compares it with the
others; ``docs/decisions.md`` has the result. Without a history it is ``simple_lru``."""
SECONDS_MAX: Final = 1e9
"""Thirty years: far above any run, and far below where a float loses whole seconds."""
DISK_ADMISSION_MAX: Final = 255
"""No filter is stricter: counts of uses are halved from time to time."""
GHOSTS_MIN: Final = 65_536
GHOSTS_PER_BLOCK: Final = 2
GHOSTS_MAX: Final = 262_144
"""A policy with history remembers ``GHOSTS_PER_BLOCK`` evicted blocks per place, within the other two bounds. They take
26 MB for most pools and 102 MB for the largest (``docs/memory.md``). The reuse of a chat takes an absolute number of
evictions, so a share of the capacity alone would forget the chats of a small pool between two turns."""


class EvictionPolicy(Protocol):
    """Ranks the blocks of one pool. Keys that were touched are resident until they are forgotten."""

    @property
    def name(self) -> str:
        """As flags and configuration call it."""
        ...

    @property
    def resident(self) -> Set[int]:
        """The resident keys, a view."""
        ...

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """These blocks of one prefix, in prompt order, were used and are resident; times never go backwards."""
        ...

    def forget(self, keys: Iterable[int]) -> None:
        """These blocks are not resident any more; unknown keys are ignored."""
        ...

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        """The ``count`` keys to evict, the coldest first, none of them protected; None when there are fewer.

        Choosing changes nothing that a later choice could see. The caller evicts the keys with ``forget``.
        """
        ...

    def gauges(self) -> dict[str, float]:
        """Figures of the policy, for example ``ghosts`` and ``ghosts_max``."""
        ...

    def export(self) -> Any:
        """Plain values in canonical order: equal state, equal export. ``restore`` of a new policy takes them."""
        ...

    def restore(self, exported: Any) -> None:
        """Take over exported columns; raises ``ValueError`` or ``TypeError`` on anything else."""
        ...


class TierPolicy(EvictionPolicy, Protocol):
    """An eviction policy that tells use and storage apart."""

    @property
    def is_recency(self) -> bool:
        """True if the policy ranks by recency alone at the moment."""
        ...

    def use(self, keys: Sequence[int], at_ns: int) -> None:
        """A request asks for these blocks, its prompt in order, whether they are resident or not."""
        ...

    def insert(self, keys: Sequence[int], beside: int | None, at_ns: int) -> None:
        """These blocks of one prefix, in prompt order, become resident.

        They are as old as ``beside``, their nearest resident ancestor, and deeper. Without an ancestor they are the
        newest.
        """
        ...


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which policy a pool is ruled by, and its parameters. Policies ignore the parameters of others."""

    policy: str = "simple_lru"
    """Recordings without a policy in their header used this policy. Users get ``DEFAULT_POLICY``."""
    frequency_weight: float = 0.3
    """``adaptive_lru``: share of frequency in the rank, from 0 (pure recency) to 1 (pure frequency)."""
    frequency_credit_s: float = 1_000.0
    """``adaptive_lru``: seconds of recency by which a popular block is ahead of a block without a second touch."""
    half_life_s: float = 300.0
    """``lrfu``: after this long a touch counts half."""
    pin_tail_tokens: int = 0
    """Above 0, a finished sequence keeps its pins for ``pin_ttl_s`` and gets pins for the blocks behind them that hold
    so many tokens. This is a budget of places. So a sequence that returns often is pinned whole, and one that comes
    once takes few."""
    pin_ttl_s: float = 60.0
    """How long a pin lasts; a sequence that goes on is pinned anew."""
    priority_ttl_s: float = 60.0
    """How long after its end the blocks of a request with a priority above 0 outrank those of lower priority."""

    disk_admission: int = 0
    """Above 1, a block is written to the disk tier only when so many requests have named or computed it."""
    used_at_end: bool = False
    """The blocks of a request are used once more when it ends. With ``simple_lru`` the lower tiers are those of vLLM's
    OffloadingConnector (``by_request``)."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        _within("frequency_weight", self.frequency_weight, 0.0, 1.0, "from 0 to 1")
        _within("frequency_credit_s", self.frequency_credit_s, 0.0, SECONDS_MAX, f"from 0 to {SECONDS_MAX:.0f}")
        _within("half_life_s", self.half_life_s, 1e-6, SECONDS_MAX, f"from 0.000001 to {SECONDS_MAX:.0f}")
        _within("pin_tail_tokens", self.pin_tail_tokens, 0, 2**31 - 1, "from 0 to 2147483647")
        _within("disk_admission", self.disk_admission, 0, DISK_ADMISSION_MAX, f"from 0 to {DISK_ADMISSION_MAX}")
        for field in ("pin_ttl_s", "priority_ttl_s"):
            _within(field, getattr(self, field), 0.0, SECONDS_MAX, f"from 0 to {SECONDS_MAX:.0f}")


    @property
    def by_request(self) -> bool:
        """True if the lower tiers follow the rules of vLLM's OffloadingConnector.

        The order of eviction is that of ``RequestLru``, so I13 does not hold. A copy down stores all of its blocks or
        none, and holds no block of a request that ends. A lookup holds nothing for a request that is not admitted, and
        waits for blocks that another request loads.
        """
        return self.used_at_end and self.policy == "simple_lru"


def _within(field: str, value: float, low: float, high: float, bound: str) -> None:
    """Raise the one-sentence ``UsageError`` unless the value is a number within the bounds (NaN is not)."""
    if not (math.isfinite(value) and low <= value <= high):
        raise UsageError(f"{field} must be {bound}, got {value!r}")


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "chat": {"policy": "adaptive_lru", "frequency_weight": 0.2, "pin_tail_tokens": 256},
    "document": {"policy": "adaptive_lru", "frequency_weight": 0.4, "pin_tail_tokens": 64},
    "batch": {"policy": "simple_lru", "pin_tail_tokens": 0},
}
"""Settings as published for three kinds of work."""


def ghosts_max(capacity: int) -> int:
    """Most evicted blocks that a policy with history remembers for a pool of this many places.

    >>> ghosts_max(1_000), ghosts_max(100_000), ghosts_max(1_000_000)
    (65536, 200000, 262144)
    """
    return min(GHOSTS_MAX, max(GHOSTS_MIN, GHOSTS_PER_BLOCK * capacity))
