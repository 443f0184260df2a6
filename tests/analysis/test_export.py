"""Exports are whole, say what the recording says, and need nothing that is not there."""

import json
import re
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from kvbm_console.analysis.export import FORMATS, export
from kvbm_console.analysis.export.tables import TABLES
from kvbm_console.analysis.walk import Evidence, evidence_of
from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core.errors import RecordingError
from kvbm_console.core.ids import SlotState
from kvbm_console.recording.reader import Recording
from tests.analysis.evidence import evidence
from tests.recording.helpers import real_run

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
ALL = sorted(path.stem for path in RECORDINGS.glob("*.mcap"))


def recorded(name: str) -> Evidence:
    return evidence_of(Recording.open(RECORDINGS / f"{name}.mcap"))


def events_of(name: str) -> list[ev.Event]:
    return [event for batch in Recording.open(RECORDINGS / f"{name}.mcap").events() for event in batch]


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["rec", "export", *map(str, arguments)])


# --- json lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_jsonl_has_every_event_and_every_gap(name: str) -> None:
    lines = [json.loads(line) for line in run(RECORDINGS / f"{name}.mcap", "--to", "jsonl").stdout.splitlines()]
    events = events_of(name)
    assert [line["seq"] for line in lines if line["kind"] != "Gap"] == [event.seq for event in events]
    assert sum(line["kind"] == "Gap" for line in lines) == len(Recording.open(RECORDINGS / f"{name}.mcap").gaps)


@pytest.mark.parametrize("name", ALL)
def test_jsonl_takes_the_expressions_of_tail(name: str) -> None:
    """Also where only the facts know whose event it is."""
    path = RECORDINGS / f"{name}.mcap"
    moves = [json.loads(line) for line in run(
        path, "--to", "jsonl", "--filter", "kind = SlotMoved and to = decoding").stdout.splitlines()]
    wanted = [e.seq for e in events_of(name) if isinstance(e, ev.SlotMoved) and e.new.label == "decoding"]
    assert [line["seq"] for line in moves if line["kind"] != "Gap"] == wanted
    opened = next((event for event in events_of(name) if isinstance(event, ev.SlotOpened)), None)
    if opened is not None and name != "gap":
        about = run(path, "--to", "jsonl", "--filter", f'request = "{opened.request}" and kind = SlotMoved')
        seqs = [json.loads(line)["seq"] for line in about.stdout.splitlines()]
        assert seqs == [e.seq for e in events_of(name) if isinstance(e, ev.SlotMoved) and e.slot == opened.slot]


# --- traces ----------------------------------------------------------------------------------------------------------


def chrome_of(what: Evidence, directory: Path) -> list[dict[str, Any]]:
    path = directory / "out.json"
    made = export(what, "chrome", path)
    events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    assert made.items == len(events)
    assert made.bytes == path.stat().st_size
    return events


def spans(what: Evidence) -> Counter[tuple[int, str]]:
    """(slot, state) of every interval, straight from the events of evidence without gaps."""
    found: Counter[tuple[int, str]] = Counter()
    for item in what.items():
        for event in getattr(item, "events", ()):
            if isinstance(event, ev.SlotOpened):
                found[event.slot, "initialized"] += 1
            elif isinstance(event, ev.SlotMoved) and event.new.label != "finished":
                found[event.slot, event.new.label] += 1
    return found


def no_overlaps(slices: list[tuple[float, float]]) -> bool:
    ordered = sorted(slices)
    return all(one[1] <= other[0] + 1e-6 for one, other in pairwise(ordered))


@pytest.mark.parametrize("sizes", [(48, 96), (40, 16)])
def test_a_chrome_trace_has_a_slice_for_every_state_and_none_overlap(sizes: tuple[int, int], tmp_path: Path) -> None:
    run_ = real_run(18, *sizes)
    what = evidence(run_.all_events, run_.config)
    events = chrome_of(what, tmp_path)
    states = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert Counter((event["tid"], event["name"]) for event in states) == spans(what)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert all(no_overlaps(slices) for slices in threads.values())
    assert any(pid == 3 for pid, _ in threads)


def test_flows_lead_from_the_plan_through_the_copy_to_its_end(tmp_path: Path) -> None:
    events = chrome_of(recorded("onboard-from-host"), tmp_path)
    phases: dict[int, str] = {}
    for event in events:
        if event["ph"] in "stf":
            phases[event["id"]] = phases.get(event["id"], "") + event["ph"]
    promoted = [event for event in events_of("onboard-from-host") if isinstance(event, ev.CandidatePromoted)]
    assert phases == {event.candidate: "stf" for event in promoted}


def test_a_gap_is_a_mark_and_nothing_is_drawn_across_it(tmp_path: Path) -> None:
    events = chrome_of(recorded("gap"), tmp_path)
    (gap,) = [event for event in events if event["ph"] == "i"]
    missing = Recording.open(RECORDINGS / "gap.mcap").gaps[0]
    assert gap["args"]["first"] == missing.first
    kept = events_of("gap")
    before = max(event.at_ns for event in kept if event.seq < missing.first) / 1e3
    after = min(event.at_ns for event in kept if event.seq > missing.last) / 1e3
    assert gap["ts"] == pytest.approx(before)
    for event in events:
        if event["ph"] == "X" and event["pid"] == 1:
            assert not (event["ts"] < before and event["ts"] + event["dur"] > after), event


