"""A worker's finding on its way: from the engine's metadata to an event, a fault, a line and a counter."""

from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.describe import describe
from kvbm_console.core.leader import Leader
from kvbm_console.metrics.collect import collect, scrape_of
from kvbm_console.metrics.exposition import render
from kvbm_console.sanitize.checker import Corrupt
from kvbm_console.sanitize.fingerprint import PageSide
from kvbm_console.sanitize.planted import FAULTS, play
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sanitizing import Marker, Options, Sanitizer, WorkerMeta, options_of
from kvbm_console.tap.sender import TapSettings
from tests.tap.watching import Watching


def watching() -> Watching:
    """A leader that watches an engine of which nothing has happened yet."""
    made = Watching(TapRecorder(), Flattener(), TapSettings("", "engine", 16, 64))
    made.pump()
    return made


def rows(fault: str) -> list[list[Any]]:
    """The findings of a planted fault, as a worker tells them."""
    return [list(astuple(finding)) for finding in play(fault)[1]]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_finding_becomes_an_event_that_says_all_of_it(fault: str) -> None:
    watch = watching()
    found = rows(fault)
    for row in found:
        watch.recorder.put(("sanitized", 1, row))
    watch.pump()
    events = [event for event in watch.events if isinstance(event, ev.ContentMismatched)]
    assert watch.rejected == []
    assert len(events) == len(found)
    for event, row in zip(events, found, strict=True):
        kind, stage, request, rank, group, key, place, below, copy, writer, edge, taken, _ = row
        assert (event.kind, event.stage, event.request, event.rank, event.group) == (kind, stage, request, rank, group)
        assert (unpack_hashes(event.hashes)[0], event.place, event.below, event.copy) == (key, place, below, copy)
        text = describe(event, watch.leader.state)
        assert all(part in text for part in (kind, f"{key:016x}"[:8], writer, edge, taken))


def test_findings_wait_until_somebody_listens_and_counters_of_ranks_add_up() -> None:
    marker = Marker(1.0, [16], 16, [0])
    one, two = rows("torn-copy"), rows("rank-missing")
    marker.heard(WorkerMeta(None, one, {0: (10, 1, 0, 500)}).aggregate(WorkerMeta(None, two, {1: (20, 2, 3, 700)})))
    assert list(marker.waiting) == one + two
    assert marker.totals == (30, 3, 3, 1200)
    marker.heard(WorkerMeta(None, [], {1: (25, 2, 3, 900)}))
    assert marker.totals == (35, 3, 3, 1400)
    for _ in range(1_000):
        marker.heard(WorkerMeta(None, one, {}))
    assert len(marker.waiting) == 256


