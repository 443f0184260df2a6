"""An engine's own metrics page: the names of each engine, hostile pages, and a server that comes and goes."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.core.errors import ConnectionLost, UsageError
from kvbm_console.core.ids import Measure
from kvbm_console.engines import exposition
from kvbm_console.engines.exposition import RateWindow, ScrapedRank, Scraper, measures, read_page, samples
from kvbm_console.stream.publishers import measure_texts

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m, \\"x\\"}"} 3.0
vllm:num_requests_running{engine="1",model_name="m, \\"x\\"}"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1200.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 7.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1.0e+03 1700000000000
vllm:cache_config_info{engine="0",num_gpu_blocks="64",sliding_window="None"} 1.0
vllm:cache_config_info{engine="1",num_gpu_blocks="None"} 1.0
vllm:num_requests_waiting{engine="0"} NaN
vllm:time_to_first_token_seconds_sum{engine="0"} 4.5
vllm:time_to_first_token_seconds_count{engine="0"} 9
vllm:num_preemptions_total{engine="0"} -1
"""
SGLANG = """
sglang:max_total_num_tokens{model_name="m",tp_rank="0",pp_rank="0"} 4096.0
sglang:max_total_num_tokens{model_name="m",tp_rank="1",pp_rank="0"} 4096.0
sglang:num_running_reqs{model_name="m",tp_rank="0",pp_rank="0"} 2.0
sglang:num_running_reqs{model_name="m",tp_rank="1",pp_rank="0"} 2.0
sglang:token_usage{tp_rank="0"} 0.5
sglang:prompt_tokens_total{is_streaming="true"} 300
sglang:prompt_tokens_total{is_streaming="false"} 100
sglang:cached_tokens_total{cache_source="device"} 128
sglang:cached_tokens_total{cache_source="host"} 32
sglang:cached_tokens_total{cache_source="storage"} 16
"""


def test_the_numbers_of_vllm_by_rank_and_nothing_that_is_unknown() -> None:
    found = list(samples(VLLM))
    assert measures(found, rank=0) == {
        Measure.RUNNING: 3, Measure.USED_PPM: 250_000, Measure.QUERY_TOKENS: 1200, Measure.HIT_TOKENS: 1000,
        Measure.CAPACITY_BLOCKS: 63, Measure.FIRST_TOKENS: 9, Measure.FIRST_TOKEN_NS: 4_500_000_000,
    }
    assert measures(found, rank=1) == {Measure.RUNNING: 5, Measure.QUERY_TOKENS: 7}
    assert measures(list(samples("")), rank=0) == {}


def test_the_numbers_of_sglang_in_blocks_of_its_own_size() -> None:
    found = list(samples(SGLANG))
    expected = {
        Measure.CAPACITY_BLOCKS: 256, Measure.RUNNING: 2, Measure.USED_PPM: 500_000, Measure.QUERY_TOKENS: 400,
        Measure.HIT_TOKENS: 128, Measure.BELOW_HIT_TOKENS: 48,
    }
    assert measures(found, block_tokens=16) == expected
    unknown = measures(found)
    assert Measure.CAPACITY_BLOCKS not in unknown, "tokens are no blocks"
    sized = list(samples(SGLANG + "sglang:page_size 64\n"))
    assert measures(sized, block_tokens=16)[Measure.CAPACITY_BLOCKS] == 64


def test_a_counter_that_is_declared_and_never_grew_is_zero() -> None:
    page = "# TYPE sglang:cached_tokens_total counter\nsglang:prompt_tokens_total 5\n"
    assert measures(list(samples(page)))[Measure.HIT_TOKENS] == 0
    assert Measure.HIT_TOKENS not in measures(list(samples("sglang:prompt_tokens_total 5\n")))


LINES = some.lists(some.sampled_from(VLLM.split("\n")), max_size=9).map("\n".join)


@given(some.text(max_size=300) | LINES, some.data())
def test_any_page_is_read_and_only_numbers_come_out(page: str, data: some.DataObject) -> None:
    cut = data.draw(some.integers(0, len(page)))
    for text in (page, page[:cut], page[cut:]):
        for value in measures(list(samples(text))).values():
            assert type(value) is int
            assert value >= 0


