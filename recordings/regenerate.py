"""Makes the recordings of this directory again: ``make recordings``.

Each is one scenario, driven through the real leader, simulated engine and recorder in virtual time, so that running
this again gives the same stimuli, events and keyframes byte for byte. With ``--check`` nothing is written; exit 1 and
what differs for each recording that today's code would make differently.

The event streams of real engines in ``kv-events`` are imported anew from what was captured. The cases in ``cases`` get
their answers beside them, in ``cases/cases.json``.

Law of this file: a scenario says what it must show, and refuses to be written when it or its replay does not.
"""

import json
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Final

from kvbm_console.analysis.diff import diff
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.cli.rec_diff import difference_lines
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import BlocksEvicted, Event
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events.capture import CaptureStreams, read_frames
from kvbm_console.recording.format import FORMAT_MAJOR, FORMAT_MINOR
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from kvbm_console.recording.writer import Recorder
from kvbm_console.simulator.embedded import build
from kvbm_console.simulator.machine import SimulatedMachine
from kvbm_console.wire.batches import pack_events, pack_stimuli
from recordings.case_scenarios import CASES, REAL_ENGINES, Case
from recordings.scenarios import SCENARIOS, Scenario, Script, visited

HERE: Final = Path(__file__).resolve().parent
CLOCK_ANCHOR_NS: Final = 1_767_225_600 * 10**9
"""2026-01-01: the engine's time 0 in every recording here."""
FLUSH_STIMULI: Final = 16
"""Stimuli of one flush; a daemon flushes by time."""
KEYFRAME_EVENTS: Final = 250
"""Far closer than in life, so that these small files hold several."""
BYTES_MAX: Final = 50_000
CASE_BYTES_MAX: Final = 100_000
CAPTURES: Final = {
    "multiturn": "vLLM 0.33's scheduler: 6 sessions, device memory that is too small, cleared at the end",
    "offload_lru": "vLLM's OffloadingConnector: a host tier that tells its tokens, evictions on both tiers",
    "offload_arc_placeholder": "the same with ARC and a host tier that names hashes alone",
    "connector": "vLLM beside a connector that loads late and frees late",
    "lmcache": "the event log of LMCache 0.5.6's server, over gRPC",
    "mooncake": "the publisher of Mooncake's master: objects of a shared pool, numbered from 1",
    "sglang": "SGLang 0.5.23's publisher: signed hashes, pinned host memory",
}
"""Frames that engines' own publishers sent, by file in ``kv-events``, and what is in them."""
LOST_FLUSH: Final = 6
"""Of the recording with a gap: in the middle, behind the first eviction."""


class Tape:
    """Flushes what is published to a recorder, every so many stimuli."""

    def __init__(self, lost_flush: int | None = None) -> None:
        self.lost_flush = lost_flush
        self.flushes = 0
        self.recorder: Recorder | None = None
        self.stimuli: list[Stimulus] = []
        self.events: list[Event] = []

    def keyframe(self, leader: Leader) -> tuple[int, bytes, bytes]:
        """As ``LeaderService.keyframe``, for who is recorded; ``leader`` is the first host."""
        return leader.state.seq, encode_facts(leader.state), leader.export()

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


class SecondHost(Tape):
    """Records another host of the same run: told the same stimuli, and altered once.

    Right before it gives up blocks of host memory for the first time, it counts one more use of the first of them and
    of its prefix.
    """

    def __init__(self, config: LeaderConfig) -> None:
        super().__init__()
        self.host = Leader(config, check=True, audit_every=1)
        self.altered = False

    def keyframe(self, leader: Leader) -> tuple[int, bytes, bytes]:
        """Of this host."""
        return super().keyframe(self.host)

    def publish(self, stimulus: Stimulus, outcome: Outcome) -> None:
        """The decision of this host on the stimulus of the first."""
        evicted = [event for event in outcome.events if isinstance(event, BlocksEvicted) and event.pool == 0]
        if evicted and not self.altered:
            self.altered = True
            prefix = unpack_hashes(evicted[0].hashes)[:1]
            while prefix[-1] in self.host.memory.parent_of:
                prefix.append(self.host.memory.parent_of[prefix[-1]])
            self.host.live_memory.policies[0].use(prefix[::-1], stimulus.at_ns)
        super().publish(stimulus, self.host.handle(stimulus))


