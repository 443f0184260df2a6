"""Continuous batching: which requests compute how many tokens in the next iteration, and where these stand.

Law of this file: every scheduled token has a place before the iteration is announced. The leader is told of every
change in the order of the changes, admissions and preemptions by calls of their own, the others in one
``IterationScheduled``.

Scheduling is vLLM's. Running requests come first, in the order of their admission. A decoding request gets a token, a
prefilling request as many prompt tokens as the budget leaves. Without free blocks, the request admitted last is
preempted and computes everything again through a new lookup. Only an iteration without a preemption admits waiting
requests. A request whose load has ended goes before them, and no request passes it while it finds no seat or no
blocks. A request that loads has no seat. Two differences:

* A request whose load has ended owns idle blocks until it goes on, so the budget first keeps its tokens free. Running
  requests that then find no budget are left out of this iteration.
* Copies may still read blocks of ended requests, which come back by themselves. Meanwhile a
  running request without a block is left out for a moment (``patience_ns``) instead of preempting another.

Each group of layers has blocks of its own. In a group with an attention window a request gives back the blocks that its
next token does not see, each time before it takes others. They stay cached. A hit needs the blocks of the window alone,
so the blocks before it may be gone. A prefix is found if each group has what it needs of it.

With ``named_early`` the blocks of a prompt are cached when the iteration that computes them is formed. A later request
of this iteration finds them, and computes behind them in the same iteration.

With ``early_steps`` an iteration is formed before the result of the last one is known. A request that has its last
token in that one keeps its seat and blocks (``ending``), is left out, and ends when the iteration has been formed.

A request of n sequences has n seats while it runs, and is admitted only when the partial blocks of its clones fit,
too. It is cloned when it is scheduled for the first time after its prompt was computed. From then on each sequence
is preempted and ends alone. With one token to generate it ends before that, and no clone is opened.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import chain
from typing import Final

from kvbm_console.core.errors import InternalError
from kvbm_console.core.instructions import MatchAnswer
from kvbm_console.core.tiers import window_blocks
from kvbm_console.simulator.config import EngineConfig, is_kept, passed_blocks
from kvbm_console.simulator.device_pool import NO_PLACE, DevicePool, SharedPool
from kvbm_console.simulator.port import EnginePort
from kvbm_console.simulator.work import CloneFamily, Plan, Table, Work

LOOKUPS_MAX: Final = 64
"""Lookups in one iteration; requests that must ask again are passed over, and a long queue of them must stay cheap.

