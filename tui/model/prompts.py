"""The prompt of a request in shares: found in a tier, computed here, to do.

Law of this file: after an admission the shares found are those of ``why``. Before it, and after a preemption, nothing
is in device memory for the request: found is what the look-up reserved, and nothing is computed.
"""

import msgspec

from kvbm_console.core.ids import Tier
from kvbm_console.core.slots import WAITING_STATES, SlotFacts
from kvbm_console.core.state import CacheState


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
