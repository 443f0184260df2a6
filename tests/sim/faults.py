"""The faults of one run: which kinds may happen, and when each does.

A run draws a few kinds, so that combinations are met and a failure still has few suspects. ``heal`` ends all of them.

Law of this file: a fault is what a system, a network or a person does; nothing of the program is changed.
"""

import errno
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from tests.sim.disk import SimPath
from tests.sim.floods import FLOODS, Flood
from tests.sim.publishers import STREAM_KINDS
from tests.sim.scrapers import SILENT, UNREAD
from tests.sim.taps import TAP_KINDS
from tests.sim.visitors import HAS_AIOHTTP, WebConsole

if TYPE_CHECKING:
    from tests.sim.run import Simulation

FAULTS_MAX: Final = 6
"""So many faults happen in one run."""
GAP_S: Final = 3.5
"""Mean time between two faults."""


class Faults:
    """Makes the faults of one simulation happen, from its seed."""

    def __init__(self, simulation: "Simulation", kinds: Sequence[str] = ()) -> None:
        self.simulation = simulation
        self.dice = random.Random(f"{simulation.seed} faults")
        self.kinds = list(kinds) or self._drawn()
        self.happened: list[str] = []
        self.tampered: dict[str, int] = {}
        """Directories in which somebody else changed files, and when that was last."""
        self.power_lost = False
        self.over = False
        self._plan()

    def _drawn(self) -> list[str]:
        """Some of those that any run may have, and those of the parts that only some runs have."""
        simulation, seed = self.simulation, self.simulation.seed
        kinds = sorted(self.dice.sample(GENERAL, self.dice.randrange(1, 5)))
        kinds += [*simulation.streams.kinds, *simulation.taps.kinds, *(FLOODS if simulation.busy else ())]
        kinds += [kind for feature in simulation.features for kind in FEATURES[feature]]
        return kinds + apart(seed)

    def _plan(self) -> None:
        self.simulation.world.after(self.dice.expovariate(1 / GAP_S) + 0.3, self._happen)

    def _happen(self) -> None:
        if self.over or len(self.happened) >= FAULTS_MAX:
            return
        kind = self.dice.choice(self.kinds)
        self.happened.append(kind)
        self.simulation.world.trace("FAULT", kind)
        KINDS[kind](self)
        self._plan()

    def heal(self) -> None:
        """No fault any more; what waits goes on."""
        self.over = True
        disk, network, machine = self.simulation.machine.disk, self.simulation.machine.network, self.simulation.machine
        disk.capacity = 1 << 40
        disk.write_error = disk.sync_error = disk.open_error = disk.unlink_error = None
        disk.short_share, disk.latency_s = 0.0, 200e-6
        disk.lying = False
        disk.strikes.clear()
        machine.no_processes, machine.sealing_s = False, self.simulation.sealing_s
        network.delay_s = 300e-6
        self.simulation.streams.heal()

    def for_a_while(self, holder: Any, name: str, value: Any, seconds: float) -> None:
        """Set an attribute for a time."""
        before = getattr(holder, name)
        setattr(holder, name, value)

        def back() -> None:
            if getattr(holder, name) == value:
                setattr(holder, name, before)

        self.simulation.world.after(seconds, back)

    def _tamper(self, path: SimPath) -> None:
        self.tampered[str(path)] = self.simulation.world.now

    # --- the disk ---

    @property
    def disk(self) -> Any:
        return self.simulation.machine.disk

    def disk_hangs(self) -> None:
        self.disk.hang(self.dice.choice((0.3, 2.0, 8.0)))

    def disk_is_full(self) -> None:
        self.for_a_while(
            self.disk, "capacity", self.disk.used + self.dice.randrange(0, 9_000), self.dice.choice((0.3, 2.0, 6.0))
        )

    def writes_fail(self) -> None:
        self.for_a_while(self.disk, "write_error", errno.EIO, self.dice.choice((0.05, 1.0, 4.0)))

    def syncs_fail(self) -> None:
        self.for_a_while(self.disk, "sync_error", errno.EIO, self.dice.choice((0.05, 1.5, 3.0)))

    def writes_are_short(self) -> None:
        self.for_a_while(self.disk, "short_share", 0.5, 6.0)

    def disk_is_slow(self) -> None:
        self.for_a_while(self.disk, "latency_s", 0.05, 4.0)

    def files_stay(self) -> None:
        self.for_a_while(self.disk, "unlink_error", errno.EACCES, 3.0)

    def no_descriptors(self) -> None:
        seconds = self.dice.choice((0.5, 3.0))
        self.for_a_while(self.disk, "open_error", errno.EMFILE, seconds)
        self.for_a_while(self.simulation.machine, "no_processes", True, seconds)

    def no_processes(self) -> None:
        self.for_a_while(self.simulation.machine, "no_processes", True, 5.0)

    def syncs_lie(self) -> None:
        self.for_a_while(self.disk, "lying", True, 4.0)

    def directory_removed(self) -> None:
        path = self.simulation.directory
        if path is not None and path.name in self.disk.root.entries:
            self._tamper(path)
            self.disk.remove_tree(path)

    def directory_moved(self) -> None:
        path = self.simulation.directory
        entries = self.disk.root.entries
        if path is not None and path.name in entries:
            self._tamper(path)
            entries[f"{path.name}.moved"] = entries.pop(path.name)
            self.disk.recount()

    def segment_cut(self) -> None:
        path = self.simulation.directory
        if path is not None and path.name in self.disk.root.entries:
            names = sorted(name for name in self.disk.directory(path) if name.endswith(".active"))
            if names:
                self._tamper(path)
                victim: SimPath = path / names[-1]
                size = len(self.disk.node(victim).data)
                self.disk.cut(victim, self.dice.choice((0, size // 2, size)))

    def keyframes_do_not_fit(self) -> None:
        self.simulation.limit_keyframes(self.dice.choice((2_000, 9_000)), self.dice.choice((2.0, 12.0)))

    def segments_are_small(self) -> None:
        """A person chose them when the daemon began, see ``run``."""

    # --- the network ---

    def connection_cut(self) -> None:
        up = [each for each in self.simulation.machine.network.connections if each.up]
        if up:
            self.dice.choice(up).cut()

    def connection_half_open(self) -> None:
        up = [each for each in self.simulation.machine.network.connections if each.up]
        if up:
            self.dice.choice(up).half_opened()

    def network_is_slow(self) -> None:
        self.for_a_while(self.simulation.machine.network, "delay_s", 0.08, 4.0)

    # --- processes ---

    def daemon_killed(self) -> None:
        self.simulation.kill_daemon()

    def power_fails(self) -> None:
        self.power_lost = True
        self.simulation.lose_power()

    def daemon_killed_at_the_disk(self) -> None:
        self.disk.strikes.append((self.dice.randrange(1, 12), self.simulation.kill_daemon))

    def power_fails_at_the_disk(self) -> None:
        self.disk.strikes.append((self.dice.randrange(1, 12), self.power_fails))

    def daemon_frozen(self) -> None:
        self.simulation.freeze_daemon(self.dice.choice((0.3, 2.0, 7.0)))

    def client_killed(self) -> None:
        self.simulation.kill_client(self.dice.choice(self.simulation.actors))

    def client_frozen(self) -> None:
        self.dice.choice(self.simulation.actors).process.freeze(self.dice.choice((0.5, 7.0)))

    def sealer_killed(self) -> None:
        for process in self.simulation.world.processes:
            if process.name.startswith("sealer") and not process.dead:
                process.kill()

    def sealer_starved(self) -> None:
        self.for_a_while(self.simulation.machine, "sealing_s", 9.0, 20.0)

    def a_thread_dies(self) -> None:
        self.simulation.break_thread(self.dice.choice(("queue", "write", "write", "sync", "retain", "seal")))

    # --- observers ---

    def callers_flood(self) -> None:
        self._flood("callers_flood")

    def questions_flood(self) -> None:
        self._flood("questions_flood")

    def readers_flood(self) -> None:
        self._flood("readers_flood")

    def _flood(self, kind: str) -> None:
        for actor in self.simulation.actors:
            if isinstance(actor, Flood):
                actor.start(kind, self.dice.choice((4.0, 5.5)))
    def silent_scrapers(self) -> None:
        self.simulation.crowd(SILENT, self.dice.choice((30, 100, 250)))

    def scrapers_never_read(self) -> None:
        self.simulation.crowd(UNREAD, self.dice.choice((4, 20, 60)))

    def hostile_names(self) -> None:
        self.simulation.names.hostile = True

    def strangers_visit(self) -> None:
        for actor in self.simulation.actors:
            if isinstance(actor, WebConsole):
                actor.strangers += self.dice.choice((10, 60))

    def wall_clock_set(self) -> None:
        self.simulation.world.wall_offset += self.dice.choice((-3_600, 3_600)) * 10**9


FEATURES: Final[dict[str, tuple[str, ...]]] = {
    "metrics": ("silent_scrapers", "scrapers_never_read"),
    "hostile_names": ("hostile_names",),
    **({"web": ("strangers_visit",)} if HAS_AIOHTTP else {}),
}
"""A part of the world that takes part in some runs, and the faults that only it knows."""
FEATURE_SHARE: Final = 0.3
DRAWN_APART: Final = {"keyframes_do_not_fit": 0.06, "segments_are_small": 0.06}
"""Faults that came later, and the share of the runs that have them. Drawn apart, they leave the other draws alone."""


def apart(seed: int) -> list[str]:
    """Those of ``DRAWN_APART`` that this seed has."""
    return [kind for kind, share in DRAWN_APART.items() if random.Random(f"{seed} {kind}").random() < share]


def drawn_features(seed: int, kinds: Sequence[str]) -> list[str]:
    """The features of a run: those of its explicit kinds of faults, or those that the seed draws."""
    return [
        name for name, faults in FEATURES.items()
        if set(kinds) & set(faults) or (not kinds and random.Random(f"{seed} joins {name}").random() < FEATURE_SHARE)
    ]


OWN_KINDS: Final[dict[str, Callable[[Faults], None]]] = {
    name: getattr(Faults, name) for name in (
        "disk_hangs", "disk_is_full", "writes_fail", "syncs_fail", "writes_are_short", "disk_is_slow", "files_stay",
        "no_descriptors", "no_processes", "syncs_lie", "directory_removed", "directory_moved", "segment_cut",
        "connection_cut", "connection_half_open", "network_is_slow", "daemon_killed", "daemon_killed_at_the_disk",
        "power_fails", "power_fails_at_the_disk",
        "daemon_frozen", "client_killed", "client_frozen", "sealer_killed", "sealer_starved", "a_thread_dies",
        "wall_clock_set", "keyframes_do_not_fit", "segments_are_small", *FLOODS,
        "silent_scrapers", "scrapers_never_read", "hostile_names", "strangers_visit",
    )
}
KINDS: Final[dict[str, Callable[[Faults], None]]] = {**OWN_KINDS, **STREAM_KINDS, **TAP_KINDS}
"""Every fault by its name."""
GENERAL: Final = sorted(
    OWN_KINDS.keys() - set(FLOODS) - DRAWN_APART.keys() - {kind for kinds in FEATURES.values() for kind in kinds}
)
"""Those that any run may draw."""
