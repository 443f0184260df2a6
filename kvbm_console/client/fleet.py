"""Asking a fleet: every daemon at once, each with a bound in time of its own.

Law of this file: a daemon that does not answer delays no other daemon and stays in the fleet.
"""

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Self, TypeVar

from kvbm_console.analysis.digest import MissedFrom
from kvbm_console.analysis.fleet import (
    OTHER_VERSION,
    DaemonRow,
    Elsewhere,
    FleetReport,
    Located,
    not_captured,
    report_of,
)
from kvbm_console.client.access import Access
from kvbm_console.client.connection import Client
from kvbm_console.core.errors import KvbmConsoleError, UsageError
from kvbm_console.core.unreadable import UNREADABLE

if TYPE_CHECKING:
    from kvbm_console.client.broker import BrokerAddress

AT_ONCE: Final = 128
"""Daemons that are asked at the same time: a thousand are asked within a second."""
ANSWER_S: Final = 2.0
"""A daemon that needs longer is shown as gone; its answer is counted in the next round."""
FIRST_S: Final = 20.0
"""The longest time that a daemon gets to read its own past before its first digest. An eighth of a core reads a full
ring, some 400,000 events, in 16 s."""
LOOK_S: Final = 0.1
MISSING_SHOWN: Final = 16
T = TypeVar("T")


class FleetView(ABC):
    """A fleet that can be asked, as an asynchronous context manager."""

    rows: list[DaemonRow]
    dropped = 0
    """Daemons that have no row, because there are more than the view keeps."""
    _summed: FleetReport | None = None
    """The last report whose sum was made anew."""
    _summed_s = 0.0
    _watching = 0
    """Daemons that the last sum has a digest of."""

    async def __aenter__(self) -> Self:
        return self

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    @abstractmethod
    async def refresh(self) -> None:
        """Bring ``rows`` up to date."""

    @abstractmethod
    async def find(self, hashes: Sequence[int], request: str = "") -> dict[str, list[Located]]:
        """Target to what its daemon has; daemons that do not answer are left out."""

    def stream_of(self, row: DaemonRow) -> "BrokerAddress | None":
        """The place of a daemon's events at a broker; None if they are at none."""
        return None

    async def look(self, older_s: float = 0.0) -> FleetReport:
        """The fleet as it is now, and where the prefixes lie that miss most.

        The sum over all daemons and those places may be ``older_s`` seconds old, unless more daemons tell a digest.
        """
        await self.refresh()
        watching = sum(row.summary is not None and row.summary.watching for row in self.rows)
        if self._summed is not None and watching <= self._watching and time.monotonic() < self._summed_s + older_s:
            return report_of(self.rows, self._summed, self.dropped)
        self._watching, self._summed_s = watching, time.monotonic()
        self._summed = report_of(self.rows)
        self._summed.missing = await self._where(self._summed.digest.missing.most(MISSING_SHOWN))
        self._summed.not_captured = not_captured(self.rows, self._summed.missing)
        return report_of(self.rows, self._summed, self.dropped)  # a daemon may have been too slow to say what it holds

    async def first_look(self) -> FleetReport:
        """As ``look``, after every daemon that answers has read its own past, or had ``FIRST_S`` for it."""
        until = time.monotonic() + FIRST_S
        while True:
            report = await self.look()
            young = [row for row in self.rows if row.summary is not None and not row.error
                     and not row.summary.watching]
            if not young or time.monotonic() > until:
                return report
            await asyncio.sleep(LOOK_S)

    async def _where(self, most: Sequence[tuple[int, MissedFrom]]) -> list[Elsewhere]:
        if not most:
            return []
        found = await self.find([key for key, _ in most])
        return [
            Elsewhere(f"{key:016x}", missed, {
                target: answers[at].tiers for target, answers in found.items() if answers[at].tiers
            }) for at, (key, missed) in enumerate(most)
        ]


class Fleet(FleetView):
    """Connections to the daemons at these targets."""

    def __init__(self, targets: Sequence[str], *, access: Access | None = None) -> None:
        self.rows = [DaemonRow(target) for target in targets]
        self._clients = {target: Client(target, name="fleet", access=access) for target in targets}
        self._answered_s: dict[str, float] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        self._began_s = time.monotonic()

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def refresh(self) -> None:
        """Ask every daemon for its summary."""
        await asyncio.gather(*map(self._look, self.rows))

    async def find(self, hashes: Sequence[int], request: str = "") -> dict[str, list[Located]]:
        """As in every view."""
        asked = (self._ask(row, lambda client: client.find(hashes, request)) for row in self.rows)
        answers = await asyncio.gather(*asked)
        return {row.target: found for row, found in zip(self.rows, answers, strict=True) if found is not None}

    async def _look(self, row: DaemonRow) -> None:
        told = await self._ask(row, Client.summary)
        if told is not None:
            row.summary, row.decode = told

    async def _ask(self, row: DaemonRow, question: Callable[[Client], Awaitable[T]]) -> T | None:
        """The answer of a daemon; None, with the reason in its row, if there is none."""
        try:
            async with self._places, asyncio.timeout(ANSWER_S):
                answer = await question(self._clients[row.target])
        except TimeoutError:
            row.error = f"{row.target} did not answer in {ANSWER_S:.0f} s"
        except UsageError:
            row.error = f"{row.target} is older than protocol 1.9 and tells no summary"
        except UNREADABLE:
            row.error = OTHER_VERSION
        except KvbmConsoleError as error:
            row.error = str(error)
        else:
            row.error = ""
            self._answered_s[row.target] = time.monotonic()
            row.silent_s = 0.0
            return answer
        row.silent_s = time.monotonic() - self._answered_s.get(row.target, self._began_s)
        return None


async def targets_of(name: str) -> list[str]:
    """The addresses of a name in ``dns:HOST:PORT``, one for each of its addresses. Raises ``UsageError``."""
    host, _, port = name.removeprefix("dns:").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= 65_535:
        raise UsageError(f"TARGET must be dns:HOST:PORT with a port from 1 to 65535, got {name!r}")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"TARGET {name!r}: {host} has no address ({error.strerror or error})") from None
    addresses = dict.fromkeys(sockaddr[0] for _, _, _, _, sockaddr in found)
    return [f"[{address}]:{port}" if ":" in str(address) else f"{address}:{port}" for address in addresses]
