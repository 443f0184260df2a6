"""The pytest plugin in tests of its own: what it records and keeps, and the documented example as it is printed."""

import re
import shutil
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kvbm_console import pytest_plugin
from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.stimuli import MatchRequested, RequestArrived
from kvbm_console.recording.info import info_of
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from kvbm_console.testing import assert_healthy, assert_invariants, assert_replays, assert_story, prompt, taping
from kvbm_console.testing.run import TAPES_MAX
from kvbm_console.testing.story import Story
from tests.core.script import Script
from tests.recording.helpers import real_run

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "recordings"


@pytest.fixture(autouse=True)
def _this_plugin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run_pytest(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Pytest in a process and a directory of its own, with no other plugin."""
    return pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "-p", "kvbm_console.pytest_plugin", *arguments, timeout=60
    )


def recordings(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.mcap"))


def test_pytest_finds_the_plugin_by_itself() -> None:
    (point,) = entry_points(group="pytest11", name="kvbm_console")
    assert point.load() is pytest_plugin


def test_loading_it_costs_nothing(pytester: pytest.Pytester) -> None:
    done = pytester.run(sys.executable, "-c", "import kvbm_console.pytest_plugin, sys; print(sorted(sys.modules))")
    loaded = done.stdout.str()
    for heavy in ("kvbm_console.core.leader", "msgspec", "grpc", "google", "textual", "mcap"):
        assert f"'{heavy}'" not in loaded


# --- the documented example ------------------------------------------------------------------------------------------


def test_the_documented_examples_run_as_they_are_printed(pytester: pytest.Pytester) -> None:
    text = (ROOT / "tests" / "PLUGIN.md").read_text()
    chat, race = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    pytester.makepyfile(test_chat=chat, test_race=race)
    shutil.copy(RECORDINGS / "stuck-slot.mcap", pytester.path)
    run_pytest(pytester, "-W", "error").assert_outcomes(passed=4)


# --- keeping ---------------------------------------------------------------------------------------------------------

FAILING = """
    from kvbm_console.testing import assert_story, prompt

    def test_wrong(kvbm_run):
        run = kvbm_run([prompt("a", (1, 40))], g2_blocks=8)
        assert_story(run.slot("a"), ["initialized", "onboarding", ...])

    def test_right(kvbm_run):
        run = kvbm_run([prompt("a", (1, 40))], g2_blocks=8)
        assert_story(run.slot("a"), ["initialized", "prefilling", ...])

    def test_broken(kvbm_run):
        def drive(rig):
            rig.run(until_ns=5_000_000)
            raise RuntimeError("the machine broke")

        kvbm_run([prompt("a", (1, 40))], drive=drive)
"""


def test_a_failure_keeps_the_recording_and_prints_its_path_and_nothing_else_is_written(
    pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_it=FAILING)
    result = run_pytest(pytester, "--basetemp", str(pytester.path / "tmp"))
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines([
        "*the story of a differs: expected 'onboarding', and *prefilling*", "*kvbm-console*",
        "recording kept: *test_it.py-test_wrong-0.mcap", "  kvbm-console replay *", "  kvbm-console doctor *",
        "*the machine broke*", "recording kept: *test_it.py-test_broken-0.mcap",
    ])
    broken, wrong = recordings(pytester.path)
    assert verify(wrong).ok
    assert info_of(Recording.open(wrong)).labels == {"test": "test_it.py::test_wrong"}
    assert 0 < info_of(Recording.open(broken)).events < info_of(Recording.open(wrong)).events


def test_kvbm_record_records_every_test_with_and_without_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it="""
        from kvbm_console.core.config import LeaderConfig
        from kvbm_console.core.leader import Leader
        from kvbm_console.core.stimuli import RequestArrived
        from kvbm_console.testing import prompt

        def test_with(kvbm_run):
            kvbm_run([prompt("a", (1, 40))])

        def test_without():
            for number in range(2):
                Leader(LeaderConfig()).handle(RequestArrived(0, 0, 1, None, f"r{number}", b"", 10, 1, 0, None))

        def test_no_leader_at_all():
            pass
    """)
    run_pytest(pytester, "--kvbm-record").assert_outcomes(passed=3)
    kept = recordings(pytester.path / "kvbm-recordings")
    assert [path.name for path in kept] == [
        "test_it.py-test_with-0.mcap", "test_it.py-test_without-0.mcap", "test_it.py-test_without-1.mcap",
    ]
    assert all(verify(path).ok for path in kept)
    run_pytest(pytester, "--kvbm-record").assert_outcomes(passed=3)
    assert recordings(pytester.path / "kvbm-recordings") == kept, "a second run replaces the first"


def test_kvbm_record_loses_no_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        from kvbm_console.simulator.config import EngineConfig
        from kvbm_console.testing import prompt

        ENGINE = EngineConfig(g1_blocks=24, max_batch_tokens=128, max_running=8)

        @pytest.mark.parametrize("name", ["a/b", "a b", "x" + "y" * 300, "z" + "y" * 300])
        def test_named(kvbm_run, name):
            kvbm_run([prompt("a", (1, 50))], engine=ENGINE)

        def test_elsewhere(kvbm_run, tmp_path, monkeypatch):
            monkeypatch.chdir(tmp_path)
            kvbm_run([prompt("a", (1, 50))], engine=ENGINE)

        @pytest.fixture
        def machine(kvbm_run):
            run = kvbm_run([prompt("a", (1, 50))], engine=ENGINE)
            yield run
            assert run.events == []

        def test_by_a_fixture(machine):
            assert machine.events == []
    """)
    done = run_pytest(pytester, "--kvbm-record")
    done.assert_outcomes(passed=5, failed=1, errors=1)
    kept = recordings(pytester.path / "kvbm-recordings")
    assert len(kept) == 6
    assert done.stdout.str().count(f"recording kept: {pytester.path}/kvbm-recordings/") == 2
    for path in kept:
        assert_replays(path)


