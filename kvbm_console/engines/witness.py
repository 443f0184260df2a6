"""Two witnesses of one engine: its event stream, folded here, and its own metrics page (``doctor http://...``).

Theory of operation
-------------------
The page is read before and after the stream is looked at, so a busy engine gives two bounds instead of a number:

    page: 900 computed tokens      stream: 60 stored blocks of 16      page: 1,000 computed tokens

A page never says how many blocks are cached, so each check is a consequence. Tokens that were computed fill blocks,
except for a last block of each request. Blocks in use by running requests are cached, except for the last of each. A
cache holds no more blocks than it has. SGLang also tells the evicted and the evictable tokens.

A stream that lost messages proves nothing against the engine, so a difference is then ours.

Law of this file: a check that the data cannot decide is unknown, and names the missing number.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from kvbm_console.core.ids import Tier
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import PoolFacts
from kvbm_console.engines.exposition import PageSample, of_rank

Verdict = Literal["agrees", "differs", "unknown"]
Culprit = Literal["stream", "reader"]
"""The side that is wrong: the engine's event stream, or this reader, which missed messages."""

CHECKS: Final = {
    "block size": "Blocks of the device have the size that the page tells.",
    "capacity": "The device holds at most its capacity.",
    "in use": "Blocks that live requests use are on the device.",
    "computed": "Each computed token is in a stored block, except for a last block of each request.",
    "evicted": "As many tokens were evicted as the page tells.",
    "evictable": "Without requests, the cached tokens are the evictable tokens.",
}
"""Name of a check to its sentence, in the order of reports."""

COUNTED: Final = frozenset({
    "vllm:cache_config_info", "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:num_preemptions_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:request_success_total",
    "sglang:max_total_num_tokens", "sglang:page_size", "sglang:num_running_reqs", "sglang:num_queue_reqs",
    "sglang:num_used_tokens", "sglang:kv_evictable_tokens", "sglang:evicted_tokens_total",
    "sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:cached_tokens_total",
    "sglang:load_back_tokens_total",
})


class WitnessCheck(msgspec.Struct, frozen=True):
    """A check of one data-parallel rank. The engine's number lies between ``least`` and ``most``; null is unbounded."""

    check: str
    text: str
    """The check's sentence."""
    verdict: Verdict
    ours: int | None
    least: int | None
    most: int | None
    unit: str
    culprit: Culprit | None
    because: str


class WitnessReport(msgspec.Struct, frozen=True):
    """The document of ``doctor http://...``, of one data-parallel rank: a stable contract."""

    engine: str
    publisher: str
    rank: int
    ok: bool
    """True if no check differs."""
    messages: int
    complete: bool
    """True if every message since the engine began was read."""
    resident_blocks: int | None
    """Blocks of the device by the stream; null if no message came."""
    checks: list[WitnessCheck]


class Heard(msgspec.Struct, frozen=True):
    """The stream of a rank: its source here, its messages, and whether all of them were read."""

    source: int
    publisher: str
    rank: int
    messages: int
    complete: bool
    cleared: bool


class _Page:
    """The numbers of a page for one rank."""

    def __init__(self, found: Sequence[PageSample], rank: int) -> None:
        self._samples: dict[str, list[PageSample]] = {}
        for sample in of_rank(found, rank):
            if sample.labels.get("cache_source", "device") not in ("device", "total"):
                continue  # SGLang's hits below the device
            self._samples.setdefault(sample.name, []).append(sample)

    def number(self, *names: str) -> int | None:
        """The sum of the first of these names that the page has."""
        for name in names:
            if name in self._samples:
                return round(sum(sample.value for sample in self._samples[name]))
        return None

    def share(self, name: str) -> float | None:
        return max((sample.value for sample in self._samples.get(name, ())), default=None)

    def label(self, name: str, label: str) -> int | None:
        """The number in a label of an info metric."""
        texts = [sample.labels.get(label, "") for sample in self._samples.get(name, ())]
        return next((int(text) for text in texts if text.isascii() and text.isdigit() and len(text) < 16), None)

    @property
    def live(self) -> int | None:
        """Requests that run or wait."""
        running = self.number("vllm:num_requests_running", "sglang:num_running_reqs")
        waiting = self.number("vllm:num_requests_waiting", "sglang:num_queue_reqs")
        return None if running is None or waiting is None else running + waiting


def compare(
    engine: str, before: Sequence[PageSample], after: Sequence[PageSample], state: CacheState, heard: Heard
) -> WitnessReport:
    """Compare the device of a stream with the page, which was read before and after the stream's facts."""
    pools = [pool for pool in state.pools if pool.info.source == heard.source and pool.info.tier is Tier.G1]
    groups = {pool.info.group for pool in pools}
    pool = min(pools, key=lambda each: each.info.group, default=None)
    comparison = _Comparison(_Page(before, heard.rank), _Page(after, heard.rank), pool, len(groups), heard)
    checks = comparison.checks()
    return WitnessReport(
        engine, heard.publisher, heard.rank, all(check.verdict != "differs" for check in checks), heard.messages,
        heard.complete, None if pool is None or not heard.messages else pool.resident_blocks, checks,
    )


