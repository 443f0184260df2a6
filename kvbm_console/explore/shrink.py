"""Shrinking: the smallest scenario that still ends in the same verdict.

Delta debugging removes actions (chunks of halves, quarters, ... single actions). A removed request takes its jobs and
its blocks with it: all later jobs take other entries of ``copies``, and the machine is less full. So further passes
remove a request together with a turn of ``copies`` or with places of the machine, or make two requests one. The last
passes make a single part smaller: segments of prompts, tokens, answers, steps, waits of copies.

A candidate counts when its run has the same signature; it replaces the best scenario when its ``Scenario.size`` is
smaller.

Law of this file: the result was run, and ended in the wanted signature. The caller bounds the number of runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from kvbm_console.explore.scenario import BLOCK, VLLM, Action, Arrive, Scenario

MERGED: Final = 4
"""The next actions that a request is made one with."""
Ends = Callable[[Scenario], str | None]
"""Function that runs a scenario and returns the signature of its verdict, None without a verdict."""


def shrink(scenario: Scenario, signature: str, ends: Ends, more: Callable[[], bool]) -> Scenario:
    """The smallest scenario found. ``more`` returns True while another run is allowed."""
    best = scenario
    while more():
        before = best.size
        best = _fewer_actions(best, signature, ends, more)
        for candidates in (_simpler_copies, _smaller_machine, _fewer_requests, _smaller_requests, _earlier):
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
    """Replace the best scenario by smaller candidates until none has the signature.

    After a success the search goes on where it was, because the candidates before have just failed."""
    smaller = True
    while smaller:
        smaller, at, left = False, 0, candidates(best)
        while (candidate := next(left, None)) is not None:
            if not more():
                return best
            if candidate.size < best.size and candidate.fits >= best.fits and ends(candidate) == signature:
                best, smaller = candidate, True
                left = islice(candidates(best), at, None)
            else:
                at += 1
    return best


def _with(scenario: Scenario, at: int, action: Action) -> Scenario:
    return replace(scenario, actions=(*scenario.actions[:at], action, *scenario.actions[at + 1 :]))


def _fewer_requests(scenario: Scenario) -> Iterator[Scenario]:
    """Without an action, with what its jobs and blocks did made up for. And with two requests as one."""
    copies = scenario.copies
    for at, action in enumerate(scenario.actions):
        rest = replace(scenario, actions=(*scenario.actions[:at], *scenario.actions[at + 1 :]))
        if not rest.actions:
            return
        for turn in range(1, len(copies)):
            yield replace(rest, copies=(*copies[turn:], *copies[:turn]))
        if not isinstance(action, Arrive):
            continue
        blocks = -(-(action.tokens + action.output) // BLOCK)
        for field in ("host_blocks", "device_blocks"):
            for less in sorted({blocks, blocks // 2, 1}, reverse=True):
                if getattr(rest, field) > less > 0:
                    yield replace(rest, **{field: getattr(rest, field) - less})
        for other, later in enumerate(rest.actions[at : at + MERGED], at):
            if isinstance(later, Arrive):
                yield _with(rest, other, replace(later, prompt=(*action.prompt, *later.prompt)))
                yield _with(rest, other, replace(later, prompt=(*later.prompt, *action.prompt)))


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
