"""The numbers of a simulated engine.

Law of this file: construction refuses a value out of bounds. All times are integer nanoseconds, so the same
configuration gives the same events on any machine.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from kvbm_console.core.config import require
from kvbm_console.simulator.link import TOKEN_BYTES

GROUPS_MAX: Final = 64
"""Groups of layers of one model. Engines make as few as they can, because each costs a lookup."""


OF_ENGINES: Final = (
    "groups", "group_numbers", "retention", "whole_sequences", "early_steps", "fenced_steps", "named_early",
    "passes_at_end",
)
"""Fields of ``EngineConfig`` in which a recorded engine may differ from our own."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers that the simulated engine schedules by. The block size is the leader's."""

    g1_blocks: int
    """Device blocks; the prefix cache lives in them too."""
    max_batch_tokens: int = 8_192
    """Most tokens of one iteration: at the default step model it then takes about 70 ms."""
    max_running: int = 256
    """Most sequences that run at once. A request that loads is not one of them, and owns device blocks, too."""
    max_waiting: int = 100_000
    """Most requests that wait; a later arrival is dropped and counted, so that an overload stays bounded."""
    step_base_ns: int = 4_000_000
    prefill_token_ns: int = 8_000
    decode_request_ns: int = 40_000
    """An iteration takes base + prompt tokens x prefill_token_ns + decoding requests x decode_request_ns."""
    patience_ns: int = 20_000_000
    """How long a running request without a block stands back for blocks that a copy withholds, before it preempts."""
    token_bytes: int = TOKEN_BYTES
    """K/V of one token, for the time of transfers."""
    groups: tuple[int, ...] = (0,)
    """The groups of layers. Each has blocks of its own, and all share the device. A number is the window of a group:
    tokens that a token sees, itself included. 0 if it sees all tokens before it. With 1 nothing would be cached."""
    group_numbers: tuple[int, ...] = ()
    """The numbers that the engine itself gives to ``groups``; empty for those of their order. Of blocks that a request
    used alike, its host tier evicts that of the lowest number first."""
    retention: int | None = None
    """Which blocks groups with a window keep cached behind their requests (vLLM's ``prefix_cache_retention_interval``):
    all for None. For 0 the windows at the end of the prompt and at the end of a shared prefix, for a larger number also
    those at each multiple of so many tokens."""
    whole_sequences: bool = False
    """True if a request is admitted only when there is room for all of its tokens, not for the first chunk alone. A
    load also leaves the blocks free that other prompts need. No loaded request is preempted for a running one."""
    early_steps: bool = False
    """True if an iteration is formed before the result of the last one is known (asynchronous scheduling). A request
    that ends, and a block that a window has passed, then come back an iteration later."""
    fenced_steps: bool = False
    """With ``early_steps``: True if a request of the running iteration is not preempted, because a connector may use
    its blocks. The request that needs them waits for an iteration, and so do those behind it."""
    named_early: bool = False
    """True if blocks of a prompt carry their hashes as soon as an iteration is formed that computes them. A later
    request of the same iteration then finds them."""
    passes_at_end: bool = False
    """True if a request that ends gives back the blocks that its windows have passed before the others, because
    a connector hears which blocks it has."""

    def __post_init__(self) -> None:
        for field in ("g1_blocks", "max_batch_tokens", "max_running", "max_waiting", "step_base_ns", "token_bytes"):
            value = getattr(self, field)
            require(1 <= value <= 2**31 - 1, field, "from 1 to 2147483647", value)
        for field in ("prefill_token_ns", "decode_request_ns", "patience_ns"):
            value = getattr(self, field)
            require(0 <= value <= 2**31 - 1, field, "from 0 to 2147483647", value)
        require(self.early_steps or not self.fenced_steps, "fenced_steps", "false without early_steps", True)
        require(self.retention is None or 0 <= self.retention <= 2**31 - 1, "retention", "from 0 to 2147483647",
                self.retention)
        require(1 <= len(self.groups) <= GROUPS_MAX, "groups", f"from 1 to {GROUPS_MAX} groups", len(self.groups))
        numbers = sorted(self.group_numbers)
        require(numbers in ([], [*range(len(self.groups))]), "group_numbers", "the numbers of the groups", numbers)
        for window in self.groups:
            require(0 <= window <= 2**31 - 1 and window != 1, "groups", "0 or from 2 to 2147483647", window)

    @property
    def plain(self) -> bool:
        """True if there is one group, which sees all tokens: no block is given back before a sequence ends."""
        return self.groups == (0,)

    def most_held(self, tokens: int, block_tokens: int) -> int:
        """Most blocks that a sequence of so many tokens holds at once, in all groups.

        >>> EngineConfig(g1_blocks=1, groups=(0, 64), max_batch_tokens=256).most_held(1_600, 16)
        121
        """
        return sum([self.most_in(window, tokens, block_tokens) for window in self.groups])

    def most_in(self, window: int, tokens: int, block_tokens: int) -> int:
        """Those of them in a group with this window."""
        if window:
            tokens = min(tokens, window - 1 + self.max_batch_tokens + block_tokens)
        return -(-tokens // block_tokens)

    def most_decoding(self, tokens: int, block_tokens: int) -> int:
        """Most blocks that a decoding sequence of so many tokens holds, in all groups.

        >>> EngineConfig(g1_blocks=1, groups=(0, 64)).most_decoding(1_600, 16)
        105
        """
        whole = -(-tokens // block_tokens)
        return sum([min(whole, (window - 1) // block_tokens + 2) if window else whole for window in self.groups])

    def step_ns(self, prefill_tokens: int, decoding: int) -> int:
        """Duration of an iteration.

        >>> EngineConfig(g1_blocks=1).step_ns(1_000, 10)
        12400000
        """
        return self.step_base_ns + prefill_tokens * self.prefill_token_ns + decoding * self.decode_request_ns


def passed_blocks(window: int, computed_tokens: int, block_tokens: int) -> int:
    """Leading blocks that no token of a group with this window sees from ``computed_tokens`` on.

    >>> passed_blocks(64, 79, 16), passed_blocks(0, 79, 16)
    (1, 0)
    """
    return max(0, computed_tokens + 1 - window) // block_tokens if window else 0


def is_kept(at: int, tails: Sequence[int], need: int, retention: int | None, block_tokens: int) -> bool:
    """True if block ``at`` of a group is kept by ``EngineConfig.retention``. A hit needs so many of its blocks in a
    row, 0 for all of them. ``tails`` are the ends of the prompt and of a shared prefix, in blocks.

    >>> [at for at in range(12) if is_kept(at, (9,), 2, 0, 16)]
    [7, 8]
    >>> [at for at in range(12) if is_kept(at, (9,), 2, 64, 16)]
    [2, 3, 6, 7, 8, 10, 11]
    """
    if not need or retention is None or any(end - need <= at < end for end in tails):
        return True
    each = retention // block_tokens
    return bool(retention) and (need >= each or at % each >= each - need)
