"""``calibrate``: times are found again in what a machine with known times did, and what cannot be found is refused.

Law of this file: measurements are made from times that the test knows, with noise, or by the simulated engine.
"""

import json
import random
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.cli.main import cli
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import SlotMoved
from kvbm_console.core.ids import SlotState
from kvbm_console.planning.calibrate import calibrate, fit_times, residuals
from kvbm_console.planning.fitting import nonnegative
from kvbm_console.planning.measured import Equation, Measured, read_measured
from kvbm_console.planning.profile import read_profile
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.config import EngineConfig

ROOT: Final = Path(__file__).resolve().parents[2]
SHARED: Final = ROOT.parent / "shared"
LIMITS: Final = EngineConfig(g1_blocks=1)
NOISE: Final = 0.05
"""Measured times are off by up to so much."""
BOUND: Final = 0.03
"""Times that are found are off by at most this share of a typical step, at the largest count."""
RECOVERED: Final = settings(max_examples=40, deadline=None)


def steps(
    seed: int, base: float, prefill: float, decode: float, count: int = 300, stalls: float = 0.0
) -> list[Equation]:
    """Steps of an engine with these times in nanoseconds, with noise; a share of them stalls."""
    dice = random.Random(seed)
    found, at_ns = [], 0.0
    for _ in range(count):
        tokens, requests = dice.choice([0, 0, 0, 37, 512, 2_048]), dice.randint(0, 64)
        lasts_ns = (base + tokens * prefill + requests * decode) * dice.uniform(1 - NOISE, 1 + NOISE)
        if dice.random() < stalls:
            lasts_ns *= dice.uniform(5, 50)
        at_ns += lasts_ns
        found.append(Equation(at_ns, 1.0, tokens, requests, lasts_ns))
    return found


@RECOVERED
@given(
    seed=some.integers(0, 10**6), base=some.floats(1e6, 5e7), prefill=some.floats(0, 2e5), decode=some.floats(0, 1e6),
    stalls=some.sampled_from([0.0, 0.03]),
)
def test_known_times_are_found_again(seed: int, base: float, prefill: float, decode: float, stalls: float) -> None:
    measured = steps(seed, base, prefill, decode, stalls=stalls)
    found = fit_times("x", measured)
    typical = float(np.median([equation.time_ns for equation in measured]))
    for mine, real, most in zip(found.times, (base, prefill, decode), (1, 2_048, 64), strict=True):
        assert abs(mine - real) * most <= BOUND * max(typical, real * most)
    assert found.left_out >= sum(stalls > 0 and equation.time_ns > 5 * (
        base + equation.prefill_tokens * prefill + equation.decode_requests * decode
    ) for equation in measured)


@RECOVERED
@given(
    seed=some.integers(0, 10**6), base=some.floats(1e6, 5e7), prefill=some.floats(0, 2e5), decode=some.floats(0, 1e6)
)
def test_the_second_half_is_predicted_from_the_first(seed: int, base: float, prefill: float, decode: float) -> None:
    found = calibrate("x", Measured("steps", steps(seed, base, prefill, decode), []), LIMITS)
    assert found.second_half.times is not None
    assert found.second_half.times.median <= NOISE
    assert found.second_half.times.p90 <= NOISE + BOUND
    assert found.fitted.ttft is found.fitted.tpot is None


@RECOVERED
@given(some.integers(0, 10**6), some.integers(1, 4))
def test_the_fit_without_negative_parts_is_the_best(seed: int, columns: int) -> None:
    """At a least sum of squares, no part can be changed for the better (the conditions of Karush, Kuhn and Tucker)."""
    dice = np.random.default_rng(seed)
    rows, values = dice.normal(size=(20, columns)), dice.normal(size=20)
    found = nonnegative(rows, values)
    slope = rows.T @ (rows @ found - values)
    assert (found >= 0).all()
    assert (slope[found == 0] >= -1e-9).all()
    assert (np.abs(slope[found > 0]) < 1e-9).all()


# --- refusals ---


