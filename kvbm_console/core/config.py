"""Data that configures the core: the leader's numbers and the specification of a breakpoint.

Law of this file: construction refuses a value that is out of bounds, in one sentence with field, bound and value. So no
other code has to check it again.
"""

import math
import re
from typing import Final, Literal, get_args

import msgspec
import xxhash

from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.ids import (
    NUMBER_MAX,
    BreakpointAction,
    CandidateStatus,
    OnTimeout,
    Route,
    Site,
    SlotState,
    Suspend,
    Tier,
)

SECOND_NS: Final = 1_000_000_000
REQUEST_ID_BYTES_MAX: Final = 256
"""A request id is an opaque name; engines use about 40 bytes, and a limit keeps a hostile name out of every event."""
MAX_HOLD_NS_MAX: Final = 120 * SECOND_NS
"""No debugger may keep a request longer than this, whatever it asks for (safety rule 2 of the breakpoints)."""
EXPIRES_DEFAULT_NS: Final = 3_600 * SECOND_NS
EXPIRES_MAX_NS: Final = 24 * 3_600 * SECOND_NS
"""A forgotten breakpoint does not outlive a day (safety rule 8)."""
NAME_BYTES_MAX: Final = 64
EXPRESSION_CHARS_MAX: Final = 1_024
"""Of a condition; the language has the same limit."""
TEMPLATE_CHARS_MAX: Final = 256
"""Of a log template."""
HIT_CONDITION: Final = re.compile(r"(==|>=|%)\s*([1-9][0-9]{0,8})")
"""Which of the matches take effect: the n-th, all from the n-th on, every n-th."""
RANKS_MAX: Final = 1024
BLOCK_TOKENS_MAX: Final = 65_536
"""Tokens of a block; engines have 16 to 1,024."""
PREFETCH_TIMEOUT_MAX_NS: Final = 3_600 * SECOND_NS
"""An hour is more than any wait for a cache."""
BATCH_TOKENS: Final = 16_384
BATCH_LEAST: Final = 64
BATCH_PARTS: Final = 16
"""Bounds of one copy down: see ``batch_blocks`` and ``offload_batch_blocks``."""
Prefetch = Literal["chain", "ngram", "session", "none"]
PrefetchStop = Literal["best_effort", "wait_complete", "timeout"]
OffloadLaw = Literal["total", "order"]
OffloadLinkBusy = Literal["queue", "skip"]


def require(ok: bool, field: str, bound: str, value: object) -> None:
    """Raise the one-sentence ``UsageError`` for ``field`` unless ``ok``."""
    if not ok:
        raise UsageError(f"{field} must be {bound}, got {value!r}")


