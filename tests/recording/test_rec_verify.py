"""Verification finds what is not as it was, and says where; the recordings of the repository are equal to today."""

import errno
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import InvariantViolation
from kvbm_console.core.ids import EvictRule, Tier
from kvbm_console.core.leader import Leader, pipeline
from kvbm_console.core.leader.decider import Decider
from kvbm_console.core.leader.victims import Evictable
from kvbm_console.core.snapshots import digest, encode_facts
from kvbm_console.core.stimuli import NoteReported, Stimulus
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.recording.info import info_of
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.recover import recover_directory
from kvbm_console.recording.verify import VerifyReport, verify
from kvbm_console.recording.writer import RETRY_S, Recorder
from kvbm_console.testing import assert_invariants
from kvbm_console.wire.batches import pack_events, pack_stimuli
from recordings import regenerate
from tests.recording.helpers import Disk, FakeClock, Log, Run, real_run, write_active

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


def recorded(directory: Path, run: Run, stimuli: list[Stimulus], events: list[list[ev.Event]]) -> VerifyReport:
    """The report about a recording of exactly these, from an empty leader on."""
    leader = Leader(run.config)
    recorder = Recorder(
        directory, config=run.config, incarnation="altered", sync_interval_s=None, keyframe_events=10**9,
        keyframe=lambda: (0, encode_facts(leader.state), leader.export()),
    )
    for at in range(0, len(stimuli), 20):
        batch = [event for caused in events[at : at + 20] for event in caused]
        recorder.offer(pack_stimuli(stimuli[at : at + 20]), pack_events(batch) if batch else None)
    recorder.close()
    return verify(directory)


def test_a_run_is_equal_to_itself_through_every_keyframe(tmp_path: Path) -> None:
    run = real_run()
    run.record(tmp_path, [30], keyframe_events=200, segment_bytes=30_000)
    report = verify(tmp_path)
    assert report.first_difference is None
    assert (report.ok, report.events, report.stimuli) == (True, len(run.all_events), len(run.stimuli))
    assert (report.not_folded, report.not_rerun) == (0, 0)
    assert report.keyframes > 5
    assert report.audits > 100
    assert report.digest == f"{digest(run.state_after(len(run.all_events) - 1)):016x}"


def test_an_altered_event_is_found_with_stimulus_number_and_field(tmp_path: Path) -> None:
    run = real_run()
    events = [list(caused) for caused in run.events]
    n, place = next(
        (n, place) for n, caused in enumerate(events) for place, event in enumerate(caused)
        if isinstance(event, ev.IterationAdvanced) and n > 100
    )
    altered = events[n][place]
    assert isinstance(altered, ev.IterationAdvanced)
    events[n][place] = msgspec.structs.replace(altered, running=altered.running + 1)
    report = recorded(tmp_path, run, run.stimuli, events)
    assert not report.ok
    assert report.first_difference == (
        f"stimulus {n}, event {altered.seq}: IterationAdvanced.running was {altered.running + 1} "
        f"and is now {altered.running}"
    )


