"""A link that is slower than its pool gives places away: copies down are skipped as ``link_busy``.

Law of this file: the blocks that are copied down at once are at most as many as the link carries in an eighth of the
time in which the pool gave away all of its places. An idle link always gets a copy, and a link that keeps up gets all.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core import events as ev
from kvbm_console.core.ids import SkipReason
from kvbm_console.core.leader.memory import COPY_LEAST, TURN_PARTS, PoolMemory
from kvbm_console.core.leader.offloads import most_planned
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import engine_config, open_trace, simulate
from kvbm_console.simulator.embedded import Rig, build
from kvbm_console.simulator.link_settings import LinkSetting

CHATS = "multiturn:requests=160,sessions=40,seed={}"
LONG_PROMPTS = "multiturn:requests=160,sessions=16,seed={}"
"""A prompt has a fifth of the device and more."""
DOCUMENTS = "multiturn:sessions=10,prompts=6,system=1024,user=64,output=32,turns=3,think=1,requests=60,seed={}"
MACHINES: dict[str, dict[str, Any]] = {
    "host": {"trace": CHATS, "total_kv_blocks": 800, "kv_cpu_blocks": 800},
    "no host": {"trace": CHATS, "total_kv_blocks": 800},
    "write-through": {"trace": CHATS, "total_kv_blocks": 800, "kv_offload_threshold": 0.0},
    "small device": {"trace": LONG_PROMPTS, "total_kv_blocks": 200},
    "documents": {"trace": DOCUMENTS, "total_kv_blocks": 450, "kv_offload_threshold": 0.0},
}
SLOW = LinkSetting("disk-write", 40e6)


def machine(name: str, seed: int, **more: Any) -> SimulateOptions:
    fields = MACHINES[name] | {"stats_every": 0, **more}
    return SimulateOptions(**fields | {"trace": fields["trace"].format(seed)})


class Watch:
    """The laws, checked at each event that promotes or skips a copy down."""

    def __init__(self, options: SimulateOptions) -> None:
        self.busy = 0
        self.promoted = 0
        self._rig: Rig = build(
            options.leader_config(), engine_config(options), open_trace(options), publish=self._seen,
            links=options.links(),
        )
        leader = self._rig.leader
        emit = leader.emit

        def emitted(kind: Any, *args: Any, **more: Any) -> None:
            if kind is ev.CandidatePromoted:
                self._promotes(*args)
            elif kind is ev.CandidateSkipped and args[1] is SkipReason.LINK_BUSY:
                self._skips(args[0])
            emit(kind, *args, **more)

        leader.emit = emitted  # type: ignore[method-assign]

    def run(self) -> "Watch":
        self._rig.run_to_end()
        return self

    def _seen(self, stimulus: Stimulus, outcome: Any) -> None:
        """Nothing: the laws are checked before each event."""

    def _in_flight(self, source: int, target: int) -> int:
        return sum(
            len(copy.sources) for copy in self._rig.leader.state.operations.values()
            if (copy.source_pool, copy.target_pool) == (source, target)
        )

    def _promotes(self, number: int, *fields: Any) -> None:
        _operation, _batch, source, target, ids, *_ = fields
        leader = self._rig.leader
        if leader.state.candidates[number].route.is_load:
            return
        self.promoted += 1
        flies, most = self._in_flight(source, target) + len(ids) // 4, leader.memory.pools[source].in_time()
        if most is None:
            assert flies <= most_planned(leader, leader.state.pools[source])
        else:
            assert flies <= max(most, COPY_LEAST)

    def _skips(self, number: int) -> None:
        self.busy += 1
        leader = self._rig.leader
        source = leader.state.pools[leader.memory.drawn_from[number]]
        target = leader.below(source)
        assert target is not None
        assert self._in_flight(source.info.pool, target.info.pool) > 0, "an idle link was refused a copy"
        assert leader.memory.pools[source.info.pool].in_time() is not None, "a link of unknown speed was refused a copy"


@pytest.mark.parametrize("name", MACHINES)
def test_a_slow_link_sheds_and_is_never_idle_for_it(name: str) -> None:
    watch = Watch(machine(name, 3, kv_disk_blocks=3_000, link=(SLOW,))).run()
    assert watch.busy > 0
    assert watch.promoted > 5


@pytest.mark.parametrize("name", MACHINES)
def test_a_link_that_keeps_up_sheds_nothing(name: str) -> None:
    watch = Watch(machine(name, 3, kv_disk_blocks=3_000, link=(LinkSetting("disk", 25e9, 20_000),))).run()
    assert watch.busy == 0
    assert watch.promoted > 5


@pytest.mark.parametrize("name", MACHINES)
def test_a_disk_of_a_tenth_of_what_is_produced_does_no_harm(name: str) -> None:
    """The mean time to the first token is at most 1.1 times that without the disk, on average of the loads."""
    ratios = []
    for seed in (2, 3):
        bare = simulate(machine(name, seed)).document
        computed = bare["prompt_blocks"] - sum(bare["hit_blocks"].values())
        produced = computed * 16 * bare["settings"]["token_bytes"] / bare["duration_s"]
        link = (LinkSetting("disk-write", produced / 10), LinkSetting("disk-read", 25e9, 20_000))
        slow = simulate(machine(name, seed, kv_disk_blocks=9_000, link=link)).document
        assert slow["moved_blocks"][f"G{2 if 'kv_cpu_blocks' in MACHINES[name] else 1}>G3"] > 0
        ratios.append(slow["ttft_ms"]["mean"] / bare["ttft_ms"]["mean"])
    assert sum(ratios) / len(ratios) <= 1.1, ratios


@given(
    capacity=some.integers(64, 4_096), place_ns=some.integers(1, 10**6), block_ns=some.integers(1, 10**6),
    batch=some.integers(1, 64), queue=some.booleans(),
)
def test_the_blocks_in_time_follow_from_turn_and_speed(
    capacity: int, place_ns: int, block_ns: int, batch: int, queue: bool
) -> None:
    """Also when copies wait for each other: their times do not count twice."""
    mine = PoolMemory()
    for given_away in range(1, 2 * capacity + 1):
        assert (mine.in_time() is None) or mine.given >= capacity
        mine.gave(1, capacity, given_away * place_ns)
    assert mine.in_time() is None, "no copy has ended"
    for copy in range(1, 3 + 300 // batch):
        started = 0 if queue else (copy - 1) * batch * block_ns
        mine.took(batch, started, copy * batch * block_ns)
    most = mine.in_time()
    assert most is not None
    exact = mine.turn_ns / (TURN_PARTS * block_ns)
    assert abs(most - exact) <= 1 + exact / 100, "up to rounding"
    if 2 * block_ns * TURN_PARTS <= place_ns:
        assert most >= capacity, "a link that keeps up carries a copy of the whole pool in time"
