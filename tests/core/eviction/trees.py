"""Random prefix trees, policies by name, and which blocks may go, for the property tests.

Law of this file: a key is the path that leads to it, so equal keys always have equal prefixes, as sequence hashes do.
"""

from collections.abc import Callable, Sequence

from hypothesis import strategies as some

from kvbm_console.core.eviction import make_policy
from kvbm_console.core.eviction.policy import POLICIES, EvictionPolicy, PolicyConfig
from kvbm_console.planning.cache_only import Belady, References

ALL = (*POLICIES, "belady")
SECOND_NS = 1_000_000_000


def chain(path: Sequence[int]) -> list[int]:
    """One key per prefix of the path."""
    keys, key = [], 7
    for step in path:
        key = key * 5 + step + 1
        keys.append(key)
    return keys


paths = some.lists(some.integers(0, 2), min_size=1, max_size=6)
steps = some.tuples(some.integers(0, 400), paths)
"""(seconds since the last request, path)"""


@some.composite
def traces(draw: some.DrawFn, most: int = 60) -> References:
    """Requests that share prefixes, at times that do not go backwards."""
    at_ns, keys, now = [], [], 0
    for gap, path in draw(some.lists(steps, min_size=1, max_size=most)):
        now += gap * SECOND_NS
        at_ns.append(now)
        keys.append(chain(path))
    return References("test", 1, [f"r{index}" for index in range(len(keys))], at_ns, keys)


def make(name: str, capacity: int, references: References | None = None) -> EvictionPolicy:
    """An empty policy."""
    if name == "belady":
        assert references is not None
        return Belady(references.keys)
    return make_policy(PolicyConfig(policy=name), capacity)


class Where:
    """``MayGo`` of the keys for which ``may_go`` is true."""

    def __init__(self, may_go: Callable[[int], bool]) -> None:
        self._may_go = may_go

    def __call__(self, key: int) -> bool:
        return self._may_go(key)

    def leading(self, keys: Sequence[int]) -> int:
        return next((at for at, key in enumerate(keys) if not self._may_go(key)), len(keys))


EVERYTHING = Where(lambda _: True)
