"""Two engines on one leader, as data-parallel ranks are: each numbers its iterations, and neither moves the other.

Law of this file: without a lower tier engines share nothing, so each does exactly what it does alone.
"""

from typing import Any

import msgspec
import pytest

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import audit
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Authority, ResetMode, SlotState, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import decode_facts, digest, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.dispatch import Dispatcher, start_leader
from kvbm_console.simulator.calendar import Calendar, EngineDeadlines
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.link import LinkMover
from kvbm_console.simulator.multiturn import Multiturn, parse_settings
from kvbm_console.simulator.port import StimulusPort
from kvbm_console.simulator.simulated import SimulatedEngine
from kvbm_console.simulator.workloads import Request

CHATS = "requests=12,sessions=8,system=32,user=32,output=90,turns=2,seed={}"


class Named(Multiturn):
    """Chats whose requests carry the name of their engine."""

    name_of_engine = ""

    def arrivals(self) -> Any:
        return (self._named(request) for request in super().arrivals())

    def finished(self, request: Request, at_ns: int) -> Request | None:
        own = msgspec.structs.replace(request, request=request.request.split("/")[1])
        following = super().finished(own, at_ns)
        return None if following is None else self._named(following)

    def _named(self, request: Request) -> Request:
        return msgspec.structs.replace(request, request=f"{self.name_of_engine}/{request.request}")


class House:
    """One leader and an engine for each seed; what each slot did, and when."""

    def __init__(self, seeds: dict[str, int], g2: int = 0, windows: bool = False) -> None:
        self.events: list[ev.Event] = []
        self.mirror = CacheState()
        self.calendar = Calendar()
        config = LeaderConfig(g2_blocks=g2, offload_threshold=0.0)
        self.dispatcher = Dispatcher(
            Leader(config, check=True, audit_every=20), self.calendar.clock, publish=self._publish,
            more_hosts=[Leader(config)], compare_every=1,
        )
        start_leader(self.dispatcher)
        mover = LinkMover(self.calendar, self.dispatcher, 16 * 1024)
        self.dispatcher.mover = mover
        self.dispatcher.engine_deadlines = EngineDeadlines(self.calendar, self.dispatcher)
        self.engines = []
        for source, (name, seed) in enumerate(seeds.items(), start=1):
            workload = Named(parse_settings(CHATS.format(seed)))
            workload.name_of_engine = name
            engine = SimulatedEngine(
                EngineConfig(g1_blocks=24), StimulusPort(self.dispatcher.port(source)), self.calendar, workload, 16,
                take_latency_ns=mover.take_latency_ns,
            )
            self.dispatcher.engines[source] = engine
            self.engines.append(engine)
        while (coming := self.calendar.next_ns) is not None:
            for engine in self.engines:
                engine.nudge()
                engine.run(coming)

    def _publish(self, stimulus: st.Stimulus, outcome: Any) -> None:
        for event in outcome.events:
            self.events.append(event)
            self.mirror.apply(event)

    def story(self, name: str) -> list[tuple[Any, ...]]:
        """The moves of the slots of an engine, and the figures of their ends."""
        slots = {event.slot: event.request for event in self.events
                 if isinstance(event, ev.SlotOpened) and event.request.startswith(f"{name}/")}
        return [
            (event.at_ns, slots[event.slot], event.new, event.iteration, event.computed_tokens, event.first_iteration,
             event.skipped_iterations)
            for event in self.events if isinstance(event, ev.SlotMoved) and event.slot in slots
        ]


def test_each_engine_does_what_it_does_alone() -> None:
    together = House({"one": 1, "two": 2})
    state = together.dispatcher.leader.state
    assert (state.totals.rejected, state.totals.violations) == (0, 0)
    assert digest(together.mirror) == together.dispatcher.leader.digest()
    for name, seed in (("one", 1), ("two", 2)):
        alone = House({name: seed})
        assert together.story(name) == alone.story(name)
        assert any(moved[2] is SlotState.PREEMPTED for moved in alone.story(name)), "a story with something in it"


