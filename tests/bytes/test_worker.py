"""A worker's copies from and to a file, without its process."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm_console.bytes.memory import make_arena
from kvbm_console.bytes.orders import CopyOrder, RankIdentity, RankPool, RankReply, RankSetup
from kvbm_console.bytes.worker import RUN_BYTES, RankWorker
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_ids
from kvbm_console.core.ids import Tier

SHARD_BYTES, PLACES = 4096, 8
Copied = Callable[[int, int, list[int], list[int], list[int]], RankReply]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RankWorker]:
    """Pool 0 is an arena whose place n holds block n + 1, and pool 1 is a file."""
    fd = make_arena("test", PLACES, SHARD_BYTES)
    pools = (RankPool(0, Tier.G2, PLACES), RankPool(1, Tier.G3, PLACES))
    made = RankWorker(
        RankSetup(0, SHARD_BYTES, pools, fresh=True, directory=str(tmp_path), identity=RankIdentity("pages", 16, 1)),
        [fd],
    )
    os.close(fd)
    keys = list(range(1, PLACES + 1))
    made.contents.write(made.arenas[0].rows, keys)
    made.arenas[0].keys[:] = keys
    yield made
    made.settle()
    made.files[1].close()


@pytest.fixture
def copied(worker: RankWorker) -> Copied:
    """A copy, and its answer."""

    def copy(source: int, target: int, sources: list[int], targets: list[int], keys: list[int]) -> RankReply:
        replies, ended = list[RankReply](), threading.Event()

        def done(reply: RankReply) -> None:
            replies.append(reply)
            ended.set()

        order = CopyOrder(1, source, target, pack_ids(sources), pack_ids(targets), pack_hashes(keys), compare=True)
        worker.begin(order, done)
        assert ended.wait(60)
        worker.settle()
        (reply,) = replies
        return reply

    return copy


def test_neighbours_on_disk_are_one_call(worker: RankWorker, copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a copy is scattered, and its places on disk are two runs."""
    sizes = list[int]()
    for name in ("pwritev", "preadv"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, views, at, call=call: sizes.append(len(views)) or call(fd, views, at))
    memory, disk = [6, 0, 3, 5, 1], [2, 3, 4, 0, 1]
    keys = [place + 1 for place in memory]
    assert copied(0, 1, memory, disk, keys).error == ""
    assert sorted(sizes) == [2, 3]
    worker.arenas[0].zero()
    assert copied(1, 0, disk, memory, keys).error == ""
    assert sorted(sizes) == [2, 2, 3, 3]
    worker.run_blocks = 2
    assert copied(1, 0, disk, memory, keys).error == ""
    assert sorted(sizes) == [1, 2, 2, 2, 2, 3, 3]
    assert RUN_BYTES >= 2 * SHARD_BYTES


def test_a_block_that_fails_takes_no_neighbour_along(worker: RankWorker, copied: Copied) -> None:
    places, keys = list(range(PLACES)), list(range(1, PLACES + 1))
    worker.arenas[0].keys[2] = 77  # it was given to another block meanwhile
    stored = copied(0, 1, places, places, keys)
    assert (stored.error, unpack_ids(stored.failed)) == ("the source holds another block", [2])
    assert [slot for slot, _, _ in worker.files[1].entries()] == [7, 6, 5, 4, 3, 1, 0]
    worker.arenas[0].zero()
    loaded = copied(1, 0, places, places, keys)
    assert (loaded.error, unpack_ids(loaded.failed)) == ("the slot has no whole block of this hash", [2])
    assert worker.arenas[0].keys.tolist() == [1, 2, 0, 4, 5, 6, 7, 8]
