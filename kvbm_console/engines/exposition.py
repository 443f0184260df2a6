"""An engine's own metrics page: its numbers as ``Measure`` values, read every two seconds beside its event stream.

Theory of operation
-------------------
vLLM, SGLang, LMCache and Dynamo's KVBM serve Prometheus text at ``/metrics``. ``RULES`` maps the names of each to our
measures. The sum over all samples of a name is the value, of these samples:

- ``engine`` or ``dp_rank`` tells the data-parallel rank, where the page has several,
- ``tp_rank`` and ``pp_rank`` are 0, because each process of SGLang repeats the numbers of its rank.

    vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1200.0    QUERY_TOKENS 1200
    vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25             USED_PPM 250000
    vllm:cache_config_info{engine="0",num_gpu_blocks="64"} 1.0           CAPACITY_BLOCKS 63, without vLLM's null block

The first rule of a measure that finds a sample wins, so a newer name stands before an older name. A measure without a
sample is unknown and left out. A counter that is declared without a sample is 0.

Law of this file: the page is hostile. It is bounded in bytes and time, a line of another shape is passed over, and only
numbers leave this file.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError, UsageError
from kvbm_console.core.ids import NUMBER_MAX, Measure
from kvbm_console.engines.http import fetch, split_server

SCRAPE_EVERY_S: Final = 2.0
"""A dead engine is noticed within two such times. An engine renders its page in some ten milliseconds."""
SCRAPE_TIMEOUT_S: Final = 4.0
"""An engine that loads a model or prefills a long prompt answers late."""
PAGE_BYTES_MAX: Final = 8 * 2**20
"""vLLM's page has 100 kB per data-parallel rank."""
SAMPLES_MAX: Final = 100_000
WINDOW_NS: Final = 60 * 10**9
"""The time that the RECENT measures cover."""
FAILURES_MAX: Final = 2
"""Failed scrapes in a row until the numbers are unknown. An engine that refuses the connection is unknown at once."""

Labels = Mapping[str, str]


class PageSample(NamedTuple):
    """A line of a page."""

    name: str
    labels: Labels
    value: float


class MeasureRule(NamedTuple):
    """A measure is ``scale`` times the sum of the samples of ``name`` that have ``labels``, plus ``plus``.

    ``|`` divides the values that a label may have. With ``label`` the number stands in that label of an info metric.
    """

    measure: Measure
    name: str
    scale: float = 1.0
    labels: Labels = {}
    label: str = ""
    plus: int = 0


