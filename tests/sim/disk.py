"""The simulated disk: files and directories with what the page cache holds and what would survive a power loss.

A file has its bytes as the system shows them, and an image of what is on the platter. ``fdatasync`` copies the blocks
that changed. A power loss leaves, for each changed block of 4096 bytes, the new one, the old one or a torn one (some of
its sectors), and any length between the durable and the current one. Names work alike: a creation, rename or removal
survives for certain once the directory was synced, else by the dice. A sync that fails marks its blocks as clean, as
Linux does, so a second sync answers that all is well and makes nothing durable.

Faults are attributes of ``Disk``; each meets the next call that it is for.

Law of this file: a dead process changes nothing, and what ``kill -9`` leaves is everything that a call had accepted.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import PurePosixPath
from typing import Final, NamedTuple, Self

from tests.sim.scheduler import Killed, Namespace, Process, Thread, World

BLOCK_BYTES: Final = 4096
SECTOR_BYTES: Final = 512
FIRST_FD: Final = 1000
CHANGES: Final = frozenset({"open", "write", "truncate", "rename", "unlink", "sync"})
"""Calls that a crash may come in front of."""


INIT_PID: Final = 1
"""The parent of a process whose parent has ended."""


class Node:
    """A file, or a directory (then ``entries`` is set)."""

    numbers = 0

    def __init__(self, world: World, directory: bool = False) -> None:
        Node.numbers += 1
        self.number = Node.numbers
        self.data = bytearray()
        self.durable = bytearray()
        self.dirty: set[int] = set()
        """Blocks that differ from the platter, or may."""
        self.links = 1
        self.mtime_ns = world.now + world.wall_offset
        self.holder: int | None = None
        """Descriptor that holds the lock."""
        self.entries: dict[str, Node] | None = {} if directory else None
        self.durable_entries: dict[str, Node] = {}

    def touch(self, start: int, end: int) -> None:
        """Bytes from ``start`` to ``end`` changed."""
        self.dirty.update(range(start // BLOCK_BYTES, (max(end, start + 1) - 1) // BLOCK_BYTES + 1))


class Found(NamedTuple):
    """The answer of ``stat``."""

    st_ino: int
    st_size: int
    st_mtime_ns: int
    st_nlink: int
    st_mode: int

    @property
    def st_mtime(self) -> float:
        """In seconds."""
        return self.st_mtime_ns / 1e9


class Open:
    """An open file."""

    def __init__(self, node: Node, path: "SimPath", process: Process, flags: int) -> None:
        self.node = node
        self.path = path
        self.process = process
        self.flags = flags
        self.offset = 0


class Disk:
    """One file system. Faults are set as attributes; ``quiet`` switches them, and the time that calls take, off."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.root = Node(world, directory=True)
        self.capacity = 1 << 40
        self.used = 0
        self.latency_s = 200e-6
        self.short_share = 0.0
        """How often a write accepts only a beginning."""
        self.write_error: int | None = None
        self.sync_error: int | None = None
        self.open_error: int | None = None
        self.unlink_error: int | None = None
        self.no_descriptor: Callable[[], bool] = lambda: False
        """True if the running process may have no further one."""
        self.lying = False
        """Syncs answer that all is well and do nothing."""
        self.ever_lied = False
        self.hangs = False
        self.hung_ns = 0
        """Since when it hangs, while it does."""
        self._hung: list[Thread] = []
        self.quiet = False
        self.strikes: list[tuple[int, Callable[[], None]]] = []
        """(calls that change something until then, what happens in front of the last of them)."""
        self.watched: PurePosixPath | None = None
        """The directory whose size ``peak`` follows."""
        self.on_change: Callable[[], None] = lambda: None
        self.on_remove: Callable[[str], None] = lambda name: None
        self.on_lie: Callable[[], None] = lambda: None
        self.bytes_in: dict[str, int] = {}
        self._open: dict[int, Open] = {}
        self._next_fd = FIRST_FD

    # --- faults ---

    @property
    def ailing(self) -> bool:
        """Whether calls may fail now."""
        return bool(self.write_error or self.sync_error or self.open_error or self.unlink_error or self.hangs)

    def hang(self, seconds: float) -> None:
        """Every call waits for so long."""
        if not self.hangs:
            self.hangs, self.hung_ns = True, self.world.now
        self.world.trace("disk hangs", seconds)
        self.world.after(seconds, self._resume)

    def _resume(self) -> None:
        self.hangs = False
        self.world.trace("disk goes on")
        self.world.wake(self._hung)

    def call(self, name: str, path: object = "") -> None:
        """The cost and the faults that every call has."""
        world = self.world
        if self.quiet:
            return
        world.require_alive()
        if world.current is None:
            return
        if self.strikes and name in CHANGES:
            self._strike()
            world.require_alive()
        dice = world.dice
        loop = world.current.loop
        if loop is not None and loop.serving:
            loop.disk_calls.append(f"{name} {path}")
        while self.hangs:
            world.wait(self._hung, None)
        if dice.random() < 0.5:
            world.pause(self.latency_s * (0.1 + dice.random()))
        world.require_alive()

    def _strike(self) -> None:
        due = [action for left, action in self.strikes if left <= 1]
        self.strikes = [(left - 1, action) for left, action in self.strikes if left > 1]
        for action in due:
            action()

    def power_loss(self) -> None:
        """Everything that was not synced survives by the dice. Every process must be dead."""
        dice = self.world.dice
        self.world.trace("power loss")
        self._lose_names(self.root)
        for node in self._nodes(self.root):
            if node.entries is not None:
                continue
            low, high = sorted((len(node.durable), len(node.data)))
            size = dice.randint(low, high) if node.dirty else len(node.durable)
            image = bytearray(node.durable[:size])
            image.extend(bytes(size - len(image)))
            for block in sorted(node.dirty):
                fate = dice.random()
                begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size)
                if fate < 0.4 or begin >= end:
                    continue
                new = node.data[begin:end]
                if fate < 0.6:  # torn: some sectors are new
                    for at in range(0, len(new), SECTOR_BYTES):
                        if dice.random() < 0.5:
                            image[begin + at : begin + at + SECTOR_BYTES] = new[at : at + SECTOR_BYTES]
                else:
                    image[begin : begin + len(new)] = new
            node.data, node.durable = image, bytearray(image)
            node.dirty.clear()
        self.used = sum(len(node.data) for node in self._nodes(self.root))
        self.recount()

    def _lose_names(self, directory: Node) -> None:
        dice = self.world.dice
        now, safe = directory.entries or {}, directory.durable_entries
        left: dict[str, Node] = {}
        for name in sorted({*now, *safe}):
            before, after = safe.get(name), now.get(name)
            kept = after if before is after or dice.random() < 0.5 else before
            if kept is not None:
                left[name] = kept
        for node in left.values():
            if node.entries is not None:
                self._lose_names(node)
            node.links = 1
        directory.entries = left
        directory.durable_entries = dict(left)

    def _nodes(self, node: Node) -> Iterator[Node]:
        yield node
        for child in (node.entries or {}).values():
            yield from self._nodes(child)

    def close_files_of(self, process: Process) -> None:
        """The end of a process, as the system handles it."""
        for fd in [fd for fd, each in self._open.items() if each.process is process]:
            self._close(fd)

    def descriptors(self, process: Process) -> int:
        """How many a process has."""
        return sum(each.process is process for each in self._open.values())

    # --- names ---

    def node(self, path: "SimPath") -> Node:
        """Raises ``FileNotFoundError``."""
        node = self.root
        for part in path.parts[1:]:
            child = (node.entries or {}).get(part)
            if child is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            node = child
        return node

    def directory(self, path: "SimPath") -> dict[str, Node]:
        """The entries of a directory. Raises ``OSError``."""
        entries = self.node(path).entries
        if entries is None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return entries

    def recount(self) -> None:
        """The size of the watched directory may have changed."""
        if self.watched is not None:
            try:
                entries = self.directory(SimPath(self.watched))
            except OSError:
                self.bytes_in = {}
            else:
                self.bytes_in = {name: len(node.data) for name, node in entries.items()}
            self.on_change()

    def unlink(self, path: "SimPath", missing_ok: bool = False) -> None:
        self.call("unlink", path)
        if self.unlink_error is not None and not self.quiet:
            raise OSError(self.unlink_error, os.strerror(self.unlink_error), str(path))
        try:
            entries = self.directory(path.parent)
            node = entries.pop(path.name)
        except (FileNotFoundError, KeyError):
            if missing_ok:
                return
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        node.links -= 1
        self._free(node)
        self.world.trace("unlink", path)
        self.on_remove(path.name)
        self.recount()

    def _free(self, node: Node) -> None:
        if node.links <= 0 and not any(each.node is node for each in self._open.values()):
            self.used -= len(node.data)

    def rename(self, old: "SimPath", new: "SimPath") -> None:
        self.call("rename", old)
        source, target = self.directory(old.parent), self.directory(new.parent)
        if old.name not in source:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(old))
        replaced = target.get(new.name)
        target[new.name] = source.pop(old.name)
        if replaced is not None:
            replaced.links -= 1
            self._free(replaced)
        self.world.trace("rename", old, new)
        self.recount()

    def mkdir(self, path: "SimPath", parents: bool, exist_ok: bool) -> None:
        self.call("mkdir", path)
        parent = self.root
        for at, part in enumerate(path.parts[1:], 1):
            entries = parent.entries
            assert entries is not None
            child = entries.get(part)
            last = at == len(path.parts) - 1
            if child is None:
                if not last and not parents:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
                child = entries[part] = Node(self.world, directory=True)
                self.recount()
            elif last and not exist_ok:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            if child.entries is None:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            parent = child

    def remove_tree(self, path: "SimPath") -> None:
        """As ``rm -rf``."""
        for name in sorted(self.directory(path)):
            child = path / name
            if self.node(child).entries is None:
                node = self.directory(path).pop(name)
                node.links -= 1
                self._free(node)
            else:
                self.remove_tree(child)
        del self.directory(path.parent)[path.name]
        self.world.trace("rm -rf", path)
        self.recount()

    # --- descriptors ---

    def open(self, path: "SimPath", flags: int, mode: int = 0o777) -> int:
        self.call("open", path)
        if self.open_error is not None and not self.quiet:
            raise OSError(self.open_error, os.strerror(self.open_error), str(path))
        if self.no_descriptor() and not self.quiet:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        entries = self.directory(path.parent) if path.name else {}
        node = entries.get(path.name) if path.name else self.root
        if node is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            if self.write_error is not None and not self.quiet:
                raise OSError(self.write_error, os.strerror(self.write_error), str(path))
            node = entries[path.name] = Node(self.world)
            self.world.trace("create", path)
            self.recount()
        elif flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        elif flags & os.O_TRUNC:
            self._resize(node, 0)
        fd, self._next_fd = self._next_fd, self._next_fd + 1
        self._open[fd] = Open(node, path, self.world.process, flags)
        return fd

    def at(self, fd: int) -> Open:
        """Raises ``OSError``."""
        found = self._open.get(fd)
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found

    def close(self, fd: int) -> None:
        self.at(fd)
        self._close(fd)

    def _close(self, fd: int) -> None:
        node = self._open.pop(fd).node
        if node.holder == fd:
            node.holder = None
        self._free(node)

    def write(self, fd: int, data: bytes) -> int:
        file = self.at(fd)
        self.call("write", file.path)
        file = self.at(fd)
        if self.write_error is not None and not self.quiet:
            raise OSError(self.write_error, os.strerror(self.write_error), str(file.path))
        accepted = len(data)
        dice = self.world.dice
        if self.short_share and not self.quiet and dice.random() < self.short_share and accepted > 1:
            accepted = dice.randrange(1, accepted)
        growth = file.offset + accepted - len(file.node.data)
        if growth > 0:
            room = self.capacity - self.used
            if growth > room:
                accepted -= growth - max(0, room)
                if accepted <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.path))
        node, at = file.node, file.offset
        if at > len(node.data):
            self._resize(node, at)
        before = len(node.data)
        node.data[at : at + accepted] = data[:accepted]
        self.used += len(node.data) - before
        node.touch(at, at + accepted)
        node.mtime_ns = self.world.now + self.world.wall_offset
        file.offset += accepted
        self.world.trace("write", file.path.name, at, accepted)
        self.recount()
        return accepted

    def _resize(self, node: Node, size: int) -> None:
        before = len(node.data)
        if size < before:
            del node.data[size:]
        else:
            node.data.extend(bytes(size - before))
        node.touch(min(before, size), max(before, size))
        self.used += size - before

    def truncate(self, fd: int, size: int) -> None:
        file = self.at(fd)
        self.call("truncate", file.path)
        self._resize(self.at(fd).node, size)
        self.world.trace("truncate", file.path.name, size)
        self.recount()

    def cut(self, path: "SimPath", size: int) -> None:
        """As ``truncate`` of somebody else."""
        self._resize(self.node(path), size)
        self.world.trace("cut by somebody else", path.name, size)
        self.recount()

    def sync(self, fd: int) -> None:
        file = self.at(fd)
        self.call("sync", file.path)
        node = self.at(fd).node
        if self.quiet or not self.lying:
            failed = self.sync_error if not self.quiet else None
            if failed is not None:
                node.dirty.clear()  # the kernel forgets what it could not write
                raise OSError(failed, os.strerror(failed), str(file.path))
            if node.entries is not None:
                node.durable_entries = dict(node.entries)
            else:
                self._make_durable(node)
        else:
            self.ever_lied = True
        self.world.trace("sync", file.path.name, len(node.data))

    def _make_durable(self, node: Node) -> None:
        size = len(node.data)
        del node.durable[size:]
        node.durable.extend(bytes(size - len(node.durable)))
        for block in node.dirty:
            begin = block * BLOCK_BYTES
            node.durable[begin : min(begin + BLOCK_BYTES, size)] = node.data[begin : begin + BLOCK_BYTES]
        del node.durable[size:]
        node.dirty.clear()

    def lock(self, fd: int, operation: int) -> None:
        file = self.at(fd)
        self.call("flock", file.path)
        node = self.at(fd).node
        if node.holder not in (None, fd):
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        node.holder = fd

    def found(self, node: Node) -> Found:
        """The answer of ``stat``."""
        kind = stat.S_IFREG if node.entries is None else stat.S_IFDIR
        return Found(node.number, len(node.data), node.mtime_ns, node.links, kind | 0o600)


