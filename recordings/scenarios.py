"""The scenarios of the recordings beside this file: what each must show, how it is made, and which events prove it.

Law of this file: a proof is about events alone, so that it holds for whoever reads the recording.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

import msgspec

from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.describe import slots_of
from kvbm_console.core.events import (
    BlocksDropped,
    BlocksEvicted,
    BlocksFilled,
    CandidateEnded,
    CandidatePromoted,
    CandidateSkipped,
    DeviceBlocksAssigned,
    DrainBegun,
    Event,
    HitsLost,
    LookupAnswered,
    OperationReported,
    ResetDone,
    SlotCloned,
    SlotMoved,
    SlotOpened,
    StimulusRejected,
)
from kvbm_console.core.ids import (
    CandidateStatus,
    FinishReason,
    MissReason,
    ReleaseReason,
    ResetMode,
    SkipReason,
    SlotState,
)
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.stimuli import (
    BreakpointsReplaced,
    DrainRequested,
    HoldContinued,
    LeaseGranted,
    LeaseLost,
    RequestFinished,
    ResetRequested,
    TransferFinished,
)
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import SOURCE, Rig
from kvbm_console.simulator.hashing import Chain, clone_hashes
from kvbm_console.simulator.link import DEFAULT_LINKS, Fault, LinkSpec
from kvbm_console.simulator.workloads import Capacities, Request

BLOCK_TOKENS: Final = 16
MS: Final = 1_000_000


class Script:
    """A workload of requests written down beforehand."""

    endless = False
    capacities = Capacities(block_tokens=BLOCK_TOKENS, g1_blocks=64, g2_blocks=0, g3_blocks=0, batch_tokens=256)

    def __init__(self, name: str, requests: list[Request]) -> None:
        self.name = name
        self.requests = requests

    def begin(self, block_tokens: int) -> None:
        """Nothing to prepare."""

    def arrivals(self) -> Iterator[Request]:
        """All requests, by time."""
        return iter(self.requests)

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """Nothing follows."""
        return None


def ask(name: str, at_ms: int, prompt: tuple[int, ...], output: int, n: int = 1) -> Request:
    """A request for ``n`` sequences, whose prompt is (number, tokens, number, tokens ...): equal beginnings are a
    shared prefix."""
    chain = Chain(BLOCK_TOKENS)
    for number, tokens in zip(prompt[::2], prompt[1::2], strict=True):
        chain.extend([number] * tokens)
    hashes, length = tuple(chain.hashes), len(chain)
    chain.extend([sum(name.encode())] * output)
    return Request(
        request=name, arrival_ns=at_ms * MS, hashes=hashes, output_hashes=tuple(chain.hashes[len(hashes):]),
        prompt_tokens=length, output_tokens=output, session=name.partition(".")[0],
        clone_hashes=clone_hashes(hashes[-1] if hashes else 0, sum(name.encode()), len(chain.hashes) - len(hashes), n),
    )


class Scenario(msgspec.Struct, frozen=True):
    """One recording: what it shows, how it is made, and which events prove it."""

    name: str
    shows: str
    config: LeaderConfig
    engine: EngineConfig
    requests: list[Request]
    proof: Callable[[list[Event]], bool]
    drive: Callable[[Rig], None] = Rig.run_to_end
    expect: str = ""
    """``gap`` or ``diverges``: what ``rec verify`` must say of it; empty: equal."""
    links: tuple[LinkSpec, ...] = DEFAULT_LINKS


def kinds(events: list[Event]) -> set[str]:
    """The kinds of events in a recording."""
    return {type(event).__name__ for event in events}


def visited(events: list[Event]) -> set[SlotState]:
    """The states that some slot moved to."""
    return {event.new for event in events if isinstance(event, SlotMoved)}


def engine(g1_blocks: int) -> EngineConfig:
    """An engine with small steps, so that prompts take several."""
    return EngineConfig(g1_blocks=g1_blocks, max_batch_tokens=128, max_running=8)


def leader(**changes: object) -> LeaderConfig:
    """A leader that copies every full block down at once, into a host tier of 64 blocks."""
    usual: dict[str, object] = {"block_tokens": BLOCK_TOKENS, "g2_blocks": 64, "offload_threshold": 0.0}
    return LeaderConfig(**{**usual, **changes})  # type: ignore[arg-type]


def hold_and_continue(rig: Rig) -> None:
    """Stop the returning request when its load is about to begin, look for a while, let it go."""
    rig.dispatcher.submit(LeaseGranted, "console-1")
    stop = BreakpointSpec(to_state=SlotState.ONBOARDING, request="chat.*", one_shot=True)
    rig.dispatcher.submit(BreakpointsReplaced, "console-1", (stop,))
    rig.run_to_end()
    hold = next(iter(rig.leader.state.holds))
    rig.dispatcher.submit(HoldContinued, hold, "console-1", None)
    rig.run_to_end()
    rig.dispatcher.submit(LeaseLost, "console-1")


def lose_a_report(rig: Rig) -> None:
    """Rank 1 never reports the first copy of ``agent-0093``, and its engine asks for the end of it twice a second."""
    store: list[int] = []

    def lost(order: StartTransfer) -> Fault | None:
        operation = rig.leader.state.operations[order.operation]
        slot = rig.leader.state.candidates[operation.candidate].slot
        if store or slot is None or rig.leader.state.slots[slot].request != STUCK:
            return None
        store.append(order.operation)
        return Fault(ranks=(1,), silent=True)

    def ask_again() -> None:
        if rig.leader.state.slot_named(STUCK) is not None and rig.now_ns > 2_000 * MS:
            rig.dispatcher.submit_from(SOURCE, None, RequestFinished, STUCK, b"", FinishReason.LENGTH)
        rig.calendar.at(rig.now_ns + 500 * MS, ask_again)

    rig.mover.faults = lost
    rig.calendar.at(2_000 * MS, ask_again)
    rig.run_to_end(until_ns=64_000 * MS)


def fail_a_load(rig: Rig) -> None:
    """The link fails for the last three of the first load's blocks."""
    failed: list[int] = []

    def broken(order: StartTransfer) -> Fault | None:
        if failed or not order.route.is_load:
            return None
        failed.append(order.operation)
        return Fault(blocks=tuple(range(order.blocks - 3, order.blocks)), error="checksum")

    rig.mover.faults = broken
    rig.run_to_end()


