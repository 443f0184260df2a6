"""The simulated engine: a scheduler under virtual time that a leader cannot tell from a real one.

Law of this file: sans-IO and synchronous. ``run`` moves virtual time from one calendar entry to the next and returns;
all that it tells or asks goes through its ``EnginePort``. Slicing a run differently changes nothing.

An iteration is formed, announced, takes its time by the step model, and ends. Full blocks then get their hashes, every
request with all its tokens computed samples a token, and requests with their last token finish. The next iteration is
formed at the same instant. Waiting for a transfer costs nothing but virtual time.
"""

import time
from collections.abc import Callable, Iterator

import msgspec

from kvbm_console.core.columns import unpack_ids
from kvbm_console.core.ids import FinishReason
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.port import EnginePort
from kvbm_console.simulator.scheduler import Scheduler
from kvbm_console.simulator.windows import may_be_wide, steps_in_time, widen
from kvbm_console.simulator.work import Plan, Work
from kvbm_console.simulator.workloads import Request, Workload


class EngineTotals(msgspec.Struct):
    """Counts of one engine since it was built."""

    arrived: int = 0
    finished: int = 0
    aborted: int = 0
    """Requests whose client went away."""
    too_large: int = 0
    refused: int = 0
    """Requests that the leader did not take, or that found the waiting queue full."""
    forgotten: int = 0
    """Sequences that a reset ended."""
    iterations: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    cloned: int = 0
    """Sequences beyond the first of requests."""
    prefill_tokens_most: int = 0
    decode_requests_most: int = 0
    """The largest counts of one iteration."""


