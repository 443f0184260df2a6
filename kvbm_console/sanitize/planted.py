"""Twelve faults on real tensors, each in a play of a few copies that the checker must name.

A play has ranks, each with the tensors of some layers on two sides, a copier between them and a checker. Without its
fault the same play must stay silent.

Law of this file: the copier and the checker share only the tensors. The checker gets only orders and ends.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvbm_console.sanitize.checker import Checker
from kvbm_console.sanitize.fingerprint import PageSide, Region
from kvbm_console.sanitize.ledger import Mismatch, Orders, short

LAYERS: Final = 8
PLACES: Final = 16
PAGE_BYTES: Final = 4_096
Make = Callable[[Any], Any]
"""From a numpy array to the library's own array over the same bytes."""


@dataclass(frozen=True)
class Wanted:
    """The fields that the finding of a planted fault must name."""

    hash: int
    place: int
    slot: int
    copy: int
    writer: str
    edge: str


class Rank:
    """The tensors, copier and checker of one rank. ``fault`` spoils the copies."""

    def __init__(self, rank: int, make: Make, fault: str, **options: Any) -> None:
        self.device = [np.zeros((PLACES, PAGE_BYTES), dtype=np.int8) for _ in range(LAYERS)]
        self.host = [np.zeros((PLACES, PAGE_BYTES), dtype=np.int8) for _ in range(LAYERS)]
        self.fault = fault
        forced = {"on_device": True} if options.pop("on_device", False) else {}
        self.checker = Checker(
            PageSide([[Region(make(layer), **forced) for layer in self.device]]),
            PageSide([[Region(make(layer)) for layer in self.host]]), rank=rank, **options,
        )

    def move(self, store: bool, pairs: list[tuple[int, int]]) -> None:
        """Carry out a copy, with the fault."""
        sources, targets = (self.device, self.host) if store else (self.host, self.device)
        ways = [(place, slot) if store else (slot, place) for place, slot in pairs]
        if self.fault == "swapped-blocks":
            (source_a, target_a), (source_b, target_b), *rest = ways
            ways = [(source_a, target_b), (source_b, target_a), *rest]
        for at, (source, target) in enumerate(ways):
            for layer in range(LAYERS):
                page = sources[layer][source].copy()
                if self.fault == "torn-copy" and at == len(ways) - 1 and layer >= LAYERS // 2:
                    continue
                if self.fault == "wrong-layer-offset":
                    targets[(layer + 1) % LAYERS][target] = page
                elif self.fault == "truncated":
                    targets[layer][target][: PAGE_BYTES * 3 // 4] = page[: PAGE_BYTES * 3 // 4]
                elif self.fault == "wrong-stride":
                    offset = target * PAGE_BYTES // 2
                    targets[layer].reshape(-1)[offset : offset + PAGE_BYTES] = page
                else:
                    targets[layer][target] = page


class Play:
    """Some ranks under a made-up scheduler. Places, slots and bytes come from a seed."""

    def __init__(
        self, fault: str, *, planted: bool = True, seed: int = 0, make: Make = lambda array: array, ranks: int = 1,
        **options: Any,
    ) -> None:
        self.dice = random.Random(f"{fault} {seed}")
        self.planted = planted
        self.ranks = [Rank(rank, make, fault if planted else "", **options) for rank in range(ranks)]
        self.places = self.dice.sample(range(1, PLACES), PLACES - 1)
        self.slots = self.dice.sample(range(2, PLACES, 2), PLACES // 2 - 1)
        self.steps = 0
        self.copies = 0
        self.known: dict[tuple[int, int], int] = {}

    def block(self) -> int:
        """Draw a new content hash."""
        return self.dice.getrandbits(64)

    def blocks(self, count: int) -> tuple[list[int], list[int]]:
        """New content hashes, and the first places, filled with new content."""
        hashes = [self.block() for _ in range(count)]
        for place in self.places[:count]:
            self.compute(place)
        return hashes, self.places[:count]

    def compute(self, place: int) -> None:
        """The model fills a place."""
        for rank in self.ranks:
            for layer in rank.device:
                layer[place] = np.frombuffer(self.dice.randbytes(PAGE_BYTES), dtype=np.int8)

    def begin(
        self, orders: dict[int, list[int]], *, given: list[tuple[int, str]] | None = None,
        flush: list[int] | None = None,
    ) -> None:
        """Begin a step. ``orders`` maps each copy that the step orders to the hashes of its blocks."""
        self.steps += 1
        blocks = {number: list(enumerate(hashes)) for number, hashes in orders.items()}
        loaded = {(key, 0) for hashes in orders.values() for key in hashes}
        wanted = {block: store for block, store in self.known.items() if block in loaded}
        for rank in self.ranks:
            rank.checker.begin(Orders(self.steps, blocks, wanted, given or [], flush or []))

    def store(self, number: int, request: str, hashes: list[int], ways: list[tuple[int, int]], *,
              move: bool = True, end: bool = True, absent: tuple[int, ...] = ()) -> None:
        """Order a store in a new step, then begin, move and end it. ``absent`` ranks take no part."""
        self.begin({number: hashes})
        self.known.update(dict.fromkeys(((key, 0) for key in hashes), number))
        for at, rank in enumerate(self.ranks):
            if at in absent:
                continue
            pairs = [(place, slot, 0) for place, slot in ways]
            rank.checker.order(number, request, pairs)
            rank.checker.submit_store(number, request, pairs)
            if move:
                rank.move(True, ways)
            if end:
                rank.checker.end(number)

    def load(self, number: int, request: str, hashes: list[int], ways: list[tuple[int, int]], *,
             move: bool = True, end: bool = True) -> None:
        """Order a load in a new step, then begin, move and end it."""
        self.begin({number: hashes})
        for rank in self.ranks:
            rank.checker.submit_load(number, request, [(place, slot, 0) for place, slot in ways])
            if move:
                rank.move(False, ways)
            if end:
                rank.checker.end(number)

    def findings(self) -> list[Mismatch]:
        """The findings of all ranks, after the end of the play."""
        for rank in self.ranks:
            rank.checker.finish()
        return [finding for rank in self.ranks for finding in rank.checker.findings]


def _spoiled(play: Play) -> list[tuple[int, int, int]]:
    """Store three blocks through the spoiled copier. Returns hash, place and slot of each block."""
    hashes, places = play.blocks(3)
    ways = list(zip(places, play.slots[:3], strict=True))
    play.store(1, "a", hashes, ways)
    return [(key, *way) for key, way in zip(hashes, ways, strict=True)]


def swapped_blocks(play: Play) -> Wanted:
    first, (other, *_), _ = _spoiled(play)
    return Wanted(*first, 1, f"store 1 with the bytes of block {short(other)}", "paired with its own slot")


def torn_copy(play: Play) -> Wanted:
    return Wanted(*_spoiled(play)[2], 1, "store 1 with 4 of 8 layers", "did not wait for layers 4 to 7")


def late_copy(play: Play) -> Wanted:
    """Load 3 of an aborted request lands in a place that load 4 got meanwhile."""
    (key_a, key_b), (place_a, place_b) = play.blocks(2)
    place, (first, second) = play.places[2], play.slots[:2]
    play.store(1, "a", [key_a], [(place_a, first)])
    play.store(2, "b", [key_b], [(place_b, second)])
    play.load(3, "a", [key_a], [(place, first)], move=not play.planted, end=not play.planted)
    play.load(4, "b", [key_b], [(place, second)], end=False)
    for rank in play.ranks:
        if play.planted:
            rank.move(False, [(place, first)])
        rank.checker.end(4)
    return Wanted(key_b, place, second, 4, f"load 3 of request a from host slot {first}",
                  f"nothing waited for load 3 before place {place} was given to load 4")


def wrong_layer_offset(play: Play) -> Wanted:
    return Wanted(*_spoiled(play)[0], 1, "store 1 with each layer 1 further up", "wrote it to n+1")


def stale_content(play: Play) -> Wanted:
    """A slot's content is evicted; the next store into the slot is reported and copies nothing."""
    (old, new), (place_a, place_b) = play.blocks(2)
    slot = play.slots[0]
    play.store(1, "a", [old], [(place_a, slot)])
    play.store(2, "b", [new], [(place_b, slot)], move=not play.planted)
    return Wanted(new, place_b, slot, 2, f"store 1 of request a with block {short(old)}",
                  "the report of store 2 did not wait for the end of its copy")


def two_writers(play: Play) -> Wanted:
    """A slot is given to two stores at once; their layers interleave."""
    (key_a, key_b), (place_a, place_b) = play.blocks(2)
    first = play.slots[0]
    second = first if play.planted else play.slots[1]
    play.store(1, "a", [key_a], [(place_a, first)], end=False)
    play.store(2, "b", [key_b], [(place_b, second)], move=not play.planted, end=False)
    for rank in play.ranks:
        if play.planted:
            for layer in range(0, LAYERS, 2):
                rank.host[layer][first] = rank.device[layer][place_b]
        rank.checker.end(1)
        rank.checker.end(2)
    return Wanted(key_a, place_a, first, 1, "store 1 and store 2 of request b at the same time",
                  f"store 2 did not wait for store 1, which writes slot {first} too")


def early_read(play: Play) -> Wanted:
    """A load that the step waits for is handed to the model before its bytes have moved."""
    (key,), (source,) = play.blocks(1)
    place, slot = play.places[1], play.slots[0]
    play.store(1, "a", [key], [(source, slot)])
    play.load(2, "b", [key], [(place, slot)], move=not play.planted, end=False)
    for rank in play.ranks:
        rank.checker.hand(2)
        rank.move(False, [(place, slot)])
        rank.checker.end(2)
    return Wanted(key, place, slot, 2, "load 2, after the model had got the block",
                  "the model did not wait for the end of load 2")


def rank_missing(play: Play) -> Wanted:
    """Rank 1 takes no part in a store whose end is reported."""
    (key,), (source,) = play.blocks(1)
    place, slot = play.places[1], play.slots[0]
    play.store(1, "a", [key], [(source, slot)], absent=(1,) if play.planted else ())
    play.load(2, "b", [key], [(place, slot)])
    return Wanted(key, place, slot, 2, "no store of this rank", "the end of store 1 on rank 1")


def truncated(play: Play) -> Wanted:
    return Wanted(*_spoiled(play)[0], 1, "store 1 with the first 3,072 of 4,096 bytes", "the bytes from 3,072 on")


def wrong_stride(play: Play) -> Wanted:
    ((key,), (place,)), slot = play.blocks(1), play.slots[0]
    play.store(1, "a", [key], [(place, slot)])
    return Wanted(key, place, slot, 1, f"store 1 with 1/2 of the stride: its bytes lie at {slot * PAGE_BYTES // 2:,}",
                  "store 1 must step by 4,096 bytes")


def lost_flush(play: Play) -> Wanted:
    """The worker ignores a flush: a step overwrites the source before the store has read it."""
    ((key,), (place,)), slot = play.blocks(1), play.slots[0]
    play.store(1, "a", [key], [(place, slot)], move=not play.planted, end=not play.planted)
    play.begin({}, given=[(place, "b")], flush=[1])
    play.compute(place)
    for rank in play.ranks:
        if play.planted:
            rank.move(True, [(place, slot)])
        rank.checker.end(1)
    return Wanted(key, place, slot, 1, f"step 2 of request b overwrote place {place}",
                  "step 2 of request b did not wait for store 1, whose flush was ordered in step 2")


def slot_given_twice(play: Play) -> Wanted:
    """A double free: a second store gets a slot whose first content is still listed, and is loaded afterwards."""
    (key_a, key_b), (place_a, place_b) = play.blocks(2)
    place, (slot, free) = play.places[2], play.slots[:2]
    play.store(1, "a", [key_a], [(place_a, slot)])
    play.store(2, "b", [key_b], [(place_b, slot if play.planted else free)])
    play.load(3, "c", [key_a], [(place, slot)])
    return Wanted(key_a, place, slot, 3, "store 2 of request b", f"slot {slot} was given to store 2 while block")


FAULTS: Final[dict[str, Callable[[Play], Wanted]]] = {
    "swapped-blocks": swapped_blocks, "torn-copy": torn_copy, "late-copy": late_copy,
    "wrong-layer-offset": wrong_layer_offset, "stale-content": stale_content, "two-writers": two_writers,
    "early-read": early_read, "rank-missing": rank_missing, "truncated": truncated, "wrong-stride": wrong_stride,
    "lost-flush": lost_flush, "slot-given-twice": slot_given_twice,
}
"""Plays by the kind of their finding."""


def play(fault: str, **options: Any) -> tuple[Wanted, list[Mismatch]]:
    """Run the play of a fault. ``options`` are those of ``Play``."""
    plot = Play(fault, ranks=2 if fault == "rank-missing" else 1, **options)
    return FAULTS[fault](plot), plot.findings()


def named(wanted: Wanted, finding: Mismatch, fault: str) -> bool:
    """True if a finding names the kind, the block, its places, the copy, the writer and the missing edge."""
    return (
        finding.kind == fault and wanted.writer in finding.writer and wanted.edge in finding.edge
        and (finding.hash, finding.place, finding.slot, finding.copy)
        == (wanted.hash, wanted.place, wanted.slot, wanted.copy)
        and short(wanted.hash) in finding.sentence and finding.writer in finding.sentence
    )
