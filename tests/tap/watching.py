"""What a tap has recorded, brought to a leader in the same process: no thread, no socket, so every step can be checked.

Law of this file: only the transport is left out; flattening, encoding, translation and the leader are the real ones.
"""

from typing import Any

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import audit
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.instructions import PoolAnswer
from kvbm_console.core.leader import Leader
from kvbm_console.core.leader.frame import Outcome
from kvbm_console.core.state import CacheState
from kvbm_console.dispatch import Dispatcher
from kvbm_console.tap.flatten import Flattener, drain
from kvbm_console.tap.recorder import Recorder
from kvbm_console.tap.sender import Settings
from kvbm_console.tap.translator import Translator


class Watching:
    """A recorder's messages on the way to a checked leader. ``events`` are those since the last ``pump``."""

    def __init__(self, recorder: Recorder, flattener: Flattener, settings: Settings) -> None:
        self.recorder, self.flattener = recorder, flattener
        self.translator = Translator(settings)
        self.now = 0
        self.leader = Leader(LeaderConfig(), check=True)
        self.dispatcher = Dispatcher(self.leader, lambda: self.now, publish=self._publish)
        self.mirror = CacheState()
        self.events: list[ev.Event] = []
        self.rejected: list[str] = []
        self.kept: list[Any] = []
        """Every message, for who wants to keep them."""
        self.stimuli: list[st.Stimulus] = []
        self.outcomes: list[list[ev.Event]] = []
        """The events of each stimulus."""
        self.translator.begin()
        self._submit()
        recorder.listen()

    def _publish(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        self.stimuli.append(stimulus)
        self.outcomes.append(list(outcome.events))
        for event in outcome.events:
            self.mirror.apply(event)
            self.events.append(event)
            if isinstance(event, ev.StimulusRejected):
                self.rejected.append(event.why)

    def pump(self) -> None:
        """Everything that was recorded so far becomes true."""
        self.pump_gently()
        assert not self.translator.wants_all

    def pump_gently(self) -> None:
        """As ``pump``; what does not fit is asked for anew, as the process beside the engine does."""
        self.events = []
        while self.recorder.queue:
            self.now += 1_000
            sent = msgspec.msgpack.encode(drain(self.recorder, self.flattener, 64))
            self.take(msgspec.msgpack.decode(sent))
        if self.translator.wants_all:
            self.recorder.want_full = True
        assert audit(self.leader.state) == []

    def take(self, messages: list[Any]) -> None:
        """Messages as the process beside the engine gets them."""
        self.kept += messages
        for message in messages:
            self.translator.take(message)
        self._submit()

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
