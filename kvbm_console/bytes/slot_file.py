"""A tier of blocks in one directory: a file of data with a place for each slot, and a file that says what is in them.

Theory of operation
-------------------
``data`` has ``slots`` places of one block each and is allocated when it is created, so no later write finds the disk
full. ``index`` has a header page and one entry of 64 bytes for each slot. A store clears the entry's check, writes the
block, sets the other fields and sets the check last. A process that is killed at any point therefore leaves whole
blocks and empty entries. A power loss may keep any of the unsynced sectors and words. The check of an entry and the sum
of a block find every mixture of old and new, so a block that is not whole is absent or damaged, and never wrong.

    header page   8 bytes magic, 4 version, 4 length of the document, 8 check of the page,
                  the document (``_About`` as JSON), zeros; the last 16 bytes are the boot at which the file was opened
    entry         word 0-3 key, 4 group and length of the key, 5 use, 6 sum of the block, 7 check of words 0-4 and 6

The sum begins with the key, and the check with the number of the slot. So an entry at another slot's place is no entry,
and bytes of another key never have the right sum. The use has a check of its own, because it changes with each load.

Example: slot 3 has block a, and b is stored there. The process dies while it writes b. Slot 3 is empty. If the power
fails after the store of b, the disk may have the entry of b with the bytes of a. The load of b says that it is damaged.

Law of this file: a load that says true has given exactly the bytes that were stored under that key. A store that was
synced is lost only by a later store in its slot.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

VERSION: Final = 1
MAGIC: Final = b"KVBMSLOT"
PAGE_BYTES: Final = 4_096
"""Size of the header, and alignment of places and buffers: direct I/O needs it on every disk that we know."""
ENTRY_WORDS: Final = 8
KEY_BYTES_MAX: Final = 32
SYNC_INTERVAL_S: Final = 1.0
"""A power loss takes the stores of about this time."""
ZERO_BYTES: Final = 4 * 2**20
"""Size of one write when all data is overwritten."""
GROUP, USE, SUM, CHECK = 4, 5, 6, 7
"""Words of an entry behind the four of its key."""

_HEAD: Final = struct.Struct("<8sIIQ")
_BOOT_BYTES: Final = 16
_BOOT_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
_KEY: Final = struct.Struct("<4Q")
_MASK: Final = 2**64 - 1
_SPREAD: Final = 0x9E3779B97F4A7C15
_MIX: Final = 0xD6E8FEB86659FD93
"""Odd numbers with bits everywhere: a product with them is another number for each word."""
_USE_BITS: Final = 48
_SCAN_SLOTS: Final = 8_192
"""Entries that are checked at once: half a megabyte stays in a core's cache, and all at once take twice the time."""
_TITLES: Final = {
    "model": "model", "dtype": "dtype", "layout": "layout", "block_tokens": "number of tokens in a block",
    "rank": "rank", "ranks": "number of ranks", "hash_algorithm": "hash algorithm", "hash_seed": "hash seed",
    "slots": "number of slots", "block_bytes": "number of bytes in a block",
}


class SlotFileRefused(ValueError):
    """Raised when a directory cannot be used as it was asked for: one sentence with the field and both values."""


class SlotGeometry(msgspec.Struct, frozen=True):
    """How many blocks of how many bytes."""

    slots: int
    block_bytes: int

    @property
    def stride(self) -> int:
        """Bytes from one place to the next."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def data_bytes(self) -> int:
        """Size of the file of data."""
        return self.slots * self.stride

    @property
    def index_bytes(self) -> int:
        """Size of the index."""
        return PAGE_BYTES + self.slots * ENTRY_WORDS * 8


class SlotIdentity(msgspec.Struct, frozen=True):
    """The blocks of an engine mean something only to an engine with the same identity."""

    model: str
    dtype: str
    layout: str
    block_tokens: int
    rank: int
    ranks: int
    hash_algorithm: str
    hash_seed: str | None
    """None if it is another one in each process."""


class _About(msgspec.Struct, frozen=True):
    """The document in the header."""

    geometry: SlotGeometry
    identity: SlotIdentity


def check_of(slot: Any, words: Sequence[Any]) -> Any:
    """The check of some words of a slot's entry, for numbers or for columns of ``uint64``; it is never 0."""
    value = (slot + 1) * _SPREAD & _MASK
    for word in words:
        value = (value ^ word) * _MIX & _MASK
        value ^= value >> 32
    return value | 1


