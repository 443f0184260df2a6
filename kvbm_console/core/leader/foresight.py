"""The memory of predictors, and the fate of their guesses.

Law of this file: plain, bounded containers in deterministic order. They name hashes and counts, and ``prefetch``
decides which blocks are copied.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Final

import msgspec

SUCCESSORS: Final = 3
"""Blocks that are remembered to follow one block, the likeliest first."""
CONTEXTS_MAX: Final = 100_000
"""Blocks whose followers are remembered, the last seen of all: 30 MB at most."""
STEPS: Final = 32
"""How far a guess is followed beyond the prompt: the length of a long turn."""
SESSIONS_MAX: Final = 1_024
SESSION_BLOCKS_MAX: Final = 4_096
"""Sessions that are remembered, those that ended last, and how many of the last blocks of each: 32 MB at most."""
JUDGED_LEAST: Final = 64
JUDGED_MAX: Final = 512
"""Fetched blocks that were then used or evicted. The precision counts from the first number of blocks on. At the second
number both counts are halved, so it is that of the last few hundred blocks."""
LIMIT_BELOW: Final = 0.25
LIFT_FROM: Final = 0.5
"""Precision below which only probes are fetched, and from which on everything is again. They are far enough apart that
a load on the border does not swing. Below a quarter a fetch pushes out more than it brings."""
PROBE_EVERY: Final = 8
PROBE_BLOCKS: Final = 16
"""While limited, every 8th guess is followed for 16 blocks. This shows in seconds that guesses are good again, for a
hundredth of the bandwidth of a long prompt."""
GAP_WEIGHT: Final = 8
"""The mean time until a session comes back moves by one part in so many towards each new gap."""


class EndedTurn(msgspec.Struct):
    """The end of a session's last turn."""

    number: int
    hashes: list[int]
    ended_ns: int


