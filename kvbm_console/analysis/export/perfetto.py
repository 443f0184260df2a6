"""Perfetto TrackEvents. Slots share lanes, as many as there were slots at once: a slice for the request, and inside it
the slices of its states. Holds and copies have lanes, too, and tiers and the engine have counters. A flow leads from
candidate to transfer to completion.

A pivot table groups by category, name and arguments. So a name tells the kind alone, arguments are flat, and an
argument has one type in all slices: ``request``, ``state``, ``from_tier``, ``to_tier``, ``status``, ``reason``.

Law of this file: the library is imported when a trace begins, a track is described before its first use, and slices of
a lane lie beside or inside each other.
"""

from heapq import heappop, heappush
from typing import IO, Any, Final

from kvbm_console.analysis.export.pictures import Lanes, hold_args, state_args, transfer_args, transfer_name
from kvbm_console.analysis.export.rows import Consumer, EngineSample, HoldSpan, StateSpan, TierSample, TransferSpan
from kvbm_console.extras import need
from kvbm_console.stream.feed import GapSeen

PROTOS: Final = "perfetto.protos.perfetto.trace.perfetto_trace_pb2"
SEQUENCE: Final = 0x4B56424D
"""Id of our packet sequence: any number that is not 0."""
GROUPS: Final = ("slots", "holds", "transfers", "tiers", "engine")


