"""The limits of an engine's settings, which a tap tells once: what follows from them, and that none is invented.

Law of this file: an unknown limit is absent, and a pool that several groups share has no capacity of its own.
"""

from kvbm_console.core.ids import Measure, Tier
from kvbm_console.core.snapshots import decode_facts, encode_facts
from kvbm_console.metrics.collect import collect, scrape_of
from kvbm_console.metrics.exposition import render
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import TapSettings
from tests.tap.watching import Watching

BLOCK = 16


def told(settings: TapSettings) -> tuple[dict[Measure, int], list[tuple[Tier, int | None]]]:
    """The numbers of the engine, and the capacities of its pools."""
    watch = Watching(TapRecorder(), Flattener(block_tokens=BLOCK), settings)
    state = watch.leader.state
    assert watch.rejected == []
    assert watch.mirror.measured.keys() == state.measured.keys()
    facts = next(iter(state.measured.values()), None)
    pools = [(pool.info.tier, state.capacity_of(pool)) for pool in state.pools if pool.info.source]
    return {} if facts is None else facts.values, pools


def test_the_limits_of_an_engine_are_numbers_of_it() -> None:
    settings = TapSettings(
        "", "vllm", BLOCK, 64, medium="CPU", host_blocks=400, running_most=16, step_tokens_most=8_192
    )
    numbers, pools = told(settings)
    assert numbers == {
        Measure.HOST_CAPACITY_BLOCKS: 400, Measure.RUNNING_MOST: 16, Measure.STEP_TOKENS_MOST: 8_192,
    }
    assert pools == [(Tier.G1, 64), (Tier.G2, 400)]


def test_metrics_have_the_limits_of_a_tapped_engine() -> None:
    watch = Watching(
        TapRecorder(), Flattener(block_tokens=BLOCK), TapSettings("", "vllm", BLOCK, 64, medium="CPU", running_most=16)
    )
    (source,) = watch.leader.state.measured
    taps = [{"source": str(source), "name": "vllm"}]
    text = render(collect(scrape_of(
        watch.leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=(), taps=taps
    )))
    assert f'kvbm_engine_running_most{{source="{source}",engine="vllm"}} 16\n' in text
    assert "\nkvbm_engine_step_tokens_most{" not in text


def test_unknown_limits_are_absent() -> None:
    assert told(TapSettings("", "vllm", BLOCK, 64, medium="CPU")) == ({}, [(Tier.G1, 64), (Tier.G2, None)])


def test_groups_that_share_the_device_have_no_capacity_of_their_own() -> None:
    numbers, pools = told(TapSettings("", "vllm", BLOCK, 64, others={1: BLOCK}))
    assert numbers == {Measure.CAPACITY_BLOCKS: 64}
    assert pools == [(Tier.G1, None), (Tier.G1, None)]


def test_the_host_tier_of_several_groups_has_places_and_no_number_of_blocks() -> None:
    """Each of its places holds a block of one group, and its pool names a block once for all groups."""
    settings = TapSettings("", "vllm", BLOCK, 64, medium="CPU", host_blocks=400, others={1: BLOCK})
    numbers, pools = told(settings)
    assert numbers == {Measure.CAPACITY_BLOCKS: 64, Measure.HOST_CAPACITY_BLOCKS: 400}
    assert pools == [(Tier.G1, None), (Tier.G1, None), (Tier.G2, None)]


def test_pools_have_the_windows_of_their_groups() -> None:
    settings = TapSettings(
        "", "vllm", BLOCK, 64, group=1, others={0: BLOCK, 2: BLOCK}, windows={0: 128, 1: 0}, retention=0
    )
    watch = Watching(TapRecorder(), Flattener(block_tokens=BLOCK), settings)
    state = watch.leader.state
    windows = {pool.info.group: pool.info.window for pool in state.pools if pool.info.source}
    assert windows == {0: 128, 1: 0, 2: None}
    assert told(settings)[0][Measure.RETENTION_TOKENS] == 0
    assert decode_facts(encode_facts(state)).pools[1].info == state.pools[1].info
