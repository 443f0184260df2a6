"""Events: everything that became true. They are the only way in which facts change.

Law of this file: an event names an outcome completely, so that folding events needs no policy, no clock and no
configuration. One event per decision, with columns: never one per block or per token. Columns of block ids are
little-endian int32, of sequence hashes little-endian uint64 (``columns.py``).

Every event starts with ``seq`` (0, 1, 2 ... contiguous), ``at_ns`` (of the stimulus) and ``cause`` (its ``n``).
New kinds take a new tag, new fields go to the end with a default: older readers skip both.
"""

from typing import Final

import msgspec

from kvbm_console.core.columns import ID_BYTES, Hashes, Ids, Indices
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import (
    Authority,
    BreakpointAction,
    BreakpointEnd,
    CandidateStatus,
    EvictRule,
    FinishReason,
    HoldEnd,
    Measure,
    MissReason,
    Note,
    OnTimeout,
    ReleaseReason,
    ResetMode,
    Route,
    Site,
    SkipReason,
    SlotState,
    Suspend,
    Tier,
    WaitPoint,
)

KIND_NUMBER_BASE: Final = 100
"""The number of a kind in the messages of the wire is this plus its msgpack tag."""
SCHEMA_ID: Final = 14
"""Version of events and stimuli that a batch carries, so that a reader can say why it cannot read one."""
FORMAT_MINOR: Final = 17
"""Minor version of recordings, which older readers may read and pass new things over."""
DECIDES_SINCE: Final = 17
"""Minor version since which a leader decides, and remembers, what today's leader does. The stimuli of older recordings
are not decided again."""
PROTOCOL_MINOR: Final = 16
"""Minor version of the wire. A new kind or field raises all three; ``make proto`` refuses it otherwise."""
NOTHING_RETURNED: Final = (0, 0, 0, 0)
TOLD: Final = -1
RESTORED: Final = -2
"""Numbers in the place of an operation's, see ``BlocksReserved``."""


class Event(msgspec.Struct, array_like=True, gc=False, tag=0):
    """The fields of every event."""

    seq: int
    at_ns: int
    cause: int


# --- pools and slots ---


class PoolKnown(Event, tag=1):
    """A pool exists under this index. ``source`` is the index of the engine that it belongs to, 0 for the leader's.

    A pool of an engine that ended may have had the index before: that pool is forgotten. ``silent``: the engine does
    not tell the content of the pool, so its content is unknown until a ``BlocksSeen`` names it. The places of the pool
    are numbered from ``first_place`` on. A token of its group of layers sees ``window`` tokens, itself included: 0 for
    all, None if the engine does not tell.
    """

    pool: int
    source: int
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


class SlotOpened(Event, tag=2):
    """A slot exists in ``initialized``.

    A request that is prefilled by one engine and decoded by another has a slot in each. The prefill half ``sends`` its
    blocks under the name by which the decode half ``receives`` them.
    """

    slot: int
    request: str
    source: int
    hashes: Hashes
    prompt_tokens: int
    output_limit: int
    priority: int
    session: str | None
    sends: str | None = None
    receives: str | None = None


class SlotMoved(Event, tag=3):
    """A slot made a move of the transition table. ``cached`` are the prompt tokens that the last admission found in G1
    to G4, without those of failed loads. Earlier versions counted loads alone.

    ``entry`` is the tag of the stimulus (``stimuli.ENTRY_NAMES``), ``detail`` the tokens of ``onboard_staged(n)`` and
    ``onboarding(n)``. A move to ``finished`` also carries the iteration first scheduled and the iterations skipped,
    and a move to ``finishing`` or ``finished`` the reason.
    """

    slot: int
    old: SlotState
    new: SlotState
    entry: int
    iteration: int
    computed_tokens: int
    evaluated_blocks: int
    cached: tuple[int, int, int, int]
    outstanding: int
    detail: int = 0
    first_iteration: int | None = None
    skipped_iterations: int | None = None
    reason: FinishReason | None = None


class SlotClosed(Event, tag=4):
    """The slot is finished and owns nothing; it leaves the facts."""

    slot: int


class SlotCloned(Event, tag=5):
    """``slot`` was opened as a clone of ``parent``: it shares the parent's full device blocks by reference count.

    ``ids`` is the clone's block list; all but a partial last block are the parent's.
    """

    slot: int
    parent: int
    request: str
    ids: Ids


# --- lookup, staging, device blocks ---


