"""The tap around vLLM's own tiers, under vLLM's own manager. Run by ``make test-vllm``."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvbm_console.core import events as ev
from kvbm_console.tap import vllm as binding
from kvbm_console.tap.copies import ConnectorWatch
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.tiers import TierTap
from kvbm_console.tap.vllm_tier import KvbmTier
from tests.tap.watching import Watching
from tests.vllm.engine import Engine
from tests.vllm.features import Kept, workload
from tests.vllm.test_copies import tiered
from tests.vllm.tiered import HERE, Below, files, key, measure, tapped
from tests.vllm.truth import compare

pytestmark = pytest.mark.timeout(600)
KEYS = [key(number) for number in range(1, 65)]
BARE_STORE_NS = 1_060


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps start no thread and no process."""
    monkeypatch.setattr(binding, "Sender", Kept)


@pytest.fixture
def made() -> Iterator[list[Below]]:
    """The managers of a test, shut down at its end."""
    managers: list[Below] = []
    yield managers
    for one in managers:
        one.close()


def below(made: list[Below], *args: Any, **more: Any) -> Below:
    made.append(Below(*args, **more))
    return made[-1]


def test_every_member_of_vllms_class_that_is_not_ours_is_the_inner_tiers(tmp_path: Path, made: list[Below]) -> None:
    one = below(made, tmp_path, [tapped(files(tmp_path, locality="LOCAL"))])
    (tier,) = one.tiers
    assert isinstance(tier, KvbmTier)
    assert isinstance(tier, SecondaryTierManager)
    ours = {name for name in vars(TierTap) if not name.startswith("_")}
    for name in dir(SecondaryTierManager):
        if not name.startswith("_") and name not in ours:
            assert getattr(tier, name) == getattr(tier._inner, name), name
    assert tier.locality is tier._inner.locality
    assert (tier.tier_type, tier.locality.value, tier.medium.value) == ("fs", "LOCAL", "STORAGE")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What the tap logs, whatever an earlier test has made of vLLM's loggers."""
    logger = logging.getLogger("vllm.kvbm_console")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "disabled", False)
    return caplog


@pytest.mark.parametrize(("mode", "sample"), [("off", 1), ("report", 1), ("fail", 1), ("fail", 4)])
def test_flipped_bits_on_disk(
    tmp_path: Path, made: list[Below], mode: str, sample: int, log: pytest.LogCaptureFixture
) -> None:
    """Without the tap vLLM takes the damaged blocks as hits. With ``fail`` it takes no wrong block."""
    one = below(made, tmp_path, [tapped(files(tmp_path), integrity=mode, sample=sample)])
    one.store(KEYS)
    bad = [each for number, each in enumerate(KEYS) if number % 13 == 3]
    for each in bad:
        one.damage(tmp_path, each)
    seen = [each for each in bad if int.from_bytes(each[:-4], "big") % sample == 0]
    for _ in range(2):  # a healed block stays healed
        one.forget_host()
        hits, wrong = one.fetch(KEYS, "victim")
        if mode == "fail":
            assert hits == [each for each in KEYS if each not in seen]
            assert wrong == [each for each in bad if each not in seen]
        else:
            assert (hits, wrong) == (KEYS, bad)
    lines = [record.getMessage() for record in log.records if "damaged block" in record.getMessage()]
    assert len(lines) == (0 if mode == "off" else len(seen))
    assert all("request victim" in line and "tier fs" in line for line in lines)
    assert all(any(each.hex() in line for line in lines) for each in (seen if mode != "off" else []))


def test_no_false_alarm_in_many_round_trips(tmp_path: Path, made: list[Below]) -> None:
    one = below(made, tmp_path, [tapped(files(tmp_path), integrity="fail")])
    for turn in range(12):
        keys = [key(1 + turn * 40 + at) for at in range(60)]  # a third was stored before
        fresh = keys if turn == 0 else keys[20:]
        one.forget_host()
        one.store(fresh)
        one.forget_host()
        assert one.fetch(keys) == (keys, [])
    (tier,) = one.tiers
    gauges = tier.gauges()
    assert gauges["checked_blocks"] == 12 * 60
    assert (gauges["damaged_blocks"], gauges["unknown_blocks"], gauges["check_errors"]) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["Corrupting", "Slow", "Raising"])
