"""A leader that watches SGLang through the tap, compared with the scheduler itself after every step.

A process of its own: each line on stdin is a run, in JSON, and each line on stdout its figures or the error.

Law of this file: nothing is compared with what the tap says. Requests and places are read in the scheduler, hashes are
computed anew from tokens, and evictions are those of SGLang's own KV events.
"""

import hashlib
import json
import os
import random
import sys
import tempfile
import threading
import traceback
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

from kvbm_console.analysis.explain import explain
from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Authority, Condition, FinishReason, SlotState, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import READY, PoolFacts
from kvbm_console.tap import sglang as binding
from tests.analysis.evidence import evidence
from tests.tap.watching import Watching
from tests.vllm.sglang_engine import Engine, HookRegistry, conn, hicache_storage

RECEIVING = {SlotState.ONBOARDING}
"""A request whose places another engine fills or has filled."""
WAITING = {SlotState.INITIALIZED, SlotState.ONBOARD_STAGED, SlotState.PREEMPTED}


def workload(seed: int, sessions: int, turns: int, longest: int = 40) -> list[tuple[int, str, list[int], int]]:
    """(step of arrival, name, prompt, output): sessions whose prompts grow and share a system prompt. Some prompts are
    asked twice at once."""
    dice = random.Random(seed)
    system = [dice.randrange(1000) for _ in range(40)]
    found = []
    for session in range(sessions):
        prompt = system + [dice.randrange(1000) for _ in range(dice.randrange(20, 90))]
        at = session * 2
        for turn in range(turns):
            output = dice.randrange(4, longest)
            found.append((at, f"s{session}t{turn}", list(prompt), output))
            if dice.random() < 0.3:
                found.append((at, f"s{session}t{turn}again", list(prompt), output))
            prompt += [dice.randrange(1000) for _ in range(dice.randrange(10, 60))]
            at += dice.randrange(10, 40)
    return sorted(found)


