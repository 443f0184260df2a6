"""Ask an engine's HTTP server where it publishes its KV events.

vLLM answers ``GET /kv_event_sources`` with the publisher of each data-parallel rank, by its number or in a list. SGLang
names a base port in ``GET /server_info``, or every rank's address. TensorRT-LLM takes ``POST /kv_cache_events``, which
empties its queue, so it is found by ``HEAD``. An address that a server binds to (``*``) stands for
the server's own host.

Law of this file: an answer is typed and limited, redirections are not followed, and only ``tcp://`` addresses are
taken from it.
"""

import http.client
from typing import Any, Final, TypeVar

import msgspec

from kvbm_console.core.errors import ConnectionLost, NotFound, UsageError
from kvbm_console.engines.http import TIMEOUT_S, fetch, split_server
from kvbm_console.engines.kv_events.address import RANKS_MAX, WILDCARDS, Publisher, parse_publishers
from kvbm_console.engines.kv_events.pull_source import PATH as PULL_PATH
from kvbm_console.stream.publishers import QUEUE_SAFE, queue_is_safe

T = TypeVar("T")

SGLANG_PATHS: Final = ("/server_info", "/get_server_info")
"""SGLang before 0.5.5 has the second path."""
POOL_PATH: Final = "/kv_events/status"
"""Mooncake's master answers here, at its metrics port."""