def test_a_parent_that_was_evicted_before_its_child_is_found_in_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that evicts what was stored first, then and in the rerun: decisions are equal, and break I13."""

    def oldest(leader: Decider, pool: PoolFacts, missing: int, hashes: list[int]) -> tuple[list[int], EvictRule]:
        going = Evictable(pool)
        return [place for key, place in pool.by_hash.items() if going(key)][:missing], EvictRule.RECENCY

    monkeypatch.setattr(pipeline, "to_evict", oldest)
    run = real_run(g2_blocks=95)
    report = recorded(tmp_path, run, run.stimuli, run.events)
    assert report.first_difference is not None
    assert "I13 is broken: pool 0 gave up" in report.first_difference
    with pytest.raises(AssertionError, match="I13 is broken"):
        assert_invariants(tmp_path)
    leader = Leader(run.config, check=True)
    with pytest.raises(InvariantViolation, match="I13"):
        deque(map(leader.handle, run.stimuli), maxlen=0)


def test_an_altered_stimulus_is_found_at_its_first_effect(tmp_path: Path) -> None:
    run = real_run()
    stimuli = list(run.stimuli)
    n = next(n for n, caused in enumerate(run.events) if n > 50 and caused)
    stimuli[n] = NoteReported(n, stimuli[n].at_ns, 0, None, ev.Note.CLOCK_STEPPED, "somebody else")
    report = recorded(tmp_path, run, stimuli, run.events)
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.startswith(f"stimulus {n}, event {run.events[n][0].seq}: ")


def test_a_leader_that_decides_otherwise_is_found(tmp_path: Path) -> None:
    """The recording of one configuration, said to be of another."""
    run = real_run()
    other = Run(msgspec.structs.replace(run.config, offload_threshold=0.0), run.stimuli, run.events)
    report = recorded(tmp_path, other, run.stimuli, run.events)
    assert not report.ok
    assert report.first_difference is not None
    assert "the leader now decides" in report.first_difference


def test_what_a_closed_recording_lacks_is_a_difference_and_what_a_killed_one_lacks_is_not(tmp_path: Path) -> None:
    run = real_run()
    last = max(n for n, caused in enumerate(run.events) if caused)
    events = [*run.events[:last], [], *run.events[last + 1 :]]
    report = recorded(tmp_path / "closed", run, run.stimuli, events)
    assert report.first_difference is not None
    assert "and the recording has its end there" in report.first_difference

    recorder = run.record(tmp_path / "killed", [25], seal=False)
    path = Path(recorder.status().path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 400])  # the end, and a part of the last events
    recover_directory(tmp_path / "killed")
    report = verify(tmp_path / "killed")
    assert report.first_difference is None
    assert report.events < len(run.all_events)


def test_a_gap_is_counted_and_comparison_goes_on_behind_it(tmp_path: Path) -> None:
    disk, clock, run = Disk(), FakeClock(), real_run()
    flushes = 0

    def fail_for_a_while(recorder: Recorder) -> None:
        nonlocal flushes
        assert recorder.settle()
        flushes += 1
        disk.write_error = errno.ENOSPC if 5 <= flushes < 8 else None
        clock.now_ns += round(RETRY_S * 10**9)

    run.record(tmp_path, [20], fail_for_a_while, open_file=disk.open, clock=clock)
    report = verify(tmp_path)
    assert report.first_difference is None
    assert report.missing > 0
    assert report.events + report.missing == len(run.all_events)
    assert report.stimuli > len(run.stimuli) // 2


def test_a_bug_that_was_undone_is_undone_again(tmp_path: Path) -> None:
    """The service states a stimulus that its leader could not handle; verification accepts exactly that."""
    config = LeaderConfig()
    leader = Leader(config)
    violated = ev.InvariantViolated(0, 5, 0, "I2", "a bug of that time", ())
    recorder = Recorder(
        tmp_path, config=config, incarnation="bug", sync_interval_s=None,
        keyframe=lambda: (0, encode_facts(leader.state), leader.export()),
    )
    stimulus = NoteReported(0, 5, 0, None, ev.Note.CLOCK_STEPPED, "")
    recorder.offer(pack_stimuli([stimulus]), pack_events([violated]))
    recorder.close()
    assert verify(tmp_path).first_difference is None


def test_a_broken_invariant_in_the_events_is_found(tmp_path: Path) -> None:
    """Events that fold, whose facts are wrong: state replay finds them without any leader's help."""
    run = real_run()
    events = [list(caused) for caused in run.events]
    n, place = next(
        (n, place) for n, caused in enumerate(events) for place, event in enumerate(caused)
        if isinstance(event, ev.DeviceBlocksReleased)
    )
    dropped = events[n][place]
    events[n][place] = ev.Noted(dropped.seq, dropped.at_ns, dropped.cause, ev.Note.CLOCK_STEPPED, "")
    directory = tmp_path
    recorder = Recorder(
        directory, config=run.config, incarnation="x", sync_interval_s=None, keyframe_events=10**9,
        keyframe=lambda: (0, encode_facts(Leader(run.config).state), Leader(run.config).export()),
    )
    # Without stimuli only the fold is compared.
    for caused in events:
        if caused:
            recorder.offer(None, pack_events(caused))
    recorder.close()
    report = verify(directory)
    assert not report.ok


# --- recordings/ and the shell ---------------------------------------------------------------------------------------


def shipped() -> list[Path]:
    """The recordings of the repository."""
    return sorted([*RECORDINGS.glob("*.mcap"), *RECORDINGS.glob("kv-events/*.mcap")])


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_shipped_recordings_replay_by_state_and_by_decision(path: Path) -> None:
    expect = info_of(Recording.open(path)).labels.get("expect", "")
    report = verify(path)
    assert (report.first_difference is not None) == (expect == "diverges")
    assert report.not_folded == report.not_rerun == 0
    assert report.gaps == (expect == "gap")
    assert expect == "diverges" or report.stimuli == info_of(Recording.open(path)).stimuli > 0
    assert path.stat().st_size <= 50_000