class LookupAnswered(Event, tag=6):
    """A lookup had a new answer. ``matched`` are blocks found in G2, G3, G4 behind ``local_blocks`` of G1.

    ``first_miss`` is the index of the first prompt block found nowhere, or None when all were found, and ``why`` is the
    reason. ``answer`` is the number of tokens told to the engine, None for "ask again".
    """

    slot: int
    local_blocks: int
    matched: tuple[int, int, int]
    first_miss: int | None
    why: MissReason
    answer: int | None
    asynchronous: bool


class BlocksStaged(Event, tag=7):
    """Places of a lower pool are held for the slot until its device blocks are allocated.

    ``prefetched`` of them stand there because they were fetched ahead, and are found for the first time since.
    """

    slot: int
    pool: int
    ids: Ids
    prefetched: int = 0


class StagingReleased(Event, tag=8):
    """All staging of the slot was given back (``allocated``: the load operations hold the places now)."""

    slot: int
    why: ReleaseReason


class DeviceBlocksAssigned(Event, tag=9):
    """Device blocks were appended to slots: ``counts[i]`` of ``ids`` to ``slots[i]``.

    The first ``reused`` blocks are prefix blocks found in G1 (one slot only); ``external_tokens`` will be loaded. The
    first ``passed_blocks`` blocks lie before the attention window, so the slot gets no place for them, and ``ids``
    begins behind them. ``passed_hashes`` are the hashes of those among them that go beyond the hashes of the slot.
    """

    pool: int
    slots: tuple[int, ...]
    counts: tuple[int, ...]
    ids: Ids
    reused: int
    external_tokens: int
    passed_blocks: int = 0
    passed_hashes: Hashes = b""


class DeviceBlocksReleased(Event, tag=10):
    """The slot gave up these device blocks; running operations may still hold some of them.

    With ``PAST_WINDOW`` they are its first ones, and it keeps the others.
    """

    slot: int
    ids: Ids
    why: ReleaseReason


class BlocksFilled(Event, tag=11):
    """Device blocks are full, ready and carry their hashes: ``counts[i]`` of both columns belong to ``slots[i]``."""

    pool: int
    slots: tuple[int, ...]
    counts: tuple[int, ...]
    ids: Ids
    hashes: Hashes


class BlocksEvicted(Event, tag=12):
    """These places lost their content so that they can be reused, for ``for_slot`` if a slot wanted the room."""

    pool: int
    ids: Ids
    hashes: Hashes
    for_slot: int | None
    rule: EvictRule


class BlocksReserved(Event, tag=13):
    """Places are being written by an operation; they become readable with ``BlocksReady``.

    Operation ``TOLD`` are blocks that an engine reports without a report of their writing. ``RESTORED`` are those that
    the pool has from before the daemon began, and the time of their writing is unknown.
    """

    pool: int
    operation: int
    ids: Ids
    hashes: Hashes


class BlocksReady(Event, tag=14):
    """The copy arrived: these places may be read."""

    pool: int
    operation: int
    ids: Ids


class BlocksDropped(Event, tag=15):
    """A copy did not arrive, or an engine does not keep these blocks (``not_kept``): the places hold nothing. Also
    frees quarantined places (``epoch``)."""

    pool: int
    operation: int
    ids: Ids
    why: ReleaseReason


# --- candidates and operations ---


class CandidatePlanned(Event, tag=16):
    """The intent to move blocks along a route, of a slot or (cached blocks that no live slot owns) of a pool.

    ``hashes`` name the content. ``targets`` are the device blocks to load into, empty for an offload. ``first_block``
    is the prompt index of the first block, None when the slot is None. A watched engine copies blocks of ``request``
    that its slot does not wait for. ``for_slot`` is that slot, which may have ended.
    """

    candidate: int
    slot: int | None
    route: Route
    hashes: Hashes
    targets: Ids
    first_block: int | None
    for_slot: int | None = None
    request: str = ""


class CandidateEnqueued(Event, tag=17):
    """The candidate waits for its evaluation."""

    candidate: int


class CandidateEvaluated(Event, tag=18):
    """``found`` of its blocks can be moved; ``filtered`` is the reason that left out the others, if any."""

    candidate: int
    found: int
    filtered: SkipReason | None


class CandidateSkipped(Event, tag=19):
    """The candidate resolved to no work (terminal)."""

    candidate: int
    reason: SkipReason