class _VllmSource(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    topic: str | None = None
    data_parallel_rank: int | None = None
    publisher: str = "zmq"
    enable_kv_cache_events: bool = True
    max_queue_size: int | None = None


class _SglangRank(msgspec.Struct):
    dp_rank: int
    endpoint: str


class _SglangEvents(msgspec.Struct):
    endpoint_port_base: int
    endpoint_host: str = "*"
    topic: str | None = None
    dp_size: int = 1
    publisher: str = "zmq"
    replay_endpoint_host: str | None = None
    replay_endpoint_port_base: int | None = None
    publishers: list[_SglangRank] | None = None


class _SglangConfig(msgspec.Struct):
    """The value of ``--kv-events-config``, the only source in versions without the structured field."""

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""


class _ServerInfo(msgspec.Struct):
    kv_events: _SglangEvents | None = None
    kv_events_config: str | None = None
    dp_size: int = 1


def discover(url: str) -> list[Publisher]:
    """The publishers of the engine at ``http://HOST:PORT``. Raises ``UsageError`` or ``ConnectionLost``."""
    host, port, tls = split_server(url)
    status, body = fetch(url, host, port, tls, "/kv_event_sources")
    if status == 200:
        publishers = _vllm(url, host, body)
    else:
        publishers, answers = _without_vllm(url, host, port, tls)
        if not answers:
            raise NotFound(
                f"{url} answers none of /kv_event_sources (vLLM), /server_info (SGLang) and {PULL_PATH} "
                "(TensorRT-LLM); give the stream itself as zmq://HOST:PORT"
            )
    if not publishers:
        raise NotFound(
            f"{url} names no publisher of KV events: start the engine with its KV events switched on "
            "(--kv-events-config), or give the stream itself as zmq://HOST:PORT"
        )
    if len(publishers) > RANKS_MAX:
        raise UsageError(f"{url} names {len(publishers)} publishers, more than {RANKS_MAX}")
    page = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    # TensorRT-LLM's /metrics empties a queue of the engine's statistics, so its page is left alone.
    return [
        publisher if publisher.endpoint.startswith("http") else msgspec.structs.replace(publisher, metrics=page)
        for publisher in publishers
    ]


def advice(publishers: list[Publisher]) -> str | None:
    """A sentence of advice if the engine's configuration may hold up its steps, else None."""
    known = [publisher.queue_batches_max for publisher in publishers if publisher.queue_batches_max is not None]
    sizes = [size for size in known if not queue_is_safe(size)]
    if not sizes:
        return None
    return (
        f"max_queue_size of the engine's kv_events_config should be at least {QUEUE_SAFE:,}, got {min(sizes):,}: "
        "an engine with so many unpublished batches waits in its step, for example during a replay"
    )


def _without_vllm(url: str, host: str, port: int, tls: bool) -> tuple[list[Publisher], bool]:
    """(publishers of SGLang or TensorRT-LLM, whether either answers)."""
    answers = False
    for path in SGLANG_PATHS:
        status, body = fetch(url, host, port, tls, path)
        if status == 200:
            answers = True
            if publishers := _sglang(url, host, body):
                return publishers, True
            break
    if _allows_post(url, host, port, tls, PULL_PATH):  # TensorRT-LLM has /server_info, too
        place = f"[{host}]" if ":" in host else host
        return [Publisher(endpoint=f"{'https' if tls else 'http'}://{place}:{port}")], True
    if not answers:
        _explain_pool(url, host, port, tls)
    return [], answers


def _allows_post(url: str, host: str, port: int, tls: bool, path: str) -> bool:
    """True if the server takes a POST at this path, which is asked without sending one."""
    kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
    connection = kind(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("HEAD", path)
        answer = connection.getresponse()
        return answer.status == 405 and "POST" in (answer.headers.get("Allow") or "")
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionLost(f"{url} does not answer: {error or type(error).__name__}") from None
    finally:
        connection.close()


class _PoolStatus(msgspec.Struct):
    enabled: bool
    published_batches: int


def _explain_pool(url: str, host: str, port: int, tls: bool) -> None:
    """Raise ``UsageError`` for the master of a Mooncake pool, which does not tell the address of its publisher."""
    status, body = fetch(url, host, port, tls, POOL_PATH)
    if status != 200:
        return
    pool: _PoolStatus = _decode(url, POOL_PATH, body, _PoolStatus)
    if pool.enabled:
        raise UsageError(f"{url} is a Mooncake master; give its --kv_events_bind_endpoint as zmq://HOST:PORT")
    raise UsageError(
        f"{url} is a Mooncake master that publishes no KV events: it needs --enable_kv_events, "
        "--kv_events_backend_id and a build with ENABLE_KV_EVENTS"
    )


def _decode(url: str, path: str, body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise UsageError(f"{url}{path} is not understood: {error}") from None


def _vllm(url: str, host: str, body: bytes) -> list[Publisher]:
    kind = list[_VllmSource] | dict[int, _VllmSource]
    sources: list[_VllmSource] | dict[int, _VllmSource] = _decode(url, "/kv_event_sources", body, kind)
    ranked = sources.items() if isinstance(sources, dict) else [(row.data_parallel_rank or 0, row) for row in sources]
    return [
        msgspec.structs.replace(
            _publisher(host, source.endpoint, source.replay_endpoint or None, source.topic or "", rank),
            queue_batches_max=source.max_queue_size,
        )
        for rank, source in ranked if source.publisher == "zmq" and source.enable_kv_cache_events
    ]


def _sglang(url: str, host: str, body: bytes) -> list[Publisher]:
    info: _ServerInfo = _decode(url, "/server_info", body, _ServerInfo)
    events = info.kv_events
    if events is None:
        return _sglang_config(url, host, info)
    if events.publisher != "zmq":
        return []
    topic = events.topic or ""
    if events.publishers:
        return [_publisher(host, rank.endpoint, None, topic, rank.dp_rank) for rank in events.publishers]
    base = f"tcp://{events.endpoint_host}:{events.endpoint_port_base}"
    replay = None
    if events.replay_endpoint_port_base:
        replay = f"tcp://{events.replay_endpoint_host or '*'}:{events.replay_endpoint_port_base}"
    return _ranks(host, base, replay, topic, events.dp_size)


def _sglang_config(url: str, host: str, info: _ServerInfo) -> list[Publisher]:
    if not info.kv_events_config:
        return []
    config: _SglangConfig = _decode(url, "/server_info", info.kv_events_config.encode(), _SglangConfig)
    if config.publisher != "zmq":
        return []
    return _ranks(host, config.endpoint, config.replay_endpoint, config.topic, info.dp_size)


def _ranks(host: str, endpoint: str, replay: str | None, topic: str, size: int) -> list[Publisher]:
    return [
        _publisher(host, _shift(endpoint, rank), _shift(replay, rank), topic, rank)
        for rank in range(min(max(1, size), RANKS_MAX + 1))
    ]


def _shift(endpoint: str | None, rank: int) -> Any:
    """The address of a rank, whose number is added to the port."""
    if endpoint is None:
        return None
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if port.isascii() and port.isdigit() else endpoint


def _publisher(host: str, endpoint: str, replay: str | None, topic: str, rank: int) -> Publisher:
    """A publisher with addresses that we can reach. Raises ``UsageError`` for an address that is not TCP."""
    (publisher,) = parse_publishers(_reachable(host, endpoint))
    if replay is not None:
        replay = parse_publishers(_reachable(host, replay))[0].endpoint
    return msgspec.structs.replace(publisher, replay=replay, topic=topic, bind=False, dp_rank=rank)


def _reachable(host: str, endpoint: str) -> str:
    if not endpoint.startswith("tcp://"):
        raise UsageError(f"the engine publishes at {endpoint[:80]!r}, which only its own machine can reach")
    place, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if place.strip("[]") in WILDCARDS:
        place = f"[{host}]" if ":" in host else host
    return f"tcp://{place}:{port}"
