"""The whole daemon under simulation: the same seed gives the same run, no seed breaks a law, and old defects are found.

Law of this file: a failing seed names itself; ``python -m tests.sim --seeds SEED --trace`` runs it again.
"""

import ast
import asyncio
import gc
import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from tests.sim.faults import FEATURES, KINDS
from tests.sim.machine import OUTSIDE, SEAMS, Machine, machine
from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.run import simulate

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(8)
SEEDS_FULL = range(1_000, 4_000)
PER_TEST = 4
PER_FULL_TEST = 100
UNUSED = {
    "kvbm_console.recording.playback": "of consoles that show a recording",
    "kvbm_console.debug.files": "files of breakpoints: only with serve --breakpoints",
    "kvbm_console.tap.connector": "time: its clock is the name _now, which is in SEAMS",
    "kvbm_console.reporter.__main__": "subprocess for a daemon of its own: only with serve",
    "server.movers": "os for the process of an engine that moves its bytes: no simulated engine does",
    "server.publisher": "only with serve --fleet",
    "server.event_publisher": "only with serve --fleet-events",
    "server.lake": "only with serve --lake",
    "server.options": "the socket: Endpoint is replaced as a whole",
    "server.daemon": "os for the environment, signal for signals: only with handle_signals",
}
"""Modules of the daemon that ask the outside in ways that no run takes."""


def look(seeds: range) -> None:
    """Fail with every sentence of every seed that broke a law."""
    broken = [result for result in map(simulate, seeds) if result.violations]
    assert not broken, "\n".join(
        f"python -m tests.sim --seeds {result.seed} ({', '.join(result.faults)}): {sentence}"
        for result in broken for sentence in result.violations
    )


async def nothing() -> None:
    return


async def waiting_for(awaitable: Coroutine[Any, Any, None]) -> None:
    await awaitable


def test_a_killed_process_closes_the_tasks_that_have_not_begun() -> None:
    def killed(machine: Machine, spawn: Callable[[TaskGroup], object]) -> None:
        async def main() -> None:
            async with anyio.create_task_group() as group:
                spawn(group)
                victim.process.kill()

        victim = machine.loop("victim", main)
        machine.world.run(1.0)
        assert victim.process.dead

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with machine(1) as made:
            killed(made, lambda group: group.start_soon(nothing))
            killed(made, lambda group: asyncio.get_running_loop().create_task(waiting_for(nothing())))
            killed(made, lambda group: group.start_soon(waiting_for, nothing()))
        gc.collect()
    assert [str(each.message) for each in told] == []


def some_digests() -> list[str]:
    """Of an embedded engine, and of some that feed: where a set of things without an order decides, runs differ."""
    return [simulate(3).digest, simulate(1, kinds=["client_killed"]).digest]


@pytest.mark.fault
@pytest.mark.parametrize("first", SEEDS[::PER_TEST])
def test_no_seed_breaks_a_law(first: int) -> None:
    look(range(first, first + PER_TEST))


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.skipif("KVBM_FULL" not in os.environ, reason="an hour: make test-full")
@pytest.mark.parametrize("first", SEEDS_FULL[::PER_FULL_TEST])
def test_thousands_of_seeds_break_no_law(first: int) -> None:
    look(range(first, first + PER_FULL_TEST))


def test_a_seed_is_one_run_whatever_the_hashes_of_this_process(tmp_path: Path) -> None:
    code = "from tests.sim.test_sim import some_digests; print(*some_digests())"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True, text=True, check=True,
        ).stdout
        for hashes in ("1", "2")
    }
    again = some_digests()
    assert said == {" ".join(again) + "\n"}
    assert len(set(again)) == len(again)


@pytest.mark.fault
@pytest.mark.parametrize("mutant", [
    pytest.param(mutant, id=mutant.name, marks=() if mutant.quick else pytest.mark.slow) for mutant in MUTANTS
])
def test_a_defect_that_is_put_back_is_found(mutant: Mutant) -> None:
    if not set(mutant.kinds).isdisjoint(FEATURES.get("web", ("strangers_visit",))):
        pytest.importorskip("aiohttp")
    seen: list[str] = []
    for seed in range(mutant.first, mutant.first + mutant.within):
        result = simulate(seed, mutants=[mutant], kinds=mutant.kinds)
        if any(sentence.partition(":")[0] in mutant.laws for sentence in result.violations):
            return
        seen += result.violations
    found = seen or "nothing"
    raise AssertionError(f"{mutant.within} seeds from {mutant.first} did not find {mutant.name}; they found {found}")


def test_every_mutant_names_faults_that_exist() -> None:
    assert not [mutant.name for mutant in MUTANTS if not set(mutant.kinds) <= set(KINDS)]
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def outside_names(module: str) -> set[str]:
    """The modules of the outside that a module imports under their own names."""
    source = Path(str(importlib.import_module(module).__file__)).read_text()
    return {
        alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names
    } & OUTSIDE


def test_the_outside_comes_in_through_the_seams_alone() -> None:
    rooms = ("kvbm_console/recording", "kvbm_console/stream", "kvbm_console/debug", "kvbm_console/metrics", "server")
    files = [path for room in rooms for path in (ROOT / room).glob("*.py")]
    files += [ROOT / "kvbm_console" / f"{name}.py" for name in ("service", "parts", "dispatch")]
    files += [ROOT / "kvbm_console" / "engines" / "kv_events" / f"{name}.py" for name in ("stream", "zmq_source")]
    files += [ROOT / "kvbm_console" / "tap" / f"{name}.py" for name in ("connector", "recorder", "sender")]
    files.append(ROOT / "kvbm_console" / "reporter" / "__main__.py")
    simulator = ("driver", "simulated", "embedded", "link")
    files += [ROOT / "kvbm_console" / "simulator" / f"{name}.py" for name in simulator]
    missing = {}
    for path in files:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names = outside_names(module) - set(SEAMS.get(module, ()))
        if names and module not in UNUSED:
            missing[module] = sorted(names)
    assert not missing, "a simulated daemon would meet the real outside there: name it in SEAMS"
