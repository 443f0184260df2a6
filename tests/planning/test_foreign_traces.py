"""Traces of other programs: a recording goes to Mooncake's format and back, and Dynamo's request trace is read.

Law of this file: two blocks have the same hash in what is read exactly if they had it in what was written.
"""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli.main import cli
from kvbm_console.core.config import LeaderConfig
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.recorded import RecordedWorkload
from kvbm_console.planning.run import simulate
from kvbm_console.planning.traces import parse_trace
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.machine import SimulatedMachine
from kvbm_console.simulator.multiturn import Multiturn, Settings
from kvbm_console.simulator.workloads import Request
from tests.planning.test_recorded import recorded

CHATS = Settings(sessions=4, requests=24, turns=4, system=700, user=900, output=700, think=0.3)


def kvbm(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), prog_name="kvbm-console")


def same(mine: list[Request], theirs: list[Request]) -> None:
    """The requests are the same, except for their names and for the numbers that stand for hashes."""
    partner: dict[int, int] = {}
    for one, other in zip(mine, theirs, strict=True):
        left, right = one.hashes + one.output_hashes, other.hashes + other.output_hashes
        assert len(left) == len(right)
        assert len(one.hashes) == len(other.hashes)
        assert (one.arrival_ns, one.prompt_tokens, one.output_tokens, one.priority, len(one.clone_hashes)) == (
            other.arrival_ns, other.prompt_tokens, other.output_tokens, other.priority, len(other.clone_hashes)
        )
        for key, found in zip(left, right, strict=True):
            assert partner.setdefault(key, found) == found
    assert len(set(partner.values())) == len(partner)


def test_a_recording_goes_to_mooncake_and_back(tmp_path: Path) -> None:
    machine = SimulatedMachine(leader=LeaderConfig(block_tokens=16), engine=EngineConfig(g1_blocks=2_000))
    recorded(machine, Multiturn(CHATS), tmp_path / "run")
    out = tmp_path / "trace.jsonl"
    result = kvbm("rec", "export", str(tmp_path / "run"), "--to", "mooncake", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "24 requests" in result.stdout
    back = parse_trace(f"mooncake:{out}")
    ours = RecordedWorkload(str(tmp_path / "run"))
    for workload in (back, ours):
        workload.begin(512)
    same(list(ours.arrivals()), list(back.arrivals()))
    reports = [
        simulate(SimulateOptions(trace=trace, total_kv_blocks=60, block_size=512)).document
        for trace in (f"recording:{tmp_path / 'run'}", f"mooncake:{out}")
    ]
    assert reports[0]["hit_blocks"] == reports[1]["hit_blocks"]
    assert reports[0]["hit_blocks"]["G1"] > 0
    assert reports[0]["ttft_ms"] == reports[1]["ttft_ms"]
    assert kvbm("rec", "export", str(tmp_path / "run"), "--to", "mooncake", "--out", str(out)).exit_code == 2


def record(at_ms: float, hashes: list[int], tokens: int, output: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": at_ms + 100,
        "request": {
            "request_id": f"q{at_ms}", "request_received_ms": at_ms, "output_tokens": output,
            "replay": {"trace_block_size": 16, "input_length": tokens, "input_sequence_hashes": hashes},
        }, **more,
    }


def test_dynamos_request_trace_is_a_workload(tmp_path: Path) -> None:
    """Records come by their end and are replayed by their begin; envelopes, other records and gzip are known."""
    records = [
        record(2_000.5, [11, 12, 14], 40, agent_context={"session_id": "a"}), record(1_000, [11, 12], 32, 20),
        {"event": record(2_500, [11, 12, 13], 48)},
        {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}},
    ]
    text = "".join(json.dumps(one) + "\n" for one in records)
    path, packed = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.gz"
    path.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    plain, unpacked = (list(parse_trace(f"dynamo:{one}").arrivals()) for one in (path, packed))
    assert plain == unpacked
    assert [request.arrival_ns for request in plain] == [0, 1_000_500_000, 1_500_000_000]
    assert [request.hashes for request in plain] == [(11, 12), (11, 12), (11, 12, 13)]
    assert [request.session for request in plain] == [None, "a", None]
    assert len(plain[0].output_hashes) == (32 + 20) // 16 - 2
    document = simulate(SimulateOptions(trace=f"dynamo:{path}", total_kv_blocks=50)).document
    assert document["hit_blocks"] == {"G1": 4}


@pytest.mark.parametrize(("lines", "said"), [
    ([], "must have requests with blocks of one size, got no request"),
    ([{"schema": "x"}], "line 1: must be a record of dynamo.request.trace.v1"),
    ([record(1, [1], 40)], "line 1: input_sequence_hashes must have 2 hashes for input_length 40, got 1"),
    ([record(1, [1, -2], 32)], "line 1: Expected `int` >= 0"),
    ([record(1, [1], 16), record(1, [], 0)], "line 2: Expected `int` >= 1"),
])
def test_a_bad_record_is_one_sentence(lines: list[Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = kvbm("simulate", "--trace", f"dynamo:{path}")
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_any_bytes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    dice = random.Random(5)
    good = (json.dumps(record(1, [1, 2], 40)) + "\n").encode() * 3
    for packed in (good, gzip.compress(good)):
        for _ in range(150):
            data = bytearray(packed)
            for _ in range(dice.randint(1, 4)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            path = tmp_path / "trace"
            path.write_bytes(data[: dice.randint(1, len(data))])
            result = kvbm("simulate", "--trace", f"dynamo:{path}", "--total-kv-blocks", "64", "--stats-every", "0")
            assert result.exit_code in (0, 2), result.output
            assert result.exception is None or isinstance(result.exception, SystemExit), path.read_bytes()


def test_output_ids_of_a_line_are_the_blocks_of_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 500, "hash_ids": [1, 2], "output_hash_ids": [3]},
        {"timestamp": 9_000, "input_length": 1_100, "output_length": 1, "hash_ids": [1, 3, 4]},
    ]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    for size, hits in ((512, 2), (128, 8)):
        workload = parse_trace(f"mooncake:{path}")
        workload.begin(size)
        first, second = workload.arrivals()
        known = set(first.hashes + first.output_hashes)
        assert [key in known for key in second.hashes] == [True] * hits
