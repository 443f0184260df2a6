"""How numbers, times and names are written on the screens.

Law of this file: values have three digits and are rounded down, so only a full value reads "100 %". An unknown value is
a dash and not a zero.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

UNKNOWN: Final = "–"
US: Final = 1_000
MS: Final = 1_000_000
S: Final = 1_000_000_000
MINUTE: Final = 60 * S
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
CUT: Final = "…"
FILL: Final = "\ue000"
"""The second cell of a wide character, of the private use area: ``plain`` lets no such character in from outside."""
_WIDE_MAYBE: Final = re.compile("[\u1100-\u115f\u231a-\u23ff\u2600-\U0010ffff]")
"""A character that may be wide, or ``FILL``; the console's own glyphs are outside these ranges."""
CELLS_MAX: Final = 4_096
"""More kinds of characters than any set of names has."""


def _three(value: int, unit: int) -> str:
    """``value / unit`` below 1,000 with three digits, rounded down."""
    whole = value // unit
    if whole >= 100:
        return str(whole)
    if whole >= 10:
        return f"{whole}.{value * 10 // unit % 10}"
    return f"{whole}.{value * 100 // unit % 100:02}"


def duration(ns: int | None) -> str:
    """A duration for columns: at most five cells, without a blank before the unit.

    >>> [duration(x) for x in (48 * MS, 1_314 * MS, 11_872 * MS, 252 * S, 72 * MINUTE, 76 * HOUR, None)]
    ['48ms', '1.31s', '11.8s', '4m12s', '1h12m', '3d04h', '–']
    """
    if ns is None:
        return UNKNOWN
    ns = max(0, ns)
    if ns < MS:
        return f"{ns // US}µs" if ns else "0ms"
    if ns < S:
        whole = ns // MS
        return f"{whole}ms" if whole >= 10 else f"{whole}.{ns * 10 // MS % 10}ms"
    if ns < MINUTE:
        return _three(ns, S) + "s"
    if ns < 10 * MINUTE:
        return f"{ns // MINUTE}m{ns // S % 60:02}s"
    if ns < HOUR:
        return _three(ns, MINUTE) + "m"
    if ns < 10 * HOUR:
        return f"{ns // HOUR}h{ns // MINUTE % 60:02}m"
    if ns < DAY:
        return _three(ns, HOUR) + "h"
    if ns < 10 * DAY:
        return f"{ns // DAY}d{ns // HOUR % 24:02}h"
    return _three(ns, DAY) + "d"


@lru_cache(maxsize=1_024)
def spoken(ns: int | None) -> str:
    """A duration for sentences: a blank before the unit, whole seconds from ten on.

    >>> [spoken(x) for x in (18 * S, 3_140 * MS, 892 * MS, 252 * S)]
    ['18 s', '3.14 s', '892 ms', '4m12s']
    """
    if ns is None:
        return UNKNOWN
    ns = max(0, ns)
    if 10 * S <= ns < 2 * MINUTE:
        return f"{ns // S} s"
    text = duration(ns)
    for unit in ("ms", "µs", "s"):
        if text.endswith(unit) and "m" not in text[: -len(unit)]:
            return f"{text[: -len(unit)]} {unit}"
    return text


def clock(ns: int, *, millis: bool = False) -> str:
    """Time of the target's clock, ``HH:MM:SS`` and ``.mmm`` for events.

    >>> clock(3_723_045 * MS, millis=True)
    '01:02:03.045'
    """
    ns = max(0, ns)
    text = f"{ns // HOUR:02}:{ns // MINUTE % 60:02}:{ns // S % 60:02}"
    return f"{text}.{ns // MS % 1_000:03}" if millis else text


def count(value: int | None) -> str:
    """A number with commas, for places that have room; a seq is always written so.

    >>> count(4182188), count(None)
    ('4,182,188', '–')
    """
    return UNKNOWN if value is None else f"{value:,}"


def brief(value: float | None) -> str:
    """A number for columns: ``9,999``, then ``11.9k``, ``1.24M``.

    >>> brief(9999), brief(11_987), brief(1_249_000), brief(0)
    ('9,999', '11.9k', '1.24M', '0')
    """
    if value is None:
        return UNKNOWN
    whole = int(value)
    if whole < 10_000:
        return f"{whole:,}"
    for unit, letter in ((1_000, "k"), (1_000_000, "M"), (1_000_000_000, "G")):
        if whole < unit * 1_000:
            return _three(whole, unit) + letter
    return _three(whole, 1_000_000_000_000) + "T"


def per_second(value: float | None) -> str:
    """A rate of things: three digits from 1,000 on.

    >>> per_second(212.7), per_second(1_921), per_second(8_310), per_second(None)
    ('212', '1.92k', '8.31k', '–')
    """
    if value is None:
        return UNKNOWN
    whole = int(value)
    if whole < 1_000:
        return str(whole)
    return _three(whole, 1_000) + "k" if whole < 1_000_000 else brief(whole)


_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(value: float | None, gap: str = " ") -> str:
    """Bytes in binary units.

    >>> size(1.845 * 2**30), size(96.7 * 2**20), size(0), size(None)
    ('1.84 GiB', '96 MiB', '0 B', '–')
    """
    if value is None:
        return UNKNOWN
    scaled = int(value)
    for unit in _BINARY:
        step = 1 << (10 * _BINARY.index(unit))
        if scaled < 1_000 * step or unit == _BINARY[-1]:
            break
    hundredths = int(value) * 100 // step
    if unit == "B" or hundredths >= 1_000:
        return f"{hundredths // 100}{gap}{unit}"
    return f"{hundredths // 100}.{hundredths % 100:02}{gap}{unit}"


