"""Heavy libraries, imported when they are needed.

Law of this file: one that is missing is one sentence with the command that installs it.
"""

import importlib
from typing import Any

from kvbm_console.core.errors import UsageError


def need(module: str, extra: str, package: str) -> Any:
    """The module. Raises ``UsageError`` that names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"this needs {package}, which is not installed: pip install 'kvbm-console[{extra}]'"
        ) from None