RULES: Final[tuple[MeasureRule, ...]] = (
    # vLLM; older releases have the names behind the newer ones
    MeasureRule(Measure.CAPACITY_BLOCKS, "vllm:cache_config_info", label="num_gpu_blocks", plus=-1),
    MeasureRule(Measure.USED_PPM, "vllm:kv_cache_usage_perc", 1e6),
    MeasureRule(Measure.USED_PPM, "vllm:gpu_cache_usage_perc", 1e6),
    MeasureRule(Measure.RUNNING, "vllm:num_requests_running"),
    MeasureRule(Measure.WAITING, "vllm:num_requests_waiting"),
    MeasureRule(Measure.PREEMPTIONS, "vllm:num_preemptions_total"),
    MeasureRule(Measure.QUERY_TOKENS, "vllm:prefix_cache_queries_total"),
    MeasureRule(Measure.QUERY_TOKENS, "vllm:gpu_prefix_cache_queries_total"),
    MeasureRule(Measure.HIT_TOKENS, "vllm:prefix_cache_hits_total"),
    MeasureRule(Measure.HIT_TOKENS, "vllm:gpu_prefix_cache_hits_total"),
    MeasureRule(Measure.BELOW_QUERY_TOKENS, "vllm:external_prefix_cache_queries_total"),
    MeasureRule(Measure.BELOW_HIT_TOKENS, "vllm:external_prefix_cache_hits_total"),
    MeasureRule(Measure.FIRST_TOKENS, "vllm:time_to_first_token_seconds_count"),
    MeasureRule(Measure.FIRST_TOKEN_NS, "vllm:time_to_first_token_seconds_sum", 1e9),
    # SGLang; capacities are tokens, which ``measures`` divides by the page size
    MeasureRule(Measure.CAPACITY_BLOCKS, "sglang:max_total_num_tokens"),
    MeasureRule(Measure.USED_PPM, "sglang:full_token_usage", 1e6),
    MeasureRule(Measure.USED_PPM, "sglang:token_usage", 1e6),
    MeasureRule(Measure.RUNNING, "sglang:num_running_reqs"),
    MeasureRule(Measure.WAITING, "sglang:num_queue_reqs"),
    MeasureRule(Measure.PREEMPTIONS, "sglang:num_retracted_requests_total"),
    MeasureRule(Measure.QUERY_TOKENS, "sglang:prompt_tokens_total"),
    MeasureRule(Measure.HIT_TOKENS, "sglang:cached_tokens_total", labels={"cache_source": "device|total"}),
    MeasureRule(Measure.BELOW_HIT_TOKENS, "sglang:cached_tokens_total", labels={"cache_source": "host|storage"}),
    MeasureRule(Measure.FIRST_TOKENS, "sglang:time_to_first_token_seconds_count"),
    MeasureRule(Measure.FIRST_TOKEN_NS, "sglang:time_to_first_token_seconds_sum", 1e9),
    MeasureRule(Measure.HOST_CAPACITY_BLOCKS, "sglang:hicache_host_total_tokens"),
    MeasureRule(Measure.HOST_USED_BLOCKS, "sglang:hicache_host_used_tokens"),
    # LMCache and Dynamo's KVBM, behind an engine
    MeasureRule(Measure.BELOW_QUERY_TOKENS, "lmcache:num_requested_tokens_total"),
    MeasureRule(Measure.BELOW_HIT_TOKENS, "lmcache:num_hit_tokens_total"),
    MeasureRule(Measure.BELOW_HIT_TOKENS, "kvbm_matched_tokens"),
    MeasureRule(Measure.OFFLOADED_BLOCKS, "kvbm_offload_blocks_d2h"),
    MeasureRule(Measure.ONBOARDED_BLOCKS, "kvbm_onboard_blocks_h2d"),
)
PAGE_SIZE: Final = "sglang:page_size"
_IN_TOKENS: Final = frozenset({
    "sglang:max_total_num_tokens", "sglang:hicache_host_total_tokens", "sglang:hicache_host_used_tokens",
})
_WANTED: Final = frozenset(rule.name for rule in RULES) | {PAGE_SIZE}
_RANKS: Final = ("engine", "dp_rank")
"""Labels that name the data-parallel rank."""
_PARALLEL: Final = ("tp_rank", "pp_rank")
_LINE: Final = re.compile(r"([a-zA-Z_:][\w:]{0,127})(?:\{(.{0,4096})\})? +(\S{1,32})(?: +-?\d{1,20})?")
_DECLARED: Final = re.compile(r"# TYPE ([a-zA-Z_:][\w:]{0,127}) counter")
_LABEL: Final = re.compile(r'([a-zA-Z_]\w{0,63})="((?:[^"\\]|\\.){0,256})"')


def samples(page: str, wanted: Container[str] = _WANTED) -> Iterator[PageSample]:
    """The samples of a page whose names are wanted, which are those that have a rule.

    >>> [found.value for found in samples('vllm:num_requests_running{engine="0"} 3.0')]
    [3.0]
    """
    count = 0
    for line in page.split("\n"):
        if line.startswith("#"):
            declared = _DECLARED.fullmatch(line.strip())
            if declared is not None and declared[1] in wanted and count < SAMPLES_MAX:
                count += 1
                yield PageSample(declared[1], {}, 0.0)
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or match[1] not in wanted:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        count += 1
        if count > SAMPLES_MAX:
            return
        if math.isfinite(value):
            yield PageSample(match[1], dict(_LABEL.findall(match[2] or "")), value)