class PrefetchMemory(msgspec.Struct):
    """The memory of predictors and the fate of their guesses. Counts are blocks."""

    asked: dict[int, int] = {}
    """Hash on its way to the host tier to its candidate."""
    unused: dict[int, None] = {}
    """Hash that stands in the host tier because it was fetched, and that no lookup has found since."""
    waits: dict[int, list[int]] = {}
    """Slot that has not been looked up to the candidates that fetch for it."""
    arrived_ns: dict[int, int] = {}
    """When the slots of ``waits`` arrived."""
    successors: dict[int, dict[int, int]] = {}
    """Hash to the hashes that followed it in prompts and how often, the last seen hash last."""
    sessions: dict[str, EndedTurn] = {}
    next_session: int = 1
    gap_ns: int = 0
    """Mean time from the end of a session's turn to its next request, 0 before a session came back."""
    fetched: int = 0
    """Arrived in the host tier."""
    used: int = 0
    """Of these, found there by a lookup."""
    late: int = 0
    """Found in the disk tier by a lookup while they were on their way."""
    from_disk: int = 0
    """Blocks found in the disk tier by a lookup, late blocks included."""
    evicted: int = 0
    """Fetched, and evicted from the host tier before any lookup found them."""
    recent_used: int = 0
    recent_wasted: int = 0
    """Of the blocks judged last: used, and evicted before any lookup found them."""
    limited: bool = False
    """True if only probes are fetched, because too few of the fetched blocks were used."""
    limits: int = 0
    """How often that began."""
    probes: int = 0
    """Guesses while limited."""

    def gauges(self) -> dict[str, int]:
        """The counts, and the sizes of the tables against their bounds."""
        return {
            "fetched": self.fetched, "used": self.used, "late": self.late, "from_disk": self.from_disk,
            "evicted_unused": self.evicted, "unused": len(self.unused), "asked": len(self.asked),
            "contexts": len(self.successors), "sessions": len(self.sessions), "limited": int(self.limited),
            "limits": self.limits, "recent_used": self.recent_used, "recent_wasted": self.recent_wasted,
        }

    @staticmethod
    def shares(counts: Mapping[str, int]) -> dict[str, float | None]:
        """Precision, coverage and timeliness of these ``gauges``; None where nothing was counted.

        Precision: used of the blocks that were fetched. Coverage: used of those that lookups had from the disk tier,
        directly or fetched. Timeliness: used of those that were fetched or on their way when a lookup found them.
        """
        used = counts["used"]
        wholes = {
            "precision": counts["fetched"], "coverage": used + counts["from_disk"], "timeliness": used + counts["late"],
        }
        return {name: used / whole if whole else None for name, whole in wholes.items()}

    # --- the end of a guess ---

    def ended(self, candidate: int, hashes: Iterable[int], arrived: Sequence[int]) -> None:
        """A candidate ended, and these of its blocks have arrived. Slots that waited for it wait no longer."""
        for key in hashes:
            if self.asked.get(key) == candidate:
                del self.asked[key]
        self.fetched += len(arrived)
        self.unused.update(dict.fromkeys(arrived))
        for slot, numbers in list(self.waits.items()):
            if candidate in numbers:
                numbers.remove(candidate)
                if not numbers:
                    self.forget(slot)

    def forget(self, slot: int) -> None:
        """This slot waits for nothing any more."""
        self.waits.pop(slot, None)
        self.arrived_ns.pop(slot, None)

    def judge(self) -> bool:
        """Begin or end the limit by the precision of the blocks judged last; True if that changed."""
        used, judged = self.recent_used, self.recent_used + self.recent_wasted
        if judged < JUDGED_LEAST:
            return False
        change = used >= LIFT_FROM * judged if self.limited else used < LIMIT_BELOW * judged
        if change:
            self.limited = not self.limited
            self.limits += self.limited
            self.recent_used = self.recent_wasted = self.probes = 0
        elif judged >= (JUDGED_LEAST if self.limited else JUDGED_MAX):
            self.recent_used //= 2
            self.recent_wasted //= 2
        return change

    def room(self, room: int) -> int:
        """How many blocks a guess may fetch where there is ``room`` for so many."""
        if not self.limited:
            return room
        self.probes += 1
        return 0 if self.probes % PROBE_EVERY else min(room, PROBE_BLOCKS)

    def found_below(self, hashes: Iterable[int]) -> None:
        """A lookup has found these blocks in the disk tier."""
        for key in hashes:
            self.from_disk += 1
            self.late += key in self.asked

    def found(self, hashes: Iterable[int]) -> int:
        """A lookup has found these blocks in the host tier; how many of them were fetched ahead."""
        before = self.used
        if self.unused:
            for key in hashes:
                if key in self.unused:
                    del self.unused[key]
                    self.used += 1
                    self.recent_used += 1
        return self.used - before

    def gave_up(self, hashes: Iterable[int]) -> None:
        """These blocks have left the host tier."""
        if self.unused:
            for key in hashes:
                if key in self.unused:
                    del self.unused[key]
                    self.evicted += 1
                    self.recent_wasted += 1

    # --- successors of a block ---

    def learn(self, hashes: Sequence[int]) -> None:
        """A prompt was seen."""
        successors = self.successors
        for key, following in pairwise(hashes):
            counts = successors.pop(key, None) or {}
            if following in counts or len(counts) < SUCCESSORS:
                counts[following] = counts.get(following, 0) + 1
            else:  # the rarest gives way and leaves its count, so that a newly frequent follower comes up
                counts[following] = counts.pop(min(counts, key=counts.__getitem__)) + 1
            successors[key] = counts
        if len(successors) > CONTEXTS_MAX:
            for key in list(islice(successors, len(successors) - CONTEXTS_MAX * 7 // 8)):
                del successors[key]

    def likely(self, hashes: Sequence[int]) -> Iterator[list[int]]:
        """Ways on from the end of a prompt that were seen before, the likeliest first."""
        for first in self._followers(hashes[-1]) if hashes else ():
            way = [first]
            while len(way) < STEPS and (following := self._followers(way[-1])):
                way.append(following[0])
            yield way

    def _followers(self, key: int) -> list[int]:
        counts = self.successors.get(key, {})
        return sorted(counts, key=lambda following: (-counts[following], following))
