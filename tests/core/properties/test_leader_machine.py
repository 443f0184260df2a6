"""The leader under an engine, a mover and people who do anything at any time, on one, two and three hosts.

Law of this file: every step is followed by all checks of ``Script`` (mirror, restored twin, audit, oracles); at the
end everybody stops, and nothing may be left behind. ``KVBM_FULL=1`` makes it longer.
"""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.eviction.policy import POLICIES, PolicyConfig
from kvbm_console.core.ids import BreakpointAction, FinishReason, OnTimeout, ResetMode, Route, Site, SlotState, Suspend
from tests.core.script import Script

from .actions import WORDS, Actions

FULL = bool(os.environ.get("KVBM_FULL"))
NUMBER = some.integers(0, 9)
SPECS = some.builds(
    BreakpointSpec, site=some.sampled_from(Site), to_state=some.none() | some.sampled_from(SlotState),
    request=some.sampled_from(["*", "r1", "r[0-4]"]), route=some.none() | some.sampled_from([Route.G2_G1, Route.G1_G2]),
    action=some.sampled_from(BreakpointAction), one_shot=some.booleans(), ignore_count=some.integers(0, 2),
    suspend=some.sampled_from(Suspend), on_timeout=some.sampled_from(OnTimeout),
)
EVICTION = some.builds(
    PolicyConfig, policy=some.sampled_from(POLICIES), pin_tail_tokens=some.sampled_from([0, 5, 100]),
    pin_ttl_s=some.sampled_from([0.00001, 60.0]), half_life_s=some.just(0.00001),
    frequency_credit_s=some.just(0.00001),
)
"""Policies whose times are those of a machine that lives for a few hundred microseconds; pins that last, and not."""


class LeaderMachine(RuleBasedStateMachine):
    """Every action as a rule. ``hosts`` is set by the test."""

    hosts = 1

    @initialize(
        g1=some.integers(6, 14), g2=some.sampled_from([0, 5, 8, 16]), g3=some.sampled_from([0, 0, 6, 16]),
        threshold=some.sampled_from([0.0, 0.5, 0.9]), ranks=some.integers(1, 2), asynchronous=some.booleans(),
        batch=some.sampled_from([2, 64]), share=some.sampled_from([0.5, 1.0]), eviction=EVICTION,
    )
    def begin(self, g1: int, g2: int, g3: int, threshold: float, ranks: int, asynchronous: bool, batch: int,
              share: float, eviction: PolicyConfig) -> None:
        self.act = Actions(Script(
            g1=g1, g2=g2, g3=g3, hosts=self.hosts, offload_threshold=threshold, ranks=ranks, eviction=eviction,
            asynchronous=asynchronous, offload_batch_blocks=batch, staging_share=share, hold_budget_min=2,
        ))

    @rule(word=some.sampled_from(WORDS), tail=some.integers(1, 3), priority=some.sampled_from([0, 0, 1, 5]))
    def arrive(self, word: str, tail: int, priority: int) -> None:
        self.act.arrive(word, tail, priority)

    @rule(number=NUMBER)
    def look_up(self, number: int) -> None:
        self.act.look_up(number)

    @rule(number=NUMBER, all_of_it=some.booleans())
    def admit(self, number: int, all_of_it: bool) -> None:
        self.act.admit(number, all_of_it)

    @rule(chunk=some.integers(1, 12), left_out=some.integers(0, 7))
    def schedule(self, chunk: int, left_out: int) -> None:
        self.act.schedule(chunk, left_out)

    @rule()
    def complete(self) -> None:
        self.act.complete()

    @rule(times=some.integers(1, 6))
    def run_on(self, times: int) -> None:
        self.act.run_on(times)

    @rule(number=NUMBER)
    def preempt(self, number: int) -> None:
        self.act.preempt(number)

    @rule(number=NUMBER, reason=some.sampled_from(FinishReason), later=some.booleans())
    def finish(self, number: int, reason: FinishReason, later: bool) -> None:
        self.act.finish(number, reason, later)

    @rule()
    def free_finished(self) -> None:
        self.act.free_finished()

    @rule(number=NUMBER, copies=some.integers(1, 2))
    def clone(self, number: int, copies: int) -> None:
        self.act.clone(number, copies)

    @rule(word=some.sampled_from(WORDS), steps=some.integers(1, 6), copies=some.booleans())
    def serve(self, word: str, steps: int, copies: bool) -> None:
        self.act.serve(word, steps, copies)

    @rule(number=NUMBER)
    def start(self, number: int) -> None:
        self.act.start(number)

    @rule(number=NUMBER, rank=some.integers(0, 1), bad=some.none() | some.integers(-1, 7))
    def report(self, number: int, rank: int, bad: int | None) -> None:
        self.act.report(number, rank, bad)

    @rule(number=NUMBER, rank=some.integers(0, 1), well=some.booleans())
    def report_again(self, number: int, rank: int, well: bool) -> None:
        self.act.report_again(number, rank, well)

    @rule()
    def move_all(self) -> None:
        self.act.move_all()

    @rule(number=NUMBER)
    def deadline(self, number: int) -> None:
        self.act.deadline(number)

    @rule(mode=some.sampled_from(ResetMode))
    def reset(self, mode: ResetMode) -> None:
        self.act.reset(mode)

    @rule()
    def drain(self) -> None:
        self.act.drain()

    @rule(owner=some.sampled_from(["me", "you"]), specs=some.lists(SPECS, max_size=3))
    def breakpoints(self, owner: str, specs: list[BreakpointSpec]) -> None:
        self.act.breakpoints(owner, specs)

    @rule(number=NUMBER, until=some.none() | some.sampled_from(SlotState))
    def go_on(self, number: int, until: SlotState | None) -> None:
        self.act.go_on(number, until)

    @rule(number=NUMBER)
    def step_slot(self, number: int) -> None:
        self.act.step_slot(number)

    @rule()
    def freeze(self) -> None:
        self.act.freeze()

    @rule()
    def thaw(self) -> None:
        self.act.thaw()

    @rule(duration_ns=some.integers(1, 20_000))
    def run_for(self, duration_ns: int) -> None:
        self.act.run_for(duration_ns)

    @rule()
    def step_pipeline(self) -> None:
        self.act.step_pipeline()

    @rule(number=NUMBER)
    def skip_candidates(self, number: int) -> None:
        self.act.skip_candidates(number)

    @rule(number=NUMBER, entry=some.integers(2, 9))
    def announce(self, number: int, entry: int) -> None:
        self.act.announce(number, entry)

    @rule(owner=some.sampled_from(["me", "you"]), live=some.booleans())
    def lease(self, owner: str, live: bool) -> None:
        self.act.lease(owner, live)

    @rule()
    def disarm(self) -> None:
        self.act.disarm()

    @rule(number=NUMBER, what=some.integers(0, 5))
    def nonsense(self, number: int, what: int) -> None:
        self.act.nonsense(number, what)

    def teardown(self) -> None:
        if hasattr(self, "act") and sys.exc_info()[0] is None:
            self.act.end()


@pytest.mark.timeout(7_200 if FULL else 120)
@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_leader_machine(hosts: int) -> None:
    machine = type(f"LeaderMachine{hosts}", (LeaderMachine,), {"hosts": hosts})
    examples, steps = (1_500, 80) if FULL else ({1: 60, 2: 25, 3: 20}[hosts], 40)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
