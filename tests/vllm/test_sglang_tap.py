"""The tap in SGLang's real scheduler: every transition against the scheduler's own truth. Run by ``make test-vllm``.

The scheduler runs in a process of its own (``sglang_oracle``), because the packages of kernels that it imports are
replaced there by empty modules.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.client import Client
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.ids import Site
from kvbm_console.stream.verbs import ContinueHold, SetBreakpoint
from tests.server.daemons import daemon_at, published
from tests.tap.test_processes import engine, requests, serving

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]


class Oracle:
    """The process that runs SGLang beside a leader and compares them after every step."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.vllm.sglang_oracle"], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )

    def run(self, workload: list[int], *, engine: dict[str, Any], **options: Any) -> dict[str, Any]:
        """The figures of one run whose every step was compared."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps({"workload": workload, "engine": engine, **options}), file=self._child.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._child.stdout.readline() or '{"error": "the process has ended"}')
        assert "error" not in answer, answer["error"]
        return answer

    def end(self) -> None:
        self._child.communicate()


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("make test-vllm runs these")
    started = Oracle()
    yield started
    started.end()


@pytest.mark.parametrize("tree", ["python", "rust"])
@pytest.mark.parametrize("page", [1, 16])
def test_reuse_chunks_retractions_and_aborts(oracle: Oracle, page: int, tree: str) -> None:
    """Requests share prefixes and compute the same blocks twice; the pool is too small for the answers."""
    found = oracle.run(
        [1, 8, 2, 160], aborts=0.01,
        engine={"page": page, "tokens": 768, "tree": tree, "schedule_conservativeness": 0.1},
    )
    seen = found["seen"]
    assert found["tree"] == {"python": "UnifiedTreeCore", "rust": "RustUnifiedTreeCore"}[tree]
    assert found["preemptions"] > 0
    assert found["finished"].keys() == {"length", "aborted"}
    assert found["hits"][0] > 0
    assert found["evicted"] > 0
    assert found["nobody"] == 0
    assert seen["DeviceBlocksReplaced"] > 0
    assert seen["skipped_prefill"] > 0


@pytest.mark.parametrize("tree", ["python", "rust"])
def test_a_flush_of_the_cache_is_seen(oracle: Oracle, tree: str) -> None:
    """As ``/flush_cache`` does it, between two waves of requests."""
    seen = oracle.run([4, 4, 1], waves=2, engine={"page": 16, "tokens": 640, "tree": tree})["seen"]
    assert (seen["flushed"], seen["cached before the flush"] > 0) == (2, True)


@pytest.mark.parametrize(
    "engine", [
        {"page": 16, "tokens": 640, "chunked_prefill_size": -1},
        {"page": 16, "tokens": 640, "enable_mixed_chunk": True},
        {"page": 16, "tokens": 640, "overlap": True}, {"page": 1, "tokens": 640, "overlap": True},
        {"page": 16, "tokens": 640, "schedule_policy": "lpm"},
    ], ids=str,
)
def test_other_ways_to_form_a_batch(oracle: Oracle, engine: dict[str, Any]) -> None:
    found = oracle.run([4, 5, 2], aborts=0.02, engine={"tree": "python", **engine})
    assert found["hits"][0] > 0
    assert found["evicted"] > 0
    assert found["nobody"] == 0


@pytest.mark.parametrize("page", [1, 16])
def test_without_a_radix_cache_no_block_is_cached(oracle: Oracle, page: int) -> None:
    found = oracle.run([3, 4, 2], engine={"page": page, "tokens": 640, "disable_radix_cache": True})
    assert sum(found["hits"]) == found["evicted"] == 0
    assert "BlocksFilled" not in found["seen"]


HICACHE = {
    "enable_hierarchical_cache": True, "hicache_io_backend": "direct", "hicache_mem_layout": "layer_first",
}


@pytest.mark.parametrize(
    ("seed", "engine"), [
        (1, {"tree": "rust", "hicache_ratio": 2.0}), (2, {"page": 1, "hicache_ratio": 2.0}),
        (3, {"hicache_write_policy": "write_back"}), (4, {"hicache_write_policy": "write_through_selective"}),
        (5, {"overlap": True}), (7, {"tree": "rust", "schedule_conservativeness": 0.1, "tokens": 768}),
    ], ids=str,
)
def test_blocks_of_the_host_tier_and_their_loads_are_those_of_hicache(
    oracle: Oracle, seed: int, engine: dict[str, Any]
) -> None:
    """The host's content after every step, each load with its request, and what the tree evicts from both tiers."""
    retracts = "schedule_conservativeness" in engine
    found = oracle.run([seed, 8, 3, 160 if retracts else 60], aborts=0.01, engine={
        "page": 16, "tokens": 480, "tree": "python", "hicache_write_policy": "write_through", "hicache_ratio": 1.2,
        **HICACHE, **engine,
    })
    assert found["hits"][1] > 0
    assert found["evicted"] > 0
    assert found["preemptions"] > 0 or not retracts
    assert found["seen"]["OperationReported"] > 0


