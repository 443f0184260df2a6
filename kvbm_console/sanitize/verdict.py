"""From a mismatch to its cause: the last writer, the copy, and the edge that is missing.

Facts decide in this order: a known content that lies there, a changed source, another copy in flight, the layers that
are right. At last come the bytes themselves, if one side still holds the right bytes.

Law of this file: it only reads. A cause needs evidence that was seen; without evidence the kind is ``other-bytes``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvbm_console.sanitize.fingerprint import Array, PageSide, Region, join
from kvbm_console.sanitize.ledger import Content, Copy, CopyLedger, Mismatch, short

KINDS: Final = {
    "swapped-blocks": "blocks of one copy changed places",
    "torn-copy": "some layers moved, and the others did not",
    "late-copy": "an earlier copy landed in a place that was given away meanwhile",
    "wrong-layer-offset": "layers landed in the place of other layers",
    "stale-content": "a slot holds its earlier content, because nothing was copied",
    "two-writers": "two copies wrote one place at the same time",
    "early-read": "the model got a block before its copy had ended",
    "rank-missing": "one rank did not carry out a store",
    "truncated": "only the beginning of each layer moved",
    "wrong-stride": "addresses were computed with another size of an element",
    "lost-flush": "a place was written again before its store had read it",
    "slot-given-twice": "a slot was given to another store while its content was still listed",
    "other-bytes": "no copy that is known explains the bytes",
}
"""Kind of a mismatch to its explanation."""
TEXT_MAX: Final = 240
"""Characters of a finding's parts; a daemon takes 256 bytes."""
_STRIDES: Final = ((1, 2), (2, 1), (1, 4), (4, 1))
_PROBE_BYTES: Final = 64
"""Bytes that must agree before a page counts as found elsewhere; they must not all be equal."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The part of a finding that explains it."""

    kind: str
    writer: str
    edge: str


@dataclass(slots=True)
class Case:
    """A mismatch with both sides at hand. ``content`` is the content that should lie there."""

    ledger: CopyLedger
    device: PageSide
    host: PageSide
    copy: Copy
    place: int
    slot: int
    content: Content
    found: Array
    """Fingerprint of each layer at the check."""
    again: Array | None = None
    """Fingerprint of each layer a step later, if the block was checked again."""

    @property
    def whole(self) -> int:
        return int(join(self.found[None])[0])

    @property
    def right(self) -> Array:
        """True for each layer whose bytes are right."""
        same: Array = self.found == self.content.parts
        return same

    def here(self, side: PageSide, place: int) -> Array:
        """The present fingerprints of a block."""
        parts: Array = side.fingerprints(self.content.group, [place]).get()[0]
        return parts

    @property
    def landed_later(self) -> bool:
        return self.again is not None and bool((self.again == self.content.parts).all())


def judge(case: Case) -> Mismatch:
    """The finding of a mismatch."""
    causes = (look(case) for look in (_STORE if case.copy.store else _LOAD))
    return finding(case, next(filter(None, causes), None) or Cause("other-bytes", str(case.copy), _unknown(case)))


def _unknown(case: Case) -> str:
    side, place = (case.device, case.place) if case.copy.store else (case.host, case.slot)
    if (case.here(side, place) == case.content.parts).all():
        return f"none is known: {case.copy} did not bring the bytes, and its source still holds them"
    return f"none is known: no other copy wrote there during {case.copy}"


def finding(case: Case, cause: Cause) -> Mismatch:
    """A mismatch with its cause, as one sentence."""
    copy, content, rank = case.copy, case.content, case.ledger.rank
    block = f"block {short(content.hash)} of request {copy.request or content.copy.request}"
    took = f"{content.copy} took from place {content.place} in step {content.copy.step}"
    words = cause.writer[:TEXT_MAX], cause.edge[:TEXT_MAX], took
    if copy.store:
        text = (f"{block} on rank {rank}: at the end of {copy} host slot {case.slot} does not hold what {took}; "
                f"last writer: {cause.writer}; missing edge: {cause.edge}")
    else:
        text = (f"{block} on rank {rank}: {copy} from host slot {case.slot} handed place {case.place} to the model, "
                f"and the place does not hold what {took}; last writer: {cause.writer}; missing edge: {cause.edge}")
    return Mismatch(
        cause.kind, "copy" if copy.store else "load", copy.request or content.copy.request, rank, content.group,
        content.hash, case.place, case.slot, copy.number, *words, text,
    )


