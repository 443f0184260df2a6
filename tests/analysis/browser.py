"""A page in headless Chromium, driven over the DevTools protocol: what it draws, what it asks the network for.

Law of this file: the browser is a process of its own with a profile of its own, and ends with the test.
"""

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from shutil import which
from typing import Any, Final

import aiohttp
import pytest

CHROMIUM: Final = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := which(name))),
                       None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


class Page:
    """A tab. ``requests`` are the addresses that it asked for, ``errors`` its exceptions."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.requests: list[str] = []
        self.errors: list[str] = []

    async def listen(self) -> None:
        """Take messages until the tab is closed."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])
            elif told["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["params"]["exceptionDetails"])[:400])

    async def say(self, method: str, **params: Any) -> Any:
        """A command of the protocol; its result."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await asyncio.wait_for(self._answers[number], 30)
        assert "error" not in told, (method, told)
        return told["result"]

    async def value(self, expression: str) -> Any:
        """The value of an expression of the page; a promise is awaited."""
        told = await self.say("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def press(self, key: str) -> None:
        """A key, as a person presses it; returns when the page has drawn."""
        for kind in ("keyDown", "keyUp"):
            text = key if kind == "keyDown" and len(key) == 1 else ""
            await self.say("Input.dispatchKeyEvent", type=kind, key=key, text=text)
        await self.drawn()

    async def drawn(self) -> None:
        """Two frames: what was asked for is drawn in the first one."""
        await self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    async def open(self, address: str) -> None:
        """Open a page and wait until it has drawn itself."""
        await self.say("Page.navigate", url=address)
        await self.value(
            "new Promise(done => { const look = () => document.body && document.body.dataset.ready ? done(1) : "
            "setTimeout(look, 10); look(); })")
        await self.drawn()


@asynccontextmanager
async def tab(width: int = 1300, height: int = 1500, dark: bool = False) -> AsyncIterator[Page]:
    """A tab of a fresh browser."""
    with tempfile.TemporaryDirectory(prefix="kvbm-chromium-", ignore_cleanup_errors=True) as profile:
        browser = _started(profile, width, height)
        try:
            line = await asyncio.to_thread(_listening, browser)
            async with aiohttp.ClientSession() as session:
                port = line.split(":")[2].split("/")[0]
                async with session.get(f"http://127.0.0.1:{port}/json") as reply:
                    target = next(one for one in await reply.json() if one["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Network"):
                        await page.say(f"{domain}.enable")
                    await page.say("Emulation.setEmulatedMedia", features=[
                        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
                    yield page
                    listening.cancel()
        finally:
            browser.terminate()
            browser.communicate(timeout=20)


def _started(profile: str, width: int, height: int) -> "subprocess.Popen[str]":
    assert CHROMIUM is not None
    return subprocess.Popen(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
         f"--user-data-dir={profile}", f"--window-size={width},{height}", "--no-first-run",
         "--disable-background-networking", "about:blank"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "HOME": profile},
    )


def _listening(browser: "subprocess.Popen[str]") -> str:
    assert browser.stderr is not None
    for line in browser.stderr:
        if "DevTools listening on" in line:
            return line.split()[-1]
    raise AssertionError("Chromium ended before it listened")
