"""``why`` on recordings: the text names event and request, the JSON is the document, mistakes are one sentence."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from kvbm_console.analysis.explain import explain
from kvbm_console.cli.main import cli
from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes, unpack_hashes, unpack_ids
from kvbm_console.core.ids import SlotState
from kvbm_console.recording.reader import Recording
from tests.analysis.tale import Tale

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
PRESSURE = RECORDINGS / "offload-pressure.mcap"
CLONE = RECORDINGS / "clone.mcap"
ONBOARD = RECORDINGS / "onboard-from-host.mcap"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["why", *map(str, arguments)])


def evicted_block() -> int:
    """A prompt block of chat.1 that was evicted below."""
    document = json.loads(run("chat.1", PRESSURE, "--format", "json").output)
    misses = document["admissions"][0]["misses"]
    return int(next(one["first"] for one in misses if (one["reason"], one["tier"]) == ("evicted", "G2")))


def test_the_text_names_the_event_and_who_it_was_for() -> None:
    result = run("chat.1", PRESSURE)
    assert result.exit_code == 0, result.output
    assert " of 12 blocks missed" in result.output
    assert "evicted from G2 to make room for operation" in result.output
    assert "a copy of blocks of other-" in result.output
    assert "time   " in result.output


def test_the_document_names_an_event_that_is_there() -> None:
    document = json.loads(run("chat.1", PRESSURE, "--format", "json", "--block", str(evicted_block())).output)
    (missed,) = document["admissions"][0]["misses"]
    events = {event.seq: event for batch in Recording.open(PRESSURE).events() for event in batch}
    opened = next(e for e in events.values() if isinstance(e, ev.SlotOpened) and e.request == "chat.1")
    event = events[missed["seq"]]
    assert type(event).__name__ == missed["event"]
    assert isinstance(event, ev.BlocksEvicted)
    assert unpack_hashes(opened.hashes)[evicted_block()] in unpack_hashes(event.hashes)
    assert document["slot"] == str(opened.slot)
    assert sum(part["ns"] for part in document["spent"]["parts"]) == (
        document["spent"]["until_ns"] - document["spent"]["from_ns"]
    )


def test_a_block_in_full_tells_its_earlier_fate() -> None:
    text = run("chat.1", PRESSURE, "--block", str(evicted_block())).output
    assert "computed by chat.0" in text
    assert "copied to G2 by operation" in text


def test_a_block_that_did_not_miss_is_said_to_be_found() -> None:
    admissions = json.loads(run("chat.1", ONBOARD, "--format", "json").output)["admissions"]
    found = [sum(one["hits"]) for one in admissions]
    assert any(found)
    for block in (0, max(found) - 1, max(found)):
        text = run("chat.1", ONBOARD, "--block", str(block)).output
        assert text.count("found          it is one of the first") == sum(block < count for count in found)


def test_a_clone_tells_whose_prompt_it_shares_and_which_blocks_are_its_own() -> None:
    blocks: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    clones: list[ev.SlotCloned] = []
    for event in (event for batch in Recording.open(CLONE).events() for event in batch):
        if isinstance(event, ev.SlotOpened):
            names[event.slot] = event.request
        elif isinstance(event, ev.DeviceBlocksAssigned):
            ids = unpack_ids(event.ids)
            for slot, count in zip(event.slots, event.counts, strict=True):
                blocks.setdefault(slot, []).extend(ids[:count])
                del ids[:count]
        elif isinstance(event, ev.SlotCloned):
            clones.append(event)
            parent, mine = blocks[event.parent], unpack_ids(event.ids)
            shared = [at for at, (one, other) in enumerate(zip(mine, parent, strict=False)) if one == other]
            document = json.loads(run(event.request, CLONE, "--format", "json").output)
            assert document["admissions"] == []
            assert document["clone"] == {
                "parent": names[event.parent], "parent_slot": str(event.parent), "seq": event.seq,
                "at_ns": event.at_ns, "shared_blocks": len(shared), "own_blocks": len(mine) - len(shared),
            }
            assert shared == list(range(len(shared)))
            text = run(event.request, CLONE).output
            assert f"clone of chat.0 (event {event.seq})" in text
            assert f"shares blocks 0 to {len(shared) - 1} with chat.0" in text
            assert f"block {len(shared)} is its own" in text
            assert "no look-up" not in text
    assert len(clones) == 2
    parent_text = run("chat.0", CLONE).output
    assert f"its prompt is shared by {', '.join(clone.request for clone in clones)}" in parent_text
    other = json.loads(run("other", CLONE, "--format", "json").output)
    assert (other["clone"], other["clones"]) == (None, [])


def test_a_clone_of_which_only_the_facts_are_known_still_tells_what_it_shares(tmp_path: Path) -> None:
    part = tmp_path / "part.mcap"
    cut = CliRunner().invoke(cli, ["rec", "cut", str(CLONE), str(part), "--from", "60"])
    assert cut.exit_code == 0, cut.output
    document = json.loads(run("chat.0#2", part, "--format", "json").output)
    assert document["clone"]["parent"] == "chat.0"
    assert document["clone"]["shared_blocks"] == 10


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    for arguments, words in (
        (("nobody", PRESSURE), "has no request 'nobody'"),
        (("chat.1", PRESSURE, "--block", "99"), "block must be from 0 to 12 for chat.1, got 99"),
        (("chat.1", PRESSURE, "--target", "unix:/x"), "not both"),
        (("chat.1", tmp_path / "none"), "does not exist"),
        (("chat.1", tmp_path), "holds no recording"),
    ):
        result = run(*arguments)
        assert result.exit_code == (3 if "nobody" in arguments else 2), result.output
        assert words in result.output
        assert "Traceback" not in result.output


def test_wrong_bytes_are_told_before_all_else() -> None:
    """Those that a worker found, also behind the end of the request, and none of another request."""
    tale = Tale()
    slot = tale.slot("a")

    def mismatch(slot: int | None, request: str, copy: int) -> None:
        tale.tell(
            ev.ContentMismatched, slot, 0, request, 0, 0, pack_hashes([7]), "lost-flush", "copy", 3, 9, copy,
            "step 9 of request b", f"step 9 of request b did not wait for store {copy}",
            f"store {copy} took from place 3 in step 7",
        )

    mismatch(slot, "a", 4)
    mismatch(None, "b", 5)
    tale.move(slot, SlotState.FINISHED)
    mismatch(None, "a", 6)
    told = explain(tale.evidence(), "a")
    assert [sentence.split("wait for ")[1].split(" (")[0] for sentence in told.wrong_bytes] == ["store 4", "store 6"]
    assert told.remarks[0].startswith("wrong bytes: lost-flush of block 00000000 on rank 0: at the end of store 4 host")
