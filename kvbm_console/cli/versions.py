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
