"""The past of a live daemon as evidence: the facts and events that its ring still holds.

Law of this file: events that the daemon forgot while it was read are never mixed with those behind its newer facts.
"""

from collections.abc import Callable, Iterator

import msgspec

from kvbm_console.analysis.walk import Evidence
from kvbm_console.client.connection import Client, Hello
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.core.snapshots import decode_facts, sparse_facts
from kvbm_console.recording.reader import Item
from kvbm_console.stream.feed import EventsArrived, GapSeen, Heartbeat, SnapshotTaken


async def live_evidence(client: Client) -> Evidence:
    """The part of a daemon's past that its ring still holds, up to now."""
    items, hello, beat = await collect(client)
    count = sum(len(getattr(item, "events", ())) for item in items)
    return Evidence(client.target, hello.leader_config, count, copies(items), lambda _seq: {}, now_ns=beat.at_ns)


def copies(items: list[Item]) -> Callable[[], Iterator[Item]]:
    """The items for each walk anew, because a walk changes the facts of a snapshot."""
    kept = [sparse_facts(item.state) if isinstance(item, SnapshotTaken) else item for item in items]

    def again() -> Iterator[Item]:
        for item in kept:
            yield SnapshotTaken(decode_facts(item)) if isinstance(item, memoryview) else item

    return again


async def collect(client: Client) -> tuple[list[Item], Hello, Heartbeat]:
    """The items from the daemon's oldest facts up to now, who it is, and its next heartbeat, as of these items.

    Events that come meanwhile are not decoded.
    """
    hello = await client.hello()
    next_seq, _ = await client.digest()
    items: list[Item] = []
    at_ns = reached = 0
    async with client.subscribe(history=True) as stream:
        async for item in stream:
            if isinstance(item, Heartbeat):
                if stream.unread:
                    return items, hello, item if item.head_seq < reached else msgspec.structs.replace(item, at_ns=at_ns)
            elif stream.unread:
                continue
            elif isinstance(item, SnapshotTaken):
                items, reached, at_ns = [item], item.state.seq, item.state.at_ns
            elif isinstance(item, EventsArrived):
                items.append(item)
                reached, at_ns = item.events[-1].seq + 1, item.events[-1].at_ns
            elif isinstance(item, GapSeen):
                items = []  # the daemon forgot more while we read: the evidence begins with its newer snapshot
            stream.unread = bool(items) and reached >= next_seq
    raise ConnectionLost(f"{client.target} ended before it had told its past")
