"""The tap around a tier below vLLM's host tier, over arrays. ``tests/vllm/test_tier.py`` has vLLM's own tiers."""

import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.core import events as ev
from kvbm_console.core.describe import describe
from kvbm_console.tap.copies import medium_of
from kvbm_console.tap.sums import WAYS, SumTable, tag_of
from kvbm_console.tap.tiers import DAMAGED_MAX
from tests.tap.test_copies import watching
from tests.tap.tiers import HIT, INNER, MISS, PLACES, SIZE, Base, Factory, Job, Result, Tier, key


class Machine:
    """A host tier of arrays and the tap around a tier below it; ``store`` and ``load`` are the manager's part."""

    def __init__(self, **settings: Any) -> None:
        self.host = np.zeros((PLACES, SIZE), np.uint8)
        self.tier: Any = Tier(None, self.host.data, "KvbmTier", inner=INNER, **settings)
        self.jobs = 0

    def job(self, keys: list[bytes], places: list[int], *, load: bool) -> Job:
        self.jobs += 1
        return Job(self.jobs, keys, np.array(places, np.int32), load)

    def store(self, keys: list[bytes], places: list[int]) -> Result:
        self.tier.submit_store(self.job(keys, places, load=False))
        return self.result()

    def load(self, keys: list[bytes], places: list[int]) -> Result:
        self.tier.submit_load(self.job(keys, places, load=True))
        return self.result()

    def result(self) -> Result:
        """The result of the only job, waited for as ``reset_cache`` does."""
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        return result  # type: ignore[no-any-return]

    def fill(self, place: int, seed: int) -> None:
        self.host[place] = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)

    def damage(self, key: bytes, bit: int) -> None:
        whole = bytearray(self.tier._inner.blocks[key])
        whole[bit // 8] ^= 1 << bit % 8
        self.tier._inner.blocks[key] = bytes(whole)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterable[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(**settings: Any) -> Machine:
        made.append(Machine(**settings))
        return made[-1]

    yield make
    for one in made:
        one.tier.shutdown()


def test_every_other_member_is_the_inner_tiers_own(machine: Callable[..., Machine]) -> None:
    tier = machine().tier
    assert issubclass(Tier, Base)
    for name in dir(Base):
        if not name.startswith("_") and name not in vars(Tier.__mro__[1]):
            assert getattr(tier, name) == getattr(tier._inner, name), name
    assert (tier.tier_type, tier.medium.value, tier.tolerates_off_thread_polling) == ("dictionary", "STORAGE", True)
    tier.touch([key(1)], None)
    assert tier._inner.touched == [key(1)]
    assert Tier.build_metric_definitions({"inner": INNER}) == {"of": "dictionary"}
    assert Tier.config_info_keys({"inner": INNER}) == ("info",)


def test_the_back_pressure_of_the_taps_entry_is_the_inner_tiers() -> None:
    entry = {"type": "KvbmTier", "inner": INNER, "backpressure": {"high": 2}}
    spec = SimpleNamespace(secondary_tier_configs=[{"type": "fs"}, entry])
    Tier(spec, memoryview(bytearray(SIZE)), "KvbmTier", inner=INNER)
    assert Factory.made == {"type": "dictionary", "backpressure": {"high": 2}}


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"inner": None}, "inner of KvbmTier must be the entry of a tier"),
    ({"inner": {}}, "inner of KvbmTier must be the entry of a tier"),
    ({"integrity": "on"}, "integrity of KvbmTier must be off, report or fail, got 'on'"),
    ({"sample": 0}, "sample of KvbmTier must be a whole number from 1 to 1000000, got 0"),
    ({"sample": 0.5}, "sample of KvbmTier must be a whole number from 1 to 1000000, got 0.5"),
    ({"root_dir": "/x"}, "KvbmTier has no setting 'root_dir'; its settings are inner, integrity and sample"),
])
def test_a_setting_that_cannot_be_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Tier(None, memoryview(bytearray(SIZE)), "KvbmTier", **{"inner": INNER, **settings})


