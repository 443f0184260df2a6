"""Stimuli: everything that the core is told. Past participles, stamped once, at the edge.

Law of this file: a stimulus carries all that a decision may depend on. So a leader that gets the recorded stimuli again
makes the same events. Columns of block ids are little-endian int32, columns of sequence hashes little-endian uint64.
Both are ``bytes``, the same in memory, on the wire and on disk.

Every stimulus starts with the same four fields, filled by ``submit``:
``n`` (0, 1, 2 ... their own order), ``at_ns`` (the engine's clock), ``source`` (index of the engine or client it came
from; 0 is the daemon itself) and ``origin_ns`` (the sender's own time, None when it has none).
"""

from typing import Final

import msgspec

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import (
    Authority,
    CandidateStatus,
    FinishReason,
    Measure,
    Note,
    ResetMode,
    Site,
    SlotState,
    Tier,
)


class Stimulus(msgspec.Struct, array_like=True, gc=False, tag=0):
    """The fields of every stimulus."""

    n: int
    at_ns: int
    source: int
    origin_ns: int | None


# --- from the engine: the entry points of a connector ---


class PoolDeclared(Stimulus, tag=1):
    """A pool exists. ``capacity_blocks`` is None when the engine does not tell. ``silent``: nor does the engine tell
    which blocks are in the pool. Places are numbered from ``first_place`` on: vLLM gives its block 0 to no request.
    ``window`` is how many tokens a token of this group of layers sees, itself included: 0 for all, None if the engine
    does not tell."""

    dp_rank: int
    group: int
    tier: Tier
    medium: str
    capacity_blocks: int | None
    block_tokens: int
    authority: Authority
    silent: bool = False
    first_place: int = 0
    window: int | None = None


class RequestArrived(Stimulus, tag=2):
    """``create_slot``: a request with the hashes of its full prompt blocks, which differ. The core never sees a token.

    ``sends`` and ``receives``: see ``SlotOpened``.
    """

    request: str
    hashes: bytes
    prompt_tokens: int
    output_limit: int
    priority: int
    session: str | None
    sends: str | None = None
    receives: str | None = None


class MatchRequested(Stimulus, tag=3):
    """``get_num_new_matched_tokens``: the engine's own prefix covers ``computed_tokens`` and the engine asks how much
    of the rest stands below G1."""

    request: str
    computed_tokens: int


class BlocksAllocated(Stimulus, tag=4):
    """``update_state_after_alloc``: block ids appended to the request, in order, and ``external_tokens`` that will be
    loaded.

    At an admission the ids start with the reused prefix blocks. A second call with 0 external tokens is normal. A
    watched engine reports the start of the load by ``CopyBegun`` if ``awaits_start`` is set. ``found`` has the external
    tokens that came from G2, G3 and G4; it is empty if the connector does not tell. ``hashes`` are those of the loaded
    blocks, if they go beyond the prompt: a request that lost its blocks may find an answer that another one computed.

    The first ``passed_blocks`` of a request lie before its attention window, and it holds no place for them. A watched
    engine reports all other blocks as they are now in ``block_ids``, and ``passed_hashes`` are the hashes of the passed
    blocks behind the prompt. Of an engine that asks, the request gives up the blocks that have passed since, and the
    answer names the places that a running copy still uses.
    """

    request: str
    block_ids: bytes
    external_tokens: int
    awaits_start: bool = False
    found: tuple[int, ...] = ()
    hashes: bytes = b""
    passed_blocks: int = 0
    passed_hashes: bytes = b""


class IterationScheduled(Stimulus, tag=5):
    """``build_connector_metadata``: the engine formed ``count`` iterations from ``iteration`` on. The lists name
    changes only.

    ``progressed[i]`` will have ``positions[i]`` computed tokens when the iteration ends (prefills; a decoding request
    advances by one token an iteration by itself). ``appended[i]`` got ``appended_counts[i]`` of ``appended_ids``.
    ``first_tokens`` are requests whose prompt is complete and which produce tokens from this iteration on.

    One stimulus may tell several iterations when requests only decode after the first. ``appended`` is then in the
    order of handing out, and names a request for each of its blocks. They end with one ``IterationFinished``, in the
    order in which blocks became full.

    ``ended`` are requests that ended before, in the order in which the connector hears of it. It is empty where that is
    the order of their ends.
    """

    iteration: int
    count: int
    new: tuple[str, ...]
    resumed: tuple[str, ...]
    preempted: tuple[str, ...]
    skipped: tuple[str, ...]
    unskipped: tuple[str, ...]
    first_tokens: tuple[str, ...]
    progressed: tuple[str, ...]
    positions: tuple[int, ...]
    appended: tuple[str, ...]
    appended_counts: tuple[int, ...]
    appended_ids: bytes
    running: int
    waiting: int
    ended: tuple[str, ...] = ()


