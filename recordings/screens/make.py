"""Draws the pictures of this directory: ``make screens``.

The console folds a simulated run with one held request in virtual time and without a terminal; what is on the screen is
saved as SVG, one file for each view.

Law of this file: nothing depends on the wall's clock, so that the same code draws the same pictures.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import Event
from kvbm_console.core.ids import SlotState
from kvbm_console.core.leader import Outcome
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.core.stimuli import BreakpointsReplaced, Stimulus
from kvbm_console.engines.embedded import build, default_engine_config, default_leader_config
from kvbm_console.engines.workloads import parse_workload
from kvbm_console.stream.feed import Connected, EventsArrived, FeedItem, Heartbeat, SnapshotTaken
from tui.app import ConsoleApp
from tui.source import Session

HERE: Final = Path(__file__).resolve().parent
SIZE: Final = (120, 40)
SECOND: Final = 1_000_000_000
RUN_NS: Final = 24 * SECOND
STOP_NS: Final = 20 * SECOND
"""When the breakpoint is set: late enough that every section of the overview has something to show."""
STEP_NS: Final = SECOND // 20
BEAT_STEPS: Final = 10
"""A heartbeat every half second, as from a daemon."""
_NAMES: Final = re.compile(r"terminal-\d+")
"""Names of elements, different in every process."""
SETTLE_NS: Final = SECOND // 2
"""Time without an event before the pictures are drawn, so that nothing on them is older than what they show."""
VIEWS: Final = {
    "1": "console", "2": "slots", "3": "slot", "4": "timeline", "5": "transfers", "6": "tiers", "7": "breakpoints",
    "8": "record", "9": "log", "exclamation_mark": "warnings",
}
"""Key to the name of the picture."""
_FONTS: Final = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""Fonts from elsewhere: a picture in a document may not load them, and should not."""


class Run:
    """A simulated machine, and a feed that folds it in steps of virtual time."""

    def __init__(self) -> None:
        workload = parse_workload("multiturn:seed=3")
        self.events: list[Event] = []
        self.rig = build(
            default_leader_config(workload), default_engine_config(workload), workload, publish=self._publish
        )
        self.at_ns = 0
        self.over = asyncio.Event()
        """Everything has been folded."""

    def _publish(self, _: Stimulus, outcome: Outcome) -> None:
        self.events += outcome.events

    def mono(self) -> int:
        """The console's clock: virtual time itself."""
        return self.at_ns

    async def items(self) -> AsyncIterator[FeedItem]:
        """As ``stream.feed.Feed``."""
        yield Connected("multiturn", "0123456789abcdef", 1, True, 16 * 131_072)
        yield SnapshotTaken(decode_facts(encode_facts(self.rig.leader.state)))
        self.events.clear()
        for step in range(1, RUN_NS // STEP_NS + 1):
            self.at_ns = step * STEP_NS
            if self.at_ns == STOP_NS:
                spec = BreakpointSpec(to_state=SlotState.ONBOARDING, one_shot=True)
                self.rig.dispatcher.submit(BreakpointsReplaced, "console-1", (spec,))
            self.rig.run(self.at_ns)
            if self.events:
                batch, self.events = self.events, []
                yield EventsArrived(batch)
            if step % BEAT_STEPS == 0:
                head = self.rig.leader.state.seq - 1
                yield Heartbeat(head, self.at_ns, "recording", head, head - 20, 400_000_000, 0, 1)
        self.over.set()
        await asyncio.Event().wait()


async def draw() -> None:
    """All pictures."""
    run = Run()
    session = Session(run, None, socket="unix:kvbm-console.sock", mono=run.mono)
    app = ConsoleApp(session, theme="dark")
    async with app.run_test(size=SIZE) as pilot:
        await run.over.wait()
        run.at_ns += SETTLE_NS
        for key, name in VIEWS.items():
            await pilot.press(key)
            app.draw()
            await pilot.pause()
            picture = _FONTS.sub("", _NAMES.sub(name, app.export_screenshot(title="kvbm-console")))
            (HERE / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(draw())
