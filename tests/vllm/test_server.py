"""vLLM's OpenAI server as a process, with tap and event stream, driven over HTTP. Run by ``make test-vllm``.

Everything is the real thing but the device (``tests.vllm.executor``): the server, its engine process, its scheduler and
its connectors, two daemons of ours. What they say is compared with the server's own answers and metrics.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from kvbm_console.analysis.requests import Requests
from kvbm_console.analysis.walk import Visitor, evidence_of, walk
from kvbm_console.client import Client
from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.ids import Measure, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from tests.server.daemons import Mirror, follow_until, socket_directory
from tests.vllm.engine import BLOCK, named, offloading
from tests.vllm.serving import complete, engine, free_ports, get, make_model, words

pytestmark = pytest.mark.timeout(600)

PROGRAM = str(Path(sys.executable).with_name("kvbm-console"))
SESSIONS, TURNS, OUTPUT, HOST = 8, 4, 40, 60
"""At once, one after the other, tokens of an answer, blocks of the host tier."""
TOLD_S = 5.0
"""A dead engine is said to have ended within this time."""
TIERS = ("--g2-blocks", "0", "--g3-blocks", "0")


def session(url: str, number: int, system: list[int]) -> dict[str, dict[str, Any]]:
    """A conversation: each prompt is the one before, its answer, and more. Request name to the server's answer."""
    dice = random.Random(number)
    prompt = [*system, *(dice.randrange(2, 1000) for _ in range(dice.randrange(30, 90)))]
    found = {}
    for turn in range(TURNS):
        name = f"s{number}t{turn}"
        found[name] = complete(url, name, prompt, OUTPUT)
        prompt += words(found[name]["choices"][0]["text"])
        prompt += [dice.randrange(2, 1000) for _ in range(dice.randrange(10, 50))]
    return found


def metrics(url: str) -> Counter[str]:
    """The sums of the server's own counters, by name."""
    found: Counter[str] = Counter()
    for line in get(f"{url}/metrics").splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] += float(value)  # type: ignore[assignment]
    return found


def residents(state: CacheState) -> dict[str, Counter[int]]:
    """Medium to the hashes that are there, with how often."""
    found: dict[str, Counter[int]] = {}
    for pool in state.pools:
        held = found.setdefault("CPU" if pool.info.medium == "CPU" else "GPU", Counter())
        held.update({key: len(pool.places_of(key)) for key in pool.by_hash})
    return found


def serve_arguments(model: Path, ports: list[int], entry: dict[str, Any] | None = None) -> list[str]:
    """Of a server with this connector, or without one."""
    connector = [] if entry is None else ["--kv-transfer-config", json.dumps(entry)]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv",
              "endpoint": f"tcp://*:{ports[1]}", "replay_endpoint": f"tcp://127.0.0.1:{ports[2]}"}
    return [
        "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m", "--host", "127.0.0.1",
        "--port", str(ports[0]), "--distributed-executor-backend", "tests.vllm.executor.FakeExecutor",
        "--load-format", "dummy", "--num-gpu-blocks-override", "64", "--block-size", str(BLOCK),
        "--max-model-len", "640", "--max-num-seqs", str(SESSIONS), "--enable-prompt-tokens-details",
        "--generation-config", "vllm", "--kv-events-config", json.dumps(events), *connector,
    ]


def tapped(target: str) -> dict[str, Any]:
    """OffloadingConnector with the tap around it."""
    return named(offloading(HOST), daemon=target)


