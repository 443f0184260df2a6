"""Figures of the debugger: a condition, many breakpoints that do not match, and a resume over the wire."""

import asyncio
import statistics
import time
from typing import Final

from kvbm_console.client import Client, HookedFeed
from kvbm_console.core import stimuli as st
from kvbm_console.core.breakpoints import Moment
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.expression import compile_condition
from kvbm_console.core.ids import Authority, Condition, Site, SlotState, Tier
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts, PoolInfo
from kvbm_console.stream.verbs import ContinueHold, RenewLease, SetBreakpoint
from tests.benchmarks.bench_core import beside_none
from tests.benchmarks.harness import Figure, Target, measure
from tests.server.daemons import process, socket_directory

CALLS: Final = 100
BREAKPOINTS: Final = 100
RESUMES: Final = 300
"""Enough for a 99th percentile that three slow ones make."""
ROUNDS: Final = 3
CONDITION: Final = "tokens.computed > 4096 and tiers.g1.available < 160"


def condition() -> Figure:
    """A condition of two comparisons, one of them a sum over pools, that holds."""
    state = CacheState()
    for index, tier in enumerate((Tier.G2, Tier.G3, Tier.G1)):
        state.pools.append(PoolFacts(PoolInfo(index, 0, 0, 0, tier, "x", 128, 16, Authority.LEADER)))
    slot = SlotFacts(
        slot=1, request="chat-1", source=1, state=SlotState.DECODING, since_ns=0, opened_ns=0, hashes=[],
        prompt_tokens=10, output_limit=10, priority=0, session=None, prompt_blocks=0, anchor_tokens=5_000,
    )
    moment = Moment(Site.TRANSITION_DID, 1, "chat-1", SlotState.PREFILLING, SlotState.DECODING)
    holds = compile_condition(CONDITION)

    def written(slot: SlotFacts, state: CacheState) -> bool:
        if slot.computed_tokens(state.iteration) <= 4_096:
            return False
        available = 0
        for pool in state.pools:
            if pool.info.tier is Tier.G1:
                available += pool.counts[Condition.EMPTY] + pool.counts[Condition.CACHED]
        return available < 160

    assert holds(slot, state, moment)
    assert written(slot, state)

    def compiled() -> None:
        for _ in range(CALLS):
            holds(slot, state, moment)

    def by_hand() -> None:
        for _ in range(CALLS):
            written(slot, state)

    return measure(
        "compiled condition", compiled, CALLS, "the same written in Python", by_hand, CALLS, Target(ns=300),
    )


def many_breakpoints() -> Figure:
    """A hundred, in states that every request enters and in others."""
    states = [SlotState.DECODING, SlotState.PREFILLING, SlotState.PREEMPTED, SlotState.ONBOARDING, SlotState.FINISHED]
    specs = tuple(
        BreakpointSpec(request=f"nobody-{at}-*", to_state=states[at % len(states)]) for at in range(BREAKPOINTS)
    )
    return beside_none("100 armed breakpoints without a match", specs, Target(extra_ns=500))


DAEMON: Final = """
import asyncio, sys
from kvbm_console.core.config import LeaderConfig
from server.daemon import run_daemon
from server.options import DaemonOptions

options = DaemonOptions(config=LeaderConfig(g2_blocks=64), listen=sys.argv[1], handle_signals=False)
asyncio.run(run_daemon(options, on_ready=lambda daemon: print(daemon.address, flush=True)))
"""


def resume() -> Figure:
    """From the continue of one client to the hook of an engine that runs again, both outside of the daemon's process.

    Beside it the 99th percentile of a bare question and answer on the same stream, in turns: a neighbour that takes the
    processor is seen in both.
    """
    return asyncio.run(_resume())


async def _resume() -> Figure:
    with socket_directory() as place, process("-c", DAEMON, f"unix:{place}/d.sock") as daemon:
        address = await asyncio.to_thread(daemon.line)
        rounds = await _resumes(address)
    pairs = [(statistics.quantiles(took, n=100)[98], statistics.quantiles(asked, n=100)[98]) for took, asked in rounds]
    slowest = statistics.median(took for took, _ in pairs)
    reference = statistics.median(asked for _, asked in pairs)
    return Figure(
        "resume to hook running, p99", slowest, "an answer to renew, p99", reference,
        statistics.median(took / asked for took, asked in pairs), Target(ns=2e6),
    )


async def _resumes(address: str) -> list[tuple[list[int], list[int]]]:
    rounds: list[tuple[list[int], list[int]]] = []
    async with (
        Client(address) as client, client.feed("engine") as feed, client.control("me") as session,
    ):
        hooked = HookedFeed(feed)
        await hooked.call(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 32, 16, Authority.ENGINE)
        await hooked.call(st.RequestArrived, "r", pack_hashes([5, 6]), 40, 8, 0, None)
        await session.ask(SetBreakpoint(BreakpointSpec(site=Site.CALL_WILL)))

        waiting = asyncio.Event()

        async def call() -> int:
            await feed.submit(st.CallAnnounced, "r", 3)
            held = feed.held["r"]
            waiting.set()
            while feed.held.get("r") == held:
                await feed.changed()
            return time.perf_counter_ns()

        for at in range(ROUNDS * RESUMES):
            if at % RESUMES == 0:
                rounds.append(([], []))
            took, asked = rounds[-1]
            waiting = asyncio.Event()
            running = asyncio.create_task(call())
            await waiting.wait()
            began = time.perf_counter_ns()
            await session.ask(ContinueHold(None))
            took.append(await running - began)
            began = time.perf_counter_ns()
            await session.ask(RenewLease())
            asked.append(time.perf_counter_ns() - began)
            await feed.submit(st.MatchRequested, "r", 0)
    return rounds


BENCHES: Final = {
    "compiled condition": condition, "100 armed breakpoints without a match": many_breakpoints,
    "resume to hook running, p99": resume,
}
