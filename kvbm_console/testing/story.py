"""The story of a slot, and the assertion about it.

Law of this file: a story is told from events. One rule decides which chapters a test may leave out, and a failure
prints all.
"""

from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Final

from kvbm_console.core import events as ev
from kvbm_console.core.describe import describe, slot_of, slots_of
from kvbm_console.core.ids import SlotState
from kvbm_console.core.state import CacheState

STATES: Final = frozenset(state.label for state in SlotState)


class Chapter:
    """An event of a story. ``state`` is the state that it leads to, None unless it is a move."""

    def __init__(self, event: ev.Event, text: str, state: str | None) -> None:
        self.event = event
        self.kind = type(event).__name__
        self.text = text
        self.state = state

    def fits(self, wanted: str) -> bool:
        """True if the chapter matches an item such as ``prefilling``, ``BlocksStaged`` or ``HoldReleased: expired``."""
        name, _, words = wanted.partition(":")
        return name.strip() in (self.kind, self.state) and words.strip() in self.text

    def __str__(self) -> str:
        name = self.kind if self.state is None else self.state
        return f"{self.event.seq:>6}  {self.event.at_ns / 1e6:>12.3f} ms  {name:<20} {self.text}"


class Story:
    """The events of a slot, its candidates and its operations, in order."""

    def __init__(self, request: str, chapters: list[Chapter]) -> None:
        self.request = request
        self.chapters = chapters

    @property
    def states(self) -> list[str]:
        """The states that it was in, in order."""
        return [chapter.state for chapter in self.chapters if chapter.state is not None]

    def kinds(self) -> list[str]:
        """The kinds of its events, in order."""
        return [chapter.kind for chapter in self.chapters]

    def __str__(self) -> str:
        return "\n".join(map(str, self.chapters)) or "(nothing happened)"


def tell(request: str, begin: CacheState, events: Iterable[ev.Event]) -> Story:
    """The story of a request. ``begin`` are the facts in front of the events and is folded forward.

    The last slot counts if several have this name. Raises ``AssertionError`` when there is none.
    """
    state = begin
    number = state.slot_of.get(request)
    chapters: list[Chapter] = []
    for event in events:
        if isinstance(event, ev.SlotOpened | ev.SlotCloned) and event.request == request:
            number, chapters = event.slot, []
        if number is not None and (number in slots_of(event) or slot_of(event, state) == number):
            chapters.append(_chapter(event, state))
        state.apply(event)
    if number is None:
        raise AssertionError(f"no slot of request {request!r} was ever opened")
    return Story(request, chapters)


def _chapter(event: ev.Event, state: CacheState) -> Chapter:
    new: str | None = None
    if isinstance(event, ev.SlotOpened):
        new = SlotState.INITIALIZED.label
    elif isinstance(event, ev.SlotMoved):
        new = event.new.label
    elif isinstance(event, ev.SlotCloned):
        new = state.slots[event.parent].state.label
    return Chapter(event, describe(event, state), new)


def assert_story(slot: Story, expected: Sequence[str | EllipsisType]) -> None:
    """The story of ``slot`` matches ``expected``.

    An item is a state (``"onboarding"``), a kind of event (``"BlocksStaged"``), either with words of its description
    (``"HoldReleased: expired"``), or ``...`` for anything. Kinds that the list does not name are left out of the
    story; moves are left out only if it names no state.
    """
    names = {item.partition(":")[0].strip() for item in expected if isinstance(item, str)}
    unknown = sorted(name for name in names - STATES if not hasattr(ev, name))
    if unknown:
        raise AssertionError(f"neither a state nor a kind of event: {', '.join(unknown)}")
    moves = bool(names & STATES)
    chapters = [chapter for chapter in slot.chapters if chapter.kind in names or (moves and chapter.state is not None)]
    reached = _reach(chapters, list(expected))
    if reached is not None:
        at, item = reached
        wanted = f"expected {item!r}" if item is not None else "expected nothing more"
        got = str(chapters[at]).strip() if at < len(chapters) else "the story ends"
        raise AssertionError(
            f"the story of {slot.request} differs: {wanted}, and {got}\n"
            f"expected  {', '.join('...' if item is ... else str(item) for item in expected)}\n"
            f"told      {', '.join(chapter.state or chapter.kind for chapter in chapters)}\n\n{slot}"
        )


def _reach(chapters: list[Chapter], expected: list[str | EllipsisType]) -> tuple[int, str | None] | None:
    """None when the chapters match, else (chapter at which the best attempt failed, the item expected there)."""
    furthest: tuple[int, str | None] = (0, None)
    # (chapter, item) places still to try: every ``...`` may stand for any number of chapters.
    places: list[tuple[int, int]] = [(0, 0)]
    seen: set[tuple[int, int]] = set()
    while places:
        at, item = places.pop()
        if (at, item) in seen:
            continue
        seen.add((at, item))
        if item == len(expected):
            if at == len(chapters):
                return None
            furthest = max(furthest, (at, None), key=lambda place: place[0])
            continue
        wanted = expected[item]
        if isinstance(wanted, EllipsisType):
            places.append((at, item + 1))
            if at < len(chapters):
                places.append((at + 1, item))
        elif at < len(chapters) and chapters[at].fits(wanted):
            places.append((at + 1, item + 1))
        elif at >= furthest[0]:
            furthest = (at, wanted)
    return furthest
