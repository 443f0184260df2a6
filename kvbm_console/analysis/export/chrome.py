"""The JSON trace format of Chrome: opens in ``chrome://tracing``, Perfetto and speedscope, and needs no library.

A process for slots (a thread each), one for holds, one for transfers (threads are lanes of a route), one for counters.

Law of this file: each row is written at once as one line of JSON, with times in microseconds of the engine.
"""

from typing import IO, Any, Final

from kvbm_console.analysis.export.pictures import Lanes, hold_args, state_args, transfer_args, transfer_name
from kvbm_console.analysis.export.rows import Consumer, EngineSample, HoldSpan, StateSpan, TierSample, TransferSpan
from kvbm_console.core.printable import json_text
from kvbm_console.stream.feed import GapSeen

SLOTS, HOLDS, TRANSFERS, COUNTERS = 1, 2, 3, 4
PROCESSES: Final = {SLOTS: "slots", HOLDS: "holds", TRANSFERS: "transfers", COUNTERS: "tiers and engine"}
LANES_PER_ROUTE: Final = 10_000
"""Thread numbers of a route begin at its number times this."""


class ChromeTrace(Consumer):
    """Writes rows as trace events."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.written = 0
        self._named: set[tuple[int, int]] = set()
        self._routes: dict[str, tuple[int, Lanes]] = {}
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for process, name in PROCESSES.items():
            for key, told in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": process})):
                self._put({"ph": "M", "pid": process, "tid": 0, "name": key, "args": told})

    def _put(self, event: dict[str, Any]) -> None:
        self._file.write((b",\n" if self.written else b"\n") + json_text(event).encode())
        self.written += 1

    def _name(self, process: int, thread: int, name: str) -> None:
        if (process, thread) not in self._named:
            self._named.add((process, thread))
            self._put({"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}})

    def _slice(
        self, process: int, thread: int, name: str, begin_ns: int, end_ns: int, args: dict[str, Any]
    ) -> None:
        self._put({
            "ph": "X", "pid": process, "tid": thread, "name": name, "ts": begin_ns / 1e3,
            "dur": (end_ns - begin_ns) / 1e3, "args": args,
        })

    def state(self, row: StateSpan) -> None:
        """A slice on the slot's thread."""
        self._name(SLOTS, row.slot, row.request)
        self._slice(SLOTS, row.slot, row.state, row.begin_ns, row.end_ns, state_args(row))

    def hold(self, row: HoldSpan) -> None:
        """A slice on a thread of its own: a hold may begin in one state and end in another."""
        self._name(HOLDS, row.slot, row.request)
        self._slice(HOLDS, row.slot, f"held at {row.site}", row.begin_ns, row.end_ns, hold_args(row))

    def transfer(self, row: TransferSpan) -> None:
        """Two slices, queued and on the wire, and a flow from the slot through them and back."""
        route, lanes = self._routes.setdefault(row.route, (len(self._routes) + 1, Lanes()))
        lane = lanes.take(row.planned_ns, row.until_ns)
        thread = route * LANES_PER_ROUTE + lane
        self._name(TRANSFERS, thread, row.route if not lane else f"{row.route} ({lane + 1})")
        name, args = transfer_name(row), transfer_args(row)
        queued_until = row.started_ns if row.started_ns is not None else row.until_ns
        self._slice(TRANSFERS, thread, f"queued {name}", row.planned_ns, queued_until, args)
        if row.started_ns is None:
            return
        self._slice(TRANSFERS, thread, name, row.started_ns, row.until_ns, args)
        slot = (SLOTS, row.slot) if row.slot is not None else (TRANSFERS, thread)
        self._flow("s", *slot, row.planned_ns, row.candidate)
        self._flow("t", TRANSFERS, thread, row.started_ns, row.candidate)
        if row.ended_ns is not None:
            self._flow("f", *slot, row.ended_ns, row.candidate)

    def _flow(self, phase: str, process: int, thread: int, at_ns: int, candidate: int) -> None:
        event = {"ph": phase, "pid": process, "tid": thread, "ts": at_ns / 1e3, "id": candidate, "cat": "copy",
                 "name": "copy"}
        if phase == "f":
            event["bp"] = "e"
        self._put(event)

    def tier(self, row: TierSample) -> None:
        """A stacked counter of the pool's places."""
        self._put({
            "ph": "C", "pid": COUNTERS, "tid": 0, "name": f"{row.tier} places (pool {row.pool})",
            "ts": row.at_ns / 1e3, "args": {
                "referenced": row.referenced, "writing": row.writing, "cached": row.cached,
                "quarantined": row.quarantined,
            },
        })

    def engine(self, row: EngineSample) -> None:
        """Requests that run and wait."""
        self._put({
            "ph": "C", "pid": COUNTERS, "tid": 0, "name": "requests", "ts": row.at_ns / 1e3,
            "args": {"running": row.running, "waiting": row.waiting},
        })

    def gap(self, gap: GapSeen, at_ns: int) -> None:
        """A mark through everything."""
        self._put({
            "ph": "i", "s": "g", "pid": SLOTS, "tid": 0, "name": f"gap {gap.count}", "ts": at_ns / 1e3,
            "args": {"first": gap.first, "last": gap.last, "reason": gap.reason},
        })

    def close(self) -> None:
        """End the document."""
        self._file.write(b"\n]}\n")