def batch_blocks(block_tokens: int) -> int:
    """Most blocks of one copy down by default: those of 16,384 tokens (2 GiB with the default geometry), or 64.

    >>> batch_blocks(16), batch_blocks(512)
    (1024, 64)
    """
    return max(BATCH_LEAST, BATCH_TOKENS // block_tokens)


class LeaderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers that the leader decides by.

    Part of every recording; two hosts compare its digest before the first command.
    """

    block_tokens: int = 16
    """Tokens in one block, the same in all tiers."""
    g2_blocks: int = 0
    """Capacity of the host tier; 0 means that there is none."""
    g3_blocks: int = 0
    """Capacity of the disk tier; 0 means that there is none."""
    offload_law: OffloadLaw = "total"
    """Which places count as safe: those that are evicted next (``order``), or all of the pool (``total``). Recordings
    of before know no word of it; users get ``order``."""
    offload_threshold: float = 0.9
    """Copying down starts when the safe share of a pool is below 1 - threshold; 0 copies every new block, 1 none."""
    offload_hysteresis: float = 0.05
    """Copying down stops when the safe share has come back to 1 - threshold + hysteresis."""
    offload_batch_blocks: int = 64
    """Most blocks of one copy down, so that it does not hold its sources for long. A copy has at most a sixteenth of
    both its pools, too, or 64 blocks if that is more. Users get ``batch_blocks``."""
    staging_share: float = 0.5
    """Most of a lower pool that staging may hold; a longer match is shortened."""
    staging_deadline_ns: int = 5 * SECOND_NS
    """How long a match stays staged without an allocation, in engine time."""
    asynchronous: bool = True
    """A load runs beside the engine (``async``) or inside the step that asked for it (``sync``)."""
    ranks: int = 1
    """Worker ranks that report each operation; it ends when all of them have."""
    thrash_window_ns: int = 1_000_000
    """A block that comes back within this time after it was offloaded counts as thrash (BC-6)."""
    hold_budget_min: int = 4
    """Slots that may always be held at once."""
    hold_budget_share: float = 0.25
    """Share of the live slots that may be held at once, at most 64 (safety rule 4)."""
    pressure_share: float = 0.25
    """Share of a device pool that held slots may own. No further slot is held beyond it, so that the other slots keep
    the rest of the pool (safety rule 4). The first hold always begins."""
    eviction: PolicyConfig = PolicyConfig()
    """The policy of the lower tiers; without a word of it (recordings of before) it is ``simple_lru``."""
    prefetch: Prefetch = "none"
    """Which predictor names blocks of the disk tier that are copied to the host tier before they are asked for."""
    prefetch_stop: PrefetchStop = "best_effort"
    """How a lookup waits for a running prefetch of its request: not at all, until the prefetch ends, or for a time."""
    prefetch_timeout_ns: int = SECOND_NS
    """How long after its arrival, in engine time, with ``timeout``."""
    offload_prompt_only: bool = False
    """Copy a device block down only if a prompt has it, as vLLM's OffloadingConnector does: an answer's blocks when the
    prompt of the next turn takes them up."""
    offload_link_busy: OffloadLinkBusy = "queue"
    """A copy down that its link cannot end in time waits for the link (``queue``), as in recordings of before and in
    vLLM and LMCache, or is skipped (``skip``), which users get."""

    lookup_window: int = 0
    """Above 0, tokens that a token of the model sees, itself included, in all layers. A prefix is then found below if
    the blocks of the window at its end are there, as vLLM's OffloadingConnector asks. 0 if each block must be there."""

    offload_window_only: bool = False
    """With ``lookup_window``: copy a device block down only if it lies in the window at the end of a prompt, as vLLM
    does by ``prefix_cache_retention_interval`` 0. No lookup of the same prompt needs another one."""

    def __post_init__(self) -> None:
        require(1 <= self.block_tokens <= BLOCK_TOKENS_MAX, "block_tokens", f"from 1 to {BLOCK_TOKENS_MAX}",
                self.block_tokens)
        for field in ("g2_blocks", "g3_blocks"):
            value = getattr(self, field)
            require(0 <= value <= 2**31 - 1, field, "from 0 to 2147483647", value)
        for field in (
            "offload_threshold", "offload_hysteresis", "staging_share", "hold_budget_share", "pressure_share",
        ):
            value = getattr(self, field)
            require(math.isfinite(value) and 0.0 <= value <= 1.0, field, "from 0 to 1", value)
        require(self.offload_batch_blocks >= 1, "offload_batch_blocks", "at least 1", self.offload_batch_blocks)
        require(self.staging_deadline_ns > 0, "staging_deadline_ns", "above 0", self.staging_deadline_ns)
        require(1 <= self.ranks <= RANKS_MAX, "ranks", f"from 1 to {RANKS_MAX}", self.ranks)
        require(self.thrash_window_ns >= 0, "thrash_window_ns", "at least 0", self.thrash_window_ns)
        for field, choices in (
            ("offload_law", OffloadLaw), ("offload_link_busy", OffloadLinkBusy), ("prefetch", Prefetch),
            ("prefetch_stop", PrefetchStop),
        ):
            known, value = get_args(choices), getattr(self, field)
            require(value in known, field, f"one of {', '.join(known)}", value)
        require(0 < self.prefetch_timeout_ns <= PREFETCH_TIMEOUT_MAX_NS, "prefetch_timeout_ns",
                f"above 0 and at most {PREFETCH_TIMEOUT_MAX_NS}", self.prefetch_timeout_ns)
        require(0 <= self.lookup_window <= 2**31 - 1, "lookup_window", "from 0 to 2147483647", self.lookup_window)
        require(self.hold_budget_min >= 1, "hold_budget_min", "at least 1", self.hold_budget_min)

    @property
    def by_order(self) -> bool:
        """True if the order of eviction says what is copied down; a law that copies all or nothing needs none."""
        return self.offload_law == "order" and 0.0 < self.offload_threshold < 1.0

    def digest(self) -> int:
        """xxh3_64 of the canonical encoding: equal for equal configurations, on any host."""
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(self))


