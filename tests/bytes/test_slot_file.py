"""The slot file: no load ever gives wrong bytes, and nothing that was synced is lost."""

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvbm_console.bytes import slot_file
from kvbm_console.bytes.slot_file import CHECK, PAGE_BYTES, USE, SlotFile, SlotFileRefused, SlotGeometry, check_of
from tests.bytes import slots
from tests.bytes.slots import IDENTITY, KEYS, SMALL, content

CASES, CASES_FULL = 500, 20_000


@pytest.mark.fault
def test_a_power_loss_gives_no_wrong_bytes_and_takes_nothing_synced() -> None:
    assert slots.broken_by_power_losses(SlotFile, 1, CASES) == set()


@pytest.mark.fault
@pytest.mark.slow
def test_twenty_thousand_power_losses() -> None:
    assert slots.broken_by_power_losses(SlotFile, 2, CASES_FULL) == set()


@pytest.mark.fault
def test_after_a_kill_an_entry_has_its_block_whole() -> None:
    assert slots.broken_by_kills(SlotFile, 3, CASES) == set()
    assert slots.broken_by_misplacement(SlotFile) == set()


@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        (slots.NoClear, "torn"),
        (slots.NoSeed, "an entry of another slot"),
        (slots.NoSeed, "bytes of another key"),
        (slots.SumAfterCheck, "torn"),
        (slots.ShortKey, "wrong bytes"),
    ],
)
def test_the_laws_find_each_mutant(mutant: type[SlotFile], law: str) -> None:
    found = slots.broken_by_kills(mutant, 4, 100) | slots.broken_by_power_losses(mutant, 4, 100)
    assert law in found | slots.broken_by_misplacement(mutant)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "slots"


def opened(directory: Path, geometry: SlotGeometry = SMALL, sync_s: float | None = None, **more: Any) -> SlotFile:
    return SlotFile.open(directory, geometry, msgspec.structs.replace(IDENTITY, **more), sync_s=sync_s)


def fill(file: SlotFile) -> None:
    for slot in range(file.geometry.slots):
        file.store(slot, KEYS[slot], memoryview(content(KEYS[slot], file.geometry.block_bytes)))


def fetched(file: SlotFile, slot: int, key: bytes) -> bytes | None:
    view = memoryview(bytearray(file.geometry.block_bytes))
    return bytes(view) if file.load(slot, key, view) else None


def test_blocks_are_found_again_in_the_order_of_their_use(directory: Path) -> None:
    file = opened(directory)
    assert file.entries() == []
    fill(file)
    assert fetched(file, 1, KEYS[1]) is not None
    file.drop(3)
    file.close()
    file.close()
    again = opened(directory)
    assert (again.found, again.rebooted) == (4, False)
    assert again.entries() == [(slot, KEYS[slot], 0) for slot in (0, 2, 4, 1)]
    for slot in (0, 1, 2, 4):
        assert fetched(again, slot, KEYS[slot]) == content(KEYS[slot], SMALL.block_bytes)
    again.store(3, b"short", memoryview(content(b"short", SMALL.block_bytes)), group=7)
    assert again.entries()[-1] == (3, b"short", 7)
    assert not again.load(3, b"short", memoryview(bytearray(SMALL.block_bytes)), group=6)
    assert not again.load(3, b"short\0", memoryview(bytearray(SMALL.block_bytes)), group=7)
    again.clear()
    assert again.entries() == []
    again.close()


def test_blocks_of_any_size_and_memory_of_any_address(directory: Path) -> None:
    """Direct I/O wants whole pages at whole pages."""
    for size in (1, 700, 4_096, 10_000):
        file = opened(directory / str(size), SlotGeometry(3, size))
        memory = memoryview(mmap.mmap(-1, 4 * PAGE_BYTES))
        for at in (0, 1, 512):
            memory[at : at + size] = content(b"x", size)
            file.store(1, b"x", memory[at : at + size])
            memory[at : at + size] = bytes(size)
            assert file.load(1, b"x", memory[at : at + size])
            assert memory[at : at + size] == content(b"x", size)
        file.close()


def test_a_machine_that_was_started_anew_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(directory).close()
    monkeypatch.setattr(slot_file, "_boot_id", lambda: b"b" * 16)
    again = opened(directory)
    assert again.rebooted
    again.close()


# --- damage -----------------------------------------------------------------------------------------------------------


def flips(path: Path, offsets: range) -> Iterator[int]:
    """Flip a bit of each byte, one at a time."""
    with path.open("r+b", buffering=0) as file:
        for at in offsets:
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << at % 8]), at)
            yield at
            os.pwrite(file.fileno(), bytes([byte]), at)


def test_each_byte_of_the_data_is_checked(directory: Path) -> None:
    file = opened(directory, SlotGeometry(2, 512))
    fill(file)
    for at in flips(directory / "data", range(512)):
        assert fetched(file, 0, KEYS[0]) is None, at
        assert fetched(file, 1, KEYS[1]) is not None
    assert fetched(file, 0, KEYS[0]) is not None
    file.close()