class SlotMedium:
    """The two files of a directory as the system gives them. Every method may raise ``OSError``."""

    def __init__(self, directory: Path, geometry: SlotGeometry) -> None:
        """Open both files, which exist with these sizes."""
        self._stride = geometry.stride
        self._index = os.open(directory / "index", os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self._index, geometry.index_bytes)
        self.words: Any = memoryview(self._map).cast("Q")[PAGE_BYTES // 8 :]
        """The words of all entries. Setting one is a single store of 8 bytes."""
        self._local = threading.local()
        self._data, self.direct = _open_data(directory / "data")

    def rows(self) -> Any:
        """The words of all entries as an array with a row for each slot. It must be gone before ``close``."""
        return np.frombuffer(self._map, np.uint64, offset=PAGE_BYTES).reshape(-1, ENTRY_WORDS)

    def boot(self, now: bytes) -> bytes:
        """Write the boot; returns the one of the last opening."""
        before = self._map[PAGE_BYTES - _BOOT_BYTES : PAGE_BYTES]
        self._map[PAGE_BYTES - _BOOT_BYTES : PAGE_BYTES] = now
        return before

    def write(self, slot: int, views: Sequence[memoryview]) -> None:
        """Write blocks at this place and the places behind it, in one call if the system can take them so."""
        if len(views) > 1 and not all(len(view) == self._stride and self._fits(view) for view in views):
            for at, view in enumerate(views, slot):
                self.write(at, [view])
            return
        if not self._fits(views[0]):
            page = self._page()
            page[: len(views[0])] = views[0]
            views = [page]
        if os.pwritev(self._data, views, slot * self._stride) != sum(map(len, views)):
            raise OSError(errno.EIO, "short write")

    def read(self, slot: int, views: Sequence[memoryview]) -> bool:
        """Read blocks from this place and the places behind it, as ``write`` does; False if the file ends before."""
        if len(views) > 1 and not all(len(view) == self._stride and self._fits(view) for view in views):
            return all(self.read(at, [view]) for at, view in enumerate(views, slot))
        buffers = views if self._fits(views[0]) else [self._page()]
        if os.preadv(self._data, buffers, slot * self._stride) != sum(map(len, buffers)):
            return False
        if buffers is not views:
            views[0][:] = buffers[0][: len(views[0])]
        return True

    def _fits(self, view: memoryview) -> bool:
        """True if the system takes this memory as it is: direct I/O wants whole pages."""
        if not self.direct:
            return True
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return not (address | len(view)) % PAGE_BYTES

    def _page(self) -> memoryview:
        """Aligned memory of this thread, for one block."""
        if (buffer := getattr(self._local, "buffer", None)) is None:
            buffer = self._local.buffer = memoryview(mmap.mmap(-1, self._stride))
        return buffer

    def zero(self, size: int) -> None:
        """Write zeroes over all data."""
        with mmap.mmap(-1, ZERO_BYTES) as zeroes:
            for at in range(0, size, ZERO_BYTES):
                buffer = memoryview(zeroes)[: min(ZERO_BYTES, size - at)]
                written = os.pwrite(self._data, buffer, at)
                wanted = len(buffer)
                buffer.release()
                if written != wanted:
                    raise OSError(errno.EIO, "short write")

    def sync(self) -> None:
        """Make all data and then all entries survive a power loss."""
        os.fdatasync(self._data)
        os.fdatasync(self._index)  # as msync does, and without the interpreter's lock

    def close(self) -> None:
        """Give files and memory back."""
        self.words.release()
        self._map.close()
        os.close(self._index)
        os.close(self._data)


def _open_data(path: Path) -> tuple[int, bool]:
    """A descriptor of the data, and whether it is one of direct I/O."""
    flags = os.O_RDWR | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0))
        try:
            with mmap.mmap(-1, PAGE_BYTES) as page:
                os.preadv(fd, [page], 0)
            return fd, hasattr(os, "O_DIRECT")
        except OSError:
            os.close(fd)
    return os.open(path, flags), False


