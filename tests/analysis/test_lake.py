"""The lake against the facts and against answers that are computed from the events without SQL.

Law of this file: stored less evicted rows are the places that hold a block, a file is whole, and adding again changes
nothing.
"""

import shutil
from collections import Counter
from datetime import date
from itertools import permutations
from pathlib import Path
from typing import Any

import duckdb
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from kvbm_console.analysis import lake, lake_files
from kvbm_console.analysis.lake_questions import ask
from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.walk import evidence_of, walk
from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core.tiers import READY
from kvbm_console.recording.reader import Recording
from tests.analysis.evidence import evidence

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
RUN = RECORDINGS / "screens" / "run.mcap"
TAPES = sorted(RECORDINGS.rglob("*.mcap"))


def add(path: Path, place: Path, engine: str) -> lake_files.Added:
    recording = Recording.open(path)
    return lake_files.add(evidence_of(recording), place, engine, recording.incarnation, recording.clock_anchor_ns)


def rows(place: Path, sql: str) -> list[Any]:
    return duckdb.sql(sql.format(**{table: f"'{place}/{table}/*/*/*.parquet'" for table in lake.TABLES})).fetchall()


def contents(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*.*") if path.is_file()}


@pytest.mark.parametrize("path", TAPES, ids=lambda path: str(path.relative_to(RECORDINGS)))
def test_stored_less_evicted_is_what_is_there(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake, "CHUNK_EVENTS", 500)
    made = add(path, tmp_path, "engine")
    state = walk(evidence_of(Recording.open(path)), [])
    if state is None or not made.rows["blocks"]:
        return  # it ends in a gap, or has no block
    there: Counter[tuple[str, int]] = Counter()
    for pool in state.pools:
        for place, content in enumerate(pool.content):
            if content == READY:
                there[pool.info.tier.label, pool.hash_of[place]] += 1
    told = rows(tmp_path, "select tier, hash, sum(if(op = 'stored', 1, -1)) from {blocks} group by all")
    assert {(tier, key): places for tier, key, places in told if places} == dict(there)
    recording = Recording.open(path)
    seqs = rows(tmp_path, "select min(seq), max(seq) from {blocks}")[0]
    assert recording.first_seq <= seqs[0] <= seqs[1] <= recording.last_seq + 1


def test_adding_again_changes_nothing_and_no_draft_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake, "CHUNK_EVENTS", 3_000)
    first = add(RUN, tmp_path, "prod/1")
    before = contents(tmp_path)
    files = [Path(name) for name in before if name.endswith(".parquet")]
    assert first.files == len(files) > 6
    assert {file.parts[2] for file in files} == {"engine=prod%2F1"}
    assert add(RUN, tmp_path, "prod/1") == first
    assert contents(tmp_path) == before
    whole = tmp_path / "whole"
    monkeypatch.setattr(lake, "CHUNK_EVENTS", 10**9)
    assert add(RUN, whole, "prod/1").rows == first.rows
    for table in lake.TABLES:
        one, other = (rows(place, f"select * from {{{table}}} order by all") for place in (tmp_path, whole))
        assert [row[: len(lake.TABLES[table])] for row in one] == [row[: len(lake.TABLES[table])] for row in other]


