"""Overview: can I believe the screen, what needs me, does the cache work, what flows.

Law of this file: the order of sections is fixed; what does not fit goes from the least useful end: counts of states
fold to one row, then trends, then routes without traffic.
"""

from itertools import islice

from kvbm_console.core.state import CacheState

from ..desk import Desk
from ..draw import words
from ..draw.frame import Hint
from ..draw.spans import BLANK, Line, Row, beside
from ..model.lints import Warning, ended_text, tally
from ..model.numbers import S, cut, plain
from ..model.sources import blocks_only
from .engines import engines_section
from .event_rows import EventLines
from .page import Page
from .sections import (
    cache_section,
    charts_section,
    engine_section,
    flows_section,
    nothing_yet,
    slots_section,
    tiers_section,
    waiting_section,
)
from .warnings import open_warning

NEEDS_SHORT = 4
"""Rows of warnings below 36 rows of screen."""
NEEDS_TALL = 8
FAST_RATE = 1_000
"""Events a second above which nobody reads them one by one: their rows then change FAST_HZ times a second."""
FAST_HZ = 8
EVENTS_MIN = 3
"""Fewer rows of events say nothing."""
SIDE = 76
"""Where the second column starts."""
THIRD = 131


class Overview(Page):
    """View 1."""

    def __init__(self) -> None:
        self.at = 0
        """The warning that ``enter`` opens."""
        self._lines = EventLines()
        self._newest: tuple[tuple[object, ...], list[Line]] = ((), [])

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """Sections from top to bottom, in one, two or three columns."""
        state = desk.mirror.state
        assert state is not None
        if not state.slots and not state.totals.slots_opened:
            if blocks_only(state):
                needs = self._needs(desk, width)
                rows = [*needs, *([BLANK] if desk.tall else []), *engines_section(desk, state, width)]
                return rows + self._events(desk, width, height - len(rows), [BLANK])
            return nothing_yet(desk, state)
        gap = [BLANK] if desk.tall else []
        needs = self._needs(desk, width)
        if width >= 180:
            rows = self._three(desk, state, width, height - len(needs) - len(gap))
        elif width >= 118:
            rows = self._two(desk, state, width, height - len(needs) - len(gap))
        else:
            rows = self._one(desk, state, width, height - len(needs) - len(gap))
        return [*needs, *gap, *rows]

    def hints(self, desk: Desk) -> list[Hint]:
        """Keys of the overview."""
        hints = [("enter", "open")] if desk.warnings else []
        if desk.mirror.state is not None and desk.mirror.state.holds and desk.may_control:
            hints.append(("c", "continue"))
        hints += [(":", "commands"), ("space", "pause view" if not desk.recording else "play"), ("!", "warnings")]
        hints.append(("e", "export"))
        return hints

    def press(self, desk: Desk, key: str) -> bool:
        """Up and down choose a warning, enter opens what it is about."""
        last = max(0, min(len(desk.warnings), NEEDS_TALL if desk.tall else NEEDS_SHORT) - 1)
        if key in ("down", "j"):
            self.at = min(last, self.at + 1)
        elif key in ("up", "k"):
            self.at = max(0, self.at - 1)
        elif key == "enter" and desk.warnings:
            open_warning(desk, desk.warnings[min(self.at, len(desk.warnings) - 1)])
        elif key.startswith("row:") and int(key[4:]) < len(desk.warnings):
            self.at = int(key[4:])
            open_warning(desk, desk.warnings[self.at])
        else:
            return False
        return True

    # --- layouts -----------------------------------------------------------------------------------------------------

    def _one(self, desk: Desk, state: CacheState, width: int, height: int) -> list[Line]:
        gap = [BLANK] if desk.tall else []
        for saving in range(4):
            parts = [
                cache_section(desk, state, width - 1, trends=saving < 2),
                tiers_section(desk, state, width - 1, trends=saving < 2),
                flows_section(desk, state, width - 1, trends=saving < 2, busy_only=saving >= 3),
                slots_section(desk, state, 1, width - 2, 26, folded=saving >= 1),
            ]
            rows = [line for part in parts for line in [*part, *gap]]
            if len(rows) - len(gap) <= height:
                break
        left = height - len(rows)
        if left >= 3:
            rows += waiting_section(desk, state, min(left - 1, 6), width - 1, with_state=True)
        return rows

    def _two(self, desk: Desk, state: CacheState, width: int, height: int) -> list[Line]:
        gap = [BLANK] if desk.tall else []
        left_rows = [
            *cache_section(desk, state, 71), *gap, *tiers_section(desk, state, 71), *gap,
            *flows_section(desk, state, 71),
        ]
        right = slots_section(desk, state, 0, 43, 22)
        engine_at = 3 + len(gap) + 4 + len(gap) if desk.tall else len(right)
        right += [BLANK] * max(len(gap), engine_at - len(right))
        right += engine_section(desk, state, 20)
        rows = beside(left_rows, right, SIDE)
        left = height - len(rows)
        chart_rows = 5 if left >= 16 else 0
        waiting = min(6, left - len(gap) - 1 - (chart_rows + 1 + len(gap) if chart_rows else 0))
        if waiting >= 2:
            rows += [*gap, *waiting_section(desk, state, waiting, width - 1, with_state=True)]
        if chart_rows:
            rows += [*gap, *charts_section(desk, state, width, 2, chart_rows)]
        return rows + self._events(desk, width, height - len(rows), gap)

    def _three(self, desk: Desk, state: CacheState, width: int, height: int) -> list[Line]:
        gap = [BLANK] if desk.tall else []
        left_rows = [
            *cache_section(desk, state, 71), *gap, *tiers_section(desk, state, 71), *gap,
            *flows_section(desk, state, 71),
        ]
        right = slots_section(desk, state, 0, 50, 26)
        engine_at = 3 + len(gap) + 4 + len(gap)
        right += [BLANK] * max(len(gap), engine_at - len(right))
        right += engine_section(desk, state, 26)
        waiting = waiting_section(desk, state, max(12, len(left_rows) - 1), width - THIRD - 1, with_state=False)
        rows = beside(beside(left_rows, right, SIDE), waiting, THIRD)
        rows += [*gap, *charts_section(desk, state, width, 3, 6)]
        return rows + self._events(desk, width, height - len(rows), gap)

    def _events(self, desk: Desk, width: int, height: int, gap: list[Line]) -> list[Line]:
        """The newest events, in the rows that are left."""
        left = height - len(gap) - 1
        if left < EVENTS_MIN:
            return []
        mono = desk.mono()
        often = S // FAST_HZ if desk.mirror.progress.rate(mono) > FAST_RATE else 1
        key = (desk.mirror.log_total if often == 1 else mono // often, left, width, desk.selected, desk.times.wall)
        if key != self._newest[0]:
            lines = [self._lines.line(desk, event, width) for event in islice(reversed(desk.mirror.log), left)]
            self._newest = key, lines[::-1]
        return [*gap, desk.title("EVENTS", "newest last"), *self._newest[1]]

    # --- what needs a person -----------------------------------------------------------------------------------------

    def _needs(self, desk: Desk, width: int) -> list[Line]:
        warnings = desk.warnings
        lines = [desk.title("NEEDS YOU", tally(warnings))]
        most = NEEDS_TALL if desk.tall else NEEDS_SHORT
        shown = warnings[:most] if len(warnings) <= most else warnings[: most - 1]
        who_width = min(28, max((len(w.who) for w in shown), default=0))
        what_width = min(28, max((len(w.what) for w in shown), default=0))
        for index, warning in enumerate(shown):
            lines.append(_warning_line(desk, warning, width, who_width, what_width, index == self.at and index > 0))
        if len(shown) < len(warnings):
            lines.append(Row().put(f" +{len(warnings) - len(shown)} more", "muted").line())
        self.at = min(self.at, max(0, len(shown) - 1))
        return lines


def _warning_line(desk: Desk, warning: Warning, width: int, who: int, what: int, chosen: bool) -> Line:
    over = warning.ended_ns is not None
    row = Row().put(desk.glyphs.select if chosen else " ", "selbar")
    row.spans(words.mark(None if over else warning.level, desk.glyphs)).put(" ")
    row.spans([words.request(warning.who, who, "muted" if over else "strong")]).to(4 + who + 2)
    row.put(cut(warning.what, what), "muted" if over else words.LEVEL_ROLE[warning.level]).to(4 + who + 2 + what + 2)
    key, word = warning.action
    usable = key not in ("c", "C") or desk.may_control
    wide = width >= 110 and usable
    room = (width - 20 if wide else width - 1) - row.x - (2 if wide else 0)
    row.put(cut(plain(ended_text(warning) or warning.because), room), "muted" if over else "text")
    if wide and not over:
        row.to(width - 20).put(key, "key").put(f"  {word}", "muted")
    row.zone(0, ("row", desk.warnings.index(warning)), width)
    return row.line("", width)
