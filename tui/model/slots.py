"""The slot list: the shares of a prompt, the facts of one row, and the order of the rows.

After an admission the shares of a prompt found in a tier are those of ``why``. Before an admission, and after a
preemption, nothing is in device memory for the request: the found blocks are those that the look-up
reserved, and nothing is computed.

Law of this file: trouble comes first. Rows move at most once a second, and the selected row never moves.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Final

import msgspec

from kvbm_console.analysis.lints import WATCHED, Level
from kvbm_console.analysis.lives import Life
from kvbm_console.analysis.waits import daemons
from kvbm_console.core.ids import SlotState, Tier
from kvbm_console.core.slots import WAITING_STATES, SlotFacts
from kvbm_console.core.state import CacheState

from .filters import Filter
from .lints import slot_level
from .mirror import Mirror
from .numbers import S
from .waits import waits_for

Limits = Callable[[Life, SlotState], int | None]
"""How long a life may stay in a state; None without a limit."""
SORT_EVERY_NS: Final = S
"""Rows may move only this often."""


class PromptShares(msgspec.Struct, frozen=True):
    """Tokens of a prompt; ``found`` is by tier, G1 to G4. The parts add up to the prompt."""

    found: tuple[int, ...]
    computed: int
    to_do: int
    reached: int
    """Tokens of the sequence whose K/V exist, those behind the prompt included."""
    block_tokens: int


def prompt_of(state: CacheState, slot: SlotFacts) -> PromptShares:
    """The shares of the prompt now."""
    pool = state.pools[slot.device_pool] if slot.device_pool is not None else state.pool_of(Tier.G1, slot.source)
    size = pool.info.block_tokens if pool is not None else state.pools[0].info.block_tokens if state.pools else 1
    if slot.device_blocks or slot.state not in WAITING_STATES:
        tokens, reached = list(state.found_tokens(slot)), slot.computed_tokens(state.iteration)
    else:
        tokens, reached = [slot.local_blocks * size, 0, 0, 0], 0
        for index, places in slot.staged:
            tokens[state.pools[index].info.tier - 1] += len(places) * size
    found: list[int] = []
    left = slot.prompt_tokens
    for amount in tokens:
        found.append(min(amount, left))
        left -= found[-1]
    computed = min(left, max(0, reached - sum(found)))
    return PromptShares(tuple(found), computed, left - computed, reached, size)


class SlotRow:
    """A row of the slot list; each fact is computed when it is first asked for."""

    def __init__(self, mirror: Mirror, slot: SlotFacts, mono_ns: int) -> None:
        self.mirror = mirror
        self.state = mirror.facts
        self.slot = slot
        self.mono_ns = mono_ns

    @cached_property
    def level(self) -> Level | None:
        """The mark of the slot."""
        return slot_level(self.mirror, self.slot, self.mirror.now_ns(self.mono_ns))

    @cached_property
    def age_ns(self) -> int:
        """How long the slot has been in its state, or held."""
        if self.slot.hold is not None:
            return self.mirror.hold_age_ns(self.slot.hold, self.mono_ns)
        return self.mirror.now_ns(self.mono_ns) - self.slot.since_ns

    @cached_property
    def prompt(self) -> PromptShares:
        """The shares of its prompt."""
        return prompt_of(self.state, self.slot)

    @cached_property
    def waits(self) -> str:
        """The thing that it waits for; empty when it works."""
        return waits_for(self.mirror, self.slot, self.mono_ns)

    def blocks(self, tier: Tier) -> int:
        """Its blocks in a tier: its device blocks, and below the blocks that its admission or look-up found."""
        if tier is Tier.G1:
            return len(self.slot.device_blocks)
        return self.prompt.found[tier - 1] // self.prompt.block_tokens


def limits(mirror: Mirror) -> Limits:
    """The limit of a life in a watched state now, by the stays of its own daemon."""
    count = 1 if mirror.state is None else daemons(mirror.state)
    known = [{state: mirror.stuck.limit(state, daemon) for state in WATCHED} for daemon in range(count)]
    return lambda life, state: known[((life.source or 1) - 1) % count].get(state)


class SlotOrder:
    """The rows of the list over time."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.matched = 0
        self._sorted_mono: int | None = None
        self._key: tuple[str, str] = ("", "")

    def update(
        self, mirror: Mirror, mono_ns: int, selected: int | None, order: str, sort: Callable[[list[SlotRow]], None],
        wanted: Filter | None,
    ) -> list[int]:
        """Slot numbers from the first row to the last; ``order`` names the order that ``sort`` makes.

        Between two sorts new slots stand at the end, and ended slots go at once, unless the selected row stands below
        them: so that it does not move, they keep their place until a new slot takes it or the next sort comes.
        """
        state = mirror.state
        if state is None:
            self.numbers = []
            return self.numbers
        key = (order, wanted.text if wanted is not None else "")
        now = mirror.now_ns(mono_ns)

        def stays(slot: SlotFacts) -> bool:
            return wanted is None or wanted.matches(slot, state, now)

        if self._sorted_mono is None or mono_ns - self._sorted_mono >= SORT_EVERY_NS or key != self._key:
            keep = selected if selected in self.numbers and key == self._key else None
            at = self.numbers.index(keep) if keep is not None else 0
            rows = [SlotRow(mirror, slot, mono_ns) for slot in state.slots.values() if stays(slot)]
            sort(rows)
            self._sorted_mono, self._key, self.matched = mono_ns, key, len(rows)
            self.numbers = [row.slot.slot for row in rows]
            if keep is not None and keep in self.numbers:
                self.numbers.remove(keep)
                self.numbers.insert(min(at, len(self.numbers)), keep)
            return self.numbers
        known = set(self.numbers)
        fresh = [slot.slot for slot in state.slots.values() if slot.slot not in known and stays(slot)]
        if fresh:
            over = (i for i, number in enumerate(self.numbers) if number not in state.slots)
            for place, number in zip(over, fresh, strict=False):
                self.numbers[place] = number
                known.add(number)
            self.numbers += [number for number in fresh if number not in known]
        kept = self.numbers.index(selected) + 1 if selected in known else 0
        self.numbers[kept:] = [number for number in self.numbers[kept:] if number in state.slots]
        return self.numbers
