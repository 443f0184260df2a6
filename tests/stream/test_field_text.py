"""Fields for people: what is told of a long column is what the whole column would have told."""

from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.stream.document import field_text


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(1, 40))
def test_a_long_column_is_cut_where_the_whole_of_it_would_be(numbers: list[int], limit: int) -> None:
    wholes = {
        "ids": (pack_ids(numbers), ", ".join(map(str, numbers))),
        "hashes": (pack_hashes(numbers), ", ".join(f"{number:016x}" for number in numbers)),
        "counts": (tuple(numbers), ", ".join(map(str, numbers))),
        "names": (["" for _ in numbers], ", ".join("" for _ in numbers)),
    }
    for field, (value, whole) in wholes.items():
        wanted = whole if len(whole) <= limit else whole[: limit - 1] + "…"
        assert field_text(field, value, limit) == wanted
