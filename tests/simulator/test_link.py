"""The link mover: times, queues, ranks, cancelling, faults, synchronous loads."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core.columns import unpack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import Route
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.stimuli import Stimulus, TransferFailed, TransferFinished, TransferStarted
from kvbm_console.dispatch import Dispatcher
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.link import DEFAULT_LINKS, TOKEN_BYTES, Fault, LinkMover, LinkSpec

LINKS = (
    LinkSpec(name="down", routes=(Route.G1_G2,), base_latency_ns=100, bytes_per_s=1e9),
    LinkSpec(name="up", routes=(Route.G2_G1, Route.G3_G1), base_latency_ns=10, bytes_per_s=2e9),
)


class Bench:
    """A mover with blocks of 1,000 bytes; ``seen`` holds (time, what, operation, rank)."""

    def __init__(self, *, asynchronous: bool = True) -> None:
        self.calendar = Calendar()
        self.seen: list[tuple[int, str, int, int | None]] = []
        self.failed: list[tuple[str, list[int]]] = []
        dispatcher = Dispatcher(Leader(LeaderConfig()), self.calendar.clock, publish=self._keep)
        self.mover = LinkMover(self.calendar, dispatcher, 1_000, links=LINKS, asynchronous=asynchronous)

    def _keep(self, stimulus: Stimulus, _: Outcome) -> None:
        if isinstance(stimulus, TransferStarted):
            self.seen.append((stimulus.at_ns, "started", stimulus.operation, None))
        elif isinstance(stimulus, TransferFinished):
            self.seen.append((stimulus.at_ns, "finished", stimulus.operation, stimulus.rank))
        elif isinstance(stimulus, TransferFailed):
            self.seen.append((stimulus.at_ns, "failed", stimulus.operation, stimulus.rank))
            self.failed.append((stimulus.error, unpack_ids(stimulus.failed)))

    def start(self, operation: int, route: Route = Route.G1_G2, blocks: int = 1, ranks: int = 1) -> None:
        self.mover.start(StartTransfer(operation, 0, route, b"", b"", blocks, operation, ranks))

    def run(self) -> None:
        while self.calendar.run_next():
            pass


def test_a_copy_takes_base_latency_plus_bytes_over_bandwidth_rounded_up() -> None:
    bench = Bench()
    bench.start(1, blocks=3)
    bench.run()
    assert bench.seen == [(0, "started", 1, None), (3_100, "finished", 1, 0)]
    assert LinkSpec(name="x", routes=(), base_latency_ns=0, bytes_per_s=3e9).copy_ns(1) == 1


def test_bytes_of_a_link_go_one_after_the_other_and_latencies_pass_together() -> None:
    bench = Bench()
    bench.start(1)
    bench.start(2)
    bench.start(3, Route.G3_G1)
    assert [(link.busy, link.queued) for link in bench.mover.statistics()] == [(True, 1), (True, 0)]
    bench.run()
    assert bench.seen == [
        (0, "started", 1, None), (0, "started", 3, None), (510, "finished", 3, 0), (1_000, "started", 2, None),
        (1_100, "finished", 1, 0), (2_100, "finished", 2, 0),
    ]
    assert [(link.operations, link.copied_bytes) for link in bench.mover.statistics()] == [(2, 2_000), (1, 1_000)]


def test_every_rank_reports() -> None:
    bench = Bench()
    bench.start(1, ranks=3)
    bench.run()
    assert [(what, rank) for _, what, _, rank in bench.seen] == [
        ("started", None), ("finished", 0), ("finished", 1), ("finished", 2),
    ]


def test_a_queued_operation_can_be_cancelled_a_running_one_runs_out() -> None:
    bench = Bench()
    bench.start(1)
    bench.start(2)
    bench.start(3)
    bench.mover.cancel(2)
    bench.mover.cancel(1)
    bench.mover.cancel(77)
    bench.run()
    assert [(what, operation) for _, what, operation, _ in bench.seen] == [
        ("started", 1), ("started", 3), ("finished", 1), ("finished", 3),
    ]


@given(some.lists(some.tuples(some.integers(0, 5_000), some.integers(1, 20)), min_size=1, max_size=30))
def test_a_link_copies_no_more_than_its_bandwidth_and_is_never_idle_beside_a_queue(
    copies: list[tuple[int, int]],
) -> None:
    """The last byte arrives when a queue without latencies would have sent it, and each copy takes its own time."""
    bench, sent_ns = Bench(), 0
    for operation, (at_ns, blocks) in enumerate(sorted(copies)):
        bench.calendar.at(at_ns, lambda operation=operation, blocks=blocks: bench.start(operation, blocks=blocks))
        sent_ns = max(sent_ns, at_ns) + blocks * 1_000
    bench.run()
    begun = {operation: at for at, what, operation, _ in bench.seen if what == "started"}
    ended = {operation: at for at, what, operation, _ in bench.seen if what == "finished"}
    for operation, (_, blocks) in enumerate(sorted(copies)):
        assert ended[operation] == begun[operation] + blocks * 1_000 + 100
    assert max(ended.values()) == sent_ns + 100


def test_a_copy_that_gets_a_time_takes_it_beside_the_queue_of_its_link() -> None:
    bench, asked = Bench(), list[tuple[int, int]]()

    def times(order: StartTransfer, link_ns: int) -> int | None:
        asked.append((order.operation, link_ns))
        return 300 if order.operation == 2 else None

    bench.mover.times = times
    for operation in (1, 2, 3):
        bench.start(operation)
    bench.run()
    assert asked == [(1, 1_100), (2, 1_100), (3, 1_100)]
    assert bench.seen == [
        (0, "started", 1, None), (0, "started", 2, None), (300, "finished", 2, 0), (1_000, "started", 3, None),
        (1_100, "finished", 1, 0), (2_100, "finished", 3, 0),
    ]
    assert [(link.busy, link.operations) for link in bench.mover.statistics()] == [(False, 3), (False, 0)]


def test_faults_are_reported_by_their_ranks_or_never() -> None:
    bench = Bench()
    faults = {1: Fault(ranks=(1,), blocks=(2,), error="parity"), 2: Fault(), 3: Fault(silent=True)}
    bench.mover.faults = lambda order: faults.get(order.operation)
    for operation in (1, 2, 3, 4):
        bench.start(operation, blocks=3, ranks=2)
    bench.run()
    reports = [(what, operation, rank) for _, what, operation, rank in bench.seen if what != "started"]
    assert reports == [
        ("finished", 1, 0), ("failed", 1, 1), ("failed", 2, 0), ("failed", 2, 1), ("finished", 4, 0),
        ("finished", 4, 1),
    ]
    assert bench.failed == [("parity", [2]), ("injected", []), ("injected", [])]


def test_synchronous_loads_report_at_once_and_their_time_is_peeked_and_taken() -> None:
    bench = Bench(asynchronous=False)
    bench.start(1, Route.G2_G1, blocks=4)
    bench.start(2, Route.G3_G1, blocks=2)
    assert bench.seen == [
        (0, "started", 1, None), (0, "finished", 1, 0), (0, "started", 2, None), (0, "finished", 2, 0),
    ]
    assert bench.mover.pending_latency_ns() == bench.mover.pending_latency_ns() == 2_010 + 1_010
    assert (bench.mover.take_latency_ns(), bench.mover.take_latency_ns()) == (3_020, 0)
    bench.start(3)
    bench.run()
    assert bench.seen[-1] == (1_100, "finished", 3, 0), "stores run beside the engine all the same"


def test_zeroing_is_noted() -> None:
    bench = Bench()
    bench.mover.zero(2)
    assert bench.mover.zeroed == [2]


def test_the_default_links_serve_every_route_once() -> None:
    routes = [route for link in DEFAULT_LINKS for route in link.routes]
    assert sorted(routes) == sorted(Route)
    assert TOKEN_BYTES == 131_072


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_bandwidth_that_is_no_bandwidth_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match="link a: bytes_per_s must be above 0 and finite"):
        LinkSpec(name="a", routes=(), base_latency_ns=0, bytes_per_s=value)


def test_other_numbers_out_of_bounds_are_refused() -> None:
    with pytest.raises(UsageError, match="link a: base_latency_ns must be at least 0, got -1"):
        LinkSpec(name="a", routes=(), base_latency_ns=-1, bytes_per_s=1.0)
    bench = Bench()
    with pytest.raises(UsageError, match="block_bytes must be above 0"):
        LinkMover(bench.calendar, Dispatcher(Leader(LeaderConfig()), lambda: 0), 0)