STORAGE = {
    "page": 16, "tokens": 480, "tree": "python", "hicache_ratio": 1.2, "hicache_write_policy": "write_through",
    "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": 16}), **HICACHE,
}


@pytest.mark.parametrize(
    ("seed", "engine"), [
        (1, {}), (2, {"tree": "rust"}), (3, {"page": 1, "hicache_ratio": 2.0}), (4, {"overlap": True}),
        (5, {"hicache_write_policy": "write_back"}), (6, {"hicache_storage_prefetch_policy": "best_effort"}),
        (7, {"hicache_storage_prefetch_policy": "timeout", "tree": "rust", "overlap": True}),
    ], ids=str,
)
def test_copies_to_and_from_a_storage_are_those_of_hicache(oracle: Oracle, seed: int, engine: dict[str, Any]) -> None:
    """Each copy with its pages and its end, and each request's hits by tier; the rest as without a storage. After each
    wave device and host are emptied, and the storage keeps its pages."""
    found = oracle.run([seed, 5, 3], waves=3, aborts=0.01, engine={**STORAGE, **engine})
    assert found["storage"]["G2>G3 completed"] > 0
    if "best_effort" not in engine.values():
        assert found["storage"]["G3>G2 completed"] > 0
        assert found["hits"][2] > 0


@pytest.mark.parametrize("tree", ["python", "rust"])
def test_a_storage_that_fails_is_shown_as_failing(oracle: Oracle, tree: str) -> None:
    """SGLang's own injector lets a fifth of the calls fail."""
    found = oracle.run(
        [8, 6, 4], waves=3, environment={"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2"},
        engine={**STORAGE, "tree": tree},
    )
    assert found["storage"]["G2>G3 failed"] > 0


def test_a_flush_empties_the_host_tier(oracle: Oracle) -> None:
    seen = oracle.run([6, 6, 2], waves=2, engine={"page": 16, "tokens": 480, "tree": "python", **HICACHE})["seen"]
    assert seen["flushed"] == 2


CHILD = "tests.vllm.sglang_child"
PROMPT = list(range(100, 170))


@pytest.mark.asyncio
async def test_a_breakpoint_of_a_daemon_holds_one_request_and_others_go_on(oracle: Oracle) -> None:
    async with (
        daemon_at(config=LeaderConfig(block_tokens=16)) as daemon, engine(daemon.address, module=CHILD) as child,
        Client(daemon.address) as client, client.control() as control,
    ):
        await child.do(listened=True)
        verdict = await control.ask(SetBreakpoint(BreakpointSpec(site=Site.CALL_WILL, request="held*")))
        assert verdict.verified
        await child.do(gated=True)
        told = await child.do(add=[["held-1", PROMPT, 20], ["free", PROMPT, 20]], until="free")
        assert told["finished"] == ["free"]
        await published(daemon, lambda: bool(daemon.service.state.holds))
        (hold,) = daemon.service.state.holds.values()
        assert daemon.service.state.slots[hold.slot].request == "held-1"
        told = await child.do(steps=50, held_back=True)
        assert told["finished"] == ["free"]
        await control.ask(ContinueHold(hold.hold))
        told = await child.do(until="held-1")
        assert told["errors"] == told["dropped"] == 0
        await published(daemon, lambda: not requests(daemon))


@pytest.mark.asyncio
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_held_request_goes_on_when_the_daemon_dies_or_freezes(oracle: Oracle, how: signal.Signals) -> None:
    async with serving(block_tokens=16) as (daemon, target), engine(target, module=CHILD) as child:
        async with Client(target) as client, client.control(lease=False) as control:
            await child.do(listened=True)
            await control.ask(SetBreakpoint(BreakpointSpec(site=Site.CALL_WILL, request="held", max_hold_ns=10**9)))
            await child.do(gated=True)
            await child.do(add=[["held", PROMPT, 2]], held_back=True)
        os.kill(daemon.pid, how)
        told = await child.do(until="held")
        assert told["errors"] == 0
