"""The contracts of the tiered cache (BC-1 to BC-11 of the domain), checked on the events of a leader.

``ContractShadow`` keeps the content and the holders of each place in sets and lists, which it walks. A place is empty,
given to a request and not full yet, written by a copy, or full. A full place is ready and has the hash of its content.
Holders are slots, staging of slots, and operations. For example, an event that gives a held place to another request
raises ``Broken`` with BC-3 and the event's number.

Law of this file: it reads events alone and shares no code with the facts of the core.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.ids import CandidateStatus, FinishReason, MissReason, ReleaseReason, Route, SlotState, Tier
from kvbm_console.simulator.link import LinkSpec

_ABSENT = (MissReason.NEVER_STORED, MissReason.EVICTED, MissReason.NOT_OFFLOADED)
"""Reasons of a block that is in no tier."""
At = tuple[int, int]
"""A place: pool and index."""


class Broken(AssertionError):
    """An event broke a contract."""


class _Place(msgspec.Struct):
    """The content of a place."""

    hash: int | None = None
    ready: bool = False
    writer: int | None = None
    """The operation that writes it."""
    holders: Counter[str] = msgspec.field(default_factory=Counter)


class _Life(msgspec.Struct):
    """A slot."""

    request: str
    hashes: list[int]
    prompt_tokens: int
    blocks: list[int] = []
    state: SlotState = SlotState.INITIALIZED
    staged: list[At] = []
    answered: tuple[int, tuple[int, int, int]] = (0, (0, 0, 0))
    """Device blocks and blocks below the device in the last lookup."""
    hits: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0, 0])
    scored: int = 0
    preempted: int = 0


class _Copy(msgspec.Struct):
    """A running operation."""

    candidate: int
    route: Route
    sources: list[At]
    targets: list[At]
    started_ns: int | None = None
    reported: bool = False
    failed: list[int] = []
    """Indices of blocks that did not arrive. Later blocks of a load arrive, and are useless."""


class ContractShadow:
    """The fold of the events. ``links`` are the links of an asynchronous mover; without links times are not checked."""

    def __init__(self, block_tokens: int, block_bytes: int, links: Sequence[LinkSpec] = (), every: int = 1) -> None:
        self.every = every
        """Stimuli between two walks over all places."""
        self._taken = 0
        self.size = block_tokens
        self.block_bytes = block_bytes
        self.links = links
        self.tiers: dict[int, Tier] = {}
        self.places: dict[At, _Place] = {}
        self.slots: dict[int, _Life] = {}
        self.copies: dict[int, _Copy] = {}
        self.candidates: dict[int, tuple[Route, list[int]]] = {}
        """Open candidates, to route and hashes."""
        self.ended: Counter[str] = Counter()
        self.hits = [0, 0, 0, 0]
        self.prompt_blocks = 0
        self.moved: Counter[str] = Counter()
        self.evicted: Counter[Tier] = Counter()
        self.quarantined: dict[At, set[int]] = {}
        """Places that copies from before a reset still touch, to the operations."""
        self.preemptions = 0
        self.preempted_requests = 0
        self.lost = 0
        self.checked: Counter[str] = Counter()
        """Number of checks of each contract."""
        self._link_free_ns: dict[str, int] = defaultdict(int)
        self._links_of = {route: link for link in links for route in link.routes}
        self._seq = -1
        self._at_ns = 0

    # --- the frame ---

    def take(self, events: Sequence[ev.Event]) -> None:
        """Fold and check the events of a stimulus."""
        for event in events:
            self._require(event.seq == self._seq + 1 and event.at_ns >= self._at_ns, "I9", event, "order")
            self._seq, self._at_ns = event.seq, event.at_ns
            fold = getattr(self, f"_{type(event).__name__}", None)
            if fold is not None:
                fold(event)
        self._taken += 1
        if self._taken % self.every == 0:
            self._walk()

    def _require(self, ok: bool, contract: str, event: ev.Event | None, why: str) -> None:
        self.checked[contract] += 1
        if not ok:
            raise Broken(f"{contract} at {self._seq} ({type(event).__name__}): {why}; {event}")

    def _walk(self) -> None:
        """BC-9: each place is in one condition, and its holders are the slots and copies that name the place."""
        named: dict[At, Counter[str]] = defaultdict(Counter)
        for number, life in self.slots.items():
            for block in life.blocks:
                named[self._device(), block][f"slot {number}"] += 1
            for at in life.staged:
                named[at][f"staging {number}"] += 1
        for operation, copy in self.copies.items():
            for at in copy.sources:
                named[at][f"source {operation}"] += 1
        for at, place in self.places.items():
            holders = +place.holders
            self._require(holders == named.get(at, Counter()), "BC-9", None, f"holders of {at}: {holders}, {named[at]}")
            self._require(
                not (place.writer is not None and place.ready) and not (place.ready and place.hash is None), "BC-9",
                None, f"{at} is {place}",
            )
            if place.hash is not None and not place.ready:
                self._require(place.writer in self.copies, "BC-9", None, f"{at} is written by nobody")

    def finished(self) -> None:
        """Require, after every request has ended, that no place has a holder and no copy runs."""
        self._walk()
        self._require(not self.slots and not self.copies and not self.candidates, "BC-9", None, "something is left")
        for at, place in self.places.items():
            self._require(not +place.holders and place.writer is None, "BC-9", None, f"{at} is held: {place}")

    def _device(self) -> int:
        return next(pool for pool, tier in self.tiers.items() if tier is Tier.G1)

    def _pool(self, tier: Tier) -> int | None:
        return next((pool for pool, its in self.tiers.items() if its is tier), None)

    def _in(self, tier: Tier) -> set[int]:
        """Hashes that can be read in a tier."""
        pool = self._pool(tier)
        return {
            place.hash for (where, _), place in self.places.items()
            if where == pool and place.ready and place.hash is not None
        }

    def _at(self, pool: int, ids: bytes, event: ev.Event) -> list[At]:
        places = [(pool, index) for index in unpack_ids(ids)]
        self._require(all(at in self.places for at in places), "BC-10", event, "a place beyond the capacity")
        return places

    # --- pools and slots ---

    def _PoolKnown(self, event: ev.PoolKnown) -> None:
        self.tiers[event.pool] = event.tier
        last = event.first_place + (event.capacity_blocks or 0)
        self.places.update({(event.pool, index): _Place() for index in range(event.first_place, last)})

    def _SlotOpened(self, event: ev.SlotOpened) -> None:
        self.slots[event.slot] = _Life(event.request, unpack_hashes(event.hashes), event.prompt_tokens)

    def _SlotCloned(self, event: ev.SlotCloned) -> None:
        parent = self.slots[event.parent]
        blocks = unpack_ids(event.ids)
        life = _Life(event.request, list(parent.hashes), parent.prompt_tokens, blocks, parent.state)
        self.slots[event.slot] = life
        for block in blocks:
            place = self.places[self._device(), block]
            self._require(
                place.ready or not +place.holders, "I5", event, f"block {block} is shared and not full",
            )
            place.holders[f"slot {event.slot}"] += 1

    def _SlotMoved(self, event: ev.SlotMoved) -> None:
        life = self.slots[event.slot]
        self._require(event.old is life.state, "I8", event, f"it was {life.state}")
        life.state = event.new
        if event.new is SlotState.PREEMPTED:  # BC-7
            self.preemptions += 1
            self.preempted_requests += not life.preempted
            life.preempted += 1
            self._require(not life.blocks, "BC-7", event, "a victim keeps blocks")
        if event.reason in (FinishReason.LENGTH, FinishReason.STOP) and event.new is SlotState.FINISHED:
            self._require(not life.blocks and not life.staged, "I8", event, "a finished slot owns something")

    def _SlotClosed(self, event: ev.SlotClosed) -> None:
        life = self.slots.pop(event.slot)
        self._require(not life.blocks and not life.staged, "I8", event, "a closed slot owns something")

    # --- admission ---

    def _findable(self) -> set[int]:
        """Hashes in the engine's prefix cache. The engine takes the blocks of a load in when all of them have come."""
        device = self._device()
        coming = {block for life in self.slots.values() if life.state is SlotState.ONBOARDING
                  for block in life.blocks[life.answered[0] :]}
        return {place.hash for (where, index), place in self.places.items()
                if where == device and place.ready and place.hash is not None and index not in coming}

    def _LookupAnswered(self, event: ev.LookupAnswered) -> None:
        """BC-3: the lookup goes on after the engine's prefix, in G2, then in G3, to the first miss in all tiers."""
        if event.answer is None:
            return
        life = self.slots[event.slot]
        life.answered = event.local_blocks, event.matched
        at = event.local_blocks
        if at < min(len(life.hashes), (life.prompt_tokens - 1) // self.size):
            self._require(life.hashes[at] not in self._findable(), "BC-3", event, f"block {at} is on the device")
        for tier, count in zip((Tier.G2, Tier.G3), event.matched, strict=False):
            hashes = self._in(tier) if count else set()
            self._require(
                all(key in hashes for key in life.hashes[at : at + count]), "BC-3", event,
                f"blocks from {at} are not in {tier.name}",
            )
            at += count
        if event.first_miss is not None and event.why in _ABSENT:
            key = life.hashes[event.first_miss]
            self._require(
                key not in self._in(Tier.G2) | self._in(Tier.G3), "BC-3", event, f"block {event.first_miss} is below",
            )
        self._require(
            event.answer == sum(event.matched) * self.size
            and at * self.size < max(life.prompt_tokens, at * self.size + 1), "BC-3", event, "tokens of the answer",
        )

    def _BlocksStaged(self, event: ev.BlocksStaged) -> None:
        life = self.slots[event.slot]
        for at in self._at(event.pool, event.ids, event):
            self._require(self.places[at].ready, "BC-3", event, f"{at} is staged and cannot be read")
            self.places[at].holders[f"staging {event.slot}"] += 1
            life.staged = [*life.staged, at]

    def _StagingReleased(self, event: ev.StagingReleased) -> None:
        life = self.slots[event.slot]
        for at in life.staged:
            self.places[at].holders[f"staging {event.slot}"] -= 1
        life.staged = []

    def _DeviceBlocksAssigned(self, event: ev.DeviceBlocksAssigned) -> None:
        assigned = self._at(event.pool, event.ids, event)
        self._require(len(set(assigned)) == len(assigned), "BC-3", event, "a place is given twice")
        reused, new = assigned[: event.reused], assigned[event.reused :]
        if event.reused:
            life = self.slots[event.slots[0]]
            prefix = [self.places[at] for at in reused]
            self._require(
                [place.hash for place in prefix] == life.hashes[: len(prefix)] and all(place.ready for place in prefix),
                "BC-3", event, "the prefix is not what the prompt begins with",
            )
        for at in new:  # no new place may have a holder, this prefix included
            place = self.places[at]
            self._require(
                place.hash is None and not +place.holders and place.writer is None and not self.quarantined.get(at),
                "BC-3", event, f"{at} is taken",
            )
        place_of = iter(assigned)
        for slot, count in zip(event.slots, event.counts, strict=True):
            for _ in range(count):
                at = next(place_of)
                self.slots[slot].blocks = [*self.slots[slot].blocks, at[1]]
                self.places[at].holders[f"slot {slot}"] += 1

    def _DeviceBlocksReleased(self, event: ev.DeviceBlocksReleased) -> None:
        """BC-2: release drops no content."""
        life = self.slots[event.slot]
        blocks = list(life.blocks)
        for at in self._at(self._device(), event.ids, event):
            self._require(at[1] in blocks, "BC-9", event, f"{at} is released and not held")
            blocks.remove(at[1])
            self.places[at].holders[f"slot {event.slot}"] -= 1
        life.blocks = blocks

    def _PrefixScored(self, event: ev.PrefixScored) -> None:
        """BC-5: hits count once, when the first admission commits, for the tier that held the blocks."""
        life = self.slots[event.slot]
        prompt = life.prompt_tokens // self.size
        local, below = life.answered
        self._require(event.prompt_blocks == prompt, "BC-5", event, f"the prompt has {prompt} blocks")
        expected, left = [], prompt
        for blocks in (local, *below):
            expected.append(min(blocks, left))
            left -= expected[-1]
        self._require(
            list(event.hits) == expected and sum(event.hits) <= prompt, "BC-5", event, f"found {expected}",
        )
        device = [self.places[self._device(), block] for block in life.blocks[: event.hits[0]]]
        self._require(
            all(place.ready for place in device)
            and [place.hash for place in device] == life.hashes[: event.hits[0]], "BC-5", event, "hits of the device",
        )
        life.hits = list(event.hits)
        life.scored += 1
        self._require(event.readmitted == (life.preempted > 0), "BC-5", event, f"preempted {life.preempted} times")
        if event.readmitted:
            return
        self.prompt_blocks += event.prompt_blocks
        self.hits = [total + hits for total, hits in zip(self.hits, event.hits, strict=True)]

    def _HitsLost(self, event: ev.HitsLost) -> None:
        life = self.slots[event.slot]
        at = event.tier - 1
        self._require(0 <= event.blocks <= life.hits[at], "BC-5", event, f"it had {life.hits}")
        life.hits[at] -= event.blocks
        self._require(event.readmitted == (life.preempted > 0), "BC-5", event, f"preempted {life.preempted} times")
        if not event.readmitted:
            self.hits[at] -= event.blocks
            self.lost += event.blocks

    # --- content ---

    def _BlocksFilled(self, event: ev.BlocksFilled) -> None:
        owners = iter([slot for slot, count in zip(event.slots, event.counts, strict=True) for _ in range(count)])
        for at, key in zip(self._at(event.pool, event.ids, event), unpack_hashes(event.hashes), strict=True):
            place = self.places[at]
            self._require(
                place.hash is None and place.writer is None and bool(+place.holders), "BC-9", event,
                f"{at} is full already, or nobody computes it",
            )
            place.hash, place.ready = key, True
            life = self.slots[next(owners)]
            index = life.blocks.index(at[1])
            if index == len(life.hashes):  # after the prompt, so a lookup after a preemption hits the block
                life.hashes = [*life.hashes, key]
            self._require(life.hashes[index] == key, "BC-2", event, f"block {index} has another hash than its request")

    def _BlocksEvicted(self, event: ev.BlocksEvicted) -> None:
        """BC-10, I3: an evicted block is ready and has no holder."""
        for at, key in zip(self._at(event.pool, event.ids, event), unpack_hashes(event.hashes), strict=True):
            place = self.places[at]
            self._require(place.ready and place.hash == key, "BC-9", event, f"{at} holds {place.hash}")
            self._require(not +place.holders, "BC-10", event, f"{at} is held by {place.holders}")
            place.hash, place.ready = None, False
            self.evicted[self.tiers[event.pool]] += 1

    def _BlocksReserved(self, event: ev.BlocksReserved) -> None:
        lower = self.tiers[event.pool] is not Tier.G1
        for at, key in zip(self._at(event.pool, event.ids, event), unpack_hashes(event.hashes), strict=True):
            place = self.places[at]
            self._require(
                place.hash is None and place.writer is None and not self.quarantined.get(at)
                and not (lower and +place.holders), "BC-10", event, f"{at} is not empty",
            )
            if lower:
                resident = any(
                    pool == event.pool and other.hash == key for (pool, _), other in self.places.items()
                )
                self._require(not resident, "BC-2", event, f"{key:x} is there, or on its way, already")
            place.hash, place.writer = key, event.operation

    def _BlocksReady(self, event: ev.BlocksReady) -> None:
        for at in self._at(event.pool, event.ids, event):
            place = self.places[at]
            self._require(place.writer == event.operation, "I16", event, f"{at} is written by {place.writer}")
            place.ready, place.writer = True, None

    def _BlocksDropped(self, event: ev.BlocksDropped) -> None:
        places = self._at(event.pool, event.ids, event)
        if event.why is ReleaseReason.EPOCH:  # a copy from before a reset has ended
            for at in places:
                self._require(event.operation in self.quarantined.get(at, ()), "I16", event, f"{at} is not kept away")
                self.quarantined[at].discard(event.operation)
            return
        for at in places:
            if event.operation < 0:  # after a block that did not arrive: ready, in a place of that request alone
                self._require(self.places[at].ready and sum(self.places[at].holders.values()) == 1, "I16", event,
                              f"{at} is {self.places[at]}")
            else:
                self._require(self.places[at].writer == event.operation, "I16", event, f"{at} is not written by it")
            place = self.places[at]
            place.hash, place.ready, place.writer = None, False, None

    def _BlocksQuarantined(self, event: ev.BlocksQuarantined) -> None:
        for at in self._at(event.pool, event.ids, event):
            self.quarantined.setdefault(at, set()).add(event.operation)

    def _ResetDone(self, event: ev.ResetDone) -> None:
        """All metadata is clear. Earlier events have ended candidates, copies, slots and holders."""
        for place in self.places.values():
            place.hash, place.ready, place.writer = None, False, None

    # --- candidates and copies ---

    def _CandidatePlanned(self, event: ev.CandidatePlanned) -> None:
        self._require(event.candidate not in self.candidates, "I6", event, "it is open already")
        self.candidates[event.candidate] = event.route, unpack_hashes(event.hashes)

    def _CandidateSkipped(self, event: ev.CandidateSkipped) -> None:
        self._end(event.candidate, "skipped", event)

    def _CandidatePromoted(self, event: ev.CandidatePromoted) -> None:
        """BC-2: a copy is of full blocks with a hash, and both ends hold the same content."""
        route, _ = self.candidates[event.candidate]
        sources = self._at(event.source_pool, event.sources, event)
        targets = self._at(event.target_pool, event.targets, event)
        self._require(
            (self.tiers[event.source_pool], self.tiers[event.target_pool]) == (route.source, route.target), "I7",
            event, "pools of the route",
        )
        for source, target in zip(sources, targets, strict=True):
            self._require(
                self.places[source].ready and self.places[source].hash is not None, "BC-2", event,
                f"{source} is not full",
            )
            self._require(
                self.places[target].hash == self.places[source].hash
                and self.places[target].writer == event.operation, "BC-2", event, f"{target} is written otherwise",
            )
            self.places[source].holders[f"source {event.operation}"] += 1
        self.copies[event.operation] = _Copy(event.candidate, route, sources, targets)

    def _OperationStarted(self, event: ev.OperationStarted) -> None:
        copy = self.copies[event.operation]
        self._require(copy.started_ns is None, "I6", event, "it began before")
        copy.started_ns = event.at_ns
        link = self._links_of.get(copy.route)
        if link is not None:
            self._require(event.at_ns >= self._link_free_ns[link.name], "BC-4", event, "the link copies another one")
            lasts_ns = link.copy_ns(len(copy.sources) * self.block_bytes)
            self._link_free_ns[link.name] = event.at_ns + lasts_ns - link.base_latency_ns

    def _OperationReported(self, event: ev.OperationReported) -> None:
        copy = self.copies[event.operation]
        self._require(copy.started_ns is not None and not copy.reported, "D2", event, "reported twice or not begun")
        copy.reported = True
        if not event.ok:
            copy.failed = unpack_ids(event.failed) or list(range(len(copy.sources)))
        link = self._links_of.get(copy.route)
        if link is not None and copy.started_ns is not None:
            lasts_ns = link.copy_ns(len(copy.sources) * self.block_bytes)
            self._require(event.at_ns == copy.started_ns + lasts_ns, "BC-4", event, f"it lasts {lasts_ns} ns")

    def _CandidateEnded(self, event: ev.CandidateEnded) -> None:
        operation = next((key for key, copy in self.copies.items() if copy.candidate == event.candidate), None)
        self._require(operation is not None, "I6", event, "no operation of it runs")
        assert operation is not None
        copy = self.copies.pop(operation)
        self._require(event.status is CandidateStatus.CANCELLED or copy.reported, "D2", event, "nobody reported it")
        for at in copy.sources:
            self.places[at].holders[f"source {operation}"] -= 1
        for at in copy.targets:
            self._require(self.places[at].writer != operation, "BC-9", event, f"{at} is still written")
        if copy.reported:
            self.moved[f"{copy.route.source.name}>{copy.route.target.name}"] += len(copy.targets) - len(copy.failed)
        if event.status is CandidateStatus.COMPLETED:
            # Tiers are inclusive, so the source keeps copied blocks.
            self._require(all(self.places[at].ready for at in copy.sources), "BC-3", event, "the copy was a move")
        self._end(event.candidate, "ended", event)

    def _end(self, candidate: int, how: str, event: ev.Event) -> None:
        self._require(self.candidates.pop(candidate, None) is not None, "I6", event, "it ended before")
        self.ended[how] += 1
