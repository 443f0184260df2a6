"""Help: the keys of the view on the screen, the keys of every view, and the terms that need an explanation.

Law of this file: only keys that exist are listed.
"""

from kvbm_console.core.ids import SlotState

from ..desk import OVERVIEW, Desk, View
from ..draw.frame import NAMES
from ..draw.spans import BLANK, Line, Row
from ..model.numbers import wrap

EVERYWHERE = (
    ("1..9", "views"), ("/", "filter"), ("enter esc", "into, back"), (":", "commands"), ("space", "pause view, play"),
    ("← →", "back, on 10 s; shift 60 s"),
    ("! H", "warnings, newest hold"), ("t p M", "timeline, map, misses"), ("[ ]", "cause, effect"),
    ("w W", "why, what if"), ("m '", "mark, to mark"), ("y e q", "copy, export, quit"),
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
    ("LIVE −30s", "the past; → comes back"), ("SAMPLED", "facts by snapshot"), ("PAUSED", "this view only"),
    ("STALE", "the target is silent"),
)
"""The meanings of the first word on the screen."""


THIRD = 84
"""The third column, with the words of the view where it fits."""


def _words(desk: Desk, width: int, room: int) -> list[Line]:
    """The view's words with their meanings, as many as fit whole."""
    lines: list[Line] = []
    for word, meaning in desk.view.words:
        pieces = wrap(f"{word}: {meaning}", width - 3)
        if len(lines) + len(pieces) > room:
            break
        for index, piece in enumerate(pieces):
            row = Row().put(" ")
            if index == 0:
                row.put(word, "text").put(piece[len(word):], "muted")
            else:
                row.put(f"  {piece}", "muted")
            lines.append(row.line())
    return lines


class Help(View):
    """The screen behind ``?``."""

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """Two columns with the keys of this view and of all views, the words of the view, then the colours."""
        mine = [("↑ ↓", "choose a warning")] if desk.current == OVERVIEW else [
            ("↑ ↓ j k", "move"), ("g G", "first, last")]
        mine += [hint for hint in desk.hints if hint not in mine]
        name = NAMES[desk.current]
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
        third = width >= THIRD + 30
        room = height - 1 if third else height - 4 - len(mine)
        told = _words(desk, width - THIRD - 2 if third else 38, room if third else room - len(PILLS) - 1)
        if told or third:
            mine += [("", ""), *PILLS]
        else:
            told = _words(desk, 38, room)  # the words of the view are worth more rows than the pills
        if third and told:
            lines[0] = Row().add(lines[0]).to(THIRD).put("WORDS", "title").line(lines[0].ground)
        lefts = [Row().put(f" {desk.glyphs.keys(key)}", "key").to(12).put(word, "muted").line() for key, word in mine]
        if not third and told:
            lefts += [BLANK, *told]
        for index in range(max(len(lefts), len(others), len(told) if third else 0)):
            row = Row().add(lefts[index]) if index < len(lefts) else Row()
            if index < len(others):
                row.to(41).put(others[index][0], "key").to(53).put(others[index][1], "muted")
            if third and index < len(told):
                row.to(THIRD - 1).add(told[index])
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
