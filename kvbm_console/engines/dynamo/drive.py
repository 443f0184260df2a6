"""Our leader, driven by the calls of a Dynamo leader recording.

Only this file fills in the gaps of the recording. An iteration ends with the next call of its scheduler. A request is
preempted at its next lookup, or when its blocks go to another request. Copies arrive at once, because the recording has
no times of copies.

Law of this file: the engine's side is taken from the recording unchanged. A call that our leader refuses is counted
with its line, and the import goes on.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvbm_console.core import instructions as ins
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import REQUEST_ID_BYTES_MAX, LeaderConfig
from kvbm_console.core.events import StimulusRejected
from kvbm_console.core.ids import EMPTY_HASH, Authority, FinishReason, ResetMode, SlotState, Tier
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.dispatch import MEDIUM_OF, Dispatcher, start_leader
from kvbm_console.engines.dynamo import lines as dy
from kvbm_console.simulator.hashing import Chain

SOURCE: Final = 1
SHOWN_MAX: Final = 100
"""Refusals and different answers that are listed; all are counted."""
_SKIPPED: Final = (SlotState.SKIPPED_PREFILL, SlotState.SKIPPED_DECODE)


class OtherAnswer(msgspec.Struct, frozen=True):
    """A call that our leader answered differently or refused."""

    line: int
    action: str
    request: str
    theirs: str
    ours: str


class ImportReport(msgspec.Struct):
    """The counts of an import."""

    lines: int = 0
    requests: int = 0
    iterations: int = 0
    lookups: int = 0
    lookups_equal: int = 0
    theirs_matched_tokens: int = 0
    ours_matched_tokens: int = 0
    finishes: int = 0
    finishes_equal: int = 0
    preempted: int = 0
    """Preemptions that the recording does not name."""
    refused: int = 0
    passed_over: dict[str, int] = {}
    """Calls that a leader does not need, and unknown calls, by action."""
    others: list[OtherAnswer] = []
    """The first ``SHOWN_MAX`` answers that differ and calls that were refused."""


class _Request(msgspec.Struct):
    prompt_tokens: int
    chain: Chain


class _AtOnce:
    """A mover whose copies arrive at their start."""

    def __init__(self, drive: "Drive") -> None:
        self._drive = drive

    def start(self, order: ins.StartTransfer) -> None:
        """Report the transfer as started, and as finished on every rank."""
        submit = self._drive.dispatcher.submit
        submit(st.TransferStarted, order.operation, order.epoch)
        for rank in range(order.ranks):
            submit(st.TransferFinished, order.operation, order.epoch, rank)

    def cancel(self, operation: int) -> None:
        """Nothing: every copy has arrived."""

    def zero(self, pool: int) -> None:
        """Nothing: the import has no bytes."""


class Drive:
    """Feeds the calls to the leader. ``publish`` gets every stimulus with its outcome."""

    def __init__(self, config: LeaderConfig, publish: Callable[[Stimulus, Outcome], None]) -> None:
        self.report = ImportReport()
        self.now_ns = 0
        self.leader = Leader(config)
        self.dispatcher = Dispatcher(self.leader, lambda: self.now_ns, publish=publish)
        self.dispatcher.mover = _AtOnce(self)
        self._block_tokens = config.block_tokens
        self._requests: dict[str, _Request] = {}
        self._plan: list[tuple[str, int]] = []
        """Requests of the running iteration, with their computed tokens at its end."""
        self._line: dy.DynamoLine
        self._handlers: dict[type[Any], Callable[[Any, Any], None]] = {
            dy.CreateSlot: self._create, dy.GetNumNewMatchedTokens: self._look_up,
            dy.UpdateStateAfterAlloc: self._allocated, dy.BuildConnectorMeta: self._scheduled,
            dy.FinishCall: self._finished, dy.ResetCache: self._reset,
        }

    def begin(self) -> None:
        """Declare the pools; the engine's size is not in the recording."""
        start_leader(self.dispatcher)
        self._submit(
            st.PoolDeclared, 0, 0, Tier.G1, MEDIUM_OF[Tier.G1], None, self._block_tokens, Authority.ENGINE
        )

    def take(self, line: dy.DynamoLine) -> None:
        """Feed a line."""
        self._line = line
        self.now_ns = max(self.now_ns, line.at_ns)
        self.report.lines += 1
        if line.call is None:
            passed = self.report.passed_over
            passed[line.action] = passed.get(line.action, 0) + 1
        else:
            self._handlers[type(line.call)](line.call, line.answer)

    def end(self) -> None:
        """End the running iteration, because the recording has ended."""
        self._finish_iteration()

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _submit(self, kind: Any, *fields: Any) -> Outcome:
        outcome: Outcome = self.dispatcher.submit_from(SOURCE, None, kind, *fields)
        for event in outcome.events:
            if isinstance(event, StimulusRejected):
                self.report.refused += 1
                self._other(event.request or "", self._line.action, event.why)
        return outcome

    def _other(self, request: str, theirs: str, ours: str) -> None:
        if len(self.report.others) < SHOWN_MAX:
            self.report.others = [
                *self.report.others, OtherAnswer(self._line.number, self._line.action, request, theirs, ours)
            ]

    def _slot(self, request: str) -> SlotFacts | None:
        slot = self.leader.state.slot_named(request)
        return None if slot is None or slot.state is SlotState.FINISHING else slot

    def _preempt(self, slot: SlotFacts) -> None:
        self.report.preempted += 1
        self._plan = [(request, end) for request, end in self._plan if request != slot.request]
        self._submit(st.RequestPreempted, slot.request)

    def _take_from_others(self, slot: SlotFacts, ids: list[int]) -> None:
        """Preempt other requests that hold these blocks; the recording names no preemption."""
        wanted = set(ids)
        for other in list(self.leader.state.slots.values()):
            if other.slot != slot.slot and not wanted.isdisjoint(other.device_blocks):
                self._preempt(other)

    # --- calls -------------------------------------------------------------------------------------------------------

    def _create(self, call: dy.CreateSlot, _answer: Any) -> None:
        name = call.request.request_id
        if self.leader.state.slot_named(name) is not None or not 1 <= len(name.encode()) <= REQUEST_ID_BYTES_MAX:
            self.report.refused += 1
            self._other(name[:80], "a slot", "a request of this name is live, or the name is too long")
            return
        chain = Chain(self._block_tokens, salt=(call.request.salt_hash or 0) & (2**64 - 1))
        chain.extend(call.tokens)
        self._requests[name] = _Request(len(call.tokens), chain)
        self.report.requests += 1
        self._submit(st.RequestArrived, name, pack_hashes(chain.hashes), len(call.tokens), 0, 0, None)

    def _look_up(self, call: dy.GetNumNewMatchedTokens, answer: dy.Matched) -> None:
        self._finish_iteration()
        slot = self._slot(call.request_id)
        if slot is None:
            self._other(call.request_id, "a look-up", "no such request")
            return
        if slot.device_blocks:
            self._preempt(slot)
        result = self._submit(st.MatchRequested, call.request_id, call.num_computed_tokens).result
        ours = result.tokens if isinstance(result, ins.MatchAnswer) else None
        theirs = answer.num_new_matched_tokens
        self.report.lookups += 1
        self.report.theirs_matched_tokens += theirs
        self.report.ours_matched_tokens += ours or 0
        if ours == theirs:
            self.report.lookups_equal += 1
        else:
            self._other(call.request_id, f"{theirs} tokens", "ask again" if ours is None else f"{ours} tokens")

    def _allocated(self, call: dy.UpdateStateAfterAlloc, _answer: Any) -> None:
        slot = self._slot(call.request_id)
        if slot is not None:
            self._give(slot, call.block_ids, call.num_external_tokens)

    def _give(self, slot: SlotFacts, ids: list[int], external: int = 0) -> None:
        """Give a request these blocks, which may or may not repeat the blocks that it holds."""
        held = slot.device_blocks
        new = ids[len(held):] if ids[: len(held)] == held else [block for block in ids if block not in set(held)]
        if held:
            if new:
                self._take_from_others(slot, new)
                self._submit(st.BlocksAllocated, slot.request, pack_ids(new), 0)
            return
        prefix = self._own_prefix(slot, new)
        if prefix < slot.local_blocks:
            # The engine hit more blocks than we saw it compute, so the lookup uses the prefix that our mirror knows.
            self._submit(st.MatchRequested, slot.request, prefix * self._block_tokens)
        self._take_from_others(slot, new[prefix:])
        staged = sum(len(places) for _, places in slot.staged) * self._block_tokens
        if external > staged:
            self._other(slot.request, f"{external} tokens to load", f"{staged} are staged")
        room = (len(new) - prefix) * self._block_tokens
        loaded = min(external, staged, room) // self._block_tokens * self._block_tokens
        self._submit(st.BlocksAllocated, slot.request, pack_ids(new), loaded)

    def _own_prefix(self, slot: SlotFacts, ids: list[int]) -> int:
        """The number of leading blocks whose content agrees with the slot's hashes, as far as we know."""
        pool = self.leader.device_pool(SOURCE)
        at = 0
        while (
            at < min(slot.local_blocks, len(ids)) and ids[at] < len(pool) and pool.hash_of[ids[at]] == slot.hashes[at]
            and pool.content[ids[at]]
        ):
            at += 1
        return at

    # --- iterations --------------------------------------------------------------------------------------------------

    def _scheduled(self, call: dy.BuildConnectorMeta, _answer: Any) -> None:
        self._finish_iteration()
        output = call.scheduler_output
        lists: dict[str, list[Any]] = {key: [] for key in (
            "new", "resumed", "skipped", "unskipped", "first", "progressed", "positions",
        )}
        for new in output.new_requests:
            slot = self._slot(new.request_id)
            if slot is not None:
                self._give(slot, new.block_ids)
                self._place(slot, new.num_computed_tokens, output, lists, resumed=False)
        for cached in output.cached_requests:
            slot = self._slot(cached.request_id)
            if slot is not None:
                self._requests[cached.request_id].chain.extend(cached.new_token_ids)
                if cached.new_block_ids:
                    new_ids = cached.new_block_ids
                    self._give(slot, new_ids if cached.resumed_from_preemption or not slot.device_blocks
                               else [*slot.device_blocks, *new_ids])
                self._place(slot, cached.num_computed_tokens, output, lists, resumed=cached.resumed_from_preemption)
        scheduled = {request for request, _ in self._plan}
        for slot in self.leader.state.slots.values():
            if slot.state in (SlotState.PREFILLING, SlotState.DECODING) and slot.request not in scheduled:
                lists["skipped"].append(slot.request)
        state = self.leader.state
        self.report.iterations += 1
        self._submit(
            st.IterationScheduled, state.iteration + 1, 1, tuple(lists["new"]), tuple(lists["resumed"]), (),
            tuple(lists["skipped"]), tuple(lists["unskipped"]), tuple(lists["first"]), tuple(lists["progressed"]),
            tuple(lists["positions"]), (), (), b"", len(self._plan), len(state.slots) - len(self._plan),
        )

    def _place(
        self, slot: SlotFacts, computed: int, output: dy.SchedulerOutput, lists: dict[str, list[Any]], *, resumed: bool
    ) -> None:
        """Add a request's part of the iteration, if the request computes tokens and has places for them."""
        tokens = output.num_scheduled_tokens.get(slot.request, 0)
        end = computed + tokens
        room = len(slot.device_blocks) * self._block_tokens
        if not tokens or any(request == slot.request for request, _ in self._plan):
            return
        if end > room or not slot.device_blocks:
            self.report.refused += 1
            self._other(slot.request, f"{end} computed tokens", f"places for {room}")
            return
        known = self._requests[slot.request]
        starts = slot.state in (
            SlotState.INITIALIZED, SlotState.ONBOARD_STAGED, SlotState.ONBOARDING, SlotState.PREEMPTED
        )
        if starts:
            lists["resumed" if resumed or slot.preemptions else "new"].append(slot.request)
        elif slot.state in _SKIPPED:
            lists["unskipped"].append(slot.request)
        decodes = slot.state in (SlotState.DECODING, SlotState.SKIPPED_DECODE)
        prefills = slot.state in (SlotState.PREFILLING, SlotState.SKIPPED_PREFILL)
        if prefills and computed >= known.prompt_tokens and slot.anchor_tokens <= computed and tokens == 1:
            lists["first"].append(slot.request)
        elif not decodes or tokens != 1 or slot.computed_tokens(self.leader.state.iteration) != computed:
            lists["progressed"].append(slot.request)
            lists["positions"].append(max(end, slot.anchor_tokens))
        self._plan.append((slot.request, end))

    def _finish_iteration(self) -> None:
        """End the running iteration: its full blocks get their hashes."""
        plan, self._plan = self._plan, []
        requests: list[str] = []
        counts: list[int] = []
        ids: list[int] = []
        hashes: list[int] = []
        pool = self.leader.device_pool(SOURCE) if plan else None
        for request, end in plan:
            slot = self._slot(request)
            if slot is None or pool is None:
                continue
            chain = self._requests[request].chain.hashes
            first = slot.filled_blocks
            full = min(end // self._block_tokens, len(chain), len(slot.device_blocks))
            places = slot.device_blocks[first:full]
            if places and all(pool.hash_of[place] == EMPTY_HASH for place in places):
                requests.append(request)
                counts.append(len(places))
                ids += places
                hashes += chain[first:full]
        if plan:
            self._submit(
                st.IterationFinished, self.leader.state.iteration, tuple(requests), tuple(counts), pack_ids(ids),
                pack_hashes(hashes),
            )

    def _finished(self, call: dy.FinishCall, answer: dy.Finished) -> None:
        self._finish_iteration()
        if self._slot(call.request_id) is None:
            self._other(call.request_id, "finished", "no such request")
            return
        result = self._submit(st.RequestFinished, call.request_id, b"", FinishReason.STOP).result
        ours = isinstance(result, ins.FinishAnswer) and result.delay_free
        self._requests.pop(call.request_id, None)
        self.report.finishes += 1
        if ours == answer.is_finished:
            self.report.finishes_equal += 1
        else:
            self._other(call.request_id, _kept(answer.is_finished), _kept(ours))

    def _reset(self, _call: dy.ResetCache, _answer: Any) -> None:
        self._plan = []
        self._requests.clear()
        self._submit(st.ResetRequested, ResetMode.LOGICAL)


def _kept(delayed: bool) -> str:
    return "blocks stay until its copies end" if delayed else "blocks are free at once"
