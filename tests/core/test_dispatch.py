"""The dispatcher: stamps, order of instructions, delivery, and the comparison of hosts."""

import pytest

from kvbm_console.core import instructions as ins
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import PoolKnown
from kvbm_console.core.ids import Clock, Note, Route, Tier
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.stimuli import NoteReported, RequestArrived, Stimulus
from kvbm_console.dispatch import DIFFERENCES_MAX, Dispatcher, HostsDiverged, differences, start_leader

START = ins.StartTransfer(7, 0, Route.G1_G2, b"", b"", 0, 0, 1)


class Scripted(Leader):
    """A leader that answers every stimulus with the next of these instruction lists."""

    def __init__(self, *scripts: list[ins.Instruction]) -> None:
        super().__init__(LeaderConfig())
        self.scripts = list(scripts)

    def handle(self, stimulus: Stimulus) -> Outcome:
        outcome = super().handle(stimulus)
        return Outcome(outcome.result, outcome.events, self.scripts.pop(0) if self.scripts else [])


class Everything:
    """Mover, engine and deadlines in one, keeping what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def start(self, order: ins.StartTransfer) -> None:
        self.told.append(("start", order.operation))

    def cancel(self, operation: int) -> None:
        self.told.append(("cancel", operation))

    def zero(self, pool: int) -> None:
        self.told.append(("zero", pool))

    def wake(self, request: str) -> None:
        self.told.append(("wake", request))

    def release(self, request: str, ids: bytes) -> None:
        self.told.append(("release", request, ids))

    def pin(self, ids: bytes) -> None:
        self.told.append(("pin", ids))

    def clear(self, keep: bytes) -> None:
        self.told.append(("clear", keep))

    def pause(self) -> None:
        self.told.append(("pause",))

    def resume(self) -> None:
        self.told.append(("resume",))

    def set(self, deadline: int, after_ns: int) -> None:
        self.told.append(("set", deadline, after_ns))


def note(dispatcher: Dispatcher, detail: str = "") -> Outcome:
    return dispatcher.submit(NoteReported, Note.CLOCK_STEPPED, detail)


def test_stimuli_are_numbered_without_a_hole_and_time_never_goes_back() -> None:
    times = iter([50, 40, 60])
    seen: list[Stimulus] = []
    dispatcher = Dispatcher(Leader(LeaderConfig()), lambda: next(times), publish=lambda s, _: seen.append(s))
    note(dispatcher)
    dispatcher.port(3).submit(RequestArrived, "a", b"", 5, 1, 0, None)
    dispatcher.submit_from(2, 999, NoteReported, Note.CLOCK_STEPPED, "")
    stamps = [(s.n, s.at_ns, s.source, s.origin_ns) for s in seen]
    assert stamps == [(0, 50, 0, None), (1, 50, 3, None), (2, 60, 2, 999)]


def test_each_instruction_reaches_its_receiver_in_order() -> None:
    script: list[ins.Instruction] = [
        START, ins.CancelTransfer(8), ins.ZeroBlocks(1), ins.WakeRequest(1, "a"), ins.ReleaseDeviceBlocks(1, "a", b"x"),
        ins.SetDeadline(4, 99, Clock.WALL), ins.PinDeviceBlocks(1, b"y"), ins.ClearDevicePool(1, b"z"),
        ins.PauseEngine(1), ins.ResumeEngine(1),
    ]
    dispatcher = Dispatcher(Scripted(script), lambda: 0)
    receiver = Everything()
    dispatcher.mover = receiver
    dispatcher.engines[1] = receiver
    wall = Everything()
    dispatcher.wall_deadlines = wall  # type: ignore[assignment]
    note(dispatcher)
    assert receiver.told == [
        ("start", 7), ("cancel", 8), ("zero", 1), ("wake", "a"), ("release", "a", b"x"), ("pin", b"y"), ("clear", b"z"),
        ("pause",), ("resume",),
    ]
    assert wall.told == [("set", 4, 99)]
    assert dispatcher.undelivered == 0


def test_instructions_without_a_receiver_are_counted() -> None:
    script: list[ins.Instruction] = [
        START, ins.CancelTransfer(1), ins.ZeroBlocks(0), ins.WakeRequest(1, "a"), ins.ReleaseDeviceBlocks(1, "a", b""),
        ins.SetDeadline(1, 1, Clock.ENGINE), ins.ClearDeadline(1), ins.ClearDevicePool(1, b""),
        ins.PinDeviceBlocks(1, b""), ins.PauseEngine(1), ins.ResumeEngine(1),
    ]
    assert {type(instruction) for instruction in script} == set(ins.Instruction.__subclasses__())
    dispatcher = Dispatcher(Scripted(script), lambda: 0)
    note(dispatcher)
    assert dispatcher.undelivered == 10, "all but ClearDeadline, which may be about an unknown one"


def test_a_nested_submit_is_handled_at_once_and_its_instructions_wait_their_turn() -> None:
    first: list[ins.Instruction] = [START, ins.WakeRequest(1, "first")]
    second: list[ins.Instruction] = [ins.WakeRequest(1, "second")]
    dispatcher = Dispatcher(Scripted(first, second), lambda: 0)

    class Answering(Everything):
        def start(self, order: ins.StartTransfer) -> None:
            super().start(order)
            note(dispatcher, "nested")
            self.told.append(("handled", dispatcher.n))

    receiver = Answering()
    dispatcher.mover = receiver
    dispatcher.engines[1] = receiver
    note(dispatcher)
    assert receiver.told == [("start", 7), ("handled", 2), ("wake", "first"), ("wake", "second")]


def test_publishing_comes_before_any_instruction() -> None:
    order: list[str] = []
    dispatcher = Dispatcher(Scripted([START]), lambda: 0, publish=lambda *_: order.append("published"))

    class Mover(Everything):
        def start(self, order_: ins.StartTransfer) -> None:
            order.append("started")

    dispatcher.mover = Mover()
    note(dispatcher)
    assert order == ["published", "started"]


def test_starting_a_leader_declares_the_tiers_of_its_configuration() -> None:
    events: list[object] = []
    dispatcher = Dispatcher(
        Leader(LeaderConfig(g2_blocks=8, g3_blocks=0)), lambda: 0, publish=lambda _, o: events.extend(o.events)
    )
    start_leader(dispatcher)
    assert [(e.tier, e.capacity_blocks, e.medium) for e in events if isinstance(e, PoolKnown)] == [
        (Tier.G2, 8, "CPU_PINNED")
    ]


def test_a_port_tells_the_position_of_a_request_and_zero_for_an_unknown_one() -> None:
    dispatcher = Dispatcher(Leader(LeaderConfig()), lambda: 0)
    port = dispatcher.port(1)
    port.submit(RequestArrived, "a", b"", 5, 1, 0, None)
    assert (port.computed_tokens("a"), port.computed_tokens("nobody"), set(port.standing)) == (0, 0, set())


def test_hosts_with_another_configuration_are_refused() -> None:
    with pytest.raises(UsageError, match="host 1 must have the configuration of host 0"):
        Dispatcher(Leader(LeaderConfig()), lambda: 0, more_hosts=[Leader(LeaderConfig(block_tokens=8))])


def test_an_altered_host_is_found_at_that_very_stimulus() -> None:
    others = [Leader(LeaderConfig(g2_blocks=4)) for _ in range(2)]
    dispatcher = Dispatcher(
        Leader(LeaderConfig(g2_blocks=4)), lambda: 0, more_hosts=others, compare_every=1
    )
    start_leader(dispatcher)
    note(dispatcher)
    others[1].state.totals.preemptions += 1
    with pytest.raises(HostsDiverged, match="host 2 differs from host 0 in its facts after stimulus 2") as caught:
        note(dispatcher)
    assert (caught.value.host, caught.value.n) == (2, 2)
    assert caught.value.difference == ["totals.preemptions: 0 is not 1"]


class Otherwise(Leader):
    """A host that orders another copy than host 0 at stimulus 3, which no fact tells."""

    def handle(self, stimulus: Stimulus) -> Outcome:
        outcome = super().handle(stimulus)
        return Outcome(outcome.result, outcome.events, [START]) if stimulus.n == 3 else outcome


def compared(host: Leader, every: int) -> Dispatcher:
    """A dispatcher with a second host, which has handled stimulus 0."""
    dispatcher = Dispatcher(Leader(LeaderConfig()), lambda: 0, more_hosts=[host], compare_every=every)
    note(dispatcher)
    return dispatcher


def notes(dispatcher: Dispatcher, until: int) -> None:
    while dispatcher.n <= until:
        note(dispatcher)


def test_hosts_that_decide_otherwise_are_found_at_that_very_stimulus_however_rarely_states_are_compared() -> None:
    dispatcher = compared(Otherwise(LeaderConfig()), 50)
    with pytest.raises(HostsDiverged, match="in its outcome after stimulus 3: on host 0") as caught:
        notes(dispatcher, 5)
    assert caught.value.difference == ["instructions has 0 entries, not 1"]


def test_an_altered_state_is_found_when_states_are_compared_next() -> None:
    host = Leader(LeaderConfig())
    dispatcher = compared(host, 50)
    host.state.totals.preemptions += 1
    notes(dispatcher, 49)
    with pytest.raises(HostsDiverged, match=r"totals\.preemptions: 0 is not 1") as caught:
        notes(dispatcher, 50)
    assert (caught.value.n, caught.value.part) == (50, "facts")


def test_altered_memory_is_found_in_the_end() -> None:
    host = Leader(LeaderConfig())
    dispatcher = compared(host, 50)
    host.memory.next_deadline += 1
    notes(dispatcher, 60)
    with pytest.raises(HostsDiverged, match=r"memory after stimulus 60: .*next_deadline: \d+ is not \d+"):
        dispatcher.compare_hosts()


def test_differences_name_their_path() -> None:
    assert differences([1, {"a": [2, 3]}], [1, {"a": [2, 3]}]) == []
    assert differences({"a": 1, "c": [1, 2]}, {"a": 1, "b": 2, "c": [1]}) == [
        "c has 2 entries, not 1", "b exists only there",
    ]
    assert differences({"a": [0, "x" * 500]}, {"a": [0, "y"]}) == [f"a[1]: '{'x' * 118}… is not 'y'"]
    assert differences({"a": {1: 0, 2: 0}}, {"a": {2: 0, 1: 0}}) == ["a stands in another order: [1, 2] is not [2, 1]"]
    assert differences(list(range(9)), [0] * 9) == ["[1]: 1 is not 0", "[2]: 2 is not 0", " differs in 6 more entries"]
    assert len(differences(dict.fromkeys(range(99), 1), dict.fromkeys(range(99), 0))) == DIFFERENCES_MAX