class PerfettoTrace(Consumer):
    """Writes rows as packets. Raises ``UsageError`` when the library is missing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._pb: Any = need(PROTOS, "perfetto", "perfetto", "--to perfetto")
        self._file = file
        self.written = 0
        self._tracks: dict[tuple[str, object], int] = {}
        self._routes: dict[str, Lanes] = {}
        self._holds = Lanes()
        self._slots: dict[int, tuple[int, int]] = {}
        """Open slots to their lane and their begin."""
        self._free: list[int] = []
        """Lanes without a slot, a heap."""
        self._resumed_ns = 0
        for rank, group in enumerate(GROUPS):
            self._track(group, None, group, rank=rank)

    # --- packets -----------------------------------------------------------------------------------------------------

    def _write(self, packet: Any) -> None:
        packet.trusted_packet_sequence_id = SEQUENCE
        trace = self._pb.Trace()
        trace.packet.append(packet)
        self._file.write(trace.SerializeToString())
        self.written += 1

    def _track(self, group: str, key: object, name: str, *, rank: int | None = None, unit: str | None = None) -> int:
        """The number of a track; it is described at its first use."""
        number = self._tracks.get((group, key))
        if number is not None:
            return number
        number = self._tracks[group, key] = len(self._tracks) + 1
        packet = self._pb.TracePacket()
        about = packet.track_descriptor
        about.uuid, about.name = number, name
        if key is not None:
            about.parent_uuid = self._tracks[group, None]
        if rank is not None:
            about.sibling_order_rank = rank
            about.child_ordering = self._pb.TrackDescriptor.CHRONOLOGICAL
        if unit is not None:
            about.counter.unit_name = unit
        self._write(packet)
        return number

    def _event(self, track: int, at_ns: int, kind: int) -> Any:
        packet = self._pb.TracePacket()
        packet.timestamp = at_ns
        packet.track_event.track_uuid = track
        packet.track_event.type = kind
        return packet

    def _slice(
        self, track: int, kind: str, name: str, begin_ns: int, end_ns: int, args: dict[str, Any],
        flow: int | None = None,
    ) -> None:
        self._begin(track, kind, name, begin_ns, args, flow)
        self._write(self._event(track, end_ns, self._pb.TrackEvent.TYPE_SLICE_END))

    def _begin(
        self, track: int, kind: str, name: str, at_ns: int, args: dict[str, Any], flow: int | None = None
    ) -> None:
        packet = self._event(track, at_ns, self._pb.TrackEvent.TYPE_SLICE_BEGIN)
        packet.track_event.name = name
        packet.track_event.categories.append(kind)
        self._annotate(packet.track_event, args)
        if flow is not None:
            packet.track_event.flow_ids.append(flow)
        self._write(packet)

    def _instant(
        self, track: int, name: str, at_ns: int, args: dict[str, Any], flow: int | None = None, *, ends: bool = False
    ) -> None:
        packet = self._event(track, at_ns, self._pb.TrackEvent.TYPE_INSTANT)
        packet.track_event.name = name
        self._annotate(packet.track_event, args)
        if flow is not None:
            (packet.track_event.terminating_flow_ids if ends else packet.track_event.flow_ids).append(flow)
        self._write(packet)

    @staticmethod
    def _annotate(event: Any, args: dict[str, Any]) -> None:
        for name, value in args.items():
            note = event.debug_annotations.add()
            note.name = name
            if isinstance(value, bool):
                note.bool_value = value
            elif isinstance(value, int):
                note.int_value = value
            else:
                note.string_value = str(value)

    def _counter(self, group: str, key: object, name: str, unit: str, at_ns: int, value: int) -> None:
        track = self._track(group, key, name, unit=unit)
        packet = self._event(track, at_ns, self._pb.TrackEvent.TYPE_COUNTER)
        packet.track_event.counter_value = value
        self._write(packet)

    # --- rows --------------------------------------------------------------------------------------------------------

    def opened(self, slot: int, request: str, at_ns: int) -> None:
        """The slice of the request begins, on the first lane that is free."""
        lane = heappop(self._free) if self._free else len(self._slots)
        begin_ns = max(at_ns, self._resumed_ns)
        self._slots[slot] = lane, begin_ns
        self._begin(self._lane(lane), "request", "request", begin_ns, {"request": request, "slot": slot})

    def closed(self, slot: int, at_ns: int) -> None:
        """The slice of the request ends."""
        lane, _ = self._slots.pop(slot)
        heappush(self._free, lane)
        self._write(self._event(self._lane(lane), at_ns, self._pb.TrackEvent.TYPE_SLICE_END))

    def resumed(self, at_ns: int) -> None:
        """Slices that begin now do not reach over the gap."""
        self._resumed_ns = at_ns

    def _lane(self, lane: int) -> int:
        return self._track("slots", lane, f"slots {lane + 1}")

    def state(self, row: StateSpan) -> None:
        """A slice below the request's."""
        lane, _ = self._slots[row.slot]
        self._slice(self._lane(lane), "state", row.state, row.begin_ns, row.end_ns, state_args(row))

    def hold(self, row: HoldSpan) -> None:
        """A slice on a lane of the holds."""
        lane = self._holds.take(row.begin_ns, row.end_ns)
        track = self._track("holds", lane, f"holds {lane + 1}")
        self._slice(track, "hold", f"held at {row.site}", row.begin_ns, row.end_ns, hold_args(row))

    def transfer(self, row: TransferSpan) -> None:
        """Queued and on the wire, with a flow from the slot's lane through both and back, while the slot is there."""
        lane = self._routes.setdefault(row.route, Lanes()).take(row.planned_ns, row.until_ns)
        track = self._track("transfers", (row.route, lane), row.route if not lane else f"{row.route} ({lane + 1})")
        name, args = transfer_name(row), transfer_args(row)
        flow = row.candidate + 1  # 0 is no flow
        at, begun_ns = (None, 0) if row.slot is None else self._slots.get(row.slot, (None, 0))
        slot = None if at is None or row.planned_ns < begun_ns else self._lane(at)
        if slot is not None:
            self._instant(slot, f"planned {row.route}", row.planned_ns, args, flow)
        queued_until = row.started_ns if row.started_ns is not None else row.until_ns
        self._slice(track, "queued", f"queued {name}", row.planned_ns, queued_until, args, flow)
        if row.started_ns is not None:
            self._slice(track, "wire", name, row.started_ns, row.until_ns, args, flow)
        if row.ended_ns is not None and slot is not None:
            self._instant(slot, f"{row.status} {row.route}", row.ended_ns, args, flow, ends=True)

    def tier(self, row: TierSample) -> None:
        """A counter for each condition."""
        for condition in ("referenced", "writing", "cached", "empty"):
            self._counter("tiers", (row.pool, condition), f"{row.tier} {condition}", "blocks", row.at_ns,
                          getattr(row, condition))

    def engine(self, row: EngineSample) -> None:
        """Requests that run and wait."""
        self._counter("engine", "running", "running", "requests", row.at_ns, row.running)
        self._counter("engine", "waiting", "waiting", "requests", row.at_ns, row.waiting)

    def gap(self, gap: GapSeen, at_ns: int) -> None:
        """An instant on the group of slots."""
        self._instant(self._tracks["slots", None], f"gap {gap.count}", at_ns,
                      {"first": gap.first, "last": gap.last, "reason": gap.reason})
