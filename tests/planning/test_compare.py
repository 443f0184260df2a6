"""``compare``: the grid, its bound, its forms, and what it refuses."""

import csv
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli import compare
from kvbm_console.cli.compare import ALL
from kvbm_console.cli.main import cli
from kvbm_console.core.errors import UsageError
from kvbm_console.planning.cache_only import COMPARED
from kvbm_console.planning.compare import grid, run_grid
from kvbm_console.planning.options import SimulateOptions

CHATS = "multiturn:requests=24,sessions=4,system=64,user=48,output=24,turns=3"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["compare", "--trace", CHATS, "--workers", "1", *args], prog_name="kvbm-console")


def cells(*args: str) -> list[dict[str, Any]]:
    result = run(*args, "--format", "json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["cells"]
    return found


def test_the_default_grid_has_every_policy() -> None:
    assert tuple(ALL.split(",")) == COMPARED
    rows = cells("--cache-only", "--total-kv-blocks", "30,100")
    assert [(row["total_kv_blocks"], row["policy"]) for row in rows] == [
        (capacity, policy) for capacity in (30, 100) for policy in COMPARED
    ]


def test_the_best_is_marked_and_nothing_is_above_belady() -> None:
    rows = cells("--cache-only", "--total-kv-blocks", "20,60")
    for capacity in (20, 60):
        group = [row for row in rows if row["total_kv_blocks"] == capacity]
        bound = next(row for row in group if row["policy"] == "belady")
        others = [row for row in group if row is not bound]
        top = max(row["hit_rate"] for row in others)
        assert [row["best"] for row in others] == [row["hit_rate"] == top for row in others]
        assert not bound["best"]
        assert bound["gap_closed"] in (1.0, None)
        assert all(row["below_belady"] == bound["hit_rate"] - row["hit_rate"] >= 0 for row in group)


def test_belady_is_an_optimum_in_one_pool_and_a_reference_beside_an_engine() -> None:
    """Without a host tier, a machine that preempts finds more than one that serves its requests in a row."""
    alone = run("--cache-only", "--total-kv-blocks", "30", "--policies", "simple_lru,belady").stdout
    assert "below optimum" in alone
    assert "belady (optimum)" in alone
    beside = run("--total-kv-blocks", "40", "--policies", "simple_lru,belady", "--workers", "1").stdout
    assert "to reference" in beside
    assert "belady (reference)" in beside
    assert "below" not in beside
    simple, belady = beside.splitlines()[-2:]
    assert re.search(r"[+-]\d+\.\d\d %", simple)
    assert "+0.00 %" in belady


def test_with_an_engine_policies_rule_the_host_tier_below_the_bound() -> None:
    rows = cells("--total-kv-blocks", "40", "--kv-cpu-blocks", "0,30", "--policies", "simple_lru,lfu,belady",
                 "--kv-offload-threshold", "0")
    assert [(row["kv_cpu_blocks"], row["policy"]) for row in rows] == [
        (host, policy) for host in (0, 30) for policy in ("simple_lru", "lfu", "belady")
    ]
    assert rows[0]["hits"] == rows[1]["hits"]
    assert rows[3]["hits"] != rows[4]["hits"]
    assert all(row["hit_rate"] <= rows[at // 3 * 3 + 2]["hit_rate"] for at, row in enumerate(rows))
    assert rows[2]["ttft_ms_mean"] is None
    assert rows[3]["moved_bytes"] > 0


def test_all_cores_give_the_same_as_one() -> None:
    options = SimulateOptions(trace=CHATS, total_kv_blocks=30)
    settings = grid(options, ["simple_lru", "lrfu", "belady"], [], [30, 60], [0], cache_only=True)
    told: list[int] = []
    one = run_grid(settings, workers=1)
    assert run_grid(settings, workers=2, progress=told.append) == one
    assert told == [1, 2, 3, 4, 5, 6]


def test_presets_are_rows_of_their_own() -> None:
    narrow = ("--cache-only", "--total-kv-blocks", "30", "--policies", "simple_lru")
    assert [row["policy"] for row in cells(*narrow, "--presets")] == [
        "simple_lru", "preset chat", "preset document", "preset batch",
    ]
    assert [row["policy"] for row in cells(*narrow, "--presets", "chat")] == ["simple_lru", "preset chat"]


def test_the_table_and_csv_say_the_same() -> None:
    args = ("--cache-only", "--total-kv-blocks", "30", "--policies", "simple_lru,belady")
    rows = cells(*args)
    listed = list(csv.DictReader(io.StringIO(run(*args, "--format", "csv").stdout)))
    assert [int(row["hits"]) for row in listed] == [row["hits"] for row in rows]
    text = run(*args)
    assert text.stdout.count("best") == 1
    assert f"{100 * rows[0]['hit_rate']:.2f} %" in text.stdout
    assert "2 runs in" in text.stderr


def test_per_request_tells_which_and_why() -> None:
    args = ("--cache-only", "--total-kv-blocks", "20,40", "--policies", "simple_lru,belady")
    result = run(*args, "--per-request", "belady@20", "simple_lru@20", "--format", "json")
    listed = json.loads(result.stdout)["per_request"]
    assert (listed["a"], listed["b"]) == ("belady@20", "simple_lru@20")
    requests = listed["requests"]
    gaps = [abs(row["hits_a"] - row["hits_b"]) for row in requests]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] > 0
    assert any(" evicted for " in row["why_b"] for row in requests)
    assert all(f"block {row['hits_b']} " in row["why_b"] for row in requests if row["why_b"] != "all found")
    assert "why no more in simple_lru@20" in run(*args, "--per-request", "belady@20", "simple_lru@20").stdout


def test_per_request_in_csv_is_a_second_table() -> None:
    args = ("--cache-only", "--total-kv-blocks", "20", "--policies", "simple_lru,belady", "--per-request", "belady",
            "simple_lru")
    cells_csv, _, requests_csv = run(*args, "--format", "csv").stdout.partition("\n\n")
    assert len(list(csv.DictReader(io.StringIO(cells_csv)))) == 2
    told = json.loads(run(*args, "--format", "json").stdout)["per_request"]["requests"]
    listed = list(csv.DictReader(io.StringIO(requests_csv)))
    assert [row["request"] for row in listed] == [row["request"] for row in told]
    assert list(listed[0]) == list(told[0])


def test_the_bound_leaves_out_what_the_device_refuses() -> None:
    """Requests that never fit are no lookups, in the machine and in the bound."""
    rows = cells("--total-kv-blocks", "14", "--kv-cpu-blocks", "60", "--policies", "simple_lru,belady",
                 "--kv-offload-threshold", "0")
    refused = run("--total-kv-blocks", "14,500", "--policies", "simple_lru", "--per-request", "simple_lru@500",
                  "simple_lru@14").stdout
    assert "never admitted: too_large" in refused
    assert rows[0]["lookups"] < cells("--total-kv-blocks", "500", "--policies", "simple_lru")[0]["lookups"]
    assert rows[1]["lookups"] <= rows[0]["lookups"]
    assert rows[1]["below_belady"] == 0.0 <= rows[0]["below_belady"]


def test_per_request_with_an_engine() -> None:
    args = ("--total-kv-blocks", "40", "--kv-cpu-blocks", "0,200", "--policies", "simple_lru")
    result = run(*args, "--per-request", "simple_lru@40", "simple_lru@240", "--format", "json")
    requests = json.loads(result.stdout)["per_request"]["requests"]
    assert any(row["hits_b"] > row["hits_a"] for row in requests)
    assert all(row["why_a"] for row in requests)


BAD = [
    (("--policies", "fifo"), "--policies"),
    (("--policies", ""), "--policies"),
    (("--presets", "fast"), "--presets"),
    (("--total-kv-blocks", "0"), "--total-kv-blocks"),
    (("--total-kv-blocks", "1,x"), "--total-kv-blocks"),
    (("--kv-cpu-blocks", "-1"), "--kv-cpu-blocks"),
    (("--kv-cpu-blocks", ""), "--kv-cpu-blocks"),
    (("--cache-only", "--kv-cpu-blocks", "5"), "--cache-only"),
    (("--block-size", "0"), "--block-size"),
    (("--half-life-s", "-1"), "--half-life-s"),
    (("--plot", "x.gif"), "--plot"),
    (("--plot", "/nonexistent/x.svg"), "--plot"),
    (("--per-request", "lru", "lfu"), "--per-request"),
    (("--limit", "0"), "--limit"),
]


@pytest.mark.parametrize(("args", "flag"), BAD, ids=lambda value: "-".join(value) if isinstance(value, tuple) else "")
def test_a_bad_flag_is_one_sentence_and_exit_2(args: tuple[str, ...], flag: str) -> None:
    usual = () if "--total-kv-blocks" in args else ("--total-kv-blocks", "30")
    result = run(*usual, *args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert flag in result.stderr


def test_an_impossible_grid() -> None:
    options = SimulateOptions(trace=CHATS, total_kv_blocks=1)
    with pytest.raises(UsageError, match="10000"):
        grid(options, ["lfu"], [], list(range(1, 10_002)), [0], cache_only=True)


def test_a_plot_without_the_library_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("--total-kv-blocks", "30", "--plot", str(tmp_path / "x.svg"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "kvbm-console[plot]" in result.stderr


def test_a_plot_is_drawn_and_repeats_itself(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    args = ("--cache-only", "--total-kv-blocks", "20,40", "--policies", "simple_lru,belady")
    pictures = []
    for name in ("a.svg", "b.svg", "c.png"):
        result = run(*args, "--plot", str(tmp_path / name))
        assert result.exit_code == 0, result.output
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"<?xml")
    assert pictures[2].startswith(b"\x89PNG")


def test_the_curve_of_a_plan_reaches_its_largest_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact curve ends where nothing is evicted any more; its label would point across larger machines."""
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    ends: list[tuple[float, float, str, str]] = []
    monkeypatch.setattr(compare, "_save", lambda path, figure, axes, title, found, drawn: ends.extend(found))
    runs = [("", 256, 0.3), ("more", 2_048, 0.8)]
    compare.draw_curve(tmp_path / "x.svg", "title", [(1, 0.1), (512, 0.8)], runs, 2**20)
    assert [(x, y) for x, y, label, _ in ends if label.startswith("LRU")] == [(2.0, 80.0)]
