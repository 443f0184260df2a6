"""The bridge from commands to the asynchronous client library.

Law of this file: grpc, and whatever else is heavy, is imported inside the functions; an error inside a task group comes
out as itself.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on an event loop of its own."""
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as group:
        raise alone(group) from None


def alone(error: BaseException) -> BaseException:
    """The error inside groups that hold only that one, else the group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
