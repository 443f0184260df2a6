"""Clients of the page of metrics: scrapers that ask and read, and crowds that connect and keep the server waiting.

``r63`` is the crowd: hundreds of connections that say nothing or half a request, from which some come again as soon as
they are closed. Others ask and never read, say a byte at a time, or send a head above the limit.

Law of this file: a crowd does what any program that reaches the port can do, and a scraper what Prometheus does.
"""

import asyncio
import contextlib
import random
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvbm_console.metrics.http import REQUEST_BYTES_MAX
from tests.sim.load import Actor
from tests.sim.tcp import SocketEnd

if TYPE_CHECKING:
    from tests.sim.run import Simulation

PLACE: Final = ("127.0.0.1", 9_464)
SCRAPE_TIMEOUT_S: Final = 10.0
"""Prometheus waits as long."""
TAKEN_PER_S: Final = 52
"""Connections that the page takes each second. More keep the queue of the port full, and then its system lets in whom
it wants."""
AGAIN_PER_S: Final = 40
"""Connections of a crowd that come again each second."""
REQUEST: Final = b"GET /metrics HTTP/1.1\r\nHost: sim\r\n\r\n"
TURNED_AWAY: Final = b"HTTP/1.1 503 "
HALF: Final = REQUEST[:-2] + b"X: "
SILENT: Final = ("say_nothing", "say_half", "say_little", "say_too_much", "leave")
UNREAD: Final = ("never_read",)
_SAMPLE: Final = re.compile(r'(\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (-?[\d.e+-]+|NaN|[+-]Inf)')


class Scraper(Actor):
    """Asks for the page about once a second, reads all of it and tells the monitors."""

    kind = "scraper"
    asked_ns = 0
    """When it first asked for the page that it has not got, because it was turned away; else 0."""

    async def _main(self) -> None:
        while not self.stopped:
            await self._scrape()
            await asyncio.sleep(self.dice.uniform(0.5, 1.5))

    async def _scrape(self) -> None:
        began, answer, met = self.asked_ns or self.simulation.world.now, b"", ""
        frozen_ns = self.process.frozen_ns
        end: SocketEnd | None = None
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                end = await self.simulation.machine.tcp.connect(self.loop, PLACE)
                await end.write(REQUEST)
                while not is_whole(answer) and (data := await end.read()):
                    answer += data
        except OSError as error:  # a timeout is one, too
            met = type(error).__name__
        finally:
            if end is not None:
                end.close()
        self.asked_ns = began if answer.startswith(TURNED_AWAY) else 0
        harmed = end is not None and end.link.harmed
        frozen_ns = self.process.frozen_ns - frozen_ns  # in which it could not read, whatever came
        self.simulation.monitors.scraped(self, began + frozen_ns, answer, met, harmed=harmed)


def is_whole(answer: bytes) -> bool:
    """True if the body has as many bytes as the head says."""
    head, found, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    return bool(found) and length is not None and len(body) >= int(length[1])


def page_troubles(page: str) -> Iterator[str]:
    """Sentences about lines that a reader of Prometheus' text format (0.0.4) or a terminal would not take."""
    kinds: dict[str, str] = {}
    seen: set[str] = set()
    if not page.endswith("\n"):
        yield "the last line does not end"
    for line in page.removesuffix("\n").split("\n"):
        if not line.isprintable():
            yield f"a character is not printable: {line!r}"
        if line.startswith("# "):
            _, what, name, text = (*line.split(" ", 3), "")[:4]
            if what == "TYPE":
                kinds[name] = text
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            yield f"no sample: {line!r}"
        elif sample[1] not in kinds:
            yield f"a sample in front of its type: {line!r}"
        elif (place := line.rpartition(" ")[0]) in seen:
            yield f"a sample twice: {line!r}"
        else:
            seen.add(place)


class Crowd:
    """Many connections of a process, each of which behaves in a way that the dice have drawn for all."""

    def __init__(self, simulation: "Simulation", number: int, manners: tuple[str, ...], count: int) -> None:
        self.simulation = simulation
        self.dice = dice = random.Random(f"{simulation.seed} crowd {number}")
        self._manners = manners
        self._count = count
        self._spread_s = dice.choice((0.0, 0.3, 3.0))
        self._pause_s = count / AGAIN_PER_S if dice.random() < 0.4 and manners != UNREAD else None
        """Until a connection that is over comes again; None if it does not."""
        self._until_s = simulation.world.seconds + dice.choice((1.0, 4.0, 8.0))
        if self._pause_s is not None:
            if simulation.world.seconds < simulation.again_until_s:
                self._pause_s = None  # two crowds that come again are such a flood
            else:
                simulation.again_until_s = self._until_s + 2 * self._pause_s
                full_s = min(simulation.again_until_s - simulation.world.seconds, count / (TAKEN_PER_S - AGAIN_PER_S))
                simulation.full_until_ns = simulation.world.now + round(full_s * 1e9)
        simulation.world.trace("crowd", number, count)
        self.loop = simulation.machine.loop(f"crowd-{number}", self._main)

    async def _main(self) -> None:
        await asyncio.gather(*(self._stay() for _ in range(self._count)))

    async def _stay(self) -> None:
        await asyncio.sleep(self.dice.uniform(0, self._spread_s))
        while not self.simulation.calm:
            await self._visit(self.dice.choice(self._manners))
            if self._pause_s is None or self.simulation.world.seconds > self._until_s:
                return
            await asyncio.sleep(self.dice.uniform(0, 2 * self._pause_s))

    async def _visit(self, manner: str) -> None:
        """Connect, behave, and stay until the server closes, or until we have had enough."""
        end: SocketEnd | None = None
        patience_s = 60.0 if manner in UNREAD else self.dice.choice((0.5, 5.0, 60.0))
        with contextlib.suppress(OSError):
            async with asyncio.timeout(patience_s):
                end = await self.simulation.machine.tcp.connect(self.loop, PLACE)
                if self.simulation.calm:
                    end.close()
                await getattr(self, f"_{manner}")(end)
        if end is not None:
            end.close()

    async def _say_nothing(self, end: SocketEnd) -> None:
        while await end.read():
            pass

    async def _say_half(self, end: SocketEnd) -> None:
        await end.write(HALF)
        await self._say_nothing(end)

    async def _say_little(self, end: SocketEnd) -> None:
        for at in range(len(HALF)):
            await end.write(HALF[at : at + 1])
            await asyncio.sleep(1.0)

    async def _say_too_much(self, end: SocketEnd) -> None:
        await end.write(HALF + bytes(2 * REQUEST_BYTES_MAX))
        await self._say_nothing(end)

    async def _leave(self, end: SocketEnd) -> None:
        await end.write(HALF)

    async def _never_read(self, end: SocketEnd) -> None:
        await end.write(REQUEST)
        await asyncio.sleep(60.0)
