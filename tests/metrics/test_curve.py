"""The LRU curve of a daemon as metrics, against the exact curve over the same admissions.

Law of this file: the exact curve is read from the events that the daemon published, by the test.
"""

from collections.abc import Iterable

import msgspec
import pytest

from kvbm_console.analysis.curve import SCALES, CurveFold
from kvbm_console.analysis.lints import LintFold
from kvbm_console.core import events as ev
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.curves import LruCurve
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import PoolDeclared
from kvbm_console.metrics.collect import collect, scrape_of
from kvbm_console.metrics.exposition import render
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import build_rig, open_trace
from kvbm_console.wire.batches import unpack_events
from server.lints import LintWatch
from tests.metrics.test_exposition import Samples, page, parse
from tests.metrics.test_lint_watch import Followed
from tests.planning.test_recorded import Taking
from tests.server.daemons import daemon_at, finished, published
from tests.tap.kept import run_of

NAME = "kvbm_lru_hit_ratio"
SAMPLES = TIER = 600
"""Far less than the blocks of a load, about 2,000."""


def exact_curve(events: Iterable[ev.Event]) -> tuple[LruCurve, CacheState, int]:
    """The curve of first admissions, the facts behind them, and the number of blocks that were asked for."""
    curve, state, seen = LruCurve(), CacheState(), set[int]()
    admitted: set[int] = set()
    for event in events:
        if isinstance(event, ev.SlotClosed) and event.slot in admitted:
            curve.add(state.slots[event.slot].hashes, asked=0)
        state.apply(event)
        if isinstance(event, ev.PrefixScored):
            admitted.add(event.slot)
            seen.update(prompt := state.slots[event.slot].hashes[: event.prompt_blocks])
            curve.add(prompt, asked=0 if event.readmitted else None)
    return curve, state, len(seen)


def shown(found: Samples, name: str = NAME) -> dict[tuple[str, str], float]:
    """Tier and capacity to the value."""
    return {(has["tier"], has["capacity"]): value for has, value in found[name]}


@pytest.mark.asyncio
async def test_a_daemon_tells_the_curve_of_its_admissions_around_its_tiers() -> None:
    async with daemon_at("multiturn:requests=60,sessions=8", speed=None, metrics="127.0.0.1:0") as daemon:
        await published(daemon, lambda: finished(daemon) == 60)
        daemon.service.broadcaster.flush()
        await daemon.lints.turn()
        assert daemon.service.ring.first_seq == 0
        curve, state, _ = exact_curve(
            event for data in daemon.service.ring.data_since(0) for event in unpack_events(data)
        )
        assert daemon.metrics is not None
        _, text = await page(daemon.metrics.port)
    found = parse(text)
    pools = sorted(state.pools, key=lambda pool: pool.info.tier)
    sizes = {pool.info.tier.label: pool.info.capacity_blocks or 0 for pool in pools}
    assert len(sizes) > 1
    assert shown(found).keys() == {(tier, f"{scale:g}") for tier in sizes for scale in SCALES}
    nearer = 0
    for tier, own in sizes.items():
        for scale in SCALES:
            capacity = nearer + round(own * scale)
            error = shown(found, f"{NAME}_error")[tier, f"{scale:g}"]
            # Above 128 blocks, depths that differ by less than 1/64 are one class.
            low, high = (curve.hit_rate(round(capacity * (1 + step / 64))) for step in (-1, 1))
            assert low is not None
            assert high is not None
            assert low - error <= shown(found)[tier, f"{scale:g}"] <= high + error
        nearer += own


@pytest.mark.parametrize(("seeds", "outside"), [
    pytest.param(4, 0.1, id="few"), pytest.param(12, 0.055, id="many", marks=pytest.mark.slow),
])
def test_a_sampled_curve_is_right_within_its_error(seeds: int, outside: float) -> None:
    """Loads with more blocks than the sample follows: 19 of 20 points are right over many loads. The points of one load
    are off together, so few loads tell less."""
    wrong, errors = 0, []
    for seed in range(seeds):
        options = SimulateOptions(
            trace=f"multiturn:requests=100,sessions=20,seed={seed}", total_kv_blocks=TIER, kv_cpu_blocks=TIER
        )
        taking = Taking()
        build_rig(options, open_trace(options), taking, windows=False).run_to_end()
        events = [event for events in taking.events for event in events]
        curve, _, blocks = exact_curve(events)
        assert blocks > 2 * SAMPLES
        fold, state = CurveFold(SAMPLES), CacheState()
        watch = LintFold([], [fold])
        for event in events:
            watch.apply(state, event)
        assert curve.references == fold.curve.references == state.totals.prompt_blocks
        for (tier, scale), rate in fold.points(state).items():
            exact = curve.hit_rate((TIER if tier is Tier.G2 else 0) + round(TIER * scale))
            assert exact is not None
            wrong += abs(rate.hit_rate - exact) > rate.error
            errors.append(rate.error)
    assert len(errors) == 2 * len(SCALES) * seeds
    assert wrong <= outside * len(errors)
    assert 0 < max(errors) < 0.1


def test_nothing_asked_for_has_no_rate_rather_than_0() -> None:
    leader = Leader(LeaderConfig(g2_blocks=64))
    assert CurveFold().points(leader.state) == {}
    found = parse(render(collect(scrape_of(leader, at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=()))))
    assert NAME not in found


@pytest.mark.asyncio
async def test_a_stream_without_requests_has_no_curve() -> None:
    followed = Followed()
    watch = LintWatch(followed.service)
    followed.publish(1, 2, 3)
    await watch.turn()
    assert watch.curve == {}


def test_a_capacity_that_is_not_known_and_all_further_ones_have_no_rate() -> None:
    leader = Leader(LeaderConfig(g2_blocks=64))
    leader.handle(PoolDeclared(0, 0, 0, None, 0, 0, Tier.G1, "GPU", 8, 16, Authority.ENGINE))
    leader.handle(PoolDeclared(1, 0, 0, None, 0, 0, Tier.G2, "CPU", 64, 16, Authority.LEADER))
    fold = CurveFold()
    fold.curve.add([1, 2, 3, 4])
    fold.curve.add([1, 2, 3, 4])
    rates = {point: rate.hit_rate for point, rate in fold.points(leader.state).items()}
    assert rates == {(tier, scale): 0.5 for tier in (Tier.G1, Tier.G2) for scale in SCALES}
    leader.handle(PoolDeclared(2, 0, 1, None, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM))
    assert len(fold.points(leader.state)) == 2 * len(SCALES), "a stream names no request"
    other = Leader(LeaderConfig(g2_blocks=64))
    for tier, capacity in ((Tier.G1, 8), (Tier.G2, None), (Tier.G3, 64)):
        other.handle(PoolDeclared(0, 0, 1, None, 0, 0, tier, "memory", capacity, 16, Authority.OBSERVED))
    assert {tier for tier, _ in fold.points(other.state)} == {Tier.G1}


def test_the_host_tier_of_a_tapped_engine_has_points_if_its_capacity_is_known() -> None:
    run = run_of("chats")
    for known in (False, True):
        fold, state = CurveFold(), CacheState()
        watch = LintFold([], [fold])
        for event in run.all_events:
            left_out = isinstance(event, ev.EngineMeasured) and not known
            watch.apply(state, msgspec.structs.replace(event, measures=(), values=()) if left_out else event)
        tiers = {tier for tier, _ in fold.points(state)}
        assert tiers == ({Tier.G1, Tier.G2} if known else {Tier.G1})
