"""When a request has its first token: at the end of the iteration that computes its prompt to the end.

Law of this file: the fold here reads what the engine told, and neither the facts nor the moves of slots.
"""

import pytest

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import SlotCloned, SlotMoved, SlotOpened
from kvbm_console.core.ids import SlotState
from kvbm_console.core.leader import Outcome
from kvbm_console.core.stimuli import IterationFinished, IterationScheduled, RequestArrived, Stimulus
from kvbm_console.planning.meter import Meter
from kvbm_console.planning.traces import parse_trace
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import build

LOAD = "multiturn:requests=60,sessions=20,system=64,user=90,output=60,turns=3,think=0.01,ramp=0.002,seed=5"


class Told:
    """First tokens as the engine's own calls tell them, and when the leader moved requests to decoding."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.prompts: dict[str, int] = {}
        self.arrived: dict[str, int] = {}
        self.first: dict[str, int] = {}
        self.decoding: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.ends: list[str] = []

    def __call__(self, stimulus: Stimulus, outcome: Outcome) -> None:
        self.meter(stimulus, outcome)
        if isinstance(stimulus, RequestArrived):
            self.prompts[stimulus.request] = stimulus.prompt_tokens
            self.arrived[stimulus.request] = stimulus.at_ns
        elif isinstance(stimulus, IterationScheduled):
            positions = zip(stimulus.progressed, stimulus.positions, strict=True)
            self.ends = [name for name, position in positions if position >= self.prompts[name]]
        elif isinstance(stimulus, IterationFinished):
            for name in self.ends:
                self.first.setdefault(name, stimulus.at_ns)
            self.ends = []
        for event in outcome.events:
            if isinstance(event, SlotOpened):
                self.names[event.slot] = event.request
            elif isinstance(event, SlotCloned):
                self.names[event.slot] = event.request
                for known in (self.first, self.arrived, self.prompts):
                    known[event.request] = known[self.names[event.parent]]
            elif isinstance(event, SlotMoved) and event.new is SlotState.DECODING:
                self.decoding.setdefault(self.names[event.slot], event.at_ns)


@pytest.mark.parametrize(("g1", "g2", "sequences"), [(60, 0, 1), (44, 200, 1), (60, 0, 2)])
def test_a_preemption_right_after_the_prompt_does_not_delay_its_first_token(g1: int, g2: int, sequences: int) -> None:
    told = Told(Meter(keep_records=True))
    rig = build(
        LeaderConfig(g2_blocks=g2, offload_threshold=0.0), EngineConfig(g1_blocks=g1),
        parse_trace(f"{LOAD},n={sequences}"), publish=told,
    )
    told.meter.watch(rig.leader.state)
    rig.run_to_end()
    assert rig.leader.state.totals.preemptions > 0
    assert {record.request: record.first_token_ns for record in told.meter.records} == told.first
    assert sorted(told.meter.times.ttft_ns) == sorted(at - told.arrived[name] for name, at in told.first.items())
    late = [name for name, at_ns in told.decoding.items() if at_ns > told.first[name]]
    assert late, "nothing was preempted between its first token and the next iteration"
