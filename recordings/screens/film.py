"""Puts pictures of one size into one that moves: an SVG whose frames follow each other by CSS.

Law of this file: text in, text out; a row that stays is drawn once for as long as it stays.
"""

import re
from collections.abc import Sequence
from typing import Final

_STYLE: Final = re.compile(r"\.film-(r\d+) \{([^}]*)\}")
_CELL: Final = re.compile(r"<(?:rect|text)[^>]*?class=\"film-r\d+\"[^>]*?(?:/>|>[^<]*</text>)|<rect fill=[^>]*?/>")
_WINDOW: Final = re.compile(r'<clipPath id="film-clip-terminal">\s*(<rect [^>]*/>)\s*</clipPath>')
"""The part of the rows inside the window: a row is drawn one unit wider than the window."""
_Y: Final = re.compile(r' y="([\d.]+)"')
_LINE: Final = re.compile(r"film-line-(\d+)")
ROW: Final = 24.4
"""Height of a row in the pictures."""


def film(frames: Sequence[str], frame_s: float) -> str:
    """One moving picture of these; all have the same size and were drawn under the name ``film``."""
    total = len(frames)
    styles: dict[str, str] = {}
    rows: dict[tuple[int, str], list[int]] = {}
    for number, frame in enumerate(frames):
        names = {}
        for name, rule in _STYLE.findall(frame):
            names[name] = styles.setdefault(rule.strip(), f"s{len(styles)}")
        body = frame[frame.index("</defs>"):]
        lines: dict[int, list[str]] = {}
        for cell in _CELL.findall(body):
            place = _Y.search(cell)
            if place is None:
                continue
            line = _LINE.search(cell)
            row = int(line[1]) if line is not None else round((float(place[1]) - 1.5) / ROW)
            cell = re.sub(r'film-(r\d+)', lambda found: names[found[1]], cell)  # noqa: B023
            cell = re.sub(r' clip-path="[^"]*"| shape-rendering="[^"]*"', "", cell)
            lines.setdefault(row, []).append(cell)
        for row, cells in lines.items():
            rows.setdefault((row, "".join(cells)), []).append(number)
    shown: dict[tuple[int, ...], str] = {}
    css, groups = [], []
    for (_, cells), numbers in sorted(rows.items(), key=lambda item: item[0][0]):
        when = tuple(numbers)
        if len(when) == total:
            groups.append(f"<g>{cells}</g>")
            continue
        if when not in shown:
            shown[when] = f"f{len(shown)}"
            css.append(_keyframes(shown[when], when, total, frame_s))
        groups.append(f'<g class="{shown[when]}">{cells}</g>')
    rules = "".join(f".{name}{{{rule}}}" for rule, name in styles.items())
    head = frames[0][: frames[0].index("<style>")]
    window = _WINDOW.search(frames[0])
    clip = f'<clipPath id="window">{window[1]}</clipPath>' if window is not None else ""
    frame = frames[0][frames[0].index("</defs>") + len("</defs>"): frames[0].index('<g transform="translate(9, 41)"')]
    frame = frame.replace("film-title", "title")
    return (
        f"{head}<style>text{{font-family:Fira Code,monospace;font-size:20px;white-space:pre}}"
        f".title{{font-size:18px;font-weight:bold;font-family:arial}}{rules}{''.join(css)}</style>\n"
        f"{clip}{frame}<g transform=\"translate(9, 41)\" clip-path=\"url(#window)\">\n"
        + "\n".join(groups) + "\n</g></svg>\n"
    )


def _keyframes(name: str, numbers: Sequence[int], total: int, frame_s: float) -> str:
    """Visible during these frames, hidden in the others."""
    steps, before = [], None
    for number in range(total):
        seen = number in numbers
        if seen is not before:
            steps.append(f"{100 * number / total:.3f}%{{visibility:{'visible' if seen else 'hidden'}}}")
            before = seen
    return (f"@keyframes {name}{{{''.join(steps)}}}"
            f".{name}{{animation:{name} {total * frame_s:g}s step-end infinite}}")
