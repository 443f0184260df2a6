"""Names of requests: the id that a client was given names the requests that its engine made of it.

vLLM's server answers a client with ``chatcmpl-X`` and calls the request ``chatcmpl-X-1a2b3c4d``, or
``cmpl-X-0-1a2b3c4d`` for the first prompt of a completion.

Law of this file: a name without wildcards names itself first, and then what an engine appends to it.
"""

import re
from collections.abc import Callable
from fnmatch import translate
from typing import Final

_APPENDED: Final = re.compile(r"(-\d{1,4})?-[0-9a-f]{8}")
"""Number of the prompt, and eight random digits."""
_HEX: Final = "-" + 8 * "[0-9a-f]"
_WILD: Final = re.compile(r"[*?\[]")


def is_called(request: str, name: str) -> bool:
    """Whether a client knows this request by ``name``.

    >>> is_called("chatcmpl-7", "chatcmpl-7"), is_called("cmpl-7-0-1a2b3c4d", "cmpl-7"), is_called("r-1", "r")
    (True, True, False)
    """
    return request == name or (
        request.startswith(name) and _APPENDED.fullmatch(request, len(name)) is not None
    )


def request_globs(pattern: str) -> tuple[str, ...]:
    """The globs that match what ``pattern`` names: itself, and without wildcards also what is called so.

    >>> request_globs("chat*")
    ('chat*',)
    """
    if _WILD.search(pattern):
        return (pattern,)
    return pattern, pattern + _HEX, f"{pattern}-[0-9]{_HEX}", f"{pattern}-[0-9][0-9]{_HEX}"


def request_match(pattern: str) -> Callable[[str], object]:
    """Not None for a request that ``pattern`` names."""
    return re.compile("|".join(map(translate, request_globs(pattern)))).match
