"""The thread between the engine and a reporter: it empties the queue and takes verdicts on held requests.

The reporter is a process that speaks gRPC to the daemon, so the engine imports neither gRPC nor protobuf. A daemon at a
Unix socket starts the reporter itself. The thread connects to the socket beside that of the daemon, and looks again
each second when no daemon listens. For a daemon at HOST:PORT the thread starts the reporter, and starts the reporter
again after a pause, which doubles each time.

Law of this file: the thread holds no lock that the scheduler could want, and works in short bursts. ``TapRecorder.off``
follows whenever no daemon listens.
"""

import contextlib
import logging
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Final

import msgspec

from kvbm_console import __version__
from kvbm_console.addresses import default_target, tap_path
from kvbm_console.tap.flatten import Flattener, drain
from kvbm_console.tap.recorder import TapRecorder

LENGTH: Final = struct.Struct(">I")
BURST: Final = 64
"""Records that are turned into messages at once: some tens of microseconds each, with the interpreter lock held."""
PAUSE_S: Final = 0.002
"""How long the thread sleeps when there is nothing to do; a verdict takes at most this much longer."""
UNSENT_MAX: Final = 8 * 2**20
"""Bytes that wait for the socket; beyond this the queue fills, and then records are dropped."""
ANSWER_MAX: Final = 4 * 2**20
RESTART_FIRST_S: Final = 1.0
RESTART_MOST_S: Final = 60.0
LOOK_AGAIN_S: Final = 1.0
"""Interval between two attempts to reach a daemon."""
COST_EVERY_S: Final = 1.0
MEASURE_EVERY_S: Final = 5.0
"""Interval between two reports of the connector's calls and figures, which become events."""
END_S: Final = 0.5


_log: Final = logging.getLogger("kvbm_console.tap")


class TapSettings(msgspec.Struct, frozen=True):
    """The settings of a reporter: the first frame of a connection, or on the command line of a process."""

    target: str
    """The daemon's address; the default socket when empty."""
    name: str
    """The engine's name on screens."""
    block_tokens: int
    capacity_blocks: int | None
    first_place: int = 0
    """The lowest block that the engine gives to a request."""
    dp_rank: int = 0
    medium: str = ""
    """The medium of the connector inside; empty when there is none."""
    serve: bool = False
    """True if a daemon is started when none listens."""
    token_file: str = ""
    tls_ca: str = ""
    group: int = 0
    """The group whose blocks are reported with each request."""
    others: dict[int, int] = {}
    """The engine's other groups, to the tokens in a block of each. All share the places of one pool, so no group has a
    capacity of its own."""
    windows: dict[int, int] = {}
    """Groups to the tokens that a token of their layers sees, itself included; 0 for all. Others are not known."""
    retention: int | None = None
    """See ``Measure.RETENTION_TOKENS``; 1 where all blocks are kept, None if unknown."""
    uncertain: bool = False
    """True if reports of blocks may be wrong, because this engine's groups or its pool cannot be followed."""
    silent: bool = False
    """True if the connector inside does not report its blocks, so that the content of its tier is unknown."""
    version: str = ""
    """The version of the tap. A daemon of another version refuses it, because messages change between versions."""
    tiers: bool = False
    """True if a tap stands around a tier below the host tier, so that a load from there can be held."""
    host_blocks: int | None = None
    """The blocks of all groups that fit into the medium; None if unknown."""
    running_most: int | None = None
    """Most requests that the engine runs at once."""
    step_tokens_most: int | None = None
    """Most tokens that a step of the engine computes."""
    caching: bool = True
    """True if the engine has a prefix cache. Without it the blocks that its connector loads cannot be found afterwards,
    so its medium is no pool here, and its loads are only counted."""


