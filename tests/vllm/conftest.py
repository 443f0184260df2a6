"""Logging and the environment are the same before and after each file of tests.

Law of this file: a file of tests leaves logging and the environment as it found them.
"""

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def logging_as_before() -> Iterator[None]:
    """``Release`` of ``explore`` silences its process, and the servers that are started from it."""
    disabled, level = logging.root.manager.disable, os.environ.get("VLLM_LOGGING_LEVEL")
    yield
    logging.disable(disabled)
    if level is None:
        os.environ.pop("VLLM_LOGGING_LEVEL", None)
    else:
        os.environ["VLLM_LOGGING_LEVEL"] = level
