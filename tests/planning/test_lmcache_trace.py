"""LMCache's storage trace as a workload: the forms of three releases, cut files and bad ones.

Law of this file: every form gives the same prompts. ``tests/vllm/test_lmcache_trace.py`` reads what LMCache's own
recorder writes.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli.main import cli
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import simulate
from kvbm_console.planning.traces import named_trace, parse_trace

CHUNK = 256
LOOKUP = "lmcache.v1.distributed.storage_manager.StorageManager.submit_prefetch_task"
HEADER = {
    "type": "header", "magic": b"LMCT", "format_version": 1, "level": "storage", "trace_schema_version": 1,
    "t_mono_start": 5.0, "t_wall_start": 1e9, "sm_config_json": "", "sm_config_digest": "",
}
PROMPTS = ((0.0, "a", (11, 12)), (1.5, "b", (11, 12, 13)), (1.75, "c", (21,)), (2.5, "b", (11, 12, 13)))


def kvbm(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def frame(body: dict[str, Any]) -> bytes:
    text = msgspec.msgpack.encode(body)
    return len(text).to_bytes(4, "big") + text


def tagged(tag: str, value: Any) -> dict[str, Any]:
    return {"__t__": tag, "v": value}


def key(value: int, rank: int = 0, model: str = "m") -> dict[str, Any]:
    inner = {"chunk_hash": value.to_bytes(8, "big") + bytes(24), "model_name": model, "kv_rank": rank,
             "object_group_id": 0}
    return tagged("ObjectKey", inner)


def layout(chunk: int = CHUNK) -> dict[str, Any]:
    return tagged("MemoryLayoutDesc", {"shapes": [[2, 32, chunk, 1024]], "dtypes": ["torch.bfloat16"]})


def arguments(form: str, hashes: tuple[int, ...], request: str, mode: str = "LOOKUP") -> dict[str, Any]:
    """The arguments of a lookup as LMCache 0.4, 0.5.4 and 0.5.6 record them, for two ranks."""
    flat = [key(value, rank) for value in hashes for rank in (0, 1)]
    if form == "0.4":
        return {"keys": flat, "layout_desc": layout(), "extra_count": 0, "external_request_id": request,
                "mode": tagged("PrefetchMode", mode)}
    if form == "0.5.4":
        spec = {"keys": flat, "extra_count": 0, "group_layout_descs": {"0": layout()},
                "mode": tagged("PrefetchMode", mode)}
        return {"spec": tagged("PrefetchRequestSpec", spec), "external_request_id": request, "skip_l2": False}
    rows = [tagged("GroupedObjectKeys", {"keys": [key(value, rank) for value in hashes], "object_group_id": 0,
                                         "layout_desc": layout(), "sliding_window_size": -1}) for rank in (0, 1)]
    spec = {"key_groups": rows, "num_kv_readers": 1, "fetching_policy": "prefix",
            "lock_mode": tagged("PrefetchLockMode", "NO_LOCK" if mode == "WARM" else "LOCK")}
    return {"spec": tagged("PrefetchTaskSpec", spec), "external_request_id": request, "skip_l2": False}


def call(at: float, args: dict[str, Any], name: str = LOOKUP) -> bytes:
    return frame({"type": "record", "t_mono": at, "t_wall": 1e9 + at, "qualname": name, "args": args})


def trace(form: str) -> bytes:
    """Four lookups of three requests among other calls, and one that belongs to no request."""
    store = call(0.5, {"keys": [key(11)], "layout_desc": layout()}, LOOKUP.replace("submit_prefetch", "reserve_write"))
    lookups = [call(at + 3, arguments(form, hashes, name)) for at, name, hashes in PROMPTS]
    return b"".join([frame(HEADER), store, *lookups, call(9, arguments(form, (77,), "", "WARM"))])


@pytest.mark.parametrize("form", ["0.4", "0.5.4", "0.5.6"])
def test_lookups_are_requests(form: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.lct"
    path.write_bytes(trace(form))
    workload = parse_trace(named_trace(str(path)))
    workload.begin(CHUNK)
    requests = list(workload.arrivals())
    assert [request.hashes for request in requests] == [(11, 12), (11, 12, 13), (21,)]
    assert [request.arrival_ns for request in requests] == [0, 1_500_000_000, 1_750_000_000]
    assert [(request.prompt_tokens, request.output_tokens) for request in requests] == [(513, 1), (769, 1), (257, 1)]
    workload.begin(2 * CHUNK)
    assert [request.hashes for request in workload.arrivals()] == [(12,), (12,), ()]
    document = simulate(SimulateOptions(trace=named_trace(str(path)), total_kv_blocks=50, block_size=CHUNK)).document
    assert document["hit_blocks"] == {"G1": 2}
    assert "no answers" in document["note"]


def test_a_frame_that_the_end_of_the_file_cuts_is_left_out(tmp_path: Path) -> None:
    path, whole = tmp_path / "trace.lct", trace("0.5.6")
    last = call(20, arguments("0.5.6", (5,), "z"))
    for cut in range(len(last)):
        path.write_bytes(whole + last[:cut])
        assert len(list(parse_trace(f"lmcache:{path}").arrivals())) == 3


@pytest.mark.parametrize(("data", "said"), [
    (b"", "must be a storage trace of LMCache, got a file without a frame"),
    (frame({**HEADER, "magic": b"LMCX"}), "frame 1: must begin with b'LMCT', got b'LMCX'"),
    (frame({**HEADER, "format_version": 2}), "frame 1: must have format 1 and schema 1, got 2 and 1"),
    (frame({**HEADER, "level": "events"}), "frame 1: level must be storage (--trace-level storage), got 'events'"),
    (frame(HEADER), "must have lookups of one model, got no lookup"),
    (b"\xff" * 9, "frame 1: must have at most 67108864 bytes, got 4294967295"),
    (frame(HEADER) + call(1, {"keys": [key(1), key(2, model="n")], "layout_desc": layout()}),
     "frame 2: a lookup must have keys of one model, got m, n"),
    (frame(HEADER) + call(1, {"keys": [key(1)], "layout_desc": layout()})
     + call(2, {"keys": [key(1)], "layout_desc": layout(16)}), "must have lookups of one size of chunks, got 16, 256"),
    (frame(HEADER) + call(1, {"keys": [key(1)]}), "frame 2: a chunk must have from 1 to 65536 tokens, got 0"),
    (frame(HEADER) + call(1, {"keys": [{"v": 1}]}), "frame 2: Expected `object`, got `int` - at `$.keys[0].v`"),
])
def test_a_bad_trace_is_one_sentence(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.lct"
    path.write_bytes(data)
    result = kvbm("simulate", "--trace", f"lmcache:{path}")
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_any_bytes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    dice, good, path = random.Random(7), trace("0.5.6"), tmp_path / "trace.lct"
    for _ in range(150):
        data = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data[: dice.randint(1, len(data))])
        result = kvbm("simulate", "--trace", f"lmcache:{path}", "--total-kv-blocks", "64", "--stats-every", "0")
        assert result.exit_code in (0, 2), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), path.read_bytes()
