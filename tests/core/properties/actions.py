"""What an engine, a mover and people can do to a leader, each as one method with plain arguments.

Law of this file: an action that makes no sense now does nothing, so any list of actions is a valid run; the state
machine and the random walks share it, and a failing list can be cut down by leaving out lines.
"""

from collections.abc import Mapping

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import Clock, FinishReason, ResetMode, SlotState
from tests.core.engine_model import hashes_of
from tests.core.script import Script

WORDS = ("abcd", "abcx", "ab", "abyz", "mnop", "mn", "qrstu", "", "abcdefgh", "abcdefgz")
"""Few words with shared beginnings: hits, copies of one hash, and short prompts are all common."""
LIVE_MAX = 6
OUTPUT_MAX = 9
"""Tokens that a request produces at most: three blocks."""


class Actions:
    """All actions on one script; ``number`` picks one of what there is."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.count = 0

    def pick(self, number: int, *, running: bool | None = None, admitted: bool | None = None) -> str | None:
        """One of the live requests of a kind, None when there is none."""
        names = [
            name for name, one in self.script.engine.requests.items()
            if (running is None or one.announced == running) and (admitted is None or bool(one.ids) == admitted)
        ]
        return names[number % len(names)] if names else None

    # --- the engine ---

    def arrive(self, word: str, tail: int, priority: int = 0) -> str | None:
        if len(self.script.engine.requests) >= LIVE_MAX:
            return None
        self.count += 1
        name = f"r{self.count}"
        self.script.arrive(name, word, tail=tail, priority=priority)
        return None if self.script.rejected else name

    def look_up(self, number: int) -> None:
        name = self.pick(number, admitted=False)
        if name is not None:
            self.script.lookup(name)

    def admit(self, number: int, all_of_it: bool = True) -> None:
        name = self.pick(number, admitted=False)
        if name is not None and self.script.lookup(name) is not None:
            external = self.script.engine.requests[name].external or 0
            self.script.allocate(name, external=external if all_of_it else 0)

    def schedule(self, chunk: int, left_out: int) -> None:
        if self.script.engine.plan is None and not self.script.paused:
            names = [name for at, name in enumerate(self.script.engine.requests) if not left_out >> at & 1]
            self.script.schedule(only=names, chunk=chunk)

    def complete(self) -> None:
        """The iteration ends, and with it the requests that have produced enough."""
        if self.script.engine.plan is not None:
            self.script.complete()
            for name, request in list(self.script.engine.requests.items()):
                if request.total - request.prompt > OUTPUT_MAX:
                    self.script.finish(name, FinishReason.LENGTH)

    def run_on(self, times: int) -> None:
        self.complete()
        for _ in range(times):
            if not self.script.paused:
                self.script.schedule()
                self.complete()

    def preempt(self, number: int) -> None:
        name = self.pick(number, admitted=True)
        if name is not None:
            self.script.preempt(name)

    def finish(self, number: int, reason: FinishReason, later: bool = False) -> None:
        """``later``: the engine keeps the blocks until ``free_finished``."""
        name = self.pick(number)
        if name is not None:
            self.script.finish(name, reason, later=later)

    def free_finished(self) -> None:
        self.script.free_finished()

    def clone(self, number: int, copies: int) -> None:
        name = self.pick(number, running=True)
        if name is not None and self.script.engine.plan is None and len(self.script.engine.requests) < LIVE_MAX:
            clones = tuple(f"r{self.count + at + 1}" for at in range(copies))
            self.count += copies
            self.script.clone(name, *clones)

    def serve(self, word: str, steps: int, copies: bool) -> None:
        """The common case in one go, so that tiers fill up."""
        name = self.arrive(word, 2)
        if name is None or not self.script.admit(name):
            return
        if copies:
            self.script.move_all()
        self.run_on(steps)
        if name in self.script.engine.requests:
            self.script.finish(name)

    # --- the mover ---

    def _operation(self, number: int, orders: Mapping[int, object]) -> int | None:
        return sorted(orders)[number % len(orders)] if orders else None

    def start(self, number: int) -> None:
        operation = self._operation(number, self.script.mover.queued)
        if operation is not None:
            self.script.start(operation)

    def report(self, number: int, rank: int, bad: int | None) -> None:
        """A rank reports; ``bad``: which block it could not copy, -1 for all."""
        operation = self._operation(number, self.script.mover.running)
        if operation is None:
            return
        missing = self.script.mover.missing(operation)
        rank = missing[rank % len(missing)]
        if bad is None:
            self.script.done(operation, rank)
        else:
            blocks = self.script.mover.running[operation].blocks
            self.script.fail(operation, [] if bad < 0 else [bad % blocks], rank)

    def report_again(self, number: int, rank: int, well: bool) -> None:
        """A report that nobody waits for: of an operation that has ended, or of a rank that has reported."""
        script = self.script
        orders = {order.operation: order for order in script.mover.ended}
        orders.update((one, order) for one, order in script.mover.running.items() if script.mover.reported[one])
        operation = self._operation(number, orders)
        if operation is None:
            return
        told = sorted(script.mover.reported[operation])
        rank = told[rank % len(told)]
        refused = script.state.totals.completions_refused
        if well:
            script.tell(st.TransferFinished, operation, orders[operation].epoch, rank)
        else:
            script.tell(st.TransferFailed, operation, orders[operation].epoch, rank, "again", b"")
        assert script.state.totals.completions_refused == refused + 1

    def move_all(self) -> None:
        self.script.move_all()

    # --- the shell and people ---

    def deadline(self, number: int) -> None:
        due = sorted(self.script.deadlines)
        if due:
            self.script.pass_deadline(due[number % len(due)])

    def reset(self, mode: ResetMode) -> None:
        self.script.reset(mode)

    def drain(self) -> None:
        self.script.tell(st.DrainRequested, 1_000_000, source=0)

    def breakpoints(self, owner: str, specs: list[BreakpointSpec]) -> None:
        self.script.breaks(*specs, owner=owner)

    def go_on(self, number: int, until: SlotState | None) -> None:
        holds = sorted(self.script.state.holds)
        if holds:
            self.script.go_on(holds[number % len(holds)], until)

    def step_slot(self, number: int) -> None:
        holds = sorted(self.script.state.holds)
        if holds:
            self.script.tell(st.SlotStepped, holds[number % len(holds)], "me", source=0)

    def freeze(self) -> None:
        self.script.tell(st.FreezeRequested, "me", 10**9, source=0)

    def thaw(self) -> None:
        self.script.tell(st.ThawRequested, "you", source=0)

    def run_for(self, duration_ns: int) -> None:
        self.script.tell(st.RunForRequested, duration_ns, "me", 10**9, source=0)

    def step_pipeline(self) -> None:
        self.script.tell(st.PipelineStepped, "me", source=0)

    def skip_candidates(self, number: int) -> None:
        holds = sorted(self.script.state.holds)
        if holds:
            self.script.tell(st.CandidateSkipRequested, holds[number % len(holds)], "me", source=0)

    def announce(self, number: int, entry: int) -> None:
        name = self.pick(number)
        if name is not None:
            self.script.tell(st.CallAnnounced, name, entry)

    def lease(self, owner: str, live: bool) -> None:
        self.script.tell(st.LeaseGranted if live else st.LeaseLost, owner, source=0)

    def disarm(self) -> None:
        self.script.tell(st.Disarmed, "me", source=0)
        assert not self.script.state.holds

    def nonsense(self, number: int, what: int) -> None:
        """What no sound engine says: it is refused, and nothing but the count changes."""
        script = self.script
        name = self.pick(number) or "nobody"
        kinds = (
            (st.RequestArrived, name if name != "nobody" else "", pack_hashes(hashes_of("ab")), 9, 9, 0, None),
            (st.MatchRequested, name, 3),
            (st.BlocksAllocated, name, pack_ids([0, 0]), 0),
            (st.RequestFinished, "nobody", b"", FinishReason.STOP),
            (st.RequestPreempted, "nobody"),
            (st.IterationFinished, 10**6, (), (), b"", b""),
        )
        kind, *fields = kinds[what]
        script.tell(kind, *fields)
        assert script.rejected

    # --- the end ---

    def end(self) -> None:
        """Everybody stops; nothing is left behind, neither in the facts nor in the memory."""
        script = self.script
        self.complete()
        self._unheld_ones_end()
        script.tell(st.Disarmed, "me", source=0)
        self.complete()
        for name in list(script.engine.requests):
            script.finish(name)
        script.move_all()
        script.free_finished()
        state, memory = script.state, script.leader.memory
        for what in (state.slots, state.candidates, state.operations, state.batches, state.late, state.holds):
            assert not what
        assert not script.engine.withheld
        for pool in state.pools:
            assert not any(pool.refs)
            assert not pool.quarantined
        left = {
            name: getattr(memory, name) for name in (
                "pending", "undispatched", "complete", "ending", "batch_of", "drawn_from", "loads", "lost_at", "fences",
                "evaluated", "place_limit", "stepping", "until", "deadlines",
            ) if getattr(memory, name)
        }
        assert not left, left
        assert not [one for one, (clock, _) in script.deadlines.items() if clock is Clock.WALL]

    def _unheld_ones_end(self) -> None:
        """Held slots stop nobody else: with all copies done, every other request can end (I12)."""
        script = self.script
        script.breaks(owner="me")
        script.breaks(owner="you")
        if script.state.pipeline_closed or script.leader.gate is not None:
            return  # everything stands still, or a step may stop somebody on the way
        script.move_all()
        for name in list(script.engine.requests):
            if script.slot(name).hold is None:
                script.finish(name)
        script.move_all()
        assert all(slot.hold is not None for slot in script.state.slots.values())
