"""The verbs: what a console asks of its target, each in a task of its own.

Law of this file: a key never waits for an answer; it comes later, as a notice, and so many calls under way are enough.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import KvbmConsoleError
from kvbm_console.core.holds import answer_text
from kvbm_console.core.ids import ResetMode, SlotState
from kvbm_console.stream.feed import Controls

from .hooks import Spawner
from .model.numbers import plural

FREEZE_NS: Final = 30_000_000_000
"""How long a freeze from the console lasts at most; `F` says so when it asks."""
CALLS_MAX: Final = 16
"""Calls under way; more keys than that on a dead connection are refused."""


class Verbs:
    """What may be asked of a target; without ``controls`` every verb says that this session only observes."""

    def __init__(self, controls: Controls | None) -> None:
        self.controls = controls
        self._spawn: Spawner | None = None
        self._tell: Callable[[str, str], None] = lambda text, role: None
        self._calls = 0

    def _call(self, work: Callable[[Controls], Awaitable[str]]) -> None:
        controls = self.controls
        if controls is None or self._spawn is None:
            self._tell("this session only observes", "muted")
            return
        if self._calls >= CALLS_MAX:
            self._tell("the target has not answered the calls before", "caution")
            return
        self._calls += 1

        async def run() -> None:
            try:
                text, role = await work(controls), "text"
            except KvbmConsoleError as error:
                text, role = str(error), "fault"
            finally:
                self._calls -= 1
            self._tell(text, role)

        self._spawn(run(), "call")

    def continue_hold(self, hold: int | None) -> None:
        """Release one hold, or all."""
        async def work(controls: Controls) -> str:
            answer = answer_text(await controls.continue_hold(hold))
            return f"hold {hold}: {answer}" if hold is not None else f"all holds: {answer}"
        self._call(work)

    def step(self, hold: int) -> None:
        """Release a hold and stop the slot at its next site."""
        async def work(controls: Controls) -> str:
            return f"hold {hold}: {answer_text(await controls.step(hold))}"
        self._call(work)

    def continue_until(self, hold: int, state: SlotState) -> None:
        """Release a hold and stop the slot once more at a state."""
        async def work(controls: Controls) -> str:
            answer = await controls.continue_hold(hold, state)
            lost = answer_text(answer) != answer
            return f"hold {hold}: {answer_text(answer)}" + ("" if lost else f", until {state.label}")
        self._call(work)

    def skip_candidate(self, hold: int) -> None:
        """Resolve the open candidates of a held slot to no work, and release the hold."""
        async def work(controls: Controls) -> str:
            return f"hold {hold}: {answer_text(await controls.skip(hold))}"
        self._call(work)

    def step_pipeline(self) -> None:
        """Let one candidate through its evaluation."""
        async def work(controls: Controls) -> str:
            return f"pipeline: {await controls.step_pipeline()}"
        self._call(work)

    def freeze(self) -> None:
        """Stop everything for a while."""
        async def work(controls: Controls) -> str:
            return f"target: {await controls.freeze(FREEZE_NS)}"
        self._call(work)

    def thaw(self) -> None:
        """End a freeze."""
        async def work(controls: Controls) -> str:
            return f"target: {answer_text(await controls.thaw())}"
        self._call(work)

    def run_for(self, duration_ns: int) -> None:
        """Go on for this much of the engine's time, then freeze."""
        async def work(controls: Controls) -> str:
            return f"target: {await controls.run_for(duration_ns, FREEZE_NS)}, then frozen"
        self._call(work)

    def add_breakpoint(self, spec: BreakpointSpec) -> None:
        """Set one more breakpoint."""
        async def work(controls: Controls) -> str:
            verdict = await controls.add_breakpoint(spec)
            if verdict.verified:
                return f"breakpoint {verdict.id} set: {spec.describe()}"
            return f"breakpoint {verdict.id} cannot work: {verdict.message}"
        self._call(work)

    def remove_breakpoint(self, breakpoint_id: int) -> None:
        """Remove a breakpoint."""
        async def work(controls: Controls) -> str:
            await controls.remove_breakpoint(breakpoint_id)
            return f"breakpoint {breakpoint_id} removed"
        self._call(work)

    def enable_breakpoint(self, breakpoint_id: int, enabled: bool) -> None:
        """Arm or mute a breakpoint."""
        async def work(controls: Controls) -> str:
            await controls.enable_breakpoint(breakpoint_id, enabled)
            return f"breakpoint {breakpoint_id} {'armed' if enabled else 'muted'}"
        self._call(work)

    def reset(self, mode: ResetMode) -> None:
        """Forget everything in all tiers."""
        async def work(controls: Controls) -> str:
            answer = await controls.reset(mode)
            return f"{mode.label} reset, epoch {answer.epoch}: {plural(answer.aborted_requests, 'request')} ended"
        self._call(work)

    def drain(self, for_ns: int) -> None:
        """Take no new request, wait for what is in flight, then reset."""
        async def work(controls: Controls) -> str:
            answer = await controls.drain(for_ns)
            return f"draining {plural(answer.live_requests, 'request')}; no new one is taken until that is over"
        self._call(work)

    def disarm(self) -> None:
        """Mute every breakpoint and release every hold."""
        async def work(controls: Controls) -> str:
            await controls.disarm()
            return "every breakpoint is muted, every hold released"
        self._call(work)

    def retry(self) -> None:
        """Reconnect at once."""
        async def work(controls: Controls) -> str:
            await controls.retry_now()
            return "trying now"
        self._call(work)
