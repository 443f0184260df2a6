"""Import of a Dynamo leader recording: our leader decides again, and calls and decisions become a recording.

Law of this package: the engine's side comes from Dynamo's recording and every decision from our leader. The report
counts the differences.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.analysis.walk import Progress
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import Event
from kvbm_console.core.leader import Outcome
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.engines.dynamo.drive import Drive, ImportReport, OtherAnswer
from kvbm_console.engines.dynamo.lines import infer_block_tokens, read_lines
from kvbm_console.recording import format as fmt
from kvbm_console.recording.format import About, Frame, Keyframe
from kvbm_console.recording.output import (
    Made,
    end_frame,
    event_frame,
    keyframe_frame,
    require_new,
    stimulus_frame,
    write_recording,
)

__all__ = ["DynamoImported", "ImportReport", "OtherAnswer", "import_dynamo", "infer_block_tokens"]

FLUSH_STIMULI: Final = 256
KEYFRAME_EVENTS: Final = 50_000


class DynamoImported(msgspec.Struct, frozen=True):
    """The recording, and the comparison of both leaders."""

    made: Made
    block_tokens: int
    report: ImportReport


def import_dynamo(
    path: Path, out: Path, config: LeaderConfig | None = None, *, block_tokens: int | None = None,
    progress: Progress | None = None,
) -> DynamoImported:
    """Rerun ``path`` through our leader into the new recording ``out``.

    Without a ``config`` every full block is copied to a host tier of 8,192 blocks, as Dynamo does. Without
    ``block_tokens`` the block size is found from the recording. Raises ``UsageError`` and ``OSError``.
    """
    require_new(out)
    if config is None:
        size = block_tokens or infer_block_tokens(path)
        if size is None:
            raise UsageError(f"the block size of {path} cannot be found; say it with --block-tokens")
        config = LeaderConfig(block_tokens=size, g2_blocks=8_192, offload_threshold=0.0)
    rerun = _Rerun(path, config, progress)
    about = About(
        program="rec import dynamo", incarnation=f"dynamo {path.name}"[-200:], clock_anchor_ns=0, config=config,
        labels={"imported_from": path.name},
    )
    made = write_recording(out, about, rerun.frames(about))
    return DynamoImported(made, config.block_tokens, rerun.drive.report)


class _Rerun:
    """Frames of the recording, made while the lines are read."""

    def __init__(self, path: Path, config: LeaderConfig, progress: Progress | None) -> None:
        self.path = path
        self.progress = progress
        self.drive = Drive(config, self._publish)
        self._stimuli: list[Stimulus] = []
        self._events: list[Event] = []

    def _publish(self, stimulus: Stimulus, outcome: Outcome) -> None:
        self._stimuli.append(stimulus)
        self._events += outcome.events

    def frames(self, about: About) -> Iterator[Frame]:
        """The whole recording, from its first keyframe to its end."""
        leader = self.drive.leader
        yield keyframe_frame(about, Keyframe(0, True, encode_facts(leader.state), leader.export()), 0)
        keyframe_seq = 0
        self.drive.begin()
        for line in read_lines(self.path):
            self.drive.take(line)
            if self.progress is not None:
                self.progress("import", line.number, 0)
            if len(self._stimuli) >= FLUSH_STIMULI:
                yield from self._flush(about)
                if leader.state.seq - keyframe_seq >= KEYFRAME_EVENTS:
                    keyframe_seq = leader.state.seq
                    yield self._keyframe(about)
        self.drive.end()
        yield from self._flush(about)
        yield end_frame(about, leader.state.seq - 1, self.drive.now_ns)

    def _flush(self, about: About) -> Iterator[Frame]:
        stimuli, self._stimuli = self._stimuli, []
        events, self._events = self._events, []
        if stimuli:
            yield stimulus_frame(about, stimuli, events[0].seq if events else self.drive.leader.state.seq)
        if events:
            yield event_frame(about, events)

    def _keyframe(self, about: About) -> Frame:
        leader = self.drive.leader
        at = about.clock_anchor_ns + leader.state.at_ns
        keyframe = Keyframe(leader.state.seq, True, encode_facts(leader.state), leader.export())
        return Frame(fmt.KEYFRAMES, keyframe.seq, 0, at, at, fmt.encode_item(keyframe))
