"""One simulation: a machine, a daemon on it, those who use it, faults, and monitors; a function of its seed.

A run has three acts. For some seconds faults happen. Then all of them are healed, and the daemon has ``CALM_S`` to be
whole again. At last the daemon is stopped in order, or killed, and what is on the disk is read back.

Law of this file: the same seed gives the same trace, whatever else the machine does.
"""

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final
from unittest import mock

import msgspec

from kvbm_console.debug import sessions
from kvbm_console.recording import format as fmt
from kvbm_console.recording import options as recording_options
from kvbm_console.recording.options import RecordingOptions
from kvbm_console.recording.writer import FrameTooLarge
from kvbm_console.service import LeaderService
from kvbm_console.simulator.embedded import default_engine_config, default_leader_config
from kvbm_console.simulator.multiturn import Multiturn, Settings
from kvbm_console.stream.ring import Ring
from server.options import DaemonOptions
from tests.sim import floods
from tests.sim.disk import SimPath
from tests.sim.faults import Faults, apart, drawn_features
from tests.sim.load import ADDRESS, Actor, Debugger, Engine, Operator, Reader
from tests.sim.machine import Life, Machine, machine
from tests.sim.monitors import Monitors
from tests.sim.mutants import Mutant
from tests.sim.publishers import Streams, small_streams
from tests.sim.scrapers import PLACE, UNREAD, Crowd, Scraper
from tests.sim.shown import Names
from tests.sim.taps import Taps, small_taps
from tests.sim.visitors import WebConsole

CALM_S: Final = 12.0
"""Two lease times and twice the time after which a rotation, a sealing or a part is tried again."""
SAMPLE_S: Final = 0.05
"""How often monitors look."""
SMALL_SEGMENT_BYTES: Final = 2_000
"""Less than a keyframe."""
KEEP_NS: Final = 1_800 * 10**9
"""No segment of a run gets as old. The wall clock is set by twice as much."""
FOREIGN: Final = ("thesis.docx.tmp", "2024-holiday.mcap", "short.active", "000001-notes.mcap")
"""Files of somebody else in the directory of a recording."""
BREAKPOINTS_MAX: Final = 12
DESCRIPTORS_MAX: Final = 64
"""Of a process where metrics are served; a daemon without clients has some ten."""
"""Instead of 256, so that a run reaches the bound."""

PACKED_FROM_BYTES: Final = 12_000
PART_BYTES: Final = 5_000
"""Instead of 4 and 16 MiB, so that about half of the keyframes are packed and divided."""


class Result(msgspec.Struct):
    """The outcome of one seed."""

    seed: int
    violations: list[str]
    digest: str
    """Of the trace."""
    cpu_s: float
    simulated_s: float
    events: int
    faults: list[str]
    lines: list[str] = []