def reset_in_a_copy(rig: Rig) -> None:
    """An operator resets everything while a load runs, whose places stay quarantined until it has ended."""
    rig.calendar.at(720 * MS, lambda: rig.dispatcher.submit(ResetRequested, ResetMode.LOGICAL, OPERATOR) and None)
    rig.run_to_end()


def drain_twice(rig: Rig) -> None:
    """The first drain waits for what is in flight and refuses ``late``; the second one's time is over too soon."""
    rig.run_to_end(until_ns=20 * MS)
    rig.dispatcher.submit(DrainRequested, 10_000 * MS, OPERATOR)
    rig.run_to_end(until_ns=700 * MS)
    rig.dispatcher.submit(DrainRequested, 10 * MS, OPERATOR)
    rig.run_to_end()


def report_late(rig: Rig) -> None:
    """Rank 1 reports the first load 60 ms after rank 0."""
    late: list[int] = []

    def silent(order: StartTransfer) -> Fault | None:
        if late or not order.route.is_load:
            return None
        late.append(order.operation)
        rig.calendar.at(
            rig.now_ns + 60 * MS,
            lambda: rig.dispatcher.submit(TransferFinished, order.operation, order.epoch, 1) and None,
        )
        return Fault(ranks=(1,), silent=True)

    rig.mover.faults = silent
    rig.run_to_end()


