"""The verbs: what a console asks of its target, each in a task of its own.

Law of this file: a key never waits for an answer; it comes later, as a notice, and so many calls under way are enough.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvbm_console.core.errors import KvbmConsoleError
from kvbm_console.stream.feed import Controls
from kvbm_console.stream.verbs import Verb

Spawner = Callable[[Awaitable[None], str], None]
"""Runs a task under a name; the application owns it."""
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

    def ask(self, verb: Verb[Any]) -> None:
        """Carry out a verb; its answer comes as a notice."""
        async def work(controls: Controls) -> str:
            return verb.told(await controls.ask(verb))
        self._call(work)

    def retry(self) -> None:
        """Reconnect at once."""
        async def work(controls: Controls) -> str:
            await controls.retry_now()
            return "trying now"
        self._call(work)
