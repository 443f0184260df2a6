"""The contract of docs/kinds.md and JSON.md: keys, kinds of values, and the text view of the same document."""

import typing
from typing import Any

import msgspec
import pytest

from kvbm_console.cli.status import render
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import BreakpointSpec, LeaderConfig
from kvbm_console.core.events import AnyEvent, BlocksFilled, BreakpointsChanged, Event, SlotMoved
from kvbm_console.core.ids import Authority, SlotState, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.stream.document import COLUMNS, event_document, status_document

SLOT = {"slot", "request", "state", "since_ns", "age_ns", "computed_tokens", "prompt_tokens", "outstanding", "hold"}
TIER = {"capacity_blocks", "resident_blocks", "referenced_blocks", "writing_blocks", "hits", "lookups"}
TRANSFER = {"operation", "candidate", "route", "blocks", "status"}
HOLD = {"id", "slot", "request", "site", "breakpoints", "pending", "since_ns", "deadline_ns"}
IDENTIFIERS = {"slot", "hold", "operation", "candidate", "id"}


@pytest.fixture
def document() -> dict[str, Any]:
    """The status of a leader with an offload that is running and a slot that is held."""
    leader = Leader(LeaderConfig(g2_blocks=8, offload_threshold=0.0), check=True)
    n = 0

    def tell(kind: type[st.Stimulus], source: int, *fields: object) -> None:
        nonlocal n
        leader.handle(kind(n, n * 1_000, source, None, *fields))
        n += 1

    tell(st.PoolDeclared, 0, 0, 0, Tier.G2, "CPU_PINNED", 8, 16, Authority.LEADER)
    tell(st.PoolDeclared, 1, 0, 0, Tier.G1, "GPU", 8, 16, Authority.ENGINE)
    tell(st.BreakpointsReplaced, 0, "daemon", (BreakpointSpec(to_state=SlotState.PREFILLING, one_shot=True),))
    tell(st.RequestArrived, 1, "chat-1", pack_hashes([11, 12]), 40, 4, 0, None)
    tell(st.MatchRequested, 1, "chat-1", 0)
    tell(st.BlocksAllocated, 1, "chat-1", pack_ids([0, 1, 2]), 0)
    tell(st.IterationScheduled, 1, 1, 1, ("chat-1",), (), (), (), (), (), ("chat-1",), (40,), (), (), b"", 1, 0)
    tell(st.IterationFinished, 1, 1, ("chat-1",), (2,), pack_ids([0, 1]), pack_hashes([11, 12]))
    return msgspec.json.decode(msgspec.json.encode(status_document(
        leader.state, at_ns=n * 1_000, incarnation="abc", subscribers=0, recorder=None
    )))


def test_status_has_the_documented_keys(document: dict[str, Any]) -> None:
    assert set(document) >= {"slots", "tiers", "transfers", "breakpoints", "holds", "stream", "recorder"}
    for part, keys in (("slots", SLOT), ("transfers", TRANSFER), ("holds", HOLD), ("breakpoints", {"id"})):
        assert document[part], part
        for entry in document[part]:
            assert set(entry) >= keys
    assert set(document["tiers"]) == {"g1", "g2", "g3", "g4"}
    for tier in document["tiers"].values():
        assert set(tier) >= TIER
    assert set(document["stream"]) >= {"head_seq", "epoch", "incarnation", "subscribers"}
    assert document["recorder"] is None


def test_identifiers_are_strings_and_absent_is_null(document: dict[str, Any]) -> None:
    for part in ("slots", "transfers", "holds", "breakpoints"):
        for entry in document[part]:
            for key in IDENTIFIERS & set(entry):
                assert entry[key] is None or isinstance(entry[key], str), (part, key)
    assert all(isinstance(number, str) for entry in document["holds"] for number in entry["breakpoints"])
    assert document["holds"][0]["pending"] is True
    assert document["slots"][0]["hold"] == document["holds"][0]["id"]


def test_tiers_count_in_blocks(document: dict[str, Any]) -> None:
    assert document["tiers"]["g1"] == {
        "capacity_blocks": 8, "resident_blocks": 3, "referenced_blocks": 3, "writing_blocks": 0, "hits": 0,
        "lookups": 2, "uncertain": False, "evicted_blocks": 0, "thrash_blocks": 0, "thrash_rate": None,
        "asked_again_blocks": 0, "asked_again_p50_ns": None, "asked_again_p90_ns": None,
    }
    assert document["tiers"]["g2"]["writing_blocks"] == 2


def test_text_shows_what_the_document_says(document: dict[str, Any]) -> None:
    text = render(document)
    for word in ("chat-1", "prefilling", "G1", "G2", "G1>G2", "transition.did", "recorder  off"):
        assert word in text
    assert "G4" not in text


def test_status_names_every_recorder_watermark(document: dict[str, Any]) -> None:
    document["recorder"] = {"state": "recording", "written_seq": 1_234, "synced_seq": 1_200}
    assert "recording  written up to event 1,234  synced up to 1,200" in render(document)


def test_events_are_documents_with_names_and_string_identifiers() -> None:
    move = SlotMoved(5, 9, 2, 3, SlotState.PREFILLING, SlotState.DECODING, 5, 7, 40, 2, (0, 0, 0, 0), 1)
    moved = event_document(move)
    assert list(moved)[:3] == ["seq", "at_ns", "kind"]
    assert moved["kind"] == "SlotMoved"
    assert (moved["slot"], moved["old"], moved["new"]) == ("3", "prefilling", "decoding")
    assert moved["entry"] == "build_connector_metadata"
    assert moved["reason"] is None
    filled = event_document(BlocksFilled(0, 0, 0, 1, (3,), (2,), pack_ids([4, 5]), pack_hashes([1, 2**64 - 1])))
    assert filled["ids"] == ["4", "5"]
    assert filled["hashes"] == ["0000000000000001", "ffffffffffffffff"]
    changed = event_document(BreakpointsChanged(0, 0, 0, "daemon", (BreakpointSpec(id=3),)))
    assert changed["specs"][0]["id"] == "3"
    assert changed["specs"][0]["site"] == "transition.did"


@pytest.mark.parametrize("kind", typing.get_args(AnyEvent), ids=lambda kind: kind.__name__)
def test_every_column_has_a_json_form(kind: type[Event]) -> None:
    for name, hint in typing.get_type_hints(kind).items():
        if hint is bytes:
            assert name in COLUMNS, name
