"""The memory of a service has bounds: behind them no table, heap or list grows with the length of a run.

Resident size cannot show a slow leak: an export of a keyframe moves it by megabytes. These tests count objects instead.
Every object that a service, its recorder and its simulated machine refer to is visited, and the lowest of many counts
is a floor that requests in flight do not move. All bounds are set so low that a short run reaches them.

Example: a table that keeps 1 entry for each request grows by 1 object in 15 events. Between the floors of the short
run are 44,000 events, so this makes 2,900 objects, and 1,000 are allowed.

Law of this file: behind the bounds, the floor of the objects does not rise.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from kvbm_console.core.eviction import learned, leaves, policy, ranked, shadows, simple_lru
from kvbm_console.core.leader import foresight, memory, prefetch
from kvbm_console.core.leader.memory import LiveMemory
from kvbm_console.planning.options import CacheOptions
from kvbm_console.recording.options import Retention
from kvbm_console.recording.writer import Recorder
from kvbm_console.service import LeaderService
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.embedded import (
    SOURCE,
    Rig,
    default_engine_config,
    default_leader_config,
    embed,
    parse_workload,
)
from kvbm_console.stream.ring import Ring
from tests.benchmarks.memory import visit

BOUNDS: Final[tuple[tuple[types.ModuleType, str, int], ...]] = (
    (policy, "GHOSTS_MIN", 64), (policy, "GHOSTS_PER_BLOCK", 1), (ranked, "_HEAP_SLACK", 32),
    (shadows, "_HEAP_SLACK", 8),
    (leaves, "_HEAP_SLACK", 32), (learned, "_HEAP_SLACK", 32), (simple_lru, "_SLACK", 32),
    (memory, "HISTORY_PART", 32), (memory, "LEFT_MAX", 64),
    (memory, "NAMED_MAX", 256), (foresight, "CONTEXTS_MAX", 256), (prefetch, "SESSIONS_MAX", 8),
)
WARM_EVENTS: Final = 10_000
"""All bounds are reached by then."""
WINDOW_EVENTS: Final = 6_000
SAMPLES: Final = 40
"""Counts of which the lowest is a floor."""
RISE_MAX: Final = 1_000
"""Objects: floors of 11,300 differ by up to 700. Over 2,000,000 events 1,000 objects are 4 MB per 10^8 events."""


def objects(root: object) -> int:
    """The objects that ``root`` refers to, directly or through others."""
    return visit(root, set())


@contextmanager
def machine(directory: Path, eviction: str) -> Iterator[tuple[LeaderService, Rig]]:
    """A recorded service with an engine whose tiers are tiny."""
    workload = parse_workload("multiturn:sessions=6,prompts=2,system=64,user=60,output=40,turns=3,think=0.2")
    config = default_leader_config(
        workload, g2_blocks=64, g3_blocks=256, eviction=policy.PolicyConfig(policy=eviction, disk_admission=2),
        prefetch=CacheOptions(total_kv_blocks=1).prefetch,
    )
    calendar = Calendar()
    service = LeaderService(config, calendar.clock, ring=Ring(events_max=2_048, bytes_max=65_536))
    recorder = service.recorder = Recorder(
        directory, config=config, incarnation=service.incarnation, keyframe=service.keyframe, facts=service.facts,
        segment_bytes=100_000, retention=Retention(keep_bytes=1_000_000), keyframe_events=1_000,
    )
    try:
        service.start()
        service.new_source(SOURCE)
        engine = default_engine_config(workload, g1_blocks=48)
        yield service, embed(service.dispatcher, calendar, engine, workload)
    finally:
        recorder.close()


def run_to(service: LeaderService, rig: Rig, seq: int) -> None:
    """Run until this event is published."""
    while service.state.seq < seq:
        rig.run(None, 2_000_000)
        service.broadcaster.flush()


def floor(service: LeaderService, rig: Rig) -> int:
    """Run ``WINDOW_EVENTS`` more; the lowest count of objects meanwhile."""
    first, counts = service.state.seq, list[int]()
    for step in range(1, SAMPLES + 1):
        run_to(service, rig, first + WINDOW_EVENTS * step // SAMPLES)
        assert service.recorder is not None
        assert service.recorder.settle()  # what its thread has not written yet depends on the machine
        counts.append(objects([service, rig]))
    return min(counts)


@pytest.fixture(autouse=True)
def _low_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, bound in BOUNDS:
        assert isinstance(getattr(module, name), int)
        monkeypatch.setattr(module, name, bound)


@pytest.mark.parametrize(("eviction", "events"), [
    ("lrfu_auto", 40_000), ("learned", 40_000), ("simple_lru", 30_000),
    pytest.param("learned", 2_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(2_400)]),
])
def test_no_table_grows_with_the_length_of_a_run(tmp_path: Path, eviction: str, events: int) -> None:
    with machine(tmp_path, eviction) as (service, rig):
        run_to(service, rig, WARM_EVENTS)
        warm = floor(service, rig)
        run_to(service, rig, events)
        later = floor(service, rig)
        print(f"{eviction}: {warm:,} objects, {later - warm:+,} after {events:,} events")
        assert later - warm <= RISE_MAX


class Leak:
    """Keeps one of four numbers of events for ever."""

    def __init__(self, service: LeaderService) -> None:
        self._service = service
        self._kept: list[str] = []

    def take(self) -> None:
        """Something was published."""
        if self._service.state.seq % 4 == 0:
            self._kept.append(str(self._service.state.seq))


def test_the_count_finds_a_table_that_grows(tmp_path: Path) -> None:
    with machine(tmp_path, "simple_lru") as (service, rig):
        service.listeners.append(Leak(service).take)
        run_to(service, rig, WARM_EVENTS)
        warm = floor(service, rig)
        assert floor(service, rig) - warm > RISE_MAX


def test_an_export_of_memory_leaves_nothing_behind(tmp_path: Path) -> None:
    with machine(tmp_path, "learned") as (service, rig):
        run_to(service, rig, 2_000)
        live = service.leader.live_memory
        before = objects(live)
        exported = live.export()
        assert objects(live) == before
        again = LiveMemory.restore(exported, service.state.pools)
        assert again.export() == exported
        assert all(pool.ranks is None for pool in again.memory.pools)
