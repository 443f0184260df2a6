"""The run that the pictures show: recorded once into ``run.mcap`` (``make.py --record``), and read from there.

A multi-turn workload of fourteen seconds; at nine a breakpoint holds the next request that loads its prefix, and
somebody continues it four seconds later.

Law of this file: nothing depends on the wall's clock.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from kvbm_console.analysis.explain import Explanation, explain
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import SlotState
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.stimuli import BreakpointsReplaced, HoldContinued, Stimulus
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.writer import Recorder
from kvbm_console.simulator.embedded import build, default_engine_config, default_leader_config, parse_workload
from kvbm_console.stream.feed import Connected, EventsArrived, FeedItem, Heartbeat, SnapshotTaken
from kvbm_console.wire.batches import pack_events, pack_stimuli

RUN: Final = Path(__file__).resolve().parent / "run.mcap"
SECOND: Final = 1_000_000_000
RUN_NS: Final = 14 * SECOND
STOP_NS: Final = 9 * SECOND
"""When the breakpoint is set: late enough that every section of the overview has something to show."""
GO_NS: Final = 13 * SECOND
STEP_NS: Final = SECOND // 20
BEAT_STEPS: Final = 10
"""A heartbeat every half second, as from a daemon."""
BLOCK_BYTES: Final = 16 * 131_072
CLOCK_ANCHOR_NS: Final = 1_767_225_600 * SECOND


def record() -> None:
    """Make ``run.mcap`` again."""
    workload = parse_workload("multiturn:seed=3")
    config = default_leader_config(workload)
    kept: list[tuple[Stimulus, Outcome]] = []

    def publish(stimulus: Stimulus, outcome: Outcome) -> None:
        kept.append((stimulus, outcome))

    rig = build(config, default_engine_config(workload), workload, publish=publish)
    fresh = Leader(config)
    first: list[tuple[int, bytes, bytes]] = [(fresh.state.seq, encode_facts(fresh.state), fresh.export())]
    with tempfile.TemporaryDirectory() as name:
        recorder = Recorder(
            Path(name) / "run", config=config, incarnation="screens", clock_anchor_ns=CLOCK_ANCHOR_NS,
            keyframe=lambda: first.pop() if first else (
                rig.leader.state.seq, encode_facts(rig.leader.state), rig.leader.export()),
            labels={"shows": "what the pictures show"},
        )
        for step in range(1, RUN_NS // STEP_NS + 1):
            if step * STEP_NS == STOP_NS:
                spec = BreakpointSpec(to_state=SlotState.ONBOARDING, one_shot=True)
                rig.dispatcher.submit(BreakpointsReplaced, "console-1", (spec,))
            if step * STEP_NS == GO_NS:
                rig.dispatcher.submit(HoldContinued, None, "console-1", None)
            rig.run(step * STEP_NS)
            events = [event for _, outcome in kept for event in outcome.events]
            if kept:
                stimuli = pack_stimuli([stimulus for stimulus, _ in kept])
                recorder.offer(stimuli, pack_events(events) if events else None)
            kept.clear()
        recorder.close()
        (made,) = (Path(name) / "run").glob("*.mcap")
        shutil.move(made, RUN)


class Tape:
    """A recording as a live target: folded in steps of its own time, up to where ``until`` lets it."""

    def __init__(self, path: Path = RUN, target: str = "multiturn", run_ns: int = RUN_NS) -> None:
        self.recording = Recording.open(path)
        self._target, self._run_ns = target, run_ns
        self.at_ns = 0
        self._until_ns = 0
        self._more = asyncio.Event()
        self._there = asyncio.Event()

    def mono(self) -> int:
        """The console's clock: the run's time itself."""
        return self.at_ns

    def wall(self) -> int:
        """The time of day, the same as during the run."""
        return CLOCK_ANCHOR_NS + self.at_ns

    async def explain(self, request: str) -> Explanation:
        """Why a request missed what it missed, by the whole run."""
        return explain(evidence_of(self.recording), request)

    async def until(self, at_ns: int) -> None:
        """Let the run come to this time, and wait until it has been folded."""
        self._until_ns = at_ns
        self._there.clear()
        self._more.set()
        await self._there.wait()

    async def items(self) -> AsyncIterator[FeedItem]:
        """As ``stream.feed.Feed``."""
        recording = self.recording
        events = [event for batch in recording.events(recording.first_seq) for event in batch]
        yield Connected(
            self._target, "0123456789abcdef", 1, True, BLOCK_BYTES, config=recording.config,
            clock_anchor_ns=CLOCK_ANCHOR_NS)
        yield SnapshotTaken(recording.state_at(recording.first_seq - 1))
        at = 0
        for step in range(1, self._run_ns // STEP_NS + 1):
            while step * STEP_NS > self._until_ns:
                self._more.clear()
                self._there.set()
                await self._more.wait()
            self.at_ns = step * STEP_NS
            first = at
            while at < len(events) and events[at].at_ns <= self.at_ns:
                at += 1
            if at > first:
                yield EventsArrived(events[first:at])
            if step % BEAT_STEPS == 0:
                head = events[at - 1].seq if at else -1
                yield Heartbeat(head, self.at_ns, "recording", head, head - 20, 400_000_000, 0, 1)
        self._there.set()
        await asyncio.Event().wait()
