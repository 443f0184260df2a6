"""``why REQUEST RUN --what-if``: the least change that would have spared a request its miss, preemption or wait.

The recording is replayed from its beginning with one change at a time, and the outcome of the request is read from the
replay. So each remedy was run, and so was the machine without a change: if its outcome is not the recorded one, the
document says so. For memory the least number of further blocks is searched, by doubling and halving.

A miss is avoided if the request finds as many blocks as with memory without end. No machine finds more, because the
other blocks are asked for the first time. A preemption is avoided if there is none. A wait is avoided if the first
token comes within a limit.

A change comes too late at some moment. Limits of an iteration and the offload threshold can change while an engine
runs, so for these the replay begins without the change and takes it on later: the last moment that still spares the
request is searched. Capacities and policies belong to the beginning. A miss is inevitable for every change from the
event on by which the last copy of its first block was lost, as ``why`` names it.

Law of this file: nothing is said that no replay showed, except the event of a miss.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from kvbm_console.analysis.explain import Explanation
from kvbm_console.core.errors import NotFound, UsageError
from kvbm_console.planning.meter import RequestRecord
from kvbm_console.planning.options import BATCH_MAX, BLOCKS_MAX, SimulateOptions
from kvbm_console.planning.plan import TIERS, Change, changes_of, with_fields
from kvbm_console.planning.recorded import RecordedLoad, RecordedWorkload
from kvbm_console.planning.run import build_ledger
from kvbm_console.planning.tiered import TieredLedger

SCHEMA: Final = "kvbm-console.what-if/1"
DOUBLINGS: Final = 8
"""Memory of a tier is tried up to 256 times its size."""
HALVINGS: Final = 6
"""A moment is found within a sixty-fourth of the time from the begin to the outcome."""
ENDLESS_BLOCKS: Final = 2**22
"""A device that evicts nothing of a recording that is replayed within minutes."""
LONG: Final = 2.0
"""A wait is long if it is so many times the median of the recording."""
SWITCHABLE: Final = ("kv_offload_threshold", "max_num_seqs", "max_num_batched_tokens")
"""Options that can change while an engine runs."""
Tell = Callable[[int, str], None]
"""Takes the number of a replay, from 1, and the flags that it changes; empty for the machine as it was."""


class ReplayedRequest(msgspec.Struct, frozen=True):
    """The outcome of a request in a replay."""

    hits: int
    """Prompt blocks found at its last admission."""
    preemptions: int
    ttft_ms: float | None
    """Null without a first token."""


class Remedy(msgspec.Struct, frozen=True):
    """A change that spares the request its trouble."""

    flags: str
    outcome: ReplayedRequest
    more_blocks: int
    """Further blocks of all tiers, 0 for a change without memory."""
    memory_bytes: int
    latest_ns: int | None
    """Engine time until which the change could be made while the engine runs; null if it belongs to the beginning."""


class Trouble(msgspec.Struct, frozen=True):
    """A trouble of the request, and the remedies that replays found, least memory first."""

    kind: str
    """``miss``, ``preemption`` or ``wait``."""
    text: str
    remedies: list[Remedy]
    tried: int
    """Replays."""
    inevitable_seq: int | None
    """The event from which on no change helps; null if it is not known."""
    inevitable_ns: int | None
    inevitable: str
    """The same as a sentence."""


class Counterfactual(msgspec.Struct, frozen=True):
    """The document of ``why --what-if``."""

    schema: str
    request: str
    trace: str
    notes: list[str]
    """Limits of the replay."""
    recorded_hits: int
    replayed: ReplayedRequest
    alike: bool
    """True if the replay without a change finds as many blocks as were recorded."""
    limit_ms: float
    """The time to the first token that counts as no wait."""
    troubles: list[Trouble]


def what_if(
    load: RecordedLoad, explanation: Explanation, within_ns: int | None = None, tell: Tell | None = None
) -> Counterfactual:
    """Search the remedies of the request that is explained. ``within_ns`` limits its time to the first token; None
    stands for twice the median of the recording. ``tell`` hears about each replay before it begins.

    Raises ``NotFound`` if the replay never admits it, and ``UsageError`` for a clone.
    """
    name = explanation.request
    if explanation.clone is not None:
        raise UsageError(f"{name} is a clone, which looks nothing up: ask for {explanation.clone.parent}")
    options = SimulateOptions(trace=load.name, **load.option_fields())
    search = _Search(load, options, name, tell)
    times = sorted(
        record.first_token_ns - record.arrived_ns for record in search.all.values() if record.first_token_ns is not None
    )
    limit_ns = within_ns if within_ns is not None else round(LONG * times[len(times) // 2]) if times else 0
    admitted = [admission for admission in explanation.admissions if admission.admitted]
    recorded_hits = sum(admitted[-1].hits) if admitted else 0
    today = search.today
    troubles = [
        trouble for trouble in (
            search.miss(explanation), search.preemption(), search.wait(limit_ns / 1e6),
        ) if trouble is not None
    ]
    return Counterfactual(
        SCHEMA, name, load.name, [*load.notes, *([] if load.exact else ["the machine is an estimate"])],
        recorded_hits, today, recorded_hits == today.hits, limit_ns / 1e6, troubles,
    )


class _Search:
    """Replays of one request."""

    def __init__(self, load: RecordedLoad, options: SimulateOptions, name: str, tell: Tell | None = None) -> None:
        self.tell = tell
        self.load = load
        self.options = options
        self.name = name
        self.tried = 0
        self.all: dict[str, RequestRecord] = {}
        self.today = self._outcome(self._run(options, ""))

    def _run(self, options: SimulateOptions, flags: str, switch_ns: int | None = None) -> RequestRecord:
        """Replay with these options; with ``switch_ns`` on the recorded machine up to this time."""
        records: dict[str, RequestRecord] = {}
        if self.tell is not None:
            self.tell(self.tried + 1, flags)

        def ended(record: RequestRecord) -> None:
            records[record.request] = record

        first = options if switch_ns is None else self.options
        workload = RecordedWorkload(self.load.name.partition(":")[2])
        ledger = build_ledger(first, workload, windows=False, ended=ended)
        if switch_ns is not None:
            ledger.engine.run(switch_ns)
            config = msgspec.structs.replace(
                ledger.engine.config, max_batch_tokens=options.max_num_batched_tokens,
                max_running=options.max_num_seqs,
            )
            ledger.engine.config = ledger.engine.scheduler.config = config
            if isinstance(ledger, TieredLedger):
                ledger.leader.config = options.leader_config()
        ledger.run_to_end()
        self.tried += 1
        if not self.all:
            self.all = records
        if self.name not in records:
            raise NotFound(f"the replay of {self.load.name} has no request {self.name!r}")
        return records[self.name]

    def _outcome(self, record: RequestRecord) -> ReplayedRequest:
        full = record.prompt_tokens // self.options.block_size
        ttft = None if record.first_token_ns is None else (record.first_token_ns - record.arrived_ns) / 1e6
        return ReplayedRequest(min(full, sum(record.hits)), record.preemptions, ttft)

    # --- troubles ---

    def miss(self, explanation: Explanation) -> Trouble | None:
        """The blocks that memory without end would have had."""
        endless = with_fields(self.options, memory=True, total_kv_blocks=ENDLESS_BLOCKS)
        most = self._outcome(self._run(endless.options, endless.flags)).hits
        asked = explanation.prompt_blocks
        if most <= self.today.hits:
            return None if self.today.hits >= asked else Trouble(
                "miss", f"found {self.today.hits} of {asked} blocks; memory without end finds no more", [], 1, None,
                None, "the other blocks are asked for the first time",
            )
        began = self.tried
        remedies = self._remedies(lambda outcome: outcome.hits >= most and not outcome.preemptions)
        seq, at_ns, words = _lost(explanation)
        return Trouble(
            "miss", f"found {self.today.hits} of {asked} blocks, and {most} with memory without end", remedies,
            self.tried - began, seq, at_ns, words,
        )

    def preemption(self) -> Trouble | None:
        """Preemptions of the request."""
        if not self.today.preemptions:
            return None
        began = self.tried
        remedies = self._remedies(lambda outcome: not outcome.preemptions)
        return Trouble(
            "preemption", f"preempted {self.today.preemptions} times", remedies, self.tried - began,
            *self._too_late(remedies),
        )

    def wait(self, limit_ms: float) -> Trouble | None:
        """A first token beyond the limit."""
        ttft_ms = self.today.ttft_ms
        if ttft_ms is None or ttft_ms <= limit_ms:
            return None
        began = self.tried
        remedies = self._remedies(lambda outcome: outcome.ttft_ms is not None and outcome.ttft_ms <= limit_ms)
        return Trouble(
            "wait", f"first token after {ttft_ms:,.1f} ms, with a limit of {limit_ms:,.1f} ms", remedies,
            self.tried - began, *self._too_late(remedies),
        )

    def _too_late(self, remedies: Sequence[Remedy]) -> tuple[None, int | None, str]:
        """The moment after which no change of a running engine helps."""
        latest = [remedy.latest_ns for remedy in remedies if remedy.latest_ns is not None]
        if not remedies:
            return None, None, "no change that was tried avoids it"
        if not latest:
            return None, 0, "from the beginning on, for a machine whose memory and policy do not change while it runs"
        return None, max(latest), f"after {max(latest) / 1e9:.3f} s no change of a running engine that was tried helps"

    # --- remedies ---

    def _remedies(self, spared: Callable[[ReplayedRequest], bool]) -> list[Remedy]:
        found = []
        for change in self._rules():
            outcome = self._outcome(self._run(change.options, change.flags))
            if spared(outcome):
                found.append(self._remedy(change, outcome, self._latest(change, spared)))
        for field in TIERS.values():
            more = self._least(field, spared)
            if more is None and field != "total_kv_blocks" and self.options.kv_offload_threshold:
                more = self._least(field, spared, kv_offload_threshold=0.0)  # a block must be copied to be kept below
            if more is not None:
                found.append(more)
        return sorted(found, key=lambda remedy: (remedy.memory_bytes, remedy.flags))

    def _rules(self) -> Iterator[Change]:
        """Changes without memory."""
        yield from (change for change in changes_of(self.options) if not change.memory)
        engine = self.load.machine.engine
        for field, now in (("max_num_seqs", engine.max_running), ("max_num_batched_tokens", engine.max_batch_tokens)):
            for value in (now // 4, now // 2, 2 * now, 4 * now):
                fields: dict[str, Any] = {field: value}
                if 1 <= value <= BATCH_MAX:
                    yield with_fields(self.options, **fields)

    def _remedy(self, change: Change, outcome: ReplayedRequest, latest_ns: int | None) -> Remedy:
        more = sum(getattr(change.options, field) - getattr(self.options, field) for field in TIERS.values())
        return Remedy(change.flags, outcome, more, more * self.options.block_bytes, latest_ns)

    def _least(self, field: str, spared: Callable[[ReplayedRequest], bool], **also: Any) -> Remedy | None:
        """The fewest further blocks of a tier, found by doubling and then halving; None if none help."""
        now = getattr(self.options, field)

        def tried(more: int) -> tuple[Change, ReplayedRequest]:
            change = with_fields(self.options, memory=True, **{field: min(BLOCKS_MAX, now + more)}, **also)
            return change, self._outcome(self._run(change.options, change.flags))

        low, high = 0, max(1, (now or self.options.total_kv_blocks) // 16)
        best: tuple[Change, ReplayedRequest] | None = None
        for _ in range(DOUBLINGS):
            attempt = tried(high)
            if spared(attempt[1]):
                best = attempt
                break
            low, high = high, 2 * high
        if best is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            attempt = tried(middle)
            if spared(attempt[1]):
                best, high = attempt, middle
            else:
                low = middle
        return self._remedy(best[0], best[1], None)

    def _latest(self, change: Change, spared: Callable[[ReplayedRequest], bool]) -> int | None:
        """The latest time at which the change still helps; None if it cannot change while an engine runs."""
        options = change.options
        changed = {
            field for field in options.__struct_fields__ if getattr(options, field) != getattr(self.options, field)
        }
        if not changed <= set(SWITCHABLE):
            return None
        record = self.all[self.name]
        low, high = 0, record.first_token_ns or record.finished_ns or 0
        if not spared(self._outcome(self._run(options, change.flags, low))):
            return None
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            if spared(self._outcome(self._run(options, change.flags, middle))):
                low = middle
            else:
                high = middle
        return low


def _lost(explanation: Explanation) -> tuple[int | None, int | None, str]:
    """The event by which the first missed block of the first admission was lost."""
    for admission in explanation.admissions:
        for run in admission.misses:
            if run.seq is None:
                return None, None, f"{run.text}: the event is not in the recording"
            at = "" if run.at_ns is None else f" at {run.at_ns / 1e9:.3f} s"
            return run.seq, run.at_ns, f"from event {run.seq}{at} on: {run.text}"
    return None, None, "no admission of the recording missed a block"
