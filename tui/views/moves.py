"""Movement keys of lists.

Law of this file: a key never leaves the list, and the first press enters it at the end that it points away from.
"""

MOVES = frozenset({"up", "down", "k", "j", "pageup", "pagedown", "g", "G", "home", "end"})


def moved(at: int | None, key: str, total: int, page: int) -> int:
    """The row after a movement key; without a row before, down and up begin at the first and last one."""
    last = total - 1
    if key in ("g", "home"):
        return 0
    if key in ("G", "end"):
        return last
    if at is None:
        return 0 if key in ("down", "j", "pagedown") else last
    step = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page}[key]
    return min(last, max(0, at + step))
