"""A fleet as its daemons tell it at a broker.

The last summary of every daemon is fetched when the fleet is looked at, and its digest is decoded when the fleet is
summed. One that is replaced before costs next to nothing. Ages count from the broker's
clock at the beginning and from our own monotonic clock afterwards, so clocks that differ by minutes do no harm.

The names of rows, and what they tell, come from anyone who may publish at the broker. So rows are bounded: those that
are gone for the longest time make way first, then living ones, the last that came first.

Law of this file: a daemon that has told a summary has a row until it ends in order, or is counted as dropped.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
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
from kvbm_console.core.unreadable import UNREADABLE
from kvbm_console.extras import need

WATCH_S: Final = 20.0
"""Daemons watch for a minute; a question may get lost."""
FETCH_S: Final = 60.0
"""For all summaries at once, so that strangers who publish without end do not hold up a view for ever."""
OVERDUE_S: Final = 3.0
"""A summary may be late: a busy daemon is not gone."""
FORGOTTEN_S: Final = 60.0
"""The broker forgets a fleet that nobody has looked at for so long; the next look begins anew."""
ROWS_MAX: Final = 16_384
"""Rows of a view, for fleets of thousands. A row takes 1.7 kB at least, so these take 28 MB."""
ROWS_BYTES_MAX: Final = 128 << 20
"""Bytes of the names and last messages of all rows. The summary of a busy daemon has 9 kB and takes 74 kB of memory, so
10,000 of them fit and take 0.75 GB. The dearest one that a stranger can make takes 34 times its bytes, 4.6 GB in all.
"""
TAKEN: Final = 8
"""Reciprocal of the share of these bounds that may wait to be decoded."""
DROPPED_MAX: Final = 65_536
"""Dropped daemons that are told apart, and the largest number of them that is told; 4 MB."""


class BrokeredFleet(FleetView):
    """The daemons of a cluster at a broker, or the one that the address names.

    Entering raises ``ConnectionLost``, ``Refused`` or ``UsageError``.
    """

    def __init__(self, address: BrokerAddress) -> None:
        self.rows = []
        self._address = address
        self._summaries: _Summaries | None = None
        """None while no broker is connected."""
        self._of: dict[str, _Known] = {}
        """In the order in which they came."""
        self._bytes = 0
        """Of all of these."""
        self._dropped: set[int] = set()
        """Hashes of the names of daemons that have no row."""
        self._fresh: dict[str, tuple[bytes, float]] = {}
        """Subject to its newest message and when it was heard, until that is decoded."""
        self._fresh_bytes = 0
        """Of all messages that were heard since, replaced ones included."""
        self._asked_s = 0.0

    async def __aenter__(self) -> "BrokeredFleet":
        await self._connect()
        self._catch_up()
        return self

    async def __aexit__(self, *_: object) -> None:
        summaries, self._summaries = self._summaries, None
        if summaries is not None:
            await summaries.broker.__aexit__(None, None, None)

    def stream_of(self, row: DaemonRow) -> BrokerAddress | None:
        """As in every view."""
        return None if row.keyframe is None else msgspec.structs.replace(self._address, daemon=row.target)

    async def refresh(self) -> None:
        """Take the summaries that have come, and have the next ones tell problems and digests.

        A broker that is gone makes every daemon gone, and is tried again.
        """
        try:
            summaries = await self._connected()
            await summaries.fetch()
            if time.monotonic() - self._asked_s > WATCH_S:
                await self._ask(summaries.broker, FleetQuestion(watch=True))
                self._asked_s = time.monotonic()
        except (ConnectionLost, Refused) as error:
            await self.__aexit__()
            for row in self.rows:
                row.error = str(error)
        self._catch_up()

    def _catch_up(self) -> None:
        now_s = time.monotonic()
        fresh, self._fresh, self._fresh_bytes = self._fresh, {}, 0
        for subject, (data, heard_s) in fresh.items():
            self._take(named(subject), data, heard_s)
        for known in self._of.values():
            row = known.row
            row.silent_s = now_s - known.heard_s
            if self._summaries is not None and row.silent_s > known.due_s + OVERDUE_S:
                row.error = "summary overdue"
        self._make_room()
        self.rows = [known.row for known in self._of.values()]
        self.dropped = len(self._dropped)

    def _make_room(self) -> None:
        if self._fits:
            return
        gone = sorted((known for known in self._of.values() if known.row.error), key=lambda known: known.heard_s)
        living = [known for known in reversed(self._of.values()) if not known.row.error]
        for known in chain(gone, living):
            name = known.row.target
            self._forget(name)
            if len(self._dropped) < DROPPED_MAX:
                self._dropped.add(hash(name))
            if self._fits:
                return

    @property
    def _fits(self) -> bool:
        return len(self._of) <= ROWS_MAX and self._bytes <= ROWS_BYTES_MAX

    def _forget(self, name: str) -> None:
        known = self._of.pop(name, None)
        if known is not None:
            self._bytes -= len(name) + known.kept

    async def find(self, hashes: Sequence[int], request: str = "") -> dict[str, list[Located]]:
        """As in every view; all daemons together have ``ANSWER_S``."""
        living = {row.target for row in self.rows if not row.error}
        found: dict[str, list[Located]] = {}
        all_answered = asyncio.Event()

        async def take(message: Any) -> None:
            try:
                answer = msgspec.msgpack.decode(message.data, type=FleetAnswer)
            except UNREADABLE:
                return
            if answer.name in self._of and len(answer.found) == len(hashes) + bool(request):
                found[answer.name] = answer.found
                living.discard(answer.name)
            if not living:
                all_answered.set()

        if not living:
            return found
        try:
            broker = (await self._connected()).broker
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
            for row in self.rows:
                if row.target in living:
                    row.error = f"it did not answer in {ANSWER_S:.0f} s"
        except (ConnectionLost, Refused) as error:
            for row in self.rows:
                row.error = str(error)
        return found

    async def _ask(self, broker: Broker, question: FleetQuestion, inbox: str = "") -> None:
        with broker.asking("ask"):
            await broker.client.publish(self._address.questions, msgspec.msgpack.encode(question), inbox)

    async def _connected(self) -> "_Summaries":
        """The connection, a new one if the last has broken or brings no summary any more."""
        summaries = self._summaries
        silent = bool(self.rows) and all(row.error for row in self.rows)
        if summaries is None or summaries.broker.lost.is_set() or silent:
            await self.__aexit__()
            summaries = await self._connect()
        return summaries

    async def _connect(self) -> "_Summaries":
        broker = Broker(self._address, "fleet")
        await broker.__aenter__()
        self._summaries, self._asked_s = _Summaries(broker, self._fresh_at), 0.0
        try:
            await self._summaries.begin()
            await self._summaries.fetch()
        except BaseException:
            await self.__aexit__()
            raise
        return self._summaries

    def _fresh_at(self, subject: str, data: bytes, heard_s: float) -> None:
        self._fresh[subject] = data, heard_s
        self._fresh_bytes += len(data) + len(subject)
        if len(self._fresh) * TAKEN >= ROWS_MAX or self._fresh_bytes * TAKEN >= ROWS_BYTES_MAX:
            self._catch_up()

    def _take(self, name: str, data: bytes, heard_s: float) -> None:
        self._dropped.discard(hash(name))
        if not data:  # it has ended in order
            self._forget(name)
            return
        known = self._of.get(name)
        if known is None:
            known = self._of[name] = _Known(name)
            self._bytes += len(name)
        row = known.row
        before = row.summary
        known.heard_s, known.due_s = heard_s, math.inf
        try:
            told = msgspec.msgpack.decode(data, type=PublishedSummary)
            mine = told.summary.incarnation
            if before is None or before.incarnation != mine:  # a version lasts as long as its incarnation
                told.summary.digest = _digest(data)
        except UNREADABLE:
            row.error = OTHER_VERSION
            return
        row.summary, row.address, row.host, row.error = told.summary, told.address, told.host, ""
        row.keyframe, row.decode = told.keyframe, partial(_digest, data)
        self._bytes += len(data) - known.kept
        known.kept = len(data)
        known.due_s = told.every_s
        if told.name_shared:
            row.error = f"two daemons publish as {name}; give each its own --name"


class _Known:
    """A daemon that has told a summary."""

    __slots__ = ("due_s", "heard_s", "kept", "row")

    def __init__(self, name: str) -> None:
        self.row = DaemonRow(name)
        self.heard_s = 0.0
        self.due_s = math.inf
        """The next summary follows within so many seconds."""
        self.kept = 0
        """Bytes of the last message that could be read."""


class _Published(msgspec.Struct):
    """The digest alone of a ``PublishedSummary``."""

    summary: Digested


def _digest(data: bytes) -> Digest:
    return msgspec.msgpack.decode(data, type=_Published).summary.digest


class _Summaries:
    """The stream of summaries, from which each is fetched once.

    They are fetched together: a client pays four times as much for messages that come one by one. ``take`` hears the
    subject, the content, and when it was published on our monotonic clock.
    """

    def __init__(self, broker: Broker, take: Callable[[str, bytes, float], None]) -> None:
        self.broker = broker
        self._take = take
        self._inbox = broker.client.new_inbox()
        self._next = ""
        """The subject on which more is asked for."""
        self._offset_s = 0.0
        self._ended = asyncio.Event()
        self._heard = 0
        self._status = ""

    async def begin(self) -> None:
        """Make the consumer. Raises ``ConnectionLost`` or ``Refused``, as ``fetch``."""
        api: Any = need("nats.js.api", "nats", "nats-py")
        address = self.broker.address
        with self.broker.asking("read summaries"):
            await self.broker.client.subscribe(self._inbox, cb=self.hear)
            consumer = await self.broker.jetstream.add_consumer(SUMMARIES, api.ConsumerConfig(
                deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT, ack_policy=api.AckPolicy.NONE,
                inactive_threshold=FORGOTTEN_S, filter_subject=address.subject(address.daemon or "*", "sum"),
            ))
        self.made(consumer.created)
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{SUMMARIES}.{consumer.name}"

    def made(self, created: datetime) -> None:
        """The consumer was made just now, at this time of the broker."""
        self._offset_s = time.monotonic() - created.replace(tzinfo=created.tzinfo or UTC).timestamp()

    async def fetch(self) -> None:
        """Take all summaries that were published since the last time."""
        self._status = _FULL
        with self.broker.asking("read summaries"):
            async with asyncio.timeout(FETCH_S):
                while self._status == _FULL:
                    self._ended.clear()
                    await self.broker.client.publish(self._next, _PART, self._inbox)
                    await self._part_heard()
        if self._status != _NO_MORE:
            raise ConnectionLost(f"the broker at {self.broker.address.shown} has forgotten who reads its summaries")

    async def _part_heard(self) -> None:
        """Wait for the end of a part. Raises ``TimeoutError`` when nothing comes for ``ANSWER_S``: a part may take
        longer than that over a slow line."""
        while not self._ended.is_set():
            heard = self._heard
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._ended.wait()
            except TimeoutError:
                if self._heard == heard:
                    raise

    async def hear(self, message: Any) -> None:
        """``$JS.ACK.[DOMAIN.ACCOUNT.]STREAM.CONSUMER.DELIVERED.SEQ.SEQ.TIME.PENDING[.TOKEN]``, or the end."""
        self._heard += 1
        if not message.reply:
            told = message.headers or {}
            self._status = told.get("Status", "")
            if self._status != _NO_MORE:
                self._status += f" {told.get('Description', '')}"
            self._ended.set()
            return
        parts = message.reply.split(".")
        at = parts[7] if len(parts) == V1_PARTS else parts[9]
        self._take(message.subject, message.data, min(int(at) / SECOND_NS + self._offset_s, time.monotonic()))


V1_PARTS: Final = 9
"""Parts of the reply subject without a domain and an account."""
_PART: Final = b'{"batch": 1000000, "no_wait": true, "max_bytes": 16777216}'
"""A broker closes the connection of a reader for whom 64 MB wait, so large fleets are fetched in parts."""
_FULL: Final = "409 Message Size Exceeds MaxBytes"
_NO_MORE: Final = "404"