def test_long_lines_and_many_samples_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "SAMPLES_MAX", 10)
    page = "vllm:num_requests_running 1\n" * 50
    assert len(list(samples(page))) == 10
    assert len(list(samples("# TYPE vllm:num_preemptions_total counter\n" * 50))) == 10
    assert list(samples('vllm:num_requests_running{a="' + "x" * 100_000 + '"} 1')) == []
    assert list(samples("vllm:num_requests_running 1" + "0" * 100)) == []


def test_a_window_tells_the_last_minute_and_forgets_an_engine_that_began_again() -> None:
    window = RateWindow()
    q, h, first, ns = Measure.QUERY_TOKENS, Measure.HIT_TOKENS, Measure.FIRST_TOKENS, Measure.FIRST_TOKEN_NS
    second = 10**9
    assert window.take({q: 100, h: 50, first: 2, ns: 10}, 0) == {q: 100, h: 50, first: 2}
    told = window.take({q: 300, h: 150, first: 4, ns: 30}, 30 * second)
    assert (told[Measure.RECENT_QUERY_TOKENS], told[Measure.RECENT_HIT_TOKENS], told[ns]) == (200, 100, 10)
    told = window.take({q: 300, h: 150, first: 4, ns: 30}, 70 * second)
    assert (told[Measure.RECENT_NS], told[Measure.RECENT_QUERY_TOKENS]) == (70 * second, 200)
    told = window.take({q: 300, h: 150, first: 4, ns: 30}, 95 * second)
    assert told[Measure.RECENT_QUERY_TOKENS] == 0
    assert ns not in told, "no request got its first token in the last minute"
    assert Measure.RECENT_QUERY_TOKENS not in window.take({q: 5, h: 5}, 97 * second)


def test_the_words_of_the_numbers() -> None:
    assert measure_texts({}) == []
    recent = {"query_tokens": 900, "hit_tokens": 0, "recent_query_tokens": 200, "recent_hit_tokens": 50,
              "recent_ns": 60 * 10**9, "waiting": 0}
    assert [text for _, text in measure_texts(recent)] == [
        "hit rate 25.0 % of 200 prompt tokens, last 60 s", "0 waiting"]
    quiet = recent | {"recent_query_tokens": 0}
    assert measure_texts(quiet)[0][1] == "hit rate 0.0 % of 900 prompt tokens, since the engine began"


class Page:
    """The answers of the server below, one after the other; the last answer stays."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)

    def next(self) -> tuple[int, str]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def serving(page: Page) -> Iterator[str]:
    """A real HTTP server with that page, and its address."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = page.next()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_page_that_is_missing_or_too_large_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Page((404, ""))) as url, pytest.raises(UsageError, match="--enable-metrics"):
        read_page(url)
    with serving(Page((500, ""))) as url, pytest.raises(ConnectionLost, match="status 500"):
        read_page(url)
    monkeypatch.setattr(exposition, "PAGE_BYTES_MAX", 100)
    with serving(Page((200, "x" * 101))) as url, pytest.raises(UsageError, match="more than 100 bytes"):
        read_page(url)


@pytest.mark.asyncio
async def test_numbers_that_stay_are_told_once_and_a_dead_engine_is_unknown() -> None:
    told: list[dict[Measure, int]] = []
    news = asyncio.Event()

    def report(values: dict[Measure, int]) -> None:
        told.append(values)
        news.set()

    async def next_report() -> dict[Measure, int]:
        await asyncio.wait_for(news.wait(), 20)
        news.clear()
        return told[-1]

    one, two = "vllm:num_requests_running 1\n", "vllm:num_requests_running 2\n"
    page = Page((200, one), (200, one), (500, ""), (200, one), (200, two))
    with serving(page) as url:
        scraper = Scraper(url, lambda: [ScrapedRank(0, report, lambda: 16)], every_s=0.01)
        task = asyncio.create_task(scraper.run())
        assert (await next_report())[Measure.RUNNING] == 1
        assert (await next_report())[Measure.RUNNING] == 2
        assert len(told) == 2, "one failed reading leaves the numbers"
    assert await next_report() == {}
    task.cancel()
    assert "does not answer" in scraper.status.error
