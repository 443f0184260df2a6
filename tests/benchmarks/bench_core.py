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
"""Some 3,200 events: short turns, so that what neighbours do to the caches meets both sides alike."""
AUDIT_PLACES: Final = 4_096
AUDIT_SLOTS: Final = 256
UNROLLED: Final = 200
"""Sites in one call, so that the loop around them weighs nothing."""


class _Sites(Leader):
    """A leader with the same call twice: with the check that every site makes, and without it."""

    def site(self, slot: object) -> object:
        if self.gate is not None:
            self.strike(slot)  # type: ignore[call-arg,arg-type]
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


def armed_breakpoint() -> Figure:
    """Leader with one breakpoint that never matches, beside a leader with none."""
    script = samples.stimuli(BATCHES)
    count = len(samples.events(BATCHES))
    arm = st.BreakpointsReplaced(0, 0, 0, None, "bench", (
        BreakpointSpec(request="nobody-*", to_state=SlotState.DECODING),
    ))

    clear = st.BreakpointsReplaced(0, 0, 0, None, "bench", ())

    def run(armed: bool) -> None:
        leader = Leader(samples.CONFIG)
        leader.handle(script[0])
        for change in (clear, arm) if armed else (arm, clear):  # the same work on both sides
            leader.handle(change)
        assert (leader.gate is not None) is armed
        for stimulus in script[1:]:
            outcome = leader.handle(stimulus)
            assert not outcome.events or type(outcome.events[0]) is not StimulusRejected

    return measure(
        "armed breakpoint without a match", lambda: run(True), count, "none armed", lambda: run(False), count,
        Target(extra_ns=100), rounds=81,
    )


BENCHES: Final = {
    "gate off": gate_off, "audit": full_audit, "digest, 4,096 blocks": digest_small,
    "digest, 100,000 blocks": digest_large, "armed breakpoint without a match": armed_breakpoint,
}
