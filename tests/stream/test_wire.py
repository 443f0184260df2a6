"""The wire: both encodings carry every kind unchanged, strangers' bytes are refused."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.core import ids
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import CandidateEnqueued, Event, SlotClosed
from kvbm_console.core.stimuli import MatchRequested, PoolDeclared, RequestArrived
from kvbm_console.wire import frames
from kvbm_console.wire.batches import (
    MSGPACK,
    PROTOBUF,
    MalformedBatch,
    UnreadBatch,
    pack_events,
    pack_stimuli,
    unpack_events,
    unpack_stimuli,
)
from kvbm_console.wire.protocol import ROLE_OF
from kvbm_console.wire.v1 import console_pb2 as pb
from server.feeding import FEED_KINDS, check_stimulus
from tests.stream.kinds import EVENT_KINDS, STIMULUS_KINDS, any_of, least

EXAMPLES = 25
"""For each of 140 pairs of kind and encoding; the full profile multiplies nothing here, the pairs are the breadth."""
ENCODINGS = pytest.mark.parametrize("encoding", [MSGPACK, PROTOBUF], ids=["msgpack", "protobuf"])


@ENCODINGS
@pytest.mark.parametrize("kind", EVENT_KINDS, ids=lambda kind: kind.__name__)
def test_every_event_kind_survives_both_encodings(kind: type[msgspec.Struct], encoding: int) -> None:
    @settings(max_examples=EXAMPLES)
    @given(any_of(kind, seq=7))
    def check(event: Any) -> None:
        chunk = pack_events([event], encoding=encoding)
        (back,) = unpack_events(chunk.data)
        assert type(back) is kind
        assert back == event
        assert [type(getattr(back, name)) for name in kind.__struct_fields__] == [
            type(getattr(event, name)) for name in kind.__struct_fields__
        ]

    check()


@ENCODINGS
@pytest.mark.parametrize("kind", STIMULUS_KINDS, ids=lambda kind: kind.__name__)
def test_every_stimulus_kind_survives_both_encodings(kind: type[msgspec.Struct], encoding: int) -> None:
    @settings(max_examples=EXAMPLES)
    @given(any_of(kind, n=3))
    def check(stimulus: Any) -> None:
        (back,) = unpack_stimuli(pack_stimuli([stimulus], encoding).data)
        assert type(back) is kind
        assert back == stimulus

    check()


def test_every_method_declares_a_role() -> None:
    assert ROLE_OF == {"Hello": 1, "Subscribe": 1, "SlotDetail": 1, "Query": 1, "Control": 2, "Feed": 2, "Recording": 2}


@given(st.binary(max_size=300))
def test_a_batch_frame_is_what_the_generated_code_writes(payload: bytes) -> None:
    batch = pb.EventBatch(first_seq=5, count=1, payload=payload)
    data = batch.SerializeToString()
    frame = frames.batch_frame(data)
    assert frame == pb.SubscribeReply(batch=batch).SerializeToString()
    assert frames.batch_of(frame) == data


@given(count=st.integers(1, 40), at_ns=st.integers(0, 2**62), lost=st.sampled_from([0, 7]))
def test_a_packed_batch_is_what_the_generated_code_writes(count: int, at_ns: int, lost: int) -> None:
    events = [SlotClosed(3 + at, at_ns, 0, at) for at in range(count)]
    stimuli = [MatchRequested(at, at_ns, 1, None, "r" * at, at) for at in range(count)]
    for chunk, kind in ((pack_events(events, lost), pb.EventBatch), (pack_stimuli(stimuli), pb.StimulusBatch)):
        assert kind.FromString(chunk.data).SerializeToString() == chunk.data


@given(st.binary(max_size=100_000))
def test_long_batches_too(payload: bytes) -> None:
    data = pb.EventBatch(payload=payload * 3).SerializeToString()
    assert frames.batch_of(frames.batch_frame(data)) == data


@given(st.binary(max_size=200))
def test_strange_bytes_are_refused_with_our_error(data: bytes) -> None:
    for unpack in (unpack_events, unpack_stimuli):
        with pytest.raises(MalformedBatch, match=r"\w"):
            unpack(data)


@given(st.data())
def test_a_flipped_byte_never_escapes_as_another_error(data: st.DataObject) -> None:
    events = [SlotClosed(seq, seq, seq, 1) for seq in range(20)]
    encoding = data.draw(st.sampled_from([MSGPACK, PROTOBUF]))
    packed = bytearray(pack_events(events, encoding=encoding).data)
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MalformedBatch):
        unpack_events(bytes(packed))


@pytest.mark.parametrize("change", [{"count": 3}, {"count": 0}, {"first_seq": 1}, {"encoding": 9}, {"count": 2**31}])
def test_a_batch_that_is_not_what_it_claims_is_refused(change: dict[str, int]) -> None:
    batch = pb.EventBatch.FromString(pack_events([SlotClosed(0, 0, 0, 1), SlotClosed(1, 0, 0, 2)]).data)
    for field, value in change.items():
        setattr(batch, field, value)
    with pytest.raises(MalformedBatch):
        unpack_events(batch.SerializeToString())


# --- batches that are not read ---


@ENCODINGS
@pytest.mark.parametrize("kind", EVENT_KINDS, ids=lambda kind: kind.__name__)
def test_a_kind_that_is_in_a_batch_is_never_missed_without_reading_it(kind: type[Event], encoding: int) -> None:
    @settings(max_examples=EXAMPLES)
    @given(
        st.sampled_from([0, 100, 126, 127, 128, 254, 255, 256, 65_534, 65_536, 2**32 - 2, 2**32, 2**40]),
        st.integers(0, 3), st.data(),
    )
    def check(first: int, at: int, data: st.DataObject) -> None:
        events: list[Event] = [SlotClosed(first + index, 0, 0, 1) for index in range(4)]
        events[at] = data.draw(any_of(kind, seq=first + at))
        chunk = pack_events(events, encoding=encoding)
        unread = UnreadBatch(pb.EventBatch.FromString(chunk.data))
        assert unread.may_have((kind,))
        assert (unread.first_seq, unread.last_seq, unread.count) == (first, first + 3, 4)
        assert unread.read() == events

    check()


def test_most_batches_without_a_kind_are_known_to_be_without_it() -> None:
    events = [CandidateEnqueued(seq, seq * 1_000, seq, seq) for seq in range(70_000, 70_256)]
    unread = UnreadBatch(pb.EventBatch.FromString(pack_events(events).data))
    assert [kind for kind in EVENT_KINDS if unread.may_have((kind,))] == [CandidateEnqueued]


@pytest.mark.parametrize("count", [0, 2**31])
def test_a_head_that_cannot_be_true_is_refused_before_anything_is_read(count: int) -> None:
    batch = pb.EventBatch.FromString(pack_events([SlotClosed(0, 0, 0, 1)]).data)
    batch.count = count
    with pytest.raises(MalformedBatch):
        UnreadBatch(batch)


# --- stimuli of strangers ---


def test_every_field_of_a_feed_has_a_limit() -> None:
    good = RequestArrived(0, 0, 1, None, "r", b"", 10, 10, 0, None)
    check_stimulus(good)
    for change in (
        {"request": "x" * 257}, {"session": "x" * 257}, {"prompt_tokens": 2**60}, {"priority": -(2**60)},
        {"hashes": bytes(4 * 1024 * 1024 + 1)},
    ):
        with pytest.raises(UsageError):
            check_stimulus(msgspec.structs.replace(good, **change))


def test_only_engines_words_come_by_feed() -> None:
    for kind in STIMULUS_KINDS:
        allowed = kind in FEED_KINDS
        if not allowed:
            with pytest.raises(UsageError, match="entry point"):
                check_stimulus(least(kind))
    check_stimulus(MatchRequested(0, 0, 1, None, "r", 0))


def test_a_feed_cannot_declare_the_leaders_pools_or_a_huge_one() -> None:
    pool = PoolDeclared(0, 0, 1, None, 0, 0, ids.Tier.G1, "GPU", 64, 16, ids.Authority.ENGINE)
    check_stimulus(pool)
    for change in ({"authority": ids.Authority.LEADER}, {"capacity_blocks": 2**30}, {"capacity_blocks": -1}):
        with pytest.raises(UsageError):
            check_stimulus(msgspec.structs.replace(pool, **change))
