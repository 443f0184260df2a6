"""A merged recording: the facts of all sources side by side at every moment, and every reader takes it."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.ids import ResetMode, SlotState
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.recording import merge as merging
from kvbm_console.recording.info import info_of
from kvbm_console.recording.merge import TRANSLATED, Source, merge, sources_of
from kvbm_console.recording.playback import Playback
from kvbm_console.recording.reader import Recording, items_of
from kvbm_console.recording.verify import verify
from kvbm_console.recording.writer import Recorder
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig, build
from kvbm_console.simulator.multiturn import Multiturn, Settings
from kvbm_console.stream.document import IDENTIFIERS
from kvbm_console.stream.feed import SnapshotTaken
from kvbm_console.wire.batches import pack_events, pack_stimuli

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
ANCHOR_NS = 10**18


def machine(seed: int, **changes: Any) -> tuple[Rig, list[tuple[st.Stimulus, list[ev.Event]]]]:
    """A small machine under pressure: preemptions, loads, evictions, all within a few hundred events."""
    tape: list[tuple[st.Stimulus, list[ev.Event]]] = []
    settings = Settings(
        sessions=6, prompts=2, system=96, user=60, output=40, turns=3, think=0.2, requests=12, seed=seed
    )
    config = LeaderConfig(**{"block_tokens": 16, "g2_blocks": 64, "offload_threshold": 0.0, **changes})
    rig = build(
        config, EngineConfig(g1_blocks=40, max_batch_tokens=128, max_running=8), Multiturn(settings),
        publish=lambda stimulus, outcome: tape.append((stimulus, outcome.events)), check=True,
    )
    return rig, tape


def recorded(
    directory: Path, tape: list[tuple[st.Stimulus, list[ev.Event]]], anchor_ns: int, *, skip: int = 0, lose: int = 0,
) -> Recording:
    """A recording of a run from its ``skip``-th stimulus on, without ``lose`` of them in its middle."""
    state = CacheState()

    def fold(part: list[tuple[st.Stimulus, list[ev.Event]]]) -> None:
        for _, events in part:
            for event in events:
                state.apply(event)

    fold(tape[:skip])
    recorder = Recorder(
        directory, config=LeaderConfig(), incarnation=directory.name, clock_anchor_ns=anchor_ns, sync_interval_s=None,
        keyframe=lambda: (state.seq, encode_facts(state), b""),
    )
    rest = tape[skip:]
    middle = len(rest) // 2
    for at in range(0, len(rest), 7):
        part = rest[at : at + 7]
        fold(part)
        events = [event for _, caused in part for event in caused]
        if events and not middle <= at < middle + lose:
            recorder.offer(pack_stimuli([stimulus for stimulus, _ in part]), pack_events(events))
    recorder.close()
    return Recording.open(directory)


def facts_of(state: CacheState, name: str, shift_ns: int) -> dict[str, Any]:
    """What is true of one source, in words that do not depend on its numbers."""
    iteration = state.iteration
    return {
        "slots": {
            f"{name}/{slot.request}": (
                slot.state, slot.computed_tokens(iteration), tuple(slot.hashes), tuple(slot.device_blocks),
                len(slot.outstanding), slot.hold is not None, slot.since_ns + shift_ns, slot.preemptions,
            )
            for slot in state.slots.values()
        },
        "pools": [
            (pool.info.tier, bytes(pool.content), pool.hash_of.tobytes(), pool.refs.tobytes(), pool.counts)
            for pool in state.pools
        ],
    }


def part_of(whole: CacheState, name: str, source: int) -> dict[str, Any]:
    """The same words of the merged facts."""
    slots = {request[1:]: facts for request, facts in facts_of(whole, "", 0)["slots"].items()}
    return {
        "slots": {request: facts for request, facts in slots.items() if request.startswith(f"{name}/")},
        "pools": [
            (pool.info.tier, bytes(pool.content), pool.hash_of.tobytes(), pool.refs.tobytes(), pool.counts)
            for pool in whole.pools if pool.info.source == source
        ],
    }


def compare(whole: CacheState, sources: list[Source], at_ns: int, base_ns: int) -> None:
    """At this moment of the merged recording, every source's part is what the source itself says."""
    for index, source in enumerate(sources):
        shift = source.recording.segments[0].about.clock_anchor_ns - base_ns
        state = CacheState()
        for item in items_of(source.recording):
            if isinstance(item, SnapshotTaken):
                if item.state.at_ns + shift <= at_ns:
                    state = item.state
            elif hasattr(item, "events"):
                for event in item.events:
                    if event.at_ns + shift <= at_ns and event.seq == state.seq:
                        state.apply(event)
        mine, own = part_of(whole, source.name, index + 1), facts_of(state, source.name, shift)
        assert mine == own, source.name


