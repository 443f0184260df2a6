"""The part in the scheduler's own thread: calls go into a bounded queue, and lookups wait for verdicts.

Law of this file: nothing here waits, allocates without bound or raises into the engine. Only the standard library is
imported. Other threads replace whole objects (``held``, ``globs``) or add to sets, so no lock is needed.
"""

import re
import time
from collections import deque
from fnmatch import translate
from typing import Any, Final

QUEUE_MAX: Final = 16_384
"""Records that wait for the sender: minutes of steps, and at most some tens of megabytes of references."""
ASK_NS: Final = 100_000_000
"""Time that a lookup which a breakpoint may match waits for a verdict; then the request goes on."""
ERRORS_MAX: Final = 100
"""Our own errors that are swallowed; then the tap is off for good, because it does not fit this engine."""
NULL_BLOCKS: Final = 1
"""vLLM gives its first block, the null block, to no request."""
AUDIT_EVERY: Final = 64
"""Steps between two audits of a part of the pool: a second or so of an engine that decodes."""
LIVE_MAX: Final = 65_536
"""Requests that are remembered; beyond this, new requests are not reported."""

STORAGE, DISK, LOCAL = "STORAGE", "DISK", "LOCAL"
"""vLLM's medium of files and objects, ours for those of this machine, and vLLM's word for "of this machine"."""

Record = tuple[Any, ...]
"""(kind, nanoseconds on the monotonic clock, fields...), see ``flatten``."""


def medium_of_event(event: Any) -> str:
    """The medium that an event of the engine names, empty without one."""
    medium = getattr(event, "medium", None) or ""
    return DISK if medium == STORAGE and getattr(event, "locality", None) == LOCAL else medium


class _OurPart:
    """A context around our part of a call: it counts the time, and counts and swallows our own errors."""

    __slots__ = ("_began", "_recorder")

    def __init__(self, recorder: "TapRecorder") -> None:
        self._recorder = recorder

    def __enter__(self) -> int:
        self._began = time.monotonic_ns()
        return self._began

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        ours = isinstance(error, Exception)
        if ours:
            self._recorder.failed()
        self._recorder.spent(time.monotonic_ns() - self._began)
        return ours


class MovingWindow:
    """The reported group of blocks if its layers see a window, so that a request gives back blocks while it runs."""

    def __init__(self, group: int, *, sparse: bool = False) -> None:
        self.group = group
        self.sparse = sparse
        """True if the engine caches only some of the full blocks."""
        self.passed: dict[str, int] = {}
        """Requests to the number of leading blocks that their windows have passed."""


