"""Slots: the state machine of one request, as data, and the records of a slot, a candidate and an operation.

The rules --------- A slot is opened for a request in ``initialized``. A lookup may find its prompt in a lower tier. The
blocks are *staged* until the engine has allocated device blocks, then *onboarded* by one load per source tier. Without
a match it is *prefilled*. The first new token makes it *decoding*. An iteration that leaves a prefilling or decoding
request out moves it to ``skipped_*``, and back. Preemption takes the device blocks and keeps the tokens; what follows
is a new lookup. A finished request stays ``finishing`` while copies of it run; ``finished`` is final, and the slot then
leaves the facts.

The diagram does not show when three moves happen. ``onboarding -> prefilling`` happens when the request is scheduled
again, after its load ended well or failed, and a failure takes the computed position back first. ``onboard_staged ->
initialized`` happens by the staging deadline only. A preempted slot may still have operations running, and its lookup
answers "ask again" until they ended.

Law of this file: a move that the table does not have is refused and leaves the slot unchanged.
"""

from typing import Final

import msgspec

from kvbm_console.core.errors import InvalidTransition
from kvbm_console.core.ids import CandidateStatus, FinishReason, Route, SlotState

_S = SlotState

TRANSITIONS: Final[dict[SlotState, dict[SlotState, str]]] = {
    _S.INITIALIZED: {
        _S.ONBOARD_STAGED: "match found below G1",
        _S.PREFILLING: "scheduled without a match",
        _S.PREEMPTED: "preempted",
        _S.FINISHING: "finished, copies outstanding",
        _S.FINISHED: "finished",
    },
    _S.ONBOARD_STAGED: {
        _S.ONBOARDING: "device blocks allocated",
        _S.PREFILLING: "admitted with 0 external tokens",
        _S.INITIALIZED: "staging deadline passed",
        _S.PREEMPTED: "preempted",
        _S.FINISHING: "finished, copies outstanding",
        _S.FINISHED: "finished",
    },
    _S.ONBOARDING: {
        _S.PREFILLING: "scheduled after its load ended",
        _S.PREEMPTED: "preempted",
        _S.FINISHING: "finished, copies outstanding",
        _S.FINISHED: "finished",
    },
    _S.PREFILLING: {
        _S.DECODING: "first new token",
        _S.SKIPPED_PREFILL: "left out of an iteration",
        _S.PREEMPTED: "preempted",
        _S.FINISHING: "finished, copies outstanding",
        _S.FINISHED: "finished",
    },
    _S.SKIPPED_PREFILL: {
        _S.PREFILLING: "back in an iteration",
        _S.PREEMPTED: "preempted",
        _S.FINISHING: "finished, copies outstanding",
        _S.FINISHED: "finished",
    },
    _S.DECODING: {
        _S.SKIPPED_DECODE: "left out of an iteration",
        _S.PREEMPTED: "preempted",
        _S.FINISHING: "finished, copies outstanding",
        _S.FINISHED: "finished",
    },
    _S.SKIPPED_DECODE: {
        _S.DECODING: "back in an iteration",
        _S.PREEMPTED: "preempted",
        _S.FINISHING: "finished, copies outstanding",
        _S.FINISHED: "finished",
    },
    _S.PREEMPTED: {
        _S.ONBOARD_STAGED: "match found below G1",
        _S.PREFILLING: "scheduled without a match",
        _S.FINISHING: "finished, copies outstanding",
        _S.FINISHED: "finished",
    },
    _S.FINISHING: {_S.FINISHED: "last outstanding operation ended"},
    _S.FINISHED: {},
}
"""From state to (to state: trigger). The diagram in docs/kinds.md is generated from this table."""

WAITING_STATES: Final = frozenset({_S.INITIALIZED, _S.ONBOARD_STAGED, _S.PREEMPTED})
"""States in which the engine has no device blocks for the request."""
PREFILL_STATES: Final = frozenset({_S.PREFILLING, _S.SKIPPED_PREFILL})
NO_LIMIT: Final = 2**62
"""Above every iteration and every number of tokens."""
ADVANCING_STATES: Final = frozenset({_S.DECODING})
"""States in which every iteration computes one token by itself."""


_DECODING: Final = SlotState.DECODING


def check_move(old: SlotState, new: SlotState, story: tuple[str, ...] = ()) -> None:
    """Raise ``InvalidTransition`` unless the table has the move.

    >>> check_move(SlotState.PREFILLING, SlotState.DECODING)
    """
    if new not in TRANSITIONS[old]:
        raise InvalidTransition(f"no transition from {old.label} to {new.label}", story)


