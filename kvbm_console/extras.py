"""Libraries of an extra, imported when they are needed.

Law of this file: a missing library is one sentence with commands that install it today.
"""

import importlib
from typing import Any

from kvbm_console.core.errors import UsageError


def install_line(extra: str) -> str:
    """The commands that install an extra: in a clone, and from an address of the repository."""
    return (
        f"pip install '.[{extra}]' in a clone of kvbm-console, or "
        f"pip install 'kvbm-console[{extra}] @ git+ADDRESS' with the address of its repository"
    )


def missing(feature: str, extra: str, package: str) -> UsageError:
    """The error to raise when ``feature`` needs a package that is not installed."""
    return UsageError(f"{feature} needs {package}, which is not installed: {install_line(extra)}")


def need(module: str, extra: str, package: str, feature: str = "this") -> Any:
    """The module. Raises ``UsageError`` that says how to install the extra."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise missing(feature, extra, package) from None
