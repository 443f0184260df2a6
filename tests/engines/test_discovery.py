"""Discovery against a real HTTP server that answers as vLLM and SGLang do, or worse."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvbm_console.analysis.lints import LintFold, stream_lints
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import ConnectionLost, UsageError
from kvbm_console.core.state import CacheState
from kvbm_console.engines.discovery import advice, discover
from kvbm_console.engines.http import ANSWER_BYTES_MAX
from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.engines.kv_events.zmq_source import Streams
from kvbm_console.service import LeaderService
from kvbm_console.wire.batches import unpack_events
from tests.engines.payloads import batch, stored

Server = Callable[[dict[str, Any]], str]


@pytest.fixture
def server() -> Iterator[Server]:
    """Starts a server with these answers by path; bytes are sent as they are."""
    made: list[ThreadingHTTPServer] = []

    def start(answers: dict[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = answers.get(self.path)
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(404 if answer is None else 302 if answer == b"away" else 200)
                self.send_header("Location", "http://127.0.0.1:9/")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        made.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=made[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{made[-1].server_port}"

    yield start
    for one in made:
        one.shutdown()
        one.server_close()


def rows(url: str) -> list[tuple[str, str | None, str, int]]:
    return [(one.endpoint, one.replay, one.topic, one.dp_rank) for one in discover(url)]


def test_vllm_names_every_rank(server: Server) -> None:
    url = server({"/kv_event_sources": [
        {"data_parallel_rank": 0, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "kv"},
        {"data_parallel_rank": 1, "endpoint": "tcp://10.0.0.2:5558", "replay_endpoint": None, "topic": "", "new": 1},
    ]})
    assert rows(url) == [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", "kv", 0), ("tcp://10.0.0.2:5558", None, "", 1),
    ]


def test_vllm_names_its_ranks_by_their_numbers(server: Server) -> None:
    """As vLLM 0.33 answers: what each rank's ``--kv-events-config`` has become."""
    common = {"enable_kv_cache_events": True, "publisher": "zmq", "buffer_steps": 10_000, "hwm": 100_000, "topic": "kv"}
    url = server({"/kv_event_sources": {
        "0": {**common, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"},
        "1": {**common, "endpoint": "tcp://*:5558", "replay_endpoint": None},
        "2": {**common, "endpoint": "tcp://*:5559", "publisher": "null"},
        "3": {**common, "endpoint": "tcp://*:5560", "enable_kv_cache_events": False},
    }})
    assert rows(url) == [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", "kv", 0), ("tcp://127.0.0.1:5558", None, "kv", 1),
    ]


def test_sglang_tells_a_base_port(server: Server) -> None:
    url = server({"/server_info": {"version": "x", "kv_events": {
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv", "block_size": 64,
        "dp_size": 2, "replay_endpoint_host": "0.0.0.0", "replay_endpoint_port_base": 6000,
    }}})
    assert rows(url) == [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:6000", "kv", 0),
        ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:6001", "kv", 1),
    ]


def test_sglang_tells_each_rank_or_only_its_flag(server: Server) -> None:
    base = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 8}
    url = server({"/server_info": {"kv_events": {
        **base, "publishers": [{"dp_rank": 4, "endpoint": "tcp://10.0.0.2:5561"}],
    }}})
    assert rows(url) == [("tcp://10.0.0.2:5561", None, "", 4)]
    flag = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:7000", "replay_endpoint": "tcp://*:7100", "topic": "t"})
    url = server({"/server_info": {"kv_events_config": flag, "dp_size": 2}})
    assert rows(url) == [
        ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7100", "t", 0),
        ("tcp://127.0.0.1:7001", "tcp://127.0.0.1:7101", "t", 1),
    ]


def test_sglang_of_before_is_asked_under_its_own_path(server: Server) -> None:
    flag = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:7000", "topic": "t"})
    url = server({"/get_server_info": {"kv_events_config": flag, "dp_size": 1}})
    assert rows(url) == [("tcp://127.0.0.1:7000", None, "t", 0)]


