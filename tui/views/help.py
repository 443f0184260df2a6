"""Help: the keys of the view on the screen, then those that work everywhere.

Law of this file: only keys that exist are listed.
"""

from kvbm_console.core.ids import SlotState

from ..desk import Desk
from ..draw.frame import TABS
from ..draw.spans import BLANK, Line, Row

EVERYWHERE = (
    ("1..9", "views"), ("/", "filter"), ("enter esc", "into, back"), (":", "commands"), ("space", "pause view, play"),
    ("!", "warnings"), ("H", "newest hold"), ("t", "timeline"), ("[ ] w", "cause, effect, why"),
    ("m '", "mark, to mark"), ("y e", "copy, export"), ("q", "quit"),
)
LIVE = (
    ("b", "break here"), ("c C", "continue, all"), ("s S", "step slot, pipeline"), ("u", "continue until…"),
    ("X", "skip candidate"), ("D F", "disarm all, freeze or thaw"),
)
RECORDING = (
    (", .", "event back, on"), ("s S", "slot's next, last event"), ("c C", "next, previous hit"),
    ("b", "look for a breakpoint"), ("< >", "slower, faster"),
)

PILLS = (
    ("LIVE −2s", "so far behind"), ("SAMPLED", "facts by snapshot"), ("PAUSED", "this view only"),
    ("STALE", "the target is silent"),
)
"""What the first word on the screen says about the rest."""


def help_lines(desk: Desk, width: int, height: int) -> list[Line]:
    """Two columns: this view, everywhere; then what the colours mean."""
    mine = [("↑ ↓ j k", "move"), ("g G", "first, last")] if desk.current not in (0,) else [("↑ ↓", "choose a warning")]
    mine += [hint for hint in desk.view.hints(desk) if hint not in mine]
    name = (*(long for long, _ in TABS), "Warnings", "Why")[desk.current]
    lines = [Row().put(f" {name.upper()}", "title").to(41).put("EVERYWHERE", "title")
             .line("" if desk.tall else "bar")]
    others = list(EVERYWHERE)
    if desk.recording:
        others += RECORDING
    elif desk.may_control:
        others += LIVE
    if len(desk.targets) > 1:
        others.append(("{ }", "previous, next target"))
    mine = [hint for hint in mine if hint[0] not in {key for key, _ in others}]
    mine += [("", ""), *PILLS]
    for index in range(max(len(mine), len(others))):
        row = Row().put(" ")
        if index < len(mine):
            row.put(mine[index][0], "key").to(12).put(mine[index][1], "muted")
        if index < len(others):
            row.to(41).put(others[index][0], "key").to(53).put(others[index][1], "muted")
        lines.append(row.line())
    lines.append(BLANK)
    staged = desk.glyphs.state[SlotState.ONBOARD_STAGED]
    row = Row().put(" COLOURS   ", "title")
    for label in ("prefilling", "decoding", "onboarding", "preempted"):
        state = next(one for one in desk.glyphs.state if one.label == label)
        row.put(desk.glyphs.state[state], f"state.{label}").put(f" {label}  ", "muted")
    row.put(desk.glyphs.held, "heldbox").put(" held", "muted").put(f"  {staged} waits", "muted")
    lines.append(row.line())
    return lines[:height]
