"""The features of vLLM under which the tap is compared with the scheduler, step by step.

``make test-vllm`` runs each feature with the installed release, and ``tests.vllm.matrix`` with many releases. A run
drives vLLM's own scheduler, and after each step the tap's leader is compared with the scheduler (``truth``).

Law of this file: a run counts only if its feature has happened in the engine, as ``proves`` states it.
"""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from vllm.v1.request import RequestStatus

from kvbm_console.tap import vllm as binding
from tests.tap.watching import Watching
from tests.vllm import adapters, outside
from tests.vllm.adapters import NoSuchFeature, made
from tests.vllm.engine import Arrival, Engine, named, offloading, tap
from tests.vllm.truth import Differs, Witness, compare, compare_below, compare_evictions

SHAPE: Final = (2, 6, 3)
"""Seed, sessions and turns of a workload."""
SIMPLE: Final = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
NOT_HYBRID: Final = ("ExampleConnector", "LMCacheConnectorV1")
"""Connectors without support for hybrid memory. The tap around one keeps its name, so that vLLM sees that."""
DIRECTORY: Final = "DIRECTORY"
"""Stands in a connector's entry for a directory of the run."""
RESET_EVERY: Final = 12
"""Steps between two resets of the prefix cache."""


class Kept:
    """Stands for the sender: keeps what it was made of, and starts nothing."""

    def __init__(self, recorder: Any, flattener: Any, settings: Any, **_: Any) -> None:
        self.recorder, self.flattener, self.settings = recorder, flattener, settings

    def start(self) -> None:
        return


def workload(seed: int, sessions: int, turns: int) -> list[Arrival]:
    """(step of arrival, name, prompt, output): sessions whose prompts grow and share a system prompt."""
    dice = random.Random(seed)
    system = [dice.randrange(1000) for _ in range(40)]
    found = []
    for session in range(sessions):
        prompt = system + [dice.randrange(1000) for _ in range(dice.randrange(20, 90))]
        at = session * 2
        for turn in range(turns):
            found.append((at, f"s{session}t{turn}", list(prompt), dice.randrange(4, 40)))
            prompt += [dice.randrange(1000) for _ in range(dice.randrange(10, 60))]
            at += dice.randrange(20, 50)
    return sorted(found)


def twins(seed: int) -> list[Arrival]:
    """Pairs of requests with the same prompt that arrive in one step, each prompt again and again."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(1000) for _ in range(length)] for length in (24, 40, 55, 70, 83, 110, 128, 135)]
    found = []
    for pair in range(24):
        prompt = dice.choice(prompts)
        found += [(5 * pair, f"s{pair}t{twin}", list(prompt), dice.randrange(1, 12)) for twin in range(2)]
    return found


@dataclass(frozen=True)
class Feature:
    """A configuration and a load. ``proves`` names what must have happened in the engine, among ``Proof``'s counts."""

    title: str
    connector: Callable[[], dict[str, Any]] | None = None
    """The connector that the tap stands around; without it the tap is alone."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``Engine``."""
    shape: tuple[int, int, int] = SHAPE
    """Arguments of the workload."""
    twins: bool = False
    """Pairs of equal prompts arrive in one step, in place of the workload."""
    proves: tuple[str, ...] = ("hits", "evictions")
    aborts: float = 0.0
    resets: bool = False
    arguments: Callable[[str], dict[str, Any]] | None = None
    """Further arguments of the request of a name."""
    transfer: Callable[[str, list[int]], dict[str, Any] | None] | None = None
    """Transfer parameters of the request of a name with a prompt."""
    copies: int = 1
    """Requests that vLLM's front end makes of one."""
    ranks: int = 1
    beside: bool = False
    """The tap stands beside the connector in a MultiConnector, and not around it."""
    own_name: bool = False
    """The connector keeps its own name in the configuration of the tap around it."""
    certain: bool = True
    """Every count is certain; else every step must carry the ``?``."""


WAYS: Final = ("scheduler", "connector")
"""The places of the tap."""


def _engine(feature: Feature, directory: Path, way: str, rank: int) -> Engine:
    if way == "connector":
        return Engine(directory, _transfer(feature, directory), rank=rank, **feature.engine)
    return Engine(directory, _inside(feature, directory), hook={}, rank=rank, **feature.engine)


