"""Copies as we show them, compared with the connector's own accounting after every step.

Law of this file: one side is read from our facts, the other from the connector's managers and from the statistics that
the engine publishes. Nothing of the tap is asked.
"""

from collections import Counter
from typing import Any

from kvbm_console.core.ids import CandidateStatus, Route, Tier
from kvbm_console.core.slots import CandidateFacts
from kvbm_console.core.state import CacheState
from tests.vllm.engine import PAGE
from tests.vllm.truth import short

Open = Counter[tuple[str, str, frozenset[int]]]
"""(route, request, hashes of the blocks) of the open copies."""


def shown(state: CacheState) -> Open:
    """The open copies of our facts; a load carries no hash here, because the request has them."""
    found: Open = Counter()
    for candidate in state.candidates.values():
        hashes = frozenset() if candidate.route.target is Tier.G1 else frozenset(candidate.hashes)
        found[candidate.route.label, _request(state, candidate), hashes] += 1
    return found


def _request(state: CacheState, candidate: CandidateFacts) -> str:
    return candidate.request if candidate.slot is None else state.slots[candidate.slot].request


def of_offloading(connector: Any) -> Open:
    """The jobs of OffloadingConnector, and of the tiers below its host tier."""
    half = connector.connector_scheduler
    found: Open = Counter()
    for job in half._jobs.values():
        hashes = frozenset(short(key[:-4]) for key in job.keys) if job.is_store else frozenset()
        found["G1>G2" if job.is_store else "G2>G1", job.req_id, hashes] += 1
    for number, (job, tier) in getattr(half.manager, "_jobs", {}).items():
        assert job.job_id == number
        medium = half.manager.secondary_tiers[tier].medium.value
        below = {"STORAGE": Tier.G4}[medium]
        route = Route.of(below, Tier.G2) if job.is_promotion else Route.of(Tier.G2, below)
        found[route.label, job.req_context.req_id, frozenset(short(key[:-4]) for key in job.keys)] += 1
    return found


def of_simple(connector: Any, device: Any) -> Counter[tuple[str, int]]:
    """(route, hash) of each block that SimpleCPUOffloadConnector copies; loads as (route, number of blocks)."""
    manager = connector.scheduler_manager
    found: Counter[tuple[str, int]] = Counter()
    for order in manager._store_event_to_blocks.values():
        for place in order.gpu_block_ids:
            found["G1>G2", short(device.blocks[place].block_hash[:-4])] += 1
    for state in manager._reqs_to_load.values():
        if state.load_event is not None:
            found["G2>G1", 0] += len(state.transfer_meta.gpu_block_ids)
    return found


def blocks_shown(state: CacheState, pool: int | None = None) -> Counter[tuple[str, int]]:
    """As ``of_simple``, from our facts."""
    found: Counter[tuple[str, int]] = Counter()
    for candidate in state.candidates.values():
        assert candidate.operation is not None
        operation = state.operations[candidate.operation]
        if candidate.route.target is Tier.G1:
            found["G2>G1", 0] += operation.blocks
        else:
            for key in candidate.hashes:
                found["G1>G2", key] += 1
    return found


def sizes_are_right(state: CacheState, layers: int, workers: int = 1) -> None:
    """Every open copy along G1 and G2 has the bytes of its blocks: a page of each layer on each worker."""
    for candidate in state.candidates.values():
        assert candidate.operation is not None
        operation = state.operations[candidate.operation]
        if {candidate.route.source, candidate.route.target} == {Tier.G1, Tier.G2}:
            assert operation.started
            assert operation.size_bytes == operation.blocks * PAGE * layers * workers


class Published:
    """The counters of the connector that the engine has published with its steps, summed."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()

    def take(self, outputs: Any) -> None:
        """The outputs of one step, by client."""
        for one in outputs.values():
            stats = one.scheduler_stats.kv_connector_stats if one.scheduler_stats is not None else None
            for name, values in (stats or {}).get("data", {}).items():
                if stats["types"][name] == "counter":
                    self.totals[name] += sum(values.values())


def ended(state: CacheState, status: CandidateStatus) -> int:
    """Copies that ended like this."""
    return state.totals.candidates_ended[status]
