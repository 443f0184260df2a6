"""Further hosts of a daemon, each a leader in a process of its own that is fed the same stimuli.

A host compares: it gets every stimulus with the digest of host 0's facts after it, and from time to time that of host
0's memory. The daemon does not wait for it, unless it falls far behind.

Law of this file: the configurations are compared before the first stimulus. A difference is reported with host,
stimulus, both digests and the places that differ, and it ends the run.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from kvbm_console.core.columns import pack_hashes, unpack_hashes
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.leader import Leader
from kvbm_console.dispatch import MEMORY_EVERY, HostsDiverged, differences, facts_tree
from kvbm_console.wire.batches import unpack_stimuli

HOSTS_MAX: Final = 16
HOST: Final = "from kvbm_console.hosts import main; main()"
START_S: Final = 30.0
END_S: Final = 1.0
"""Time for hosts to compare the last stimuli of a daemon that was told to end."""
OUTBOX_BYTES_MAX: Final = 8 * 2**20
"""A host that is this far behind is waited for."""
BEHIND_S: Final = 10.0
"""And given up if it gets no further for so long."""
AUDIT_EVERY: Final = 50
_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 2**18


class HostSetup(msgspec.Struct, array_like=True, frozen=True):
    """The first message to a host."""

    config: LeaderConfig
    check: bool


class HostSteps(msgspec.Struct, array_like=True, frozen=True):
    """Stimuli as they are recorded, the digest of host 0's facts after each, and that of its memory after the last."""

    stimuli: bytes
    digests: bytes
    memory: int | None


class HostAnswer(msgspec.Struct, array_like=True, frozen=True):
    """``n`` stimuli were handled; ``part`` is empty while all was equal, else ``facts``, ``memory`` or ``error``."""

    n: int
    part: str = ""
    digests: tuple[int, int] = (0, 0)
    """Host 0's, and that of the configuration or of the part that differs."""
    tree: Any = None
    """The host's own facts or memory as plain values."""


class _Host:
    def __init__(self, number: int, process: "subprocess.Popen[bytes]", channel: socket.socket) -> None:
        self.number = number
        self.process = process
        self.channel = channel
        self.outbox: deque[memoryview] = deque()
        self.unsent = 0
        self.received = bytearray()
        self.n = 0
        """Stimuli that it has handled."""
        self.writing = False
        self.alive = True

    @property
    def name(self) -> str:
        return f"host {self.number}"