class Simulation:
    """One run; ``seed`` decides everything."""

    def __init__(self, seed: int, made: Machine, kinds: Sequence[str] = ()) -> None:
        self.seed = seed
        self.machine, self.world = made, made.world
        self.dice = dice = random.Random(f"{seed} simulation")
        self.calm = False
        self.life: Life | None = None
        self._directories = 0
        self._armed: list[list[int]] = []
        self.directory: SimPath | None = None
        """The place where the daemon records now."""
        self.settings = Settings(
            sessions=dice.randrange(2, 6), prompts=2, system=96, user=60, output=20, turns=3,
            think=dice.choice((0.3, 1.0)), requests=1_000_000,
        )
        self.workload = Multiturn(self.settings)
        self.streams = Streams(self, kinds)
        self.taps = Taps(self, kinds)
        fed = self.streams.take_part or self.taps.take_part
        self.busy = floods.drawn(seed, kinds) and not fed
        """Work takes time in this run, and the engine runs at full speed."""
        self.embedded = (dice.random() < 0.65 or self.busy) and not fed
        self.config = default_leader_config(
            self.workload, g2_blocks=dice.choice((64, 128)), g3_blocks=dice.choice((0, 128)),
        )
        segment = dice.choice((25_000, 40_000, 200_000))
        if "segments_are_small" in (kinds or apart(seed)):
            segment = SMALL_SEGMENT_BYTES
        self.keep = dice.choice((None, max(200_000, 4 * segment)))
        by_age = self.keep is None and random.Random(f"{seed} age").random() < 0.5
        self.recording = RecordingOptions(
            segment_bytes=segment, segment_ns=round(dice.choice((1, 3, 600)) * 10**9), keep_bytes=self.keep,
            keep_ns=KEEP_NS if by_age else None,
            sync=dice.choice(("1s", "1s", "always", "never")),
        )
        self.ring_events = dice.choice((400, 3_000, 262_144))
        made.sealing_s = self.sealing_s = dice.choice((0.0, 0.5, 2.0))
        self.records = dice.random() < 0.9
        if self.busy:
            self.ring_events = 262_144  # a small ring has small chunks, and each costs every reader a write
            made.step_s, made.answer_s = floods.STEP_S, floods.ANSWER_S
        self.features = drawn_features(seed, kinds)
        self.crowds = self.unread_ns = self.full_until_ns = 0
        """Crowds so far, when the last that reads nothing came, and until when one keeps the page's queue full."""
        self.again_until_s = 0.0
        """A crowd comes again and again until then."""
        self.names = Names(seed)
        if "metrics" in self.features:
            made.descriptors_max = DESCRIPTORS_MAX
        self.monitors = Monitors(self)
        self.world.trace("seed", seed)
        self.streams.begin()
        first = self.new_directory()
        for name in FOREIGN:
            self._write(first, name)
        self.first_directory = first
        self.start_daemon()
        self.actors: list[Actor] = []
        self._populate()
        self.faults = Faults(self, kinds)
        self.world.after(SAMPLE_S, self._sample)

    def _populate(self) -> None:
        """Begin the programs that use the daemon."""
        seed, dice = self.seed, self.dice
        self.actors += [Reader(self, n) for n in range(dice.randrange(1, 3))]
        self.actors += [Debugger(self, n) for n in range(dice.randrange(0, 3))]
        self.actors += [Engine(self, n) for n in range(0 if self.embedded else dice.randrange(1, 4))]
        if dice.random() < 0.4:
            self.actors.append(Operator(self, 0))
        self.taps.begin()
        if self.busy:
            self.actors.append(floods.Flood(self, 0))
        if "metrics" in self.features:
            self.actors += [Scraper(self, n) for n in range(random.Random(f"{seed} scrapers").randrange(1, 4))]
        if "web" in self.features:
            self.actors.append(WebConsole(self, 0))

    def _write(self, directory: SimPath, name: str) -> None:
        disk = self.machine.disk
        disk.quiet = True
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"the only copy")
        disk.directory(directory)
        for place in (directory.parent, directory):
            disk.node(place).durable_entries = dict(disk.directory(place))
        disk.quiet = False

    def new_directory(self) -> SimPath:
        """A place for one more recording."""
        self._directories += 1
        return SimPath(f"/rec{self._directories}")

    @property
    def directories(self) -> list[SimPath]:
        """All places that were ever made."""
        return [SimPath(f"/rec{number}") for number in range(1, self._directories + 1)]

    @property
    def service(self) -> LeaderService | None:
        """Of the daemon, while it is ready."""
        return None if self.life is None else self.life.service

    # --- the daemon ---------------------------------------------------------------------------------------------------

    def _options(self) -> DaemonOptions:
        more: dict[str, Any] = {}
        if self.embedded:
            engine = default_engine_config(self.workload, g1_blocks=96)
            more = {"workload": Multiturn(self.settings), "engine": engine, "speed": None if self.busy else 1.0}
        if "metrics" in self.features:
            more["metrics"] = "{}:{}".format(*PLACE)
        return DaemonOptions(
            config=self.config, listen=ADDRESS, record=self.first_directory if self.records else None,
            recording=self.recording, handle_signals=False, ring=Ring(events_max=self.ring_events),
            publishers=self.streams.addresses(), **more,
        )

    def start_daemon(self) -> None:
        """Begin a life over the directory that the last one left."""
        self.directory = self.first_directory if self.records else None
        self.machine.disk.watched = self.directory
        self.life = life = Life(self.machine, self._options)
        life.loop.one_event_a_turn = self.busy
        life.on_service = self.monitors.began
        life.process.on_death.append(lambda: self._over(life))

    def _over(self, life: Life) -> None:
        self.monitors.ended(life)
        if life is self.life and not self.monitors.closing and not self.world.closing:
            self.world.after(random.Random(f"{self.seed} {life.process.name}").uniform(0.05, 1.5), self._again)

    def _again(self) -> None:
        if self.life is not None and self.life.process.dead and not self.monitors.closing:
            self.start_daemon()

    def kill_daemon(self) -> None:
        """As ``kill -9``; its supervisor starts it again."""
        if self.life is not None:
            self.life.process.kill()

    def lose_power(self) -> None:
        """The whole machine goes down, and comes up again."""
        for process in list(self.world.processes):
            if process is not self.world.system:
                process.kill()
        self.monitors.power_lost()
        self.machine.disk.power_loss()
        for actor in self.actors:
            self._revive(actor)
        self.streams.power_lost()
        self.taps.power_lost()

    def freeze_daemon(self, seconds: float) -> None:
        """As ``SIGSTOP`` for a time."""
        if self.life is not None and not self.life.process.dead:
            self.monitors.unavailable(seconds)
            self.life.process.freeze(seconds)

    def kill_client(self, actor: Actor) -> None:
        """As ``kill -9``; it is started again."""
        if not actor.process.dead:
            actor.process.kill()
            self._revive(actor)

    def _revive(self, actor: Actor) -> None:
        def begin() -> None:
            if actor.process.dead and not self.monitors.closing:
                actor.begin()

        self.world.after(1.0, begin)

    def crowd(self, manners: tuple[str, ...], count: int) -> None:
        """So many connections to the page of metrics."""
        self.crowds += 1
        if manners == UNREAD:
            self.unread_ns = self.world.now
        Crowd(self, self.crowds, manners, count)

    def break_thread(self, name: str) -> None:
        """A bug of ours in a thread of the recorder: its next turn raises."""
        service = self.service
        recorder = None if service is None else service.recorder
        if recorder is None:
            return
        holder, method = {
            "queue": (recorder._queue, "done"), "write": (recorder, "_write_chunks"),
            "sync": (recorder._syncer, "_pass"), "retain": (recorder._sealer, "retain"),
            "seal": (recorder._sealer, "has_room"),
        }[name]
        real, left = getattr(holder, method), [1]
        self._armed.append(left)

        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] and self.world.process.threads[0] is not self.world.current:
                left[0] -= 1
                raise RuntimeError("a bug of ours")
            return real(*args, **kwargs)

        setattr(holder, method, call)

    def limit_keyframes(self, most: int, seconds: float) -> None:
        """For so long the recorder's keyframes have a limit that the state exceeds, as that of a huge pool does."""
        service = self.service
        recorder = None if service is None else service.recorder
        if recorder is None:
            return
        frames_of, until_ns = recorder._frames_of, self.world.now + round(seconds * 1e9)

        def limited(item: Any, about: Any) -> Any:
            if item.size > most and self.world.now < until_ns and not self.calm:
                raise FrameTooLarge(0, f"a keyframe of {item.size} bytes is above the limit of {most}")
            return frames_of(item, about)

        recorder._frames_of = limited  # type: ignore[method-assign]

    def disarm_bugs(self) -> None:
        """Bugs that have not struck yet never will."""
        for left in self._armed:
            left[0] = 0

    # --- the acts -----------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        if not self.monitors.closing:
            self.monitors.sample()
            self.world.after(SAMPLE_S, self._sample)

    def play(self) -> None:
        """All three acts."""
        world, monitors = self.world, self.monitors
        world.run(self.dice.uniform(6, 16))
        self.faults.heal()
        self.disarm_bugs()
        self.calm = True
        world.trace("calm")
        world.run(CALM_S + max(self.streams.calm_s, self.taps.calm_s))
        monitors.after_calm()
        monitors.closing = True
        life = self.life
        for actor in self.actors:
            actor.stopped = True
        if life is not None and life.daemon is not None and not life.process.dead and self.dice.random() < 0.7:
            world.trace("stop")
            monitors.stopping()
            life.loop.call_soon(lambda: life.daemon.stop(soon=True))  # type: ignore[union-attr]
            world.run(10.0, lambda: life.process.dead)
            monitors.stopped(life)
        elif life is not None:
            life.process.kill()
        for process in list(world.processes):
            process.end("closed")
        self.machine.disk.quiet = True
        monitors.read_back()


