"""Sequence hashes: published vectors, chaining, linearity, and the expansion of trace ids."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.core.errors import UsageError
from kvbm_console.simulator import hashing
from kvbm_console.simulator.hashing import Chain, hashes_of_trace_ids, sequence_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_dynamo_vectors() -> None:
    salt = 1337
    assert hashing.dynamo_block_hash([1, 2, 3, 4], salt) == 14643705804678351452
    assert hashing.dynamo_block_hash([5, 6, 7, 8], salt) == 16777012769546811212
    assert hashing.dynamo_block_hash([9, 10, 11, 12], salt) == 483935686894639516
    assert sequence_hashes(range(1, 13), 4, salt=salt) == [
        14643705804678351452, 4945711292740353085, 12583592247330656132,
    ]


def test_blis_vector() -> None:
    first = hashing.blis_hash("", [10, 11])
    assert first == "f32f536d83181d6868963aa6e1a7fd2ed55d51411fc19cfd50932e1e4b946758"
    second = hashing.blis_hash(first, [20, 21])
    assert second == "e3a6899fb0cb59a2f130670e3b288a564bac6376fee84d89b59ec7e81c8bad71"
    assert sequence_hashes([10, 11, 20, 21], 2, algorithm="blis") == [
        int(first[-16:], 16), int(second[-16:], 16),
    ]


def test_sha256_chains_digest_salt_and_tokens() -> None:
    digest = hashlib.sha256(bytes(32) + bytes(8) + (7).to_bytes(4, "little")).digest()
    assert sequence_hashes([7], 1, algorithm="sha256") == [int.from_bytes(digest[-8:], "big")]


@pytest.mark.parametrize("algorithm", hashing.ALGORITHMS)
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 70), max_size=4), block=st.integers(1, 9))
def test_growing_in_pieces_equals_hashing_at_once(
    algorithm: hashing.Algorithm, tokens: list[int], cuts: list[int], block: int
) -> None:
    chain = Chain(block, algorithm=algorithm, salt=5)
    at = 0
    for cut in [*sorted(cuts), len(tokens)]:
        chain.extend(tokens[at:cut])
        at = max(at, min(cut, len(tokens)))
    assert chain.hashes == sequence_hashes(tokens, block, algorithm=algorithm, salt=5)
    assert len(chain) == len(tokens)


@given(tokens=st.lists(st.integers(0, 3), min_size=8, max_size=24), at=st.integers(0, 7))
def test_a_changed_token_changes_every_hash_from_its_block_on(tokens: list[int], at: int) -> None:
    other = list(tokens)
    other[at] += 4
    mine, theirs = sequence_hashes(tokens, 4), sequence_hashes(other, 4)
    same = at // 4
    assert mine[:same] == theirs[:same]
    assert not set(mine[same:]) & set(theirs[same:])


def test_salt_and_lora_separate_chains() -> None:
    salts = {hashing.salt_hash(), hashing.salt_hash("a"), hashing.salt_hash(None, "a"), hashing.salt_hash("a", "a")}
    assert len(salts) == 4
    assert len({sequence_hashes([1, 2], 2, salt=salt)[0] for salt in salts}) == 4


def test_zero_is_never_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing.xxhash, "xxh3_64_intdigest", lambda data, seed=0: 0)
    assert sequence_hashes([1, 2], 1) == [1, 1]
    assert hashes_of_trace_ids([3], 512, 512) == [1]
    assert hashing.generated_hashes(1, 2, 1) == [1]
    assert hashing.as_hash(bytes(32)) == 1


def test_each_token_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = hashing.xxhash.xxh3_64_intdigest

    def counting(data: bytes, seed: int = 0) -> int:
        calls.append(len(data))
        return real(data, seed)

    monkeypatch.setattr(hashing.xxhash, "xxh3_64_intdigest", counting)
    sequence_hashes(range(1_600), 16)
    assert sum(calls) == 1_600 * 4 + 99 * 16


def test_trace_vectors() -> None:
    """Recordings and reports of the past name these: an id of many blocks, several ids of one, blocks generated."""
    assert hashes_of_trace_ids([7, 2**63 - 1], 800, 256) == [
        12212924594288796059, 18429988569905829628, 2224796381073914828,
    ]
    assert hashes_of_trace_ids([7, 8, 9, 10, 11], 2_500, 1_024) == [13834784602756079664, 1515229566227424900]
    assert hashing.generated_hashes(5, 9, 3) == [5272964016836826032, 2678697424049736219, 9186114194714823066]


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=5), other=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    block=st.sampled_from([16, 128, 512, 1024]),
)
def test_trace_ids_are_equal_exactly_as_far_as_their_prefix_is(ids: list[int], other: list[int], block: int) -> None:
    mine = hashes_of_trace_ids(ids, 512 * len(ids), block)
    theirs = hashes_of_trace_ids(other, 512 * len(other), block)
    assert len(mine) == 512 * len(ids) // block
    same = 0
    while same < min(len(ids), len(other)) and ids[same] == other[same]:
        same += 1
    shared = 512 * same // block
    assert mine[:shared] == theirs[:shared]
    assert not set(mine[shared:]) & set(theirs[shared:])


def test_the_partial_last_id_gives_only_full_blocks() -> None:
    assert len(hashes_of_trace_ids([1, 2], 600, 512)) == 1
    assert len(hashes_of_trace_ids([1, 2], 600, 16)) == 37


@pytest.mark.parametrize("block", [0, 24, 768])
def test_a_block_that_does_not_fit_the_trace_is_refused(block: int) -> None:
    with pytest.raises(UsageError, match="block_tokens must divide 512"):
        hashes_of_trace_ids([1], 512, block)


def test_generated_hashes_belong_to_their_owner() -> None:
    assert hashing.generated_hashes(9, 1, 3)[:2] == hashing.generated_hashes(9, 1, 2)
    assert not set(hashing.generated_hashes(9, 1, 3)) & set(hashing.generated_hashes(9, 2, 3))
