"""The process that runs scenarios: ``python -m kvbm_console.explore.worker vllm [ADAPTER ...]`` or ``leader``.

The process reads a task from each line on stdin and answers lines of JSON on its original stdout. The output of an
engine goes to the null device. A task is ``{"connector": ..., "faults": [...], "runs": [[profile, seed], ...]}``, or
has ``"shrink": scenario, "signature": ..., "most": runs`` or ``"record": scenario`` instead of runs.

Law of this file: only the engine's modules survive a task, so the parent may kill the process at any time.
"""

import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, TextIO

from kvbm_console.explore.connectors import Unsupported, loaded
from kvbm_console.explore.scenario import GENERATE, Scenario
from kvbm_console.explore.shrink import shrink

Say = Callable[[dict[str, Any]], None]

ALIVE: Final = 5
"""Runs of shrinking after which the process says that it lives: far less than the parent's patience."""


class NotMade(Exception):
    """The engine refuses the machine of a scenario; the text has its choices and the engine's reason."""


def main() -> int:
    """Serve tasks until stdin ends. Returns 2 when the installed engine lacks a part that the driver needs."""
    out = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    engine: Any = import_module(f"kvbm_console.explore.{sys.argv[1]}")
    try:
        adapters = [loaded(text) for text in sys.argv[2:]]
    except Unsupported as error:
        _say(out, {"refused": str(error)})
        return 2
    try:
        release = engine.ENGINE[0](*adapters)
    except ImportError as error:
        _say(out, {"unsupported": f"{sys.argv[1]} cannot be imported here: {error}"})
        return 2
    except Unsupported as error:
        _say(out, {"unsupported": str(error)})
        return 2
    _say(out, {"release": f"{release.name} {release.version}", "adapters": {
        adapter.__name__: inspect.getsource(sys.modules[adapter.__module__]) for adapter in adapters}})
    for line in sys.stdin:
        task = json.loads(line)
        try:
            for answer in _answers(engine, release, task, lambda part: _say(out, part)):
                _say(out, answer)
        except Unsupported as error:
            _say(out, {"unsupported": str(error)})
            return 2
        _say(out, {"done": True})
    return 0


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def _answers(engine: Any, release: Any, task: dict[str, Any], say: Say) -> Any:
    connector, faults = task["connector"], tuple(task["faults"])

    def machine(scenario: Scenario) -> Any:
        try:
            return engine.ENGINE[1](release, connector, scenario, faults)
        except Unsupported:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:200]}".strip(": ")
            raise NotMade(f"{', '.join(f'{name} {value}' for name, value in scenario.machine)}: {text}") from error

    def play(scenario: Scenario) -> Any:
        return machine(scenario).play()

    if "shrink" in task:
        yield _shrunk(play, task, say)
        return
    if "record" in task:
        yield _recorded(engine, release, task, say)
        return
    for profile, seed in task["runs"]:
        began = time.process_time()
        scenario = GENERATE[sys.argv[1]](profile, seed)
        try:
            run = play(scenario)
        except NotMade as error:
            if not scenario.machine:
                raise Unsupported(f"the scheduler cannot be made here{error}") from error
            yield {"profile": profile, "seed": seed, "skipped": str(error)}
            continue
        yield {
            "profile": profile, "seed": seed, "steps": run.steps, "reads": run.reads, "moved": run.moved_blocks,
            "cpu_s": time.process_time() - began, "pairs": sorted(map(list, run.pairs)),
            "verdict": None if run.verdict is None else vars(run.verdict),
        }


def _shrunk(play: Any, task: dict[str, Any], say: Say) -> dict[str, Any]:
    """The smallest scenario found. Every ``ALIVE`` runs the parent hears that the process lives."""
    scenario, signature, left = Scenario.from_json(task["shrink"]), task["signature"], [int(task["most"])]

    def ends(candidate: Scenario) -> str | None:
        left[0] -= 1
        if left[0] % ALIVE == 0:
            say({"left": left[0]})
        try:
            verdict = play(candidate).verdict
        except NotMade:
            return None
        return None if verdict is None else str(verdict.signature)

    best = shrink(scenario, signature, ends, lambda: left[0] > 0)
    run = play(best)
    return {"scenario": best.to_json(), "steps": run.steps,
            "verdict": None if run.verdict is None else vars(run.verdict)}


def _recorded(engine: Any, release: Any, task: dict[str, Any], say: Say) -> dict[str, Any]:
    """Send the tap's messages step by step, so that they survive the death of the process. Returns the verdict."""
    try:
        machine = engine.recorded(
            release, task["connector"], Scenario.from_json(task["record"]), tuple(task["faults"]), task["path"], say)
    except Exception as error:
        return {"unrecorded": f"the tap does not fit here: {type(error).__name__}: {str(error)[:200]}"}
    run = machine.play()
    machine.tell_rest()
    return {"verdict": None if run.verdict is None else vars(run.verdict)}


if __name__ == "__main__":
    sys.exit(main())