def places_of(engine: Engine, req: Any) -> list[int]:
    """Places of a request, read in the table of rows."""
    if not req.kv.holds_kv:
        return []
    row = engine.scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len : engine.page]
    return [int(position) // engine.page for position in row]


def compare(engine: Engine, state: CacheState, source: int = 1) -> None:
    """Every request, every place, every holder."""
    batch = engine.formed
    scheduled = {} if not batch else {req.rid: batch.forward_mode for req in batch.reqs}
    live = {slot.request: slot for slot in state.slots.values()
            if slot.state is not SlotState.FINISHING and slot.source == source}
    requests = engine.live()
    assert live.keys() == requests.keys(), live.keys() ^ requests.keys()
    held: Counter[int] = Counter()
    for name, req in requests.items():
        slot, places = live[name], places_of(engine, req)
        assert slot.device_blocks == places, (name, slot.state, slot.device_blocks, places)
        held.update(places)
        if not places:
            assert slot.state in WAITING, (name, slot.state)
            continue
        if slot.state in RECEIVING:
            assert name not in scheduled, (name, slot.state)
            continue
        # A request that has received its blocks is shown as prefilling in its first step, up to its prompt's end.
        first = engine.mode == "decode" and name not in engine.ran
        computed, committed = slot.computed_tokens(state.iteration), req.kv.kv_committed_len
        behind = first and not slot.preemptions and committed == len(req.origin_input_ids) + 1
        assert computed == committed - behind, (name, slot.state, computed, committed)
        if name in scheduled:
            decodes = scheduled[name].is_decode() or req in (batch.decoding_reqs or ())
            state_now = SlotState.DECODING if decodes and not first else SlotState.PREFILLING
            assert slot.state is state_now, (name, slot.state)
        elif batch:  # a turn without a batch is no step, and leaves nobody out
            assert slot.state in (SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE), (name, slot.state)
    for req in engine.sending():
        held.update(places_of(engine, req))
    (pool,) = (
        pool for pool in state.pools if pool.info.authority is Authority.OBSERVED and pool.info.source == source
    )
    assert {place: refs for place, refs in enumerate(pool.refs) if refs} == dict(held)
    compare_tree(engine, pool, held)
    compare_host(engine, state)


def compare_tree(engine: Engine, pool: PoolFacts, held: Counter[int]) -> None:
    """The tree's content, its locks, and the free pages."""
    scheduler, page = engine.scheduler, engine.page
    known = {place: key for place, key in enumerate(pool.hash_of) if key and pool.content[place] == READY}
    core = scheduler.tree_cache.tree_core
    if scheduler.tree_cache.disable:
        assert known == {}
    elif hasattr(core, "_node_arena"):
        resident, locked = content_of(core, page)
        assert known == resident, (known.items() - resident.items(), resident.items() - known.items())
        compare_locks(engine, locked, {place for place in resident if held[place]})
    else:
        rows = core.walk_for_kv_canary(False, False)
        places = {int(slot) // page for slot in rows.slot_indices}
        assert places == set(known)
        unlocked = {int(slot) // page for slot in core.walk_for_kv_canary(True, False).slot_indices}
        compare_locks(engine, places - unlocked, {place for place in places if held[place]})
        parent = {
            int(slot) // page: int(before) // page
            for slot, before, at in zip(rows.slot_indices, rows.prev_slot_indices, rows.positions, strict=True)
            if not int(at) % page
        }
        for place, before in parent.items():
            if before >= 0:
                assert engine_parents(engine)[known[place]] == known[before]
    assert Counter(known.values()) == resident_by_events(engine)
    allocator = scheduler.token_to_kv_pool_allocator
    free = {int(one) for one in allocator.get_all_free_pages()}
    assert free == set(range(1, allocator.size // page + 1)) - set(known) - set(held)
    if pool.info.capacity_blocks is not None:
        assert (pool.info.capacity_blocks, pool.counts[Condition.EMPTY]) == (allocator.size // page, len(free))


def compare_host(engine: Engine, state: CacheState) -> None:
    """HiCache's host tier, by SGLang's own events, and its places in use."""
    tree = engine.scheduler.tree_cache
    pools = [pool for pool in state.pools if pool.info.authority is Authority.STREAM]
    if getattr(tree, "cache_controller", None) is None or tree.disable:
        assert {pool.info.medium for pool in pools} <= {"EXTERNAL"}
        return
    (pool,) = (pool for pool in pools if pool.info.tier is Tier.G2)
    assert all(pool.silent for pool in pools if pool.info.tier is not Tier.G2), "nobody tells what the storage keeps"
    known = Counter(key for place, key in enumerate(pool.hash_of) if pool.content[place] == READY)
    told = resident_by_events(engine, pool.info.medium)
    assert known == told, (known - told, told - known)
    host = tree.cache_controller.mem_pool_host
    used = (host.size - host.available_size()) // engine.page
    assert used >= known.total()  # a copy that runs, also one that nobody waits for any more, has places
    if not tree.ongoing_write_through and not tree.cache_controller.enable_storage:
        assert used == known.total()


def compare_locks(engine: Engine, locked: set[int], held: set[int]) -> None:
    """The tree locks what requests hold, and what a copy reads or writes."""
    tree = engine.scheduler.tree_cache
    assert locked == held or (locked > held and (tree.ongoing_write_through or tree.ongoing_load_back))


def content_of(core: Any, page: int) -> tuple[dict[int, int], set[int]]:
    """Place to hash of the Python tree, hashes computed from tokens, and the places of locked nodes."""
    resident: dict[int, int] = {}
    locked: set[int] = set()

    def walk(node: Any, digest: bytes) -> None:
        value = node.component_data[0].value
        tokens = node.key.raw_token_ids()
        for at in range(0, len(tokens), page):
            digest = hashlib.sha256(digest + array("I", tokens[at : at + page]).tobytes()).digest()
            if value is not None and len(value):
                place = int(value[at]) // page
                assert place not in resident
                resident[place] = int.from_bytes(digest[:8], "big")
                if node.component_data[0].lock_ref:
                    locked.add(place)
        for child in node.children.values():
            walk(child, digest)

    walk(core.root_node, b"")
    return resident, locked


def _named(events: list[Any], kind: str, medium: str = "GPU") -> list[Any]:
    return [one for one in events if type(one).__name__ == kind and getattr(one.medium, "value", one.medium) == medium]


def resident_by_events(engine: Engine, medium: str = "GPU") -> Counter[int]:
    """Hashes on a medium, by SGLang's own events since the beginning."""
    found: Counter[int] = Counter()
    for event in engine.events:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            found.clear()
        elif getattr(event.medium, "value", event.medium) == medium:
            change = 1 if kind == "BlockStored" else -1
            for key in event.block_hashes:
                found[key & (2**64 - 1)] += change
    assert not -found
    return +found


def engine_parents(engine: Engine) -> dict[int, int]:
    """Hash to the hash before it, by SGLang's own events."""
    found = {}
    for event in _named(engine.events, "BlockStored"):
        before = event.parent_block_hash
        for key in event.block_hashes:
            if before is not None:
                found[key & (2**64 - 1)] = before & (2**64 - 1)
            before = key
    return found


def wanting() -> set[str]:
    """Requests that SGLang makes room for at this moment, read in the frames of its own functions."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name, values = frame.f_code.co_name, frame.f_locals
        if name in ("alloc_for_extend", "alloc_for_decode", "alloc_for_decode_default"):
            return {req.rid for req in values["batch"].reqs}
        if name == "check_decode_mem":
            chosen = values["selected_indices"]
            reqs = values["self"].reqs
            return {req.rid for req in (reqs if chosen is None else [reqs[at] for at in chosen])}
        if name in ("add_one_req", "release_req") and "req" in values:
            return {values["req"].rid} if name == "add_one_req" else set()
        frame = frame.f_back
    return set()


def watch_loads(engine: Engine, log: Counter[str]) -> None:
    """Count the blocks that SGLang loads back for each request, beneath the tap."""
    tree, page = engine.scheduler.tree_cache, engine.page
    load = tree.init_load_back

    def load_and_count(params: Any) -> Any:
        answer = load(params)
        log[params.req.rid] += answer[0] // page
        return answer

    tree.init_load_back = load_and_count


def watch_storage(engine: Engine, log: Counter[tuple[str, int, str]]) -> None:
    """Count SGLang's own copies between host and storage, beneath the tap: (direction, pages, end)."""
    tree, page = engine.scheduler.tree_cache, engine.page
    controller = getattr(tree, "cache_controller", None)
    if controller is None or not controller.enable_storage:
        return
    controller.storage_host_pool.pin_memory = False  # needs a device
    save, take, drop = controller._page_backup_or_log, tree._handle_prefetch_result, tree._retire_ongoing_prefetch

    def save_and_count(operation: Any) -> None:
        save(operation)
        written = operation.completed_tokens // page
        log["G2>G3", len(operation.hash_value), "completed" if written == len(operation.hash_value) else "failed"] += 1

    def take_and_count(operation: Any) -> None:
        wanted = len(tree.ongoing_prefetch[operation.handle].host_indices)
        come = operation.completed_tokens
        take(operation)
        log["G3>G2", wanted // page, "completed" if come == wanted else "failed"] += 1

    def drop_and_count(request: Any, host_indices: Any, extra_pools: Any) -> None:
        if host_indices is not None and len(host_indices):
            log["G3>G2", len(host_indices) // page, "cancelled"] += 1
        drop(request, host_indices, extra_pools)

    controller._page_backup_or_log = save_and_count
    tree._handle_prefetch_result, tree._retire_ongoing_prefetch = take_and_count, drop_and_count


class StorageCopies:
    """The same copies, as they were told."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, int, str]] = Counter()
        self._of: dict[int, tuple[str, int]] = {}
        self._blocks: dict[int, int] = {}

    def see(self, event: ev.Event, state: CacheState) -> None:
        if isinstance(event, ev.CandidatePromoted):
            source, target = (state.pools[pool].info.tier for pool in (event.source_pool, event.target_pool))
            self._of[event.candidate] = f"{source.name}>{target.name}", event.operation
        elif isinstance(event, ev.OperationStarted):
            self._blocks[event.operation] = event.blocks
        elif isinstance(event, ev.CandidateEnded) and event.candidate in self._of:
            direction, operation = self._of.pop(event.candidate)
            if "G3" in direction:
                self.ended[direction, self._blocks[operation], event.status.label] += 1


def watch_spans(engine: Engine, spans: dict[str, tuple[int, int]]) -> None:
    """Keep the span of tokens, as (first, end), that SGLang's tree fetched for each waiting request."""
    tree = engine.scheduler.tree_cache
    if not getattr(tree, "enable_storage", False):
        return
    pop = tree.pop_prefetch_loaded_span

    def pop_and_keep(request: Any) -> tuple[int, int | None]:
        tokens, first = pop(request)
        if tokens:
            spans[request.rid] = first, first + tokens
        return tokens, first

    tree.pop_prefetch_loaded_span = pop_and_keep


def storage_hits(engine: Engine, began: set[str], spans: dict[str, tuple[int, int]]) -> Counter[str]:
    """Blocks of the prompt of each request that begins in this step which came from the storage.

    A retracted request begins again, and may have fetched other pages meanwhile, also of its answer. SGLang's own split
    counts only the first time, so the fetched spans are read where the scheduler takes them."""
    found: Counter[str] = Counter()
    batch = engine.formed
    began.difference_update(req.rid for req in engine.scheduler.waiting_queue)
    for req in batch.reqs if batch and batch.forward_mode.is_extend() else ():
        if req.rid not in began:
            began.add(req.rid)
            first, end = spans.pop(req.rid, (0, 0))
            computed, prompt = req.prefix_len, len(req.origin_input_ids) // engine.page * engine.page
            in_host = min(computed, end, prompt) - max(computed - req.materialized_host_hit_len(), first)
            found[req.rid] += max(0, in_host) // engine.page
    return found


def seed_failures() -> None:
    """The storage's random failures follow from the thread that meets them, so two runs differ in timing alone."""

    def dice_of_thread(injector: Any) -> random.Random:
        kept = injector._thread_local
        if not hasattr(kept, "random"):
            kept.random = random.Random(threading.current_thread().name.partition("(")[2])
        return kept.random  # type: ignore[no-any-return]

    injector = getattr(hicache_storage, "HiCacheStorageFailureInjector", None)  # older releases have none
    if injector is not None:
        injector._thread_local_random = dice_of_thread


def watch_evictions(engine: Engine, log: list[tuple[set[int], set[str]]]) -> None:
    """Keep (places, requests they may be for) of every eviction, beneath the tap."""
    pool, page = engine.scheduler.token_to_kv_pool_allocator, engine.page
    tree = engine.scheduler.tree_cache
    evict, free = tree.evict_for_alloc, pool.free_segment
    now: list[set[int]] = []

    def evict_and_keep(*args: Any, **kwargs: Any) -> Any:
        now.append(set())
        try:
            return evict(*args, **kwargs)
        finally:
            places = now.pop()
            if places:
                log.append((places, wanting()))

    def free_and_keep(indices: Any, **kwargs: Any) -> Any:
        if now:
            now[-1].update(int(position) // page for position in indices[::page])
        return free(indices, **kwargs)

    tree.evict_for_alloc, pool.free_segment = evict_and_keep, free_and_keep


def compare_evictions(
    engine: Engine, told: list[tuple[int, int, int | None]], log: list[tuple[set[int], set[str]]],
    names: dict[int, str],
) -> None:
    """Every eviction was told, for a request that SGLang made room for."""
    removed = Counter(
        key & (2**64 - 1) for event in _named(engine.events, "BlockRemoved") for key in event.block_hashes
    )
    assert Counter(key for key, _, _ in told) == removed
    allowed: dict[int, list[set[str]]] = {}
    for places, requests in log:
        for place in places:
            allowed.setdefault(place, []).append(requests)
    for _, place, slot in told:
        requests = allowed[place].pop(0)
        assert not requests or (slot is not None and names[slot] in requests), (place, slot, requests)


def run(order: dict[str, Any]) -> dict[str, Any]:
    """One run to its end, compared after every step; its figures."""
    with tempfile.TemporaryDirectory() as store:
        own = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": store, **order.get("environment", {})}
        os.environ.update(own)
        try:
            return run_with_store(order)
        finally:
            for name in own:
                del os.environ[name]


class Told:
    """The tap's words, as far as they are compared when a run has ended."""

    def __init__(self) -> None:
        self.evicted: list[tuple[int, int, int | None]] = []
        self.loads: Counter[str] = Counter()
        self.from_storage: Counter[str] = Counter()
        self.copies = StorageCopies()
        self.seen: Counter[str] = Counter()
        self.names: dict[int, str] = {}

    def look(self, events: list[ev.Event], state: CacheState, page: int) -> None:
        """The events since the last look."""
        self.names.update({number: slot.request for number, slot in state.slots.items()})
        self.evicted += evictions(events, state)
        self.seen.update(slot.state.label for slot in state.slots.values())
        self.seen.update(type(event).__name__ for event in events)
        for event in events:
            if isinstance(event, ev.DeviceBlocksAssigned) and event.external_tokens:
                self.loads[self.names[event.slots[0]]] += event.external_tokens // page
            elif isinstance(event, ev.PrefixScored):
                self.from_storage[self.names[event.slot]] += event.hits[2] + event.hits[3]
            self.copies.see(event, state)


def run_with_store(order: dict[str, Any]) -> dict[str, Any]:
    """The same, where the files of a storage have their directory."""
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(Path(directory), **order.get("engine", {}))
    log: list[tuple[set[int], set[str]]] = []
    loads: Counter[str] = Counter()
    stored: Counter[tuple[str, int, str]] = Counter()
    from_storage: Counter[str] = Counter()
    watch_evictions(engine, log)
    watch_loads(engine, loads)
    watch_storage(engine, stored)
    spans: dict[str, tuple[int, int]] = {}
    watch_spans(engine, spans)
    tap = engine.scheduler.kvbm_tap
    watch = Watching(tap.recorder, tap.sender.flattener, tap.sender.settings)
    told, began = Told(), set[str]()
    for wave in range(order.get("waves", 1)):
        requests = [(at, f"w{wave}{name}", *rest) for at, name, *rest in workload(*order["workload"])]
        for _ in engine.run(requests, aborts=order.get("aborts", 0.0), seed=order.get("seed", 0)):
            watch.pump()
            assert watch.rejected == [], watch.rejected
            told.look(watch.events, watch.leader.state, engine.page)
            from_storage += storage_hits(engine, began, spans)
            compare(engine, watch.leader.state)
        if order.get("waves"):
            engine.settle()
            watch.pump()
            told.look(watch.events, watch.leader.state, engine.page)
            told.seen["cached before the flush"] += watch.leader.state.pools[0].resident_blocks
            told.seen["flushed"] += engine.scheduler.flush_cache()
            engine.scheduler.tree_cache.take_events()
            watch.pump()
            compare(engine, watch.leader.state)
    watch.pump()
    engine.formed = None
    compare(engine, watch.leader.state)
    assert watch.rejected == []
    assert watch.leader.state.lost_sources == {}
    assert tap.recorder.errors == 0
    assert watch.mirror.totals == watch.leader.state.totals
    assert told.loads == +loads, (told.loads, loads)
    assert +told.from_storage == +from_storage, (told.from_storage - from_storage, from_storage - told.from_storage)
    assert told.copies.ended == stored, (told.copies.ended - stored, stored - told.copies.ended)
    compare_evictions(engine, told.evicted, log, told.names)
    return figures(engine, watch, told, stored)


def figures(engine: Engine, watch: Watching, told: Told, stored: Counter[tuple[str, int, str]]) -> dict[str, Any]:
    """The figures of a run."""
    totals = watch.leader.state.totals
    return {
        "steps": engine.steps, "opened": totals.slots_opened, "finished": {
            reason.label: totals.finished[reason] for reason in FinishReason if totals.finished[reason]
        }, "hits": list(totals.hit_blocks), "preemptions": totals.preemptions, "evicted": len(told.evicted),
        "storage": {f"{direction} {end}": sum(
            count for (way, _, outcome), count in stored.items() if (way, outcome) == (direction, end)
        ) for direction, _, end in stored},
        "nobody": sum(slot is None for _, _, slot in told.evicted), "seen": dict(told.seen), "tree": type(
            engine.scheduler.tree_cache.tree_core).__name__,
    }


def run_halves(order: dict[str, Any]) -> dict[str, Any]:
    """Each request in an engine that prefills and then in one that decodes, compared after every step."""
    slow_down(order.get("polls", 0))
    events: list[ev.Event] = []
    before: Watching | None = None
    seen: Counter[str] = Counter()
    requests = workload(*order["workload"])
    for source, mode in enumerate(("prefill", "decode"), 1):
        with tempfile.TemporaryDirectory() as directory:
            engine = Engine(Path(directory), disaggregation_mode=mode, disaggregation_transfer_backend="nixl",
                            **order.get("engine", {}))
        tap = engine.scheduler.kvbm_tap
        watch = before = Watching(tap.recorder, tap.sender.flattener, tap.sender.settings, source=source, beside=before)
        arrivals = [(at, f"{mode}-{name}", *rest) for at, name, *rest in requests]
        for _ in engine.run(arrivals, aborts=order.get("aborts", 0.0)):
            watch.pump()
            assert watch.rejected == [], watch.rejected
            state = watch.leader.state
            seen.update(f"{mode} {slot.state.label}" for slot in state.slots.values() if slot.source == source)
            compare(engine, state, source)
        for _ in range(order.get("polls", 0) + 2):
            engine.form()
            engine.finish()
        watch.pump()
        compare(engine, watch.leader.state, source)
        assert tap.recorder.errors == 0
        assert tap.sender.settings.uncertain
        events += [event for outcome in watch.outcomes for event in outcome]
    assert before is not None
    assert before.leader.state.slots == {}
    told = {}
    for _, name, *_ in requests:
        explained = explain(evidence(events, LeaderConfig()), f"decode-{name}")
        told[name] = [[half.role, half.request, half.engine, half.state] for half in explained.halves]
    totals = before.leader.state.totals
    return {"told": told, "seen": dict(seen), "preemptions": totals.preemptions, "finished": {
        reason.label: totals.finished[reason] for reason in FinishReason if totals.finished[reason]
    }}


TRANSFERS = {conn.FakeKVSender: conn.FakeKVSender.poll, conn.FakeKVReceiver: conn.FakeKVReceiver.poll}
"""SGLang's fake transfers and their own polls."""


def slow_down(polls: int) -> None:
    """A fake transfer takes so many polls from its beginning to its end."""
    for kind, inner in TRANSFERS.items():
        kind.poll = polled(inner, polls)


def polled(inner: Any, polls: int) -> Any:
    def poll(self: Any) -> Any:
        if getattr(self, "has_sent", False) or getattr(self, "has_sent_metadata", False):
            self.polls = getattr(self, "polls", 0) + 1
            if self.polls <= polls:
                return conn.KVPoll.Transferring
        return inner(self)

    return poll


def evictions(events: list[ev.Event], state: CacheState) -> list[tuple[int, int, int | None]]:
    """(hash, place, slot that caused it) of every eviction from the device."""
    return [
        (key, place, event.for_slot) for event in events
        if isinstance(event, ev.BlocksEvicted) and state.pools[event.pool].info.authority is Authority.OBSERVED
        for key, place in zip(unpack_hashes(event.hashes), unpack_ids(event.ids), strict=True)
    ]


def main() -> None:
    os.environ["KVBM_TAP"] = '{"send": false}'
    binding.plugin()
    HookRegistry.apply_hooks()
    seed_failures()
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        try:
            order = json.loads(line)
            answer = run_halves(order) if order.get("halves") else run(order)
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
