"""What is said above every view: the daemon is gone, the target is frozen, everything is held or waits for a hold.

Law of this file: whoever looks at a screen on which nothing moves reads why, until when, and the key that ends it.
"""

from typing import TYPE_CHECKING

from kvbm_console.core.ids import Suspend

from .draw.frame import message_line
from .draw.spans import Line
from .model.numbers import S, count, cut, plain, plural

if TYPE_CHECKING:
    from .desk import Desk


def banner(desk: "Desk", width: int) -> Line | None:
    """The first sentence that is true; None on an ordinary screen."""
    return _gone(desk, width) or _frozen(desk, width) or _all_held(desk, width) or _suspended(desk, width) or (
        _draining(desk, width)
    )


def _gone(desk: "Desk", width: int) -> Line | None:
    mirror = desk.mirror
    gone = mirror.disconnected
    if gone is None:
        return None
    since = desk.mono() - mirror.disconnected_mono_ns
    text = f"{'Daemon gone' if mirror.connected is not None else 'No daemon'} {since // S} s ago."
    if mirror.state is not None:
        text += f" Shown: seq {count(mirror.state.seq - 1)}, {desk.times.text(mirror.state.at_ns)}."
    left = desk.retry_left()
    if left is not None:
        text += f" Next try in {left} s.  r  now"
    else:
        text += f" {gone.reason}"
    return message_line(text, ("key", "r"), width)


def _frozen(desk: "Desk", width: int) -> Line | None:
    """Also on a recording, where it is what the run did."""
    state = desk.mirror.state
    if state is None or state.frozen is None:
        return None
    by = plain(state.frozen.by) or "a breakpoint"
    if desk.recording:
        return message_line(f"Frozen by {by}.", None, width)
    left = max(0, desk.mirror.frozen_left_ns(desk.mono()) or 0)
    text = f"Frozen by {by}. Thaws by itself in {left // S} s."
    return message_line(text + ("  F  thaw now" if desk.may_control else ""), ("key", "F"), width)


def _draining(desk: "Desk", width: int) -> Line | None:
    """New requests are refused, which looks like an engine without work."""
    state = desk.mirror.state
    if state is None or not state.draining:
        return None
    live, copies = plural(len(state.slots), "live request"), plural(len(state.operations), "copy", "copies")
    return message_line(f"Draining: no new request is taken; {live}, {copies} in flight. Then a reset.", None, width)


def _all_held(desk: "Desk", width: int) -> Line | None:
    """Nothing moves because somebody looks at all of it."""
    state = desk.mirror.state
    if state is None or desk.recording or not state.all_held:
        return None
    left = min(max(0, desk.mirror.hold_left_ns(hold, desk.mono()) or 0) for hold in state.holds)
    text = f"Everything in flight is held ({len(state.holds)}). Resumes by itself in {left // S} s."
    return message_line(text + ("  C  continue all" if desk.may_control else ""), ("key", "C"), width)


def _suspended(desk: "Desk", width: int) -> Line | None:
    """One hold makes the others wait as well: they are not held, and still nothing begins."""
    state = desk.mirror.state
    if state is None or desk.recording:
        return None
    holds = [hold for hold in state.holds.values() if hold.suspend is not Suspend.SLOT]
    if not holds:
        return None
    hold = max(holds, key=lambda hold: (hold.suspend, desk.mirror.hold_left_ns(hold.hold, desk.mono()) or 0))
    left = max(0, desk.mirror.hold_left_ns(hold.hold, desk.mono()) or 0)
    what = "Engines wait" if hold.suspend is Suspend.ALL else "All copies wait"
    text = f"{what} for held {cut(plain(state.slots[hold.slot].request), 20)}. Resumes by itself in {left // S} s."
    return message_line(text + ("  C  continue all" if desk.may_control else ""), ("key", "C"), width)
