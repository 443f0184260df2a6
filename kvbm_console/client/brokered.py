"""A fleet as its daemons tell it at a broker.

The last summary of every daemon comes when the view connects, then each new one as it is published. A message is
decoded when the fleet is looked at, and its digest when the fleet is summed, so one that is replaced before costs next
to nothing. Ages count from the broker's
clock at the beginning and from our own monotonic clock afterwards, so clocks that differ by minutes do no harm.

Law of this file: a daemon that has ever told a summary has a row until it has ended in order.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec

from kvbm_console.analysis.digest import Digest
from kvbm_console.analysis.fleet import OTHER_VERSION, DaemonRow, Digested, Located
from kvbm_console.client.broker import (
    ANSWER_S,
    SUMMARIES,
    Broker,
    BrokerAddress,
    FleetAnswer,
    FleetQuestion,
    PublishedSummary,
    named,
)
from kvbm_console.client.fleet import FleetView
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.errors import ConnectionLost, Refused
from kvbm_console.extras import need

WATCH_S: Final = 20.0
"""Daemons watch for a minute; a question may get lost."""
OVERDUE_S: Final = 3.0
"""A summary may be late: a busy daemon is not gone."""
BOTH_S: Final = 60.0
"""Two daemons that publish under one name are noticed within this time."""


class BrokeredFleet(FleetView):
    """The daemons of a cluster at a broker, or the one that the address names.

    Entering raises ``ConnectionLost``, ``Refused`` or ``UsageError``.
    """

    def __init__(self, address: BrokerAddress) -> None:
        self.rows = []
        self._address = address
        self._broker: Broker | None = None
        self._of: dict[str, DaemonRow] = {}
        self._fresh: dict[str, tuple[bytes, float]] = {}
        """Subject to its newest message and when it was heard, until that is decoded."""
        self._heard_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._others: dict[str, tuple[str, float]] = {}
        """Name to the incarnation that published under it before the present one, and when it last did."""
        self._asked_s = 0.0
        self._complete = asyncio.Event()
        """Set when the summaries of the beginning have come."""

    async def __aenter__(self) -> "BrokeredFleet":
        await self._connect()
        self._catch_up()
        return self

    async def __aexit__(self, *_: object) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.__aexit__(None, None, None)

    def stream_of(self, row: DaemonRow) -> BrokerAddress | None:
        """As in every view."""
        return None if row.keyframe is None else msgspec.structs.replace(self._address, daemon=row.target)

    async def refresh(self) -> None:
        """Take the summaries that have come, and have the next ones tell problems and digests.

        A broker that is gone makes every daemon gone, and is tried again.
        """
        try:
            broker = await self._connected()
            if time.monotonic() - self._asked_s > WATCH_S:
                await self._ask(broker, FleetQuestion(watch=True))
                self._asked_s = time.monotonic()
        except (ConnectionLost, Refused) as error:
            for row in self.rows:
                row.error = str(error)
        self._catch_up()

    def _catch_up(self) -> None:
        now_s = time.monotonic()
        fresh, self._fresh = self._fresh, {}
        for subject, (data, heard_s) in fresh.items():
            self._take(named(subject), data, heard_s)
        for name, row in self._of.items():
            row.silent_s = now_s - self._heard_s[name]
            if self._broker is not None and row.silent_s > self._due_s[name] + OVERDUE_S:
                row.error = "its summary is overdue"
        self.rows = list(self._of.values())

    async def find(self, hashes: Sequence[int], request: str = "") -> dict[str, list[Located]]:
        """As in every view; all daemons together have ``ANSWER_S``."""
        living = {row.target for row in self.rows if not row.error}
        found: dict[str, list[Located]] = {}
        all_answered = asyncio.Event()

        async def take(message: Any) -> None:
            try:
                answer = msgspec.msgpack.decode(message.data, type=FleetAnswer)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return
            if len(answer.found) == len(hashes) + bool(request):
                found[answer.name] = answer.found
                living.discard(answer.name)
            if not living:
                all_answered.set()

        if not living:
            return found
        try:
            broker = await self._connected()
            inbox = broker.client.new_inbox()
            with broker.asking("hear answers"):
                subscription = await broker.client.subscribe(inbox, cb=take)
            await self._ask(broker, FleetQuestion(list(hashes), request), inbox)
            try:
                await asyncio.wait_for(all_answered.wait(), ANSWER_S)
            finally:
                with broker.asking("hear answers"):
                    await subscription.unsubscribe()
        except TimeoutError:
            for name in living:
                self._of[name].error = f"it did not answer in {ANSWER_S:.0f} s"
        except (ConnectionLost, Refused) as error:
            for row in self.rows:
                row.error = str(error)
        return found

    async def _ask(self, broker: Broker, question: FleetQuestion, inbox: str = "") -> None:
        with broker.asking("ask"):
            await broker.client.publish(self._address.questions, msgspec.msgpack.encode(question), inbox)

    async def _connected(self) -> Broker:
        """The connection, a new one if the last has broken or brings no summary any more."""
        broker = self._broker
        silent = bool(self.rows) and all(row.error for row in self.rows)
        if broker is None or broker.lost.is_set() or silent:
            await self.__aexit__()
            broker = await self._connect()
        return broker

    async def _connect(self) -> Broker:
        broker = Broker(self._address, "fleet")
        await broker.__aenter__()
        self._broker, self._asked_s = broker, 0.0
        self._complete.clear()
        api: Any = need("nats.js.api", "nats", "nats-py")
        inbox, heard = broker.client.new_inbox(), _Heard(self._fresh_at, self._complete)
        try:
            with broker.asking("read summaries"):
                await broker.client.subscribe(inbox, cb=heard.take)
                consumer = await broker.jetstream.add_consumer(SUMMARIES, api.ConsumerConfig(
                    deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT, ack_policy=api.AckPolicy.NONE,
                    deliver_subject=inbox, filter_subject=self._address.subject(self._address.daemon or "*", "sum"),
                ))
                heard.begin(consumer.created, consumer.num_pending or 0)
                async with asyncio.timeout(ANSWER_S):
                    await self._complete.wait()
        except BaseException:
            await self.__aexit__()
            raise
        return broker

    def _fresh_at(self, subject: str, data: bytes, heard_s: float) -> None:
        self._fresh[subject] = data, heard_s

    def _take(self, name: str, data: bytes, heard_s: float) -> None:
        if not data:  # it has ended in order
            self._of.pop(name, None)
            return
        row = self._of.setdefault(name, DaemonRow(name))
        before = row.summary
        self._heard_s[name], self._due_s[name] = heard_s, math.inf
        try:
            told = msgspec.msgpack.decode(data, type=PublishedSummary)
            mine = told.summary.incarnation
            if before is None or before.incarnation != mine:  # a version lasts as long as its incarnation
                told.summary.digest = _digest(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            row.error = OTHER_VERSION
            return
        row.summary, row.address, row.host, row.error = told.summary, told.address, told.host, ""
        row.keyframe, row.decode = told.keyframe, partial(_digest, data)
        self._due_s[name] = told.every_s
        other, at_s = self._others.get(name, ("", 0.0))
        if before is not None and before.incarnation != mine:
            self._others[name] = before.incarnation, heard_s
        if mine == other and heard_s - at_s < BOTH_S:
            row.error = f"two daemons publish as {name}; give each its own --name"


class _Published(msgspec.Struct):
    """The digest alone of a ``PublishedSummary``."""

    summary: Digested


def _digest(data: bytes) -> Digest:
    return msgspec.msgpack.decode(data, type=_Published).summary.digest


class _Heard:
    """Takes the messages of a consumer, with the time at which each was published on our monotonic clock."""

    def __init__(self, fresh: Any, complete: asyncio.Event) -> None:
        self._fresh = fresh
        self._complete = complete
        self._waiting: list[Any] | None = []
        """Messages that came before ``begin``."""
        self._offset_s = 0.0

    def begin(self, created: datetime, pending: int) -> None:
        """The consumer was made just now, at this time of the broker; so many messages are there already."""
        self._offset_s = time.monotonic() - created.replace(tzinfo=created.tzinfo or UTC).timestamp()
        waiting, self._waiting = self._waiting or [], None
        if not pending:
            self._complete.set()
        for message in waiting:
            self._hear(message)

    async def take(self, message: Any) -> None:
        """The next message."""
        if self._waiting is None:
            self._hear(message)
        else:
            self._waiting.append(message)

    def _hear(self, message: Any) -> None:
        """``$JS.ACK.[DOMAIN.ACCOUNT.]STREAM.CONSUMER.DELIVERED.SEQ.SEQ.TIME.PENDING[.TOKEN]``."""
        parts = message.reply.split(".")
        at, pending = (parts[7], parts[8]) if len(parts) == V1_PARTS else (parts[9], parts[10])
        published_s = int(at) / SECOND_NS + self._offset_s
        self._fresh(message.subject, message.data, min(published_s, time.monotonic()))
        if pending == "0":
            self._complete.set()


V1_PARTS: Final = 9
"""Parts of the reply subject without a domain and an account."""
