"""``lrfu_auto`` and ``learned`` in vLLM's own host tier, under vLLM's own manager. Run by ``make test-vllm``."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvbm_console.core.ids import Tier
from kvbm_console.tap import vllm as binding
from kvbm_console.tap.vllm_policy import LearnedCachePolicy, LrfuAutoCachePolicy
from tests.core.eviction.generated import references_named
from tests.tap.watching import Watching
from tests.vllm.engine import Engine, offloading
from tests.vllm.features import Kept, workload
from tests.vllm.policies import MODULE, POLICIES, manager_of, replay
from tests.vllm.truth import compare

pytestmark = pytest.mark.timeout(600)
CHUNKS = 12
OURS = pytest.mark.parametrize("policy", ["lrfu_auto", "learned"])


class Manager(RuleBasedStateMachine):
    """Requests with shared prefixes whose copies overlap, fail and are forgotten by a reset."""

    @initialize(policy=st.sampled_from(["lrfu_auto", "learned"]))
    def begin(self, policy: str) -> None:
        self.manager = manager_of(policy, CHUNKS)
        self.requests: dict[int, tuple[ReqContext, list[Any]]] = {}
        self.loading: list[tuple[ReqContext, list[Any]]] = []
        self.storing: list[tuple[ReqContext, list[Any]]] = []
        self.names = 0

    @property
    def policy(self) -> Any:
        assert isinstance(self.manager._policy, LrfuAutoCachePolicy | LearnedCachePolicy)
        return self.manager._policy

    @rule(chat=st.integers(0, 3), turns=st.integers(1, 8))
    def arrive(self, chat: int, turns: int) -> None:
        self.names += 1
        context = ReqContext(f"r{self.names}")
        keys = [make_offload_key(bytes((chat, turn)) * 16, 0) for turn in range(turns)]
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, at + 1)
        self.manager.on_new_request(context)
        self.requests[self.names] = context, keys

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        if not self.requests:
            return
        context, keys = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        found = []
        for key in keys:
            if self.manager.lookup(key, context) is not LookupResult.HIT:
                break
            found.append(key)
        if found:
            self.manager.prepare_load(found, context)
            self.loading.append((context, found))

    @rule(data=st.data(), first=st.integers(0, 4))
    def store(self, data: st.DataObject, first: int) -> None:
        if not self.requests:
            return
        context, keys = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        answer = self.manager.prepare_store(keys[first:], context)
        if answer is not None and answer.keys_to_store:
            self.storing.append((context, list(answer.keys_to_store)))

    @rule(data=st.data(), works=st.booleans())
    def end_store(self, data: st.DataObject, works: bool) -> None:
        if self.storing:
            context, keys = self.storing.pop(data.draw(st.integers(0, len(self.storing) - 1)))
            self.manager.complete_store(keys, context, success=works)

    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        if self.loading:
            context, keys = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
            self.manager.complete_load(keys, context)

    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        if self.requests:
            context, _ = self.requests.pop(data.draw(st.sampled_from(sorted(self.requests))))
            self.manager.on_request_finished(context)

    @rule()
    def reset(self) -> None:
        self.manager.reset_cache()
        self.loading.clear()
        self.storing.clear()

    @invariant()
    def every_place_has_one_owner(self) -> None:
        chunks = self.policy._chunks
        places = [chunk.chunk_id for chunk in chunks.values()]
        assert len(set(places)) == len(places)
        assert not set(places) & set(self.manager._free_list)
        assert len(places) + self.manager._get_num_free_chunks() == CHUNKS
        assert set(self.policy._keys.values()) == set(chunks)
        assert set(self.policy._keys) == set(self.policy.ranking.resident)

    @invariant()
    def idle_is_what_no_copy_uses(self) -> None:
        idle = {self.policy._keys[number] for number in self.policy._idle}
        assert idle == {key for key, chunk in self.policy._chunks.items() if chunk.ref_cnt == 0}
        assert len(idle) == self.manager._num_evictable_cache_chunks

    @invariant()
    def a_copy_in_flight_keeps_its_chunk(self) -> None:
        for _, keys in [*self.loading, *self.storing]:
            assert all(key in self.policy._chunks for key in keys)


Manager.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestManager = Manager.TestCase


@OURS
def test_a_chunk_that_is_read_or_protected_is_not_evicted(policy: str) -> None:
    manager = manager_of(policy, 2)
    first, second, third = (make_offload_key(bytes((number,)) * 32, 0) for number in range(3))
    one, two = ReqContext("one"), ReqContext("two")
    manager.complete_store(manager.prepare_store([first, second], one).keys_to_store, one)
    manager.prepare_load([first], one)
    answer = manager.prepare_store([third], two)
    assert answer is not None
    assert answer.evicted_keys == [second]
    manager.complete_store([third], two)
    assert manager.prepare_store([third, make_offload_key(b"4" * 32, 0)], two) is None, "one is read, one protected"


@OURS
def test_a_request_counts_once_however_many_calls_vllm_makes(policy: str) -> None:
    manager = manager_of(policy, 8)
    ours: Any = manager._policy
    context = ReqContext("one")
    keys = [make_offload_key(bytes((number,)) * 32, 0) for number in range(6)]
    for at, key in enumerate(keys):
        context.set_offload_key_position(key, at + 1)
    for first in (0, 2, 4):  # the prompt is computed in three steps
        manager.complete_store(manager.prepare_store(keys[: first + 2], context).keys_to_store, context)
    manager.prepare_load(keys[:3], context)
    manager.complete_load(keys[:3], context)
    manager.on_request_finished(context)
    ranking = ours.ranking
    uses = {node.uses for node in ranking._nodes} if policy == "learned" else set(ranking._uses.values())
    assert uses == {1}
    assert ours.evict(1, set())[0][0] == keys[-1], "the end of the prompt is the coldest"


@OURS
def test_what_it_remembers_is_bounded(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ranked", "learned"):
        monkeypatch.setattr(f"kvbm_console.core.eviction.{module}.ghosts_max", lambda capacity: 100)
    manager = manager_of(policy, 50)
    for number in range(2_000):
        context = ReqContext(f"r{number}")
        keys = [make_offload_key(bytes((part,)) + number.to_bytes(31, "big"), 0) for part in range(3)]
        manager.complete_store(manager.prepare_store(keys, context).keys_to_store, context)
        manager.on_request_finished(context)
    ours: Any = manager._policy
    assert len(ours._chunks) == 50
    assert ours.gauges()["ghosts"] <= 115, "an eighth more, until the next are forgotten"


@pytest.mark.parametrize(("load", "chunks"), [("default-a", 500), ("default-b", 700)])
def test_ours_are_not_a_point_below_the_better_of_vllms_own(load: str, chunks: int) -> None:
    found = {policy: replay(references_named(load), policy, chunks).hit_rate for policy in POLICIES}
    assert min(found["lrfu_auto"], found["learned"]) >= max(found["lru"], found["arc"]) - 1.0, found


@pytest.mark.parametrize(
    ("kind", "choice"), [(LrfuAutoCachePolicy, "eviction half_life_s"), (LearnedCachePolicy, "eviction fits")]
)
def test_vllms_scheduler_runs_with_it_and_the_tap_tells_its_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any], choice: str
) -> None:
    """As a server loads it, by the two settings of the connector."""
    monkeypatch.setattr(binding, "Sender", Kept)
    entry = offloading(40, eviction_policy=kind.__name__, cache_policy_module_path=MODULE)
    engine = Engine(tmp_path, entry, hook={}, blocks=48, running=4)
    sender = engine.tap.sender
    watch = Watching(sender.recorder, sender.flattener, sender.settings)
    for output in engine.run(workload(2, 6, 4)):
        watch.pump()
        compare(engine, watch.leader.state, set(output.num_scheduled_tokens))
    manager: Any = engine.connector.connector_scheduler.manager
    assert isinstance(manager, CPUOffloadingManager)
    assert type(manager._policy) is kind
    assert watch.leader.state.totals.hit_blocks[Tier.G2 - 1] > 0
    assert manager._policy.gauges()["ghosts"] > 0
    told = sender.recorder.watch.measured()[-1]
    assert (told[choice], told["eviction ghosts"]) == (0.0, manager._policy.gauges()["ghosts"])
