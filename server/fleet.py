"""The daemon's side of a fleet: its summary, and whether it has a block or a request.

Law of this file: an answer costs the same however many blocks and events the daemon has.
"""

from collections import Counter
from collections.abc import Sequence

from kvbm_console.analysis.digest import Digest
from kvbm_console.analysis.fleet import FINE, SHOWN_CHARS, WORDS, DaemonSummary, Located, Problem
from kvbm_console.analysis.lints import Level
from kvbm_console.analysis.lints.slots import HeldSlots
from kvbm_console.core.ids import Tier, is_called
from kvbm_console.service import LeaderService
from kvbm_console.stream.document import tier_row

from .lints import FINDINGS_MAX, LintWatch


def summary_of(service: LeaderService, watch: LintWatch, program: str, name: str) -> DaemonSummary:
    """The summary as of now."""
    state, watching = service.state, watch.ready.is_set()
    shown = sorted({pool.info.tier for pool in state.shown_pools})
    tiers = {tier.label: tier_row(state, tier) for tier in shown}
    recorder = None if service.recorder is None else service.recorder.status().state
    return DaemonSummary(
        name=name, program=program, incarnation=service.incarnation, seq=state.seq, at_ns=service.at_ns,
        watching=watching, passed_over=watch.passed_over,
        slots=dict(Counter(slot.state.label for slot in state.slots.values())), holds=len(state.holds),
        tiers={label: (row["resident_blocks"], row["capacity_blocks"]) for label, row in tiers.items()},
        engines=len({pool.info.source for pool in state.pools if pool.info.source} - {
            source for source in state.lost_sources if state.has_ended(source)
        }),
        recorder=recorder, problems=_problems(service, watch, recorder),
        digest=watch.digest if watching else Digest(),
    )


def _problems(service: LeaderService, watch: LintWatch, recorder: str | None) -> list[Problem]:
    faults = [_problem(Level.FAULT, "part", "the daemon", text, "") for text in service.parts.warnings()]
    if recorder == "degraded":
        faults.append(_problem(Level.FAULT, "recorder", "the recorder", "events are not recorded", "the disk fails"))
    holds = HeldSlots()  # from the facts of now: nothing of the past is needed
    holds.resumed(service.state, None)
    found = [*holds.now(service.state, service.at_ns), *(watch.findings if watch.ready.is_set() else [])]
    found.sort(key=lambda finding: (finding.level, finding.since_ns))
    return faults + [
        _problem(finding.level, finding.lint, finding.who, finding.what, finding.because, finding.request)
        for finding in found[:FINDINGS_MAX]
    ]


def _problem(level: Level, lint: str, who: str, what: str, because: str, request: str | None = None) -> Problem:
    word = level.label if level.label in WORDS else FINE
    return Problem(word, lint, who[:SHOWN_CHARS], what[:SHOWN_CHARS], because[:SHOWN_CHARS], request)


def find(service: LeaderService, hashes: Sequence[int], request: str) -> list[Located]:
    """This daemon's answer for each block and, if it is named, for the request, which stands last. The name that an
    engine's client knows finds the request, too."""
    state = service.state
    pools = state.living(state.pools)
    found = [
        Located(tiers=[
            tier.label for tier in Tier
            if any(pool.info.tier is tier and pool.ready_place(key) is not None for pool in pools)
        ]) for key in hashes
    ]
    if request:
        slot = state.slot_named(request) or next(
            (slot for slot in state.slots.values() if is_called(slot.request, request)), None
        )
        found.append(Located() if slot is None else Located(slot=str(slot.slot), state=slot.state.label))
    return found
