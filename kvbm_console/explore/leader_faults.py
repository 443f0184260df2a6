"""Faults that ``explore leader --fault`` plants: in the copies, in the leader, and in the engine beside it.

Law of this file: a fault omits or spoils a step of the product, and the product has no flag for it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from kvbm_console.core import events as ev
from kvbm_console.core.folding import APPLY
from kvbm_console.core.ids import SkipReason
from kvbm_console.core.leader import pipeline
from kvbm_console.core.leader.decider import Decider
from kvbm_console.explore.shadow import FAULTS as FAULTS_OF_WORKER
from kvbm_console.explore.shadow import PAIR_FAULTS
from kvbm_console.simulator.embedded import Rig
from kvbm_console.simulator.link import Fault

COPY_FAULTS = {name: (FAULTS_OF_WORKER[name], PAIR_FAULTS[name])
               for name in ("swapped-blocks", "torn-copy", "first-source")}


def _at_once(stack: ExitStack) -> None:
    promote = pipeline._promote

    def done(leader: Decider, candidate: Any, *rest: Any) -> None:
        promote(leader, candidate, *rest)
        number = leader.state.next_operation - 1
        leader.emit(ev.OperationReported, number, 0, True, "", b"")
        leader.memory.complete.append(number)

    stack.enter_context(patch.object(pipeline, "_promote", done))


def _never_closes(stack: ExitStack) -> None:
    def forgets(leader: Decider, candidate: Any, reason: SkipReason) -> None:
        leader.memory.pending.remove(candidate.candidate)

    stack.enter_context(patch.object(pipeline, "skip", forgets))


def _released(wrong: Callable[[Any, Any, list[int]], None]) -> Callable[[ExitStack], None]:
    """A fault that spoils the release of device blocks; ``wrong`` gets the facts, the slot and its former blocks."""

    def plant(stack: ExitStack) -> None:
        release = APPLY[ev.DeviceBlocksReleased]

        def released(state: Any, event: Any) -> None:
            slot = state.slots[event.slot]
            places = list(slot.device_blocks)
            release(state, event)
            wrong(state, slot, places)

        stack.enter_context(patch.dict(APPLY, {ev.DeviceBlocksReleased: released}))

    return plant


def _double_free(state: Any, slot: Any, places: list[int]) -> None:
    state.pools[slot.device_pool or 0].unref(places)


def _stale_row(state: Any, slot: Any, places: list[int]) -> None:
    slot.device_blocks = places


LEADER_FAULTS: dict[str, tuple[str, Callable[[ExitStack], None]]] = {
    "complete-at-promotion": ("a copy counts as done when it is promoted, before it ran", _at_once),
    "skip-never-closes": ("a skipped candidate never closes", _never_closes),
    "double-free": ("a released block loses two holders", _released(_double_free)),
    "stale-row": ("a slot goes on listing blocks that it has given up", _released(_stale_row)),
}


def _no_fence(rig: Rig) -> None:
    rig.engine.scheduler.withhold = lambda name, ids: rig.engine.scheduler.pool.release(ids)  # type: ignore[method-assign]


def _no_pin(rig: Rig) -> None:
    rig.engine.pin = lambda ids: None  # type: ignore[method-assign]


def _lost_load(rig: Rig) -> None:
    rig.mover.faults = lambda order: Fault(silent=True) if order.route.is_load else None


def _lost_store(rig: Rig) -> None:
    rig.mover.faults = lambda order: None if order.route.is_load else Fault(silent=True)


def _no_quarantine(rig: Rig) -> None:
    clear = rig.engine.clear
    rig.engine.clear = lambda keep: clear(b"")  # type: ignore[method-assign]


ENGINE_FAULTS: dict[str, tuple[str, Callable[[Rig], None]]] = {
    "no-fence": ("the engine reuses blocks that a copy reads", _no_fence),
    "no-pin": ("the engine reuses cached blocks that a copy of nobody reads", _no_pin),
    "no-quarantine": ("after a reset the engine reuses blocks that a copy still touches", _no_quarantine),
    "lost-load-report": ("no load is reported", _lost_load),
    "lost-store-report": ("no store is reported", _lost_store),
}
FAULTS = {**COPY_FAULTS, **LEADER_FAULTS, **ENGINE_FAULTS}


@contextmanager
def planted(faults: tuple[str, ...]) -> Iterator[None]:
    """Plant the leader's faults for a run."""
    with ExitStack() as stack:
        for name in faults:
            if name in LEADER_FAULTS:
                LEADER_FAULTS[name][1](stack)
        yield


def plant(rig: Rig, faults: tuple[str, ...]) -> None:
    """Plant the engine's and the mover's faults."""
    for name in faults:
        if name in ENGINE_FAULTS:
            ENGINE_FAULTS[name][1](rig)
