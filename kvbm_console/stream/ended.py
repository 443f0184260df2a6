"""Holds that have ended, and holds that were refused, with slot, site, duration and reason.

Law of this file: every end and every refusal leaves a trace. Refusals in a row are one entry that counts them, because
a breakpoint that every request hits is refused thousands of times.
"""

from collections import deque
from typing import Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.holds import ended_text
from kvbm_console.core.ids import HoldEnd, Site, WaitPoint
from kvbm_console.core.state import CacheState

ENDED_MAX: Final = 64
"""Entries that are kept, as many as a person scrolls through; the recording has all."""


class EndedHold(msgspec.Struct):
    """A hold that ended, or, without a number, refused holds."""

    hold: int | None
    request: str
    site: Site
    point: WaitPoint | None
    at_ns: int
    """Time of the end, or of the last refusal."""
    held_ns: int
    why: HoldEnd | None
    """None: refused."""
    by: str
    text: str
    """The reason, as a clause."""
    times: int = 1


class EndedHolds:
    """``take`` is given every event of a hold; ``last`` are the entries, the newest at the end."""

    def __init__(self) -> None:
        self.last: deque[EndedHold] = deque(maxlen=ENDED_MAX)
        self.count = 0
        """Entries so far, including forgotten entries."""
        self._open: dict[int, tuple[str, ev.SlotHeld]] = {}

    def take(self, event: ev.Event, state: CacheState, request: str | None = None) -> None:
        """Take an event, before or after it was applied to the facts. ``request`` is the slot's request, if known."""
        if isinstance(event, ev.SlotHeld):
            self._open[event.hold] = request or _request(state, event.slot), event
        elif isinstance(event, ev.HoldReleased):
            self._ended(event, state, request or _request(state, event.slot))
        elif isinstance(event, ev.HoldDenied):
            self._refused(event, request or _request(state, event.slot))

    def _ended(self, event: ev.HoldReleased, state: CacheState, name: str) -> None:
        request, held = self._open.pop(event.hold, (name, None))
        known = held or state.holds.get(event.hold)  # a hold that began before the first event we saw
        site, point = (known.site, known.point) if known is not None else (Site.TRANSITION_DID, None)
        text = ended_text(event.why, event.by)
        self.count += 1
        self.last.append(
            EndedHold(event.hold, request, site, point, event.at_ns, event.held_ns, event.why, event.by, text)
        )

    def _refused(self, event: ev.HoldDenied, request: str) -> None:
        times = 1
        if self.last and self.last[-1].why is None:
            times += self.last.pop().times
        else:
            self.count += 1
        text = f"refused: {event.why}"
        self.last.append(EndedHold(None, request, event.site, None, event.at_ns, 0, None, "", text, times))


def _request(state: CacheState, slot: int) -> str:
    known = state.slots.get(slot)
    return f"slot {slot}" if known is None else known.request
