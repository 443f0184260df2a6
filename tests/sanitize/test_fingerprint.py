"""Fingerprints: equal for equal bytes on every path, different for any change."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.sanitize.checker import sampled
from kvbm_console.sanitize.fingerprint import PageSide, Region, fold, fold_page, join, keys

pages = some.binary(min_size=16, max_size=400)


def bytes_of(data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.int8)


@given(pages, some.integers(0, 399), some.integers(1, 255))
def test_a_changed_byte_changes_the_fingerprint(data: bytes, at: int, by: int) -> None:
    changed = bytearray(data)
    changed[at % len(data)] ^= by
    assert fold_page(bytes_of(data)) != fold_page(bytes_of(bytes(changed)))


@given(some.lists(some.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40, unique=True), some.data())
def test_words_that_change_places_change_the_fingerprint(words: list[int], data: some.DataObject) -> None:
    one, two = data.draw(some.lists(some.sampled_from(range(len(words))), min_size=2, max_size=2, unique=True))
    moved = list(words)
    moved[one], moved[two] = moved[two], moved[one]
    before, after = np.array(words), np.array(moved)
    assert fold_page(before.view(np.int8)) != fold_page(after.view(np.int8))
    layers = join(np.array([words, moved]))  # as layers of a block, too
    assert layers[0] != layers[1]


@given(some.integers(1, 60), some.integers(0, 2**32))
def test_one_formula_by_row_and_by_page(words: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, (3, words), dtype=np.int64)
    assert [int(one) for one in fold(rows, keys(words))] == [fold_page(row.view(np.int8)) for row in rows]


def test_the_keys_are_odd_and_differ() -> None:
    found = keys(4_096)
    assert len(set(found.tolist())) == 4_096
    assert (found & 1 == 1).all()
    assert keys(100).tolist() == keys(4_096)[:100].tolist()


@pytest.mark.parametrize("used", [64, 61, 24])
@pytest.mark.parametrize("per_row", [1, 3])
def test_torch_and_numpy_agree_on_every_layout(used: int, per_row: int) -> None:
    """Padded pages, several pages in a row, rows with a gap behind them, sizes that are no multiple of a word."""
    torch = pytest.importorskip("torch", reason="torch is not installed: `make test-vllm` runs this")
    wide = np.random.default_rng(used).integers(-128, 127, (10, 64 * per_row + 32), dtype=np.int8)
    rows = wide[:, : 64 * per_row]
    tensor = torch.from_numpy(wide)[:, : 64 * per_row]
    places = [0, 7, 3, 10 * per_row - 1]
    found = [
        PageSide([[Region(array, per_row=per_row, used=used, on_device=apart)] * 2]).fingerprints(0, places).get()
        for array, apart in ((rows, False), (tensor, False), (tensor, True))
    ]
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()
    alone = [fold_page(rows[place // per_row, place % per_row * 64 :][:used]) for place in places]
    assert found[0][:, 0].tolist() == found[0][:, 1].tolist() == alone


@given(some.integers(0, 2**64 - 1), some.floats(0, 1), some.floats(0, 1))
def test_a_larger_sample_contains_the_smaller_one(key: int, one: float, two: float) -> None:
    less, more = sorted((one, two))
    assert not sampled(key, less) or sampled(key, more)
    assert sampled(key, 1.0)
    assert not sampled(key, 0.0)


def test_a_sample_has_its_share() -> None:
    dice = np.random.default_rng(1)
    keys_ = dice.integers(0, 2**64 - 1, 100_000, dtype=np.uint64).tolist()
    for share in (0.01, 0.1, 0.5):
        count = sum(sampled(key, share) for key in keys_)
        assert abs(count - share * 100_000) < 5 * (100_000 * share * (1 - share)) ** 0.5
