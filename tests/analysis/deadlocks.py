"""An engine that is watched and in which no request can go on: what its tap would say.

Of 15 blocks the request ``loaded`` holds 9, brought from host memory, and waits for its next iteration. ``head`` stands
in front of it, was preempted, and wants more than are free. Others wait behind both.
"""

from typing import Any

from kvbm_console.analysis.walk import Evidence
from kvbm_console.core.config import SECOND_NS, BreakpointSpec, LeaderConfig
from kvbm_console.core.ids import Site
from kvbm_console.core.stimuli import BreakpointsReplaced
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import TapSettings
from tests.analysis.evidence import evidence
from tests.recording.helpers import Run
from tests.tap.watching import Watching

BLOCK = 16


def _new(name: str, blocks: int) -> list[Any]:
    first = 1 + 1_000 * sum(map(ord, name))
    return ["new", 0, name, list(range(first, first + blocks)), blocks * BLOCK, 8, 0, None]


def _step(new: list[Any], preempted: list[str], running: int) -> list[Any]:
    return ["step", 0, new, [], [], preempted, [], [], running, []]


def stands_still(
    wait_ns: int = 12 * SECOND_NS, *, others: int = 6, wanted: int = 13, loads: bool = False, held: bool = False,
    aborted: bool = False,
) -> Run:
    """The run of an engine that has stood still for ``wait_ns``.

    With ``loads`` the load has not ended yet, with ``held`` a breakpoint stops a request at its lookup, and with
    ``aborted`` the loaded request is aborted in the end.
    """
    watch = Watching(TapRecorder(), Flattener(), TapSettings("", "vllm-a", BLOCK, 16, medium="CPU"))
    watch.take([["all", 0, [], 0, 0], _new("head", wanted), ["lookup", 0, "head", 0, 0, False],
                ["alloc", 0, "head", [1, 2], 0], _step([["head", [1, 2], 0, 32, wanted * BLOCK]], [], 1)])
    watch.now += SECOND_NS
    ids = list(range(3, 12))
    watch.take([_new("loaded", 10), ["lookup", 0, "loaded", 0, 9 * BLOCK, True],
                ["alloc", 0, "loaded", ids, 9 * BLOCK], _step([], ["head"], 0)])
    if not loads:
        watch.now += SECOND_NS // 10
        watch.take([["copies", 0, ["loaded"], [], [], []]])
    for number in range(others):
        watch.take([_new(f"other-{number}", 2)])
    if held:
        watch.dispatcher.submit(BreakpointsReplaced, "me", (BreakpointSpec(site=Site.CALL_WILL, request="other-0"),))
        watch.take([["will", 0, "other-0", 0]])
        assert watch.leader.state.holds
    steps = 10
    for _ in range(steps):
        watch.now += wait_ns // steps
        watch.take([_step([], [], 0)])
    if aborted:
        watch.take([["finish", 0, "loaded", "FINISHED_ABORTED", False, 0]])
    assert watch.rejected == []
    return Run(LeaderConfig(), watch.stimuli, watch.outcomes)


def deadlocked(*arguments: Any, **options: Any) -> Evidence:
    """The same as evidence."""
    run = stands_still(*arguments, **options)
    return evidence(run.all_events, run.config)