def test_a_place_for_recordings_that_is_a_file_is_one_sentence(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_one="def test_one(): pass")
    done = run_pytest(pytester, "--kvbm-record", "test_one.py")
    assert done.ret is pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: --kvbm-record needs a directory, and *test_one.py is none: File exists"])


async def _never_run(rig: object) -> None:
    raise AssertionError


def test_arguments_that_would_do_nothing_are_refused(kvbm_leader, kvbm_run) -> None:  # type: ignore[no-untyped-def]
    for make in (lambda **more: kvbm_leader(LeaderConfig(), **more),
                 lambda **more: kvbm_run([prompt("a", (1, 50))], config=LeaderConfig(), **more)):
        with pytest.raises(TypeError, match="not both: g2_blocks would be ignored"):
            make(g2_blocks=5)
    with pytest.raises(TypeError, match="drive is a coroutine function and was not run"):
        kvbm_run([prompt("a", (1, 50))], drive=_never_run)


def test_a_tape_of_a_real_run_replays(tmp_path: Path) -> None:
    run = real_run(12, 48, 96)
    with taping() as tapes:
        script = Script(twin=False, checks=False)
        script.arrive("a", "wxyz")
        assert script.admit("a")
        script.step(3)
        script.move_all()
    (tape,) = tapes.all
    path = tape.save(tmp_path / "a.mcap", "a")
    assert_replays(path)
    assert len([event for batch in Recording.open(path).events() for event in batch]) == len(script.events)
    assert run.all_events  # another leader, made before, is on no tape


def test_of_very_many_leaders_the_first_are_taped() -> None:
    with taping() as tapes:
        for _ in range(TAPES_MAX + 5):
            Script(twin=False, checks=False)
    assert (len(tapes.all), tapes.not_taped) == (TAPES_MAX, 5)


# --- assertions ------------------------------------------------------------------------------------------------------


def story() -> Story:
    from kvbm_console.core.state import CacheState
    from kvbm_console.testing.story import tell

    script = Script(g1=6, g2=8, twin=False, checks=False, offload_threshold=0.0)
    script.arrive("a", "wxyz")
    assert script.admit("a")
    script.step(2)
    script.move_all()
    script.finish("a")
    return tell("a", CacheState(), script.events)


@pytest.mark.parametrize("expected", [
    ["initialized", "prefilling", "decoding", "finished"],
    ["initialized", ..., "finished"],
    [..., "decoding", ...],
    ["SlotOpened", "PrefixScored: no hit", "SlotClosed"],
    ["CandidatePlanned", "CandidatePromoted", "CandidateEnded: completed"],
    [..., "finished", "SlotClosed"],
    [...],
])
def test_stories_that_are_true(expected: list[str]) -> None:
    assert_story(story(), expected)


@pytest.mark.parametrize(("expected", "words"), [
    (["initialized", "decoding"], "expected 'decoding', and"),
    (["initialized", "prefilling", "decoding"], "expected nothing more, and"),
    (["initialized", "prefilling", "decoding", "finished", "preempted"], "expected 'preempted', and the story ends"),
    ([..., "preempted", ...], "preempted"),
    (["PrefixScored: G2"], "expected 'PrefixScored: G2'"),
    (["prefiling"], "neither a state nor a kind of event: prefiling"),
])
def test_stories_that_are_not_true(expected: list[str], words: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(words)):
        assert_story(story(), expected)


def test_invariants_of_a_broken_run_name_the_event(kvbm_leader) -> None:  # type: ignore[no-untyped-def]
    leader = kvbm_leader(g1_blocks=4)
    leader.tell(RequestArrived, "a", b"", 3, 8, 0, None)
    assert_invariants(leader)
    leader.leader.state.pools[0].refs[2] += 1
    with pytest.raises(AssertionError, match="I2 is broken"):
        assert_invariants(leader.leader)
    with pytest.raises(AssertionError, match="I10"):
        assert_invariants(leader)


def test_a_recording_that_diverges_does_not_replay() -> None:
    with pytest.raises(AssertionError, match="does not replay: stimulus"):
        assert_replays(RECORDINGS / "two-hosts.mcap")
    assert_replays(RECORDINGS / "thrash.mcap")


def test_health_is_what_doctor_says(kvbm_open, kvbm_run) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError, match="stuck: agent-0093"):
        assert_healthy(kvbm_open(RECORDINGS / "stuck-slot.mcap"))
    run = kvbm_run([prompt("a", (1, 200)), prompt("b", (1, 160), (2, 40), at_ms=50)])
    assert_healthy(run)
    assert diagnose(evidence_of(Recording.open(run.path))).ok


def test_a_path_is_written_anew_when_more_has_happened(kvbm_leader) -> None:  # type: ignore[no-untyped-def]
    leader = kvbm_leader()
    leader.tell(RequestArrived, "a", b"", 3, 8, 0, None)
    first = leader.path
    assert leader.path == first
    leader.tell(MatchRequested, "a", 0)
    assert leader.path != first
    assert info_of(Recording.open(leader.path)).events == len(leader.events)
