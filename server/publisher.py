"""``serve --fleet``: the daemon's summary at a broker, and its answers to the questions of those who look at the fleet.

A summary is published every ten seconds, and every two while somebody looks. Nothing waits in a queue: a summary that
the broker does not take is not sent again, because the next is newer. Questions take their turn as those of any other
caller. A daemon that ends in order publishes an empty message and so leaves the fleet.

Each summary is published on the condition that the newest of the subject is the daemon's own last one. Where it is not,
another daemon publishes under this name. Its last message may have been its farewell, so the second within a minute
counts.

Law of this file: no failure of the broker ends or delays the daemon, and each is a sentence among its warnings.
"""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import anyio
import msgspec

from kvbm_console.client.broker import (
    Broker,
    BrokerAddress,
    FleetAnswer,
    FleetQuestion,
    PublishedSummary,
    keep_summaries,
)
from kvbm_console.core.errors import ConnectionLost, Refused
from kvbm_console.core.unreadable import UNREADABLE
from kvbm_console.extras import need
from kvbm_console.service import LeaderService
from kvbm_console.wire.protocol import FOUND_HASHES_MAX, NAME_BYTES_MAX

from .fleet import find, summary_of
from .lints import LintWatch
from .questions import Questions, TooMany

QUIET_S: Final = 10.0
"""Nobody looks: the summary tells that the daemon lives, and what its facts count."""
LOOKED_S: Final = 2.0
"""As often as a fleet on the screen is drawn."""
RETRY_S: Final = (0.5, 2.0)
"""A thousand daemons do not come back to their broker in the same moment."""
FAREWELL_S: Final = 0.5
SHARED_S: Final = 60.0
"""Two messages of another daemon within this time mean that it goes on publishing."""
WAITING_MAX: Final = 128
"""Questions that wait for their turn; later ones are not answered."""
PART: Final = "fleet"


class FleetPublisher:
    """Publishes summaries of a service at a broker, from ``run`` until cancelled. ``address`` is the daemon's own."""

    def __init__(
        self, broker: BrokerAddress, service: LeaderService, watch: LintWatch, questions: Questions, *,
        program: str, name: str, address: Callable[[], str], keyframe: Callable[[], int | None] = lambda: None,
    ) -> None:
        need("nats", "nats", "nats-py", "--fleet")
        self._broker = broker
        self._service = service
        self._watch = watch
        self._questions = questions
        self._program = program
        self._host = socket.gethostname()
        self.name = name or self._host
        """The daemon's name in the fleet."""
        self._address = address
        self._keyframe = keyframe
        self._trouble = ""
        self._last: int | None = None
        """Number of the daemon's last summary at the broker, None if it is not known."""
        self._foreign_s: list[float] = []
        """When the last two messages of another daemon under this name were noticed."""

    async def run(self) -> None:
        """Publish, on a new connection whenever the last one has failed."""
        self._service.parts.known([PART])
        while True:
            try:
                async with Broker(self._broker, self.name) as broker:
                    await self._publish(broker)
            except (ConnectionLost, Refused) as error:
                self._failed(str(error))
            await asyncio.sleep(random.uniform(*RETRY_S))

    async def _publish(self, broker: Broker) -> None:
        subject = self._broker.subject(self.name, "sum")
        self._last = None
        await keep_summaries(broker)
        with broker.asking("answer questions"):
            await broker.client.subscribe(self._broker.questions, cb=self._asked, pending_msgs_limit=WAITING_MAX)
        try:
            while True:
                summary = await self._tell(broker, subject)
                await self._pause(broker, summary)
        except asyncio.CancelledError:
            with (
                anyio.move_on_after(FAREWELL_S, shield=True), contextlib.suppress(ConnectionLost, Refused),
                broker.asking("publish summaries"),
            ):
                await broker.jetstream.publish(subject, b"")
            raise

    def summary(self) -> PublishedSummary:
        """The summary as of now."""
        told = summary_of(self._service, self._watch, self._program, self.name)
        every_s = LOOKED_S if self._watch.is_wanted else QUIET_S
        return PublishedSummary(told, self._address(), self._host, every_s, self._keyframe(), self._shares_name())

    async def _tell(self, broker: Broker, subject: str) -> PublishedSummary:
        with broker.asking("publish summaries"):
            summary = self.summary()
            last = await broker.publish_behind(subject, msgspec.msgpack.encode(summary), self._last)
            if last is None:
                self._foreign_s = [*self._foreign_s[-1:], time.monotonic()]
                summary = self.summary()
                last = await broker.publish_behind(subject, msgspec.msgpack.encode(summary), None)
            self._last = last
        if summary.name_shared:
            self._failed(f"another daemon publishes as {self.name}; give each its own --name")
        else:
            self._works()
        return summary

    def _shares_name(self) -> bool:
        return len(self._foreign_s) > 1 and time.monotonic() - self._foreign_s[0] < SHARED_S

    async def _pause(self, broker: Broker, last: PublishedSummary) -> None:
        """Until the next summary is due: at once when the first digest is there that somebody has asked for."""
        waits = [asyncio.ensure_future(broker.lost.wait())]
        if not last.summary.watching:
            waits.append(asyncio.ensure_future(self._watch.ready.wait()))
        try:
            await asyncio.wait(waits, timeout=last.every_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if broker.lost.is_set():
            raise ConnectionLost(f"the connection to the broker at {self._broker.shown} was lost")

    async def _asked(self, message: Any) -> None:
        try:
            question = msgspec.msgpack.decode(message.data, type=FleetQuestion)
        except UNREADABLE:
            return  # somebody else's
        if len(question.hashes) > FOUND_HASHES_MAX or len(question.request.encode()) > NAME_BYTES_MAX:
            return
        if question.watch:
            self._watch.want()
        if not message.reply:
            return
        try:
            turn = await self._questions.observers.turn(PART)
        except TooMany:
            return  # the asker shows this daemon as silent
        with turn.working():
            found = find(self._service, question.hashes, question.request)
        with contextlib.suppress(Exception):  # the connection broke: its owner tells
            await message.respond(msgspec.msgpack.encode(FleetAnswer(self.name, found)))

    def _failed(self, why: str) -> None:
        if why != self._trouble:
            self._service.parts.troubled(PART, why)
        self._trouble = why

    def _works(self) -> None:
        if self._trouble:
            self._trouble = ""
            self._service.parts.begun(PART)