def perfetto_of(what: Evidence, directory: Path) -> Trace:
    path = directory / "out.pftrace"
    made = export(what, "perfetto", path)
    trace = Trace.FromString(path.read_bytes())
    assert made.items == len(trace.packet)
    return trace


@pytest.mark.parametrize("name", ["onboard-from-host", "breakpoint-hold", "stuck-slot", "gap", "thrash"])
def test_perfetto_tracks_are_described_balanced_and_connected(name: str, tmp_path: Path) -> None:
    trace = perfetto_of(recorded(name), tmp_path)
    described = [one.track_descriptor for one in trace.packet if one.HasField("track_descriptor")]
    tracks = {one.uuid: one for one in described}
    depth: Counter[int] = Counter()
    names: Counter[str] = Counter()
    kinds: set[tuple[str, ...]] = set()
    begun: set[int] = set()
    ended: set[int] = set()
    for packet in sorted((one for one in trace.packet if one.HasField("track_event")), key=lambda one: one.timestamp):
        event = packet.track_event
        assert event.track_uuid in tracks
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            depth[event.track_uuid] += 1
            kinds.add((*event.categories, event.name))
            if "wire" in event.categories:
                assert {"route", "blocks", "operation"} <= {note.name for note in event.debug_annotations}
            names[event.name.split(",")[0].split(" ")[0]] += 1
        elif event.type == TrackEvent.TYPE_SLICE_END:
            depth[event.track_uuid] -= 1
        assert 0 <= depth[event.track_uuid] <= 2
        begun |= set(event.flow_ids)
        ended |= set(event.terminating_flow_ids)
    assert not +depth
    assert ended <= begun
    # A pivot table groups by category and name: both tell the kind, and no name has the number of one copy or request.
    assert {kind for kind, _ in kinds} <= {"request", "state", "hold", "queued", "wire"}
    assert not [name for _, name in kinds if re.search(r"\d", re.sub(r"G\d", "", name))], kinds
    groups = {one.name for one in tracks.values() if not one.HasField("parent_uuid")}
    assert groups == {"slots", "holds", "transfers", "tiers", "engine"}
    assert names["queued"] >= 1
    if name == "breakpoint-hold":
        assert names["held"] == 1


class Pivot:
    """The slices of a trace as a pivot table has them: closed in the order of time, each with its arguments."""

    def __init__(self, trace: Trace) -> None:
        described = [one.track_descriptor for one in trace.packet if one.HasField("track_descriptor")]
        root = next(one.uuid for one in described if one.name == "slots" and not one.HasField("parent_uuid"))
        self.lanes = {one.uuid for one in described if one.parent_uuid == root}
        self.types: dict[str, set[str | None]] = defaultdict(set)
        """The type of each argument."""
        self.slices: list[tuple[str, int, dict[str, Any], Any]] = []
        """Category, duration, arguments, and the slice around it."""
        open_: dict[int, list[tuple[int, Any, dict[str, Any]]]] = defaultdict(list)
        events = sorted((one for one in trace.packet if one.HasField("track_event")), key=lambda one: one.timestamp)
        for packet in events:
            event, stack = packet.track_event, open_[packet.track_event.track_uuid]
            for note in event.debug_annotations:
                self.types[note.name].add(note.WhichOneof("value"))
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                args = {note.name: getattr(note, note.WhichOneof("value") or "") for note in event.debug_annotations}
                stack.append((packet.timestamp, event, args))
            elif event.type == TrackEvent.TYPE_SLICE_END:
                begun, inner, args = stack.pop()
                self.slices.append((inner.categories[0], packet.timestamp - begun, args,
                                    stack[-1][2] if stack else None))
        assert not any(open_.values())

    def sums(self, category: str, *by: str, of: str = "") -> dict[tuple[Any, ...], int]:
        """The sum of an argument, or of durations, by arguments."""
        found: Counter[tuple[Any, ...]] = Counter()
        for kind, took, args, _ in self.slices:
            if kind == category:
                found[tuple(args.get(name) for name in by)] += args[of] if of else took
        return dict(found)