class _Comparison:
    """The checks of one rank."""

    def __init__(self, before: _Page, after: _Page, pool: PoolFacts | None, groups: int, heard: Heard) -> None:
        self.pages = before, after
        self.pool, self.groups, self.heard = pool, groups, heard
        self._done: list[WitnessCheck] = []

    def checks(self) -> list[WitnessCheck]:
        """All checks, in the order of ``CHECKS``."""
        pool, (before, after) = self.pool, self.pages
        if pool is None or not self.heard.messages:
            for name in CHECKS:
                self._unknown(name, "the stream brought no block")
            return self._done
        size, chains = pool.info.block_tokens, pool.chains
        told = after.label("vllm:cache_config_info", "block_size") or after.number("sglang:page_size")
        self._judge("block size", size, told, told, "tokens")
        capacity = self._capacity(size)
        self._judge("capacity", pool.resident_blocks, 0, capacity, "blocks")
        self._in_use(pool, capacity)
        assert chains is not None
        self._computed(chains.stored_blocks * size, size)
        gone = (chains.stored_blocks - pool.resident_blocks) * size
        evicted = [page.number("sglang:evicted_tokens_total") for page in (before, after)]
        if self.heard.cleared:
            self._unknown("evicted", "the cache was cleared, which the page does not count")
        elif self.heard.complete:
            self._judge("evicted", gone, evicted[0], evicted[1], "tokens")
        else:
            self._unknown("evicted", "only a part of the stream was read")
        idle = [page.number("sglang:kv_evictable_tokens") if page.live == 0 else None for page in (before, after)]
        self._judge("evictable", pool.resident_blocks * size, idle[0], idle[1], "tokens")
        return self._done

    def _capacity(self, size: int) -> int | None:
        blocks = self.pages[1].label("vllm:cache_config_info", "num_gpu_blocks")
        tokens = self.pages[1].number("sglang:max_total_num_tokens")
        if blocks is not None:
            return blocks - 1  # one is vLLM's null block
        return None if tokens is None or not size else tokens // size

    def _in_use(self, pool: PoolFacts, capacity: int | None) -> None:
        """The last block of a request is partial, and drafts may have a further block."""
        shares = [page.share("vllm:kv_cache_usage_perc") for page in self.pages]
        running = [page.number("vllm:num_requests_running") for page in self.pages]
        if capacity is None or None in shares or None in running:
            self._unknown("in use", "the page does not tell it")
            return
        used = min(share for share in shares if share is not None) * capacity
        least = max(0, round(used) - 2 * max(count for count in running if count is not None))
        self._judge("in use", pool.resident_blocks * self.groups, least, None, "blocks")

    def _computed(self, stored: int, size: int) -> None:
        before, after = self.pages
        names = (("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
                 ("vllm:generation_tokens_total", "sglang:generation_tokens_total"))
        prompts, outputs = ([page.number(*each) for page in self.pages] for each in names)
        hits = [page.number("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total") for page in self.pages]
        if None in prompts or None in outputs or None in hits:
            self._unknown("computed", "the page does not tell it")
        elif not self.heard.complete:
            self._unknown("computed", "only a part of the stream was read")
        elif self.groups > 1:
            self._unknown("computed", "groups of layers keep different blocks")
        else:
            back = [page.number("sglang:load_back_tokens_total") or 0 for page in self.pages]
            least, most = ((prompts[at] or 0) + (outputs[at] or 0) + back[at] - (hits[at] or 0) for at in (0, 1))
            ended, live = before.number("vllm:request_success_total"), after.live
            requests = None
            if ended is not None and live is not None:
                requests = (after.number("vllm:request_success_total") or 0) + live
            # Requests that compute the same prompt at once store it once in SGLang, which leaves no least number.
            bottom = None if requests is None else max(0, least - requests * size)
            moving = live != 0 or after.number("vllm:num_preemptions_total")
            self._judge("computed", stored, bottom, None if moving else most, "tokens")

    def _judge(self, name: str, ours: int, least: int | None, most: int | None, unit: str) -> None:
        if least is None and most is None:
            self._unknown(name, "the page does not tell it")
            return
        more, less = most is not None and ours > most, least is not None and ours < least
        if not more and not less:
            self._done.append(WitnessCheck(name, CHECKS[name], "agrees", ours, least, most, unit, None, ""))
            return
        if self.heard.complete:
            culprit: Culprit = "stream"
            because = "it stored too much, or did not tell what was removed" if more else "it did not tell every store"
            if name == "block size":
                because = "it tells blocks of another size"
        else:
            culprit, because = "reader", "it did not get every message since the engine began"
        self._done.append(WitnessCheck(name, CHECKS[name], "differs", ours, least, most, unit, culprit, because))

    def _unknown(self, name: str, why: str) -> None:
        self._done.append(WitnessCheck(name, CHECKS[name], "unknown", None, None, None, "", None, why))