def test_tiers_that_misbehave(tmp_path: Path, made: list[Below], kind: str) -> None:
    """The manager meets what it meets with the bare tier, but for the blocks that are healed."""
    bare = below(made, tmp_path / "bare", [files(tmp_path / "bare", kind)])
    one = below(made, tmp_path / "tap", [tapped(files(tmp_path / "tap", kind), integrity="fail")])
    for each in (bare, one):
        each.store(KEYS)
        each.forget_host()
    if kind == "Raising":
        for each in (bare, one):
            with pytest.raises(OSError, match="this tier is broken"):
                each.fetch(KEYS)
            each.manager._jobs.clear()
            each.manager._metrics.__init__(["fs"], 64, each.size)
        return
    hits, wrong = bare.fetch(KEYS)
    assert (hits, len(wrong)) == (KEYS, len(KEYS) // 3 if kind == "Corrupting" else 0)
    hits, wrong = one.fetch(KEYS)
    assert wrong == []
    (tier,) = one.tiers
    assert set(hits) == set(KEYS) - set(getattr(tier._inner, "flipped", ()))
    assert tier.gauges()["damaged_blocks"] == (len(KEYS) // 3 if kind == "Corrupting" else 0)


def test_a_tier_that_ends_its_jobs_at_once_and_two_tiers(tmp_path: Path, made: list[Below]) -> None:
    memory = {"type": "Keeping", "module_path": HERE}
    one = below(made, tmp_path, [tapped(memory, integrity="fail"), tapped(files(tmp_path), integrity="fail")])
    one.store(KEYS)
    one.forget_host()
    first, second = one.tiers
    first._inner.bytes[KEYS[5]] = bytes(one.size)
    assert one.fetch(KEYS) == (KEYS, []), "the second tier has the block that the first one lost"
    assert (first.gauges()["damaged_blocks"], second.gauges()["damaged_blocks"]) == (1, 0)
    assert second.gauges()["checked_blocks"] == 1


def test_reset_with_jobs_and_checks_in_flight(tmp_path: Path, made: list[Below]) -> None:
    one = below(made, tmp_path, [tapped(files(tmp_path), integrity="fail")])
    one.store(KEYS)
    for turn in range(10):
        one.forget_host()
        context = one.request()
        one.look(KEYS, context)
        one.look(KEYS[: 6 * turn], context)
        one.manager.on_request_finished(context)
    one.forget_host()
    assert one.fetch(KEYS) == (KEYS, [])
    (tier,) = one.tiers
    assert not tier._checks
    assert not tier._ended


def test_vllms_scheduler_with_the_tap_and_a_finding_in_the_daemons_events(tmp_path: Path, kept: None) -> None:
    """As a server loads it; copies to a tier of this machine go to G3."""
    entry = tiered(tmp_path, 40)
    extra = entry["kv_connector_extra_config"]
    inner = {**extra["secondary_tiers"][0], "locality": "LOCAL"}
    extra["secondary_tiers"] = [tapped(inner, integrity="fail")]
    engine = Engine(tmp_path, entry, hook={}, blocks=48, running=3)
    sender = engine.tap.sender
    watch = Watching(sender.recorder, sender.flattener, sender.settings)
    (tier,) = engine.connector.connector_scheduler.manager.secondary_tiers
    told: list[ev.ContentMismatched] = []
    broken = False
    for output in engine.run(workload(5, 6, 4)):
        watch.pump()
        told += [event for event in watch.events if isinstance(event, ev.ContentMismatched)]
        compare(engine, watch.leader.state, set(output.num_scheduled_tokens))
        tier._inner.drain_jobs()  # so that the course does not depend on the disk
        tier._checker.wait()
        if not broken and tier._checker.table.kept > 20:
            broken = True
            tier._checker._sum = lambda block: 4711  # of bytes that no store had
    watch.pump()
    told += [event for event in watch.events if isinstance(event, ev.ContentMismatched)]
    totals = watch.leader.state.totals
    assert totals.moved_blocks["G2>G3"] > 0
    assert watch.rejected == []
    assert len(told) == tier.gauges()["damaged_blocks"] > 0
    assert all(event.request and event.writer == "fs" and event.stage == "tier" for event in told)
    stats = sender.recorder.watch.measured()[-1]
    assert stats["tier 1:fs damaged_blocks"] == len(told)
    engine.scheduler.shutdown()


def test_a_held_load_waits_and_other_loads_go_on(tmp_path: Path, made: list[Below]) -> None:
    """The daemon's verdicts are given by hand."""
    one = below(made, tmp_path, [tapped(files(tmp_path), integrity="fail")])
    one.store(KEYS)
    recorder = TapRecorder(ask_ns=60 * 10**9)
    watch = ConnectorWatch(recorder, {})
    watch._watch_tiers(one.manager, 1)
    recorder.on = True
    for end in ("go", "reset", "off"):
        one.forget_host()
        recorder.obey_copies({}, ["held-*"], [])
        held, free = one.request(f"held-{end}"), one.request(f"free-{end}")
        one.until(lambda: LookupResult.HIT_PENDING in one.look(KEYS[:8], held))  # noqa: B023
        one.until(lambda: one.look(KEYS[8:16], free) == [LookupResult.HIT] * 8)  # noqa: B023
        ((number, _),) = one.tiers[0]._held
        for _ in range(200):
            assert one.look(KEYS[:8], held) == [LookupResult.HIT_PENDING] * 8
        if end == "go":
            recorder.obey_copies({}, ["held-*"], [number])
            one.until(lambda: one.look(KEYS[:8], held) == [LookupResult.HIT] * 8)  # noqa: B023
        elif end == "reset":
            one.forget_host()
            assert not one.manager._jobs
        else:
            recorder.off()
            one.until(lambda: one.look(KEYS[:8], held) == [LookupResult.HIT] * 8)  # noqa: B023
        for context in (held, free):
            one.manager.on_request_finished(context)
        recorder.on = True
    assert not recorder.copies_asked
    assert recorder.errors == 0


def test_a_call_costs_at_most_three_microseconds_more() -> None:
    """The bar is of a quiet machine, where a store of the bare tier took ``BARE_STORE_NS``; a slower one has more."""
    found = measure(jobs=400)
    most = 3_000 * max(1.0, found["submit_store"][0] / BARE_STORE_NS)
    for call, (bare, more) in found.items():
        assert max(more.values()) < most, (call, bare, more)
