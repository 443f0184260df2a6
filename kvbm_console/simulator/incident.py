"""The load of ``demo``: chats on a machine with the speed of a large model, and trouble that is staged on top.

A step takes 30 ms, so a request lives 5 to 60 s and a person can follow it. About 40 requests are live from 10 s on. A
``Incident`` adds one trouble to the chats, and ``incident`` adds four of them one after the other:

- ``stuck``: rank 1 never reports one copy of ``agent-0093.22``, which then never finishes.
- ``thrash``: agents ask over documents that together need more room than the host tier has.
- a preempt loop: long answers fill the device, and younger requests are preempted again and again.
- ``queue``: one prompt wants nearly all of the device, and every later request waits behind it.
- ``gap``: the engine repeats a refused call thousands of times at once, and readers with little room lose events.

Law of this file: everything is seeded and happens at virtual times, so a scenario gives the same events on any machine.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.ids import FinishReason
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.stimuli import RequestFinished
from kvbm_console.simulator.hashing import Chain
from kvbm_console.simulator.link import Fault
from kvbm_console.simulator.multiturn import Multiturn, Settings
from kvbm_console.simulator.workloads import Capacities, Request

if TYPE_CHECKING:  # the names of the scenarios stand in a help text, which loads no machine
    from kvbm_console.simulator.embedded import Rig

CHATS: Final = Settings(
    sessions=150, prompts=4, system=512, user=200, output=300, turns=3, think=30.0, ramp=0.26, seed=3,
)
CAPACITIES: Final = Capacities(
    block_tokens=16, g1_blocks=3_200, g2_blocks=4_000, g3_blocks=20_000, batch_tokens=65_536,
)
"""A device that holds the live chats with little to spare, and a host tier that the documents outgrow."""
MACHINE: Final[dict[str, Any]] = {
    "step_base": 30_000_000, "step_prefill_token": 20_000, "step_decode_request": 100_000,
    "thrash_window": 5 * SECOND_NS,
}
"""Fields of ``CacheOptions`` that every scenario sets where no flag does."""
ROOMY: Final[dict[str, Any]] = {
    "total_kv_blocks": 4_000, "kv_cpu_blocks": 60_000, "thrash_window": SECOND_NS,
}
"""Tiers in which the chats alone lack nothing, although some come back seconds after their eviction."""
RANKS: Final = 2
"""Fewest ranks: one of them goes silent."""
STUCK: Final = "agent-0093.22"
BIG: Final = "report-0007.0"
POLLS: Final = 8_000
"""Refused calls of ``gap``, all at once: four times the events that its ring keeps."""
GAP_RING_EVENTS: Final = 2_048
GAP_QUEUE_BYTES: Final = 16 * 1024
"""Bytes that may wait for the recorder in ``gap``: a tenth of what the refused calls take."""

Requests = Callable[[int], list[Request]]
"""Makes requests in blocks of so many tokens."""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One run of ``demo``. ``requests`` and ``stage`` make its trouble."""

    name: str
    lints: tuple[str, ...]
    """The findings that it must show, by their lints."""
    requests: Requests = lambda block_tokens: []
    stage: "Callable[[Rig], None] | None" = None
    """Called with the machine before its first step."""
    machine: dict[str, Any] = {}
    """Fields of ``CacheOptions`` beside ``MACHINE``."""
    ring_events: int | None = None
    queue_bytes: int | None = None
    """Room of ring and recorder where it is less than usual."""

    def workload(self, limit: int | None = None) -> "StagedChats":
        """The chats and the staged requests, at most ``limit`` of both together."""
        return StagedChats(self.name, self.requests, limit)


class StagedChats:
    """A ``Workload`` of the chats with further requests at their times."""

    capacities = CAPACITIES

    def __init__(self, name: str, more: Requests, limit: int | None = None) -> None:
        self.name = name
        self._more = more
        self._limit = limit
        self._staged: list[Request] = []
        self._left = limit
        self._chats = Multiturn(CHATS)
        self._chat_of: dict[str, Request] = {}

    @property
    def endless(self) -> bool:
        """True if the number of requests is not limited."""
        return self._limit is None

    def begin(self, block_tokens: int) -> None:
        """Start from the beginning, in blocks of this size."""
        self._left = self._limit
        self._chat_of.clear()
        self._chats.begin(block_tokens)
        self._staged = sorted(self._more(block_tokens), key=lambda request: request.arrival_ns)

    def arrivals(self) -> Iterator[Request]:
        """The first turns of the chats, and the staged requests."""
        chats = map(self._named, self._chats.arrivals())
        for request in heapq.merge(chats, self._staged, key=lambda each: each.arrival_ns):
            if not self._counted():
                return
            yield request

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """The next turn of a chat; nothing follows a staged request."""
        chat = self._chat_of.pop(request.request, None)
        after = None if chat is None else self._chats.finished(chat, at_ns)
        return None if after is None or not self._counted() else self._named(after)

    def _counted(self) -> bool:
        """Count a request; False if it is one too many."""
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0

    def _named(self, chat: Request) -> Request:
        session, turn = chat.request[1:].split("-t")
        name = f"chat-{int(session):04d}.{turn}"
        self._chat_of[name] = chat
        return msgspec.structs.replace(chat, request=name, session=name.partition(".")[0])


