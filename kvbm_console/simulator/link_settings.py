"""Links by name: settings of the command line, and files of ``bench links``.

    --link pcie=25GB/s,20us --link disk-read=970MB/s,42us --link 'G3>G1=1GB/s'

``pcie``, ``disk`` and ``net`` name both directions, ``disk-read`` one. A route has a queue of its own then. A file of
``bench links`` has the same settings as tables; a later setting replaces an earlier one.

Law of this file: a setting that cannot be is refused with a sentence from "must" on, and the flag stands before it.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import Route
from kvbm_console.files import read_bounded
from kvbm_console.simulator.link import DEFAULT_LINKS, LinkSpec

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "pcie": ("pcie-down", "pcie-up"), "disk": ("disk-write", "disk-read"), "net": ("net-out", "net-in"),
    **{link.name: (link.name,) for link in DEFAULT_LINKS},
}
STEP: Final = "step"
"""The table of a profile that is no link."""
MEMCPY: Final = "memcpy"
"""A table of a file that is no link: the speed of copies within the host's memory, which bounds those of a device."""
FILE_BYTES_MAX: Final = 1 << 20
"""Far above the size of a file with every link."""
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B/s", re.IGNORECASE | re.ASCII)
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)", re.ASCII)
_UNITS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_UNITS_NS: Final = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}


class LinkSetting(msgspec.Struct, frozen=True):
    """Bandwidth and latency of a link; without a latency the link keeps its own."""

    name: str
    bytes_per_s: float
    base_latency_ns: int | None = None

    @property
    def text(self) -> str:
        """The text that ``parse`` reads."""
        base = "" if self.base_latency_ns is None else f",{self.base_latency_ns}ns"
        return f"{self.name}={self.bytes_per_s:.0f}B/s{base}"

    @classmethod
    def parse(cls, text: str) -> "LinkSetting":
        """``NAME=BANDWIDTH[,LATENCY]``.

        >>> LinkSetting.parse("disk-read=970MB/s,42us")
        LinkSetting(name='disk-read', bytes_per_s=970000000.0, base_latency_ns=42000)
        """
        name, sign, value = text.partition("=")
        rate, _, base = value.partition(",")
        found, took = _RATE.fullmatch(rate.strip()), _TIME.fullmatch(base.strip()) if base else None
        if not sign or found is None or (base and took is None):
            raise UsageError(f"must be NAME=BANDWIDTH[,LATENCY] such as disk-read=3GB/s,100us, got {text!r}")
        bytes_per_s = float(found[1]) * _UNITS[(found[2] or "").lower()]
        if not bytes_per_s:
            raise UsageError(f"must have a bandwidth above 0, got {text!r}")
        base_ns = None if took is None else round(float(took[1]) * _UNITS_NS[took[2]])
        return cls(_known(name.strip(), text), bytes_per_s, base_ns)


def _known(name: str, text: str) -> str:
    if name in NAMES:
        return name
    try:
        return Route.labelled(name).label
    except KeyError:
        raise UsageError(f"must name one of {', '.join(NAMES)} or a route such as G3>G2, got {text!r}") from None


def read_links(path: Path) -> tuple[LinkSetting, ...]:
    """The settings in a file of ``bench links``."""
    try:
        return settings_of(tomllib.loads(read_bounded(path, FILE_BYTES_MAX).decode()))
    except OSError as error:
        raise UsageError(f"must name a file that can be read, got {str(path)!r}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"must name a file of bench links, got {str(path)!r}: {error}") from None


def settings_of(tables: Mapping[str, Any]) -> tuple[LinkSetting, ...]:
    """The links among the tables of a file of ``bench links`` or ``calibrate``."""
    return tuple(
        LinkSetting(_known(name, name), float(table["bytes_per_s"]), int(table["base_latency_ns"]))
        for name, table in tables.items() if name not in (MEMCPY, STEP)
    )


def links_text() -> str:
    """``DEFAULT_LINKS`` for people, both directions as one.

    >>> links_text()
    'pcie=25GB/s,20us disk=3GB/s,100us net=1.2GB/s,1000us'
    """
    usual = {link.name: link for link in DEFAULT_LINKS}
    both = [(name, usual[parts[0]]) for name, parts in NAMES.items() if len(parts) == 2]
    return " ".join(
        f"{name}={link.bytes_per_s / 1e9:g}GB/s,{link.base_latency_ns / 1e3:g}us" for name, link in both
    )


def links_of(settings: Iterable[LinkSetting], usual: Sequence[LinkSpec] = DEFAULT_LINKS) -> tuple[LinkSpec, ...]:
    """The usual links with these settings. A route without a link gets one of its own, if it is set.

    >>> [link.name for link in links_of([LinkSetting("G3>G1", 1e9)])][-1]
    'G3>G1'
    """
    links = {link.name: link for link in usual}
    for setting in settings:
        if setting.name not in NAMES:
            route = Route.labelled(setting.name)
            shared = next((link for link in links.values() if route in link.routes), None)
            if shared is not None:
                del links[shared.name]
                if rest := tuple(other for other in shared.routes if other is not route):
                    links[shared.name] = msgspec.structs.replace(shared, routes=rest)
            like = shared or next(link for link in DEFAULT_LINKS if route in link.routes)
            links[setting.name] = _with(msgspec.structs.replace(like, name=setting.name, routes=(route,)), setting)
            continue
        for name in NAMES[setting.name]:
            if name in links:
                links[name] = _with(links[name], setting)
    return tuple(links.values())


def _with(link: LinkSpec, setting: LinkSetting) -> LinkSpec:
    base_ns = link.base_latency_ns if setting.base_latency_ns is None else setting.base_latency_ns
    return msgspec.structs.replace(link, bytes_per_s=setting.bytes_per_s, base_latency_ns=base_ns)
