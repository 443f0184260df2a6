"""The options of a daemon, and the endpoint that it listens on.

Law of this file: a daemon that may not listen here is refused with one sentence, before anything is started. A Unix
socket belongs to this user alone; TCP is for this machine alone.
"""

import errno
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import grpc.aio
import msgspec

from kvbm_console.addresses import DEFAULT_SOCKET, SOCKET_PATH_BYTES_MAX, socket_address
from kvbm_console.client.broker import BrokerAddress
from kvbm_console.core.config import LeaderConfig, require
from kvbm_console.core.errors import UsageError
from kvbm_console.debug.leases import LEASE_TTL_NS
from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.recording.format import POOLS_BLOCKS_MAX
from kvbm_console.recording.options import RecordingOptions
from kvbm_console.recording.output import FILE_SUFFIX
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig
from kvbm_console.simulator.link import DEFAULT_LINKS, LinkSpec
from kvbm_console.simulator.workloads import Workload
from kvbm_console.stream.ring import Ring

DIRECTORY_MODE: Final = 0o700
SOCKET_UMASK: Final = 0o177
"""The socket file is created 0600: connecting needs write permission, so even in an open directory it is ours alone."""


class DaemonOptions(msgspec.Struct, kw_only=True):
    """Everything that ``run_daemon`` needs. Without a workload it serves engines that connect by ``Feed``."""

    config: LeaderConfig
    listen: str
    """``unix:PATH`` or ``HOST:PORT`` of the loopback; port 0 takes a free port."""
    workload: Workload | None = None
    engine: EngineConfig | None = None
    """The simulated engine; needed with a workload."""
    links: Sequence[LinkSpec] = DEFAULT_LINKS
    """The links that modelled copies run on."""
    hosts: int = 1
    """Deciders, each but the first in a process of its own, compared after every step."""
    with_bytes: Path | None = None
    """Directory of the disk tier of a simulated engine whose blocks have bytes."""
    stage: Callable[[Rig], None] | None = None
    """Called with the simulated machine before its first step, for a demo to plant its trouble."""
    publishers: tuple[Publisher, ...] = ()
    """KV-event streams of real engines to follow."""
    metrics: str | None = None
    """``HOST:PORT`` of the Prometheus exposition: of the loopback or, with TLS and a token, of any interface."""
    otlp: str | None = None
    """Address of the OpenTelemetry collector that gets the timelines of requests as spans."""
    fleet: BrokerAddress | None = None
    """Broker at which the daemon publishes its summary."""
    fleet_events: bool = False
    """True if its events go there, too."""
    speed: float | None = 1.0
    """Virtual seconds per second of the wall; None never waits."""
    record: Path | None = None
    lake: Path | None = None
    """Directory of the lake that gets rows of the recording while it is written."""
    recording: RecordingOptions = RecordingOptions()
    """Options of the recording, now or when ``rec start`` begins one."""
    exit_when_done: bool = False
    healthy_without_recorder: bool = False
    """True if the health service says SERVING while a recorder that was asked for is dead."""
    check: bool = False
    """Verify the invariants after every stimulus and raise on a bug instead of undoing it."""
    target: str = ""
    """A name for people; by default that of the workload, or of the engines."""
    run: int = 0
    """Number of this run as people count them, 0 when unknown."""
    block_bytes: int | None = None
    program: str = "0+unknown"
    handle_signals: bool = True
    """True if SIGTERM, SIGINT and SIGHUP end the daemon in order, and a second SIGTERM or SIGINT at once."""
    lease_ttl_ns: int = LEASE_TTL_NS
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """Certificate chain and private key in PEM form; both or neither, and only for ``HOST:PORT``, also of metrics."""
    token_file: Path | None = None
    """Holds the token that grants control over TCP; readable by its owner alone."""
    read_only: bool = False
    """No client may control or feed, not even over the Unix socket."""
    breakpoints: Path | None = None
    """File of the breakpoints that are kept from run to run."""
    ring: Ring | None = None
    """History to keep; a ring of the usual size by default."""

    def __post_init__(self) -> None:
        together = (self.workload is None) == (self.engine is None)
        require(together, "engine", "given together with a workload", self.engine)
        require(self.workload is None or not self.publishers, "publishers", "none beside a workload", self.publishers)
        require(self.workload is not None or self.with_bytes is None, "bytes", "none without a workload",
                str(self.with_bytes))
        require(self.lake is None or (self.record is not None and self.record.suffix != FILE_SUFFIX), "lake",
                "given with --record DIR, a directory", str(self.record))
        require(self.fleet is not None or not self.fleet_events, "fleet-events", "given with --fleet", True)
        require((self.tls_cert is None) == (self.tls_key is None), "tls-cert", "given together with tls-key",
                self.tls_cert or self.tls_key)
        unix = self.listen.startswith("unix:") and self.metrics is None
        require(self.tls_cert is None or not unix, "tls-cert", "used with HOST:PORT only", self.listen)
        require(self.speed is None or self.speed > 0, "speed", "above 0", self.speed)
        self._require_readable_tiers()

    def _require_readable_tiers(self) -> None:
        """Bound the sum of the tiers, because readers of recordings refuse larger pools. Flags bound each tier."""
        total = self.config.g2_blocks + self.config.g3_blocks + (0 if self.engine is None else self.engine.g1_blocks)
        require(total <= POOLS_BLOCKS_MAX, "g1-blocks plus g2-blocks plus g3-blocks", f"at most {POOLS_BLOCKS_MAX}",
                total)


