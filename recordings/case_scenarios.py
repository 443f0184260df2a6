"""The cases in ``cases/``: a question that a person asks, a run in which it comes up, and the event that decides it.

Law of this file: the deciding event is found in the events alone, without a lint or an explanation, so that the tools
can be tested against it.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import msgspec

from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.config import MAX_HOLD_NS_MAX, BreakpointSpec
from kvbm_console.core.events import (
    BlocksEvicted,
    ContentMismatched,
    Event,
    LookupAnswered,
    OperationReported,
    OperationStarted,
    PrefetchLimited,
    SlotHeld,
    SlotMoved,
    SlotOpened,
)
from kvbm_console.core.ids import SlotState
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.stimuli import BreakpointsReplaced, LeaseGranted, MismatchReported
from kvbm_console.simulator.embedded import SOURCE, Rig
from kvbm_console.simulator.link import Fault
from kvbm_console.simulator.workloads import Request
from recordings.scenarios import MS, OTHERS, Scenario, ask, engine, fail_a_load, leader

Events = list[Event]


class Case(msgspec.Struct, frozen=True):
    """A case. ``scenario`` is None for a recording that a real engine gave."""

    name: str
    question: str
    answer: str
    decides: Callable[[Events], Event]
    request: str | None
    scenario: Scenario | None


def slot_of(events: Events, request: str) -> int:
    """The last slot of a request."""
    return [event.slot for event in events if isinstance(event, SlotOpened) and event.request == request][-1]


def always(events: Events) -> bool:
    """``decides`` is the proof of a case."""
    return True


def case(
    name: str, question: str, answer: str, decides: Callable[[Events], Event], request: str | None,
    requests: list[Request], *, g1: int = 24, drive: Callable[[Rig], None] = Rig.run_to_end, expect: str = "",
    **config: object,
) -> Case:
    """A case of the simulated engine; ``config`` are fields of the leader's configuration."""
    scenario = Scenario(name, question, leader(**config), engine(g1), requests, always, drive, expect)
    return Case(name, question, answer, decides, request, scenario)


# --- what happens ----------------------------------------------------------------------------------------------------


CHAT: Final = [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)]
"""A chat that comes back after others took its device blocks."""


VISITS: Final = 26
"""Sessions of which the first six come back once, and the others never."""


def lose_rank_one(rig: Rig) -> None:
    """Rank 1 never reports the load of ``chat.1``; other requests come and go meanwhile."""
    lost: list[int] = []

    def silent(order: StartTransfer) -> Fault | None:
        if lost or not order.route.is_load:
            return None
        lost.append(order.operation)
        return Fault(ranks=(1,), silent=True)

    rig.mover.faults = silent
    rig.run_to_end(until_ns=76_000 * MS)


def forget_a_hold(rig: Rig) -> None:
    """Somebody stops each load of a chat and goes home; others are served meanwhile."""
    rig.dispatcher.submit(LeaseGranted, "ben@laptop")
    stop = BreakpointSpec(
        to_state=SlotState.ONBOARDING, request="chat.*", max_hold_ns=MAX_HOLD_NS_MAX, name="look at loads",
    )
    rig.dispatcher.submit(BreakpointsReplaced, "ben@laptop", (stop,))
    rig.run_to_end(until_ns=100_000 * MS)


def read_wrong_bytes(rig: Rig) -> None:
    """A worker that checks contents finds other bytes in a block that a load brought."""

    def found() -> None:
        slot = next(slot for slot in rig.leader.state.slots.values() if slot.request == "chat.1")
        rig.dispatcher.submit_from(
            SOURCE, None, MismatchReported, "chat.1", 0, 0, slot.hashes[2].to_bytes(8, "little"), "overwritten",
            "load", 5, 2, 1, "store 9", "the copy waits for the step that reads the block", "store 3",
        )

    rig.calendar.at(712 * MS, found)
    rig.run_to_end()


# --- the events that decide ------------------------------------------------------------------------------------------


def never_reported(events: Events) -> Event:
    """The start of the load that one rank alone reported."""
    ranks: dict[int, set[int]] = {}
    for event in events:
        if isinstance(event, OperationReported):
            ranks.setdefault(event.operation, set()).add(event.rank)
    (operation,) = (number for number, seen in ranks.items() if seen == {0})
    return next(event for event in events if isinstance(event, OperationStarted) and event.operation == operation)


def third_preemption(events: Events) -> Event:
    """The preemption from which on the request runs in circles."""
    slot = slot_of(events, "victim")
    return [event for event in events
            if isinstance(event, SlotMoved) and event.slot == slot and event.new is SlotState.PREEMPTED][2]


