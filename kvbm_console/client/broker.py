"""A NATS broker between daemons and those who look at a fleet: its address, its subjects, its refusals.

    nats://[USER[:PASSWORD]@]HOST[:PORT][/CLUSTER][?creds=FILE]      tls:// for TLS
    ...&daemon=NAME      the events of one daemon there

    kvbm.v1.CLUSTER.DAEMON.sum   the summary of a daemon; the stream KVBM_SUM keeps the last of each
    kvbm.v1.CLUSTER.DAEMON.ev    its events, if it publishes them; the stream KVBM_EV keeps two hours, at most 4 GiB
    kvbm.v1.CLUSTER.ask          questions to every daemon, answered to the asker's inbox

A connection that breaks is not taken up again: whoever needs the broker makes a new one. The client library would send
what its buffer still holds before a message that is sent again, and so change their order.

Law of this file: a broker that is absent, frozen or unwilling costs a bounded time and is told in one sentence.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator
from types import TracebackType
from typing import Annotated, Any, Final, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

import anyio
import msgspec

from kvbm_console.analysis.fleet import DaemonSummary, Located
from kvbm_console.core.errors import ConnectionLost, Refused, UsageError
from kvbm_console.extras import need

SCHEMES: Final = ("nats://", "tls://")
"""Beginnings of a broker's address."""
PORT: Final = 4222
CLUSTER: Final = "default"
ANSWER_S: Final = 2.0
"""Time for an answer of the broker, and for a connection."""
CLOSE_S: Final = 0.5
"""Time for the goodbye: a frozen broker takes none."""
PING_S: Final = 2
"""Two pings without an answer end the connection."""
SUMMARIES: Final = "KVBM_SUM"
"""The stream that keeps the last summary of each daemon."""
EVERY_S_MAX: Final = 3600.0
"""Longest time between two summaries, far above that of any daemon: else a row could claim never to be overdue."""
SUMMARIES_AGE_S: Final = 86_400
"""A dead daemon stays in the fleet for a day."""
EVENTS: Final = "KVBM_EV"
"""The stream of events. It discards the oldest."""
EVENTS_AGE_S: Final = 7_200
EVENTS_BYTES: Final = 4 << 30
"""Reserved when the stream is made; 2,000 events a second are some 0.3 GB in two hours."""
DUPLICATES_S: Final = 120
"""A message that is sent again within this time is stored once."""
_FORM: Final = "nats://[USER[:PASSWORD]@]HOST[:PORT][/CLUSTER][?creds=FILE]"


class BrokerAddress(msgspec.Struct, frozen=True):
    """Where a broker listens, who asks there, and which cluster of daemons is meant."""

    url: str
    """As the client library takes it, with user and password."""
    shown: str
    """Without them."""
    cluster: str = CLUSTER
    creds: str | None = None
    """Path of a file of NATS credentials."""
    daemon: str = ""
    """The daemon whose events are meant, empty for none."""

    @property
    def questions(self) -> str:
        """The subject of questions to every daemon."""
        return f"kvbm.v1.{token(self.cluster)}.ask"

    def subject(self, daemon: str, kind: str) -> str:
        """The subject on which a daemon publishes; ``*`` stands for every daemon."""
        return f"kvbm.v1.{token(self.cluster)}.{daemon if daemon == '*' else token(daemon)}.{kind}"


class PublishedSummary(msgspec.Struct):
    """A summary as a daemon publishes it."""

    summary: DaemonSummary
    address: str
    """Where the daemon listens; a Unix socket is one of the machine ``host``."""
    host: str
    every_s: Annotated[float, msgspec.Meta(ge=0, le=EVERY_S_MAX)]
    """The next one follows within so many seconds."""
    keyframe: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of the message in ``KVBM_EV`` with which the daemon's last snapshot begins, None without events there."""
    name_shared: bool = False
    """Another daemon publishes summaries under the same name."""


class FleetQuestion(msgspec.Struct):
    """A question to every daemon: who has these blocks, on whom does the request live. With ``watch`` summaries carry
    problems and a digest for the next minute."""

    hashes: list[int] = []
    request: str = ""
    watch: bool = False


class FleetAnswer(msgspec.Struct):
    """A daemon's answer, in the order of the question."""

    name: str
    found: list[Located]


