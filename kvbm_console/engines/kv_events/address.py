"""Addresses of publishers: ``zmq://HOST:PORT[?OPTIONS]``, a publisher for each rank.

The options are ``replay``, ``topic``, ``ranks``, ``bind`` and ``metrics``, joined by ``&``. ``replay`` and ``metrics``
are ports of the same host, or HOST:PORT.

Law of this file: a text that is no address is refused with one sentence that names the wrong part.
"""

from collections.abc import Sequence
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from kvbm_console.core.errors import UsageError

RANKS_MAX: Final = 64
"""Publishers of one address: data-parallel ranks of one engine."""
TOPIC_BYTES_MAX: Final = 256
PORT_MAX: Final = 65_535
NAMED_MAX: Final = 3
"""Publishers that a line names."""
WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::"})
"""Hosts that a server binds to. In an address of ours they mean that we bind and the engine connects."""
_KEYS: Final = frozenset({"replay", "topic", "ranks", "bind", "metrics"})
_SCHEMES: Final = ("zmq", "tcp")
LMCACHE: Final = "lmcache"
HINT: Final = "zmq://HOST:PORT[?replay=PORT&topic=NAME&ranks=N&metrics=PORT&bind=1]"


class Publisher(msgspec.Struct, frozen=True, kw_only=True):
    """A publisher of KV events. ``replay`` is the address that repeats old batches, None when the engine has none."""

    endpoint: str
    """``tcp://HOST:PORT``, ``http://HOST:PORT`` of an engine that is asked for its events, or LMCache's ``grpc://``."""
    replay: str | None = None
    topic: str = ""
    """Prefix of the topics to listen to; all topics when empty. Of an LMCache server the model."""
    bind: bool = False
    """True if we bind, for an engine that connects."""
    dp_rank: int = 0
    """The rank of batches that name none."""
    metrics: str | None = None
    """``http://HOST:PORT`` of the engine's own metrics page, None if unknown."""
    queue_batches_max: int | None = None
    """Batches that may wait inside the engine until the engine itself waits; 0 for any number, None if unknown."""

    @property
    def label(self) -> str:
        """The publisher's name on screens and in labels of metrics."""
        return self.endpoint.partition("://")[2]


def parse_publishers(text: str) -> list[Publisher]:
    """The publishers of an address, one for each rank (rank r publishes and replays on its port + r).

    Raises ``UsageError``.

    >>> [publisher.endpoint for publisher in parse_publishers("zmq://gpu7:5557?ranks=2&replay=5657")]
    ['tcp://gpu7:5557', 'tcp://gpu7:5558']
    """
    scheme, separator, rest = text.partition(":")
    if scheme == LMCACHE:
        return [_lmcache(rest, text)]
    if not separator or scheme not in _SCHEMES:
        raise UsageError(f"an event stream must be {HINT}, got {text!r}")
    parts = urlsplit("//" + rest.removeprefix("//"))
    host, port = _place(parts.netloc, text)
    if parts.path not in ("", "/") or parts.fragment:
        raise UsageError(f"an event stream must be {HINT}, got {text!r}")
    options = _options(parts.query, text)
    ranks = _number(options.get("ranks", "1"), "ranks", RANKS_MAX)
    topic = options.get("topic", "")
    if len(topic.encode()) > TOPIC_BYTES_MAX:
        raise UsageError(f"topic must be at most {TOPIC_BYTES_MAX} bytes, got {topic[:40]!r}...")
    bind = options.get("bind", "1" if host in WILDCARDS else "0")
    if bind not in ("0", "1"):
        raise UsageError(f"bind must be 0 or 1, got {bind!r}")
    replay, metrics = (_beside(options.get(key), key, host) for key in ("replay", "metrics"))
    if metrics is not None:
        metrics = "http://{}:{}".format(*_place(metrics, text))
    replay_host, replay_port = (host, port) if replay is None else _place(replay, text)
    for base in (port, replay_port):
        if base + ranks - 1 > PORT_MAX:
            raise UsageError(f"ranks must leave the ports below {PORT_MAX + 1}, got {ranks} from {base}")
    return [
        Publisher(
            endpoint=f"tcp://{host}:{port + rank}", topic=topic, bind=bind == "1", dp_rank=rank, metrics=metrics,
            replay=None if replay is None else f"tcp://{replay_host}:{replay_port + rank}",
        )
        for rank in range(ranks)
    ]


def names_of(publishers: Sequence[Publisher]) -> str:
    """Publishers in a few words: the first of them, and how many others.

    >>> names_of(parse_publishers("zmq://gpu7:5557?ranks=64"))
    'gpu7:5557, gpu7:5558, gpu7:5559 and 61 others'
    """
    shown = publishers if len(publishers) <= NAMED_MAX + 1 else publishers[:NAMED_MAX]
    more = f" and {len(publishers) - len(shown):,} others" if len(publishers) > len(shown) else ""
    return ", ".join(publisher.label for publisher in shown) + more


def _lmcache(rest: str, text: str) -> Publisher:
    """The server of ``lmcache://HOST:PORT?model=NAME``."""
    parts = urlsplit("//" + rest.removeprefix("//"))
    options = dict(parse_qsl(parts.query)) if parts.query else {}
    model = options.get("model", "")
    fits = set(options) == {"model"} and 0 < len(model.encode()) <= TOPIC_BYTES_MAX
    if not fits or parts.path not in ("", "/") or parts.fragment:
        raise UsageError(f"an LMCache server must be lmcache://HOST:PORT?model=NAME, got {text!r}")
    host, port = _place(parts.netloc, text)
    return Publisher(endpoint=f"grpc://{host}:{port}", topic=model)


def _beside(place: str | None, key: str, host: str) -> str | None:
    """``HOST:PORT`` of an option that may name a port alone."""
    if place is None or ":" in place:
        return place
    if host in WILDCARDS:
        raise UsageError(f"{key} must be HOST:PORT where we bind, got {place!r}")
    return f"{host}:{place}"


def _place(netloc: str, text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 host keeps its brackets."""
    host, _, port = netloc.rpartition(":")
    if not host or "@" in host or any(char in host for char in " /?#"):
        raise UsageError(f"an event stream must be {HINT}, got {text!r}")
    return host, _number(port, "port", PORT_MAX)


def _options(query: str, text: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=16)) if query else {}
    for key in options:
        if key not in _KEYS:
            raise UsageError(f"{key!r} is no option of an event stream: use {', '.join(sorted(_KEYS))} in {text!r}")
    return options


def _number(text: str, name: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise UsageError(f"{name} must be from 1 to {most}, got {text!r}")
    return int(text)
