"""One HTML file to send: overview, findings, timeline, slots, their stories, the tree of prefixes, and every event.

``page.html`` is the page. The run goes into it as JSON, packed with deflate and base64, which the browser unpacks
itself. The page asks no network for anything, and forbids itself to do so.

    {"events": {"seq": [0, 1, 1], "at": [0, 0, 70], "kind": [3, 9, 9], "slot": [-1, 0, 0], "text": ["...", ...]}, ...}

Columns of numbers that grow hold the differences, which pack to a few bits.

Law of this file: a page has at most ``EVENTS_MAX`` events, and says nothing that another export does not say.
"""

import base64
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from kvbm_console.analysis.colours import style_sheet
from kvbm_console.analysis.diagnosis import diagnose, document
from kvbm_console.analysis.export.rows import Consumer, EventRow, HoldSpan, Rows, StateSpan, TierSample, TransferSpan
from kvbm_console.analysis.requests import Requests, RequestSummary
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.walk import Evidence, Progress, walk
from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import SlotState
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import GapSeen

PAGE: Final = Path(__file__).with_name("page.html")
COLOURS: Final = b"/* colours */"
"""The place of the variables in the style sheet of the page."""
DATA: Final = b"<!-- data -->"
EVENTS_MAX: Final = 100_000
"""Events of a page: it then has less than 2 MB, and a browser draws it at once."""
CURVE_POINTS_MAX: Final = 2_000
"""Samples of a pool's curve: more than a screen has columns."""
NODES_MAX: Final = 400
"""Nodes of the tree of prefixes, those with the most blocks asked for; the rest is counted in their parents."""
PROMPT_BLOCKS_MAX: Final = 2_000_000
"""Blocks of prompts that the tree is made from; the prompts behind them are counted and left out."""


def write_html(evidence: Evidence, file: IO[bytes], progress: Progress | None = None) -> int:
    """Write the page; returns the number of its events. Raises ``UsageError`` for a run of more than ``EVENTS_MAX``."""
    if evidence.events > EVENTS_MAX:
        raise UsageError(
            f"a page holds at most {EVENTS_MAX:,} events, and {evidence.name} has {evidence.events:,}: "
            "rec cut makes a recording of a stretch, as with --from -60s"
        )
    page, requests, prompts = _Page(), Requests(), _Prompts()
    walk(evidence, (requests, prompts, Rows(page, requests)), progress=progress, what="export")
    run = {
        "name": evidence.name, "states": [state.label for state in SlotState],
        "doctor": document(diagnose(evidence, progress)), **page.columns(), "prefixes": prompts.tree(),
        "prompts_left_out": prompts.left_out,
    }
    packed = base64.b64encode(zlib.compress(msgspec.json.encode(run), 9))
    sheet = PAGE.read_bytes().replace(COLOURS, style_sheet().encode())
    before, _, after = sheet.partition(DATA)
    file.write(before + b'<script id="data" type="text/plain">' + packed + b"</script>" + after)
    return len(page.events)


class _Page(Consumer):
    """Collects the rows of a page."""

    wants_events = True

    def __init__(self) -> None:
        self.events: list[EventRow] = []
        self._states: list[StateSpan] = []
        self._holds: list[HoldSpan] = []
        self._copies: list[TransferSpan] = []
        self._tiers: dict[str, list[TierSample]] = {}
        self._gaps: list[dict[str, Any]] = []
        self._slots: list[dict[str, Any]] = []
        self._until_ns = 0

    def state(self, row: StateSpan) -> None:
        self._states.append(row)

    def hold(self, row: HoldSpan) -> None:
        self._holds.append(row)

    def transfer(self, row: TransferSpan) -> None:
        self._copies.append(row)

    def tier(self, row: TierSample) -> None:
        self._tiers.setdefault(f"{row.tier} pool {row.pool}", []).append(row)

    def event(self, row: EventRow) -> None:
        self.events.append(row)

    def gap(self, gap: GapSeen, at_ns: int) -> None:
        self._gaps.append({"at": at_ns, "first": gap.first, "last": gap.last, "reason": gap.reason})

    def request(self, summary: RequestSummary, until_ns: int) -> None:
        self._until_ns = until_ns
        self._slots.append({
            "slot": summary.slot, "request": summary.request, "session": summary.session, "at": summary.arrived_ns,
            "end": summary.ended_ns, "first_token": summary.first_token_ns, "tokens": summary.prompt_tokens,
            "blocks": summary.scored_blocks, "hits": summary.hits, "lost": summary.lost_blocks,
            "preemptions": summary.preemptions, "held": summary.held_ns, "reason": summary.reason,
            "time": summary.time_ns(until_ns),
        })

    def columns(self) -> dict[str, Any]:
        """The rows of the page as columns."""
        kinds = sorted({row.kind for row in self.events})
        number = {kind: at for at, kind in enumerate(kinds)}
        states = {state.label: state.value for state in SlotState}
        return {
            "kinds": kinds, "slots": self._slots, "gaps": self._gaps, "until": self._until_ns,
            "events": {
                "seq": _steps([row.seq for row in self.events]), "at": _steps([row.at_ns for row in self.events]),
                "kind": [number[row.kind] for row in self.events],
                "slot": [-1 if row.slot is None else row.slot for row in self.events],
                "text": [row.detail for row in self.events],
            },
            "stays": {
                "slot": [row.slot for row in self._states], "state": [states[row.state] for row in self._states],
                "begin": _steps([row.begin_ns for row in self._states]),
                "time": [row.end_ns - row.begin_ns for row in self._states],
                "seq": _steps([row.seq for row in self._states]),
            },
            "holds": [[row.slot, row.begin_ns, row.end_ns, row.seq, row.site, row.why] for row in self._holds],
            "copies": [
                [-1 if row.slot is None else row.slot, row.route, row.blocks, row.planned_ns, row.started_ns,
                 row.until_ns, row.status, row.seq, row.operation] for row in self._copies
            ],
            "tiers": {name: _thinned(rows) for name, rows in self._tiers.items()},
        }