def test_shipped_recordings_are_described_and_made_by_the_command() -> None:
    readme = (RECORDINGS / "README.md").read_text()
    made = {scenario.name for scenario in regenerate.SCENARIOS} | set(regenerate.CAPTURES)
    assert {path.stem for path in shipped()} == made
    for name, shows in regenerate.CAPTURES.items():
        assert f"| `kv-events/{name}.mcap` | {shows} |" in readme
    for scenario in regenerate.SCENARIOS:
        assert f"| `{scenario.name}.mcap` | {scenario.shows} |" in readme
    for path in (RECORDINGS / "versions").glob("*.mcap"):
        assert f"| `versions/{path.name}` |" in readme
    assert regenerate.main(["--check"]) == 0, "today's code makes other recordings: run make recordings"


def test_the_two_hosts_part_at_the_step_at_which_one_was_altered() -> None:
    """Up to there the files are equal, and verification, comparison and regeneration name the same event."""
    one, other = Recording.open(RECORDINGS / "offload-pressure.mcap"), Recording.open(RECORDINGS / "two-hosts.mcap")
    events = [[event for batch in host.events() for event in batch] for host in (one, other)]
    mine = next(a for a, b in zip(*events, strict=False) if a != b)
    assert isinstance(mine, ev.BlocksEvicted)
    assert one.state_at(mine.seq - 1).pools[mine.pool].info.tier is Tier.G2
    found = verify(other.path).first_difference
    assert found is not None
    assert found.startswith(f"stimulus {mine.cause}, event {mine.seq}: BlocksEvicted.ids was ")
    assert regenerate.differences(one.path, other.path)[3].startswith(f"first difference in ids: event {mine.seq}")


def test_what_would_change_is_shown_readably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A kept file that today's code makes otherwise: the first event that differs, then the figures."""
    (tmp_path / "versions").mkdir()
    (tmp_path / "two-hosts.mcap").write_bytes((RECORDINGS / "offload-pressure.mcap").read_bytes())
    monkeypatch.setattr(regenerate, "HERE", tmp_path)
    monkeypatch.setattr(regenerate, "SCENARIOS", [one for one in regenerate.SCENARIOS if one.name == "two-hosts"])
    monkeypatch.setattr(regenerate, "CAPTURES", {})
    monkeypatch.setattr(regenerate, "make_cases", lambda *, only_check: 0)
    assert regenerate.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "would change" in printed
    assert "first difference in ids: event 132" in printed
    assert regenerate.main([]) == 0
    assert regenerate.main(["--check"]) == 0


def test_verify_from_the_shell(tmp_path: Path) -> None:
    run = CliRunner()
    good = run.invoke(cli, ["rec", "verify", str(shipped()[0])])
    assert (good.exit_code, good.stdout.splitlines()[-1]) == (0, "equal")
    events = [list(caused) for caused in real_run().events]
    first = events[0][0]
    events[0][0] = ev.Noted(first.seq, first.at_ns, first.cause, ev.Note.CLOCK_STEPPED, "")
    report = recorded(tmp_path, real_run(), real_run().stimuli, events)
    assert not report.ok
    bad = run.invoke(cli, ["rec", "verify", str(tmp_path)])
    assert bad.exit_code == 1
    assert bad.stdout.splitlines()[-1] == f"first difference: {report.first_difference}"


def test_json_of_info_and_verify_is_stable(tmp_path: Path) -> None:
    path = write_active(tmp_path, Log(), [3, 4])
    run = CliRunner()
    info = msgspec.json.decode(run.invoke(cli, ["rec", "info", "--format", "json", str(path)]).stdout)
    assert list(info) == [
        "path", "incarnation", "first_seq", "last_seq", "events", "stimuli", "requests", "live_requests", "engines",
        "keyframes", "gaps", "versions", "config", "config_digest", "labels", "clock_anchor_ns", "first_ns", "last_ns",
        "bytes", "bytes_per_event", "finished", "segments", "runs", "unreadable",
    ]
    assert (info["first_seq"], info["last_seq"], info["events"], info["stimuli"], info["gaps"]) == (0, 6, 7, 7, [])
    assert list(info["versions"]) == ["format", "wire", "program"]
    report = msgspec.json.decode(run.invoke(cli, ["rec", "verify", "--format", "json", str(path)]).stdout)
    assert list(report) == [
        "path", "ok", "first_difference", "events", "stimuli", "not_folded", "not_rerun", "keyframes", "audits", "gaps",
        "missing", "digest", "decisions", "unknown", "run", "findings", "earlier", "older",
    ]
    assert report["ok"] is True
