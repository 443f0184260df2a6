"""The console's overview as text: what needs a person, whether the cache works, what flows, who waits longest.

Law of this file: the console's own sections, drawn once; nothing is computed here a second time. A target is folded
from the oldest facts that it still has, so that rates and percentiles of the last minute are known at once.
"""

import sys
from typing import TYPE_CHECKING, Final

from kvbm_console.core.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvbm_console.client import Client
    from kvbm_console.stream.feed import FeedItem
    from tui.model.mirror import Mirror

WIDTH: Final = 100
ROWS: Final = 44
"""More than the sections take: the last rows are the newest events."""


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
    """What the daemon still has of its past, up to its next heartbeat."""
    import msgspec

    from kvbm_console.client import Ended
    from kvbm_console.stream.feed import Connected, Heartbeat
    from tui.model.mirror import Mirror

    hello = await client.hello()
    next_seq, _ = await client.digest()
    mirror = Mirror()
    mirror.take(Connected(
        target=hello.target, incarnation=hello.incarnation, run=hello.run, control=False,
        block_bytes=hello.block_bytes,
    ), 0)
    async with client.subscribe(history=True) as stream:
        async for item in stream:
            if isinstance(item, Ended):
                break
            if isinstance(item, Heartbeat):
                if mirror.next_seq < next_seq:
                    continue
                if mirror.state is not None and mirror.next_seq <= item.head_seq:  # as of what is folded, not later
                    item = msgspec.structs.replace(item, at_ns=mirror.state.at_ns)
                mirror.take(item, 0)
                return mirror
            mirror.take(item, 0)
    raise ConnectionLost(f"{client.target} ended before it had told its past")


def drawn(mirror: "Mirror") -> list[str]:
    """The overview of a mirror, as plain rows; in ASCII where the output cannot take more."""
    from tui.desk import Desk
    from tui.draw.glyphs import ASCII, TRANSLATE, UNICODE
    from tui.model.lints import SHOW_AFTER_NS
    from tui.source import Session
    from tui.views import all_views

    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    session = Session(_Told())
    session.mirror = mirror
    mirror.clock.live = False
    desk = Desk(mirror, session, lambda: 0, all_views(), glyphs=UNICODE if unicode else ASCII, read_only=True)
    desk.draw(WIDTH, ROWS)
    for after_ns in (0, SHOW_AFTER_NS):  # what is true now is told now, not in two seconds
        desk.lints.check(mirror, after_ns)
    desk.warnings = desk.lints.warnings(SHOW_AFTER_NS)
    lines = [line.text.rstrip() for line in desk.view.body(desk, WIDTH, ROWS)]
    return lines if unicode else [line.translate(TRANSLATE) for line in lines]
