"""The screen as an SVG that every program draws alike.

Text stands in pieces that may begin and end with spaces; programs differ in whether those count, and then columns move.
Here a piece begins with its first character, where that stands. The picture says its own width and height, because a
page that shrinks pictures to its column gives none to a picture that has only a viewBox.

Law of this file: what is drawn is the same, character by character and cell by cell.
"""

import html
import re
from typing import Final

_PIECE: Final = re.compile(
    r'<text class="(?P<kind>[^"]*)" x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)" textLength="(?P<length>[\d.]+)" '
    r'clip-path="(?P<clip>[^"]*)">(?P<text>[^<]*)</text>'
)
_ROOT: Final = re.compile(r'(<svg\b(?![^>]* width=)[^>]*?) viewBox="0 0 (?P<width>[\d.]+) (?P<height>[\d.]+)"')
_SPACES: Final = " \u00a0"


def sturdy(svg: str) -> str:
    """The same picture with its size; pieces of nothing but spaces are left out."""
    sized = _ROOT.sub(r'\1 width="\g<width>" height="\g<height>" viewBox="0 0 \g<width> \g<height>"', svg, count=1)
    return _PIECE.sub(_trimmed, sized)


def _trimmed(piece: re.Match[str]) -> str:
    text = html.unescape(piece["text"])
    kept = text.strip(_SPACES)
    if not kept:
        return ""
    if len(kept) == len(text):
        return piece[0]
    cell = float(piece["length"]) / len(text)
    x = float(piece["x"]) + cell * (len(text) - len(text.lstrip(_SPACES)))
    told = html.escape(kept).replace(" ", "&#160;").replace("\u00a0", "&#160;")
    return (
        f'<text class="{piece["kind"]}" x="{x:.1f}" y="{piece["y"]}" textLength="{cell * len(kept):.1f}" '
        f'clip-path="{piece["clip"]}">{told}</text>'
    )
