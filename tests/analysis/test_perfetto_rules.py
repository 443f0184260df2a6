"""A trace read with nothing but the wire format: what Perfetto's trace processor requires of a file, rule by rule.

The field numbers are those of ``perfetto/trace/trace_packet.proto`` and ``track_event/*.proto``; no generated class and
nothing of the exporter is used, so a mistake in either shows.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm_console.analysis.export import export
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.recording.reader import Recording

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
PACKET = 1
TIMESTAMP, SEQUENCE_ID, TRACK_EVENT, TRACK_DESCRIPTOR = 8, 10, 11, 60
UUID, NAME, PARENT_UUID, COUNTER = 1, 2, 5, 8
EVENT_TYPE, EVENT_TRACK, EVENT_NAME, COUNTER_VALUE, FLOWS, TERMINATING_FLOWS = 9, 11, 23, 30, 47, 48
SLICE_BEGIN, SLICE_END, INSTANT, COUNTER_TYPE = 1, 2, 3, 4

Fields = dict[int, list[int | bytes]]


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of one message."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = varint(data, at)
            yield key >> 3, value
        elif kind == BYTES:
            length, at = varint(data, at)
            yield key >> 3, data[at : at + length]
            at += length
        else:
            size = {FIXED64: 8, FIXED32: 4}[kind]
            yield key >> 3, int.from_bytes(data[at : at + size], "little")
            at += size
    assert at == len(data), "a field is cut off"


def message(data: bytes) -> Fields:
    found: Fields = defaultdict(list)
    for number, value in fields(data):
        found[number].append(value)
    return found


def packets(path: Path) -> list[Fields]:
    found = []
    for number, value in fields(path.read_bytes()):
        assert number == PACKET
        assert isinstance(value, bytes)
        found.append(message(value))
    return found


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDINGS.glob("*.mcap")))
def test_a_trace_keeps_the_rules_of_its_format(name: str, tmp_path: Path) -> None:
    source = evidence_of(Recording.open(RECORDINGS / f"{name}.mcap"))
    path = tmp_path / "out.pftrace"
    made = export(source, "perfetto", path)
    found = packets(path)
    assert len(found) == made.items
    tracks: dict[object, Fields] = {}
    open_slices: dict[object, int] = defaultdict(int)
    begun: set[object] = set()
    first_ns, last_ns = 2**63, 0
    for packet in found:
        assert packet[SEQUENCE_ID], "an event of no sequence is dropped"
        assert packet[SEQUENCE_ID][0] != 0
        assert len(packet[TRACK_DESCRIPTOR]) + len(packet[TRACK_EVENT]) == 1
        if packet[TRACK_DESCRIPTOR]:
            track = message(packet[TRACK_DESCRIPTOR][0])  # type: ignore[arg-type]
            assert track[UUID][0] not in tracks, "one descriptor a track"
            assert track[NAME][0]
            for parent in track[PARENT_UUID]:
                assert parent in tracks, "a parent is described before its children"
            tracks[track[UUID][0]] = track
        else:
            number = message(packet[TRACK_EVENT][0])[EVENT_TRACK][0]  # type: ignore[arg-type]
            assert number in tracks, "a track is described before its first event"
    slots = next(number for number, track in tracks.items() if track[NAME] == [b"slots"])
    # As the processor does: by time, and those of one time as they stand in the file.
    for packet in sorted((one for one in found if one[TRACK_EVENT]), key=lambda one: one[TIMESTAMP]):
        (event_data,) = packet[TRACK_EVENT]
        event = message(event_data)  # type: ignore[arg-type]
        (at_ns,), (track_id,), (kind,) = packet[TIMESTAMP], event[EVENT_TRACK], event[EVENT_TYPE]
        assert isinstance(at_ns, int)
        first_ns, last_ns = min(first_ns, at_ns), max(last_ns, at_ns)
        is_counter = bool(tracks[track_id][COUNTER])
        assert is_counter == (kind == COUNTER_TYPE) == bool(event[COUNTER_VALUE]), "values are of counters"
        if kind == SLICE_BEGIN:
            assert event[EVENT_NAME]
        open_slices[track_id] += {SLICE_BEGIN: 1, SLICE_END: -1}.get(kind, 0)  # type: ignore[call-overload]
        deepest = 2 if tracks[track_id][PARENT_UUID] == [slots] else 1  # the request, and a state inside
        assert 0 <= open_slices[track_id] <= deepest, "slices of a track neither overlap nor end twice"
        begun |= set(event[FLOWS])
        assert set(event[TERMINATING_FLOWS]) <= begun, "a flow ends after it began"
    assert not any(open_slices.values())
    events = [one for batch in Recording.open(RECORDINGS / f"{name}.mcap").events() for one in batch]
    assert first_ns >= events[0].at_ns
    assert last_ns <= events[-1].at_ns
