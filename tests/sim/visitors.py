"""The console in a browser and its visitors: a person with the printed address, and those whom ``r41`` sends.

The person opens the address with its key and comes back with the cookie. Others are another user of the machine who
guesses, a page of another origin that the person's browser shows, and a name that an attacker resolves to our address.
Their requests go through the real gate of ``attach --serve-web``. Who is let in starts a process with the real command
line, in a directory where somebody else has left Python files.

Law of this file: a request has any headers that a browser or a script may send, and the gate alone decides.
"""

import asyncio
import importlib.util
import shlex
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.cli import web as web_console
from kvbm_console.client import Client
from kvbm_console.core.errors import KvbmConsoleError
from tests.sim.load import ADDRESS, Actor

if TYPE_CHECKING:
    from tests.sim.run import Simulation

HAS_AIOHTTP: Final = importlib.util.find_spec("aiohttp") is not None
"""It comes with the extra ``web``. Without it no run has visitors, and the mutants are skipped."""
PORT: Final = 8_000
OWN: Final = ("127.0.0.1:8000", "localhost:8000")
HOSTS: Final = (*OWN, *OWN, "evil.example:8000", "127.0.0.1:8001", "127.0.0.1", "127.0.0.1.evil.example:8000", "")
ORIGINS: Final = (
    None, None, "http://127.0.0.1:8000", "http://localhost:8000", "http://evil.example", "http://evil.example:8000",
    "https://127.0.0.1:8000", "http://127.0.0.1:8001", "null", "", "http://127.0.0.1:8000.evil.example",
)
FOREIGN: Final = ("click.py", "asyncio.py")
"""Modules in the working directory that Python would import before its own."""


class WebConsole(Actor):
    """The process of ``attach --serve-web``, with the requests that reach it."""

    kind = "web"

    def __init__(self, simulation: "Simulation", number: int) -> None:
        self.strangers = 0
        """Requests that are on their way, with headers as the dice throw them."""
        self.visitors = 0
        super().__init__(simulation, number)

    async def _main(self) -> None:
        self.key = f"{self.dice.getrandbits(192):048x}"
        gate = web_console.gate(PORT, self.key)
        while not self.stopped:
            await asyncio.sleep(self.dice.uniform(0.1, 1.0))
            await self._request(gate, OWN[0], None, self.key, None)
            for path in ("/", "/ws"):
                await self._request(gate, OWN[0], self.dice.choice((None, f"http://{OWN[0]}")), None, self.key, path)
            while self.strangers:
                self.strangers -= 1
                host, origin = self.dice.choice(HOSTS), self.dice.choice(ORIGINS)
                await self._request(gate, host, origin, self._guess(), self._guess())

    def _guess(self) -> str | None:
        """A key, or a cookie: the right one where an address has leaked."""
        known = self.key
        return self.dice.choice((None, None, known, "", known[:-1], known + "0", known[::-1], "\u00fc", "guess"))

    async def _request(
        self, gate: Any, host: str, origin: str | None, key: str | None, cookie: str | None, path: str = "/"
    ) -> None:
        from aiohttp import web
        from aiohttp.test_utils import make_mocked_request
        from yarl import URL

        headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
        if cookie is not None:
            headers["Cookie"] = f"kvbm-console-{PORT}={cookie}"
        request = make_mocked_request("GET", str(URL(path) if key is None else URL(path).with_query(key=key)), headers)
        entitled = host in OWN and origin in (None, *(f"http://{own}" for own in OWN)) and self.key in (key, cookie)
        try:
            reply = await gate(request, self._let_in)
        except web.HTTPForbidden:
            entered = False
        else:
            entered = reply.status in (200, 303)
        self.simulation.monitors.visited(f"{host} {origin} {key} {cookie}", entitled=entitled, entered=entered)

    async def _let_in(self, request: Any) -> Any:
        """The page; a websocket has a process of its own."""
        from aiohttp import web

        if request.path == "/ws":
            self.visitors += 1
            command = web_console.visitor_command(["attach", ADDRESS])
            self.simulation.machine.loop(f"{self.name}.visitor-{self.visitors}", lambda: self._visit(command))
        return web.Response(text="a terminal")

    async def _visit(self, command: str) -> None:
        """As Python begins with ``-c``: the working directory stands first on its path, unless ``-P`` is there."""
        flags = shlex.split(command)[1:]
        if "-P" not in flags[: flags.index("-c")]:
            self.simulation.monitors.violated("web", f"a visitor's process runs {FOREIGN[0]} of the working directory")
        try:
            async with Client(ADDRESS, name=self.name) as client:
                await client.status()
        except KvbmConsoleError as error:
            self.simulation.monitors.told(self.name, error)
