"""Verification: a recording against itself, and against today's leader.

*State replay* folds the recorded events from each keyframe on, audits the invariants on the way and compares the facts
with every later keyframe. *Decision replay* feeds the recorded stimuli to a leader restored from a complete keyframe
and compares its events and its memory with the recorded ones.

Law of this file: a replay stops at the first difference and names it. A stretch that could not be compared never counts
as equal.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.audit import Lineage, Violation, audit, quick_audit
from kvbm_console.core.errors import CorruptRecording, KvbmConsoleError
from kvbm_console.core.events import DECIDES_SINCE, Event, InvariantViolated, UnknownKind
from kvbm_console.core.leader import Leader
from kvbm_console.core.leader.memory import LiveMemory
from kvbm_console.core.snapshots import digest
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import (
    FOLD_ERRORS,
    decode_events,
    decode_keyframe,
    decode_state,
    decode_stimuli,
    fold,
)
from kvbm_console.recording.format import Frame, Gap, Keyframe, SegmentEnd
from kvbm_console.recording.reader import MISSING, Recording
from kvbm_console.recording.segments import SealedSegment
from kvbm_console.stream.document import field_text
from kvbm_console.wire.batches import NewerSchema

AUDIT_ALL_BELOW: Final = 5_000
"""Up to this many events the facts are audited after every stimulus."""
AUDITS: Final = 200
"""Full audits of a longer recording, spread evenly; each walks every place. The cheap checks run after every
stimulus."""

Progress = Callable[[str, int, int], None]
"""(step, events done, events in all)."""


class VerifyReport(msgspec.Struct, frozen=True):
    """The document of ``rec verify``: a stable contract."""

    path: str
    ok: bool
    first_difference: str | None
    events: int
    """Events that were folded."""
    stimuli: int
    """Stimuli that were rerun and whose events were compared."""
    not_folded: int
    """Events behind a gap and in front of the next keyframe."""
    not_rerun: int
    """Stimuli without a complete keyframe to start from."""
    keyframes: int
    audits: int
    gaps: int
    missing: int
    """Events in gaps."""
    digest: str | None
    """The digest of the facts behind the last event; None when they are unknown."""
    decisions: bool = True
    """False when only the state was replayed: no stimuli have a complete keyframe in front, or it is ``older``."""
    unknown: int = 0
    """Events of kinds that only a newer version knows: passed over, and nothing compared until the next keyframe."""
    run: str = ""
    """Incarnation of the run."""
    findings: list[str] = []
    """Segments that were removed from this run and, in the report of a directory, segments that cannot be read."""
    earlier: "list[VerifyReport]" = []
    """The same for every earlier run of the directory, oldest first. ``ok`` covers them."""
    older: str = ""
    """The format of a recording whose leader decided by other rules (before ``DECIDES_SINCE``)."""


class _Difference(Exception):
    """Raised to end the verification; the text is the first difference."""


def verify(path: Path, progress: Progress | None = None) -> VerifyReport:
    """Replay every run of a recording by state and by decision.

    The report is that of the last run, with those of the earlier ones inside. Raises ``RecordingError`` when the last
    run cannot be read.
    """
    recording = Recording.open(path)
    report = _verified(recording, progress)
    earlier = [_earlier(path, run, progress) for run in recording.runs if run != recording.incarnation]
    unreadable = [f"{file.name} cannot be read: {error}" for file, error in recording.unreadable.items()]
    findings = report.findings + unreadable
    ok = report.ok and not findings and all(each.ok for each in earlier)
    return msgspec.structs.replace(report, ok=ok, findings=findings, earlier=earlier)


def _earlier(path: Path, run: str, progress: Progress | None) -> VerifyReport:
    """The report of an earlier run; damage is its first difference."""
    try:
        return _verified(Recording.open(path, run), progress)
    except CorruptRecording as error:
        return VerifyReport(str(path), False, str(error), 0, 0, 0, 0, 0, 0, 0, 0, None, run=run)


def _verified(recording: Recording, progress: Progress | None) -> VerifyReport:
    for segment in recording.segments:
        if isinstance(segment, SealedSegment):
            segment.verify_bytes()
    run = _Verification(recording, progress)
    difference: str | None = None
    try:
        run.run()
    except _Difference as error:
        difference = str(error)
    state = run.state
    removed = [
        f"events {gap.first} to {gap.last} are missing: a segment was removed"
        for gap in recording.gaps if gap.reason == MISSING
    ]
    if recording.path.is_dir() and recording.cut_off:
        removed.append(f"every segment behind event {recording.last_seq} was removed")
    about = recording.segments[0].about
    return VerifyReport(
        str(recording.path), difference is None and not removed, difference, run.events, run.stimuli, run.not_folded,
        run.not_rerun, run.keyframes, run.audits, len(recording.gaps), sum(gap.count for gap in recording.gaps),
        None if state is None or difference is not None else f"{digest(state):016x}", run.stimuli > 0,
        run.unknown, recording.incarnation, removed, older="" if run.decides else f"{about.major}.{about.minor}",
    )


class _Verification:
    def __init__(self, recording: Recording, progress: Progress | None) -> None:
        self.recording = recording
        self.path = recording.path
        self.progress = progress
        self.total = recording.events_count
        self.audit_every = 1 if self.total <= AUDIT_ALL_BELOW else self.total // AUDITS
        self.state: CacheState | None = None
        self.leader: Leader | None = None
        self.next_n: int | None = None
        self.decided: deque[Event] = deque()
        self.pending: list[Stimulus] = []
        """Stimuli whose events come next in the file."""
        self.finished = False
        self.events = self.stimuli = self.not_folded = self.not_rerun = self.keyframes = self.audits = 0
        self.unknown = 0
        self.decides = recording.segments[0].about.minor >= DECIDES_SINCE
        self.doubtful = False
        """An event was passed over: the facts are the writer's again from the next keyframe on."""
        self._audited = 0
        self._lineage = Lineage(loose=recording.config.eviction.by_request)
        self._of_stimulus: list[Event] = []
        """Events of the last stimulus that was folded."""

    def run(self) -> None:
        handlers = {
            fmt.EVENTS: self._events, fmt.STIMULI: self._stimuli, fmt.KEYFRAMES: self._keyframe, fmt.MARKS: self._mark,
        }
        for frame in self.recording.frames():
            handler = handlers.get(frame.channel)
            if handler is not None:
                handler(frame)
        self._rerun([])
        if self.state is not None:
            self._stimulus_ends(self.state)
            self._audit(self.state)
        # Events that a killed writer did not record are no difference, but events that a closed recording lacks are.
        if self.finished and self.decided:
            event = self.decided[0]
            raise self._surplus(event, "its end")

    # --- frames ---

    def _keyframe(self, frame: Frame) -> None:
        keyframe = decode_keyframe(frame, self.path)
        self.keyframes += 1
        if self.state is None or self.doubtful:
            self.doubtful = False
            self.state = decode_state(keyframe, self.path)
            self._audit(self.state)
        elif digest(self.state) != digest(decode_state(keyframe, self.path)):  # encoded again: fields may be new since
            raise _Difference(f"event {frame.first_seq - 1}: the folded facts differ from the keyframe behind it")
        if not keyframe.complete or not self.decides:
            return
        if self.leader is None:
            self.leader = self._restored(keyframe)
            self.next_n = None
            self.decided.clear()
            return
        self._rerun([])
        if self.decided:
            raise self._surplus(self.decided[0], "a keyframe")
        if self.leader.export() != self._memory(keyframe):
            raise _Difference(f"event {frame.first_seq - 1}: the leader's memory differ from the keyframe behind it")

    def _memory(self, keyframe: fmt.Keyframe) -> bytes:
        """The memory of a keyframe as today's code writes it: it may know more fields."""
        try:
            return LiveMemory.restore(keyframe.memory, decode_state(keyframe, self.path).pools).export()
        except msgspec.DecodeError as error:
            raise CorruptRecording(f"{self.path}: the memory at event {keyframe.seq} cannot be read: {error}") from None

    def _restored(self, keyframe: Keyframe) -> Leader:
        try:
            return Leader.restore(self.recording.config, keyframe.facts, keyframe.memory)
        except (*FOLD_ERRORS, msgspec.MsgspecError) as error:
            raise CorruptRecording(
                f"{self.path}: the leader cannot go on from the keyframe at event {keyframe.seq}: {error}"
            ) from None

    def _mark(self, frame: Frame) -> None:
        mark = fmt.decode_mark(frame.data)
        if isinstance(mark, SegmentEnd):
            self.finished = not mark.more
        elif isinstance(mark, Gap):
            self.leader = None
            self.decided.clear()
            self.pending.clear()
            if mark.count and self.state is not None:
                self._audit(self.state)
                self.state = None
                self._of_stimulus.clear()

    def _stimuli(self, frame: Frame) -> None:
        try:
            stimuli = decode_stimuli(frame, self.path)
        except NewerSchema:
            self._undecidable(max(frame.count, 1))
            return
        if self.leader is None:
            self.not_rerun += len(stimuli)
            return
        if self.next_n is not None and stimuli[0].n != self.next_n:
            raise _Difference(f"stimulus {stimuli[0].n} follows stimulus {self.next_n - 1} without a gap between them")
        self.next_n = stimuli[-1].n + 1
        self.pending += stimuli
        self.stimuli += len(stimuli)

    def _undecidable(self, stimuli: int) -> None:
        """Today's leader cannot be compared with the recorded leader until the next complete keyframe."""
        self.not_rerun += stimuli
        self.leader = None
        self.pending.clear()
        self.decided.clear()

    def _rerun(self, events: list[Event]) -> None:
        """Let the leader decide the pending stimuli. A bug that the recorded run met and undid is undone here too."""
        leader = self.leader
        pending, self.pending = self.pending, []
        if leader is None or not pending:
            return
        undone = {event.cause: event for event in events if isinstance(event, InvariantViolated)}
        for stimulus in pending:
            violated = undone.get(stimulus.n)
            if violated is not None:
                leader.state.apply(violated)
                self.decided.append(violated)
                continue
            try:
                self.decided.extend(leader.handle(stimulus).events)
            except (KvbmConsoleError, LookupError, ValueError, TypeError, AttributeError) as error:
                sentence = (str(error).splitlines() or [""])[0]
                raise _Difference(
                    f"stimulus {stimulus.n} ({type(stimulus).__name__}): the leader now raises "
                    f"{type(error).__name__}: {sentence}"
                ) from error

    def _events(self, frame: Frame) -> None:
        events = decode_events(frame, self.path)
        unknown = sum(type(event) is UnknownKind for event in events)
        if unknown:
            self.unknown += unknown
            self.doubtful = True
            self._of_stimulus.clear()
            self.stimuli -= len(self.pending)
            self._undecidable(len(self.pending))
        if self.leader is not None:
            self._rerun(events)
            self._compare(events)
        state = self.state
        if state is None:
            self.not_folded += len(events)
            return
        if self.doubtful:
            if not self._fold_doubtful(state, events):
                return
        else:
            self._fold(state, events)
        self.events += len(events)
        if self.progress is not None:
            self.progress("verify", self.events, self.total)

    def _fold_doubtful(self, state: CacheState, events: list[Event]) -> bool:
        """Fold behind an event that was passed over; an event that no longer fits makes the facts unknown."""
        try:
            fold(state, events, self.path)
        except CorruptRecording:
            self.not_folded += len(events)
            self.state = None
            return False
        return True

    def _fold(self, state: CacheState, events: list[Event]) -> None:
        start = 0
        for index, event in enumerate(events):
            # Between the events of one stimulus an invariant may be open: audit where the cause changes.
            if event.cause != (events[index - 1].cause if index else state.n):
                self._apply(state, events[start:index])
                start = index
                self._stimulus_ends(state)
                self._audited += 1
                if self._audited >= self.audit_every or quick_audit(state.pools):
                    self._audit(state)
        self._apply(state, events[start:])

    def _apply(self, state: CacheState, events: list[Event]) -> None:
        try:
            fold(state, events, self.path)
        except CorruptRecording as error:
            raise _Difference(str(error)) from error
        self._of_stimulus += events

    def _stimulus_ends(self, state: CacheState) -> None:
        self._found(self._lineage.saw(self._of_stimulus, state), state)
        self._of_stimulus.clear()

    # --- comparisons ---

    def _compare(self, events: list[Event]) -> None:
        decided = self.decided
        for event in events:
            if not decided:
                raise _Difference(
                    f"stimulus {event.cause}, event {event.seq}: the recording has {_name(event)}, "
                    "and the leader now decides nothing more"
                )
            mine = decided.popleft()
            if mine != event or type(mine) is not type(event):
                raise _Difference(_describe(event, mine))

    def _surplus(self, event: Event, place: str) -> _Difference:
        return _Difference(
            f"stimulus {event.cause}: the leader now decides {_name(event)} as event {event.seq}, "
            f"and the recording has {place} there"
        )

    def _audit(self, state: CacheState) -> None:
        self._audited = 0
        if self.doubtful:
            return
        self.audits += 1
        self._found(audit(state), state)

    def _found(self, violations: list[Violation], state: CacheState) -> None:
        if violations:
            first = violations[0]
            raise _Difference(f"event {state.seq - 1}, stimulus {state.n}: {first.rule} is broken: {first.detail}")


def _name(event: Event) -> str:
    return type(event).__name__


def _describe(recorded: Event, decided: Event) -> str:
    """(n, seq, field) of the first difference between two events, in words."""
    where = f"stimulus {recorded.cause}, event {recorded.seq}"
    if type(recorded) is not type(decided):
        return f"{where}: the recording has {_name(recorded)}, the leader now decides {_name(decided)}"
    for field in recorded.__struct_fields__:
        was, now = getattr(recorded, field), getattr(decided, field)
        if was != now:
            then, today = field_text(field, was), field_text(field, now)
            return f"{where}: {_name(recorded)}.{field} was {then} and is now {today}"
    return f"{where}: {_name(recorded)} is encoded differently"