def lost_and_computed(events: list[Event]) -> bool:
    """Hits were taken back, and the same slot computed the rest and finished."""
    lost = [event for event in events if isinstance(event, HitsLost)]
    return any(
        isinstance(event, SlotMoved) and event.new is SlotState.FINISHED and event.slot == lost[0].slot
        and event.seq > lost[0].seq for event in events
    ) and any(isinstance(event, CandidateEnded) and event.status is CandidateStatus.FAILED for event in events)


def was_quarantined(events: list[Event]) -> bool:
    """Places were quarantined at the reset and given back when the copy of the older epoch had ended."""
    done, = (event for event in events if isinstance(event, ResetDone))
    return "BlocksQuarantined" in kinds(events) and any(
        isinstance(event, BlocksDropped) and event.why is ReleaseReason.EPOCH and event.seq > done.seq
        for event in events
    )


def shared_and_own(events: list[Event]) -> bool:
    """Two clones list the ten full blocks of their parent's prompt and a last block of their own; all three finish."""
    clones = [event for event in events if isinstance(event, SlotCloned)]
    blocks = [unpack_ids(event.ids) for event in clones]
    finished = {event.slot for event in events if isinstance(event, SlotMoved) and event.new is SlotState.FINISHED}
    return len(blocks) == 2 and blocks[0][:10] == blocks[1][:10] and blocks[0][10] != blocks[1][10] and (
        finished >= {event.slot for event in clones} | {clones[0].parent}
    )


def drained_and_cut(events: list[Event]) -> bool:
    """The first drain refused a request and ended nobody; the second one did."""
    begun = [event.seq for event in events if isinstance(event, DrainBegun)]
    ended = [event.seq for event in events if isinstance(event, ResetDone)]
    aborted = [event.seq for event in events
               if isinstance(event, SlotMoved) and event.reason is FinishReason.ABORTED]
    refused = any(isinstance(event, StimulusRejected) and begun[0] < event.seq < ended[0] for event in events)
    return len(begun) == len(ended) == 2 and refused and bool(aborted) and min(aborted) > begun[1]


def ranks_apart(events: list[Event]) -> int:
    """The longest time between the reports of two ranks about one load that completed."""
    loads = {event.candidate: event.operation for event in events
             if isinstance(event, CandidatePromoted) and event.target_pool != 0}
    done = {event.candidate for event in events
            if isinstance(event, CandidateEnded) and event.status is CandidateStatus.COMPLETED}
    apart = 0
    for candidate, operation in loads.items():
        at = {event.rank: event.at_ns for event in events
              if isinstance(event, OperationReported) and event.operation == operation}
        if candidate in done and set(at) == {0, 1}:
            apart = max(apart, abs(at[1] - at[0]) + 1)
    return apart


def deferred_then_loaded(events: list[Event]) -> bool:
    """Some lookup was answered "ask again" because of a copy under way, and the same slot loaded later."""
    asked = [event for event in events if isinstance(event, LookupAnswered) and event.answer is None
             and event.why is MissReason.WRITING]
    return any(
        isinstance(event, SlotMoved) and event.new is SlotState.ONBOARDING and event.slot == asked[0].slot
        and event.seq > asked[0].seq for event in events
    )


def spared_its_own_prefix(events: list[Event]) -> bool:
    """``chat.1`` reused its prefix, and what gave way for it had been used after every block of that prefix."""
    filled: dict[int, int] = {}
    slot: SlotOpened | None = None
    evicted: list[int] = []
    reused = 0
    for event in events:
        if isinstance(event, BlocksFilled):
            filled.update(dict.fromkeys(unpack_hashes(event.hashes), event.seq))
        elif isinstance(event, SlotOpened) and event.request == "chat.1":
            slot = event
        elif slot is not None and isinstance(event, BlocksEvicted) and event.for_slot == slot.slot and not reused:
            evicted += unpack_hashes(event.hashes)
        elif slot is not None and isinstance(event, DeviceBlocksAssigned) and slot.slot in event.slots:
            reused = reused or event.reused
    if slot is None or not reused or not evicted:
        return False
    prefix = unpack_hashes(slot.hashes)[:reused]
    return max(filled[key] for key in prefix) < min(filled[key] for key in evicted)


