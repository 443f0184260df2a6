"""SGLang's cache keeps each content once: its tap's messages, told by hand.

Law of this file: each message is one that SGLang's scheduler was seen to cause.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.ids import SlotState, Tier
from kvbm_console.core.tiers import READY
from kvbm_console.tap import sglang as binding
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import TapSettings
from kvbm_console.tap.sglang_flatten import HOST_MEDIUM, SglangFlattener
from tests.tap.watching import Watching

PAGE = 4
KEYS = [11, 12, 13]


class Tensor(list[int]):
    """Token positions, as a tensor gives them."""

    def __getitem__(self, part: Any) -> Any:
        found = super().__getitem__(part)
        return Tensor(found) if isinstance(part, slice) else found

    def tolist(self) -> list[int]:
        return list(self)


@pytest.fixture
def watch() -> Watching:
    watch = Watching(TapRecorder(), SglangFlattener(page=PAGE), TapSettings("", "sglang", PAGE, 16))
    watch.pump()
    return watch


def tell(watch: Watching, *messages: list[Any]) -> None:
    """Messages of one step."""
    watch.now += 1_000
    watch.events = []
    watch.take([[message[0], watch.now, *message[1:]] for message in messages])
    assert not watch.translator.wants_all


def start(watch: Watching, name: str, places: list[int], found: int = 0) -> None:
    """A request of three blocks and a token starts, with blocks found on the device."""
    tell(watch, ["new", name, KEYS, 3 * PAGE + 1, 8, 0, None], ["lookup", name, found * PAGE, 0, False])
    going = 3 * PAGE + 1 - found * PAGE
    tell(watch, ["step", [[name, places, found * PAGE, going, 3 * PAGE + 1]], [], [], [], [], [], 1, []])


def test_the_places_of_the_cache_replace_a_requests_own_copies(watch: Watching) -> None:
    start(watch, "a", [0, 1, 2, 3])
    start(watch, "b", [4, 5, 6, 7])
    tell(watch, ["publish", "a", [0, 1], KEYS[:2]])
    tell(watch, ["publish", "b", [0, 1, 6], KEYS])
    state = watch.leader.state
    a, b = state.slots.values()
    assert (a.device_blocks, b.device_blocks) == ([0, 1, 2, 3], [0, 1, 6, 7])
    assert (a.filled_blocks, b.filled_blocks) == (2, 3)
    (pool,) = state.pools
    assert [pool.refs[place] for place in range(8)] == [2, 2, 1, 1, 0, 0, 1, 1]
    assert [pool.hash_of[place] for place in (0, 1, 6)] == KEYS
    assert [type(event) for event in watch.events] == [ev.DeviceBlocksReplaced, ev.BlocksFilled]
    tell(watch, ["publish", "a", [6], KEYS[2:]])
    assert a.device_blocks == [0, 1, 6, 3]
    tell(watch, ["finish", "a", "FINISHED_STOPPED", False, 0], ["finish", "b", "FINISHED_STOPPED", False, 0])
    assert (not any(pool.refs), pool.resident_blocks, watch.rejected, state.lost_sources) == (True, 3, [], {})
    assert watch.mirror.totals == state.totals


@pytest.mark.parametrize("places", [[9, 5], [4, 5, 6, 7, 8], [1, 1]], ids=str)
def test_a_publication_that_does_not_fit_marks_the_engine_as_lossy(watch: Watching, places: list[int]) -> None:
    start(watch, "b", [4, 5, 6, 7])
    tell(watch, ["publish", "b", places, list(range(30, 30 + len(places)))])
    assert watch.leader.state.lost_sources
    assert watch.rejected == []


def test_a_retracted_request_finds_blocks_of_an_answer_that_another_request_computed(watch: Watching) -> None:
    """Both got the same answer. The first published its answer, so the second finds more than its prompt."""
    start(watch, "a", [0, 1, 2, 3])
    start(watch, "b", [4, 5, 6, 7])
    tell(watch, ["preempt", "b"])
    tell(watch, ["publish", "a", [0, 1, 2, 3], [*KEYS, 14]], ["finish", "a", "FINISHED_STOPPED", False, 0])
    tell(watch, ["lookup", "b", 4 * PAGE, 0, False])
    tell(watch, ["step", [["b", [0, 1, 2, 3, 8], 4 * PAGE, 1, 4 * PAGE + 1]], [], [], [], [], [], 1, []])
    (slot,) = [slot for slot in watch.leader.state.slots.values() if slot.request == "b"]
    assert (slot.state, slot.device_blocks, slot.filled_blocks) == (SlotState.PREFILLING, [0, 1, 2, 3, 8], 4)
    assert slot.hashes == [*KEYS, 14]
    assert (watch.rejected, watch.leader.state.lost_sources) == ([], {})


def test_an_eviction_names_the_requests_that_found_no_free_page(watch: Watching) -> None:
    """``a`` needs 2 pages, ``b`` 2, ``c`` 1, and 3 pages are free: ``b`` needs one evicted page, ``c`` another."""
    flattener = SglangFlattener(page=PAGE)
    freed = [Tensor(range(5 * PAGE, 7 * PAGE))]  # the tree gives up pages 5 and 6
    record = ("evict", 7, freed, None, 3 * PAGE, [("a", 2 * PAGE), ("b", 2 * PAGE), ("c", PAGE)])
    assert flattener.messages(record) == [["evict", 7, [["b", [5]], ["c", [6]]]]]
    start(watch, "a", [4, 5, 6, 7])
    tell(watch, ["publish", "a", [4, 5], KEYS[:2]], ["finish", "a", "FINISHED_STOPPED", False, 0])
    tell(watch, ["new", "b", [91], PAGE, 1, 0, None], ["new", "c", [92], PAGE, 1, 0, None])
    tell(watch, ["evict", [["b", [4]], ["c", [5]]]])
    slots = {slot.slot: slot.request for slot in watch.leader.state.slots.values()}
    evicted = [event for event in watch.events if isinstance(event, ev.BlocksEvicted)]
    assert [(slots[event.for_slot or 0], unpack_ids(event.ids), unpack_hashes(event.hashes)) for event in evicted] == [
        ("b", [4], KEYS[:1]), ("c", [5], KEYS[1:2]),
    ]


def test_salts_and_adapters_separate_the_hashes_of_equal_tokens() -> None:
    def keys(**more: Any) -> list[int]:
        request = SimpleNamespace(
            rid="a", origin_input_ids=array("q", range(9)), output_ids=array("q"), sampling_params=None, **more
        )
        (message,) = SglangFlattener(page=PAGE).messages(("new", 1, request))
        return list(message[3])

    plain, salted, adapted = keys(), keys(cache_salt="s"), keys(extra_key="lora")
    assert len(plain) == 2
    assert len({*plain, *salted, *adapted}) == 6


def owner(role: str, *lacking: str) -> Any:
    methods = {name: lambda *_: None for name in binding.NEEDED[role] if name not in lacking}
    return type(role.capitalize(), (), methods)()


def scheduler_of(release: dict[str, str]) -> Any:
    """The objects of a scheduler that lack a method each."""
    scheduler = owner("scheduler", release.get("scheduler", ""))
    scheduler.req_to_token_pool = owner("table")
    scheduler.tree_cache = owner("tree", release.get("tree", ""))
    scheduler.token_to_kv_pool_allocator = owner("pool", release.get("pool", ""))
    scheduler.spec_algorithm = SimpleNamespace(is_none=lambda: "drafts" not in release)
    scheduler.disaggregation_mode = SimpleNamespace(name="NULL")
    return scheduler


@pytest.mark.parametrize(("release", "lacking"), [
    ({}, []),
    ({"tree": "checkpoint"}, ["Tree.checkpoint"]),  # 0.5.20
    ({"scheduler": "get_new_batch_prefill", "tree": "checkpoint"},
     ["Scheduler.get_new_batch_prefill", "Tree.checkpoint"]),
    ({"tree": "checkpoint", "drafts": ""}, []),
])
def test_a_release_without_what_the_tap_needs_is_not_observed(
    release: dict[str, str], lacking: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(binding, "_leads", lambda _: True)
    scheduler = scheduler_of(release)
    assert binding.missing_methods(scheduler) == lacking
    if lacking:
        assert binding.tap_of(scheduler, {"send": False}) is None
        assert f"has no {', '.join(lacking)}, so the engine is not observed" in caplog.text


BARE = {
    "scheduler": (
        "_add_request_to_queue", "send_abort_output", "get_new_batch_prefill", "get_next_batch_to_run",
        "get_next_disagg_prefill_batch_to_run", "send_kv_chunk", "handle_bootstrap_failure",
        "get_next_disagg_decode_batch_to_run",
    ),
    "tree": (
        "match_prefix", "checkpoint", "reset", "evict", "evict_for_alloc", "init_load_back", "writing_check",
        "_handle_prefetch_result", "_retire_ongoing_prefetch",
    ),
    "pool": ("free", "check_decode_capacity"),
    "table": ("alloc", "free"),
    "controller": ("write", "load", "write_storage", "_page_backup", "allocate_storage_hit"),
    "group": ("free",),
    "preallocated": ("_pre_alloc", "pop_preallocated", "resume_retracted_reqs"),
    "transferred": ("pop_transferred",),
}
"""SGLang's methods that the tap stands around, by the objects that have them."""
ANSWER = object()
NO_REQUEST = SimpleNamespace(req=object())


