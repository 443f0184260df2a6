"""Copies, calls and figures of a connector, told by hand to a leader that watches."""

from typing import Any

import pytest

from kvbm_console.analysis.lives import FOLD, Lives, Transfer
from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import CandidateStatus, ResetMode, Route, Site, Tier, WaitPoint
from kvbm_console.tap import copies
from kvbm_console.tap.copies import ConnectorWatch, Sizes
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import TapSettings
from server.feeding import abandon
from tests.tap.test_loads import BLOCK, tell
from tests.tap.watching import Watching


def watching(*, silent: bool = False) -> Watching:
    """An engine with a request ``a`` that computes one block."""
    settings = TapSettings("", "vllm", BLOCK, 8, medium="CPU", silent=silent)
    watch = Watching(TapRecorder(), Flattener(block_tokens=BLOCK), settings)
    tell(watch, ["all", [], True, 0, [[], []], None if silent else [["CPU", []]]])
    tell(watch, ["new", "a", [77], BLOCK, 1, 0, None], ["lookup", "a", 0, 0, False], ["alloc", "a", [1], 0])
    tell(watch, ["step", [["a", [1], 0, BLOCK, BLOCK]], [], [], [], [], [], 1, [["a", 0, [77]]]])
    return watch


def ends(watch: Watching) -> dict[CandidateStatus, int]:
    counts = watch.leader.state.totals.candidates_ended
    return {status: counts[status] for status in CandidateStatus if counts[status]}


def test_a_store_outlives_its_request_and_keeps_its_slot_and_bytes() -> None:
    watch = watching()
    state = watch.leader.state
    (slot,) = state.slots
    tell(watch, ["finish", "a", "FINISHED_LENGTH_CAPPED", False, 0])
    assert not state.slots
    tell(watch, ["copy", 1, "a", "GPU", "CPU", [77], 1, 8_192])
    (candidate,) = state.candidates.values()
    assert (candidate.slot, candidate.for_slot, candidate.request) == (None, slot, "a")
    assert (candidate.hashes, candidate.route.label) == ([77], "G1>G2")
    (operation,) = state.operations.values()
    assert (operation.blocks, operation.size_bytes, operation.sources) == (1, 8_192, [])
    tell(watch, ["copied", 1, "completed"])
    assert not state.operations
    assert (state.totals.moved_blocks, state.totals.moved_bytes) == ({"G1>G2": 1}, {"G1>G2": 8_192})
    assert state.totals.bytes_moved("G1>G2", None) == 8_192
    assert watch.rejected == []
    assert watch.mirror.totals == state.totals


def test_unknown_bytes_stay_unknown_and_are_no_zero() -> None:
    watch = watching()
    tell(watch, ["copy", 1, "a", "GPU", "CPU", [77], 1, None], ["copied", 1, "completed"])
    tell(watch, ["copy", 2, "a", "GPU", "CPU", [78], 1, 100], ["copied", 2, "completed"])
    totals = watch.leader.state.totals
    assert totals.moved_blocks == {"G1>G2": 2}
    assert totals.bytes_moved("G1>G2", None) is None
    assert totals.bytes_moved("G1>G2", 50) == 150
    assert totals.bytes_moved("G2>G1", None) == 0


def test_a_load_begins_when_its_order_is_told() -> None:
    watch = watching()
    tell(watch, ["new", "b", [77, 78], 2 * BLOCK + 1, 1, 0, None], ["lookup", "b", BLOCK, BLOCK, True])
    tell(watch, ["alloc", "b", [1, 2, 3], BLOCK], ["found", "b", {"disk": BLOCK}])
    tell(watch, ["copy", 5, "b", "CPU", "GPU", [], 1, 8_192], ["step", [], [], [], [], [], [], 1, []])
    (operation,) = watch.leader.state.operations.values()
    assert (operation.started, operation.targets, operation.size_bytes) == (True, [2], 8_192)
    (scored,) = (event for outcome in watch.outcomes for event in outcome
                 if isinstance(event, ev.PrefixScored) and event.slot == 1)
    assert scored.hits == (1, 0, 0, 1)
    tell(watch, ["copies", ["b"], [], [], []], ["copied", 5, "completed"])
    assert ends(watch) == {CandidateStatus.COMPLETED: 1}
    assert watch.leader.state.totals.moved_bytes == {"G2>G1": 8_192}
    assert watch.rejected == []


