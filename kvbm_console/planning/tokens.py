"""The times between the tokens of requests, of a simulated engine.

An engine samples one token of each decoding request at the end of an iteration, so nearly all gaps of an iteration
are equal. ``TokenGaps`` therefore counts requests instead of visiting them. It keeps the time of the last token only
for requests that were left out since: after a preemption, or because they found no block.

For example, two requests decode, and an iteration ends at 10 ms and the next one at 15 ms: two gaps of 5 ms. If one of
them is left out of the second iteration and samples again at 20 ms, its gap is 10 ms, and the other has two of 5 ms.

Law of this file: a request has one gap less than it has tokens. A gap before a request was cloned counts once.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any


class TokenGaps:
    """``counts``: nanoseconds between two tokens of a request, to how often."""

    __slots__ = ("_away", "_last_ns", "counts")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._away: dict[Hashable, int] = {}
        """Requests that sampled no token in the last iteration, to the time of their last one."""
        self._last_ns = 0
        """The end of the last iteration."""

    def left_out(self, request: Hashable) -> None:
        """A request that has a token takes no part in the next iteration."""
        self._away.setdefault(request, self._last_ns)

    def cloned(self, parent: Hashable, clone: Hashable) -> None:
        """A clone goes on from the last token of its parent."""
        if parent in self._away:
            self._away[clone] = self._away[parent]

    def gone(self, request: Hashable) -> None:
        """A request has ended."""
        self._away.pop(request, None)

    def sampled(
        self, begun_ns: int, at_ns: int, steps: int, requests: int, first: int, back: Iterable[Hashable]
    ) -> None:
        """``steps`` iterations of equal length ended, in each of which so many requests sampled a token.

        Of the first iteration, ``first`` are the first tokens of their requests; ``back`` names all requests that
        may have been left out of the iteration before.
        """
        lasts_ns = (at_ns - begun_ns) // steps
        ends_ns = begun_ns + lasts_ns
        together = requests - first
        for request in back:
            last_ns = self._away.pop(request, None)
            if last_ns is not None:
                together -= 1
                self._count(ends_ns - last_ns, 1)
        self._count(ends_ns - self._last_ns, together)
        self._count(lasts_ns, (steps - 1) * requests)
        self._last_ns = at_ns

    def _count(self, gap_ns: int, requests: int) -> None:
        if requests:
            self.counts[gap_ns] = self.counts.get(gap_ns, 0) + requests


def per_token_ns(first_token_ns: int, finished_ns: int, tokens: int) -> int:
    """Nanoseconds for each token behind the first, rounded down; -1 of a request without a second token.

    >>> per_token_ns(100, 400, 4), per_token_ns(100, 100, 1)
    (100, -1)
    """
    return (finished_ns - first_token_ns) // (tokens - 1) if tokens > 1 else -1


def spread_of(counts: Mapping[int, int]) -> dict[str, Any]:
    """Mean, percentiles and maximum of values that are there so often, None of none.

    >>> spread_of({1: 9, 11: 1})
    {'mean': 2.0, 'p50': 1, 'p90': 1, 'p99': 11, 'max': 11}
    """
    number = sum(counts.values())
    if not number:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    ordered = sorted(counts)
    found: dict[str, Any] = {"mean": sum(value * count for value, count in counts.items()) / number}
    at = seen = 0
    for name, share in (("p50", 500), ("p90", 900), ("p99", 990)):
        rank = -(-number * share // 1_000)
        while seen + counts[ordered[at]] < rank:
            seen += counts[ordered[at]]
            at += 1
        found[name] = ordered[at]
    found["max"] = ordered[-1]
    return found
