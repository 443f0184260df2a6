"""The search: many runs in several processes, guided by coverage.

Each profile has a counter of seeds. With seeds from the command line every profile runs each of them. Without them,
a batch goes to the profile with the fewest seeds. The next goes to the profile whose last batches saw most new (state,
event) pairs. A process that dies or is silent for ``SILENT_S`` is replaced, and its present run is a finding.

Law of this file: an engine that crashes, hangs or prints ends its process, never the search. An interrupted search
reports its findings.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbm_console.core.errors import FoldError, InvariantViolation, UsageError
from kvbm_console.explore.scenario import GENERATE, PROFILES_OF, Scenario

BATCH: Final = 10
"""Runs of a task: a tenth of a second of work."""
SILENT_S: Final = 30.0
"""Far beyond the longest run, so a longer silence means that the engine hangs."""
START_S: Final = 600.0
"""The import of an engine takes 20 s of a core. That was 231 s of the clock when ten programs shared the core."""
SHRINK_RUNS: Final = 3_000
"""The most runs to shrink a finding: about 30 s."""
PACKAGE: Final = Path(__file__).resolve().parents[1]
BOOTSTRAP: Final = (
    "import importlib.util as util, runpy, sys; place = sys.argv.pop(); "
    "spec = util.spec_from_file_location('kvbm_console', place + '/__init__.py', submodule_search_locations=[place]); "
    "package = sys.modules['kvbm_console'] = util.module_from_spec(spec); spec.loader.exec_module(package); "
    "runpy.run_module('kvbm_console.explore.worker', run_name='__main__', alter_sys=False)"
)
"""Code that runs the worker with the engine's interpreter. This program need not be installed there, because the code
names the directory of our package."""


@dataclass
class ExploreFinding:
    """A signature with the run that showed it first, and its smallest scenario."""

    signature: str
    verdict: dict[str, Any]
    profile: str
    seed: int
    cpu_s: float
    """CPU seconds of all runs up to the first run with this signature."""
    scenario: Scenario
    times: int = 1
    shrunk: bool = False
    recording: Path | None = None
    unrecorded: str = ""
    """The reason for a missing recording, empty without."""


@dataclass
class SearchReport:
    """The counts and findings of a search."""

    release: str = ""
    runs: int = 0
    steps: int = 0
    reads: int = 0
    moved_blocks: int = 0
    cpu_s: float = 0.0
    adapters: dict[str, str] = field(default_factory=dict)
    """Class of each adapter that the search was given, to the source of its module."""
    pairs: set[tuple[str, str]] = field(default_factory=set)
    findings: dict[str, ExploreFinding] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason of the engine to refuse a machine, to the runs that were left out for it."""
    interrupted: bool = False


