"""Addresses of daemons: their forms, and the sockets of this user."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

TARGET_VARIABLE: Final = "KVBM_CONSOLE_TARGET"
DEFAULT_SOCKET: Final = "default.sock"
SOCKET_PATH_BYTES_MAX: Final = 103
"""The kernel's ``sun_path`` has 108 bytes with the final zero; a daemon has ``.tap`` and ``.new`` behind its path."""


def parse_address(text: str, refuse: Callable[[str], Any]) -> str:
    """``unix:PATH`` (also written as a bare path with a slash) or ``HOST:PORT``; anything else is refused."""
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse(f"must be UTF-8, because gRPC takes no other address, got {text!r}")
    if "/" in text and "://" not in text and not text.startswith("unix:"):
        text = f"unix:{text}"
    if text.startswith("unix:") and len(text) > len("unix:"):
        if len(os.fsencode(text.removeprefix("unix:"))) > SOCKET_PATH_BYTES_MAX:
            refuse(f"must have a path of at most {SOCKET_PATH_BYTES_MAX} bytes, got {text!r}")
        return text
    host, _, port = text.rpartition(":")
    if host and port.isascii() and port.isdigit() and 0 <= int(port) <= 65_535:
        return text
    refuse(f"must be unix:PATH or HOST:PORT with a port up to 65535, got {text!r}")
    raise AssertionError("refuse did not raise")


def socket_address(name: str) -> str:
    """The address of the socket ``name`` in the directory of our sockets, which only this user may read."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(runtime, "kvbm-console") if runtime else Path(tempfile.gettempdir(), f"kvbm-console-{os.getuid()}")
    return f"unix:{directory / name}"


def default_target() -> str:
    """The daemon's address where the user gives none: ``KVBM_CONSOLE_TARGET``, else the default socket."""
    return os.environ.get(TARGET_VARIABLE) or socket_address(DEFAULT_SOCKET)


def tap_path(address: str) -> str:
    """The path of the socket on which the daemon at ``unix:PATH`` accepts taps."""
    return f"{address.removeprefix('unix:')}.tap"
