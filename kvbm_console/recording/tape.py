"""A tape: everything that one leader was told and decided, in memory, and as a recording when somebody wants it.

Law of this file: a tape holds whole stimuli only; one that is full stops and says so, and never slows a test down.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import Event
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.format import About, Frame, Keyframe
from kvbm_console.recording.output import end_frame, event_frame, keyframe_frame, write_recording
from kvbm_console.wire.batches import pack_stimuli

EVENTS_MAX: Final = 1_000_000
"""Events that one tape holds: some hundred megabytes."""
FLUSH_STIMULI: Final = 256
CLOCK_ANCHOR_NS: Final = 1_767_225_600 * 10**9
"""2026-01-01: time 0 of a test's engine, so that equal tests give equal recordings."""


class Tape:
    """The stimuli and events of one leader, from the facts that it began with."""

    def __init__(self, leader: Leader) -> None:
        self.config: LeaderConfig = leader.config
        self.begin = encode_facts(leader.state)
        self.aids = leader.export()
        self.stimuli: list[Stimulus] = []
        self.outcomes: list[list[Event]] = []
        """The events of each stimulus."""
        self.events: list[Event] = []
        self.not_taped = 0
        """Events behind the end of a full tape."""

    def take(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """One stimulus with what it led to."""
        if self.not_taped or len(self.events) + len(outcome.events) > EVENTS_MAX:
            self.not_taped += len(outcome.events)
            return
        self.stimuli.append(stimulus)
        self.outcomes.append(list(outcome.events))
        self.events += outcome.events

    def state_at_begin(self) -> CacheState:
        """The facts that it began with, as a new object."""
        return decode_facts(self.begin)

    def save(self, path: Path, name: str, *, program: str = "pytest", label: str = "test") -> Path:
        """Write it as a recording of one file. Raises ``UsageError`` when nothing happened or the name is taken."""
        if not self.events:
            raise UsageError(f"{name}: no event happened, so there is nothing to record")
        first_seq = self.state_at_begin().seq
        about = About(
            program=program, incarnation=name[-200:], clock_anchor_ns=CLOCK_ANCHOR_NS, config=self.config,
            first_seq=first_seq, labels={label: name},
        )
        write_recording(path, about, self._frames(about, first_seq))
        return path

    def _frames(self, about: About, first_seq: int) -> Iterator[Frame]:
        yield keyframe_frame(about, Keyframe(first_seq, True, self.begin, self.aids), self.stimuli[0].at_ns)
        anchor = about.clock_anchor_ns
        next_seq = first_seq
        for at in range(0, len(self.stimuli), FLUSH_STIMULI):
            chunk = pack_stimuli(self.stimuli[at : at + FLUSH_STIMULI])
            yield Frame(
                fmt.STIMULI, next_seq, chunk.count, anchor + chunk.base_ns, anchor + chunk.last_ns, chunk.data
            )
            events = [event for caused in self.outcomes[at : at + FLUSH_STIMULI] for event in caused]
            if events:
                yield event_frame(about, events)
                next_seq = events[-1].seq + 1
        yield end_frame(about, next_seq - 1, self.stimuli[-1].at_ns)
