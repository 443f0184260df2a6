"""Two engines with requests of the same name: each drives, and is asked for, its own."""

import typing
from collections.abc import Awaitable, Callable
from enum import EnumMeta
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.client import Client
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import Authority, FinishReason, SlotState, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.recording.verify import verify
from kvbm_console.stream.verbs import SetBreakpoint
from kvbm_console.wire.batches import pack_stimuli, unpack_stimuli
from server.feeding import FEED_KINDS, MANY, RequestNames
from tests.server.daemons import daemon_at, published

Submit = Callable[..., Awaitable[Any]]


def step(iteration: int, request: str) -> dict[str, Any]:
    """A step that runs a new request of 40 tokens."""
    return {
        "iteration": iteration, "count": 1, "new": (request,), "resumed": (), "preempted": (), "skipped": (),
        "unskipped": (), "first_tokens": (), "progressed": (request,), "positions": (40,), "appended": (),
        "appended_counts": (), "appended_ids": b"", "running": 1, "waiting": 0,
    }


async def request_of(submit: Submit, request: str, first_block: int, authority: Authority) -> None:
    """A request in its third block, prefilling."""
    await submit(st.RequestArrived, request, pack_hashes([first_block + 1, first_block + 2]), 40, 8, 0, None)
    if authority is Authority.OBSERVED:
        await submit(st.LookupObserved, request, 0, 0, False, Tier.G2)
    else:
        await submit(st.MatchRequested, request, 0)
    ids = [first_block, first_block + 1, first_block + 2]
    await submit(st.BlocksAllocated, request, pack_ids(ids), 0)
    await submit(st.IterationScheduled, **step(1, request))


@pytest.mark.asyncio
@pytest.mark.parametrize("authority", [Authority.ENGINE, Authority.OBSERVED])
async def test_two_engines_may_use_one_name_at_the_same_time(authority: Authority) -> None:
    async with (
        daemon_at(None) as daemon, Client(daemon.address) as one, Client(daemon.address) as two,
        one.feed("first") as first, two.feed("second") as second,
    ):
        for feed, block in ((first, 0), (second, 8)):
            await feed.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 24, 16, authority)
            await request_of(feed.submit, "0", block, authority)
        slots = daemon.service.state.slots
        assert {(slot.source, slot.request, slot.state) for slot in slots.values()} == {
            (first.source, "0", SlotState.PREFILLING), (second.source, f"0@{second.source}", SlotState.PREFILLING),
        }
        await first.submit(st.RequestFinished, "0", pack_ids([0, 1, 2]), FinishReason.LENGTH, False)
        assert [slot.source for slot in slots.values()] == [second.source], "the other one's goes on"
        await second.submit(st.RequestFinished, "0", pack_ids([8, 9, 10]), FinishReason.LENGTH, False)
        assert not slots
        assert daemon.service.state.totals.rejected == 0
        await second.submit(st.RequestArrived, "0", pack_hashes([9, 10]), 40, 8, 0, None)
        assert [slot.request for slot in slots.values()] == ["0"], "a name that is free is kept"


@pytest.mark.asyncio
async def test_an_engine_never_reaches_a_request_of_another_that_it_has_not_opened() -> None:
    async with (
        daemon_at(None) as daemon, Client(daemon.address) as one, Client(daemon.address) as two,
        one.feed("first") as first, two.feed("second") as second,
    ):
        for feed in (first, second):
            await feed.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 24, 16, Authority.OBSERVED)
        await request_of(first.submit, "0", 0, Authority.OBSERVED)
        await second.submit(st.IterationScheduled, **{**step(1, "0"), "preempted": ("0",), "new": ()})
        slot = daemon.service.state.slot_named("0")
        assert slot is not None
        assert slot.state is SlotState.PREFILLING


