"""The words of the core: states, tiers, routes, sites and reasons, each a small integer with a name.

Names of requests stand here too: a client knows a request by the id that it was given, and its engine appends to that
id. vLLM's server answers a client with ``chatcmpl-X`` and calls the request ``chatcmpl-X-1a2b3c4d``, or
``cmpl-X-0-1a2b3c4d`` for the first prompt of a completion. The samples of a request with ``n`` of 3 are
``0_chatcmpl-X-1a2b3c4d`` to ``2_chatcmpl-X-1a2b3c4d``. A pattern matches all these forms.

Law of this file: recordings and the wire carry a member's value, so a value is never changed or reused. New members are
added at the end.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import IntEnum
from fnmatch import translate
from typing import Final

NUMBER_MAX: Final = 2**53
"""The largest number of a breakpoint, hold, event or count: every JSON reader represents it exactly."""
EMPTY_HASH: Final = 0
"""The sequence hash of a place that holds no full block (I4: one encoding of empty). The edge maps a real 0 to 1."""


class Word(IntEnum):
    """An integer with a lower-case label, the form of programs and expressions, and words, the form of sentences."""

    @property
    def label(self) -> str:
        """The member's name as programs read it and expressions spell it, for example ``onboard_staged``."""
        return self._name_.lower()  # ``name`` takes three times as long

    @property
    def words(self) -> str:
        """The member's name as people read it, for example ``onboard staged``."""
        return self.label.replace("_", " ")

    @classmethod
    def labelled(cls, label: str) -> "Word":
        """The member with this label; raises KeyError for an unknown label."""
        return cls[label.upper().replace("-", "_").replace(".", "_")]


class SlotState(Word):
    """The ten states of a slot; the moves between them are in ``slots.TRANSITIONS``."""

    INITIALIZED = 0
    ONBOARD_STAGED = 1
    ONBOARDING = 2
    PREFILLING = 3
    SKIPPED_PREFILL = 4
    DECODING = 5
    SKIPPED_DECODE = 6
    PREEMPTED = 7
    FINISHING = 8
    FINISHED = 9


class Tier(Word):
    """G1 device memory, G2 pinned host memory, G3 local disk, G4 remote storage."""

    G1 = 1
    G2 = 2
    G3 = 3
    G4 = 4


_PAIRS: Final = [divmod(value, 10) for value in range(45)]
_SOURCE_OF: Final = tuple(Tier(min(max(source, 1), 4)) for source, _ in _PAIRS)
_TARGET_OF: Final = tuple(Tier(min(max(target, 1), 4)) for _, target in _PAIRS)
_IS_LOAD: Final = tuple(target < source for source, target in _PAIRS)
_LABEL: Final = tuple(f"G{source}>G{target}" for source, target in _PAIRS)
"""Tables by the value of a route, because every copy reads them a dozen times. Other values are never read."""


class Route(Word):
    """(source tier, target tier) as ten times the source plus the target."""

    G1_G2 = 12
    G1_G3 = 13
    G1_G4 = 14
    G2_G1 = 21
    G2_G3 = 23
    G2_G4 = 24
    G3_G1 = 31
    G3_G2 = 32
    G3_G4 = 34
    G4_G1 = 41
    G4_G2 = 42
    G4_G3 = 43

    @property
    def source(self) -> Tier:
        """The tier that is read."""
        return _SOURCE_OF[self]

    @property
    def target(self) -> Tier:
        """The tier that is written."""
        return _TARGET_OF[self]

    @property
    def is_load(self) -> bool:
        """True if blocks move up, towards G1 (onboard); otherwise they move down (offload)."""
        return _IS_LOAD[self]

    @property
    def label(self) -> str:
        """For example ``G2>G1``, the form of the expression language."""
        return _LABEL[self]

    @property
    def words(self) -> str:
        """For example ``G2→G1``."""
        return f"{self.source.name}→{self.target.name}"

    @property
    def arrow(self) -> str:
        """For example ``↑ G2→G1``; the arrow distinguishes loads (up) from offloads (down)."""
        return f"{'↑' if self.is_load else '↓'} {self.words}"

    @classmethod
    def labelled(cls, label: str) -> "Route":
        """The route written as ``G2>G1`` or with an arrow; raises KeyError for an unknown route."""
        return cls[label.strip().upper().replace("→", ">").replace(">", "_")]

    @classmethod
    def of(cls, source: Tier, target: Tier) -> "Route":
        """The route between two different tiers."""
        return cls(source * 10 + target)


class Authority(Word):
    """The party that decides the content of a pool."""

    LEADER = 0
    ENGINE = 1
    STREAM = 2
    OBSERVED = 3
    """An engine that is only watched: it has decided already, and its reports are never refused."""


class Condition(Word):
    """The five conditions of a place; they add up to the capacity of its pool."""

    EMPTY = 0
    CACHED = 1
    REFERENCED = 2
    WRITING = 3
    QUARANTINED = 4


class CandidateStatus(Word):
    """pending_evaluation -> promoted -> completed | failed | cancelled, or pending_evaluation -> skipped."""

    PENDING_EVALUATION = 0
    PROMOTED = 1
    COMPLETED = 2
    FAILED = 3
    CANCELLED = 4
    SKIPPED = 5


