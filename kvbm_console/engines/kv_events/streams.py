"""All the publishers that one daemon follows, as sources of its leader.

Law of this file: an address that cannot be used is refused by ``open``, before anything is followed; while they run,
one publisher's silence or nonsense does not touch another.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio
import msgspec

from kvbm_console.core.ids import Note
from kvbm_console.core.stimuli import Noted
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events.address import Publisher
from kvbm_console.engines.kv_events.stream import EventStream, StreamCounts
from kvbm_console.engines.kv_events.zmq_source import SourceStatus, ZmqSource, new_context
from kvbm_console.stream.publishers import queue_note

Keep = Callable[[str, Callable[[], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]]
"""Runs a task under a name (``LeaderService.keep``)."""


class StreamRow(msgspec.Struct, frozen=True):
    """One publisher as screens and metrics show it."""

    source: int
    label: str
    counts: StreamCounts
    status: SourceStatus


class Streams:
    """Follows ``publishers``; each gets a source of its own from ``new_source``."""

    def __init__(self, publishers: Sequence[Publisher], dispatcher: Dispatcher, new_source: Callable[[], int]) -> None:
        self._dispatcher, self._new_source = dispatcher, new_source
        self._context: Any = None
        self._publishers = publishers
        self.sources = [self._source(publisher) for publisher in publishers]

    def _source(self, publisher: Publisher) -> ZmqSource:
        def taker(topic: str) -> EventStream:
            label = f"{publisher.label} {topic}" if publisher.bind else publisher.label
            source = self._new_source()
            self._dispatcher.submit(Noted, Note.ENGINE_SUMMARY, queue_note(source, publisher.queue_batches_max))
            return EventStream(self._dispatcher, source, dp_rank=publisher.dp_rank, label=label)

        return ZmqSource(publisher, taker)

    def rows(self) -> list[StreamRow]:
        """Every publisher that was heard of."""
        return [
            StreamRow(taker.source, taker.label, taker.counts, source.status)
            for source in self.sources for taker in source.takers if isinstance(taker, EventStream)
        ]

    def documents(self) -> list[dict[str, Any]]:
        """The same as rows of the status document."""
        return [
            {
                "source": str(row.source), "name": row.label, "connected": row.status.connected,
                "batches": row.counts.batches, "gaps": row.counts.gaps, "lost_batches": row.counts.lost_batches,
                "restarts": row.counts.restarts, "last_batch_ns": row.counts.last_batch_ns,
            }
            for row in self.rows()
        ]

    def open(self) -> None:
        """Connect or bind all. Raises ``UsageError``."""
        self._context = new_context()
        try:
            for source in self.sources:
                source.open(self._context)
        except BaseException:
            self.close()
            raise

    async def run(self, keep: Keep | None = None) -> None:
        """Follow all until cancelled, then give the sockets back. ``keep(name, run)`` runs each of them."""
        try:
            async with anyio.create_task_group() as group:
                for publisher, source in zip(self._publishers, self.sources, strict=True):
                    if keep is None:
                        group.start_soon(source.run)
                    else:
                        group.start_soon(keep, f"publisher {publisher.label}", source.run)
        finally:
            self.close()

    def close(self) -> None:
        """Give the sockets back; may be called again."""
        for source in self.sources:
            source.close()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