def waited_for_room(events: list[Event]) -> bool:
    """``chat.1`` kept its staging and changed nothing else between its match and the end of ``long``."""
    opened = {event.request: event.slot for event in events if isinstance(event, SlotOpened)}
    moves = [event for event in events if isinstance(event, SlotMoved)]
    staged, = (event for event in moves if event.new is SlotState.ONBOARD_STAGED and event.slot == opened["chat.1"])
    ended, = (event for event in moves if event.new is SlotState.FINISHED and event.slot == opened["long"])
    between = [event for event in events if staged.seq < event.seq < ended.seq]
    return ended.at_ns - staged.at_ns > 50 * MS and not any(opened["chat.1"] in slots_of(event) for event in between)


SLOW_DOWN: Final = (msgspec.structs.replace(DEFAULT_LINKS[0], bytes_per_s=100e6), *DEFAULT_LINKS[1:])
"""Copies to host memory that take as long as five iterations for each block."""
SLOW_UP: Final = (
    DEFAULT_LINKS[0], msgspec.structs.replace(DEFAULT_LINKS[1], base_latency_ns=60 * MS), *DEFAULT_LINKS[2:],
)
"""Copies from host memory that take as long as fifteen iterations."""
OPERATOR: Final = "ann@ops"
STUCK: Final = "agent-0093"
OTHERS: Final = [ask(f"other-{number}", 200 + 60 * number, (100 + number, 150), 8) for number in range(4)]
"""Four prompts of ten blocks: together more than a device pool of 24 holds beside a fifth one."""