class SkipReason(Word):
    """Why a candidate resolved to no work. 3, 6 and 7 are reserved: they had names before anything emitted them."""

    ALREADY_CACHED = 0
    NO_CAPACITY = 1
    BELOW_FREQUENCY = 2
    SOURCE_EVICTED = 4
    SLOT_STOPPING = 5
    OPERATOR = 8
    LINK_BUSY = 9


class MissReason(Word):
    """Why the first block that missed was not found below G1."""

    NONE = 0
    NEVER_STORED = 1
    EVICTED = 2
    NOT_OFFLOADED = 3
    WRITING = 4
    BOUNDARY = 5
    TOO_SHORT = 6
    FILTERED = 7
    UNKNOWN_AFTER_GAP = 8


class ReleaseReason(Word):
    """Why blocks or staging were given back."""

    FINISHED = 0
    PREEMPTED = 1
    ALLOCATED = 2
    DEADLINE = 3
    UNUSED = 4
    REASSIGNED = 5
    RESET = 6
    FAILED = 7
    EPOCH = 8
    LOADED = 9
    PAST_WINDOW = 10
    """The attention window of the request has passed them."""
    NOT_KEPT = 11
    """The engine caches only some blocks of an attention window, and not these."""


class EvictRule(Word):
    """Which rule chose the blocks that were evicted."""

    REASSIGNED = 0
    RECENCY = 1
    STREAM = 2
    FREQUENCY = 3
    """The policy of a lower tier, where recency alone would have chosen others."""


class FinishReason(Word):
    """Why the engine finished a request."""

    STOP = 0
    LENGTH = 1
    ABORTED = 2
    TOO_LARGE = 3
    ERROR = 4


class Site(Word):
    """Interception points. ``will`` sites are asked before the change, ``did`` sites after it."""

    TRANSITION_WILL = 0
    TRANSITION_DID = 1
    CANDIDATE_ENQUEUE = 2
    EVALUATE_WILL = 3
    EVALUATE_DID = 4
    PROMOTE_WILL = 5
    SKIP_DID = 6
    DISPATCH_WILL = 7
    COMPLETE_WILL = 8
    EVICT_WILL = 9
    REQUEST_FINISH = 10
    CALL_WILL = 11
    CALL_DID = 12

    @property
    def label(self) -> str:
        """For example ``transition.did``."""
        return self.name.lower().replace("_", ".")


class WaitPoint(Word):
    """A point at which a held slot can stand still."""

    LOOKUP = 0
    SCHEDULE = 1
    EVALUATE = 2
    PROMOTE = 3
    DISPATCH = 4
    COMPLETION = 5
    RELEASE = 6
    CALL = 7
    """In the caller's own task, before the call: only for callers that await (``stimuli.CallAnnounced``)."""


class HoldEnd(Word):
    """Why a hold was released."""

    CONTINUED = 0
    STEPPED = 1
    SKIPPED = 2
    EXPIRED = 3
    LEASE_LOST = 4
    CANCELLED = 5
    DISARMED = 6
    PRESSURE = 7
    SHUTDOWN = 8


class BreakpointAction(Word):
    """The effect of a hit. It holds the slot, logs, captures the slot's values, or freezes everything."""

    HOLD = 0
    LOG = 1
    SNAPSHOT = 2
    FREEZE = 3


class Suspend(Word):
    """The scope of a hold. It is the slot alone, all candidates that are not promoted, or the engines too."""

    SLOT = 0
    PIPELINE = 1
    ALL = 2


class OnTimeout(Word):
    """The fate of a slot whose hold expires. It goes on with or without its open candidates."""

    CONTINUE = 0
    SKIP_CANDIDATE = 1


class BreakpointEnd(Word):
    """Why a breakpoint was disabled without being asked to."""

    FAILED = 0
    OVERRUN = 1
    EXPIRED = 2


class ResetMode(Word):
    """Logical: clear all metadata. Physical: also overwrite the bytes."""

    LOGICAL = 0
    PHYSICAL = 1


class Clock(Word):
    """Which clock a deadline runs on: the engine's (virtual when it is simulated) or the wall's monotonic clock."""

    ENGINE = 0
    WALL = 1


class Note(Word):
    """The subject of a ``Noted`` stimulus or event, which concerns the process around the core."""

    RECORDER_DEGRADED = 0
    RECORDER_RESUMED = 1
    CLOCK_STEPPED = 2
    LOOP_BLOCKED = 3
    SHUTTING_DOWN = 4
    ENGINE_SUMMARY = 5
    PART_ENDED = 6
    PART_RESTARTED = 7
    VERDICT = 8