def _prepare(engine: Engine, feature: Feature) -> None:
    """Give the engine the requests' further arguments and the other side of its connector."""
    if feature.arguments is not None:
        engine.arguments = feature.arguments
    if feature.transfer is not None:
        engine.transfer = feature.transfer
    outside.attend(engine)


def _inside(feature: Feature, directory: Path) -> dict[str, Any] | None:
    """The entry of the connector; a connector that keeps files has a directory below this one."""
    inside = None if feature.connector is None else feature.connector()
    text = json.dumps(inside).replace(DIRECTORY, str(directory / "kept"))
    found: dict[str, Any] | None = json.loads(text)
    return found


def _transfer(feature: Feature, directory: Path) -> dict[str, Any]:
    inside = _inside(feature, directory)
    if feature.beside:
        assert inside is not None
        return {"kv_connector": "MultiConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [inside, tap()]}}
    if feature.own_name or (inside is not None and inside["kv_connector"] in NOT_HYBRID):
        assert inside is not None
        return named(inside)
    policy = {} if inside is None else {name: inside[name] for name in ("kv_load_failure_policy",) if name in inside}
    return {**tap(inside), **policy}


def _multi() -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [offloading(40), dict(SIMPLE, kv_connector_extra_config={
                "cpu_bytes_to_use": 40 * adapters.PAGE})]}}


def _simple() -> dict[str, Any]:
    return dict(SIMPLE, kv_connector_extra_config={"cpu_bytes_to_use": 40 * adapters.PAGE})


def _tiers() -> dict[str, Any]:
    entry = offloading(40, spec_name="TieringOffloadingSpec", secondary_tiers=[
        {"type": "fs", "root_dir": DIRECTORY, "n_read_threads": 1, "n_write_threads": 1}])
    del entry["kv_connector_extra_config"]["self_describing_kv_events"]  # some releases refuse it with tiers
    return entry


def _nixl() -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}


def _policy(policy: str) -> Callable[[], dict[str, Any]]:
    return lambda: {**offloading(60), "kv_load_failure_policy": policy}


def _salt(name: str) -> dict[str, Any]:
    return {"cache_salt": f"tenant {name[:2] in ('s0', 's1', 's2')}"}


def _lora(name: str) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    number = int(name[1]) % 3
    return {} if not number else {"lora_request": LoRARequest(f"adapter {number}", number, "/nowhere")}


def _priority(name: str) -> dict[str, Any]:
    return {"priority": 5 - int(name[1])}


