"""A run of the exploration with a tap, which is listened to in several ways, beside the engine alone.

Law of this file: only the tap is added. Scenario, release and connector are those of the run without it.
"""

import copy
from collections import Counter
from typing import Any, Final
from unittest.mock import patch

from kvbm_console.explore.scenario import Scenario
from kvbm_console.explore.vllm import Machine, Release, ScenarioRun
from kvbm_console.tap import recorder
from kvbm_console.tap import vllm as binding
from kvbm_console.tap.flatten import drain
from tests.vllm.engine import tap
from tests.vllm.features import Kept

WAYS: Final = ("nobody listens", "read at once", "frozen", "full", "killed")
"""How a tap is listened to. ``frozen``: its queue is never emptied. ``full``: nor has it room, so that it drops."""
PLACES: Final = ("connector", "scheduler")
FULL: Final = 50
"""Entries of the queue that is to be full."""


def decided(run: ScenarioRun) -> tuple[Any, ...]:
    """All that the engine has decided and published."""
    return run.digest, run.published, run.steps, run.verdict


class Listened(Machine):
    """A machine with a tap at its connector or at its scheduler, listened to in one of ``WAYS``."""

    def __init__(
        self, release: Release, connector: dict[str, Any], scenario: Scenario, place: str, way: str = "",
        **settings: Any,
    ) -> None:
        if place == "scheduler":
            release = copy.copy(release)
            release.scheduler = binding.tapped(release.scheduler, settings)
        super().__init__(release, tap(connector, **settings) if place == "connector" else connector, scenario)
        self.way, self.sender = way, getattr(self.scheduler, "kvbm_tap", self.connector).sender
        if way not in ("", "nobody listens"):
            self.sender.recorder.listen()

    def step(self) -> bool:
        """A step of the engine, and then the reader's part."""
        happened = super().step()
        recorder, steps = self.sender.recorder, self.run.steps
        if self.way == "read at once" or (self.way == "killed" and steps < 10):
            drain(recorder, self.sender.flattener, 10_000)
        elif self.way == "killed" and steps == 10:
            recorder.off()
        return happened


class Beside:
    """Compares runs with a tap with the run of the engine alone, and counts."""

    def __init__(self, release: Release, connector: dict[str, Any], place: str) -> None:
        self.release, self.connector, self.place = release, connector, place
        self.scenarios = self.steps = self.errors = 0
        self.dropped: Counter[str] = Counter()
        """Way to the entries that the tap dropped."""

    def differing(self, scenario: Scenario, ways: tuple[str, ...] = WAYS) -> list[str]:
        """The ways in which the engine decides or publishes something else than alone."""
        alone = Machine(self.release, self.connector, scenario).play()
        self.scenarios, self.steps = self.scenarios + 1, self.steps + alone.steps
        found = []
        for way in ways:
            room = FULL if way == "full" else recorder.QUEUE_MAX
            with patch.object(binding, "Sender", Kept), patch.object(recorder, "QUEUE_MAX", room):
                machine = Listened(self.release, self.connector, scenario, self.place, way)
                watched = machine.play()
            if decided(watched) != decided(alone):
                found.append(way)
            self.dropped[way] += machine.sender.recorder.dropped
            self.errors += machine.sender.recorder.errors
        return found
