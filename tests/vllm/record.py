"""Makes ``recordings/vllm``: what the tap and the event stream said of vLLM's own scheduler, with its truth beside it.

``python -m tests.vllm.record [NAME...]`` in the environment of ``make test-vllm``. Each file is compressed msgpack: the
settings of the tap, and for each step its messages and what the scheduler held then (requests with their blocks and
positions, and the hashes of all full blocks), and the engine's own counts of the prompt tokens that it found. Ordinary
tests bring the messages to a leader and compare.

A step takes ``STEP_NS``, ``TOKEN_NS`` for each prompt token and ``REQUEST_NS`` for each decoding request by the tap's
clock, as in a real engine.

Law of this file: the truth is read from the scheduler, never from the tap.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import msgspec
import zstandard
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.request import RequestStatus

from kvbm_console.tap import connector, copies, recorder, scheduler
from kvbm_console.tap import vllm as binding
from tests.tap.watching import Watching
from tests.vllm.engine import Engine, offloading, tap
from tests.vllm.features import Kept, twins, workload
from tests.vllm.truth import short

HERE: Final = Path(__file__).resolve().parents[2] / "recordings" / "vllm"
DENSE: Final = {"prefix_cache_retention_interval": None}
"""All blocks of a window are cached, as before vLLM 0.33."""
RUNS: Final[dict[str, Any]] = {
    "alone": (tap(), {"blocks": 36}, (1, 6, 4), 0.0),
    "offload": (tap(offloading(40)), {"blocks": 48, "running": 4}, (2, 6, 4), 0.0),
    "trouble": (
        {**tap(offloading(60)), "kv_load_failure_policy": "recompute"}, {"blocks": 32, "running": 5, "fail_every": 3},
        (3, 8, 4), 0.02,
    ),
    "refused": (
        {**tap(offloading(60)), "kv_load_failure_policy": "fail"}, {"blocks": 32, "running": 5, "fail_every": 3},
        (4, 5, 3), 0.0,
    ),
    "hybrid": (tap(), {"blocks": 34, "running": 8, "groups": ("full", "window"), **DENSE}, (7, 6, 3), 0.0),
    "window": (tap(), {"blocks": 30, "running": 8, "groups": ("window",), **DENSE}, (8, 6, 3), 0.02),
    "passed": (tap(), {"blocks": 40, "running": 4, "groups": ("window",), **DENSE}, (5123, 6, 4), 0.0),
    "below": (tap(offloading(100)), {"blocks": 96, "running": 16, "groups": ("window",)}, (13, 24, 5), 0.0),
    "kept": (tap(), {"blocks": 59, "running": 8, "groups": ("full", "window")}, (35, 16, 4), 0.0),
    "mixed": (
        tap(offloading(100)), {"blocks": 60, "running": 8, "groups": ("window", "full", "window")},
        (97, 16, 4), 0.0,
    ),
    "early": (tap(), {"blocks": 36, "running": 8, "scheduling": {"async_scheduling": True}}, (41, 6, 4), 0.0),
    "twins": (tap(), {"blocks": 40, "running": 8}, 42, 0.0),
    "ahead": (
        tap(offloading(60)), {"blocks": 42, "running": 8, "scheduling": {"async_scheduling": True}}, (722, 6, 4), 0.0,
    ),
    "anew": (tap(offloading(40)), {"blocks": 40, "running": 5}, (120, 8, 4), 0.0),
    "chats": (tap(offloading(400)), {"blocks": 256, "running": 16}, (12, 60, 5), 0.0),
}
"""Name to connector, sizes, (seed, sessions, turns) of the workload or the seed of ``twins``, and the probability of an
abort before a step.

``trouble`` has loads that fail and are computed instead, preemptions and aborts; in ``refused`` a failed load ends its
request; ``hybrid`` has a second group of blocks, of layers that see a window, and ``window`` has these alone;
in ``passed`` the order in which a request that ends gives back its blocks decides what is lost next; ``below`` has such
layers with a host tier; ``below``, ``kept`` and ``mixed`` keep the windows at the ends of prompts alone, as vLLM does
by default, and ``mixed`` has three groups and a host tier; ``early`` forms a step before the result of the last one is
known, and ``ahead`` does with a host tier; in ``twins`` two requests with one prompt arrive in each step; in ``anew`` a
preempted request stores blocks again that the host tier gave up; ``chats`` is large enough for a hit rate.
"""
STEP_NS: Final = 8_000_000
TOKEN_NS: Final = 50_000
REQUEST_NS: Final = 300_000


class Clock:
    """The tap's clock while the ``with`` block runs."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        self._changes = ExitStack()

    def __enter__(self) -> "Clock":
        for module in (connector, copies, scheduler):
            self._changes.enter_context(mock.patch.object(module, "_now", self.now))
        stand_in = SimpleNamespace(**{**vars(time), "monotonic_ns": self.now})
        self._changes.enter_context(mock.patch.object(recorder, "time", stand_in))
        return self

    def __exit__(self, *_: object) -> None:
        self._changes.close()

    def now(self) -> int:
        """Nanoseconds, as ``time.monotonic_ns``."""
        return self.now_ns

    def step(self, output: Any) -> None:
        """The time of the formed step passes."""
        counts = list(output.num_scheduled_tokens.values())
        decoding = counts.count(1)
        self.now_ns += STEP_NS + TOKEN_NS * (sum(counts) - decoding) + REQUEST_NS * decoding


def truth(engine: Engine, group: int) -> dict[str, Any]:
    """The blocks that the scheduler holds after it has formed a step: places in one group, hashes in all others."""
    manager = engine.scheduler.kv_cache_manager
    requests = {
        name: [manager.get_block_ids(name)[group], request.num_computed_tokens, request.status is RequestStatus.RUNNING]
        for name, request in engine.scheduler.requests.items() if not request.is_finished()
    }
    hashes = {
        block.block_id: short(get_block_hash(block.block_hash)) for block in manager.block_pool.blocks
        if block.block_hash is not None and not block.is_null and get_group_id(block.block_hash) == group
    }
    others = {
        (get_group_id(block.block_hash), short(get_block_hash(block.block_hash)))
        for block in manager.block_pool.blocks if block.block_hash is not None
    }
    windows = sorted(key for at, key in others if at != group)
    return {"requests": requests, "hashes": hashes, "windows": windows}


def record(name: str) -> bytes:
    """One run, compressed."""
    given, sizes, shape, aborts = RUNS[name]
    steps: list[Any] = []
    with tempfile.TemporaryDirectory() as directory, Clock() as clock:
        engine = Engine(Path(directory), given, **sizes)
        sender = engine.connector.sender
        watch = Watching(sender.recorder, sender.flattener, sender.settings)
        load = twins(shape) if isinstance(shape, int) else workload(*shape)
        for formed in engine.run(load, aborts=aborts):
            clock.step(formed)
            watch.pump()
            steps.append([watch.kept, truth(engine, sender.settings.group)])
            watch.kept = []
        watch.pump()
        steps.append([watch.kept, truth(engine, sender.settings.group)])
    data = msgspec.msgpack.encode({
        "settings": msgspec.to_builtins(sender.settings), "steps": steps, "cached": engine.cached,
    })
    return zstandard.ZstdCompressor(level=19).compress(data)


def main() -> None:
    """Write all."""
    binding.Sender = Kept  # type: ignore[misc,assignment]
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RUNS:
        path = HERE / f"{name}.tap.zst"
        path.write_bytes(record(name))
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