def test_a_pivot_table_of_perfetto_has_the_figures_of_the_facts(tmp_path: Path) -> None:
    run_ = real_run(18, 40, 16)
    what = evidence(run_.all_events, run_.config)
    pivot = Pivot(perfetto_of(what, tmp_path))
    state = run_.state_after(len(run_.all_events) - 1)
    moved = pivot.sums("wire", "route", "status", of="blocks")
    assert {route: blocks for (route, status), blocks in moved.items() if status == "completed"} \
        == {route: blocks for route, blocks in state.totals.moved_blocks.items() if blocks}
    assert pivot.sums("wire", "from_tier", "to_tier", of="blocks") == {
        tuple(route.split(">")): sum(blocks for (other, _), blocks in moved.items() if other == route)
        for route, _ in moved}
    spent: Counter[tuple[str, str]] = Counter()
    known: dict[int, tuple[str, str, int]] = {}
    for event in run_.all_events:  # the time in each state, counted from the events alone
        if isinstance(event, ev.SlotOpened):
            known[event.slot] = event.request, SlotState.INITIALIZED.label, event.at_ns
        elif isinstance(event, ev.SlotMoved):
            request, label, since = known[event.slot]
            spent[request, label] += event.at_ns - since
            known[event.slot] = request, event.new.label, event.at_ns
    assert +Counter(pivot.sums("state", "request", "state")) == +spent
    assert {name: len(types) for name, types in pivot.types.items() if len(types) > 1} == {}
    live, most = 0, 0
    for event in run_.all_events:
        live += isinstance(event, ev.SlotOpened) - isinstance(event, ev.SlotClosed)
        most = max(most, live)
    assert len(pivot.lanes) == most
    for kind, _, args, around in pivot.slices:
        assert (around is not None) == (kind == "state")
        assert kind != "state" or around["request"] == args["request"]


# --- tables ----------------------------------------------------------------------------------------------------------


def test_parquet_answers_questions_in_sql(tmp_path: Path) -> None:
    run_ = real_run(18, 40, 16)
    place = tmp_path / "run.parquet"
    made = export(evidence(run_.all_events, run_.config), "parquet", place)
    assert sorted(path.stem for path in place.iterdir()) == sorted(TABLES)
    assert made.items == sum(pyarrow.parquet.read_metadata(path).num_rows for path in place.iterdir())

    def ask(sql: str) -> Any:
        return duckdb.sql(sql.format(at=place)).fetchall()

    state = run_.state_after(len(run_.all_events) - 1)
    assert ask("select count(*) from '{at}/events.parquet'") == [(len(run_.all_events),)]
    assert ask("select sum(hits_g1), sum(hits_g2), sum(scored_blocks), sum(preemptions) from '{at}/requests.parquet'") \
        == [(state.totals.hit_blocks[0], state.totals.hit_blocks[1], state.totals.prompt_blocks,
             state.totals.preemptions)]
    moved = ask("select route, sum(blocks) from '{at}/transfers.parquet' where status = 'completed' group by route")
    assert dict(moved) == state.totals.moved_blocks
    backwards = "started_ns < promoted_ns or ended_ns < started_ns"
    assert ask("select count(*) from '{at}/transfers.parquet' where " + backwards) == [(0,)]
    # The states of a request fill its time.
    assert ask(
        "select count(*) from (select r.slot, r.time_ns, sum(s.end_ns - s.begin_ns) as spent from "
        "'{at}/requests.parquet' r join '{at}/states.parquet' s using (slot) group by all) where spent != time_ns"
    ) == [(0,)]
    assert ask("select count(*) from '{at}/tiers.parquet' where tier = 'G1' and "
               "empty + cached + referenced + writing + quarantined != 40") == [(0,)]


def test_an_empty_table_is_a_table(tmp_path: Path) -> None:
    place = tmp_path / "run.parquet"
    export(recorded("local-only"), "parquet", place)
    assert duckdb.sql(f"select count(*) from '{place}/gaps.parquet'").fetchall() == [(0,)]


# --- what can go wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "module", "extra"), [
    ("perfetto", "perfetto.protos.perfetto.trace.perfetto_trace_pb2", "perfetto"), ("parquet", "pyarrow", "parquet"),
])
def test_a_missing_library_is_one_sentence_with_its_extra(
    form: str, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = run(RECORDINGS / "gap.mcap", "--to", form, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert f"pip install '.[{extra}]'" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_nothing_is_overwritten_and_a_failure_leaves_nothing(form: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    result = run(RECORDINGS / "gap.mcap", "--to", form, "--out", taken)
    assert result.exit_code == 2
    assert taken.read_text() == "mine"

    def broken() -> Any:
        yield from recorded("gap").items()
        raise RecordingError("the file is corrupt")

    what = recorded("gap")
    with pytest.raises(RecordingError):
        export(Evidence(what.name, what.config, what.events, broken, what.remembered), form, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    for arguments, words in (
        ((RECORDINGS / "gap.mcap", "--to", "chrome"), "--to chrome needs --out"),
        ((RECORDINGS / "gap.mcap", "--to", "csv", "--out", tmp_path / "o"), "csv"),
        ((RECORDINGS / "gap.mcap", "--to", "chrome", "--out", tmp_path / "no" / "o"), "is not a directory"),
        ((tmp_path / "none", "--to", "jsonl"), "does not exist"),
        ((RECORDINGS / "gap.mcap", "--to", "jsonl", "--filter", "knd = x"), "--filter, column 1: an event has no"),
        ((RECORDINGS / "gap.mcap", "--to", "chrome", "--out", tmp_path / "o", "--filter", "seq > 1"), "not for chrome"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert words in result.output


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    result = run(RECORDINGS / "thrash.mcap", "--to", "perfetto", "--out", tmp_path / "t.pftrace", "--format", "json")
    document = json.loads(result.stdout)
    assert document["format"] == "perfetto"
    assert document["bytes"] == (tmp_path / "t.pftrace").stat().st_size