def ask(name: str, at_s: float, parts: Iterable[tuple[str, int]], output: int, block_tokens: int) -> Request:
    """A request whose prompt is made of (text, tokens): equal beginnings are a shared prefix."""
    chain = Chain(block_tokens)

    def extend(text: str, tokens: int) -> None:
        chain.extend(memoryview(random.Random(text).randbytes(4 * tokens)).cast("I").tolist())

    for text, tokens in parts:
        extend(text, tokens)
    hashes, length = tuple(chain.hashes), len(chain)
    extend(name, output)
    return Request(
        request=name, arrival_ns=round(at_s * SECOND_NS), hashes=hashes,
        output_hashes=tuple(chain.hashes[len(hashes):]), prompt_tokens=length, output_tokens=output,
        session=name.partition(".")[0],
    )


# --- troubles ---------------------------------------------------------------------------------------------------------


def agents(ends_s: float, block_tokens: int) -> list[Request]:
    """The request that loses a report, which would end at about ``ends_s``, and further agents every 8 s."""
    names = [STUCK, *(f"agent-{number:04d}.{number % 7}" for number in range(94, 124))]
    return [
        ask(name, ends_s - 5.0 + 8.0 * number, [("tools", 512), (name, 900)], 140, block_tokens)
        for number, name in enumerate(names)
    ]


def documents(at_s: float, seconds: float, block_tokens: int) -> list[Request]:
    """Agents that ask over 36 documents in turn, four questions a second."""
    return [
        ask(f"rag-{1_180 + number}.0", at_s + number / 4,
            [(f"document {number % 36}", 1_600), (f"question {number}", 80)], 60, block_tokens)
        for number in range(int(4 * seconds))
    ]


def writers(at_s: float, block_tokens: int) -> list[Request]:
    """Long answers that together outgrow the device some seconds after ``at_s``."""
    return [
        ask(f"batch-{number:04d}.0", at_s + number / 20, [(f"task {number}", 200)], 1_000, block_tokens)
        for number in range(28)
    ]


def big_prompt(at_s: float, block_tokens: int) -> list[Request]:
    """A prompt that wants nearly all of the device."""
    return [ask(BIG, at_s, [("all reports of the year", 46_000)], 40, block_tokens)]


def lose_a_report(rig: "Rig") -> None:
    """Rank 1 never reports the first copy of ``STUCK``."""
    lost: list[int] = []

    def silent(order: StartTransfer) -> Fault | None:
        state = rig.leader.state
        slot = state.candidates[state.operations[order.operation].candidate].slot
        if lost or slot is None or state.slots[slot].request != STUCK:
            return None
        lost.append(order.operation)
        return Fault(ranks=(1,), silent=True)

    rig.mover.faults = silent


def repeat_a_call(rig: "Rig") -> None:
    """At 8 s the engine asks ``POLLS`` times at once for the end of a request that it never had."""
    from kvbm_console.simulator.embedded import SOURCE

    def burst() -> None:
        for _ in range(POLLS):
            rig.dispatcher.submit_from(SOURCE, None, RequestFinished, "agent-0071.4", b"", FinishReason.LENGTH)

    rig.calendar.at(8 * SECOND_NS, burst)


SCENARIOS: Final = {scenario.name: scenario for scenario in (
    Incident(
        name="incident", lints=("stuck", "thrash", "preempt_loop"), stage=lose_a_report,
        requests=lambda block: [
            *agents(15.0, block), *documents(25.0, 20.0, block), *writers(38.0, block), *big_prompt(60.0, block)],
    ),
    Incident(name="stuck", lints=("stuck",), requests=lambda block: agents(8.0, block), stage=lose_a_report,
             machine=ROOMY),
    Incident(name="thrash", lints=("thrash",), requests=lambda block: documents(5.0, 300.0, block)),
    Incident(name="queue", lints=("stuck",), requests=lambda block: big_prompt(10.0, block)),
    Incident(name="gap", lints=("lost",), stage=repeat_a_call, machine=ROOMY, ring_events=GAP_RING_EVENTS,
             queue_bytes=GAP_QUEUE_BYTES),
    Incident(name="calm", lints=(), machine=ROOMY),
)}
"""Scenarios by name; the first is the demo's own."""
