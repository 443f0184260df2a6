"""``why REQUEST RUN --what-if``: the least change that would have spared a request its miss, preemption or wait.

The recording is replayed from its beginning with one change at a time, and the outcome of the request is read from the
replay. So each remedy was run, and so was the machine without a change: if its outcome is not the recorded one, the
document says so. For memory the least number of further blocks is searched, by doubling and halving.

A miss is avoided if the request finds as many blocks as with memory without end. No machine finds more, because the
other blocks are asked for the first time. A preemption is avoided if there is none. A wait is avoided if the first
token comes within a limit.

A change comes too late at some moment. Limits of an iteration and the offload threshold can change while an engine
runs, so for these the replay begins without the change and takes it on later: the last moment that still spares the
request is searched. Policies, retention and prefetch belong to the beginning.

The trouble is inevitable from the event on after which no change helps. Memory may grow at that moment, too, although
no engine can do that: each tier by as many blocks as the recording has, and by those of its remedy. A change that is
made before the moments of a replay helps up to some moment and not after it. So that moment is found by halving, for
one change after the other; a change that does not help after the latest moment so far costs one replay.

Law of this file: nothing is said that no replay showed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from kvbm_console.analysis.explain import Explanation, MissedRun
from kvbm_console.core import events as ev
from kvbm_console.core.describe import describe
from kvbm_console.core.errors import NotFound, UsageError
from kvbm_console.core.ids import SlotState
from kvbm_console.planning.connector import refusal
from kvbm_console.planning.meter import RequestRecord
from kvbm_console.planning.options import BATCH_MAX, BLOCKS_MAX, SimulateOptions
from kvbm_console.planning.plan import TIERS, Change, changes_of, with_fields
from kvbm_console.planning.recorded import RecordedLoad, RecordedWorkload, recording_of
from kvbm_console.planning.run import build_ledger

SCHEMA: Final = "kvbm-console.what-if/1"
DOUBLINGS: Final = 8
"""Memory of a tier is tried up to 256 times its size."""
LONG: Final = 2.0
"""A wait is long if it is so many times the median of the recording."""
LATER_NS: Final = 50_000_000
"""A replay in which the request ends later is looked at again after so much of its time."""
SWITCHABLE: Final = ("kv_offload_threshold", "max_num_seqs", "max_num_batched_tokens")
"""Options that can change while an engine runs."""
Spared = Callable[["ReplayedRequest"], bool]
Tell = Callable[[int, str], None]
"""Takes the number of a replay, from 1, and the flags that it changes; empty for the machine as it was."""


class ReplayedRequest(msgspec.Struct, frozen=True):
    """The outcome of a request in a replay."""

    hits: int
    """Prompt blocks found at its first admission."""
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
    """The event after which no change that was tried helps; null if it is not known."""
    inevitable_ns: int | None
    """Its engine time. A change that is made before everything of this time helps, and one that is made after it does
    not."""
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
    recorded_hits = next((sum(admission.hits) for admission in explanation.admissions if admission.admitted), 0)
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
        self.moments: list[int] = []
        """The times at which the machine as it was did something, up to the end of the request."""
        self.today = self._outcome(self._run(options, ""))
        sequences = ((request, 1 + len(request.clone_hashes)) for request in load.requests)
        self.endless = sum(
            ways * -(-(request.prompt_tokens + request.output_tokens) // load.block_tokens)
            for request, ways in sequences
        )
        """As many blocks as the recording has."""

    def _run(self, options: SimulateOptions, flags: str, before_ns: int | None = None) -> RequestRecord:
        """Replay with these options; with ``before_ns`` on the recorded machine up to this time, and not at it."""
        records: dict[str, RequestRecord] = {}
        if self.tell is not None:
            self.tell(self.tried + 1, flags)

        def ended(record: RequestRecord) -> None:
            records[record.request] = record

        first = options if before_ns is None else self.options
        workload = RecordedWorkload(self.load.name.partition(":")[2])
        ledger = build_ledger(first, workload, windows=False, ended=ended)
        if before_ns is not None:
            ledger.engine.run(before_ns - 1)
            ledger.change(options)
        if self.all:
            ledger.engine.run(self.moments[-1])
            while self.name not in records and ledger.engine.next_ns is not None:
                ledger.engine.run(ledger.engine.next_ns + LATER_NS)  # what comes behind its end cannot change it
        else:
            while (next_ns := ledger.engine.next_ns) is not None:
                self.moments.append(next_ns)
                ledger.engine.run(next_ns)
            ledger.run_to_end()
        self.tried += 1
        if self.name not in records:
            raise NotFound(f"the replay of {self.load.name} has no request {self.name!r}")
        if not self.all:
            self.all, record = records, records[self.name]
            del self.moments[bisect_right(self.moments, record.finished_ns or 0) :]
        return records[self.name]

    def _outcome(self, record: RequestRecord) -> ReplayedRequest:
        full = record.prompt_tokens // self.options.block_size
        ttft = None if record.first_token_ns is None else (record.first_token_ns - record.arrived_ns) / 1e6
        return ReplayedRequest(min(full, sum(record.hits)), record.preemptions, ttft)

    # --- troubles ---

    def miss(self, explanation: Explanation) -> Trouble | None:
        """The blocks that memory without end would have had."""
        endless = with_fields(self.options, memory=True, total_kv_blocks=self._more("total_kv_blocks", self.endless))
        most = self._outcome(self._run(endless.options, endless.flags)).hits
        asked = explanation.prompt_blocks
        if most <= self.today.hits:
            return None if self.today.hits >= asked else Trouble(
                "miss", f"found {self.today.hits} of {asked} blocks; memory without end finds no more", [], 1, None,
                None, "the other blocks are asked for the first time",
            )
        admissions = explanation.admissions
        first = next((admission for admission in admissions if admission.admitted), admissions[-1])
        lost = [run for run in first.misses if run.first is not None and run.first < most]
        return self._trouble(
            "miss", f"found {self.today.hits} of {asked} blocks, and {most} with memory without end",
            lambda outcome: outcome.hits >= most and not outcome.preemptions, lost,
        )

    def preemption(self) -> Trouble | None:
        """Preemptions of the request."""
        often = self.today.preemptions
        if not often:
            return None
        return self._trouble(
            "preemption", f"preempted {'once' if often == 1 else f'{often} times'}",
            lambda outcome: not outcome.preemptions,
        )

    def wait(self, limit_ms: float) -> Trouble | None:
        """A first token beyond the limit."""
        ttft_ms = self.today.ttft_ms
        if ttft_ms is None or ttft_ms <= limit_ms:
            return None
        return self._trouble(
            "wait", f"first token after {ttft_ms:,.1f} ms, with a limit of {limit_ms:,.1f} ms",
            lambda outcome: outcome.ttft_ms is not None and outcome.ttft_ms <= limit_ms,
        )

    def _trouble(
        self, kind: str, text: str, spared: Spared, lost: Sequence[MissedRun] = ()
    ) -> Trouble:
        """The remedies, and the event after which there is none. ``lost`` are the missed blocks that could be found."""
        began = self.tried
        found = self._remedies(spared)
        seq, at_ns, words = self._inevitable(spared, [change for change, _ in found], lost)
        return Trouble(kind, text, [remedy for _, remedy in found], self.tried - began, seq, at_ns, words)

    # --- remedies ---

    def _remedies(self, spared: Spared) -> list[tuple[Change, Remedy]]:
        found = []
        for change in self._rules():
            outcome = self._outcome(self._run(change.options, change.flags))
            if spared(outcome):
                found.append((change, self._remedy(change, outcome, self._latest(change, spared))))
        sooner: dict[str, Any] = {"kv_offload_threshold": 0.0}
        enough = with_fields(self.options, **sooner).flags in [change.flags for change, _ in found]
        for field in TIERS.values():
            more = self._least(field, spared)
            if more is None and field != "total_kv_blocks" and self.options.kv_offload_threshold and not enough:
                more = self._least(field, spared, **sooner)  # a block must be copied to be kept below
            if more is not None:
                found.append(more)
        return sorted(found, key=lambda pair: (pair[1].memory_bytes, pair[1].flags))

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

    def _more(self, field: str, blocks: int) -> int:
        """The capacity of this tier with so many further blocks."""
        now: int = getattr(self.options, field)
        return min(BLOCKS_MAX, now + blocks)

    def _least(self, field: str, spared: Spared, **also: Any) -> tuple[Change, Remedy] | None:
        """The fewest further blocks of a tier, found by doubling and then halving; None if none help."""

        def tried(more: int) -> tuple[Change, ReplayedRequest]:
            change = with_fields(self.options, memory=True, **{field: self._more(field, more)}, **also)
            return change, self._outcome(self._run(change.options, change.flags))

        if refusal(msgspec.structs.replace(self.options, **{field: self._more(field, 1)})) is not None:
            return None
        low, high = 0, max(1, (getattr(self.options, field) or self.options.total_kv_blocks) // 16)
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
        return best[0], self._remedy(best[0], best[1], None)

    # --- moments ---

    def _latest(self, change: Change, spared: Spared) -> int | None:
        """The latest time at which the change still helps; None if it cannot change while an engine runs."""
        if not self._changed(change) <= set(SWITCHABLE) or not self._helps(change, spared, 0):
            return None
        if change.options.connects != self.options.connects:
            return None  # a connector does not become a leader while the engine runs
        return self.moments[self._last(change, spared, 0)]

    def _changed(self, change: Change) -> set[str]:
        """The fields that differ from the machine as it was."""
        fields = self.options.__struct_fields__
        return {field for field in fields if getattr(change.options, field) != getattr(self.options, field)}

    def _helps(self, change: Change, spared: Spared, moment: int) -> bool:
        """True if the change spares the request when it is made before this moment and behind the moment before it."""
        return spared(self._outcome(self._run(change.options, change.flags, self.moments[moment])))

    def _last(self, change: Change, spared: Spared, low: int, guess: int = 0) -> int:
        """The last moment before which the change helps; it helps before ``low``. ``guess`` is looked at first."""
        high, middles = len(self.moments), [guess, guess + 1]
        while high - low > 1:
            middle = middles.pop(0) if middles else (low + high) // 2
            if not low < middle < high:
                continue
            if self._helps(change, spared, middle):
                low = middle
            else:
                high = middle
        return low

    def _of_a_moment(self, remedies: Sequence[Change]) -> Iterator[Change]:
        """The changes that can be made at a moment, if memory could grow while an engine runs."""
        tiers = [field for field in TIERS.values() if getattr(self.options, field)]
        for field in tiers:
            more = {field: self._more(field, self.endless)}
            yield with_fields(self.options, memory=True, **more)
            if field != "total_kv_blocks" and self.options.kv_offload_threshold:
                yield with_fields(self.options, memory=True, **more, kv_offload_threshold=0.0)
        possible = {*tiers, *SWITCHABLE}
        for change in (*self._rules(), *(change for change in remedies if change.memory)):
            if self._changed(change) <= possible:
                yield change

    def _inevitable(
        self, spared: Spared, remedies: Sequence[Change], lost: Sequence[MissedRun]
    ) -> tuple[int | None, int | None, str]:
        """Number and time of the event after which no change helps, and a sentence."""
        guess = bisect_left(self.moments, min((run.at_ns for run in lost if run.at_ns is not None), default=0))
        last, helped = -1, ""
        for change in self._of_a_moment(remedies):
            if last + 1 < len(self.moments) and self._helps(change, spared, last + 1):
                last, helped = self._last(change, spared, last + 1, guess), change.flags
        if last < 0:
            return None, None if not remedies else 0, (
                "from the beginning on: no change helps that a machine takes while it runs" if remedies
                else "no change that was tried avoids it"
            )
        at_ns = self.moments[last]
        event = self._event_at(at_ns) if self.load.exact else None
        words = next((f": block {run.first} {run.text}" for run in lost if run.at_ns == at_ns), "") or (
            "" if event is None else f": {describe(event)}"
        )
        seconds = f"{at_ns / 1e9:.3f} s"
        begin = f"{seconds} of the replay" if event is None else f"event {event.seq:,} at {seconds}"
        told = f"from {begin} on{words}; before it, {helped} would have helped"
        return None if event is None else event.seq, at_ns, told

    def _event_at(self, at_ns: int) -> ev.Event | None:
        """The event of this time that tells most; None if there is none."""
        found = [
            event for batch in recording_of(self.load.name.partition(":")[2]).events() for event in batch
            if event.at_ns == at_ns
        ]
        return min(found, key=_telling, default=None)


def _telling(event: ev.Event) -> tuple[int, int]:
    """Order of events at one time: losses, then preemptions and admissions, then the first."""
    kinds = (ev.BlocksEvicted, ev.SlotMoved, ev.PrefixScored)
    lost = isinstance(event, ev.SlotMoved) and event.new is not SlotState.PREEMPTED
    return (len(kinds) if lost or type(event) not in kinds else kinds.index(type(event))), event.seq