class Measure(Word):
    """A number that an engine tells of itself, on its metrics page or to a tap. Counters began with the engine, RECENT
    ones with the last minute."""

    CAPACITY_BLOCKS = 0
    """Blocks that the device can hold."""
    USED_PPM = 1
    """Share of the device's blocks that live requests use, in millionths."""
    RUNNING = 2
    WAITING = 3
    PREEMPTIONS = 4
    QUERY_TOKENS = 5
    """Prompt tokens that were looked up on the device."""
    HIT_TOKENS = 6
    """Prompt tokens that were found there."""
    BELOW_QUERY_TOKENS = 7
    """Prompt tokens that were looked up below the device, in a connector or a host tier."""
    BELOW_HIT_TOKENS = 8
    FIRST_TOKENS = 9
    """Requests that got their first token."""
    FIRST_TOKEN_NS = 10
    """Mean time from a request to its first token, over the last minute."""
    RECENT_NS = 11
    """The time that the RECENT counters cover."""
    RECENT_QUERY_TOKENS = 12
    RECENT_HIT_TOKENS = 13
    RECENT_BELOW_QUERY_TOKENS = 14
    RECENT_BELOW_HIT_TOKENS = 15
    HOST_CAPACITY_BLOCKS = 16
    HOST_USED_BLOCKS = 17
    OFFLOADED_BLOCKS = 18
    """Blocks that were copied from the device to the host."""
    ONBOARDED_BLOCKS = 19
    """Blocks that were copied from the host to the device."""
    RUNNING_MOST = 20
    """Most requests that run at once, by the engine's settings."""
    STEP_TOKENS_MOST = 21
    """Most tokens that one step computes, by the engine's settings."""
    RETENTION_TOKENS = 22
    """Groups with an attention window keep the blocks of a window cached at each multiple of so many tokens. 0: only at
    the end of a prompt and of a shared prefix."""


COUNTERS: Final = frozenset({
    Measure.PREEMPTIONS, Measure.QUERY_TOKENS, Measure.HIT_TOKENS, Measure.BELOW_QUERY_TOKENS, Measure.BELOW_HIT_TOKENS,
    Measure.FIRST_TOKENS, Measure.OFFLOADED_BLOCKS, Measure.ONBOARDED_BLOCKS,
})
"""Measures that only grow while an engine lives."""


for _word in Word.__subclasses__():
    for _member in _word:
        # Python 3.11 finds a member by a descriptor written in Python, which takes twice as long as an attribute.
        type.__setattr__(_word, _member.name, _member)


_APPENDED: Final = re.compile(r"(-\d{1,4})?-[0-9a-f]{8}")
"""Number of the prompt, and eight random digits."""
_SAMPLE: Final = re.compile(r"\d{1,2}_")
_HEX: Final = "-" + 8 * "[0-9a-f]"
_WILD: Final = re.compile(r"[*?\[]")


def sampled(request: str) -> str:
    """The request that this sample belongs to; the request itself if it is no sample.

    >>> sampled("2_chatcmpl-7-1a2b3c4d")
    'chatcmpl-7-1a2b3c4d'
    """
    sample = _SAMPLE.match(request) if "_" in request[:3] else None  # filters ask for each event
    return request if sample is None else request[sample.end() :]


def is_called(request: str, name: str) -> bool:
    """True if a client knows this request by ``name``.

    >>> is_called("chatcmpl-7", "chatcmpl-7"), is_called("2_cmpl-7-0-1a2b3c4d", "cmpl-7"), is_called("r-1", "r")
    (True, True, False)
    """
    if request.startswith(name):
        return len(request) == len(name) or _APPENDED.fullmatch(request, len(name)) is not None
    return (rest := sampled(request)) != request and is_called(rest, name)


def request_globs(pattern: str) -> tuple[str, ...]:
    """The globs that match a request named by ``pattern``: itself, and its samples. Without wildcards they also match
    the client's name of it.

    >>> request_globs("chat*")
    ('chat*', '[0-9]_chat*', '[0-9][0-9]_chat*')
    """
    if pattern.startswith("*"):
        return (pattern,)
    forms = [pattern]
    if not _WILD.search(pattern):
        forms += [pattern + _HEX, f"{pattern}-[0-9]{_HEX}", f"{pattern}-[0-9][0-9]{_HEX}"]
    return (*forms, *(f"[0-9]_{form}" for form in forms), *(f"[0-9][0-9]_{form}" for form in forms))


def request_match(pattern: str) -> Callable[[str], object]:
    """Not None for a request that ``pattern`` names."""
    return re.compile("|".join(map(translate, request_globs(pattern)))).match


AGE_BOUNDS_NS: Final[tuple[int, ...]] = (*(step * 10**power for power in range(6, 13) for step in (1, 2, 5)), 10**15)
"""1, 2, 5 ms up to 5,000 s, and eleven days for all older evictions, which no pool remembers."""


def age_class(age_ns: int) -> int:
    """The index of the class of an age.

    >>> AGE_BOUNDS_NS[age_class(1_500_000)]
    2000000
    """
    return min(bisect_left(AGE_BOUNDS_NS, age_ns), len(AGE_BOUNDS_NS) - 1)


def age_within(counts: Sequence[int], share: float) -> int | None:
    """The smallest bound within which this share of the counted values lies; None when the histogram is empty."""
    wanted, seen = share * sum(counts), 0
    for bound, count in zip(AGE_BOUNDS_NS, counts, strict=True):
        seen += count
        if seen and seen >= wanted:
            return bound
    return None