@pytest.mark.asyncio
async def test_a_hold_is_told_to_its_engine_under_the_name_that_the_engine_knows() -> None:
    async with (
        daemon_at(None) as daemon, Client(daemon.address) as one, Client(daemon.address) as two,
        one.feed("first") as first, two.feed("second") as second, one.control("shell", lease=False) as shell,
    ):
        for feed in (first, second):
            await feed.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 24, 16, Authority.ENGINE)
        await request_of(first.submit, "0", 0, Authority.ENGINE)
        await second.submit(st.RequestArrived, "0", pack_hashes([9, 10]), 40, 8, 0, None)
        await second.submit(st.MatchRequested, "0", 0)
        await second.submit(st.BlocksAllocated, "0", pack_ids([8, 9, 10]), 0)
        await shell.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.PREFILLING)))
        await second.submit(st.IterationScheduled, **step(1, "0"))
        held = daemon.service.state.slot_named(f"0@{second.source}")
        assert held is not None
        assert held.hold is not None
        await second.submit(st.IterationFinished, 1, (), (), b"", b"")  # answered behind the news
        assert (second.standing, first.standing) == ({"0"}, frozenset())


@pytest.mark.asyncio
@pytest.mark.parametrize("authority", [Authority.ENGINE, Authority.OBSERVED])
async def test_the_lives_of_an_engine_that_crashes_leave_one_pool(tmp_path: Path, authority: Authority) -> None:
    lives = 6
    async with daemon_at(None, record=tmp_path / "run") as daemon, Client(daemon.address) as client:
        for life in range(lives):
            async with Client(daemon.address) as one, one.feed("crashes") as engine:
                await engine.submit(st.PoolDeclared, 0, 0, Tier.G1, "GPU", 24 + life, 16, authority)
                await request_of(engine.submit, f"r{life}", 0, authority)
                document = await client.status()
                assert document["tiers"]["g1"]["capacity_blocks"] == 24 + life
                assert document["tiers"]["g1"]["uncertain"] is False
            await published(daemon, lambda: not daemon.service.feeds)
        state = daemon.service.state
        assert [pool.info.tier for pool in state.pools] == [Tier.G2, Tier.G3, Tier.G1]
        assert len(state.lost_sources) == 1
        assert state.totals.rejected == 0
    report = verify(tmp_path / "run")
    assert report.ok, report


SAMPLES: dict[Any, Any] = {
    str: "0", str | None: "0", tuple[str, ...]: ("0", "1"), bytes: b"\x01\0\0\0", int: 1, int | None: 1, bool: True,
    tuple[int, ...]: (1, 2),
}


@pytest.mark.parametrize("kind", sorted(FEED_KINDS, key=lambda kind: kind.__name__))
def test_another_name_of_a_request_changes_names_alone(
    kind: type[st.Stimulus], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block ids are bytes in some kinds, under the name of a list of requests in others."""
    hints = typing.get_type_hints(kind)
    values = [SAMPLES.get(hints[name]) for name in kind.__struct_fields__[4:]]
    values = [
        next(iter(hints[name])) if isinstance(hints[name], EnumMeta) else () if value is None else value
        for name, value in zip(kind.__struct_fields__[4:], values, strict=True)
    ]
    stimulus = kind(0, 0, 2, None, *values)
    names = RequestNames(2)
    names._here = {"0": "0@2"}
    monkeypatch.setattr(names, "_arrives", lambda *_: None)  # would forget the name, which no slot has
    translated = names.translated(stimulus, CacheState())
    (read,) = unpack_stimuli(pack_stimuli([translated]).data)
    assert read == translated
    for name in kind.__struct_fields__:
        before, after = getattr(stimulus, name), getattr(translated, name)
        named = name == "request" or (hints[name] == tuple[str, ...] and name in MANY)
        assert after == ({"0": "0@2", ("0", "1"): ("0@2", "1")}[before] if named else before), name


@pytest.mark.asyncio
async def test_a_failed_copy_beside_another_engine_names_its_blocks() -> None:
    async with (
        daemon_at(None) as daemon, Client(daemon.address) as one, Client(daemon.address) as two,
        one.feed("first"), two.feed("second") as second,
    ):
        await second.submit(st.TransferFailed, 99, 0, 0, "the disk is gone", pack_ids([0]))
        assert daemon.service.recoveries == 0
        assert daemon.service.state.totals.completions_refused == 1, "no such copy runs"