@given(some.integers(0, 10**6), some.sampled_from([0, 1, 2, 3]))
@settings(max_examples=20, deadline=None)
def test_what_the_measurements_do_not_tell_is_refused(seed: int, kind: int) -> None:
    measured = steps(seed, 4e6, 8e3, 4e4)
    if kind == 0:
        changed, named = [row._replace(prefill_tokens=0.0) for row in measured], "--step-prefill-token"
    elif kind == 1:
        changed, named = [row._replace(decode_requests=7.0) for row in measured], "--step-decode-request"
    elif kind == 2:
        changed, named = [row._replace(decode_requests=row.prefill_tokens * 3) for row in measured], "--step-prefill"
    else:  # all but equal: noise is larger than what a request adds
        dice = random.Random(seed)
        changed = [row._replace(decode_requests=64.0 + (at == 5), time_ns=dice.uniform(4e6, 8e6))
                   for at, row in enumerate(measured)]
        named = "--step-"
    with pytest.raises(UsageError, match="cannot tell") as caught:
        fit_times("steps.csv", changed)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["calibrate", *map(str, args)], prog_name="kvbm-console")


@pytest.mark.parametrize(("name", "text", "said"), [
    ("few.csv", "prefill_tokens,decode_requests,duration_ms\n1,2,3\n", "at least 12 measurements of busy steps, got 1"),
    ("no.csv", "tokens\n1\n", "must have the columns prefill_tokens, decode_requests, duration_ns of steps"),
    ("empty.csv", "", "must have the columns"),
    ("word.csv", "prefill_tokens,decode_requests,duration_ms\n1,2,long\n",
     "row 1: duration_ms must be a number, got 'long'"),
    ("hole.csv", "prefill_tokens,decode_requests\n1,2\n", "row 1: duration_ns must be a number, got None"),
    ("minus.json", '[{"prefill_tokens": -1, "decode_requests": 1, "duration_ns": 5}]',
     "row 1: prefill_tokens must be from 0"),
    ("broken.json", "[{", "cannot be read"), ("list.jsonl", "[1]\n", "must hold an object in each row"),
    ("nan.json", '[{"prefill_tokens": 1, "decode_requests": "nan", "duration_ns": 5}]', "must be from 0 to 2^63"),
    ("order.jsonl", '{"arrived_ns": 9, "first_token_ns": 5, "finished_ns": 6, "prompt_tokens": 1, "output_tokens": 2}',
     "arrival, first token and end must follow each other"),
    ("zero.jsonl", '{"prefill_tokens": 1, "decode_requests": 1, "duration_ns": 0}\n' * 20, "must have times above 0"),
])
def test_a_bad_table_is_one_sentence(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    result = run(path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert str(path) in result.stderr
    assert said in result.stderr


# --- tables and recordings ---


def test_units_and_forms_of_a_table_say_the_same(tmp_path: Path) -> None:
    rows = [(row.prefill_tokens, row.decode_requests, row.time_ns) for row in steps(1, 4e6, 8e3, 4e4)]
    found = []
    for unit, size in (("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)):
        tables = [dict(zip(("prefill_tokens", "decode_requests", f"duration_{unit}"), (*row[:2], row[2] / size),
                           strict=True)) for row in rows]
        (tmp_path / "a.csv").write_text("\n".join([",".join(tables[0]), *(
            ",".join(map(str, table.values())) for table in tables
        )]))
        (tmp_path / "a.json").write_text(json.dumps(tables))
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, tables)))
        found += [read_measured(tmp_path / f"a.{suffix}", 8_192).equations for suffix in ("csv", "json", "jsonl")]
    for other in found:
        assert np.allclose(np.array(other), np.array(found[0]), rtol=1e-9)


TIMES: Final = {"step-base": 7_000_000, "step-prefill-token": 21_000, "step-decode-request": 130_000}
CHATS: Final = "multiturn:requests=400,sessions=24,seed=3"


def made(tmp_path: Path, *more: str) -> Path:
    """The rows of requests of a simulated engine with ``TIMES``."""
    path = tmp_path / "rows.jsonl"
    times = [part for name, time in TIMES.items() for part in (f"--{name}", f"{time}ns")]
    words = ["simulate", "--trace", CHATS, "--total-kv-blocks", "5000", "--stats-every", "0", *times, *more,
             "--requests-out", str(path)]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    return path


def times_of(found: dict[str, Any]) -> dict[str, int]:
    return {name: found[name.replace("-", "_") + "_ns"] for name in TIMES}


def test_times_are_found_again_from_requests_alone(tmp_path: Path) -> None:
    """A table of requests names no step, so times are found within 5 %; the half that was held out is predicted."""
    out = tmp_path / "times.toml"
    result = run(made(tmp_path), "--out", out, "--format", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    for name, mine in times_of(found).items():
        assert abs(mine / TIMES[name] - 1) <= 0.05, name
    later = found["second_half"]
    assert later["tpot"]["median"] <= 0.02
    for name, percent, within in (("ttft", "p50", 0.1), ("ttft", "p99", 0.2), ("tpot", "p50", 0.02)):
        measured, predicted = (later[name][f"{which}_{percent}_ms"] for which in ("measured", "predicted"))
        assert abs(predicted / measured - 1) <= within, (name, percent)
    profile = read_profile(out)
    assert {name: profile.settings()[name.replace("-", "_")] for name in TIMES} == times_of(found)
    assert (profile.step.prefill_tokens_max, profile.links) == (found["prefill_tokens_max"], ())
    again = run(tmp_path / "rows.jsonl", "--out", out)
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
    assert "which exists" in again.stderr


def test_a_profile_makes_the_machine_and_says_where_it_guesses(tmp_path: Path) -> None:
    """The same report as with its numbers as flags; a step beyond what was measured is named, and a flag wins."""
    profile = tmp_path / "machine.toml"
    assert run(ROOT / "recordings" / "offload-pressure.mcap", "--out", profile).exit_code == 0
    load = ("simulate", "--trace", "multiturn:requests=20,sessions=4", "--total-kv-blocks", "300", "--stats-every", "0",
            "--kv-cpu-blocks", "100", "--format", "json")
    done = CliRunner().invoke(cli, [*load, "--profile", str(profile)])
    assert f"{profile} was measured with up to 128 prompt tokens in a step, and a step of this run had" in done.stderr
    found = read_profile(profile)
    links = [part for link in found.links for part in ("--link", link.text)]
    step = [part for name in TIMES for part in (f"--{name}", f"{found.settings()[name.replace('-', '_')]}ns")]
    assert CliRunner().invoke(cli, [*load, *step, *links]).stdout == done.stdout
    slower = ("--step-base", "9ms", "--link", "pcie=1GB/s,20us")
    mine = CliRunner().invoke(cli, [*load, "--profile", str(profile), *slower]).stdout
    assert mine == CliRunner().invoke(cli, [*load, *slower]).stdout != done.stdout
    config = tmp_path / "config.toml"
    config.write_text(f'[simulate]\nprofile = "{profile}"\n')
    assert CliRunner().invoke(cli, load, env={"KVBM_CONSOLE_CONFIG": str(config)}).stdout == done.stdout
    small = ("--max-num-batched-tokens", "64", "--max-num-seqs", "1")
    assert "guess" not in CliRunner().invoke(cli, [*load, *small, "--profile", str(profile)]).stderr


def test_residuals_are_the_errors_that_are_stated(tmp_path: Path) -> None:
    measured = Measured("steps", steps(3, 4e6, 8e3, 4e4), [])
    found = calibrate("x", measured, LIMITS)
    off = sorted(abs(1 / (1 + percent / 100) - 1) for _, percent in residuals(found, measured))
    assert found.fitted.times is not None
    assert off[len(off) // 2] == pytest.approx(found.fitted.times.median, rel=0.05)
    refused = run(ROOT / "recordings" / "thrash.mcap", "--plot", tmp_path / "x.gif")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--plot must name a file that ends in .svg or .png" in refused.stderr
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    drawn = run(ROOT / "recordings" / "thrash.mcap", "--plot", tmp_path / "x.svg")
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "x.svg").read_text().count("<use") > 10, "a mark for each measurement"


@pytest.mark.parametrize(("text", "said"), [
    ("[disk-read]\nbytes_per_s = 1\nbase_latency_ns = 0\n", "it has no 'step'"),
    ("[step]\nbase_ns = 4000000\n", "missing required field `prefill_token_ns`"),
    ("step = 3", "Expected `object`, got `int`"), ("speed", "Expected '='"),
])
def test_a_bad_profile_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    result = CliRunner().invoke(
        cli, ["simulate", "--trace", "multiturn:requests=5", "--profile", str(path)], prog_name="kvbm-console"
    )
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--profile" in result.stderr
    assert said in result.stderr


@pytest.mark.parametrize("seed", range(3))
def test_the_held_out_half_of_a_noisy_engine_is_predicted(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median time to the first token within 10 %, its p99 within 20 %."""
    dice, exact = random.Random(seed), EngineConfig.step_ns
    with monkeypatch.context() as noisy:
        noisy.setattr(
            EngineConfig, "step_ns",
            lambda self, *counts: round(exact(self, *counts) * dice.uniform(1 - NOISE, 1 + NOISE)),
        )
        rows = made(tmp_path)
    later = json.loads(run(rows, "--format", "json").stdout)["second_half"]["ttft"]
    for percent, within in (("p50", 0.1), ("p99", 0.2)):
        assert abs(later[f"predicted_{percent}_ms"] / later[f"measured_{percent}_ms"] - 1) <= within, (percent, later)


@pytest.mark.parametrize(("seed", "requests"), [
    (0, 160), (1, 160), *(pytest.param(seed, 480, marks=pytest.mark.slow) for seed in range(8)),
])
def test_the_held_out_half_of_a_noisy_engine_with_tiers_is_predicted(
    seed: int, requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bars, where requests wait for loads and for room: the recording is served by its machine."""
    dice, exact, recorded = random.Random(seed), EngineConfig.step_ns, tmp_path / "run"
    with monkeypatch.context() as noisy:
        noisy.setattr(
            EngineConfig, "step_ns",
            lambda self, *counts: round(exact(self, *counts) * dice.uniform(1 - NOISE, 1 + NOISE)),
        )
        served = CliRunner().invoke(cli, [
            "serve", "--workload", f"multiturn:requests={requests},sessions=16,seed={seed}", "--total-kv-blocks", "700",
            "--kv-cpu-blocks", "1500", "--speed", "max", "--exit-when-done", "--record", str(recorded),
            "--listen", f"unix:{tmp_path}/s",
        ])
    assert served.exit_code == 0, served.output
    found = json.loads(run(recorded, "--format", "json").stdout)
    assert (found["tiers"], found["device_blocks"]) == (True, None)
    later = found["second_half"]["ttft"]
    for percent, within in (("p50", 0.1), ("p99", 0.2)):
        assert abs(later[f"predicted_{percent}_ms"] / later[f"measured_{percent}_ms"] - 1) <= within, (percent, later)
    assert "with its lower tiers and copies" in run(recorded).stdout


@pytest.mark.parametrize("memory", [
    ("--total-kv-blocks", "5000"), ("--total-kv-blocks", "260", "--kv-cpu-blocks", "0", "--kv-disk-blocks", "0"),
])
def test_times_are_found_exactly_in_a_recording(tmp_path: Path, memory: tuple[str, ...]) -> None:
    """The recorded requests are served again to the nanosecond, on a device that preempts too."""
    recorded = tmp_path / "run"
    times = [part for name, time in TIMES.items() for part in (f"--{name}", f"{time}ns")]
    served = CliRunner().invoke(cli, [
        "serve", "--workload", CHATS, "--limit", "60", *memory, "--speed", "max",
        "--exit-when-done", "--record", str(recorded), "--listen", f"unix:{tmp_path}/s", *times,
    ])
    assert served.exit_code == 0, served.output
    found = json.loads(run(recorded, "--format", "json").stdout)
    assert times_of(found) == TIMES
    for tried in (found["fitted"], found["second_half"]):
        for name in ("times", "ttft", "tpot"):
            assert tried[name]["p90"] < 1e-6, name
    assert found["requests"] == 60
    preempted = any(
        isinstance(event, SlotMoved) and event.new is SlotState.PREEMPTED
        for batch in Recording.open(recorded).events() for event in batch
    )
    assert preempted == (memory[1] == "260")


@pytest.mark.parametrize("name", ["local-only", "thrash", "two-hosts", "clone", "preempt-and-resume"])
def test_committed_recordings_tell_the_times_of_their_engine(name: str) -> None:
    found = calibrate(name, read_measured(ROOT / "recordings" / f"{name}.mcap", 8_192), LIMITS)
    assert (found.step_base_ns, found.step_prefill_token_ns, found.step_decode_request_ns) == (
        LIMITS.step_base_ns, LIMITS.prefill_token_ns, LIMITS.decode_request_ns
    )
    assert (found.requests == 0) == (name == "clone"), "sequences that share a prompt are not served again one by one"


@pytest.mark.parametrize(("name", "served"), [("local-only", True), ("clone", False)])
def test_the_text_says_errors_of_requests_only_where_they_were_served_again(name: str, served: bool) -> None:
    text = run(ROOT / "recordings" / f"{name}.mcap").stdout
    assert "--step-base 4000000ns --step-prefill-token 8000ns --step-decode-request 40000ns" in text
    for line in ("served again with", "ttft", "tpot"):
        assert (f"\n{line}" in text) == served, line


def test_a_gap_loses_what_was_under_way_and_nothing_else() -> None:
    """Steps in front of the gap and behind it count, those across it do not; the requests are not served again."""
    measured = read_measured(ROOT / "recordings" / "gap.mcap", 8_192)
    assert len(measured.equations) > 7
    assert not measured.requests
    for step in measured.equations:
        assert step.time_ns == LIMITS.step_ns(round(step.prefill_tokens), round(step.decode_requests))


@pytest.mark.skipif(not (SHARED / "recordings").is_dir(), reason="no recording of a real engine at ../shared")
def test_a_recording_of_vllm_tells_the_steps_of_its_executor() -> None:
    """The executor of that run sleeps 20 ms a step, and vLLM's scheduler adds to it."""
    found = calibrate("vllm", read_measured(SHARED / "recordings" / "vllm-0.33-loads", 8_192), LIMITS)
    assert 20_000_000 <= found.step_base_ns <= 21_500_000
    assert found.fitted.times is not None
    assert found.fitted.times.p90 <= 0.05
    assert found.measurements > 120
    assert found.requests == 0, "reports were lost, so requests may be missing"


def test_few_measurements_of_a_half_say_nothing_of_the_other() -> None:
    equations = steps(1, 4e6, 8e3, 4e4, count=20)
    found = calibrate("x", Measured("steps", equations, []), LIMITS)
    assert found.second_half.times is None


def test_a_file_that_is_no_text_is_one_sentence() -> None:
    path = ROOT / "recordings" / "vllm" / "chats.tap.zst"
    result = run(path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "is neither a recording nor a table: it holds no text" in result.stderr


@pytest.mark.parametrize("flag", ["--max-num-batched-tokens", "--max-num-seqs"])
def test_limits_of_the_engine_act(tmp_path: Path, flag: str) -> None:
    rows = made(tmp_path)
    found = [json.loads(run(rows, flag, value, "--format", "json").stdout)["fitted"]["ttft"] for value in (2, 8_192)]
    assert found[0]["predicted_p50_ms"] > 2 * found[1]["predicted_p50_ms"]


def test_a_request_that_a_breakpoint_held_is_served_again_and_not_compared() -> None:
    measured = read_measured(ROOT / "recordings" / "breakpoint-hold.mcap", 8_192)
    held = [served for served in measured.requests if served.held]
    assert held
    assert len(held) < len(measured.requests)
    others = [served for served in measured.requests if not served.held]
    equations = [Equation(1.0, 1.0, float(tokens), float(decodes), 5e6 + 8e3 * tokens + 4e4 * decodes)
                 for tokens in (0, 32, 64, 128, 256) for decodes in range(4)]
    found = calibrate("run", measured._replace(equations=equations), LIMITS)
    assert found.fitted.ttft is not None
    assert found.fitted.ttft.values == len(others)
