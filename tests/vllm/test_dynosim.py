"""Our simulated engine against NVIDIA's DynoSim (``dynamo.replay``), request by request. Run by ``make test-vllm``.

Law of this file: both replay one file in Mooncake's format with blocks of 512 tokens; what the peer says is taken from
its report alone. DynoSim needs no GPU and no vLLM: ``pip install --no-deps ai-dynamo ai-dynamo-runtime`` is enough.

DynoSim's fixed timing charges a step for its prefills and again for its decodes, so times are compared where requests
do not meet. It copies no block of an answer to the host, so loads with a host tier have answers below a block.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.planning.options import OFFLOAD_THRESHOLD, SimulateOptions
from kvbm_console.planning.report import row_of
from kvbm_console.planning.run import simulate

replay: Any = pytest.importorskip("dynamo.replay.api", reason="make test-vllm runs these")

pytestmark = pytest.mark.timeout(300)

BLOCK = 512
STEP_MS = 4.0
ALONE_MS = (20_000, 20_000)
"""Between two arrivals: an answer of 600 tokens takes 2.4 s."""
Pair = tuple[dict[str, Any], dict[str, Any]]
"""A request as DynoSim and as we report it."""


def load(
    seed: int, gap_ms: tuple[int, int], output_most: int = 600, tail: bool = True, requests: int = 60
) -> list[dict[str, Any]]:
    """Requests of families that share the beginning of their prompts."""
    dice = random.Random(seed)
    families, key, at_ms = dice.randint(2, 8), 1_000, 0
    rows = []
    for _ in range(requests):
        full = dice.randint(1, 12)
        shared, family = dice.randint(0, full), dice.randrange(families) * 100
        less = dice.choice([0, 0, 1, 37, 300]) if tail else 200
        rows.append({
            "timestamp": at_ms, "input_length": full * BLOCK - less, "output_length": dice.randint(1, output_most),
            "hash_ids": [*range(family, family + shared), *range(key, key + full - shared)],
        })
        key += full
        at_ms += dice.randint(*gap_ms)
    return rows


def both(
    tmp_path: Path, rows: list[dict[str, Any]], *, device: int, host: int = 0, batch_tokens: int = 8_192,
    threshold: float = 0.0,
) -> list[Pair]:
    """The requests of both reports, by arrival."""
    path = tmp_path / "load.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine: dict[str, Any] = {
        "num_gpu_blocks": device, "block_size": BLOCK, "max_num_seqs": 256, "max_num_batched_tokens": batch_tokens,
        "timing_model": {"type": "fixed", "prefill_ms": STEP_MS, "decode_ms": STEP_MS},
    }
    if host:
        engine |= {"native_host_offload": {"num_host_blocks": host}, "kv_cache_bytes_per_token": 131_072}
    theirs = replay.run_trace_replay(
        str(path), extra_engine_args={"engine": engine}, trace_block_size=BLOCK, capture_per_request=True,
    ).per_request
    ours: list[dict[str, Any]] = []
    report = simulate(
        SimulateOptions(
            trace=f"mooncake:{path}", total_kv_blocks=device, block_size=BLOCK, kv_cpu_blocks=host,
            kv_offload_threshold=threshold, policy=PolicyConfig(policy="simple_lru"), step_base=round(STEP_MS * 1e6),
            step_prefill_token=0, step_decode_request=0, max_num_batched_tokens=batch_tokens, stats_every=0,
        ),
        ended=lambda instance, record: ours.append(row_of(instance, record, BLOCK)),
    ).document
    assert report["preemptions"] == 0, "hits of a second admission are no hits of the first"
    theirs.sort(key=lambda request: request["arrival_time_ms"])
    ours.sort(key=lambda request: request["arrived_ns"])
    assert len(theirs) == len(ours) == len(rows)
    return list(zip(theirs, ours, strict=True))


@pytest.mark.parametrize("batch_tokens", [512, 700, 8_192])
@pytest.mark.parametrize("seed", range(5))
def test_requests_one_after_the_other_find_the_same_and_take_the_same_time(
    tmp_path: Path, seed: int, batch_tokens: int
) -> None:
    """On a device that evicts, with prompts in one piece and in many: to the nanosecond."""
    pairs = both(tmp_path, load(seed, ALONE_MS), device=30, batch_tokens=batch_tokens)
    for theirs, ours in pairs:
        assert theirs["reused_input_tokens"] == ours["cached_g1_tokens"]
        assert round(theirs["ttft_ms"] * 1e6) == ours["first_token_ns"] - ours["arrived_ns"]
        assert round(theirs["e2e_latency_ms"] * 1e6) == ours["finished_ns"] - ours["arrived_ns"]
        assert theirs["output_length"] == ours["output_tokens"]
    assert sum(ours["cached_g1_tokens"] for _, ours in pairs) > 0


@pytest.mark.parametrize("seed", range(5))
def test_requests_that_meet_find_the_same_where_there_is_room(tmp_path: Path, seed: int) -> None:
    """Each prompt is computed before the next request comes, so that times of steps do not decide what is found."""
    pairs = both(tmp_path, load(seed, (30, 300)), device=400)
    assert [theirs["reused_input_tokens"] for theirs, _ in pairs] == [ours["cached_g1_tokens"] for _, ours in pairs]


def tiers_of(pairs: list[Pair]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Tokens from device and host of each request, theirs and ours."""
    return (
        [(theirs["first_admission_g1_reused_input_tokens"], theirs["first_admission_host_reused_input_tokens"])
         for theirs, _ in pairs],
        [(ours["cached_g1_tokens"], ours["cached_g2_tokens"]) for _, ours in pairs],
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_host_tier_that_holds_all_gives_the_same_to_each_request(tmp_path: Path, seed: int) -> None:
    theirs, ours = tiers_of(both(tmp_path, load(seed, ALONE_MS), device=16, host=600))
    assert theirs == ours
    assert sum(host for _, host in ours) > 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("host", [24, 40, 60])
def test_a_host_tier_that_evicts_gives_no_less(tmp_path: Path, seed: int, host: int) -> None:
    """Both evict by recency. Of equally old blocks ours gives the deepest up first, so more prefixes stay whole."""
    theirs, ours = tiers_of(both(tmp_path, load(seed, ALONE_MS, 100, tail=False), device=16, host=host))
    assert [device for device, _ in theirs] == [device for device, _ in ours]
    assert sum(found for _, found in ours) >= sum(found for _, found in theirs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("device", "host"), [(16, 100), (16, 4_000), (36, 4_000)])
def test_the_default_threshold_finds_within_half_a_point_as_much(
    tmp_path: Path, seed: int, device: int, host: int
) -> None:
    """DynoSim copies all blocks. Loads are long: of 60 requests a lost prefix of four blocks would be a whole point."""
    rows = load(seed, ALONE_MS, 100, tail=False, requests=400)
    theirs, ours = tiers_of(both(tmp_path, rows, device=device, host=host, threshold=OFFLOAD_THRESHOLD))
    fewer = sum(map(sum, theirs)) - sum(map(sum, ours))
    assert 100 * fewer <= 0.5 * sum(row["input_length"] for row in rows)
