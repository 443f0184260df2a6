"""The console's overview as text: what needs a person, whether the cache works, what flows, who waits longest.

Law of this file: the console's own sections, drawn once; nothing is computed here a second time. A target is known by
its facts and by so much of its past that rates and percentiles of the last minute are there, and no more is decoded.
"""

import sys
from typing import TYPE_CHECKING, Final

from kvbm_console.core.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from kvbm_console.client import Client
    from kvbm_console.stream.feed import FeedItem
    from tui.model.mirror import Mirror

WIDTH: Final = 100
ROWS: Final = 44
"""More than the sections take: the last rows are the newest events."""


PAST: Final = 32_768
"""Events before now that are looked at: a minute of a busy engine, for a tenth of a second of work."""


class _Told:
    """A feed that has said everything."""

    async def items(self) -> "AsyncIterator[FeedItem]":
        """Nothing."""
        return
        yield


def overview(target: str) -> list[str]:
    """The rows of the overview of a daemon, as of now."""
    from kvbm_console.cli.ask import ask

    return drawn(ask(target, fold))


async def fold(client: "Client") -> "Mirror":
    """The daemon's facts as of now behind the last of its past, and its next heartbeat.

    Its snapshot may have been made a little earlier: the events up to now are folded, those behind them not decoded.
    """
    import msgspec

    from kvbm_console.client import Ended
    from kvbm_console.stream.feed import Connected, EventsArrived, Heartbeat, PastSeen, SnapshotTaken
    from tui.model.history import take_past
    from tui.model.mirror import Mirror

    hello = await client.hello()
    next_seq, _ = await client.digest()
    mirror = Mirror()
    mirror.take(Connected(
        target=hello.target, incarnation=hello.incarnation, run=hello.run, control=False,
        block_bytes=hello.block_bytes,
    ), 0)
    async with client.subscribe() as stream:
        async for item in stream:
            if isinstance(item, Ended):
                break
            if isinstance(item, SnapshotTaken) and mirror.state is None:
                for _ in take_past(mirror, PastSeen(await client.past(item.state.seq, PAST), item.state), 0):
                    pass
                mirror.take(item, 0)
            elif isinstance(item, EventsArrived):
                mirror.take(item, 0)
            elif isinstance(item, Heartbeat) and mirror.state is not None and stream.unread:
                if mirror.next_seq <= item.head_seq:  # as of the facts, not later
                    item = msgspec.structs.replace(item, at_ns=mirror.state.at_ns)
                mirror.take(item, 0)
                return mirror
            stream.unread = mirror.state is not None and mirror.next_seq >= next_seq
    raise ConnectionLost(f"{client.target} ended before it had told its past")


def drawn(mirror: "Mirror") -> list[str]:
    """The overview of a mirror, as plain rows; in ASCII where the output cannot take more."""
    from tui.desk import Desk
    from tui.draw.glyphs import ASCII, UNICODE
    from tui.model.lints import SHOW_AFTER_NS
    from tui.source import Session
    from tui.views import all_views

    unicode = _takes_unicode()
    session = Session(_Told())
    session.mirror = mirror
    mirror.clock.live = False
    desk = Desk(mirror, session, lambda: 0, all_views(), glyphs=UNICODE if unicode else ASCII, read_only=True)
    desk.draw(WIDTH, ROWS)
    for after_ns in (0, SHOW_AFTER_NS):  # what is true now is told now, not in two seconds
        desk.lints.check(mirror, after_ns)
    desk.warnings = desk.lints.warnings(SHOW_AFTER_NS)
    return printable(line.text.rstrip() for line in desk.view.body(desk, WIDTH, ROWS))


def printable(lines: "Iterable[str]") -> list[str]:
    """These lines, in ASCII where stdout cannot take more."""
    from tui.draw.glyphs import TRANSLATE

    return list(lines) if _takes_unicode() else [line.translate(TRANSLATE) for line in lines]


def _takes_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
