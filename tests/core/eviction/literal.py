"""The adaptive formula as it was published, which is inverted: kept to show that it loses.

score = 0.7 x age / 1000 + 0.3 / (count + 1), evict the minimum. The smallest score has the block that was used a moment
ago and often, so the formula evicts what it should keep.
"""

from collections.abc import Callable, Collection, Iterable, Sequence, Set


class Literal:
    """The published score, age in seconds."""

    name = "literal"

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._count: dict[int, int] = {}
        self._now = 0

    @property
    def resident(self) -> Set[int]:
        return self._last.keys()

    def touch(self, keys: Sequence[int], at_ns: int) -> None:
        self._now = at_ns
        for key in keys:
            self._count[key] = self._count.get(key, 0) + 1 if key in self._last else 1
            self._last[key] = at_ns

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._last.pop(key, None)

    def victims(
        self, count: int, evictable: Callable[[int], bool] | None = None, protected: Collection[int] = (),
    ) -> list[int] | None:
        def score(key: int) -> float:
            return 0.7 * (self._now - self._last[key]) / 1e9 / 1000 + 0.3 / (self._count[key] + 1)

        order = sorted((key for key in self._last if key not in protected), key=lambda key: (score(key), key))
        return order[:count] if len(order) >= count else None

    def gauges(self) -> dict[str, float]:
        return {}

    def export(self) -> object:
        return None

    def restore(self, exported: object) -> None:
        raise NotImplementedError
