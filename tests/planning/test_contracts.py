"""BC-1 to BC-12, one by one: each contract of the tiered cache in a test that carries its number.

Law of this file: a contract is shown on the store (``KVStore``), on a leader with its engine (``Script``) or on the
command itself, whichever is decided there; where it depends on a number, changing the number changes the outcome.
"""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import EMPTY_HASH, SkipReason
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.store import (
    THRASH_WINDOW_TICKS,
    KVStore,
    StoreConfig,
    blis_cache_hit_rate,
    blis_cache_hit_rate_mean,
    blis_preemption_rate,
)
from tests.core.engine_model import BLOCK
from tests.core.oracle import tiers_of
from tests.core.scenes import forget_g1, serve, stored
from tests.core.script import Script

CHATS = "multiturn:requests=24,sessions=4,system=64,user=48,output=24,turns=3"
A, B, C, D = [1, 2], [3, 4], [5, 6], [7, 8]
"""Blocks of two tokens."""


def store(gpu: int = 4, cpu: int = 10, **config: Any) -> KVStore:
    return KVStore(StoreConfig(gpu_blocks=gpu, block_size=2, cpu_blocks=cpu, **config))


def simulated(*args: str) -> str:
    result = CliRunner().invoke(cli, ["simulate", "--trace", CHATS, "--total-kv-blocks", "40", "--stats-every", "0",
                                      "--format", "json", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(simulated(*args))
    return found


def fill(cache: KVStore, blocks: int, token: int = 90) -> None:
    """A request takes these many places and leaves; what was there is gone."""
    assert cache.admit(f"filler{token}", [token] * 2 * blocks)[3]
    cache.release(f"filler{token}")


# --- BC-1, BC-2 ---


def test_bc1_without_a_lower_tier_nothing_tells_that_there_could_be_one() -> None:
    plain = simulated()
    assert simulated("--kv-cpu-blocks", "0", "--kv-offload-threshold", "0", "--policy", "lrfu") == plain
    assert "G2" not in plain


@pytest.mark.parametrize("host", ["0", "200"])
def test_bc1_two_runs_are_byte_identical(host: str) -> None:
    assert simulated("--kv-cpu-blocks", host) == simulated("--kv-cpu-blocks", host)


def test_bc2_copying_down_is_idempotent_and_never_takes_a_partial_block() -> None:
    cache = store()
    cache.admit("r", [*A, *B, 5])
    cache.mirror(["r"])
    assert (cache.mirrored, len(cache.host.resident)) == (2, 2)
    cache.mirror(["r"])
    assert cache.mirrored == 2


def test_bc2_a_release_drops_no_hash() -> None:
    cache = store()
    cache.admit("r", A + B)
    cache.release("r")
    assert len(cache.lookup(A + B)) == 2


def test_bc2_copies_start_when_too_little_is_safe_and_t_0_copies_everything() -> None:
    copied = {
        threshold: document("--kv-cpu-blocks", "200", "--kv-offload-threshold", threshold)["offloaded_blocks"]
        for threshold in ("0", "0.5", "0.9", "1")
    }
    assert copied["0"] >= copied["0.5"] >= copied["0.9"] > copied["1"] == 0
    assert copied["0"] > copied["0.9"]


# --- BC-3, BC-4 ---


def tiers_with_prefix_ab() -> KVStore:
    """``a`` and ``b`` on the device, the chain ``a b c d`` below; the other two places hold something else."""
    cache = store()
    cache.admit("r", A + B + C + D)
    cache.mirror(["r"])
    cache.release("r")
    fill(cache, 2)
    assert len(cache.lookup(A + B + C + D)) == 2
    return cache


def test_bc3_an_admission_continues_the_prefix_below_and_never_pays_with_it() -> None:
    cache = tiers_with_prefix_ab()
    prefix = cache.lookup(A + B)
    assert cache.admit("s", A + B + C + D)[3]
    assert cache.requests["s"][:2] == prefix
    assert (cache.hits, cache.host_hits) == (4, 2)


def test_bc3_a_refused_admission_changes_nothing() -> None:
    cache = tiers_with_prefix_ab()
    cache.admit("wall", [80, 81])
    before = cache.state()
    assert not cache.admit("s", A + B + C + D)[3]
    assert cache.state() == before
    script = stored("abcd", g1=8)
    script.arrive("b", "abcd", tail=40)
    script.lookup("b")
    digest, order = script.leader.digest(), script.engine.pool.free_order()
    assert not script.allocate("b")
    assert (script.leader.digest(), script.engine.pool.free_order()) == (digest, order)


def test_bc3_the_lower_copy_stays() -> None:
    script = stored("abcd")
    serve(script, "b", "abcd")
    assert {"a", "ab", "abc", "abcd"} <= tiers_of(script.state)["G2"]


def test_bc4_a_transfer_takes_base_and_ceil_and_reading_it_changes_nothing() -> None:
    cache = store(bandwidth=0.75, base_latency=10)
    cache.admit("r", A + B)
    cache.mirror(["r"])
    cache.release("r")
    fill(cache, 4)
    assert cache.pending() == 0
    cache.admit("s", A + B)
    each = 10 + 3  # ceil(2 / 0.75), and in the compatibility configuration per block
    assert [cache.pending(), cache.pending(), cache.consume(), cache.consume()] == [2 * each, 2 * each, 2 * each, 0]


def test_bc4_only_an_admission_is_charged() -> None:
    cache = tiers_with_prefix_ab()
    cache.admit("wall", [80, 81])
    cache.admit("s", A + B + C + D)
    assert cache.pending() == 0


def test_bc4_a_transfer_of_many_blocks_has_one_base_latency() -> None:
    options = SimulateOptions(trace=CHATS, total_kv_blocks=1, kv_cpu_blocks=1, kv_transfer_bandwidth=3.0,
                              kv_transfer_base_latency=7.0)
    (up,) = [link for link in options.links() if link.name == "pcie-up"]
    for blocks in (1, 2, 5):
        ticks = 7 + -(-blocks * options.block_size // 3)
        assert up.copy_ns(blocks * options.block_bytes) == ticks * 1_000


# --- BC-5, BC-6 ---


def test_bc5_hits_are_counted_once_and_nothing_looked_up_is_not_a_miss() -> None:
    assert blis_cache_hit_rate(0, 0) == 0.0
    cache = store(cpu=0)
    cache.admit("r", A + B)
    cache.release("r")
    for _ in range(3):
        cache.lookup(A + B + C)
    assert (cache.hits, cache.misses) == (0, 2)
    cache.admit("s", A + B + C)
    assert (cache.hits, cache.misses) == (2, 3)


def test_bc5_hits_of_all_tiers_add_up_and_without_lookups_there_is_no_rate() -> None:
    shown = document("--kv-cpu-blocks", "200")
    assert sum(shown["hit_blocks"].values()) == round(shown["prefix_hit_rate"] * shown["prompt_blocks"])
    none = document("--limit", "1", "--block-size", "4096")
    assert (none["prompt_blocks"], none["prefix_hit_rate"], none["blis_cache_hit_rate"]) == (0, None, 0.0)


def test_bc5_a_failed_load_takes_its_hits_back() -> None:
    script = stored("abcd", g1=12)
    script.arrive("b", "abcd")
    script.admit("b")
    assert sum(script.state.totals.hit_blocks) == 4
    operation = script.operation_of("b")
    script.start(operation)
    script.fail(operation)
    assert (sum(script.state.totals.hit_blocks), script.state.totals.lost_blocks) == (0, 4)


@pytest.mark.parametrize(("later", "thrashed"), [(THRASH_WINDOW_TICKS - 1, 2), (THRASH_WINDOW_TICKS, 0)])
def test_bc6_what_comes_back_within_the_window_is_thrash_the_end_excluded(later: int, thrashed: int) -> None:
    cache = store()
    cache.clock(5)
    cache.admit("r", A + B)
    cache.mirror(["r"])
    cache.release("r")
    fill(cache, 4)
    cache.clock(5 + later)
    cache.admit("s", A + B)
    assert cache.thrashed == thrashed
    assert cache.real_thrash_rate == thrashed / 2
    assert cache.host_evictions == 0, "evictions are something else"


@pytest.mark.parametrize(("window_ns", "thrashed"), [(1, 0), (10**9, 4)])
def test_bc6_the_window_of_the_leader_is_configured(window_ns: int, thrashed: int) -> None:
    script = stored("abcd", g1=12, thrash_window_ns=window_ns)
    serve(script, "b", "abcd")
    assert script.state.totals.thrash_blocks == thrashed
    assert store().real_thrash_rate is None, "nothing was copied down"


# --- BC-7, BC-8 ---


def test_bc7_every_preempted_victim_is_an_event_of_its_own() -> None:
    script = Script(g1=16, g2=0)
    for name, word in (("a", "ab"), ("b", "mn"), ("c", "xy")):
        script.arrive(name, word)
        script.admit(name)
    script.step(2)
    for name in ("a", "c"):
        script.preempt(name)
    assert script.state.totals.preemptions == 2
    told = [event.slot for event in script.ever(ev.SlotMoved) if event.new.label == "preempted"]
    assert told == [0, 2]


def test_bc8_preemptions_per_completed_request_and_as_a_fraction_of_the_requests() -> None:
    shown = document("--total-kv-blocks", "24")
    assert shown["preemptions"] > 0
    assert shown["preemptions_per_completed"] == shown["preemptions"] / shown["requests_completed"]
    assert 0 < shown["preempted_fraction"] <= 1
    assert blis_preemption_rate([3, 1], 2) == 2.0, "the legacy rate may exceed 1"


def test_bc8_rates_of_several_instances_are_weighted_and_the_mean_is_not() -> None:
    uneven = CHATS.replace("sessions=4", "sessions=5")
    two = document("--trace", uneven, "--kv-cpu-blocks", "100", "--instances", "2")
    assert two["prefix_hit_rate"] == sum(two["hit_blocks"].values()) / two["prompt_blocks"]
    assert two["thrash_rate"] == two["thrash_blocks"] / sum(two["evicted_blocks"].values())
    assert two["blis_cache_hit_rate_mean"] != two["blis_cache_hit_rate"]
    assert blis_cache_hit_rate_mean([0.5, 0.0]) == 0.25
    assert two["blocks_total"] == 80, "lower tiers are no device capacity"


# --- BC-9, BC-10 ---


def test_bc9_conservation_is_found_by_walking_the_blocks() -> None:
    cache = tiers_with_prefix_ab()
    cache.admit("s", A + B + C)
    assert cache.pool.audit(cache.requests.values()) == []
    for break_it in (
        lambda pool: pool._state.__setitem__(cache.requests["s"][0], 2),
        lambda pool: pool.hash_of.__setitem__(cache.requests["s"][1], EMPTY_HASH),
        lambda pool: pool.free_order().append(0) or setattr(pool, "_free", pool.free_blocks + 1),
    ):
        broken = tiers_with_prefix_ab()
        broken.admit("s", A + B + C)
        break_it(broken.pool)
        assert broken.pool.audit(broken.requests.values())


def test_bc10_a_full_lower_tier_evicts_its_coldest_block_and_never_touches_the_device() -> None:
    cache = store(gpu=8, cpu=3)
    cache.admit("r", A + B + C)
    cache.mirror(["r"])
    on_device = list(cache.pool.hash_of)
    first = cache.host.export()[0]
    cache.admit("s", [9, 9])
    cache.mirror(["s"])
    assert (len(cache.host.resident), cache.host_evictions) == (3, 1)
    assert first not in cache.host.resident
    assert cache.pool.hash_of[:3] == on_device[:3]


def test_bc10_a_full_lower_tier_of_which_all_is_held_is_passed_over_and_counted() -> None:
    script = Script(g1=16, g2=2, offload_threshold=0.0, staging_share=1.0)
    serve(script, "a", "ab")
    forget_g1(script)
    script.arrive("b", "ab")
    script.lookup("b")
    script.arrive("c", "mn")
    script.admit("c")
    script.step()
    script.move_all()
    assert script.state.totals.skipped[SkipReason.NO_CAPACITY] > 0
    assert script.state.pools[0].resident_blocks == 2
    assert tiers_of(script.state)["G2"] == {"a", "ab"}


# --- BC-11, BC-12 (every flag and key: tests/cli/test_bad_input.py) ---


@pytest.mark.parametrize(("field", "value"), [
    ("kv_transfer_bandwidth", 0.0), ("kv_transfer_bandwidth", -1.0), ("kv_transfer_bandwidth", float("nan")),
    ("kv_transfer_bandwidth", float("inf")), ("kv_cpu_blocks", -1), ("kv_disk_blocks", -1), ("total_kv_blocks", 0),
    ("kv_transfer_base_latency", -1.0), ("kv_offload_threshold", 1.1), ("kv_offload_threshold", -0.1),
    ("kv_offload_threshold", float("nan")),
])
def test_bc11_a_bad_number_is_refused_at_construction_by_the_name_of_its_field(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=field.replace("_", "[-_]")):
        SimulateOptions(**{"trace": CHATS, "total_kv_blocks": 9, field: value})


@pytest.mark.parametrize(("field", "value"), [
    ("g2_blocks", -1), ("g3_blocks", -1), ("offload_threshold", 1.1), ("offload_threshold", float("nan")),
    ("staging_share", -0.1), ("block_tokens", 0),
])
def test_bc11_the_leader_refuses_what_it_is_told_wrong(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=field):
        LeaderConfig(**{field: value})  # type: ignore[arg-type]


def test_bc12_the_command_line_says_the_same_before_any_work() -> None:
    for flag, value in (("--kv-cpu-blocks", "-1"), ("--kv-offload-threshold", "1.5"),
                        ("--kv-transfer-bandwidth", "NaN"), ("--kv-transfer-base-latency", "-3")):
        result = CliRunner().invoke(
            cli, ["simulate", "--trace", "mooncake:/nonexistent", "--total-kv-blocks", "9", flag, value],
            prog_name="kvbm-console",
        )
        assert (result.exit_code, result.stdout) == (2, "")
        assert flag in result.stderr, "before the trace is looked for"


def test_every_contract_has_its_tests() -> None:
    numbers = {name.split("_")[1] for name in globals() if name.startswith("test_bc")}
    assert numbers == {f"bc{number}" for number in range(1, 13)}
    assert BLOCK == 4
