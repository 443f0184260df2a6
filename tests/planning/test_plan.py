"""``plan``: its curve is a replay's, its answers are runs, and what it promises then happens.

Law of this file: a recommended machine is run again by the test, and what was held back is judged by itself.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.cli.main import cli
from kvbm_console.core.eviction import make_policy
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.planning.cache_only import References, in_order, replay
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.plan import (
    FLAT,
    Answered,
    Change,
    ChangeRow,
    Curves,
    Goal,
    MachinePlan,
    RunJudge,
    changes_of,
    lru_curves,
    plan,
    ratio,
    run_one,
    with_fields,
)
from kvbm_console.planning.run import open_trace

CHATS = "multiturn:requests=72,sessions=9,think=3"
SMALL: dict[str, Any] = {
    "trace": CHATS, "total_kv_blocks": 256, "kv_cpu_blocks": 192, "kv_transfer_bandwidth": 0.2,
    "max_num_batched_tokens": 256,
}


def kvbm(*words: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *words], prog_name="kvbm-console")


def test_a_device_that_preempts_is_not_promised_more_hits() -> None:
    """A request that was preempted finds its own blocks, which is no reason for a smaller device."""
    trace = "multiturn:requests=96,sessions=96,system=0,user=400,output=200,turns=1,think=0.001"
    found = plan(SimulateOptions(trace=trace, total_kv_blocks=400), Goal())
    smaller = next(row for row in found.changes if row.flags == "--total-kv-blocks 200")
    assert smaller.hit_rate.value == smaller.points.value == 0
    assert smaller.ttft_ms > found.today.ttft_ms


# --- the curve ---


@pytest.mark.parametrize("seed", range(3))
def test_the_curve_is_that_of_a_replay_at_every_capacity(seed: int) -> None:
    options = SimulateOptions(trace=f"{CHATS},seed={seed},turns=7", total_kv_blocks=1)
    requests = list(in_order(open_trace(options), options.block_size))
    stored = [request.hashes + request.output_hashes for request in requests]
    asked = [request.hashes[: (request.prompt_tokens - 1) // options.block_size] for request in requests]
    curve = lru_curves(options, len(requests))
    half = len(requests) // 2
    longest = max(map(len, stored))
    for capacity in range(longest, curve.enough + 50, 97):  # a smaller pool would cut a request
        references = References("x", 16, [""] * len(stored), [0] * len(stored), stored)
        found = replay(references, make_policy(PolicyConfig(policy="simple_lru"), capacity), capacity, lookups=asked)
        assert curve.hit_rate(capacity) == pytest.approx(
            sum(found.hits_of[half:]) / sum(map(len, asked[half:])), abs=1e-12
        )
    assert curve.hit_rate(curve.enough) >= curve.most - FLAT
    assert curve.points()[-1].hit_rate == curve.most


@given(some.lists(some.tuples(some.integers(0, 5), some.integers(1, 5)), min_size=2, max_size=30))
@settings(max_examples=50)
def test_a_figure_is_the_ratio_of_the_sums(parts: list[tuple[int, int]]) -> None:
    figure = ratio(parts)
    assert figure.value == pytest.approx(sum(part[0] for part in parts) / sum(part[1] for part in parts))
    alike = ratio([(2 * size, size) for _, size in parts])
    assert (alike.value, alike.error) == (2, 0)
    assert figure.error >= 0


# --- promises ---


def promise(options: SimulateOptions) -> ChangeRow:
    """The promise of the first half, and what happened in the second."""
    run = run_one(options)
    judge = RunJudge(options, run, Goal(), check=True)
    judge.curve = lru_curves(options, judge.requests // 2)
    return judge.row(Change("", options, memory=False), run)


def promised(options: SimulateOptions) -> tuple[float, float, float]:
    """The promise, its error, and the outcome."""
    row = promise(options)
    assert row.happened is not None
    return row.hit_rate.value, row.hit_rate.error, row.happened


@pytest.mark.parametrize("blocks", [
    4_000, pytest.param(2_000, marks=pytest.mark.slow), pytest.param(8_000, marks=pytest.mark.slow),
])
def test_what_the_first_half_of_a_real_trace_promises_happens_in_the_second(
    blocks: int, mooncake_trace: Path
) -> None:
    options = SimulateOptions(trace=f"mooncake:{mooncake_trace}", total_kv_blocks=blocks, block_size=512)
    value, error, happened = promised(options)
    assert abs(value - happened) < min(error, 0.01)


def test_what_the_first_half_of_chats_promises_happens_in_the_second() -> None:
    options = SimulateOptions(trace="multiturn:requests=2400,sessions=60", total_kv_blocks=6_000)
    value, error, happened = promised(options)
    assert abs(value - happened) < 0.01
    assert error < 0.03


LOADS = (
    ("multiturn:requests=600,sessions=40,think=1,turns=10", (600, 1_160, 2_400)),
    ("multiturn:requests=600,sessions=40,think=4", (400, 726, 1_500)),
    ("multiturn:requests=600,sessions=20,think=4,turns=20", (1_000, 4_000)),
    ("multiturn:requests=800,sessions=30,think=2,turns=6,prompts=3", (500, 2_500)),
)
"""Chats with few and many turns, in pools that are too small, that are on the cliff of the curve, and large."""


@pytest.mark.parametrize(("seeds", "outside"), [
    pytest.param(1, 0, id="few"), pytest.param(4, 2, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
])
def test_what_happens_is_within_the_error_that_is_stated(seeds: int, outside: int) -> None:
    """19 of 20 promises are kept within their error, and a wide error is that of a cliff, which the row names."""
    broken = []
    for trace, sizes in LOADS:
        for seed in range(seeds):
            for blocks in sizes:
                row = promise(SimulateOptions(trace=f"{trace},seed={seed}", total_kv_blocks=blocks, block_size=64))
                if not row.kept:
                    broken.append((trace, seed, blocks, row))
                assert row.cliff or row.hit_rate.error < 0.08
                assert not row.cliff or blocks < sizes[-1]
                assert row.cliff or blocks not in (726, 1_160)
    assert len(broken) <= outside, broken


def test_a_host_tier_that_copies_blocks_of_the_device_is_on_the_cliff_of_what_both_hold() -> None:
    """1,436 places would be far beyond the cliff at 908 blocks, if each block had one place."""
    options = SimulateOptions(
        trace="multiturn:requests=600,sessions=40,think=4", total_kv_blocks=726, kv_cpu_blocks=710, block_size=64
    )
    row = promise(options)
    assert row.cliff
    assert row.kept


def test_a_promise_on_a_cliff_says_how_steep_it_is() -> None:
    """A loop over 100 blocks hits all in 100 places and nothing in 80, though every stretch had the same rate."""
    curve = Curves()
    keys = [[at] for at in range(100)]
    for lap in range(6):
        for key in keys:
            curve.add(key, 1, judged=lap > 2)
    assert curve.hit_rate(100) == 1.0
    assert curve.drift(100) == 1.0
    assert curve.drift(1_000) == 0.0


def test_the_held_back_half_is_not_looked_at() -> None:
    """The promise stays the same, whatever the second half does."""
    run = [Answered(f"r{at}", 10, at % 10, 1_000_000) for at in range(400)]
    other = run[:200] + [Answered(f"r{at}", 10, 0, 9_000_000) for at in range(200, 400)]
    options = SimulateOptions(**SMALL)
    change = Change("", options, memory=False)
    rows = [RunJudge(options, each, Goal(), check=True).row(change, each) for each in (run, other)]
    assert rows[0].hit_rate == rows[1].hit_rate
    assert rows[0].ttft_limit_ms == rows[1].ttft_limit_ms
    assert (rows[0].happened, rows[1].happened) == (0.45, 0.0)


# --- changes and answers ---


@pytest.fixture(scope="module")
def chats() -> MachinePlan:
    return plan(SimulateOptions(**SMALL), Goal(hit_rate=0.5, percent=90), workers=1)


def test_every_row_is_a_run_of_its_flags(chats: MachinePlan) -> None:
    options = SimulateOptions(**SMALL)
    changes = {change.flags: change for change in changes_of(options)}
    assert {row.flags for row in chats.changes} == changes.keys()
    today = run_one(options)
    judge = RunJudge(options, today, Goal(percent=90), check=False)
    judge.curve = lru_curves(options, judge.requests)
    for row in (chats.changes[0], chats.changes[-1]):
        assert judge.row(changes[row.flags], run_one(changes[row.flags].options)) == row
    points = [row.points.value for row in chats.changes]
    assert points == sorted(points, reverse=True)
    assert chats.today.points.value == chats.today.points.error == 0
    for row in chats.changes:
        assert row.points.value == pytest.approx(row.hit_rate.value - chats.today.hit_rate.value)


def test_an_answer_meets_its_goal_and_less_memory_does_not(chats: MachinePlan) -> None:
    assert chats.answers
    assert chats.answer == f"50 % of hits: the least change is {chats.answers[0].flags}"
    options = SimulateOptions(**SMALL)
    judge = RunJudge(options, run_one(options), Goal(), check=False)
    for row in chats.answers:
        assert row.hit_rate.value >= 0.5
        flag, _, blocks = row.flags.rpartition(" ")
        if row.memory_bytes <= 0 or " " in flag:
            continue
        field = flag[2:].replace("-", "_")
        less = with_fields(options, memory=True, **{field: int(blocks) * 4 // 5})
        assert judge.row(less, run_one(less.options)).hit_rate.value < 0.5


def test_more_memory_than_enough_pays_nothing(chats: MachinePlan) -> None:
    large = SimulateOptions(**{**SMALL, "total_kv_blocks": chats.enough_blocks + 500, "kv_cpu_blocks": 0})
    found = plan(large, Goal(hit_rate=0.99), workers=1)
    assert found.today.hit_rate.value >= found.most - 0.01
    assert all(row.points.value <= 0.01 for row in found.changes if row.memory_bytes > 0)
    assert found.answers == []
    assert "no memory reaches that" in found.answer


def test_a_budget_is_spent_as_far_as_it_pays() -> None:
    options = SimulateOptions(**SMALL)
    spent = plan(options, Goal(budget={"host": 64 * 2**30}), workers=1)
    assert spent.budget is not None
    assert spent.budget.blocks[1] == 64 * 2**30 // options.block_bytes
    least, = spent.answers
    assert least.blocks[1] < spent.budget.blocks[1]
    assert least.hit_rate.value >= spent.budget.hit_rate.value - FLAT
    assert "of the budget pay nothing" in spent.answer
    assert spent.changes
    for row in spent.changes:
        assert all(mine <= theirs for mine, theirs in zip(row.blocks, spent.budget.blocks, strict=True)), row.flags


def test_the_machine_of_today_is_the_one_that_was_given_whatever_the_budget() -> None:
    options = SimulateOptions(**SMALL)
    alone, spent = (plan(options, goal, workers=1) for goal in (Goal(), Goal(budget={"host": 64 * 2**30})))
    assert alone.budget is None
    assert spent.today == alone.today
    assert spent.budget is not None
    assert spent.budget.points.value == spent.budget.hit_rate.value - spent.today.hit_rate.value
    same = plan(options, Goal(budget={"host": options.kv_cpu_blocks * options.block_bytes}), workers=1)
    assert (same.today, same.budget) == (alone.today, None)
    assert same.answer.startswith("all of the budget pays") or "pay nothing" in same.answer


def test_a_time_to_the_first_token_is_a_goal() -> None:
    options = SimulateOptions(**{**SMALL, "kv_cpu_blocks": 0})
    met = plan(options, Goal(percent=90, ttft_ns=10**10), workers=1)
    assert met.answers == [met.today]
    assert met.answer == "p90 of ttft within 10000 ms: the machine has that without a change"
    assert min(row.ttft_limit_ms for row in met.changes) < met.today.ttft_limit_ms


@pytest.mark.slow
def test_the_least_machine_for_a_time_to_the_first_token_is_found() -> None:
    options = SimulateOptions(**{**SMALL, "kv_cpu_blocks": 0})
    found = plan(options, Goal(percent=90, ttft_ns=15 * 10**6), workers=1)
    assert found.today.ttft_limit_ms > 15
    assert found.answers
    assert all(row.ttft_limit_ms <= 15 for row in found.answers)


# --- the command ---


def test_the_command_prints_the_plan_and_its_json() -> None:
    words = (CHATS, "--total-kv-blocks", "384", "--workers", "1", "--target-hit", "30%", "--check")
    text = kvbm(*words)
    assert text.exit_code == 0, text.output
    assert "more memory pays nothing" in text.stdout
    assert "promised and happened differ by at most" in text.stdout
    document = msgspec.json.decode(kvbm(*words, "--format", "json").stdout, type=MachinePlan)
    assert document.schema == "kvbm-console.plan/1"
    assert document.judged == 18
    assert document.checked is not None


def test_a_plot_shows_the_machine_of_today_beside_that_of_the_budget(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    picture = tmp_path / "plan.svg"
    result = kvbm(CHATS, "--total-kv-blocks", "384", "--workers", "1", "--budget", "1GiB-host", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "\nbudget " in result.stdout
    drawn = picture.read_text()
    assert "<!-- you are here -->" in drawn
    assert "<!-- budget -->" in drawn


@pytest.mark.parametrize(("words", "said"), [
    (("--target-hit", "140%"), "--target-hit must be a share above 0 and up to 100%, got '140%'"),
    (("--target-hit", "much"), "--target-hit must be a share"),
    (("--budget", "2TB"), "--budget must be sizes of tiers such as 2TB-disk,512GB-host, got '2TB'"),
    (("--budget", "lots-host"), "--budget must be a size such as 64GiB"),
    (("--budget", "1KiB-host"), "--budget must hold a block of 2097152 bytes of host"),
    (("--slo", "p95=1s"), "--slo must be of the form ttft-p95=800ms"),
    (("--budget", "1GB-host", "--target-hit", "50%"), "it takes no --target-hit and no --slo"),
    (("--limit", "5"), "must have at least 64 answered requests, got 5"),
])
def test_a_mistake_is_one_sentence(words: tuple[str, ...], said: str) -> None:
    result = kvbm(CHATS, "--workers", "1", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


# --- the curve of compare ---


def test_the_curve_of_compare_is_simple_lru_at_each_of_its_capacities() -> None:
    runner, trace = CliRunner(), "multiturn:requests=60,sessions=9,turns=4"
    words = [
        "compare", "--trace", trace, "--cache-only", "--policies", "simple_lru", "--workers", "1", "--format", "json",
    ]
    curve = msgspec.json.decode(runner.invoke(cli, [*words, "--total-kv-blocks", "9"]).stdout)["lru_curve"]
    sizes = ",".join(str(point["blocks"]) for point in curve)
    cells = msgspec.json.decode(runner.invoke(cli, [*words, "--total-kv-blocks", sizes]).stdout)["cells"]
    assert len(curve) > 20
    assert [cell["hit_rate"] for cell in cells] == [point["hit_rate"] for point in curve]


def test_compare_takes_the_flags_of_the_machine() -> None:
    runner = CliRunner()
    words = ["--trace", CHATS, "--kv-disk-size", "512MiB", "--compat", "--kv-transfer-bandwidth", "0.02",
             "--instances", "2"]
    cells = msgspec.json.decode(runner.invoke(cli, [
        "compare", *words, "--total-kv-blocks", "128", "--kv-cpu-blocks", "64", "--policies", "lfu", "--workers", "1",
        "--format", "json",
    ]).stdout)["cells"]
    alone = msgspec.json.decode(runner.invoke(cli, [
        "simulate", *words, "--total-kv-blocks", "128", "--kv-cpu-blocks", "64", "--policy", "lfu", "--stats-every",
        "0", "--format", "json",
    ]).stdout)
    assert alone["settings"]["kv_disk_blocks"] == 256
    assert cells[0]["ttft_ms_mean"] == alone["ttft_ms"]["mean"]
    assert cells[0]["hits"] == sum(alone["hit_blocks"].values())