class CandidatePromoted(Event, tag=20):
    """The candidate became an operation: ``sources[i]`` is copied to ``targets[i]``.

    Two counts concern loads. ``thrash`` blocks come back within the window after their offload (BC-6), ``returned[i]``
    blocks within the window after G1 to G4 evicted them.
    """

    candidate: int
    operation: int
    batch: int
    source_pool: int
    target_pool: int
    sources: Ids
    targets: Ids
    thrash: int = 0
    returned: tuple[int, int, int, int] = NOTHING_RETURNED

    @property
    def blocks(self) -> int:
        """How many blocks the operation copies. A pool that is known by hash alone names no places on its side."""
        return max(len(self.sources), len(self.targets)) // ID_BYTES


class OperationStarted(Event, tag=21):
    """The mover began to copy.

    The connector of a watched engine tells the size of its copy: all ``blocks``, of every group of layers, and
    ``size_bytes``. Else they are 0 and None.
    """

    operation: int
    blocks: int = 0
    size_bytes: int | None = None


class OperationReported(Event, tag=22):
    """One rank reported; an error counts as a report. ``failed`` are indices (int32) into the blocks.

    ``wire_ns``: the mover began to copy so long ago, and not when the operation was started. None if it does not tell.
    """

    operation: int
    rank: int
    ok: bool
    error: str
    failed: Indices
    wire_ns: int | None = None


class CandidateEnded(Event, tag=23):
    """``completed``, ``failed`` or ``cancelled`` (terminal); its operation released the blocks that it held."""

    candidate: int
    status: CandidateStatus


class BatchEnded(Event, tag=24):
    """All members of the batch have ended; only now are they no longer in flight."""

    batch: int


# --- iterations and scores ---


class IterationAdvanced(Event, tag=25):
    """``count`` iterations up to ``iteration`` were formed; ``slots[i]`` will have ``positions[i]`` tokens computed.

    Of several engines the leader counts the iterations together, and decoding slots of the others stay where they are:
    they are told with their position. ``ended`` is that of ``IterationScheduled``.
    """

    iteration: int
    count: int
    running: int
    waiting: int
    slots: tuple[int, ...]
    positions: tuple[int, ...]
    ended: tuple[str, ...] = ()


class PrefixScored(Event, tag=26):
    """An admission committed. Of its ``prompt_blocks``, ``hits`` were found in G1 to G4, and the engine computes the
    rest (BC-5).

    Tier ``again_tiers[i]`` had evicted ``again_blocks[i]`` of them within ``again_within_ns[i]`` before, and not within
    the next shorter time of ``AGE_BOUNDS_NS``. A tier that holds the block again does not count it.

    ``readmitted`` says that the request had been preempted. It then finds blocks that it has computed itself, so no
    total and no hit rate counts this admission, and no block counts as asked again.
    """

    slot: int
    prompt_blocks: int
    hits: tuple[int, int, int, int]
    again_tiers: tuple[int, ...] = ()
    again_within_ns: tuple[int, ...] = ()
    again_blocks: tuple[int, ...] = ()
    readmitted: bool = False


class HitsLost(Event, tag=27):
    """A load failed.

    ``blocks`` hits of a tier that were scored are taken back, and the slot goes back to ``position``. Those of an
    admission that was ``readmitted`` are in no total.
    """

    slot: int
    tier: Tier
    blocks: int
    position: int
    readmitted: bool = False


# --- breakpoints and holds ---


class BreakpointsChanged(Event, tag=28):
    """The breakpoints of ``owner`` are now exactly these (ids assigned).

    ``by`` is the client that changed them, empty for the owner itself. A breakpoint that is repeated unchanged stays as
    it is, armed or not.
    """

    owner: str
    specs: tuple[BreakpointSpec, ...]
    by: str = ""


class BreakpointHit(Event, tag=29):
    """Breakpoints matched at a site and took effect as ``action``; a hit disables a one-shot breakpoint."""

    breakpoints: tuple[int, ...]
    slot: int
    site: Site
    action: BreakpointAction
    message: str = ""


class SlotHeld(Event, tag=30):
    """A hold exists. The slot will stand still at ``point``, and the hold is pending until then."""

    hold: int
    slot: int
    site: Site
    point: WaitPoint
    breakpoints: tuple[int, ...]
    owner: str
    max_hold_ns: int
    suspend: Suspend = Suspend.SLOT
    on_timeout: OnTimeout = OnTimeout.CONTINUE


class HoldParked(Event, tag=31):
    """The held slot reached its waitable point and stands still."""

    hold: int


class HoldReleased(Event, tag=32):
    """The slot goes on."""

    hold: int
    slot: int
    why: HoldEnd
    by: str
    held_ns: int