@pytest.mark.parametrize("seed", range(3))
def test_the_merged_facts_are_those_of_the_sources_side_by_side(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    for index, name in enumerate(("a", "b", "c")):
        rig, tape = machine(10 * seed + index, g2_blocks=16 + 40 * index)
        rig.run_to_end()
        recorded(tmp_path / name, tape, ANCHOR_NS + dice.randrange(10**9))
    sources = sources_of([tmp_path / name for name in ("a", "b", "c")])
    made = merge(sources, tmp_path / "all.mcap")
    report = verify(tmp_path / "all.mcap")
    assert (report.first_difference, report.gaps, report.decisions) == (None, 0, False)
    assert made.events == sum(source.recording.events_count for source in sources)
    whole = Recording.open(tmp_path / "all.mcap")
    base_ns = whole.segments[0].about.clock_anchor_ns
    events = [event for batch in whole.events() for event in batch]
    ends = [one for one, other in pairwise(events) if other.at_ns > one.at_ns]
    for event in dice.sample(ends, 6):
        compare(whole.state_at(event.seq), sources, event.at_ns, base_ns)
    end = whole.state_at(whole.last_seq)
    totals = [source.recording.state_at(source.recording.last_seq).totals for source in sources]
    assert end.totals.preemptions == sum(one.preemptions for one in totals)
    for tier in range(4):
        assert end.totals.evicted_blocks[tier] == sum(one.evicted_blocks[tier] for one in totals)
    assert any(event.new is SlotState.PREEMPTED for event in events if isinstance(event, ev.SlotMoved))


def test_a_recording_that_is_given_twice_has_two_names(tmp_path: Path) -> None:
    rig, tape = machine(1)
    rig.run_to_end()
    recorded(tmp_path / "a", tape, ANCHOR_NS)
    sources = sources_of([tmp_path / "a", tmp_path / "a"])
    assert sources[1].name == f"{sources[0].name}#2"
    merge(sources, tmp_path / "all.mcap")
    assert verify(tmp_path / "all.mcap").first_difference is None


def test_gaps_and_sources_recorded_from_their_middle_are_gaps_with_their_numbers(tmp_path: Path) -> None:
    for index, name in enumerate(("a", "b")):
        rig, tape = machine(7 + index)
        rig.run_to_end()
        recorded(tmp_path / name, tape, ANCHOR_NS, skip=200 * index, lose=30)
    sources = sources_of([tmp_path / "a", tmp_path / "b"])
    merge(sources, tmp_path / "all.mcap")
    whole = Recording.open(tmp_path / "all.mcap")
    assert verify(whole.path).first_difference is None
    late = sources[1].recording
    assert [gap.reason.partition(":")[0] for gap in whole.gaps if "fell behind" in gap.reason] == ["a", "b"]
    (begin,) = (gap for gap in whole.gaps if "is recorded from its event" in gap.reason)
    assert begin.count == late.first_seq
    missing = sum(gap.count for source in sources for gap in source.recording.gaps)
    assert sum(gap.count for gap in whole.gaps) == missing + late.first_seq
    assert whole.last_seq + 1 == sum(source.recording.last_seq + 1 for source in sources)
    end = whole.state_at(whole.last_seq)
    events = [event for batch in whole.events() for event in batch]
    compare(end, sources, events[-1].at_ns, whole.segments[0].about.clock_anchor_ns)


def test_a_reset_and_a_freeze_of_one_source_leave_the_others_as_they_are(tmp_path: Path) -> None:
    rig, tape = machine(21)
    rig.run(rig.now_ns + 400_000_000)
    assert rig.leader.state.slots
    rig.dispatcher.submit(st.FreezeRequested, "me", 10**9)
    rig.dispatcher.submit(st.ThawRequested, "me")
    rig.dispatcher.submit(st.ResetRequested, ResetMode.LOGICAL)
    rig.run_to_end()
    recorded(tmp_path / "a", tape, ANCHOR_NS)
    rig, tape = machine(22)
    rig.dispatcher.submit(st.LeaseGranted, "me")
    stop = BreakpointSpec(to_state=SlotState.DECODING, one_shot=True)
    rig.dispatcher.submit(st.BreakpointsReplaced, "me", (stop,))
    rig.run(rig.now_ns + 300_000_000)
    rig.dispatcher.submit(st.FreezeRequested, "me", 10**9)
    rig.run(rig.now_ns + 3_000_000_000)
    recorded(tmp_path / "b", tape, ANCHOR_NS)
    sources = sources_of([tmp_path / "a", tmp_path / "b"])
    merge(sources, tmp_path / "all.mcap")
    whole = Recording.open(tmp_path / "all.mcap")
    assert verify(whole.path).first_difference is None
    assert [(gap.count, gap.reason) for gap in whole.gaps] == [(1, "a: a reset, which is of one source alone")]
    end = whole.state_at(whole.last_seq)
    assert end.frozen is not None
    assert end.frozen.by == "b/me"
    assert {known.owner for known in end.breakpoints.values()} == {"b/me"}
    assert [hold.owner for hold in end.holds.values()] == ["b/me"]
    assert [end.slots[hold.slot].hold for hold in end.holds.values()] == list(end.holds)
    events = [event for batch in whole.events() for event in batch]
    compare(end, sources, events[-1].at_ns, whole.segments[0].about.clock_anchor_ns)


def test_keyframes_stand_between_stimuli_and_a_seek_folds_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merging, "BATCH_EVENTS", 20)
    monkeypatch.setattr(merging, "KEYFRAME_EVENTS", 100)
    merge(sources_of([RECORDINGS / "thrash.mcap", RECORDINGS / "stuck-slot.mcap"]), tmp_path / "all.mcap")
    whole = Recording.open(tmp_path / "all.mcap")
    assert info_of(whole).keyframes > 5
    assert verify(whole.path).first_difference is None
    playback = Playback(whole)
    for seq in (whole.last_seq, 0, 517, 300, 301, 299):
        playback.seek(seq)
        fold = whole.advance(whole.state_at(whole.first_seq - 1), seq)
        assert encode_facts(playback.state) == encode_facts(fold)


