"""Where two hosts, or a leader and its restored twin, disagree: trees of plain values under the names of the fields.

Law of this file: what differs is named as a person would look for it (``slots.3.state``, ``pools.G2.refs[7]``), first
differences first, and a bounded number of them.
"""

from array import array
from enum import Enum
from typing import Any, Final

import msgspec

from kvbm_console.core.state import CacheState

DIFFERENCES_MAX: Final = 8
"""Differences that are told: what follows from the first ones does not help."""
ENTRIES_MAX: Final = 2
"""Entries of one list that are told: a column is one place, however many of its entries differ."""
_SHOWN_CHARS: Final = 120
_PARTS: Final = (
    "seq", "n", "at_ns", "epoch", "iteration", "running", "waiting", "draining", "slots", "candidates", "operations",
    "batches", "late", "holds", "breakpoints", "frozen", "leases", "lost_sources", "totals", "next_slot",
    "next_candidate", "next_operation", "next_hold", "next_breakpoint",
)
_COLUMNS: Final = ("hash_of", "content", "refs", "stored_at", "copies", "quarantined")


def facts_tree(state: CacheState) -> dict[str, Any]:
    """All facts as plain values by name; pools by tier, those of an engine with its source."""
    pools = {}
    for pool in state.pools:
        info = pool.info
        name = info.tier.name + (f" of source {info.source}" if info.source else "")
        name += f" rank {info.dp_rank}" if info.dp_rank else ""
        pools[name if name not in pools else f"{name} pool {info.pool}"] = {
            "info": plain(info), **{column: plain(getattr(pool, column)) for column in _COLUMNS},
        }
    return {**{name: plain(getattr(state, name)) for name in _PARTS}, "pools": pools}


def plain(value: Any) -> Any:
    """Structs as dicts by field, columns and tuples as lists, sets sorted, words as their labels."""
    if isinstance(value, Enum):
        return getattr(value, "label", value.name)
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(one) for one in value)
    if isinstance(value, (list, tuple, array, bytearray)):
        return [plain(one) for one in value]
    return value


def differences(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two trees differ, in the order of the first one; empty when they are equal, at most ``DIFFERENCES_MAX``.

    >>> differences({"a": [1, 2], "b": 1}, {"a": [1, 3], "b": 1})
    ['a[1]: 2 is not 3']
    """
    found: list[str] = []
    _compare(mine, theirs, path, found)
    return found


def _compare(mine: Any, theirs: Any, path: str, found: list[str]) -> None:
    if len(found) >= DIFFERENCES_MAX or (mine == theirs and repr(mine) == repr(theirs)):  # the order counts too
        return
    known = len(found)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            here = f"{path}.{key}" if path else str(key)
            if key in mine and key in theirs:
                _compare(mine[key], theirs[key], here, found)
            elif len(found) < DIFFERENCES_MAX:
                found.append(f"{here} exists only {'on host 0' if key in mine else 'there'}")
        if len(found) == known:
            found.append(f"{path} stands in another order: {_short(list(mine))} is not {_short(list(theirs))}")
        return
    if isinstance(mine, list) and isinstance(theirs, list):
        other = [at for at, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]]
        for index in other[:ENTRIES_MAX]:
            _compare(mine[index], theirs[index], f"{path}[{index}]", found)
        if len(other) > ENTRIES_MAX and len(found) < DIFFERENCES_MAX:
            found.append(f"{path} differs in {len(other) - ENTRIES_MAX} more entries")
        if len(mine) != len(theirs) and len(found) < DIFFERENCES_MAX:
            found.append(f"{path} has {len(mine)} entries, not {len(theirs)}")
        return
    found.append(f"{path or 'value'}: {_short(mine)} is not {_short(theirs)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
