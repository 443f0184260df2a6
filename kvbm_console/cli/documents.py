"""The JSON of every command, as types: the contract that JSON.md shows and that a test compares with real output.

A document that the library makes has its type there. The types here are those of documents that are put together as
plain values: the status document, answers of a few commands.

Law of this file: a key that a command prints is a field of its type, and each field is printed. Only a field whose
default is UNSET may be absent.
"""

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

INTERACTIVE: Final = {
    "attach": "it is a screen; `status` and `tail` tell a script the same",
    "dap": "it speaks the Debug Adapter Protocol; [editors](../../docs/editors.md) says what it can",
    "mcp": "it speaks the Model Context Protocol; [agents](../../docs/agents.md) lists its tools",
}
"""Commands without a document, and the reason."""
ELSEWHERE: Final = {
    "simulate": "keys and formulas are in [REFERENCE.md](../planning/REFERENCE.md); with `--vectors` an object of "
                "`file`, `vectors`, `failed` and `lines`",
    "tail": "one event a line (`--format jsonl`): `seq`, `at_ns`, `kind`, `cause` and the fields of that kind, see "
            "[all kinds](../../docs/kinds.md#all-kinds)",
}
"""Commands whose keys another generated document lists."""


class Slot(msgspec.Struct):
    """A live slot."""

    slot: str
    request: str
    state: str
    since_ns: int
    age_ns: int
    computed_tokens: int
    prompt_tokens: int
    outstanding: int
    """Candidates that are not terminal."""
    hold: str | None


class TierRow(msgspec.Struct):
    """A tier: the sum over the pools of all engines."""

    capacity_blocks: int | None
    """Null: an engine does not tell."""
    resident_blocks: int
    """Cached, referenced and writing."""
    referenced_blocks: int | None
    """Null, like the counts of writing, hits, lookups, thrash and asked again: only event streams report."""
    writing_blocks: int | None
    hits: int | None
    """In prompt blocks."""
    lookups: int | None
    """In prompt blocks."""
    uncertain: bool
    """Reports of an engine were lost."""
    evicted_blocks: int
    thrash_blocks: int | None
    """Came back within the window after their eviction."""
    thrash_rate: float | None
    """Thrash per evicted block; null without evictions."""
    asked_again_blocks: int | None
    """Prompt blocks that the tier had evicted."""
    asked_again_p50_ns: int | None
    """Half of them were asked for again at most so long after their eviction."""
    asked_again_p90_ns: int | None


class Thrash(msgspec.Struct):
    """Blocks that came back soon after their eviction, of all tiers."""

    window_ns: int | None
    """Null: unknown."""
    evicted_blocks: int
    thrash_blocks: int | None
    """Null: only event streams report."""
    thrash_rate: float | None


class PrefetchRow(msgspec.Struct):
    """Blocks that were copied from disk to host ahead of a look-up."""

    fetched_blocks: int
    used_blocks: int
    precision: float | None
    """Used per fetched block; null without any."""
    limits: int
    """Times that prefetching was limited to probes."""
    limited: bool


class OpenTransfer(msgspec.Struct):
    """A candidate that is not terminal."""

    operation: str | None
    """Null: not promoted."""
    candidate: str
    route: str
    blocks: int
    status: str


class BreakpointRow(msgspec.Struct):
    """A breakpoint with its specification."""

    id: str
    owner: str
    description: str
    enabled: bool
    site: str
    request: str
    from_state: str | None
    to_state: str | None
    tier: str | None
    route: str | None
    action: str
    one_shot: bool
    hits: int
    max_hold_ns: int
    name: str
    status: str | None
    condition: str
    ignore_count: int
    hit_condition: str
    log: str
    suspend: str
    depends_on: str | None
    on_timeout: str
    expires_ns: int
    persist: bool
    message: str
    """The reason for which it was disabled by itself."""


class HoldRow(msgspec.Struct):
    """A hold."""

    id: str
    slot: str
    request: str
    site: str
    point: str
    """The point at which it stands still."""
    owner: str
    breakpoints: list[str]
    pending: bool
    since_ns: int
    deadline_ns: int
    suspend: str
    on_timeout: str
    age_ns: int


class EndedHoldRow(msgspec.Struct):
    """A hold that ended or was refused."""

    id: str | None
    request: str
    site: str
    point: str | None
    at_ns: int
    held_ns: int
    why: str
    by: str
    text: str
    times: int