class Endpoint:
    """An address that is ours: checked and locked by the constructor, bound by ``bind``, given back by ``close``.

    With ``credentials`` it speaks TLS; with ``remote`` other machines may be served.
    """

    def __init__(
        self, listen: str, *, credentials: grpc.ServerCredentials | None = None, remote: bool = False
    ) -> None:
        self._credentials = credentials
        self.address = listen
        """The address as clients write it; with port 0 the real port after ``bind``."""
        self._lock: int | None = None
        self._path: Path | None = None
        self._socket: FileId | None = None
        if listen.startswith("unix:"):
            self._path = Path(listen.removeprefix("unix:")).absolute()
            self.address = f"unix:{self._path}"
            self._take_path(self._path)
        else:
            self._host, self._port = host_and_port("listen", listen, remote=remote)
            self._try_port()

    def _take_path(self, path: Path) -> None:
        size = len(os.fsencode(path))
        require(size <= SOCKET_PATH_BYTES_MAX, "listen", f"a path of at most {SOCKET_PATH_BYTES_MAX} bytes", str(path))
        try:
            path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            _require_own(path.parent)
            # In a directory that others may write, a link would have us make a file wherever it points.
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            why = f"{path}.lock is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise UsageError(f"cannot listen on unix:{path}: {why}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._unlock()  # the socket is the other daemon's: it stays
            raise UsageError(
                f"a daemon is listening on unix:{path} already: kvbm-console attach unix:{path} opens it, and serve "
                "--listen takes another address"
            ) from None
        try:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                self._unlock()
                raise UsageError(f"cannot listen on unix:{path}: there is a file that is no socket")
            if _answers(path):  # we hold the lock, so it is no daemon of ours
                self._unlock()
                raise UsageError(f"cannot listen on unix:{path}: another program listens there")
            path.unlink()
        except FileNotFoundError:
            pass

    def _try_port(self) -> None:
        """Ask the kernel first, because gRPC's refusal is a page of text."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((self._host, self._port))
        except OSError as error:
            raise UsageError(f"cannot listen on {self.address}: {error.strerror}") from None

    def bind(self, server: grpc.aio.Server) -> None:
        """Let the server listen here."""
        if self._path is not None:
            # gRPC removes at its end whatever socket has the name that it bound. So it binds a name that goes at once.
            bound = f"{self._path}.new"
            before = os.umask(SOCKET_UMASK)
            try:
                server.add_insecure_port(f"unix:{bound}")
                self._socket = file_id(Path(bound))
                os.rename(bound, self._path)
            except (RuntimeError, OSError):
                raise UsageError(f"cannot listen on {self.address}") from None
            finally:
                os.umask(before)
            return
        name = f"[{self._host}]" if ":" in self._host else self._host
        try:
            if self._credentials is None:
                port = server.add_insecure_port(f"{name}:{self._port}")
            else:
                port = server.add_secure_port(f"{name}:{self._port}", self._credentials)
        except RuntimeError:
            raise UsageError(f"cannot listen on {self.address}: the port is in use") from None
        self.address = f"{name}:{port}"

    def close(self) -> None:
        """Give the address back. The lock file stays, otherwise two daemons could lock two files of the same name.

        A socket that another daemon has made there, after somebody removed ours, is left alone.
        """
        if self._lock is not None:
            if self._path is not None:
                remove_own(self._path, self._socket)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


FileId = tuple[int, int]
"""Device and inode."""


def file_id(path: Path) -> FileId | None:
    """The file with this name, None if there is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def remove_own(path: Path, own: FileId | None) -> None:
    """Remove the file if it is still this one."""
    if own is not None and file_id(path) == own:
        path.unlink(missing_ok=True)


def _require_own(directory: Path) -> None:
    """Refuse the directory of our sockets where somebody else made it in front of us: they could replace a socket."""
    if str(directory) == str(Path(socket_address(DEFAULT_SOCKET).removeprefix("unix:")).parent):
        found = directory.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(f"directory {directory} of our sockets must be ours alone (chmod 700); or use --listen")


def _answers(path: Path) -> bool:
    """True if a program listens on the socket. The program that made a dead socket has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its queue of connections is full
        except OSError:
            return False
    return True


def host_and_port(field: str, listen: str, *, remote: bool) -> tuple[str, int]:
    """Host and port; refuses every host that other machines can reach, unless TLS and a token stand before it."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    unix = "unix:PATH or " if field == "listen" else ""
    require(bool(host) and port.isascii() and port.isdigit() and int(port) <= 65_535, field,
            f"{unix}HOST:PORT with a port up to 65535", listen)
    host = "127.0.0.1" if host == "localhost" else host
    if not is_loopback(host) and not remote:
        kind = "a Unix socket or a loopback address" if unix else "a loopback address"
        raise UsageError(
            f"{field} must be {kind}, got {listen!r}: without TLS and a token other machines are not served "
            "(--tls-cert, --tls-key, --token-file)"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address of this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
