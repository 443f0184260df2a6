"""A mover over links: base latency, bandwidth, one queue per link, reports per rank, all in virtual time.

Law of this file: every rank reports every started operation exactly once, at the time that the link's numbers give,
unless a fault was injected or another time given. A queued operation can be cancelled and is then never reported.

The time of a copy is ``base + ceil(bytes / bandwidth)``. The bytes of a link's copies go one after the other, first in,
first out, and the base latency of a copy passes while the bytes of the next one go. So many small copies use the whole
bandwidth, as they do when several wait for a disk or a device at once.
Loads of a leader with ``asynchronous = False`` belong to the step that asked for them. They are reported at once, and
their time is added up until the engine takes it (``pending_latency_ns`` peeks, ``take_latency_ns`` consumes).
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from kvbm_console.core.columns import pack_ids
from kvbm_console.core.config import SECOND_NS, require
from kvbm_console.core.ids import Route
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.stimuli import TransferFailed, TransferFinished, TransferStarted
from kvbm_console.simulator.calendar import Calendar

TOKEN_BYTES: Final = 32 * 8 * 128 * 2 * 2
"""K and V of a token in an 8B model: ``32 layers x 8 KV heads x 128 x 2 tensors x 2 bytes = 128 KiB``."""


class Timer(Protocol):
    """Virtual time, as far as a mover needs it."""

    @property
    def now_ns(self) -> int:
        """Now."""
        ...

    def at(self, at_ns: int, action: Callable[[], None]) -> int:
        """Run ``action`` at this time."""
        ...


class Reports(Protocol):
    """Takes the reports of a mover, as a ``Dispatcher`` does."""

    def submit(self, kind: type[Any], *args: Any) -> object:
        """A report of this kind of stimulus."""
        ...


class Carrier(Protocol):
    """Moves the bytes of copies, beside virtual time (``bytes.ranks.Ranks``)."""

    def copy(self, order: StartTransfer) -> None:
        """Begin this copy on every rank."""
        ...

    def arrived(self, operation: int) -> bool:
        """True if every rank has ended its part, well or not."""
        ...

    def outcome(self, operation: int) -> list[tuple[str, bytes] | None]:
        """The error and the failed blocks of each rank; None for a rank whose failure was reported already."""
        ...

    def zero(self, pool: int) -> None:
        """Overwrite the bytes of a pool."""
        ...


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of one physical way between tiers, and the routes that share it."""

    name: str
    routes: tuple[Route, ...]
    base_latency_ns: int
    bytes_per_s: float
    grain_ns: int = 1
    """The time that the bytes take is rounded up to a multiple of this."""

    def __post_init__(self) -> None:
        require(self.base_latency_ns >= 0, f"link {self.name}: base_latency_ns", "at least 0", self.base_latency_ns)
        ok = math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0
        require(ok, f"link {self.name}: bytes_per_s", "above 0 and finite", self.bytes_per_s)
        require(self.grain_ns >= 1, f"link {self.name}: grain_ns", "at least 1", self.grain_ns)

    def copy_ns(self, size_bytes: int) -> int:
        """Nanoseconds that a copy of this size takes once it has begun."""
        grains = math.ceil(size_bytes * SECOND_NS / (self.bytes_per_s * self.grain_ns))
        return self.base_latency_ns + grains * self.grain_ns


_R = Route
DEFAULT_LINKS: Final[tuple[LinkSpec, ...]] = (
    LinkSpec(name="pcie-down", routes=(_R.G1_G2,), base_latency_ns=20_000, bytes_per_s=25e9),
    LinkSpec(name="pcie-up", routes=(_R.G2_G1,), base_latency_ns=20_000, bytes_per_s=25e9),
    LinkSpec(name="disk-write", routes=(_R.G2_G3, _R.G1_G3), base_latency_ns=100_000, bytes_per_s=3e9),
    LinkSpec(name="disk-read", routes=(_R.G3_G2, _R.G3_G1), base_latency_ns=100_000, bytes_per_s=3e9),
    LinkSpec(name="net-out", routes=(_R.G1_G4, _R.G2_G4, _R.G3_G4), base_latency_ns=1_000_000, bytes_per_s=1.2e9),
    LinkSpec(name="net-in", routes=(_R.G4_G1, _R.G4_G2, _R.G4_G3), base_latency_ns=1_000_000, bytes_per_s=1.2e9),
)
"""PCIe 4.0 x16 as measured (25 of 32 GB/s), one NVMe disk, 10 Gbit/s to an object store; each way its own queue."""


class Fault(msgspec.Struct, frozen=True):
    """A fault of an operation on these ranks (None for all) and these blocks (empty for all). ``silent``: no report."""

    ranks: tuple[int, ...] | None = None
    blocks: tuple[int, ...] = ()
    error: str = "injected"
    silent: bool = False


class _Link:
    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self.busy = False
        self.queue: deque[StartTransfer] = deque()
        self.copied_bytes = 0
        self.operations = 0


class LinkStatus(msgspec.Struct, frozen=True):
    """One link now: whether bytes go, operations that wait for it, and what it has copied so far."""

    name: str
    busy: bool
    queued: int
    operations: int
    copied_bytes: int