def test_every_command_takes_a_merged_recording_also_another_merge(tmp_path: Path) -> None:
    def run(*words: str | Path, code: int = 0) -> str:
        result = CliRunner().invoke(cli, [str(word) for word in words])
        assert result.exit_code == code, result.output
        return result.output

    made, again = tmp_path / "all.mcap", tmp_path / "again.mcap"
    names = [RECORDINGS / f"{name}.mcap" for name in ("onboard-from-host", "stuck-slot", "gap")]
    run("rec", "merge", *names, "--out", made)
    assert "engines    1: 24 blocks of 16 tokens; 2: 32" in run("rec", "info", made)
    assert run("rec", "verify", made).splitlines()[-1] == "equal"
    assert '"stuck-slot/agent-0093"' in run("replay", made, "--format", "json")
    assert "found G2 10; 2 of 12 blocks missed" in run("why", "onboard-from-host/chat.1", made)
    assert "stuck-slot/agent-0093" in run("doctor", made, code=1)
    assert "equal" in run("rec", "diff", made, made)
    for form in ("jsonl", "chrome"):
        run("rec", "export", made, "--to", form, "--out", tmp_path / form)
    run("rec", "cut", made, tmp_path / "part.mcap", "--request", "gap/chat*")
    run("rec", "merge", made, RECORDINGS / "thrash.mcap", "--out", again)
    assert run("rec", "verify", again).splitlines()[-1] == "equal"
    assert "found G2 10; 2 of 12" in run("why", "all/onboard-from-host/chat.1", again)
    for words in (
        ("rec", "merge", made, "--out", tmp_path / "one.mcap"), ("rec", "merge", *names, "--out", made),
        ("rec", "merge", *names, "--out", tmp_path / "x.mcap", "--where", "seq > 1"),
        ("rec", "merge", *names, "--out", tmp_path / "x.mcap", "--format", "jsonl"),
        ("rec", "merge", *names, "--format", "json"),
    ):
        assert len(run(*words, code=2).splitlines()) == 1


def test_every_field_that_names_something_of_its_source_is_translated() -> None:
    fields = {field for kind in ev.AnyEvent.__args__ for field in kind.__struct_fields__}
    assert (IDENTIFIERS & fields) <= set(TRANSLATED)
    assert {"request", "owner", "by", "specs", "session"} <= set(TRANSLATED)
    assert set(TRANSLATED) <= fields