class SlotFacts(msgspec.Struct, array_like=True):
    """The facts of one slot. Only ``CacheState.apply`` writes it."""

    slot: int
    request: str
    source: int
    state: SlotState
    since_ns: int
    """When it entered the state."""
    opened_ns: int
    hashes: list[int]
    """Sequence hashes of its full blocks, prompt first; grows as blocks are filled."""
    prompt_tokens: int
    output_limit: int
    """Most tokens that it may generate, 0 when its engine does not tell."""
    priority: int
    session: str | None
    prompt_blocks: int
    """Full blocks of the prompt."""
    parent: int | None = None
    anchor_tokens: int = 0
    """Computed tokens as of ``anchor_iteration``; see ``computed_tokens``."""
    anchor_iteration: int = 0
    evaluated_blocks: int = 0
    """Leading blocks that the pipeline has already looked at for an offload."""
    device_pool: int | None = None
    device_blocks: list[int] = []
    staged: list[tuple[int, list[int]]] = []
    """(pool, block ids), in prompt order, held for it until device blocks are allocated."""
    filled_blocks: int = 0
    """Leading device blocks whose content exists or is being loaded."""
    local_blocks: int = 0
    """Prefix blocks that the engine reported as its own (G1) at the last lookup."""
    cached: tuple[int, int, int, int] = (0, 0, 0, 0)
    """``CacheState.found_tokens`` as of the last move. Older recordings have it of loads alone: read that instead."""
    hits: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Blocks scored as hits at its last admission, minus the blocks whose load failed."""
    outstanding: set[int] = set()
    """Candidates of this slot that are not terminal."""
    hold: int | None = None
    last_answer: tuple[int | None, int, int | None] | None = None
    """(answer, local blocks, first miss) of the last ``LookupAnswered``."""
    first_iteration: int | None = None
    skipped_iterations: int = 0
    skipped_since: int = 0
    preemptions: int = 0
    reason: FinishReason | None = None
    sends: str | None = None
    """The name under which its blocks go to the engine that decodes it; None without such an engine."""
    receives: str | None = None
    """The name under which another engine, which prefilled it, sends its blocks."""
    passed_blocks: int = 0
    """Leading blocks that lie before the attention window of its model: it holds no place for them, and
    ``device_blocks`` begins behind them."""

    @property
    def end_block(self) -> int:
        """The number of its blocks on the device, with those that its window has passed."""
        return self.passed_blocks + len(self.device_blocks)

    def places(self, first: int, end: int) -> list[int]:
        """The places of its blocks from ``first`` to ``end``; those that its window has passed have none."""
        passed = self.passed_blocks
        return self.device_blocks[max(0, first - passed) : max(0, end - passed)]

    def sequence_tokens(self, iteration: int, block_tokens: int) -> int:
        """Tokens of the sequence as far as they are known: the prompt, and the tokens generated behind it."""
        generated = len(self.hashes) > self.prompt_blocks
        return max(
            self.prompt_tokens, self.computed_tokens(iteration) + 1, len(self.hashes) * block_tokens + generated
        )

    @property
    def token_limit(self) -> int:
        """Most tokens that its sequence may have: those of the prompt and ``output_limit`` more (I15)."""
        return self.prompt_tokens + self.output_limit if self.output_limit else NO_LIMIT

    def most_tokens(self, state: SlotState) -> int:
        """Most tokens that can be computed in a state: before the first token the prompt's, later ``token_limit``."""
        first = state in PREFILL_STATES and not self.preemptions and self.parent is None
        return self.prompt_tokens if first else self.token_limit

    def computed_tokens(self, iteration: int) -> int:
        """Tokens whose K/V exist after ``iteration``: a decoding slot adds one per iteration since its anchor."""
        if self.state is _DECODING:
            return self.anchor_tokens + iteration - self.anchor_iteration
        return self.anchor_tokens


TERMINAL: Final = frozenset(
    {CandidateStatus.COMPLETED, CandidateStatus.FAILED, CandidateStatus.CANCELLED, CandidateStatus.SKIPPED}
)
"""Statuses that end a candidate."""


class CandidateFacts(msgspec.Struct, array_like=True):
    """One planned transfer that is not terminal. ``slot`` is None for cached blocks that no live slot owns."""

    candidate: int
    slot: int | None
    route: Route
    hashes: list[int]
    targets: list[int]
    first_block: int | None
    status: CandidateStatus
    operation: int | None = None
    enqueued: bool = False
    found: int | None = None
    """Blocks that can be moved, None before the evaluation."""
    planned_ns: int = 0
    enqueued_ns: int | None = None
    evaluated_ns: int | None = None
    promoted_ns: int | None = None
    started_ns: int | None = None
    for_slot: int | None = None
    """The slot whose blocks a watched engine copies without its waiting; it may have ended."""
    request: str = ""
    """The request of ``for_slot``."""

    @property
    def owner(self) -> int | None:
        """The slot that waits for it, or whose blocks a connector copies; None for blocks of no slot."""
        return self.for_slot if self.slot is None else self.slot


class OperationFacts(msgspec.Struct, array_like=True):
    """The copy of ``sources[i]`` to ``targets[i]``."""

    operation: int
    candidate: int
    batch: int
    epoch: int
    source_pool: int
    target_pool: int
    sources: list[int]
    targets: list[int]
    started: bool = False
    reported: set[int] = set()
    """Ranks that have reported, well or not."""
    failed: set[int] = set()
    """Indices of blocks that some rank could not copy."""
    error: str = ""
    told_blocks: int = 0
    """Blocks that the connector of a watched engine copies, of all groups of layers; 0 when it does not tell."""
    size_bytes: int | None = None
    """Bytes that it copies; None when it does not tell."""

    @property
    def blocks(self) -> int:
        """How many blocks the operation copies. A pool that is known by hash alone names no places on its side."""
        return self.told_blocks or max(len(self.sources), len(self.targets))


class ConnectorFacts(msgspec.Struct, array_like=True, frozen=True):
    """The connectors of a watched engine, since the engine began: the fields of ``ConnectorMeasured``."""

    connectors: tuple[str, ...]
    methods: tuple[str, ...]
    calls: tuple[int, ...]
    total_ns: tuple[int, ...]
    longest_ns: tuple[int, ...]
    stats: tuple[str, ...]
    values: tuple[float, ...]
    at_ns: int