HOST: Final[dict[str, Any]] = {"blocks": 48, "running": 4}
BELOW: Final = ("hits", "evictions", "loads", "below")
FEATURES: Final[dict[str, Feature]] = {
    "alone": Feature("alone", engine={"blocks": 36}, proves=("hits", "evictions", "preemptions")),
    "batched": Feature("alone, large steps", engine={"blocks": 64, "tokens": 2048}),
    "lru": Feature("OffloadingConnector, LRU", lambda: offloading(40), HOST, proves=BELOW),
    "arc": Feature("OffloadingConnector, ARC", lambda: offloading(40, eviction_policy="arc"), HOST, proves=BELOW),
    "own-name": Feature("OffloadingConnector under its own name", lambda: offloading(40), HOST, proves=BELOW,
                        own_name=True),
    "tiers": Feature("OffloadingConnector, host and directory", _tiers, {**HOST, "running": 3, "events": False},
                     (5, 6, 4), proves=("hits", "evictions", "loads")),
    "simple": Feature("SimpleCPUOffloadConnector", _simple, HOST, proves=BELOW),
    "sync": Feature("ExampleConnector, loads inside the step", lambda: outside.example(DIRECTORY),
                    {"blocks": 28, "tokens": 2048}, twins=True, proves=("hits", "evictions", "loads")),
    "lmcache": Feature("LMCacheConnectorV1", outside.lmcache, HOST, proves=("hits", "evictions", "loads")),
    "lmcache-twins": Feature("LMCacheConnectorV1, equal prompts in one step", outside.lmcache,
                             {"blocks": 28, "tokens": 2048}, twins=True, proves=("hits", "evictions", "loads")),
    "nixl": Feature("NixlConnector", _nixl, HOST, proves=("hits", "evictions", "loads"), transfer=outside.from_peer),
    "beside": Feature("beside OffloadingConnector in MultiConnector", lambda: offloading(40), HOST,
                      proves=("hits", "evictions", "loads"), beside=True),
    "multi": Feature("around MultiConnector", _multi, HOST, proves=BELOW),
    "hybrid": Feature("hybrid: full and sliding window", engine={"blocks": 34, "groups": ("full", "window")},
                      proves=("hits", "evictions", "preemptions")),
    "hybrid-lru": Feature("hybrid with OffloadingConnector", lambda: offloading(60),
                          {"blocks": 34, "groups": ("full", "window")}, proves=("hits", "evictions")),
    "three-groups": Feature("hybrid: three groups", engine={"blocks": 44, "groups": ("window", "full", "window")}),
    "sizes": Feature("hybrid: blocks of two sizes", engine={"blocks": 34, "groups": ("wide", "window")}),
    "chunked-local": Feature("hybrid: full and chunked local", engine={"blocks": 40, "groups": ("full", "chunked")}),
    "mamba": Feature("hybrid: full and Mamba", engine={
        "blocks": 60, "groups": ("full", "mamba"), "mamba_cache_mode": "align"}),
    "mla": Feature("MLA", engine={"blocks": 36, "groups": ("mla",)}),
    "window": Feature("sliding window alone", engine={"blocks": 40, "running": 5, "groups": ("window",)},
                      proves=("hits", "evictions")),
    "windows": Feature("sliding windows alone, two groups", engine={"blocks": 60, "groups": ("window", "window")}),
    "chunked-alone": Feature("chunked local attention alone", engine={"blocks": 40, "groups": ("chunked",)}),
    "window-aborts": Feature("sliding window alone, aborts", engine={"blocks": 36, "groups": ("window",)},
                             aborts=0.15, proves=("hits", "evictions", "aborts")),
    "window-drafts": Feature("sliding window alone, speculative decoding",
                             engine={"blocks": 40, "groups": ("window",), "drafts": 3}),
    "window-async": Feature("sliding window alone, asynchronous scheduling", engine={
        "blocks": 36, "groups": ("window",), "scheduling": {"async_scheduling": True}}),
    "window-resets": Feature("sliding window alone, resets", engine={"blocks": 48, "groups": ("window",)}, resets=True,
                             proves=("resets", "preemptions")),
    "window-lru": Feature("sliding window alone, OffloadingConnector", lambda: offloading(40),
                          {**HOST, "groups": ("window",)}),
    "recompute": Feature("failed loads, computed again", _policy("recompute"),
                         {"blocks": 32, "running": 5, "fail_every": 3}, (3, 8, 4), aborts=0.02,
                         proves=("hits", "evictions", "preemptions", "aborts", "failed loads")),
    "refuse": Feature("failed loads, request fails", _policy("fail"), {"blocks": 32, "running": 5, "fail_every": 3},
                      (4, 5, 3), proves=("hits", "evictions", "failed loads")),
    "aborts": Feature("aborts", engine={"blocks": 40}, aborts=0.15, proves=("hits", "evictions", "aborts")),
    "aborts-lru": Feature("aborts with OffloadingConnector", lambda: offloading(40), HOST, aborts=0.15,
                          proves=("hits", "evictions", "aborts")),
    "priority": Feature("priorities", engine={"blocks": 36, "scheduling": {"policy": "priority"}},
                        arguments=_priority, proves=("hits", "evictions", "preemptions")),
    "async": Feature("asynchronous scheduling", engine={"blocks": 36, "scheduling": {"async_scheduling": True}},
                     proves=("hits", "evictions", "preemptions")),
    "async-lru": Feature("asynchronous scheduling with OffloadingConnector", lambda: offloading(40),
                         {**HOST, "scheduling": {"async_scheduling": True}}, proves=BELOW),
    "whole": Feature("chunked prefill off", engine={
        "blocks": 60, "tokens": 2048, "scheduling": {"enable_chunked_prefill": False}}),
    "uncached": Feature("prefix caching off", engine={"blocks": 36, "caching": False}, proves=("preemptions",)),
    "uncached-lru": Feature("prefix caching off, OffloadingConnector", lambda: offloading(40),
                            {"blocks": 36, "caching": False}, proves=("loads",)),
    "resets": Feature("resets of the prefix cache", engine={"blocks": 48, "running": 4}, resets=True,
                      proves=("resets", "preemptions")),
    "resets-hybrid": Feature("resets, hybrid", engine={"blocks": 48, "running": 4, "groups": ("full", "window")},
                             resets=True, proves=("resets", "preemptions")),
    "resets-lru": Feature("resets with OffloadingConnector", lambda: offloading(40), HOST, resets=True,
                          proves=("resets",)),
    "lora": Feature("LoRA", engine={"blocks": 36}, arguments=_lora),
    "salt": Feature("salts", engine={"blocks": 36}, arguments=_salt),
    "ranks": Feature("DP 2", engine={"blocks": 36}, ranks=2),
    "copies": Feature("n = 3", engine={"blocks": 48}, copies=3),
    "drafts": Feature("speculative decoding", engine={"blocks": 40, "drafts": 3}),
    "drafts-lru": Feature("speculative decoding, OffloadingConnector", lambda: offloading(40),
                          {**HOST, "drafts": 3}, proves=BELOW),
}
"""Features by name, in the order of the table."""


