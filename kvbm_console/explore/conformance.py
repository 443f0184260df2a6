"""The conformance test of an adapter, for its author.

``conforms({"kv_connector": "ShelfConnector", "kv_connector_module_path": "shelf"}, ShelfAdapter)`` in a test, where
vLLM is installed. It takes some seconds.

Law of this file: an adapter that copies nothing, orders what no worker could copy, or hides a bad worker fails. Bugs
of the connector are no failure.
"""

from collections.abc import Iterator
from typing import Any, Final

from kvbm_console.explore.connectors import Adapter
from kvbm_console.explore.scenario import generate
from kvbm_console.explore.shadow import Job, StepOrders
from kvbm_console.explore.vllm import Machine, Release

RUNS: Final = 3
"""Runs of the profile ``hits`` whose orders are checked."""
SEEDS: Final = 40
"""Runs in which a planted fault must show."""
FAULTS: Final = ("first-source", "torn-copy")
ASYNCHRONOUS: Final = ("hasty-load", "lost-load-report")
SYNCHRONOUS: Final = ("late-sync-load",)


def conforms(connector: dict[str, Any], *adapters: type[Adapter], release: Release | None = None) -> None:
    """Check the adapter of a connector, which is named as in ``--kv-transfer-config``.

    ``adapters`` are those beside this program's own. Raises ``AssertionError`` with the law that is broken, and
    ``Unsupported`` where the connector or the release cannot be driven."""
    release = release or Release(*adapters)
    loads: list[Job] = []
    moved = 0
    for seed in range(RUNS):
        first, again = (_watched(release, connector, seed) for _ in range(2))
        _law((first.run.digest, first.run.steps) == (again.run.digest, again.run.steps),
             f"hits {seed} ran differently the second time: the adapter's orders depend on more than the scenario")
        loads, moved = loads + first.loads, moved + first.run.moved_blocks
    _law(moved > 0, f"no block was copied in {RUNS} runs of the profile hits")
    _law(bool(loads), f"no load was ordered in {RUNS} runs of the profile hits")
    faults = [*FAULTS, *(ASYNCHRONOUS if not all(job.sync for job in loads) else ()),
              *(SYNCHRONOUS if any(job.sync for job in loads) else ())]
    for fault in faults:
        _law(any(_shows(release, connector, seed, fault) for seed in range(SEEDS)),
             f"a worker with the fault {fault} behaves as a good one in {SEEDS} runs of the profile hits")


def _law(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


def _shows(release: Release, connector: dict[str, Any], seed: int, fault: str) -> bool:
    """True if a run with the fault ends in a verdict that the same run has not without it."""
    scenario = generate("hits", seed)
    verdict = Machine(release, connector, scenario, (fault,)).play().verdict
    return verdict is not None and verdict != Machine(release, connector, scenario).play().verdict


def _watched(release: Release, connector: dict[str, Any], seed: int) -> "_Watched":
    machine = _Watched(release, connector, generate("hits", seed))
    _law(bool(list(machine.halves)), f"no adapter serves {type(machine.connector).__name__}")
    try:
        machine.play()
    finally:
        _law(not machine.broken, "".join(machine.broken[:1]))
    return machine


class _Watched(Machine):
    """A machine that checks the orders of its adapters."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.loads: list[Job] = []
        self.broken: list[str] = []
        """The laws that an order has broken, as sentences."""
        for adapter in self.halves:
            self._watch_orders(adapter)

    def _watch_orders(self, adapter: Adapter) -> None:
        orders = adapter.orders

        def checked(metadata: Any) -> StepOrders:
            made = orders(metadata)
            self.broken += [sentence for job in (*made.loads, *made.stores) for sentence in self._laws(job)]
            self.loads += made.loads
            return made

        adapter.orders = checked  # type: ignore[method-assign]

    def _laws(self, job: Job) -> Iterator[str]:
        what = f"{'load' if job.load else 'store'} {job.number} of request {job.request!r}"
        if any((other.kind, other.load, other.number) == (job.kind, job.load, job.number)
               for worker in self.workers[:1] for other in (*worker.jobs, *worker.ordered)):
            yield f"{what} is ordered while a job of the same number is in flight"
        last = self.scenario.device_blocks - 1
        for source, target in job.pairs:
            place = target if job.load else source
            if not 0 < place <= last:
                yield f"{what} names place {place}, and the device has the places 1 to {last}"
        targets = [target for _, target in job.pairs]
        if len(set(targets)) < len(targets):
            yield f"{what} writes a place twice: {targets}"
        if job.load and not job.sync and not job.request:
            yield f"{what} names no request, so that its end cannot be reported"
