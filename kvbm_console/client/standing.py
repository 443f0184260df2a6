"""Waits until a slot stands still at a breakpoint.

Law of this file: it follows the stream and asks only when a hold may have begun.
"""

from typing import Any

from kvbm_console.client.connection import Client
from kvbm_console.client.subscription import Ended
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.core.events import HoldParked
from kvbm_console.stream.feed import BatchArrived, Heartbeat


async def standing_still(client: Client, breakpoint_id: int | None = None) -> list[dict[str, Any]]:
    """Wait until a slot stands still, for this breakpoint if it is named. Returns the rows of the holds that stand
    still."""

    async def held() -> tuple[list[dict[str, Any]], int, str]:
        status = await client.status()
        rows = [
            row for row in status["holds"]
            if not row["pending"] and (breakpoint_id is None or str(breakpoint_id) in row["breakpoints"])
        ]
        return rows, status["stream"]["head_seq"], status["stream"]["incarnation"]

    rows, head_seq, incarnation = await held()
    if rows:
        return rows
    async with client.subscribe(after_seq=head_seq, incarnation=incarnation) as items:
        items.unread = True
        async for item in items:
            if isinstance(item, Ended):
                raise ConnectionLost(f"{client.target} ended after event {item.last_seq}: {item.reason}")
            if isinstance(item, Heartbeat) or (
                isinstance(item, BatchArrived) and not item.batch.may_have([HoldParked])
            ):
                continue
            rows, _, _ = await held()
            if rows:
                return rows
    raise ConnectionLost(f"{client.target} ended the stream")
