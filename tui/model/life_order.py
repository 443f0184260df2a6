"""The rows of the timeline: which lives, in which order.

Law of this file: those that need a person first, then by arrival; rows move at most once a second and the selected one
never does. While nothing is selected, new ones come in at the top at once: the live edge is never empty.
"""

from .filters import Filter
from .lints import slot_level
from .lives import Life
from .mirror import Mirror
from .rows import SORT_EVERY_NS


class LifeOrder:
    """The order over time."""

    def __init__(self) -> None:
        self.by_arrival = False
        self._numbers: list[int] = []
        self._needy = 0
        """How many at the top need a person."""
        self._sorted_mono = -SORT_EVERY_NS
        self._sorted_by: tuple[bool, str] = (False, "")
        self._chosen: Life | None = None

    def update(self, mirror: Mirror, mono_ns: int, selected: str | None, wanted: Filter | None) -> list[Life]:
        """Lives from the first row to the last, live ones and the recently finished."""
        state = mirror.state
        assert state is not None
        now = mirror.now_ns(mono_ns)
        by_slot = {life.slot: life for life in mirror.past} | mirror.lives

        def key(life: Life) -> tuple[int, int]:
            slot = state.slots.get(life.slot)
            level = slot_level(mirror, slot, now) if slot is not None and not self.by_arrival else None
            return (9, -life.slot) if level is None else (int(level), life.slot)

        key_now = (self.by_arrival, wanted.text if wanted is not None else "")
        if key_now == self._sorted_by and 0 <= mono_ns - self._sorted_mono < SORT_EVERY_NS:
            if selected is None:
                known = set(self._numbers)
                fresh = [
                    number for number, life in mirror.lives.items()
                    if number not in known and (wanted is None or wanted.matches(life, state, now))
                ]
                self._numbers[self._needy : self._needy] = sorted(fresh, reverse=True)
            return [by_slot[number] for number in self._numbers if number in by_slot]
        self._sorted_by, self._sorted_mono = key_now, mono_ns
        lives = [life for life in by_slot.values() if wanted is None or wanted.matches(life, state, now)]
        lives.sort(key=key)
        self._needy = sum(key(life)[0] < 9 for life in lives[:len(mirror.lives)])
        at = next((i for i, number in enumerate(self._numbers) if by_slot.get(number) is self._chosen), None)
        if at is not None and self._chosen in lives and self._chosen.request == selected:
            lives.remove(self._chosen)
            lives.insert(min(at, len(lives)), self._chosen)
        self._numbers = [life.slot for life in lives]
        self._chosen = mirror.life_of(selected) if selected else None
        return lives
