"""Which versions this program speaks.

Law of this file: the numbers are read where they are defined, never written a second time.
"""

from importlib import metadata


def program_version() -> str:
    """The version of the installed distribution, ``0+unknown`` in a tree that was never installed."""
    try:
        return metadata.version("kvbm-console")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def version_line() -> str:
    """Program, protocol and recording format, on one line."""
    from kvbm_console.recording.format import FORMAT_MAJOR, FORMAT_MINOR
    from kvbm_console.wire.protocol import PROTOCOL_MAJOR, PROTOCOL_MINOR

    return (
        f"kvbm-console {program_version()}, protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}, "
        f"recording format {FORMAT_MAJOR}.{FORMAT_MINOR}"
    )