def test_copies_that_a_whole_report_does_not_name_again_are_given_up() -> None:
    watch = watching()
    tell(watch, ["copy", 1, "a", "GPU", "CPU", [77], 1, 1], ["copy", 2, "a", "GPU", "CPU", [78], 1, 1])
    about = ["a", [77], BLOCK, 1, 0, None]
    tell(watch, ["all", [[about, [[1], BLOCK, "RUNNING", BLOCK, True, [77]]]], 1, 0, [[[], []], []], [["CPU", []]]])
    tell(watch, ["copy", 2, "a", "GPU", "CPU", [78], 1, 1], ["copy", 3, "a", "GPU", "CPU", [79], 1, 1])
    tell(watch, ["step", [], [], [], [], [], [], 1, []])
    assert {candidate.hashes[0] for candidate in watch.leader.state.candidates.values()} == {78, 79}
    assert ends(watch) == {CandidateStatus.CANCELLED: 1}


def test_an_engine_that_is_gone_takes_its_copies_and_figures_with_it() -> None:
    watch = watching()
    tell(watch, ["copy", 1, "a", "GPU", "CPU", [77], 1, 1], ["measured", [["C", "ask", 3, 40, 20]], {"bytes": 7}])
    state = watch.leader.state
    (facts,) = state.connectors.values()
    assert (facts.methods, facts.calls, facts.total_ns, facts.longest_ns) == (("ask",), (3,), (40,), (20,))
    assert (facts.stats, facts.values) == (("bytes",), (7.0,))
    abandon(watch.dispatcher, 1)
    assert not state.operations
    assert not state.connectors
    assert ends(watch) == {CandidateStatus.CANCELLED: 1}


def test_a_reset_of_the_leader_leaves_no_copy_behind() -> None:
    watch = watching()
    tell(watch, ["copy", 1, "a", "GPU", "CPU", [77], 1, 1])
    watch.dispatcher.submit(st.ResetRequested, ResetMode.LOGICAL)
    assert not watch.leader.state.operations
    assert not watch.leader.state.late
    tell(watch, ["copied", 1, "completed"])
    assert ends(watch) == {CandidateStatus.CANCELLED: 1}


def test_a_copy_within_a_tier_is_no_route() -> None:
    watch = watching()
    tell(watch, ["copy", 1, "a", "CPU", "CPU_PINNED", [77], 1, 1], ["copied", 1, "completed"])
    assert ends(watch) == {}
    assert watch.rejected == []


def test_a_tier_is_silent_until_an_event_names_a_block() -> None:
    watch = watching(silent=True)
    (host,) = (pool for pool in watch.leader.state.pools if pool.info.tier is Tier.G2)
    tell(watch, ["copy", 1, "a", "GPU", "CPU", [77], 1, 1], ["copied", 1, "completed"])
    assert host.silent
    tell(watch, ["events", [["BlockStored", [77], "CPU", 0]]])
    assert not host.silent
    assert host.resident_blocks == 1


class Base:
    """Stands for the engine's base class of connectors."""

    def ask(self, request: Any) -> int:
        raise NotImplementedError

    def _own(self) -> None:
        """No call of the engine."""


Base.__name__ = copies.BASE


class Slow(Base):
    """A connector whose clock jumps in a call; ``inside`` is a connector that it asks in turn."""

    def __init__(self, clock: list[int], took: int, *inside: Any) -> None:
        self.clock, self.took, self._connectors = clock, took, list(inside)

    def ask(self, request: Any) -> int:
        self.clock[0] += self.took
        return 1 + sum(each.ask(request) for each in self._connectors)


