"""The three points at which a block is fingerprinted, for one rank's worker.

``order`` fingerprints the blocks of a store when the engine orders it, after the forward pass that filled them. ``end``
fingerprints the host slots of a store and compares. ``hand`` fingerprints the device places of a load when the model
may read them, and compares with the content that the store took. A mismatch of a load is checked a second time when
the next step begins, because a late copy has landed by then. ``action: stop`` does not wait for that.

Sampling goes by content hash, so the same block is chosen at all three points and on every rank.

Law of this file: it never changes a byte, and it never waits for a device unless ``action`` asks for it.
"""

import time
from collections.abc import Sequence
from typing import Final

from kvbm_console.sanitize.fingerprint import Array, PageSide, Values
from kvbm_console.sanitize.ledger import Content, Copy, CopyLedger, Mismatch, Orders, Pair
from kvbm_console.sanitize.verdict import Case, judge, missing

ACTIONS: Final = ("report", "recompute", "stop")
FINDINGS_MAX: Final = 1_024
"""Findings that wait for the scheduler's half; further findings are only counted."""
_GOLDEN: Final = 0x9E3779B97F4A7C15


def sampled(key: int, share: float) -> bool:
    """True if a content hash belongs to the sample. Each larger share contains the smaller ones.

    >>> [sampled(7, share) for share in (0.0, 1.0)]
    [False, True]
    """
    return (key * _GOLDEN & 2**64 - 1) >> 32 < share * 2**32


class Corrupt(RuntimeError):
    """Raised into the engine by ``action: stop``; its text is the finding."""


