"""Engines with a tap: the tests' small engine with the program's recorder and sender, in a process of its own.

The engine steps in its own thread, the sender works in another, and a reporter is a process of its own. The daemon
starts the reporter of an engine that knows its Unix socket. An engine that knows HOST:PORT starts the reporter itself.

Law of this file: a run without taps has none of their dice.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from kvbm_console.service import LeaderService
from kvbm_console.tap import recorder as recorders
from kvbm_console.tap import sender as senders
from kvbm_console.tap.connector import make_tap
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import Sender, TapSettings
from tests.sim.load import ADDRESS
from tests.sim.machine import TAPS_ADDRESS
from tests.sim.scheduler import Thread
from tests.sim.sockets import ReporterProcess
from tests.tap.fake_engine import BLOCK, Base, Inner, Request, Scheduler

if TYPE_CHECKING:
    from tests.sim.faults import Faults
    from tests.sim.run import Simulation

SHARE: Final = 0.2
"""Of the seeds that choose their own faults: so many have taps."""
BLOCKS: Final = 60
QUEUE_MAX: Final = 150
UNSENT_MAX: Final = 4_000
"""Instead of 16,384 records and 8 MiB, so that a frozen daemon makes an engine reach them."""
PAUSE_S: Final = 0.03
"""Instead of 2 ms, which is 500 turns of a thread a second."""
LINGERS_S: Final = 4.0
"""The time between the end of an engine's connector and that of its process."""
HELD_S: Final = 0.005
"""A step takes no longer: our part of it waits for nothing."""
STAYS_S: Final = 3.0
"""A reporter ends within so long after its engine, unless a daemon that stands still keeps it."""
KILLED_S: Final = 1.5
"""A reporter whose sender has ended its connection is killed by then, also when it is frozen."""
WELL_S: Final = 9.0
"""A tap to which nothing happens for so long reports: three starts of a reporter, with pauses of a second or two."""
SHOWN_S: Final = 2.0
"""A request that began or ended before is shown, or is not shown."""


class TappedEngine:
    """An engine that begins again when it has ended."""

    def __init__(self, taps: "Taps", number: int) -> None:
        self.taps, self.simulation = taps, taps.simulation
        self.world = self.simulation.world
        self.name = f"tapped-{number}"
        self.dice = dice = random.Random(f"{self.simulation.seed} {self.name}")
        self.starts_reporter = dice.random() < 0.4
        self.pace_s = dice.choice((0.05, 0.1, 0.3))
        self.lives = 0
        self.well_ns = 0
        self.ending = False
        self.begin()

    def begin(self) -> None:
        """Start the engine."""
        self.lives += 1
        self.ending = False
        self.began: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        """Requests, and when each began and ended."""
        self.recorder = TapRecorder()
        self.sender: Sender | None = None
        self.process = self.simulation.machine.process(f"{self.name}.{self.lives}")
        self.died_ns: int | None = None
        self.process.on_death.append(self._died)
        self.well(0.0)
        Thread(self._run, f"{self.name}-engine", process=self.process).start()

    def _died(self) -> None:
        self.died_ns = self.world.now

    def well(self, in_s: float) -> None:
        """Something keeps its tap from reporting until then."""
        self.well_ns = max(self.well_ns, self.world.now + round(in_s * 1e9))

    def end(self, *, in_order: bool) -> None:
        """It ends, and is started again."""
        if self.process.dead:
            return
        if in_order:
            self.ending = True
        else:
            self.process.kill()
        self.again(self.dice.choice((0.3, 3.0)) + (LINGERS_S + 0.5 if in_order else 0.0))

    def again(self, in_s: float) -> None:
        """Start it later, if nobody has meanwhile, when its last process has ended."""
        def begin() -> None:
            if self.process.dead and not self.simulation.monitors.closing:
                self.begin()
            elif self.ending:
                self.again(0.5)

        self.well(in_s)
        self.world.after(in_s, begin)

    # --- what ``make_tap`` asks of an engine's binding ---

    def inner(self, tap: Any, args: Any, kwargs: Any) -> Any:
        return Inner()

    def inner_class(self, args: Any, kwargs: Any) -> Any:
        return Inner, args, kwargs

    def recorder_of(self, tap: Any, args: Any, kwargs: Any) -> TapRecorder:
        target = TAPS_ADDRESS if self.starts_reporter else ADDRESS
        settings = TapSettings(target, self.name, BLOCK, BLOCKS)
        self.sender = Sender(self.recorder, Flattener(block_tokens=BLOCK), settings)
        self.sender.start()
        return self.recorder

    # --- the engine's thread ---

    def _run(self) -> None:
        binding = _Binding(self)
        tap = make_tap("Tap", (Base,), binding)(None, None)
        engine = Scheduler(tap, blocks=BLOCKS, running=4, budget=24)
        dice, world = self.dice, self.world
        while not self.ending and not self.simulation.monitors.closing:
            while len(engine.requests) < 5:
                self._add(engine)
            began = world.now
            engine.sample(engine.step())
            took_s = (world.now - began) / 1e9
            if took_s > HELD_S:
                self.taps.violated("taps", f"the tap of {self.name} kept a step for {took_s:.3f} s")
            for name in self.began.keys() - engine.requests.keys() - self.ended.keys():
                self.ended[name] = world.now
            world.pause(self.pace_s * (0.5 + dice.random()))
        self.died_ns = world.now
        tap.shutdown()
        world.pause(LINGERS_S)
        self.process.end("ended")

    def _add(self, engine: Scheduler) -> None:
        dice = self.dice
        name = f"{self.name}.{self.lives}-{len(self.began)}"
        base = dice.randrange(5) * 1_000
        self.began[name] = self.world.now
        engine.add(Request(name, [base + at for at in range(dice.choice((6, 12, 30)))], dice.randrange(1, 40)))


