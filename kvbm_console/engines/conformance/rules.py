"""The rules of a stream of KV events, and the checker that judges a publisher by them, message for message.

Theory of operation. The checker keeps the copies that the stream has announced, by group, hash and medium. A store adds
a copy, a removal takes a copy away, and a clear or a restart takes all. Each rule is a question that some events raise.
A rule counts the questions and the wrong answers. Its example is the first wrong answer, with the number of the message
and the place of the event in its batch.

Three facts make the answers less simple than the questions.

*A late join.* A checker that joins at message 40, or misses messages, does not know the blocks from before. A parent or
a removed block that is unknown then raises no question. A clear or a restart makes the knowledge complete again.

*Restatements.* vLLM's ``kv_cache_report_mode: full`` announces the blocks of a hit again, as a chain from the root
whose blocks are all in the cache. Two requests that compute the same prompt at once publish the same events, and then
two copies exist. Later removals tell the difference. The checker takes such a chain as a restatement, and keeps the
place of its event. When a block of the chain is removed more often than stored, the chain was a second store.

*Blocks of another life.* A block from before a clear or a restart is remembered. An event that names such a block
breaks ``cleared`` or ``restart``, instead of ``removed`` or ``parent``.

Example. Messages 0 to 2 are: store [1, 2] without parent, store [1, 2] again, remove 1 and 1. The second message is a
restatement. The first removal of message 2 takes the copy of 1. The second removal shows that message 1 stored a
further copy, so ``stored-once`` fails with message 1, event 0 as its example.

Law of this file: a verdict is a count of answers. ``pass`` needs at least one answer and no wrong one.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final, Literal

import msgspec
import xxhash

from kvbm_console.engines.conformance.statements import (
    EVERYWHERE,
    BadEvent,
    Hash,
    Reading,
    Statement,
    Unreadable,
    read,
)
from kvbm_console.engines.kv_events.batch import DEFAULT_MEDIUM, TIER_OF_MEDIUM

RULES: Final = {
    "message": "A message is a topic, a number of 8 bytes and a batch that can be decoded.",
    "event": "An event has a known kind and the fields of its kind, with their types.",
    "sequence": "The numbers of messages rise by 1, and no number comes twice.",
    "restart": "A publisher that began again names no block from before.",
    "replay": "A replay brings the messages that were heard, in order and without a hole.",
    "replay-end": "A replay ends with the number -1 and an empty payload.",
    "replay-topic": "A reply of a replay has the frames of a live message: topic, number, payload.",
    "parent": "The parent of a stored block is in the cache.",
    "stored-once": "A block is stored once on a medium; a chain from the root of cached blocks restates them.",
    "removed": "A block is removed only from a medium that has it.",
    "cleared": "After AllBlocksCleared no event names a block from before.",
    "capacity": "A medium never has more blocks than its capacity.",
    "described": "A store tells its block size and its tokens.",
    "block-size": "The stores of a group on a medium have one block size.",
    "tokens": "A store has as many tokens as its blocks.",
    "content": "A hash has the same parent and the same tokens whenever it is stored.",
    "hash-form": "All hashes have one form: integers of 64 bits, signed or not, or bytes of one length.",
    "medium": "A medium is known, and its name has one spelling.",
    "rank": "A publisher names one data-parallel rank.",
}
"""Name of a rule to its sentence, in the order of reports."""
HEARD_MAX: Final = 20_000
"""Messages whose digests are kept: twice the 10,000 batches that engines keep for a replay."""
CONTENTS_MAX: Final = 2**20
"""Blocks whose parent and tokens are kept; further blocks are not compared."""
Judgement = Literal["pass", "fail", "not exercised"]
PASSED: Final = "pass"
FAILED: Final = "fail"
UNTESTED: Final = "not exercised"


class Example(msgspec.Struct, frozen=True):
    """The first violation of a rule."""

    message: int | None
    """The number of the message; null for a message without a number."""
    event: int | None
    """The event's place in its batch, from 0; null if the whole message is meant."""
    text: str


class RuleVerdict(msgspec.Struct, frozen=True):
    """A rule, and how the stream kept it."""

    rule: str
    text: str
    """The rule's sentence."""
    verdict: Judgement
    checked: int
    """Times that the stream exercised the rule."""
    violations: int
    example: Example | None
    """The first violation; null without any."""


