"""A Dynamo leader recording drives our leader: what it matched is matched here, and what is foreign is counted."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.engines.dynamo import DynamoImported, import_dynamo, infer_block_tokens
from kvbm_console.engines.dynamo.lines import TORN, read_lines
from kvbm_console.recording.info import info_of
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.hashing import sequence_hashes
from kvbm_console.testing import assert_invariants
from tests.engines.dynamo_writer import SALT, Asked, DynamoWriter

BLOCK = 16
CONFIG = LeaderConfig(block_tokens=BLOCK, g2_blocks=256, offload_threshold=0.0)


def ask(name: str, at_ms: int, *words: tuple[int, int], output: int = 8) -> Asked:
    return Asked(name, words, at_ms, output, BLOCK)


CHATS = (
    ask("chat.0", 0, (7, 160)), *(ask(f"other-{at}", 200 + 60 * at, (100 + at, 150)) for at in range(4)),
    ask("chat.1", 700, (7, 160), (8, 40)),
)
GROWING = (ask("long-a", 0, (1, 120), output=90), ask("long-b", 5, (2, 120), output=90))

CROWD = tuple(
    ask(
        f"s{at % 7}.{at // 7}", 13 * at, (at % 7, 90), *((50 + turn, 30) for turn in range(at // 7)),
        output=20 + at % 5,
    )
    for at in range(35)
)
"""Seven chats of five turns that come all at once: look-ups while copies run, preemptions, resumed requests."""
RUNS = {"chats": (CHATS, 24), "growing": (GROWING, 20), "crowd": (CROWD, 40)}


@cache
def written(which: str) -> DynamoWriter:
    asked, g1 = RUNS[which]
    return DynamoWriter(asked, CONFIG, EngineConfig(g1_blocks=g1, max_batch_tokens=128, max_running=8))


def imported(which: str, directory: Path) -> DynamoImported:
    source = directory / "records.jsonl"
    source.write_text(written(which).text())
    return import_dynamo(source, directory / "out.mcap", CONFIG)


def test_every_look_up_is_answered_as_it_was(tmp_path: Path) -> None:
    one = imported("chats", tmp_path)
    assert one.report.refused == 0, one.report.others
    assert one.report.lookups == one.report.lookups_equal > 0
    assert one.report.theirs_matched_tokens == one.report.ours_matched_tokens == 160
    assert one.report.requests == len(CHATS)
    assert one.report.finishes == len(CHATS)
    assert one.report.passed_over == {"HasSlot": len(CHATS)}


@pytest.mark.parametrize("which", sorted(RUNS))
def test_what_comes_out_is_a_recording_of_ours(which: str, tmp_path: Path) -> None:
    one = imported(which, tmp_path)
    report = verify(tmp_path / "out.mcap")
    assert report.ok, report.first_difference
    assert report.not_rerun == 0
    recording = Recording.open(tmp_path / "out.mcap")
    assert_invariants(recording)
    assert info_of(recording).labels == {"imported_from": "records.jsonl"}
    state = recording.state_at(recording.last_seq)
    theirs = written(which).totals
    assert sum(state.totals.finished) == sum(theirs.finished)
    assert state.totals.slots_opened == theirs.slots_opened == one.report.requests
    assert not state.slots


def test_hits_are_those_that_the_engine_had(tmp_path: Path) -> None:
    imported("chats", tmp_path)
    recording = Recording.open(tmp_path / "out.mcap")
    state = recording.state_at(recording.last_seq)
    assert state.totals.hit_blocks == written("chats").totals.hit_blocks
    assert state.totals.prompt_blocks == written("chats").totals.prompt_blocks


def test_preemptions_that_nobody_named_are_found(tmp_path: Path) -> None:
    theirs = written("growing").totals
    assert theirs.preemptions > 0
    one = imported("growing", tmp_path)
    assert one.report.preempted == theirs.preemptions
    assert one.report.refused == 0, one.report.others
    events = [event for batch in Recording.open(tmp_path / "out.mcap").events() for event in batch]
    assert sum(isinstance(event, ev.SlotMoved) and event.new.label == "preempted" for event in events) \
        == theirs.preemptions


def test_a_crowd_is_followed_to_its_end(tmp_path: Path) -> None:
    one = imported("crowd", tmp_path)
    assert written("crowd").totals.preemptions > 0
    assert one.report.refused == 0, one.report.others
    assert one.report.lookups_equal >= 0.9 * one.report.lookups
    assert one.report.finishes == len(CROWD)


def test_hashes_are_dynamos(tmp_path: Path) -> None:
    imported("chats", tmp_path)
    events = [event for batch in Recording.open(tmp_path / "out.mcap").events() for event in batch]
    opened = next(event for event in events if isinstance(event, ev.SlotOpened))
    assert opened.hashes == b"".join(
        value.to_bytes(8, "little") for value in sequence_hashes([7] * 160, BLOCK, salt=SALT)
    )


def test_the_block_size_is_found(tmp_path: Path) -> None:
    source = tmp_path / "records.jsonl"
    source.write_text(written("chats").text())
    assert infer_block_tokens(source) == BLOCK
    source.write_text(lines_of("chats")[0])
    assert infer_block_tokens(source) == 16


def test_a_leader_with_another_capacity_is_compared(tmp_path: Path) -> None:
    source = tmp_path / "records.jsonl"
    source.write_text(written("chats").text())
    small = LeaderConfig(block_tokens=BLOCK, g2_blocks=8, offload_threshold=0.0)
    one = import_dynamo(source, tmp_path / "out.mcap", small)
    assert one.report.ours_matched_tokens < one.report.theirs_matched_tokens
    other = next(other for other in one.report.others if other.action == "GetNumNewMatchedTokens")
    assert (other.request, other.theirs) == ("chat.1", "160 tokens")
    assert verify(tmp_path / "out.mcap").ok


# --- foreign and broken lines ----------------------------------------------------------------------------------------


def lines_of(which: str) -> list[str]:
    return written(which).text().splitlines(keepends=True)


def test_unknown_actions_and_fields_are_passed_over_and_counted(tmp_path: Path) -> None:
    source = tmp_path / "records.jsonl"
    lines = lines_of("chats")
    first = json.loads(lines[0])
    first["event"]["CreateSlot"][0]["new_field"] = {"a": 1}
    lines[0] = json.dumps(first) + "\n"
    lines.insert(3, json.dumps({"timestamp": 5, "event": {"DanceAround": [{}, {}]}}) + "\n")
    source.write_text("".join(lines))
    one = import_dynamo(source, tmp_path / "out.mcap", CONFIG)
    assert one.report.passed_over["DanceAround"] == 1
    assert one.report.requests == len(CHATS)


def test_a_torn_last_line_is_left_out_and_told(tmp_path: Path) -> None:
    source = tmp_path / "records.jsonl"
    text = written("chats").text()
    source.write_text(text[:-20])
    assert sum(1 for line in read_lines(source) if line.action != TORN) == len(lines_of("chats")) - 1
    done = run(source, "--out", tmp_path / "out.mcap")
    assert done.exit_code == 0
    assert "1 torn last line" in done.output


@pytest.mark.parametrize(("text", "says"), [
    ("", "must have calls of a Dynamo leader, got no line"), ("\n\n", "got no line"),
    ("one line of another file", "line 1 is not a call of a Dynamo leader"),
    ("\n[1]", "line 2 is not a call of a Dynamo leader"),
])
def test_a_file_without_a_whole_line_is_another_file(text: str, says: str, tmp_path: Path) -> None:
    source = tmp_path / "records.jsonl"
    source.write_text(text)
    done = run(source, "--out", tmp_path / "out.mcap")
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert str(source) in done.stderr
    assert says in done.stderr
    assert not (tmp_path / "out.mcap").exists()


@pytest.mark.parametrize("bad", [
    "not json\n", '{"timestamp": 1}\n', '{"timestamp": -1, "event": {"HasSlot": [{}, {}]}}\n',
    '{"timestamp": 1, "event": {"RequestFinished": [{"request_id": 7}, {"is_finished": true}]}}\n',
    '{"timestamp": 1, "event": {"A": [], "B": []}}\n',
])
def test_a_bad_line_is_named(bad: str, tmp_path: Path) -> None:
    source = tmp_path / "records.jsonl"
    source.write_text(lines_of("chats")[0] + bad + lines_of("chats")[1])
    with pytest.raises(UsageError, match=r"records\.jsonl line 2 is not a call of a Dynamo leader"):
        import_dynamo(source, tmp_path / "out.mcap", CONFIG)
    assert not (tmp_path / "out.mcap").exists()


def test_a_recording_that_begins_in_the_middle_goes_as_far_as_it_can(tmp_path: Path) -> None:
    source = tmp_path / "records.jsonl"
    lines = lines_of("growing")
    source.write_text("".join(lines[len(lines) // 3:]))
    one = import_dynamo(source, tmp_path / "out.mcap", CONFIG)
    assert one.report.others
    assert verify(tmp_path / "out.mcap").ok


# --- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["rec", "import", "dynamo", *map(str, arguments)])


def test_the_command_compares_the_two_leaders(tmp_path: Path) -> None:
    source = tmp_path / "records.jsonl"
    source.write_text(written("chats").text())
    result = run(source, "--out", tmp_path / "out.mcap")
    assert result.exit_code == 0, result.output
    assert f"of {len(CHATS)} requests, blocks of 16" in result.output
    assert "answered alike (100.0 %); matched 160 tokens there, 160 here" in result.output
    again = run(source, "--out", tmp_path / "small.mcap", "--g2-blocks", "8", "--format", "json")
    document = json.loads(again.stdout)
    assert document["report"]["lookups_equal"] < document["report"]["lookups"]
    assert document["block_tokens"] == 16
    taken = run(source, "--out", tmp_path / "out.mcap")
    assert taken.exit_code == 2
    assert "exists already" in taken.output


def altered(value: Any, dice: random.Random) -> Any:
    """A JSON value with one thing in it changed."""
    if isinstance(value, dict) and value:
        key = dice.choice(sorted(value))
        return {**value, key: altered(value[key], dice)}
    if isinstance(value, list) and value:
        at = dice.randrange(len(value))
        if dice.random() < 0.2:
            return [*value, value[at]]
        return [*value[:at], altered(value[at], dice), *value[at + 1 :]]
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return dice.choice([0, 1, value + 1, max(0, value - 1), value + 16, 5, 2**31 - 1, -1, 2**63])
    return dice.choice(["chat.0", "other-1", "chat.1", "", "x" * 300])


@pytest.mark.parametrize("seed", range(60))
def test_altered_recordings_are_followed_or_refused_in_one_sentence(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    lines = [json.loads(line) for line in lines_of("chats")]
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(lines))
        what = dice.random()
        if what < 0.2:
            del lines[at]
        elif what < 0.4:
            lines.insert(dice.randrange(len(lines)), lines[at])
        else:
            (action,) = lines[at]["event"]
            lines[at] = {**lines[at], "event": {action: altered(lines[at]["event"][action], dice)}}
    source = tmp_path / "records.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused = ""
    try:
        import_dynamo(source, tmp_path / "out.mcap", CONFIG)
    except UsageError as error:
        refused = str(error)
    if refused:
        assert "is not a call of a Dynamo leader" in refused
    else:
        assert verify(tmp_path / "out.mcap").ok