def evicted(pool_is_lower: bool) -> Callable[[Events], Event]:
    """The last eviction of the first missed block of ``chat.1``, from the host tier or the device."""

    def found(events: Events) -> Event:
        slot = next(event for event in events if isinstance(event, SlotOpened) and event.request == "chat.1")
        looked = next(event for event in events if isinstance(event, LookupAnswered) and event.slot == slot.slot)
        missed = unpack_hashes(slot.hashes)[looked.first_miss]
        return [
            event for event in events
            if isinstance(event, BlocksEvicted) and (event.pool == 0) == pool_is_lower and event.seq < looked.seq
            and missed in unpack_hashes(event.hashes)
        ][-1]

    return found


def failed_report(events: Events) -> Event:
    """The report of the rank that could not copy."""
    return next(event for event in events if isinstance(event, OperationReported) and not event.ok)


def before_the_gap(events: Events) -> Event:
    """The last event in front of the events that are missing."""
    return next(one for one, later in pairwise(events) if later.seq > one.seq + 1)


def of_kind(kind: type[Event]) -> Callable[[Events], Event]:
    """The first event of this kind."""
    return lambda events: next(event for event in events if type(event) is kind)


REAL_ENGINES: Final = {"deadlock": "vLLM 0.33.0, found by explore vllm --profile failures --seeds 10:11"}
"""Cases whose recording is kept as a real engine gave it, with its origin."""

CASES: Final = [
    case(
        "stuck-rank", "Request chat.1 has been loading for more than a minute. Which part never answered?",
        "Rank 1 never reported the load of chat.1; rank 0 reported it at once.",
        never_reported, "chat.1",
        [*CHAT, *(ask(f"later-{at}", 5_000 * at + 2_000, (200 + at, 60), 4) for at in range(1, 16))],
        drive=lose_rank_one, ranks=2,
    ),
    case(
        "preempt-loop", "The engine is busy and request victim gets nowhere. Why?",
        "victim loses its blocks each time an older request grows, and computes the same tokens again.",
        third_preemption, "victim",
        [*(ask(f"writer-{at}", 3 * at, (10 + at, prompt), output)
           for at, (prompt, output) in enumerate([(30, 399), (100, 174), (30, 125), (60, 319), (100, 312)])),
         ask("victim", 100, (77, 624), 120)],
        g1=53, g2_blocks=0,
    ),
    case(
        "tier-too-small", "chat.1 came back, and its prefix was gone from host memory. Which event took it?",
        "The host tier has 16 blocks; the copy of another request evicted the prefix of chat.1 from it.",
        evicted(pool_is_lower=True), "chat.1", CHAT, g2_blocks=16, offload_threshold=0.0,
    ),
    Case(
        "deadlock", "vLLM stopped: nothing runs, no copy is in flight, and all blocks are free. Which event began it?",
        "The load of s6t2b failed; the scheduler looks it up again and waits for the block reserved for itself.",
        failed_report, "s6t2b", None,
    ),
    case(
        "failed-load", "chat.1 should have been loaded from host memory and was partly computed again. Why?",
        "Three blocks of its load failed with a checksum error, so the hits were taken back.",
        failed_report, "chat.1", CHAT, drive=fail_a_load,
    ),
    case(
        "lost-events", "Can this recording be trusted from its beginning to its end?",
        "No. One flush was not recorded: the events behind the deciding one are missing.",
        before_the_gap, None, CHAT, expect="gap",
    ),
    case(
        "wrong-threshold", "Host memory is nearly empty, and chat.1 still missed its whole prefix. Why?",
        "Blocks are copied down only above 97 % use, and the device evicted the prefix before its copy.",
        evicted(pool_is_lower=False), "chat.1", CHAT, offload_threshold=0.97, offload_hysteresis=0.01,
    ),
    case(
        "prefetch-waste", "The disk is busy since prefetch was switched on, and hits did not rise. Does it pay?",
        "No. Sessions do not come back, so few of the fetched blocks were used and the leader limited prefetch.",
        of_kind(PrefetchLimited), None,
        sorted((ask(f"visit{at}.{turn}", 100 * at + 800 * turn, (20 + at, 160), 4) for at in range(VISITS)
                for turn in range(2 if at < 6 else 1)), key=lambda request: request.arrival_ns),
        g2_blocks=24, g3_blocks=400, prefetch="session",
    ),
    case(
        "hold-forgotten", "chat.1 stands still and everybody else is served. Who stopped it?",
        "A breakpoint of ben@laptop named \"look at loads\" holds it in front of its load.",
        of_kind(SlotHeld), "chat.1",
        [*CHAT, *(ask(f"later-{at}", 5_000 * at + 2_000, (200 + at, 60), 4) for at in range(1, 16))],
        drive=forget_a_hold,
    ),
    case(
        "corrupt-read", "chat.1 answered nonsense although its prompt was right. Did it read its own context?",
        "No. A block that its load brought had been overwritten by another store.",
        of_kind(ContentMismatched), "chat.1", CHAT, drive=read_wrong_bytes,
    ),
]
"""Every case by the order in which people should look at them."""