class Run:
    """One engine under a feature, with the tap's leader beside it."""

    def __init__(
        self, feature: Feature, directory: Path, way: str, rank: int = 0, other: Watching | None = None
    ) -> None:
        self.feature, self.source = feature, rank + 1
        self.engine = engine = _engine(feature, directory, way, rank)
        _prepare(engine, feature)
        self.witness = Witness(engine)
        at = engine.tap
        if feature.beside:
            (at,) = (one for one in engine.connector._connectors if type(one).__name__ == "KvbmTap")
        if not hasattr(at, "sender"):
            raise NoSuchFeature("this release takes its own class for a name that it knows")
        sender, self.settings = at.sender, at.sender.settings
        sender.recorder.audit_every = min(1, sender.recorder.audit_every)
        self.watch = Watching(
            sender.recorder, sender.flattener, sender.settings, source=self.source, beside=other)
        self.proof: Counter[str] = Counter()
        """Counts of what happened in the engine."""
        self.steps = self.equal = self.doubted = 0
        self.reasons: list[str] = []

    def steps_of(self, requests: list[Arrival]) -> Iterator[None]:
        """Run to the end, and compare after each step."""
        for output in self.engine.run(requests, aborts=self.feature.aborts, before=self._before):
            self._count(output)
            self.steps += 1
            before = len(self.reasons)
            self._guarded(self.watch.pump)
            self._guarded(lambda output=output: self._compare(output))
            self.equal += len(self.reasons) == before
            yield
        self._guarded(self.watch.pump)
        self._guarded(self._finish)

    def _guarded(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            self.reasons.append(str(error) or "an assertion of the leader failed")

    def _before(self) -> None:
        scheduler = self.engine.scheduler
        if self.feature.resets and self.engine.steps % RESET_EVERY == RESET_EVERY - 1:
            try:
                # A release before 0.12 cannot reset while requests run, and refuses.
                self.proof["resets"] += bool(made(scheduler.reset_prefix_cache, reset_running_requests=True))
            except RuntimeError as error:
                if not str(error).startswith("Failed to reset KV cache"):
                    raise  # refused while a load is in flight, as vLLM's text says

    def _count(self, output: Any) -> None:
        requests = self.engine.scheduler.requests.values()
        self.proof["preemptions"] = max(self.proof["preemptions"], sum(one.num_preemptions for one in requests))
        self.proof["loads"] += sum(one.status is RequestStatus.WAITING_FOR_REMOTE_KVS for one in requests)
        self.proof["hits"] = sum(found[0] for found in self.engine.cached.values())
        self.proof["loads"] += sum(found[1] for found in self.engine.cached.values())
        self.proof["loads"] += self.engine.copies.loads
        self.proof["aborts"] = self.engine.aborted
        self.proof["failed loads"] = self.engine.copies.failed

    def _compare(self, output: Any) -> None:
        state, feature = self.watch.leader.state, self.feature
        doubted, uncertain = bool(state.lost_sources), not feature.certain or self.settings.uncertain
        if doubted is not uncertain:
            raise Differs(f"counts are {'' if not doubted else 'not '}certain")
        self.doubted += doubted
        if doubted:
            self.proof["evictions"] += len(self.witness.evicted)
            self.witness.evicted.clear()
            return
        self.proof["evictions"] += compare_evictions(self.witness, self.watch.events, state, self.source)
        compare(self.engine, state, set(output.num_scheduled_tokens), source=self.source, beside=feature.beside)
        told = feature.engine.get("caching", True) and feature.engine.get("events", True)
        if feature.connector is not None and not feature.beside and told:
            self.proof["below"] += compare_below(self.engine, state, self.source)

    def _finish(self) -> None:
        watch = self.watch
        if watch.rejected:
            raise Differs(f"{len(watch.rejected)} reports rejected, the first: {watch.rejected[0]}")
        if watch.recorder.errors:
            raise Differs(f"{watch.recorder.errors} errors inside the tap")
        if watch.translator.differing:
            raise Differs(f"audits found {watch.translator.differing} differences")
        if not self.doubted and watch.recorder.places_known and not watch.translator.audited:
            raise Differs("nothing was audited")
        if watch.mirror.totals != watch.leader.state.totals:
            raise Differs("a mirror of the events has other totals")
        slots = [slot for slot in watch.leader.state.slots.values() if slot.source == self.source]
        if slots:
            raise Differs(f"{len(slots)} slots left at the end")


@dataclass(frozen=True)
class Outcome:
    """Steps compared, equal steps, and the points in which others differ."""

    steps: int
    equal: int
    reasons: tuple[str, ...]
    unproved: tuple[str, ...]
    """Parts of the feature that have not happened."""
    doubted: int = 0
    """Steps in which every count carried the ``?``, so that nothing was compared."""

    @property
    def right(self) -> bool:
        """True if every step was equal and the feature has happened."""
        return self.steps == self.equal > 0 and not self.reasons and not self.unproved


def requests_of(feature: Feature) -> list[Arrival]:
    """The requests of a feature. vLLM's front end names the n requests that it makes of one ``0_NAME``, ``1_NAME``."""
    found = twins(feature.shape[0]) if feature.twins else workload(*feature.shape)
    if feature.copies == 1:
        return found
    return [(step, f"{number}_{name}", prompt, output) for step, name, prompt, output in found
            for number in range(feature.copies)]


def run_feature(feature: Feature, directory: Path, way: str = "scheduler") -> Outcome:
    """Run a feature with the imported release and the tap in one of ``WAYS``.

    Raises the release's own errors, and ``NoSuchFeature``."""
    if way == "scheduler" and (feature.beside or feature.own_name):
        raise NoSuchFeature("the tap at the scheduler leaves connectors as they are")
    binding.Sender = Kept  # type: ignore[misc,assignment]
    runs: list[Run] = []
    for rank in range(feature.ranks):
        place = directory / str(rank)
        place.mkdir()
        runs.append(Run(feature, place, way, rank, runs[0].watch if runs else None))
    requests = requests_of(feature)
    lives = [run.steps_of([each for at, each in enumerate(requests) if at % len(runs) == rank])
             for rank, run in enumerate(runs)]
    for _ in itertools.zip_longest(*lives):
        pass
    reasons = list(dict.fromkeys(_plain(reason) for run in runs for reason in run.reasons))
    proof = sum((run.proof for run in runs), Counter())
    return Outcome(
        sum(run.steps for run in runs), sum(run.equal for run in runs), tuple(reasons),
        tuple(name for name in feature.proves if not proof[name]), sum(run.doubted for run in runs),
    )


def _plain(reason: str) -> str:
    """A reason in one line, without the numbers that differ from step to step."""
    return re.sub(r"\s+", " ", reason)[:200]


def without_tap(feature: Feature, directory: Path) -> None:
    """Run a feature without a tap, to find out if the release itself fails. Raises the release's own errors."""
    engine = Engine(directory, _inside(feature, directory), **feature.engine)
    _prepare(engine, feature)
    run = replace(feature, beside=False)
    plain = Run.__new__(Run)
    plain.feature, plain.engine, plain.proof = run, engine, Counter()
    for _ in engine.run(requests_of(feature), aborts=feature.aborts, before=plain._before):
        pass


__all__ = ["FEATURES", "Feature", "NoSuchFeature", "Outcome", "run_feature", "without_tap"]
