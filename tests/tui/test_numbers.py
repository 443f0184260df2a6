"""How numbers are written: three digits, rounded down, a dash for what is unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui.model.numbers import (
    MS,
    S,
    brief,
    clock,
    count,
    cut,
    cut_middle,
    duration,
    flow,
    per_second,
    percent,
    plain,
    shares,
    shown,
    size,
    spoken,
    tenth,
)

MINUTE, HOUR, DAY = 60 * S, 3_600 * S, 86_400 * S


@pytest.mark.parametrize(("ns", "text"), [
    (None, "–"), (0, "0ms"), (900, "0µs"), (412_000, "412µs"), (4_190_000, "4.1ms"), (48 * MS, "48ms"),
    (999_999_999, "999ms"), (1_314 * MS, "1.31s"), (11_899 * MS, "11.8s"), (59_999 * MS, "59.9s"), (252 * S, "4m12s"),
    (599 * S, "9m59s"), (750 * S, "12.5m"), (72 * MINUTE, "1h12m"), (605 * MINUTE, "10.0h"), (76 * HOUR, "3d04h"),
    (12 * DAY, "12.0d"), (400 * DAY, "400d"), (-5, "0ms"),
])
def test_durations_have_three_digits(ns: int | None, text: str) -> None:
    assert duration(ns) == text


@given(st.integers(0, 999 * DAY))
def test_a_duration_never_takes_more_than_five_cells(ns: int) -> None:
    assert len(duration(ns)) <= 5


@pytest.mark.parametrize(("ns", "text"), [
    (18_900 * MS, "18 s"), (3_149 * MS, "3.14 s"), (892 * MS, "892 ms"), (26 * MS, "26 ms"), (252 * S, "4m12s"),
    (72 * S, "72 s"), (4_100_000, "4.1 ms"), (None, "–"),
])
def test_durations_in_sentences(ns: int | None, text: str) -> None:
    assert spoken(ns) == text


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (9_999, "9,999"), (10_000, "10.0k"), (11_987, "11.9k"), (126_195, "126k"), (1_249_000, "1.24M"),
    (None, "–"),
])
def test_counts_in_columns(value: int | None, text: str) -> None:
    assert brief(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (1.849 * 2**30, "1.84 GiB"), (612.9 * 2**20, "612 MiB"), (96.9 * 2**20, "96 MiB"), (0, "0 B"), (None, "–"),
    (999 * 2**20, "999 MiB"), (1_000 * 2**20, "0.97 GiB"),
])
def test_bytes_are_binary(value: float | None, text: str) -> None:
    assert size(value) == text


def test_rates_tell_their_unit() -> None:
    assert flow(10, 2**20) == "10 MiB/s"
    assert flow(1_500, None) == "1.50k blk/s"
    assert flow(None, 2**20) == "–"
    assert per_second(1_921.4) == "1.92k"


def test_percents_are_floored_and_need_a_denominator() -> None:
    assert percent(2_047, 2_048) == "99 %"
    assert percent(2_048, 2_048) == "100 %"
    assert percent(5, None) == "–"
    assert tenth(1, 0) == "–"


@given(st.lists(st.integers(0, 5_000), min_size=4, max_size=4), st.integers(0, 5_000))
def test_shares_add_up_as_written(parts: list[int], miss: int) -> None:
    whole = sum(parts) + miss
    total, each, rest = shares(parts, whole)
    if not whole:
        assert (total, rest) == ("–", "–")
        return
    tenths = [int(text.replace(".", "")) for text in (total, rest)]
    assert sum(int(text.replace(".", "")) for text in each) == tenths[0]
    assert sum(tenths) == 1_000


def test_names_are_cut_in_the_middle_and_sentences_at_the_end() -> None:
    assert cut_middle("chat-0418.3", 20) == "chat-0418.3"
    assert cut_middle("a-very-long-request-0418.3", 13) == "a-very-l…18.3"
    assert cut("nothing evictable", 9) == "nothing…"
    assert all(len(cut_middle("x" * 40, width)) == width for width in range(41))


def test_outside_text_cannot_move_the_cursor() -> None:
    assert shown(plain("a\x1b[2Jb\nc日")) == "a?[2Jb?c日"
    assert plain("chat-é") == "chat-é"


def test_clock_and_seq() -> None:
    assert clock(50_707 * S + 118 * MS, millis=True) == "14:05:07.118"
    assert count(4_182_188) == "4,182,188"