@contextlib.contextmanager
def small_bounds() -> Iterator[None]:
    """Limits that a run reaches."""
    with (
        mock.patch.object(recording_options, "SEGMENT_BYTES_MIN", SMALL_SEGMENT_BYTES),
        mock.patch.object(sessions, "BREAKPOINTS_MAX", BREAKPOINTS_MAX),
        mock.patch.object(fmt, "PACKED_FROM_BYTES", PACKED_FROM_BYTES),
        mock.patch.object(fmt, "PART_BYTES", PART_BYTES),
        small_streams(),
        small_taps(),
    ):
        yield


def simulate(
    seed: int, *, mutants: Sequence[Mutant] = (), kinds: Sequence[str] = (), keep_trace: bool = False
) -> Result:
    """Run one seed, with these kinds of faults or with those that the seed draws.

    ``mutants`` are defects that are put back for this run.
    """
    began = time.process_time()
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_bounds())
        made = stack.enter_context(machine(seed, keep_trace=keep_trace))
        for mutant in mutants:
            stack.enter_context(mutant.planted())
        simulation = Simulation(seed, made, kinds)
        simulation.play()
        monitors = simulation.monitors
        violations = monitors.sentences() + [f"edge: {each}" for each in made.world.failures]
        result = Result(
            seed, violations, made.world.digest, 0.0, made.world.seconds, monitors.events_seen,
            simulation.faults.happened, made.world.lines or [],
        )
    result.cpu_s = time.process_time() - began
    return result
