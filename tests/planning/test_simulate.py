"""``simulate`` from the command line: what it prints, that it repeats itself, and what it refuses before any work."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli.main import cli
from kvbm_console.core.errors import UsageError
from kvbm_console.dispatch import Dispatcher, HostsDiverged
from kvbm_console.planning import run as run_module
from kvbm_console.planning.cache_only import KEYS as CACHE_ONLY_KEYS
from kvbm_console.planning.meter import spread_of
from kvbm_console.planning.options import Geometry, SimulateOptions, blocks_of_size, parse_size
from kvbm_console.planning.report import KEYS
from kvbm_console.planning.run import simulate
from kvbm_console.planning.traces import NO_REUSE, parse_trace
from kvbm_console.simulator.embedded import Rig

CHATS = "multiturn:requests=24,sessions=4,system=64,user=48,output=24,turns=3"
"""Four chats that do not fit into 40 blocks of 16 tokens at once."""
TIERED = ("--total-kv-blocks", "40", "--kv-cpu-blocks", "200")


def run(*args: str, trace: str = CHATS) -> Result:
    return CliRunner().invoke(cli, ["simulate", "--trace", trace, *args], prog_name="kvbm-console")


def document(*args: str, trace: str = CHATS) -> dict[str, Any]:
    result = run(*args, "--format", "json", trace=trace)
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def test_the_document_has_exactly_the_documented_keys_and_adds_up() -> None:
    shown = document(*TIERED)
    assert list(shown) == list(KEYS)
    assert shown["requests_completed"] == shown["requests_arrived"] == 24
    hits = shown["hit_blocks"]
    assert set(hits) == {"G1", "G2"}
    assert hits["G2"] > 0
    assert shown["prefix_hit_rate"] == sum(hits.values()) / shown["prompt_blocks"]
    assert 0 <= shown["prefix_hit_rate"] <= 1
    moved = shown["moved_blocks"]
    assert shown["offloaded_blocks"] == moved["G1>G2"]
    assert shown["onboarded_blocks"] == moved["G2>G1"]
    assert shown["moved_bytes"]["G2>G1"] == moved["G2>G1"] * 16 * 131_072
    assert shown["thrash_rate"] == shown["thrash_blocks"] / sum(shown["evicted_blocks"].values())
    assert 0 < shown["blocks_used_mean"] <= shown["blocks_used_peak"] <= shown["blocks_total"] == 40
    assert [line["point"] for line in shown["stats"]] == ["reset", "prefill", "decode"]
    assert shown["stats"][-1]["active_slots"] == shown["stats"][-1]["blocks_used"] == 0
    for spread in (shown["ttft_ms"], shown["latency_ms"]):
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]
    assert shown["ttft_ms"]["mean"] < shown["latency_ms"]["mean"]
    again = shown["readmitted_prompt_blocks"], shown["readmitted_hit_blocks"]
    assert shown["blis_cache_hit_rate"] == (sum(hits.values()) + again[1]) / (shown["prompt_blocks"] + again[0])


def test_text_says_the_same_and_time_goes_to_stderr() -> None:
    result = run(*TIERED)
    assert "24 completed of 24" in result.stdout
    assert "G2" in result.stdout
    assert "second" not in result.stdout.split("throughput")[0]
    assert "24 requests in" in result.stderr


def test_two_runs_are_the_same_byte_for_byte() -> None:
    for args in (TIERED, (*TIERED, "--policy", "lrfu_auto", "--transfers", "sync"), ("--total-kv-blocks", "64")):
        assert run(*args, "--format", "json").stdout == run(*args, "--format", "json").stdout


def test_without_a_lower_tier_nothing_about_tiers_is_printed() -> None:
    """BC-1."""
    plain = run("--total-kv-blocks", "64", "--format", "json").stdout
    flags = ("--kv-cpu-blocks", "0", "--kv-disk-blocks", "0", "--kv-offload-threshold", "0.2", "--policy", "lfu",
             "--link", "pcie=1GB/s", "--transfers", "sync", "--preset", "chat", "--prefetch", "none")
    assert run("--total-kv-blocks", "64", *flags, "--format", "json").stdout == plain
    shown = json.loads(plain)
    assert shown["policy"] is None
    assert list(shown["hit_blocks"]) == ["G1"]


def test_a_disk_tier_without_a_host_tier() -> None:
    shown = document("--total-kv-blocks", "40", "--kv-disk-blocks", "300")
    assert list(shown["hit_blocks"]) == ["G1", "G3"]
    assert shown["hit_blocks"]["G3"] > 0
    assert set(shown["moved_blocks"]) == {"G1>G3", "G3>G1"}


def test_the_threshold_and_the_link_change_the_result() -> None:
    """BC-2, BC-4."""
    early = document(*TIERED, "--kv-offload-threshold", "0")
    late = document(*TIERED, "--kv-offload-threshold", "1")
    assert early["offloaded_blocks"] > late["offloaded_blocks"] == 0
    slow = document(*TIERED, "--link", "pcie=1GB/s,500us")
    assert slow["latency_ms"]["mean"] > document(*TIERED)["latency_ms"]["mean"]


def test_presets_copy_down_as_others_do() -> None:
    def shown(*flags: str) -> dict[str, Any]:
        found = document("--total-kv-blocks", "40", "--kv-cpu-blocks", "60", "--kv-disk-blocks", "300", *flags)
        law, threshold = found["settings"].pop("kv_offload_law"), found["settings"].pop("kv_offload_threshold")
        assert (law, threshold) == (("total", 0.9) if "original" in flags else ("order", threshold))
        return found

    queued = ("--kv-offload-link-busy", "queue")
    through = shown("--kv-offload-threshold", "0", *queued)
    assert shown("--offload-preset", "lmcache") == through
    assert shown("--offload-preset", "lmcache", "--kv-offload-threshold", "0.9") == shown(*queued) != through
    by_request = ("--kv-offload-prompt-only", "--policy", "simple_lru", "--used-at-end", *queued)
    prompts = shown("--kv-offload-threshold", "0", *by_request)
    assert shown("--offload-preset", "vllm") == prompts
    assert prompts["offloaded_blocks"] < through["offloaded_blocks"], "blocks of answers are left to the next turn"
    later = shown("--offload-preset", "vllm", "--kv-offload-threshold", "0.9")
    assert later == shown(*by_request) != prompts
    original = shown("--offload-preset", "original")
    assert original["offloaded_blocks"] < shown()["offloaded_blocks"]


def test_synchronous_loads_lengthen_the_step_that_asked_for_them() -> None:
    fast = document(*TIERED, "--transfers", "sync")
    slow = document(*TIERED, "--transfers", "sync", "--link", "pcie=25GB/s,1s")
    assert fast["onboarded_blocks"] > 0
    assert slow["duration_s"] > fast["duration_s"] + 0.5, "a load of a second stands in the way of its step"


@pytest.mark.parametrize("cleanup", ["none", "incremental"])
def test_cleaning_up_changes_no_output(cleanup: str) -> None:
    usual = run(*TIERED, "--format", "json").stdout
    assert run(*TIERED, "--cleanup", cleanup, "--format", "json").stdout == usual


@pytest.mark.parametrize(("cleanup", "held", "left", "resident"), [
    ("none", 24, 24, True), ("end", 24, 0, False), ("incremental", 0, 0, False),
])
def test_cleaning_up_gives_memory_back(
    monkeypatch: pytest.MonkeyPatch, cleanup: Any, held: int, left: int, resident: bool
) -> None:
    """How many records stand when the last request ends, and after the run; and whether the tiers keep content."""
    rigs: list[Rig] = []
    build = run_module.build_rig

    def kept(*args: Any, **named: Any) -> Rig:
        rigs.append(build(*args, **named))
        return rigs[-1]

    monkeypatch.setattr(run_module, "build_rig", kept)
    options = SimulateOptions(trace=CHATS, total_kv_blocks=40, kv_cpu_blocks=200, cleanup=cleanup)
    ran = simulate(options, leader=True)
    assert (ran.held_records, len(ran.records)) == (held, left)
    pools = rigs[0].leader.state.pools
    assert [pool.resident_blocks > 0 for pool in pools] == [resident] * len(pools)
    assert len(simulate(options, keep_records=True).records) == 24, "whoever asked for them gets them"


def test_hosts_that_agree_and_checked_invariants_change_no_output() -> None:
    small = ("--limit", "8", *TIERED)
    usual = run(*small, "--format", "json").stdout
    for flags in (("--hosts", "2"), ("--hosts", "2", "--check")):
        assert run(*small, *flags, "--format", "json").stdout == usual


def test_hosts_that_differ_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = Dispatcher.compare_hosts

    def alter(self: Dispatcher, *, memory: bool = True) -> None:
        compared.append(self.n)
        self.more_hosts[0].state.totals.preemptions += len(compared) == 3
        compare(self, memory=memory)

    monkeypatch.setattr(Dispatcher, "compare_hosts", alter)
    options = SimulateOptions(trace=CHATS, total_kv_blocks=40, kv_cpu_blocks=200, hosts=2)
    with pytest.raises(HostsDiverged, match=r"facts.*totals.preemptions"):
        simulate(options)
    assert len(compared) == 3, "states are compared from time to time"


def test_ranks_that_all_copy_change_no_output() -> None:
    small = ("--limit", "8", *TIERED, "--format", "json")
    assert run(*small, "--ranks", "3").stdout == run(*small).stdout


def test_stats_lines_come_at_four_points_and_every_n_iterations() -> None:
    result = run(*TIERED, "--stats-every", "25")
    lines = [line for line in result.stderr.splitlines() if line.startswith("stats ")]
    points = [line.split()[1].rstrip(":") for line in lines]
    assert [points[0], points[1], *points[-2:]] == ["reset", "prefill", "decode", "cleanup"]
    steps = int(document(*TIERED)["steps"])
    assert len(lines) == 4 + steps // 25
    assert "0 active slots, 0 blocks used" in lines[-1]
    quiet = run(*TIERED)
    assert quiet.stdout == result.stdout
    assert len(quiet.stderr.splitlines()) == 1, "the time that it took"
    assert run(*TIERED, "--stats-every", "10").stderr.count("stats ") == 4 + steps // 10


def test_instances_share_the_work_and_weight_their_rates() -> None:
    whole = document(*TIERED, "--instances", "2")
    assert whole["requests_completed"] == 24
    assert whole["blocks_total"] == 80
    assert whole["prefix_hit_rate"] == sum(whole["hit_blocks"].values()) / whole["prompt_blocks"]
    one = run(*TIERED, "--instances", "9")
    assert one.exit_code == 2
    assert "--instances" in one.stderr


def test_a_request_larger_than_the_device_is_refused_and_counted() -> None:
    shown = document("--total-kv-blocks", "8")
    assert shown["requests_too_large"] > 0
    assert shown["requests_completed"] + shown["requests_too_large"] == shown["requests_arrived"]


def test_a_seed_draws_another_workload() -> None:
    assert document(*TIERED, "--seed", "1") != document(*TIERED)
    assert document(*TIERED, "--seed", "0")["prompt_blocks"] != document(*TIERED, "--seed", "2")["prompt_blocks"]


def test_policies_rule_the_host_tier() -> None:
    narrow = ("--total-kv-blocks", "40", "--kv-cpu-blocks", "30", "--kv-offload-threshold", "0")
    shown = document(*narrow, "--policy", "lfu")
    assert shown["policy"]["policy"] == "lfu"
    gauges = shown["policy"]["gauges"]["G2"]
    assert gauges["evicted_as_recency"] < gauges["evicted"] == shown["evicted_blocks"]["G2"]
    chat = document(*narrow, "--preset", "chat", "--frequency-weight", "0.5")["policy"]
    assert (chat["policy"], chat["frequency_weight"], chat["pin_tail_tokens"]) == ("adaptive_lru", 0.5, 256)


# --- preemptions ---

DISTINCT = "multiturn:requests=24,sessions=24,system=0,user=400,output=200,turns=1,think=0.001"
"""Requests of which none repeats anything of another."""


@pytest.mark.parametrize("tier", [(), ("--kv-cpu-blocks", "200")], ids=["device", "host"])
def test_a_preempted_request_that_finds_its_own_blocks_makes_no_hit_rate(tier: tuple[str, ...]) -> None:
    shown = document("--total-kv-blocks", "120", *tier, trace=DISTINCT)
    assert shown["preemptions"] > 0
    assert shown["readmitted_prompt_blocks"] >= shown["readmitted_hit_blocks"] > 0
    assert sum(shown["hit_blocks"].values()) == shown["prefix_hit_rate"] == 0
    assert shown["blis_cache_hit_rate"] > 0, "BLIS counts all admissions"
    text = run("--total-kv-blocks", "120", *tier, trace=DISTINCT).stdout
    found = f"{shown['readmitted_hit_blocks']:,} of {shown['readmitted_prompt_blocks']:,} prompt blocks found"
    assert f"readmitted   {found}" in text
    assert "readmitted" not in run("--total-kv-blocks", "4000", *tier, trace=DISTINCT).stdout


# --- traces ---


def azure(path: Path, *rows: str) -> str:
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    return f"azure:{path}"


def test_azure_has_lengths_only_and_says_so(tmp_path: Path) -> None:
    rows = ("2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,374,30")
    trace = azure(tmp_path / "azure.csv", *rows)
    shown = document("--total-kv-blocks", "100", trace=trace)
    assert shown["note"] == NO_REUSE
    assert shown["hit_blocks"] == {"G1": 0}
    assert shown["requests_completed"] == 2
    assert NO_REUSE in run("--total-kv-blocks", "100", trace=trace).stdout
    requests = list(parse_trace(trace).arrivals())
    assert [request.arrival_ns for request in requests] == [0, 4_314_579_000]
    assert [(request.prompt_tokens, request.output_tokens) for request in requests] == [(374, 44), (374, 30)]


def test_burstgpt_passes_over_failures(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n118.5,GPT-4,417,276,693,API log\n"
    )
    workload = parse_trace(f"burstgpt:{path}")
    requests = list(workload.arrivals())
    assert [(request.arrival_ns, request.prompt_tokens) for request in requests] == [(0, 472), (113_500_000_000, 417)]
    assert len(list(parse_trace(f"burstgpt:{path}", 1).arrivals())) == 1


BAD_LINES = [
    ("2023-11-16 18:15:46,x,4", "ContextTokens"),
    ("2023-11-16 18:15:46,0,4", "ContextTokens"),
    ("2023-11-16 18:15:46,5,-1", "GeneratedTokens"),
    ("yesterday,5,5", "TIMESTAMP"),
    ("2023-11-16 18:15:46,5", "3 fields"),
]


@pytest.mark.parametrize(("row", "what"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, row: str, what: str) -> None:
    trace = azure(tmp_path / "bad.csv", "2023-11-16 18:15:45,3,3", row)
    result = run("--total-kv-blocks", "9", "--stats-every", "0", trace=trace)
    assert result.exit_code == 2
    assert "bad.csv line 3" in result.stderr
    assert what in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    assert "line 1: must have the columns" in run("--total-kv-blocks", "9", trace=f"azure:{path}").stderr


# --- the command line ---

BAD = [
    (("--total-kv-blocks", "0"), "--total-kv-blocks"),
    (("--total-kv-blocks", "x"), "--total-kv-blocks"),
    (("--total-kv-blocks", "9", "--block-size", "0"), "--block-size"),
    (("--total-kv-blocks", "9", "--kv-cpu-blocks", "-1"), "--kv-cpu-blocks"),
    (("--total-kv-blocks", "9", "--kv-disk-blocks", "-1"), "--kv-disk-blocks"),
    (("--total-kv-blocks", "9", "--kv-cpu-size", "lots"), "--kv-cpu-size"),
    (("--total-kv-blocks", "9", "--kv-cpu-size", "1KiB"), "--kv-cpu-size"),
    (("--total-kv-blocks", "9", "--kv-cpu-size", "64GiB", "--kv-cpu-blocks", "3"), "--kv-cpu-size"),
    (("--total-kv-blocks", "9", "--kv-geometry", "32,8,128"), "--kv-geometry"),
    (("--total-kv-blocks", "9", "--kv-geometry", "0,8,128,2"), "--kv-geometry"),
    (("--total-kv-blocks", "9", "--kv-offload-threshold", "1.5"), "--kv-offload-threshold"),
    (("--total-kv-blocks", "9", "--kv-offload-threshold", "nan"), "--kv-offload-threshold"),
    (("--total-kv-blocks", "9", "--kv-transfer-bandwidth", "0"), "--kv-transfer-bandwidth"),
    (("--total-kv-blocks", "9", "--kv-transfer-bandwidth", "-1"), "--kv-transfer-bandwidth"),
    (("--total-kv-blocks", "9", "--kv-transfer-bandwidth", "NaN"), "--kv-transfer-bandwidth"),
    (("--total-kv-blocks", "9", "--kv-transfer-bandwidth", "inf"), "--kv-transfer-bandwidth"),
    (("--total-kv-blocks", "9", "--kv-transfer-base-latency", "-3"), "--kv-transfer-base-latency"),
    (("--total-kv-blocks", "9", "--transfers", "later"), "--transfers"),
    (("--total-kv-blocks", "9", "--policy", "fifo"), "--policy"),
    (("--total-kv-blocks", "9", "--policy", "belady"), "--policy"),
    (("--total-kv-blocks", "9", "--preset", "none"), "--preset"),
    (("--total-kv-blocks", "9", "--frequency-weight", "2"), "--frequency-weight"),
    (("--total-kv-blocks", "9", "--frequency-credit-s", "-1"), "--frequency-credit-s"),
    (("--total-kv-blocks", "9", "--half-life-s", "0"), "--half-life-s"),
    (("--total-kv-blocks", "9", "--pin-tail-tokens", "-1"), "--pin-tail-tokens"),
    (("--total-kv-blocks", "9", "--instances", "0"), "--instances"),
    (("--total-kv-blocks", "9", "--hosts", "17"), "--hosts"),
    (("--total-kv-blocks", "9", "--limit", "0"), "--limit"),
    (("--total-kv-blocks", "9", "--stats-every", "-1"), "--stats-every"),
    (("--total-kv-blocks", "9", "--seed", "-1"), "--seed"),
    (("--total-kv-blocks", "9", "--cache-only", "--kv-cpu-blocks", "3"), "--cache-only"),
]


@pytest.mark.parametrize(("args", "flag"), BAD, ids=lambda value: "-".join(value) if isinstance(value, tuple) else "")
def test_a_bad_flag_is_one_sentence_and_exit_2_before_any_work(args: tuple[str, ...], flag: str) -> None:
    """BC-11, BC-12."""
    result = run(*args)
    assert result.exit_code == 2
    assert flag in result.stderr
    assert result.stderr.startswith("kvbm-console: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("trace", "words"),
    [("nothing:x", "--trace must be one of"), ("mooncake:", "--trace must be one of"), ("azure:", "must name a file"),
     ("mooncake:/nonexistent", "cannot be read"), ("multiturn", "--limit"), ("multiturn:turns=x", "turns")],
)
def test_a_bad_trace_is_one_sentence(trace: str, words: str) -> None:
    result = run("--total-kv-blocks", "9", trace=trace)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert words in result.stderr


def test_no_trace_at_all() -> None:
    result = CliRunner().invoke(cli, ["simulate", "--total-kv-blocks", "9"], prog_name="kvbm-console")
    assert result.exit_code == 2
    assert "--trace" in result.stderr


# --- cache only ---


def test_cache_only_prints_its_own_document_and_how_it_counts() -> None:
    shown = document("--cache-only", "--total-kv-blocks", "60", "--policy", "belady")
    assert list(shown) == list(CACHE_ONLY_KEYS)
    assert shown["policy"]["policy"] == "belady"
    assert shown["prefix_hit_rate"] == shown["hits"] / shown["references"]
    text = run("--cache-only", "--total-kv-blocks", "60").stdout
    assert "partial last one included" in text
    assert "lrfu_auto" in text


# --- parts ---


def test_sizes_become_blocks() -> None:
    geometry = Geometry.parse("32,8,128,2")
    assert geometry.token_bytes == 131_072
    assert blocks_of_size(parse_size("64GiB", "x"), 16 * geometry.token_bytes, "x") == 32_768
    assert parse_size("1.5 MB", "x") == 1_500_000
    assert parse_size("7", "x") == 7
    shown = document("--total-kv-blocks", "40", "--kv-cpu-size", "512MiB")
    assert shown["settings"]["kv_cpu_blocks"] == 256
    with pytest.raises(UsageError, match="--kv-geometry"):
        Geometry(2**20, 2**20, 2, 1)


def test_percentiles_are_values_that_occurred() -> None:
    assert set(spread_of({}).values()) == {None}
    assert spread_of(dict.fromkeys(range(1, 101), 1)) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99, "max": 100}


def test_records_tell_why_a_request_found_no_more() -> None:
    options = SimulateOptions(trace=CHATS, total_kv_blocks=40, kv_cpu_blocks=30)
    run = simulate(options, keep_records=True)
    assert len(run.records) == 24
    assert {record.reason for record in run.records} == {"length"}
    assert all(record.finished_ns is not None and record.prompt_blocks >= sum(record.hits) for record in run.records)
    assert any(record.why_missed for record in run.records)


@pytest.mark.parametrize("every", [1, 7, 10, 64])
@pytest.mark.parametrize("host", [0, 30, 200])
def test_stats_lines_are_the_same_with_iterations_taken_together(every: int, host: int) -> None:
    options = SimulateOptions(
        trace="multiturn:requests=24,sessions=4,system=64,user=48,output=70,turns=3", total_kv_blocks=60,
        kv_cpu_blocks=host, stats_every=every,
    )
    told: list[list[str]] = []
    for windows in (True, False):
        lines: list[str] = []
        simulate(options, stats=lambda line, lines=lines: lines.append(line.text()), windows=windows)
        told.append(lines)
    assert told[0] == told[1]
    assert len(told[0]) > 10
