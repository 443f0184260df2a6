"""What a tap has recorded, brought to a leader in the same process, so every step can be checked.

Law of this file: only the transport is left out; flattening, encoding, translation, the daemon's
check of fed stimuli and the leader are the real ones.
"""

from typing import Any

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import audit
from kvbm_console.core.leader.decider import Outcome
from kvbm_console.core.state import CacheState
from kvbm_console.reporter import translator
from kvbm_console.tap.flatten import Flattener, drain
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import TapSettings
from server.feeding import check_stimulus


class Watching(translator.Watching):
    """A recorder's messages on the way to a checked leader. ``events`` are those since the last ``pump``.

    ``source`` is the number of the engine at the leader, which is that of ``beside`` if this is given."""

    def __init__(
        self, recorder: TapRecorder, flattener: Flattener, settings: TapSettings, *, source: int = 1,
        beside: "Watching | None" = None,
    ) -> None:
        super().__init__(settings)
        self.source = source
        if beside is not None:
            self.leader, self.dispatcher = beside.leader, beside.dispatcher
        self._publish_also = self.dispatcher.publish
        self.dispatcher.publish = self._publish
        self.recorder, self.flattener = recorder, flattener
        self.mirror = CacheState() if beside is None else beside.mirror
        self.events: list[ev.Event] = []
        self.rejected: list[str] = []
        self.kept: list[Any] = []
        """Every message, for who wants to keep them."""
        self.stimuli: list[st.Stimulus] = []
        self.outcomes: list[list[ev.Event]] = []
        """The events of each stimulus."""
        self.begin()
        recorder.listen()

    def _publish(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        if stimulus.source == self.source and not (isinstance(stimulus, st.SourceRestarted) and stimulus.gone):
            check_stimulus(stimulus)  # all but the end of the feed, which the daemon itself tells
        self.stimuli.append(stimulus)
        self.outcomes.append(list(outcome.events))
        for event in outcome.events:
            if self._publish_also is None:
                self.mirror.apply(event)
            self.events.append(event)
            if isinstance(event, ev.StimulusRejected):
                self.rejected.append(event.why)
        if self._publish_also is not None:
            self._publish_also(stimulus, outcome)

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
        super().take(messages)
