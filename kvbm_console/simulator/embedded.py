"""A whole machine in one process: leader, dispatcher, simulated engine, link mover and workload on one calendar.

Law of this file: only this file knows how the parts fit together, so ``serve``, ``demo``, ``simulate`` and the tests
run the same machine.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.bytes.orders import RankPool
from kvbm_console.bytes.ranks import Ranks
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import LeaderConfig, batch_blocks, require
from kvbm_console.core.errors import InternalError, UsageError
from kvbm_console.core.ids import Note, Tier
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.stimuli import BlocksRestored, NoteReported, Stimulus, TransferFailed
from kvbm_console.dispatch import Dispatcher, start_leader
from kvbm_console.simulator.calendar import Calendar, EngineDeadlines
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.link import DEFAULT_LINKS, LinkMover, LinkSpec
from kvbm_console.simulator.multiturn import Multiturn, parse_settings
from kvbm_console.simulator.port import ContentsPort, StimulusPort
from kvbm_console.simulator.simulated import SimulatedEngine
from kvbm_console.simulator.traces import MooncakeTrace
from kvbm_console.simulator.workloads import Workload

BYTES_WAIT_S: Final = 0.5
"""A wait for workers ends after this time to look whether they live."""
SOURCE = 1
"""Index of the embedded engine; 0 is the daemon itself."""


class Rig:
    """The assembled machine. ``run`` moves virtual time; the rest is there to look at.

    Stimuli from outside (breakpoints, leases, resets) need nothing more than ``dispatcher``. The next ``run`` notices
    them and lets the engine look again.
    """

    def __init__(
        self, dispatcher: Dispatcher, calendar: Calendar, engine: SimulatedEngine, mover: LinkMover,
        workload: Workload, ranks: Ranks | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.calendar = calendar
        self.engine = engine
        self.mover = mover
        self.workload = workload
        self.ranks = ranks
        """The bytes behind the blocks, if there are any."""
        self._seen_n = dispatcher.n

    def close(self) -> None:
        """End the workers of the ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.close()

    @property
    def leader(self) -> Leader:
        """Host 0's leader."""
        return self.dispatcher.leader

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        return self.calendar.now_ns

    @property
    def next_ns(self) -> int | None:
        """When something happens next by itself, None when nothing will."""
        return self.engine.next_ns

    @property
    def done(self) -> bool:
        """True if every request has ended and nothing is to come."""
        return self.engine.done and (self.ranks is None or self.ranks.idle)

    @property
    def waits_for_bytes(self) -> bool:
        """True if time stands still until workers have answered."""
        ranks = self.ranks
        return ranks is not None and (
            self.calendar.waiting or ranks.crowded or (self.engine.done and not ranks.idle)
        )

    @property
    def only_held(self) -> bool:
        """True if time stands still because all that is left is held."""
        return self.engine.only_held

    @property
    def touched(self) -> bool:
        """True if a stimulus was submitted from outside since the last ``run``."""
        return self.dispatcher.n != self._seen_n

    def run(self, until_ns: int | None = None, wall_budget_ns: int | None = None) -> None:
        """Run up to ``until_ns`` of virtual time (None: as far as it goes), for about ``wall_budget_ns`` of the wall's.

        Raises ``InternalError`` when requests are left, nothing is to come and no hold explains it.
        """
        if self.touched:
            self.engine.nudge()
        if self.ranks is None:
            self.engine.run(until_ns, wall_budget_ns)
        else:
            if not self.ranks.crowded:
                self.engine.run(until_ns, wall_budget_ns)
            self.ranks.flush()
        self._seen_n = self.dispatcher.n
        if self.engine.only_held and not self.leader.state.holds and not self.leader.state.pipeline_closed:
            slots = self.leader.state.slots.values()
            story = tuple(f"{slot.request} is {slot.state.label}" for slot in slots)
            raise InternalError(f"the engine is stuck at {self.now_ns} ns without a hold", story)

    def run_to_end(self, until_ns: int | None = None, progress: Callable[[int], None] | None = None) -> None:
        """Run until every request has ended, only held requests are left, or ``until_ns`` of virtual time has passed.

        An endless workload needs ``until_ns``. ``progress`` is told the finished requests about ten times a second.
        """
        if self.workload.endless and until_ns is None:
            raise UsageError(f"{self.workload.name} never ends; say how many requests or how long")
        while not self.done and (self.touched or not self.only_held):
            if until_ns is not None and (self.next_ns is None or self.next_ns > until_ns):
                return
            self.run(until_ns, 100_000_000)
            if self.ranks is not None and self.waits_for_bytes:
                self.ranks.wait(BYTES_WAIT_S)
            if progress is not None:
                progress(self.engine.totals.finished)


def default_leader_config(workload: Workload, **changes: object) -> LeaderConfig:
    """The leader's configuration that goes with a workload; ``changes`` are fields that the user said."""
    sizes = workload.capacities
    base = LeaderConfig(
        block_tokens=sizes.block_tokens, g2_blocks=sizes.g2_blocks, g3_blocks=sizes.g3_blocks, offload_law="order",
        offload_link_busy="skip", offload_batch_blocks=batch_blocks(sizes.block_tokens),
    )
    return msgspec.structs.replace(base, **changes)


def default_engine_config(workload: Workload, **changes: object) -> EngineConfig:
    """The engine's configuration that goes with a workload; ``changes`` are fields that the user said."""
    sizes = workload.capacities
    base = EngineConfig(g1_blocks=sizes.g1_blocks, max_batch_tokens=sizes.batch_tokens)
    return msgspec.structs.replace(base, **changes)


