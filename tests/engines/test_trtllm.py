"""TensorRT-LLM's events, made after its serialiser: levels, moves, removals without a level, two kinds of hash."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.engines.kv_events.batch import BadPayload, Batch, Cleared, Removed, Stored, decode
from tests.engines.payloads import batch, removed
from tests.engines.test_stream import House, facts_of


def event(data: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"event_id": 0, "data": data, "window_size": 256, **more}


def block(block_hash: Any, level: int = 0, tokens: int = 4) -> dict[str, Any]:
    return {
        "type": "stored_block", "block_hash": block_hash, "cache_level": level, "priority": 35,
        "tokens": [{"type": "unique_token", "token_id": one, "token_extra_id": 0} for one in range(tokens)],
    }


def moved(block_hash: Any, old: int, new: int) -> dict[str, Any]:
    diff = {"type": "event_diff", "new_value": new, "old_value": old}
    return event({"type": "updated", "block_hash": block_hash, "cache_level": diff, "priority": None})


CREATED = event({"type": "created", "num_blocks_per_cache_level": [101, 20]})


def batches(*events: Any) -> list[Batch]:
    return decode(json.dumps(events).encode())


def test_a_run_from_creation_to_removal() -> None:
    (one,) = batches(
        CREATED, event({"type": "stored", "parent_hash": None, "blocks": [block(11), block(12)]}), moved(12, 0, 1),
        event({"type": "removed", "block_hashes": [11]}),
    )
    assert one.events[:3] == [Cleared(), Stored([11], None, 4, "GPU", 0), Stored([12], 11, 4, "GPU", 0)]
    assert one.events[3:] == [
        Removed([12], "GPU", 0), Stored([12], None, 0, "CPU", 0), Removed([11], "GPU", 0), Removed([11], "CPU", 0),
    ]


def test_hexadecimal_and_signed_hashes_ranks_and_groups() -> None:
    first, second = batches(
        event({"type": "stored", "parent_hash": "ab", "blocks": [block("00" * 24 + "ff" * 8)]}, hash_algo="v2_sha256"),
        event({"type": "removed", "block_hashes": [-1]}, attention_dp_rank=1, layer_group_id=2),
    )
    assert first.events == [Stored([2**64 - 1], 0xAB, 4, "GPU", 0)]
    assert (second.dp_rank, second.events[0]) == (1, Removed([2**64 - 1], "GPU", 2))


def test_a_new_priority_moves_nothing() -> None:
    data = {"type": "updated", "block_hash": 5, "cache_level": None, "priority": {"new_value": 1, "old_value": 2}}
    assert batches(event(data))[0].events == []


def test_unknown_and_broken_events_are_counted() -> None:
    (one,) = batches(
        event({"type": "pinned"}), event({"type": "stored"}), event({"type": "removed", "block_hashes": ["xyz"]}), 5,
        event({"type": "removed", "block_hashes": [3]}),
    )
    assert (one.unknown, one.malformed, len(one.events)) == (1, 3, 2)


@given(some.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_is_raised(data: bytes) -> None:
    for payload in (data, b"[" + data + b"]", b"[" * 50_000):
        with contextlib.suppress(BadPayload):
            decode(payload)


def test_a_payload_beyond_the_limit() -> None:
    with pytest.raises(BadPayload, match="above"):
        decode(b" " * (16 * 2**20 + 1))


def test_a_stream_finds_the_schema_by_the_first_byte() -> None:
    house = House()
    house.stream.accept(0, json.dumps([
        CREATED, event({"type": "stored", "parent_hash": None, "blocks": [block(11), block(12)]}), moved(12, 0, 1),
    ]).encode())
    assert {place: set(here) for place, here in facts_of(house.dispatcher.leader.state).items()} == {
        (0, 0, "GPU"): {11}, (0, 0, "CPU"): {12},
    }
    house.stream.accept(1, batch(removed(12, medium="CPU")))
    assert set(facts_of(house.dispatcher.leader.state)) == {(0, 0, "GPU")}
    assert house.stream.counts.gaps == house.stream.counts.bad_payloads == 0
