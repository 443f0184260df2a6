"""Stream and metrics page of one engine, compared: each side is made wrong in turn, and the side is named."""

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvbm_console.engines.exposition import PageSample, samples
from kvbm_console.engines.witness import CHECKS, COUNTED, Heard, WitnessReport, compare
from tests.engines.payloads import removed, stored
from tests.engines.test_commands import run
from tests.engines.test_discovery import Server, server  # noqa: F401
from tests.engines.test_stream import SOURCE, House
from tests.engines.test_zmq_source import Engine

CONFIG = 'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="64"} 1.0\n'


def vllm(prompts: int, outputs: int, hits: int, ended: int, *, running: int = 0, used: float = 0.0) -> str:
    return CONFIG + "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in {
        "prompt_tokens_total": prompts, "generation_tokens_total": outputs, "prefix_cache_hits_total": hits,
        "request_success_total": ended, "num_requests_running": running, "num_requests_waiting": 0,
        "num_preemptions_total": 0, "kv_cache_usage_perc": used,
    }.items())


def sglang(evicted: int, evictable: int, *, running: int = 0) -> str:
    return "".join(f'sglang:{name}{{tp_rank="0"}} {value}\n' for name, value in {
        "max_total_num_tokens": 1024, "page_size": 16, "num_running_reqs": running, "num_queue_reqs": 0,
        "evicted_tokens_total": evicted, "kv_evictable_tokens": evictable,
    }.items())


def page(text: str) -> list[PageSample]:
    return list(samples(text, COUNTED))


def judged(house: House, before: str, after: str | None = None, *, complete: bool = True) -> WitnessReport:
    heard = Heard(SOURCE, "e:1", 0, house.stream.counts.batches, complete, house.stream.counts.clears > 0)
    report = compare(
        "http://e", page(before), page(before if after is None else after), house.dispatcher.leader.state, heard)
    assert [check.check for check in report.checks] == list(CHECKS)
    return report


def verdicts(report: WitnessReport) -> dict[str, str]:
    return {check.check: check.verdict for check in report.checks if check.verdict != "unknown"}


def told(blocks: int, **more: Any) -> House:
    house = House(snapshots=False)
    house.send(stored(*range(1, blocks + 1), **more))
    return house


def test_a_stream_and_a_page_of_one_truth_agree() -> None:
    report = judged(told(40), vllm(600, 60, 0, 2))
    assert report.ok
    assert verdicts(report) == dict.fromkeys(("block size", "capacity", "in use", "computed"), "agrees")
    house = told(40)
    house.send(removed(1), removed(2))
    report = judged(house, sglang(32, 38 * 16))
    assert report.ok
    assert verdicts(report) == dict.fromkeys(("block size", "capacity", "evicted", "evictable"), "agrees")


@pytest.mark.parametrize(("house", "before", "broken"), [
    (lambda: told(40, size=32), vllm(1280, 0, 0, 1), "block size"),
    (lambda: told(64), vllm(1024, 0, 0, 1), "capacity"),
    (lambda: told(20), vllm(330, 0, 0, 1, running=1, used=30 / 63), "in use"),
    (lambda: told(40), vllm(800, 0, 0, 2), "computed"),
    (lambda: told(40), vllm(640, 0, 16, 2), "computed"),
    (lambda: told(40), sglang(16, 40 * 16), "evicted"),
    (lambda: told(40), sglang(0, 39 * 16), "evictable"),
])
def test_a_difference_is_the_streams_if_every_message_was_read(
    house: Callable[[], House], before: str, broken: str
) -> None:
    made = house()
    report = judged(made, before)
    (check,) = [check for check in report.checks if check.verdict == "differs"]
    assert (check.check, check.culprit, report.ok) == (broken, "stream", False)
    assert check.ours is not None
    report = judged(made, before, complete=False)
    culprits = {check.culprit for check in report.checks if check.verdict == "differs"}
    assert culprits <= {"reader"}, "a reader that missed messages proves nothing against the stream"


def test_an_engine_at_work_gives_bounds() -> None:
    """While requests run their prompts are computed and not yet counted, so no page says how much is too much."""
    report = judged(told(40), vllm(500, 0, 0, 1, running=3), vllm(520, 0, 0, 1, running=3))
    (check,) = [check for check in report.checks if check.check == "computed"]
    assert (check.verdict, check.least, check.most) == ("agrees", 500 - 4 * 16, None)
    assert "evictable" not in verdicts(judged(told(40), sglang(0, 0, running=1)))


def test_a_stream_without_a_message_decides_nothing() -> None:
    report = judged(House(snapshots=False), vllm(0, 0, 0, 0))
    assert (report.ok, report.resident_blocks, verdicts(report)) == (True, None, {})


@pytest.fixture
def engine() -> Iterator[Engine]:
    one = Engine(topic_in_replay=True)
    yield one
    one.end()


@pytest.mark.parametrize(("prompts", "status"), [(48, 0), (480, 1)])
def test_doctor_compares_a_live_engine(server: Server, engine: Engine, prompts: int, status: int) -> None:  # noqa: F811
    url = server({
        "/kv_event_sources": {"0": {"endpoint": f"tcp://*:{engine.port}",
                                    "replay_endpoint": f"tcp://*:{engine.replay_port}", "topic": "kv"}},
        "/metrics": vllm(prompts, 0, 0, 1).encode(),
    })
    engine.publish([stored(1, 2, 3)])
    done: subprocess.CompletedProcess[str] = run("doctor", url, "--seconds", "1", "--format", "json")
    assert done.returncode == status, done.stderr
    (report,) = json.loads(done.stdout)
    assert (report["messages"], report["complete"], report["resident_blocks"]) == (1, True, 3)
    assert {check["check"]: check["culprit"] for check in report["checks"] if check["verdict"] == "differs"} == (
        {"computed": "stream"} if status else {})
    text = run("doctor", url, "--seconds", "1")
    assert ("the engine's event stream is wrong" in text.stdout) is bool(status)
    assert text.returncode == status
