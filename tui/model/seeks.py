"""Seeks: a mirror that is brought to a place of a tape, and the index that makes the past of a place known.

    stand    a place with its past: the spine at a place in front, folded to where the stretch begins, then the lives
             of the lanes up to there, then the stretch
    index    one walk over the whole tape, in slices: spines, hits, and findings of lints

Without a spine in front, before the index has come so far, the past of a place begins with its stretch.

Law of this file: facts behind a gap come from facts that the tape has. No event of a gap is invented.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from kvbm_console.analysis.lints import Finding
from kvbm_console.core import events as ev
from kvbm_console.core.errors import RecordingError
from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import Connected, EventsArrived, GapSeen, SnapshotTaken
from kvbm_console.stream.tape import RunTape

from .history import PastLives
from .mirror import Mirror
from .spine import LANES_EVENTS, STRETCH_EVENTS, KeptSpines, Spines

SLICE_EVENTS: Final = 400
"""Events folded before keys get a turn: about 4 ms."""
Breathe = Callable[[], Awaitable[None]]
Clock = Callable[[], int]


async def stand(
    mirror: Mirror, tape: RunTape, state: CacheState, spines: Spines, mono: Clock, breathe: Breathe
) -> bool:
    """Reach the place with these facts by folding the events before it, so that views show its past.

    The mirror shows the place before until this one is reached. Returns False when the past was folded from the stretch
    alone, because no spine in front of it is known yet.
    """
    shown, mirror, target = mirror, Mirror(), state.seq
    assert shown.connected is not None
    mirror.take(shown.connected, mono())
    mirror.sources.told = shown.sources.told
    begin = max(tape.first_seq, target - STRETCH_EVENTS)
    kept = spines.spine_before(begin)
    try:
        before = tape.state_at((begin if kept is None else kept[0]) - 1)
    except RecordingError:
        before, kept = state, None
    mirror.take(SnapshotTaken(before), mono())
    if kept is not None:
        mirror.resume(before, kept[1], mono())
        await fold_to(mirror, tape, begin, mono, breathe)
        mirror.let_go(mono(), await lanes_before(tape, begin, breathe))
    await fold_to(mirror, tape, target, mono, breathe, state)
    if mirror.next_seq != target:
        mirror.take(SnapshotTaken(state), mono())
    shown.become(mirror)
    return kept is not None or begin == tape.first_seq


async def lanes_before(tape: RunTape, seq: int, breathe: Breathe) -> PastLives | None:
    """The lives of the ``LANES_EVENTS`` events before event ``seq``; None where they cannot be read up to there."""
    lanes, seen_ns = PastLives(), 0
    lanes.next_seq = first = max(tape.first_seq, seq - LANES_EVENTS)
    try:
        if first == tape.first_seq:
            lanes.resume(tape.state_at(first - 1), 0)
        for events in tape.events(first):
            wanted = events if events[-1].seq < seq else [event for event in events if event.seq < seq]
            if not wanted:
                break
            if wanted[0].seq != lanes.next_seq:
                lanes.resume(tape.state_at(wanted[0].seq - 1), seen_ns)
            lanes.fold(wanted)
            seen_ns = wanted[-1].at_ns
            await breathe()
        return lanes if lanes.next_seq == seq else None
    except RecordingError:
        return None


async def fold_to(
    mirror: Mirror, tape: RunTape, target: int, mono: Clock, breathe: Breathe, state: CacheState | None = None,
    look: Callable[[list[Event]], None] = lambda events: None,
) -> None:
    """Fold the tape up to event ``target``, or over the gap in which it lies; ``state`` are its facts, if known.

    ``look`` sees every slice behind its fold.
    """
    for events in tape.events(mirror.next_seq) if mirror.next_seq < target else ():
        wanted = [event for event in events if mirror.next_seq <= event.seq < target]
        if not wanted:
            if events[-1].seq >= target:
                break
            continue
        if wanted[0].seq != mirror.next_seq:
            _over_gap(mirror, tape, wanted[0].seq, mono)
            wanted = [event for event in wanted if event.seq >= mirror.next_seq]
        for first in range(0, len(wanted), SLICE_EVENTS):
            piece = wanted[first : first + SLICE_EVENTS]
            mirror.take(EventsArrived(piece), mono())
            look(piece)
            await breathe()
    if mirror.next_seq < target:
        _over_gap(mirror, tape, target, mono, state)


def _over_gap(mirror: Mirror, tape: RunTape, seq: int, mono: Clock, state: CacheState | None = None) -> None:
    """Pass a gap of the tape, to the facts before event ``seq``; the stretch stays blank."""
    first = mirror.next_seq
    reason = next((gap.reason for gap in tape.gaps if gap.first <= first <= gap.last), "not recorded")
    try:
        found = state if state is not None else tape.state_at(seq - 1)
    except RecordingError:
        return
    mirror.take(GapSeen(first, seq - 1, reason), mono())
    mirror.take(SnapshotTaken(found), mono())


class TapeIndex:
    """Findings of one walk over a tape. On a reel the spines are there already, and nothing is walked."""

    def __init__(self, spines: Spines | None = None) -> None:
        self._kept = KeptSpines()
        self.spines: Spines = self._kept if spines is None else spines
        self.hits: list[int] = []
        """The events at which breakpoints took effect in the recorded run."""
        self.findings: list[Finding] = []
        """The problems of the whole run, worst first."""
        self.read_seq = -1
        """The event up to which the tape was read."""
        self.complete = False

    @property
    def walks(self) -> bool:
        """True if the tape is walked, so that it gets findings."""
        return self.spines is self._kept

    async def read(self, tape: RunTape, connected: Connected, mono: Clock, breathe: Breathe) -> None:
        """Walk over the tape. A tape that cannot be read to its end is indexed up to there."""
        mirror = Mirror()
        mirror.take(connected, mono())
        target = tape.last_seq + 1

        def look(events: list[Event]) -> None:
            self.hits += [event.seq for event in events if type(event) is ev.BreakpointHit]
            self.read_seq = mirror.next_seq - 1
            self._kept.look(mirror)

        try:
            mirror.take(SnapshotTaken(tape.state_at(tape.first_seq - 1)), mono())
            look([])
            await fold_to(mirror, tape, target, mono, breathe, look=look)
        except RecordingError:
            pass
        if mirror.state is not None:
            found = mirror.watch.findings(mirror.state, mirror.state.at_ns)
            from kvbm_console.analysis.diagnosis import ranked  # it opens recordings

            self.findings = ranked(found)
        self.complete = True


def moment_of(finding: Finding, tape: RunTape) -> int:
    """The event at which a problem is seen best: the last before its end, or the last of the tape while it lasts."""
    if not finding.since_ns:
        return finding.seq
    last = tape.last_seq if finding.until_ns is None else tape.seq_at(finding.until_ns - 1)
    return max(finding.seq, last)
