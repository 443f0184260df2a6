"""A server that answers as TensorRT-LLM's: each request takes the events since the last request out of its queue.

The shapes are those of its ``KVCacheEventSerializer``. TensorRT-LLM itself needs a GPU.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvbm_console.core.events import SourceLost
from kvbm_console.engines.discovery import discover
from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.engines.kv_events.pull_source import PATH, PullSource
from kvbm_console.engines.kv_events.stream import EventStream
from tests.engines.test_commands import run
from tests.engines.test_stream import SOURCE, House, facts_of
from tests.engines.test_zmq_source import PATIENCE_S


class TrtServer:
    """The server, with the queue of its engine. ``created`` is the first event of an engine."""

    def __init__(self, port: int = 0, *, capacity: int = 1_000) -> None:
        self.queue: list[dict[str, Any]] = []
        self.capacity, self.next_id = capacity, 0
        self.answer_garbage = False
        lock, ours = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with lock:
                    body = json.dumps(ours.queue).encode() if not ours.answer_garbage else b"<html>"
                    ours.queue.clear()
                self._send(200 if self.path == PATH else 404, body)

            def do_GET(self) -> None:
                self._send(200 if self.path == "/server_info" else 405 if self.path == PATH else 404, b"{}")

            do_HEAD = do_GET

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                if status == 405:
                    self.send_header("Allow", "POST")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.put({"type": "created", "num_blocks_per_cache_level": [100, 50]})

    def put(self, *data: dict[str, Any]) -> None:
        """The engine makes events; of a full queue the oldest are dropped."""
        for each in data:
            self.queue.append({"event_id": self.next_id, "data": each, "window_size": 4096})
            self.next_id += 1
        del self.queue[: -self.capacity]

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def stored(*hashes: int, parent: int | None = None, level: int = 0) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": [
        {"type": "stored_block", "block_hash": key, "cache_level": level, "priority": 35,
         "tokens": [{"type": "unique_token", "token_id": key * 4 + at, "token_extra_id": 0} for at in range(4)]}
        for key in hashes
    ]}


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(hashes)}


def moved(key: int) -> dict[str, Any]:
    return {"type": "updated", "block_hash": key, "priority": None,
            "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1}}


@pytest.fixture
def server() -> Iterator[Callable[..., TrtServer]]:
    made: list[TrtServer] = []

    def start(*arguments: Any, **options: Any) -> TrtServer:
        made.append(TrtServer(*arguments, **options))
        return made[-1]

    yield start
    for one in made:
        one.end()


class Following:
    """A source that follows, and the facts of its leader."""

    def __init__(self, url: str) -> None:
        self.house = House()
        (publisher,) = discover(url)
        self.source = PullSource(publisher, lambda _: EventStream(self.house.dispatcher, SOURCE), every_s=0.001)

    @property
    def facts(self) -> dict[Any, Any]:
        return facts_of(self.house.dispatcher.leader.state)

    @property
    def stream(self) -> EventStream:
        stream: EventStream = self.source.takers[0]
        return stream


@asynccontextmanager
async def following(url: str) -> AsyncIterator[tuple[Following, Callable[..., Any]]]:
    """A source that runs, and a function that waits for something to become true of it."""
    it = Following(url)
    task = asyncio.ensure_future(it.source.run())

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                assert not task.done()
                await asyncio.sleep(0.001)

    try:
        yield it, until
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_the_server_is_found_without_taking_its_events(server: Callable[..., TrtServer]) -> None:
    engine = server()
    assert discover(engine.url) == [Publisher(endpoint=engine.url)]
    assert len(engine.queue) == 1


@pytest.mark.asyncio
async def test_events_of_all_answers_are_folded(server: Callable[..., TrtServer]) -> None:
    engine = server()
    async with following(engine.url) as (it, until):
        engine.put(stored(1, 2), stored(3, parent=2))
        await until(lambda: it.facts == {(0, 0, "GPU"): {1: 1, 2: 1, 3: 1}})
        engine.put(moved(2), removed(3))
        await until(lambda: it.facts == {(0, 0, "GPU"): {1: 1}, (0, 0, "CPU"): {2: 1}})
        assert it.house.dispatcher.leader.state.lost_sources == {}
        assert it.source.status.connected


@pytest.mark.asyncio
async def test_events_that_another_asker_took_leave_doubt(server: Callable[..., TrtServer]) -> None:
    engine = server()
    async with following(engine.url) as (it, until):
        engine.put(stored(1))
        await until(lambda: it.facts == {(0, 0, "GPU"): {1: 1}})
        engine.next_id += 2
        engine.put(stored(4))
        await until(lambda: 4 in it.facts[0, 0, "GPU"])
        assert it.stream.counts.lost_batches == 2
        assert SOURCE in it.house.dispatcher.leader.state.lost_sources
        assert it.house.of(SourceLost)


@pytest.mark.asyncio
async def test_a_late_join_and_a_garbled_answer_leave_doubt(server: Callable[..., TrtServer]) -> None:
    engine = server(capacity=1)
    engine.put(stored(1), stored(2))
    async with following(engine.url) as (it, until):
        await until(lambda: it.facts == {(0, 0, "GPU"): {2: 1}})
        assert it.stream.counts.lost_batches == 2
        engine.answer_garbage = True
        await until(lambda: it.stream.counts.doubts > 0)
        assert it.source.status.bad_messages > 0


@pytest.mark.asyncio
async def test_an_engine_that_begins_again_has_no_earlier_block(server: Callable[..., TrtServer]) -> None:
    engine = server()
    async with following(engine.url) as (it, until):
        engine.put(stored(1), stored(2))
        await until(lambda: it.facts == {(0, 0, "GPU"): {1: 1, 2: 1}})
        engine.next_id = 0
        engine.put({"type": "created", "num_blocks_per_cache_level": [100]}, stored(7))
        await until(lambda: it.facts == {(0, 0, "GPU"): {7: 1}})
        assert it.house.dispatcher.leader.state.lost_sources == {}


@pytest.mark.asyncio
async def test_a_server_that_refuses_connections_has_ended(server: Callable[..., TrtServer]) -> None:
    engine = TrtServer()
    async with following(engine.url) as (it, until):
        engine.put(stored(1))
        await until(lambda: it.facts == {(0, 0, "GPU"): {1: 1}})
        engine.end()
        await until(lambda: it.facts == {})
        assert not it.source.status.connected


def test_the_commands_follow_it(server: Callable[..., TrtServer], tmp_path: Path) -> None:
    engine = server()
    engine.put(stored(1, 2), removed(2))
    found = run("rec", "capture", engine.url, "--out", str(tmp_path / "capture"), "--batches", "1", "--format", "json")
    assert json.loads(found.stdout)[0]["resident_blocks"]["GPU"] == 1, found
    assert run("rec", "import", "kv-events", str(tmp_path / "capture"), "--out", str(tmp_path / "made")).returncode == 0
    engine.next_id = 0
    engine.put({"type": "created"}, stored(1, 2), removed(2), removed(2))
    judged = run("conform", engine.url, "--batches", "1", "--format", "json")
    failed = [each["rule"] for each in json.loads(judged.stdout)[0]["verdicts"] if each["verdict"] == "fail"]
    assert (judged.returncode, failed) == (1, ["removed"]), judged