def build(
    config: LeaderConfig, engine: EngineConfig, workload: Workload, *,
    publish: Callable[[Stimulus, Outcome], None] | None = None, hosts: int = 1, check: bool = False,
    audit_every: int = 50, links: Sequence[LinkSpec] = DEFAULT_LINKS, with_bytes: Path | None = None,
    warm: bool = False, compare_every: int = 1,
) -> Rig:
    """A machine from nothing: an engine and ``hosts`` leaders, which are compared as a ``Dispatcher`` says.

    ``check`` turns on the cheap invariants after every stimulus and the full audit after every ``audit_every``-th.
    """
    require(1 <= hosts <= 16, "hosts", "from 1 to 16", hosts)
    leaders = [Leader(config, check=check, audit_every=audit_every) for _ in range(hosts)]
    calendar = Calendar()
    dispatcher = Dispatcher(
        leaders[0], calendar.clock, publish=publish, more_hosts=leaders[1:], compare_every=compare_every
    )
    start_leader(dispatcher)
    return embed(dispatcher, calendar, engine, workload, links=links, with_bytes=with_bytes, warm=warm)


def embed(
    dispatcher: Dispatcher, calendar: Calendar, engine: EngineConfig, workload: Workload, *,
    links: Sequence[LinkSpec] = DEFAULT_LINKS, with_bytes: Path | None = None,
    warm: bool = False,
) -> Rig:
    """Put an engine, a mover and deadlines around a started leader whose dispatcher uses ``calendar.clock``.

    With a directory ``with_bytes`` blocks have bytes, which a worker process of each rank moves; ``Rig.close`` ends
    them. A ``warm`` machine begins with the blocks that the directory has from an earlier run.
    """
    config = dispatcher.leader.config
    ranks = None if with_bytes is None else open_ranks(with_bytes, dispatcher, engine)
    mover = LinkMover(
        calendar, dispatcher, engine.token_bytes * config.block_tokens, links=links, asynchronous=config.asynchronous
    )
    dispatcher.mover = mover
    dispatcher.engine_deadlines = EngineDeadlines(calendar, dispatcher)
    if ranks is not None and warm:
        restore(dispatcher, ranks)
    if ranks is None:
        port = StimulusPort(dispatcher.port(SOURCE))
    else:
        mover.carry(ranks, calendar)
        port = ContentsPort(dispatcher.port(SOURCE), ranks, len(dispatcher.leader.state.pools))
    simulated = SimulatedEngine(
        engine, port, calendar, workload, config.block_tokens,
        take_latency_ns=mover.take_latency_ns,
        arrivals_felt=config.prefetch != "none" and min(config.g2_blocks, config.g3_blocks) > 0,
    )
    dispatcher.engines[SOURCE] = simulated
    return Rig(dispatcher, calendar, simulated, mover, workload, ranks)


def open_ranks(directory: Path, dispatcher: Dispatcher, engine: EngineConfig) -> Ranks:
    """Running workers for every rank: of the leader's pools, and of the engine's, which is declared next."""
    config, pools = dispatcher.leader.config, dispatcher.leader.state.pools
    block_bytes = engine.token_bytes * config.block_tokens
    if not config.asynchronous:
        raise UsageError("--bytes needs --transfers async, got sync: a step cannot wait for bytes")
    if block_bytes % config.ranks:
        raise UsageError(f"--ranks must divide a block of {block_bytes} bytes, got {config.ranks}")
    ranks = Ranks(
        [
            *(RankPool(pool.info.pool, pool.info.tier, len(pool)) for pool in pools),
            RankPool(len(pools), Tier.G1, engine.g1_blocks),
        ],
        config.ranks, block_bytes // config.ranks, directory, config.block_tokens,
    )

    def lost(operation: int, epoch: int, rank: int, why: str) -> None:
        dispatcher.submit(TransferFailed, operation, epoch, rank, why, b"")

    def ended(name: str, why: str) -> None:
        dispatcher.submit(NoteReported, Note.PART_ENDED, f"{name}: {why}")

    def begun(name: str) -> None:
        dispatcher.submit(NoteReported, Note.PART_RESTARTED, name)

    ranks.lost, ranks.ended, ranks.trouble, ranks.begun = lost, ended, ended, begun
    ranks.start()
    return ranks


def restore(dispatcher: Dispatcher, ranks: Ranks) -> None:
    """Tell the leader of the blocks that the disks of all ranks have from before."""
    for pool in ranks.pools.values():
        if not pool.in_memory:
            places, hashes = ranks.found(pool.pool)
            if places:
                dispatcher.submit(BlocksRestored, pool.pool, pack_ids(places), pack_hashes(hashes))


def parse_workload(text: str, limit: int | None = None) -> Workload:
    """The workload named ``mooncake:FILE`` or ``multiturn[:key=value,...]``; ``limit`` is the most requests.

    Raises ``UsageError`` with a sentence that names the mistake.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}")
    kind, _, rest = text.partition(":")
    if kind == "mooncake":
        if not rest:
            raise UsageError("--workload mooncake: must name a file, as in mooncake:trace.jsonl")
        return MooncakeTrace(Path(rest), limit)
    if kind == "multiturn":
        settings = parse_settings(rest)
        return Multiturn(settings if limit is None else msgspec.structs.replace(settings, requests=limit))
    raise UsageError(f"--workload must be mooncake:FILE or multiturn[:key=value,...], got {text!r}")