class FreezeState(msgspec.Struct):
    """A freeze."""

    by: str
    since_ns: int
    max_hold_ns: int


class Stream(msgspec.Struct):
    """The event stream of the daemon."""

    name: str
    head_seq: int
    """-1 before the first event."""
    epoch: int
    incarnation: str
    subscribers: int


class RecorderRow(msgspec.Struct):
    """The recorder of the daemon."""

    state: str
    written_seq: int
    synced_seq: int
    path: str
    bytes: int


class EngineRow(msgspec.Struct):
    """The cost of a tap to its engine."""

    source: str
    name: str
    calls: int
    dropped: int
    errors: int
    call_ns: int
    steps: int
    step_ns: int
    checked_blocks: int | UnsetType = UNSET
    """Blocks whose bytes ``sanitize`` compared; this and the next three are absent without it."""
    mismatched_blocks: int | UnsetType = UNSET
    unknown_blocks: int | UnsetType = UNSET
    """Blocks of loads whose store was not seen."""
    check_ns: int | UnsetType = UNSET
    audited_places: int | UnsetType = UNSET
    """Places of the engine's pool that were compared with ours; absent where the engine does not give its pool."""
    differing_places: int | UnsetType = UNSET


class PublisherRow(msgspec.Struct):
    """An event stream that is followed."""

    source: str
    name: str
    connected: bool
    batches: int
    gaps: int
    lost_batches: int
    restarts: int
    last_batch_ns: int | None
    """Null: no batch yet."""
    ended: bool
    """Its engine is gone."""
    metrics: str | None
    """Address of the engine's own metrics; null if unknown."""
    metrics_error: str | None
    """Why the last reading failed."""
    measures: dict[str, int]
    """The engine's own numbers. A number that it does not tell is absent; counters began with the engine."""


class PartRow(msgspec.Struct):
    """A task or thread of the daemon."""

    part: str
    healthy: bool
    ended: int
    """How often it ended without being asked to."""
    restarted: int
    why: str
    """Why it ended last; empty if it never did."""


class Status(msgspec.Struct):
    """A daemon's state now."""

    slots: list[Slot]
    tiers: dict[str, TierRow]
    """By `g1` to `g4`."""
    thrash: Thrash
    prefetch: PrefetchRow
    transfers: list[OpenTransfer]
    breakpoints: list[BreakpointRow]
    holds: list[HoldRow]
    ended_holds: list[EndedHoldRow]
    """The last 64, the newest last."""
    frozen: FreezeState | None
    stream: Stream
    recorder: RecorderRow | None
    engines: list[EngineRow]
    publishers: list[PublisherRow]
    parts: list[PartRow]
    warnings: list[str]
    """Of parts that are not healthy, or were restarted in the last five minutes."""


class Verdict(msgspec.Struct):
    """A breakpoint that was set."""

    id: str
    verified: bool
    message: str
    """The reason for which it cannot work."""
    holds: list[HoldRow] | UnsetType = UNSET
    """With `--wait`: the holds that stand still."""


class HitRow(msgspec.Struct):
    """One hit on a recording."""

    seq: int
    at_ns: int
    n: int
    slot: str
    request: str
    site: str
    from_state: str
    to_state: str
    message: str


class Tried(msgspec.Struct):
    """Breakpoints that were tried on a recording."""

    run: str
    """Its incarnation."""
    runs: int
    """How many the recording holds."""
    hits: int
    matches: int
    failed: str | None
    first: list[HitRow]


class FindingRow(msgspec.Struct):
    """One thing that needs a person."""

    lint: str
    level: str
    who: str
    what: str
    because: str
    seq: int
    evidence: list[int]
    request: str | None
    slot: str | None
    since_ns: int
    until_ns: int | None
    count: int
    threshold: str
    bad: str
    do: str


class Doctor(msgspec.Struct):
    """Findings that need a person."""

    evidence: str
    ok: bool
    events: int
    lost_events: int
    requests: int
    from_ns: int
    until_ns: int
    evicted_blocks: int
    thrash_blocks: int | None
    """Null: only event streams report."""
    thrash_rate: float | None
    findings: list[FindingRow]


class GapRow(msgspec.Struct):
    """Events that are missing."""

    first: int
    last: int
    reason: str
    bytes: int


class RecoveredRow(msgspec.Struct):
    """One segment that was recovered."""

    segment: str
    outcome: str
    torn_bytes: int
    first_seq: int
    last_seq: int
    gaps: list[GapRow]


