"""Two runs side by side: equal to itself, the first difference, pairs by id and by prompt, who won and who lost."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvbm_console.analysis.diff import Difference, diff
from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.walk import Evidence, evidence_of, walk
from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core.events import Event
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.planning.meter import spread_of
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.testing import prompt
from tests.analysis.evidence import evidence
from tests.recording.helpers import real_run
from tests.tap.kept import run_of

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


def recorded(name: str) -> Evidence:
    return evidence_of(Recording.open(RECORDINGS / f"{name}.mcap"))


def renamed(events: list[Event], prefix: str) -> list[Event]:
    """The same run with other request ids."""
    return [
        msgspec.structs.replace(event, request=prefix + event.request) if isinstance(event, ev.SlotOpened) else event
        for event in events
    ]


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDINGS.glob("*.mcap")))
def test_a_run_is_equal_to_itself(name: str) -> None:
    result = diff(recorded(name), recorded(name))
    assert result.equal
    assert result.first is None
    assert result.config == []
    assert all(pair.same and pair.by == "id" for pair in result.pairs)
    assert result.only_a == result.only_b == []
    assert all(metric.a == metric.b for metric in result.metrics)


def test_two_capacities_show_who_won() -> None:
    result = diff(recorded("offload-pressure"), recorded("onboard-from-host"))
    assert not result.equal
    assert {change.field: (change.a, change.b) for change in result.config}["g2_blocks"] == ("16", "64")
    chat = next(pair for pair in result.pairs if pair.a.request == "chat.1")
    assert sum(chat.b.hits) > sum(chat.a.hits)
    assert chat.b.time_ns < chat.a.time_ns
    rates = {metric.name: metric for metric in result.metrics}
    assert (rates["hit rate"].b or 0) > (rates["hit rate"].a or 0)
    assert rates["moved G2>G1"].b == sum(pair.b.hits[1] for pair in result.pairs)


def test_two_policies_on_one_trace_show_who_won_and_who_lost(kvbm_run: Any) -> None:
    asked = [
        prompt(f"s{at}", (at % 7 * (at % 2), 160), (50 + at // 5, 30 * (at % 3)), at_ms=90 * at) for at in range(60)
    ]
    engine = EngineConfig(g1_blocks=24, max_batch_tokens=128, max_running=8)
    one, other = (
        kvbm_run(asked, engine=engine, g2_blocks=40, offload_threshold=0.0, eviction=PolicyConfig(policy=policy))
        for policy in ("simple_lru", "lfu")
    )
    result = diff(*(evidence_of(Recording.open(run.path)) for run in (one, other)))
    assert [(change.field, change.a, change.b) for change in result.config] == [
        ("eviction.policy", "simple_lru", "lfu"),
    ]
    assert not result.equal
    changed = [pair for pair in result.pairs if pair.a.hits != pair.b.hits]
    assert changed
    for pair in changed:
        assert pair.a.request == pair.b.request
    total = {side: sum(sum(getattr(pair, side).hits) for pair in result.pairs) for side in "ab"}
    assert total == {"a": sum(one.state.totals.hit_blocks), "b": sum(other.state.totals.hit_blocks)}


def test_the_first_difference_is_where_they_part() -> None:
    run = real_run(12, 48, 96)
    events = run.all_events
    at = next(i for i, event in enumerate(events) if isinstance(event, ev.SlotMoved) and i > 100)
    assert isinstance(events[at], ev.SlotMoved)
    other = list(events)
    other[at] = msgspec.structs.replace(events[at], evaluated_blocks=12_345)
    result = diff(evidence(events, run.config), evidence(other, run.config))
    assert result.first is not None
    assert (result.first.seq_a, result.first.seq_b, result.first.field) == (at, at, "evaluated_blocks")
    assert "[evaluated_blocks 12345]" in result.first.b
    slot = events[at].slot  # type: ignore[attr-defined]
    opened = next(event for event in events if isinstance(event, ev.SlotOpened) and event.slot == slot)
    assert result.first.request == opened.request


def test_a_run_that_ends_earlier_differs_where_it_ends() -> None:
    run = real_run(12, 48, 96)
    events = run.all_events
    result = diff(evidence(events, run.config), evidence(events[:-3], run.config))
    assert result.first is not None
    assert (result.first.seq_a, result.first.seq_b, result.first.b) == (len(events) - 3, None, "ends")


def test_a_run_that_begins_later_is_compared_where_both_are() -> None:
    run = real_run(12, 48, 96)
    events = run.all_events
    assert diff(evidence(events, run.config), evidence(events, run.config, begin=len(events) // 2)).equal


def test_requests_with_other_ids_are_paired_by_prompt() -> None:
    run = real_run(12, 48, 96)
    result = diff(evidence(run.all_events, run.config), evidence(renamed(run.all_events, "again-"), run.config))
    assert result.only_a == result.only_b == []
    assert all(pair.by == "prompt" and pair.b.request == "again-" + pair.a.request for pair in result.pairs)
    assert all(pair.same for pair in result.pairs)
    assert not result.equal
    assert result.first is not None
    assert result.first.field == "request"


def test_every_request_is_in_one_pair_or_alone() -> None:
    one, other = real_run(12, 48, 96), real_run(18, 40, 16)
    result = diff(evidence(one.all_events, one.config), evidence(other.all_events, other.config))
    for run, alone, side in ((one, result.only_a, "a"), (other, result.only_b, "b")):
        names = [event.request for event in run.all_events if isinstance(event, ev.SlotOpened)]
        assert sorted([*alone, *(getattr(pair, side).request for pair in result.pairs)]) == sorted(names)
    assert result.only_b


def test_summaries_agree_with_the_facts() -> None:
    run = real_run(18, 40, 16)
    requests = Requests()
    state = walk(evidence(run.all_events, run.config), (requests,))
    assert state is not None
    totals = state.totals
    assert sum(sum(one.hits) for one in requests.all) == sum(totals.hit_blocks)
    assert sum(one.scored_blocks for one in requests.all) == totals.prompt_blocks
    assert sum(one.preemptions for one in requests.all) == totals.preemptions
    assert {tier: blocks for tier, blocks in requests.evicted_blocks.items() if blocks} == {
        f"G{at + 1}": blocks for at, blocks in enumerate(totals.evicted_blocks) if blocks
    }
    assert requests.moved_blocks == totals.moved_blocks


@pytest.mark.parametrize(("name", "begin"), [
    ("tap-mixed", 0), ("tap-mixed", 1_000), ("kv-events/multiturn", 0), ("kv-events/connector", 0), ("gap", 0),
])
def test_evictions_and_copies_are_those_of_the_facts(name: str, begin: int) -> None:
    if name == "tap-mixed":
        run = run_of("mixed")
        what = evidence(run.all_events, run.config, begin=begin)
        first, last = run.state_after(begin - 1).totals, run.state_after(len(run.all_events) - 1).totals
        assert sum(last.evicted_blocks[:2]) == 1_027 + 795
        assert last.moved_blocks == {"G1>G2": 895, "G2>G1": 76}
    else:
        recording = Recording.open(RECORDINGS / f"{name}.mcap")
        what = evidence_of(recording)
        first, last = (recording.state_at(seq).totals for seq in (recording.first_seq - 1, recording.last_seq))
    told = {metric.name: metric.a for metric in diff(what, what).metrics if metric.name[:5] in ("evict", "moved")}
    evicted = [now - then for now, then in zip(last.evicted_blocks, first.evicted_blocks, strict=True)]
    assert told == {
        **{f"evicted G{tier}": blocks for tier, blocks in enumerate(evicted, 1) if blocks},
        **{f"moved {route}": blocks - first.moved_blocks.get(route, 0) for route, blocks in last.moved_blocks.items()
           if blocks > first.moved_blocks.get(route, 0)},
    }
    assert told


def test_percentiles_are_those_of_simulate() -> None:
    run = real_run(18, 40, 16)
    what = evidence(run.all_events, run.config)
    result, requests = diff(what, what), Requests()
    walk(what, (requests,))
    times = [each.ended_ns - each.arrived_ns for each in requests.all if each.ended_ns is not None]
    first = [each.first_token_ns - each.arrived_ns for each in requests.all if each.first_token_ns is not None]
    assert len(times) == 18  # an even number: the middle has two values
    metrics = {metric.name: metric.a for metric in result.metrics}
    for name, values in (("time", times), ("first token", first)):
        spread = spread_of(Counter(values))
        assert (metrics[f"{name} p50"], metrics[f"{name} p99"]) == (spread["p50"], spread["p99"])


# --- the command -----------------------------------------------------------------------------------------------------


def run_diff(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["rec", "diff", *map(str, arguments)])


def test_the_command_says_equal_and_different() -> None:
    one, other = RECORDINGS / "offload-pressure.mcap", RECORDINGS / "onboard-from-host.mcap"
    same = run_diff(one, one)
    assert (same.exit_code, same.output.splitlines()[-1]) == (0, "equal: every event of 6 requests")
    result = run_diff(one, other)
    assert result.exit_code == 1
    assert "g2_blocks  16 → 64" in result.output
    assert "first difference" in result.output
    assert "chat.1" in result.output
    assert "B faster for" in result.output


def test_the_document_is_the_librarys() -> None:
    one, other = RECORDINGS / "offload-pressure.mcap", RECORDINGS / "two-hosts.mcap"
    result = run_diff(one, other, "--format", "json")
    document = json.loads(result.stdout)
    assert set(document) == set(Difference.__struct_fields__)
    assert document["equal"] is False
    assert document["config"] == []
    assert (document["first"]["field"], document["first"]["seq_a"]) == ("ids", document["first"]["seq_b"])
    assert result.exit_code == 1


def test_a_gap_is_said() -> None:
    result = run_diff(RECORDINGS / "onboard-from-host.mcap", RECORDINGS / "gap.mcap")
    assert result.exit_code == 1
    assert "events are not in it" in result.output
