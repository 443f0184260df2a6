"""Long random walks over everything an engine, a mover and people can do, by seed.

Law of this file: a seed gives the same walk on every machine; a failing walk is cut down to the lines that matter and
printed as a list of actions. ``KVBM_FULL=1`` walks further, ``KVBM_SEED=n`` starts at another seed.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.eviction.policy import POLICIES, PolicyConfig
from kvbm_console.core.ids import BreakpointAction, FinishReason, OnTimeout, ResetMode, Route, Site, SlotState, Suspend
from tests.core.properties.actions import WORDS, Actions
from tests.core.script import Script

FULL = bool(os.environ.get("KVBM_FULL"))
FIRST_SEED = int(os.environ.get("KVBM_SEED", "1"))
STEPS = 400 if FULL else 120
Line = tuple[str, tuple[Any, ...]]


def spec(dice: random.Random) -> BreakpointSpec:
    """A breakpoint of any kind."""
    return BreakpointSpec(
        site=dice.choice(list(Site)), request=dice.choice(["*", "*", "*", "r*[0-4]"]),
        to_state=dice.choice([*SlotState, *[None] * 20]),
        route=dice.choice([None, None, None, None, Route.G2_G1]),
        action=dice.choice([BreakpointAction.HOLD, BreakpointAction.HOLD, BreakpointAction.HOLD, *BreakpointAction]),
        one_shot=dice.random() < 0.3, ignore_count=dice.choice([0, 0, 0, 1, 2]),
        suspend=dice.choice([Suspend.SLOT, Suspend.SLOT, Suspend.PIPELINE, Suspend.ALL]),
        on_timeout=dice.choice(list(OnTimeout)),
    )


WEIGHTS: dict[str, tuple[int, Callable[[random.Random], tuple[Any, ...]]]] = {
    "arrive": (14, lambda dice: (dice.choice(WORDS), dice.randint(1, 3), dice.choice([0, 0, 0, 1, 5]))),
    "look_up": (3, lambda dice: (dice.randint(0, 9),)),
    "admit": (18, lambda dice: (dice.randint(0, 9), dice.random() < 0.85)),
    "schedule": (6, lambda dice: (dice.randint(1, 12), dice.randint(0, 7))),
    "complete": (6, lambda dice: ()),
    "run_on": (10, lambda dice: (dice.randint(1, 5),)),
    "preempt": (4, lambda dice: (dice.randint(0, 9),)),
    "finish": (9, lambda dice: (dice.randint(0, 9), dice.choice(list(FinishReason)), dice.random() < 0.3)),
    "free_finished": (4, lambda dice: ()),
    "clone": (2, lambda dice: (dice.randint(0, 9), dice.randint(1, 2))),
    "serve": (6, lambda dice: (dice.choice(WORDS), dice.randint(1, 5), dice.random() < 0.5)),
    "start": (14, lambda dice: (dice.randint(0, 9),)),
    "report": (16, lambda dice: (dice.randint(0, 9), dice.randint(0, 1),
                                 dice.randint(-1, 7) if dice.random() < 0.2 else None)),
    "report_again": (1, lambda dice: (dice.randint(0, 9), dice.randint(0, 1), dice.random() < 0.5)),
    "move_all": (3, lambda dice: ()),
    "deadline": (2, lambda dice: (dice.randint(0, 9),)),
    "reset": (2, lambda dice: (dice.choice(list(ResetMode)),)),
    "drain": (1, lambda dice: ()),
    "breakpoints": (2, lambda dice: (dice.choice(["me", "you"]), [spec(dice) for _ in range(dice.randint(0, 2))])),
    "go_on": (5, lambda dice: (dice.randint(0, 9), dice.choice([None, None, *SlotState]))),
    "step_slot": (2, lambda dice: (dice.randint(0, 9),)),
    "lease": (2, lambda dice: (dice.choice(["me", "you"]), dice.random() < 0.5)),
    "freeze": (0, lambda dice: ()),
    "thaw": (2, lambda dice: ()),
    "run_for": (0, lambda dice: (dice.randint(1, 20_000),)),
    "step_pipeline": (1, lambda dice: ()),
    "skip_candidates": (1, lambda dice: (dice.randint(0, 9),)),
    "announce": (0, lambda dice: (dice.randint(0, 9), dice.randint(2, 9))),
    "disarm": (2, lambda dice: ()),
    "nonsense": (1, lambda dice: (dice.randint(0, 9), dice.randint(0, 5))),
}


THEMES: tuple[dict[str, int], ...] = (
    {"breakpoints": 0, "reset": 0, "drain": 0, "preempt": 1},
    {"breakpoints": 0, "reset": 0, "drain": 0, "preempt": 8, "serve": 12},
    {"breakpoints": 0, "reset": 10, "move_all": 0, "deadline": 0},
    {"breakpoints": 4, "lease": 4, "drain": 0, "announce": 2},
    {"breakpoints": 4, "reset": 0, "serve": 12, "drain": 0, "disarm": 0},
    {"breakpoints": 4, "reset": 1, "drain": 0, "freeze": 2, "run_for": 2, "thaw": 3, "step_pipeline": 5},
)
"""Weights that a walk changes."""


def walk(seed: int, steps: int) -> tuple[dict[str, Any], list[Line]]:
    """The configuration and the actions of a seed."""
    dice = random.Random(seed)
    config: dict[str, Any] = {
        "g1": dice.randint(7, 14), "g2": dice.choice([0, 5, 8, 16, 24, 32]), "g3": dice.choice([0, 0, 6, 16, 32]),
        "offload_threshold": dice.choice([0.0, 0.0, 0.3, 0.9]), "offload_law": ("total", "order")[seed % 2],
        "ranks": dice.randint(1, 2),
        "asynchronous": dice.random() < 0.7, "offload_batch_blocks": dice.choice([2, 64]),
        "staging_share": dice.choice([0.5, 1.0]), "hold_budget_min": dice.choice([1, 2, 4]),
        "eviction": PolicyConfig(
            policy=dice.choice(POLICIES), pin_tail_tokens=dice.choice([0, 0, 5, 100]),
            pin_ttl_s=dice.choice([0.00001, 60.0]), half_life_s=0.00001, frequency_credit_s=0.00001,
        ),
    }
    weights = {name: weight for name, (weight, _) in WEIGHTS.items()}
    # Each walk is about something: when everybody does everything, one hides the other.
    weights.update(dice.choice(THEMES))
    names = dice.choices(list(weights), list(weights.values()), k=steps)
    return config, [(name, WEIGHTS[name][1](dice)) for name in names]


def run(config: dict[str, Any], lines: list[Line], hosts: int) -> Exception | None:
    """Do the lines and stop everything; the failure, if any."""
    try:
        act = Actions(Script(hosts=hosts, **config))
        for name, arguments in lines:
            getattr(act, name)(*arguments)
        act.end()
    except Exception as error:
        return error
    return None


def shrink(config: dict[str, Any], lines: list[Line], hosts: int, failure: Exception) -> list[Line]:
    """Leave out what is not needed for a failure of the same type."""
    size = len(lines) // 2
    while size:
        at = 0
        while at < len(lines):
            fewer = lines[:at] + lines[at + size :]
            again = run(config, fewer, hosts)
            if again is not None and type(again) is type(failure):
                lines = fewer
            else:
                at += size
        size //= 2
    return lines


@pytest.mark.timeout(7_200 if FULL else 240)
@pytest.mark.parametrize(("hosts", "walks"), [(1, 16 if not FULL else 1_500), (2, 4 if not FULL else 200),
                                              (3, 4 if not FULL else 200)])
def test_random_walks(hosts: int, walks: int) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + walks):
        config, lines = walk(1_000_000 * hosts + seed, STEPS)
        failure = run(config, lines, hosts)
        if failure is not None:
            lines = shrink(config, lines, hosts, failure)
            failure = run(config, lines, hosts)
            text = "\n".join(f"    {line}" for line in lines)
            raise AssertionError(f"seed {seed} with {hosts} hosts: {config}\n{text}") from failure
