"""Prefetch limits itself where what it fetches is not used, says so everywhere, and comes back."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core import events as ev
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.leader import Leader, Outcome, foresight
from kvbm_console.core.leader.foresight import JUDGED_LEAST, PROBE_BLOCKS, PROBE_EVERY, PrefetchMemory
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.metrics.collect import collect, scrape_of
from kvbm_console.planning.options import COMPAT_BANDWIDTH, SimulateOptions
from kvbm_console.planning.run import engine_config, open_trace, simulate
from kvbm_console.simulator.embedded import build
from kvbm_console.stream.document import status_document

CHATS = "multiturn:requests=60,sessions=14,prompts=2,system=96,user=64,output=32,turns=4,ramp=0.005,think="
TIGHT = SimulateOptions(
    trace=f"{CHATS}0.3", total_kv_blocks=40, kv_cpu_blocks=48, kv_disk_blocks=2_000, kv_offload_threshold=0.0,
    stats_every=0,
)
"""Chats of which the host tier holds a few: what is fetched for one pushes out what was fetched for another."""
ROOMY = msgspec.structs.replace(TIGHT, kv_cpu_blocks=150, trace=f"{CHATS}1")


def run(options: SimulateOptions) -> tuple[Leader, list[ev.PrefetchLimited]]:
    told: list[ev.PrefetchLimited] = []
    state = CacheState()

    def publish(_stimulus: Stimulus, outcome: Outcome) -> None:
        for event in outcome.events:
            state.apply(event)
            if isinstance(event, ev.PrefetchLimited):
                told.append(event)

    rig = build(
        options.leader_config(), engine_config(options), open_trace(options), publish=publish, links=options.links()
    )
    rig.run_to_end()
    assert state.totals == rig.leader.state.totals
    return rig.leader, told


def unlimited(monkeypatch: pytest.MonkeyPatch, options: SimulateOptions) -> Leader:
    with monkeypatch.context() as patch:
        patch.setattr(foresight, "LIMIT_BELOW", 0.0)
        leader, told = run(options)
    assert not told
    return leader


def hit_rate(leader: Leader) -> float:
    return sum(leader.state.totals.hit_blocks) / leader.state.totals.prompt_blocks


def test_on_a_tight_load_little_is_fetched_and_no_hits_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    before = unlimited(monkeypatch, TIGHT)
    leader, told = run(TIGHT)
    wasted = before.memory.prefetch
    assert wasted.used < 0.25 * wasted.fetched
    assert told[0].limited
    assert told[0].used < 0.25 * told[0].judged
    assert leader.memory.prefetch.fetched < 0.7 * wasted.fetched
    assert hit_rate(leader) >= hit_rate(before) - 0.01


def test_on_a_load_where_it_pays_nothing_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, told = run(ROOMY)
    memory = leader.memory.prefetch
    assert memory.fetched > 0
    assert memory.used > 0.5 * memory.fetched
    assert not told
    assert leader.state.totals == unlimited(monkeypatch, ROOMY).state.totals


def test_every_place_tells_the_same() -> None:
    leader, told = run(TIGHT)
    memory, totals = leader.memory.prefetch, leader.state.totals
    assert [event.limited for event in told] == [at % 2 == 0 for at in range(len(told))]
    assert (memory.used, memory.limits, memory.limited) == (
        totals.prefetch_used_blocks, totals.prefetch_limits, totals.prefetch_limited
    )
    row = status_document(leader.state, at_ns=0, incarnation="", subscribers=0, recorder=None)["prefetch"]
    assert row == {
        "fetched_blocks": memory.fetched, "used_blocks": memory.used, "precision": memory.used / memory.fetched,
        "limits": memory.limits, "limited": memory.limited,
    }
    families = {family.name: family.samples for family in collect(
        scrape_of(leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=())
    )}
    assert [families[f"kvbm_prefetch_{name}"][0][1] for name in ("limits_total", "limited")] == [
        memory.limits, memory.limited
    ]
    report = simulate(TIGHT).document["prefetch"]
    assert (report["limits"], report["limited"], report["used_blocks"]) == (memory.limits, memory.limited, memory.used)


def test_hosts_agree_on_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of facts and memory are compared after every stimulus; with a stricter limit few requests are enough."""
    monkeypatch.setattr(foresight, "JUDGED_LEAST", 8)
    monkeypatch.setattr(foresight, "LIMIT_BELOW", 0.9)
    short = msgspec.structs.replace(TIGHT, trace=TIGHT.trace.replace("requests=60", "requests=30"))
    report = simulate(msgspec.structs.replace(short, hosts=2)).document
    assert report == simulate(short).document
    assert report["prefetch"]["limits"] > 0


@pytest.mark.parametrize("policy", ["lrfu_auto", "learned"])
def test_the_shared_trace_is_not_limited(mooncake_trace: object, policy: str) -> None:
    leader, told = run(SimulateOptions(
        trace=f"mooncake:{mooncake_trace}", limit=250, block_size=512, total_kv_blocks=600, kv_cpu_blocks=600,
        kv_disk_blocks=20_000, kv_offload_threshold=0.0, stats_every=0, policy=PolicyConfig(policy=policy),
        kv_transfer_bandwidth=COMPAT_BANDWIDTH,
    ))
    assert not told
    assert leader.memory.prefetch.used >= 0.8 * leader.memory.prefetch.fetched


# --- hysteresis ---


@given(some.lists(some.tuples(some.integers(0, 80), some.integers(0, 80)), max_size=60))
def test_the_limit_changes_on_evidence_alone_and_stands_between_its_two_bounds(
    rounds: list[tuple[int, int]]
) -> None:
    memory = PrefetchMemory()
    for used, wasted in rounds:
        memory.recent_used += used
        memory.recent_wasted += wasted
        known, before = (memory.recent_used, memory.recent_wasted), memory.limited
        judged = sum(known)
        if memory.judge():
            assert judged >= JUDGED_LEAST
            assert memory.limited is not before
            assert (2 * known[0] >= judged) if before else (4 * known[0] < judged)
            assert memory.recent_used == memory.recent_wasted == 0, "the next change needs evidence of its own"
        else:
            assert judged < JUDGED_LEAST or ((2 * known[0] < judged) if before else (4 * known[0] >= judged))


def test_probes_are_few_and_bring_it_back() -> None:
    memory = PrefetchMemory()
    memory.recent_wasted = JUDGED_LEAST
    assert memory.judge()
    assert memory.limited
    rooms = [memory.room(1_000) for _ in range(4 * PROBE_EVERY)]
    assert [room for room in rooms if room] == [PROBE_BLOCKS] * 4
    memory.recent_used, memory.recent_wasted = JUDGED_LEAST, 0
    assert memory.judge()
    assert not memory.limited
    assert memory.limits == 1
    assert memory.room(1_000) == 1_000
