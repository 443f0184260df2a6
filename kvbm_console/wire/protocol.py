"""The protocol's numbers: versions, limits, names of methods, and the settings of a channel on either side.

Law of this file: both sides read the same constants, and a limit says why it has its value.
"""

from pathlib import Path
from typing import Any, Final, cast

from kvbm_console.core.config import REQUEST_ID_BYTES_MAX
from kvbm_console.core.events import PROTOCOL_MINOR
from kvbm_console.wire.v1 import console_pb2 as pb

PROTOCOL_MAJOR: Final = 1

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""The largest message that the transport accepts; the largest flush of an engine's calls is far below."""
CONTROL_MESSAGE_BYTES_MAX: Final = 256 * 1024
"""A control message has a few hundred bytes; this leaves room for a long list of breakpoints."""
NAME_BYTES_MAX: Final = REQUEST_ID_BYTES_MAX
"""Names of clients and engines, and request ids in questions."""
SUBSCRIBERS_MAX: Final = 128
"""Each costs about 20 us a flush and up to 8 MiB in the transport's buffers."""
STREAMS_MAX: Final = 256
"""Calls of one connection at once: all subscribers through one proxy, and as many questions."""
TOKEN_KEY: Final = "authorization"
TOKEN_SCHEME: Final = "Bearer "
"""How a token is shown, as a pair of the call's metadata."""
TOKEN_BYTES_MIN: Final = 16
TOKEN_BYTES_MAX: Final = 512
"""A token is made by a machine: 16 random bytes in hexadecimal have 32 characters."""
HISTORY_EVENTS_MAX: Final = 4_096
"""Events of an answer about the past: a flush."""
FOUND_HASHES_MAX: Final = 256
"""Blocks of a question where they lie: more than the missing prefixes that a fleet's view names."""
REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest reply that a client accepts: a flush of events with long columns, bounded like a batch in a recording."""

SERVICE: Final = str(pb.DESCRIPTOR.services_by_name["Console"].full_name)
ROLE_OF: Final[dict[str, int]] = {
    str(method.name): int(method.GetOptions().Extensions[cast(Any, pb.role)])
    for method in pb.DESCRIPTOR.services_by_name["Console"].methods
}
"""Method to the role that it needs, as the contract declares it; a method with 0 (undeclared) is refused."""

SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # otherwise two daemons share a port silently
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", REPLY_BYTES_MAX),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.server_handshake_timeout_ms", 10_000),  # a connection that says nothing does not keep its descriptor
    ("grpc.keepalive_time_ms", 30_000),  # finds a TCP peer whose machine went away
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
CLIENT_OPTIONS: Final = (
    ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    ("grpc.http2.bdp_probe", 0),  # a window that grows by itself hides megabytes of lag from a reader that stopped
    ("grpc.http2.lookahead_bytes", 262_144),
    ("grpc.enable_retries", 0),  # we reconnect ourselves, visibly
    ("grpc.use_local_subchannel_pool", 1),  # closing a channel closes its socket, too
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def method_path(name: str) -> str:
    """The path of a method, for example ``/kvbm_console.wire.v1.Console/Hello``."""
    return f"/{SERVICE}/{name}"


def version() -> pb.Version:
    """Our protocol version as a message."""
    return pb.Version(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR)


def limits(lease_ttl_ns: int) -> pb.Limits:
    """Our limits as a message."""
    return pb.Limits(
        request_id_bytes=REQUEST_ID_BYTES_MAX, control_message_bytes=CONTROL_MESSAGE_BYTES_MAX,
        message_bytes=MESSAGE_BYTES_MAX, subscribers=SUBSCRIBERS_MAX, lease_ttl_ns=lease_ttl_ns,
    )


def process_began(process: int) -> int:
    """When a process of this machine began, in clock ticks since the boot: a number that is used again is noticed.

    0 where there is none, or the system does not say. Both sides of ``OpenFeed.process_began`` ask here.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[_BEGAN])
    except (OSError, ValueError, IndexError):
        return 0


_BEGAN: Final = 19
"""Field 22 of ``/proc/PID/stat``, counted behind the name, which may hold spaces."""