def test_a_slow_call_is_told_for_the_connector_in_which_the_time_was_spent(monkeypatch: Any) -> None:
    clock = [0]
    monkeypatch.setattr(copies, "_now", lambda: clock[0])
    recorder = TapRecorder()
    recorder.on = True
    child = type("Child", (Slow,), {})(clock, 3 * copies.SLOW_NS)
    parent = type("Parent", (Slow,), {})(clock, copies.SLOW_NS // 2, child)
    watch = ConnectorWatch(recorder, {}, Sizes())
    watch.attach(parent)
    request = type("Asked", (), {"request_id": "a"})()
    assert parent.ask(request) == 2
    assert [record[2:] for record in recorder.queue] == [("a", "Child", "ask", 3 * copies.SLOW_NS)]
    assert watch.calls == {
        ("Parent", "ask"): [1, *[3 * copies.SLOW_NS + copies.SLOW_NS // 2] * 2],
        ("Child", "ask"): [1, 3 * copies.SLOW_NS, 3 * copies.SLOW_NS],
    }


def test_an_error_of_the_connector_reaches_the_engine_and_its_call_is_counted() -> None:
    recorder = TapRecorder()
    watch = ConnectorWatch(recorder, {})
    broken = type("Broken", (Base,), {})()
    watch.attach(broken)
    try:
        broken.ask(None)
    except NotImplementedError:
        pass
    else:
        raise AssertionError("the error was swallowed")
    assert watch.calls["Broken", "ask"][0] == 1
    assert recorder.errors == 0


class Figures:
    """A connector's statistics of an interval."""

    def __init__(self, data: dict[str, Any], reduced: dict[str, Any] | None = None) -> None:
        self.data, self._reduced = data, reduced or {}

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, Any]:
        return self._reduced


def test_counts_are_summed_and_other_figures_are_the_last() -> None:
    watch = ConnectorWatch(TapRecorder(), {})
    told = {"types": {"bytes": "counter", "used": "gauge", "took": "histogram"},
            "data": {"bytes": {(): 5}, "used": {("cpu",): 0.5}, "took": {(): [1.0, 2.0]}}}
    for _ in range(2):
        watch._add_stats(Figures({"One": Figures(told), "Two": Figures({"n": [3]}, {"Avg (ms)": 4.0})}))
    assert watch.stats == {
        "One bytes": 10, "One used{cpu}": 0.5, "One took_count": 4, "One took_sum": 6.0, "Two Avg (ms)": 4.0,
    }


def test_hits_of_a_disk_are_those_of_this_machines_disk_once_it_is_named() -> None:
    watch = watching()
    tell(watch, ["copy", 1, "a", "CPU", "DISK", [77], 1, 100], ["copied", 1, "completed"])
    assert watch.leader.state.totals.moved_blocks == {"G2>G3": 1}
    tell(watch, ["new", "b", [77, 78], 2 * BLOCK + 1, 1, 0, None], ["lookup", "b", BLOCK, BLOCK, True])
    tell(watch, ["alloc", "b", [1, 2, 3], BLOCK], ["found", "b", {"disk": BLOCK}])
    tell(watch, ["copy", 5, "b", "CPU", "GPU", [], 1, 8_192], ["step", [], [], [], [], [], [], 1, []])
    (scored,) = (event for outcome in watch.outcomes for event in outcome
                 if isinstance(event, ev.PrefixScored) and event.slot == 1)
    assert scored.hits == (1, 0, 1, 0)
    assert watch.rejected == []


class Kept(Lives):
    """Lives that keep the transfers that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.over: list[Transfer] = []

    def take(self, event: ev.Event) -> None:
        if type(event) in FOLD:
            FOLD[type(event)](self, event)

    def transfer_ended(self, transfer: Transfer) -> None:
        self.over.append(transfer)


def asked(watch: Watching, number: int, request: str) -> None:
    """A tap around a lower tier asks before it loads two blocks for a request."""
    tell(watch, ["copy", number, request, "DISK", "CPU", [90 + number], 2, 200, True])


def armed(watch: Watching, **spec: Any) -> None:
    """A breakpoint at the dispatch of these loads."""
    spec = {"site": Site.DISPATCH_WILL, "route": Route.G3_G2, **spec}
    watch.dispatcher.submit(st.BreakpointsReplaced, "me", (BreakpointSpec(**spec),))


def test_a_breakpoint_holds_the_load_of_one_request_from_a_lower_tier() -> None:
    watch = watching()
    state = watch.leader.state
    for name in ("b", "c"):
        tell(watch, ["new", name, [78], BLOCK, 1, 0, None], ["lookup", name, 0, None, True])
    armed(watch, request="b")
    asked(watch, 1, "b")
    asked(watch, 2, "c")
    (hold,) = state.holds.values()
    assert (hold.site, hold.point, hold.parked) == (Site.DISPATCH_WILL, WaitPoint.DISPATCH, True)
    assert state.slots[hold.slot].request == "b"
    held, free = state.operations.values()
    assert (held.started, free.started, free.blocks, free.size_bytes) == (False, True, 2, 200)
    tell(watch, ["copied", 2, "completed", 700, ""])
    watch.now += 1_000_000
    watch.dispatcher.submit(st.HoldContinued, hold.hold, "me", None)
    assert (held.started, held.blocks, held.size_bytes) == (True, 2, 200)
    assert not state.holds
    tell(watch, ["copied", 1, "failed", None, "1 of 2 chunks did not arrive"])
    assert not state.operations
    assert not watch.leader.memory.told_waiting
    assert ends(watch) == {CandidateStatus.COMPLETED: 1, CandidateStatus.FAILED: 1}
    errors = [event.error for event in watch.events if isinstance(event, ev.OperationReported)]
    assert errors == ["", "1 of 2 chunks did not arrive"]
    assert watch.rejected == []
    assert watch.mirror.totals == state.totals


@pytest.mark.parametrize("end", ["the load ends", "the request ends", "the engine ends"])
def test_a_held_load_that_does_not_wait_any_more(end: str) -> None:
    watch = watching()
    state = watch.leader.state
    tell(watch, ["new", "b", [78], BLOCK, 1, 0, None], ["lookup", "b", 0, None, True])
    armed(watch)
    asked(watch, 1, "b")
    (operation,) = state.operations.values()
    if end == "the load ends":
        tell(watch, ["copied", 1, "completed"])
    elif end == "the request ends":
        tell(watch, ["finish", "b", "FINISHED_ABORTED", False, 0])
        assert operation.started
        tell(watch, ["copied", 1, "completed"])
    else:
        abandon(watch.dispatcher, watch.source)
    assert not state.operations
    assert not watch.leader.memory.told_waiting
    assert watch.rejected == []
    assert bool(state.holds) is (end == "the load ends")  # the request is held until somebody continues it


def test_the_wire_time_that_a_tier_tells_is_not_its_queue() -> None:
    watch = watching()
    tell(watch, ["copy", 1, "a", "CPU", "DISK", [77], 1, 100])
    begun = watch.dispatcher.leader.state.at_ns
    (candidate,) = watch.leader.state.candidates.values()
    lives = Kept()
    for event in (event for outcome in watch.outcomes for event in outcome):
        lives.take(event)
    watch.now += 5_000
    tell(watch, ["copied", 1, "completed", 2_000, ""])
    assert candidate.promoted_ns == begun
    assert candidate.started_ns == watch.now - 2_000
    for event in watch.outcomes[-1]:
        lives.take(event)
    (known,) = lives.over
    assert (known.request, known.slot) == ("a", 0)
    assert known.blocks == 1
    assert (known.promoted_ns, known.started_ns, known.ended_ns) == (begun, watch.now - 2_000, watch.now)
