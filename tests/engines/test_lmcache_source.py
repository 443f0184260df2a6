"""An LMCache server of a few answers: records, a break, another incarnation, a log that is off, an older server.

The answers are made with protobuf, and the program reads them by hand. ``tests/vllm`` has LMCache's own server.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core.errors import UsageError
from kvbm_console.engines.kv_events import lmcache_source
from kvbm_console.engines.kv_events.address import parse_publishers
from kvbm_console.engines.kv_events.batch import BadPayload, Removed, Stored, decode
from kvbm_console.engines.kv_events.lmcache_source import METHOD, LmcacheSource
from kvbm_console.engines.kv_events.stream import EventStream
from tests.engines.payloads import LmcacheBatch
from tests.engines.test_stream import SOURCE, House, facts_of
from tests.engines.test_zmq_source import PATIENCE_S

KEYS = [bytes(24) + key.to_bytes(8, "big") for key in range(1, 9)]


def answer(*records: dict[str, Any], incarnation: int = 5, cursor: int = 0, **more: Any) -> bytes:
    enabled = more.pop("enabled", True)
    made: bytes = LmcacheBatch(
        enabled=enabled, incarnation=incarnation, next_cursor=cursor, events=list(records), **more
    ).SerializeToString()
    return made


def stored(seq: int, *keys: bytes, parent: bytes | None = None) -> dict[str, Any]:
    return {"seq": seq, "kind": "stored", "medium": "CPU", "model_name": "m", "block_hashes": list(keys),
            "parent_block_hash": parent, "token_ids": [1_000_000] * 16 * len(keys)}


def evicted(seq: int, *keys: bytes) -> dict[str, Any]:
    return {"seq": seq, "kind": "removed", "medium": "CPU", "model_name": "m", "block_hashes": list(keys)}


class Log:
    """The answers to each subscription; the last subscription stays open. ``asked`` has the cursors."""

    def __init__(self, *subscriptions: list[bytes]) -> None:
        self.subscriptions = list(subscriptions)
        self.asked: list[int] = []

    async def subscribe(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.asked.append(LmcacheRequest(request))
        for payload in self.subscriptions.pop(0) if self.subscriptions else ():
            yield payload
        if not self.subscriptions:
            await asyncio.Event().wait()


def LmcacheRequest(request: bytes) -> int:
    """The cursor of a request: its fields 1 to 4 are an instance, a model, a cursor and a limit."""
    found = LmcacheBatch.FromString(request)  # the number of the cursor is that of next_cursor
    cursor: int = found.next_cursor
    return cursor


@asynccontextmanager
async def following(
    log: Log, monkeypatch: pytest.MonkeyPatch, *, method: str = METHOD
) -> AsyncIterator[tuple[House, LmcacheSource, Callable[[Callable[[], bool]], Any], Any]]:
    monkeypatch.setattr(lmcache_source, "AWAY_S", 0.01)
    _, service, name = method.split("/")
    server = grpc.aio.server()
    handlers = {name: grpc.unary_stream_rpc_method_handler(log.subscribe)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    (publisher,) = parse_publishers(f"lmcache://127.0.0.1:{port}?model=m")
    house = House()
    source = LmcacheSource(publisher, lambda _: EventStream(house.dispatcher, SOURCE))
    task = asyncio.ensure_future(source.run())

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                assert not task.done()
                await asyncio.sleep(0.001)

    try:
        yield house, source, until, task
    finally:
        task.cancel()
        await asyncio.wait([task])
        await server.stop(None)


def facts(house: House) -> dict[Any, Any]:
    return facts_of(house.dispatcher.leader.state)


@pytest.mark.asyncio
async def test_records_are_folded_and_a_break_goes_on_behind_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(
        [answer(), answer(stored(1, KEYS[0]), stored(2, KEYS[1], parent=KEYS[0]), cursor=2)],
        [answer(cursor=2), answer(evicted(3, KEYS[0]), stored(4, *KEYS[2:4]), cursor=4)],
    )
    async with following(log, monkeypatch) as (house, source, until, _):
        await until(lambda: facts(house) == {(0, 0, "CPU"): {2: 1, 3: 1, 4: 1}})
        assert log.asked == [0, 2]
        state = house.dispatcher.leader.state
        assert state.lost_sources == {}
        assert (state.pools[0].info.block_tokens, source.status.messages) == (16, 2)


@pytest.mark.asyncio
async def test_another_incarnation_is_read_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(
        [answer(stored(1, KEYS[0]), cursor=1)],
        [answer(incarnation=6, cursor=1)],
        [answer(stored(1, KEYS[4]), incarnation=6, cursor=1)],
    )
    async with following(log, monkeypatch) as (house, _, until, _task):
        await until(lambda: facts(house) == {(0, 0, "CPU"): {5: 1}})
        assert log.asked == [0, 1, 0]
        assert house.dispatcher.leader.state.lost_sources == {}


@pytest.mark.asyncio
async def test_a_loss_that_the_server_tells_leaves_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([answer(stored(9, KEYS[0]), cursor=9, lost=True)])
    async with following(log, monkeypatch) as (house, _, until, _task):
        await until(lambda: facts(house) == {(0, 0, "CPU"): {1: 1}})
        assert SOURCE in house.dispatcher.leader.state.lost_sources


@pytest.mark.asyncio
@pytest.mark.parametrize(("log", "method", "sentence"), [
    (Log([answer(enabled=False)]), METHOD, "keeps no KV events"),
    (Log([]), "/lmcache.mp.ObservabilityService/Another", "from 0.5.6 on"),
])
async def test_a_server_without_events_is_one_sentence(
    log: Log, method: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(log, monkeypatch, method=method) as (_, _, _, task):
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([task])
        with pytest.raises(UsageError, match=sentence):
            task.result()


@pytest.mark.parametrize("text", [
    "lmcache://h:1", "lmcache://h:1?model=", "lmcache://h?model=m", "lmcache://h:1?model=m&x=1", "lmcache://h:1/p?model=m",
])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_publishers(text)


RECORD = some.fixed_dictionaries({
    "seq": some.integers(0, 2**62), "kind": some.sampled_from(["stored", "removed", "touched"]),
    "medium": some.sampled_from(["CPU", "cpu", ""]), "model_name": some.text(max_size=4),
    "block_hashes": some.lists(some.binary(min_size=8, max_size=40), min_size=1, max_size=3),
    "parent_block_hash": some.none() | some.binary(min_size=8, max_size=8),
})


@given(some.lists(some.tuples(RECORD, some.integers(0, 40))), some.booleans())
def test_every_batch_that_protobuf_writes_is_read(rows: list[Any], lost: bool) -> None:
    records = [{**record, "token_ids": [2**40] * size * len(record["block_hashes"])} for record, size in rows]
    (found,) = decode(answer(*records, lost=lost, cursor=7))
    kinds = [{"stored": Stored, "removed": Removed}[each["kind"]] for each in records if each["kind"] != "touched"]
    assert [type(event) for event in found.events] == kinds
    sizes = [size for record, size in rows if record["kind"] == "stored"]
    assert [event.block_tokens for event in found.events if isinstance(event, Stored)] == sizes
    assert (found.lost, found.unknown, found.malformed) == (lost, len(records) - len(kinds), 0)
    assert {event.medium for event in found.events if not isinstance(event, Stored | Removed)} == set()


@given(some.binary(max_size=60))
def test_bytes_that_are_no_batch_raise_their_own_error(data: bytes) -> None:
    try:
        decode(b"\x08\x01" + data)
    except BadPayload:
        return
