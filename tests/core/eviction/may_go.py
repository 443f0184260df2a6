"""Which blocks may go, by a function of one block."""

from collections.abc import Callable, Sequence


class Where:
    """``MayGo`` of the keys for which ``may_go`` is true."""

    def __init__(self, may_go: Callable[[int], bool]) -> None:
        self._may_go = may_go

    def __call__(self, key: int) -> bool:
        return self._may_go(key)

    def leading(self, keys: Sequence[int]) -> int:
        return next((at for at, key in enumerate(keys) if not self._may_go(key)), len(keys))


EVERYTHING = Where(lambda _: True)
