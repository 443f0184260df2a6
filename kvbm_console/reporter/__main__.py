"""The process between a tap and a daemon: messages of the tap go to the daemon, and the daemon's holds go back.

A process that the engine starts looks for the daemon again and again, and tells the tap when the daemon comes and goes.
With ``serve`` it starts a daemon if none listens. A process that the daemon starts (``--once``) ends with the daemon.
Both end with the engine.

Law of this file: it reads on only after it has delivered, so a slow daemon fills the tap's queue and nothing else.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.addresses import default_target
from kvbm_console.client import Access, Client
from kvbm_console.client.feeder import FeedClient
from kvbm_console.core import stimuli as st
from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError, Refused
from kvbm_console.core.ids import WaitPoint
from kvbm_console.core.instructions import MatchAnswer
from kvbm_console.reporter.translator import Call, Translator
from kvbm_console.tap.sender import LENGTH, LOOK_AGAIN_S, TapAnswer, TapSettings, skew_of, take_frames

FRAME_MAX: Final = 64 * 2**20
"""One burst of the tap: the hashes of a few prompts of a million tokens."""
READ_BYTES: Final = 2**20
BATCH_CALLS: Final = 512
SLACK_NS: Final = 1_000_000_000
"""Time that a hold may last beyond its limit on the engine's side when the daemon freezes."""


