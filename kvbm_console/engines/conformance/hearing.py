"""Hears a publisher over ZeroMQ for the checker: its history, its live messages, and at the end its replay once more.

The history comes from a replay before the first live message, so that the blocks from before are known. Messages that
are missing on the live stream are requested. ``compare`` requests the heard messages again and judges the replies.

Law of this file: the checker gets each message once, in the order in which the publisher numbered them. A message that
the publisher itself repeats is no repetition of ours and is handed over, too.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Final

import zmq
import zmq.asyncio

from kvbm_console.engines.conformance.rules import RuleChecker, digest_of
from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.engines.kv_events.zmq_source import (
    END_MARKER,
    SEQ_BYTES,
    TOPICS_MAX,
    Replay,
    fetch_replay,
    source_of,
    subscribe,
)

SOCKET: Final = "tcp://"
"""Addresses of publishers; other sources are servers that answer."""


class Hearing:
    """An address with the checkers of its publishers; ``open``, then ``run`` until cancelled, then ``compare``.

    An address that we connect to has one publisher. If we bind, each topic is a publisher.
    """

    def __init__(self, publisher: Publisher, new_checker: Callable[[], RuleChecker]) -> None:
        self.publisher = publisher
        self.checkers: dict[str, RuleChecker] = {}
        """Label of a publisher to its checker."""
        self.refetched = 0
        """Messages that were missing on the live stream and came by a replay."""
        self._new_checker = new_checker
        self._replayed: dict[int, int] = {}
        """Digests of replayed messages, because the live stream may bring the newest of them, too."""
        self._context: Any = None
        self._sub: Any = None
        if not publisher.bind:
            self.checkers[publisher.label] = new_checker()

    def open(self, context: zmq.asyncio.Context) -> None:
        """Connect or bind; messages wait in the socket from now on. Raises ``UsageError``."""
        if not self.publisher.endpoint.startswith(SOCKET):
            return
        self._context, self._sub = context, context.socket(zmq.SUB)
        subscribe(self._sub, self.publisher)

    async def run(self) -> None:
        """Hear the publishers until cancelled."""
        if not self.publisher.endpoint.startswith(SOCKET):
            judge = self.checkers[self.publisher.label]
            await source_of(self.publisher, lambda _: _Pulled(judge)).run()  # type: ignore[arg-type,return-value]
        if self.publisher.replay is not None:
            await self._history(self.checkers[self.publisher.label], 0, None)
        while True:
            parts = await self._sub.recv_multipart()
            checker = self._checker(parts[0])
            if checker is None:
                continue
            if len(parts) != 3 or len(parts[1]) != SEQ_BYTES:
                sizes = ", ".join(str(len(part)) for part in parts)
                checker.bad_message(f"a message has frames of {sizes} bytes; topic, 8 and a batch were expected")
                continue
            await self._take(checker, int.from_bytes(parts[1], "big"), parts[2])

    def _checker(self, topic: bytes) -> RuleChecker | None:
        """The checker of a message; None when there are too many publishers."""
        label = self.publisher.label
        if self.publisher.bind:
            label = f"{label} {topic.decode(errors='replace')}"
            if label not in self.checkers:
                if len(self.checkers) >= TOPICS_MAX:
                    return None
                self.checkers[label] = self._new_checker()
        return self.checkers[label]

    async def _take(self, checker: RuleChecker, seq: int, payload: bytes) -> None:
        digest, want = digest_of(payload), checker.next_seq
        if self._replayed.pop(seq, None) == digest:
            return
        if self.publisher.replay is not None and want is not None and want != seq:
            before = checker.messages
            if seq > want:
                await self._fill(checker, want, seq)
            elif checker.heard().get(seq) != digest:
                await self._history(checker, 0, seq)
            self.refetched += checker.messages - before
        checker.accept(seq, payload)

    async def _fill(self, checker: RuleChecker, want: int, seq: int) -> None:
        """Hand over the missing messages. The message before them shows if the publisher began again meanwhile."""
        address = self.publisher.replay
        assert address is not None
        replay = _messages(await fetch_replay(self._context, address, max(0, want - 1)))
        if want and replay and checker.heard().get(int.from_bytes(replay[0][-2], "big")) != digest_of(replay[0][-1]):
            checker.restart()
            await self._history(checker, 0, seq)
            return
        self._hand_over(checker, replay, want, seq)

    async def _history(self, checker: RuleChecker, start: int, end: int | None) -> None:
        """Hand over the messages from ``start`` to before ``end`` that the publisher still has."""
        assert self.publisher.replay is not None
        replay = await fetch_replay(self._context, self.publisher.replay, start)
        self._hand_over(checker, _messages(replay), start, end)

    def _hand_over(self, checker: RuleChecker, replay: list[list[bytes]], start: int, end: int | None) -> None:
        for parts in replay:
            seq, payload = int.from_bytes(parts[-2], "big"), parts[-1]
            if seq >= start and (end is None or seq < end):
                checker.accept(seq, payload)
                self._replayed[seq] = digest_of(payload)

    async def compare(self) -> None:
        """Request the heard messages once more, and judge the replies."""
        if self.publisher.replay is None:
            return
        checker = self.checkers[self.publisher.label]
        heard, judge = checker.heard(), checker.judge
        if not heard:
            return
        start, newest = next(iter(heard)), next(reversed(heard))
        replay = await fetch_replay(self._context, self.publisher.replay, start)
        judge("replay-end", replay.complete, f"the replay from {start} on has {len(replay.replies)} replies and no end")
        last: int | None = None
        for parts in _messages(replay):
            seq = int.from_bytes(parts[-2], "big")
            framed = len(parts) == 4 and not parts[0] and parts[1].startswith(self.publisher.topic.encode())
            judge("replay-topic", framed, f"the reply with message {seq} has {len(parts)} frames; an empty frame, "
                                          "topic, number and payload were expected")
            if seq < start or (last is not None and seq != last + 1):
                judge("replay", False, f"a replay from {start} on brings message {seq} "
                                       f"{'first' if last is None else f'after message {last}'}")
            elif seq in heard:
                judge("replay", heard[seq] == digest_of(parts[-1]), f"message {seq} has other bytes in the replay")
            last = seq
        judge("replay", last is not None and last >= newest,
              f"a replay from {start} on ends with message {last}, and message {newest} was heard")

    def close(self) -> None:
        """Close the socket; may be called again."""
        if self._sub is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._sub.close(linger=0)


class _Pulled:
    """Hands the answers of a server that is asked for its events to the checker; the events' numbers count."""

    def __init__(self, checker: RuleChecker) -> None:
        self._checker = checker

    @property
    def next_seq(self) -> int:
        return self._checker.next_seq or 0

    def accept(self, seq: int, payload: bytes, *, replayed: bool = False) -> None:
        self._checker.accept(seq, payload)

    def lose(self, first: int, last: int) -> None:
        self._checker.lose(last - first + 1, f"{last - first + 1} events before event {first} never came")

    def doubt(self) -> None:
        self._checker.forget()

    def gone(self) -> None:
        return

    def restart(self) -> None:
        self._checker.restart()


def _messages(replay: Replay) -> list[list[bytes]]:
    """The replies that are messages."""
    replies = replay.replies[: -1 if replay.complete else None]
    return [parts for parts in replies if len(parts) > 1 and len(parts[-2]) == SEQ_BYTES and parts[-2] != END_MARKER]
