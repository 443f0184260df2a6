"""A few pictures of the console on a fixed script: the clock stands, the size is fixed.

A change of a picture is looked at (``snapshot_report.html``) and then accepted with ``pytest --snapshot-update``.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from tests.tui.script import Mono, ScriptedFeed, opening, story
from tui.app import ConsoleApp
from tui.source import TargetSession

PICTURES = [
    ("overview-80", "1", (80, 24), "dark"), ("overview-120", "1", (120, 40), "dark"),
    ("overview-120-light", "1", (120, 40), "light"), ("slots-80", "2g", (80, 24), "dark"),
    ("slots-120", "2g", (120, 40), "dark"), ("slot-80", "2g3", (80, 24), "dark"),
    ("timeline-80-none", "4ggn", (80, 24), "none"), ("timeline-120", "4ggn", (120, 40), "dark"),
    ("transfers-120", "5j", (120, 40), "dark"), ("tiers-80", "6", (80, 24), "dark"),
    ("breaks-80", "7", (80, 24), "dark"), ("record-80", "8", (80, 24), "dark"), ("log-120", "9", (120, 40), "dark"),
]


@pytest.mark.parametrize(("keys", "size", "theme"), [rest for _, *rest in PICTURES], ids=[p[0] for p in PICTURES])
def test_picture(
    snap_compare: Callable[..., bool], keys: str, size: tuple[int, int], theme: str
) -> None:
    mono = Mono()
    app = ConsoleApp(TargetSession(_Later(), mono=mono), theme=theme)

    async def settle(pilot: Pilot[Any]) -> None:
        feed = app.session.feed
        assert isinstance(feed, _Later)
        await feed.over().wait()
        app.draw()
        await pilot.press(*keys)
        app.draw()
        await pilot.pause()

    before: Callable[[Pilot[Any]], Awaitable[None]] = settle
    assert snap_compare(app, terminal_size=size, run_before=before)


class _Later:
    """A scripted feed that is made on the loop it runs on."""

    def __init__(self) -> None:
        self._feed: ScriptedFeed | None = None

    def _made(self) -> ScriptedFeed:
        if self._feed is None:
            self._feed = ScriptedFeed(opening(story()))
        return self._feed

    def over(self) -> Any:
        """Set when everything has been taken."""
        return self._made().over

    def items(self) -> Any:
        """As ``stream.feed.Feed``."""
        return self._made().items()
