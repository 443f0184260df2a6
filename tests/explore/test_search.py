"""A search survives the engine: processes that die or hang are findings, and a fixed search runs each seed once."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.core.errors import UsageError
from kvbm_console.explore import search as module
from kvbm_console.explore.search import Search
from tests.cli.programs import DEADLINE_S, PROGRAM, environment

FAKE = str(Path(__file__).with_name("fake_engine.py"))


def search(**changes: Any) -> Search:
    fields: dict[str, Any] = {
        "connector": {"kv_connector": "X"}, "profiles": ("press",), "python": FAKE, "seeds": range(2), **changes,
    }
    return Search(**fields)


def test_each_seed_of_each_profile_runs_once() -> None:
    report = search(profiles=("press", "tight"), seeds=range(20, 33), processes=2).run()
    assert (report.release, report.runs, report.steps) == ("fake 1.0", 26, 260)
    assert report.findings == {}


def test_a_process_that_dies_or_hangs_is_a_finding_and_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.5)
    report = search(seeds=range(40)).run()
    assert set(report.findings) == {"progress: deadlock", "no crash: the process died", "progress: the engine hangs"}
    assert report.findings["no crash: the process died"].seed == 5
    assert report.findings["progress: the engine hangs"].verdict["sentence"] == "one run took more than 0 s"
    assert report.runs == 38


def test_a_finding_is_counted_and_shrunk() -> None:
    one = search(seeds=range(4))
    report = one.run()
    one.shrink(report)
    (finding,) = report.findings.values()
    assert (finding.seed, finding.times, finding.shrunk) == (3, 1, True)


def test_a_release_that_lacks_something_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "old")
    with pytest.raises(UsageError, match="explore: vLLM has no Scheduler here; --python names"):
        search().run()


@pytest.mark.parametrize(("how", "sentence"), [
    ("crashes", "ended with status 7 before it began"), ("hangs", "said nothing for 1 s"),
])
def test_a_process_that_never_begins_is_a_sentence(how: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", how)
    monkeypatch.setattr(module, "START_S", DEADLINE_S if how == "crashes" else 1)
    with pytest.raises(UsageError, match=sentence):
        search().run()


def test_without_vllm_the_refusal_says_so() -> None:
    with pytest.raises(UsageError, match=r"explore: vLLM has no vllm\.__version__ here"):
        search(python=sys.executable).run()


@pytest.mark.parametrize(("adapter", "sentence"), [
    ("nowhere", "--adapter must be MODULE:CLASS, got 'nowhere': No module named 'nowhere'"),
    ("json:Adapter", "--adapter must be MODULE:CLASS, got 'json:Adapter': module 'json' has no attribute 'Adapter'"),
    ("json:JSONDecoder", "--adapter must name a subclass of kvbm_console.explore.connectors.Adapter with connectors"),
])
def test_an_adapter_that_is_none_is_refused_by_its_name(adapter: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        search(python=sys.executable, adapters=(adapter,)).run()


def test_what_the_engine_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that prints while it is imported, through Python and past it."""
    (tmp_path / "noisy.py").write_text(
        "import os\nfrom kvbm_console.explore.connectors import Adapter\nprint('{\"release\": \"none\"}', flush=True)\n"
        "os.write(1, b'garbage\\n')\nclass Noisy(Adapter):\n    connectors = ('X',)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"explore: vLLM has no vllm\.__version__ here"):
        search(python=sys.executable, adapters=("noisy:Noisy",)).run()


def test_the_command_writes_each_finding_and_ends_with_1(tmp_path: Path) -> None:
    done = subprocess.run(
        [PROGRAM, "explore", "vllm", "--python", FAKE, "--seeds", "0:4", "--profile", "press", "--workers", "1",
         "--out", "found", "--format", "json"],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, timeout=DEADLINE_S, text=True,
    )
    assert done.returncode == 1, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    directory = tmp_path / finding["directory"]
    assert sorted(path.name for path in directory.iterdir()) == ["issue.md", "scenario.json", "test_reproduction.py"]
    assert "nothing was scheduled" in (directory / "issue.md").read_text()
    assert finding["recording"] is None


def interrupted(
    tmp_path: Path, begun: Callable[["subprocess.Popen[str]"], bool], **more: str
) -> tuple[str, int | None]:
    """Output and exit status of a search that gets ctrl-c as soon as it has begun."""
    process = subprocess.Popen(
        [PROGRAM, "explore", "vllm", "--python", FAKE, "--seeds", "0:8", "--profile", "press", "--workers", "1"],
        cwd=tmp_path, env={**environment(tmp_path), "PYTHONUNBUFFERED": "1", **more}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )
    while not begun(process):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=DEADLINE_S)
    return out, process.returncode


def test_ctrl_c_keeps_what_was_found(tmp_path: Path) -> None:
    """Seed 7 hangs; before it, seed 3 was found and the process of seed 5 was replaced."""
    hangs = tmp_path / "hangs"
    out, status = interrupted(tmp_path, lambda _: hangs.exists(), FAKE_ENGINE_HANGS=str(hangs))
    assert "interrupted; these are the findings until then" in out
    assert "FOUND progress: deadlock" in out
    assert "FOUND no crash: the process died" in out
    assert status == 1


def test_ctrl_c_while_the_engine_is_imported_says_so(tmp_path: Path) -> None:
    def has_child(process: "subprocess.Popen[str]") -> bool:
        return bool(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())

    out, status = interrupted(tmp_path, has_child, FAKE_ENGINE="hangs")
    assert out == "interrupted while the engine was imported: no run was begun\n"
    assert status == 130


@pytest.mark.parametrize(("arguments", "sentence"), [
    (("--seeds", "5"), "--seeds must be A:B with 0 <= A < B"),
    (("--connector", "[]"), '--connector must be an object with the key "kv_connector", got'),
    (("--workers", "0"), "--workers must be from 1 to 256, got 0"),
])
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [PROGRAM, "explore", "vllm", *arguments], cwd=tmp_path, env=environment(tmp_path), capture_output=True,
        timeout=DEADLINE_S, text=True,
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