class SimulatedEngine:
    """Continuous batching over a ``Workload``. Implements ``dispatch.EngineSink``.

    ``latency_ns`` tells the time of synchronous loads that the next step is charged for (peek and take). The engine
    declares its G1 pool at construction.
    """

    def __init__(
        self, config: EngineConfig, port: EnginePort, calendar: Calendar, workload: Workload, block_tokens: int, *,
        take_latency_ns: Callable[[], int] = lambda: 0, arrivals_felt: bool = False,
    ) -> None:
        self.config = config
        self.port = port
        self.calendar = calendar
        self.workload = workload
        self.block_tokens = block_tokens
        self.totals = EngineTotals()
        self.scheduler = Scheduler(config, port, block_tokens)
        self._take_latency_ns = take_latency_ns
        self._arrivals_felt = arrivals_felt
        """True if an arrival can start a copy, which then ends within an iteration that is under way."""
        self._iteration = 0
        self._current: Plan | None = None
        self._end_ticket = 0
        self._nudged = False
        self._ends: list[tuple[int, str]] = []
        """Number and name of each request that ended since an iteration was formed."""
        self._aborting: list[tuple[int, str]] = []
        """Number and name of requests whose client has gone; they end before the next iteration is formed."""
        self._aborts: dict[str, int] = {}
        """Live requests to the calendar's ticket of their client's going."""
        self.paused = False
        """True if the leader froze this engine."""
        self.windows = False
        """True if iterations are taken together where no observer can tell the difference. The caller then submits no
        stimulus from outside, neither during a ``run`` nor between two runs."""
        port.declared(config.g1_blocks, block_tokens, len(config.groups))
        workload.begin(block_tokens)
        self._arrivals: Iterator[Request] = workload.arrivals()
        self._expect_next()

    # --- the driver's side ---

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        return self.calendar.now_ns

    @property
    def next_ns(self) -> int | None:
        """When something happens next, None when nothing will by itself: virtual time stands still while paused."""
        return None if self.paused else self.calendar.next_ns

    @property
    def done(self) -> bool:
        """True if every request has ended and nothing is to come, transfers and withheld blocks included."""
        return not self.scheduler.owes and self.calendar.next_ns is None

    @property
    def only_held(self) -> bool:
        """True if work is left but time stands still: only a release or a thaw makes it go on."""
        return not self.done and self.next_ns is None

    def nudge(self) -> None:
        """Something happened outside (a hold was released): look again at the next ``run``."""
        self._nudged = True

    def run(self, until_ns: int | None = None, wall_budget_ns: int | None = None) -> None:
        """Run the calendar up to and including ``until_ns``, or as far as it goes for None, for about this much wall
        time."""
        started = time.perf_counter_ns() if wall_budget_ns is not None else 0
        calendar = self.calendar
        if self._nudged and not calendar.waiting:
            self._nudged = False
            self._begin_iteration()
        while not self.paused:
            if not calendar.run_next(until_ns):
                return
            if self._current is None:
                self._begin_iteration()
            if wall_budget_ns is not None and time.perf_counter_ns() - started >= wall_budget_ns:
                return

    # --- the leader's side (EngineSink) ---

    def wake(self, request: str) -> None:
        """The request's load ended, well or not."""
        self.scheduler.wake(request)
        self._nudged = True

    def release(self, request: str, ids: bytes) -> None:
        """These blocks, withheld until now, may be reused."""
        self.scheduler.give_back(request, unpack_ids(ids))
        self._nudged = True

    def pin(self, ids: bytes) -> None:
        """A copy reads these cached blocks: they count as held until they are released."""
        self.scheduler.pin(unpack_ids(ids))

    def clear(self, keep: bytes) -> None:
        """The leader was reset: forget the requests and the running iteration, clear the pool, go on with arrivals."""
        scheduler = self.scheduler
        ended = [
            *scheduler.ending, *scheduler.running, *scheduler.loaded, *scheduler.loading.values(), *scheduler.waiting,
        ]
        scheduler.clear()
        if scheduler.groups > 1:
            self.port.shared("", [], cleared=True)
        self.pin(keep)
        self.calendar.cancel(self._end_ticket)
        self._current = None
        self._ends.clear()
        self.totals.forgotten += len(ended)
        for work in ended:
            self._end(work)
        self._nudged = True

    def pause(self) -> None:
        """Virtual time stands still until ``resume``, within an iteration too: nothing arrives or piles up."""
        self.paused = True

    def resume(self) -> None:
        """Go on."""
        self.paused = False
        self._nudged = True

    # --- arrivals ---

    def _expect_next(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._expect(request, last=False)

    def _expect(self, request: Request, *, last: bool = True) -> None:
        at_ns = max(request.arrival_ns, self.calendar.now_ns)

        def arrive() -> None:
            if not last:
                self._expect_next()
            self._arrive(request)

        self.calendar.at(at_ns, arrive, felt=self._arrivals_felt)

    def _follow(self, request: Request) -> None:
        follower = self.workload.finished(request, self.calendar.now_ns)
        if follower is not None:
            self._expect(follower)

    def _end(self, work: Work) -> bool:
        """A sequence has ended. True if it was the last of its request, whose end is followed then."""
        self.calendar.cancel(self._aborts.pop(work.name, 0))
        family = work.family
        if family is not None:
            family.left -= 1
            if family.left:
                return False
        self._follow(work.request if family is None else family.request)
        return True

    def _fits(self, request: Request) -> bool:
        """True if there are seats for all sequences, blocks for each, and blocks for all when they begin."""
        size, clones, config = self.block_tokens, len(request.clone_hashes), self.config
        prompt = config.most_held(request.prompt_tokens, size)
        forked = prompt + clones * len(config.groups) * (request.prompt_tokens % size > 0)
        tokens = request.prompt_tokens + request.output_tokens - 1
        longest = config.most_decoding(tokens, size) if config.whole_sequences else config.most_held(tokens, size)
        return clones < self.config.max_running and max(forked, longest) <= self.config.g1_blocks

    def _arrive(self, request: Request) -> None:
        self.totals.arrived += 1
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            self.totals.refused += 1
            self._follow(request)
            return
        if not self.port.arrived(request):
            self.totals.refused += 1
            self._follow(request)
        elif not self._fits(request):
            self.totals.too_large += 1
            self.port.finished(request.request, [], FinishReason.TOO_LARGE)
            self._follow(request)
        else:
            self.scheduler.waiting.append(Work(request, self.scheduler.groups))
            if request.abort_ns is not None:
                at_ns = max(request.abort_ns, self.calendar.now_ns)
                left = self.totals.arrived, request.request
                self._aborts[request.request] = self.calendar.at(at_ns, lambda: self._aborting.append(left))

    def _end_aborted(self) -> None:
        """End the requests whose client has gone, in the order of their arrival, unless they ended by themselves."""
        gone, self._aborting = sorted(self._aborting), []
        for _, name in gone:
            work = self.scheduler.take_out(name)
            if work is not None:
                self._give_up(work, FinishReason.ABORTED)
                self.totals.aborted += self._end(work)

    # --- iterations ---

    def _begin_iteration(self) -> None:
        """Form the next iteration unless an iteration runs. An iteration that only leaves requests out ends at once."""
        while self._current is None and not self.paused:
            self._nudged = False
            if self._aborting:
                self._end_aborted()
            plan = self.scheduler.form(self.calendar.now_ns)
            self.totals.preemptions = self.scheduler.preemptions
            if self.scheduler.sampled:
                self.totals.cloned = self.scheduler.cloned
                self.totals.output_tokens += self.scheduler.sampled
                self.scheduler.sampled = 0
            if plan is None:
                if self._ended_late() or self._nudged or (self.calendar.next_ns is None and self.scheduler.made_way()):
                    continue
                if self._end_too_large():
                    continue
                return
            lasts_ns, late_ns = self.config.step_ns(plan.prefill_tokens, plan.decoding), 0
            if plan.steady or plan.tokens:
                late_ns = self._take_latency_ns()
                if self.windows and not late_ns and may_be_wide(self.scheduler, plan):
                    self._widen(plan, lasts_ns)
            plan.ended = self._take_ends()
            first = self._iteration + 1
            self._iteration += plan.steps
            self.totals.iterations += plan.steps
            self.totals.prefill_tokens += plan.prefill_tokens
            self.totals.prefill_tokens_most = max(self.totals.prefill_tokens_most, plan.prefill_tokens)
            self.totals.decode_requests_most = max(self.totals.decode_requests_most, plan.decoding)
            self._current = plan
            self.scheduler.announce(plan, first)
            self._ended_late()
            if not (plan.steady or plan.tokens):
                self._end_iteration()
                continue
            ends_ns = self.calendar.now_ns + lasts_ns * plan.steps + late_ns
            self._end_ticket = self.calendar.at(ends_ns, self._end_iteration, felt=False)

    def _end_too_large(self) -> bool:
        """End a request that was preempted and has become longer than the empty device. vLLM would wait for ever."""
        work = self.scheduler.take_hopeless()
        if work is None:
            return False
        self.totals.too_large += 1
        self.port.finished(work.name, [], FinishReason.TOO_LARGE)
        self._end(work)
        return True

    def _take_ends(self) -> list[str]:
        """The requests that ended since an iteration was formed, by their numbers; none if one has no number."""
        ends, self._ends = self._ends, []
        if len(ends) < 2 or not all(number for number, _ in ends):
            return []
        return [name for _, name in sorted(ends)]

    def _widen(self, plan: Plan, lasts_ns: int) -> None:
        calendar = self.calendar
        steps = steps_in_time(calendar.now_ns, lasts_ns, calendar.next_ns, calendar.next_felt_ns)
        if steps > 1:
            calm_blocks = self.port.calm_blocks()
            if calm_blocks is not None:
                widen(self.scheduler, plan, steps, calm_blocks)

    def _end_iteration(self) -> None:
        plan, self._current = self._current, None
        assert plan is not None
        filled: list[Work] = []
        counts: list[int] = []
        ids: list[int] = []
        hashes: list[int] = []
        ended: list[Work] = []
        if self.config.early_steps:
            self.scheduler.settle()
        if plan.steady:
            self._advance(plan, filled, ended)
            for work in filled:
                at = work.stored
                work.stored = at + 1
                counts.append(1)
                ids.append(work.blocks[at])
                hashes.append(work.hashes[at])
            self.totals.output_tokens += plan.steps * plan.steady
        if plan.tokens:
            self._compute(plan, filled, counts, ids, hashes, ended)
        if ids:
            self.scheduler.store(filled, counts, ids, hashes)
        self.port.filled(self._iteration, filled, counts, ids, hashes)
        for work in ended:
            self.scheduler.remove(work)
            if self.config.early_steps:
                self.scheduler.ending.append(work)
            else:
                self._finish(work)

    def _advance(self, plan: Plan, filled: list[Work], ended: list[Work]) -> None:
        """The steady requests have computed one token in each iteration of the plan."""
        steps, size = plan.steps, self.block_tokens
        running = self.scheduler.running
        steady = running if plan.steady == len(running) else running[: plan.steady]
        if steps > 1:
            filled += plan.fills
            for work in steady:
                computed = work.computed = work.computed + steps
                if computed == work.last:
                    ended.append(work)
            return
        for work in steady:
            computed = work.computed = work.computed + 1
            if not computed % size:
                filled.append(work)
            if computed == work.last:
                ended.append(work)

    def _compute(
        self, plan: Plan, filled: list[Work], counts: list[int], ids: list[int], hashes: list[int], ended: list[Work]
    ) -> None:
        """The other requests have computed their tokens."""
        size, produced = self.block_tokens, 0
        for work, tokens in plan.tokens:
            goal = work.computed + work.left
            computed = work.computed = work.computed + tokens
            full = computed // size
            if full > work.stored:
                filled.append(work)
                counts.append(full - work.stored)
                ids += work.blocks[work.stored : full]
                hashes += work.hashes[work.stored : full]
                work.stored = full
            if computed == goal:
                work.prefilled = True
                if not work.due:
                    produced += 1
                elif computed == work.last:
                    produced += (1 + work.due) * work.sampled
                if computed == work.last:
                    ended.append(work)
        self.totals.output_tokens += produced

    def _ended_late(self) -> bool:
        """End the requests whose end was not known when the iteration was formed. False if there are none."""
        ending, self.scheduler.ending = self.scheduler.ending, []
        for work in ending:
            self._finish(work)
        return bool(ending)

    def _finish(self, work: Work) -> None:
        self._give_up(work, FinishReason.LENGTH)
        self.totals.finished += self._end(work)

    def _give_up(self, work: Work, reason: FinishReason) -> None:
        """Tell the end of a sequence that left the queues, and give its blocks back as soon as no copy reads them."""
        if self.config.passes_at_end:
            self.scheduler.pass_windows(work)
        held = work.held
        self._ends.append((work.request.end_number, work.name))
        self.scheduler.withhold(work.name, held)
        withheld = self.port.finished(work.name, held, reason)
        self.scheduler.release_others(work, before_first=True)
        if not withheld:
            self.scheduler.give_back(work.name, held)
        self.scheduler.release_others(work)