class TapRecorder:
    """The queue of one engine and the daemon's verdicts. ``on`` is true while a daemon listens."""

    __slots__ = (
        "_ask_ns", "_copy_pattern", "_pattern", "alone", "answers", "asked", "audit_due", "audit_every",
        "audit_from", "below", "by_place", "call_ns", "calls", "checks", "cleared", "copies_asked", "copies_go",
        "copies_held", "dropped", "ending", "errors", "gated", "held", "held_back", "keeps", "live", "on", "one_size",
        "out", "part", "places_known", "queue", "step_ns", "stepped_ns", "steps", "swept", "unheard", "want_full",
        "watch", "window",
    )

    def __init__(self, *, ask_ns: int = ASK_NS, by_place: bool = False) -> None:
        self._ask_ns = ask_ns
        self.part = _OurPart(self)
        self.queue: deque[Record] = deque()
        self.on = False
        self.keeps = False
        """True if records are also sent while no daemon listens, because the sender follows the prefix cache."""
        self.ending = False
        """True once the engine shuts down: the queue is sent, and no record follows."""
        self.want_full = False
        """True after a daemon began to listen or records were dropped: the next step reports everything once."""
        self.unheard = False
        """True if a request arrived that no daemon heard of; then the next step reports everything."""
        self.by_place = by_place
        """True if the engine's places must be followed: several groups share one pool, or it has other connectors."""
        self.places_known = False
        """True if the places are followed."""
        self.below: dict[str, dict[Any, int]] | None = None
        """Medium to its hashes with their counts, for a connector that reports all of them from the start."""
        self.alone = False
        """True if no other program can hold places of the pool, so that references and free places are exact."""
        self.window: MovingWindow | None = None
        self.one_size = True
        """True if all groups have blocks of one size. Else the beginning of a block has a name, too, and counts."""
        self.audit_every = AUDIT_EVERY
        """Steps between two audits; 0 for an engine whose pool cannot be compared."""
        self.audit_from = NULL_BLOCKS
        """The place at which the next audit begins. A daemon that begins to listen gets the whole pool step by step."""
        self.swept = False
        """True if the whole pool was compared since the last whole report."""
        self.audit_due = 0
        """Steps until the next audit."""
        self.live: dict[str, Any] = {}
        """Requests by id, from arrival to end."""
        self.out: set[str] = set()  # preempted at the last step, for a release that does not name them
        self.answers: dict[str, Any] = {}
        """The last answer of each lookup, because schedulers repeat a lookup at every step."""
        self.gated = False
        self.held: dict[str, int] = {}
        """Requests that a daemon holds, to the moment when they go on even without its release."""
        self._pattern: re.Pattern[str] | None = None
        self.asked: dict[str, int] = {}
        """Requests that wait for a verdict, to the moment of their first lookup."""
        self.cleared: set[str] = set()
        """Requests with a verdict: they go on until their next lookup."""
        self._copy_pattern: re.Pattern[str] | None = None
        self.copies_held: dict[int, int] = {}
        """As ``held``, for loads from a lower tier, by their number."""
        self.copies_go: set[int] = set()
        """Such loads that have their verdict and did not hear of it."""
        self.copies_asked: dict[int, int] = {}
        """Such loads that wait, to the moment when they asked."""
        self.watch: Any = None
        """The ``copies.ConnectorWatch`` of the engine's connectors, None without a connector."""
        self.checks: tuple[int, ...] = ()
        """``sanitize``: blocks checked, mismatches, blocks without a known store, nanoseconds of all workers."""
        self.calls = self.dropped = self.errors = self.held_back = 0
        self.call_ns = self.steps = self.step_ns = self.stepped_ns = 0

    # --- the scheduler's thread ---

    def put(self, record: Record) -> None:
        """Queue a record. Without room the record is dropped, and a later step reports everything again."""
        if len(self.queue) < QUEUE_MAX:
            self.queue.append(record)
        else:
            self.dropped += 1
            self.want_full = True

    def spent(self, ns: int) -> None:
        """Count a call that cost the engine this much."""
        self.calls += 1
        self.call_ns += ns

    def stepped(self, now: int) -> None:
        """Count a step that the engine formed."""
        if self.stepped_ns:
            self.steps += 1
            self.step_ns += now - self.stepped_ns
        self.stepped_ns = now

    def failed(self) -> None:
        """Count an error of our own, which was swallowed."""
        self.errors += 1
        self.want_full = True
        if self.errors >= ERRORS_MAX:
            self.off()

    def must_wait(self, request: str, computed: int) -> bool:
        """True if this lookup has to be answered with "ask again"."""
        now = time.monotonic_ns()
        until = self.held.get(request)
        if until is not None:
            self.held_back += 1
            return now < until
        if request in self.cleared:
            return False
        asked_ns = self.asked.get(request)
        if asked_ns is None:
            if self._pattern is None or self._pattern.match(request) is None:
                return False
            self.asked[request] = now
            self.put(("will", now, request, computed))
            return True
        if now - asked_ns < self._ask_ns:
            return True
        self.cleared.add(request)  # no answer came in time
        return False

    def may_hold(self, request: str) -> bool:
        """True if a breakpoint may hold a load for this request from a lower tier."""
        return self._copy_pattern is not None and self._copy_pattern.match(request) is not None

    def copy_must_wait(self, number: int) -> bool:
        """True while this load shall not begin. The first call is its question, and after False it is forgotten."""
        now = time.monotonic_ns()
        asked_ns = self.copies_asked.setdefault(number, now)
        until = self.copies_held.get(number)
        waits = now < until if until is not None else (
            self.on and number not in self.copies_go and now - asked_ns < self._ask_ns
        )
        if not waits:
            self.forget_copy(number)
        return waits

    def forget_copy(self, number: int) -> None:
        """This load begins or never will."""
        self.copies_asked.pop(number, None)
        self.copies_go.discard(number)

    def stored_below(self, events: Any) -> None:
        """Keep the content of a connector after these events, so that a daemon that begins to listen gets all of it."""
        assert self.below is not None
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.below.clear()
                continue
            held = self.below.setdefault(medium_of_event(event), {})
            change = 1 if kind == "BlockStored" else -1
            for key in event.block_hashes:
                left = held.get(key, 0) + change
                if left > 0:
                    held[key] = left
                else:
                    held.pop(key, None)

    def forget(self, request: str) -> None:
        """Forget a request whose lookup is over, or which has ended."""
        self.answers.pop(request, None)
        self.asked.pop(request, None)
        self.cleared.discard(request)
        if self.window is not None:
            self.window.passed.pop(request, None)

    # --- the sender's thread ---

    def listen(self) -> None:
        """Begin to report, because a daemon listens."""
        if self.errors >= ERRORS_MAX:
            return
        self.unheard = False
        fresh = not self.live and not self.stepped_ns
        if fresh:  # the engine has done nothing yet, so requests that arrive from now on follow this record
            places: list[Any] | None = None if self.by_place and not self.places_known else []
            unseen = int(self.window is not None and not self.places_known)  # its moves are unknown, as after a step
            self.queue.appendleft(
                ("all", time.monotonic_ns(), [], unseen, 0, places, None if self.below is None else []))
        self.audit_from, self.audit_due, self.swept = NULL_BLOCKS, 0, False
        self.want_full = not fresh
        self.on = True

    def off(self) -> None:
        """Stop reporting and release held requests, because no daemon listens any more."""
        self.on = False
        self.gated = False
        self.held = {}
        self._pattern = None
        self.asked = {}
        self.cleared = set()
        self.answers = {}
        self._copy_pattern = None
        self.copies_held = {}
        self.copies_go = set()
        if not self.keeps:
            self.queue.clear()

    def obey(self, held: dict[str, int], globs: list[str], go: list[str]) -> None:
        """Take the daemon's verdicts: requests that it holds and until when, names that it may hold, and releases."""
        self.cleared.update(go)
        self.cleared.update(request for request in self.held if request not in held)
        self.held = held
        self._pattern = re.compile("|".join(map(translate, globs))) if globs else None
        self.gated = bool(held or globs)

    def obey_copies(self, held: dict[int, int], globs: list[str], go: list[int]) -> None:
        """As ``obey``, for loads from a lower tier."""
        self.copies_go.update(self.copies_asked.keys() & go)
        self.copies_held = held
        self._copy_pattern = re.compile("|".join(map(translate, globs))) if globs else None