@dataclass
class Search:
    """The engine, its connector and the loads to explore, and the end of the search."""

    connector: dict[str, Any]
    engine: str = "vllm"
    """``vllm``, or ``leader`` for our own leader with the embedded engine."""
    profiles: tuple[str, ...] = PROFILES_OF["vllm"]
    faults: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    """``MODULE:CLASS`` of each adapter beside those of this program."""
    seeds: range | None = None
    """The seeds of every profile; None to search until ``seconds`` have passed."""
    seconds: float = 60.0
    processes: int = 1
    python: str = sys.executable
    tell: Callable[[SearchReport], None] = lambda report: None
    first_only: bool = False
    """True to end with the first finding."""
    _processes: list["_Process"] = field(default_factory=list)
    _gain: dict[str, float] = field(default_factory=dict)
    """Profile to the new pairs of its last runs; older pairs count less."""

    def run(self) -> SearchReport:
        """Explore, then shrink each finding. Raises ``UsageError`` when the engine cannot be driven."""
        report = SearchReport()
        tasks = self._fixed() if self.seeds is not None else self._guided()
        try:
            workers = [self._start() for _ in range(self.processes)]
            for worker in workers:
                report.release, report.adapters = worker.wait()
            self._explore(report, workers, tasks, time.monotonic() + self.seconds)
        except KeyboardInterrupt:
            report.interrupted = True
        finally:
            self._end_all()
        return report

    def _start(self) -> "_Process":
        """Start a process, which imports the engine from now on."""
        self._processes.append(_Process(self.python, self.engine, *self.adapters))
        return self._processes[-1]

    def _fresh(self, worker: "_Process") -> "_Process":
        """Replace a process that died or hangs."""
        worker.kill()
        replacement = self._start()
        replacement.wait()
        return replacement

    def _end_all(self) -> None:
        while self._processes:
            self._processes.pop().kill()

    def shrink(self, report: SearchReport) -> None:
        """Shrink each finding. After an interruption the remaining findings stay unchanged."""
        self._with_each(report, self._shrink)

    def _with_each(self, report: SearchReport, work: Callable[["_Process", ExploreFinding], "_Process"]) -> None:
        """Call ``work`` for each finding, in a process that the call may replace."""
        try:
            worker = self._start()
            worker.wait()
            for finding in report.findings.values():
                worker = work(worker, finding)
        except KeyboardInterrupt:
            report.interrupted = True
        finally:
            self._end_all()

    def _shrink(self, worker: "_Process", finding: ExploreFinding) -> "_Process":
        task = {"connector": self.connector, "faults": list(self.faults), "shrink": finding.scenario.to_json(),
                "signature": finding.signature, "most": SHRINK_RUNS}
        worker.send(task)
        for answer in worker.answers(SILENT_S):
            if answer is None:  # the finding hangs or crashes the process, so it stays unchanged
                return self._fresh(worker)
            if "scenario" in answer and answer["verdict"] is not None:
                finding.scenario = Scenario.from_json(answer["scenario"])
                finding.verdict, finding.shrunk = answer["verdict"], True
        return worker

    def record(self, report: SearchReport, places: Mapping[str, Path]) -> None:
        """Record each finding with the tap around its connector, into the place of its signature."""
        self._with_each(report, lambda worker, finding: self._record(worker, finding, places[finding.signature]))

    def _record(self, worker: "_Process", finding: ExploreFinding, place: Path) -> "_Process":
        from kvbm_console.explore.recorded import record

        place.unlink(missing_ok=True)  # a file of an earlier search
        worker.send({"connector": self.connector, "faults": list(self.faults), "path": str(place),
                     "record": finding.scenario.to_json()})
        answers: list[dict[str, Any]] = []
        ended = finding.signature
        died = False
        for answer in worker.answers(SILENT_S):
            if answer is None:
                died = True
            elif "unrecorded" in answer or "unsupported" in answer:
                finding.unrecorded = answer.get("unrecorded") or answer["unsupported"]
                died = "unsupported" in answer
            elif "verdict" in answer:
                ended = "no finding" if answer["verdict"] is None else answer["verdict"]["signature"]
            else:
                answers.append(answer)
        if ended != finding.signature:
            finding.unrecorded = f"with the tap around its connector the run ends with {ended}"
        elif not answers:
            finding.unrecorded = finding.unrecorded or "the run sent no messages"
        elif "recorded" in answers[-1]:
            finding.recording = place
        else:
            try:
                finding.recording = record(answers, finding.verdict, place, finding.signature)
            except (FoldError, InvariantViolation) as error:
                finding.unrecorded = f"our leader does not follow this run, which is a bug of ours: {error}"
        return self._fresh(worker) if died else worker

    def _fixed(self) -> Iterator[list[tuple[str, int]]]:
        assert self.seeds is not None
        every = [(profile, seed) for seed in self.seeds for profile in self.profiles]
        for at in range(0, len(every), BATCH):
            yield every[at : at + BATCH]

    def _guided(self) -> Iterator[list[tuple[str, int]]]:
        next_seed = dict.fromkeys(self.profiles, 0)
        self._gain = dict.fromkeys(self.profiles, 100.0)
        for turn in range(sys.maxsize):
            fair = turn % 2 == 0
            profile = min(next_seed, key=next_seed.__getitem__) if fair else max(
                self._gain, key=self._gain.__getitem__)
            first = next_seed[profile]
            next_seed[profile] += BATCH
            yield [(profile, seed) for seed in range(first, first + BATCH)]

    def _explore(self, report: SearchReport, workers: list["_Process"], tasks: Any, until: float) -> None:
        free = list(workers)
        busy: list[_Process] = []
        while True:
            while free and (self.seeds is not None or time.monotonic() < until):
                task = next(tasks, None)
                if task is None:
                    break
                worker = free.pop()
                worker.give(task, self._message(task))
                busy.append(worker)
            if not busy:
                return
            for worker in _ready(busy):
                busy.remove(worker)
                worker, rest = self._take(report, worker)
                if rest:
                    worker.give(rest, self._message(rest))
                (busy if rest else free).append(worker)
            self.tell(report)
            if self.first_only and report.findings:
                return

    def _message(self, runs: list[tuple[str, int]]) -> dict[str, Any]:
        return {"connector": self.connector, "faults": list(self.faults), "runs": runs}

    def _take(self, report: SearchReport, worker: "_Process") -> tuple["_Process", list[tuple[str, int]]]:
        """Take the answers to a batch. Returns the worker or its replacement, and the rest of the batch."""
        for answer in worker.answers(SILENT_S):
            if answer is None:
                profile, seed = worker.task[worker.answered]
                ended = worker.ended()
                kind = "no crash: the process died" if ended else "progress: the engine hangs"
                sentence = (f"the engine's process ended with status {ended}" if ended else
                            f"one run took more than {SILENT_S:.0f} s")
                self._found(report, profile, seed, {
                    "monitor": kind.split(":")[0], "step": 0, "sentence": sentence, "signature": kind})
                return self._fresh(worker), worker.task[worker.answered + 1 :]
            if "unsupported" in answer:
                raise UsageError(f"explore: {answer['unsupported']}")
            if "seed" in answer:
                self._count(report, answer)
        return worker, []

    def _count(self, report: SearchReport, answer: dict[str, Any]) -> None:
        if "skipped" in answer:
            report.skipped[answer["skipped"]] += 1
            return
        report.runs += 1
        report.steps += answer["steps"]
        report.reads += answer["reads"]
        report.moved_blocks += answer["moved"]
        report.cpu_s += answer["cpu_s"]
        pairs = {(state, event) for state, event in answer["pairs"]}
        fresh = len(pairs - report.pairs)
        report.pairs |= pairs
        if self.seeds is None:
            self._gain[answer["profile"]] = 0.9 * self._gain[answer["profile"]] + fresh
        if answer["verdict"] is not None:
            self._found(report, answer["profile"], answer["seed"], answer["verdict"])

    def _found(self, report: SearchReport, profile: str, seed: int, verdict: dict[str, Any]) -> None:
        scenario = GENERATE[self.engine](profile, seed)
        known = report.findings.get(verdict["signature"])
        if known is None:
            report.findings[verdict["signature"]] = ExploreFinding(
                verdict["signature"], verdict, profile, seed, report.cpu_s, scenario)
            return
        known.times += 1
        if scenario.size < known.scenario.size:
            known.scenario, known.verdict = scenario, verdict


