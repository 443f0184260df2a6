"""``learned`` on generated loads and the shared trace: near the best simple policy, and closes much of the gap.

``python -m tests.benchmarks.policies`` compares it on others, with policies of another program.

Law of this file: hit rates in percent of all references, over the capacities of
``tests.core.eviction.generated`` and, where it is at hand, of the shared trace.
``REGRET`` is the most that it may be below the best of ``FIXED`` in any cell. Some
cells run always, all of them among the slow tests, which print every cell (``pytest -s``).
"""

import sys
from statistics import mean
from typing import Final

import msgspec
import pytest

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.eviction.policy import DEFAULT_POLICY, PolicyConfig
from kvbm_console.planning.cache_only import References, policy_named, references_of, replay
from kvbm_console.planning.options import CacheOptions
from kvbm_console.planning.traces import parse_trace
from tests.conftest import shared_directory
from tests.core.eviction.generated import WORKLOADS, references_named

FIXED: Final = ("simple_lru", "adaptive_lru", "lfu")
REGRET: Final = 1.0
QUARTER: Final = 0.25
"""Of the gap between recency and the optimum that is closed, on average over the cells that have one."""
GAP_MIN: Final = 0.5
"""A smaller gap than so many points is none."""
TRACE_CAPACITIES: Final = (250, 1_000, 4_000, 16_000, 64_000)
ALWAYS: Final = (("default-a", 200), ("default-a", 500), ("default-a", 1_000), ("default-b", 700))


class Cell(msgspec.Struct, frozen=True):
    """Hit rates of one load at one capacity."""

    load: str
    capacity: int
    learned: float
    fixed: dict[str, float]
    belady: float

    @property
    def regret(self) -> float:
        """Points below the best fixed policy; negative: above it."""
        return max(self.fixed.values()) - self.learned

    @property
    def gap_closed(self) -> float | None:
        """Share of the way from recency to the optimum, None where there is hardly any."""
        gap = self.belady - self.fixed["simple_lru"]
        return None if gap < GAP_MIN else (self.learned - self.fixed["simple_lru"]) / gap

    def line(self) -> str:
        """For people."""
        closed = "" if self.gap_closed is None else f"  gap closed {100 * self.gap_closed:6.1f} %"
        fixed = "  ".join(f"{name} {rate:5.2f}" for name, rate in self.fixed.items())
        return f"{self.load:10} {self.capacity:6}  {fixed}  new {self.learned:5.2f}  belady {self.belady:5.2f}{closed}"


def cell(load: str, refs: References, capacity: int) -> Cell:
    """Replay every policy."""
    def rate(policy: str) -> float:
        return 100 * replay(refs, policy_named(policy, PolicyConfig(), capacity, refs), capacity).hit_rate

    return Cell(load, capacity, rate("learned"), {policy: rate(policy) for policy in FIXED}, rate("belady"))


def judge(cells: list[Cell]) -> float:
    """Print all cells, and fail for one that is too far below; returns the mean share of the gap that is closed."""
    for one in cells:
        sys.stdout.write(one.line() + "\n")
    closed = [one.gap_closed for one in cells if one.gap_closed is not None]
    sys.stdout.write(f"mean gap closed {100 * mean(closed):.1f} %, most below {max(one.regret for one in cells):.2f}\n")
    assert [one for one in cells if one.regret > REGRET] == []
    return mean(closed)


def test_one_policy_is_the_default_everywhere() -> None:
    assert DEFAULT_POLICY == "lrfu_auto"
    assert CacheOptions(total_kv_blocks=1).policy.policy == DEFAULT_POLICY
    assert LeaderConfig().eviction.policy == "simple_lru", "recordings from before there were policies"


def test_learned_on_some_generated_loads() -> None:
    assert judge([cell(load, references_named(load), capacity) for load, capacity in ALWAYS]) >= QUARTER


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_learned_on_all_generated_loads() -> None:
    closed = judge([
        cell(load, references_named(load), capacity)
        for load, (_, capacities) in WORKLOADS.items() for capacity in capacities
    ])
    assert closed >= QUARTER


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_learned_on_the_real_trace() -> None:
    place = shared_directory()
    path = None if place is None else place / "traces" / "mooncake_conversation_trace.jsonl"
    if path is None or not path.is_file():
        pytest.skip("needs the real trace in the shared data: set KVBM_SHARED")
    refs = references_of(parse_trace(f"mooncake:{path}"))
    assert judge([cell("trace", refs, capacity) for capacity in TRACE_CAPACITIES]) > 0.0