class SlotFile:
    """The blocks of a directory. Threads may store and load in different slots at the same time; see ``open``."""

    def __init__(self, geometry: SlotGeometry, medium: SlotMedium, *, lock: int = -1, boot: bytes = b"") -> None:
        """``lock`` is a descriptor that is closed at the end."""
        self.geometry = geometry
        self.stored = 0
        """Stores that have ended."""
        self.synced = 0
        """Stores that survive a power loss: those up to this number."""
        self.sync_error = ""
        """Why syncing has stopped: a disk that failed once may have forgotten what it could not write."""
        self._medium = medium
        self._lock_fd = lock
        self._words = medium.words
        self._counting = threading.Lock()
        self._syncing = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.rebooted = bool(boot) and medium.boot(boot) not in (boot, bytes(_BOOT_BYTES))
        """True if the machine was started anew since the file was last open: unsynced blocks may be damaged."""
        slots, uses = self._valid()
        self.found = len(slots)
        """Blocks that were there when the file was opened."""
        self._uses = int(uses.max(initial=0))

    @classmethod
    def open(
        cls, directory: Path, geometry: SlotGeometry, identity: SlotIdentity, *,
        sync_s: float | None = SYNC_INTERVAL_S,
    ) -> "SlotFile":
        """The blocks of this directory, which is created if need be.

        A thread syncs every ``sync_s`` seconds; None leaves that to the caller. Raises ``SlotFileRefused`` for another
        identity or geometry, a random hash seed, a directory that another process has, and a disk without room."""
        _check_asked(geometry, identity)
        lock = _locked(directory)
        try:
            about = _About(geometry, identity)
            if not (directory / "index").exists():
                _create(directory, about)
            _compare(directory, about)
            file = cls(geometry, SlotMedium(directory, geometry), lock=lock, boot=_boot_id())
        except OSError as error:
            os.close(lock)
            raise SlotFileRefused(f"cannot keep blocks in {directory}: {error.strerror}") from None
        except BaseException:
            os.close(lock)
            raise
        if sync_s is not None:
            file._thread = threading.Thread(target=file._sync_often, args=(sync_s,), name="kvbm-slots", daemon=True)
            file._thread.start()
        return file

    # --- one block ---

    def store(self, slot: int, key: bytes, view: memoryview, group: int = 0) -> int:
        """Put a block of ``block_bytes`` contiguous bytes into a slot; what was there is gone, also after an error.

        Returns the number of the store: it survives a power loss once ``synced`` is as high. Raises ``OSError``."""
        return self.store_run(slot, [key], [view], group)

    def store_run(self, slot: int, keys: Sequence[bytes], views: Sequence[memoryview], group: int = 0) -> int:
        """Store blocks in this slot and those behind it. They are one write. Returns the number of the last store."""
        views = [view.cast("B") for view in views]
        named = [self._key_words(key, group) for key in keys]
        blocks = list(zip(range(slot, slot + len(views)), keys, named, views, strict=True))
        for at, _, _, view in blocks:
            if not 0 <= at < self.geometry.slots or len(view) != self.geometry.block_bytes:
                raise ValueError(f"no block of {len(view)} bytes fits into slot {at} of {self.geometry}")
        for at, _, _, _ in blocks:
            self._clear(at * ENTRY_WORDS)
        self._medium.write(slot, views)
        for at, key, words, view in blocks:
            self._publish(at, at * ENTRY_WORDS, words, self._sum(key, group, view))
        with self._counting:
            self.stored += len(blocks)
            return self.stored

    def load(self, slot: int, key: bytes, view: memoryview, group: int = 0) -> bool:
        """Fill ``view`` with the block of this key. False if the slot has no whole block of it, and then the bytes in
        ``view`` mean nothing. Raises ``OSError``."""
        return self.load_run(slot, [key], [view], group)

    def load_run(self, slot: int, keys: Sequence[bytes], views: Sequence[memoryview], group: int = 0) -> bool:
        """Load the blocks of this slot and those behind it. They are one read. False unless all are whole."""
        views, sums = [view.cast("B") for view in views], []
        for at, key in enumerate(keys, slot):
            words = self._words[at * ENTRY_WORDS : (at + 1) * ENTRY_WORDS].tolist()
            if words[:USE] != self._key_words(key, group) or words[CHECK] != self._check(at, words):
                return False
            sums.append(words[SUM])
        if not self._medium.read(slot, views) or [
            self._sum(key, group, view) for key, view in zip(keys, views, strict=True)
        ] != sums:
            return False
        for at in range(slot, slot + len(views)):
            self.touch(at)
        return True

    def sums(self, slot: int, key: bytes, view: memoryview, group: int = 0) -> tuple[int, int]:
        """The sum in the slot's entry, and that of these bytes as a block of this key."""
        return self._words[slot * ENTRY_WORDS + SUM], self._sum(key, group, view.cast("B"))

    def drop(self, slot: int) -> None:
        """The slot is empty."""
        self._clear(slot * ENTRY_WORDS)

    def touch(self, slot: int) -> None:
        """The block of this slot was used now. Storing and loading say so, too."""
        with self._counting:
            self._uses = uses = self._uses + 1
        self._words[slot * ENTRY_WORDS + USE] = _use_word(slot, uses)

    # The steps of a store, each of which a mutant of the tests leaves out or changes.

    def _clear(self, at: int) -> None:
        self._words[at + CHECK] = 0

    def _publish(self, slot: int, at: int, words: list[int], total: int) -> None:
        for column, word in enumerate(words):
            self._words[at + column] = word
        self._words[at + SUM] = total
        self.touch(slot)
        self._words[at + CHECK] = self._check(slot, [*words, 0, total])

    def _key_words(self, key: bytes, group: int) -> list[int]:
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise ValueError(f"a key must have 1 to {KEY_BYTES_MAX} bytes, got {len(key)}")
        return [*_KEY.unpack(key.ljust(KEY_BYTES_MAX, b"\0")), len(key) << 32 | group]

    def _sum(self, key: bytes, group: int, view: memoryview) -> int:
        return xxh3_64_intdigest(view, xxh3_64_intdigest(key, group))

    def _check(self, slot: Any, words: Any) -> Any:
        return check_of(slot, [*words[:USE], words[SUM]])

    # --- all blocks ---

    def _valid(self) -> tuple[Any, Any]:
        """The slots with a valid entry, and their uses."""
        rows, found = self._medium.rows(), []
        for first in range(0, len(rows), _SCAN_SLOTS):
            words = np.ascontiguousarray(rows[first : first + _SCAN_SLOTS].T)
            slots = np.arange(first, first + words.shape[1], dtype=np.uint64)
            uses = words[USE] >> np.uint64(64 - _USE_BITS)
            valid = (words[CHECK] == self._check(slots, words)) & (words[USE] == _use_word(slots, uses))
            found.append((slots[valid].astype(np.int64), uses[valid]))
        slots, uses = (np.concatenate(column) for column in zip(*found, strict=True))
        return slots, uses

    def entries(self) -> list[tuple[int, bytes, int]]:
        """Slot, key and group of all blocks, the least recently used first. Their bytes are checked at each load."""
        slots, uses = self._valid()
        slots = slots[np.argsort(uses, kind="stable")]
        found = self._medium.rows()[slots]
        keys = np.ascontiguousarray(found[:, :GROUP]).view(f"V{KEY_BYTES_MAX}").ravel().tolist()
        groups, lengths = found[:, GROUP] & np.uint64(2**32 - 1), found[:, GROUP] >> np.uint64(32)
        if (lengths != KEY_BYTES_MAX).any():
            keys = [key[:length] for key, length in zip(keys, lengths.tolist(), strict=True)]
        return list(zip(slots.tolist(), keys, groups.tolist(), strict=True))

    def clear(self) -> None:
        """Every slot is empty."""
        for slot in self._valid()[0].tolist():
            self.drop(slot)

    def zero(self) -> None:
        """Every slot is empty, and every byte of the data is 0. No store or load may run. Raises ``OSError``."""
        self.clear()
        self._medium.zero(self.geometry.data_bytes)

    # --- durability ---

    def sync(self) -> None:
        """Make all stores that have ended survive a power loss. Raises ``OSError``, and never tries again after it."""
        with self._syncing:
            if self.sync_error:
                raise OSError(errno.EIO, self.sync_error)
            stored = self.stored
            try:
                self._medium.sync()
            except OSError as error:
                self.sync_error = error.strerror or str(error)
                raise
            self.synced = stored

    def _sync_often(self, interval_s: float) -> None:
        while not self._wake.wait(interval_s):
            if self.stored != self.synced:
                try:
                    self.sync()
                except OSError:
                    return

    def close(self) -> None:
        """Sync a last time and let the directory go. No store or load may run; twice is fine."""
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self._words is None:
            return
        with contextlib.suppress(OSError):
            self.sync()
        self._words = None
        self._medium.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)