class LinkMover:
    """``dispatch.Mover`` over links. Reports as source 0.

    ``block_bytes`` is the size of a block. Tests may set ``faults``, which is called once for each operation when its
    copy begins. The queue of a link is bounded by the leader, which reserves places before it orders a copy.
    """

    def __init__(
        self, timer: Timer, reports: Reports, block_bytes: int, *,
        links: Sequence[LinkSpec] = DEFAULT_LINKS, asynchronous: bool = True,
    ) -> None:
        require(block_bytes > 0, "block_bytes", "above 0", block_bytes)
        self._timer = timer
        self._reports = reports
        self.block_bytes = block_bytes
        self.asynchronous = asynchronous
        self.faults: Callable[[StartTransfer], Fault | None] | None = None
        self.times: Callable[[StartTransfer, int], int | None] | None = None
        """Called once for each asynchronous copy with the time that its link gives it. A copy that gets another time
        takes it, from the order on and beside the queue of its link."""
        self.zeroed: list[int] = []
        """Pools whose bytes were to be overwritten, in order."""
        self._links = [_Link(spec) for spec in links]
        self._of_route: Mapping[Route, _Link] = {
            route: link for link in self._links for route in link.spec.routes
        }
        self._latency_ns = 0
        self._carrier: Carrier | None = None
        self._calendar: Calendar | None = None

    def carry(self, carrier: Carrier, calendar: Calendar) -> None:
        """Have the bytes of every copy moved between its beginning and its end, at which time waits for them."""
        require(self.asynchronous, "asynchronous", "true where bytes move", self.asynchronous)
        self._carrier, self._calendar = carrier, calendar

    # --- the mover's side of the dispatcher ---

    def start(self, order: StartTransfer) -> None:
        """Begin the copy, or queue it behind those of its link."""
        link = self._of_route[order.route]
        if order.route.is_load and not self.asynchronous:
            self._latency_ns += self._copy_ns(link, order)
            link.operations += 1
            link.copied_bytes += order.blocks * self.block_bytes
            self._reports.submit(TransferStarted, order.operation, order.epoch)
            self._report(order, self._fault(order))
            return
        lasts_ns = None if self.times is None else self.times(order, self._copy_ns(link, order))
        if lasts_ns is not None:
            self._copy(link, order, lasts_ns, beside=True)
        elif link.busy:
            link.queue.append(order)
        else:
            self._begin(link, order)

    def cancel(self, operation: int) -> None:
        """Take a queued operation out; an operation that has begun runs out (no cancel comes after its start)."""
        for link in self._links:
            for order in link.queue:
                if order.operation == operation:
                    link.queue.remove(order)
                    return

    def zero(self, pool: int) -> None:
        """Have the bytes of a pool overwritten, if there are any."""
        self.zeroed.append(pool)
        if self._carrier is not None:
            self._carrier.zero(pool)

    # --- questions ---

    def pending_latency_ns(self) -> int:
        """Time of the synchronous loads that no step has been charged for yet. Reading changes nothing."""
        return self._latency_ns

    def take_latency_ns(self) -> int:
        """The same, and forget it: the caller's step is longer by it."""
        taken, self._latency_ns = self._latency_ns, 0
        return taken

    def statistics(self) -> list[LinkStatus]:
        """Every link in the order of its specification."""
        return [
            LinkStatus(link.spec.name, link.busy, len(link.queue), link.operations, link.copied_bytes)
            for link in self._links
        ]

    # --- copying ---

    def _copy_ns(self, link: _Link, order: StartTransfer) -> int:
        return link.spec.copy_ns(order.blocks * self.block_bytes)

    def _fault(self, order: StartTransfer) -> Fault | None:
        return self.faults(order) if self.faults is not None else None

    def _begin(self, link: _Link, order: StartTransfer) -> None:
        link.busy = True
        lasts_ns = self._copy_ns(link, order)
        if link.spec.base_latency_ns:
            self._timer.at(
                self._timer.now_ns + lasts_ns - link.spec.base_latency_ns, lambda: self._next(link)
            )
        self._copy(link, order, lasts_ns, beside=False)

    def _copy(self, link: _Link, order: StartTransfer, lasts_ns: int, *, beside: bool) -> None:
        fault, ends_ns = self._fault(order), self._timer.now_ns + lasts_ns

        def end() -> None:
            link.operations += 1
            link.copied_bytes += order.blocks * self.block_bytes
            self._report(order, fault)
            if not (beside or link.spec.base_latency_ns):
                self._next(link)

        if self._carrier is None or self._calendar is None:
            self._timer.at(ends_ns, end)
        else:
            carrier = self._carrier
            carrier.copy(order)
            self._calendar.at(ends_ns, end, ready=lambda: carrier.arrived(order.operation))
        self._reports.submit(TransferStarted, order.operation, order.epoch)

    def _next(self, link: _Link) -> None:
        """The bytes of a copy are through."""
        if link.queue:
            self._begin(link, link.queue.popleft())
        else:
            link.busy = False

    def _report(self, order: StartTransfer, fault: Fault | None) -> None:
        outcome = None if self._carrier is None else self._carrier.outcome(order.operation)
        for rank in range(order.ranks):
            carried = ("", b"") if outcome is None else outcome[rank]
            if carried is None:
                continue
            if carried[0]:
                self._reports.submit(TransferFailed, order.operation, order.epoch, rank, *carried)
            elif fault is None or (fault.ranks is not None and rank not in fault.ranks):
                self._reports.submit(TransferFinished, order.operation, order.epoch, rank)
            elif not fault.silent:
                self._reports.submit(
                    TransferFailed, order.operation, order.epoch, rank, fault.error, pack_ids(fault.blocks)
                )