class IterationFinished(Stimulus, tag=6):
    """The iteration's blocks are filled and carry their hashes: ``counts[i]`` of the two columns are of request i.

    A watched engine with attention windows may cache only some of its full blocks: the places ``unkept`` hold blocks of
    these requests that no lookup finds.
    """

    iteration: int
    requests: tuple[str, ...]
    counts: tuple[int, ...]
    block_ids: bytes
    hashes: bytes
    unkept: bytes = b""


class RequestPreempted(Stimulus, tag=7):
    """The scheduler takes the device blocks back; the result names fenced ids that must not be reused yet."""

    request: str


class RequestCloned(Stimulus, tag=8):
    """``request`` continues as several sequences: full blocks shared, ``partial_ids[i]`` is clone i's own last block.

    ``partial_ids`` is empty when the parent ends at a block boundary.
    """

    request: str
    clones: tuple[str, ...]
    partial_ids: bytes


class RequestFinished(Stimulus, tag=9):
    """Finish or abort. The result says whether the blocks stay allocated until outstanding operations end."""

    request: str
    block_ids: bytes
    """Of an engine that is watched: leading blocks that a lookup can find, of a request that ends while it loads."""
    reason: FinishReason
    delayed: bool = False
    """Of an engine that is watched: it keeps the blocks until their copy has ended (``CopiesObserved.sent``)."""


# --- from the mover ---


class TransferStarted(Stimulus, tag=10):
    """The mover began to copy."""

    operation: int
    epoch: int


class TransferFinished(Stimulus, tag=11):
    """One rank has copied its part."""

    operation: int
    epoch: int
    rank: int


class TransferFailed(Stimulus, tag=12):
    """One rank could not copy. ``failed`` holds indices (int32) into the operation's blocks; empty means all."""

    operation: int
    epoch: int
    rank: int
    error: str
    failed: bytes


class BlocksRestored(Stimulus, tag=47):
    """The lowest pool of the leader has these blocks from before the daemon began, the least recently used first.

    ``ids[i]`` holds ``hashes[i]``. It comes before any use of the pool.
    """

    pool: int
    ids: bytes
    hashes: bytes


# --- from a KV-event stream (level 1) ---


class BlocksReported(Stimulus, tag=13):
    """An engine's event stream told of blocks stored in and removed from a pool, by hash; ``cleared`` empties it.

    The device of an engine has ``places`` (an int32 column). Without ``stored`` these were given out, in any group of
    layers, so their content is evicted for ``request``. A watched engine also tells what they hold: with ``stored``
    these hashes. With ``stored`` and ``request`` they are the next full blocks of this request, as a lookup finds them
    from now on.

    The columns from ``chains`` on concern an event stream and are those of ``BlocksSeen``.
    """

    pool: int
    stored: bytes
    removed: bytes
    cleared: bool
    places: bytes = b""
    request: str = ""
    chains: bytes = b""
    parents: bytes = b""
    marked: bytes = b""
    contents: bytes = b""
    contexts: tuple[str, ...] = ()
    again_within_ns: tuple[int, ...] = ()
    again_within_blocks: tuple[int, ...] = ()
    again_blocks: tuple[int, ...] = ()
    age_ns: int | None = 0


class SourceGapped(Stimulus, tag=14):
    """Reports of this source were lost; the content of its pools is unknown until it is reported again."""

    first: int
    last: int


class SourceRestarted(Stimulus, tag=15):
    """The source began again as a new incarnation. With ``gone`` it ended, and nothing more is heard of it.

    ``replaceable``: with ``gone``, pools that are declared later take over the indices of its pools.
    """

    gone: bool = False
    replaceable: bool = False


class MeasuresReported(Stimulus, tag=41):
    """Numbers that an engine tells of itself, or none if they cannot be read any more (``EngineMeasured``)."""

    measures: tuple[Measure, ...]
    values: tuple[int, ...]


# --- from an engine that is only watched (``Authority.OBSERVED``) ---


class LookupObserved(Stimulus, tag=38):
    """A connector answered a lookup: ``tokens`` beyond ``computed_tokens`` found in ``tier``, None for "ask again"."""

    request: str
    computed_tokens: int
    tokens: int | None
    asynchronous: bool
    tier: Tier


class CopiesObserved(Stimulus, tag=39):
    """A connector's copies ended, loads and stores by request. Loads of ``failed`` requests brought only a part.

    ``failed_ids`` are the device blocks (int32 column) that did not arrive.
    """

    loaded: tuple[str, ...]
    sent: tuple[str, ...]
    failed: tuple[str, ...]
    failed_ids: bytes


