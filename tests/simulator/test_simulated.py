"""The simulated engine against a scripted leader: order of calls, places of tokens, preemption, holds, loads."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import unpack_ids
from kvbm_console.core.ids import FinishReason
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.port import StimulusPort
from kvbm_console.simulator.simulated import SimulatedEngine
from kvbm_console.simulator.workloads import Request
from tests.simulator.fakes import FakePort, Listed, request


def machine(requests: list[Request], **config: int) -> tuple[SimulatedEngine, FakePort, Listed]:
    calendar = Calendar()
    port = FakePort(calendar)
    workload = Listed(requests)
    numbers = {"g1_blocks": 64, "max_batch_tokens": 16, **config}
    engine = SimulatedEngine(EngineConfig(**numbers), StimulusPort(port), calendar, workload, 4)
    port.engine = engine
    return engine, port, workload


def iterations(port: FakePort) -> list[Any]:
    return port.of(st.IterationScheduled)


def holders(engine: SimulatedEngine) -> list[list[int]]:
    scheduler = engine.scheduler
    live = [*scheduler.running, *scheduler.loaded, *scheduler.loading.values()]
    return [*(work.blocks for work in live), *scheduler.withheld.values()]


def test_one_request_from_arrival_to_end() -> None:
    engine, port, workload = machine([request("a", 10, 3)])
    engine.run()
    assert [type(s).__name__ for s in port.log] == [
        "PoolDeclared", "RequestArrived", "MatchRequested", "BlocksAllocated",
        "IterationScheduled", "IterationFinished", "IterationScheduled", "IterationFinished",
        "IterationScheduled", "IterationFinished", "RequestFinished",
    ]
    first, second, third = iterations(port)
    assert (first.new, first.progressed, first.positions, first.first_tokens) == (("a",), ("a",), (10,), ())
    assert (second.new, second.first_tokens, second.progressed) == ((), ("a",), ())
    assert (third.first_tokens, third.iteration) == ((), 3)
    fills = [(s.counts, len(unpack_ids(s.block_ids))) for s in port.of(st.IterationFinished)]
    assert fills == [((2,), 2), ((), 0), ((1,), 1)]
    prefill, decode = 4_000_000 + 10 * 8_000, 4_000_000 + 40_000
    assert workload.ended == [("a", prefill + 2 * decode)]
    assert engine.done
    assert not engine.only_held


def test_a_long_prompt_is_prefilled_in_chunks_and_leaves_no_budget_to_others() -> None:
    engine, port, _ = machine([request("a", 40, 1), request("b", 8, 1, family=1)])
    engine.run()
    assert [(s.progressed, s.positions) for s in iterations(port)] == [
        (("a",), (16,)), (("a",), (32,)), (("a", "b"), (40, 8)),
    ]


def test_a_shared_prefix_is_reused_but_one_token_is_left_to_compute() -> None:
    engine, port, _ = machine([request("a", 8, 1), request("b", 8, 1, at_ns=50_000_000)])
    engine.run()
    assert [s.computed_tokens for s in port.of(st.MatchRequested)] == [0, 4]
    mine, theirs = (unpack_ids(s.block_ids) for s in port.of(st.BlocksAllocated))
    assert mine[0] == theirs[0]
    assert mine[1] != theirs[1]


def test_a_request_larger_than_device_memory_is_finished_at_once() -> None:
    engine, port, workload = machine([request("a", 30, 4)], g1_blocks=8)
    engine.run()
    assert [(s.request, s.reason) for s in port.of(st.RequestFinished)] == [("a", FinishReason.TOO_LARGE)]
    assert (engine.totals.too_large, workload.ended) == (1, [("a", 0)])
    engine, port, _ = machine([request("a", 30, 3)], g1_blocks=8)
    engine.run()
    assert [s.reason for s in port.of(st.RequestFinished)] == [FinishReason.LENGTH]


def test_out_of_blocks_the_last_admitted_is_preempted_and_computes_its_tokens_again() -> None:
    engine, port, _ = machine([request("a", 8, 12), request("b", 8, 12, family=1)], g1_blocks=7)
    engine.run()
    assert [s.request for s in port.of(st.RequestPreempted)] == ["b"]
    resumed = [s for s in iterations(port) if s.resumed]
    assert [s.resumed for s in resumed] == [("b",)]
    assert [s.request for s in port.of(st.RequestFinished)] == ["a", "b"]
    again = [s for s in port.of(st.MatchRequested) if s.request == "b"][-1]
    assert again.computed_tokens > 0, "its own blocks are still found in G1"
    assert sum(s.first_tokens.count("b") for s in iterations(port)) == 2
    assert engine.totals.output_tokens == 24


def test_fenced_blocks_are_not_reused_before_they_are_released() -> None:
    engine, port, _ = machine([request("a", 8, 16), request("b", 8, 12, family=1)], g1_blocks=7)
    port.fence = lambda name, ids: ids[:1]
    engine.run()
    fenced = sorted(port.withheld)
    assert fenced, "a preemption fenced something"
    assert engine.only_held, "what is left cannot go on without them"
    port.release("b", fenced)
    engine.run()
    assert engine.done


def test_blocks_of_an_ended_request_stay_withheld_until_they_are_released() -> None:
    engine, port, _ = machine([request("a", 8, 1), request("b", 8, 1, at_ns=10_000_000, family=1)], g1_blocks=3)
    port.delay_free = True
    engine.run()
    assert [s.request for s in port.of(st.RequestFinished)] == ["a"]
    assert engine.only_held
    port.delay_free = False
    port.release("a", sorted(port.withheld))
    engine.run()
    assert [s.request for s in port.of(st.RequestFinished)] == ["a", "b"]
    assert engine.done


def test_a_running_request_stands_back_for_withheld_blocks_before_it_preempts() -> None:
    def ran(patience_ns: int) -> tuple[int, int]:
        engine, port, _ = machine(
            [request("a", 1, 8), request("b", 4, 9, family=1), request("c", 4, 1, family=2)],
            g1_blocks=5, patience_ns=patience_ns,
        )
        port.delay_free = True
        engine.calendar.at(23_000_000, lambda: port.release("c", sorted(port.withheld)))
        engine.run(24_000_000)
        port.delay_free = False
        engine.run()
        assert engine.done
        return len(port.of(st.RequestPreempted)), sum(len(s.skipped) for s in iterations(port))

    assert ran(patience_ns=0)[0] > 0
    assert ran(patience_ns=1_000_000_000) == (0, 1)


def test_a_held_request_is_left_out_and_comes_back() -> None:
    engine, port, _ = machine([request("a", 4, 6), request("b", 4, 6, family=1)])
    engine.run(5_000_000)
    port.standing.add("b")
    engine.run(14_000_000)
    port.standing.discard("b")
    engine.run()
    skipped = [s.iteration for s in iterations(port) if "b" in s.skipped]
    back = [s.iteration for s in iterations(port) if "b" in s.unskipped]
    assert len(skipped) == len(back) == 1
    assert [s.request for s in port.of(st.RequestFinished)] == ["a", "b"]


def test_time_stands_still_when_only_held_requests_are_left() -> None:
    engine, port, _ = machine([request("a", 4, 6)])
    engine.run(5_000_000)
    port.standing.add("a")
    engine.run()
    assert engine.only_held
    at_ns = engine.now_ns
    last = iterations(port)[-1]
    assert (last.skipped, last.first_tokens) == (("a",), ())
    engine.nudge()
    engine.run()
    assert engine.now_ns == at_ns
    port.standing.clear()
    engine.nudge()
    engine.run()
    assert engine.done


def test_a_request_held_before_its_first_iteration_is_passed_over() -> None:
    engine, port, _ = machine([request("a", 4, 2), request("b", 4, 2, family=1)])
    port.standing.add("a")
    engine.run()
    assert [s.request for s in port.of(st.RequestFinished)] == ["b"]
    assert not any("a" in s.skipped for s in iterations(port))
    assert engine.only_held


def test_a_request_that_must_ask_again_lets_the_next_one_try() -> None:
    engine, port, _ = machine([request("a", 4, 2), request("b", 4, 2, family=1)])
    port.found["a"] = None
    engine.run(1_000_000)
    assert iterations(port)[0].new == ("b",)
    del port.found["a"]
    engine.run()
    assert engine.done


@pytest.mark.parametrize("delay_ns", [0, 5_000])
def test_an_asynchronous_load_is_waited_for(delay_ns: int) -> None:
    engine, port, _ = machine([request("a", 14, 1)])
    port.found["a"] = 8
    port.delay_ns = delay_ns
    engine.run()
    allocated = port.of(st.BlocksAllocated)
    assert [(len(unpack_ids(s.block_ids)), s.external_tokens) for s in allocated] == [(2, 8), (2, 0)]
    assert (iterations(port)[0].at_ns, iterations(port)[0].positions) == (delay_ns, (14,))
    assert port.of(st.IterationFinished)[0].counts == (1,), "loaded blocks are not filled again"


def test_a_request_that_loads_has_no_seat_and_needs_one_to_go_on() -> None:
    """Of two requests and one seat, the second computes during the load of the first, which then waits for its end."""
    engine, port, workload = machine([request("a", 12, 1), request("b", 8, 9, family=1)], max_running=1)
    port.found["a"], port.delay_ns = 8, 10_000_000
    engine.run()
    took_part = [s.new for s in iterations(port) if s.new]
    assert took_part == [("b",), ("a",)]
    load_ends = next(s for s in port.of(st.BlocksAllocated) if s.external_tokens).at_ns + 10_000_000
    ended = dict(workload.ended)
    assert load_ends < ended["b"] < ended["a"]
    assert all(s.running <= 1 for s in iterations(port))


def test_nobody_passes_a_request_whose_load_has_ended() -> None:
    """The running request takes the blocks that it needs, and a small request that comes then waits behind it."""
    requests = [
        request("a", 16, 20), request("b", 24, 1, family=1, at_ns=1_000),
        request("c", 4, 1, family=2, at_ns=50_000_000),
    ]
    engine, port, workload = machine(requests, g1_blocks=12)
    port.found["b"], port.delay_ns = 12, 40_000_000
    engine.run(50_000_000)
    assert [work.name for work in engine.scheduler.loaded] == ["b"]
    assert engine.scheduler.pool.free_blocks == 2
    engine.run()
    assert [name for name, _ in workload.ended] == ["a", "b", "c"]


def test_a_load_leaves_the_blocks_that_another_load_needs_to_go_on() -> None:
    """Nothing runs yet. Both prefixes fit at once and both prompts do not, so the second load waits for the first."""
    engine, port, workload = machine([request("a", 28, 1), request("b", 28, 1, family=1)], g1_blocks=12)
    port.found |= {"a": 12, "b": 12}
    port.delay_ns = 10_000_000
    engine.run(5_000_000)
    assert list(engine.scheduler.loading) == ["a"]
    engine.run()
    assert [name for name, _ in workload.ended] == ["a", "b"]
    assert engine.totals.preemptions == 0


def test_a_failed_load_is_computed_from_where_the_leader_says() -> None:
    engine, port, _ = machine([request("a", 14, 1)])
    port.found["a"], port.loaded["a"] = 12, 4
    engine.run()
    assert iterations(port)[0].positions == (14,)
    assert port.of(st.IterationFinished)[0].counts == (2,)
    assert engine.done


def test_a_synchronous_load_is_charged_to_the_step_that_asked_for_it() -> None:
    calendar = Calendar()
    port = FakePort(calendar)
    port.found["a"], port.asynchronous, port.delay_ns = 8, False, 0
    latency = [700]
    workload = Listed([request("a", 14, 1)])
    config = EngineConfig(g1_blocks=64, max_batch_tokens=16)
    engine = SimulatedEngine(config, StimulusPort(port), calendar, workload, 4, take_latency_ns=lambda: latency.pop())
    port.engine = engine
    engine.run()
    assert iterations(port)[0].at_ns == 0
    assert workload.ended == [("a", 4_000_000 + 6 * 8_000 + 700)]


def test_a_reset_forgets_everything_and_the_rest_of_the_workload_goes_on() -> None:
    engine, port, workload = machine([request("a", 8, 9), request("b", 8, 2, at_ns=20_000_000)])
    engine.run(9_000_000)
    port.blocks.clear()
    port.decoding.clear()
    engine.clear(b"")
    assert engine.scheduler.pool.audit([]) == []
    engine.run()
    assert workload.ended == [("a", 8_104_000), ("b", engine.now_ns)]
    assert (engine.totals.forgotten, engine.totals.finished) == (1, 1)


def test_a_full_queue_drops_and_counts() -> None:
    engine, port, _ = machine([request(f"r{i}", 4, 1) for i in range(5)], max_waiting=2)
    engine.run()
    assert (engine.totals.finished, engine.totals.refused) == (2, 3)
    assert len(port.of(st.RequestArrived)) == 2


def test_a_paused_engine_forms_no_iteration() -> None:
    engine, port, _ = machine([request("a", 4, 2)])
    engine.pause()
    engine.run()
    assert engine.only_held
    assert iterations(port) == []
    engine.resume()
    engine.run()
    assert engine.done


REQUESTS = hs.lists(
    hs.tuples(hs.integers(1, 60), hs.integers(1, 30), hs.integers(0, 60_000_000), hs.integers(0, 2)),
    min_size=1, max_size=12,
)


@settings(max_examples=60)
@given(
    shapes=REQUESTS, g1=hs.integers(8, 40), batch=hs.integers(1, 40), running=hs.integers(1, 6),
    found=hs.lists(hs.integers(0, 3), max_size=12), synchronous=hs.booleans(),
)
def test_every_request_ends_and_every_token_has_a_place(
    shapes: list[tuple[int, int, int, int]], g1: int, batch: int, running: int, found: list[int], synchronous: bool
) -> None:
    """The port asserts the places; here: all end once, in order of time, with all tokens, and no block is lost."""
    requests = [
        request(f"r{at}", prompt, output, at_ns=when, family=family)
        for at, (prompt, output, when, family) in enumerate(sorted(shapes, key=lambda shape: shape[2]))
    ]
    engine, port, workload = machine(requests, g1_blocks=g1, max_batch_tokens=batch, max_running=running)
    port.asynchronous = not synchronous
    port.delay_ns = 0 if synchronous else 3_000_000
    lookups: dict[str, int] = {}
    for made, blocks in zip(requests, found, strict=False):
        lookups[made.request] = blocks

    real = port._MatchRequested

    def bounded(s: st.MatchRequested) -> Any:
        made = next(made for made in requests if made.request == s.request)
        room = (made.prompt_tokens - 1 - s.computed_tokens) // 4
        port.found[s.request] = 4 * max(0, min(lookups.get(s.request, 0), room))
        return real(s)

    port._MatchRequested = bounded  # type: ignore[method-assign]
    while not engine.done:
        assert not engine.only_held
        engine.run(engine.calendar.next_ns)
        assert engine.scheduler.pool.audit(holders(engine)) == []
        assert len(engine.scheduler.running) <= running
    assert sorted(name for name, _ in workload.ended) == sorted(made.request for made in requests)
    times = [s.at_ns for s in port.log]
    assert times == sorted(times)
    big = {made.request for made in requests if -(-(made.prompt_tokens + made.output_tokens - 1) // 4) > g1}
    assert engine.totals.too_large == len(big)
    assert engine.totals.output_tokens == sum(m.output_tokens for m in requests if m.request not in big)
    assert [s.iteration for s in iterations(port)] == list(range(1, engine.totals.iterations + 1))
