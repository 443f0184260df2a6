"""Text from outside that may reach a terminal: names of requests, engines and sessions are whatever a client sent.

Law of this file: what it returns moves no cursor and turns no text around, and JSON keeps every name whole.
"""

import json
from typing import Any

import msgspec


def json_text(document: Any) -> str:
    """A JSON value on one line, without characters that move a cursor or turn text around."""
    try:
        text = msgspec.json.encode(document).decode()
    except UnicodeEncodeError:  # bytes of a file's name that are no UTF-8: Python's names have surrogates for them
        return json.dumps(msgspec.to_builtins(document), separators=(",", ":"))
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    """The character as a JSON escape, valid because unprintable characters stand only inside of strings."""
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + (code - 0x10000 >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def safe(text: str) -> str:
    """A line that may hold names from outside, with ``?`` for characters that move a cursor or turn text around.

    >>> safe("r\\x1b[2J\\n\\u202ename")
    'r?[2J??name'
    """
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