class _Process:
    """A worker process and its batch of runs."""

    def __init__(self, python: str, engine: str, *adapters: str) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-c", BOOTSTRAP, engine, *adapters, str(PACKAGE)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
        )
        assert self._process.stdout is not None
        self.descriptor = self._process.stdout.fileno()
        self._rest = b""
        self.task: list[tuple[str, int]] = []
        self.answered = 0

    def wait(self) -> tuple[str, dict[str, str]]:
        """Wait for the import of the engine. Returns its release, and class and source of each adapter. Raises
        ``UsageError`` when an import fails."""
        silent_ns = time.monotonic_ns() + int(START_S * 1e9)
        for answer in self.answers(START_S):
            if answer is not None and "release" in answer:
                return str(answer["release"]), answer.get("adapters", {})
            silent = time.monotonic_ns() >= silent_ns
            self.kill()
            if answer is None:
                why = f"said nothing for {START_S:.0f} s" if silent else (
                    f"ended with status {self._process.returncode} before it began")
                raise UsageError(f"explore: the process that should drive the engine {why}")
            if "refused" in answer:
                raise UsageError(f"explore: {answer['refused']}")
            raise UsageError(f"explore: {answer['unsupported']}; --python names the interpreter that has the engine")
        raise UsageError("explore: the engine could not be started")

    def give(self, task: list[tuple[str, int]], message: dict[str, Any]) -> None:
        """Send a batch of runs."""
        self.task, self.answered = task, 0
        self.send(message)

    def send(self, message: dict[str, Any]) -> None:
        """Send a task. A process that has died is noticed when its answers are read."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def answers(self, silent_s: float) -> Iterator[dict[str, Any] | None]:
        """The process's answers up to ``done``; None when the process died or was silent for too long."""
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                answer = json.loads(line)
                if "done" in answer:
                    return
                self.answered += "seed" in answer
                yield answer
                continue
            if not select.select([self.descriptor], [], [], silent_s)[0]:
                yield None
                return
            part = os.read(self.descriptor, 65_536)
            if not part:
                yield None
                return
            self._rest += part

    def ended(self) -> int | None:
        """The exit status of a process that has ended by itself, else None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.5)
        return None

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _ready(busy: list[_Process]) -> list[_Process]:
    """The processes with answers, or all processes after ``SILENT_S`` without an answer."""
    readable = select.select([worker.descriptor for worker in busy], [], [], SILENT_S)[0]
    return [worker for worker in busy if worker.descriptor in readable or not readable]
