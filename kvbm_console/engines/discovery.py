"""Ask an engine's HTTP server where it publishes its KV events.

vLLM answers ``GET /kv_event_sources`` with the publisher of each data-parallel rank, by its number or in a list. SGLang
names a base port in ``GET /server_info``, or every rank's address. An address that a server binds to (``*``) stands for
the server's own host.

Law of this file: an answer is typed and limited, redirections are not followed, and only ``tcp://`` addresses are
taken from it.
"""

import http.client
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvbm_console.core.errors import ConnectionLost, NotFound, UsageError
from kvbm_console.engines.kv_events.address import RANKS_MAX, WILDCARDS, Publisher, parse_publishers
from kvbm_console.stream.publishers import QUEUE_SAFE, queue_is_safe

T = TypeVar("T")

SGLANG_PATHS: Final = ("/server_info", "/get_server_info")
"""SGLang before 0.5.5 has the second path."""
TIMEOUT_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 4 * 2**20
"""SGLang's answer holds every argument of the server: some 20 kB."""


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
    host, port, tls = _server(url)
    status, body = _get(url, host, port, tls, "/kv_event_sources")
    if status == 200:
        publishers = _vllm(url, host, body)
    else:
        for path in SGLANG_PATHS:
            status, body = _get(url, host, port, tls, path)
            if status == 200:
                break
        else:
            raise NotFound(
                f"{url} answers neither /kv_event_sources (vLLM) nor /server_info (SGLang); "
                "give the stream itself as zmq://HOST:PORT"
            )
        publishers = _sglang(url, host, body)
    if not publishers:
        raise NotFound(f"{url} publishes no KV events: start the engine with its KV events switched on")
    if len(publishers) > RANKS_MAX:
        raise UsageError(f"{url} names {len(publishers)} publishers, more than {RANKS_MAX}")
    return publishers


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


def _server(url: str) -> tuple[str, int, bool]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise UsageError(f"an engine must be http://HOST:PORT, got {url!r}")
    tls = parts.scheme == "https"
    return parts.hostname, port or (443 if tls else 80), tls


def _get(url: str, host: str, port: int, tls: bool, path: str) -> tuple[int, bytes]:
    kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
    connection = kind(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        body = answer.read(ANSWER_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionLost(f"{url} does not answer: {error or type(error).__name__}") from None
    finally:
        connection.close()
    if len(body) > ANSWER_BYTES_MAX:
        raise UsageError(f"{url}{path} answers with more than {ANSWER_BYTES_MAX} bytes")
    return answer.status, body


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