class CellRow(msgspec.Struct):
    """One policy or preset at one capacity."""

    policy: str
    total_kv_blocks: int
    kv_cpu_blocks: int
    hits: int
    lookups: int
    hit_rate: float | None
    best: bool
    below_belady: float | None
    """The hit rate of belady - this one. With --cache-only belady is the optimum; with an engine it is a reference, and
    a machine that has more hits is negative here."""
    gap_closed: float | None
    """Share of the way from simple_lru to belady; null where belady is no better."""
    ttft_ms_mean: float | None
    evicted_blocks: int
    moved_bytes: int
    thrash_rate: float | None


class PairRow(msgspec.Struct):
    """One request in two cells."""

    request: str
    blocks: int
    hits_a: int
    hits_b: int
    why_a: str
    why_b: str


class Pairs(msgspec.Struct):
    """The requests whose hits differ most."""

    a: str
    b: str
    requests: list[PairRow]


class LruPoint(msgspec.Struct):
    """The exact LRU curve of a pool of so many blocks."""

    blocks: int
    hit_rate: float


class Comparison(msgspec.Struct):
    """A grid of runs."""

    schema: str
    trace: str
    limit: int | None
    seed: int | None
    cache_only: bool
    block_size: int | None
    kv_disk_blocks: int
    cells: list[CellRow]
    lru_curve: list[LruPoint] | None
    """With ``--cache-only``: what ``simple_lru`` has at every capacity, on a logarithmic scale."""
    per_request: Pairs | None


class Configuration(msgspec.Struct):
    """The settings in effect."""

    path: str
    exists: bool
    config: dict[str, dict[str, Any]]
    """Section to key to value."""


class ResetReport(msgspec.Struct):
    """A reset."""

    mode: str
    epoch: int
    aborted_requests: int
    quarantined_blocks: int


class ExploredFinding(msgspec.Struct):
    """One signature that an exploration found."""

    signature: str
    """Monitor and kind; the same for the same bug."""
    monitor: str
    sentence: str
    step: int
    """Scheduler step of the scenario in which the monitor ended the run."""
    times: int
    """Runs that ended so."""
    profile: str
    seed: int
    cpu_s: float
    """CPU seconds of all runs up to the first that ended so."""
    shrunk: bool
    """False: the scenario is as it was found."""
    scenario: dict[str, Any]
    """Sizes, actions and copies, as `scenario.json` has them."""
    directory: str | None
    """The directory that `--out` wrote."""
    recording: str | None
    """Its recording; null without `--out`, or where the tap does not fit."""


class Exploration(msgspec.Struct):
    """The counts and findings of an exploration."""

    release: str
    runs: int
    steps: int
    """Scheduler steps."""
    block_reads: int
    """Computed blocks that steps read and whose content was checked."""
    copied_blocks: int
    cpu_s: float
    pairs: int
    """(state, event) pairs that were seen."""
    left_out: dict[str, int]
    """Runs that the engine refuses, by its reason."""
    interrupted: bool
    findings: list[ExploredFinding]


class TierFill(msgspec.Struct):
    """How full a tier of a daemon is."""

    resident_blocks: int
    capacity_blocks: int | None


class ProblemRow(msgspec.Struct):
    """A problem of a daemon: a finding of `doctor`, or a part of the daemon that does not run."""

    level: str
    lint: str
    who: str
    what: str
    because: str
    request: str | None


class FleetRow(msgspec.Struct):
    """A daemon of a fleet."""

    target: str
    """Its address, or at a broker its name there."""
    name: str
    address: str
    """Where it listens."""
    stands: str
    """`fault`, `gone`, `held`, `caution` or `fine`."""
    error: str | None
    """Why the daemon did not answer."""
    silent_s: float
    """Seconds since its last answer."""
    hit_rate: float | None
    seq: int | None
    slots: dict[str, int]
    """Live slots by state."""
    holds: int
    tiers: dict[str, TierFill]
    problems: list[ProblemRow]
    """The worst first, at most eight and those of the daemon's parts."""
    passed_over_events: int
    """Events that its figures do not cover."""


class Quantiles(msgspec.Struct):
    """Nanoseconds, at most 2 % too high; null without a request."""

    p50: int | None
    p90: int | None
    p99: int | None


