"""Arrivals and first tokens of recorded requests, against those of the simulator (``simulate --requests-out``).

Law of this file: an export, a lake, a digest and a comparison of a recording tell the times that the engine had. A
recorded request ends with its slot, which stays for the copies of its blocks.
"""

import math
from functools import cache
from typing import NamedTuple

import pytest

from kvbm_console.analysis.diff import diff
from kvbm_console.analysis.digest import GAMMA, DigestFold
from kvbm_console.analysis.lake import TABLES, FileRows, LakeRows, TableRows
from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.walk import Evidence, walk
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import Event, SlotCloned, SlotClosed, SlotMoved, SlotOpened
from kvbm_console.core.ids import SlotState
from kvbm_console.core.leader import Outcome
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.planning.meter import Meter, RequestRecord
from kvbm_console.planning.traces import parse_trace
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import build
from tests.analysis.evidence import evidence

LOAD = "multiturn:requests=60,sessions=20,system=64,user=90,output=60,turns=3,think=0.01,ramp=0.002,seed=5"
ANCHOR_NS = 1_000


class Served(NamedTuple):
    """A run: its events, the configuration, and the simulator's own record of each request."""

    events: list[Event]
    config: LeaderConfig
    records: list[RequestRecord]


class Times(NamedTuple):
    arrived_ns: int
    first_token_ns: int
    ended_ns: int


@cache
def served(g1: int, g2: int, sequences: int, output: int) -> Served:
    events: list[Event] = []
    meter = Meter(keep_records=True)

    def publish(stimulus: Stimulus, outcome: Outcome) -> None:
        meter(stimulus, outcome)
        events.extend(outcome.events)

    config = LeaderConfig(g2_blocks=g2, offload_threshold=0.0)
    load = parse_trace(f"{LOAD.replace('output=60', f'output={output}')},n={sequences}")
    rig = build(config, EngineConfig(g1_blocks=g1), load, publish=publish)
    meter.watch(rig.leader.state)
    rig.run_to_end()
    return Served(events, config, meter.records)


def told(run: Served) -> dict[str, Times]:
    """The rows of ``--requests-out``, with the end of the slot."""
    slots = {event.slot: event.request for event in run.events if isinstance(event, SlotOpened | SlotCloned)}
    ended = {slots[event.slot]: event.at_ns for event in run.events if isinstance(event, SlotClosed)}
    return {
        record.request: Times(record.arrived_ns, record.first_token_ns, ended[record.request])
        for record in run.records
    }


def exported(what: Evidence) -> dict[str, Times]:
    requests = Requests()
    walk(what, [requests])
    return {each.request: Times(each.arrived_ns, each.first_token_ns, each.ended_ns) for each in requests.all}


def in_lake(what: Evidence) -> dict[str, Times]:
    found: dict[str, Times] = {}

    def write(table: str, chunk: int, day: int, rows: TableRows) -> None:
        if table == "requests" and isinstance(rows, FileRows):
            for values in zip(*rows.columns, strict=True):
                row = dict(zip(TABLES[table], values, strict=True))
                first = row["first_token_ns"]
                found[row["request"]] = Times(
                    row["opened_ns"] - ANCHOR_NS, None if first is None else first - ANCHOR_NS,
                    row["at_ns"] - ANCHOR_NS,
                )

    walk(what, [LakeRows(ANCHOR_NS, write, lambda chunk: None)])
    return found


RUNS = pytest.mark.parametrize(("g1", "g2", "sequences", "output"), [
    (60, 0, 1, 60), (44, 200, 1, 60), (44, 200, 3, 60), (60, 0, 1, 1),
])


@RUNS
def test_times_of_a_recording_are_those_of_the_simulator(g1: int, g2: int, sequences: int, output: int) -> None:
    run = served(g1, g2, sequences, output)
    what, simulated = evidence(run.events, run.config), told(run)
    assert len(simulated) == 60 * sequences
    assert exported(what) == simulated
    assert in_lake(what) == simulated
    for record in run.records if not g2 else ():
        assert simulated[record.request].ended_ns == record.finished_ns
    assert {pair.a.request: (pair.a.first_token_ns, pair.a.time_ns) for pair in diff(what, what).pairs} == {
        name: (first_ns - arrived_ns, ended_ns - arrived_ns)
        for name, (arrived_ns, first_ns, ended_ns) in simulated.items()
    }
    fold = DigestFold()
    walk(what, [fold])
    for sketch, at in ((fold.digest.first_token, 1), (fold.digest.latency, 2)):
        exact = sorted(times[at] - times.arrived_ns for times in simulated.values())
        assert sketch.count == len(exact)
        for share in (0.5, 0.9, 1.0):
            least = exact[math.ceil(share * len(exact)) - 1]
            assert least <= (sketch.quantile(share) or 0) <= least * GAMMA + 1


@pytest.mark.parametrize("part", [0.1, 0.25, 0.4])
@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_first_token_that_was_not_seen_is_not_told(sequences: int, part: float, gap: bool) -> None:
    run = served(44, 200, sequences, 60)
    begin = int(len(run.events) * part)
    lost = (begin - len(run.events) // 20, begin - 1)
    what = evidence(run.events, run.config, gap=lost) if gap else evidence(run.events, run.config, begin=begin)
    simulated, summaries, rows = told(run), exported(what), in_lake(what)
    for each in (summaries, rows):
        seen = {name: times.first_token_ns for name, times in each.items() if times.first_token_ns is not None}
        assert seen == {name: simulated[name].first_token_ns for name in seen}
    late = {name: times for name, times in simulated.items() if times.arrived_ns > run.events[begin].at_ns}
    assert late
    assert {name: summaries[name] for name in late} == {name: rows[name] for name in late} == late


def test_the_runs_have_what_makes_it_hard() -> None:
    """Requests that are preempted right after their prompt, and clones."""
    run = served(44, 200, 3, 60)
    moves = [event for event in run.events if isinstance(event, SlotMoved)]
    first = {record.first_token_ns for record in run.records}
    assert [move for move in moves if move.new is SlotState.PREEMPTED and move.at_ns in first]
    assert sum(isinstance(event, SlotCloned) for event in run.events) == 120