class Sender:
    """Owner of the thread, the connection and the process if there is one. ``start`` returns at once.

    ``python`` is an interpreter that has kvbm-console, for a reporter that this process starts.
    """

    def __init__(
        self, recorder: TapRecorder, flattener: Flattener, settings: TapSettings, *, python: str = ""
    ) -> None:
        self.recorder = recorder
        self.flattener = flattener
        self.settings = msgspec.structs.replace(settings, version=__version__)
        self.python = python or sys.executable
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._received = bytearray()
        self._cost_sent_s = self._measured_s = 0.0
        self._measured: list[Any] = []
        self._wait_s = RESTART_FIRST_S
        self._told = False
        self._refused = ""
        """The last sentence by which a daemon refused this tap."""
        target = settings.target or default_target()
        self._path = "" if settings.serve or not target.startswith("unix:") else tap_path(target)
        """The daemon's socket for taps; empty if this process starts the reporter."""
        self._thread = threading.Thread(target=self._run, name="kvbm-tap", daemon=True)

    def start(self) -> None:
        """Start the thread, when the engine's connector is there."""
        watch = self.recorder.watch
        if watch is not None:
            self.settings = msgspec.structs.replace(self.settings, tiers=watch.holds_loads)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, after ``recorder.ending``."""
        self._thread.join(timeout_s)

    # --- the thread ---

    def _run(self) -> None:
        while not self.recorder.ending:
            began = time.monotonic()
            with contextlib.suppress(Exception):
                self._begin()
                self._exchange()
            self._end()
            if time.monotonic() - began > RESTART_MOST_S:
                self._wait_s = RESTART_FIRST_S
            until = time.monotonic() + (LOOK_AGAIN_S if self._path else self._wait_s)
            while time.monotonic() < until and not self.recorder.ending:
                if self.recorder.keeps:
                    while drain(self.recorder, self.flattener, BURST):
                        time.sleep(0)  # nobody reads them, but the flattener follows the cache
                time.sleep(0.05)
            self._wait_s = min(2 * self._wait_s, RESTART_MOST_S)
            self.restarts += 1

    def _begin(self) -> None:
        mine = self._connected() if self._path else self._started()
        mine.setblocking(False)
        self._socket = mine

    def _connected(self) -> socket.socket:
        """A connection to the daemon's socket for taps. Raises ``OSError``; the first time a warning says so."""
        mine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mine.connect(self._path)
        except OSError as error:
            mine.close()
            if not self._told:
                self._told = True
                _log.warning("no daemon at %s yet (%s); the tap looks again every second", self._path, error.strerror)
            raise
        self._told = False
        self._pack(self.settings)
        return mine

    def _started(self) -> socket.socket:
        """A connection to a reporter that this process starts."""
        mine, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [self.python, "-P", "-m", "kvbm_console.reporter", str(theirs.fileno()),
                 msgspec.json.encode(self.settings).decode()],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        return mine

    def _end(self) -> None:
        self.recorder.off()
        self._unsent.clear()
        self._received.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.process is not None:
            try:
                self.process.wait(timeout=END_S)  # it ends when its socket does, unless a frozen daemon keeps it
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def _exchange(self) -> None:
        assert self._socket is not None
        recorder = self.recorder
        while not recorder.ending or recorder.queue or self._unsent:
            if len(self._unsent) < UNSENT_MAX:
                if messages := drain(recorder, self.flattener, BURST):
                    self._pack(messages)
                if time.monotonic() - self._cost_sent_s >= COST_EVERY_S:
                    self._cost_sent_s = time.monotonic()
                    self._pack([self._cost()])
                    self._measure()
            busy = bool(recorder.queue) and len(self._unsent) < UNSENT_MAX  # without room the queue has to wait
            wanted = [self._socket] if self._unsent else []
            readable, writable, _ = select.select([self._socket], wanted, [], 0.0 if busy else PAUSE_S)
            if writable:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
            if readable and not self._receive():
                return
            if recorder.ending and not wanted and not readable and not recorder.queue:
                return

    def _cost(self) -> list[Any]:
        recorder = self.recorder
        return ["cost", recorder.calls, recorder.dropped, recorder.call_ns, recorder.steps, recorder.step_ns,
                recorder.errors, *recorder.checks]

    def _measure(self) -> None:
        """Report the calls and figures of the connector if they have changed."""
        watch = self.recorder.watch
        if watch is None or not self.recorder.on or time.monotonic() - self._measured_s < MEASURE_EVERY_S:
            return
        message = watch.measured()
        if message[2:] != self._measured:
            self._measured, self._measured_s = message[2:], time.monotonic()
            self._pack([message])

    def _pack(self, frame: Any) -> None:
        data = msgspec.msgpack.encode(frame)
        self._unsent += LENGTH.pack(len(data))
        self._unsent += data

    def _receive(self) -> bool:
        """Take the process's answers; False when it has ended."""
        assert self._socket is not None
        data = self._socket.recv(65_536)
        if not data:
            return False
        self._received += data
        for frame in take_frames(self._received, ANSWER_MAX):
            self._obey(msgspec.msgpack.decode(frame, type=TapAnswer))
        return True

    def _obey(self, answer: "TapAnswer") -> None:
        recorder = self.recorder
        if answer.refused:
            if answer.refused != self._refused:
                self._refused = answer.refused
                _log.error("kvbm-console: %s", answer.refused)
        elif answer.listens is True:
            recorder.listen()
        elif answer.listens is False:
            recorder.off()
        elif answer.full:
            recorder.want_full = True
        else:
            now = time.monotonic_ns()
            recorder.obey({name: now + left for name, left in answer.held.items()}, answer.globs, answer.go)
            recorder.obey_copies(
                {number: now + left for number, left in answer.copies_held.items()}, answer.copies, answer.copies_go
            )