class HoldDenied(Event, tag=33):
    """A hit could not hold (budget, already held, finished) and was logged instead."""

    slot: int
    site: Site
    why: str


class LeaseChanged(Event, tag=34):
    """The right of ``owner`` to keep slots waiting began or ended; ended, its breakpoints are disabled.

    ``back``: it was lost before, and the breakpoints that its end disabled are armed again.
    """

    owner: str
    live: bool
    back: bool = False


# --- the process, peers, faults ---


class ResetBegun(Event, tag=35):
    """A reset was asked for, or a drain ends; the events up to ``ResetDone`` return everything to the initial state.

    ``by`` is the client that asked for the reset, empty at the end of a drain.
    """

    mode: ResetMode
    by: str = ""


class ResetDone(Event, tag=36):
    """All metadata is clear, except places that a running copy still writes; the epoch is new."""

    mode: ResetMode
    epoch: int


class DrainBegun(Event, tag=37):
    """No new request is taken; when the last live request and the last copy have ended, a reset follows."""

    deadline_ns: int
    by: str = ""


class StimulusRejected(Event, tag=38):
    """The peer asked for something impossible; nothing changed."""

    entry: int
    request: str | None
    why: str


class CompletionRefused(Event, tag=39):
    """A duplicate or late report, or a report about an operation of an older epoch; only the count changed."""

    operation: int
    epoch: int
    rank: int
    why: str


class InvariantViolated(Event, tag=40):
    """The core caught itself in a mistake; the stimulus was refused with the facts unchanged."""

    rule: str
    detail: str
    story: tuple[str, ...]


class BlocksSeen(Event, tag=41):
    """An engine's event stream: blocks stored and removed, by hash, in a pool of authority ``stream``.

    ``stored`` is a row of chains: ``chains[i]`` blocks continue the block ``parents[i]``, 0 for the beginning of a
    prompt. Both are empty if unknown. The blocks at ``marked`` have more facts: ``contents`` are digests of their
    tokens alone, 0 if unknown, and ``contexts`` name LoRA, salt, images and session.

    ``again_blocks[i]`` stored blocks had been evicted here, less than ``again_within_ns[i]`` and
    ``again_within_blocks[i]`` further evictions before.

    The engine did this ``age_ns`` before the event, by the clocks of both: a replay tells of earlier steps. None if
    unknown. It is below 0 if the engine's clock is ahead. Steps within 50 ms may share an event, which then has the age
    of the last.
    """

    pool: int
    stored: Hashes
    removed: Hashes
    cleared: bool
    chains: Indices = b""
    parents: Hashes = b""
    marked: Indices = b""
    contents: Hashes = b""
    contexts: tuple[str, ...] = ()
    again_within_ns: tuple[int, ...] = ()
    again_within_blocks: tuple[int, ...] = ()
    again_blocks: tuple[int, ...] = ()
    age_ns: int | None = 0


class SourceLost(Event, tag=42):
    """Reports of a source were lost, or (``restarted``) the source began again; the content of its pools is unknown.

    ``gone``: the source ended. No more reports come from the source, and the content of its pools is no fact any more.
    ``replaceable``: pools that are declared later take over the indices of its pools.
    """

    source: int
    first: int
    last: int
    restarted: bool
    gone: bool = False
    replaceable: bool = False


class Noted(Event, tag=43):
    """Something about the process around the core."""

    note: Note
    detail: str


class BlocksQuarantined(Event, tag=44):
    """A reset found these places under a running copy: neither free nor resident until every rank has reported it."""

    pool: int
    operation: int
    ids: Ids
    reported: tuple[int, ...]


class BreakpointStopped(Event, tag=45):
    """A breakpoint was disabled without being asked to: it failed, cost too much, or its time was over."""

    breakpoint: int
    why: BreakpointEnd
    message: str


class SlotCaptured(Event, tag=46):
    """The values of a slot at a site: ``values[i]`` is the text of field ``names[i]`` of the expression language."""

    slot: int
    site: Site
    breakpoints: tuple[int, ...]
    names: tuple[str, ...]
    values: tuple[str, ...]


class Frozen(Event, tag=47):
    """Everything stands still: no candidate is evaluated, engines are paused, for ``max_hold_ns`` at most."""

    by: str
    max_hold_ns: int


class Thawed(Event, tag=48):
    """The freeze ended."""

    why: HoldEnd
    by: str
    held_ns: int


class PrefetchLimited(Event, tag=49):
    """Prefetch is ``limited`` to probes, or not any more: of ``judged`` fetched blocks ``used`` were used."""

    limited: bool
    used: int
    judged: int