class HostProcesses:
    """Hosts 1 and up. ``decided`` and ``follow`` are called by host 0's service.

    ``rerun(n)`` gives host 0's leader as it was after stimulus ``n``, or None; ``ended(name, why)`` is called when a
    host's process ends, and nothing is compared with it from then on.
    """

    def __init__(self, config: LeaderConfig, hosts: int, *, check: bool = False) -> None:
        if not 1 <= hosts <= HOSTS_MAX:
            raise UsageError(f"--hosts must be from 1 to {HOSTS_MAX}, got {hosts}")
        self.rerun: Callable[[int], Leader | None] = lambda n: None
        self.ended: Callable[[str, str], None] = lambda name, why: None
        self.diverged: HostsDiverged | None = None
        """The first difference that was found."""
        self._answered = asyncio.Event()
        self.found = asyncio.Event()
        """Set with ``diverged``."""
        self._config = config
        self._encode = msgspec.msgpack.Encoder().encode
        self._digests: list[int] = []
        self._sent = 0
        self._memory_at = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hosts = [self._start(number, check) for number in range(1, hosts)]
        try:
            self._compare_configurations()
        except BaseException:
            self.close()
            raise

    # --- life ---

    def _start(self, number: int, check: bool) -> _Host:
        mine, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", HOST, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )
        mine.setblocking(False)
        host = _Host(number, process, mine)
        self._put(host, self._encode(HostSetup(self._config, check)))
        return host

    def _compare_configurations(self) -> None:
        mine, until = self._config.digest(), time.monotonic() + START_S
        for host in self._hosts:
            answers: list[HostAnswer] = []
            while not answers:
                left = until - time.monotonic()
                if left <= 0 or not host.alive:
                    raise UsageError(f"{host.name} must say its configuration within {START_S:.0f} s")
                self._wait(host, left)
                answers = self._answers(host)
            if answers[0].digests[1] != mine:
                raise UsageError(
                    f"{host.name} must have the configuration of host 0, got digest {answers[0].digests[1]:016x} "
                    f"instead of {mine:016x}"
                )

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this loop take answers and send what waits."""
        self._loop = loop
        for host in self._hosts:
            loop.add_reader(host.channel, self._receive, host)

    async def caught_up(self, hurried: asyncio.Event) -> None:
        """Return when every host has compared what it was sent, or has differed. One that has not is told of as ended:
        with ``hurried`` after ``END_S``, else when none has got further for ``BEHIND_S``."""
        began = further = time.monotonic()
        while self.diverged is None and (behind := [one for one in self._hosts if one.alive and one.n < self._sent]):
            now = time.monotonic()
            if now > began + END_S if hurried.is_set() else now > further + BEHIND_S:
                for host in behind:
                    self.ended(host.name, f"it has compared {host.n} of {self._sent} stimuli")
                return
            self._answered.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._answered.wait()
                    further = time.monotonic()

    def close(self) -> None:
        """End all hosts."""
        for host in self._hosts if hasattr(self, "_hosts") else ():
            self._leave(host)
            if host.process.poll() is None:
                host.process.kill()
            host.process.wait()

    @property
    def names(self) -> list[str]:
        """``host 1`` and so on."""
        return [host.name for host in self._hosts]

    @property
    def processes(self) -> list[int]:
        """The processes of the hosts."""
        return [host.process.pid for host in self._hosts]

    # --- host 0's side ---

    def decided(self, digest: int) -> None:
        """Host 0 has handled a stimulus; the digest of its facts after it."""
        self._digests.append(digest)

    @property
    def wants_memory(self) -> bool:
        """True if the digest of host 0's memory is wanted with the next flush."""
        return self._sent + len(self._digests) - self._memory_at >= MEMORY_EVERY

    def follow(self, stimuli: bytes, memory: int | None) -> None:
        """The stimuli since the last call, encoded as they are recorded."""
        steps = self._encode(HostSteps(stimuli, pack_hashes(self._digests), memory))
        self._sent += len(self._digests)
        if memory is not None:
            self._memory_at = self._sent
        self._digests.clear()
        for host in self._hosts:
            if host.alive:
                self._put(host, steps)
                self._let_catch_up(host)

    def _let_catch_up(self, host: _Host) -> None:
        """Wait for a host that is too far behind. Its answers are taken meanwhile, or it could not go on."""
        until = time.monotonic() + BEHIND_S
        while host.alive and host.unsent > OUTBOX_BYTES_MAX:
            if time.monotonic() > until:
                self._leave(host)
                self.ended(host.name, f"it has taken no stimulus for {BEHIND_S:g} s")
                return
            self._wait(host, until - time.monotonic())
            self._receive(host)

    # --- sockets ---

    def _put(self, host: _Host, message: bytes) -> None:
        framed = _LENGTH.pack(len(message)) + message
        host.outbox.append(memoryview(framed))
        host.unsent += len(framed)
        self._send(host)

    def _send(self, host: _Host) -> None:
        try:
            while host.outbox:
                sent = host.channel.send(host.outbox[0])
                host.unsent -= sent
                if sent == len(host.outbox[0]):
                    host.outbox.popleft()
                else:
                    host.outbox[0] = host.outbox[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # it has ended; its last answer may still have to be read
            host.outbox.clear()
            host.unsent = 0
        waits = bool(host.outbox) and host.alive
        if self._loop is not None and waits != host.writing:
            host.writing = waits
            if waits:
                self._loop.add_writer(host.channel, self._send, host)
            else:
                self._loop.remove_writer(host.channel)

    def _wait(self, host: _Host, seconds: float) -> None:
        """Until the host has sent, or takes more."""
        poll = select.poll()
        poll.register(host.channel, select.POLLIN | (select.POLLOUT if host.outbox else 0))
        poll.poll(max(0.0, seconds) * 1000)
        if host.outbox:
            self._send(host)

    def _answers(self, host: _Host) -> list[HostAnswer]:
        """All answers that have come."""
        try:
            while data := host.channel.recv(_READ_BYTES):
                host.received += data
            self._gone(host)
        except BlockingIOError:
            pass
        except OSError:
            self._gone(host)
        answers = []
        while len(host.received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(host.received)
            if len(host.received) < _LENGTH.size + length:
                break
            answers.append(msgspec.msgpack.decode(
                bytes(host.received[_LENGTH.size : _LENGTH.size + length]), type=HostAnswer
            ))
            del host.received[: _LENGTH.size + length]
        return answers

    def _receive(self, host: _Host) -> None:
        if not host.alive:
            return
        for answer in self._answers(host):
            host.n = answer.n
            self._answered.set()
            if answer.part == "error":
                self.ended(host.name, str(answer.tree))
                self._leave(host)
            elif answer.part and self.diverged is None:
                self._differ(host, answer)

    def _differ(self, host: _Host, answer: HostAnswer) -> None:
        n = answer.n - 1
        leader = self.rerun(n)
        if leader is None:
            found = ["host 0 has gone on, and its past is not kept"]
        elif answer.part == "facts":
            found = differences(_plain(facts_tree(leader.state)), answer.tree)
        else:
            found = differences(msgspec.msgpack.decode(leader.export()), answer.tree)
        self.diverged = HostsDiverged(host.number, n, answer.part, answer.digests, found)
        self.found.set()

    def _gone(self, host: _Host) -> None:
        if host.alive:
            self._leave(host)
            status = host.process.wait()
            self.ended(host.name, f"killed by {signal.Signals(-status).name}" if status < 0
                       else f"ended with status {status}")

    def _leave(self, host: _Host) -> None:
        if host.alive:
            host.alive = False
            host.outbox.clear()
            host.unsent = 0
            if self._loop is not None:
                self._loop.remove_reader(host.channel)
                if host.writing:
                    self._loop.remove_writer(host.channel)
            host.channel.close()


# --- the process of a host ---


def main() -> None:
    """Be a host, on the descriptor that the command line names, until the daemon closes it."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            for answer in _compare(_messages(channel)):
                message = msgspec.msgpack.encode(answer)
                channel.sendall(_LENGTH.pack(len(message)) + message)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)  # the daemon has gone


def _messages(channel: socket.socket) -> Iterator[bytes]:
    with channel.makefile("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            yield file.read(*_LENGTH.unpack(head))


def _compare(messages: Iterator[bytes]) -> Iterator[HostAnswer]:
    """Handle the stimuli of all messages, and answer each; ends with the first difference."""
    setup = msgspec.msgpack.decode(next(messages), type=HostSetup)
    leader = Leader(setup.config, check=setup.check, audit_every=AUDIT_EVERY)
    yield HostAnswer(0, "", (0, setup.config.digest()))
    n = 0
    for message in messages:
        steps = msgspec.msgpack.decode(message, type=HostSteps)
        for stimulus, digest in zip(unpack_stimuli(steps.stimuli), unpack_hashes(steps.digests), strict=True):
            try:
                leader.handle(stimulus)
            except Exception as error:
                yield HostAnswer(stimulus.n, "error", (0, 0), f"{type(error).__name__}: {error}")
                return
            n = stimulus.n + 1
            mine = leader.digest()
            if mine != digest:
                yield HostAnswer(n, "facts", (digest, mine), _plain(facts_tree(leader.state)))
                return
        if steps.memory is not None and leader.memory_digest() != steps.memory:
            memory = msgspec.msgpack.decode(leader.export())
            yield HostAnswer(n, "memory", (steps.memory, leader.memory_digest()), memory)
            return
        yield HostAnswer(n)


def _plain(tree: Any) -> Any:
    """A tree as it is after its way through a message."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(tree), strict=False)
