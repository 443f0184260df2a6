"""Where ``why`` and ``doctor`` look: a recording, or a live target.

Law of this file: exactly one source, and what it does not hold is a stated gap.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kvbm_console.cli.params import resolve_target

if TYPE_CHECKING:
    from kvbm_console.client import Client
    from kvbm_console.core.config import LeaderConfig
    from kvbm_console.core.events import Event
    from kvbm_console.recording.walk import Evidence, Item

HISTORY_ROUNDS_MAX: Final = 10_000
"""Questions for past events; each brings thousands, and the ring moves on while they are asked."""

RECORDING: Final = click.argument("path", metavar="[DIR-or-FILE]", required=False,
                                  type=click.Path(exists=True, path_type=Path))


def evidence_from(path: Path | None, target: str | None) -> "Evidence":
    """The recording at ``path``, else what the target's ring holds. Raises ``UsageError`` or ``ConnectionLost``."""
    if path is not None and target is not None:
        raise click.UsageError(f"give a recording or --target, not both: {path} and {target!r}")
    if path is None:
        return live_evidence(resolve_target(None, target))
    from kvbm_console.recording.reader import Recording
    from kvbm_console.recording.walk import evidence_of

    return evidence_of(Recording.open(path))


def live_evidence(target: str) -> "Evidence":
    """What a daemon still holds of its past, as of now."""
    from kvbm_console.cli.ask import ask
    from kvbm_console.recording.walk import Evidence

    items, config = ask(target, _collect)
    count = sum(len(getattr(item, "events", ())) for item in items)
    return Evidence(target, config, count, _copies(items), lambda _seq: {})


def _copies(items: "list[Item]") -> "Callable[[], Iterator[Item]]":
    """The items again and again: whoever walks them changes the facts of a snapshot."""
    from kvbm_console.core.snapshots import decode_facts, encode_facts
    from kvbm_console.stream.feed import SnapshotTaken

    kept = [encode_facts(item.state) if isinstance(item, SnapshotTaken) else item for item in items]

    def again() -> "Iterator[Item]":
        for item in kept:
            yield SnapshotTaken(decode_facts(item)) if isinstance(item, bytes) else item

    return again


async def _collect(client: "Client") -> "tuple[list[Item], LeaderConfig | None]":
    from kvbm_console.core.config import LeaderConfig
    from kvbm_console.core.state import CacheState
    from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken

    hello = await client.hello()
    events, oldest = await _history(client, 0)
    try:
        config: LeaderConfig | None = msgspec.convert(hello.config, LeaderConfig)
    except msgspec.ValidationError:
        config = None  # a newer daemon has a field that we do not know
    if oldest == 0:
        return [SnapshotTaken(CacheState()), EventsArrived(events)], config
    state = await _snapshot(client)
    items: list[Any] = [GapSeen(0, state.seq - 1, "the daemon's ring does not reach back"), SnapshotTaken(state)]
    later = [event for event in events if event.seq >= state.seq]
    if later:
        items.append(EventsArrived(later))
    return items, config


async def _history(client: "Client", first_seq: int) -> "tuple[list[Event], int]":
    """All past events that the daemon has, and the number of the first of them."""
    events: list[Event] = []
    begin = -1
    for _ in range(HISTORY_ROUNDS_MAX):
        more, oldest = await client.history(first_seq)
        if begin < 0 or (more and more[0].seq != first_seq):
            events, begin = [], oldest  # the ring overtook us: what is left begins later
        if not more:
            break
        events += more
        first_seq = more[-1].seq + 1
    return events, begin if events else max(begin, 0)


async def _snapshot(client: "Client") -> Any:
    from kvbm_console.core.errors import ConnectionLost
    from kvbm_console.stream.feed import SnapshotTaken

    async with client.subscribe() as stream:
        async for item in stream:
            if isinstance(item, SnapshotTaken):
                return item.state
    raise ConnectionLost(f"{client.target} sent no snapshot")