class Checker:
    """The checker of one rank. The caller takes ``findings`` and ``invalid``, the device places to recompute."""

    def __init__(
        self, device: PageSide, host: PageSide, *, rank: int = 0, action: str = "report", stores_here: bool = True,
        ledger: CopyLedger | None = None,
    ) -> None:
        """``stores_here`` is false for a rank without stores; a single rank stores replicated blocks."""
        self.device, self.host = device, host
        self.action = action
        self.ledger = CopyLedger(rank) if ledger is None else ledger
        self.stores_here = stores_here
        self.findings: list[Mismatch] = []
        self.invalid: set[int] = set()
        self.checked = 0
        """Blocks that were compared."""
        self.mismatches = 0
        self.unknown = 0
        """Blocks of loads whose store was not seen or is forgotten."""
        self.spent_ns = 0
        """Time of the engine's thread in this class."""
        self._orders = Orders()
        self._ordered: dict[int, Copy] = {}
        """Stores that were ordered and not submitted."""
        self._handed: list[tuple[Copy, int, list[int], Values]] = []
        """Loads whose fingerprints are being computed: copy, group, rows of its sample, values."""
        self._again: list[tuple[Copy, int, Content, Array]] = []
        """Mismatches of loads that the next step checks again: copy, row of its sample, wanted, found."""

    # --- the step's orders ---

    def begin(self, orders: Orders) -> None:
        """A step begins."""
        began = time.monotonic_ns()
        self._orders = orders
        for place, request in orders.given:
            for copy in (*self._ordered.values(), *self.ledger.flying.values()):
                if copy.store and any(place == source for source, _, _ in copy.pairs):
                    copy.given.setdefault(place, (orders.step, request))
        for number in orders.flush:
            flushed = self._ordered.get(number) or self.ledger.flying.get(number)
            if flushed is not None:
                flushed.flushed = True
        self.look_again()
        self.settle(wait=False)
        self.spent_ns += time.monotonic_ns() - began

    def _copy(self, number: int, store: bool, request: str, pairs: Sequence[Pair]) -> Copy:
        sample = self._orders.blocks.get(number, [])
        return Copy(number, store, request, self._orders.step, list(pairs),
                    [(row, key) for row, key in sample if row < len(pairs)], wanted=self._orders.known)

    # --- stores ---

    def order(self, number: int, request: str, pairs: Sequence[Pair]) -> None:
        """A store is ordered; its source is complete once the device has done the work that is queued now."""
        began = time.monotonic_ns()
        copy = self._copy(number, True, request, pairs)
        for group, rows in _by_group(copy):
            places = [copy.pairs[copy.sampled[row][0]][0] for row in rows]
            copy.taken.append((rows, self.device.fingerprints(group, places)))
        self._ordered[number] = copy
        self.spent_ns += time.monotonic_ns() - began

    def submit_store(self, number: int, request: str, pairs: Sequence[Pair]) -> None:
        """A store begins to copy."""
        if number not in self._ordered:
            self.order(number, request, pairs)
        copy = self._ordered.pop(number)
        if not copy.request:
            copy.request = request
        self.ledger.submit(copy)

    def _end_store(self, copy: Copy) -> None:
        ledger = self.ledger
        contents: list[Content] = []
        for rows, values in copy.taken:
            for row, parts in zip(rows, values.get(), strict=True):
                at, key = copy.sampled[row]
                place, slot, group = copy.pairs[at]
                content = Content(key, group, parts, copy, place, slot)
                contents.append(content)
                ledger.keep(content)
        copy.taken = []
        for content in contents:
            found = self.host.fingerprints(content.group, [content.slot]).get()[0]
            self.checked += 1
            if (found == content.parts).all():
                ledger.bad.pop(content.slot, None)
            else:
                self._found(judge(Case(
                    ledger, self.device, self.host, copy, content.place, content.slot, content, found)))
        for _, slot, _ in copy.pairs:
            if ledger.slot_store.get(slot) is copy:
                ledger.slot_content.pop(slot, None)
        for content in contents:
            if ledger.slot_store.get(content.slot) is copy:
                ledger.slot_content[content.slot] = content

    # --- loads ---

    def submit_load(self, number: int, request: str, pairs: Sequence[Pair]) -> None:
        """A load begins to copy."""
        self.ledger.submit(self._copy(number, False, request, pairs))

    def hand(self, number: int) -> None:
        """The model may read the blocks of a load. A second call for the same load does nothing."""
        copy = self.ledger.flying.get(number)
        if copy is None or copy.store or copy.handed:
            return
        began = time.monotonic_ns()
        copy.handed = True
        for group, rows in _by_group(copy):
            places = [copy.pairs[copy.sampled[row][0]][0] for row in rows]
            self._handed.append((copy, group, rows, self.device.fingerprints(group, places, apart=True)))
        self.spent_ns += time.monotonic_ns() - began
        self.settle(wait=self.action != "report")

    def end(self, number: int) -> None:
        """The engine's worker reports the end of a copy."""
        self.hand(number)
        began = time.monotonic_ns()
        copy = self.ledger.end(number)
        if copy is not None and copy.store:
            self._end_store(copy)
        self.spent_ns += time.monotonic_ns() - began

    def settle(self, *, wait: bool) -> None:
        """Compare the fingerprints of loads that are computed; with ``wait`` all of them."""
        began = time.monotonic_ns()
        waiting = []
        for copy, group, rows, values in self._handed:
            if not wait and not values.ready:
                waiting.append((copy, group, rows, values))
                continue
            for row, found in zip(rows, values.get(), strict=True):
                self._compare(copy, group, row, found)
        self._handed = waiting
        self.spent_ns += time.monotonic_ns() - began

    def _compare(self, copy: Copy, group: int, row: int, found: Array) -> None:
        at, key = copy.sampled[row]
        content = self.ledger.content(key, group)
        if content is None:
            store = copy.wanted.get((key, group))
            if store is None or not self.stores_here:
                self.unknown += 1
                return
            self.checked += 1
            self.invalid.add(copy.pairs[at][0])
            self._found(missing(self.ledger, copy, at, key, store))
            return
        self.checked += 1
        if (found == content.parts).all():
            return
        self.invalid.add(copy.pairs[at][0])
        if self.action == "stop":
            self._found(judge(self._case(copy, at, content, found)))
        else:
            self._again.append((copy, at, content, found))

    def _case(self, copy: Copy, at: int, content: Content, found: Array, again: Array | None = None) -> Case:
        place, slot, _ = copy.pairs[at]
        return Case(self.ledger, self.device, self.host, copy, place, slot, content, found, again)

    def look_again(self) -> None:
        """Judge the mismatches of the last step, with new fingerprints of their places."""
        waiting, self._again = self._again, []
        for copy, at, content, found in waiting:
            again = self.device.fingerprints(content.group, [copy.pairs[at][0]], apart=True).get()[0]
            self._found(judge(self._case(copy, at, content, found, again)))

    def finish(self) -> None:
        """Judge all waiting mismatches, because the engine ends."""
        self.settle(wait=True)
        self.look_again()

    def take_invalid(self) -> set[int]:
        """Device places with wrong content since the last call; none unless ``action`` is recompute."""
        invalid, self.invalid = self.invalid, set()
        return invalid if self.action == "recompute" else set()

    def _found(self, finding: Mismatch) -> None:
        self.mismatches += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)
        if finding.stage == "copy":
            self.ledger.bad[finding.slot] = finding
        if self.action == "stop":
            raise Corrupt(finding.sentence)


def _by_group(copy: Copy) -> list[tuple[int, list[int]]]:
    rows: dict[int, list[int]] = {}
    for row, (at, _) in enumerate(copy.sampled):
        rows.setdefault(copy.pairs[at][2], []).append(row)
    return list(rows.items())
