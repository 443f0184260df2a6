"""An adapter of somebody else: used by its name, checked by the conformance test, and part of a reproduction.

Law of this file: ``tests.vllm.shelf`` stands for the module of a connector's author.
"""

import inspect
import re
import sys
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from kvbm_console.explore.conformance import conforms
from kvbm_console.explore.connectors import Unsupported
from kvbm_console.explore.report import reproduction
from kvbm_console.explore.scenario import PROFILES, Arrive, CacheReset, Scenario, generate
from kvbm_console.explore.search import Search
from kvbm_console.explore.shadow import StepOrders
from kvbm_console.explore.vllm import Machine, Release
from tests.vllm.explore_known import (
    DECODE_BENCH,
    EXAMPLE,
    MOONCAKE,
    READMITTED,
    STORE,
    TOLD_AS_CACHED,
    UNCOUNTED,
    known,
)
from tests.vllm.shelf import ShelfAdapter

pytestmark = pytest.mark.timeout(600)
SHELF = {"kv_connector": "ShelfConnector", "kv_connector_module_path": "tests.vllm.shelf"}
HASTY = {**SHELF, "kv_connector": "HastyShelfConnector"}


@pytest.fixture(scope="module")
def release() -> Release:
    return Release(ShelfAdapter)


def test_the_example_conforms_and_its_connector_has_no_bug(release: Release) -> None:
    """Beyond vLLM's own: it tells tokens that a failed load did not bring as cached."""
    conforms(SHELF, release=release)
    moved, verdicts = 0, Counter[str]()
    for profile, shape in PROFILES.items():
        for seed in range(5) if "groups" not in shape.machine else ():
            run = Machine(release, SHELF, generate(profile, seed)).play()
            moved += run.moved_blocks
            verdicts.update([run.verdict.signature] if run.verdict is not None else [])
    assert moved > 1_000
    assert set(verdicts) <= {TOLD_AS_CACHED}


def test_a_bug_of_the_connector_is_found_and_reproduced_without_this_program(release: Release) -> None:
    verdict = None
    for seed in range(40):
        scenario = generate("press", seed)
        verdict = Machine(release, HASTY, scenario).play().verdict
        if verdict is not None:
            break
    assert verdict is not None
    assert verdict.signature == "right content: written by load, torn store"
    source = reproduction(scenario, HASTY, (), release.version, verdict.signature, {
        "ShelfAdapter": inspect.getsource(sys.modules[ShelfAdapter.__module__])})
    assert not re.search("^(from|import) kvbm_console", source, re.M)
    space: dict[str, Any] = {"__name__": "reproduction"}
    exec(compile(source, "reproduction", "exec"), space)
    with pytest.raises(AssertionError, match="did not wait for store"):
        space["test_reproduction"]()
    exec(compile(source.replace("'kv_connector': 'Hasty", "'kv_connector': '"), "reproduction", "exec"), space)
    space["test_reproduction"]()


def test_a_search_takes_the_adapter_by_its_name() -> None:
    report = Search(SHELF, profiles=("press",), seeds=range(1), adapters=("tests.vllm.shelf:ShelfAdapter",)).run()
    assert (report.runs, report.findings) == (1, {})
    assert "class ShelfAdapter(Adapter)" in report.adapters["ShelfAdapter"]


def test_a_connector_without_an_adapter_is_refused_by_its_metadata() -> None:
    with pytest.raises(Unsupported, match="for ShelfMetadata with loads, saves; --adapter takes one"):
        Machine(Release(), SHELF, generate("press", 0)).play()


@pytest.mark.parametrize(("name", "connector"), [
    ("mooncake", MOONCAKE), ("mooncake store", STORE), ("example", EXAMPLE), ("decode bench", DECODE_BENCH)])
def test_it_conforms_and_nothing_is_found_beyond_what_is_known(
    release: Release, name: str, connector: dict[str, Any]
) -> None:
    conforms(connector, release=release)
    moved = 0
    for profile in PROFILES:
        for seed in range(4):
            scenario = generate(profile, seed)
            if name != "mooncake" and scenario.option("groups") != "full":
                continue  # these connectors or their adapters have one group of layers
            run = Machine(release, connector, scenario).play()
            moved += run.moved_blocks
            if run.verdict is not None:
                assert run.verdict.signature in known(name, profile), (profile, seed, run.verdict)
    assert moved > 1_000


@pytest.mark.parametrize(("prompt", "signature"), [(20, UNCOUNTED), (5, READMITTED)])
def test_mooncakes_store_forgets_a_request_that_a_reset_preempts_when_it_is_admitted_again(
    release: Release, prompt: int, signature: str
) -> None:
    """One request and a reset of the prefix cache. Its load is not ordered, or the engine ends, if it has none. A
    release in which this fails has mended the finding."""
    scenario = Scenario(8, 8, 1, 64, (Arrive(0, "a", ((1, prompt),), 8), CacheReset(3, True, False)), (3,))
    verdict = Machine(release, STORE, scenario).play().verdict
    assert verdict is not None
    assert verdict.signature == signature


class Idle(ShelfAdapter):
    def orders(self, metadata: Any) -> StepOrders:
        return StepOrders(self.kind)


class Shifted(ShelfAdapter):
    def orders(self, metadata: Any) -> StepOrders:
        orders = super().orders(metadata)
        for job in orders.loads:
            job.pairs = [(source, target + 1_000) for source, target in job.pairs]
        return orders


class Doubled(ShelfAdapter):
    """A store writes its last block twice."""

    def orders(self, metadata: Any) -> StepOrders:
        orders = super().orders(metadata)
        for job in orders.stores:
            job.pairs += job.pairs[-1:]
        return orders


class Renumbered(ShelfAdapter):
    """All jobs of a run have the same number."""

    def orders(self, metadata: Any) -> StepOrders:
        orders = super().orders(metadata)
        for job in (*orders.loads, *orders.stores):
            job.number = 1
        return orders


class Nameless(ShelfAdapter):
    def orders(self, metadata: Any) -> StepOrders:
        orders = super().orders(metadata)
        for job in orders.loads:
            job.request = ""
        return orders


class Dreaming(ShelfAdapter):
    """Its orders depend on the runs before."""

    asked = 0

    def orders(self, metadata: Any) -> StepOrders:
        Dreaming.asked += 1
        orders = super().orders(metadata)
        for job in orders.stores:
            job.pairs = [(source, slot + Dreaming.asked) for source, slot in job.pairs]
        return orders




@pytest.mark.parametrize(("adapter", "law"), [
    (Idle, "no block was copied in 3 runs of the profile hits"),
    (Shifted, r"names place 10\d\d, and the device has the places 1 to "),
    (Doubled, "writes a place twice"), (Renumbered, "is ordered while a job of the same number is in flight"),
    (Nameless, "names no request, so that its end cannot be reported"),
    (Dreaming, "hits 0 ran differently the second time"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_an_adapter_that_does_not_conform_is_told_the_law(adapter: type[ShelfAdapter], law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        conforms(SHELF, adapter)


def test_an_adapter_that_raises_is_not_taken_for_the_connector() -> None:
    class Broken(ShelfAdapter):
        def orders(self, metadata: Any) -> StepOrders:
            raise KeyError("block_ids")

    with pytest.raises(Unsupported, match="or the adapter from the connector: KeyError: 'block_ids'"):
        Machine(Release(Broken), SHELF, generate("press", 0)).play()
