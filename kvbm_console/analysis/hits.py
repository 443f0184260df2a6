"""The events at which a breakpoint would have hit in a recording.

The recorded stimuli are fed to today's leader again, with a second gate that only looks. So every site counts exactly
as it would have live, conditions, ignored matches and hit conditions included, and the run itself stays as it was.

Law of this file: the second gate only looks, so the leader decides as it did in the recorded run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvbm_console.core.breakpoints import Gate, Moment
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.errors import InternalError, RecordingError
from kvbm_console.core.holds import BreakpointFacts
from kvbm_console.core.ids import Site, SlotState
from kvbm_console.core.leader import Leader
from kvbm_console.core.leader.debugger import check_spec
from kvbm_console.core.leader.memory import LiveMemory
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import decode_keyframe, decode_state, decode_stimuli
from kvbm_console.recording.reader import Recording

Progress = Callable[[int, int], None]
"""``progress(done, total)`` in events."""


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
    spec: int = 0
    """Index of the specification that was hit."""


class HitReport(msgspec.Struct, frozen=True):
    """All hits. ``matches`` counts also those that were ignored or left out by the hit condition."""

    hits: list[Hit]
    matches: int
    stimuli: int
    failed: str
    """Why a condition failed, empty when none did."""
    run: str = ""
    """The incarnation of the searched run."""
    runs: int = 1
    """The number of runs in the recording."""


class ProbedLeader(Leader):
    """A leader with a second gate that is asked at every site and decides nothing."""

    def __init__(self, config: LeaderConfig, *, check: bool = False, audit_every: int = 1) -> None:
        self.probe: Gate | None = None
        self.probed: dict[int, BreakpointFacts] = {}
        """The tested breakpoints, by their number in the second gate; 1 is the first specification."""
        self.hits: list[Hit] = []
        self.match_counts: Counter[int] = Counter()
        super().__init__(config, check=check, audit_every=audit_every)

    def look_for(self, specs: Sequence[BreakpointSpec]) -> None:
        """Begin to look. Raises ``Refused`` for a specification that cannot be evaluated."""
        numbers = {spec.id: at for at, spec in enumerate(specs, 1) if spec.id}
        for at, spec in enumerate(specs, 1):
            check_spec(spec)
            alone = msgspec.structs.replace(spec, id=at, depends_on=numbers.get(spec.depends_on, 0))
            self.probed[at] = BreakpointFacts(alone, "probe", alone.enabled)
        self.probe = Gate(self.probed)
        self.observer = self._look
        self.rearm()

    def stops(self) -> frozenset[Site]:
        """Sites to watch: those where the recorded run held a slot, and those that the tested breakpoints name."""
        return super().stops() if self.probe is None else super().stops() | self.probe.sites

    def _look(self, moment: Moment, slot: SlotFacts) -> None:
        assert self.probe is not None
        matched, failed = self.probe.ask(moment, slot, self.state)
        for number, message in failed:
            self.probed[number].enabled, self.probed[number].message = False, message
        for armed in matched:
            facts = armed.known
            self.match_counts[armed.number] += 1
            count = self.match_counts[armed.number] - facts.spec.ignore_count
            if count <= 0 or (armed.counts is not None and not armed.counts(count)):
                continue
            facts.hits += 1
            facts.enabled = not facts.spec.one_shot
            message = armed.message(slot, self.state, moment) if armed.message is not None else ""
            self.hits.append(Hit(
                self.state.seq, self.at_ns, self.n, slot.slot, slot.request, moment.site, moment.old, moment.new,
                message, armed.number - 1,
            ))


def find_hits(
    path: Path, specs: Sequence[BreakpointSpec], run: str | None = None, progress: Progress | None = None
) -> HitReport:
    """Every hit that breakpoints would have had in a run, in order; ``depends_on`` refers to the ids in ``specs``.

    ``run`` is its incarnation; None stands for the last run of a directory.
    Raises ``RecordingError`` when the recording holds no stimuli behind a complete keyframe, and ``Refused`` for an
    expression that is not understood.
    """
    recording = Recording.open(path, run)
    leader = ProbedLeader(recording.config)
    leader.look_for(specs)
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
    failed = "; ".join(facts.message for facts in leader.probed.values() if facts.message)
    return HitReport(
        leader.hits, leader.match_counts.total(), stimuli, failed, recording.incarnation, len(recording.runs)
    )


def _stretches(recording: Recording, leader: ProbedLeader) -> Iterator[list[Stimulus]]:
    """The stimuli in batches. The leader takes its facts from the first complete keyframe, and anew behind a gap."""
    restored = False
    for frame in recording.frames():
        if frame.channel == fmt.KEYFRAMES:
            keyframe = decode_keyframe(frame, recording.path)
            if keyframe.complete and (not restored or leader.state.seq != keyframe.seq):
                leader.state = decode_state(keyframe, recording.path)
                leader.live_memory = LiveMemory.restore(keyframe.memory, leader.state.pools)
                leader.rearm()
                restored = True
        elif frame.channel == fmt.STIMULI and restored:
            yield decode_stimuli(frame, recording.path)