vLLM has no such limit, and neither has an engine with ``whole_sequences``."""


class Scheduler:
    """The queues of the simulated engine. ``form`` makes the next iteration; the engine runs it.

    Requests in ``waiting`` have no blocks, those in ``loading`` wait for a load. Those in ``loaded`` have blocks and
    were not scheduled since, those in ``running`` are in the batch. ``withheld`` are blocks by request that may not be
    reused before the leader says so.
    """

    def __init__(self, config: EngineConfig, port: EnginePort, block_tokens: int) -> None:
        self.config = config
        self.groups = len(config.groups)
        self._before_first = config.group_numbers[0] if config.group_numbers else 0
        self.pool = SharedPool(config.g1_blocks) if self.groups > 1 else DevicePool(config.g1_blocks)
        self.port = port
        self.block_tokens = block_tokens
        self.waiting: deque[Work] = deque()
        self.loading: dict[str, Work] = {}
        self.loaded: list[Work] = []
        self.running: list[Work] = []
        self.ending: list[Work] = []
        """Requests with seats and blocks that end when the next iteration has been formed."""
        self.withheld: dict[str, list[int]] = {}
        self.preemptions = 0
        self.cloned = 0
        self.sampled = 0
        """Tokens that the sequences of a request have when it is cloned, and that the engine has not counted."""
        self._due = 0
        """Clones that running requests will have: their seats are kept."""
        self._refused: Work | None = None
        """The request that found no room in the last iteration; requests behind it were not asked for."""
        self._steady = 0
        """So many leading requests of ``running`` were decoding in the last iteration."""

    @property
    def live(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self.waiting) + len(self.loading) + len(self.loaded) + len(self.running) + len(self.ending)

    @property
    def owes(self) -> bool:
        """True if requests are live or blocks of ended requests have not come back."""
        return self.live > 0 or bool(self.withheld)

    def clear(self) -> None:
        """Forget all requests and blocks (reset)."""
        self.waiting.clear()
        self.loading.clear()
        self.loaded.clear()
        self.running.clear()
        self.ending.clear()
        self._steady = self._due = 0
        self._refused = None
        self.withheld.clear()
        self.pool.clear()

    # --- an iteration ---

    def form(self, now_ns: int) -> Plan | None:
        """Schedule all requests that can go on; None when no token is computed and no change is to be told."""
        running, waiting, loaded = self.running, self.waiting, self.loaded
        if not (running or waiting or loaded or self.ending):
            return None
        plan = Plan()
        for work in self.ending:
            self._leave_out(plan, work)
        self._refused = None
        budget = self.config.max_batch_tokens
        # With windows the requests of an iteration take blocks that others of it have given back.
        plain = self.config.plain
        plan.tell_at_once = not plain or bool(waiting or loaded or self._due) or (
            self.pool.free_blocks <= len(running) + budget // self.block_tokens
        )
        kept = self._kept_for_loaded() if loaded and not self.config.whole_sequences else 0
        budget -= kept
        if 0 < self._steady <= budget and plain and self._go_on(plan):
            budget -= plan.steady
        budget = kept + self._schedule_running(plan, budget, now_ns)
        if not plan.preempted and (waiting or loaded):
            budget = self._schedule_loaded(plan, budget)
            budget = self._admit(plan, budget)
            self._schedule_loaded(plan, budget)
        self._settle(plan)
        if plan.steady or plan.tokens or plan.skipped:
            return plan
        if plan.blocked:
            self.settle()  # no iteration runs, so its blocks can be taken
        # No time passes in which a request that was just preempted would ask again.
        return self.form(now_ns) if plan.preempted or plan.blocked else None

    def settle(self) -> None:
        """The results of all iterations that were formed before are known."""
        for work in self.running:
            work.settled = work.computed

    def _go_on(self, plan: Plan) -> bool:
        """A token more for each request that was decoding, as in the iteration before.

        False when the iteration is not that simple.
        """
        port, pool, size, steady = self.port, self.pool, self.block_tokens, self._steady
        if port.standing:
            return False
        running = self.running if steady == len(self.running) else self.running[:steady]
        dry = [work for work in running if work.computed == len(work.blocks) * size]
        if len(dry) > pool.free_blocks:
            return False
        for work in dry:
            ids = pool.allocate(1) or []
            work.blocks += ids
            if plan.tell_at_once:
                port.appended(work, ids)
                if port.standing:
                    return False
            else:
                plan.appended.append(work)
                plan.appended_counts.append(1)
                plan.appended_ids += ids
        plan.steady = plan.decoding = steady
        return True

    def _settle(self, plan: Plan) -> None:
        """Count leading requests that decode now together with those that did before."""
        at, first, running = 0, plan.steady, self.running
        for work, _ in plan.tokens:
            if not work.decoding or running[first + at] is not work:
                break
            at += 1
        if at:
            plan.steady += at
            del plan.tokens[:at]
        self._steady = plan.steady

    def remove(self, work: Work) -> None:
        """A running request has ended."""
        at = self.running.index(work)
        del self.running[at]
        self._due -= work.due
        if at < self._steady:
            self._steady -= 1

    def take_out(self, name: str) -> Work | None:
        """Take a live request out of its queue, between two iterations; None if it has ended or was cloned."""
        work = self.loading.get(name) or next(
            (work for work in chain(self.running, self.loaded, self.waiting) if work.name == name), None
        )
        if work is None or work.family is not None:
            return None
        if work in self.running:
            self.remove(work)
            return work
        if name in self.loading:
            del self.loading[name]
        elif work in self.loaded:
            self.loaded.remove(work)
        else:
            self.waiting.remove(work)
        return work

    def announce(self, plan: Plan, iteration: int) -> None:
        """Tell the leader the changes by the iterations of the plan, of which ``iteration`` is the first."""
        waiting = len(self.waiting) + len(self.loading) + len(self.loaded)
        self.port.scheduled(plan, iteration, len(self.running), waiting)

    def _kept_for_loaded(self) -> int:
        """Tokens of the budget that running requests leave to loaded requests that have a seat and room to go on."""
        standing = self.port.standing
        budget, free = self.config.max_batch_tokens, self.pool.free_blocks
        seats = self.config.max_running - self._seats_taken()
        for work in self.loaded:
            if budget and work.name not in standing:
                seats -= 1 + work.due
                if seats < 0:
                    break
                count = min(work.left, budget)
                free -= self.groups * max(0, self._blocks(work.computed + count) - len(work.blocks))
                if free < 0:
                    break
                budget -= count
        return self.config.max_batch_tokens - budget

    def _seats_taken(self) -> int:
        """Seats of running requests and of their clones to come. A request that loads has none."""
        return len(self.running) + len(self.ending) + self._due

    def _run(self, work: Work) -> None:
        self.running.append(work)
        self._due += work.due

    def _blocks(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_tokens)

    def _schedule_running(self, plan: Plan, budget: int, now_ns: int) -> int:
        standing, running, tokens = self.port.standing, self.running, plan.tokens
        size, at, plain = self.block_tokens, plan.steady, self.config.plain
        while at < len(running):
            work = running[at]
            if work.decoding and budget > 0 and work.computed < len(work.blocks) * size and not work.skipped and (
                not standing or work.name not in standing
            ) and plain:  # by far the most common case: a token that has a place
                tokens.append((work, 1))
                plan.decoding += 1
                work.starved_ns = None
                budget -= 1
                at += 1
                continue
            count = min(work.left, budget)
            if count <= 0 or work.name in standing:
                self._leave_out(plan, work)
            elif (not work.due or not work.prefilled or self._fork(plan, at, now_ns)) and (
                self._room(plan, at, count, now_ns)
            ):
                self._schedule(plan, work, count)
                budget -= count
            elif at < len(running) and running[at] is work:
                self._leave_out(plan, work)
                if plan.blocked:
                    for other in running[at + 1 :]:
                        self._leave_out(plan, other)
                    break
            else:
                continue  # it was preempted; held requests may stand behind it
            at += 1
        return budget

    def _room(self, plan: Plan, at: int, count: int, now_ns: int) -> bool:
        """Give running request ``at`` the blocks for ``count`` more tokens.

        False when it stands back or was preempted.
        """
        work = self.running[at]
        self.pass_windows(work)
        need = self._blocks(work.computed + count) - len(work.blocks)
        if need <= 0:
            return True
        ids = self._take(plan, at, need * self.groups, now_ns)
        if ids is None:
            return False
        ids = self._deal(work, ids)
        if plan.tell_at_once:
            self.port.appended(work, ids)
        else:
            plan.appended.append(work)
            plan.appended_counts.append(need)
            plan.appended_ids += ids
        return True

    def _deal(self, work: Work, ids: list[int]) -> list[int]:
        """Append new blocks to a request, as many in each group. The result are those of the first group."""
        if self.groups == 1:
            work.blocks += ids
            return ids
        self._tell_shared(work, ids)
        each = len(ids) // self.groups
        for group, table in enumerate(work.tables):
            table.blocks += ids[group * each : (group + 1) * each]
        return ids[:each]

    def _tell_shared(self, work: Work, ids: list[int]) -> None:
        """Tell, before all else, that these places were given to a request, in whatever group."""
        if isinstance(self.pool, SharedPool):
            self.port.shared(work.name, ids, removed=self.pool.take_lost())

    def pass_windows(self, work: Work) -> None:
        """Give back the blocks that the attention windows of a request have passed, before it takes others.

        A held request keeps them, because a copy of them may wait for its hold.
        """
        if self.config.plain or work.name in self.port.held:
            return
        computed = work.settled if self.config.early_steps else work.computed
        tables, first = work.tables, self._before_first
        for group in (*range(1, 1 + first), 0, *range(1 + first, self.groups)):
            table = tables[group]
            before, passed = table.passed, passed_blocks(self.config.groups[group], computed, self.block_tokens)
            if passed <= before:
                continue
            ids = table.blocks[before:passed]
            table.blocks[before:passed] = [NO_PLACE] * len(ids)
            table.passed = passed
            if group:
                self.pool.release(ids)
                continue
            self.withhold(work.name, ids)
            kept = set(self.port.passed(work))
            self.give_back(work.name, [block for block in ids if block not in kept])

    def _take(self, plan: Plan, at: int, need: int, now_ns: int) -> list[int] | None:
        """Blocks for running request ``at``, or None when it stands back or was preempted."""
        work = self.running[at]
        ids = self.pool.allocate(need)
        while ids is None:
            if (plan.steady or plan.tokens) and self._patient(work, now_ns):
                return None
            victim = self._victim(at)
            if victim is None and (plan.steady or plan.tokens):
                return None  # its turn comes before a hold has to end
            victim = victim or self._last()
            if self.config.fenced_steps and victim.settled < victim.computed:
                plan.blocked = True
                return None
            self._preempt(plan, victim)
            if victim is work:
                return None
            ids = self.pool.allocate(need)
        return ids

    def _fork(self, plan: Plan, at: int, now_ns: int) -> bool:
        """Open the clones of running request ``at``, whose prompt is computed, behind it; False as of ``_room``.

        They share the full blocks of the prompt. Each has a partial last block of its own.
        """
        work = self.running[at]
        self.pass_windows(work)
        full = work.computed // self.block_tokens
        tail = len(work.blocks) - full
        ids = self._take(plan, at, tail * work.due * self.groups, now_ns)
        if ids is None:
            return False
        count, work.due = work.due, 0
        self._due -= count
        work.family = CloneFamily(work.request, count + 1)
        clones = []
        for index in range(count):
            clone = work.clone(index + 2)
            for mine, table in zip(work.tables, clone.tables, strict=True):
                table.blocks, table.passed = mine.blocks[:full], mine.passed
                self.pool.touch(table.held)
            clones.append(clone)
        own = [
            block for at in range(count)
            for block in self._deal(clones[at], ids[at * tail * self.groups : (at + 1) * tail * self.groups])
        ]
        self.running[at + 1 : at + 1] = clones
        self.cloned += count
        self.sampled += (count + 1) * work.sampled
        self.port.cloned(work, clones, own)
        return True

    def _victim(self, at: int) -> Work | None:
        """The request to preempt next, which is the last admitted that is not held.

        Candidates are running requests from ``at`` on, which had no turn in this iteration yet, and loaded requests. An
        engine that admits whole sequences takes no loaded request for a running one, as vLLM.
        """
        held, running = self.port.held, self.running[at:]
        loaded = self.loaded if not (running and self.config.whole_sequences) else ()
        return next((work for work in reversed([*running, *loaded]) if work.name not in held), None)

    def _last(self) -> Work:
        return self.loaded[-1] if self.loaded else self.running[-1]

    def _blocks_come_back(self) -> bool:
        """True if a request ends, or a copy runs whose end gives blocks back or lets a request go on: a held copy does
        not end."""
        return bool(self.ending) or not (self.withheld.keys() | self.loading.keys()) <= self.port.held

    def _patient(self, work: Work, now_ns: int) -> bool:
        if not self.withheld or self.withheld.keys() <= self.port.held:
            return False  # nothing comes back by itself
        if work.starved_ns is None:
            work.starved_ns = now_ns
        return now_ns - work.starved_ns < self.config.patience_ns

    def _leave_out(self, plan: Plan, work: Work) -> None:
        if not work.skipped:
            work.skipped = True
            plan.skipped.append(work.name)

    def _schedule(self, plan: Plan, work: Work, count: int) -> None:
        plan.tokens.append((work, count))
        work.starved_ns = None
        if work.skipped:
            work.skipped = False
            plan.unskipped.append(work.name)
        if not work.announced:
            work.announced = True
            (plan.resumed if work.preempted else plan.new).append(work.name)
        if work.prefilled:
            plan.decoding += 1
            if not work.decoding:
                work.decoding = True
                plan.first_tokens.append(work.name)
        else:
            plan.prefill_tokens += count
            plan.progressed.append(work.name)
            plan.positions.append(work.computed + count)
            if self.config.named_early:
                self._name(plan, work, count)

    def _schedule_loaded(self, plan: Plan, budget: int) -> int:
        """Requests whose load has ended, in the order of their admission. The budget that is left for others: none if
        the next of them finds no seat or no blocks, because nobody passes it."""
        standing = self.port.standing
        for work in list(self.loaded):
            if budget <= 0:
                break
            if work.name in standing or work not in self.loaded:
                continue
            if self._seats_taken() + work.due >= self.config.max_running:
                return 0
            if work.fetched:
                self._cache_fetched(work)
            count = min(work.left, budget)
            self.pass_windows(work)
            need = self.groups * max(0, self._blocks(work.computed + count) - len(work.blocks))
            ids = self.pool.allocate(need)
            while ids is None and not (plan.steady or plan.tokens or plan.blocked or self._blocks_come_back()):
                # Only requests that do not run could give blocks. The last of them does, else all wait for ever.
                victim = self._victim(0) or self._last()
                self._preempt(plan, victim)
                if victim is work:
                    break
                ids = self.pool.allocate(need)
            if ids is None:
                return 0
            if ids:
                self.port.appended(work, self._deal(work, ids))
            self.loaded.remove(work)
            self._run(work)
            self._schedule(plan, work, count)
            budget -= count
        return budget

    # --- admission ---

    def _admit(self, plan: Plan, budget: int) -> int:
        """Waiting requests, first come first served; a request that must ask again lets the next request try."""
        at = lookups = 0
        most = len(self.waiting) if self.config.whole_sequences else LOOKUPS_MAX
        while at < len(self.waiting) and budget > 0 and lookups < most:
            work = self.waiting[at]
            if self._seats_taken() + sum(1 + other.due for other in self.loaded) + work.due >= self.config.max_running:
                break
            places = self._found(work)
            prefix = len(places[0])
            found = self._look_up(work, prefix * self.block_tokens)
            lookups += 1
            if found.tokens is None or work.name in self.port.standing:
                at += 1
                continue
            computed = prefix * self.block_tokens + found.tokens
            wait = found.tokens > 0 and found.asynchronous
            count = 0 if wait else min(work.total - computed, budget)
            if not self._place(work, places, computed, count, wait=wait):
                self._refused = work
                break
            del self.waiting[at]
            work.stored = work.named = prefix
            work.computed = work.settled = computed
            self._tell_reused(plan, places[0])
            if found.tokens:
                self.loading[work.name] = work
            self.port.admitted(work, prefix, found.tokens)
            if not found.tokens:
                self._run(work)
                self._schedule(plan, work, count)
                budget -= count
        return budget

    def _place(self, work: Work, found: list[list[int]], computed: int, count: int, *, wait: bool) -> bool:
        """Give a request the places ``found``, without those that its windows have passed, and new ones behind them.

        False if there is no room for the ``count`` tokens behind ``computed``, or for the whole sequence where it
        waits for a load or the engine asks for that.
        """
        blocks = self._blocks(computed + count)
        passed = [passed_blocks(window, computed, self.block_tokens) for window in self.config.groups]
        kept = [places[gone:] if gone else places for places, gone in zip(found, passed, strict=True)]
        first = [max(len(found[0]), gone) for gone in passed]
        needs = [blocks - at for at in first]
        held, need = kept[0] if self.groups == 1 else list(chain.from_iterable(kept)), sum(needs)
        more = work.due * self.groups if work.request.prompt_tokens % self.block_tokens else 0
        if self.config.whole_sequences:
            more += max(0, self._whole(work, first) - need, self._reserved() if wait else 0)
        elif wait and self._others_go_on():
            more += self.config.most_held(work.total, self.block_tokens) - len(held) - need + self._owed()
        ids = None if more and not self.pool.fits(need + more, held) else self.pool.allocate(need, held)
        if ids is None:
            return False
        self._tell_shared(work, ids)
        at = 0
        for table, places, gone, new in zip(work.tables, kept, passed, needs, strict=True):
            table.blocks, table.passed = [NO_PLACE] * gone + places + ids[at : at + new], gone
            at += new
        return True

    def _reserved(self) -> int:
        """Blocks that requests whose prompts are not computed need for them: a load leaves these free, as in vLLM."""
        prefilling = [work for work in self.running if not work.prefilled]
        return sum([
            self._whole(work, [len(table.blocks) for table in work.tables])
            for work in chain(self.loading.values(), self.loaded, prefilling)
        ])

    def _whole(self, work: Work, first: list[int]) -> int:
        """Blocks from ``first`` of each group on that the whole sequence of a request needs, by vLLM's count."""
        config = self.config
        return sum([
            max(0, config.most_in(window, work.total, self.block_tokens) - at)
            for window, at in zip(config.groups, first, strict=True)
        ])

    def _found(self, work: Work) -> list[list[int]]:
        """The places, in each group, of the longest prefix that the engine itself has.

        Blocks before the window of a group may have none.
        """
        limit = (work.total - 1) // self.block_tokens
        if self.config.plain:
            return [self.pool.match(work.hashes, limit)]
        longest = None
        while True:
            found = [
                self._found_in(table, window, limit)
                for table, window in zip(work.tables, self.config.groups, strict=True)
            ]
            if longest is None:
                longest = min([len(places) for places, window in zip(found, self.config.groups, strict=True)
                               if not window], default=len(found[0]))
            limit = min(map(len, found))
            if all(len(places) == limit for places in found):
                work.junction = longest * self.block_tokens if longest > limit else 0
                return found

    def _found_in(self, table: Table, window: int, limit: int) -> list[int]:
        blocks = window_blocks(window, self.block_tokens)
        return self.pool.match_window(table.hashes, blocks, limit) if blocks else self.pool.match(table.hashes, limit)

    def _others_go_on(self) -> bool:
        """True if another request computes or will, and so gives blocks back one day; a hold may be for ever."""
        standing, held = self.port.standing, self.port.held
        return (any(work.name not in standing for work in self.running)
                or any(work.name not in held for work in chain(self.loading.values(), self.loaded)))

    def _owed(self) -> int:
        """Blocks that requests whose loads run or have ended still need for their prompts.

        Without this reservation loads are admitted by their prefixes alone, and their prompts then preempt others. Held
        requests are left out, because the time when they go on is not known.
        """
        held = self.port.held
        return sum(
            self.config.most_held(work.total, self.block_tokens) - sum([len(table.held) for table in work.tables])
            for work in chain(self.loading.values(), self.loaded) if work.name not in held
        )

    def _look_up(self, work: Work, computed_tokens: int) -> MatchAnswer:
        answer = self.port.looked_up(work.name, computed_tokens)
        if answer.tokens and computed_tokens + answer.tokens >= work.total:
            raise InternalError(f"the lookup of {work.name} leaves no token to compute: {answer}")
        return answer

    def take_hopeless(self) -> Work | None:
        """Take out the next request if it finds no room on a device that nobody uses."""
        work = self._refused
        if work is None or not self.config.whole_sequences or self.live > len(self.waiting) or (
            self.pool.free_blocks < self.pool.capacity_blocks
        ):
            return None
        self.waiting.remove(work)
        self._refused = None
        return work

    def made_way(self) -> bool:
        """Ask again for the refused request, as a polling engine does; True if a hold made way for it.

        The caller has nothing that runs or is to come, so no time passes in which the engine would ask again.
        """
        held = self.port.held
        if not held or self._refused is None:
            return False
        for _ in range(2):  # the second lookup tells of a refusal, and two refusals make a hold go on
            prefix = len(self._found(self._refused)[0])
            self._look_up(self._refused, prefix * self.block_tokens)
        return self.port.held != held

    def wake(self, name: str) -> None:
        """A load ended: take the computed tokens from the leader (fewer if the load failed)."""
        work = self.loading.pop(name, None)
        if work is None:
            return
        before, work.computed = work.stored, self.port.computed_tokens(name)
        work.stored = work.named = good = work.computed // self.block_tokens
        work.fetched = good - before
        if not self.config.whole_sequences:
            self._cache_fetched(work)
        self.loaded.append(work)

    def _cache_fetched(self, work: Work) -> None:
        """Others find the blocks that were loaded for a request. vLLM caches them when the request has a seat."""
        count, work.fetched = work.fetched, 0
        stored = {
            group: self._cache(work, group, max(work.stored - count, table.passed), work.stored)
            for group, table in enumerate(work.tables)
        }
        if self.groups > 1:
            self.port.shared("", [], stored=stored)

    def _cache(self, work: Work, group: int, first: int, end: int) -> list[int]:
        """Cache full blocks of a group of a request, as far as they are kept. The result are their hashes."""
        table, config, size = work.tables[group], self.config, self.block_tokens
        need = window_blocks(config.groups[group], size)
        if not need or config.retention is None:
            self.pool.store(table.blocks[first:end], table.hashes[first:end])
            return list(work.hashes[first:end])
        tails = (work.request.prompt_tokens - 1) // size, work.junction // size
        kept = [at for at in range(first, end) if is_kept(at, tails, need, config.retention, size)]
        self.pool.store([table.blocks[at] for at in kept], [table.hashes[at] for at in kept])
        return [work.hashes[at] for at in kept]

    def _name(self, plan: Plan, work: Work, count: int) -> None:
        """Cache the blocks of a prompt that ``count`` scheduled tokens fill."""
        full = (work.computed + count) // self.block_tokens
        if full <= work.named:
            return
        named: dict[int, list[int]] = {}
        for group, table in enumerate(work.tables):
            named[group] = self._cache(work, group, max(work.named, table.passed), full)
        work.named = full
        plan.named.append(work)
        if self.groups > 1:
            self.port.shared("", [], stored=named)

    def _tell_reused(self, plan: Plan, found: list[int]) -> None:
        """A request is to use the places ``found``. Those that this iteration computes count as full from now on."""
        for work in plan.named:
            last = min(work.named, len(found))
            while last > work.stored and found[last - 1] != work.blocks[last - 1]:
                last -= 1
            if last > work.stored:
                self.port.named(work, last - work.stored)
                work.stored = last

    def store(self, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]) -> None:
        """The last ``counts`` of the stored blocks of these requests have become full: in the first group ``ids``."""
        if self.config.groups[0] and self.config.retention is not None:
            for work, count in zip(works, counts, strict=True):
                self._cache(work, 0, max(work.stored - count, work.named), work.stored)
            self.store_others(works, counts)
            return
        if self.config.named_early:
            named = [work.named > at for work, count in zip(works, counts, strict=True)
                     for at in range(work.stored - count, work.stored)]
            ids = [block for block, known in zip(ids, named, strict=True) if not known]
            hashes = [key for key, known in zip(hashes, named, strict=True) if not known]
        self.pool.store(ids, hashes)
        self.store_others(works, counts)

    def store_others(self, works: Sequence[Work], counts: Sequence[int]) -> None:
        """As ``store``, in the groups beside the first."""
        if self.groups == 1:
            return
        stored: dict[int, list[int]] = {}
        for work, count in zip(works, counts, strict=True):
            for group, table in enumerate(work.others, start=1):
                first = max(work.stored - count, work.named, table.passed)
                stored.setdefault(group, []).extend(self._cache(work, group, first, work.stored))
        self.port.shared("", [], stored=stored)

    # --- taking blocks back ---

    def _preempt(self, plan: Plan, victim: Work) -> None:
        if victim in self.loaded:
            self.loaded.remove(victim)
        else:
            self.running.remove(victim)
            self._due -= victim.due
        held = victim.held
        self.withhold(victim.name, held)
        kept = set(self.port.preempted(victim))
        self.release_others(victim, before_first=True)
        self.give_back(victim.name, [block for block in held if block not in kept])
        self.release_others(victim)
        if victim.prefilled:
            victim.total = victim.computed + 1
        if victim.name in plan.skipped:  # it was left out before it had to make way
            plan.skipped.remove(victim.name)
        victim.blocks = []
        victim.computed = victim.stored = victim.named = victim.fetched = victim.passed = 0
        victim.announced = victim.prefilled = victim.decoding = victim.skipped = False
        victim.preempted = True
        victim.starved_ns = None
        self.waiting.appendleft(victim)
        self.preemptions += 1
        plan.preempted += 1

    def release_others(self, work: Work, *, before_first: bool = False) -> None:
        """Release the blocks of a request in the groups beside the first: no copy reads them. ``before_first``: only in
        those that the engine numbers below the first, and releases before it."""
        for table in work.others[: self._before_first] if before_first else work.others:
            self.pool.release(table.held)
            table.blocks, table.passed = [], 0

    def withhold(self, name: str, ids: list[int]) -> None:
        """Keep blocks of a request from reuse until ``give_back``."""
        if ids:
            self.withheld.setdefault(name, []).extend(ids)

    def pin(self, ids: list[int]) -> None:
        """A copy reads these cached blocks: withhold them, under no name, until they are given back."""
        self.pool.touch(ids)
        self.withhold("", ids)

    def give_back(self, name: str, ids: list[int]) -> None:
        """Withheld blocks may be reused, each as often as it is named; blocks not withheld any more are passed over."""
        kept = self.withheld.pop(name, [])
        if kept == ids:
            self.pool.release(kept)
            return
        if len(set(kept)) == len(kept):
            returned = set(ids)
            freed = [block for block in kept if block in returned]
            left = [block for block in kept if block not in returned] if len(freed) < len(kept) else []
        else:  # several copies read a block
            named, freed, left = Counter(ids), [], []
            for block in kept:
                (freed if named[block] > 0 else left).append(block)
                named[block] -= 1
        self.pool.release(freed)
        if left:
            self.withheld[name] = left
