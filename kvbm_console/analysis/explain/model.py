"""The document of ``why --format json``, a stable contract.

Law of this file: data only. Identifiers are strings, absent values are null, times are the engine's in nanoseconds.
``text`` says the same in one sentence.
"""

from enum import StrEnum
from typing import Final

import msgspec

CLONES_NAMED: Final = 5
"""Clones that a sentence names; the document names all."""


class Missed(StrEnum):
    """Why a prompt block had to be computed."""

    NEVER_STORED = "never_stored"
    OTHER_CONTEXT = "other_context"
    """Its tokens were there, but under another LoRA, salt or image."""
    EVICTED = "evicted"
    NOT_OFFLOADED = "not_offloaded"
    """Evicted from device memory before a copy of it stood anywhere else."""
    FILTERED = "filtered"
    """A rule left it out; ``filter`` names it."""
    BOUNDARY = "boundary"
    """The whole prompt was there, and one token must be left to compute."""
    TOO_SHORT = "too_short"
    """Tokens that do not fill a block have no identity and are never kept."""
    IN_FLIGHT = "in_flight"
    BEHIND_A_MISS = "behind_a_miss"
    """It was there, but a block in front of it was not, and a prefix has no holes."""
    COPY_FAILED = "copy_failed"
    NOT_KEPT = "not_kept"
    """The engine keeps only some blocks of an attention window."""
    RESET = "reset"
    LOST_TO_A_GAP = "lost_to_a_gap"
    """The deciding event is not in the evidence: it cannot be known."""


class MissedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt blocks ``first`` to ``last`` that missed for the same reason; ``seq`` is the deciding event of the first.

    ``first`` is None for the tokens behind the last full block.
    """

    first: int | None
    last: int | None
    blocks: int
    tokens: int
    reason: Missed
    text: str
    seq: int | None = None
    last_seq: int | None = None
    """The deciding event of the last block, when each has its own."""
    at_ns: int | None = None
    event: str | None = None
    """Kind of the deciding event."""
    tier: str | None = None
    rule: str | None = None
    """The rule of an eviction that chose the block."""
    filter: str | None = None
    for_request: str | None = None
    """The request that wanted the room, or that the copy belonged to."""
    operation: str | None = None
    candidate: str | None = None
    remembered: str | None = None
    """The leader's own memory, if the event is not in the evidence."""
    also: tuple[str, ...] = ()
    """Other events of the first block, newest last."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """One admission of the request, or the look-up that it waits on (``admitted`` false)."""

    admitted: bool
    seq: int
    at_ns: int
    after_preemption: bool
    lookup_seq: int | None
    """The answer that decided it."""
    asked_again: int
    """Answers "ask again" in front of it."""
    hits: tuple[int, int, int, int]
    """Prompt blocks found in G1 to G4, without the blocks of failed loads."""
    missed: int
    misses: tuple[MissedRun, ...]


class Part(msgspec.Struct, frozen=True):
    """A part of the request's time."""

    what: str
    ns: int


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A copy that the request waited for. ``wire_ns`` is None when it never started."""

    operation: str | None
    candidate: str
    route: str
    blocks: int
    status: str
    seq: int
    """The event of its planning."""
    queue_ns: int
    wire_ns: int | None


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the time from ``from_ns`` to ``until_ns``, which add up to the difference."""

    from_ns: int
    until_ns: int
    ended: bool
    complete: bool
    """True if the evidence holds it from its arrival on."""
    parts: tuple[Part, ...]
    """Longest first, those that took no time left out."""
    waits: tuple[Wait, ...]

    @property
    def total_ns(self) -> int:
        """All of it."""
        return self.until_ns - self.from_ns