class Conformance(msgspec.Struct, frozen=True):
    """The report on a publisher."""

    publisher: str
    messages: int
    events: int
    stored_blocks: int
    removed_blocks: int
    clears: int
    restarts: int
    missed_messages: int
    """Numbers that never came."""
    restatements: int
    """Stores that announced cached blocks again."""
    joined_late: bool
    """The first message that came has a number above 0."""
    verdicts: list[RuleVerdict]

    @property
    def ok(self) -> bool:
        """True if no rule is broken."""
        return all(verdict.verdict != FAILED for verdict in self.verdicts)


class _Copies:
    """The copies of a hash, in a group of a rank: by medium, with the restatements that may have been stores."""

    __slots__ = ("certain", "restated")

    def __init__(self) -> None:
        self.certain = Counter[str]()
        self.restated: dict[str, list[Example]] = {}


def digest_of(payload: bytes) -> int:
    """The digest that stands for a message."""
    return xxhash.xxh3_64_intdigest(payload)


Key = int | bytes | str
_Place = tuple[int, Key]
"""Group and hash."""


class RuleChecker:
    """Judges the messages of a publisher. ``capacity`` is the number of blocks by medium, where it is known."""

    def __init__(self, capacity: Mapping[str, int] | None = None) -> None:
        self.next_seq: int | None = None
        """The expected number; None before the first message."""
        self._capacity = {medium.upper(): blocks for medium, blocks in (capacity or {}).items()}
        self._checked, self._violations = Counter[str](), Counter[str]()
        self._examples: dict[str, Example] = {}
        self._heard: dict[int, int] = {}
        self._earlier: dict[int, int] = {}
        """Digests of the messages before the last restart."""
        self._complete = False
        """True if every block in the cache is known."""
        self._joined_late = False
        self._copies: dict[_Place, _Copies] = defaultdict(_Copies)
        self._before: dict[_Place, dict[str, str]] = {}
        """Blocks from before a clear or a restart, by medium, with the rule that an event breaks by naming them."""
        self._lives = set[str]()
        """Rules of ``_before`` that an event may break."""
        self._contents: dict[_Place, int] = {}
        self._sizes: dict[tuple[int, str], int] = {}
        self._spellings: dict[str, str] = {}
        self._forms: list[str] = []
        self._rank: int | None = None
        self.messages = self.events = self.stored_blocks = self.removed_blocks = 0
        self.clears = self.restarts = self.missed_messages = self.restatements = 0
        self._at: tuple[int | None, int | None] = (None, None)

    # --- verdicts ---

    def judge(self, rule: str, kept: bool, text: str, *, at: Example | None = None) -> None:
        """Count an answer to a rule's question. ``text`` says how the rule is broken if it is."""
        self._checked[rule] += 1
        if not kept:
            self._violations[rule] += 1
            self._examples.setdefault(rule, at if at is not None else Example(*self._at, text))

    def report(self, publisher: str) -> Conformance:
        """The verdicts so far."""
        return Conformance(
            publisher, self.messages, self.events, self.stored_blocks, self.removed_blocks, self.clears, self.restarts,
            self.missed_messages, self.restatements, self._joined_late,
            [
                RuleVerdict(
                    rule, text, FAILED if self._violations[rule] else PASSED if self._checked[rule] else UNTESTED,
                    self._checked[rule], self._violations[rule], self._examples.get(rule),
                )
                for rule, text in RULES.items()
            ],
        )

    # --- messages ---

    def accept(self, seq: int, payload: bytes) -> None:
        """Judge the next message."""
        self._at = seq, None
        digest = digest_of(payload)
        try:
            reading = read(payload)
        except Unreadable as error:
            reading, fault = None, str(error)
        if not self._number(seq, digest, first=1 if reading is not None and reading.of_pool else 0):
            return
        self.next_seq = seq + 1
        self._heard[seq] = digest
        if len(self._heard) > HEARD_MAX:
            self._heard.pop(next(iter(self._heard)))
        self.messages += 1
        if reading is None:
            self.judge("message", False, fault)
            self.forget()
            return
        self.judge("message", True, "")
        self._batch(seq, reading)

    def bad_message(self, text: str) -> None:
        """A message was not [topic, number, payload]."""
        self._at = None, None
        self.judge("message", False, text)

    def restart(self) -> None:
        """The publisher began again."""
        self.restarts += 1
        self.next_seq = 0
        self._earlier, self._heard = self._heard, {}
        self._end_lives("restart")

    def lose(self, events: int, text: str) -> None:
        """Numbers of events show a loss before the next message."""
        self._at = self.next_seq or 0, None
        if self.next_seq is None:
            self._joined_late = True
        else:
            self.judge("sequence", False, text)
            self.missed_messages += events
        self.forget()

    def forget(self) -> None:
        """Messages were missed, so the cache is unknown."""
        self._complete = False
        self._copies.clear()
        self._before.clear()
        self._lives.clear()

    def heard(self) -> dict[int, int]:
        """Number to digest of the last messages of this incarnation, in order."""
        return self._heard

    def _number(self, seq: int, digest: int, *, first: int) -> bool:
        """Judge a number; False for a message that came before. A publisher begins with ``first``."""
        want = self.next_seq
        if want is None:
            self._joined_late = self._joined_late or seq > first
            self._complete = not self._joined_late
            return True
        if digest in (self._heard.get(seq), self._earlier.get(seq)):
            self.judge("sequence", False, f"message {seq} came twice")
            return False
        if seq < want:
            self.restart()
            self._complete = seq <= first
            if seq > first:
                self.forget()
            return True
        if not want:
            want = first  # after a restart
        self.judge("sequence", seq == want, f"message {seq} follows message {want - 1}: {seq - want} are missing")
        if seq > want:
            self.missed_messages += seq - want
            self.forget()
        return True

    def _batch(self, seq: int, reading: Reading) -> None:
        if reading.rank is not None:
            if self._rank is None:
                self._rank = reading.rank
            self.judge("rank", reading.rank == self._rank, f"rank {reading.rank} after rank {self._rank}")
        media = set[str]()
        for index, event in enumerate(reading.events):
            self._at = seq, index
            self.events += 1
            if isinstance(event, BadEvent):
                self.judge("event", False, event.text)
                continue
            self.judge("event", True, "")
            for hash_ in (*event.hashes, *(() if event.parent is None else (event.parent,))):
                self._form(hash_)
            if event.kind == "stored":
                media.add(self._stored(event))
            elif event.kind == "removed":
                self._removed(event)
            elif event.kind == "moved":
                media.add(self._moved(event))
            else:
                self._cleared()
        # An engine may tell a batch's stores before its removals, so only the end of a batch is a state of the cache.
        for medium in sorted(media):
            self._full(medium)

    # --- events ---

    def _stored(self, event: Statement) -> str:
        """Judge a store; the medium."""
        medium = self._medium(event.medium)
        count, size = len(event.hashes), event.block_size
        self.stored_blocks += count
        described = size > 0 and bool(event.tokens)
        self.judge("described", described, f"a store of {count} blocks has a block size of {size} and "
                                           f"{len(event.tokens)} tokens")
        whole = described and len(event.tokens) == count * size
        if described:
            self.judge("tokens", whole, f"{count} blocks of {size} tokens come with {len(event.tokens)} tokens")
            first = self._sizes.setdefault((event.group, medium), size)
            self.judge("block-size", size == first, f"blocks of {size} tokens after blocks of {first} on {medium}")
        parent = None if event.parent is None else _key(event.parent)
        if parent is not None:
            self._known("parent", (event.group, parent), None, f"the parent {_shown(parent)} is not in the cache")
        places = [(event.group, _key(value)) for value in event.hashes]
        known = [place for place in places if place in self._copies and self._copies[place].certain[medium]]
        # Whoever joined late does not know all blocks of a chain that is told again.
        again = bool(known) and event.parent is None and (len(known) == len(places) or not self._complete)
        self.restatements += again
        for place in places:
            copies = self._copies[place]
            if again and place in known:
                self._restated(place, medium)
                continue
            once = not copies.certain[medium]
            self.judge("stored-once", once, f"block {_shown(place[1])} is on {medium} already")
            copies.certain[medium] += 1
            self._forget_before(place, medium)
        if whole:
            self._contents_of(event, places, parent)
        return medium

    def _restated(self, place: _Place, medium: str) -> None:
        """A block of a chain from the root is on the medium already; it remembers the event."""
        text = f"block {_shown(place[1])} is on {medium} already, and both copies were removed"
        self._copies[place].restated.setdefault(medium, []).append(Example(*self._at, text))
        self.judge("stored-once", True, "")

    def _contents_of(self, event: Statement, places: list[_Place], parent: Key | None) -> None:
        size = event.block_size
        for at, place in enumerate(places):
            tokens = event.tokens[at * size : (at + 1) * size]
            digest = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((parent, tokens)))
            known = self._contents.get(place)
            if known is not None:
                self.judge("content", digest == known, f"block {_shown(place[1])} has another parent or other tokens")
            elif len(self._contents) < CONTENTS_MAX:
                self._contents[place] = digest
            parent = place[1]

    def _removed(self, event: Statement) -> None:
        medium = event.medium if event.medium == EVERYWHERE else self._medium(event.medium)
        self.removed_blocks += len(event.hashes)
        for value in event.hashes:
            place = event.group, _key(value)
            where = None if medium == EVERYWHERE else medium
            self._known("removed", place, where, f"block {_shown(place[1])} is not on {where or 'any medium'}")
            self._take(place, where)

    def _moved(self, event: Statement) -> str:
        medium, source = self._medium(event.medium), self._medium(event.source)
        for value in event.hashes:
            place = event.group, _key(value)
            self._known("removed", place, source, f"block {_shown(place[1])} is not on {source}")
            self._take(place, source)
            self._copies[place].certain[medium] += 1
        return medium

    def _known(self, rule: str, place: _Place, medium: str | None, text: str) -> None:
        """Judge that a block is on the medium, or on any medium in any group if ``medium`` is None."""
        copies = self._copies.get(place)
        if copies is not None and (copies.certain[medium] if medium else copies.certain.total()):
            self.judge(rule, True, "")
            for other in self._lives:
                self.judge(other, True, "")
        elif rule == "removed" and copies is not None and medium and copies.restated.get(medium):
            self.judge("stored-once", False, "", at=copies.restated[medium].pop(0))
        elif (before := self._before.get(place)) is not None and (medium is None or medium in before):
            life = before[medium] if medium else next(iter(before.values()))
            self.judge(life, False, f"block {_shown(place[1])} is from before")
        elif self._complete:
            self.judge(rule, False, text)

    def _take(self, place: _Place, medium: str | None) -> None:
        copies = self._copies.get(place)
        if copies is None:
            return
        if medium is None:
            copies.certain.clear()
        elif copies.certain[medium]:
            copies.certain[medium] -= 1
        if not copies.certain.total() and not any(copies.restated.values()):
            del self._copies[place]

    def _forget_before(self, place: _Place, medium: str) -> None:
        before = self._before.get(place)
        if before is not None:
            before.pop(medium, None)
            if not before:
                del self._before[place]

    def _cleared(self) -> None:
        self.clears += 1
        self._end_lives("cleared")

    def _end_lives(self, rule: str) -> None:
        """All blocks are gone; ``rule`` is broken by an event that names one of them."""
        for place, copies in self._copies.items():
            if media := +copies.certain:
                self._before.setdefault(place, {}).update(dict.fromkeys(media, rule))
                self._lives.add(rule)
        self._copies.clear()
        self._complete = True

    # --- facts of a stream ---

    def _full(self, medium: str) -> None:
        most = self._capacity.get(medium.upper())
        if most is not None:
            blocks = sum(copies.certain[medium] for copies in self._copies.values())
            self.judge("capacity", blocks <= most, f"{blocks} blocks are on {medium}, which has {most}")

    def _medium(self, name: str | None) -> str:
        """Judge a medium; its name in capitals."""
        told = name or DEFAULT_MEDIUM
        first = self._spellings.setdefault(told.upper(), told)
        known = told.upper() in TIER_OF_MEDIUM
        self.judge("medium", known and told == first, f"the medium {told[:40]!r} " + (
            f"was spelled {first[:40]!r} before" if known else "is unknown"))
        return told.upper()

    def _form(self, value: Hash) -> None:
        """Judge the form of a hash."""
        form = _form_of(value)
        if form not in self._forms:
            self._forms.append(form)
        other = next((name for name in self._forms if not _agree(name, form)), None)
        self.judge("hash-form", other is None and form != TOO_WIDE, f"{form} after {other}" if other else form)


SMALL, SIGNED, UNSIGNED, TOO_WIDE = (
    "an integer", "a negative integer", "an integer above 2**63", "an integer above 64 bits",
)
"""Forms of integers. A small integer is the same, signed or not."""


def _form_of(value: Hash) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        return f"text of {len(value)} characters"
    if not -(2**63) <= value < 2**64:
        return TOO_WIDE
    return SIGNED if value < 0 else UNSIGNED if value >= 2**63 else SMALL


def _agree(one: str, other: str) -> bool:
    return one == other or (SMALL in (one, other) and {one, other} <= {SMALL, SIGNED, UNSIGNED})


def _key(value: Hash) -> Key:
    return value % 2**64 if isinstance(value, int) else value


def _shown(key: Key) -> str:
    return f"{key:016x}" if isinstance(key, int) else key.hex()[:16] if isinstance(key, bytes) else key[:16]
