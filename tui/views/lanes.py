"""Lanes: the whole run on one screen. Requests that do not overlap share a row, and counters stand above on one axis.

A lane takes the next request that begins after its last one has ended, the lane that is free for longest first. So
there are as many lanes as requests lived at once, and never more.

    queue  ▁▁▂▅▆▆▃▁     requests that wait, in each cell
    G1     ▁▃▅▆▆▆▆▆     the share of the tier in use
    hits   ▁▁▃▄▅▅▅▄     hit rate of the last minute
           ██▄▄▄ ░▒█▄▄▄ ██▄▄    lane 1
             ██▄▄▄▄▄▄    ██▄▄   lane 2

Law of this file: two requests of a lane never overlap, and each known request is in one lane.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

from kvbm_console.analysis.lives import Life
from kvbm_console.core.ids import SlotState

from ..desk import Desk
from ..draw import bars, words
from ..draw.lifeline import Lifelines, Window, runs
from ..draw.spans import Line, Row
from ..model.numbers import S, count
from ..model.series import KEPT_S, Gauge
from ..model.slots import Limits

WAITING: Final = (SlotState.INITIALIZED, SlotState.ONBOARD_STAGED, SlotState.ONBOARDING, SlotState.PREEMPTED)
"""States in which a request waits for its turn, its blocks or its copies."""
COUNTED_MAX: Final = 1_024
"""Requests over which the queue is counted for one frame; with more of them its track is left out."""
_WAITS: Final = bytes(1 if code - 1 in {int(state) for state in WAITING} or code in (21, 22) else 0
                      for code in range(256))
"""A code of a lifeline to 1 if the request waits there, those past their limit included."""


def lanes_of(lives: Iterable[Life], now_ns: int) -> list[list[Life]]:
    """The lanes, the oldest first; each holds its lives in the order of their arrival."""
    lanes: list[list[Life]] = []
    free: list[tuple[int, int]] = []
    for life in sorted(lives, key=lambda life: (life.first_known_ns(), life.slot)):
        end = life.closed_ns if life.closed_ns is not None else now_ns + 1
        if free and free[0][0] <= life.first_known_ns():
            _, number = heapq.heappop(free)
            lanes[number].append(life)
        else:
            number = len(lanes)
            lanes.append([life])
        heapq.heappush(free, (end, number))
    return lanes


def lane_cells(lane: Sequence[Life], lines: Lifelines, window: Window, bounds: Limits) -> tuple[bytearray, set[int]]:
    """The cells of a lane, and those with many changes. In a cell of two lives the later life is seen."""
    codes, busy = bytearray(window.cells), set[int]()
    for life in lane:
        if life.first_known_ns() >= window.end_ns or (life.closed_ns or window.end_ns) < window.start_ns:
            continue
        mine, changes = lines.codes(life, window, bounds)
        first = len(mine) - len(mine.lstrip(b"\0"))
        last = len(mine.rstrip(b"\0"))
        for cell in range(first, last):
            codes[cell] = mine[cell] or codes[cell]
        busy |= {cell for cell in changes if 0 <= cell < window.cells}
    return codes, busy


def lane_line(
    desk: Desk, lane: Sequence[Life], lines: Lifelines, window: Window, bounds: Limits, left: int, width: int
) -> Line:
    """A row with the selected request's name, else the newest request's, and the number of the others."""
    chosen = next((life for life in lane if life.request == desk.selected), None)
    shown = chosen or lane[-1]
    row = Row().put(desk.glyphs.select if chosen is not None else " ", "selbar")
    more = f" +{len(lane) - 1}" if len(lane) > 1 else ""
    row.spans([words.request(shown.request, left - 3 - len(more), "strong" if chosen is not None else "text")])
    row.put(more, "muted").to(left)
    codes, busy = lane_cells(lane, lines, window, bounds)
    row.spans(runs(codes, busy, desk.glyphs))
    return row.zone(0, ("select", shown.request), width).line("sel" if chosen is not None else "", width)


def waiting(lives: Sequence[Life], lines: Lifelines, window: Window, bounds: Limits) -> list[int]:
    """Requests that wait, in each cell."""
    total = [0] * window.cells
    for start in range(0, len(lives), 255):  # a byte counts to 255
        added = 0
        for life in lives[start : start + 255]:
            added += int.from_bytes(lines.codes(life, window, bounds)[0].translate(_WAITS), "little")
        for cell, number in enumerate(added.to_bytes(window.cells, "little")):
            total[cell] += number
    return total


def level_cells(gauge: Gauge, window: Window) -> list[float | None]:
    """A level in each cell: the mean of its seconds; None where it was not seen."""
    if gauge.second is None:
        return [None] * window.cells
    values, newest = gauge.last(KEPT_S), gauge.second
    found: list[float | None] = []
    for cell in range(window.cells):
        begin = window.start_ns + cell * window.cell_ns
        first, last = begin // S, min(begin + window.cell_ns - 1, window.now_ns) // S
        if begin > window.now_ns:
            found.append(None)
            continue
        places = [min(second, newest) - newest + KEPT_S - 1 for second in range(max(first, newest - KEPT_S), last + 1)]
        known = [value for at in places if at >= 0 and (value := values[at]) is not None]
        found.append(sum(known) / len(known) if known else None)
    return found


def tracks(
    desk: Desk, lives: Sequence[Life], lines: Lifelines, window: Window, bounds: Limits, left: int
) -> list[Line]:
    """The counters on the axis of the lanes: who waits, how full each tier is, how much is found."""
    shown: list[tuple[str, str, list[float | None], float | None, str]] = []
    if len(lives) <= COUNTED_MAX:
        queue = waiting(lives, lines, window, bounds)
        unknown = ((desk.mirror.lives_ns or 0) - window.start_ns) // window.cell_ns
        queue[: max(0, unknown)] = [0] * min(window.cells, max(0, unknown))
        most = max(queue, default=0)
        queued = [float(one) or None for one in queue]
        shown.append(("waiting", f"at most {count(most)}", queued, float(max(1, most)), "trend"))
    flows = desk.mirror.flows
    for pool in sorted(desk.mirror.facts.pools, key=lambda pool: (pool.info.tier, pool.info.pool)):
        gauge = flows.occupancy.get(pool.info.pool)
        capacity = desk.mirror.facts.capacity_of(pool)
        if gauge is not None and capacity:
            used = pool.resident_blocks * 100 // capacity
            tier = pool.info.tier.name
            shown.append((f"{tier} used", f"{used} %", level_cells(gauge, window), 1.0, tier.lower()))
    now = flows.hit_rate.last(1)[0]
    share = "–" if now is None else f"{int(now * 100)} %"
    shown.append(("hit rate", share, level_cells(flows.hit_rate, window), 1.0, "trend"))
    found = []
    for name, told, values, top, role in shown:
        row = Row().put(f" {name}", "muted").right(told, left - 2, "text").to(left)
        found.append(row.spans(bars.trend(values, desk.glyphs, top, role)).line())
    return found
