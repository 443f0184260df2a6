"""Where a breakpoint would have hit: a specification on a recording.

The recorded stimuli are fed to today's leader again, with a second gate that only looks. So every site counts exactly
as it would have live, conditions, ignored matches and hit conditions included, and the run itself stays as it was.

Law of this file: looking changes nothing; the leader that is looked into decides what it decided.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.breakpoints import BreakpointFacts, Gate, Moment
from kvbm_console.core.candidates import CandidateFacts
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.errors import InternalError, RecordingError
from kvbm_console.core.ids import Site, SlotState
from kvbm_console.core.leader import Leader
from kvbm_console.core.leader.aids import AidsBox
from kvbm_console.core.leader.debugger import check_spec
from kvbm_console.core.leader.holds import moment_of
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import decode_state, decode_stimuli
from kvbm_console.recording.reader import Recording

Progress = Callable[[int, int], None]
"""``progress(done, total)`` in events."""
PROBE: Final = 1
"""Number of the breakpoint that is tried out, in a gate of its own."""


class Hit(msgspec.Struct, frozen=True):
    """One hit: ``seq`` is the number of the event that follows it, ``at_ns`` the engine's time."""

    seq: int
    at_ns: int
    n: int
    """The stimulus in which it happened."""
    slot: int
    request: str
    site: Site
    old: SlotState
    new: SlotState
    message: str


class Hits(msgspec.Struct, frozen=True):
    """All hits of a specification. ``matches`` counts also those that were ignored or left out by the hit condition."""

    hits: list[Hit]
    matches: int
    stimuli: int
    failed: str
    """Why the condition failed, empty when it did not."""


class ProbedLeader(Leader):
    """A leader with a second gate that is asked at every site and decides nothing."""

    def __init__(self, config: LeaderConfig, *, check: bool = False, audit_every: int = 1) -> None:
        self.probe: Gate | None = None
        self.spec = BreakpointSpec()
        self.hits: list[Hit] = []
        self.matches = 0
        self.failed = ""
        super().__init__(config, check=check, audit_every=audit_every)

    def look_for(self, spec: BreakpointSpec) -> None:
        """Begin to look. Raises ``Refused`` for a specification that cannot be evaluated."""
        check_spec(spec)
        self.spec = msgspec.structs.replace(spec, id=PROBE, enabled=True, depends_on=0)
        self.probe = Gate({PROBE: BreakpointFacts(self.spec, "probe", True)})
        self.rearm()

    def rearm(self) -> None:
        """The gate of the run, never absent while a probe looks, so that every site is passed."""
        super().rearm()
        if self.probe is not None:
            if self.gate is None:
                self.gate = Gate({})
            self.gate.calls = self.gate.calls or self.probe.calls

    def strike(
        self, site: Site, slot: SlotFacts, old: SlotState, new: SlotState, candidate: CandidateFacts | None = None,
        since_ns: int | None = None,
    ) -> None:
        """A site is passed: look first, then do what the run did."""
        if self.probe is not None and self.probe.watches(site, new):
            self._look(slot, moment_of(site, slot, old, new, candidate, since_ns))
        super().strike(site, slot, old, new, candidate, since_ns)

    def _look(self, slot: SlotFacts, moment: Moment) -> None:
        assert self.probe is not None
        matched, failed = self.probe.ask(moment, slot, self.state)
        if failed:
            self.failed = failed[0][1]
            self.probe = None
            return
        for armed in matched:
            self.matches += 1
            seen = self.matches - self.spec.ignore_count
            if seen <= 0 or (armed.counts is not None and not armed.counts(seen)):
                continue
            message = armed.message(slot, self.state, moment) if armed.message is not None else ""
            self.hits.append(Hit(
                self.state.seq, self.at_ns, self.n, slot.slot, slot.request, moment.site, moment.old, moment.new,
                message,
            ))
            if self.spec.one_shot:
                self.probe = None
                return


def find_hits(path: Path, spec: BreakpointSpec, progress: Progress | None = None) -> Hits:
    """Every hit that a breakpoint would have had, in order.

    Raises ``RecordingError`` when the recording holds no stimuli behind a complete keyframe, and ``Refused`` for an
    expression that is not understood.
    """
    recording = Recording.open(path)
    leader = ProbedLeader(recording.config)
    leader.look_for(spec)
    stimuli = 0
    for part in _stretches(recording, leader):
        for stimulus in part:
            try:
                leader.handle(stimulus)
            except InternalError as error:
                raise RecordingError(f"{path} cannot be rerun beyond stimulus {stimulus.n}: {error.message}") from None
            stimuli += 1
        if progress is not None:
            progress(leader.state.seq - recording.first_seq, recording.last_seq - recording.first_seq + 1)
    if not stimuli:
        raise RecordingError(f"{path} holds no stimuli that can be rerun, so a breakpoint cannot be tried on it")
    return Hits(leader.hits, leader.matches, stimuli, leader.failed)


def _stretches(recording: Recording, leader: ProbedLeader) -> Iterator[list[Stimulus]]:
    """The stimuli in batches; at the first complete keyframe, and at one behind a gap, the leader takes its facts."""
    restored = False
    for frame in recording.frames():
        if frame.channel == fmt.KEYFRAMES:
            keyframe = fmt.decode_keyframe(frame.data)
            if keyframe.complete and (not restored or leader.state.seq != keyframe.seq):
                leader.state = decode_state(keyframe, recording.path)
                leader.box = AidsBox.restore(keyframe.aids, leader.state.pools)
                leader.rearm()
                restored = True
        elif frame.channel == fmt.STIMULI and restored:
            yield decode_stimuli(frame, recording.path)
