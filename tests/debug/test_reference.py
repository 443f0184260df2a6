"""The debugger's reference is what the code does: its tables are fresh, its examples are accepted."""

import re

import pytest

from kvbm_console.core.expression import EVENT, SLOT, ExpressionError, parse

from .reference import DOCUMENT, regenerated

TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_the_tables_of_fields_are_fresh() -> None:
    assert regenerated(TEXT) == TEXT, "run python -m tests.debug.reference"


LANGUAGE = TEXT.split("## The expression language")[1]


@pytest.mark.parametrize("example", re.findall(r"^    (\S.*)$", LANGUAGE, re.MULTILINE))
def test_the_examples_of_the_language_are_accepted(example: str) -> None:
    def fits(schema: object) -> bool:
        try:
            parse(example, schema)  # type: ignore[arg-type]
        except ExpressionError:
            return False
        return True

    assert fits(SLOT) or fits(EVENT)
