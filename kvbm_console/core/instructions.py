"""Instructions of the core to the shell around it. The shell executes these imperatives in order.

Law of this file: only an instruction starts a copy, wakes an engine or sets a clock. With several hosts, only those of
host 0 are executed. Instructions are not recorded: replaying stimuli produces them again.
"""

import msgspec

from kvbm_console.core.ids import Clock, Route


class Instruction(msgspec.Struct, array_like=True, gc=False, tag=0):
    """Base of all instructions."""


class StartTransfer(Instruction, tag=1):
    """Copy ``sources[i]`` to ``targets[i]`` (int32 columns) and report started, then finished or failed per rank."""

    operation: int
    epoch: int
    route: Route
    sources: bytes
    targets: bytes
    blocks: int
    batch: int
    ranks: int
    source_pool: int = 0
    target_pool: int = 0
    hashes: bytes = b""
    """The block that each source holds, as a column of uint64."""


class CancelTransfer(Instruction, tag=2):
    """Do not start this operation; it is not reported any more."""

    operation: int


class WakeRequest(Instruction, tag=3):
    """``finished_recving``: the request's load ended, well or not, so the request can be scheduled or looked up
    again."""

    source: int
    request: str


class ReleaseDeviceBlocks(Instruction, tag=4):
    """``finished_sending``: these device blocks of the request, withheld until now, may be reused."""

    source: int
    request: str
    ids: bytes


class SetDeadline(Instruction, tag=5):
    """Send ``DeadlinePassed(deadline)`` after this time on this clock."""

    deadline: int
    after_ns: int
    clock: Clock


class ClearDeadline(Instruction, tag=6):
    """The deadline is not needed any more; an unknown deadline is ignored."""

    deadline: int


class ZeroBlocks(Instruction, tag=7):
    """Overwrite the bytes of every place of this pool (physical reset)."""

    pool: int


class ClearDevicePool(Instruction, tag=8):
    """The leader was reset: the engine forgets its requests and clears its own pool, except the places in ``keep``.

    Running copies still use those (int32 column); ``ReleaseDeviceBlocks`` with an empty request frees them.
    """

    source: int
    keep: bytes


class PinDeviceBlocks(Instruction, tag=9):
    """Cached device blocks that a copy reads while no request holds them: not to be reused before they are released.

    ``ReleaseDeviceBlocks`` with an empty request gives them back. Carried out before the call that caused it returns,
    so the engine cannot have reused them in between.
    """

    source: int
    ids: bytes


class PauseEngine(Instruction, tag=10):
    """The engine forms no iteration until it is resumed; it ends the iterations that it has formed."""

    source: int


class ResumeEngine(Instruction, tag=11):
    """The engine goes on."""

    source: int


AnyInstruction = (
    StartTransfer | CancelTransfer | WakeRequest | ReleaseDeviceBlocks | SetDeadline | ClearDeadline | ZeroBlocks
    | ClearDevicePool | PinDeviceBlocks | PauseEngine | ResumeEngine
)
"""The closed union of instructions."""


# --- results that an entry point returns to its caller, beside the instructions ---


class MatchAnswer(msgspec.Struct, frozen=True):
    """``tokens`` found below G1 (None: ask again); ``asynchronous`` if they are loaded beside the steps."""

    tokens: int | None
    asynchronous: bool


class FencedBlocks(msgspec.Struct, frozen=True):
    """Device blocks (int32 column) that a running copy still uses; ``ReleaseDeviceBlocks`` frees them later."""

    ids: bytes


class FinishAnswer(msgspec.Struct, frozen=True):
    """True if the blocks stay allocated until ``ReleaseDeviceBlocks``."""

    delay_free: bool


class IterationMetadata(msgspec.Struct, frozen=True):
    """For engines whose workers read it: the iteration and the operations that were issued for it."""

    iteration: int
    operations: tuple[int, ...]


class BreakpointVerdict(msgspec.Struct, frozen=True):
    """The answer to one specification: its id, ``verified`` if it can work, otherwise the reason."""

    id: int
    verified: bool
    message: str


class CloneAnswer(msgspec.Struct, frozen=True):
    """The slots opened for the clones."""

    slots: tuple[int, ...]


class PoolAnswer(msgspec.Struct, frozen=True):
    """The index of the declared pool, by which ``BlocksReported`` names it."""

    pool: int


class AuditAnswer(msgspec.Struct, frozen=True):
    """Places or hashes in which the engine and the facts differ."""

    differing: int


class ResetAnswer(msgspec.Struct, frozen=True):
    """The result of a reset."""

    epoch: int
    aborted_requests: int
    quarantined_blocks: int
    """Places that running copies still touch."""


class DrainAnswer(msgspec.Struct, frozen=True):
    """A drain has begun."""

    seq: int
    """Number of its ``DrainBegun``."""
    live_requests: int


Result = (
    PoolAnswer | MatchAnswer | FencedBlocks | FinishAnswer | IterationMetadata | CloneAnswer
    | AuditAnswer | ResetAnswer | DrainAnswer | tuple[BreakpointVerdict, ...]
)
"""The types of ``Outcome.result``, which is None when the entry point returns nothing or refused."""
