"""Frames of a tap, read by the process beside its engine."""

import asyncio
from typing import cast

import msgspec
import pytest

from kvbm_console.reporter.__main__ import FRAME_MAX, Reporter
from kvbm_console.tap.sender import LENGTH, TapSettings


def frame(*messages: list[object]) -> bytes:
    data = msgspec.msgpack.encode(messages)
    return LENGTH.pack(len(data)) + data


def reporter_of(reader: asyncio.StreamReader) -> Reporter:
    return Reporter(reader, cast(asyncio.StreamWriter, None), TapSettings("unix:/none", "engine", 16, 64))


@pytest.mark.asyncio
async def test_one_read_takes_every_frame_that_has_arrived() -> None:
    """Each answer of a daemon far away costs a round trip, and the engine steps meanwhile."""
    reader = asyncio.StreamReader()
    reporter = reporter_of(reader)
    last = frame(["steps", 4])
    reader.feed_data(frame(["steps", 1]) + frame(["steps", 2], ["steps", 3]) + last[:5])
    assert await reporter._read() == [["steps", 1], ["steps", 2], ["steps", 3]]
    reader.feed_data(last[5:7])
    reading = asyncio.ensure_future(reporter._read())
    await asyncio.sleep(0)
    assert not reading.done()
    reader.feed_data(last[7:])
    assert await reading == [["steps", 4]]
    reader.feed_eof()
    assert await reporter._read() is None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "wrong", [LENGTH.pack(FRAME_MAX + 1), LENGTH.pack(3) + b"\xc1\xc1\xc1", LENGTH.pack(1) + b"\x05"]
)
async def test_a_frame_that_is_none_ends_the_tap(wrong: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(wrong)
    assert await reporter_of(reader)._read() is None