class Clone(msgspec.Struct, frozen=True, kw_only=True):
    """Another sequence of a request: cloned behind the prompt, it is never looked up and shares device blocks."""

    parent: str | None
    """The request whose prompt it shares; None when that is not in the evidence."""
    parent_slot: str
    seq: int | None
    """The event; None when it is not in the evidence."""
    at_ns: int
    shared_blocks: int | None
    """Blocks from the first on that are the parent's own; None when that is not in the evidence."""
    own_blocks: int | None
    """Blocks behind them that it had of its own from the beginning."""


class Half(msgspec.Struct, frozen=True, kw_only=True):
    """The slot of the same request in another engine: one engine prefills it, another decodes it."""

    role: str
    """``prefill`` or ``decode``."""
    request: str
    slot: str
    engine: int
    state: str
    spent: Spent


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request missed its blocks, and where its time went."""

    evidence: str
    request: str
    slot: str
    occurrences: int
    """Slots of this name in the evidence; the document explains the last slot."""
    state: str
    prompt_tokens: int
    prompt_blocks: int
    block_tokens: int
    admissions: tuple[Admission, ...]
    spent: Spent
    clone: Clone | None = None
    """Whose prompt it shares; None for a request that arrived."""
    clones: tuple[str, ...] = ()
    """Requests that share its prompt."""
    wrong_bytes: tuple[str, ...] = ()
    """Findings of ``sanitize`` about its blocks, a sentence each, at most ``WRONG_MAX``."""
    engine: int | None = None
    """The engine that its slot belongs to."""
    receives: str | None = None
    """The name under which the engine that prefilled it sends its blocks; None if its own engine prefilled it."""
    sends: str | None = None
    """The name under which its blocks go to the engine that decodes it; None if its own engine decodes it."""
    halves: tuple[Half, ...] = ()
    """Its slots in these engines, as far as they are in the evidence."""
    samples: tuple[str, ...] = ()
    """The other samples of the request that was asked for, if a client wanted several answers to one prompt."""

    @property
    def remarks(self) -> list[str]:
        """Sentences that come before the admissions: its other samples, wrong bytes, and where a clone's prompt is
        from."""
        more = f", and {len(self.samples) - CLONES_NAMED:,} more" if len(self.samples) > CLONES_NAMED else ""
        names = ", ".join(self.samples[:CLONES_NAMED])
        others = f"one of {len(self.samples) + 1} samples; the others are {names}{more}"
        return [
            *([others] if self.samples else []), *(f"wrong bytes: {sentence}" for sentence in self.wrong_bytes),
            *self.origin,
        ]

    @property
    def origin(self) -> list[str]:
        """The parent of a clone and the clones of a parent, in sentences."""
        sentences = []
        if self.clone is not None:
            sentences = _cloned(self.clone)
        if self.clones:
            more = f" and {len(self.clones) - CLONES_NAMED:,} more" if len(self.clones) > CLONES_NAMED else ""
            sentences.append(f"its prompt is shared by {', '.join(self.clones[:CLONES_NAMED])}{more}")
        return sentences


def _cloned(clone: Clone) -> list[str]:
    parent = f"slot {clone.parent_slot}" if clone.parent is None else clone.parent
    event = "" if clone.seq is None else f" (event {clone.seq:,})"
    if clone.shared_blocks is None:
        shares = f"its parent, slot {clone.parent_slot}, is not in the evidence any more: what they share is not known"
    elif not clone.shared_blocks:
        shares = "it shares no block any more: all its blocks are its own"
    else:
        last = clone.shared_blocks - 1
        own = "what it computes behind them is its own"
        if clone.own_blocks:
            end = clone.shared_blocks + clone.own_blocks - 1
            which = f"block {end} is" if clone.own_blocks == 1 else f"blocks {clone.shared_blocks} to {end} are"
            own = f"{which} its own, and so is what it computes behind"
        blocks = "block 0" if not last else f"blocks 0 to {last}"
        shares = f"it shares {blocks} with {parent}, by reference, without a look-up or a copy; {own}"
    return [f"clone of {parent}{event}", shares, f"what its prompt missed is told by: why {clone.parent or parent}"]