def token(name: str) -> str:
    """A name as a token of a subject: other names give other tokens."""
    return quote(name, safe="").replace(".", "%2E")


def named(subject: str) -> str:
    """The name of the daemon that publishes on a subject."""
    return unquote(subject.split(".")[3])


def broker_address(text: str, field: str, *, daemon: bool = False) -> BrokerAddress:
    """The address that a user wrote, with the name of a ``daemon`` or without. Raises ``UsageError`` naming
    ``field``."""
    form = f"{_FORM}, and daemon=NAME behind ? or &" if daemon else _FORM
    names = {"creds", "daemon"} if daemon else {"creds"}
    try:
        parts = urlsplit(text)
        port = PORT if parts.port is None else parts.port
    except ValueError:
        parts, port = urlsplit(""), PORT
    query = parse_qs(parts.query, keep_blank_values=True)
    cluster = unquote(parts.path.strip("/"))
    fits = parts.scheme in ("nats", "tls") and parts.hostname and port and "/" not in cluster and set(query) <= names
    if not fits or parts.fragment or (daemon and not query.get("daemon", [""])[0]):
        said = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() or text
        raise UsageError(f"{field} must be {form}, got {said!r}")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    user, _, _ = parts.netloc.rpartition("@")
    plain = f"{parts.scheme}://{host}:{port}"
    url = f"{parts.scheme}://{user}@{host}:{port}" if user else plain
    return BrokerAddress(
        url, plain, cluster or CLUSTER, query["creds"][0] if "creds" in query else None, query.get("daemon", [""])[0]
    )


def _client(errors: Any, *, tls: bool) -> Any:
    """The library's client. It speaks TLS where the broker asks for TLS; with ``tls`` it shows no broker that does not
    ask for it the user and the password."""

    class Client(need("nats", "nats", "nats-py").NATS):  # type: ignore[misc]
        def _connect_command(self) -> bytes:
            if tls and not self._server_info.get("tls_required"):
                raise errors.SecureConnWantedError
            return bytes(super()._connect_command())

    return Client()


def _is_news(record: logging.LogRecord) -> bool:
    """False for what asyncio says at the end of each TLS connection that began without TLS, as all do here."""
    return "eof_received() has no effect" not in record.getMessage()