class Reporter:
    """One engine and its daemon."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, settings: TapSettings, *, once: bool = False
    ) -> None:
        self._reader, self._writer = reader, writer
        self._received = bytearray()
        """The beginning of the next frame."""
        self._once = once
        self._settings = settings
        self._translator = Translator(settings)
        self._waiting: set[str] = set()
        """Requests that the tap has asked for and that are held."""
        self._copies: dict[int, str] = {}
        """Loads that the tap has asked for and that are held, by number, with their requests."""
        self._served: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[list[Any] | None] | None = None
        self.ended = False
        """True if the engine has ended."""
        self.sessions = 0

    async def run(self) -> None:
        """Report to daemons until the engine ends. A tap of another version is refused."""
        if skew := skew_of(self._settings):
            await self._send(TapAnswer(refused=skew))
            return
        while not self.ended:
            try:
                await self._session()
            except KvbmConsoleError:
                await self._send(TapAnswer(listens=False))
                if self._once:
                    return
                self._serve()
                await self._discard(LOOK_AGAIN_S)

    async def _send(self, answer: TapAnswer) -> None:
        data = msgspec.msgpack.encode(answer)
        with contextlib.suppress(ConnectionError):
            self._writer.write(LENGTH.pack(len(data)) + data)
            await self._writer.drain()

    async def _read(self) -> list[Any] | None:
        """The messages of all frames that have arrived, at least of one; None at the tap's end.

        One answer of a daemon far away takes longer than the engine's next steps. With a frame for each answer the
        daemon would be shown an ever older engine.
        """
        messages: list[Any] = []
        try:
            while not messages:
                data = await self._reader.read(READ_BYTES)
                if not data:
                    return None
                self._received += data
                for frame in take_frames(self._received, FRAME_MAX):
                    messages += msgspec.msgpack.decode(frame, type=list[list[Any]])
        except (ConnectionError, ValueError):  # a frame is no MessagePack, or too large
            return None
        return messages

    def _reading(self) -> "asyncio.Task[list[Any] | None]":
        # The read is never cancelled, because the messages that it has would be lost.
        if self._task is None:
            self._task = asyncio.create_task(self._read(), name="kvbm-tap-read")
        return self._task

    def _take_read(self) -> list[Any] | None:
        assert self._task is not None
        messages = self._task.result()
        self._task = None
        self.ended = messages is None
        return messages

    async def _discard(self, seconds: float) -> None:
        """Read and drop the tap's messages for this long, because no daemon listens."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not self.ended and (left := until - loop.time()) > 0:
            done, _ = await asyncio.wait((self._reading(),), timeout=left)
            if done:
                self._take_read()

    # --- a daemon ---

    def _serve(self) -> None:
        """Start our own daemon, once, if the settings ask for it. The daemon ends with this process."""
        if not self._settings.serve or (self._served is not None and self._served.poll() is None):
            return
        self._served = subprocess.Popen(
            [sys.executable, "-P", "-c", "from kvbm_console.cli.main import main; main()", "serve",
             "--listen", self._settings.target or default_target(),
             "--block-tokens", str(self._settings.block_tokens), "--g2-blocks", "0", "--g3-blocks", "0"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """Stop our own daemon, because the engine ended."""
        if self._served is not None:
            self._served.terminate()
            self._served.wait()

    async def _session(self) -> None:
        settings = self._settings
        access = Access.load(
            Path(settings.tls_ca) if settings.tls_ca else None,
            Path(settings.token_file) if settings.token_file else None,
        )
        async with (
            Client(settings.target or default_target(), access=access) as client,
            client.feed(settings.name, points=_points(settings)) as feed,
        ):
            self.sessions += 1
            self._waiting.clear()
            self._copies.clear()
            self._translator.begin()
            await self._submit(feed)
            await self._send(TapAnswer(listens=True))
            watching = asyncio.ensure_future(self._watch(feed))
            try:
                while (messages := await self._read_while(feed)) is not None:
                    for message in messages:
                        self._translator.take(message)
                        if len(self._translator.calls) >= BATCH_CALLS:
                            await self._submit(feed)
                    await self._submit(feed)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _read_while(self, feed: FeedClient) -> list[Any] | None:
        """The next messages; a feed that ends meanwhile raises ``ConnectionLost``."""
        reading = self._reading()
        ended = asyncio.ensure_future(_end_of(feed))
        try:
            await asyncio.wait((reading, ended), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ConnectionLost(f"{self._settings.target} ended the feed")
            return self._take_read()
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    async def _submit(self, feed: FeedClient) -> None:
        """Deliver the translated calls; verdicts go back at once."""
        translator = self._translator
        go: list[str] = []
        copies_go: list[int] = []
        waiting = len(self._copies)
        # A declaration is submitted alone, because later calls need the pool's index from its answer.
        for _, group in groupby(enumerate(translator.take_calls()), lambda row: _declares(row[1]) and row[0] + 1):
            part = [call for _, call in group]
            results = await feed.submit_all([translator.placed(call) for call in part])
            for call, result in zip(part, results, strict=True):
                self._answered(call, result, go, copies_go)
        if translator.cost is not None:
            cost, translator.cost = translator.cost, None
            differing = None if translator.audited is None else translator.differing
            await feed.tell_cost(*cost, audited=translator.audited, differing=differing)
        if translator.wants_all:
            translator.wants_all = False
            await self._send(TapAnswer(full=True))
        if go or copies_go or len(self._copies) > waiting:  # the hold itself may have been told before
            await self._tell(feed, go, copies_go)

    def _answered(self, call: Call, result: Any, go: list[str], copies_go: list[int]) -> None:
        self._translator.answered(call, result)
        if isinstance(result, Refused):
            if isinstance(call.stimulus, st.PoolDeclared):
                raise result
            self._translator.wants_all = True
        held = isinstance(result, MatchAnswer) and result.tokens is None
        if call.copy is not None and held:
            self._copies[call.copy] = call.asks
        elif call.copy is not None:
            copies_go.append(call.copy)
        elif call.asks and held:
            self._waiting.add(call.asks)
        elif call.asks:
            go.append(call.asks)

    async def _watch(self, feed: FeedClient) -> None:
        """Tell the tap each change of holds or breakpoints."""
        while feed.alive:
            changed = asyncio.ensure_future(feed.changed())
            await self._tell(feed, [], [])
            await changed

    async def _tell(self, feed: FeedClient, go: list[str], copies_go: list[int]) -> None:
        held = {name: hold.max_hold_ns + SLACK_NS for name, hold in feed.held.items()}
        released = [name for name in self._waiting if name not in held]
        self._waiting.difference_update(released)
        begin = [number for number, name in self._copies.items() if name not in held]
        for number in begin:
            del self._copies[number]
        await self._send(TapAnswer(
            held=held, globs=list(feed.lookups), go=[*go, *released], copies=list(feed.copies),
            copies_held={number: held[name] for number, name in self._copies.items()}, copies_go=[*copies_go, *begin],
        ))


def _points(settings: TapSettings) -> tuple[WaitPoint, ...]:
    """The places at which this engine can let a request stand still."""
    return (WaitPoint.LOOKUP, WaitPoint.DISPATCH) if settings.tiers else (WaitPoint.LOOKUP,)


async def _end_of(feed: FeedClient) -> None:
    while feed.alive:
        await feed.changed()


def _declares(call: Call) -> bool:
    return isinstance(call.stimulus, st.PoolDeclared)


async def main(number: int, settings: TapSettings, *, once: bool) -> None:
    """Serve the tap at the other end of this socket until it ends; with ``once`` until the daemon ends."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=number), limit=2**20)
    reporter = Reporter(reader, writer, settings, once=once)
    try:
        await reporter.run()
    finally:
        reporter.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=TapSettings), once="--once" in sys.argv))