class _Binding:
    """The engine as ``make_tap`` knows it."""

    def __init__(self, engine: TappedEngine) -> None:
        self.inner, self.inner_class, self.recorder = engine.inner, engine.inner_class, engine.recorder_of


class Taps:
    """All engines with a tap of a run, and their laws."""

    def __init__(self, simulation: "Simulation", kinds: Sequence[str]) -> None:
        self.simulation = simulation
        self.dice = dice = random.Random(f"{simulation.seed} taps")
        drawn = not kinds and dice.random() < SHARE
        self.kinds = sorted(dice.sample([*sorted(TAP_KINDS), *_OTHERS], dice.randrange(1, 4))) if drawn else []
        self.take_part = drawn or bool(TAP_KINDS.keys() & set(kinds))
        self.all: list[TappedEngine] = []
        self.violated: Callable[[str, str], None] = lambda law, sentence: None
        self._gone: dict[int, int] = {}
        """Number of a reporter's process to the time since when nobody needs it."""

    @property
    def calm_s(self) -> float:
        """The time that a run with taps needs beyond that of others."""
        return WELL_S if self.take_part else 0.0

    def begin(self) -> None:
        """Start the engines."""
        if self.take_part:
            self.violated = self.simulation.monitors.violated
            self.simulation.machine.spinning = lambda name: self.violated("taps", f"the sender of {name} never waits")
            self.all = [TappedEngine(self, number) for number in range(self.dice.randrange(1, 3))]

    def one(self) -> TappedEngine:
        """Any of them."""
        return self.dice.choice(self.all)

    def reporters(self) -> list[ReporterProcess]:
        """Those that live."""
        return [each for each in self.simulation.machine.sockets.children if not each.process.dead]

    def power_lost(self) -> None:
        """All of them were killed."""
        for engine in self.all:
            engine.again(1.0)

    # --- laws ---

    def sample(self) -> None:
        """Look at queues, and at reporters that nobody needs."""
        for engine in self.all:
            if len(engine.recorder.queue) > QUEUE_MAX:
                self.violated("taps", f"{len(engine.recorder.queue)} records wait in {engine.name}")
        for reporter in self.reporters():
            self._look_at_reporter(reporter)

    def _look_at_reporter(self, reporter: ReporterProcess) -> None:
        """A reporter ends with its engine, and with the connection of its sender."""
        world, process = self.simulation.world, reporter.process
        name = reporter.settings.name
        engine = next(each for each in self.all if each.name == name)
        mine = engine.sender is not None and engine.sender.process is reporter
        if not reporter.once and reporter.parent is engine.process and not engine.process.dead and not mine:
            since = self._gone.setdefault(process.pid, world.now)
            if world.now - since > KILLED_S * 1e9 and not engine.process.frozen:
                self.violated("taps", f"{process.name} outlives the connection of {name}")
            return
        life = self.simulation.life
        stands = life is None or life.service is None or life.process.frozen
        needed = engine.died_ns is None and (reporter.once or reporter.parent is engine.process)
        if needed or process.frozen or stands or engine.process.frozen:
            self._gone.pop(process.pid, None)
            return
        since = self._gone.setdefault(process.pid, world.now)
        if world.now - since > STAYS_S * 1e9 and "connection_half_open" not in self.simulation.faults.happened:
            self.violated("taps", f"{process.name} outlives its engine {name}")

    def after_calm(self, service: LeaderService) -> None:
        """A tap to which nothing has happened for some time reports, and its requests are those of its engine."""
        happened = {"connection_half_open", "connection_cut"} & set(self.simulation.faults.happened)
        now = self.simulation.world.now
        shown = {slot.request for slot in service.state.slots.values()}
        for engine in self.all:
            sender = engine.sender
            if sender is None or now - engine.well_ns < WELL_S * 1e9 or happened:
                continue
            if engine.starts_reporter and sender._wait_s > 4:  # it waits longer after each end of a reporter
                continue
            if not engine.recorder.on:
                self.violated("taps", f"the tap of {engine.name} does not report")
                continue
            late = now - SHOWN_S * 1e9
            missing = {name for name, at in engine.began.items() if at < late} - engine.ended.keys() - shown
            ghosts = {name for name, at in engine.ended.items() if at < late} & shown
            if missing or ghosts:
                self.violated("taps", f"of {engine.name} {sorted(missing)} are not shown, {sorted(ghosts)} have ended")


