"""The slot list: the shares of a prompt, the facts of one row, and the order of the rows.

After an admission the shares of a prompt found in a tier are those of ``why``. Before an admission, and after a
preemption, nothing is in device memory for the request: found is what the look-up reserved, and nothing is computed.

Law of this file: trouble first; rows move at most once a second and the selected row never moves.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from kvbm_console.analysis.lints import WATCHED, Level
from kvbm_console.core.ids import SlotState, Tier
from kvbm_console.core.slots import WAITING_STATES, SlotFacts
from kvbm_console.core.state import CacheState

from .filters import Filter
from .lints import slot_level
from .mirror import Mirror
from .numbers import S
from .waits import waits_for


class Prompt(msgspec.Struct, frozen=True):
    """Tokens of a prompt; ``found`` is by tier, G1 to G4. The parts add up to the prompt."""

    found: tuple[int, ...]
    computed: int
    to_do: int
    reached: int
    """Tokens of the sequence whose K/V exist, those behind the prompt included."""
    block_tokens: int


def prompt_of(state: CacheState, slot: SlotFacts) -> Prompt:
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
    return Prompt(tuple(found), computed, left - computed, reached, size)


SORT_EVERY_NS: Final = S
"""Rows may move only this often."""
SORTS: Final = ("need", "age", "request", "tokens", "arrival")

_S = SlotState
_RANK: Final = {
    _S.PREEMPTED: 3, _S.ONBOARD_STAGED: 3, _S.ONBOARDING: 3, _S.INITIALIZED: 4, _S.FINISHING: 4, _S.PREFILLING: 5,
    _S.SKIPPED_PREFILL: 6, _S.DECODING: 7, _S.SKIPPED_DECODE: 8, _S.FINISHED: 9,
}
"""Among slots without trouble: those that wait for blocks or copies first, then work by phase."""


class SlotRow(msgspec.Struct):
    """One line of the slot list."""

    slot: SlotFacts
    level: Level | None
    age_ns: int
    prompt: Prompt
    waits: str
    blocks: dict[Tier, int]
    """Blocks of the slot by tier: its device blocks, and what its admission or look-up found below."""


def slot_row(mirror: Mirror, slot: SlotFacts, mono_ns: int) -> SlotRow:
    """What the list says of one slot."""
    now = mirror.now_ns(mono_ns)
    state = mirror.state
    assert state is not None
    prompt = prompt_of(state, slot)
    blocks = {Tier.G1: len(slot.device_blocks)}
    for tier, tokens in zip((Tier.G2, Tier.G3, Tier.G4), prompt.found[1:], strict=True):
        blocks[tier] = tokens // prompt.block_tokens
    age = now - slot.since_ns
    if slot.hold is not None:
        age = mirror.hold_age_ns(slot.hold, mono_ns)
    return SlotRow(
        slot, slot_level(mirror, slot, now), age, prompt, waits_for(mirror, slot, mono_ns), blocks
    )


def limits(mirror: Mirror) -> dict[SlotState, int]:
    """The limit of every watched state now."""
    return {state: mirror.stuck.limit(state) for state in WATCHED}


class SlotOrder:
    """The order of the list over time."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.matched = 0
        self._sorted_mono: int | None = None
        self._key: tuple[str, bool, str] = ("", False, "")

    def update(
        self, mirror: Mirror, mono_ns: int, selected: int | None, sort: str, reverse: bool, wanted: Filter | None
    ) -> list[int]:
        """Slot numbers from the first row to the last.

        Between two sorts new ones stand at the end, and those that ended go at once, unless the selected one stands
        below them: so that it does not move, they keep their place until a new one takes it or the next sort comes.
        """
        state = mirror.state
        if state is None:
            self.numbers = []
            return self.numbers
        key = (sort, reverse, wanted.text if wanted is not None else "")
        now = mirror.now_ns(mono_ns)
        due = self._sorted_mono is None or mono_ns - self._sorted_mono >= SORT_EVERY_NS or key != self._key
        if due:
            keep = selected if selected in self.numbers and key == self._key else None
            self._sorted_mono, self._key = mono_ns, key
            at = self.numbers.index(keep) if keep is not None else 0
            found = [
                slot for slot in state.slots.values() if wanted is None or wanted.matches(slot, state, now)
            ]
            found.sort(key=_sort_key(mirror, sort, mono_ns), reverse=reverse)
            self.numbers = [slot.slot for slot in found]
            if keep is not None and keep in self.numbers:
                self.numbers.remove(keep)
                self.numbers.insert(min(at, len(self.numbers)), keep)
            self.matched = len(found)
        else:
            known = set(self.numbers)
            fresh = [
                slot.slot for slot in state.slots.values()
                if slot.slot not in known and (wanted is None or wanted.matches(slot, state, now))
            ]
            if fresh:
                over = (i for i, number in enumerate(self.numbers) if number not in state.slots)
                for place, number in zip(over, fresh, strict=False):
                    self.numbers[place] = number
                    known.add(number)
                self.numbers += [number for number in fresh if number not in known]
            kept = self.numbers.index(selected) + 1 if selected in known else 0
            self.numbers[kept:] = [number for number in self.numbers[kept:] if number in state.slots]
        return self.numbers


def _sort_key(mirror: Mirror, sort: str, mono_ns: int) -> Callable[[SlotFacts], tuple[object, ...]]:
    state = mirror.state
    assert state is not None
    iteration = state.iteration
    if sort == "age":
        return lambda slot: (slot.since_ns, slot.slot)
    if sort == "request":
        return lambda slot: (slot.request,)
    if sort == "tokens":
        return lambda slot: (-slot.computed_tokens(iteration), slot.slot)
    if sort == "arrival":
        return lambda slot: (slot.slot,)
    now = mirror.now_ns(mono_ns)

    def need(slot: SlotFacts) -> tuple[object, ...]:
        level = slot_level(mirror, slot, now)
        rank = int(level) if level is not None else _RANK[slot.state]
        return rank, slot.since_ns, slot.slot

    return need