def _use_word(slot: Any, uses: Any) -> Any:
    """How often anything was used until now, with a check."""
    return uses << (64 - _USE_BITS) | check_of(slot, [uses]) >> _USE_BITS


# --- opening ----------------------------------------------------------------------------------------------------------


def _check_asked(geometry: SlotGeometry, identity: SlotIdentity) -> None:
    if identity.hash_seed is None:
        raise SlotFileRefused(
            "blocks are not kept for an engine whose hash seed is random, because no other process could find them: "
            "set PYTHONHASHSEED to the same value at each start"
        )
    for name, value in msgspec.structs.asdict(geometry).items():
        if value < 1:
            raise SlotFileRefused(f"the {_TITLES[name]} must be at least 1, got {value}")


def _locked(directory: Path) -> int:
    """A descriptor that holds the lock of the directory."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = "its file 'lock' is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise SlotFileRefused(f"cannot keep blocks in {directory}: {why}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise SlotFileRefused(f"cannot lock {directory}: {error.strerror}") from None
        raise SlotFileRefused(f"{directory} is used by another process") from None
    return fd


def _boot_id() -> bytes:
    """The identity of this boot of the machine; zeros if the system does not say."""
    try:
        return bytes.fromhex(_BOOT_FILE.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(_BOOT_BYTES)


def _create(directory: Path, about: _About) -> None:
    """Both files with all their bytes. The index gets its name last, so a broken creation is begun anew."""
    geometry, data, new = about.geometry, directory / "data", directory / "index.new"
    data.unlink(missing_ok=True)
    new.unlink(missing_ok=True)
    needed = geometry.data_bytes + geometry.index_bytes
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    full = SlotFileRefused(
        f"{directory} has {free:,} bytes free, and {geometry.slots:,} slots of {geometry.stride:,} bytes with their "
        f"index need {needed:,}"
    )
    if needed > free:
        raise full
    try:
        for path, size in ((data, geometry.data_bytes), (new, geometry.index_bytes)):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
                if path is new:
                    os.pwrite(fd, _header(about), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
    except OSError as error:
        data.unlink(missing_ok=True)
        new.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise full from None
        raise
    new.rename(directory / "index")
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _header(about: _About) -> bytes:
    document = msgspec.json.encode(about)
    room = PAGE_BYTES - _HEAD.size - _BOOT_BYTES
    if len(document) > room:
        raise SlotFileRefused(f"the identity of the blocks must have at most {room} bytes as JSON, got {len(document)}")
    rest = document.ljust(room, b"\0")
    check = _page_check(_HEAD.pack(MAGIC, VERSION, len(document), 0), rest)
    return _HEAD.pack(MAGIC, VERSION, len(document), check) + rest + bytes(_BOOT_BYTES)


def _page_check(head: bytes, rest: bytes) -> int:
    return xxh3_64_intdigest(head[:-8] + rest)


def _compare(directory: Path, asked: _About) -> None:
    """Raises ``SlotFileRefused`` unless the files are what was asked for."""
    index, data = directory / "index", directory / "data"
    with index.open("rb") as file:
        page = file.read(PAGE_BYTES)
    broken = SlotFileRefused(f"{index} is damaged: remove {directory} to begin with an empty one")
    if len(page) < PAGE_BYTES:
        raise broken
    magic, version, length, check = _HEAD.unpack_from(page)
    if magic == MAGIC and version != VERSION:
        raise SlotFileRefused(f"{index} has format {version}, and this program reads {VERSION}: remove {directory}")
    rest = page[_HEAD.size : -_BOOT_BYTES]
    if magic != MAGIC or check != _page_check(page[: _HEAD.size], rest):
        raise broken
    there = msgspec.json.decode(rest[:length], type=_About)
    for name, title in _TITLES.items():
        old, new = (getattr(about.identity, name, None) if hasattr(about.identity, name)
                    else getattr(about.geometry, name) for about in (there, asked))
        if old != new:
            raise SlotFileRefused(
                f"{directory} has blocks of another {title}: {old!r} there, {new!r} here. Name another directory"
            )
    geometry = asked.geometry
    for path, size in ((index, geometry.index_bytes), (data, geometry.data_bytes)):
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            raise SlotFileRefused(f"{path} has {found:,} bytes instead of {size:,}: remove {directory}")
