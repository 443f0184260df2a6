"""Assertions about runs and recordings: invariants hold, decisions replay, nothing needs a person.

Law of this file: a failure names the event, or the first difference, and the file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvbm_console.analysis.diagnosis import diagnose
from kvbm_console.analysis.walk import Evidence, evidence_of
from kvbm_console.core.audit import Lineage, Violation, audit
from kvbm_console.core.events import Event, InvariantViolated
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import digest
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from kvbm_console.testing.run import Taped

AUDITS_MAX: Final = 5_000
"""Full audits of an assertion; a longer run is audited at as many places, spread evenly."""

Checked = Taped | Recording | Path | Leader | CacheState
"""A run, a recording or its path, a leader, or facts."""


def assert_invariants(what: Checked) -> None:
    """Every invariant of the audit holds: now for a leader or facts, after every stimulus for a run or recording."""
    if isinstance(what, Leader | CacheState):
        _audit(what.state if isinstance(what, Leader) else what, "now")
        return
    evidence = _evidence(what)
    every = max(1, evidence.events // AUDITS_MAX)
    state: CacheState | None = None
    loose = evidence.config is not None and evidence.config.eviction.by_request
    lineage, of_stimulus = Lineage(loose=loose), list[Event]()
    for item in evidence.items():
        if isinstance(item, SnapshotTaken):
            state = item.state
            of_stimulus.clear()
            _audit(state, f"in front of event {state.seq}")
        elif isinstance(item, EventsArrived) and state is not None:
            for at, event in enumerate(item.events):
                _no_violation(event)
                # Between the events of one stimulus an invariant may be open: audit where the cause changes.
                if event.cause != state.n:
                    _none_of(lineage.saw(of_stimulus, state), f"behind event {state.seq - 1}")
                    of_stimulus.clear()
                    if at % every == 0:
                        _audit(state, f"behind event {state.seq - 1}")
                state.apply(event)
                of_stimulus.append(event)
    if state is not None:
        _none_of(lineage.saw(of_stimulus, state), f"behind event {state.seq - 1}")
        _audit(state, f"behind event {state.seq - 1}")
        if isinstance(what, Taped) and not what.tape.not_taped and digest(state) != what.leader.digest():
            raise AssertionError("I10: folding the events does not give the leader's facts")


def assert_replays(path: Path | str) -> None:
    """Today's leader decides the recorded stimuli exactly as they were decided, and the facts fold."""
    report = verify(Path(path))
    if not report.ok:
        raise AssertionError(f"{path} does not replay: {report.first_difference}")
    if not report.stimuli or report.not_rerun:
        raise AssertionError(
            f"{path} cannot be replayed: {report.not_rerun or 'no'} stimuli have no complete keyframe in front of them"
        )


def assert_healthy(what: Taped | Recording | Path) -> None:
    """No lint finds anything worse than a note."""
    diagnosis = diagnose(_evidence(what))
    if not diagnosis.ok:
        raise AssertionError("\n".join(
            f"{finding.lint}: {finding.who}  {finding.what}  {finding.because} (event {finding.seq})"
            for finding in diagnosis.findings
        ))


def _evidence(run: Taped | Recording | Path) -> Evidence:
    if isinstance(run, Path):
        run = Recording.open(run)
    if isinstance(run, Recording):
        return evidence_of(run)
    tape = run.tape

    def items() -> Iterator[SnapshotTaken | EventsArrived]:
        yield SnapshotTaken(tape.state_at_begin())
        yield EventsArrived(tape.events)

    return Evidence(run.name, tape.config, len(tape.events), items, lambda seq: {})


def _audit(state: CacheState, where: str) -> None:
    _none_of(audit(state), where)


def _none_of(broken: list[Violation], where: str) -> None:
    if broken:
        rules = "; ".join(f"{violation.rule} is broken: {violation.detail}" for violation in broken)
        raise AssertionError(f"{where}: {rules}")


def _no_violation(event: Event) -> None:
    if isinstance(event, InvariantViolated):
        raise AssertionError(f"event {event.seq}: {event.rule} was broken: {event.detail}")
