"""The queue size of an event stream's publisher, as a note on the record.

Law of this file: it reads its own texts, and a text of another shape means nothing.
"""

import re
from typing import Final

QUEUE_SAFE: Final = 10_000
"""Batches that suffice: as many as a replay sends, and a minute of steps of 6 ms with a batch each."""

_QUEUE: Final = re.compile(r"engine (\d{1,18}): max_queue_size (\d{1,18}|unknown)")


def queue_note(source: int, batches_max: int | None) -> str:
    """The detail of an ``ENGINE_SUMMARY`` about the queue of a source's publisher.

    >>> queue_note(1, 100_000), queue_note(2, None)
    ('engine 1: max_queue_size 100000', 'engine 2: max_queue_size unknown')
    """
    return f"engine {source}: max_queue_size {'unknown' if batches_max is None else batches_max}"


def queue_of(detail: str) -> tuple[int, int | None] | None:
    """(source, batches or None for unknown) of such a detail; None for another text.

    >>> queue_of("engine 2: max_queue_size unknown"), queue_of("hello")
    ((2, None), None)
    """
    match = _QUEUE.fullmatch(detail)
    return None if match is None else (int(match[1]), None if match[2] == "unknown" else int(match[2]))


def queue_is_safe(batches_max: int) -> bool:
    """True if a queue of so many batches, 0 for no bound, leaves the engine time for a replay."""
    return not batches_max or batches_max >= QUEUE_SAFE
