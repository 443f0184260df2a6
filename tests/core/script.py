"""A leader driven by sentences: ``script.arrive("a", "wxyz")``, ``script.lookup("a")``, ``script.allocate("a")``.

Law of this file: every stimulus, whoever sends it, is followed by all checks: the mirror folded from the events has
the leader's digest, a leader restored from the keyframe before it did the same, the audit and the oracles are silent.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvbm_console.core import events as ev
from kvbm_console.core import instructions as ins
from kvbm_console.core import stimuli as st
from kvbm_console.core.audit import Lineage, audit
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes, unpack_ids
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.describe import describe
from kvbm_console.core.ids import Authority, Clock, FinishReason, ResetMode, Site, SlotState, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.snapshots import decode_facts, digest, encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.dispatch import Dispatcher, differences, start_leader

from . import oracle
from .engine_model import BLOCK, EngineModel, Plan, Request, hashes_of
from .mover_model import MoverModel

TICK_NS = 1_000
ENGINE = 1
"""Source of the engine."""
ROUNDS_MAX = 50
"""Rounds of copies that may follow from copies: down a tier each time, so a handful."""


class Script:
    """One leader (or ``hosts`` of them) with a small engine, a mover that waits for orders, and all checks.

    ``make`` builds a host's leader; ``twin`` reruns every stimulus on a leader restored from the keyframe before it.
    """

    def __init__(
        self, *, g1: int = 16, g2: int = 16, g3: int = 0, hosts: int = 1, twin: bool = True, checks: bool = True,
        make: Callable[[LeaderConfig, int], Leader] | None = None, **config: Any,
    ) -> None:
        self.config = LeaderConfig(block_tokens=BLOCK, g2_blocks=g2, g3_blocks=g3, **config)
        build = make or (lambda config, host: Leader(config, check=checks))
        leaders = [build(self.config, host) for host in range(hosts)]
        self.now = 0
        self.dispatcher = Dispatcher(leaders[0], lambda: self.now, publish=self._published, more_hosts=leaders[1:],
                                     compare_every=1)
        self.hosts = leaders
        self.leader = leaders[0]
        self.mirror = CacheState()
        self.twin = twin
        self.checks = checks
        self.engine = EngineModel(g1)
        self.bytes = oracle.Bytes()
        self.holders = oracle.Holders()
        self.staging = oracle.StagingTold()
        self.statuses = oracle.Statuses()
        self.fates = oracle.Fates()
        self.lineage = Lineage()
        self.deadlines: dict[int, tuple[Clock, int]] = {}
        self.woken: list[str] = []
        self.released: list[tuple[str, list[int]]] = []
        self.zeroed: list[int] = []
        self.paused = False
        self.unfreed: list[tuple[str, list[int]]] = []
        """Places of finished requests that the engine has not taken back yet (``free_finished``)."""
        self.ever_lost: set[int] = set()
        self.events: list[ev.Event] = []
        """All events so far."""
        self.last: list[ev.Event] = []
        """Events of the last stimulus."""
        self.asked: list[ins.Instruction] = []
        """Instructions of the last stimulus."""
        self.stimuli: list[st.Stimulus] = []
        self._before = CacheState()
        self._keyframe: tuple[bytes, bytes] | None = None
        self.mover = MoverModel(self.bytes, self.config.ranks)
        self._frame()
        start_leader(self.dispatcher)
        self.device = len(self.state.pools)
        self.tell(st.PoolDeclared, 0, 0, Tier.G1, "GPU", g1, BLOCK, Authority.ENGINE)
        self.mover.pools = {pool.info.tier: pool.info.pool for pool in self.state.pools}

    # --- one stimulus and what follows it ---

    def tell(self, kind: Callable[..., st.Stimulus], *fields: Any, source: int = ENGINE) -> Any:
        """Send one stimulus; the entry point's answer. Its instructions have been carried out."""
        self.now += TICK_NS
        self._frame()
        outcome = self.dispatcher.submit_from(source, None, kind, *fields)
        for instruction in outcome.instructions:
            self._carry_out(instruction)
        if self.checks:
            self._check()
        return outcome.result

    def _frame(self) -> None:
        self._keyframe = (encode_facts(self.state), self.leader.export()) if self.twin else None
        self._before = decode_facts(encode_facts(self.state)) if self.checks else self.state

    def _published(self, stimulus: st.Stimulus, outcome: Any) -> None:
        self.stimuli.append(stimulus)
        self.last, self.asked = outcome.events, outcome.instructions
        self.events += self.last
        for event in self.last:
            self.mirror.apply(event)
            if self.checks:
                self.staging.see(event)
                self.statuses.see(event)
                self.fates.see(event, max(self.state.pools, key=lambda pool: pool.info.tier).info.pool)
                if isinstance(event, (ev.BlocksEvicted, ev.BlocksDropped)):
                    self.ever_lost.update(self._hashes_lost(event))
        assert digest(self.mirror) == self.leader.digest(), f"the mirror differs after {stimulus}"
        if self._keyframe is not None:
            twin = Leader.restore(self.config, *self._keyframe)
            again = twin.handle(stimulus)
            assert again.events == outcome.events, f"a restored leader decides otherwise on {stimulus}"
            assert again.instructions == outcome.instructions
            assert again.result == outcome.result
            assert twin.digest() == self.leader.digest()
            ours, theirs = (msgspec.msgpack.decode(one.export()) for one in (self.leader, twin))
            assert theirs == ours, differences(ours, theirs)
            self._keyframe = (encode_facts(self.state), self.leader.export())

    def _hashes_lost(self, event: ev.BlocksEvicted | ev.BlocksDropped) -> list[int]:
        if isinstance(event, ev.BlocksEvicted):
            return unpack_hashes(event.hashes)
        before = self._before.pools[event.pool]
        return [before.hash_of[place] for place in unpack_ids(event.ids)]

    def _check(self) -> None:
        assert audit(self.state) == []
        assert self.engine.pool.audit(self.engine.holders()) == []
        oracle.check_memory(self.leader, self.ever_lost)
        self.fates.check(self.leader)
        self.bytes.check(self.state)
        self.holders.check(self.state, self.engine, self.device, self.mover.orders, self.staging.of,
                           self.leader.memory.undispatched)
        self.statuses.check(self.state)
        assert self.lineage.saw(self.last, self.state) == []
        oracle.check_holds(self._before, self.state, self.last, self.asked)
        oracle.check_hits(self.state)
        assert self.paused == self.state.engines_paused

    def _carry_out(self, order: ins.Instruction) -> None:
        if isinstance(order, ins.StartTransfer):
            self.mover.queue(order)
        elif isinstance(order, ins.CancelTransfer):
            self.mover.cancel(order.operation)
        elif isinstance(order, ins.WakeRequest):
            self.woken.append(order.request)
            request = self.engine.requests[order.request]
            self.engine.woken(request, self.dispatcher.port(ENGINE).computed_tokens(order.request))
        elif isinstance(order, ins.ReleaseDeviceBlocks):
            ids = unpack_ids(order.ids)
            self.released.append((order.request, ids))
            self.engine.give_back(order.request, ids)
        elif isinstance(order, ins.PinDeviceBlocks):
            ids = unpack_ids(order.ids)
            self.engine.pool.touch(ids)
            self.engine.withhold("", ids)
        elif isinstance(order, ins.SetDeadline):
            self.deadlines[order.deadline] = (order.clock, self.now + order.after_ns)
        elif isinstance(order, ins.ClearDeadline):
            self.deadlines.pop(order.deadline, None)
        elif isinstance(order, ins.ClearDevicePool):
            self.engine.clear(unpack_ids(order.keep))
            self.unfreed.clear()
        elif isinstance(order, ins.PauseEngine):
            assert not self.paused
            self.paused = True
        elif isinstance(order, ins.ResumeEngine):
            assert self.paused
            self.paused = False
        elif isinstance(order, ins.ZeroBlocks):
            self.zeroed.append(order.pool)
        else:
            raise AssertionError(f"nobody carries out {order}")

    # --- requests ---

    def arrive(self, name: str, word: str, *, tail: int = 2, out: int = 100, priority: int = 0) -> None:
        """A request whose prompt is ``word``, a block for each letter, and ``tail`` more tokens."""
        prompt = len(word) * BLOCK + tail
        self.tell(st.RequestArrived, name, pack_hashes(hashes_of(word)), prompt, out, priority, None)
        if not self.rejected:
            self.engine.requests[name] = Request(name, word, hashes_of(word), prompt, prompt)

    def lookup(self, name: str) -> int | None:
        """Tokens found below G1 behind the engine's own prefix; None: ask again."""
        request = self.engine.requests[name]
        answer = self.tell(st.MatchRequested, name, len(self.engine.local_prefix(request)) * BLOCK)
        request.external = None if answer is None else answer.tokens
        return request.external

    def allocate(self, name: str, *, external: int | None = None) -> bool:
        """Blocks for the whole prompt, behind the own prefix; False: no room (and nothing was told)."""
        engine, request = self.engine, self.engine.requests[name]
        if external is None:
            external = request.external or 0
        prefix = engine.local_prefix(request)
        new = engine.pool.allocate(engine.blocks_for(request.total) - len(prefix), prefix)
        if new is None:
            return False
        self.bytes.overwrite(self.device, new)
        request.ids = prefix + new
        request.reused = request.stored = len(prefix)
        request.computed = len(prefix) * BLOCK + external
        request.loading = external > 0
        self.tell(st.BlocksAllocated, name, pack_ids(request.ids), external)
        return True

    def admit(self, name: str) -> bool:
        """Look up and allocate; False when one of them did not succeed."""
        return self.lookup(name) is not None and self.allocate(name)

    def grow(self, request: Request, tokens: int) -> list[int] | None:
        """Further blocks so that ``tokens`` have places; not told yet. None: no room."""
        need = self.engine.blocks_for(tokens) - len(request.ids)
        new = self.engine.pool.allocate(max(0, need))
        if new:
            self.bytes.overwrite(self.device, new)
            request.ids = request.ids + new
        return new

    def preempt(self, name: str) -> list[int]:
        """Take the blocks back; the fenced ones."""
        engine, request = self.engine, self.engine.requests[name]
        ids = request.ids
        engine.preempted(request)
        engine.withhold(name, ids)
        return unpack_ids(self.tell_withheld(st.RequestPreempted, name, give=lambda answer: [
            block for block in ids if block not in unpack_ids(answer.ids)
        ]).ids)

    def finish(self, name: str, reason: FinishReason = FinishReason.STOP, *, later: bool = False) -> bool:
        """Finish; whether the blocks stay allocated. ``later``: the engine takes them back by ``free_finished``."""
        request = self.engine.requests[name]
        ids = request.ids
        self.engine.forget(name)
        self.engine.withhold(name, ids)

        def give(answer: Any) -> list[int]:
            if later and not answer.delay_free:
                self.unfreed.append((name, ids))
            return [] if later or answer.delay_free else ids

        return bool(self.tell_withheld(st.RequestFinished, name, pack_ids(ids), reason, give=give).delay_free)

    def free_finished(self) -> None:
        """The engine takes back what it kept of finished requests; the leader gave it up when they finished."""
        for name, ids in self.unfreed:
            self.engine.give_back(name, ids)
        self.unfreed.clear()
        if self.checks:
            self._check()

    def tell_withheld(self, kind: Callable[..., st.Stimulus], name: str, *fields: Any,
                      give: Callable[[Any], list[int]]) -> Any:
        """As ``tell``, for a call whose blocks are withheld first and given back as the answer says."""
        self.now += TICK_NS
        self._frame()
        outcome = self.dispatcher.submit_from(ENGINE, None, kind, name, *fields)
        assert outcome.result is not None, [describe(event) for event in outcome.events]
        self.engine.give_back(name, give(outcome.result))
        for instruction in outcome.instructions:
            self._carry_out(instruction)
        if self.checks:
            self._check()
        return outcome.result

    def abort(self, name: str) -> bool:
        return self.finish(name, FinishReason.ABORTED)

    def clone(self, name: str, *clones: str) -> tuple[int, ...]:
        """Continue a request as several; the slots of the clones, () when refused or without room."""
        engine, parent = self.engine, self.engine.requests[name]
        shared = parent.ids[: parent.stored]
        tail = len(parent.ids) - len(shared)
        own = engine.pool.allocate(tail * len(clones), shared * len(clones)) if tail <= 1 else None
        if own is None:
            return ()
        self.bytes.overwrite(self.device, own)
        for at, clone in enumerate(clones):
            mine = own[at * tail : (at + 1) * tail]
            if clone in engine.requests:
                engine.pool.release(shared + mine)
                continue
            engine.requests[clone] = Request(
                clone, parent.word, list(parent.hashes), parent.prompt, parent.total, ids=shared + mine,
                reused=parent.reused, computed=parent.computed, stored=parent.stored, announced=parent.announced,
                decoding=parent.decoding, skipped=parent.skipped,
            )
        answer = self.tell(st.RequestCloned, name, clones, pack_ids(own))
        return () if answer is None else answer.slots

    # --- iterations ---

    def schedule(self, *, only: Iterable[str] | None = None, chunk: int = 1_000) -> Plan:
        """Form an iteration of all requests that can be in it (or ``only`` these); prefills go ``chunk`` tokens."""
        engine = self.engine
        engine.iteration += 1
        plan = engine.plan = Plan(engine.iteration)
        lists: dict[str, list[Any]] = {key: [] for key in (
            "new", "resumed", "skipped", "unskipped", "first", "progressed", "positions", "appended", "counts", "ids"
        )}
        wanted = None if only is None else set(only)
        for name, request in engine.requests.items():
            if not request.ids or request.loading:
                continue
            out = name in self.state.standing or (wanted is not None and name not in wanted)
            if not out:
                out = not self._take_part(request, plan, lists, chunk)
            if out and request.announced and not request.skipped:
                request.skipped = True
                lists["skipped"].append(name)
        self.tell(
            st.IterationScheduled, engine.iteration, 1, tuple(lists["new"]), tuple(lists["resumed"]), (),
            tuple(lists["skipped"]), tuple(lists["unskipped"]), tuple(lists["first"]), tuple(lists["progressed"]),
            tuple(lists["positions"]), tuple(lists["appended"]), tuple(lists["counts"]), pack_ids(lists["ids"]),
            len(plan.members), len(engine.requests) - len(plan.members),
        )
        assert not self.rejected, self.why
        return plan

    def _take_part(self, request: Request, plan: Plan, lists: dict[str, list[Any]], chunk: int) -> bool:
        full = request.computed == request.total - 1 and request.announced and request.total > request.prompt
        prefill = not request.decoding and not full
        to = min(request.total, request.computed + chunk) if prefill else request.computed + 1
        new = self.grow(request, to)
        if new is None:
            return False
        if new:
            lists["appended"].append(request.name)
            lists["counts"].append(len(new))
            lists["ids"] += new
        if not request.announced:
            request.announced = True
            lists["resumed" if request.preempted else "new"].append(request.name)
        if request.skipped:
            request.skipped = False
            lists["unskipped"].append(request.name)
        if prefill:
            lists["progressed"].append(request.name)
            lists["positions"].append(to)
        elif not request.decoding:
            request.decoding = True
            lists["first"].append(request.name)
        request.computed = to
        plan.members[request.name] = to
        return True

    def complete(self) -> None:
        """The iteration ends: blocks are full, every request with all tokens computed has one more."""
        engine, plan = self.engine, self.engine.plan
        assert plan is not None
        engine.plan = None
        names, counts, ids, hashes = [], [], [], []
        for name in plan.members:
            request = engine.requests[name]
            full = request.computed // BLOCK
            if full > request.stored:
                keys = [request.hash_at(at) for at in range(request.stored, full)]
                places = request.ids[request.stored : full]
                engine.pool.store(places, keys)
                self.bytes.write(self.device, places, keys)
                names.append(name)
                counts.append(full - request.stored)
                ids += places
                hashes += keys
                request.stored = full
            if request.computed == request.total:
                request.total += 1
        self.tell(
            st.IterationFinished, plan.iteration, tuple(names), tuple(counts), pack_ids(ids), pack_hashes(hashes)
        )
        assert not self.rejected, self.why

    def step(self, times: int = 1, **how: Any) -> None:
        """Iterations, formed and finished."""
        for _ in range(times):
            self.schedule(**how)
            self.complete()

    # --- transfers, deadlines, resets ---

    def start(self, operation: int) -> None:
        """The mover begins a queued copy."""
        order = self.mover.start(operation)
        self.tell(st.TransferStarted, operation, order.epoch)

    def done(self, operation: int, rank: int = 0) -> None:
        """A rank has copied its part."""
        order = self.mover.report(operation, rank, set())
        self.tell(st.TransferFinished, operation, order.epoch, rank)

    def fail(self, operation: int, failed: Iterable[int] = (), rank: int = 0) -> None:
        """A rank could not copy these blocks (none named: all)."""
        bad = list(failed)
        order = self.mover.report(operation, rank, set(bad) or None)
        self.tell(st.TransferFailed, operation, order.epoch, rank, "link down", pack_ids(bad))

    def move_all(self) -> None:
        """Carry out every copy, also those that follow from it."""
        rounds = 0
        while self.mover.queued or self.mover.running:
            rounds += 1
            assert rounds < ROUNDS_MAX, "copies follow from copies without an end"
            for operation in list(self.mover.queued):
                self.start(operation)
            for operation in list(self.mover.running):
                for rank in self.mover.missing(operation):
                    self.done(operation, rank)

    def pass_deadline(self, deadline: int) -> None:
        clock, due = self.deadlines.pop(deadline)
        if clock is Clock.ENGINE:
            self.now = max(self.now, due)
        self.tell(st.DeadlinePassed, deadline, source=0)

    def reset(self, mode: ResetMode = ResetMode.LOGICAL) -> None:
        self.tell(st.ResetRequested, mode, source=0)
        # Copies that run go on by themselves; those that wait were cancelled.
        assert not self.mover.queued

    # --- breakpoints ---

    def breaks(self, *specs: BreakpointSpec, owner: str = "me") -> tuple[int, ...]:
        """Set all breakpoints of an owner; their ids."""
        return tuple(verdict.id for verdict in self.tell(st.BreakpointsReplaced, owner, specs, source=0))

    def stop_at(self, site: Site = Site.TRANSITION_DID, to: SlotState | None = None, owner: str = "me", **fields: Any
                ) -> int:
        """One breakpoint, replacing those of the owner."""
        return self.breaks(BreakpointSpec(site=site, to_state=to, **fields), owner=owner)[0]

    def go_on(self, hold: int | None = None, until: SlotState | None = None) -> None:
        self.tell(st.HoldContinued, hold, "me", until, source=0)

    # --- questions ---

    @property
    def state(self) -> CacheState:
        return self.leader.state

    @property
    def rejected(self) -> bool:
        """Whether the last stimulus was refused."""
        return any(type(event) is ev.StimulusRejected for event in self.last)

    @property
    def why(self) -> str:
        """The last refusal."""
        return next((event.why for event in self.last if isinstance(event, ev.StimulusRejected)), "")

    def slot(self, name: str) -> SlotFacts:
        slot = self.state.slot_named(name)
        assert slot is not None, f"no slot of {name!r}"
        return slot

    def state_of(self, name: str) -> SlotState:
        return self.slot(name).state

    def operation_of(self, name: str) -> int:
        """The one open operation of a request."""
        numbers = [
            self.state.candidates[one].operation for one in self.slot(name).outstanding
            if self.state.candidates[one].operation is not None
        ]
        assert len(numbers) == 1, numbers
        return numbers[0]  # type: ignore[return-value]

    def told(self, kind: type[Any]) -> list[Any]:
        """The events of a kind in the last stimulus."""
        return [event for event in self.last if type(event) is kind]

    def ever(self, kind: type[Any]) -> list[Any]:
        """All events of a kind."""
        return [event for event in self.events if type(event) is kind]

    def story(self) -> str:
        """All events as text, for a failing test."""
        return "\n".join(f"{event.seq:4} {type(event).__name__} {describe(event)}" for event in self.events)