def test_engines_share_the_lower_tiers() -> None:
    house = House({"one": 1, "two": 1}, g2=400)
    totals = house.dispatcher.leader.state.totals
    assert (totals.rejected, totals.violations) == (0, 0)
    assert totals.hit_blocks[Tier.G2 - 1] > 0
    assert sum(totals.finished) == 24
    assert audit(house.dispatcher.leader.state) == []


# --- step by step ---


class Pair:
    """Two engines with a decoding request each, told by hand: ``a`` of source 1 and ``b`` of source 2."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(Leader(LeaderConfig(block_tokens=4), check=True), lambda: 0)
        for source in (1, 2):
            self.tell(source, st.PoolDeclared, 0, source - 1, Tier.G1, "GPU", 16, 4, Authority.ENGINE)

    def tell(self, source: int, kind: Any, *fields: Any) -> Any:
        outcome = self.dispatcher.submit_from(source, None, kind, *fields)
        refused = [event.why for event in outcome.events if isinstance(event, ev.StimulusRejected)]
        return refused[0] if refused else outcome.result

    def start(self, source: int, name: str) -> None:
        self.tell(source, st.RequestArrived, name, pack_hashes([]), 3, 99, 0, None)
        self.tell(source, st.MatchRequested, name, 0)
        self.tell(source, st.BlocksAllocated, name, pack_ids([0, 1, 2]), 0)

    def form(self, source: int, iteration: int, count: int = 1, **lists: Any) -> Any:
        names = ("new", "resumed", "preempted", "skipped", "unskipped", "first_tokens", "progressed", "positions")
        fields = [lists.get(name, ()) for name in names]
        return self.tell(source, st.IterationScheduled, iteration, count, *fields, (), (), b"", 1, 0)

    def computed(self, name: str) -> int:
        return self.dispatcher.port(0).computed_tokens(name)


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    for source, name in ((1, "a"), (2, "b")):
        pair.start(source, name)
        assert pair.form(source, 1, new=(name,), progressed=(name,), positions=(3,)).iteration == 1
        assert pair.form(source, 2, first_tokens=(name,)).iteration == 2
    assert (pair.computed("a"), pair.computed("b")) == (4, 4)
    return pair


def test_iterations_of_one_engine_leave_the_tokens_of_the_other(pair: Pair) -> None:
    assert pair.form(1, 3, 4).iteration == 6
    assert (pair.computed("a"), pair.computed("b")) == (8, 4)
    assert pair.form(2, 3).iteration == 3
    assert (pair.computed("a"), pair.computed("b")) == (8, 5)
    state = pair.dispatcher.leader.state
    assert (state.iteration, state.running) == (9, 2)
    assert pair.dispatcher.leader.last_iteration(1) == 6


def test_each_engine_has_to_go_on_from_its_own_number(pair: Pair) -> None:
    pair.form(1, 3)
    assert pair.form(2, 4) == "iteration 4 (count 1) does not follow iteration 2"
    assert pair.tell(2, st.IterationFinished, 3, (), (), b"", b"") == "iteration 3 was not formed yet"
    assert pair.form(2, 3).iteration == 3


def test_a_place_is_missed_only_by_the_engine_that_needs_it(pair: Pair) -> None:
    assert pair.form(1, 3, 8).iteration == 10, "a has three blocks full of tokens"
    assert "'a' has no place" in pair.form(1, 11)
    assert pair.form(2, 3, 8).iteration == 10
    assert "'b' has no place" in pair.form(2, 11)


def test_a_leader_restored_from_a_keyframe_and_a_reset_one_know_the_numbers(pair: Pair) -> None:
    pair.form(1, 3, 2)
    leader = pair.dispatcher.leader
    again = Leader.restore(leader.config, encode_facts(leader.state), leader.export())
    assert [again.last_iteration(source) for source in (1, 2)] == [4, 2]
    assert digest(decode_facts(encode_facts(leader.state))) == again.digest()
    pair.tell(0, st.ResetRequested, ResetMode.LOGICAL)
    assert [leader.last_iteration(source) for source in (1, 2)] == [4, 2]
