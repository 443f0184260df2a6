"""Shrinking: the smallest scenario that still ends in the same verdict.

Delta debugging removes actions (chunks of halves, quarters, ... single actions). Further passes make a single part
smaller: segments of prompts, tokens, answers, steps, waits of copies. A candidate counts when its run has the same
signature; it replaces the best scenario when its ``Scenario.size`` is smaller.

Law of this file: the result was run, and ended in the wanted signature. The caller bounds the number of runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvbm_console.explore.scenario import BLOCK, VLLM, Action, Arrive, Scenario

Ends = Callable[[Scenario], str | None]
"""Function that runs a scenario and returns the signature of its verdict, None without a verdict."""


def shrink(scenario: Scenario, signature: str, ends: Ends, more: Callable[[], bool]) -> Scenario:
    """The smallest scenario found. ``more`` returns True while another run is allowed."""
    best = scenario
    while more():
        before = best.size
        best = _fewer_actions(best, signature, ends, more)
        for candidates in (_smaller_machine, _smaller_requests, _earlier, _simpler_copies):
            best = _first_of(best, signature, ends, more, candidates)
        if best.size >= before:
            break
    return best


def _fewer_actions(best: Scenario, signature: str, ends: Ends, more: Callable[[], bool]) -> Scenario:
    chunk = max(1, len(best.actions) // 2)
    while chunk and more():
        at = 0
        while at < len(best.actions) and more():
            kept = best.actions[:at] + best.actions[at + chunk :]
            candidate = replace(best, actions=kept)
            if kept and ends(candidate) == signature:
                best = candidate
            else:
                at += chunk
        chunk //= 2
    return best


def _first_of(
    best: Scenario, signature: str, ends: Ends, more: Callable[[], bool],
    candidates: Callable[[Scenario], Iterator[Scenario]],
) -> Scenario:
    """Replace the best scenario by smaller candidates until none has the signature."""
    smaller = True
    while smaller and more():
        smaller = False
        for candidate in candidates(best):
            if not more():
                break
            if candidate.size < best.size and candidate.fits >= best.fits and ends(candidate) == signature:
                best, smaller = candidate, True
                break
    return best


def _with(scenario: Scenario, at: int, action: Action) -> Scenario:
    return replace(scenario, actions=(*scenario.actions[:at], action, *scenario.actions[at + 1 :]))


def _smaller_machine(scenario: Scenario) -> Iterator[Scenario]:
    """A smaller machine needs fewer requests to fill it, and fewer choices are easier to read."""
    for at in range(len(scenario.machine)):
        rest = scenario.machine[:at], scenario.machine[at + 1 :]
        yield replace(scenario, machine=(*rest[0], *rest[1]))
        name, value = scenario.machine[at]
        for simpler in VLLM.get(name, ())[1:]:
            if str(simpler) < str(value):
                yield replace(scenario, machine=(*rest[0], (name, simpler), *rest[1]))
    for field in ("host_blocks", "device_blocks", "max_running"):
        value = getattr(scenario, field)
        for less in (value // 2, value - 4, value - 1):
            if 1 <= less < value:
                yield replace(scenario, **{field: less})


def _smaller_requests(scenario: Scenario) -> Iterator[Scenario]:
    for at, action in enumerate(scenario.actions):
        if not isinstance(action, Arrive):
            continue
        if action.after and action.prompt:
            yield _with(scenario, at, replace(action, after=""))
        for output in (1, action.output // 2, action.output - 1):
            if 1 <= output < action.output:
                yield _with(scenario, at, replace(action, output=output))
        for place, (family, count) in enumerate(action.prompt):
            rest = action.prompt[:place], action.prompt[place + 1 :]
            if len(action.prompt) > 1:
                yield _with(scenario, at, replace(action, prompt=(*rest[0], *rest[1])))
            for less in (count // 2, count // BLOCK * BLOCK, count - BLOCK, count - 1):
                if 0 < less < count:
                    yield _with(scenario, at, replace(action, prompt=(*rest[0], (family, less), *rest[1])))


def _earlier(scenario: Scenario) -> Iterator[Scenario]:
    for at, action in enumerate(scenario.actions):
        for step in (0, action.step // 2, action.step - 1):
            if 0 <= step < action.step:
                moved = _with(scenario, at, replace(action, step=step))
                yield replace(moved, actions=tuple(sorted(moved.actions, key=lambda moving: moving.step)))


def _simpler_copies(scenario: Scenario) -> Iterator[Scenario]:
    copies = scenario.copies
    if len(copies) > 1:
        for entry in sorted(set(copies)):
            yield replace(scenario, copies=(entry,))
        yield replace(scenario, copies=copies[: len(copies) // 2])
    for at, entry in enumerate(copies):
        if entry >= 3:
            yield replace(scenario, copies=(*copies[:at], entry - 3, *copies[at + 1 :]))
