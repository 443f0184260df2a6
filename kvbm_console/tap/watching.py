"""A tap's messages, brought to a leader in the same process: no thread and no socket.

Law of this file: only the transport is left out; translation and the leader are the real ones.
"""

from typing import Any

from kvbm_console.core import stimuli as st
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Note
from kvbm_console.core.instructions import PoolAnswer
from kvbm_console.core.leader import Leader
from kvbm_console.dispatch import Dispatcher
from kvbm_console.tap.sender import Settings
from kvbm_console.tap.translator import Translator


class Watching:
    """A checked leader that watches one engine. ``now`` is its clock."""

    def __init__(self, settings: Settings, config: LeaderConfig | None = None) -> None:
        self.translator = Translator(settings)
        self.now = 0
        self.leader = Leader(config or LeaderConfig(), check=True)
        self.dispatcher = Dispatcher(self.leader, lambda: self.now)

    def begin(self) -> None:
        """Declare the engine's pools."""
        self.translator.begin()
        self._submit()

    def take(self, messages: list[Any]) -> None:
        """Messages as the process beside the engine gets them."""
        for message in messages:
            self.translator.take(message)
        self._submit()

    def note(self, note: Note, detail: str) -> None:
        """A note of the program that watches."""
        self.dispatcher.submit(st.Noted, note, detail)

    def _submit(self) -> None:
        calls, self.translator.calls = self.translator.calls, []
        for call in calls:
            stimulus = call.stimulus
            if isinstance(stimulus, st.BlocksReported):
                stimulus.pool = self.translator.pools[call.medium]
            kind: Any = type(stimulus)
            fields = [getattr(stimulus, name) for name in kind.__struct_fields__[4:]]
            outcome = self.dispatcher.submit_from(1, stimulus.at_ns, kind, *fields)
            if isinstance(outcome.result, PoolAnswer):
                self.translator.pools[call.medium] = outcome.result.pool