class BreakpointSpec(msgspec.Struct, frozen=True, array_like=True):
    """One breakpoint as its owner states it. Fields that are None match everything; new fields go to the end.

    >>> BreakpointSpec(to_state=SlotState.ONBOARDING).describe()
    'transition.did * → onboarding'
    """

    id: int = 0
    """0 asks the leader for a new id; otherwise the id given before, which keeps its hit count."""
    site: Site = Site.TRANSITION_DID
    request: str = "*"
    """Glob over the request id."""
    from_state: SlotState | None = None
    to_state: SlotState | None = None
    tier: Tier | None = None
    route: Route | None = None
    action: BreakpointAction = BreakpointAction.HOLD
    enabled: bool = True
    one_shot: bool = False
    ignore_count: int = 0
    """Matches that are let through before the first hit."""
    max_hold_ns: int = 30 * SECOND_NS
    name: str = ""
    """For people, and for the file that ``break save`` writes."""
    status: CandidateStatus | None = None
    """Of the candidate that passes the site."""
    condition: str = ""
    """An expression (``core.expression``) over the slot, the site and the tiers; empty matches everything."""
    hit_condition: str = ""
    """``==N``, ``>=N`` or ``%N`` over the matches that were not ignored, counted from 1. Empty means every match."""
    log: str = ""
    """The message of a hit, in which ``{field}`` is filled in. Empty means no message."""
    suspend: Suspend = Suspend.SLOT
    depends_on: int = 0
    """Id of a breakpoint that must have taken effect before, or 0."""
    on_timeout: OnTimeout = OnTimeout.CONTINUE
    expires_ns: int = EXPIRES_DEFAULT_NS
    """How long after it was set it is disabled, on the wall's clock."""
    persist: bool = False
    """True if the daemon keeps the breakpoint in its file, so that the next run has it too."""

    def __post_init__(self) -> None:
        require(len(self.name.encode()) <= NAME_BYTES_MAX, "name", f"at most {NAME_BYTES_MAX} bytes", self.name)
        require(len(self.condition) <= EXPRESSION_CHARS_MAX, "condition",
                f"at most {EXPRESSION_CHARS_MAX} characters", self.condition[:80])
        require(len(self.log) <= TEMPLATE_CHARS_MAX, "log", f"at most {TEMPLATE_CHARS_MAX} characters", self.log[:80])
        require(not self.hit_condition or HIT_CONDITION.fullmatch(self.hit_condition) is not None, "hit_condition",
                "==N, >=N or %N with N from 1", self.hit_condition[:80])
        require(abs(self.id) <= NUMBER_MAX, "id", f"the id of a breakpoint, at most {NUMBER_MAX}, or 0", self.id)
        require(0 <= self.depends_on <= NUMBER_MAX, "depends_on", f"the id of a breakpoint, at most {NUMBER_MAX}, or 0",
                self.depends_on)
        require(0 < self.expires_ns <= EXPIRES_MAX_NS, "expires_ns", f"above 0 and at most {EXPIRES_MAX_NS}",
                self.expires_ns)
        require(1 <= len(self.request.encode()) <= REQUEST_ID_BYTES_MAX, "request",
                f"a pattern of 1 to {REQUEST_ID_BYTES_MAX} bytes", self.request)
        require(0 < self.max_hold_ns <= MAX_HOLD_NS_MAX, "max_hold_ns",
                f"above 0 and at most {MAX_HOLD_NS_MAX}", self.max_hold_ns)
        require(0 <= self.ignore_count <= NUMBER_MAX, "ignore_count", f"0 to {NUMBER_MAX}", self.ignore_count)

    @property
    def narrowed(self) -> bool:
        """True if it names a site, a state, requests, a copy or a condition. Any other breakpoint stops every move."""
        return bool(self.condition) or self.status is not None or self.describe() != BreakpointSpec().describe()

    def describe(self) -> str:
        """A line for lists: the site and the conditions."""
        old = f"{self.from_state.words} " if self.from_state is not None else ""
        new = f" → {self.to_state.words}" if self.to_state is not None else ""
        scope = "".join(f" {part.words}" for part in (self.tier, self.route) if part is not None)
        return f"{self.site.label} {self.request}{(' ' + old).rstrip() if old else ''}{new}{scope}"