class Told(Visitor):
    """Of a recording: what each slot's first admission found, what was evicted for whom, what an engine removed."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[int, tuple[int, int, int, int]] = {}
        self.evicted: list[tuple[int, int | None]] = []
        self.removed: list[int] = []
        self.before = {ev.BlocksEvicted: self._evicted, ev.BlocksSeen: self._seen}
        self.after = {ev.PrefixScored: self._scored}

    def _scored(self, event: ev.PrefixScored, state: CacheState) -> None:
        self.first.setdefault(event.slot, event.hits)

    def _evicted(self, event: ev.BlocksEvicted, state: CacheState) -> None:
        if state.pools[event.pool].info.medium != "CPU":
            self.evicted += [(key, event.for_slot) for key in unpack_hashes(event.hashes)]

    def _seen(self, event: ev.BlocksSeen, state: CacheState) -> None:
        if state.pools[event.pool].info.medium != "CPU":
            self.removed += unpack_hashes(event.removed)


@pytest.mark.asyncio
@pytest.mark.parametrize("at", ["scheduler", "connector"])
async def test_every_http_request_is_a_slot_and_hits_are_those_of_the_server(tmp_path: Path, at: str) -> None:
    model = make_model(tmp_path / "model")
    ports = free_ports(3)
    url = f"http://127.0.0.1:{ports[0]}"
    system = [random.Random(7).randrange(2, 1000) for _ in range(70)]
    by_tap, by_stream = Mirror(), Mirror()
    with (
        socket_directory() as place,
        engine("-P", PROGRAM, "serve", "--listen", f"unix:{place}/tap", "--record", str(tmp_path / "tap"), *TIERS,
               ready="serving on"),
        engine(*serve_arguments(model, ports, tapped(f"unix:{place}/tap") if at == "connector" else offloading(HOST)),
               ready="startup complete", VLLM_TARGET_DEVICE="cpu", VLLM_NO_USAGE_STATS="1",
               KVBM_TAP=f"unix:{place}/tap" if at == "scheduler" else ""),
        engine("-P", PROGRAM, "serve", "--listen", f"unix:{place}/stream", "--record", str(tmp_path / "stream"),
               "--engine", url, ready="serving on"),
    ):
        with ThreadPoolExecutor(SESSIONS) as pool:
            futures = [pool.submit(session, url, number, system) for number in range(SESSIONS)]
            answers = {
                name: answer for one in futures for name, answer in (await asyncio.wrap_future(one)).items()
            }
        counted = metrics(url)

        def settled() -> bool:
            tapped, streamed = by_tap.state, by_stream.state
            if tapped is None or streamed is None:
                return False
            return sum(tapped.totals.finished) == len(answers) and residents(tapped) == residents(streamed)

        async with (
            Client(f"unix:{place}/tap") as one, Client(f"unix:{place}/stream") as other,
            one.subscribe() as first, other.subscribe() as second,
        ):
            await asyncio.gather(follow_until(first, by_tap, settled), follow_until(second, by_stream, settled))
        assert by_tap.state is not None
        assert by_stream.state is not None
        assert by_tap.state.lost_sources == by_stream.state.lost_sources == {}
    requests, told, removed = Requests(), Told(), Told()
    walk(evidence_of(Recording.open(tmp_path / "tap")), (requests, told))
    walk(evidence_of(Recording.open(tmp_path / "stream")), (removed,))
    slots = {one.request.removeprefix("cmpl-").split("-")[0]: one for one in requests.all}
    assert len(requests.all) == len(answers)
    assert slots.keys() == answers.keys()
    for name, answer in answers.items():
        slot, usage = slots[name], answer["usage"]
        assert slot.complete, name
        assert slot.prompt_tokens == usage["prompt_tokens"], name
        assert (slot.states[0], slot.states[-1], slot.reason) == ("initialized", "finished", "length"), name
        assert {"prefilling", "decoding"} < set(slot.states), name
        assert sum(told.first[slot.slot]) * BLOCK == usage["prompt_tokens_details"]["cached_tokens"], name
    for tier, name in ((Tier.G1, "vllm:prefix_cache"), (Tier.G2, "vllm:external_prefix_cache")):
        found = sum(hits[tier - 1] for hits in told.first.values())
        assert found > 0
        assert found * BLOCK == counted[f"{name}_hits_total"]
    assert counted["vllm:prefix_cache_queries_total"] == sum(one.prompt_tokens for one in requests.all)
    assert counted["vllm:num_preemptions_total"] == sum(one.preemptions for one in requests.all) > 0
    # Each eviction is one that the engine published, and names the request that caused it.
    assert sorted(key for key, _ in told.evicted) == sorted(removed.removed) != []
    assert all(slot is not None for _, slot in told.evicted)


@pytest.mark.asyncio
async def test_a_stream_and_the_metrics_alone_tell_hits_and_the_death_of_the_server(tmp_path: Path) -> None:
    """The engine needs no change: the daemon has its address alone."""
    model = make_model(tmp_path / "model")
    ports = free_ports(3)
    url = f"http://127.0.0.1:{ports[0]}"
    system = [random.Random(7).randrange(2, 1000) for _ in range(70)]
    mirror = Mirror()
    with (
        socket_directory() as place,
        engine(*serve_arguments(model, ports), ready="startup complete", VLLM_TARGET_DEVICE="cpu",
               VLLM_NO_USAGE_STATS="1") as server,
        engine("-P", PROGRAM, "serve", "--listen", f"unix:{place}/d", "--engine", url, ready="serving on"),
    ):
        with ThreadPoolExecutor(SESSIONS) as pool:
            futures = [pool.submit(session, url, number, system) for number in range(SESSIONS)]
            answers = {
                name: answer for one in futures for name, answer in (await asyncio.wrap_future(one)).items()
            }
        counted = metrics(url)
        doctor = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-P", PROGRAM, "doctor", url, "--format", "json"], capture_output=True,
            text=True, timeout=120)
        assert doctor.returncode == 0, doctor.stdout + doctor.stderr
        (report,) = json.loads(doctor.stdout)
        judged = {check["check"] for check in report["checks"] if check["verdict"] == "agrees"}
        assert judged == {"block size", "capacity", "in use", "computed"}

        def told() -> bool:
            assert mirror.state is not None
            return any(
                known.values.get(Measure.QUERY_TOKENS) == counted["vllm:prefix_cache_queries_total"]
                and known.values.get(Measure.HIT_TOKENS) == counted["vllm:prefix_cache_hits_total"]
                and known.values.get(Measure.CAPACITY_BLOCKS) == 63 for known in mirror.state.measured.values()
            )

        def ended() -> bool:
            assert mirror.state is not None
            return any(mirror.state.has_ended(pool.info.source) for pool in mirror.state.pools)

        async with Client(f"unix:{place}/d") as client, client.subscribe() as items:
            await follow_until(items, mirror, told)
            assert mirror.state is not None
            assert mirror.state.lost_sources == {}
            (pool,) = mirror.state.pools
            assert pool.resident_blocks == report["resident_blocks"]
            hits = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers.values())
            assert counted["vllm:prefix_cache_hits_total"] == hits > 0
            killed = time.monotonic()
            os.killpg(server.child.pid, signal.SIGKILL)
            await follow_until(items, mirror, ended)
            assert time.monotonic() - killed < TOLD_S
            assert not mirror.state.measured, "the numbers of a dead engine are unknown"