def missing(ledger: CopyLedger, copy: Copy, row: int, key: int, store: int) -> Mismatch:
    """The finding of a load whose content a store was ordered for, while this rank stored nothing."""
    place, slot, group = copy.pairs[row]
    writer = "no store of this rank"
    edge = f"the end of store {store} on rank {ledger.rank}: its end was reported without this rank's part"
    text = (f"block {short(key)} of request {copy.request} on rank {ledger.rank}: {copy} from host slot {slot} "
            f"handed place {place} to the model; last writer: {writer}; missing edge: {edge}")
    return Mismatch("rank-missing", "load", copy.request, ledger.rank, group, key, place, slot, copy.number, writer,
                   edge, f"store {store} should have taken", text)


# --- causes that another content explains ---


def _known(case: Case) -> Cause | None:
    """The store's own finding, when the load copied the slot's bytes correctly."""
    bad = case.ledger.bad.get(case.slot)
    if bad is None or bad.hash != case.content.hash or not (case.here(case.host, case.slot) == case.found).all():
        return None
    return Cause(bad.kind, bad.writer, bad.edge)


def _swapped(case: Case) -> Cause | None:
    """The place holds the content of another block of the same copy."""
    copy, ledger = case.copy, case.ledger
    other = _of_same_copy(case)
    if other is None:
        return None
    theirs = f"block {short(other.hash)}" if isinstance(other, Content) else f"the block of {other}"
    return Cause("swapped-blocks", f"{copy} with the bytes of {theirs}",
                 f"in {copy} each source must be paired with its own {'slot' if copy.store else 'place'}"
                 + ("" if ledger.rank == 0 else f" on rank {ledger.rank}"))


def _of_same_copy(case: Case) -> Content | str | None:
    copy, ledger = case.copy, case.ledger
    for row, key in copy.sampled:
        other = ledger.content(key, copy.pairs[row][2])
        if other is not None and other.hash != case.content.hash and other.whole == case.whole:
            return other
    side = case.device if copy.store else case.host
    for place, slot, group in copy.pairs:
        source, own = (place, case.place) if copy.store else (slot, case.slot)
        if source == own or group != case.content.group:
            continue
        if (side.fingerprints(group, [source]).get()[0] == case.found).all():
            return f"place {place}" if copy.store else f"slot {slot}"
    return None


def _early(case: Case) -> Cause | None:
    """The block was right a step later, so the copy ended after its end was reported."""
    if not case.landed_later:
        return None
    if case.copy.store:
        return Cause("stale-content", f"{case.copy}, after its end was reported",
                     f"the report of {case.copy} did not wait for the end of its copy")
    return Cause("early-read", f"{case.copy}, after the model had got the block",
                 f"the model did not wait for the end of {case.copy}")


def _stale(case: Case) -> Cause | None:
    """The slot holds its earlier content."""
    before = case.ledger.slot_content.get(case.slot)
    if before is None or before.hash == case.content.hash or before.whole != case.whole:
        return None
    return Cause("stale-content", f"{before.copy.text} with block {short(before.hash)}, which was evicted since",
                 f"the report of {case.copy} did not wait for the end of its copy")


def _flush(case: Case) -> Cause | None:
    """The source place was overwritten between the order and the copy."""
    now, copy = case.here(case.device, case.place), case.copy
    given = copy.given.get(case.place)
    if (now == case.content.parts).all() or not (given or (now == case.found).any()):
        return None
    by = "a later step" if given is None else f"step {given[0]} of request {given[1]}"
    order = f", whose flush was ordered in step {given[0]}" if given is not None and copy.flushed else ""
    return Cause("lost-flush", f"{by} overwrote place {case.place}, and {copy}",
                 f"{by} did not wait for {copy}{order}")


