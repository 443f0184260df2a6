"""Where ``why`` and ``doctor`` look: a recording, or a live target.

Law of this file: exactly one source, and what it does not hold is a stated gap.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvbm_console.cli.params import resolve_target

if TYPE_CHECKING:
    from kvbm_console.analysis.walk import Evidence
    from kvbm_console.client import Client
    from kvbm_console.core.config import LeaderConfig
    from kvbm_console.recording.reader import Item

RECORDING: Final = click.argument("path", metavar="[DIR-or-FILE]", required=False,
                                  type=click.Path(exists=True, path_type=Path))
RUN: Final = click.option("--run", metavar="ID",
                          help="The run to look at in a recording of several, by its incarnation; default: the last.")


def evidence_from(path: Path | None, target: str | None, run: str | None = None) -> "Evidence":
    """The recording at ``path``, else what the target's ring holds. Raises ``UsageError`` or ``ConnectionLost``."""
    if path is None and run is not None:
        raise click.UsageError("--run names a run of a recording, and none is given")
    if path is not None and target is not None:
        raise click.UsageError(f"give a recording or --target, not both: {path} and {target!r}")
    if path is None:
        return live_evidence(resolve_target(None, target))
    from kvbm_console.analysis.walk import evidence_of
    from kvbm_console.recording.reader import Recording

    return evidence_of(Recording.open(path, run))


def live_evidence(target: str) -> "Evidence":
    """What a daemon still holds of its past, as of now."""
    from kvbm_console.analysis.walk import Evidence
    from kvbm_console.cli.ask import ask

    items, config, now_ns = ask(target, _collect)
    count = sum(len(getattr(item, "events", ())) for item in items)
    return Evidence(target, config, count, _copies(items), lambda _seq: {}, now_ns=now_ns)


def _copies(items: "list[Item]") -> "Callable[[], Iterator[Item]]":
    """The items again and again: whoever walks them changes the facts of a snapshot."""
    from kvbm_console.core.snapshots import decode_facts, encode_facts
    from kvbm_console.stream.feed import SnapshotTaken

    kept = [encode_facts(item.state) if isinstance(item, SnapshotTaken) else item for item in items]

    def again() -> "Iterator[Item]":
        for item in kept:
            yield SnapshotTaken(decode_facts(item)) if isinstance(item, bytes) else item

    return again


async def _collect(client: "Client") -> "tuple[list[Item], LeaderConfig | None, int]":
    """From the oldest facts that the daemon still has up to its next heartbeat, and the engine's time then."""
    from kvbm_console.core.errors import ConnectionLost
    from kvbm_console.stream.feed import EventsArrived, GapSeen, Heartbeat, SnapshotTaken

    hello = await client.hello()
    next_seq, _ = await client.digest()
    items: list[Item] = []
    reached = 0
    async with client.subscribe(history=True) as stream:
        async for item in stream:
            if isinstance(item, SnapshotTaken):
                items, reached = [item], item.state.seq
            elif isinstance(item, EventsArrived):
                items.append(item)
                reached = item.events[-1].seq + 1
            elif isinstance(item, GapSeen):
                items = []  # the daemon forgot more while we read: the evidence begins with its newer snapshot
            elif isinstance(item, Heartbeat) and items and reached >= next_seq:
                return items, hello.leader_config, item.at_ns
    raise ConnectionLost(f"{client.target} ended before it had told its past")
