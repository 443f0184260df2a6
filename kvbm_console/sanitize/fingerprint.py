"""64 bits of a page, by one formula for numpy and torch: a copy on the host compares with its original on a device.

A page is the part of a block that one layer keeps. Its bytes are read as little-endian 64-bit words ``w[i]``. The
fingerprint is the sum of ``(w[i] + (w[i] >> 32)) * key[i]`` modulo 2**64, with an arithmetic shift and odd random keys.
The keys depend on the position, so words that change places change the sum. A change of one word always changes it.
Several changed words cancel with a probability of at most 2**-33, because the shift brings high bits down before the
product. xxh3 is four times faster on the host, but no tensor operation computes it on a device.

Law of this file: equal bytes have equal fingerprints, wherever they lie and whichever library reads them.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import numpy as np

WORD: Final = 8
BATCH_BYTES: Final = 64 * 2**20
"""Bytes of blocks that a device gathers at once. Folding them needs three times as much memory."""
Array = np.ndarray[Any, Any]


@lru_cache(maxsize=64)
def keys(words: int) -> Array:
    """The odd multipliers of so many positions: the stream of splitmix64 from zero.

    >>> [hex(int(key) & 2**64 - 1) for key in keys(2)]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f5']
    """
    state = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31)) | np.uint64(1)).view(np.int64)


def fold(words: Any, multipliers: Any) -> Any:
    """The fingerprints of the rows of a tensor or array of 64-bit words."""
    return ((words + (words >> 32)) * multipliers).sum(-1)


def fold_page(page: Array) -> int:
    """The fingerprint of the bytes of one page. Buffers of the right size stay in the processor's cache."""
    rest = page.nbytes % WORD
    if rest:
        page = np.concatenate((page.view(np.uint8), np.zeros(WORD - rest, dtype=np.uint8)))
    words = page.view(np.int64)
    mixed = np.right_shift(words, 32)
    np.add(mixed, words, out=mixed)
    np.multiply(mixed, keys(len(words)), out=mixed)
    return int(mixed.sum())


def join(parts: Array) -> Array:
    """A fingerprint of each block (row) from those of its layers, as unsigned numbers. Layers do not commute."""
    joined: Array = fold(parts, keys(parts.shape[1])).view(np.uint64)
    return joined


class Region:
    """The pages of one layer on one side: a 2-D tensor or array of bytes with ``per_row`` pages in each row.

    ``used`` is the number of bytes of a page that belong to the layer. A page has the number ``row * per_row + index``.
    """

    def __init__(
        self, array: Any, *, per_row: int = 1, used: int | None = None, on_device: bool | None = None
    ) -> None:
        """``on_device`` chooses torch for a tensor of the host too, so that tests can compare both."""
        if on_device is None:
            on_device = getattr(getattr(array, "device", None), "type", "cpu") != "cpu"
        self.on_device = on_device
        self.array = array.numpy() if not on_device and hasattr(array, "numpy") else array
        self.per_row = per_row
        self.page_bytes = int(array.shape[1]) // per_row
        self.used = self.page_bytes if used is None else used

    def page(self, place: int) -> Array:
        """The bytes of one page, as a view if they lie on the host."""
        row, index = divmod(place, self.per_row)
        begin = index * self.page_bytes
        page = self.array[row, begin : begin + self.used]
        return (page.cpu().numpy() if self.on_device else page).view(np.uint8)  # type: ignore[no-any-return]

    def at(self, offset: int, size: int) -> Array:
        """Bytes from an offset in the concatenation of all pages; fewer beyond its end."""
        parts: list[Array] = []
        pages = len(self.array) * self.per_row
        while size > 0 and 0 <= offset < pages * self.page_bytes:
            place, begin = divmod(offset, self.page_bytes)
            row, index = divmod(place, self.per_row)
            first = index * self.page_bytes
            part = self.array[row, first + begin : first + min(self.page_bytes, begin + size)]
            parts.append((part.cpu().numpy() if self.on_device else part).view(np.uint8))
            offset, size = offset + len(parts[-1]), size - len(parts[-1])
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)

    def words(self, places: Any) -> Any:
        """The pages as rows of 64-bit words, gathered on the device."""
        array = self.array
        begin = (places % self.per_row) * self.page_bytes
        rows = array.index_select(0, places // self.per_row)
        if self.per_row > 1:
            offsets = begin[:, None] + _torch().arange(self.used, device=array.device)
            rows = rows.gather(1, offsets)
        rows = rows[:, : self.used].contiguous()
        if self.used % WORD:
            rows = _torch().nn.functional.pad(rows, (0, WORD - self.used % WORD))
        return rows.view(_torch().int64)


class Values:
    """Fingerprints of some blocks (rows) by layer (columns), which a device may still be computing."""

    def __init__(self, values: Any, event: Any = None) -> None:
        self._values = values
        self._event = event

    @property
    def ready(self) -> bool:
        """True if ``get`` returns at once."""
        return self._event is None or bool(self._event.query())

    def get(self) -> Array:
        """The numbers; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
            self._values, self._event = self._values.numpy(), None
        return self._values  # type: ignore[no-any-return]


class PageSide:
    """All layers of all groups on one side: the device's blocks or the host's."""

    def __init__(self, groups: Sequence[Sequence[Region]]) -> None:
        self.groups = groups
        self.on_device = any(region.on_device for group in groups for region in group)
        self._keys: dict[int, Any] = {}
        self._own_stream: Any = None

    def fingerprints(self, group: int, places: Sequence[int], *, apart: bool = False) -> Values:
        """The fingerprints of the pages of each place (row), by layer (column).

        On a device the work is queued on its current stream, after all earlier work, or ``apart`` on our own stream."""
        regions = self.groups[group]
        if self.on_device:
            with self._stream(regions[0].array.device) if apart else nullcontext():
                return self._on_device(regions, places)
        values = np.empty((len(places), len(regions)), dtype=np.int64)
        for row, place in enumerate(places):
            for column, region in enumerate(regions):
                values[row, column] = fold_page(region.page(place))
        return Values(values)

    def _on_device(self, regions: Sequence[Region], places: Sequence[int]) -> Values:
        torch = _torch()
        device = regions[0].array.device
        size = sum(region.used for region in regions)
        batch = max(1, BATCH_BYTES // size)
        parts = []
        for first in range(0, len(places), batch):
            at = torch.tensor(places[first : first + batch], device=device)
            columns: list[Any] = [None] * len(regions)
            for used in {region.used for region in regions}:
                alike = [column for column, region in enumerate(regions) if region.used == used]
                words = torch.stack([regions[column].words(at) for column in alike])
                for column, folded in zip(alike, fold(words, self._multipliers(words.shape[-1], device)), strict=True):
                    columns[column] = folded
            parts.append(torch.stack(columns, dim=1))
        folded = torch.cat(parts)
        if device.type == "cpu":
            return Values(folded.numpy())
        host = torch.empty(folded.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(folded, non_blocking=True)
        event = torch.Event(device=device)
        event.record()
        return Values(host, event)

    def _stream(self, device: Any) -> AbstractContextManager[Any]:
        if device.type != "cuda":
            return nullcontext()
        cuda = _torch().cuda
        if self._own_stream is None:
            self._own_stream = cuda.Stream(device=device)
        stream: AbstractContextManager[Any] = cuda.stream(self._own_stream)
        return stream

    def _multipliers(self, words: int, device: Any) -> Any:
        if words not in self._keys:
            self._keys[words] = _torch().from_numpy(keys(words).copy()).to(device)
        return self._keys[words]


def _torch() -> Any:
    """The library of the given tensors, which was imported with them."""
    return import_module("torch")
