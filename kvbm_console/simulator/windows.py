"""Windows: several iterations taken at once, where nothing can tell the difference.

Law of this file: a window leaves engine, leader and report as the same iterations would without it.
``tests/simulator/test_windows.py`` compares the two over hundreds of machines. A window of k iterations is therefore
taken only if

1. every running request decodes and sees all of its tokens in one group of layers, and no waiting request could be
   admitted between two of its iterations;
2. no request ends before its last iteration;
3. a request arrives no earlier than in its last iteration, where it can only queue, and where the leader fetches
   nothing for it;
4. the device pool has the blocks for all of it without taking a block from a request;
5. blocks are handed out, and become full, in the order (iteration, running order);
6. the leader would copy nothing down in between, because at most ``calm_blocks`` of the port are given before the last
   block becomes full, or no block is given and none becomes full before the last iteration;
7. nothing else falls into it that an iteration under way feels: the end of a copy, a deadline, a hold, a breakpoint.

All times are integer nanoseconds and all iterations of a window last equally long, so its ends are exact.
"""

from collections.abc import Sequence
from typing import Final

from kvbm_console.simulator.scheduler import Scheduler
from kvbm_console.simulator.work import Plan, Work

STEPS_MAX: Final = 4_096
"""Iterations of one window: bounds the work of a single call, far above the windows between arrivals and ends."""


def may_be_wide(scheduler: Scheduler, plan: Plan) -> bool:
    """Rule 1, of a plan whose first iteration is formed."""
    running = len(scheduler.running)
    if not scheduler.config.plain:  # each iteration may give blocks back
        return False
    if plan.decoding != running or plan.prefill_tokens or plan.preempted or plan.skipped or scheduler.loaded:
        return False
    config = scheduler.config
    full = running >= config.max_running or running >= config.max_batch_tokens
    return full or not scheduler.waiting


def steps_in_time(now_ns: int, lasts_ns: int, next_ns: int | None, felt_ns: int | None) -> int:
    """Rules 3 and 7: iterations of this length up to the next entry, its own included unless that would be felt.

    >>> steps_in_time(0, 10, 25, None), steps_in_time(0, 10, 20, 20), steps_in_time(0, 10, None, 5)
    (3, 1, 1)
    """
    steps = STEPS_MAX
    if next_ns is not None:
        steps = min(steps, -(-(next_ns - now_ns) // lasts_ns))
    if felt_ns is not None:
        steps = min(steps, -(-(felt_ns - now_ns) // lasts_ns) - 1)
    return max(1, steps)


def widen(scheduler: Scheduler, plan: Plan, steps: int, calm_blocks: int) -> None:
    """Make the plan up to ``steps`` iterations long and give its requests the blocks that they take."""
    size, running, pool = scheduler.block_tokens, scheduler.running, scheduler.pool
    for work in running:
        left = work.last - work.computed
        if left < steps:
            steps = left
    if steps < 2:
        return
    most = len(running) * (steps // size + 1)  # blocks that could be needed at all
    if pool.free_blocks < most:
        steps = _within(_first_needs(running, size), size, pool.free_blocks, steps)
    calm = calm_blocks - len(plan.appended_ids)
    if calm < 0 and plan.appended_ids:
        return  # the blocks of the first iteration may start a copy, whose end would be felt
    if calm < most:
        needs = _first_needs(running, size)
        first_fill = min(needs) - 1
        if first_fill < steps:
            steps = max(first_fill, _within(needs, size, calm, steps) if calm >= 0 else 0)
    if steps < 2:
        return
    plan.steps = steps
    at_steps, plan.fills = fills(running, size, steps)
    plan.early = [step for step in at_steps if step < steps]  # the next block is needed in the iteration after
    if not plan.early:
        return
    ids = pool.allocate(len(plan.early))
    assert ids is not None
    needing = plan.fills[: len(ids)]
    for work, block in zip(needing, ids, strict=True):
        work.blocks.append(block)
    plan.appended += needing
    plan.appended_counts += [1] * len(ids)
    plan.appended_ids += ids


def fills(works: Sequence[Work], size: int, steps: int) -> tuple[list[int], list[Work]]:
    """The iterations, from 1 to ``steps``, in which blocks of requests that decode become full, and whose block; in
    the order (iteration, order of ``works``)."""
    firsts: dict[int, list[Work]] = {}
    for work in works:
        first = size - work.computed % size
        if first <= steps:
            if first in firsts:
                firsts[first].append(work)
            else:
                firsts[first] = [work]
    at_steps: list[int] = []
    whose: list[Work] = []
    in_order = sorted(firsts.items())
    for base in range(0, steps, size):
        for first, mine in in_order:
            if base + first > steps:
                break
            at_steps += [base + first] * len(mine)
            whose += mine
    return at_steps, whose


def _first_needs(works: Sequence[Work], size: int) -> list[int]:
    """The iteration from now in which each request needs a block again, when it has a place for the next token."""
    return [size - work.computed % size + 1 for work in works]


def _within(firsts: Sequence[int], size: int, blocks: int, steps: int) -> int:
    """The most of ``steps`` steps in which at most this many blocks are needed; 0 if the first needs more."""
    def needed(upto: int) -> int:
        return sum([(upto - first) // size + 1 for first in firsts if first <= upto])

    if needed(steps) <= blocks:
        return steps
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        if needed(middle) <= blocks:
            low = middle
        else:
            high = middle
    return low
