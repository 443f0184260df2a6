"""Figures of the core: the gate, the digest, the audit, and what an armed breakpoint costs."""

from typing import Any, Final

import xxhash

from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import audit
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import StimulusRejected
from kvbm_console.core.ids import SlotState, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.snapshots import digest, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import READY, PoolFacts, PoolInfo
from tests.benchmarks import samples
from tests.benchmarks.harness import Figure, Target, measure

BATCHES: Final = 40
"""Some 3,200 events before a new leader begins: arming it weighs little, and it does not grow."""
AUDIT_PLACES: Final = 4_096
AUDIT_SLOTS: Final = 256
TURN_NS: Final = 500_000
"""One batch: with thousands of such turns the difference of two equal sides is below 20 ns."""
UNROLLED: Final = 200
"""Sites in one call, so that the loop around them weighs nothing."""


class _Sites(Leader):
    """A leader with the same call twice: with the check that every site makes, and without it."""

    def site(self, slot: object) -> object:
        if self.gate is not None:
            raise AssertionError
        return slot

    def no_site(self, slot: object) -> object:
        return slot


def gate_off() -> Figure:
    """One ``is not None`` per site."""
    leader = _Sites(samples.CONFIG)
    calls = "\n    ".join(["ask(1)"] * UNROLLED)
    made: dict[str, Any] = {}
    exec(f"def with_site(ask):\n    {calls}\ndef without_site(ask):\n    {calls}", made)
    return measure(
        "gate off", lambda: made["with_site"](leader.site), UNROLLED, "the same call without",
        lambda: made["without_site"](leader.no_site), UNROLLED, Target(extra_ns=5),
    )


def filled_state(places: int) -> CacheState:
    """Facts with one full pool."""
    state = CacheState()
    pool = PoolFacts(PoolInfo(0, 0, 0, 0, Tier.G2, "CPU_PINNED", places, 16, 0))  # type: ignore[arg-type]
    pool.store(range(places), range(1, places + 1), READY, 0)
    state.pools.append(pool)
    return state


def _digest(places: int, target: Target) -> Figure:
    state = filled_state(places)
    data = encode_facts(state)
    return measure(
        f"digest, {places:,} blocks", lambda: digest(state), 1, "xxh3 of the encoded facts",
        lambda: xxhash.xxh3_64_intdigest(data), 1, target,
    )


def digest_small() -> Figure:
    """At the size of a device pool."""
    return _digest(4_096, Target(ns=50_000))


def digest_large() -> Figure:
    """At the size of a host pool."""
    return _digest(100_000, Target(ns=1_000_000))


def full_audit() -> Figure:
    """A full pool, and as many slots as an engine runs."""
    state = filled_state(AUDIT_PLACES)
    per_slot = AUDIT_PLACES // AUDIT_SLOTS
    for slot in range(AUDIT_SLOTS):
        ids = list(range(slot * per_slot, (slot + 1) * per_slot))
        state.slots[slot] = SlotFacts(
            slot=slot, request=f"request-{slot}", source=1, state=SlotState.DECODING, since_ns=0, opened_ns=0,
            hashes=[place + 1 for place in ids], prompt_tokens=per_slot * 16, output_limit=8, priority=0, session=None,
            prompt_blocks=per_slot, anchor_tokens=per_slot * 16, device_pool=0, device_blocks=ids,
            filled_blocks=per_slot,
        )
        state.pools[0].ref(ids)
    assert not audit(state)
    data = encode_facts(state)
    return measure(
        "audit", lambda: audit(state), 1, "xxh3 of the encoded facts",
        lambda: xxhash.xxh3_64_intdigest(data), 1, Target(ns=2_000_000),
    )


class _Side:
    """A leader with these breakpoints that handles the traffic of the benchmarks, one batch with each call.

    So two sides take turns of half a millisecond, and what a neighbour does to the caches and to the clock meets both.
    When the traffic ends a new leader begins with it.
    """

    def __init__(self, specs: tuple[BreakpointSpec, ...], others: tuple[BreakpointSpec, ...]) -> None:
        declared, *rest = samples.stimuli(BATCHES)
        size = len(rest) // BATCHES
        self._changes = [st.BreakpointsReplaced(0, 0, 0, None, "bench", each) for each in (others, specs)]
        self._declared = declared
        self._batches = [rest[at : at + size] for at in range(0, len(rest), size)]
        self._armed = bool(specs)
        self._at = 0

    def begin(self) -> None:
        """The same work on both sides: one arms last what the other arms first."""
        self._leader = Leader(samples.CONFIG)
        for stimulus in (self._declared, *self._changes):
            self._leader.handle(stimulus)
        assert (self._leader.gate is not None) is self._armed

    def __call__(self) -> None:
        if not self._at:
            self.begin()
        handle = self._leader.handle
        for stimulus in self._batches[self._at]:
            outcome = handle(stimulus)
            assert not outcome.events or type(outcome.events[0]) is not StimulusRejected
        self._at = (self._at + 1) % BATCHES


def beside_none(name: str, specs: tuple[BreakpointSpec, ...], target: Target) -> Figure:
    """A leader with breakpoints that match nobody, beside one with none."""
    items = (len(samples.events(BATCHES)) - 1) // BATCHES
    return measure(
        name, _Side(specs, ()), items, "none armed", _Side((), specs), items, target, rounds=61, turns=160,
        turn_ns=TURN_NS,
    )


def armed_breakpoint() -> Figure:
    """One, in a state that every request enters."""
    spec = BreakpointSpec(request="nobody-*", to_state=SlotState.DECODING)
    return beside_none("armed breakpoint without a match", (spec,), Target(extra_ns=100))


BENCHES: Final = {
    "gate off": gate_off, "audit": full_audit, "digest, 4,096 blocks": digest_small,
    "digest, 100,000 blocks": digest_large, "armed breakpoint without a match": armed_breakpoint,
}