class Broker:
    """One connection to a broker, as an asynchronous context manager. Entering raises ``ConnectionLost``, ``Refused``,
    or ``UsageError`` where the client library is not installed."""

    def __init__(self, address: BrokerAddress, name: str) -> None:
        self.address = address
        self.lost = asyncio.Event()
        """Set when the connection has broken."""
        self._errors: Any = need("nats.errors", "nats", "nats-py", "a fleet at a NATS broker")
        self._name = name
        self._refusal = ""
        """The broker's last refusal, which comes beside an answer that does not."""
        self.client: Any = _client(self._errors, tls=address.url.startswith("tls:"))
        self.jetstream: Any = None

    async def __aenter__(self) -> Self:
        logging.getLogger("asyncio").addFilter(_is_news)
        try:
            with self.asking("connect"):
                async with asyncio.timeout(2 * ANSWER_S):
                    await self.client.connect(
                        [self.address.url], name=self._name, allow_reconnect=False, connect_timeout=ANSWER_S,
                        ping_interval=PING_S, error_cb=self._error, closed_cb=self._closed,
                        user_credentials=self.address.creds,
                    )
        except BaseException:
            await self._close()
            raise
        self.jetstream = self.client.jetstream(timeout=ANSWER_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        with contextlib.suppress(Exception), anyio.move_on_after(CLOSE_S, shield=True):
            await self.client.close()

    async def _error(self, error: Exception) -> None:
        if self.jetstream is None:
            raise error  # else the library tries to connect for ever
        self._refusal = str(error).removeprefix("nats: ")

    async def _closed(self) -> None:
        self.lost.set()

    async def publish_behind(self, subject: str, data: bytes, last: int | None) -> int | None:
        """Publish if the message numbered ``last`` is the newest of the subject, in any case if that is None.

        Returns the number of the new message, None if another message stood behind ``last``.
        """
        headers = None if last is None else {"Nats-Expected-Last-Subject-Sequence": str(last)}
        try:
            acknowledged = await self.jetstream.publish(subject, data, headers=headers)
        except self._errors.Error as error:
            if getattr(error, "err_code", None) == NOT_LAST:
                return None
            raise
        return int(acknowledged.seq)

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Turn the library's errors inside the block into ``ConnectionLost`` or ``Refused``; ``what`` was asked."""
        errors, place = self._errors, f"the broker at {self.address.shown}"
        self._refusal = ""
        try:
            yield
        except errors.AuthorizationError:
            raise Refused(f"{place} refuses this user or password") from None
        except (errors.NoRespondersError, errors.ConnectionClosedError, TimeoutError, OSError, errors.Error) as error:
            raise self._sentence(error, what, place) from None

    def _sentence(self, error: Exception, what: str, place: str) -> ConnectionLost | Refused:
        errors = self._errors
        refused = self._refusal.lower()
        if "authorization" in f"{refused} {error}".lower():
            return Refused(f"{place} refuses this user or password")
        if "permissions violation" in refused:
            return Refused(f"{place} {NO_RIGHT} {what} ({refused})")
        if isinstance(error, errors.SecureConnWantedError):
            return Refused(f"{place} does not speak TLS; write nats:// if it is to be trusted without")
        if isinstance(error, FileNotFoundError):
            return Refused(f"the credentials {self.address.creds} cannot be read ({error.strerror})")
        if isinstance(error, ssl.SSLCertVerificationError):
            return Refused(f"{place} shows no certificate that this machine trusts ({error.verify_message}); "
                           "SSL_CERT_FILE names another authority")
        if isinstance(error, ssl.SSLError):
            return Refused(f"{place} speaks another TLS ({error.reason or error})")
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            return ConnectionLost(f"no broker listens on {self.address.shown}")
        if isinstance(error, TimeoutError | errors.ConnectionClosedError | errors.StaleConnectionError):
            return ConnectionLost(f"{place} does not answer")
        if getattr(error, "err_code", None) == NO_ROOM:
            return Refused(f"{place} has no room left to {what}")
        code = getattr(error, "code", None)
        if code == NO_STREAM or type(error).__name__ in ("NoStreamResponseError", "ServiceUnavailableError"):
            return Refused(f"{place} keeps no messages: JetStream is off there, or its stream is missing")
        said = getattr(error, "description", None) or str(error).removeprefix("nats: ") or type(error).__name__
        return Refused(f"{place} refuses to {what} ({said})")


NO_RIGHT: Final = "gives no right to"
NO_ROOM: Final = 10_023
"""JetStream's code for a store that is full."""
NOT_LAST: Final = 10_071
"""JetStream's code for a message that is not to follow the newest of its subject."""
NO_STREAM: Final = 404
"""JetStream's code for a stream that does not exist."""


async def keep_summaries(broker: Broker) -> object:
    """Make the stream of summaries, as ``_keep`` does."""
    return await _keep(
        broker, SUMMARIES, subjects=["kvbm.v1.*.*.sum"], max_msgs_per_subject=1, max_age=SUMMARIES_AGE_S
    )


async def keep_events(broker: Broker) -> object:
    """Make the stream of events, as ``_keep`` does."""
    return await _keep(
        broker, EVENTS, subjects=["kvbm.v1.*.*.ev"], max_age=EVENTS_AGE_S, max_bytes=EVENTS_BYTES,
        duplicate_window=DUPLICATES_S, compression="s2",
    )


async def _keep(broker: Broker, name: str, **settings: Any) -> object:
    """Make a stream where it is missing and we may; where it stands already, it stays as it is.

    Returns what tells it from a later stream of its name, None if we may not know. Raises ``ConnectionLost``, and
    ``Refused`` where the broker has no room for it.
    """
    api: Any = need("nats.js.api", "nats", "nats-py")
    try:
        with broker.asking(f"make the stream {name}"):
            return (await broker.jetstream.add_stream(api.StreamConfig(name=name, **settings))).created
    except Refused as refused:
        if not any(word in str(refused) for word in (NO_RIGHT, "already in use")):
            raise
    with contextlib.suppress(Refused), broker.asking(f"ask for the stream {name}"):
        return (await broker.jetstream.stream_info(name)).created
    return None
