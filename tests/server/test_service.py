"""The service without a socket: what is published folds, a bug of ours is undone, leases and deadlines are stimuli."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbm_console.core import leader as core
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.errors import Refused
from kvbm_console.core.events import HoldReleased, InvariantViolated
from kvbm_console.core.ids import Authority, FinishReason, HoldEnd, Note, SlotState, Tier
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import decode_facts, digest, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.writer import Recorder
from kvbm_console.service import LeaderService
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.embedded import (
    Rig,
    build,
    default_engine_config,
    default_leader_config,
    embed,
    parse_workload,
)
from kvbm_console.stream.ring import Ring
from kvbm_console.wire.batches import MSGPACK, PROTOBUF, pack_events, unpack_events

BLOCKS = pack_ids([0, 1, 2, 3])


def machine(ring: Ring | None = None, **changes: Any) -> tuple[LeaderService, Rig]:
    """A service with the built-in workload, not yet run."""
    workload = parse_workload("multiturn:seed=3")
    calendar = Calendar()
    service = LeaderService(default_leader_config(workload), calendar.clock, ring=ring, **changes)
    service.start()
    return service, embed(service.dispatcher, calendar, default_engine_config(workload), workload)


def folded(service: LeaderService) -> CacheState:
    """The facts as somebody sees them who has the base snapshot and the ring."""
    service.broadcaster.flush()
    base = service.snapshot()
    state = decode_facts(base.facts)
    for data in service.ring.data_since(base.seq):
        for event in unpack_events(data):
            if event.seq >= base.seq:
                state.apply(event)
    return state


@pytest.mark.parametrize("encoding", [MSGPACK, PROTOBUF], ids=["msgpack", "protobuf"])
def test_folding_the_encoded_events_gives_the_leaders_digest_at_every_step(encoding: int) -> None:
    workload = parse_workload("multiturn:seed=9")
    mirror, steps = CacheState(), [0]
    rigs: list[Rig] = []

    def publish(stimulus: Stimulus, outcome: Outcome) -> None:
        if outcome.events:
            for event in unpack_events(pack_events(outcome.events, encoding=encoding).data):
                mirror.apply(event)
        if rigs:
            assert digest(mirror) == rigs[0].leader.digest()
            steps[0] += 1

    config = default_leader_config(workload, g2_blocks=192, g3_blocks=512)
    rigs.append(build(config, default_engine_config(workload, g1_blocks=192), workload, publish=publish))
    rigs[0].run_to_end(3_000_000_000)
    assert steps[0] > 1_000
    assert sum(mirror.totals.moved_blocks.values()) > 0


@pytest.mark.parametrize("ring_events", [64, 500, 100_000])
def test_base_snapshot_and_ring_always_give_the_facts(ring_events: int) -> None:
    service, rig = machine(Ring(ring_events))
    for until_ms in range(100, 4_000, 100):
        rig.run_to_end(until_ms * 1_000_000)
        assert digest(folded(service)) == service.digest()[1]
        assert service.snapshot().seq >= service.ring.first_seq
        assert service.ring.events <= ring_events or len(service.ring._entries) == 1
    assert service.ring.next_seq == service.state.seq > 1_000


def test_each_flush_is_encoded_once_and_the_recorder_gets_the_rings_bytes() -> None:
    offered: list[bytes] = []

    class Kept:
        def offer(self, stimuli: Any, events: Any) -> None:
            if events is not None:
                offered.append(events.data)

        def status(self) -> None: ...

        def close(self) -> None: ...

    service, rig = machine()
    service.recorder = Kept()
    readers = [service.broadcaster.subscribe(service.ring.next_seq, MSGPACK) for _ in range(20)]
    rig.run_to_end(1_000_000_000)
    service.broadcaster.flush()
    first = readers[0].cursor.position
    assert service.ring.data_since(first) == offered
    assert service.ring.encodes[MSGPACK] <= service.broadcaster.flushes
    for reader in readers:
        while reader.read() is not None:
            pass
    assert service.ring.encodes == {MSGPACK: service.ring.encodes[MSGPACK]}
    assert len(offered) <= service.broadcaster.flushes


# --- a bug of ours ---


def break_once(monkeypatch: pytest.MonkeyPatch, kind: type[Stimulus], when: Callable[[Any], bool]) -> list[int]:
    """Let the handler of a kind raise once behind its events; returns the list of numbers of broken stimuli."""
    (entry, handle, names_request), broken = core._ROUTES[kind], list[int]()

    def handler(leader: Leader, stimulus: Any) -> object:
        result = handle(leader, stimulus)
        if not broken and when(stimulus):
            broken.append(stimulus.n)
            raise RuntimeError("a bug behind the first event")
        return result

    monkeypatch.setitem(core._ROUTES, kind, (entry, handler, names_request))
    return broken


@pytest.mark.parametrize(("ring_events", "recorded"), [(200, False), (100_000, False), (100_000, True)])
def test_a_bug_of_the_core_is_undone_published_and_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ring_events: int, recorded: bool
) -> None:
    service, rig = machine(Ring(ring_events))
    if recorded:
        record(service, tmp_path)
    broken = break_once(monkeypatch, st.MatchRequested, lambda stimulus: stimulus.n > 600)
    before: list[bytes] = []
    published: list[Any] = []
    publish = service.dispatcher.publish
    assert publish is not None

    def watch(stimulus: Stimulus, outcome: Outcome) -> None:
        if stimulus.n in broken:
            published.append(outcome.events)
            expected = decode_facts(before[0])
            expected.totals.violations += 1
            expected.seq, expected.n, expected.at_ns = expected.seq + 1, stimulus.n, stimulus.at_ns
            assert digest(expected) == service.digest()[1]
        publish(stimulus, outcome)
        before[:] = [encode_facts(service.state)]

    service.dispatcher.publish = watch
    with pytest.raises(Exception, match="got no answer"):  # the engine does not survive it; the leader does
        rig.run_to_end(60_000_000_000)
    assert service.recoveries == 1
    ((violation,),) = published
    assert isinstance(violation, InvariantViolated)
    assert (violation.rule, violation.cause) == ("RuntimeError", broken[0])
    state = folded(service)
    assert digest(state) == service.digest()[1]
    assert state.totals.violations == 1
    request = next(slot.request for slot in state.slots.values() if slot.state is SlotState.INITIALIZED)
    outcome = service.dispatcher.port(1).submit(st.MatchRequested, request, 0)
    assert outcome.result is not None
    assert digest(folded(service)) == service.digest()[1]


def test_a_bug_that_cannot_be_undone_leaves_the_facts_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    service, rig = machine(Ring(100_000))
    break_once(monkeypatch, st.MatchRequested, lambda stimulus: stimulus.n > 600)

    def unreadable() -> Any:
        raise RuntimeError("a stimulus cannot be read")

    monkeypatch.setattr(service, "_stimuli_since_base", unreadable)
    with pytest.raises(Exception, match="got no answer"):
        rig.run_to_end(60_000_000_000)
    assert service.recoveries == 1
    state = folded(service)
    assert state.totals.violations == 1
    assert digest(state) == service.digest()[1]
    service.submit(st.NoteReported, Note.SHUTTING_DOWN, "the stream goes on")
    assert digest(folded(service)) == service.digest()[1]


def test_a_keyframe_is_a_base_so_memory_are_exported_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    service, rig = machine(Ring(1_000))
    exports: list[int] = []
    export = Leader.export

    def counted(leader: Leader) -> bytes:
        exports.append(leader.state.seq)
        return export(leader)

    monkeypatch.setattr(Leader, "export", counted)
    recorder = record(service, tmp_path)
    rig.run_to_end(10_000_000_000)
    service.close()
    recorder.close()
    recording = Recording.open(tmp_path)
    assert recording.last_seq > 10_000
    assert exports == recording.keyframe_seqs


def test_with_check_a_bug_is_raised_where_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    service, rig = machine(check=True)
    break_once(monkeypatch, st.IterationFinished, lambda stimulus: stimulus.iteration == 10)
    with pytest.raises(RuntimeError, match="a bug behind the first event"):
        rig.run_to_end(10_000_000_000)
    assert service.recoveries == 0


def record(service: LeaderService, directory: Path) -> Recorder:
    """With keyframes that stand close."""
    service.recorder = recorder = Recorder(
        directory, config=service.config, incarnation=service.incarnation, keyframe=service.keyframe,
        keyframe_events=400, sync_interval_s=None,
    )
    return recorder


# --- leases and deadlines ---


def one_request(service: LeaderService) -> None:
    """An engine with one request that is about to be scheduled."""
    port = service.dispatcher.port(service.new_source())
    port.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 32, 16, Authority.ENGINE)
    port.submit(st.RequestArrived, "r-1", pack_hashes([1, 2, 3]), 50, 10, 0, None)
    port.submit(st.MatchRequested, "r-1", 0)
    port.submit(st.BlocksAllocated, "r-1", BLOCKS, 0)


def schedule(service: LeaderService) -> None:
    """The iteration that prefills it."""
    port = service.dispatcher.port(1)
    port.submit(st.IterationScheduled, 1, 1, ("r-1",), (), (), (), (), (), ("r-1",), (48,), (), (), b"", 1, 0)


def test_a_lost_lease_releases_its_holds_and_a_renewed_one_does_not_arm_again() -> None:
    now = [0]
    service = LeaderService(LeaderConfig(), lambda: 0, monotonic=lambda: now[0], lease_ttl_ns=100)
    service.start()
    one_request(service)
    session = service.sessions.open("me", lease=True)
    service.sessions.set(session, BreakpointSpec(to_state=SlotState.PREFILLING))
    schedule(service)
    (hold,) = service.state.holds.values()
    assert hold.owner == session.owner == "me-1"
    now[0] = 99
    service.leases.expire()
    assert service.state.holds
    now[0] = 100
    service.leases.expire()
    assert not service.state.holds
    assert service.state.totals.holds_ended[HoldEnd.LEASE_LOST] == 1
    service.sessions.renew(session)
    assert service.state.leases == {"me-1": True}
    assert [known.enabled for known in service.state.breakpoints.values()] == [False]
    service.sessions.close(session)
    assert service.state.leases == {}


@pytest.mark.asyncio
async def test_a_hold_ends_at_its_longest_time_whoever_forgot_it() -> None:
    service = LeaderService(LeaderConfig(), lambda: 0)
    service.start()
    one_request(service)
    async with anyio.create_task_group() as group:
        await group.start(service.run)
        session = service.sessions.open("shell", lease=False)
        service.sessions.set(session, BreakpointSpec(to_state=SlotState.PREFILLING, max_hold_ns=50_000_000))
        begin = asyncio.get_running_loop().time()
        schedule(service)
        assert len(service.state.holds) == 1
        while service.state.holds:
            await service.changed.wait()
        assert 0.05 <= asyncio.get_running_loop().time() - begin < 1.0
        group.cancel_scope.cancel()
    service.broadcaster.flush()
    events = [event for data in service.ring.data_since(0) for event in unpack_events(data)]
    assert [(e.why, e.by) for e in events if isinstance(e, HoldReleased)] == [(HoldEnd.EXPIRED, "")]


def test_sessions_refuse_with_a_sentence() -> None:
    service = LeaderService(LeaderConfig(), lambda: 0)
    service.start()
    for name in ("", "x" * 65, "two\nlines"):
        with pytest.raises(Refused, match="name must be 1 to 64 printable bytes"):
            service.sessions.open(name, lease=True)
    mine = service.sessions.open("me", lease=True)
    shell = service.sessions.open("shell", lease=False)
    verdict = service.sessions.set(mine, BreakpointSpec(to_state=SlotState.DECODING))
    with pytest.raises(Refused, match=f"breakpoint {verdict.id} belongs to me-1"):
        service.sessions.set(shell, BreakpointSpec(id=verdict.id))
    for _ in range(255):
        service.sessions.set(shell, BreakpointSpec(to_state=SlotState.DECODING))
    with pytest.raises(Refused, match="256 breakpoints already"):
        service.sessions.set(shell, BreakpointSpec(to_state=SlotState.DECODING))


# --- the status document ---


NOTHING_EVICTED = {
    "evicted_blocks": 0, "thrash_blocks": 0, "thrash_rate": None, "asked_again_blocks": 0, "asked_again_p50_ns": None,
    "asked_again_p90_ns": None,
}


def test_the_status_document_has_exactly_the_documented_keys() -> None:
    service = LeaderService(LeaderConfig(g2_blocks=16), lambda: 7, incarnation="abc", name="here")
    service.start()
    one_request(service)
    session = service.sessions.open("me", lease=True)
    service.sessions.set(session, BreakpointSpec(to_state=SlotState.PREFILLING, max_hold_ns=1_000))
    schedule(service)
    document = service.status()
    assert document == {
        "slots": [{
            "slot": "0", "request": "r-1", "state": "prefilling", "since_ns": 7, "age_ns": 0, "computed_tokens": 48,
            "prompt_tokens": 50, "outstanding": 0, "hold": "1",
        }],
        "tiers": {
            "g1": {"capacity_blocks": 32, "resident_blocks": 4, "referenced_blocks": 4, "writing_blocks": 0,
                   "hits": 0, "lookups": 3, "uncertain": False, **NOTHING_EVICTED},
            "g2": {"capacity_blocks": 16, "resident_blocks": 0, "referenced_blocks": 0, "writing_blocks": 0,
                   "hits": 0, "lookups": 3, "uncertain": False, **NOTHING_EVICTED},
            "g3": {"capacity_blocks": 0, "resident_blocks": 0, "referenced_blocks": 0, "writing_blocks": 0,
                   "hits": 0, "lookups": 3, "uncertain": False, **NOTHING_EVICTED},
            "g4": {"capacity_blocks": 0, "resident_blocks": 0, "referenced_blocks": 0, "writing_blocks": 0,
                   "hits": 0, "lookups": 3, "uncertain": False, **NOTHING_EVICTED},
        },
        "transfers": [],
        "breakpoints": [{
            "id": "1", "owner": "me-1", "description": "transition.did * → prefilling", "enabled": True,
            "site": "transition.did", "request": "*", "from_state": None, "to_state": "prefilling", "tier": None,
            "route": None, "action": "hold", "one_shot": False, "hits": 1, "max_hold_ns": 1_000,
            "name": "", "status": None, "condition": "", "ignore_count": 0, "hit_condition": "", "log": "",
            "suspend": "slot", "depends_on": None, "on_timeout": "continue", "expires_ns": 3_600 * 10**9,
            "persist": False, "message": "",
        }],
        "holds": [{
            "id": "1", "slot": "0", "request": "r-1", "site": "transition.did", "point": "schedule", "owner": "me-1",
            "breakpoints": ["1"], "pending": True, "since_ns": 7, "deadline_ns": 1_007, "suspend": "slot",
            "on_timeout": "continue", "age_ns": 0,
        }],
        "ended_holds": [],
        "frozen": None,
        "stream": {
            "name": "here", "head_seq": service.state.seq - 1, "epoch": 0, "incarnation": "abc", "subscribers": 0,
        },
        "recorder": None,
        "engines": [],
        "publishers": [],
        "parts": [],
        "warnings": [],
        "prefetch": {"fetched_blocks": 0, "used_blocks": 0, "precision": None, "limits": 0, "limited": False},
        "thrash": {"window_ns": 1_000_000, "evicted_blocks": 0, "thrash_blocks": 0, "thrash_rate": None},
    }
    service.dispatcher.port(1).submit(st.RequestFinished, "r-1", BLOCKS, FinishReason.ABORTED)
    assert service.status()["slots"] == service.status()["holds"] == []
    assert service.status()["ended_holds"] == [{
        "id": "1", "request": "r-1", "site": "transition.did", "point": "schedule", "at_ns": 7, "held_ns": 0,
        "why": "cancelled", "by": "aborted", "text": "the request was aborted", "times": 1,
    }]


def test_refused_holds_leave_one_trace_with_their_count() -> None:
    service = LeaderService(LeaderConfig(g2_blocks=16, hold_budget_min=1, hold_budget_share=0.0), lambda: 0)
    service.start()
    service.submit(st.BreakpointsReplaced, "me", (BreakpointSpec(to_state=SlotState.INITIALIZED),), "")
    for number in range(4):
        service.submit(st.RequestArrived, f"r-{number}", b"", 8, 8, 0, None)
    (refused,) = service.status()["ended_holds"]
    assert (refused["id"], refused["why"], refused["request"], refused["times"]) == (None, "refused", "r-3", 3)
    assert refused["text"] == "refused: the budget of 1 holds is used up"
    service.submit(st.HoldContinued, None, "ann", None, None)
    service.submit(st.RequestArrived, "r-4", b"", 8, 8, 0, None)
    service.submit(st.RequestArrived, "r-5", b"", 8, 8, 0, None)
    assert [(entry["why"], entry["times"]) for entry in service.status()["ended_holds"]] == [
        ("refused", 3), ("continued", 1), ("refused", 1),
    ]


def test_an_unknown_capacity_is_null_and_pools_of_engines_add_up() -> None:
    service = LeaderService(LeaderConfig(), lambda: 0)
    service.start()
    for capacity in (10, 20):
        port = service.dispatcher.port(service.new_source())
        port.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", capacity, 16, Authority.ENGINE)
    assert service.status()["tiers"]["g1"]["capacity_blocks"] == 30
    port = service.dispatcher.port(service.new_source())
    port.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", None, 16, Authority.ENGINE)
    assert service.status()["tiers"]["g1"]["capacity_blocks"] is None