@contextlib.contextmanager
def small_taps() -> Iterator[None]:
    """Limits of taps that a run reaches."""
    with (
        mock.patch.object(recorders, "QUEUE_MAX", QUEUE_MAX),
        mock.patch.object(senders, "UNSENT_MAX", UNSENT_MAX), mock.patch.object(senders, "PAUSE_S", PAUSE_S),
    ):
        yield


# --- faults ----------------------------------------------------------------------------------------------------------


def _taps(faults: "Faults") -> Taps:
    return faults.simulation.taps


def _disturbed(faults: "Faults", reporter: ReporterProcess, seconds: float) -> None:
    for engine in _taps(faults).all:
        if engine.name == reporter.settings.name:
            engine.well(seconds)


def reporter_killed(faults: "Faults") -> None:
    """As ``kill -9``."""
    if reporters := _taps(faults).reporters():
        reporter = _taps(faults).dice.choice(reporters)
        reporter.process.kill()
        _disturbed(faults, reporter, 0.0)


def reporter_frozen(faults: "Faults") -> None:
    """As ``SIGSTOP`` for a time."""
    if reporters := _taps(faults).reporters():
        reporter, seconds = _taps(faults).dice.choice(reporters), _taps(faults).dice.choice((0.5, 6.0))
        reporter.process.freeze(seconds)
        _disturbed(faults, reporter, seconds)


def reporter_frozen_at_the_end(faults: "Faults") -> None:
    """A reporter is frozen while its engine shuts down, most often one that the engine has started."""
    taps = _taps(faults)
    found = sorted(taps.reporters(), key=lambda reporter: reporter.once)
    if found:
        engine = next(engine for engine in taps.all if engine.name == found[0].settings.name)
        found[0].process.freeze(6.0)
        engine.end(in_order=True)


def tapped_engine_killed(faults: "Faults") -> None:
    """As ``kill -9``; it is started again."""
    _taps(faults).one().end(in_order=False)


def tapped_engine_ends(faults: "Faults") -> None:
    """It shuts its connector down and ends two seconds later; it is started again."""
    _taps(faults).one().end(in_order=True)


def tapped_engine_frozen(faults: "Faults") -> None:
    """As ``SIGSTOP`` for a time."""
    engine, seconds = _taps(faults).one(), _taps(faults).dice.choice((0.5, 4.0))
    engine.process.freeze(seconds)
    engine.well(seconds)


_OTHERS: Final = ("daemon_frozen", "daemon_killed")
TAP_KINDS: Final[dict[str, Callable[["Faults"], None]]] = {
    kind.__name__: kind for kind in (
        reporter_killed, reporter_frozen, reporter_frozen_at_the_end, tapped_engine_killed, tapped_engine_ends,
        tapped_engine_frozen,
    )
}
"""Faults of a run with taps."""