@pytest.mark.parametrize(("answers", "sentence"), [
    ({}, "answers none of"),
    ({"/kv_event_sources": []}, "names no publisher of KV events"),
    ({"/kv_event_sources": {}}, "names no publisher of KV events"),
    ({"/kv_event_sources": {"x": {"endpoint": "tcp://*:1"}}}, "is not understood"),
    ({"/kv_event_sources": b"away"}, "answers none of"),
    ({"/server_info": {"kv_events": None}}, "names no publisher of KV events"),
    ({"/server_info": {"kv_events": {"publisher": "null", "endpoint_port_base": 1}}}, "names no publisher"),
    ({"/kv_events/status": {"enabled": False, "published_batches": 0}}, "needs --enable_kv_events"),
    ({"/kv_events/status": {"enabled": True, "published_batches": 3}}, "give its --kv_events_bind_endpoint"),
    ({"/kv_event_sources": b"<html>"}, "is not understood"),
    ({"/kv_event_sources": {"endpoint": "tcp://*:1"}}, "is not understood"),
    ({"/kv_event_sources": b"[" * 100_000}, "is not understood"),
    ({"/kv_event_sources": b" " * (ANSWER_BYTES_MAX + 1)}, "more than"),
    ({"/kv_event_sources": [{"endpoint": "ipc:///tmp/secret"}]}, "only its own machine"),
    ({"/kv_event_sources": [{"endpoint": "tcp://*:99999"}]}, "port must be"),
    ({"/kv_event_sources": [{"endpoint": f"tcp://*:{port}"} for port in range(1, 100)]}, "more than 64"),
    ({"/server_info": {"kv_events": {"endpoint_port_base": 5557, "dp_size": 10**9}}}, "more than 64"),
])
def test_other_answers_are_refused_in_one_sentence(server: Server, answers: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        discover(server(answers))


@pytest.mark.parametrize("url", ["http://", "http://h:x", "http://127.0.0.1:1/path", "ftp://h:1", "http://127.0.0.1:1"])
def test_urls_that_are_refused_or_silent(url: str) -> None:
    with pytest.raises(ConnectionLost if url.endswith(":1") and "ftp" not in url else UsageError):
        discover(url)


@pytest.mark.parametrize(("size", "said"), [(100, True), (9_999, True), (10_000, False), (0, False), (None, False)])
def test_a_queue_in_the_engine_that_may_hold_it_up_is_said_in_one_sentence(
    server: Server, size: int | None, said: bool
) -> None:
    source = {"endpoint": "tcp://*:5557", **({} if size is None else {"max_queue_size": size})}
    url = server({"/kv_event_sources": {"0": source, "1": {**source, "max_queue_size": 100_000}}})
    (mine, other) = discover(url)
    assert (mine.queue_batches_max, other.queue_batches_max) == (size, 100_000)
    told = advice([mine, other])
    assert (told is not None) is said
    if told is not None:
        assert "max_queue_size" in told
        assert f"at least 10,000, got {size:,}:" in told


@pytest.mark.parametrize(("size", "found"), [
    (500, "queue of 500 batches"), (100_000, None), (None, "queue size unknown"),
])
def test_the_queue_of_a_publisher_is_on_the_record_and_a_finding(size: int | None, found: str | None) -> None:
    service = LeaderService(LeaderConfig(), lambda: 0, check=True)
    watch, state = LintFold(stream_lints()), CacheState()
    publisher = Publisher(endpoint="tcp://127.0.0.1:9", queue_batches_max=size)
    (source,) = Streams([publisher], service.dispatcher, service.new_source).sources
    (taker,) = source.takers
    taker.accept(0, batch(stored(1, 2)))
    service.broadcaster.flush()
    for data in service.ring.data_since(0):
        for event in unpack_events(data):
            watch.apply(state, event)
    told = [one for one in watch.findings(state, state.at_ns) if one.lint == "publisher_queue"]
    assert [(one.who, one.what) for one in told] == ([] if found is None else [("engine 1", found)])