class CopyBegun(Stimulus, tag=42):
    """A connector ordered a copy from one pool to another. ``copy`` is its number, which ``CopyEnded`` repeats.

    A load into the device is the load of the allocation of ``request``. ``hashes`` are the blocks as far as their
    content is known, and ``blocks`` is the number of all blocks. ``size_bytes`` is None if the size is unknown.

    With ``asks`` the copy waits for the answer, which is like that of a lookup. A breakpoint at ``dispatch.will`` may
    hold the copy.
    """

    copy: int
    request: str
    source_pool: int
    target_pool: int
    hashes: bytes
    blocks: int
    size_bytes: int | None
    asks: bool = False


class CopyEnded(Stimulus, tag=43):
    """A connector's copy ended as ``status``: completed, failed or cancelled.

    ``wire_ns`` is the time in which its bytes moved, None if the connector does not tell. ``error`` is the reason of a
    failure in words, if there are any.
    """

    copy: int
    status: CandidateStatus
    wire_ns: int | None = None
    error: str = ""


class ConnectorReported(Stimulus, tag=44):
    """The calls of the connectors of an engine and their own statistics, since the engine began: see
    ``ConnectorMeasured``."""

    connectors: tuple[str, ...]
    methods: tuple[str, ...]
    calls: tuple[int, ...]
    total_ns: tuple[int, ...]
    longest_ns: tuple[int, ...]
    stats: tuple[str, ...]
    values: tuple[float, ...]


class CallReported(Stimulus, tag=45):
    """A call into a connector blocked its engine for long: see ``CallBlocked``."""

    request: str
    connector: str
    method: str
    took_ns: int


class PlacesAudited(Stimulus, tag=46):
    """The content of a part of a watched engine's pool after a step, to compare it with the facts.

    A device pool has the places from ``first`` on: ``hashes`` (0 without content) and ``references``, an int32 column
    of the holders. ``free`` is the number of free places in the engine, None if other programs may hold places, too.
    ``cached`` is the number of hashes in all groups of the engine's prefix cache. The pool of another group has hashes
    alone.
    """

    pool: int
    first: int
    hashes: bytes
    references: bytes
    free: int | None = None
    cached: int | None = None


class MismatchReported(Stimulus, tag=40):
    """A worker compared the bytes of a copy and found others than a store had taken (``ContentMismatched``)."""

    request: str
    rank: int
    group: int
    hashes: bytes
    kind: str
    stage: str
    place: int
    below: int
    copy: int
    writer: str
    edge: str
    taken: str


# --- from clients ---


class BreakpointsReplaced(Stimulus, tag=20):
    """All breakpoints of ``owner``, replacing those it had. The result is one verdict for each.

    A breakpoint that is repeated unchanged stays as it is, armed or not. ``by`` names the client that asked, empty for
    the owner itself.
    """

    owner: str
    specs: tuple[BreakpointSpec, ...]
    by: str = ""


class HoldContinued(Stimulus, tag=21):
    """Release ``hold``, or all when it is None.

    ``until`` arms a one-shot stop of that slot at that state, ``until_site`` at that site.
    """

    hold: int | None
    by: str
    until: SlotState | None
    until_site: Site | None = None


class SlotStepped(Stimulus, tag=22):
    """Release the hold and hold the same slot again at its next site."""

    hold: int
    by: str


class PipelineStepped(Stimulus, tag=23):
    """While the pipeline is closed: let one candidate through its evaluation."""

    by: str


class RunForRequested(Stimulus, tag=24):
    """Thaw, let the engines run for ``duration_ns`` of engine time, then freeze for at most ``max_hold_ns``."""

    duration_ns: int
    by: str
    max_hold_ns: int


class CandidateSkipRequested(Stimulus, tag=25):
    """Resolve the held slot's open candidates to no work, and release the hold."""

    hold: int
    by: str


class FreezeRequested(Stimulus, tag=26):
    """Close the pipeline and pause the engines, for at most ``max_hold_ns``."""

    by: str
    max_hold_ns: int


class ThawRequested(Stimulus, tag=27):
    """End the freeze."""

    by: str


class Disarmed(Stimulus, tag=28):
    """Disable every breakpoint and release every hold."""

    by: str


# --- from the shell around the core ---


class LeaseGranted(Stimulus, tag=30):
    """``owner`` is alive; its holds are kept.

    ``back``: the owner lost its lease and is here again. Breakpoints that this disabled, and no client changed since,
    are armed.
    """

    owner: str
    back: bool = False


class LeaseLost(Stimulus, tag=31):
    """``owner`` is gone: its holds are released, its breakpoints disabled."""

    owner: str