class ContentMismatched(Event, tag=50):
    """A worker of rank ``rank`` found other bytes in a block than a store had taken. It looks at the end of a store
    (``stage`` copy) and when a load hands the block to the model (``load``).

    ``hashes`` is the block. ``place`` is its place on the device, ``below`` its slot in the host tier, and ``copy`` the
    number of the connector's store or load. ``kind`` is a word of ``sanitize``, ``edge`` the order that was missing,
    ``taken`` the store that the bytes should come from. ``slot`` is None when the request is not live.

    In stage ``tier`` a block came back from the tier ``writer`` with the sum ``edge`` and not ``taken``.
    """

    slot: int | None
    source: int
    request: str
    rank: int
    group: int
    hashes: Hashes
    kind: str
    stage: str
    place: int
    below: int
    copy: int
    writer: str
    edge: str
    taken: str


class EngineMeasured(Event, tag=51):
    """Numbers that an engine tells: ``measures[i]`` is ``values[i]``. They replace all earlier values of the source.

    A metrics page has counts and gauges, and a tap tells limits of the engine's settings. A number that the engine does
    not tell is absent. Without any number the engine's metrics cannot be read.
    """

    source: int
    measures: tuple[Measure, ...]
    values: tuple[int, ...]


class DeviceBlocksReplaced(Event, tag=52):
    """The slot uses these places from block ``first`` on, and gave up its own copies of the same content.

    An engine whose cache keeps each content once does this when two requests have computed the same blocks.
    """

    slot: int
    first: int
    ids: Ids


class ConnectorMeasured(Event, tag=53):
    """The connector of a watched engine has cost and reported this since the engine began.

    ``calls[i]`` calls of ``methods[i]`` of ``connectors[i]`` took ``total_ns[i]`` together and ``longest_ns[i]`` at
    most. ``stats[i]`` is a figure of the connector's own statistics, under its own name, with ``values[i]``.
    """

    source: int
    connectors: tuple[str, ...]
    methods: tuple[str, ...]
    calls: tuple[int, ...]
    total_ns: tuple[int, ...]
    longest_ns: tuple[int, ...]
    stats: tuple[str, ...]
    values: tuple[float, ...]


class CallBlocked(Event, tag=54):
    """A call of an engine into its connector took ``took_ns``, and the engine formed no step meanwhile.

    ``request`` is the request of the call, empty if the call is about no request. ``slot`` is None if it is not live.
    """

    slot: int | None
    source: int
    request: str
    connector: str
    method: str
    took_ns: int


class AuditDiffered(Event, tag=55):
    """An audit found that the engine's pool and the facts differ, so reports were wrong or lost.

    ``ids`` are the places that differ, with their ``hashes`` in the engine. A group whose places are not told has
    hashes alone. ``detail`` names the first difference.
    """

    pool: int
    ids: Ids
    hashes: Hashes
    detail: str


class UnknownKind(Event, tag=-1):
    """An event of a kind that this program does not know: a newer minor version wrote it.

    The event keeps its number, so no number is missing, and it changes no fact. Until the next keyframe or snapshot the
    facts may differ from the writer's. An event of a known kind never becomes an ``UnknownEvent``.
    """

    kind: int
    """The number of its kind in the newer version."""


AnyEvent = (
    PoolKnown | SlotOpened | SlotMoved | SlotClosed | SlotCloned | LookupAnswered | BlocksStaged | StagingReleased
    | DeviceBlocksAssigned | DeviceBlocksReleased | BlocksFilled | BlocksEvicted | BlocksReserved | BlocksReady
    | BlocksDropped | CandidatePlanned | CandidateEnqueued | CandidateEvaluated | CandidateSkipped | CandidatePromoted
    | OperationStarted | OperationReported | CandidateEnded | BatchEnded | IterationAdvanced | PrefixScored | HitsLost
    | BreakpointsChanged | BreakpointHit | SlotHeld | HoldParked | HoldReleased | HoldDenied | LeaseChanged
    | ResetBegun | ResetDone | DrainBegun | StimulusRejected | CompletionRefused | InvariantViolated | BlocksSeen
    | SourceLost | Noted | BlocksQuarantined | BreakpointStopped | SlotCaptured | Frozen | Thawed
    | PrefetchLimited | ContentMismatched | EngineMeasured | DeviceBlocksReplaced | ConnectorMeasured | CallBlocked
    | AuditDiffered
)
"""The closed union of events; decoding a batch is ``msgspec.msgpack.Decoder(list[AnyEvent])``."""
