"""The past of a target that was running before this console came: what its daemon still remembers, as history.

Facts come from the snapshot behind it. The past fills what facts do not keep: lives with their moves and stories,
copies that ended, rates, the log. A slot that was there before is followed from where the past begins.

Law of this file: what the past does not tell is not guessed: levels of tiers and tokens a second stay blank before the
snapshot, a slot that ended in it without having begun in it is left out.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvbm_console.core import events as ev
from kvbm_console.stream.feed import PastSeen

from .history import HISTORY
from .lives import Life, Move

if TYPE_CHECKING:
    from .mirror import Mirror

PAST_EVENTS: Final = 8_192
"""Events asked for: seconds of a busy engine, minutes of an ordinary one, for less than a tenth of a second of work
before the first picture."""
SLICE_EVENTS: Final = 400
_SECOND_NS: Final = 1_000_000_000


def take_past(mirror: "Mirror", item: PastSeen, mono_ns: int) -> Iterator[None]:
    """Fold the events into the history of a mirror that has no facts yet; one that has some learns nothing from it.

    It stops after every ``SLICE_EVENTS``, so that keys get a turn.
    """
    events = item.events
    if mirror.state is not None or not events:
        return
    begin_ns = events[0].at_ns
    for number, slot in item.state.slots.items():
        if slot.opened_ns < begin_ns:
            mirror.lives[number] = Life(number, slot.request, slot.opened_ns)
    second, counted = begin_ns // _SECOND_NS, 0
    for event in events:
        if event.at_ns // _SECOND_NS != second:
            _tell_second(mirror, second, counted)
            second, counted = event.at_ns // _SECOND_NS, 0
        counted += 1
        mirror.density.add(event.at_ns, 1)
        _keep(mirror, event, begin_ns)
        if event.seq % SLICE_EVENTS == 0:
            yield
    _tell_second(mirror, second, counted)
    mirror.hold_mono.clear()  # when they began by the local clock is worked out from the snapshot
    mirror.log.extend(events)
    mirror.log_total += len(events)
    mirror.clock.event(events[-1].at_ns, mono_ns)
    mirror.next_seq = events[-1].seq + 1


def _keep(mirror: "Mirror", event: ev.Event, begin_ns: int) -> None:
    if isinstance(event, ev.IterationAdvanced):
        mirror.steps.append((event.iteration, event.at_ns))  # its tokens need to know who was decoding
        return
    if isinstance(event, ev.SlotMoved):
        life = mirror.lives.get(event.slot)
        if life is not None and not life.moves:
            life.add(Move(begin_ns, event.old, None))
    if isinstance(event, ev.HoldParked):
        for life in mirror.lives.values():  # the facts, which know whose hold it is, come later
            if any(stay.hold == event.hold for stay in life.stays):
                life.story.append(event)
        return
    keep = HISTORY.get(type(event))
    if keep is None:
        return
    try:
        keep(mirror, event)
    except KeyError:
        return  # about a copy that was planned before the past begins


def _tell_second(mirror: "Mirror", second: int, events: int) -> None:
    """A second of the past is over."""
    at_ns = second * _SECOND_NS
    flows = mirror.flows
    flows.events.add(at_ns, events)
    asked, hits = flows.hit_shares(at_ns)
    flows.hit_rate.set(at_ns, sum(hits) / asked if asked else None)
