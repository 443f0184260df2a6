"""vLLM's own ``TieringOffloadingManager`` with bytes, and tiers that damage, delay or refuse.

``python -m tests.vllm.tiered`` measures the tap around a tier: its time in a call, in turns with the bare tier.

Law of this file: manager, factory, host tier and fs tier are vLLM's. The copies of the device alone are left out, and
the bytes of a block follow from its key.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from tests.vllm.engine import Engine, offloading

MODULE = "kvbm_console.tap.vllm_tier"
HERE = "tests.vllm.tiered"
STEP_S = 0.0005
STEPS_MAX = 20_000


class Corrupting(FileSystemTierManager):
    """Flips a bit of each ``every``-th block of all loads."""

    def __init__(self, *, every: int = 3, **more: Any) -> None:
        super().__init__(**more)
        self.every, self.seen = every, 0
        self.flipped: list[bytes] = []
        self._loads: dict[int, Any] = {}

    def submit_load(self, job_metadata: Any) -> None:
        self._loads[job_metadata.job_id] = job_metadata
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        results = list(super().get_finished_jobs())
        view = self._primary_kv_view.cast("B")
        for result in results:
            job = self._loads.pop(result.job_id, None)
            for key, place in zip(job.keys, job.chunk_ids, strict=True) if job is not None else ():
                self.seen += 1
                if self.seen % self.every == 0:
                    self.flipped.append(key)
                    view[int(place) * self._block_size + self.seen % self._block_size] ^= 1 << self.seen % 8
        return results


class Slow(FileSystemTierManager):
    """Tells a result only at the ``polls``-th question after its end."""

    def __init__(self, *, polls: int = 20, **more: Any) -> None:
        super().__init__(**more)
        self.polls = polls
        self._late: list[list[Any]] = []

    def get_finished_jobs(self) -> Iterable[Any]:
        self._late += [[self.polls, result] for result in super().get_finished_jobs()]
        for row in self._late:
            row[0] -= 1
        due = [result for left, result in self._late if left <= 0]
        self._late = [row for row in self._late if row[0] > 0]
        return due

    def drain_jobs(self) -> None:
        super().drain_jobs()
        self.polls = 0
        for row in self._late:
            row[0] = 0


class Raising(FileSystemTierManager):
    """Refuses each load by an error."""

    def submit_load(self, job_metadata: Any) -> None:
        raise OSError("this tier is broken")


class Keeping(ExampleSecondaryTierManager):
    """vLLM's example tier, which ends its jobs at once, with the bytes of its blocks."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.bytes: dict[bytes, bytes] = {}

    def _place(self, place: Any) -> memoryview:
        return self._primary_kv_view.cast("B")[int(place) * self._chunk_size : (int(place) + 1) * self._chunk_size]

    def submit_store(self, job_metadata: Any) -> None:
        for key, place in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            self.bytes[key] = bytes(self._place(place))
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        for key, place in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            self._place(place)[:] = self.bytes[key]
        super().submit_load(job_metadata)