def _late_load(case: Case) -> Cause | None:
    """An earlier load into the same place landed late."""
    for other in case.ledger.loads_into(case.place):
        if other.number == case.copy.number or other.submitted > case.copy.submitted:
            continue
        for place, slot, group in other.pairs:
            if place != case.place or slot == case.slot:
                continue
            source = case.here(case.host, slot) if group == case.content.group else None
            content = _content_in(other, place, case.ledger)
            held = None if content is None else content.parts
            for parts in (held, source):
                if parts is not None and (parts == case.found).all():
                    return Cause("late-copy", f"{other.text} from host slot {slot}, and not {case.copy}",
                                 f"nothing waited for {other} before place {place} was given to {case.copy}")
    return None


def _content_in(copy: Copy, place: int, ledger: CopyLedger) -> Content | None:
    for row, key in copy.sampled:
        if copy.pairs[row][0] == place:
            return ledger.content(key, copy.pairs[row][2])
    return None


def _other_store(case: Case) -> Cause | None:
    """Another store wrote into the same slot: at the same time, later, or earlier and late."""
    store = case.content.copy
    for other in case.ledger.stores_into(case.slot):
        if other.number == store.number:
            continue
        if case.copy.store and other.ended and other.ended < store.submitted:
            continue  # the slot's earlier content, of which a torn store leaves a part
        parts = case.ledger.parts_in(other, case.slot)
        seen = parts is not None and bool((parts == case.found).any())
        first, second = sorted((store, other), key=lambda copy: copy.submitted)
        if parts is None and other is second and not case.copy.store:  # not sampled, so the slot itself decides
            seen = bool((case.here(case.host, case.slot) == case.found).all())
        if not seen:
            continue
        if not first.ended or first.ended > second.submitted:
            return Cause("two-writers", f"{store} and {other.text} at the same time",
                         f"{second} did not wait for {first}, which writes slot {case.slot} too")
        if other is first:
            return Cause("late-copy", f"{other.text}, after its end was reported",
                         f"nothing waited for {other} before slot {case.slot} was given to {store}")
        return Cause("slot-given-twice", other.text,
                     f"slot {case.slot} was given to {other} while block {short(case.content.hash)} of {store} was "
                     f"still listed there: it was freed twice, or never taken from the list")
    return None


# --- causes that layers and bytes explain ---


