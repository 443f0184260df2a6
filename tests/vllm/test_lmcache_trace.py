"""The storage trace that LMCache's own recorder writes, read as a workload. Run where LMCache is installed."""

import importlib.util
from pathlib import Path

import pytest

from kvbm_console.planning.traces import parse_trace

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("needs lmcache: pip install --no-deps lmcache", allow_module_level=True)


def test_lookups_of_its_recorder_are_requests(tmp_path: Path) -> None:
    import torch
    from lmcache.v1.distributed.api import (
        GroupedObjectKeys,
        MemoryLayoutDesc,
        ObjectKey,
        PrefetchLockMode,
        PrefetchTaskSpec,
    )
    from lmcache.v1.distributed.storage_manager import StorageManager
    from lmcache.v1.mp_observability.trace.recorder import StorageTraceRecorder

    layout = MemoryLayoutDesc(shapes=[torch.Size([2, 4, 16, 64])], dtypes=[torch.bfloat16])
    recorder = StorageTraceRecorder(str(tmp_path / "trace.lct"))
    lookup = StorageManager.submit_prefetch_task.__lmc_trace_qualname__
    for at, (name, chunks, mode) in enumerate([
        ("a", 3, PrefetchLockMode.LOCK), ("b", 5, PrefetchLockMode.LOCK), ("warm", 9, PrefetchLockMode.NO_LOCK),
    ]):
        keys = [[ObjectKey(bytes([number + 1]) * 32, "m", rank) for number in range(chunks)] for rank in (0, 1)]
        rows = [GroupedObjectKeys(row, 0, layout) for row in keys]
        arguments = {"spec": PrefetchTaskSpec(rows, lock_mode=mode), "external_request_id": name, "skip_l2": False}
        assert set(arguments) == set(StorageManager.submit_prefetch_task.__lmc_trace_params__)
        recorder.write_record(lookup, arguments, 1e9 + at, recorder._t_mono_start + at)
    recorder.close()
    assert recorder.dropped_count == 0
    requests = list(parse_trace(f"lmcache:{tmp_path / 'trace.lct'}").arrivals())
    assert [len(request.hashes) for request in requests] == [3, 5]
    assert requests[0].hashes == requests[1].hashes[:3]
    assert [request.arrival_ns for request in requests] == [0, 1_000_000_000]
    assert [request.prompt_tokens for request in requests] == [49, 81]
