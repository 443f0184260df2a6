"""The links of a machine from the copies of its recording: queue and wire apart, and latency and bandwidth by fit.

A copy waits for its link from its promotion to its start (queue). Then it takes ``latency + bytes / bandwidth`` (wire).
For each direction, latency and time of a byte are fitted to the wire times by least squares of the relative error, none
below 0. Copies of one size do not tell the two apart, so their latency counts as 0. Fewer than ``COPIES_MIN`` copies
have a latency alone.

A real engine orders the store of a block with the step that computes it, and the copy begins behind that step. It
learns of the end of a copy when a step ends. The copy ended at some moment of that step, so the middle of the step
counts.

Law of this file: a fit comes with its standard errors, with the errors of its copies, and with the sizes that it saw.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from kvbm_console.core import events as ev
from kvbm_console.core.columns import ID_BYTES
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.ids import CandidateStatus, Route
from kvbm_console.planning.fitting import Errors, errors_of, nonnegative, standard_errors
from kvbm_console.planning.measured import of_recording, origins_of
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.link import DEFAULT_LINKS, TOKEN_BYTES, LinkSpec
from kvbm_console.simulator.machine import SimulatedMachine

COPIES_MIN: Final = 8
"""Copies of a direction for a fit: four for each of its two numbers. With fewer the latency alone is fitted."""
BYTES_PER_S_MAX: Final = 1e15
"""The bandwidth of copies whose time does not depend on their size."""


class CopyTime(msgspec.Struct, frozen=True):
    """A copy that ended well."""

    route: Route
    size_bytes: int
    queue_ns: int
    wire_ns: int


class LinkFit(msgspec.Struct, frozen=True):
    """One direction of a way between tiers."""

    link: str
    route: str
    copies: int
    latency_ns: int
    bytes_per_s: float
    standard_errors: tuple[float, float]
    """Of the latency in nanoseconds, and of the time of a GiB in nanoseconds."""
    errors: Errors
    """Relative errors of the wire times."""
    queue_share: float
    """Share of queue in queue and wire of all copies together."""
    bytes_min: int
    bytes_max: int
    """Sizes of the copies; beyond them the fit is a guess."""

    def residual(self, copy: CopyTime) -> tuple[float, float]:
        """The fitted wire time of a copy in milliseconds, and by how many percent the measured one is longer."""
        told_ns = self.latency_ns + copy.size_bytes * SECOND_NS / self.bytes_per_s
        return told_ns / 1e6, 100 * (copy.wire_ns / told_ns - 1)

    def spec(self, usual: LinkSpec) -> LinkSpec:
        """``usual`` with these numbers."""
        return msgspec.structs.replace(usual, base_latency_ns=self.latency_ns, bytes_per_s=self.bytes_per_s)


def copies_of(
    recording: Recording, block_bytes: int, times: dict[int, int], begun_ns: Sequence[float] = ()
) -> list[CopyTime]:
    """The copies of a recording that were seen from their promotion to their end.

    ``block_bytes`` counts where the engine tells no bytes, and ``times`` has the engine's own times by cause.
    ``begun_ns`` are the begins of steps, for an engine that looks for ended copies when a step ends.
    """
    found: list[CopyTime] = []
    pools: dict[int, ev.PoolKnown] = {}
    promoted: dict[int, tuple[ev.CandidatePromoted, int]] = {}
    begun: dict[int, tuple[ev.OperationStarted, int]] = {}
    for batch in recording.events():
        for event in batch:
            at_ns = times.get(event.cause, event.at_ns)
            if isinstance(event, ev.PoolKnown):
                pools[event.pool] = event
            elif isinstance(event, ev.CandidatePromoted):
                promoted[event.candidate] = event, at_ns
            elif isinstance(event, ev.OperationStarted):
                begun[event.operation] = event, at_ns
            elif isinstance(event, ev.CandidateEnded) and event.candidate in promoted:
                order, promoted_ns = promoted.pop(event.candidate)
                start, start_ns = begun.pop(order.operation, (None, 0))
                source, target = pools.get(order.source_pool), pools.get(order.target_pool)
                if start is None or source is None or target is None or event.status is not CandidateStatus.COMPLETED:
                    continue
                blocks = start.blocks or len(order.targets) // ID_BYTES or len(order.sources) // ID_BYTES
                size = blocks * block_bytes if start.size_bytes is None else start.size_bytes
                if size > 0 and at_ns > start_ns >= promoted_ns:
                    route = Route(10 * source.tier + target.tier)
                    wire_ns = at_ns - start_ns if not begun_ns else _on_wire(start_ns, at_ns, route, begun_ns)
                    found.append(CopyTime(route, size, start_ns - promoted_ns, wire_ns))
    return found


def _on_wire(start_ns: int, ended_ns: int, route: Route, begun_ns: Sequence[float]) -> int:
    """The time of a copy that began with a step, or behind it, and ended in the step that ends at ``ended_ns``."""
    if not route.is_load:
        start_ns = round(begun_ns[min(bisect_right(begun_ns, start_ns), bisect_left(begun_ns, ended_ns) - 1)])
    before_ns = max(start_ns, begun_ns[bisect_left(begun_ns, ended_ns) - 1])
    return max(1, round((before_ns + ended_ns) / 2) - start_ns)


def copies_in(recording: Recording) -> list[CopyTime]:
    """As ``copies_of``. Blocks without a size have that of the recording, else of 16 tokens of an 8B model."""
    about = recording.segments[0].about
    machine = SimulatedMachine.of_labels(about.config, about.labels)
    own = None if machine is None else machine.engine.token_bytes * about.config.block_tokens
    block_bytes = recording.block_bytes or own or TOKEN_BYTES * about.config.block_tokens
    begun_ns = of_recording(recording).begun_ns if machine is None else ()
    return copies_of(recording, block_bytes, origins_of(recording), begun_ns)


def fit_links(copies: list[CopyTime]) -> list[LinkFit]:
    """A fit for each direction with a copy."""
    by_route: dict[Route, list[CopyTime]] = defaultdict(list)
    for copy in copies:
        by_route[copy.route].append(copy)
    return [_fit(route, of) for route, of in sorted(by_route.items())]


def _fit(route: Route, copies: list[CopyTime]) -> LinkFit:
    sizes = np.array([copy.size_bytes for copy in copies], dtype=np.float64)
    times = np.array([copy.wire_ns for copy in copies], dtype=np.float64)
    rows = np.column_stack([np.ones(len(copies)), sizes / 2**30]) / times[:, None]
    if len(copies) < COPIES_MIN:
        rows[:, 1] = 0.0
    elif sizes.min() == sizes.max():
        rows[:, 0] = 0.0
    fitted = nonnegative(rows, np.ones(len(copies)))
    spread = standard_errors(rows, np.ones(len(copies)), fitted)
    off = np.abs(fitted[0] + fitted[1] * sizes / 2**30 - times) / times
    errors = errors_of(off.tolist())
    assert errors is not None
    queue, wire = sum(copy.queue_ns for copy in copies), sum(copy.wire_ns for copy in copies)
    return LinkFit(
        link_of(route).name, route.label, len(copies), round(fitted[0]),
        min(BYTES_PER_S_MAX, 2**30 * SECOND_NS / max(float(fitted[1]), 1e-9)), (spread[0], spread[1]), errors,
        queue / (queue + wire), int(sizes.min()), int(sizes.max()),
    )


def link_of(route: Route) -> LinkSpec:
    """The usual link of a route."""
    return next(link for link in DEFAULT_LINKS if route in link.routes)


def links_with(fits: list[LinkFit]) -> tuple[LinkSpec, ...]:
    """The usual links, with the fitted numbers where there are some; of two routes of a link the one with more copies
    counts."""
    best = {fit.link: fit for fit in sorted(fits, key=lambda fit: fit.copies)}
    return tuple(best[link.name].spec(link) if link.name in best else link for link in DEFAULT_LINKS)