def test_a_writer_that_has_read_less_leaves_complete_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``lake add`` beside ``serve --lake``: it began before the other completed the chunk, and ends behind it."""
    monkeypatch.setattr(lake, "CHUNK_EVENTS", 3_000)
    late = lake_files.LakeFiles(tmp_path, "a", Recording.open(RUN).incarnation)
    add(RUN, tmp_path, "a")
    before = contents(tmp_path)
    for table in lake.TABLES:
        (path, *_) = sorted((tmp_path / table).glob("day=*/*/*-00000000.parquet"))
        day = date.fromisoformat(path.parent.parent.name.removeprefix("day=")).toordinal() - lake_files.EPOCH_DAY
        late.write(table, 0, day, lake.rows_of(table))
    assert contents(tmp_path) == before


def test_a_file_that_was_taken_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake, "CHUNK_EVENTS", 3_000)
    first = add(RUN, tmp_path, "a")
    before = contents(tmp_path)
    next(tmp_path.glob("lookups/*/*/*-00000000.parquet")).unlink()
    assert add(RUN, tmp_path, "a") == first
    assert contents(tmp_path) == before


def test_a_broken_list_of_complete_files_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake, "CHUNK_EVENTS", 3_000)
    add(RUN, tmp_path, "a")
    (whole,) = tmp_path.glob("whole/*/*.json")
    whole.write_text("{half")
    done = CliRunner().invoke(cli, ["lake", "add", str(RUN), "--lake", str(tmp_path), "--engine", "a"])
    assert (done.exit_code, done.stderr.count("is no list of complete files")) == (2, 1), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["lake[3]", "lake*", "lake?", "lake's"])
def test_a_lake_has_any_name_and_no_rows_of_its_neighbours(name: str, tmp_path: Path) -> None:
    for place in (name, "lake1", "lake12"):
        add(RUN, tmp_path / place, place)
    assert [row[0] for row in ask(tmp_path / name, "hit-rate").rows] == [None, name]


NAMES = ("__HIVE_DEFAULT_PARTITION__", "", ".", "..", "a/b", "/", "a=b", "engine=a", "a%b", "a%2Fb", "%5F", "+", " ",
         "007", "NULL", "*", "[a]", "'", '"', "\\", "\n", "聊" * 64, "x" * 200, "\udcff")


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_an_engine_has_any_name(name: str, tmp_path: Path) -> None:
    for engine in (name, "a"):
        add(RECORDINGS / "failed-load.mcap", tmp_path, engine)
    told = name.encode(errors="backslashreplace").decode()  # of a file whose name is no UTF-8
    assert [row[0] for row in ask(tmp_path, "hit-rate").rows] == [None, *sorted((told, "a"))]
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.parquet")} == set(lake.TABLES)


@pytest.mark.parametrize(("name", "folder"), [
    (NAMES[0], "engine=__HIVE_DEFAULT_PARTITION__"), ("聊", "engine=%E8%81%8A"), ("a/b", "engine=a%2Fb"),
])
def test_an_older_lake_keeps_the_folders_of_its_engines(name: str, folder: str, tmp_path: Path) -> None:
    """A recording that is added again replaces its files, and the engine has its name."""
    path = RECORDINGS / "failed-load.mcap"
    add(path, tmp_path, name)
    new = next(each.name for each in (tmp_path / "whole").iterdir())
    for each in [*tmp_path.rglob(new)]:
        each.rename(each.with_name(folder))
    before, answer = contents(tmp_path), ask(tmp_path, "hit-rate").rows
    assert answer[1][0] == name
    add(path, tmp_path, name)
    assert contents(tmp_path) == before


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    def fails(table: object, path: str, **_: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", fails)
    with pytest.raises(OSError, match="No space"):
        add(RUN, tmp_path, "engine")
    assert not contents(tmp_path)
    monkeypatch.undo()
    add(RUN, tmp_path, "engine")
    assert contents(tmp_path), "the next try writes all"


def test_the_questions_are_answered_as_the_events_say(tmp_path: Path) -> None:
    for engine in ("a", "b"):
        add(RUN, tmp_path, engine)
    requests = Requests()
    walk(evidence_of(Recording.open(RUN)), [requests])
    prompt = sum(each.scored_blocks for each in requests.all)
    found = {row[0]: row for row in ask(tmp_path, "hit-rate").rows}
    looked = rows(tmp_path, "select engine, sum(prompt_blocks), sum(g1 + g2 + g3 + g4) from {lookups} group by engine")
    assert {engine: (blocks, hits) for engine, blocks, hits in looked} == {
        engine: (row[1], sum(row[2:6])) for engine, row in found.items() if engine is not None
    }
    assert found["a"][6] == 0
    assert found["a"][1] == prompt
    assert found[None][1] == 2 * prompt
    missed: Counter[int] = Counter()
    gone: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for engine, at_ns, key, tier in rows(
        tmp_path, "select engine, at_ns, hash, tier from {blocks} where op = 'evicted' order by at_ns"
    ):
        gone.setdefault((engine, key), []).append((at_ns, tier))
    after: Counter[tuple[str, str]] = Counter()
    for engine, at_ns, key, blocks in rows(
        tmp_path, "select engine, at_ns, miss_hash, missed_blocks from {lookups} where miss_hash is not null"
    ):
        missed[key] += blocks
        before = [tier for gone_ns, tier in gone.get((engine, key), ()) if gone_ns <= at_ns]
        if before:
            after[engine, before[-1]] += blocks
    top = ask(tmp_path, "top-misses").rows
    assert [row[1] for row in top] == sorted(missed.values(), reverse=True)[:20]
    assert all(missed[int(row[0], 16)] == row[1] and row[3] == 2 for row in top)
    assert {(row[0], row[1]): row[3] for row in ask(tmp_path, "evict-then-miss").rows} == dict(after)
    totals = walk(evidence_of(Recording.open(RUN)), [])
    assert totals is not None
    copies = {row[0]: row[2] for row in ask(tmp_path, "copies").rows}
    assert copies == {route: 2 * blocks for route, blocks in totals.totals.moved_blocks.items() if blocks}
    pool = next(pool for pool in totals.pools if pool.info.tier.label == "g3")
    key = next(iter(pool.by_hash))
    assert [row[:2] for row in ask(tmp_path, "who-has", key).rows if row[1] == "g3"] == [["a", "g3"], ["b", "g3"]]


@pytest.mark.parametrize("name", ["screens/run", "failed-load", "gap", "clone"])
def test_a_request_that_ended_is_a_row(name: str, tmp_path: Path) -> None:
    path = RECORDINGS / f"{name}.mcap"
    add(path, tmp_path, "a")
    anchor = Recording.open(path).clock_anchor_ns
    requests = Requests()
    walk(evidence_of(Recording.open(path)), [requests])
    ended = {each.slot: each for each in requests.all if each.ended_ns is not None and each.reason is not None}
    told = rows(
        tmp_path, "select slot, request, opened_ns, first_token_ns, at_ns, prompt_blocks, reason from {requests}"
    )
    assert ended
    assert {row[0]: row[1:] for row in told} == {
        slot: (
            each.request, anchor + each.arrived_ns,
            None if each.first_token_ns is None else anchor + each.first_token_ns,
            anchor + (each.ended_ns or 0), each.prompt_blocks, each.reason,
        ) for slot, each in ended.items()
    }
    (lost,) = rows(tmp_path, "select sum(lost_blocks), sum(preemptions), count(*) from {requests}")
    assert lost == (
        sum(each.lost_blocks for each in ended.values() if each.complete),
        sum(each.preemptions for each in ended.values()), len(told),
    )
    assert bool(lost[0]) == (path.stem == "failed-load")


def test_reuse_is_what_was_delivered_captured_and_held(tmp_path: Path) -> None:
    """Counted again from the rows alone, look-up by look-up, in a fleet of engines with different runs."""
    runs = {"a": RUN, "b": RECORDINGS / "thrash.mcap", "c": RECORDINGS / "failed-load.mcap", "d": RUN}
    start = min(Recording.open(path).clock_anchor_ns for path in runs.values())
    for late, (engine, path) in enumerate(runs.items()):
        recording = Recording.open(path)
        anchor = start + late * 150_000_000
        lake_files.add(evidence_of(recording), tmp_path, engine, recording.incarnation, anchor)
    places: Counter[tuple[str, int]] = Counter()
    prompt, delivered, lost, elsewhere = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for _, kind, engine, key, number in rows(tmp_path, """
        select at_ns, 0 as kind, engine, hash, if(op = 'stored', 1, -1) from {blocks} union all
        select at_ns, 1 as kind, engine, miss_hash, missed_blocks from {lookups} where miss_hash is not null
        order by at_ns, kind
    """):
        if kind == 0:
            places[engine, key] += number
        elif any(places[other, key] > 0 for other in runs if other != engine):
            elsewhere[engine] += number
    for engine, blocks, found in rows(
        tmp_path, "select engine, sum(prompt_blocks), sum(g1 + g2 + g3 + g4) from {lookups} group by engine"
    ):
        prompt[engine], delivered[engine] = blocks, found
    for engine, blocks in rows(tmp_path, "select engine, sum(lost_blocks) from {requests} group by engine"):
        lost[engine] = blocks
        delivered[engine] -= blocks
    assert elsewhere["d"] > 0
    assert lost["c"] > 0
    told = ask(tmp_path, "reuse").rows
    assert [row[0] for row in told] == [None, *sorted(runs)]
    for engine, blocks, *shares in told:
        assert sum(shares) == pytest.approx(100.0, abs=0.03)
        engines = runs if engine is None else [engine]
        assert blocks == sum(prompt[each] for each in engines)
        counts = [sum(count[each] for each in engines) for count in (delivered, lost, elsewhere)]
        assert shares[:3] == [pytest.approx(100 * count / blocks, abs=0.006) for count in counts]


def test_an_engine_holds_nothing_of_an_earlier_run(tmp_path: Path) -> None:
    """``b`` asks for the prompts of ``a`` after ``a`` has begun again with others."""
    first, again = Recording.open(RUN), Recording.open(RECORDINGS / "thrash.mcap")
    later = 100_000_000_000

    def run(place: Path, engine: str, recording: Recording, at: int) -> None:
        anchor = first.clock_anchor_ns + at * later
        lake_files.add(evidence_of(recording), place, engine, recording.incarnation, anchor)

    alone, place = tmp_path / "alone", tmp_path / "again"
    run(alone, "b", again, 1)
    for lake_of in (place, tmp_path / "held"):
        run(lake_of, "a", first, 0)
        run(lake_of, "b", first, 2)
    run(place, "a", again, 1)
    state, other = first.state_at(first.last_seq), again.state_at(again.last_seq)
    held = {key for pool in state.pools for key in pool.by_hash} - {key for pool in other.pools for key in pool.by_hash}
    key = min(held)
    assert {row[0] for row in ask(tmp_path / "held", "who-has", key).rows} == {"a", "b"}
    assert {row[0] for row in ask(place, "who-has", key).rows} == {"b"}
    now = next(key for pool in other.pools for key, at in pool.by_hash.items() if pool.content[at] == READY)
    assert [["a", *row[1:]] for row in ask(alone, "who-has", now).rows] == ask(place, "who-has", now).rows != []
    elsewhere = {row[0]: row[4] for row in ask(place, "reuse").rows}
    assert elsewhere["b"] == 0
    assert {row[0]: row[4] for row in ask(tmp_path / "held", "reuse").rows}["b"] > 0


@pytest.mark.parametrize("moments", permutations([(4, "g1", 7), (5, "g2", 7), (9, "g3", 7)]))
def test_the_last_of_the_evictions_of_one_moment_is_told(
    moments: tuple[tuple[int, str, int], ...], tmp_path: Path
) -> None:
    """Two tiers give a block up in the same nanosecond, and a third one behind the look-up."""
    for table, columns in (
        ("blocks", {
            "seq": [seq for seq, _, _ in moments], "at_ns": [at for _, _, at in moments], "op": ["evicted"] * 3,
            "tier": [tier for _, tier, _ in moments], "hash": [1] * 3, "slot": [None] * 3,
        }),
        ("lookups", {
            "seq": [8], "at_ns": [7], "slot": [0], "request": ["r"], "prompt_blocks": [3],
            "g1": [0], "g2": [0], "g3": [0], "g4": [0], "miss_hash": [1], "missed_blocks": [3], "why": ["evicted"],
        }),
    ):
        file = tmp_path / table / "day=2026-01-01" / "engine=e" / "run-00000000.parquet"
        file.parent.mkdir(parents=True)
        schema = lake_files._schema(pyarrow, table)
        pyarrow.parquet.write_table(pyarrow.table(columns, schema=schema), file)
    assert ask(tmp_path, "evict-then-miss").rows == [["e", "g2", 1, 3, 0.0]]


def test_hits_of_failed_loads_are_no_hits(tmp_path: Path) -> None:
    path = RECORDINGS / "failed-load.mcap"
    add(path, tmp_path, "a")
    state = walk(evidence_of(Recording.open(path)), [])
    assert state is not None
    totals = state.totals
    rate = round(100 * sum(totals.hit_blocks) / totals.prompt_blocks, 2)
    for row in ask(tmp_path, "hit-rate").rows:
        assert (row[1], row[6], row[7]) == (totals.prompt_blocks, totals.lost_blocks, rate)
    delivered = ask(tmp_path, "reuse").rows[0][2]
    assert delivered == rate
    shutil.rmtree(tmp_path / "requests")
    assert ask(tmp_path, "hit-rate").rows[0][6] == 0, "none of its requests has ended"


@pytest.mark.parametrize("begin", [True, False])
@pytest.mark.parametrize("unseen", ["nothing", "admission", "loss"])
def test_hits_are_lost_only_where_they_were_counted(unseen: str, begin: bool, tmp_path: Path) -> None:
    """The recording begins behind the admission whose load fails, or behind the loss, or has a gap there."""
    recording = Recording.open(RECORDINGS / "failed-load.mcap")
    events = [event for batch in recording.events() for event in batch]
    assert recording.config is not None
    (lost,) = (event for event in events if isinstance(event, ev.HitsLost))
    (scored,) = (event for event in events if isinstance(event, ev.PrefixScored) and event.slot == lost.slot)
    last = {"nothing": 0, "admission": scored.seq, "loss": lost.seq}[unseen]
    seen = evidence(events, recording.config, begin=last + 1) if begin else (
        evidence(events, recording.config, gap=(max(1, last - 3), last + 1)))
    lake_files.add(seen, tmp_path, "a", recording.incarnation, recording.clock_anchor_ns)
    if begin and unseen != "nothing":
        assert not (tmp_path / "lookups").exists()
        assert rows(tmp_path, "select sum(lost_blocks) from {requests}") == [(0,)]
        return
    (told,) = rows(tmp_path, "select sum(prompt_blocks), sum(g1 + g2 + g3 + g4) from {lookups}")
    counted = lost.blocks if unseen == "nothing" else 0
    row = ask(tmp_path, "hit-rate").rows[0]
    assert (row[6], row[7]) == (counted, round(100 * (told[1] - counted) / told[0], 2))


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["ask", "EMPTY", "hit-rate"], "holds no lookups; kvbm-console lake add RUN"),
    (["ask", "EMPTY", "who-has"], "--hash goes with who-has, and who-has needs it"),
    (["ask", "EMPTY", "waste", "--hash", "00"], "--hash goes with who-has"),
    (["ask", "EMPTY", "who-has", "--hash", "xyz"], "--hash must be 16 hexadecimal digits, got 'xyz'"),
    (["add", str(RUN), str(RUN), "--lake", "x", "--engine", "a"], "--engine names one engine, and there are 2"),
])
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    words = [str(tmp_path) if word == "EMPTY" else word for word in arguments]
    done = CliRunner().invoke(cli, ["lake", *words], prog_name="kvbm-console")
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_file_is_one_sentence(tmp_path: Path) -> None:
    add(RUN, tmp_path, "a")
    broken = next(tmp_path.glob("lookups/*/*/*.parquet"))
    broken.write_bytes(b"PAR1" + bytes(40) + b"PAR1")
    done = CliRunner().invoke(cli, ["lake", "ask", str(tmp_path), "hit-rate"], prog_name="kvbm-console")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"{tmp_path} cannot be read: " in done.stderr