class Bare:
    """An object of a later release, which has the methods and no attribute that the tap reads."""

    def __init__(self, role: str) -> None:
        self.calls: list[str] = []
        self.fails = False
        for name in BARE[role]:
            setattr(self, name, self.method(name))

    def method(self, name: str) -> Any:
        def inner(*_: Any, **__: Any) -> object:
            self.calls.append(name)
            if self.fails:
                raise KeyError(name)
            return ANSWER

        return inner


def bare_objects(half: str) -> dict[str, Any]:
    """A scheduler and its parts, by their roles, with what the tap reads when it begins."""
    roles: dict[str, Any] = {role: Bare(role) for role in BARE}
    scheduler, tree, pool = roles["scheduler"], roles["tree"], roles["pool"]
    scheduler.page_size, scheduler.tree_cache, scheduler.waiting_queue = PAGE, tree, []
    scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool = pool, roles["table"]
    scheduler.disaggregation_mode = SimpleNamespace(name=half)
    scheduler.spec_algorithm = SimpleNamespace(is_none=lambda: True)
    scheduler.disagg_decode_prealloc_queue = roles["preallocated"]
    scheduler.disagg_decode_transfer_queue = roles["transferred"]
    tree.disable, tree.cache_controller, tree.host_pool_group = False, roles["controller"], roles["group"]
    pool.size, pool.device = 16 * PAGE, "cpu"
    return roles


