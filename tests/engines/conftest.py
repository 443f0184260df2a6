"""Publishers in other processes, for every test of this directory.

Law of this file: no publisher outlives its test.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines.test_zmq_source import Engine


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    """Makes engines; kills them at the end."""
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(Engine(**settings))
        return made[-1]

    yield make
    for engine in made:
        if engine.process.poll() is None:
            engine.end()
