"""A recording as a workload: the requests that an engine served, and the machine that served them.

A recording of slots has all that a replay needs: arrivals, prompts as hashes, lengths of answers, sessions, priorities,
further sequences, and clients that went away. A recording of an event stream names blocks and no request. Each chain of
blocks that the engine stored is then a request, whose prompt begins with the blocks that the chain continues. Blocks
that follow within ``TURN_NS`` are its answer. Such a request was a miss: hits of the engine are not in its stream.

The machine of a simulated run is in the recording. Of a real engine it has capacities, tokens and requests of an
iteration, and step times as ``calibrate`` finds them. Its lower tiers copy each full block down and evict the block
that was not used for the longest time, as vLLM and LMCache do. ``notes`` name all that is not in the recording.

Law of this file: a recording of the simulated engine, whole and without a word of a person, is replayed event for event
by its machine.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.ids import Authority, FinishReason, Measure, ReleaseReason, Route, SlotState, Tier
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.tiers import window_blocks
from kvbm_console.planning.attention import TOKENS_MAX, AttentionWindow, GroupWindow, LayerGroups
from kvbm_console.planning.measured import Equation, Measured, of_recording, origins_of
from kvbm_console.planning.options import BLOCK_TOKENS, Geometry
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.device_pool import HASH_BITS
from kvbm_console.simulator.hashing import generated_hashes
from kvbm_console.simulator.link import Fault, LinkMover
from kvbm_console.simulator.machine import SimulatedMachine
from kvbm_console.simulator.traces import TOKENS_MAX as LONGEST
from kvbm_console.simulator.workloads import Capacities, Request

TURN_NS: Final = 1_000_000_000
"""Blocks of a stream that continue a chain this soon belong to the same request, and later ones to its next turn."""
DEVICE_BLOCKS: Final = 16_384
"""Blocks of a tier whose capacity nobody told."""
ANCESTORS_MAX: Final = 2**16
"""Blocks of a prompt of a stream, a million tokens; a longer chain is a circle of damaged parents."""
IDLE_FACTOR: Final = 1.5
"""An engine was idle if the next step began so many times later than the step model says, and no request went on."""
OPTION: Final = re.compile(r"(.+),(engine|run)=([^,]+)")


class RecordedCopy(msgspec.Struct):
    """A copy of a recording."""

    route: Route
    blocks: int
    ordered: int
    """Steps that were formed before it was ordered."""
    fault: Fault | None = None
    ended: int | None = None
    """Steps that were formed before the last report of its end."""
    link_ns: int | None = None
    """Its time by the link of the recorded machine."""
    lasts_ns: int | None = None
    """Its time in a replay of a real engine, None if the recording does not tell it."""


CopyName = str | tuple[int, ...]


class RecordedLoad(msgspec.Struct, frozen=True):
    """The content of a recording for a replay. ``engine`` is the source of the slots."""

    name: str
    block_tokens: int
    machine: SimulatedMachine
    exact: bool
    """True if the machine is the recorded one, and not an estimate."""
    requests: list[Request]
    prompt_blocks: int
    hit_blocks: tuple[int, int, int, int]
    """Full prompt blocks of the recorded requests at their first admissions, and those found in G1 to G4."""
    notes: list[str]
    copies: dict[tuple[CopyName, int], RecordedCopy] = {}
    """Copies that failed or whose time is known, by name and by number from 0 in their order. The name of a load is its
    request, the name of a copy down are its blocks. A fault is one that the request survived."""

    @property
    def hit_rate(self) -> float | None:
        """The hit rate that was measured, None for a stream."""
        return sum(self.hit_blocks) / self.prompt_blocks if self.prompt_blocks else None

    def option_fields(self) -> dict[str, Any]:
        """The fields of ``SimulateOptions`` that describe the recorded machine."""
        leader, engine = self.machine.leader, self.machine.engine
        return {
            "machine": self.machine, "total_kv_blocks": engine.g1_blocks, "block_size": self.block_tokens,
            "kv_cpu_blocks": leader.g2_blocks, "kv_disk_blocks": leader.g3_blocks,
            "kv_geometry": Geometry.of_token_bytes(engine.token_bytes),
            "kv_offload_threshold": leader.offload_threshold, "kv_offload_law": leader.offload_law,
            "kv_offload_prompt_only": leader.offload_prompt_only,
            "kv_offload_link_busy": leader.offload_link_busy,
            "transfers": "async" if leader.asynchronous else "sync", "policy": leader.eviction,
            "prefetch": leader.prefetch, "prefetch_stop": leader.prefetch_stop,
            "prefetch_timeout_s": leader.prefetch_timeout_ns / 1e9, "thrash_window": leader.thrash_window_ns,
            "step_base": engine.step_base_ns, "step_prefill_token": engine.prefill_token_ns,
            "step_decode_request": engine.decode_request_ns, "max_num_batched_tokens": engine.max_batch_tokens,
            "max_num_seqs": engine.max_running, "max_waiting": engine.max_waiting,
        }


class RecordedWorkload:
    """A ``Workload`` of the requests of a recording, at their times; ``limit`` is the most requests."""

    endless = False

    def __init__(self, text: str, limit: int | None = None) -> None:
        self.run = read_run(text)
        self.name = f"recording:{text}"
        self.note = "; ".join(self.run.notes) or None
        self._requests = self.run.requests[:limit]
        self._together = 1
        leader, engine = self.run.machine.leader, self.run.machine.engine
        self.capacities = Capacities(
            self.run.block_tokens, engine.g1_blocks, leader.g2_blocks, leader.g3_blocks, engine.max_batch_tokens
        )

    def __len__(self) -> int:
        """Requests."""
        return len(self._requests)

    def begin(self, block_tokens: int) -> None:
        """Take blocks of a multiple of the recorded size."""
        size = self.run.block_tokens
        if block_tokens % size:
            raise UsageError(
                f"--block-size must be a multiple of {size}, the block of {self.name}, got {block_tokens}"
            )
        self._together = block_tokens // size

    def arrivals(self) -> Iterator[Request]:
        """All requests, by their times."""
        return iter(self._requests) if self._together == 1 else map(self._joined, self._requests)

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """None: each request has its own time."""
        return None

    def follow(self, mover: LinkMover, leader: Decider) -> None:
        """Have the copies of this mover last and fail as the recorded ones did; ``leader`` orders them."""
        def loader(order: StartTransfer) -> str | None:
            state = leader.state
            slot = state.candidates[state.operations[order.operation].candidate].slot
            return None if slot is None else state.slots[slot].request

        self.follow_loads(mover, loader)

    def follow_loads(self, mover: LinkMover, loader: Callable[[StartTransfer], str | None]) -> None:
        """As ``follow``; ``loader`` names the request of a load.

        A copy lasts as long as the recorded one if it has as many blocks and its link would need the same time.
        """
        copies, orders = self.run.copies, dict[CopyName, list[int]]()

        def recorded(order: StartTransfer) -> RecordedCopy | None:
            name = loader(order) if order.route.is_load else tuple(sorted(unpack_hashes(order.hashes)))
            if name is None:
                return None
            same = orders.setdefault(name, [])
            if order.operation not in same:
                same.append(order.operation)
            return copies.get((name, same.index(order.operation)))

        def lasts_ns(order: StartTransfer, link_ns: int) -> int | None:
            copy = recorded(order)
            if copy is None or (copy.blocks, copy.link_ns) != (order.blocks * self._together, link_ns):
                return None
            return copy.lasts_ns

        def fault(order: StartTransfer) -> Fault | None:
            copy = recorded(order)
            found = None if copy is None else copy.fault
            if found is None or not found.blocks:
                return found
            # A load of another machine can be shorter.
            blocks = {min(block // self._together, order.blocks - 1) for block in found.blocks}
            return msgspec.structs.replace(found, blocks=tuple(sorted(blocks)))

        if copies:
            mover.times, mover.faults = lasts_ns, fault

    def _joined(self, request: Request) -> Request:
        """The request in larger blocks; the hash of a block is that of its last part."""
        many, first = self._together, len(request.hashes)

        def joined(output: tuple[int, ...]) -> tuple[int, ...]:
            return (request.hashes + output)[many - 1 :: many][first // many :]

        return msgspec.structs.replace(
            request, hashes=request.hashes[many - 1 :: many], output_hashes=joined(request.output_hashes),
            clone_hashes=tuple(map(joined, request.clone_hashes)),
        )


def read_run(text: str) -> RecordedLoad:
    """The run that ``PATH[,engine=N][,run=ID]`` names. Raises ``UsageError`` and ``RecordingError``."""
    recording, path, engine = _opened(text)
    return _read(text, path, recording.incarnation, engine, recording.last_seq)


def recording_of(text: str) -> Recording:
    """The recording of that run."""
    return _opened(text)[0]


def _opened(text: str) -> tuple[Recording, Path, int | None]:
    """The recording that a text names, its path, and the engine."""
    if not text:
        raise UsageError("--trace recording: must name a file, as in recording:run/")
    chosen: dict[str, str] = {}
    rest = text
    while (found := OPTION.fullmatch(rest)) is not None:
        rest = found[1]
        chosen[found[2]] = found[3]
    engine = chosen.get("engine")
    if engine is not None and not (engine.isascii() and engine.isdigit()):
        raise UsageError(f"--trace recording: engine must be a number, got {engine!r}")
    path = Path(rest)
    return Recording.open(path, chosen.get("run")), path, None if engine is None else int(engine)


@lru_cache(maxsize=4)
def _read(text: str, path: Path, incarnation: str, engine: int | None, last_seq: int) -> RecordedLoad:
    """The run; ``last_seq`` tells a recording that has grown from the same one before."""
    recording = Recording.open(path, incarnation)
    reading = _Reading()
    expected: int | None = None
    for batch in recording.events():
        for event in batch:
            reading.whole &= expected in (None, event.seq)
            expected = event.seq + 1
            reading.take(event)
    return _Run(text, recording, reading, origins_of(recording)).of_engine(engine)


# --- reading ---


class _Life:
    """A slot, or a chain of a stream."""

    __slots__ = (
        "anchor", "clones", "computed", "decodes", "ended", "event", "filled", "full", "hashes", "known", "last_ns",
        "loaded", "loads", "opened_ns", "parent", "passed", "preempted", "prompt", "went_on",
    )

    def __init__(self, event: Any, hashes: tuple[int, ...], prompt: int) -> None:
        self.event = event
        self.opened_ns: int = event.at_ns
        self.last_ns: int = event.at_ns
        self.hashes = hashes
        self.known = set(hashes)
        self.prompt = prompt
        self.filled: dict[int, None] = {}
        """Hashes of blocks behind the prompt, in their order."""
        self.computed = 0
        self.full = 0
        """Leading blocks that are full."""
        self.anchor = 0, 0
        """Computed tokens, and the iteration that computed them; see ``position``."""
        self.decodes = False
        self.passed = 0
        """Leading blocks that its attention window has passed."""
        self.preempted = False
        self.ended: ev.SlotMoved | None = None
        self.loaded = False
        """True if blocks were loaded for it at its last admission; a group beside the first has them later."""
        self.went_on = False
        """True if it lost hits: other engines end a request whose load fails."""
        self.clones: list[_Life] = []
        self.parent: _Life | None = None
        self.loads: list[RecordedCopy] = []
        """Its loads in their order."""

    @property
    def chain(self) -> list[int]:
        """The hashes of its blocks."""
        return [*self.hashes, *self.filled]

    def position(self, iteration: int) -> int:
        """Tokens that are computed after an iteration: a decoding request adds one in each."""
        return self.anchor[0] + (iteration - self.anchor[1] if self.decodes else 0)


class _Told:
    """The limits that engines told, and the ends of requests."""

    def __init__(self) -> None:
        self.numbers: dict[int, dict[Measure, int]] = {}
        """Source to the numbers that it told last."""
        self.ends: dict[str, int] = {}
        """Requests that ended before the same step as others, to their number in the order of all ends."""
        self.passed: dict[int, int] = {}
        """Slot to the iteration behind which its window passed a block last."""
        self.passes_at_end = False
        """True if the window of a request passed a block when it ended."""
        self.seats: Counter[int] = Counter()
        """Running requests to the iterations in which others waited although a quarter of the device was free, and the
        prompt of the first of them fitted."""


class _Reading:
    """The fold of a recording."""

    def __init__(self) -> None:
        self.lives: list[_Life] = []
        self.pools: dict[int, ev.PoolKnown] = {}
        self.whole = True
        self.people = 0
        """Holds, resets, drains and freezes."""
        self.unknown_slots = 0
        self.prompt_blocks: dict[int, int] = {}
        self.hits: dict[int, list[int]] = {}
        """Source to its prompt blocks at first admissions, and to the hits in each tier."""
        self.found: set[tuple[int, Tier]] = set()
        """Sources, each with a tier in which an admission found a block."""
        self.below: set[int] = set()
        """Blocks that a stream said to be below the device."""
        self.copied: tuple[int, int] = (0, 0)
        """Blocks and bytes of copies whose size is known."""
        self.peaks: dict[int, int] = {}
        """Pool of a stream to the most blocks that it had at once."""
        self.evicting: set[int] = set()
        """Pools of streams that gave blocks up."""
        self.windows: dict[int, AttentionWindow] = {}
        """Device pool to the window of its requests."""
        self.iteration = 0
        self.steps = 0
        """Events that told an iteration."""
        self.first_place_used: set[int] = set()
        """Device pools whose place 0 was given out; vLLM never does that."""
        self.early = False
        """True if the engine forms a step before it knows the result of the last one: the request that ends there is
        then left out of a step."""
        self.named_early = False
        """True if blocks were full before the iteration began that computes them."""
        self._stood_back = self._preempted_at_work = 0
        """Requests that were left out and went on, and those that were preempted right after a step."""
        self.groups = LayerGroups()
        self._admitted: list[tuple[_Life, int]] = []
        """Requests that were admitted since the last step, with the blocks that the engine found. None has a load: its
        window is then over the loaded blocks, and those that the engine found before may be gone."""
        self._last_place: dict[int, int] = {}
        """Device pool to the highest place that its requests had."""
        self.told = _Told()
        self._waiting: dict[int, _Life] = {}
        """Slots without blocks, the next to be admitted first."""
        self._devices: dict[int, int] = {}
        """Source to the device pool whose places its requests hold."""
        self._held: Counter[int] = Counter()
        """Device blocks to their holders."""
        self._resident: dict[int, set[int]] = {}
        """Pool of a stream to its blocks. Below several groups of layers those of a hash differ above its bits."""
        self._live: dict[int, _Life] = {}
        self.stores: list[tuple[int, tuple[int, ...], RecordedCopy]] = []
        """Copies down, each with its source and its blocks."""
        self._planned: dict[int, tuple[_Life | None, ev.CandidatePlanned]] = {}
        """Candidate to its slot and plan, until it becomes an operation."""
        self._copies: dict[int, RecordedCopy] = {}
        """Operation to its copy."""
        self._parent: dict[int, int] = {}
        """Block of a stream to the block that it continues."""
        self._tip: dict[int, _Life] = {}
        """Last block of a chain to the chain."""

    @property
    def prompts_only(self) -> bool:
        """True if blocks of prompts went below the device, and none of the blocks that only answers had."""
        prompts = set[int]().union(*(life.hashes for life in self.lives))
        answers = set[int]().union(*(life.filled for life in self.lives)) - prompts
        return bool(self.below and answers) and self.below.isdisjoint(answers)

    def keeps_prompts(self, pool: int) -> bool:
        """True if a group of layers cached few of the blocks that only answers had: it keeps the ends of prompts alone,
        and of answers where a preempted request goes on."""
        prompts = set[int]().union(*(life.hashes for life in self.lives))
        answers = set[int]().union(*(life.filled for life in self.lives)) - prompts
        return 2 * len(answers & self.groups.windows[pool].stored) < len(answers)

    def windows_only(self, window: int, size: int) -> bool:
        """True if all blocks that went below the device lie in such a window at the end of a prompt."""
        if not window or not self.below:
            return False
        needed = window_blocks(window, size)
        ends = [(max(0, life.prompt - 1) // size, life.hashes) for life in self.lives]
        return self.below <= set[int]().union(*(hashes[max(0, end - needed) : end] for end, hashes in ends))

    @property
    def fenced(self) -> bool:
        """True if requests wait for the blocks of others, and none is preempted while a step uses its blocks."""
        return self._stood_back > 0 and not self._preempted_at_work

    def take(self, event: ev.Event) -> None:
        """Fold the next event."""
        look = _LOOK.get(type(event))
        if look is not None:
            look(self, event)

    def opened(self, event: ev.SlotOpened) -> None:
        life = self._live[event.slot] = _Life(event, tuple(unpack_hashes(event.hashes)), event.prompt_tokens)
        self.lives.append(life)
        self._waiting[event.slot] = life

    def cloned(self, event: ev.SlotCloned) -> None:
        parent = self._live.get(event.parent)
        if parent is None:
            return
        life = self._live[event.slot] = _Life(event, parent.hashes, parent.prompt)
        life.parent = parent
        life.filled = dict(islice(parent.filled.items(), len(parent.filled)))
        life.anchor, life.decodes = parent.anchor, parent.decodes
        life.passed, life.full = parent.passed, parent.full
        parent.clones.append(life)

    def moved(self, event: ev.SlotMoved) -> None:
        life = self._live.get(event.slot)
        if life is None:
            self.unknown_slots += event.reason is not None
            return
        life.computed = max(life.computed, event.computed_tokens)
        life.anchor, life.decodes = (event.computed_tokens, self.iteration), event.new is SlotState.DECODING
        left_out = event.old in (SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE)
        self.early |= left_out and event.reason is FinishReason.LENGTH
        self._stood_back += left_out and event.new in (SlotState.PREFILLING, SlotState.DECODING)
        if event.new is SlotState.PREEMPTED:
            self._preempted_at_work += not left_out
            life.passed, life.preempted = 0, True
            self._waiting = {event.slot: life, **self._waiting}
        if event.reason is not None and life.ended is None:
            life.ended = event

    def closed(self, event: ev.SlotClosed) -> None:
        self._live.pop(event.slot, None)
        self._waiting.pop(event.slot, None)

    def blocks_filled(self, event: ev.BlocksFilled) -> None:
        hashes = iter(unpack_hashes(event.hashes))
        for slot, count in zip(event.slots, event.counts, strict=True):
            life = self._live.get(slot)
            for key in islice(hashes, count):
                if life is not None and key not in life.known:
                    life.filled[key] = None
            if life is not None and not life.went_on:
                life.full += count
                size = self.pools[event.pool].block_tokens
                self.named_early |= life.full * size > life.position(self.iteration)

    def scored(self, event: ev.PrefixScored) -> None:
        life = self._live.get(event.slot)
        source = -1 if life is None else _source_of(life)
        self.found.update((source, tier) for tier in Tier if event.hits[tier - 1])
        if life is not None and life.preempted:
            return
        self.prompt_blocks[source] = self.prompt_blocks.get(source, 0) + event.prompt_blocks
        hits = self.hits.setdefault(source, [0, 0, 0, 0])
        for at, blocks in enumerate(event.hits):
            hits[at] += blocks

    def lost(self, event: ev.HitsLost) -> None:
        life = self._live.get(event.slot)
        if life is not None:
            if not life.preempted:
                self.hits[_source_of(life)][event.tier - 1] -= event.blocks
            life.went_on = True

    def pool(self, event: ev.PoolKnown) -> None:
        self.pools[event.pool] = event
        if event.authority is Authority.STREAM and event.tier is Tier.G1 and any(
            other.source == event.source and other.authority in (Authority.ENGINE, Authority.OBSERVED)
            for other in self.pools.values()
        ):
            self.groups.found(
                event.pool, source=event.source, group=event.group, block_tokens=event.block_tokens
            )

    def numbers(self, event: ev.EngineMeasured) -> None:
        if event.measures:
            self.told.numbers[event.source] = dict(zip(event.measures, event.values, strict=True))

    def copy_begun(self, event: ev.OperationStarted) -> None:
        copy = self._copies.get(event.operation)
        if copy is not None and event.blocks:
            copy.blocks = event.blocks  # a load of several groups of layers names the blocks of one
        if event.size_bytes is not None and event.blocks:
            self.copied = (self.copied[0] + event.blocks, self.copied[1] + event.size_bytes)

    def copy_planned(self, event: ev.CandidatePlanned) -> None:
        life = None if event.slot is None else self._live.get(event.slot)
        if life is not None or not event.route.is_load:
            self._planned[event.candidate] = life, event

    def copy_promoted(self, event: ev.CandidatePromoted) -> None:
        planned = self._planned.pop(event.candidate, None)
        if planned is None:
            return
        life, plan = planned
        hashes = tuple(unpack_hashes(plan.hashes))
        copy = self._copies[event.operation] = RecordedCopy(plan.route, len(hashes), self.steps)
        if not plan.route.is_load:
            self.stores.append((self.pools[event.source_pool].source, tuple(sorted(hashes)), copy))
            owner = self._live.get(plan.for_slot) if self.groups.windows and plan.for_slot is not None else None
            if owner is not None:
                self.groups.copied(self.pools[event.source_pool].source, owner.prompt, owner.chain, hashes)
        elif life is not None:
            life.loads.append(copy)

    def copy_reported(self, event: ev.OperationReported) -> None:
        copy = self._copies.get(event.operation)
        if copy is None:
            return
        copy.ended = self.steps
        if not event.ok and copy.route.is_load:
            before = copy.fault or Fault(ranks=(), error=event.error)
            blocks = () if not event.failed else (*before.blocks, *unpack_ids(event.failed))
            copy.fault = Fault((*(before.ranks or ()), event.rank), blocks, before.error)

    def person(self, event: ev.Event) -> None:
        self.people += 1

    def device_blocks(self, pool: ev.PoolKnown) -> int:
        """Places of a device: its capacity, else up to the highest place that a request had."""
        if pool.capacity_blocks:
            # A tap before protocol 1.12 declares vLLM's null block, which no request uses, as a place.
            null = pool.authority is Authority.OBSERVED and not pool.first_place
            return pool.capacity_blocks - (null and pool.pool not in self.first_place_used)
        first = pool.first_place or (pool.pool not in self.first_place_used)
        return self._last_place.get(pool.pool, first - 1) - first + 1

    def assigned(self, event: ev.DeviceBlocksAssigned) -> None:
        ids = unpack_ids(event.ids)
        self._held.update(ids)
        self._last_place[event.pool] = max([self._last_place.get(event.pool, 0), *ids])
        for slot in event.slots:
            life = self._waiting.pop(slot, None)
            if life is not None:
                life.full = event.reused + event.external_tokens // self.pools[event.pool].block_tokens
            if life is not None and self.groups.windows:
                life.loaded = event.external_tokens > 0
                self._admitted += [] if life.loaded else [(life, event.reused)]
        if event.slots[0] in self._live:
            self._devices[_source_of(self._live[event.slots[0]])] = event.pool
        if 0 in ids:
            self.first_place_used.add(event.pool)
        if event.passed_blocks or event.reused or event.external_tokens:
            self._admitted_behind(event)

    def _admitted_behind(self, event: ev.DeviceBlocksAssigned) -> None:
        """A request goes on behind a prefix that was found."""
        life, window = self._live.get(event.slots[0]), self._window(event.pool)
        if life is not None and window is not None:
            life.anchor = event.reused * window.block_tokens + event.external_tokens, self.iteration
            life.passed = event.passed_blocks
            window.found(life.anchor[0], life.passed)

    def _window(self, number: int) -> AttentionWindow | None:
        pool = self.pools.get(number)
        if pool is None:
            return None
        window = self.windows.setdefault(number, AttentionWindow())
        window.block_tokens = pool.block_tokens
        return window

    def _window_moved(self, life: _Life, blocks: int) -> None:
        """The window of a request has passed further blocks, before an iteration that it takes part in."""
        window = self._window(self._devices.get(_source_of(life), 0))
        if window is None:
            return
        at, before = life.position(self.iteration), life.passed
        life.passed += blocks
        if life.decodes and self.iteration >= life.anchor[1] + 2:  # the steps before this one decoded, too
            window.decoded(at, before, life.passed)
        else:
            window.moved(at, life.passed)

    def released(self, event: ev.DeviceBlocksReleased) -> None:
        life = self._live.get(event.slot)
        if event.why is ReleaseReason.PAST_WINDOW and life is not None:
            self._window_moved(life, len(unpack_ids(event.ids)))
            self.told.passed[event.slot] = self.iteration
        elif event.why is ReleaseReason.FINISHED:
            self.told.passes_at_end |= self.told.passed.pop(event.slot, -1) == self.iteration
        for block in unpack_ids(event.ids):
            self._held[block] -= 1
            if self._held[block] <= 0:
                del self._held[block]

    def evicted(self, event: ev.BlocksEvicted) -> None:
        self.evicting.add(event.pool)

    def _look_at_groups(self) -> None:
        """A step was formed, and all that it changed in the groups of layers was told before."""
        for number, window in self.groups.windows.items():
            source = self.pools[number].source
            for life, reused in self._admitted:
                if _source_of(life) == source:
                    window.found(life.chain[:reused])
            for slot, life in self._live.items():
                runs = life.ended is None and slot not in self._waiting and not life.loaded
                if runs and _source_of(life) == source:
                    self._gone_of_group(window, life)
            window.gone.clear()
        self._admitted.clear()

    def _gone_of_group(self, window: GroupWindow, life: _Life) -> None:
        """A request runs, and blocks of a group of layers are gone."""
        if window.gone.isdisjoint(life.known) and window.gone.isdisjoint(life.filled):
            return
        computed = life.position(self.iteration)
        for at, key in enumerate(life.chain[: computed // window.block_tokens]):
            if key in window.gone:
                window.passed(computed, at)

    def advanced(self, event: ev.IterationAdvanced) -> None:
        if self.groups.windows:
            self._look_at_groups()
        self.iteration = event.iteration
        self.steps += 1
        for name in event.ended:
            self.told.ends[name] = len(self.told.ends) + 1
        for number, position in zip(event.slots, event.positions, strict=True):
            life = self._live.get(number)
            if life is not None:
                life.anchor = position, event.iteration
        if event.waiting:
            further = self.groups.windows
            devices = [pool for pool in self.pools.values() if pool.tier is Tier.G1 and pool.pool not in further]
            blocks, groups = sum(map(self.device_blocks, devices)), 1 + len(further) // max(1, len(devices))
            next_one = next(iter(self._waiting.values()), None)
            held, prompt = groups * len(self._held), groups * (0 if next_one is None else len(next_one.hashes) + 1)
            self.told.seats[event.running] += 4 * held <= 3 * blocks and held + prompt <= blocks

    def seen(self, event: ev.BlocksSeen) -> None:
        """Sizes of the pools of a stream, and the chains of the device: what lies below was on the device before."""
        pool = self.pools.get(event.pool)
        if pool is None or pool.authority is not Authority.STREAM:
            return
        if event.pool in self.groups.windows:
            self.groups.windows[event.pool].changed(
                unpack_hashes(event.stored), unpack_hashes(event.removed), cleared=event.cleared
            )
            return
        resident = self._resident.setdefault(event.pool, set())
        if event.removed:
            self.evicting.add(event.pool)
        several = self.groups.number(pool.source) > 0
        for key in unpack_hashes(event.removed):
            while several and key + (1 << HASH_BITS) in resident:
                key += 1 << HASH_BITS
            resident.discard(key)
        if event.cleared:
            resident.clear()
        for key in unpack_hashes(event.stored):
            while several and key in resident:
                key += 1 << HASH_BITS
            resident.add(key)
        self.peaks[event.pool] = max(self.peaks.get(event.pool, 0), len(resident))
        if pool.tier is not Tier.G1:
            self.below.update(unpack_hashes(event.stored))
            return
        hashes = iter(unpack_hashes(event.stored))
        for count, parent in zip(unpack_ids(event.chains), unpack_hashes(event.parents), strict=True):
            self._chain(event, pool, list(islice(hashes, count)), parent)

    def _chain(self, event: ev.BlocksSeen, pool: ev.PoolKnown, keys: list[int], parent: int) -> None:
        if not keys:
            return
        for before, key in zip([parent, *keys], keys, strict=False):
            self._parent[key] = before
        life = self._tip.pop(parent, None)
        if life is not None and event.at_ns - life.last_ns <= TURN_NS:
            life.filled |= dict.fromkeys(keys)
            life.last_ns = event.at_ns
        else:
            prompt = [*self._ancestors(parent), *keys]
            life = _Life(event, tuple(prompt), len(prompt) * pool.block_tokens + 1)
            self.lives.append(life)
        self._tip[keys[-1]] = life

    def _ancestors(self, key: int) -> list[int]:
        found: dict[int, None] = {}
        while key and key not in found and len(found) < ANCESTORS_MAX:
            found[key] = None
            key = self._parent.get(key, 0)
        return list(found)[::-1]


_LOOK: Final[dict[type[ev.Event], Any]] = {
    ev.SlotOpened: _Reading.opened, ev.SlotCloned: _Reading.cloned, ev.SlotMoved: _Reading.moved,
    ev.SlotClosed: _Reading.closed, ev.BlocksFilled: _Reading.blocks_filled,
    ev.DeviceBlocksAssigned: _Reading.assigned, ev.DeviceBlocksReleased: _Reading.released,
    ev.IterationAdvanced: _Reading.advanced, ev.PrefixScored: _Reading.scored, ev.HitsLost: _Reading.lost,
    ev.PoolKnown: _Reading.pool, ev.EngineMeasured: _Reading.numbers, ev.OperationStarted: _Reading.copy_begun,
    ev.CandidatePlanned: _Reading.copy_planned, ev.CandidatePromoted: _Reading.copy_promoted,
    ev.OperationReported: _Reading.copy_reported, ev.SlotHeld: _Reading.person,
    ev.Frozen: _Reading.person, ev.ResetBegun: _Reading.person, ev.DrainBegun: _Reading.person,
    ev.BlocksSeen: _Reading.seen, ev.BlocksEvicted: _Reading.evicted,
}


def _source_of(life: _Life) -> int:
    while life.parent is not None:
        life = life.parent
    return life.event.source if isinstance(life.event, ev.SlotOpened) else 0


# --- requests and machine ---


class _Run:
    """The requests of an engine of a recording, and its machine."""

    def __init__(self, text: str, recording: Recording, reading: _Reading, times: dict[int, int]) -> None:
        self.text = text
        self.recording = recording
        self.reading = reading
        self.times = times
        self.notes: list[str] = []
        self._pace: Callable[[int], int] = int

    @cached_property
    def measured(self) -> Measured:
        """The steps of a real engine."""
        return of_recording(self.recording)

    def of_engine(self, engine: int | None) -> RecordedLoad:
        """The run of this engine; None stands for the only one with requests."""
        engine = self._chosen(engine)
        lives = [life for life in self.reading.lives if _engine_of(life, self.reading.pools) == engine]
        if not lives:
            raise UsageError(f"--trace recording:{self.text} has no request and no stored block, so nothing to replay")
        devices = [
            pool for pool in self.reading.pools.values() if pool.tier is Tier.G1 and pool.source == engine
        ]
        about = self.recording.segments[0].about
        machine = SimulatedMachine.of_labels(about.config, about.labels)
        exact = machine is not None
        if machine is None:
            machine = self._estimated(engine, devices)
        size = devices[0].block_tokens if devices else machine.leader.block_tokens
        whole = exact and self.recording.first_seq == 0
        begin_ns = 0 if whole else min(self._at(life) for life in lives)
        if not exact:
            self._pace = paced(self.measured, machine.engine, begin_ns)
        else:
            self._pace = lambda at_ns: at_ns - begin_ns
        lives = self._without_endless(lives, size, exact=exact)
        requests = [self._request(life, at, size, machine, exact=exact) for at, life in enumerate(lives)]
        if not exact:
            requests.sort(key=lambda request: request.arrival_ns)
        self._note(devices, lives)
        hits = self.reading.hits.get(engine, [0, 0, 0, 0])
        return RecordedLoad(
            f"recording:{self.text}", size, machine, exact, requests, self.reading.prompt_blocks.get(engine, 0),
            (hits[0], hits[1], hits[2], hits[3]), self.notes, self._copies(engine, lives, machine, exact=exact),
        )

    def _without_endless(self, lives: list[_Life], size: int, *, exact: bool) -> list[_Life]:
        """An engine may tell any length, and a replay has a hash for every block."""
        found = [life for life in lives if life.prompt + self._length(life, size, exact=exact)[0] <= LONGEST]
        if len(found) < len(lives):
            self.notes.append(
                f"requests of more than {LONGEST:,} tokens are left out, {len(lives) - len(found)} of {len(lives)}"
            )
        if not found:
            raise UsageError(
                f"--trace recording:{self.text} must have a request of at most {LONGEST:,} tokens, but all have more"
            )
        return found

    def _copies(
        self, engine: int, lives: list[_Life], machine: SimulatedMachine, *, exact: bool
    ) -> dict[tuple[CopyName, int], RecordedCopy]:
        """See ``RecordedLoad.copies``. The links of a simulated machine tell all times."""
        named: list[tuple[CopyName, RecordedCopy]] = []
        for life in lives:
            if isinstance(life.event, ev.SlotOpened):
                for copy in life.loads:
                    copy.fault = copy.fault if life.went_on else None
                    named.append((life.event.request, copy))
        if not exact:
            named += [(blocks, copy) for source, blocks, copy in self.reading.stores if source == engine]
            for _, copy in named:
                self._time(copy, machine)
        counts, copies = Counter[CopyName](), dict[tuple[CopyName, int], RecordedCopy]()
        for name, copy in named:
            if copy.fault is not None or copy.lasts_ns is not None:
                copies[name, counts[name]] = copy
            counts[name] += 1
        return copies

    def _time(self, copy: RecordedCopy, machine: SimulatedMachine) -> None:
        """Have a copy end in the middle of the step in which the engine saw its end.

        A replay orders a load before it forms a step, and a copy down when the step has ended.
        """
        begun, first = self.measured.begun_ns, copy.ordered + (not copy.route.is_load)
        link = next((link for link in machine.links if copy.route in link.routes), None)
        if link is not None and copy.ended is not None and first < copy.ended < len(begun):
            ends_ns = (begun[copy.ended - 1] + begun[copy.ended]) / 2
            copy.lasts_ns = self._pace(round(ends_ns)) - self._pace(round(begun[first]))
            copy.link_ns = link.copy_ns(copy.blocks * machine.leader.block_tokens * machine.engine.token_bytes)

    def _chosen(self, engine: int | None) -> int:
        engines = sorted({_engine_of(life, self.reading.pools) for life in self.reading.lives})
        if engine is None and len(engines) <= 1:
            return engines[0] if engines else 0
        if engine not in engines:
            known = ", ".join(map(str, engines)) or "none"
            got = "none named" if engine is None else str(engine)
            raise UsageError(
                f"--trace recording:{self.text} must name one of the engines {known} by ,engine=N, got {got}"
            )
        return engine

    def _at(self, life: _Life) -> int:
        return self.times.get(life.event.cause, life.opened_ns)

    def _request(
        self, life: _Life, at: int, size: int, machine: SimulatedMachine, *, exact: bool
    ) -> Request:
        output, abort_ns = self._length(life, size, exact=exact)
        own = (life.prompt + output) // size - len(life.hashes)
        opened = life.event if isinstance(life.event, ev.SlotOpened) else None
        answer = _padded(life, own, at)
        return Request(
            request=opened.request if opened is not None else f"chain-{at:06d}",
            arrival_ns=self._pace(self._at(life)), hashes=life.hashes,
            output_hashes=answer, prompt_tokens=life.prompt, output_tokens=output,
            session=None if opened is None else opened.session, priority=0 if opened is None else opened.priority,
            clone_hashes=tuple(
                _padded(clone, own, at + (index << 40)) for index, clone in enumerate(life.clones, start=1)
            ) or (answer,) * self._never(life, machine, size),
            abort_ns=abort_ns, end_number=0 if opened is None else self.reading.told.ends.get(opened.request, 0),
        )

    def _never(self, life: _Life, machine: SimulatedMachine, size: int) -> int:
        """As many clones as there are seats, for a request that was too large for its clones alone: nobody told how
        many it had."""
        if life.ended is None or life.ended.reason is not FinishReason.TOO_LARGE:
            return 0
        longest = machine.engine.most_held(life.prompt + life.event.output_limit - 1, size)
        return machine.engine.max_running if longest <= machine.engine.g1_blocks else 0

    def _length(self, life: _Life, size: int, *, exact: bool) -> tuple[int, int | None]:
        """Tokens of the answer, and when the client went away."""
        if not isinstance(life.event, ev.SlotOpened):
            return 1 + len(life.filled) * size, None
        limit, ended = life.event.output_limit, life.ended
        if not exact:
            limit = max(1, limit)  # an engine samples a token behind each prompt, whatever it tells of the limit
        computed = max(life.computed, (len(life.hashes) + len(life.filled)) * size)
        sampled = max(1, computed - life.prompt + 1)
        if ended is None:
            return (limit if exact else sampled), None
        if ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
            return max(1, ended.computed_tokens - life.prompt + 1), None
        if ended.reason is FinishReason.TOO_LARGE:
            return limit, None
        # One token more, because a request with its last token would end with the results of a step, before the abort.
        output = limit if exact else min(limit, sampled + 1)
        return output, self._pace(self.times.get(ended.cause, ended.at_ns))

    def _estimated(self, engine: int, devices: list[ev.PoolKnown]) -> SimulatedMachine:
        """The machine of a real engine, as far as the recording tells of it."""
        measured = self.measured
        size = devices[0].block_tokens if devices else BLOCK_TOKENS
        told = self.reading.told.numbers.get(engine, {})
        blocks = self._device_blocks(devices, told)
        below = {tier: self._below(engine, tier) for tier in (Tier.G2, Tier.G3)}
        config = EngineConfig(
            g1_blocks=blocks, **self._groups(devices), retention=self._retention(devices, told),
            whole_sequences=True, patience_ns=0, early_steps=self.reading.early,
            fenced_steps=self.reading.early and self.reading.fenced, named_early=self.reading.named_early,
            passes_at_end=self.reading.told.passes_at_end,
            **self._limits(measured, told),
        )
        copied_blocks, copied_bytes = self.reading.copied
        if copied_blocks:
            config = msgspec.structs.replace(
                config, token_bytes=max(1, round(copied_bytes / (copied_blocks * size)))
            )
        leader = LeaderConfig(
            block_tokens=size, g2_blocks=below[Tier.G2], g3_blocks=below[Tier.G3], offload_law="order",
            offload_threshold=0.0, offload_prompt_only=self.reading.prompts_only, staging_share=1.0,
            lookup_window=config.groups[0], offload_window_only=self._copies_windows(engine, config, told, size),
            eviction=PolicyConfig(policy="simple_lru", used_at_end=True),
        )
        from kvbm_console.planning.copies import copies_of, fit_links, links_with  # NumPy, as above

        copies = copies_of(self.recording, size * config.token_bytes, self.times, measured.begun_ns)
        return SimulatedMachine(
            leader=leader, engine=self._timed(config, measured), links=links_with(fit_links(copies)),
            own_connector=True,
        )

    def _device_blocks(self, devices: list[ev.PoolKnown], told: Mapping[Measure, int]) -> int:
        for pool in devices:
            if pool.authority is Authority.OBSERVED and told.get(Measure.CAPACITY_BLOCKS):
                return told[Measure.CAPACITY_BLOCKS]  # of all groups; a metrics page would count the null block, too
            if pool.capacity_blocks:
                return self.reading.device_blocks(pool)
            if pool.pool in self.reading.evicting:
                if pool.authority is not Authority.STREAM:
                    self.notes.append("the device is as large as the highest place that a request had")
                    return self.reading.device_blocks(pool)
                self.notes.append("the device is as large as the most blocks that it had at once")
                return self.reading.peaks[pool.pool]
        self.notes.append(f"the capacity of the device is not in it: {DEVICE_BLOCKS:,} blocks are assumed")
        return DEVICE_BLOCKS

    def _groups(self, devices: list[ev.PoolKnown]) -> dict[str, Any]:
        """The window of each group of layers, 0 for a group that sees all tokens, and the number of each."""
        further = [pool for pool in devices if pool.pool in self.reading.groups.windows]
        windows, numbers = [self._window_tokens(devices)], [pool.group for pool in devices if pool not in further][:1]
        size = devices[0].block_tokens if devices else BLOCK_TOKENS
        for pool in further:
            tokens, group = pool.window, f"group {pool.group} of the layers"
            if tokens is None:
                tokens = self.reading.groups.tokens(pool.pool)
            if pool.block_tokens != size or tokens is None:
                why = "its blocks are of another size" if pool.block_tokens != size else "it has no sliding window"
                self.notes.append(f"{group} is not replayed, and hits that miss a block of it count as hits: {why}")
                continue
            windows.append(tokens)
            numbers.append(pool.group)
            if pool.window is None:
                self.notes.append(self._about_window(group, tokens))
        order = [sorted(numbers).index(number) for number in numbers]
        return {"groups": tuple(windows), "group_numbers": tuple(order) if order != sorted(order) else ()}

    @staticmethod
    def _about_window(group: str, tokens: int) -> str:
        """How the window of a group was found."""
        if not tokens:
            return f"{group} sees all tokens, because no block of a running request was gone"
        if tokens == TOKENS_MAX:
            return f"{group} sees a window that no request has passed"
        return f"{group} sees a window of {tokens} tokens, by its blocks that were gone"

    def _retention(self, devices: list[ev.PoolKnown], told: Mapping[Measure, int]) -> int | None:
        """See ``EngineConfig.retention``."""
        if Measure.RETENTION_TOKENS in told:
            tokens = told[Measure.RETENTION_TOKENS]
            return None if tokens == 1 else tokens
        further = [pool.pool for pool in devices if pool.pool in self.reading.groups.windows]
        return 0 if any(map(self.reading.keeps_prompts, further)) else None

    def _copies_windows(self, engine: int, config: EngineConfig, told: Mapping[Measure, int], size: int) -> bool:
        """True if only the windows at the ends of prompts are copied down, in groups of layers that have a window."""
        if told.get(Measure.RETENTION_TOKENS, 1) != 1 or self.reading.windows_only(config.groups[0], size):
            return True
        return self.reading.groups.copies_windows(engine)

    def _window_tokens(self, devices: list[ev.PoolKnown]) -> int:
        """The attention window of all layers, or of the group whose blocks are told with requests; 0 without one."""
        further = self.reading.groups.windows
        told = [pool.window for pool in devices if pool.window is not None and pool.pool not in further]
        if told:
            return told[0]
        windows = [self.reading.windows[pool.pool] for pool in devices if pool.pool in self.reading.windows]
        moved = [window for window in windows if window.moves]
        if not moved:
            return 0
        tokens = moved[0].tokens
        self.notes.append(
            f"all layers see a window of {tokens} tokens, by the blocks that requests gave back while they ran"
            if tokens else
            "requests give back blocks while they run, but not as a sliding window does, and the replay holds them to "
            "the end"
        )
        return tokens

    def _below(self, engine: int, tier: Tier) -> int:
        """Blocks of a lower tier: its capacity, else the most that it had at once."""
        told = self.reading.told.numbers.get(engine, {}).get(Measure.HOST_CAPACITY_BLOCKS)
        if tier is Tier.G2 and told:
            return told
        total = 0
        for pool in self.reading.pools.values():
            if pool.tier is not tier or pool.source != engine:
                continue
            total += pool.capacity_blocks or self.reading.peaks.get(pool.pool, 0)
            if not pool.capacity_blocks:
                least = "" if pool.pool in self.reading.evicting else ", and may be larger"
                self.notes.append(f"{tier.label} is as large as the most blocks that it had at once{least}")
        if not total and (engine, tier) in self.reading.found:
            self.notes.append(f"the capacity of {tier.label} is not in it: {DEVICE_BLOCKS:,} blocks are assumed")
            return DEVICE_BLOCKS
        return total

    def _limits(self, measured: Measured, told: Mapping[Measure, int]) -> dict[str, Any]:
        """The limits of an iteration that the engine ``told``, else those that it came up against more than once."""
        tokens = [
            row.prefill_tokens + row.decode_requests for row in measured.equations if row.steps == 1
        ]
        limits: dict[str, Any] = {}
        if tokens and tokens.count(max(tokens)) > 1 and max(tokens) == measured.tokens_most:
            limits["max_batch_tokens"] = int(max(tokens))
        seats = self.reading.told.seats
        if seats and seats[max(seats)] > 1 and max(seats) > 0:
            limits["max_running"] = max(seats)
        for measure, field in (Measure.STEP_TOKENS_MOST, "max_batch_tokens"), (Measure.RUNNING_MOST, "max_running"):
            if told.get(measure):
                limits[field] = told[measure]
        return limits

    def _timed(self, config: EngineConfig, measured: Measured) -> EngineConfig:
        from kvbm_console.planning.calibrate import fit_times  # NumPy, which an exact machine does not need

        try:
            return fit_times(self.text, measured.equations).config(config)
        except UsageError as error:
            self.notes.append(f"step times are assumed: {error}")
        if not measured.equations:
            return config
        usual_ns = round(median(row.time_ns / row.steps for row in measured.equations))
        return msgspec.structs.replace(
            config, step_base_ns=max(1, usual_ns), prefill_token_ns=0, decode_request_ns=0
        )

    def _note(self, devices: list[ev.PoolKnown], lives: list[_Life]) -> None:
        reading = self.reading
        if self.recording.first_seq:
            self.notes.append("it begins in the middle of a run, and the replay begins with empty tiers")
        if not reading.whole:
            self.notes.append("events are missing, and with them requests")
        if reading.unknown_slots:
            self.notes.append(f"{reading.unknown_slots} requests that were under way when it began are left out")
        if reading.people:
            self.notes.append(f"people held, reset, drained or froze {reading.people} times, which is not replayed")
        if not isinstance(lives[0].event, ev.SlotOpened):
            self.notes.append("a stream names stored blocks and no request, so every request had a miss")


def paced(measured: Measured, config: EngineConfig, begin_ns: int) -> Callable[[int], int]:
    """Engine time to the time of a replay, in which each busy step takes the time of the step model.

    A step after which no request went on was busy to the next one, unless that began much later.

    A real step takes longer or shorter than the model by chance. Without this a request would arrive some steps earlier
    or later than it did. What arrives while the engine is idle arrives at the begin of the next step.
    """
    def model_ns(row: Equation) -> float:
        return (
            row.steps * config.step_base_ns + row.prefill_tokens * config.prefill_token_ns
            + row.decode_requests * config.decode_request_ns
        )

    steps = {row.at_ns: row for row in measured.equations}
    steps |= {row.at_ns: row for row in measured.last_ones if row.time_ns <= IDLE_FACTOR * model_ns(row)}
    begun, at_ns = measured.begun_ns, [0.0]
    for before, begin in pairwise(begun):
        row = steps.get(begin)
        at_ns.append(at_ns[-1] + (begin - before if row is None else model_ns(row)))
    if not begun:
        return lambda time_ns: time_ns - begin_ns
    since = 0.0

    def pace(time_ns: int) -> int:
        at = bisect_left(begun, time_ns)
        if at == len(begun):
            return round(at_ns[-1] + time_ns - begun[-1] - since)
        if at == 0 or begun[at] not in steps:
            return round(at_ns[at] - since)
        share = (time_ns - begun[at - 1]) / (begun[at] - begun[at - 1])
        return round(at_ns[at - 1] + share * (at_ns[at] - at_ns[at - 1]) - since)

    since = float(pace(begin_ns))
    return pace


def _engine_of(life: _Life, pools: dict[int, ev.PoolKnown]) -> int:
    if isinstance(life.event, ev.SlotOpened):
        return life.event.source
    return pools[life.event.pool].source


def _padded(life: _Life, own: int, owner: int) -> tuple[int, ...]:
    """``own`` hashes behind the prompt: those that were seen, then some that nobody else has."""
    known = list(islice(life.filled, max(0, own)))
    last = known[-1] if known else life.hashes[-1] if life.hashes else 0
    return (*known, *generated_hashes(last, owner, own - len(known)))
