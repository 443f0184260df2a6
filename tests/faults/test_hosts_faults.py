"""F23 and F24: one of three hosts altered at a random step; copies that are reported after a reset, twice, or never.

Law of this file: the step, host and place of an alteration are drawn from a seed that the test's name carries.
"""

import random

import pytest

from kvbm_console.analysis.lints import LintFold
from kvbm_console.analysis.lints.copies import SILENT_LEAST_NS, Slow
from kvbm_console.analysis.lints.lint import Finding, Level
from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.ids import FinishReason
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.state import CacheState
from kvbm_console.dispatch import HostsDiverged
from tests.core.scenes import on_host, stored, story
from tests.core.script import Script


class Altered(Leader):
    """A sound leader whose memory is changed by something else before one stimulus."""

    at_n = -1
    what = ""

    def handle(self, stimulus: st.Stimulus) -> Outcome:
        outcome = super().handle(stimulus)
        if stimulus.n == self.at_n:
            state, memory = self.state, self.memory
            if self.what == "refs":
                state.pools[0].refs[0] += 1
            elif self.what == "hash":
                state.pools[1].hash_of[3] ^= 1
            elif self.what == "totals":
                state.totals.preemptions += 1
            elif self.what == "order":
                memory.pools[0].free.append(10**6)
            else:
                memory.next_deadline += 1
        return outcome


WHERE = {
    "refs": "pools.G2.refs[0]", "hash": ".hash_of[3]", "totals": "totals.preemptions", "order": "pools[0].free",
    "deadline": "next_deadline",
}
"""Each alteration to the place where the diff tells it."""


@pytest.mark.fault
@pytest.mark.parametrize("what", ["refs", "hash", "totals", "order", "deadline"])
@pytest.mark.parametrize("host", [1, 2])
def test_f23_one_of_three_hosts_altered_at_a_random_step_is_found_at_that_very_step(what: str, host: int) -> None:
    steps = len(story(3).stimuli)
    dice = random.Random(f"{what} {host}")
    for at_n in dice.sample(range(5, steps), 4):
        wrong = type("AlteredHere", (Altered,), {"at_n": at_n, "what": what})
        with pytest.raises(HostsDiverged) as caught:
            story(3, on_host(wrong, host))
        assert (caught.value.host, caught.value.n) == (host, at_n)
        assert caught.value.difference
        assert WHERE[what] in caught.value.difference[0]


# --- F24 ---


def loading(ranks: int = 1) -> tuple[Script, int]:
    """A request whose load runs; the script and the load's operation."""
    script = stored("abcd", g1=12, ranks=ranks)
    script.arrive("b", "abcd")
    assert script.admit("b")
    operation = script.operation_of("b")
    script.start(operation)
    return script, operation


@pytest.mark.fault
def test_f24_a_copy_that_ends_after_a_reset_is_refused_by_epoch_counted_and_frees_its_places() -> None:
    script, operation = loading()
    refused = script.state.totals.completions_refused
    script.reset()
    assert script.state.pools[0].quarantined
    script.done(operation)
    assert [event.why for event in script.told(ev.CompletionRefused)] == ["older epoch"]
    assert script.state.totals.completions_refused == refused + 1
    assert not script.state.pools[0].quarantined
    script.arrive("c", "ab")
    assert script.admit("c"), "the leader goes on as from the beginning"


@pytest.mark.fault
def test_f24_a_copy_that_ends_twice_changes_nothing_the_second_time() -> None:
    script, operation = loading(ranks=2)
    script.done(operation, 0)
    for rank, why in ((0, "reported twice"), (1, ""), (0, "not open"), (1, "not open")):
        before = script.leader.memory_digest(), script.state.totals.moved_blocks.copy(), tuple(script.slot("b").hits)
        if why:
            script.tell(st.TransferFinished, operation, 0, rank)
            assert [event.why for event in script.told(ev.CompletionRefused)] == [why]
            after = script.leader.memory_digest(), script.state.totals.moved_blocks, tuple(script.slot("b").hits)
            assert after == before
        else:
            script.done(operation, rank)
    assert script.state.totals.completions_refused == 3


def silent(script: Script, after_ns: int) -> list[Finding]:
    """The findings of the lint of copies about a script's stream when this time has passed since its last event."""
    watch, state = LintFold([Slow()]), CacheState()
    watch.resumed(state)
    for event in script.events:
        watch.apply(state, event)
    return [one for one in watch.findings(state, state.at_ns + after_ns) if one.lint == "silent"]


@pytest.mark.fault
def test_f24_a_copy_that_never_ends_is_reported_as_stuck() -> None:
    script, operation = loading(ranks=2)
    script.done(operation, 1)
    script.finish("b", FinishReason.ABORTED)
    assert silent(script, SECOND_NS) == []
    (finding,) = silent(script, 2 * SILENT_LEAST_NS)
    assert (finding.who, finding.level, finding.request) == (f"op {operation}", Level.FAULT, "b")
    assert "1 rank reported" in finding.because
    script.done(operation, 0)
    assert silent(script, 9 * SILENT_LEAST_NS) == []


@pytest.mark.fault
def test_f24_a_copy_that_never_ends_after_a_reset_is_reported_too() -> None:
    script, operation = loading()
    script.reset()
    assert silent(script, SECOND_NS) == []
    (finding,) = silent(script, SILENT_LEAST_NS + SECOND_NS)
    assert (finding.who, finding.what) == (f"op {operation}", "quarantined 31s")
    script.done(operation)
    assert silent(script, 9 * SILENT_LEAST_NS) == []
