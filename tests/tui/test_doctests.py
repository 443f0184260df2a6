"""The examples in the docstrings of the view model and of the drawing primitives are true."""

import doctest
import importlib
import pkgutil

import pytest

import tui.draw
import tui.model

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (tui.model, tui.draw) for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
