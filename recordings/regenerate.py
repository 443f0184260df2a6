"""Makes the recordings of this directory again: ``make recordings``.

Each is one scenario, driven through the real leader, simulated engine and recorder in virtual time, so that running
this again gives the same stimuli, events and keyframes byte for byte. With ``--check`` nothing is written; exit 1 and
one line for each recording that today's code would make differently.

Law of this file: a scenario says what it must show, and refuses to be written when it does not.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.events import BlocksEvicted, CandidatePromoted, Event, SlotMoved, StimulusRejected
from kvbm_console.core.hashing import Chain
from kvbm_console.core.ids import FinishReason, SlotState
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.leader import Outcome
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.stimuli import (
    BreakpointsReplaced,
    HoldContinued,
    LeaseGranted,
    LeaseLost,
    RequestFinished,
    Stimulus,
)
from kvbm_console.engines.config import EngineConfig
from kvbm_console.engines.embedded import SOURCE, Rig, build
from kvbm_console.engines.workloads import Capacities, Request
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.writer import Recorder
from kvbm_console.transfers.link import Fault
from kvbm_console.wire.batches import pack_events, pack_stimuli

HERE: Final = Path(__file__).resolve().parent
CLOCK_ANCHOR_NS: Final = 1_767_225_600 * 10**9
"""2026-01-01: the engine's time 0 in every recording here."""
BLOCK_TOKENS: Final = 16
FLUSH_STIMULI: Final = 16
"""Stimuli of one flush; a daemon flushes by time."""
KEYFRAME_EVENTS: Final = 250
"""Far closer than in life, so that these small files hold several."""
BYTES_MAX: Final = 50_000
LOST_FLUSH: Final = 6
"""Of the recording with a gap: in the middle, behind the first eviction."""
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


def ask(name: str, at_ms: int, prompt: tuple[int, ...], output: int) -> Request:
    """A request whose prompt is (number, tokens, number, tokens ...): equal beginnings are a shared prefix."""
    chain = Chain(BLOCK_TOKENS)
    for number, tokens in zip(prompt[::2], prompt[1::2], strict=True):
        chain.extend([number] * tokens)
    hashes, length = tuple(chain.hashes), len(chain)
    chain.extend([sum(name.encode())] * output)
    return Request(
        request=name, arrival_ns=at_ms * MS, hashes=hashes, output_hashes=tuple(chain.hashes[len(hashes):]),
        prompt_tokens=length, output_tokens=output, session=name.partition(".")[0],
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
    told: LeaderConfig | None = None
    """The configuration that the recording claims, where it is another one than it ran with."""


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
        "diverges", "as offload-pressure, and it claims another offload threshold: today's leader decides otherwise",
        leader(g2_blocks=16, offload_threshold=0.6), engine(24),
        [ask("chat.0", 0, (7, 160), 8), *OTHERS, ask("chat.1", 700, (7, 160, 8, 40), 8)],
        lambda events: True, expect="diverges", told=leader(g2_blocks=16, offload_threshold=0.5),
    ),
]


class Tape:
    """Flushes what is published to a recorder, every so many stimuli."""

    def __init__(self, lost_flush: int | None = None) -> None:
        self.lost_flush = lost_flush
        self.flushes = 0
        self.recorder: Recorder | None = None
        self.stimuli: list[Stimulus] = []
        self.events: list[Event] = []

    def publish(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """One stimulus with what it caused."""
        self.stimuli.append(stimulus)
        self.events += outcome.events
        if len(self.stimuli) >= FLUSH_STIMULI:
            self.flush()

    def flush(self) -> None:
        """Hand over what is there; before there is a recorder, keep it."""
        if self.recorder is None or not self.stimuli:
            return
        if self.flushes != self.lost_flush:
            self.recorder.offer(pack_stimuli(self.stimuli), pack_events(self.events) if self.events else None)
        self.flushes += 1
        self.stimuli, self.events = [], []


def record(scenario: Scenario, directory: Path) -> Path:
    """Run a scenario and record it into an empty directory; returns the sealed file."""
    tape = Tape(LOST_FLUSH if scenario.expect == "gap" else None)
    empty = build(scenario.config, scenario.engine, Script(scenario.name, []), check=True).leader
    first = type(empty)(scenario.config)
    begin: tuple[int, bytes, bytes] | None = (0, encode_facts(first.state), first.export())
    rig = build(
        scenario.config, scenario.engine, Script(scenario.name, scenario.requests), publish=tape.publish, check=True,
        audit_every=1,
    )

    def keyframe() -> tuple[int, bytes, bytes]:
        nonlocal begin
        taken, begin = begin, None
        return taken or (rig.leader.state.seq, encode_facts(rig.leader.state), rig.leader.export())

    tape.recorder = Recorder(
        directory, config=scenario.told or scenario.config, incarnation=scenario.name, keyframe=keyframe,
        clock_anchor_ns=CLOCK_ANCHOR_NS, keyframe_events=KEYFRAME_EVENTS,
        labels={"shows": scenario.shows, **({"expect": scenario.expect} if scenario.expect else {})},
    )
    scenario.drive(rig)
    tape.flush()
    tape.recorder.close()
    if tape.recorder.status().not_recorded and scenario.expect != "gap":
        raise RuntimeError(f"{scenario.name}: {tape.recorder.status().not_recorded} events were not recorded")
    (path,) = directory.glob("*.mcap")
    return path


def check(scenario: Scenario, path: Path) -> None:
    """Refuse a recording that does not show what it should, or is too large."""
    events = [event for batch in Recording.open(path).events() for event in batch]
    if not scenario.proof(events):
        raise RuntimeError(f"{scenario.name} does not show: {scenario.shows}; states {sorted(visited(events))}")
    if path.stat().st_size > BYTES_MAX:
        raise RuntimeError(f"{scenario.name} has {path.stat().st_size} bytes, above {BYTES_MAX}")


def same(one: Path, other: Path) -> bool:
    """Whether two recordings hold the same frames."""
    return other.exists() and list(Recording.open(one).frames()) == list(Recording.open(other).frames())


def main(arguments: list[str]) -> int:
    """Make, or with ``--check`` compare, every recording."""
    only_check = arguments == ["--check"]
    different = 0
    for scenario in SCENARIOS:
        with tempfile.TemporaryDirectory() as directory:
            made = record(scenario, Path(directory))
            check(scenario, made)
            kept = HERE / f"{scenario.name}.mcap"
            equal = same(made, kept)
            different += not equal
            if not equal and not only_check:
                kept.write_bytes(made.read_bytes())
            state = "unchanged" if equal else "would change" if only_check else "written"
            print(f"{scenario.name:20} {state}, {kept.stat().st_size if kept.exists() else 0:,} bytes")
    return 1 if only_check and different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