def record(scenario: Scenario, directory: Path) -> Path:
    """Run a scenario and record it into an empty directory; returns the sealed file."""
    gap = LOST_FLUSH if scenario.expect == "gap" else None
    tape = SecondHost(scenario.config) if scenario.expect == "diverges" else Tape(gap)
    begin: tuple[int, bytes, bytes] | None = tape.keyframe(Leader(scenario.config))
    rig = build(
        scenario.config, scenario.engine, Script(scenario.name, scenario.requests), publish=tape.publish, check=True,
        audit_every=1, links=scenario.links,
    )

    def keyframe() -> tuple[int, bytes, bytes]:
        nonlocal begin
        taken, begin = begin, None
        return taken or tape.keyframe(rig.leader)

    tape.recorder = Recorder(
        directory, config=scenario.config, incarnation=scenario.name, keyframe=keyframe,
        clock_anchor_ns=CLOCK_ANCHOR_NS, keyframe_events=KEYFRAME_EVENTS,
        labels={
            "shows": scenario.shows, **({"expect": scenario.expect} if scenario.expect else {}),
            **SimulatedMachine(leader=scenario.config, engine=scenario.engine, links=scenario.links).labels(),
        },
    )
    scenario.drive(rig)
    tape.flush()
    tape.recorder.close()
    if tape.recorder.status().not_recorded and scenario.expect != "gap":
        raise RuntimeError(f"{scenario.name}: {tape.recorder.status().not_recorded} events were not recorded")
    (path,) = directory.glob("*.mcap")
    return path


def from_capture(name: str, directory: Path) -> Path:
    """Feed what an engine published to a leader and record it into an empty directory, as an import does.

    Refuses a capture of which anything is unknown or lost, and a recording that does not replay.
    """
    frames = list(read_frames(HERE / "kv-events" / f"{name}.bin"))
    streams, tape, numbers = CaptureStreams(), Tape(), count(1)
    config = LeaderConfig()
    leader = Leader(config, check=True, audit_every=1)
    dispatcher = Dispatcher(leader, lambda: streams.now_ns, publish=tape.publish)
    tape.recorder = Recorder(
        directory, config=config, incarnation=name, keyframe=lambda: tape.keyframe(leader),
        clock_anchor_ns=round(frames[0].received * 1e9), keyframe_events=KEYFRAME_EVENTS,
        labels={"shows": CAPTURES[name]},
    )
    for frame in frames:
        streams.take(frame, dispatcher, lambda: next(numbers))
    tape.flush()
    tape.recorder.close()
    (path,) = directory.glob("*.mcap")
    lost = [
        (one.unknown_events, one.malformed_events, one.bad_payloads, one.gaps, one.restarts, one.refused_blocks)
        for one in (stream.counts for stream in streams.streams.values())
    ]
    report = verify(path)
    if not report.ok or any(map(any, lost)):
        raise RuntimeError(f"{name}: {report.first_difference}; {lost} of its publishers were not understood")
    return path


def check(scenario: Scenario, path: Path, bytes_max: int = BYTES_MAX) -> None:
    """Refuse a recording that does not show what it should, replays otherwise than it should, or is too large."""
    events = [event for batch in Recording.open(path).events() for event in batch]
    if not scenario.proof(events):
        raise RuntimeError(f"{scenario.name} does not show: {scenario.shows}; states {sorted(visited(events))}")
    report = verify(path)
    if (report.first_difference is not None) != (scenario.expect == "diverges"):
        raise RuntimeError(f"{scenario.name} should {scenario.expect or 'replay'}; {report.first_difference}")
    if path.stat().st_size > bytes_max:
        raise RuntimeError(f"{scenario.name} has {path.stat().st_size} bytes, above {bytes_max}")


