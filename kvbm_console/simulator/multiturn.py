"""The built-in workload: chats of several turns with shared system prompts, think time and growing context.

Law of this file: closed loop and seeded. A session's next turn comes a think time after the end of its last turn. Its
lengths depend on seed, session and turn alone, not on the order in which sessions finish.

A turn's prompt is the whole conversation so far: system prompt, all user messages, all answers. So a returning turn
finds its prefix in G1, or, when others have pushed it out meanwhile, in the lower tiers.
"""

import random
from collections.abc import Iterator
from typing import Final

import msgspec

from kvbm_console.core.config import SECOND_NS, require
from kvbm_console.core.errors import UsageError
from kvbm_console.simulator.hashing import Chain, clone_hashes
from kvbm_console.simulator.workloads import SEQUENCES_MAX, Capacities, Request

TURNS_MAX: Final = 10_001
SPREAD: Final = 0.5
"""Lengths and times are drawn uniformly within this share around their mean: visible variety, no extreme tail."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of ``multiturn:key=value,...``. Lengths in tokens, times in seconds."""

    sessions: int = 20
    """Chats that go on at once; when one ends, its user begins another."""
    prompts: int = 3
    """Different system prompts, given to sessions in turn."""
    system: int = 256
    """Tokens of a system prompt."""
    user: int = 240
    """Mean tokens of a user message."""
    output: int = 96
    """Mean tokens of an answer."""
    turns: int = 5
    """Turns of a session."""
    think: float = 1.0
    """Mean seconds between an answer and the next message of its session."""
    ramp: float = 0.15
    """Seconds between the first messages of two sessions."""
    priority: float = 0.0
    """Share of the users, spread evenly, whose requests have a priority of 1."""
    n: int = 1
    """Sequences of each request, at most 64: the answer is generated so many times, and the first answer stays."""
    seed: int = 0
    requests: int = 0
    """Most requests; 0 goes on for ever."""

    def __post_init__(self) -> None:
        for field, low, high in (
            ("sessions", 1, 100_000), ("prompts", 1, 100_000), ("system", 0, 1_000_000), ("user", 1, 1_000_000),
            ("output", 1, 1_000_000), ("turns", 1, TURNS_MAX - 1), ("n", 1, SEQUENCES_MAX),
            ("seed", 0, 2**63 - 1), ("requests", 0, 2**63 - 1),
        ):
            value = getattr(self, field)
            require(low <= value <= high, f"multiturn {field}", f"from {low} to {high}", value)
        for field in ("think", "ramp"):
            value = getattr(self, field)
            require(0.0 <= value <= 86_400.0, f"multiturn {field}", "from 0 to 86400", value)
        require(0.0 <= self.priority <= 1.0, "multiturn priority", "from 0 to 1", self.priority)


def parse_settings(text: str) -> Settings:
    """``sessions=4,think=0.5``; raises ``UsageError`` for an unknown key or a bad value.

    >>> parse_settings("sessions=4,think=0.5").think
    0.5
    """
    fields = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    values: dict[str, int | float] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in fields:
            raise UsageError(f"multiturn has the keys {', '.join(fields)}, each with =value, got {part!r}")
        try:
            values[key] = int(value) if fields[key] is int else float(value)
        except ValueError:
            kind = "a whole number" if fields[key] is int else "a number"
            raise UsageError(f"multiturn {key} must be {kind}, got {value!r}") from None
    return Settings(**values)  # type: ignore[arg-type]


class _Session:
    """One chat: its random numbers, its tokens as a chain of hashes, its turn."""

    def __init__(self, number: int, user: int, settings: Settings, block_tokens: int) -> None:
        self.number = number
        self.user = user
        self.turn = 0
        self.random = random.Random(f"{settings.seed}/session/{number}")
        self.chain = Chain(block_tokens)
        shared = random.Random(f"{settings.seed}/prompt/{number % settings.prompts}")
        self.append(settings.system, shared)

    def append(self, count: int, source: random.Random | None = None) -> None:
        """Add tokens to the conversation."""
        data = (source or self.random).randbytes(4 * count)
        self.chain.extend(memoryview(data).cast("I").tolist())

    def around(self, mean: float) -> float:
        """A number within the spread around ``mean``."""
        return mean * self.random.uniform(1 - SPREAD, 1 + SPREAD)


class Multiturn:
    """A ``Workload`` of chats; see ``Settings``."""

    capacities = Capacities(block_tokens=16, g1_blocks=512, g2_blocks=1_024, g3_blocks=4_096, batch_tokens=256)

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._block_tokens = self.capacities.block_tokens
        self._live: dict[str, _Session] = {}
        self._sessions = 0
        self._requests = 0

    @property
    def name(self) -> str:
        """``multiturn:`` with the settings that differ from the defaults."""
        usual = Settings()
        pairs = [
            f"{field.name}={getattr(self.settings, field.name)}" for field in msgspec.structs.fields(Settings)
            if getattr(self.settings, field.name) != getattr(usual, field.name)
        ]
        return ":".join(["multiturn", *([",".join(pairs)] if pairs else [])])

    @property
    def endless(self) -> bool:
        """True if the number of requests is not limited."""
        return self.settings.requests == 0

    def begin(self, block_tokens: int) -> None:
        """Start from the beginning, in blocks of this size."""
        self._block_tokens = block_tokens
        self._live.clear()
        self._sessions = self._requests = 0

    def arrivals(self) -> Iterator[Request]:
        """The first turn of the first session of each user."""
        for user in range(self.settings.sessions):
            request = self._open(user, round(user * self.settings.ramp * SECOND_NS))
            if request is not None:
                yield request

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """The next turn of the session, or the first turn of the user's next session, a think time later."""
        session = self._live.pop(request.request)
        later_ns = at_ns + round(session.around(self.settings.think) * SECOND_NS)
        if session.turn < self.settings.turns:
            return self._turn(session, later_ns)
        return self._open(session.user, later_ns)

    def _open(self, user: int, at_ns: int) -> Request | None:
        session = _Session(self._sessions, user, self.settings, self._block_tokens)
        self._sessions += 1
        return self._turn(session, at_ns)

    def _turn(self, session: _Session, at_ns: int) -> Request | None:
        if not self.endless and self._requests == self.settings.requests:
            return None
        self._requests += 1
        session.turn += 1
        session.append(max(1, round(session.around(self.settings.user))))
        prompt = len(session.chain)
        blocks = len(session.chain.hashes)
        output = max(1, round(session.around(self.settings.output)))
        session.append(output)
        name = f"s{session.number:03d}-t{session.turn}"
        self._live[name] = session
        hashes, output_hashes = tuple(session.chain.hashes[:blocks]), tuple(session.chain.hashes[blocks:])
        owner = session.number * TURNS_MAX + session.turn
        return Request(
            request=name, arrival_ns=at_ns, hashes=hashes, output_hashes=output_hashes, prompt_tokens=prompt,
            output_tokens=output,
            clone_hashes=clone_hashes(hashes[-1] if hashes else 0, owner, len(output_hashes), self.settings.n),
            session=f"s{session.number:03d}", priority=self._priority(session.user),
        )

    def _priority(self, user: int) -> int:
        share = self.settings.priority
        return int((user + 1) * share) - int(user * share)