def bare_engine(monkeypatch: pytest.MonkeyPatch, half: str = "NULL") -> tuple[binding.SglangTap, dict[str, Any]]:
    """A tap that listens, around objects that lost everything else once the tap stood around them."""
    monkeypatch.setattr(binding, "_parallel", SimpleNamespace)
    roles = bare_objects(half)
    scheduler, tree = roles["scheduler"], roles["tree"]
    tap = binding.SglangTap(scheduler, {"send": False})
    tap.recorder.listen()
    tap.recorder.obey({"held": 2**62}, [], [])
    for owner, names in ((scheduler, ("waiting_queue", "disagg_decode_prealloc_queue")), (tree, ("disable",))):
        for name in names:
            delattr(owner, name)
    return tap, roles


@pytest.mark.parametrize(("half", "role", "name", "arguments"), [
    ("NULL", "scheduler", "_add_request_to_queue", [object()]),
    ("NULL", "scheduler", "send_abort_output", [object(), object()]),
    ("NULL", "scheduler", "get_new_batch_prefill", [object()]),
    ("NULL", "scheduler", "get_next_batch_to_run", []),
    ("NULL", "tree", "match_prefix", [NO_REQUEST]),
    ("NULL", "tree", "checkpoint", [object()]),
    ("NULL", "tree", "evict", [object()]),
    ("NULL", "tree", "evict_for_alloc", [object()]),
    ("NULL", "tree", "init_load_back", [object()]),
    ("NULL", "tree", "init_load_back", [NO_REQUEST]),
    ("NULL", "tree", "_handle_prefetch_result", [object()]),
    ("NULL", "pool", "check_decode_capacity", [("requests", object())]),
    ("NULL", "table", "alloc", [object()]),
    ("NULL", "table", "free", [object()]),
    ("NULL", "controller", "write", [object()]),
    ("NULL", "controller", "load", [object()]),
    ("NULL", "controller", "write_storage", [object()]),
    ("NULL", "controller", "_page_backup", [object()]),
    ("NULL", "controller", "allocate_storage_hit", [object()]),
    ("NULL", "group", "free", [object()]),
    ("PREFILL", "scheduler", "send_kv_chunk", [object(), True]),
    ("PREFILL", "scheduler", "handle_bootstrap_failure", [object()]),
    ("PREFILL", "scheduler", "get_next_disagg_prefill_batch_to_run", []),
    ("DECODE", "scheduler", "get_next_disagg_decode_batch_to_run", []),
    ("DECODE", "preallocated", "_pre_alloc", [object()]),
    ("DECODE", "preallocated", "pop_preallocated", []),
    ("DECODE", "preallocated", "resume_retracted_reqs", []),
    ("DECODE", "transferred", "pop_transferred", []),
])
def test_an_attribute_that_a_later_release_renames_costs_the_report_and_not_the_request(
    half: str, role: str, name: str, arguments: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own answer and its own error reach the caller as without the tap."""
    tap, roles = bare_engine(monkeypatch, half)
    owner = roles[role]
    words = dict(argument for argument in arguments if isinstance(argument, tuple))
    places = [argument for argument in arguments if not isinstance(argument, tuple)]
    assert getattr(owner, name)(*places, **words) is ANSWER
    assert (owner.calls, tap.recorder.errors > 0) == ([name], True)
    owner.fails = True
    with pytest.raises(KeyError, match=name):
        getattr(owner, name)(*places, **words)


def test_stores_are_told_after_a_publication_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    tap, roles = bare_engine(monkeypatch)
    roles["controller"].mem_pool_host = SimpleNamespace(size_per_token=2)
    roles["tree"].fails = True
    with pytest.raises(KeyError):
        roles["tree"].checkpoint(SimpleNamespace(kv=SimpleNamespace(cache_protected_len=0)))
    tap._stores(lambda *_, **__: Tensor(range(PAGE)), Tensor(range(PAGE)), node_id=5)
    assert [record[0] for record in tap.recorder.queue] == ["all", "store"]


def test_copies_whose_table_a_later_release_renames_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ends are never seen, so they would gather without bound."""
    tap, roles = bare_engine(monkeypatch)
    tap._copies[1] = "ongoing_write_through", 5
    assert roles["tree"].writing_check() is ANSWER
    assert (tap._copies, tap.recorder.errors) == ({}, 1)


def test_a_flush_forgets_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tap, roles = bare_engine(monkeypatch)
    roles["controller"]._page_backup(SimpleNamespace(id=7, hash_value=["a"], completed_tokens=PAGE))
    assert list(tap._saved) == [7]
    roles["tree"].reset()
    assert tap._saved == {}
    assert tap.recorder.errors == 0


def test_an_engine_that_cannot_be_observed_gets_its_own_methods_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tap would keep the engine's tensors for a sender that never starts."""
    monkeypatch.setattr(binding, "_parallel", SimpleNamespace)
    roles = bare_objects("NULL")
    del roles["tree"].host_pool_group
    before = {role: dict(vars(owner)) for role, owner in roles.items()}
    with pytest.raises(AttributeError, match="host_pool_group"):
        binding.SglangTap(roles["scheduler"], {"send": False})
    assert {role: vars(owner) for role, owner in roles.items()} == before


def request_in(room: int | None, host: str = "10.0.0.1") -> Any:
    return SimpleNamespace(
        rid="a", bootstrap_room=room, bootstrap_host=host, origin_input_ids=array("q", range(2 * PAGE + 1)),
        output_ids=array("q"), sampling_params=SimpleNamespace(max_new_tokens=4),
    )


@pytest.mark.parametrize(("half", "room", "host", "names"), [
    ("PREFILL", 77, "10.0.0.1", ("77", None)),
    ("DECODE", 77, "10.0.0.1", (None, "77")),
    ("DECODE", 0, "2.2.2.2", (None, None)),  # SGLang's own request to warm up, in each engine
    ("NULL", None, "10.0.0.1", (None, None)),
])
def test_a_room_joins_the_halves_of_a_request(
    half: str, room: int | None, host: str, names: tuple[str | None, str | None]
) -> None:
    flattener = SglangFlattener(page=PAGE, half=half)
    (message,) = flattener.messages(("new", 1, request_in(room, host)))
    assert tuple(message[-2:]) == names


def test_a_request_waits_for_the_blocks_that_another_engine_sends() -> None:
    """The engine forms no step meanwhile, and the slot shows the load all the same."""
    settings = TapSettings("", "sglang", PAGE, 16, medium="EXTERNAL", silent=True)
    watch = Watching(TapRecorder(), SglangFlattener(page=PAGE, half="DECODE"), settings)
    watch.pump()
    request = request_in(77)
    places = Tensor([PAGE * place for place in (1, 2, 3)])
    watch.recorder.queue += [("new", 1, request), ("receive", 2, request, 0, 2 * PAGE + 1, places, None)]
    watch.pump()
    (slot,) = watch.leader.state.slots.values()
    assert (slot.state, slot.device_blocks, slot.cached[3]) == (SlotState.ONBOARDING, [1, 2, 3], 2 * PAGE)
    watch.recorder.queue += [("copies", 3, ["a"], [], [], []), ("decode", 4, [request], Tensor([0]), None, 1)]
    watch.pump()
    assert slot.state is SlotState.PREFILLING
    watch.recorder.queue.append(("decode", 5, [request], Tensor([0]), None, 1))
    watch.pump()
    assert slot.state is SlotState.DECODING
    assert slot.computed_tokens(watch.leader.state.iteration) == 2 * PAGE + 3
    assert watch.rejected == []


def fetching(request: Any, pages: int) -> Watching:
    """A leader that watches HiCache with files as its storage, which has ``pages`` of the request."""
    settings = TapSettings("", "sglang", PAGE, 16, 1, medium=HOST_MEDIUM)
    watch = Watching(TapRecorder(), SglangFlattener(page=PAGE, host=True), settings)
    watch.pump()
    watch.recorder.queue += [
        ("new", 1, request), ("lookup", 2, "a", 0, 0, False), ("fetch", 3, 1, "a", 0, pages, "DISK file", 64)
    ]
    watch.pump()
    return watch


def load(watch: Watching, request: Any, pages: int, stored: int) -> None:
    """The device gets the pages that have come to the host, and the request starts."""
    end = pages * PAGE
    device, tokens = Tensor(range(PAGE, end + PAGE, PAGE)), len(request.origin_input_ids) + len(request.output_ids)
    watch.recorder.queue += [
        ("load", 5, 2, "a", device, Tensor(range(0, end, PAGE)), None, 64),
        ("extend", 6, [(request, end, 1, device, tokens, end, stored)], Tensor([end + PAGE]), None, 1),
        ("copied", 7, 2, "completed"),
    ]
    watch.pump()


def test_pages_of_a_storage_come_to_the_host_and_count_as_its_hits() -> None:
    request = request_in(None)
    watch = fetching(request, 2)
    state = watch.leader.state
    (slot,), (copy,) = state.slots.values(), state.operations.values()
    pools = {pool.info.pool: pool.info.tier.name for pool in state.pools}
    assert (pools[copy.source_pool], pools[copy.target_pool], copy.size_bytes) == ("G3", "G2", 64)
    watch.recorder.queue.append(("fetched", 4, 1, "a", 0, Tensor([0, PAGE]), "completed", ""))
    watch.pump()
    (host,) = (pool for pool in state.pools if pool.info.tier is Tier.G2)
    assert (sorted(host.by_hash), state.operations) == (sorted(slot.hashes), {})
    load(watch, request, 2, 2 * PAGE)
    (scored,) = [event for event in watch.events if isinstance(event, ev.PrefixScored)]
    assert (scored.hits, slot.state, slot.device_blocks) == ((0, 0, 2, 0), SlotState.PREFILLING, [1, 2, 3])
    assert (watch.rejected, state.lost_sources) == ([], {})


def test_a_copy_that_brought_less_has_failed_and_says_how_much_came() -> None:
    watch = fetching(request_in(None), 2)
    watch.recorder.queue.append(("fetched", 4, 1, "a", 0, Tensor([0]), "failed", "1 of 2 pages were read"))
    watch.pump()
    (host,) = (pool for pool in watch.leader.state.pools if pool.info.tier is Tier.G2)
    assert host.resident_blocks == 1
    (end,) = [event for event in watch.events if isinstance(event, ev.OperationReported)]
    assert (end.ok, end.error) == (False, "1 of 2 pages were read")


def test_a_retracted_request_loads_an_answer_that_another_request_computed() -> None:
    """The engine has the loaded page behind the prompt under its hash, so a later request finds it."""
    request = request_in(None)
    watch = Watching(
        TapRecorder(), SglangFlattener(page=PAGE, host=True), TapSettings("", "sglang", PAGE, 16, 1, medium=HOST_MEDIUM)
    )
    watch.recorder.queue += [
        ("new", 1, request), ("lookup", 2, "a", 0, 0, False),
        ("extend", 3, [(request, 0, 9, None, 9, 0, 0)], Tensor(range(9 * PAGE, 9 * PAGE + 9)), None, 1),
        *(("decode", 4, [request], Tensor([12 * PAGE]), None, 1) for _ in range(4)), ("preempt", 5, "a"),
        ("lookup", 6, "a", 0, 0, False), ("fetch", 7, 1, "a", 0, 3, "DISK file", 64),
    ]
    request.output_ids = array("q", range(50, 54))
    watch.recorder.queue.append(("fetched", 4, 1, "a", 0, Tensor([0, PAGE, 2 * PAGE]), "completed", ""))
    watch.pump()
    load(watch, request, 3, 0)
    state = watch.leader.state
    (slot,) = state.slots.values()
    assert len(slot.hashes) == slot.filled_blocks == 3
    device = state.pools[0]
    assert [device.hash_of[place] for place in slot.device_blocks[:3]] == slot.hashes
    assert all(device.content[place] == READY for place in slot.device_blocks[:3])
    assert (watch.rejected, state.lost_sources) == ([], {})


def test_a_parameter_that_another_release_names_otherwise_reaches_the_engine() -> None:
    seen: list[object] = []

    class Engine:
        def free(self, request: str, last: bool = False, *, fast: bool = False) -> tuple[str, bool, bool]:
            return request, last, fast

    def around(inner: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(req)
        return inner(req, *args, **kwargs)

    free = binding.wrapped(Engine().free, around)
    assert free("a") == ("a", False, False)
    assert free(request="b", last=True) == ("b", True, False)
    assert free("c", last=True, fast=True) == ("c", True, True)
    assert free(last=True, request="d") == ("d", True, False)
    assert seen == ["a", "b", "c", "d"]
    with pytest.raises(TypeError, match="unheard"):
        free("e", unheard=1)