def test_each_byte_of_the_index_is_checked(directory: Path) -> None:
    """A flipped entry is absent, and a flipped header is refused. The boot id alone may change."""
    geometry = SlotGeometry(2, 512)
    file = opened(directory, geometry)
    fill(file)
    for at in flips(directory / "index", range(PAGE_BYTES, geometry.index_bytes)):
        hit = (at - PAGE_BYTES) // 64
        assert [slot for slot, _, _ in file.entries()] == [1 - hit], at
    file.close()
    for _ in flips(directory / "index", range(PAGE_BYTES - 16)):
        with pytest.raises(SlotFileRefused, match=r"is damaged|has format"):
            slot_file._compare(directory, slot_file._About(geometry, IDENTITY))


def test_files_that_were_cut_are_refused(directory: Path) -> None:
    opened(directory).close()
    for name in ("data", "index"):
        path = directory / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(SlotFileRefused, match=f"{name} has [0-9,]+ bytes instead of"):
            opened(directory)
        path.write_bytes(whole)
    (directory / "index").write_bytes(b"")
    with pytest.raises(SlotFileRefused, match="is damaged"):
        opened(directory)


def test_data_that_is_cut_while_it_is_open_is_damaged(directory: Path) -> None:
    file = opened(directory)
    fill(file)
    os.truncate(directory / "data", SMALL.stride)
    assert fetched(file, 0, KEYS[0]) is not None
    assert fetched(file, 1, KEYS[1]) is None
    file.close()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "another", "of another model: 'a model' there, 'another' here"),
        ("dtype", "float8", "of another dtype: 'bfloat16' there"),
        ("layout", "two layers", "of another layout"),
        ("block_tokens", 32, "of another number of tokens in a block: 16 there, 32 here"),
        ("rank", 1, "of another rank"),
        ("ranks", 2, "of another number of ranks"),
        ("hash_algorithm", "xxhash", "of another hash algorithm"),
        ("hash_seed", "1", "of another hash seed"),
        ("hash_seed", None, "set PYTHONHASHSEED to the same value at each start"),
        ("slots", 6, "of another number of slots: 5 there, 6 here"),
        ("slots", 0, "the number of slots must be at least 1, got 0"),
        ("block_bytes", 4_000, "of another number of bytes in a block: 2048 there, 4000 here"),
    ],
)
def test_another_identity_is_refused_by_name(directory: Path, field: str, value: Any, words: str) -> None:
    opened(directory).close()
    geometry, identity = SMALL, IDENTITY
    if field in SlotGeometry.__struct_fields__:
        geometry = msgspec.structs.replace(geometry, **{field: value})
    else:
        identity = msgspec.structs.replace(identity, **{field: value})
    with pytest.raises(SlotFileRefused, match=words):
        SlotFile.open(directory, geometry, identity)
    opened(directory).close()


def test_a_second_holder_is_refused(directory: Path) -> None:
    file = opened(directory)
    with pytest.raises(SlotFileRefused, match="is used by another process"):
        opened(directory)
    file.close()
    opened(directory).close()


def test_links_of_others_are_not_followed(directory: Path, tmp_path: Path) -> None:
    """Another writer of the directory could have this process create or empty a file elsewhere."""
    directory.mkdir()
    (directory / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SlotFileRefused, match="its file 'lock' is a symbolic link"):
        opened(directory)
    assert not (tmp_path / "elsewhere").exists()
    (directory / "lock").unlink()
    (tmp_path / "theirs").write_bytes(b"theirs")
    for name in ("data", "index.new"):
        (directory / name).symlink_to(tmp_path / "theirs")
    opened(directory).close()
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_a_disk_without_room_is_refused_at_the_start(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SlotFileRefused, match=r"bytes free, and 1,099,511,627,776 slots of 2,097,152 bytes .* need"):
        opened(directory, SlotGeometry(2**40, 2**21))
    assert sorted(path.name for path in directory.iterdir()) == ["lock"]

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(SlotFileRefused, match=r"need 24,896$"):
            opened(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["lock"]
    file = opened(directory)
    assert (directory / "data").stat().st_blocks * 512 >= SMALL.data_bytes, "allocated, and not only long"
    file.close()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SlotFileRefused, match=r"cannot keep blocks in .*file/slots: Not a directory"):
        opened(tmp_path / "file" / "slots")


def test_a_creation_that_broke_is_begun_anew(directory: Path) -> None:
    directory.mkdir()
    (directory / "data").write_bytes(b"half")
    (directory / "index.new").write_bytes(b"half")
    opened(directory).close()


def test_a_block_that_does_not_fit_is_a_mistake(directory: Path) -> None:
    file = opened(directory)
    block = memoryview(bytes(SMALL.block_bytes))
    for slot, key, view in ((5, b"k", block), (-1, b"k", block), (0, b"k", block[1:]), (0, b"", block),
                            (0, bytes(33), block)):
        with pytest.raises(ValueError, match=r"fits into slot|a key must have 1 to 32 bytes"):
            file.store(slot, key, view)
    assert file.entries() == []
    file.close()