@pytest.mark.parametrize("integrity", ["off", "report", "fail"])
def test_a_flipped_bit_is_found_named_and_computed_again(
    machine: Callable[..., Machine], integrity: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, watch = machine(integrity=integrity), watching()
    one.tier.watched_by(watch.recorder)
    keys = [key(number) for number in range(1, 5)]
    for place in range(4):
        one.fill(place, place)
    stored = one.host[:4].copy()
    assert one.store(keys, [0, 1, 2, 3]).success
    one.damage(keys[2], bit=77)
    result = one.load(keys, [8, 9, 10, 11])
    if integrity == "fail":
        assert (result.success, result.successful_keys) == (False, (keys[0], keys[1], keys[3]))
        assert [one.tier.lookup(each, None) for each in keys] == [HIT, HIT, MISS, HIT]
    else:
        assert result.success
        assert {one.tier.lookup(each, None) for each in keys} == {HIT}
    assert result.transfer_time == 0.5
    watch.pump()
    told = [event for event in watch.events if isinstance(event, ev.ContentMismatched)]
    if integrity == "off":
        assert not told
        assert not caplog.records
        return
    (finding,) = told
    assert (finding.request, finding.writer, finding.below, finding.copy) == ("a", "dictionary", 10, 2)
    sums = [text.rpartition(" ")[2] for text in (finding.taken, finding.edge)]
    right, wrong = one.tier._checker._sum(memoryview(stored[2])), one.tier._checker._sum(memoryview(one.host[10]))
    assert sums == [f"{right:016x}", f"{wrong:016x}"]
    (line,) = [record.message for record in caplog.records]
    for part in ("tier dictionary", "request a", keys[2].hex(), *sums):
        assert part in line
    assert describe(finding).startswith("damaged-block 00000000 from tier dictionary: load 2 filled host place 10")
    assert one.tier.gauges()["damaged_blocks"] == 1


def test_a_store_ends_the_miss_of_a_block_that_was_damaged_once(machine: Callable[..., Machine]) -> None:
    one = machine(integrity="fail")
    one.fill(0, 1)
    for times in (1, 2, 3):
        assert one.store([key(1)], [0]).success
        assert one.tier.lookup(key(1), None) == (HIT if times < 3 else MISS)
        if times < 3:
            if times == 1:
                one.damage(key(1), 5)  # the tier has the block, so the store of its recompute writes nothing
            assert not one.load([key(1)], [1]).success
            assert one.tier.lookup(key(1), None) == MISS


def test_blocks_that_did_not_arrive_are_not_checked(machine: Callable[..., Machine]) -> None:
    one = machine(integrity="fail")
    one.fill(0, 1)
    one.store([key(1)], [0])
    result = one.load([key(1), key(9)], [1, 2])
    assert (result.success, result.successful_keys) == (False, (key(1),))
    assert one.load([key(9)], [2]).successful_keys is None
    one.damage(key(1), 3)
    assert one.load([key(1), key(9)], [1, 2]).successful_keys is None
    assert one.tier.found == 1


def test_a_block_that_was_computed_again_in_other_bits_is_no_damage(machine: Callable[..., Machine]) -> None:
    one = machine(integrity="fail")
    for seed in (1, 2):
        one.fill(0, seed)
        assert one.store([key(1)], [0]).success
    assert one.load([key(1)], [1]).success  # the tier kept the first
    one.tier._inner.blocks[key(1)] = one.host[0].tobytes()
    assert one.load([key(1)], [1]).success  # another tier would have kept the second


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), sample=st.integers(1, 5))
def test_every_flipped_bit_of_a_sampled_block_is_found_and_no_other(seed: int, sample: int) -> None:
    one, dice = Machine(integrity="report", sample=sample), random.Random(seed)
    try:
        keys = [key(dice.getrandbits(256), dice.randrange(3)) for _ in range(PLACES)]
        for place in range(PLACES):
            one.fill(place, dice.getrandbits(32))
        assert one.store(keys, list(range(PLACES))).success
        flipped = {each for each in keys if dice.random() < 0.3}
        for each in flipped:
            one.damage(each, dice.randrange(8 * SIZE))
        places = dice.sample(range(PLACES), PLACES)
        assert one.load(keys, places).success
        assert set(one.tier._damaged) == {each for each in flipped if tag_of(each) % sample == 0}
        assert one.tier.gauges()["unknown_blocks"] == one.tier.gauges()["check_errors"] == 0
    finally:
        one.tier.shutdown()


def test_memory_is_bounded_by_sixteen_bytes_a_key() -> None:
    table, dice = SumTable(1_024), random.Random(1)
    tags = [dice.getrandbits(64) | 1 for _ in range(5_000)]
    for tag in tags:
        table.add(tag, tag ^ 5)
    assert table.size_bytes == 16 * 1_024
    assert table.kept + table.forgotten == 5_000
    assert table.kept > 1_000
    kept = [tag for tag in tags if table.sums(tag)]
    assert len(kept) == table.kept
    assert all(table.sums(tag) == [tag ^ 5] for tag in kept)
    assert kept[-1] == tags[-1], "the newest is never forgotten"
    for value in range(WAYS + 2):
        table.add(7, value)
    assert table.sums(7) == list(range(2, WAYS + 2))


def test_damaged_blocks_are_bounded(machine: Callable[..., Machine]) -> None:
    one = machine(integrity="fail")
    job = one.job([], [], load=True)
    for number in range(DAMAGED_MAX + 10):
        one.tier._tell(job, key(number), 0, [1], 2)
    assert len(one.tier._damaged) == len(one.tier._missing) == DAMAGED_MAX


def test_an_error_of_a_check_lets_the_job_go(machine: Callable[..., Machine]) -> None:
    one = machine(integrity="fail")
    one.fill(0, 1)
    one.store([key(1)], [0])
    one.damage(key(1), 3)

    def broken(block: memoryview) -> int:
        raise RuntimeError("no")

    one.tier._checker._sum = broken
    assert one.load([key(1)], [1]).success
    assert one.tier.gauges()["check_errors"] == 1


def test_without_xxhash_the_sum_is_the_crc_of_the_standard_library() -> None:
    code = "import sys; sys.modules['xxhash'] = None\nfrom kvbm_console.tap.sums import chosen_sum\n" \
           "name, what = chosen_sum(); print(name, what(memoryview(b'abc')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["crc32", str(zlib.crc32(b"abc"))]


def test_tiers_of_one_medium_are_told_apart() -> None:
    def tier(kind: str, medium: str | None, locality: str | None = None) -> Any:
        return SimpleNamespace(
            tier_type=kind, medium=medium and SimpleNamespace(value=medium),
            locality=locality and SimpleNamespace(value=locality),
        )

    tiers = [tier("fs", "STORAGE", "LOCAL"), tier("obj", "STORAGE"), tier("p2p", None), tier("kv", "STORAGE", "REMOTE")]
    assert [medium_of(tiers, at) for at in range(4)] == ["DISK", "STORAGE 2:obj", "EXTERNAL", "STORAGE 4:kv"]
