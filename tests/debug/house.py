"""A leader driven by sentences, with the verbs of the debugger.

Law of this file: all checks of ``tests.core.script`` run after every stimulus, the rerun on a restored leader included.
"""

from typing import Any

from kvbm_console.core import events as ev
from kvbm_console.core import instructions as ins
from kvbm_console.core import stimuli as st
from kvbm_console.core.holds import HoldFacts
from kvbm_console.core.ids import HoldEnd, SlotState
from tests.core.script import ENGINE, Script

WORD = "abcd"
SECOND = 1_000_000_000


class House(Script):
    """A ``Script`` that also counts pauses, and asks what a debugger asks."""

    def __init__(self, **config: Any) -> None:
        self.paused = 0
        super().__init__(**config)

    def _carry_out(self, order: ins.Instruction) -> None:
        if isinstance(order, ins.PauseEngine | ins.ResumeEngine):
            if order.source != ENGINE:
                return
            self.paused += 1 if isinstance(order, ins.PauseEngine) else -1
            assert self.paused in (0, 1), "paused twice, or resumed without a pause"
        else:
            super()._carry_out(order)

    @property
    def hold(self) -> HoldFacts:
        """The only hold."""
        (hold,) = self.state.holds.values()
        return hold

    @property
    def ended(self) -> list[HoldEnd]:
        """Why holds ended, in order."""
        return [event.why for event in self.ever(ev.HoldReleased)]

    def command(self, kind: Any, *fields: Any) -> None:
        """A verb of the debugger."""
        self.tell(kind, *fields, source=0)

    def decoding(self, name: str, word: str = WORD) -> None:
        """A request that decodes."""
        self.arrive(name, word)
        assert self.admit(name)
        self.step(2)
        assert self.state_of(name) in (SlotState.DECODING, SlotState.SKIPPED_DECODE)

    def stored_below(self, word: str = WORD) -> None:
        """Most blocks of ``word`` stand in G2 and not in G1 any more (needs offload_threshold 0 and 8 places)."""
        for name, letters in (("first", word), ("second", "mnopqr")):
            self.arrive(name, letters)
            assert self.admit(name)
            self.step(1)
            self.finish(name)
            self.move_all()

    def onboarding(self, name: str, word: str = WORD) -> None:
        """A request whose load was asked for."""
        self.arrive(name, word)
        tokens = self.lookup(name)
        assert tokens, f"{word} stands below"
        assert self.allocate(name)

    def expire(self, kind: str, key: int = 0) -> None:
        """The deadline of this purpose comes."""
        (number,) = [number for number, purpose in self.leader.memory.deadlines.items() if purpose == (kind, key)]
        self.pass_deadline(number)

    def lose(self, owner: str) -> None:
        """The lease of an owner is lost."""
        self.command(st.LeaseLost, owner)
