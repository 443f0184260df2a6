"""Publishers of event streams in words: the size of the queue as a note on the record, the engine's own numbers.

Law of this file: it reads its own texts, and a text of another shape means nothing. An unknown number has no text.
"""

import re
from collections.abc import Mapping
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


def hit_share(values: Mapping[str, int]) -> tuple[int, int, int | None] | None:
    """(hits, prompt tokens, their time in ns): of the last minute if prompts came, else since the engine began.

    ``values`` are measures by label. The time is None since the engine began; the result is None if hits are unknown.
    """
    asked, found = values.get("recent_query_tokens"), values.get("recent_hit_tokens")
    if asked and found is not None:
        return found, asked, values.get("recent_ns")
    asked, found = values.get("query_tokens"), values.get("hit_tokens")
    return (found, asked, None) if asked and found is not None else None


def measure_texts(values: Mapping[str, int]) -> list[tuple[str, str]]:
    """(subject, words) of each number that an engine tells, the most important first.

    >>> [text for _, text in measure_texts({"running": 3, "used_ppm": 250_000})]
    ['in use 25.0 %', '3 running']
    """
    texts = []
    hits = hit_share(values)
    if hits is not None:
        found, asked, span = hits
        during = "since the engine began" if span is None else f"last {max(1, round(span / 1e9))} s"
        texts.append(("hits", f"hit rate {_percent(found, asked)} of {asked:,} prompt tokens, {during}"))
    below, looked_up = values.get("below_hit_tokens"), values.get("below_query_tokens")
    if below is not None and (below or looked_up):
        whole = f" of {looked_up:,}" if looked_up else ""
        texts.append(("below", f"{below:,}{whole} tokens found below G1"))
    if "capacity_blocks" in values:
        texts.append(("capacity", f"capacity {values['capacity_blocks']:,} blocks"))
    if "host_capacity_blocks" in values:
        texts.append(("host", f"host {values['host_capacity_blocks']:,} blocks"))
    if "used_ppm" in values:
        texts.append(("used", f"in use {_percent(values['used_ppm'], 1_000_000)}"))
    texts += [(name, f"{values[name]:,} {name}") for name in ("running", "waiting") if name in values]
    if "running_most" in values:
        texts.append(("limit", f"at most {values['running_most']:,} running"))
    if "step_tokens_most" in values:
        texts.append(("step", f"at most {values['step_tokens_most']:,} tokens a step"))
    if values.get("retention_tokens") == 0:
        texts.append(("windows", "keeps the windows at the ends of prompts"))
    elif values.get("retention_tokens", 1) > 1:
        texts.append(("windows", f"keeps a window each {values['retention_tokens']:,} tokens"))
    if "preemptions" in values:
        texts.append(("preemptions", f"{values['preemptions']:,} preempted"))
    if "first_token_ns" in values:
        texts.append(("first token", f"first token after {values['first_token_ns'] / 1e6:,.0f} ms"))
    return texts


def _percent(part: int, whole: int) -> str:
    """Rounded down, as every share of the console: only a full value reads 100.0 %."""
    return f"{1_000 * part // whole / 10:.1f} %"