class Inner:
    """Worker metadata of a connector."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def aggregate(self, other: "Inner") -> "Inner":
        return Inner(self.jobs + other.jobs)


def test_the_connectors_own_metadata_comes_through_whatever_ranks_tell() -> None:
    both = WorkerMeta(Inner(1), [["a"]], {0: (1, 0, 0, 0)}).aggregate(WorkerMeta(Inner(2), [["b"]], {1: (1, 0, 0, 0)}))
    assert (both.inner.jobs, both.findings, set(both.counts)) == (3, [["a"], ["b"]], {0, 1})
    assert WorkerMeta(None, [], {}).aggregate(WorkerMeta(Inner(2), [], {})).inner.jobs == 2
    assert WorkerMeta(Inner(2), [], {}).aggregate(Inner(3)).inner.jobs == 5
    idle = Sanitizer("report")
    inner = Inner(1)
    assert idle.tell(inner) is inner  # no tensors were registered yet
    assert idle.tell(None) is None


def test_orders_name_the_sampled_blocks_and_who_got_their_places() -> None:
    class Ids(list[int]):
        def tolist(self) -> list[int]:
            return list(self)

    def block(key: int | None, group: int = 0) -> Any:
        named = None if key is None else key.to_bytes(32, "big") + group.to_bytes(4, "big")
        return SimpleNamespace(block_hash=named)

    def spec(ids: list[int], sizes: list[int], firsts: list[int]) -> Any:
        return SimpleNamespace(block_ids=Ids(ids), group_sizes=sizes, block_indices=firsts)

    def output(new: Any = (), names: Any = (), ids: Any = ()) -> Any:
        return SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=SimpleNamespace(req_ids=names, new_block_ids=ids))

    def job(request: str, **specs: Any) -> Any:
        return SimpleNamespace(req_id=request, **specs)

    def metadata(loads: Any = None, stores: Any = None, flush: Any = None) -> Any:
        return SimpleNamespace(load_jobs=loads or {}, store_jobs=stores or {}, jobs_to_flush=flush)

    marker = Marker(1.0, [16, 32], 16, [1])  # the connector has the engine's second group, of two hashes a block
    blocks = [block(None), block(0x101, 1), block(0x102, 0), block(None), block(0x103, 1)]
    first = metadata(stores={4: job("a", src_spec=spec([1, 2, 3, 4], [4], [0]))})
    marker.mark({}, blocks, output(), first)
    assert first.kvbm_orders.blocks == {4: [(0, 0x101), (3, 0x103)]}
    hashes = [key.to_bytes(32, "big") for key in (1, 0x101, 2, 0x999)]
    second = metadata(loads={5: job("b", dst_spec=spec([7, 8], [2], [0]))}, flush={4})
    new = SimpleNamespace(req_id="n", num_computed_tokens=32, block_ids=([9], [1, 4]))
    formed = output([new], ["c", "d"], [None, ([], [1])])
    marker.mark({"b": SimpleNamespace(block_hashes=hashes)}, blocks, formed, second)
    orders = second.kvbm_orders
    assert orders.blocks == {5: [(0, 0x101), (1, 0x999)]}
    assert orders.known == {(0x101, 0): 4}
    assert orders.given == [(4, "n"), (1, "d")]  # place 1 of request n is a prefix that was found
    assert orders.flush == [4]
    assert orders.step == 2
    marker.forget()
    third = metadata(loads={6: job("b", dst_spec=spec([7], [1], [0]))})
    marker.mark({"b": SimpleNamespace(block_hashes=hashes)}, blocks, output(), third)
    assert third.kvbm_orders.known == {}


def test_an_error_of_ours_never_reaches_the_engine_and_a_stop_always_does() -> None:
    class Worker:
        ended = 0

        def get_finished(self) -> list[Any]:
            self.ended += 1
            return [SimpleNamespace(job_id=1)]

    def broken(*_: Any) -> None:
        raise KeyError("planted")

    def corrupt(*_: Any) -> None:
        raise Corrupt("block 1 is wrong")

    inner = Worker()
    sanitizer = Sanitizer("stop")
    side = PageSide([])
    worker = sanitizer.attach(inner, side, side, rank=0, per_chunk=1)
    checker: Any = sanitizer.checker
    checker.end = broken
    for _ in range(200):
        assert worker.get_finished()
    assert (inner.ended, sanitizer.errors) == (200, 100)  # then it is off
    sanitizer.errors = 0
    checker.end = corrupt
    with pytest.raises(Corrupt, match="block 1 is wrong"):
        worker.get_finished()
    assert worker.ended == 201  # all else is the worker's own


def test_settings() -> None:
    assert options_of({}) is None
    assert options_of({"sanitize": {}}) == Options(0.01, "report")
    assert options_of({"sanitize": {"sample": 1, "action": "stop"}}) == Options(1.0, "stop")
    for told, sentence in (
        ({"sample": 0}, '"sample" of "sanitize" must be above 0 and at most 1, and not 0.'),
        ({"sample": True}, "and not True."), ({"action": 3}, "must be report, recompute or stop, and not 3."),
        (7, 'takes an object with "sample" and "action", and not 7.'),
    ):
        with pytest.raises(ValueError, match="sanitize") as caught:
            options_of({"sanitize": told})
        assert sentence in str(caught.value)


def test_counters_are_samples_of_engines_that_check_and_of_no_other() -> None:
    cost = {"calls": 1, "dropped": 0, "errors": 0, "call_ns": 1, "steps": 1, "step_ns": 1}
    checks = {"checked_blocks": 40, "mismatched_blocks": 2, "unknown_blocks": 1, "check_ns": 3_000_000_000}
    taps = [{"source": "1", "name": "a", **cost, **checks}, {"source": "2", "name": "b", **cost}]
    view = scrape_of(Leader(LeaderConfig()), at_ns=0, subscribers=0, ring_bytes=0, recorder=None, streams=(), taps=taps)
    text = render(collect(view))
    found = {
        sample.name: [(sample.labels["engine"], sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text) for sample in family.samples
        if sample.name.startswith("kvbm_sanitize_")
    }
    assert found == {
        "kvbm_sanitize_checked_blocks_total": [("a", 40)], "kvbm_sanitize_mismatched_blocks_total": [("a", 2)],
        "kvbm_sanitize_unknown_blocks_total": [("a", 1)], "kvbm_sanitize_check_seconds_total": [("a", 3)],
    }
