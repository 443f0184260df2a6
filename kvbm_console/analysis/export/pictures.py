"""The common part of the two trace formats: the track of each row, and its text.

Law of this file: slices of one track never overlap, so copies that run side by side get lanes of their own.
"""

from typing import Any

from kvbm_console.analysis.export.rows import HoldSpan, StateSpan, TransferSpan


class Lanes:
    """Lanes of one route. Rows come in the order of their ends, so a lane is free behind its last end.

    >>> lanes = Lanes()
    >>> lanes.take(0, 5), lanes.take(1, 6), lanes.take(5, 7), lanes.take(2, 8)
    (0, 1, 0, 2)
    """

    def __init__(self) -> None:
        self._ends: list[int] = []

    def take(self, begin_ns: int, end_ns: int) -> int:
        """The lane for a slice: the fullest free lane."""
        free = [lane for lane, end in enumerate(self._ends) if end <= begin_ns]
        if free:
            lane = max(free, key=lambda lane: (self._ends[lane], -lane))
            self._ends[lane] = end_ns
            return lane
        self._ends.append(end_ns)
        return len(self._ends) - 1


def state_args(row: StateSpan) -> dict[str, Any]:
    """The details of a state's slice, shown when it is clicked."""
    return {
        "request": row.request, "slot": row.slot, "state": row.state, "seq": row.seq, "cause": row.cause,
        "iteration": row.iteration, "computed_tokens": row.computed_tokens, "open": row.open,
    }


def hold_args(row: HoldSpan) -> dict[str, Any]:
    """The same for a hold."""
    return {"request": row.request, "hold": row.hold, "slot": row.slot, "site": row.site, "seq": row.seq,
            "reason": row.why or "lasts"}


def transfer_args(row: TransferSpan) -> dict[str, Any]:
    """The same for a copy."""
    source, _, target = row.route.partition(">")
    known = {
        "request": row.request, "slot": row.slot, "route": row.route, "from_tier": source, "to_tier": target,
        "candidate": row.candidate, "operation": row.operation, "batch": row.batch,
        "blocks": row.blocks, "status": row.status, "reason": row.reason, "seq": row.seq,
        "thrash_blocks": row.thrash_blocks or None,
    }
    return {name: value for name, value in known.items() if value is not None}


def transfer_name(row: TransferSpan) -> str:
    """The kind of a copy: ``G1→G2``, or ``G1→G2 skipped``. Numbers are arguments, so a viewer can group by names."""
    kind = row.route.replace(">", "→")
    return kind if row.status == "completed" else f"{kind} {row.status}"