def take_frames(buffer: bytearray, most: int) -> list[bytearray]:
    """Take all whole frames out of the front of the buffer. Raises ``ValueError`` for one of more than ``most`` bytes.

    >>> buffer = bytearray(b"\\0\\0\\0\\2ab\\0\\0\\0\\1")
    >>> take_frames(buffer, 8), buffer
    ([bytearray(b'ab')], bytearray(b'\\x00\\x00\\x00\\x01'))
    """
    frames, at = list[bytearray](), 0
    while len(buffer) >= at + LENGTH.size:
        (size,) = LENGTH.unpack_from(buffer, at)
        if size > most:
            raise ValueError(f"a frame of {size} bytes")
        end = at + LENGTH.size + size
        if len(buffer) < end:
            break
        frames.append(buffer[at + LENGTH.size : end])
        at = end
    del buffer[:at]
    return frames


class TapVersion(msgspec.Struct, frozen=True):
    """The part of the settings that every version has sent; ``version`` is empty before versions were sent."""

    block_tokens: int
    version: str = ""


def skew_of(settings: TapSettings | TapVersion) -> str:
    """One sentence about a tap of another version than this program; empty for the same version.

    >>> skew_of(TapVersion(16, __version__)), skew_of(TapVersion(16, "9.0"))[:43]
    ('', 'the tap in the engine is kvbm-console-tap 9')
    """
    if settings.version == __version__:
        return ""
    theirs = settings.version or "of a version that is not told"
    return (
        f"the tap in the engine is kvbm-console-tap {theirs[:32]}, and the daemon is kvbm-console {__version__}. "
        f"Install kvbm-console-tap {__version__} in the engine's environment and restart the engine, or run the tap's "
        "version of the daemon"
    )


class TapAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the process to the engine: a daemon comes or goes, a full report is wanted, or requests are held."""

    listens: bool | None = None
    refused: str = ""
    """One sentence if the daemon does not take this tap; then the connection ends."""
    full: bool = False
    held: dict[str, int] = {}
    """Held requests, to the nanoseconds after which they go on even without a further answer."""
    globs: list[str] = []
    go: list[str] = []
    """Requests that have their verdict and may go on."""
    copies: list[str] = []
    """Globs of requests whose loads from a lower tier may be held."""
    copies_held: dict[int, int] = {}
    """Held loads by their number, like ``held``."""
    copies_go: list[int] = []
    """Loads that have their verdict and may go on."""