def _steps(values: Sequence[int]) -> list[int]:
    """The differences between neighbours, from 0.

    >>> _steps([5, 7, 7])
    [5, 2, 0]
    """
    return [value - before for before, value in zip([0, *values], values, strict=False)]


def _thinned(rows: list[TierSample]) -> list[list[int]]:
    step = max(1, len(rows) // CURVE_POINTS_MAX)
    kept = rows[::step] + ([rows[-1]] if (len(rows) - 1) % step else [])
    return [[row.at_ns, row.empty, row.cached, row.referenced, row.writing, row.quarantined] for row in kept]


class _Prompts(Visitor):
    """The prompts of all requests, by the hashes of their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._prompts: list[tuple[list[int], str]] = []
        self._blocks = 0
        self.left_out = 0
        self.after = {ev.SlotOpened: self._opened}

    def _opened(self, e: ev.SlotOpened, state: CacheState) -> None:
        hashes = unpack_hashes(e.hashes)[: state.slots[e.slot].prompt_blocks]
        if self._blocks + len(hashes) > PROMPT_BLOCKS_MAX:
            self.left_out += 1
        elif hashes:
            self._blocks += len(hashes)
            self._prompts.append((hashes, e.request))

    def tree(self) -> list[list[Any]]:
        """Nodes [parent, first block, blocks, requests, a request]; a node ends where its requests part.

        A hash names its whole prefix, so requests with the same hash at a place have everything before it in common.
        """
        nodes: list[list[Any]] = []
        self._prompts.sort()
        waiting = [(-1, 0, 0, len(self._prompts))] if self._prompts else []
        while waiting:
            parent, depth, low, high = waiting.pop(0)
            for begin, end in self._groups(depth, low, high):
                first, last = self._prompts[begin][0], self._prompts[end - 1][0]
                until = depth
                while until < min(len(first), len(last)) and first[until] == last[until]:
                    until += 1
                nodes.append([parent, depth, until - depth, end - begin, self._prompts[begin][1]])
                if end - begin > 1:
                    waiting.append((len(nodes) - 1, until, begin, end))
        return _largest(nodes)

    def _groups(self, depth: int, low: int, high: int) -> list[tuple[int, int]]:
        """The runs of prompts that have the same block here; prompts that end before are in none."""
        groups: list[tuple[int, int]] = []
        at = low
        while at < high:
            prompt = self._prompts[at][0]
            end = at + 1
            if len(prompt) > depth:
                while end < high and self._prompts[end][0][depth] == prompt[depth]:
                    end += 1
                groups.append((at, end))
            at = end
        return groups


def _largest(nodes: list[list[Any]]) -> list[list[Any]]:
    """The nodes with the most blocks asked for, with their parents, in the same order."""
    ranked = sorted(range(len(nodes)), key=lambda at: -nodes[at][2] * nodes[at][3])
    kept: set[int] = set()
    for at in ranked:
        way = [at]
        while nodes[way[-1]][0] >= 0 and nodes[way[-1]][0] not in kept:
            way.append(nodes[way[-1]][0])
        if len(kept) + len(way) <= NODES_MAX:
            kept.update(way)
    order = {at: place for place, at in enumerate(sorted(kept))}
    return [[order.get(nodes[at][0], -1), *nodes[at][1:]] for at in sorted(kept)]
