"""``lrfu_auto``: ``lrfu`` whose half-life is chosen while it runs, from pure recency to pure frequency.

Law of this file: what is chosen depends on the touches alone. Beside the pool run shadow caches, one for each rule,
over the same sample of blocks and with the same share of the capacity. Every ``EPOCH_REFERENCES`` sampled references
the rule whose shadow had the most hits is taken, if it is better by a margin over a long and over a short time
(hysteresis), so that noise changes nothing. Then every known block is ranked anew by its uses and its last touch.
Without any history the rule is recency, which is ``simple_lru``, and the gauges say so: a half-life of 0.

Two rules are no half-lives: ``lfu`` and ``adaptive_lru``, which count only while a block is resident. They keep what
they have instead of fetching back what was popular, which is better where the popular blocks alone do not fit.

A sample of blocks is enough because a block is never evicted before its children, so a hit of a block in a shadow is a
hit of the prefix that ends with it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappush
from math import log2
from typing import Any, Final

import msgspec

from kvbm_console.core.eviction.ranked import SECOND_NS, Lrfu
from kvbm_console.core.eviction.shadows import AdaptiveShadow, LrfuShadow, Shadow

SAMPLED_SHARE: Final = 7
"""One block in so many is sampled: the shadows then cost about as much as the pool itself. A prime, so that ids in
sequence are spread evenly."""
_REMAINDER: Final = 3
"""Which ones; not 0, because traces like to call the block that every prompt begins with 0."""
EPOCH_REFERENCES: Final = 256
"""Sampled references between two decisions."""
MEMORY: Final = 0.975
"""Weight of the hits of earlier epochs, per epoch: long enough to see through loads that swing for a minute or two."""
MARGIN: Final = 0.02
CLOSE_MARGIN: Final = 0.01
"""To be taken, a rule must have had more hits than recency by the first share of the references, more than any other
current rule by the second: those are nearer to each other."""
RECENT_MEMORY: Final = 0.6
RETURN: Final = 0.03
"""The way back to recency is shorter: it is taken when recency was better by this share over the last few epochs.
Whoever is wrong about frequency keeps dead blocks for long; whoever is wrong about recency forgets it soon."""
EVIDENCE: Final = 8
"""And by this many hits besides, so that a handful of lucky ones at the beginning does not count."""
RECENCY_S: Final = 1e-3
"""A half-life below the time between two requests: pure recency."""
FOR_EVER_S: Final = 1e8
"""A half-life above any run: pure frequency."""


class Rule(msgspec.Struct, frozen=True):
    """How blocks are ranked: ``lrfu`` with a half-life, or ``adaptive_lru`` with a weight (1: ``lfu``)."""

    half_life_s: float | None = None
    weight: float = 0.0
    credit_s: float = 1_000.0

    @property
    def recency(self) -> float:
        """Factor of the last touch in seconds."""
        return 1.0 - self.weight

    @property
    def handicap(self) -> float:
        """Seconds that a block which was never used again is set back, doubled."""
        return self.weight * self.credit_s

    def shadow(self, capacity: int, ghosts_max: int) -> Shadow:
        """A small cache under this rule."""
        if self.half_life_s is not None:
            return LrfuShadow(capacity, self.half_life_s, ghosts_max)
        return AdaptiveShadow(capacity, self.recency, self.handicap)


RULES: Final = (
    *(Rule(half_life_s) for half_life_s in (RECENCY_S, 3.0, 10.0, 30.0, 100.0, 300.0, FOR_EVER_S)),
    Rule(weight=0.3), Rule(weight=1.0),
)
"""Half-lives between which agents (seconds) and people (minutes) come back, and the two that count residence only."""


class LrfuAuto(Lrfu):
    """``lrfu`` with a half-life that follows the load. See the head of this file."""

    name = "lrfu_auto"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, RECENCY_S)
        share = max(1, capacity // SAMPLED_SHARE)
        ghosts = max(1, self.ghosts_max // SAMPLED_SHARE)
        self._shadows = [rule.shadow(share, ghosts) for rule in RULES]
        self._current = 0
        """Index of the rule in force."""
        self._scores = [0.0] * len(RULES)
        self._weight = 0.0
        """References behind the scores."""
        self._recent = [0.0] * len(RULES)
        self._recent_weight = 0.0
        """The same over the last few epochs."""
        self._batch: list[tuple[Sequence[int], int]] = []
        """Sampled touches since the last decision."""
        self._sampled = 0
        """References in them."""
        self._changes = 0
        self._uses: Counter[int] = Counter()
        """Key to its touches, as long as it is known."""
        self._before: dict[int, int] = {}
        """Resident key to its touches before it became resident."""
        self._last: dict[int, int] = {}
        """Key to the time of its last touch."""

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """One more use of each, here and in the shadows."""
        queued, uses = self._queued, self._uses
        for key in keys:
            if key not in queued:
                self._before[key] = uses[key]
        uses.update(keys)
        self._last.update(dict.fromkeys(keys, at_ns))
        if RULES[self._current].half_life_s is not None:
            super().touch(keys, at_ns)
        else:
            self._touch_resident(keys, RULES[self._current], at_ns)
        sampled = [key for key in keys if key % SAMPLED_SHARE == _REMAINDER]
        if sampled:
            self._batch.append((sampled, at_ns))
            self._sampled += len(sampled)
            if self._sampled >= EPOCH_REFERENCES:
                self._decide(at_ns)

    def forget(self, keys: Iterable[int]) -> None:
        """These blocks are not resident any more."""
        gone = list(keys)
        super().forget(gone)
        for key in gone:
            self._before.pop(key, None)

    def _touch_resident(self, keys: Sequence[int], rule: Rule, at_ns: int) -> None:
        """Rank by a rule that counts residence."""
        ranks, stamps, queued, heap, stamp = self._rank, self._stamp, self._queued, self._heap, self._clock
        uses, before = self._uses, self._before
        now, handicap = rule.recency * at_ns / SECOND_NS, rule.handicap
        for key in reversed(keys):
            stamp += 1
            rank = ranks[key] = now - handicap / (uses[key] - before[key] + 1)
            stamps[key] = stamp
            if key not in queued:
                queued[key] = stamp
                heappush(heap, (rank, stamp, key))
        self._clock = stamp

    # --- the choice ---

    def _decide(self, at_ns: int) -> None:
        for index, shadow in enumerate(self._shadows):
            hits = shadow.use(self._batch)
            self._scores[index] = self._scores[index] * MEMORY + hits
            self._recent[index] = self._recent[index] * RECENT_MEMORY + hits
        self._weight = self._weight * MEMORY + self._sampled
        self._recent_weight = self._recent_weight * RECENT_MEMORY + self._sampled
        self._batch, self._sampled = [], 0
        best = self._best()
        if best != self._current:
            self._current = best
            self._changes += 1
            self._follow(RULES[best])

    def _best(self) -> int:
        """The rule to follow from now on."""
        scores, recent, current = self._scores, self._recent, self._current
        if current and recent[0] > recent[current] + RETURN * self._recent_weight + EVIDENCE:
            return 0
        best = max(range(len(scores)), key=lambda index: (scores[index], -abs(index - current)))
        bar = scores[current] + (CLOSE_MARGIN if current else MARGIN) * self._weight + EVIDENCE
        return best if scores[best] > bar and recent[best] >= recent[current] else current

    def _follow(self, rule: Rule) -> None:
        """Rank what is known anew, as if all touches of a block had been at the time of its last one.

        Uses and last touch both grow from child to parent, so the order along a chain stays right.
        """
        uses = self._uses
        if rule.half_life_s is not None:
            self.half_life_s = rule.half_life_s
            scale = SECOND_NS * rule.half_life_s
            self._rank = {key: last / scale + log2(uses[key]) for key, last in self._last.items()}
        else:
            recency, handicap, before = rule.recency / SECOND_NS, rule.handicap, self._before
            self._rank = {
                key: last * recency - handicap / (uses[key] - before.get(key, 0) + 1)
                for key, last in self._last.items()
            }
        self._rebuild()

    def _drop(self, key: int) -> None:
        super()._drop(key)
        del self._uses[key]
        del self._last[key]
        self._before.pop(key, None)

    def gauges(self) -> dict[str, float]:
        """Also the rule in force: its half-life (0: pure recency) or its weight, and how often it changed."""
        rule = RULES[self._current]
        chosen = {"weight": rule.weight} if rule.half_life_s is None else {
            "half_life_s": rule.half_life_s if self._current else 0.0
        }
        return {**super().gauges(), **chosen, "changes": self._changes}

    # --- keyframes ---

    def export(self) -> Any:
        """As all, with the shadows and their scores."""
        return {
            **super().export(), "current": self._current, "changes": self._changes,
            "scores": list(self._scores), "weight": self._weight,
            "recent": list(self._recent), "recent_weight": self._recent_weight,
            "batch": [[list(keys), at_ns] for keys, at_ns in self._batch],
            "touched": [
                [key, uses, self._before.get(key), self._last[key]] for key, uses in sorted(self._uses.items())
            ],
            "shadows": [shadow.export() for shadow in self._shadows],
        }

    def restore(self, exported: Any) -> None:
        """Become what was exported."""
        self._current, self._changes = exported["current"], exported["changes"]
        half_life_s = RULES[self._current].half_life_s
        if half_life_s is not None:
            self.half_life_s = half_life_s
        self._scores, self._weight = list(exported["scores"]), exported["weight"]
        self._recent, self._recent_weight = list(exported["recent"]), exported["recent_weight"]
        self._batch = [(keys, at_ns) for keys, at_ns in exported["batch"]]
        self._sampled = sum(len(keys) for keys, _ in self._batch)
        self._uses = Counter({key: uses for key, uses, _, _ in exported["touched"]})
        self._before = {key: before for key, _, before, _ in exported["touched"] if before is not None}
        self._last = {key: last for key, _, _, last in exported["touched"]}
        for shadow, state in zip(self._shadows, exported["shadows"], strict=True):
            shadow.restore(state)
        super().restore(exported)
