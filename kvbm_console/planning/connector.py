"""The figures of a recorded engine whose own connector decides about its host tier, as vLLM's does.

The leader decided nothing there, so no leader decides in the replay. ``simulator/offloading_tier.py`` has the rules of
the connector. They are also those for several groups of layers, for which a leader's tiers have one block. The links
carry the copies as they do for a leader.

Law of this file: the counts are those of ``MachineLedger``, with the hits and the copies of the host tier.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from kvbm_console.core.columns import pack_ids, unpack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import InternalError
from kvbm_console.core.eviction import make_policy
from kvbm_console.core.ids import FinishReason, Route, Tier
from kvbm_console.core.instructions import MatchAnswer, StartTransfer
from kvbm_console.core.stimuli import TransferFailed, TransferFinished
from kvbm_console.planning.ledger import ALWAYS_CALM, MachineLedger
from kvbm_console.planning.meter import RequestRecord, StatsLine
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.report import InstanceMeasures
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.link import LinkMover, LinkSpec
from kvbm_console.simulator.offloading_tier import Formed, HostCopy, OffloadingTier
from kvbm_console.simulator.work import Plan, Work
from kvbm_console.simulator.workloads import Request, Workload

G2 = 1
"""The host tier in the columns of a count."""


def refusal(options: SimulateOptions) -> str | None:
    """Why an engine with several groups of layers cannot be run with these options; None if it can. A leader runs
    others, with tiers of its own."""
    flag = options.leader_flag
    if flag is None or not options.has_connector or len(options.engine_fields().get("groups", (0,))) == 1:
        return None
    return f"{flag} is not for an engine with several groups of layers: its own connector has one host tier"


class ConnectorLedger(MachineLedger):
    """A machine whose engine has a connector with a host tier: the ``EnginePort`` of its engine, and the receiver of
    its mover's ``Reports``."""

    def __init__(
        self, leader: LeaderConfig, links: Sequence[LinkSpec], config: EngineConfig, workload: Workload, *,
        stats_every: int = 0, stats: Callable[[StatsLine], None] | None = None, windows: bool = True,
        ended: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """The numbers of the host tier are those of ``leader``, as far as this engine has them (``refusal``)."""
        calendar = Calendar()
        size = leader.block_tokens
        self.host = OffloadingTier(
            leader.g2_blocks, size, config.groups, numbers=config.group_numbers, prompt_only=leader.offload_prompt_only,
            retention=config.retention or (0 if leader.offload_window_only else None),
            make_order=partial(make_policy, leader.eviction, leader.g2_blocks), clock=lambda: calendar.now_ns,
        )
        self.mover = LinkMover(
            calendar, self, config.token_bytes * size, links=links, asynchronous=leader.asynchronous,
        )
        self._copies: dict[int, HostCopy] = {}
        """Operation to its copy."""
        self._orders: list[HostCopy] = []
        """Copies down that begin when the step has ended."""
        self._prompts: dict[str, int] = {}
        """Live requests to the tokens of their prompts."""
        self._works: dict[str, Work] = {}
        """Requests that were admitted, to their records."""
        self._preempted: list[str] = []
        """Requests that were preempted for the step that is being formed."""
        self._steps = False
        """True while a step runs."""
        self._ends: list[tuple[int, str]] = []
        """Number and name of each request that ended since a step was formed."""
        self._withheld: dict[int, list[int]] = {}
        """Loads of requests that have ended, to the places into which they run."""
        self._found: dict[str, tuple[int, int, int]] = {}
        """Requests that load, to their computed tokens before and behind the load, and the prompt blocks it counts."""
        super().__init__(
            config, workload, size, stats_every=stats_every, stats=stats, windows=windows, ended=ended,
            calendar=calendar, take_latency_ns=self.mover.take_latency_ns,
        )

    def change(self, options: SimulateOptions) -> None:
        """As without tiers; the host tier has more room, and the same order of eviction."""
        super().change(options)
        self.host.blocks = options.kv_cpu_blocks

    def measures(self) -> InstanceMeasures:
        """The figures of the run; before ``clear``."""
        found = super().measures()
        gauges = {Tier.G2.name: self.host.order.gauges()}
        return InstanceMeasures(found.engine, found.times, found.totals, found.readmitted, gauges)

    def clear(self) -> None:
        """Forget the content of both tiers, as a reset does."""
        super().clear()
        self.host.clear()

    # --- the engine's side (EnginePort) ---

    def arrived(self, request: Request) -> bool:
        """As without tiers."""
        if not super().arrived(request):
            return False
        self.host.arrived(request.request, request.hashes + request.output_hashes, request.prompt_tokens)
        self._prompts[request.request] = request.prompt_tokens
        return True

    def looked_up(self, name: str, computed_tokens: int) -> MatchAnswer:
        """Continue the prefix in the host tier."""
        work = self._works.get(name)
        tokens = self._prompts[name] if work is None else work.total
        found = self.host.looked_up(name, computed_tokens // self._block_tokens, tokens)
        return MatchAnswer(found, self.mover.asynchronous and bool(found))

    def admitted(self, work: Work, prefix: int, found_tokens: int) -> None:
        """Score the prefix of a request and start its load."""
        super().admitted(work, prefix, found_tokens)
        self._works[work.name] = work
        copy = self.host.admitted(work.name, work.tables, found_tokens)
        if copy is None:
            return
        blocks = len(work.request.hashes)
        counted = max(0, min(blocks, prefix + -(-found_tokens // self._block_tokens)) - prefix)
        if work.preempted:
            self.readmitted.hit_blocks += counted
        else:
            self.totals.hit_blocks[G2] += counted
            if self._ended is not None:
                self._records[work.name].hits = min(prefix, blocks), counted, 0, 0
        before = prefix * self._block_tokens
        self._found[work.name] = before, before + found_tokens, counted
        self._start(copy)

    def cloned(self, work: Work, clones: Sequence[Work], ids: list[int]) -> None:
        """As without tiers. A clone offers what follows the prompt, which the first sequence has offered."""
        super().cloned(work, clones, ids)
        for clone in clones:
            self.host.cloned(work.name, clone.name, clone.hashes)
            self._prompts[clone.name] = self._prompts[work.name]
            self._works[clone.name] = clone

    def scheduled(self, plan: Plan, iteration: int, running: int, waiting: int) -> None:
        """As without tiers; then blocks that the iteration fills may be copied down."""
        super().scheduled(plan, iteration, running, waiting)
        fresh = {*plan.new, *plan.resumed}
        steady = self.engine.scheduler.running[: plan.steady]
        is_calm = self.host.is_calm
        parts = [
            self._formed(work, work.name in fresh, 1) for work in steady
            if work.name in fresh or not is_calm(work.name, work.computed + 1, len(work.tables[0].blocks))
        ]
        parts += [self._formed(work, work.name in fresh, count) for work, count in plan.tokens]
        self._steps = True
        flushed = self.host.flushed
        self._orders += self.host.formed(parts, self._preempted, plan.ended)
        if self.engine.config.early_steps:  # the results of the last step become known
            self._end_all(flushed)
        self._ends.clear()
        self._preempted.clear()

    def _formed(self, work: Work, anew: bool, count: int) -> Formed:
        done = work.settled if self.engine.config.early_steps else work.computed
        known = max(work.total, done + 1)
        return Formed(work.name, work.tables, anew, work.computed + count, known, work.junction)

    def filled(
        self, iteration: int, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        """As without tiers, and the copies of the iteration begin."""
        super().filled(iteration, works, counts, ids, hashes)
        self._steps = False
        if self._ends:
            self._look_for_ends()
        if not self.engine.config.early_steps:
            self._end_all(self.host.flushed)
        self._start_orders()

    def preempted(self, work: Work) -> list[int]:
        """As without tiers; the copies of the request end with the iteration."""
        self._preempted.append(work.name)
        return super().preempted(work)

    def finished(self, name: str, ids: list[int], reason: FinishReason) -> bool:
        """As without tiers. True while the blocks are the target of a load."""
        super().finished(name, ids, reason)
        work = self._works.pop(name, None)
        self._prompts.pop(name)
        self._found.pop(name, None)
        load = self.host.finished(name, 0 if work is None else work.computed)
        if load is not None:
            self._withheld[load.number] = ids
        self._ends.append((0 if work is None else work.request.end_number, name))
        if not self._steps:
            self._look_for_ends()
        return load is not None

    def _look_for_ends(self) -> None:
        """Look a moment later for ends that no step was formed behind."""
        self._calendar.at(self._calendar.now_ns + 1, self._form_empty)

    def _form_empty(self) -> None:
        """No request could go on when others ended. vLLM forms a step without requests then."""
        if self._ends and not self._steps:
            self._orders += self.host.formed([], (), [name for _, name in sorted(self._ends, key=itemgetter(0))])
            self._ends.clear()
            self._start_orders()

    def computed_tokens(self, name: str) -> int:
        """The position behind the load, or before it if it failed."""
        return self._found[name][1]

    def calm_blocks(self) -> int | None:
        """None while a request that decodes has more to offer. Else all that an iteration can change is a copy down
        whose places are given out: it ends with the iterations that are taken together, and nobody asks before."""
        offered = all(self.host.has_offered(work.name) for work in self.engine.scheduler.running)
        return ALWAYS_CALM if offered else None

    # --- copies ---

    def _start_orders(self) -> None:
        orders, self._orders = self._orders, []
        for copy in orders:
            if not copy.done:
                self._start(copy)

    def _start(self, copy: HostCopy) -> None:
        self._copies[copy.number] = copy
        route = Route.G2_G1 if copy.is_load else Route.G1_G2
        self.mover.start(StartTransfer(
            copy.number, 0, route, b"", b"", len(copy.keys), copy.number, 1,
        ))

    def submit(self, kind: type[Any], *args: Any) -> None:
        """A copy has begun or ended."""
        copy = self._copies.get(args[0])
        if copy is None or kind not in (TransferFinished, TransferFailed):
            return
        del self._copies[copy.number]
        if copy.is_load and copy.number not in self._withheld:
            if kind is TransferFailed:
                self._lose(copy, unpack_ids(args[4]))
            self.engine.wake(copy.request)
        self._end(copy)
        if copy.is_load:
            self.engine.release(copy.request, pack_ids(self._withheld.pop(copy.number, ())))

    def _lose(self, copy: HostCopy, failed: list[int]) -> None:
        """A load failed, at these of its blocks. Of several groups vLLM takes none, of one what comes before them."""
        before, after, counted = self._found[copy.request]
        arrived = before
        if failed and len(self.engine.config.groups) == 1:
            first = -(-after // self._block_tokens) - len(copy.keys)
            arrived = max(before, min(after, (first + min(failed)) * self._block_tokens))
        kept = min(counted, (arrived - before) // self._block_tokens)
        self._found[copy.request] = before, arrived, kept
        if self._works[copy.request].preempted:
            return
        self.totals.hit_blocks[G2] -= counted - kept
        self.totals.lost_blocks += counted - kept
        if self._ended is not None:
            record = self._records[copy.request]
            record.hits = record.hits[0], kept, 0, 0

    def _end_all(self, copies: Sequence[HostCopy]) -> None:
        for copy in copies:
            self._end(copy)

    def _end(self, copy: HostCopy) -> None:
        if copy.done:
            return
        self.host.ended(copy)
        route = (Route.G2_G1 if copy.is_load else Route.G1_G2).label
        self.totals.moved_blocks[route] = self.totals.moved_blocks.get(route, 0) + len(copy.keys)
        self.totals.evicted_blocks[G2] = self.host.evicted

    def name_of(self, order: StartTransfer) -> str | None:
        """The request of this load, None for a copy down."""
        copy = self._copies.get(order.operation)
        if copy is None:
            raise InternalError(f"operation {order.operation} is not known")
        return copy.request if copy.is_load else None