def _offset(case: Case) -> Cause | None:
    wanted, found = case.content.parts, case.found
    layers = len(wanted)
    for shift in (*range(1, layers), *range(-1, -layers, -1)):
        pairs = [(at, at + shift) for at in range(layers) if 0 <= at + shift < layers]
        hits = [found[to] == wanted[at] for at, to in pairs]
        if len(hits) >= max(1, layers // 2) and all(hits):
            return Cause("wrong-layer-offset", f"{case.copy} with each layer {abs(shift)} further "
                         + ("up" if shift > 0 else "down"),
                         f"{case.copy} must write layer n to the place of layer n; it wrote it to n{shift:+d}")
    return None


def _damaged(case: Case) -> Cause | None:
    """A few bytes differ inside layers, which no copy of whole pages can cause."""
    sides = [(case.device, case.place)]
    if not case.copy.store:
        sides = [(case.host, case.slot), (case.device, case.content.place)]
    truth = next(((side, at) for side, at in sides if (case.here(side, at) == case.content.parts).all()), None)
    if truth is None:
        return None
    group = case.content.group
    target, to = (case.host, case.slot) if case.copy.store else (case.device, case.place)
    for layer in np.flatnonzero(~case.right):
        wanted = truth[0].groups[group][int(layer)].page(truth[1])
        differs = np.flatnonzero(wanted != target.groups[group][int(layer)].page(to))
        if not 0 < len(differs) <= len(wanted) // 16:
            return None
        first, last = int(differs[0]), int(differs[-1])
    return Cause("other-bytes", f"no copy that is known, at bytes {first:,} to {last:,} of layer {int(layer)}",
                 "none is known: every copy moves whole pages")


def _torn(case: Case) -> Cause | None:
    right = case.right
    if not right.any():
        return None
    wrong = np.flatnonzero(~right)
    return Cause("torn-copy", f"{case.copy} with {int(right.sum())} of {len(right)} layers",
                 f"the report of {case.copy} did not wait for layers {_runs(wrong)}")


def _runs(rows: Array) -> str:
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return str(first) if first == last else f"{first} to {last}"
    return ", ".join(str(int(row)) for row in rows[:8])


def _bytes(case: Case) -> Cause | None:
    """If one side still holds the right bytes, compare how far they agree, and search for them elsewhere."""
    store = case.copy.store
    source, at = (case.device, case.place) if store else (case.host, case.slot)
    target, to = (case.host, case.slot) if store else (case.device, case.place)
    if not (case.here(source, at) == case.content.parts).all():
        return None
    layer = int(np.flatnonzero(~case.right)[0])
    regions = source.groups[case.content.group][layer], target.groups[case.content.group][layer]
    return _truncated(case, source, target, at, to) or _stride(case, *regions, at, to)


def _stride(case: Case, source: Region, target: Region, at: int, to: int) -> Cause | None:
    wanted, found = source.page(at), target.page(to)
    for top, bottom in _STRIDES:
        name = f"{top}/{bottom}" if bottom > 1 else str(top)
        for region, place, page, verb in ((target, to, wanted, "its bytes lie"), (source, at, found, "it read bytes")):
            offset = place * region.page_bytes * top // bottom
            content = region.at(offset, region.used)
            if offset == place * region.page_bytes or not _same(content, page):
                continue
            if region is target and _belongs(case, offset, region.page_bytes):
                continue
            if region is source and offset % region.page_bytes == 0:
                continue  # a whole other block, which may also be an old content of the target
            return Cause("wrong-stride", f"{case.copy} with {name} of the stride: {verb} at {offset:,}",
                         f"{case.copy} must step by {region.page_bytes:,} bytes for each block")
    for size in (2, 4):
        if len(wanted) % (2 * size):
            continue
        view = wanted.view(f"u{size}")
        if _same(found[: len(found) // 2], view[::2].copy().view(np.uint8)):
            return Cause("wrong-stride", f"{case.copy} with every second element of {size} bytes",
                         f"{case.copy} must read elements of {size} bytes without a gap")
    return None


def _belongs(case: Case, offset: int, page_bytes: int) -> bool:
    """True if a copy of the content belongs at this offset."""
    place, rest = divmod(offset, page_bytes)
    if rest:
        return False
    if case.copy.store:
        content = case.ledger.slot_content.get(place)
        return content is not None and content.hash == case.content.hash
    load = case.ledger.place_load.get(place)
    brought = None if load is None else _content_in(load, place, case.ledger)
    return place == case.content.place or (brought is not None and brought.hash == case.content.hash)


def _same(page: Array, other: Array) -> bool:
    probe = page[:_PROBE_BYTES]
    return len(page) == len(other) > 0 and bool((probe != probe[0]).any()) and bool((page == other).all())


def _truncated(case: Case, source: PageSide, target: PageSide, at: int, to: int) -> Cause | None:
    group = case.content.group
    least, size = None, 0
    for layer in np.flatnonzero(~case.right):
        wanted = source.groups[group][int(layer)].page(at)
        differs = np.flatnonzero(wanted != target.groups[group][int(layer)].page(to))
        if len(differs) == 0:
            return None
        least, size = int(differs[0]) if least is None else min(least, int(differs[0])), len(wanted)
    if not least or least < min(_PROBE_BYTES, size // 8):
        return None
    return Cause("truncated", f"{case.copy} with the first {least:,} of {size:,} bytes of each layer",
                 f"the report of {case.copy} did not wait for the bytes from {least:,} on")


Look = Callable[[Case], Cause | None]
_STORE: Final[tuple[Look, ...]] = (_stale, _swapped, _other_store, _flush, _early, _offset, _damaged, _torn, _bytes)
_LOAD: Final[tuple[Look, ...]] = (_known, _early, _swapped, _late_load, _other_store, _offset, _damaged, _torn, _bytes)