def flow(blocks_per_second: float | None, block_bytes: int | None, gap: str = " ") -> str:
    """The rate of a route: bytes when the geometry is known, else blocks."""
    if blocks_per_second is None:
        return UNKNOWN
    if block_bytes is None:
        return f"{per_second(blocks_per_second)}{gap}blk/s"
    return size(blocks_per_second * block_bytes, gap) + "/s"


def percent(part: int, whole: int | None) -> str:
    """Whole percents, floored; a dash without a denominator.

    >>> percent(2047, 2048), percent(2048, 2048), percent(0, 0)
    ('99 %', '100 %', '–')
    """
    return UNKNOWN if not whole else f"{part * 100 // whole} %"


def tenth(part: int, whole: int) -> str:
    """Percents with a decimal, floored, without the sign.

    >>> tenth(618, 1000)
    '61.8'
    """
    if not whole:
        return UNKNOWN
    tenths = part * 1_000 // whole
    return f"{tenths // 10}.{tenths % 10}"


def shares(parts: Sequence[int], whole: int) -> tuple[str, list[str], str]:
    """(sum of the parts, each part, the rest) in percent with a decimal, so that they add up as written.

    >>> shares([412, 179, 27], 1000)
    ('61.8', ['41.2', '17.9', '2.7'], '38.2')
    """
    if not whole:
        return UNKNOWN, [UNKNOWN] * len(parts), UNKNOWN
    total = sum(parts) * 1_000 // whole
    return _tenths(total), _divided(parts, whole, total), _tenths(1_000 - total)


def rest_shares(parts: Sequence[int], whole: int) -> list[str]:
    """The parts of the rest of ``shares``, so that they add up to it as written.

    >>> shares([410], 1001)[2], rest_shares([291, 300], 1001)
    ('59.1', ['29.1', '30.0'])
    """
    return _divided(parts, whole, 1_000 - (whole - sum(parts)) * 1_000 // whole)


def _divided(parts: Sequence[int], whole: int, total: int) -> list[str]:
    """Each part in percent with a decimal; together ``total`` tenths."""
    floors = [part * 1_000 // whole for part in parts]
    order = sorted(range(len(parts)), key=lambda i: -(parts[i] * 1_000 % whole))
    for index in order[: total - sum(floors)]:
        floors[index] += 1
    return [_tenths(tenths) for tenths in floors]


def _tenths(tenths: int) -> str:
    return f"{tenths // 10}.{tenths % 10}"


def cut_middle(text: str, width: int) -> str:
    """A name in ``width`` cells, cut in its middle: both ends tell requests apart.

    >>> cut_middle("chat-0418-long.3", 11)
    'chat-0…ng.3'
    """
    if len(text) <= width:
        return text
    if width <= 1:
        return CUT[:width]
    tail = (width - 1) * 2 // 5
    return text[: width - 1 - tail] + CUT + (text[-tail:] if tail else "")


def cut(text: str, width: int) -> str:
    """A sentence in ``width`` cells, cut at its end with a mark."""
    if len(text) <= width:
        return text
    return text[: max(0, width - 1)].rstrip() + CUT if width > 0 else ""


def clauses(text: str, width: int) -> str:
    """As many clauses of a sentence as fit in ``width`` cells; the first, cut, if none does.

    >>> clauses("place 2 in the queue; first a, which waits", 24)
    'place 2 in the queue'
    >>> clauses("38 G1 blocks, 11 free; first of 3", 12)
    '38 G1 block…'
    """
    while len(text) > width and "; " in text:
        text = text.rpartition("; ")[0]
    return cut(text, width)


def plain(text: str) -> str:
    """Outside text made safe for the terminal: a character for each cell, and no control characters.

    A wide character has ``FILL`` for its second cell, so that positions stay plain indices; ``shown`` takes it out.

    >>> plain("a\\x1b[2J日") == "a?[2J日" + FILL
    True
    """
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_CELLS)


def is_shown(text: str) -> bool:
    """True if a terminal gets this text as it is.

    >>> is_shown("G1→G2 ━━"), is_shown(plain("日")), is_shown("a\\x1b[2J")
    (True, False, False)
    """
    return text.isprintable() and (text.isascii() or _WIDE_MAYBE.search(text) is None)


def shown(text: str) -> str:
    """The text as a terminal gets it. A wide character that was cut in half becomes a blank.

    >>> shown(plain("日本")), shown(plain("日本")[:3]), shown(plain("日本")[1:])
    ('日本', '日 ', ' 本')
    """
    return text if text.isascii() or _WIDE_MAYBE.search(text) is None else _halved(text)


def _halved(text: str) -> str:
    parts, at, end = [], 0, len(text)
    while at < end:
        character = text[at]
        if character == FILL:
            parts.append(" ")
        elif _is_wide(character):
            whole = text[at + 1 : at + 2] == FILL
            parts.append(character if whole else " ")
            at += whole
        else:
            parts.append(character)
        at += 1
    return "".join(parts)


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


class _Cells(dict[int, str]):
    """The replacement of a character, kept for the first CELLS_MAX of them."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        safe = character.isprintable() and not unicodedata.category(character).startswith("M")
        cells = "" if character == FILL else "?" if not safe else character + FILL * _is_wide(character)
        if len(self) < CELLS_MAX:
            self[code] = cells
        return cells


_CELLS: Final = _Cells()


def plural(number: int, one: str, many: str | None = None) -> str:
    """``1 fault``, ``2 faults``."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` cells.

    >>> wrap("one two three", 8)
    ['one two', 'three']
    """
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word[: max(1, width)])
    return lines
