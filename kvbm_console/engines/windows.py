"""Windows: several iterations taken at once, where nothing can tell the difference.

Law of this file: a window leaves engine, leader and report as the same iterations one by one would;
``tests/simulation/test_windows.py`` compares the two over hundreds of machines. A window of k iterations
is therefore taken only if

1. every running request decodes, and nobody who waits could be admitted between two of its iterations;
2. no request ends before its last iteration;
3. a request arrives no earlier than in its last iteration, where it can only queue, and where the leader fetches
   nothing for it;
4. the device pool has the blocks for all of it without taking one from a request;
5. blocks are handed out, and become full, in the order (iteration, running order);
6. the leader would copy nothing down in between: at most ``calm_blocks`` of the port are given before the last block
   of it becomes full, or no block becomes full before its last iteration;
7. nothing else falls into it that an iteration under way feels: the end of a copy, a deadline, a hold, a breakpoint.

All times are integer nanoseconds and all iterations of a window last equally long, so its ends are exact.
"""

from collections.abc import Sequence
from typing import Final

from kvbm_console.engines.scheduler import Plan, Scheduler, Work

STEPS_MAX: Final = 4_096
"""Of one window: bounds what a single call prepares, and is far above what arrivals and ends leave."""


def may_be_wide(scheduler: Scheduler, plan: Plan) -> bool:
    """Rule 1, of a plan whose first iteration is formed."""
    running = len(scheduler.running)
    if plan.decoding != running or plan.prefill_tokens or plan.preempted or plan.skipped or scheduler.loaded:
        return False
    config = scheduler.config
    full = running + len(scheduler.loading) >= config.max_running or running >= config.max_batch_tokens
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
    size, tokens = scheduler.block_tokens, plan.tokens
    first_needs: list[int] = []
    for work, _ in tokens:
        left = work.output_tokens - work.produced
        if left < steps:
            if left < 2:
                return
            steps = left
        first_needs.append(len(work.blocks) * size - work.computed + 1)
    most = len(tokens) * (steps // size + 1)  # blocks that could be needed at all
    if scheduler.pool.free_blocks < most:
        steps = _within(first_needs, size, scheduler.pool.free_blocks, steps)
    calm = calm_blocks - len(plan.appended_ids)
    if calm < most:
        first_fill = min([(work.stored + 1) * size - work.computed for work, _ in tokens])
        if first_fill < steps:
            steps = max(first_fill, _within(first_needs, size, calm, steps) if calm >= 0 else 0)
    if steps < 2:
        return
    plan.steps = steps
    needs = in_order(first_needs, size, steps)
    if not needs:
        return
    ids = scheduler.pool.allocate(len(needs))
    assert ids is not None
    appended = plan.appended
    for (_, at), block in zip(needs, ids, strict=True):
        work = tokens[at][0]
        work.blocks.append(block)
        appended.append(work.name)
    plan.early = [step - 1 for step, _ in needs]
    plan.appended_counts += [1] * len(ids)
    plan.appended_ids += ids


def in_order(firsts: Sequence[int], size: int, steps: int) -> list[tuple[int, int]]:
    """(step, running order) of what happens to each request first in step ``firsts[i]`` and then every ``size`` steps.

    >>> in_order([3, 1], 2, 4)
    [(1, 1), (3, 0), (3, 1)]
    """
    end = steps + 1
    found = [
        (step, at) for at, first in enumerate(firsts) if first < end for step in range(first, end, size)
    ]
    found.sort()
    return found


def filled(tokens: Sequence[tuple[Work, int]], size: int, steps: int) -> list[Work]:
    """Whose next block becomes full, block by block, while each computes ``steps`` tokens more; before they do."""
    firsts = [(work.stored + 1) * size - work.computed for work, _ in tokens]
    return [tokens[at][0] for _, at in in_order(firsts, size, steps)]


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
