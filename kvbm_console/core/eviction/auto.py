"""``lrfu_auto``: ``lrfu`` whose half-life is chosen while it runs, from pure recency to pure frequency.

Theory of operation
-------------------
Shadow caches run beside the pool, one for each rule, over the same sample of blocks and with the same share of the
capacity. Every ``EPOCH_REFERENCES`` sampled references the policy takes the rule whose shadow had the most hits. It
must be better by a margin over a long and over a short time (hysteresis), so that noise changes nothing. Then every
known block is ranked anew by its uses and its last touch. Without any history the rule is recency, which is
``simple_lru``, and the gauges show a half-life of 0.

A sample of blocks is enough because a block is never evicted before its children. So a hit of a block in a shadow is a
hit of the prefix that ends with the block.

Two rules are no half-lives: ``lfu`` and ``adaptive_lru``, which count only while a block is resident. They keep their
blocks instead of fetching popular blocks back, which is better when the popular blocks alone do not fit.

Example: a pool of 700 places samples one block in 7, so each shadow has 100 places. After the first 256 sampled
references the shadow of recency had 40 hits and that of the half-life of 100 s had 60. The bar is 40 + 1 % of 256 + 8
= 50.6 hits, so the half-life of 100 s is taken. At the next epoch these counts weigh 0.985 of new counts.

Law of this file: the choice depends on the touches alone.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import log
from typing import Any, Final

import msgspec

from kvbm_console.core.eviction.ranked import SECOND_NS, Lrfu, known_columns, packed, unpacked
from kvbm_console.core.eviction.shadows import AdaptiveShadow, Batch, LrfuShadow, RecencyShadow, Shadow

SAMPLED_SHARE: Final = 7
"""One block in so many is sampled: the shadows then cost about as much as the pool itself. A prime, so that ids in
sequence are spread evenly."""
EPOCH_REFERENCES: Final = 256
"""Sampled references between two decisions, with a sample of one in ``SAMPLED_SHARE``."""
MEMORY: Final = 0.985
"""Weight of the hits of earlier epochs, per epoch: long enough to see through loads that swing for a minute or two."""
MARGIN: Final = 0.01
CLOSE_MARGIN: Final = 0.01
"""A rule is taken when it had more hits than recency by the first share of the references. The second share applies
against any other current rule, because those rules are nearer to each other."""
RECENT_MEMORY: Final = 0.6
RETURN: Final = 0.02
"""The way back to recency is shorter: it is taken when recency was better by this share over the last few epochs. A
wrong choice of frequency keeps dead blocks for long, whereas a wrong choice of recency passes soon."""
EVIDENCE: Final = 8
"""And by this many hits besides, so that a few lucky hits at the beginning do not count."""
BATCHES: Final = 16
"""The shadows look at touches in batches of one part in so many of their capacity: a call for each would cost more."""


class Rule(msgspec.Struct, frozen=True):
    """A way to rank blocks, either ``lrfu`` with a half-life (0 is recency) or ``adaptive_lru`` with a weight (1 is
    ``lfu``)."""

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

    def shadow(self, capacity: int, stamps: dict[int, int]) -> Shadow:
        """A small cache under this rule."""
        if self.half_life_s is None:
            return AdaptiveShadow(capacity, stamps, self.recency, self.handicap)
        return LrfuShadow(capacity, stamps, self.half_life_s) if self.half_life_s else RecencyShadow(capacity)


FOR_EVER_S: Final = 1e8
"""A half-life above any run: pure frequency."""
RULES: Final = (
    *(Rule(half_life_s) for half_life_s in (0.0, 3.0, 10.0, 30.0, 100.0, 300.0, FOR_EVER_S)),
    Rule(weight=0.3), Rule(weight=1.0),
)
"""Half-lives between which agents (seconds) and people (minutes) come back, and the two that count residence only."""


class LrfuAuto(Lrfu):
    """``lrfu`` with a half-life that follows the load. See the head of this file."""

    name = "lrfu_auto"

    def __init__(self, capacity: int, sampled_share: int = SAMPLED_SHARE) -> None:
        super().__init__(capacity, 0.0)
        self._sampled_share = sampled_share
        self._epoch = EPOCH_REFERENCES * SAMPLED_SHARE // sampled_share
        """Sampled references between two decisions: as many references of all, whatever is sampled."""
        self._remainder = sampled_share // 2
        """The sampled remainder. It is not 0, because traces often give the id 0 to the block that begins every
        prompt."""
        share = max(1, capacity // sampled_share)
        self._batch_keys = max(1, share // BATCHES)
        self._sample: dict[int, int] = {}
        """Sampled key to its stamp, the last touched keys last; as many as ghosts and blocks are sampled."""
        self._sample_max = max(1, (self.ghosts_max + capacity) // sampled_share)
        self._shadows = [rule.shadow(share, self._sample) for rule in RULES]
        self._current = 0
        """Index of the rule in force."""
        self._scores = [0.0] * len(RULES)
        self._weight = 0.0
        """References behind the scores."""
        self._recent = [0.0] * len(RULES)
        self._recent_weight = 0.0
        """The same over the last few epochs."""
        self._batch: Batch = []
        """Sampled touches that the shadows have not seen."""
        self._waiting = 0
        """References in them."""
        self._hits = [0] * len(RULES)
        self._sampled = 0
        """References since the last decision."""
        self._changes = 0
        self._uses: Counter[int] = Counter()
        """Key to its touches, as long as it is known."""
        self._residence = False
        """True if the rule in force counts uses while resident only."""
        self._before: dict[int, int] = {}
        """Resident key to its touches before it became resident, while ``_residence``. Keys that were resident before
        the rule have 0."""
        self._follow(0)

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        """One more use of each, here and in the shadows."""
        super().touch(keys, at_ns)
        self._show(keys, at_ns)

    def use(self, keys: Sequence[int], at_ns: int) -> None:
        """One more use of each, here and in the shadows, which store every key that is asked for."""
        super().use(keys, at_ns)
        self._show(keys, at_ns)

    @property
    def is_recency(self) -> bool:  # type: ignore[override]
        """True if the rule in force is recency."""
        return not self._current

    def _show(self, keys: Sequence[int], at_ns: int) -> None:
        share, remainder = self._sampled_share, self._remainder
        sampled = [key for key in reversed(keys) if key % share == remainder]
        if sampled:
            stamps, sample = self._stamp, self._sample
            own = [stamps[key] for key in sampled]
            for key in sampled:
                sample.pop(key, None)
            sample.update(zip(sampled, own, strict=True))
            self._batch.append((sampled, own, at_ns))
            self._waiting += len(sampled)
            if self._waiting >= self._batch_keys:
                self._look()

    def _use(self, keys: Sequence[int], at_ns: int) -> None:
        self._uses.update(keys)
        if self.half_life_s:
            super()._use(keys, at_ns)

    def _enter(self, keys: Sequence[int], aside: bool = False) -> None:
        if self._residence:
            uses, before = self._uses, self._before
            for key in keys:
                before[key] = uses[key] - 1
        super()._enter(keys, aside)

    def forget(self, keys: Iterable[int]) -> None:
        """These blocks are not resident any more."""
        if self._residence:
            keys = list(keys)
            for key in keys:
                self._before.pop(key, None)
        super().forget(keys)

    # --- the choice ---

    def _look(self) -> None:
        for index, shadow in enumerate(self._shadows):
            self._hits[index] += shadow.use(self._batch)
        self._sampled += self._waiting
        self._batch, self._waiting = [], 0
        if len(self._sample) > self._sample_max:
            for key in list(self._sample)[: len(self._sample) - self._sample_max // 8 * 7]:
                for shadow in self._shadows:
                    shadow.forget(key)
                del self._sample[key]
        if self._sampled >= self._epoch:
            self._decide()

    def _decide(self) -> None:
        for index, hits in enumerate(self._hits):
            self._scores[index] = self._scores[index] * MEMORY + hits
            self._recent[index] = self._recent[index] * RECENT_MEMORY + hits
        self._weight = self._weight * MEMORY + self._sampled
        self._recent_weight = self._recent_weight * RECENT_MEMORY + self._sampled
        self._hits, self._sampled = [0] * len(RULES), 0
        best = self._best()
        if best != self._current:
            self._changes += 1
            self._follow(best)

    def _best(self) -> int:
        """The rule to follow from now on."""
        scores, recent, current = self._scores, self._recent, self._current
        if current and recent[0] > recent[current] + RETURN * self._recent_weight + EVIDENCE:
            return 0
        best = max(range(len(scores)), key=lambda index: (scores[index], -abs(index - current)))
        bar = scores[current] + (CLOSE_MARGIN if current else MARGIN) * self._weight + EVIDENCE
        return best if scores[best] > bar and recent[best] >= recent[current] else current

    def _follow(self, index: int) -> None:
        """Rank by this rule from now on; a half-life dates all touches of a block at the time of its last touch.

        Uses and last touch both grow from child to parent, so the order along a chain stays right.
        """
        self._current = index
        rule, stamps, uses, before = RULES[index], self._stamp, self._uses, self._before
        half_life_s = self.half_life_s = rule.half_life_s or 0.0
        self._residence = rule.half_life_s is None
        self._first = None
        self._value.clear()
        before.clear()
        if half_life_s:
            scale = log(2.0) / SECOND_NS / half_life_s
            self._value.update({key: stamp * scale + log(uses[key]) for key, stamp in stamps.items()})
            self.rank = self._value.__getitem__
        elif self._residence:
            recency, handicap = rule.recency / SECOND_NS, rule.handicap
            before.update(dict.fromkeys(self._queued, 0))
            self.rank = lambda key: recency * stamps[key] - handicap / (uses[key] - before[key] + 1)
        else:
            self.rank = lambda key: 0.0
        self._rebuild()

    def _drop(self, keys: Sequence[int]) -> None:
        super()._drop(keys)
        deque(map(self._uses.pop, keys), 0)

    def gauges(self) -> dict[str, float]:
        """Also the rule in force by its half-life (0 is pure recency) or weight, and how often the rule changed."""
        rule = RULES[self._current]
        chosen = {"weight": rule.weight} if rule.half_life_s is None else {"half_life_s": rule.half_life_s}
        return {**super().gauges(), **chosen, "changes": self._changes}

    # --- keyframes ---

    def export(self) -> Any:
        """As all, with the shadows and their scores."""
        known = super().export()
        keys = unpacked(known["keys"])
        return {
            **known, "current": self._current, "changes": self._changes,
            "scores": list(self._scores), "weight": self._weight,
            "recent": list(self._recent), "recent_weight": self._recent_weight,
            "batch": [[list(part) for part in touch[:2]] + [touch[2]] for touch in self._batch],
            "hits": list(self._hits), "sampled": self._sampled,
            "uses": list(map(self._uses.__getitem__, keys)), "before": list(map(self._before.get, keys)),
            "sample": [packed(self._sample), packed(self._sample.values())],
            "shadows": [shadow.export() for shadow in self._shadows],
        }

    def restore(self, exported: Any) -> None:
        """Take over exported columns."""
        if "before" in exported:
            keys, uses, before = known_columns(exported)[0], exported["uses"], exported["before"]
        else:  # an older recording: a row for each key
            keys, uses, before = ([row[column] for row in exported["uses"]] for column in range(3))
        self._uses.update(dict(zip(keys, uses, strict=True)))
        self._follow(exported["current"])
        self._changes = exported["changes"]
        self._scores, self._weight = list(exported["scores"]), exported["weight"]
        self._recent, self._recent_weight = list(exported["recent"]), exported["recent_weight"]
        self._batch = [(keys, stamps, at_ns) for keys, stamps, at_ns in exported["batch"]]
        self._waiting = sum(len(keys) for keys, _, _ in self._batch)
        self._hits, self._sampled = list(exported["hits"]), exported["sampled"]
        self._before.update({key: uses for key, uses in zip(keys, before, strict=True) if uses is not None})
        sample = exported["sample"]
        if len(sample) == 2 and isinstance(sample[0], bytes):
            sample = zip(unpacked(sample[0]), unpacked(sample[1]), strict=True)
        self._sample.update(dict(sample))
        for shadow, state in zip(self._shadows, exported["shadows"], strict=True):
            shadow.restore(state)
        super().restore(exported)