# --- durability and threads -------------------------------------------------------------------------------------------


def test_a_thread_syncs_what_was_stored(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(directory, sync_s=0.001)
    real, passed = file._medium.sync, threading.Semaphore(0)
    monkeypatch.setattr(file._medium, "sync", lambda: (real(), passed.release()))
    number = file.store(0, KEYS[0], memoryview(content(KEYS[0], SMALL.block_bytes)))
    assert passed.acquire(timeout=30)
    file.close()
    assert file.synced >= number


def test_a_disk_that_cannot_sync_is_never_asked_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(directory)
    fill(file)
    file.sync()
    file.store(0, KEYS[5], memoryview(content(KEYS[5], SMALL.block_bytes)))

    def broken() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(file._medium, "sync", broken)
        with pytest.raises(OSError, match="Input/output error"):
            file.sync()
    with pytest.raises(OSError, match="Input/output error"):
        file.sync()
    assert (file.synced, file.stored, file.sync_error) == (5, 6, "Input/output error")
    assert fetched(file, 0, KEYS[5]) is not None
    file.close()


def test_a_failed_write_leaves_an_empty_slot(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(directory)
    fill(file)
    monkeypatch.setattr(os, "pwritev", lambda *_: 512)
    with pytest.raises(OSError, match="short write"):
        file.store(0, KEYS[5], memoryview(content(KEYS[5], SMALL.block_bytes)))
    assert [slot for slot, _, _ in file.entries()] == [1, 2, 3, 4]
    file.close()


@pytest.mark.parametrize(("size", "offset", "calls"), [(PAGE_BYTES, 0, 1), (PAGE_BYTES, 512, None), (700, 0, 3)])
def test_neighbours_are_one_call_if_they_fill_whole_pages(
    directory: Path, monkeypatch: pytest.MonkeyPatch, size: int, offset: int, calls: int | None,
) -> None:
    file = opened(directory, SlotGeometry(5, size))
    if calls is None:  # only direct I/O minds the address
        calls = 3 if file._medium.direct else 1
    made, blocks = [], memoryview(mmap.mmap(-1, 4 * PAGE_BYTES))[offset : offset + 3 * size]
    views = [blocks[at : at + size] for at in (2 * size, 0, size)]
    for name in ("pwritev", "preadv"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, call=call: made.append(call) or call(*given))
    for view, key in zip(views, KEYS, strict=False):
        view[:] = content(key, size)
    file.store_run(1, KEYS[:3], views)
    blocks[:] = bytes(3 * size)
    assert file.load_run(1, KEYS[:3], views)
    assert [bytes(view) for view in views] == [content(key, size) for key in KEYS[:3]]
    assert (len(made), file.stored) == (2 * calls, 3)
    assert [slot for slot, _, _ in file.entries()] == [1, 2, 3]
    assert not file.load_run(0, KEYS[:3], views)
    with pytest.raises(ValueError, match="fits into slot 5"):
        file.store_run(3, KEYS[:3], views)
    file.close()


def test_a_failed_write_of_neighbours_leaves_empty_slots(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(directory)
    fill(file)
    monkeypatch.setattr(os, "pwritev", lambda *_: 512)
    with pytest.raises(OSError, match="short write"):
        file.store_run(1, KEYS[5:8], [memoryview(content(key, SMALL.block_bytes)) for key in KEYS[5:8]])
    assert 1 not in {slot for slot, _, _ in file.entries()}
    file.close()


def test_threads_work_in_their_own_slots(directory: Path) -> None:
    geometry = SlotGeometry(8, 700)
    file, failed = opened(directory, geometry, sync_s=0.001), []

    def work(slot: int) -> None:
        for turn in range(40):
            key = bytes([slot, turn]) * 16
            file.store(slot, key, memoryview(content(key, 700)))
            if fetched(file, slot, key) != content(key, 700):
                failed.append((slot, turn))

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert (file.stored, len(file.entries())) == (320, 8)
    file.close()
    assert file.synced == 320


def test_half_a_million_slots_open_in_a_moment(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, _, size: os.ftruncate(fd, size))  # the data is never written
    geometry = SlotGeometry(2**19, 1)
    slots_, rows = np.arange(2**19, dtype=np.uint64), np.zeros((2**19, 8), np.uint64)
    rows[:, :4] = np.random.default_rng(1).integers(0, 2**63, (2**19, 4), dtype=np.uint64)
    rows[:, 4] = 32 << 32
    rows[:, USE] = slot_file._use_word(slots_, slots_[::-1] + np.uint64(1))
    rows[:, CHECK] = check_of(slots_, [*rows.T[:5], rows[:, 6]])
    index = opened(directory, geometry)
    index._medium.rows()[:] = rows
    index.close()
    began = time.process_time()
    again = opened(directory, geometry)
    took = time.process_time() - began
    entries = again.entries()
    again.close()
    assert again.found == 2**19
    assert [slot for slot, _, _ in entries[:3]] == [2**19 - 1, 2**19 - 2, 2**19 - 3]
    assert took <= 0.3, "seconds of the processor"