def tapped(inner: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The entry of a tier with the tap around it."""
    return {"type": "KvbmTier", "module_path": MODULE, "inner": inner, **settings}


def files(directory: Path, kind: str = "fs", **more: Any) -> dict[str, Any]:
    """The entry of a tier of files, vLLM's own or one of this file."""
    entry = {"type": kind, "root_dir": str(directory / "tier"), "n_read_threads": 2, "n_write_threads": 2, **more}
    return entry if kind == "fs" else {**entry, "module_path": HERE}


def key(number: int) -> Any:
    """The key of a block of these tests."""
    return make_offload_key(number.to_bytes(32, "big"), 0)


def content(key: bytes, size: int) -> bytes:
    """The bytes of a block."""
    return random.Random(key).randbytes(size)


class Below:
    """A manager with these tiers, and blocks that are stored and fetched as the scheduler's half does it."""

    def __init__(
        self, directory: Path, tiers: list[dict[str, Any]], chunks: int = 64, extra: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """``extra`` are further settings of the connector, and ``more`` those of the engine."""
        directory.mkdir(exist_ok=True)
        entry = offloading(chunks, spec_name="TieringOffloadingSpec", secondary_tiers=tiers, **(extra or {}))
        self.engine = Engine(directory, entry, **more)
        connector = self.engine.connector
        self.manager: Any = getattr(connector, "_tapped", connector).connector_scheduler.manager
        self.tiers = self.manager.secondary_tiers
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.size: int = self.view.strides[0]
        self.requests = 0

    def close(self) -> None:
        self.view = None
        self.engine.scheduler.shutdown()

    def request(self, name: str = "") -> ReqContext:
        self.requests += 1
        context = ReqContext(name or f"r{self.requests}")
        self.manager.on_new_request(context)
        return context

    def _place(self, place: Any) -> memoryview:
        return self.view.cast("B")[int(place) * self.size : (int(place) + 1) * self.size]

    def store(self, keys: list[Any], name: str = "") -> None:
        """Blocks are computed, and go to the host tier and below."""
        context = self.request(name)
        answer = self.manager.prepare_store(keys, context)
        assert answer is not None
        assert list(answer.keys_to_store) == keys
        for each, place in zip(answer.keys_to_store, answer.store_spec.chunk_ids, strict=True):
            self._place(place)[:] = content(each, self.size)
        self.manager.complete_store(keys, context)
        self.until(lambda: not self.manager._jobs)
        self.manager.on_request_finished(context)

    def step(self) -> None:
        """The end of a scheduler's step."""
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def until(self, done: Callable[[], bool]) -> int:
        """Step until it is done; the number of steps."""
        for steps in range(STEPS_MAX):
            if done():
                return steps
            self.step()
            time.sleep(STEP_S)  # the tier's threads get a turn
        raise AssertionError("it never ends")

    def forget_host(self) -> None:
        """Empty the host tier alone, as ``reset_cache`` of a server does."""
        self.manager.reset_cache()
        self.manager.on_reset_flushed()

    def look(self, keys: list[Any], context: ReqContext) -> list[LookupResult]:
        """One lookup of all keys, and the end of its step."""
        found = [self.manager.lookup(each, context) for each in keys]
        self.step()
        return found

    def fetch(self, keys: list[Any], name: str = "") -> tuple[list[Any], list[Any]]:
        """The blocks that a request finds, and those of them whose bytes are wrong."""
        context = self.request(name)
        found: list[LookupResult] = []

        def known() -> bool:
            found[:] = self.look(keys, context)
            return all(one in (LookupResult.HIT, LookupResult.MISS) for one in found)

        self.until(known)
        hits = [each for each, one in zip(keys, found, strict=True) if one is LookupResult.HIT]
        spec = self.manager.prepare_load(hits, context) if hits else None
        wrong = [each for each, place in zip(hits, spec.chunk_ids if spec is not None else (), strict=True)
                 if bytes(self._place(place)) != content(each, self.size)]
        if hits:
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return hits, wrong

    def damage(self, directory: Path, key: bytes, at: int = 100) -> None:
        """Flip a bit in the file of a block."""
        (path,) = directory.rglob(f"{key[:-4].hex()}.bin")
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))


def call_ns(tier: Any, jobs: int, keys: int) -> dict[str, float]:
    """Median nanoseconds of each call, with jobs that end at once."""
    import numpy as np
    from vllm.v1.kv_offload.tiering.base import TransferJob

    context, took = ReqContext("r"), {"lookup": [], "submit_store": [], "submit_load": [], "get_finished_jobs": []}
    for number in range(jobs):
        names = [key(number * keys + at) for at in range(keys)]
        places = np.arange(keys, dtype=np.int32)
        for call, args in (
            ("submit_store", (TransferJob(2 * number, names, places, False, context),)), ("get_finished_jobs", ()),
            ("lookup", (names[0], context)),
            ("submit_load", (TransferJob(2 * number + 1, names, places, True, context),)), ("get_finished_jobs", ()),
        ):
            method = getattr(tier, call)
            began = time.perf_counter_ns()
            method(*args)
            took[call].append(time.perf_counter_ns() - began)  # type: ignore[attr-defined]
    return {call: statistics.median(each) for call, each in took.items()}


def measure(jobs: int = 2_000, keys: int = 8) -> dict[str, tuple[float, dict[str, float]]]:
    """Call to the bare tier's median, and what the tap adds to it for each mode, all in turns in one run.

    The shortest median of the rounds counts, because another process in the core's caches makes a round longer."""
    modes = {"bare": {"type": "example"}} | {
        mode: tapped({"type": "example"}, integrity=mode) for mode in ("off", "report", "fail")
    }
    rounds: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as directory:
        below = Below(Path(directory), list(modes.values()))
        for _ in range(5):
            for seen, tier in zip(rounds.values(), below.tiers, strict=True):
                seen.append(call_ns(tier, jobs, keys))
                tier.drain_jobs()
                list(tier.get_finished_jobs())
        below.close()
    medians = {mode: {call: min(one[call] for one in seen) for call in seen[0]}
               for mode, seen in rounds.items()}
    return {
        call: (bare, {mode: medians[mode][call] - bare for mode in modes if mode != "bare"})
        for call, bare in medians["bare"].items()
    }


def main() -> None:
    """Print what the tap adds to each call."""
    sys.stdout.write("| call | bare tier, us | off | report | fail |\n|---|---|---|---|---|\n")
    for call, (bare, more) in measure().items():
        cells = " | ".join(f"+{more[mode] / 1e3:.2f}" for mode in ("off", "report", "fail"))
        sys.stdout.write(f"| {call} | {bare / 1e3:.2f} | {cells} |\n")


if __name__ == "__main__":
    main()
