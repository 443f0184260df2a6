"""The decoder: every shape that engines have sent, every form of hash, and bytes that nobody should send."""

import contextlib
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from kvbm_console.core.ids import Tier
from kvbm_console.engines.kv_events.batch import (
    BLOCKS_MAX,
    EVENTS_MAX,
    PAYLOAD_BYTES_MAX,
    BadPayload,
    Cleared,
    Removed,
    Stored,
    StoredMark,
    normal_hash,
    tier_of,
)
from tests.engines.payloads import batch, cleared, decode_batch, plain, removed, stored

encode = msgspec.msgpack.encode
HASH = some.one_of(
    some.integers(0, 2**64 - 1), some.integers(-(2**63), -1), some.binary(min_size=32, max_size=32)
)
HASHES = some.lists(HASH, max_size=6)
PLAIN = some.recursive(
    some.none() | some.booleans() | some.integers(-(2**63), 2**64 - 1) | some.floats() | some.text(max_size=5)
    | some.binary(max_size=40),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


def unmarked(events: list[Any]) -> list[Any]:
    """The events without the digests and contexts of their blocks."""
    bare = {"marks": (), "tokens": None}
    return [msgspec.structs.replace(event, **bare) if isinstance(event, Stored) else event for event in events]


@pytest.mark.parametrize("fields", [
    [],  # before there was a medium
    ["GPU"],
    ["GPU", "adapter"],
    ["GPU", "adapter", [["key"], None]],
    ["GPU", None, None, 2, "full_attention", None],
    ["GPU", {"cache_salt": "tenant"}],  # SGLang puts a map where vLLM puts a name
    ["GPU", None, None, 2, "sliding_window", 128, "from", {"a": "later"}, 3],
])
def test_array_events_of_every_age(fields: list[Any]) -> None:
    payload = batch(["BlockStored", [1, -1], 7, [5] * 32, 16, None, *fields])
    (event,) = decode_batch(payload).events
    group = 2 if len(fields) > 3 else 0
    assert isinstance(event, Stored)
    assert unmarked([event]) == [Stored([1, 2**64 - 1], 7, 16, "GPU", group)]
    words = " ".join(mark.context for mark in event.marks)
    assert words.partition(" ")[0] == ("lora=adapter" if "adapter" in fields else "session=3" if 3 in fields else "")


@pytest.mark.parametrize(("event", "expected"), [
    (["BlockRemoved", [3]], Removed([3], "GPU", 0)),
    (["BlockRemoved", [3], "CPU"], Removed([3], "CPU", 0)),
    (["BlockRemoved", [3], "CPU", 1, "later"], Removed([3], "CPU", 1)),
    (["AllBlocksCleared"], Cleared(everywhere=False)),
    (["AllBlocksCleared", "later"], Cleared(everywhere=False)),
    (removed(3, medium=None), Removed([3], "GPU", 0)),
    (removed(3, medium="NVME", group_idx=4, remaining_copy_counts=[2]), Removed([3], "NVME", 4)),
    ({"type": "BlockRemoved", "block_hashes": [3]}, Removed([3], "GPU", 0)),
    (cleared(), Cleared(everywhere=False)),
    (stored(9, parent=8, session_id="s", locality="LOCAL"),
     Stored([9], 8, 16, "GPU", 0, (StoredMark(0, 0, "session=s"),))),
    (stored(9, parent=8, medium="STORAGE", locality="REMOTE", ownership="kv cr"),
     Stored([9], 8, 16, "STORAGE REMOTE kv_cr", 0)),
    (removed(9, medium="STORAGE", locality="REMOTE", ownership="kv cr"), Removed([9], "STORAGE REMOTE kv_cr", 0)),
    (removed(9, medium="cpu"), Removed([9], "CPU", 0)),
    (removed(9, medium="Cpu_Pinned"), Removed([9], "CPU_PINNED", 0)),
    (removed(9, medium="nvme"), Removed([9], "nvme", 0)),
    (removed(9, medium="storage", locality="remote"), Removed([9], "STORAGE REMOTE", 0)),
    (removed(9, medium="STORAGE", locality="LOCAL"), Removed([9], "DISK", 0)),
    ({"type": "BlockStored", "block_hashes": [9]}, Stored([9], None, 0, "GPU", 0)),
    (stored(9, size=0, medium="CPU"), Stored([9], None, 0, "CPU", 0)),
])
def test_an_event_in_each_shape(event: Any, expected: object) -> None:
    (found,) = decode_batch(batch(event)).events
    assert (found if isinstance(found, Stored) and found.marks else unmarked([found])[0]) == expected


def marks_of(**more: Any) -> tuple[StoredMark, ...]:
    event = decode_batch(batch(stored(*range(1, 4), **more))).events[0]
    assert isinstance(event, Stored)
    return event.marks or event.opening()


TOKENS = some.lists(some.integers(0, 2**40), min_size=12, max_size=12)


@given(TOKENS, TOKENS, some.integers(0, 11))
def test_equal_tokens_have_equal_contents_under_every_context(tokens: list[int], others: list[int], same: int) -> None:
    """Of the first block of a prompt, and of each block with an image; the encoding of integers does not matter."""
    keys = [["ada", "tenant"], None, ["ada", ["f" * 64, 3]]]
    plain = marks_of(token_ids=tokens, size=4)
    salted = marks_of(token_ids=tokens, size=4, lora_name="ada", extra_keys=keys)
    assert [mark.at for mark in plain] == [0]
    assert [(mark.at, mark.context.partition("#")[0]) for mark in salted] == [
        (0, "lora=ada salt="), (2, "image=" + 16 * "f")]
    assert plain[0].content == salted[0].content != 0
    changed = [*others[:same], *tokens[same:]]
    assert (marks_of(token_ids=changed, size=4)[0].content == plain[0].content) == (changed[:4] == tokens[:4])
    image = marks_of(token_ids=changed, size=4, lora_name="ada", extra_keys=keys)[1]
    assert (image.content == salted[1].content) == (changed[8:] == tokens[8:])


def test_a_salt_is_kept_as_a_digest_whatever_names_it() -> None:
    by_key = marks_of(extra_keys=[["secret"], None, None])[0].context
    by_field = marks_of(cache_salt="secret")[0].context
    assert by_key == by_field == marks_of(cache_salt="secret", parent=5)[0].context
    assert "secret" not in by_key
    assert marks_of(lora_id=3)[0].context == "lora=3"
    assert marks_of(lora_name="a b\n" + 300 * "c", session_id=90 * "s" )[0].context == (
        "lora=a_b_" + 60 * "c" + " session=" + 64 * "s")


@pytest.mark.parametrize("more", [
    {"lora_name": {"cache_salt": "tenant"}}, {"extra_keys": 7}, {"extra_keys": [7, "x", {}]}, {"token_ids": "text"},
    {"token_ids": [1, 2], "lora_name": "x"}, {"session_id": [[]]}, {"cache_salt": b"raw", "extra_keys": [[]]},
    {"token_ids": [], "extra_keys": [[b"embeds"], [["image"]], [[]]]},
])
def test_fields_of_another_shape_leave_the_event(more: dict[str, Any]) -> None:
    event = decode_batch(batch(stored(1, 2, 3, **more))).events[0]
    assert isinstance(event, Stored)
    assert event.hashes == [1, 2, 3]


def test_two_three_and_more_elements_and_a_map() -> None:
    assert decode_batch(batch(cleared(), dp_rank=None)).dp_rank is None
    assert decode_batch(batch(cleared(), dp_rank=3)).dp_rank == 3
    assert decode_batch(encode([1, [], None])).dp_rank is None
    assert decode_batch(encode([1.5, [cleared()], 2, "later", {}])).dp_rank == 2
    assert decode_batch(encode([1.5, [cleared()], {"later": 1}])).dp_rank is None
    whole = decode_batch(encode({"ts": 2.5, "events": [removed(4)], "data_parallel_rank": 1, "later": [1]}))
    assert (whole.ts, whole.dp_rank, whole.events) == (2.5, 1, [Removed([4], "GPU", 0)])


def test_shapes_may_be_mixed_and_unknown_kinds_are_counted() -> None:
    found = decode_batch(batch(
        stored(1), ["BlockRemoved", [1]], {"type": "BlockMoved", "block_hashes": [1]}, ["BlockPinned", 5], cleared(),
    ))
    assert unmarked(found.events) == [
        Stored([1], None, 16, "GPU", 0), Removed([1], "GPU", 0), Cleared(everywhere=False),
    ]
    assert (found.unknown, found.malformed) == (2, 0)


@pytest.mark.parametrize("event", [
    {"type": "BlockStored"}, {"type": "BlockStored", "block_hashes": 5}, stored("text"), stored(b"short"),
    stored(1, group_idx=-1), stored(1, group_idx=10**6), stored(1, size=-1), stored(1, medium="M" * 65),
    stored(1, medium="\x1b[2J"), ["BlockRemoved"], [], [5], {}, {"type": 5}, 7, None, "text", [[]],
    {str(number): 1 for number in range(100)},
])
def test_a_broken_event_is_counted_and_its_neighbours_are_kept(event: Any) -> None:
    found = decode_batch(batch(stored(1), event, removed(2)))
    assert unmarked(found.events) == [Stored([1], None, 16, "GPU", 0), Removed([2], "GPU", 0)]
    assert (found.unknown, found.malformed) == (0, 1)


@given(HASHES, HASHES, some.booleans(), some.sampled_from(["GPU", "CPU", "DISK", "SOMETHING"]))
def test_three_forms_of_a_hash_in_both_shapes(new: list[Any], gone: list[Any], arrays: bool, medium: str) -> None:
    if arrays:
        events: list[Any] = [["BlockStored", new, None, [], 16, None, medium], ["BlockRemoved", gone, medium]]
    else:
        events = [stored(*new, medium=medium), removed(*gone, medium=medium)]
    found = decode_batch(batch(*events))
    assert unmarked(found.events) == [
        Stored([plain(one) for one in new], None, 16, medium, 0), Removed([plain(one) for one in gone], medium, 0),
    ]
    assert found.blocks == len(new) + len(gone)


def test_the_hash_of_nothing_is_moved_away_from_zero() -> None:
    assert normal_hash(0) == normal_hash(bytes(32)) == 1
    assert normal_hash(-(2**63)) == 2**63


def test_media_have_tiers_and_an_unknown_one_has_the_last() -> None:
    assert [tier_of(medium) for medium in ("GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL", "TAPE")] == [
        Tier.G1, Tier.G2, Tier.G2, Tier.G3, Tier.G4, Tier.G4, Tier.G4,
    ]


@given(some.binary(max_size=300))
@example(b"\x93\xcb")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x92\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff")
@example(b"\x92\xcb" + bytes(8) + b"\x91" * 50_000)
@example(b"\x92\xcb" + bytes(8) + b"\x91\x82\xa4type\xa1X\xa1a" + b"\x91" * 50_000 + b"\x90")
@settings(max_examples=300)
def test_garbage_is_refused_and_nothing_else_is_raised(data: bytes) -> None:
    with contextlib.suppress(BadPayload):
        decode_batch(data)


@given(PLAIN, some.lists(PLAIN, max_size=4))
@settings(max_examples=300)
def test_well_formed_msgpack_of_any_shape(ts: Any, events: list[Any]) -> None:
    for payload in (encode([1.0, events]), encode([ts, events]), encode(ts), encode([1.0, ts])):
        try:
            found = decode_batch(payload)
        except BadPayload:
            continue
        if payload == encode([1.0, events]):
            assert len(found.events) + found.unknown + found.malformed == len(events)


def test_limits() -> None:
    with pytest.raises(BadPayload, match="above"):
        decode_batch(bytes(PAYLOAD_BYTES_MAX + 1))
    with pytest.raises(BadPayload, match="events is above"):
        decode_batch(batch(*[None] * (EVENTS_MAX + 1)))
    with pytest.raises(BadPayload, match="blocks is above"):
        decode_batch(batch(["BlockRemoved", [1] * (BLOCKS_MAX + 1)]))


@pytest.mark.parametrize("piece", [b"\x01", b"\x80", b"\xc0", b"\xa1a", b"\xcf" + b"\xff" * 8])
def test_memory_is_a_small_multiple_of_the_payload(piece: bytes) -> None:
    size = 1_000_000
    many = b"\xdd" + (size // len(piece)).to_bytes(4, "big") + piece * (size // len(piece))
    pieces = [
        b"\x92\xcb" + bytes(8) + many, many,
        b"\x92\xcb" + bytes(8) + b"\x91\x92\xacBlockRemoved" + many,
        b"\x92\xcb" + bytes(8) + b"\x91\xdf" + many[1:5] + b"\xa1a\x01" * (size // len(piece)),
    ]
    for payload in pieces:
        tracemalloc.start()
        try:
            with contextlib.suppress(BadPayload):
                decode_batch(payload)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 20 * max(len(payload), size) + 2**20


# --- a shared pool ---


def of_pool(kind: str, *hashes: int, key: str = "", medium: str | None = "cpu", legacy: bool = True) -> dict[str, Any]:
    """An event as Mooncake's master publishes it (RFC 1527), with the names of engines beside its own."""
    mine = {"type": {"stored": "BlockStored", "removed": "BlockRemoved"}.get(kind, ""), "block_hashes": list(hashes)}
    return {
        "event_id": 1, "timestamp": 1_795_425_729_535, "event_type": kind, **(mine if legacy else {}),
        "block_size": None, "tenant_id": "default", "backend_id": "pool 7", "group_id": None, "medium": medium,
        "dp_rank": None, "object_key": key, "seq_hashes": list(hashes), "parent_hash": None, "token_ids": None,
    }


@pytest.mark.parametrize("legacy", [True, False])
def test_objects_of_a_shared_pool(legacy: bool) -> None:
    digits = "ab" * 24 + "00000000000000ff"
    payload = batch(
        of_pool("stored", 7, legacy=legacy), of_pool("stored", key=f"llama@tp_rank:0@group:0@{digits}", legacy=legacy),
        of_pool("removed", 7, medium="disk", legacy=legacy), of_pool("cleared", legacy=legacy),
        of_pool("touched", legacy=legacy), of_pool("stored", legacy=legacy), ts=1_795_425_729_535,
    )
    found = decode_batch(payload)
    assert found.events == [
        Stored([7], None, 0, "CPU REMOTE pool_7", 0), Stored([255], None, 0, "CPU REMOTE pool_7", 0),
        Removed([7], "DISK REMOTE pool_7", 0), Cleared(),
    ]
    assert (found.pool, found.unknown, found.malformed, found.ts) == ("pool_7", 1, 1, 1_795_425_729.535)


def test_a_key_without_a_hash_stands_for_itself() -> None:
    (one, other, again) = decode_batch(batch(*(of_pool("stored", key=key) for key in ("a@x", "b@x", "a@x")))).events
    assert isinstance(one, Stored)
    assert isinstance(other, Stored)
    assert one == again
    assert one.hashes != other.hashes


def test_a_remote_medium_is_g4_whatever_it_consists_of() -> None:
    assert [tier_of(medium) for medium in ("CPU", "CPU REMOTE pool7", "STORAGE REMOTE", "CPU mine")] == [
        Tier.G2, Tier.G4, Tier.G4, Tier.G2,
    ]