class DeadlinePassed(Stimulus, tag=32):
    """A deadline that was asked for with ``SetDeadline`` has come."""

    deadline: int


class BreakpointOverran(Stimulus, tag=33):
    """A breakpoint cost more than its budget, by a clock that the core does not have: disable it."""

    breakpoint: int
    message: str


class ResetRequested(Stimulus, tag=34):
    """Return to the initial state at once; running copies quarantine their places until they are reported.

    ``by`` is the client that asked, empty for an engine or a test.
    """

    mode: ResetMode
    by: str = ""


class DrainRequested(Stimulus, tag=35):
    """Take no new request, let the live requests and the copies end for ``deadline_ns`` of engine time, abort the rest,
    then reset. ``by`` is the client that asked."""

    deadline_ns: int
    by: str = ""


class NoteReported(Stimulus, tag=36):
    """Something about the process around the core that belongs into the record."""

    note: Note
    detail: str


class CallAnnounced(Stimulus, tag=37):
    """A caller that can wait is about to call ``entry`` (a stimulus tag) for this request: the site ``call.will``."""

    request: str
    entry: int


AnyStimulus = (
    PoolDeclared | RequestArrived | MatchRequested | BlocksAllocated | IterationScheduled | IterationFinished
    | RequestPreempted | RequestCloned | RequestFinished | TransferStarted | TransferFinished | TransferFailed
    | BlocksReported | BlocksRestored | SourceGapped | SourceRestarted | BreakpointsReplaced | HoldContinued
    | SlotStepped | Disarmed | LeaseGranted | LeaseLost | DeadlinePassed | ResetRequested | DrainRequested
    | NoteReported | LookupObserved | CopiesObserved | CopyBegun | CopyEnded | ConnectorReported | CallReported
    | MismatchReported | MeasuresReported | PlacesAudited | CallAnnounced | PipelineStepped | RunForRequested
    | CandidateSkipRequested | FreezeRequested | ThawRequested | BreakpointOverran
)
"""The closed union of stimuli; decoding a batch is ``msgspec.msgpack.Decoder(list[AnyStimulus])``."""

WIRE_NAMES: Final[dict[type, str]] = {FreezeRequested: "Frozen", ThawRequested: "Thawed", NoteReported: "Noted"}
"""Names of messages in the contract that stayed when the class got another name."""

ENTRY_POINTS: Final[dict[type[Stimulus], str]] = {
    PoolDeclared: "pool_declared",
    RequestArrived: "create_slot",
    MatchRequested: "get_num_new_matched_tokens",
    BlocksAllocated: "update_state_after_alloc",
    IterationScheduled: "build_connector_metadata",
    IterationFinished: "iteration_finished",
    RequestPreempted: "request_preempted",
    RequestCloned: "request_cloned",
    RequestFinished: "request_finished",
    TransferStarted: "transfer_started",
    TransferFinished: "transfer_finished",
    TransferFailed: "transfer_failed",
    BlocksReported: "blocks_reported",
    BlocksRestored: "blocks_restored",
    SourceGapped: "source_gapped",
    SourceRestarted: "source_restarted",
    BreakpointsReplaced: "replace_breakpoints",
    HoldContinued: "continue",
    SlotStepped: "step",
    Disarmed: "disarm",
    LeaseGranted: "lease_granted",
    LeaseLost: "lease_lost",
    DeadlinePassed: "deadline_passed",
    ResetRequested: "reset",
    DrainRequested: "drain",
    NoteReported: "note",
    CallAnnounced: "call_announced",
    LookupObserved: "lookup_observed",
    CopiesObserved: "copies_observed",
    CopyBegun: "copy_begun",
    CopyEnded: "copy_ended",
    ConnectorReported: "connector_reported",
    CallReported: "call_reported",
    MismatchReported: "mismatch_reported",
    PlacesAudited: "places_audited",
    MeasuresReported: "measures_reported",
    PipelineStepped: "step_pipeline",
    RunForRequested: "run_for",
    CandidateSkipRequested: "skip_candidate",
    FreezeRequested: "freeze",
    ThawRequested: "thaw",
    BreakpointOverran: "breakpoint_overran",
}
"""The entry point that each stimulus stands for, under the name that connectors use."""

ENTRY_TAGS: Final[dict[type[Stimulus], int]] = {
    kind: int(kind.__struct_config__.tag) for kind in ENTRY_POINTS  # type: ignore[arg-type]
}
ENTRY_NAMES: Final[dict[int, str]] = {ENTRY_TAGS[kind]: name for kind, name in ENTRY_POINTS.items()}
"""Tag of a stimulus (the ``entry`` of a ``SlotMoved``) to the name of its entry point."""