_disk: Disk | None = None


def the_disk() -> Disk:
    """Of the run."""
    assert _disk is not None
    return _disk


def set_disk(disk: Disk | None) -> None:
    """Make a disk that of the run."""
    global _disk
    _disk = disk


class SimPath(PurePosixPath):
    """As ``pathlib.Path``, on the simulated disk."""

    def exists(self) -> bool:
        """Whether there is something."""
        the_disk().call("stat", self)
        try:
            the_disk().node(self)
        except OSError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.exists() and the_disk().node(self).entries is not None

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self.exists() and the_disk().node(self).entries is None

    def absolute(self) -> Self:
        """It is."""
        return self

    def stat(self) -> Found:
        """As ``os.stat``."""
        the_disk().call("stat", self)
        return the_disk().found(the_disk().node(self))

    def iterdir(self) -> "Iterator[SimPath]":
        """The directory's entries, in the order in which they were made."""
        the_disk().call("list", self)
        return iter([self / name for name in the_disk().directory(self)])

    def glob(self, pattern: str) -> "Iterator[SimPath]":
        """Those whose name fits."""
        if not self.exists():
            return iter(())
        return iter([path for path in self.iterdir() if fnmatchcase(path.name, pattern)])

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the name."""
        the_disk().unlink(self, missing_ok)

    def rename(self, target: "SimPath") -> "SimPath":
        """Give it another name."""
        the_disk().rename(self, target)
        return target

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a directory."""
        the_disk().mkdir(self, parents, exist_ok)

    def open(self, mode: str = "r") -> "_Reader":
        """For reading, as bytes."""
        assert mode == "rb"
        return _Reader(self)

    def write_bytes(self, data: bytes) -> None:
        """Make a file; for the test itself."""
        disk = the_disk()
        fd = disk.open(self, os.O_WRONLY | os.O_CREAT)
        disk.write(fd, data)
        disk.sync(fd)
        disk.close(fd)

    def read_bytes(self) -> bytes:
        """All of it."""
        return bytes(the_disk().node(self).data)


