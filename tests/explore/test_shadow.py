"""The worker copies only between order and report, and what it copies is what lies there at that moment."""

from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.explore.shadow import EMPTY, Job, Memory, ShadowWorker, StepOrders, cause

COPIES = st.lists(st.integers(0, 20), min_size=1, max_size=6).map(tuple)


@given(COPIES, st.lists(st.integers(1, 6), min_size=1, max_size=8), st.booleans())
def test_every_job_is_reported_once_and_only_when_all_its_blocks_have_moved(
    copies: tuple[int, ...], sizes: list[int], load: bool
) -> None:
    memory = Memory()
    worker = ShadowWorker(memory, copies)
    reported: list[int] = []
    place = 0
    for number in range(len(sizes) + 40):
        orders = StepOrders("offloading")
        if number < len(sizes):
            pairs = [(place + at, place + at) for at in range(sizes[number])]
            for source, _ in pairs:
                memory.host[("offloading", source)] = memory.device[source] = 1_000 + source
            place += len(pairs)
            (orders.loads if load else orders.stores).append(Job(number, load, "r", pairs, "offloading"))
        for job in [*worker.begin(orders), *worker.end(orders)]:
            assert job.moved == len(job.pairs)
            reported.append(job.number)
    assert sorted(reported) == list(range(len(sizes)))
    assert not worker.busy
    assert worker.moved_blocks == sum(sizes)


@given(COPIES)
def test_a_flush_ends_a_store_before_the_step_overwrites_its_place(copies: tuple[int, ...]) -> None:
    memory = Memory()
    worker = ShadowWorker(memory, copies)
    memory.device[3] = 77
    worker.begin(StepOrders("offloading"))
    worker.end(StepOrders("offloading", stores=[Job(0, False, "r", [(3, 9)], "offloading")]))
    ended = worker.begin(StepOrders("offloading", flush={0}))
    memory.write(3, 88, "other", 16)
    ended += worker.end(StepOrders("offloading"))
    assert [job.number for job in ended] == [0]
    assert memory.host[("offloading", 9)] == 77
    assert memory.torn == {}


def test_a_store_that_nobody_waited_for_is_named_with_the_step_that_overwrote_its_place() -> None:
    memory = Memory()
    worker = ShadowWorker(memory, (3 * 2 + 1,), ("ignored-flush",))
    memory.device[3] = 77
    worker.begin(StepOrders("offloading"))
    worker.end(StepOrders("offloading", stores=[Job(0, False, "r", [(3, 9)], "offloading")]))
    for step in range(1, 8):
        memory.step = step
        worker.begin(StepOrders("offloading", flush={0}))
        memory.write(3, 88, "other", 16)
        worker.end(StepOrders("offloading"))
    assert memory.host[("offloading", 9)] == 88
    worker.begin(StepOrders("offloading"))
    worker.end(StepOrders("offloading", loads=[Job(1, True, "late", [(9, 5)], "offloading")]))
    while worker.busy:
        worker.begin(StepOrders("offloading"))
        worker.end(StepOrders("offloading"))
    told = cause(memory, 5, str)
    assert "load 1 of request late wrote it from host slot 9" in told
    assert "did not wait for store 0" in told
    assert memory.device[5] != EMPTY