SCENARIOS: Final = [
    Scenario(
        "local-only", "three requests and no lower tier: prefill, decode, a prefix shared in device memory",
        leader(g2_blocks=0), engine(64),
        [ask("first", 0, (1, 200), 12), ask("second", 40, (1, 160, 2, 40), 12), ask("third", 60, (3, 30), 4)],
        lambda events: SlotState.DECODING in visited(events) and "BlocksReserved" not in kinds(events),
    ),
    Scenario(
        "onboard-from-host", "a chat returns after others took its device blocks, and is loaded from host memory",
        leader(), engine(24), [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)],
        lambda events: {SlotState.ONBOARD_STAGED, SlotState.ONBOARDING} <= visited(events),
    ),
    Scenario(
        "preempt-and-resume", "two growing requests and room for one: preempted, resumed, finished",
        leader(g2_blocks=32), engine(20), [ask("long-a", 0, (1, 120), 90), ask("long-b", 5, (2, 120), 90)],
        lambda events: SlotState.PREEMPTED in visited(events),
    ),
    Scenario(
        "offload-pressure", "more prompts than host memory holds: blocks are evicted there and later missed",
        leader(g2_blocks=16, offload_threshold=0.6), engine(24),
        [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)],
        lambda events: any(isinstance(event, BlocksEvicted) and event.pool == 0 for event in events),
    ),
    Scenario(
        "breakpoint-hold", "a breakpoint holds the load of a returning chat until somebody continues it",
        leader(), engine(24), [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)],
        lambda events: {"SlotHeld", "HoldParked", "HoldReleased"} <= kinds(events), hold_and_continue,
    ),
    Scenario(
        "stuck-slot", "a request stays finishing for ever: rank 1 never reports its copy, and the engine keeps asking",
        leader(ranks=2), engine(32),
        [ask(STUCK, 0, (7, 160), 8), *(ask(f"chat-{at}", 5_000 * at + 500, (at, 60), 4) for at in range(1, 13))],
        lambda events: sum(isinstance(event, StimulusRejected) for event in events) > 100, lose_a_report,
    ),
    Scenario(
        "thrash", "three chats take turns in a device memory that holds two: what goes down comes back at once",
        leader(thrash_window_ns=2_000 * MS), engine(24),
        [ask(f"chat-{at % 3}.{at // 3}", 150 * at, (at % 3 + 1, 160), 4) for at in range(21)],
        lambda events: sum(event.thrash for event in events if isinstance(event, CandidatePromoted)) > 40,
    ),
    Scenario(
        "gap", "as onboard-from-host, and one flush in the middle was not recorded",
        leader(), engine(24), [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)],
        lambda events: any(later.seq > one.seq + 1 for one, later in pairwise(events)), expect="gap",
    ),
    Scenario(
        "deferred", "a preempted request whose blocks are still being copied is told to ask again, and loads them then",
        leader(g2_blocks=32), engine(20), [ask("long-a", 0, (1, 120), 60), ask("long-b", 5, (2, 120), 60)],
        deferred_then_loaded, links=SLOW_DOWN,
    ),
    Scenario(
        "own-prefix", "the oldest blocks are the beginning of the very request that needs room to load its rest",
        leader(), engine(24),
        [ask("chat.0", 0, (7, 160), 8), ask("other-0", 200, (100, 150), 8), ask("other-1", 260, (101, 90), 8),
         ask("chat.1", 700, (7, 160, 8, 40), 8)],
        spared_its_own_prefix,
    ),
    Scenario(
        "refused-admission", "a match is found and there is no room: nothing changes, again and again, until there is",
        leader(), engine(24),
        [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("long", 690, (50, 250), 20),
         ask("chat.1", 700, (7, 160, 8, 40), 8)],
        waited_for_room,
    ),
    Scenario(
        "failed-load", "three blocks of a load fail: their hits are taken back, and the rest of the prompt is computed",
        leader(), engine(24), [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)],
        lost_and_computed, fail_a_load,
    ),
    Scenario(
        "skipped", "host memory has no place that could be given up: copies down are skipped until a copy has ended",
        leader(g2_blocks=8), engine(24),
        [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)],
        lambda events: {event.reason for event in events if isinstance(event, CandidateSkipped)}
        == {SkipReason.NO_CAPACITY}, links=SLOW_DOWN,
    ),
    Scenario(
        "clone", "a prompt is answered three times: its full blocks are shared, the last block is each clone's own",
        leader(), engine(24), [ask("chat.0", 0, (7, 165), 40, n=3), ask("other", 60, (8, 60), 8)], shared_and_own,
    ),
    Scenario(
        "reset", "an operator resets everything during a load: its places are quarantined until the copy has ended",
        leader(), engine(24),
        [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8),
         ask("chat.2", 900, (7, 160, 8, 40), 8)],
        was_quarantined, reset_in_a_copy, links=SLOW_UP,
    ),
    Scenario(
        "drain", "an operator drains twice: the first drain waits for what is in flight, the second ends what is left",
        leader(), engine(24),
        [ask("chat.0", 0, (7, 160), 8), ask("late", 25, (8, 60), 4), ask("chat.1", 500, (7, 160, 8, 40), 8),
         ask("long", 690, (9, 200), 40), ask("after", 900, (7, 160), 4)],
        drained_and_cut, drain_twice,
    ),
    Scenario(
        "two-ranks", "a chat is loaded by two ranks, and its load ends when both have reported",
        leader(ranks=2), engine(24),
        [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)],
        lambda events: ranks_apart(events) == 1,
    ),
    Scenario(
        "late-rank", "rank 1 reports a load 60 ms after rank 0: the request waits for the later one",
        leader(ranks=2), engine(24),
        [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)],
        lambda events: ranks_apart(events) > 50 * MS, report_late,
    ),
    Scenario(
        "two-hosts", "the second host of offload-pressure, whose order of eviction was altered at one step",
        leader(g2_blocks=16, offload_threshold=0.6), engine(24),
        [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)],
        lambda events: any(isinstance(event, BlocksEvicted) and event.pool == 0 for event in events), expect="diverges",
    ),
]