class _Reader(BytesIO):
    """A file that was opened for reading: what was in it then."""

    def __init__(self, path: SimPath) -> None:
        disk = the_disk()
        self.fd = disk.open(path, os.O_RDONLY)
        super().__init__(bytes(disk.at(self.fd).node.data))

    def fileno(self) -> int:
        return self.fd

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, Killed):
            the_disk().close(self.fd)
        super().__exit__(*error)  # type: ignore[arg-type]


# --- what stands in for ``os``, ``fcntl``, ``mmap`` and ``shutil`` ----------------------------------------------------


class _Space(NamedTuple):
    f_bavail: int
    f_frsize: int


def _pread(fd: int, length: int, offset: int) -> bytes:
    return bytes(the_disk().at(fd).node.data[offset : offset + length])


def _lseek(fd: int, offset: int, whence: int) -> int:
    the_disk().at(fd).offset = offset
    return offset


def _writev(fd: int, buffers: Sequence[bytes | memoryview]) -> int:
    return the_disk().write(fd, b"".join(buffers))


def _parent_of(process: Process) -> int:
    parent = process.parent
    return INIT_PID if parent is None or parent.dead else parent.pid


def os_module() -> Namespace:
    """``os``."""
    disk = the_disk()

    def close(fd: int) -> None:
        # A reader that is collected late closes a descriptor of its own run, never one of the next.
        if fd in disk._open:
            disk.close(fd)

    names = (
        "O_WRONLY", "O_RDONLY", "O_RDWR", "O_CREAT", "O_EXCL", "O_CLOEXEC", "O_DIRECTORY", "O_TRUNC", "O_NOFOLLOW",
        "SEEK_SET", "strerror", "environ", "fsencode", "nice",
    )
    return Namespace(os, {
        "open": disk.open, "close": close, "write": disk.write, "writev": _writev, "ftruncate": disk.truncate,
        "lseek": _lseek, "fdatasync": disk.sync, "fsync": disk.sync, "rename": disk.rename, "pread": _pread,
        "stat": lambda path: path.stat(), "fstat": lambda fd: disk.found(disk.at(fd).node),
        "statvfs": lambda path: _Space(max(0, disk.capacity - disk.used), 1),
        "getpid": lambda: disk.world.process.pid, "getppid": lambda: _parent_of(disk.world.process),
    }, names)


def fcntl_module() -> Namespace:
    """``fcntl``."""
    import fcntl

    return Namespace(fcntl, {"flock": the_disk().lock}, ("LOCK_EX", "LOCK_NB"))


def mmap_module() -> Namespace:
    """``mmap``: what is in the file now, as bytes."""
    return Namespace(None, {
        "mmap": lambda fd, size, access: bytes(the_disk().at(fd).node.data[:size]), "ACCESS_READ": 1,
    })


def shutil_module() -> Namespace:
    """``shutil``."""
    return Namespace(None, {"rmtree": lambda path: the_disk().remove_tree(path)})
