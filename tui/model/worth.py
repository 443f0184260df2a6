"""Worth: what a tier took, what it gave back, and whether the time that it saved exceeds the time that its copies took.

Blocks are totals of the run, so they are exact even while facts are sampled. Seconds are these totals times two prices
that the console measures: the prefill time of a token, from requests that went from prefilling to decoding, and the
wire time of a block on each route, from copies that completed.

    saved      blocks copied from the tier to the device x tokens of a block x prefill time of a token
    copying    blocks copied into the tier and back x wire time of a block

Both are seconds of requests and of links, not of the wall: several requests prefill in one step, and copies go on while
the engine computes.

Law of this file: without a price there is no verdict.
"""

from collections import defaultdict

import msgspec

from kvbm_console.analysis.lives import Life, Transfer
from kvbm_console.core.ids import CandidateStatus, Route, SlotState, Tier
from kvbm_console.core.state import CacheState


class Prices:
    """Measured times: of a prefilled token, and of a copied block by route."""

    def __init__(self) -> None:
        self.prefill_ns = 0
        self.prefill_tokens = 0
        self.wire_ns: defaultdict[Route, int] = defaultdict(int)
        self.wire_blocks: defaultdict[Route, int] = defaultdict(int)
        self.lives = 0
        """Requests that were seen from their beginning to their end."""

    def life_ended(self, life: Life) -> None:
        """Measure the stretches of a life in which it was prefilled from the beginning to the end."""
        self.lives += bool(life.moves) and life.moves[0].seq is not None and not life.lost
        for move, following in zip(life.moves, life.moves[1:], strict=False):
            if (move.state, following.state) == (SlotState.PREFILLING, SlotState.DECODING):
                tokens = following.computed_tokens - move.computed_tokens
                if move.seq is not None and following.seq is not None and tokens > 0:
                    self.prefill_ns += following.start_ns - move.start_ns
                    self.prefill_tokens += tokens

    def transfer_ended(self, transfer: Transfer) -> None:
        """Measure a copy that completed."""
        if transfer.status is CandidateStatus.COMPLETED and transfer.started_ns is not None and (
            transfer.ended_ns is not None and not transfer.lost
        ):
            self.wire_ns[transfer.route] += transfer.ended_ns - transfer.started_ns
            self.wire_blocks[transfer.route] += transfer.blocks

    @property
    def token_ns(self) -> float | None:
        """Prefill time of a token; None before the first."""
        return self.prefill_ns / self.prefill_tokens if self.prefill_tokens else None

    def copying_ns(self, route: Route, blocks: int) -> float | None:
        """Wire time of so many blocks; None if blocks were copied and none was timed."""
        if not blocks:
            return 0.0
        timed = self.wire_blocks[route]
        return blocks * self.wire_ns[route] / timed if timed else None


    def whole(self, state: CacheState) -> bool:
        """True if every request and every copy that ended since the run began was measured."""
        return self.lives == state.totals.slots_opened - len(state.slots) and all(
            self.wire_blocks[route] == state.totals.moved_blocks.get(route.label, 0) for route in Route)


class TierWorth(msgspec.Struct, frozen=True):
    """Cost and gain of a tier since the run began."""

    tier: Tier
    down_blocks: int
    """Blocks that were copied into it from above."""
    back_blocks: int
    """Blocks that were copied out of it upwards."""
    found_tokens: int
    """Tokens that requests found in it, also after a preemption, and that no engine computed again."""
    saved_ns: float | None
    copying_ns: float | None
    about: bool = False
    """True if the times are estimates, because the prices were measured in a part of the run."""

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if not self.down_blocks and not self.back_blocks:
            return "took nothing"
        if self.saved_ns is None or self.copying_ns is None:
            return "–"
        if not self.found_tokens:
            return "no hit"
        return "pays" if self.saved_ns > self.copying_ns else "costs more"


def worth_of(state: CacheState, prices: Prices) -> list[TierWorth]:
    """The worth of each lower tier, near tiers first."""
    totals, about = state.totals, not prices.whole(state)
    found = []
    for tier in sorted({pool.info.tier for pool in state.shown_pools} - {Tier.G1}):
        block_tokens = next(pool.info.block_tokens for pool in state.pools if pool.info.tier is tier)
        into = [route for route in Route if route.target is tier and route.source < tier]
        out = [route for route in Route if route.source is tier and route.target < tier]
        blocks = {route: totals.moved_blocks.get(route.label, 0) for route in (*into, *out)}
        costs = [prices.copying_ns(route, number) for route, number in blocks.items()]
        tokens = totals.moved_blocks.get(Route.of(tier, Tier.G1).label, 0) * block_tokens
        token_ns = prices.token_ns
        found.append(TierWorth(
            tier, sum(blocks[route] for route in into), sum(blocks[route] for route in out), tokens,
            None if token_ns is None else tokens * token_ns,
            None if any(cost is None for cost in costs) else sum(cost or 0.0 for cost in costs), about,
        ))
    return found
