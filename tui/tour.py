"""The tour of ``demo --tour``: a sentence for each step of the incident, with the key to press, on the views.

Law of this file: a step ends when the console is where its key leads, however the person came there. The tour takes
``ROWS`` rows from its first frame to its last, so that nothing moves.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from kvbm_console.analysis.lints import Level
from kvbm_console.core.state import CacheState

from .desk import MISSES, PREFIXES, SLOT, TIERS, WHY, Desk
from .draw.frame import NAMED_KEYS
from .draw.spans import Line, Row
from .model.numbers import wrap

ROWS: Final = 2


class TourStep(msgspec.Struct, frozen=True):
    """A sentence, the key that it asks for, and the moment at which it is over."""

    text: str
    over: Callable[[Desk], bool]
    key: str = ""
    """Empty while there is nothing to do but watch."""


def _fault(desk: Desk) -> bool:
    return bool(desk.warnings) and desk.warnings[0].level is Level.FAULT and desk.warnings[0].request is not None


def _present(desk: Desk) -> CacheState | None:
    """The facts now, also while the past is shown."""
    return (desk.live.mirror if desk.looks_back else desk.mirror).state


def _armed(desk: Desk) -> bool:
    state = _present(desk)
    return state is not None and bool(state.breakpoints)


def _held(desk: Desk) -> bool:
    state = _present(desk)
    return state is not None and bool(state.holds)


def _on_held(desk: Desk) -> bool:
    state = _present(desk)
    slot = state.slot_named(desk.selected) if state is not None and desk.selected else None
    return desk.current == SLOT and slot is not None and slot.hold is not None


def _thrash(desk: Desk) -> bool:
    return any(warning.lint == "thrash" for warning in desk.warnings)


STEPS: Final = (
    TourStep("Some 40 chats are served. Soon one copy will lose a report, and NEEDS YOU will say so.", _fault),
    TourStep("NEEDS YOU names a request that has finished and does not end. Open it.",
             lambda desk: desk.current == SLOT, "enter"),
    TourStep("WAITS FOR names its copy and the rank that never reported. Ask for the whole explanation.",
             lambda desk: desk.current == WHY, "w"),
    TourStep("Hold the next agent before such a copy: this key proposes the breakpoint, and enter sets it.",
             _armed, "b"),
    TourStep("The breakpoint is set. The next agent will stop in front of its copy; all others go on.", _held),
    TourStep("An agent is held now, before its copy begins. The engine goes on.", _on_held, "H"),
    TourStep("Look at it: its copies, its blocks, its story. Then let it go on.", lambda desk: not _held(desk), "c"),
    TourStep("Agents now ask over documents that outgrow the host tier. Wait for the word thrash.", _thrash),
    TourStep("Evicted blocks come back within seconds. See what a larger host tier would bring.",
             lambda desk: desk.current == TIERS, "6"),
    TourStep("See why prompts miss, and which requests evicted their blocks.",
             lambda desk: desk.current == MISSES, "M"),
    TourStep("See all prompts as one map: who shares what, and where it lies now.",
             lambda desk: desk.current == PREFIXES, "p"),
    TourStep("Everything is kept. Go back 10 s, in this very view.", lambda desk: desk.looks_back, "←"),
    TourStep("This is the past, as it was. Press until the first row says LIVE again.",
             lambda desk: not desk.looks_back, "→"),
    TourStep("This was the tour. A preempt loop and a queue follow. Leaving names the recording of it all.",
             lambda desk: False, "q"),
)


class Tour:
    """The place of one person in ``STEPS``."""

    def __init__(self) -> None:
        self.at = 0

    @property
    def step(self) -> TourStep:
        """The step that is shown."""
        return STEPS[self.at]

    def lines(self, desk: Desk, width: int) -> list[Line]:
        """``ROWS`` rows above the keys, after a look whether the step is over."""
        while self.step.over(desk):
            self.at += 1
        head = f"TOUR {self.at + 1} of {len(STEPS)}  "
        pieces = wrap(self.step.text, width - 2 - len(head) - len(self.step.key) - 9)
        rows = [Row().put(f" {head}", "title"), Row().put(" " * (len(head) + 1))]
        for row, piece in zip(rows, pieces, strict=False):
            row.put(piece, "text")
        if self.step.key:
            last = rows[len(pieces) - 1].put("   press ", "muted")
            start = last.x
            key = desk.glyphs.keys(self.step.key)
            last.put(f"{key}", "key").zone(start, ("key", NAMED_KEYS.get(self.step.key, self.step.key)))
        return [row.line("bar", width) for row in rows]