def same(one: Path, other: Path) -> bool:
    """Whether two recordings hold the same frames."""
    return other.exists() and list(Recording.open(one).frames()) == list(Recording.open(other).frames())


def differences(kept: Path, made: Path) -> list[str]:
    """The differences that a reviewer looks at: as ``rec diff`` of the file that is kept and the one made now."""
    found = diff(evidence_of(Recording.open(kept)), evidence_of(Recording.open(made)))
    if found.equal:
        return ["every event is the same: the stimuli, the keyframes or the description differ"]
    return difference_lines(found, top=3)


def make(scenario: Scenario, kept: Path, bytes_max: int, *, only_check: bool) -> bool:
    """Make, or only compare, the recording of a scenario; returns whether today's code makes another one."""
    with tempfile.TemporaryDirectory() as directory:
        made = record(scenario, Path(directory))
        check(scenario, made, bytes_max)
        equal = same(made, kept)
        changes = [] if equal or not kept.exists() else differences(kept, made)
        if not equal and not only_check:
            kept.write_bytes(made.read_bytes())
    state = "unchanged" if equal else "would change" if only_check else "written"
    print(f"{scenario.name:20} {state}, {kept.stat().st_size if kept.exists() else 0:,} bytes")
    for line in changes:
        print(f"    {line}")
    return not equal


def answer_of(case: Case) -> dict[str, object]:
    """The entry of a case in ``cases.json``: its question, its answer, and the event that decides it."""
    path = HERE / "cases" / f"{case.name}.mcap"
    event = case.decides([event for batch in Recording.open(path).events() for event in batch])
    return {
        "name": case.name, "question": case.question, "answer": case.answer, "request": case.request,
        "origin": REAL_ENGINES.get(case.name, "the simulated engine"),
        "event": {"seq": event.seq, "at_ns": event.at_ns, "kind": type(event).__name__},
    }


def make_cases(*, only_check: bool) -> int:
    """Make, or only compare, the cases and their answers; returns how many differ."""
    different = 0
    for case in CASES:
        if case.scenario is not None:
            kept = HERE / "cases" / f"{case.name}.mcap"
            different += make(case.scenario, kept, CASE_BYTES_MAX, only_check=only_check)
    file = HERE / "cases" / "cases.json"
    text = json.dumps([answer_of(case) for case in CASES], indent=1) + "\n"
    equal = file.exists() and file.read_text(encoding="utf-8") == text
    if not equal and not only_check:
        file.write_text(text, encoding="utf-8")
    print(f"cases/cases.json: {'unchanged' if equal else 'would change' if only_check else 'written'}")
    return different + (not equal)


def main(arguments: list[str]) -> int:
    """Make, or with ``--check`` compare, every recording."""
    only_check = arguments == ["--check"]
    different = sum(
        make(scenario, HERE / f"{scenario.name}.mcap", BYTES_MAX, only_check=only_check) for scenario in SCENARIOS
    )
    different += make_cases(only_check=only_check)
    for name, shows in CAPTURES.items():
        with tempfile.TemporaryDirectory() as directory:
            made = from_capture(name, Path(directory))
            kept = HERE / "kv-events" / f"{name}.mcap"
            equal = same(made, kept)
            different += not equal
            if not equal and not only_check:
                kept.write_bytes(made.read_bytes())
            print(f"kv-events/{name}: {'unchanged' if equal else 'would change' if only_check else 'written'}, {shows}")
    version = HERE / "versions" / f"{FORMAT_MAJOR}.{FORMAT_MINOR}.mcap"
    if not version.exists() and not only_check:  # made once for each version of the format, and never again
        version.write_bytes((HERE / f"{SCENARIOS[0].name}.mcap").read_bytes())
        print(f"versions/{version.name}: written, the first recording of this format")
    return 1 if only_check and different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