class MissingPrefix(msgspec.Struct):
    """A block from which prompts began to miss."""

    hash: str
    blocks: int
    """Blocks that were computed from here on."""
    error_blocks: int
    """At most so many of them belong to other blocks."""
    requests: int
    why: str
    lies_at: dict[str, list[str]]
    """Target of each daemon that holds the block, to its tiers."""


class FleetReuse(msgspec.Struct):
    """Prompt blocks by their reuse. The rest was computed, and nobody is known to have held it."""

    prompt_blocks: int
    delivered: int
    """Found in a cache of the request's daemon and used."""
    not_delivered: int
    """Found there, but their load failed."""
    not_captured: int
    """Missed behind one of the `missing` prefixes, while another daemon holds that block now."""


class FleetDocument(msgspec.Struct):
    """A fleet now: its daemons by need, and the sum of their requests as far back as each daemon remembers."""

    daemons: list[FleetRow]
    stands: dict[str, int]
    dropped_daemons: int
    """Daemons at a broker that have no row, because there are more than a view keeps."""
    prompt_blocks: int
    hit_blocks: dict[str, int]
    missed_blocks: int
    reuse: FleetReuse
    finished_requests: int
    preemptions: int
    first_token_ns: Quantiles
    latency_ns: Quantiles
    missing: list[MissingPrefix]


class Holder(msgspec.Struct):
    """A daemon that has the block or the request."""

    target: str
    tiers: list[str]
    slot: str | None
    state: str | None


class SilentDaemon(msgspec.Struct):
    """A daemon that did not answer."""

    target: str
    error: str


class WhoHas(msgspec.Struct):
    """With `--who-has`: the daemons that have a block or a request."""

    who_has: str
    daemons: list[Holder]
    silent: list[SilentDaemon]


def documents() -> dict[str, Any]:
    """Command to the type of its document, in the order of the help."""
    from kvbm_console.analysis.diff import Difference
    from kvbm_console.analysis.explain import Explanation
    from kvbm_console.analysis.export import Exported
    from kvbm_console.analysis.lake_files import Added
    from kvbm_console.analysis.lake_questions import LakeAnswer
    from kvbm_console.cases import RecordedCase
    from kvbm_console.cli.output import Answer
    from kvbm_console.cli.rec import Indexed
    from kvbm_console.cli.streams import Captured, Imported
    from kvbm_console.client.draining import DrainReport
    from kvbm_console.engines.conformance.rules import Conformance
    from kvbm_console.engines.dynamo import DynamoImported
    from kvbm_console.engines.witness import WitnessReport
    from kvbm_console.planning.calibrate import Calibration
    from kvbm_console.planning.links import LinkBench
    from kvbm_console.planning.plan import MachinePlan
    from kvbm_console.planning.what_if import Counterfactual
    from kvbm_console.recording.info import RecordingInfo
    from kvbm_console.recording.options import RecorderStatus
    from kvbm_console.recording.output import Made
    from kvbm_console.recording.verify import VerifyReport
    from server.summary import Summary

    verbs = ("break clear", "break disable", "break enable", "break load", "break save", "continue", "step", "skip",
             "run-for", "freeze", "thaw", "disarm", "config init")
    recorder = dict.fromkeys(("rec start", "rec stop", "rec rotate"), RecorderStatus)
    return {
        "demo": Summary, "serve": Summary, "status": Status, "fleet": FleetDocument | WhoHas,
        "replay": Status, "holds": list[HoldRow],
        "break list": list[BreakpointRow], "break set": Verdict, "break test": Tried, **dict.fromkeys(verbs, Answer),
        "reset": ResetReport, "drain": DrainReport, **recorder, "rec status": RecorderStatus | None, "rec dump": Made,
        "rec cut": Made, "rec merge": Made, "rec info": RecordingInfo, "rec verify": VerifyReport,
        "rec recover": list[RecoveredRow], "rec index": list[Indexed], "rec diff": Difference, "rec export": Exported,
        "rec import dynamo": DynamoImported, "rec import kv-events": Imported, "rec capture": list[Captured],
        "compare": Comparison, "plan": MachinePlan, "calibrate": Calibration, "bench links": LinkBench,
        "why": Explanation | Counterfactual,
        "doctor": Doctor | list[WitnessReport],
        "conform": list[Conformance], "explore vllm": Exploration, "explore leader": Exploration,
        "config show": Configuration, "case": list[RecordedCase], "lake add": list[Added], "lake ask": LakeAnswer,
    }