def measures(found: Sequence[PageSample], *, rank: int = 0, block_tokens: int | None = None) -> dict[Measure, int]:
    """The measures of a data-parallel rank. ``block_tokens`` divides tokens of pages that name no page size.

    ``FIRST_TOKEN_NS`` is the sum over all requests here; ``RateWindow`` makes a mean of it.
    """
    by_name: dict[str, list[PageSample]] = {}
    for sample in of_rank(found, rank):
        by_name.setdefault(sample.name, []).append(sample)
    sizes = [sample.value for sample in by_name.get(PAGE_SIZE, ()) if sample.value >= 1]
    size = sizes[0] if sizes else block_tokens
    values: dict[Measure, int] = {}
    for rule in RULES:
        if rule.measure in values:
            continue
        known = [number for sample in by_name.get(rule.name, ()) if (number := _number(rule, sample)) is not None]
        if not known or (rule.name in _IN_TOKENS and not size):
            continue
        # An info metric has a sample for each change of its other labels.
        value = known[0] if rule.label else sum(known)
        value = value // size if rule.name in _IN_TOKENS and size else value * rule.scale
        value = round(value) + rule.plus
        if 0 <= value <= NUMBER_MAX:
            values[rule.measure] = value
    return values


def _number(rule: MeasureRule, sample: PageSample) -> float | None:
    if sample.labels and any(sample.labels.get(label) not in text.split("|") for label, text in rule.labels.items()):
        return None
    if not rule.label:
        return sample.value
    text = sample.labels.get(rule.label, "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def of_rank(found: Sequence[PageSample], rank: int) -> Iterator[PageSample]:
    """The samples of a data-parallel rank, of the first process of its tensor and pipeline parallelism."""
    ranks = {label: {sample.labels[label] for sample in found if label in sample.labels} for label in _RANKS}
    for sample in found:
        labels = sample.labels
        if any(labels.get(label, "0") != "0" for label in _PARALLEL):
            continue
        if any(len(ranks[label]) > 1 and labels.get(label, str(rank)) != str(rank) for label in _RANKS):
            continue
        yield sample


class RateWindow:
    """The counters of the last minute of one engine, for the RECENT measures."""

    def __init__(self) -> None:
        self._past: deque[tuple[int, dict[Measure, int]]] = deque()

    def take(self, values: dict[Measure, int], at_ns: int) -> dict[Measure, int]:
        """``values`` with the RECENT measures, and the mean of ``FIRST_TOKEN_NS``, as far as the window tells them."""
        past = self._past
        if past and any(values.get(measure, 0) < number for measure, number in past[-1][1].items() if measure in _SEEN):
            past.clear()  # the engine began again
        past.append((at_ns, values))
        while len(past) > 2 and at_ns - past[1][0] >= WINDOW_NS:
            past.popleft()
        first_ns, first = past[0]
        told = dict(values)
        told.pop(Measure.FIRST_TOKEN_NS, None)
        if at_ns > first_ns:
            told[Measure.RECENT_NS] = at_ns - first_ns
            for measure, recent in _RECENT:
                if measure in values and measure in first:
                    told[recent] = values[measure] - first[measure]
        firsts = values.get(Measure.FIRST_TOKENS, 0) - first.get(Measure.FIRST_TOKENS, 0)
        if firsts > 0 and Measure.FIRST_TOKEN_NS in values and Measure.FIRST_TOKEN_NS in first:
            told[Measure.FIRST_TOKEN_NS] = (values[Measure.FIRST_TOKEN_NS] - first[Measure.FIRST_TOKEN_NS]) // firsts
        return told


_RECENT: Final = (
    (Measure.QUERY_TOKENS, Measure.RECENT_QUERY_TOKENS), (Measure.HIT_TOKENS, Measure.RECENT_HIT_TOKENS),
    (Measure.BELOW_QUERY_TOKENS, Measure.RECENT_BELOW_QUERY_TOKENS),
    (Measure.BELOW_HIT_TOKENS, Measure.RECENT_BELOW_HIT_TOKENS),
)
_SEEN: Final = frozenset({measure for measure, _ in _RECENT} | {Measure.FIRST_TOKENS, Measure.FIRST_TOKEN_NS})


class ScrapeStatus(msgspec.Struct):
    """The outcome of the scrapes of one page."""

    url: str
    scrapes: int = 0
    failures: int = 0
    error: str = ""
    """Why the last scrape failed; empty if it did not."""


class ScrapedRank(NamedTuple):
    """A data-parallel rank on a page: how it reports its measures, and the size of its blocks."""

    rank: int
    report: Callable[[dict[Measure, int]], None]
    block_tokens: Callable[[], int | None]


class Scraper:
    """Reads the page at ``url`` (``http://HOST:PORT``) until cancelled, and reports the measures of each rank.

    A report without measures says that they cannot be read any more. The same measures are reported once.
    """

    def __init__(
        self, url: str, ranks: Callable[[], Iterable[ScrapedRank]], *,
        monotonic: Callable[[], int] = time.monotonic_ns, every_s: float = SCRAPE_EVERY_S,
    ) -> None:
        self.status = ScrapeStatus(url)
        self._ranks = ranks
        self._monotonic = monotonic
        self._every_s = every_s
        self._windows: dict[int, RateWindow] = {}
        self._told: dict[int, dict[Measure, int]] = {}
        self._failed = 0

    async def run(self) -> None:
        """Scrape again and again."""
        while True:
            try:
                found = await anyio.to_thread.run_sync(partial(read_page, self.status.url), abandon_on_cancel=True)
            except KvbmConsoleError as error:
                self._fail(error)
            else:
                self._take(found)
            await anyio.sleep(self._every_s)

    def _take(self, found: Sequence[PageSample]) -> None:
        self.status.scrapes += 1
        self.status.error = "" if found else f"{self.status.url}/metrics has no number that is known here"
        self._failed = 0
        now_ns = self._monotonic()
        for rank in self._ranks():
            values = measures(found, rank=rank.rank, block_tokens=rank.block_tokens())
            window = self._windows.setdefault(rank.rank, RateWindow())
            self._report(rank, window.take(values, now_ns) if values else {})

    def _fail(self, error: KvbmConsoleError) -> None:
        self.status.failures += 1
        self.status.error = str(error)
        self._failed += 1
        if self._failed >= FAILURES_MAX or "refused" in str(error):
            self._windows.clear()
            for rank in self._ranks():
                self._report(rank, {})

    def _report(self, rank: ScrapedRank, values: dict[Measure, int]) -> None:
        def steady(told: dict[Measure, int] | None) -> dict[Measure, int] | None:
            return told and {measure: value for measure, value in told.items() if measure is not Measure.RECENT_NS}

        if steady(self._told.get(rank.rank)) != steady(values):
            self._told[rank.rank] = values
            rank.report(values)


def read_page(url: str, wanted: Container[str] = _WANTED) -> list[PageSample]:
    """The wanted samples of an engine's page. Raises ``ConnectionLost`` and ``UsageError``."""
    host, port, tls = split_server(url)
    status, body = fetch(url, host, port, tls, "/metrics", timeout_s=SCRAPE_TIMEOUT_S, bytes_max=PAGE_BYTES_MAX)
    if status == 404:
        raise UsageError(f"{url} has no /metrics; SGLang serves its metrics with --enable-metrics")
    if status != 200:
        raise ConnectionLost(f"{url}/metrics answers with status {status}")
    return list(samples(body.decode(errors="replace"), wanted))
