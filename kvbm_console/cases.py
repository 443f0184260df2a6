"""The cases that come with the program: a question, a recording in which it comes up, and the right answer.

``recordings/cases/`` has them in a clone, and ``case_files`` in an installed program.

Law of this file: the answers are read from ``cases.json``, which ``make recordings`` writes.
"""

from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.errors import NotFound, UsageError

_HERE: Final = Path(__file__).resolve().parent
_PLACES: Final = (_HERE / "case_files", _HERE.parent / "recordings" / "cases")


class CaseEvent(msgspec.Struct, frozen=True):
    """The event that decides a case."""

    seq: int
    at_ns: int
    kind: str


class RecordedCase(msgspec.Struct, frozen=True):
    """A question with its recording and its answer."""

    name: str
    question: str
    answer: str
    request: str | None
    """The request that the question names; null if it names none."""
    origin: str
    """The engine that the recording is from."""
    event: CaseEvent
    path: str = ""
    """Its recording."""


def all_cases() -> list[RecordedCase]:
    """Every case, in the order in which a reader should look at them. Raises ``UsageError`` where there are none."""
    place = next((place for place in _PLACES if (place / "cases.json").is_file()), None)
    if place is None:
        raise UsageError("the cases are not installed: they come with kvbm-console's wheel and with a clone")
    found = msgspec.json.decode((place / "cases.json").read_bytes(), type=list[RecordedCase])
    return [msgspec.structs.replace(case, path=str(place / f"{case.name}.mcap")) for case in found]


def case_named(name: str) -> RecordedCase:
    """The case of this name. Raises ``NotFound``."""
    known = all_cases()
    found = next((case for case in known if case.name == name), None)
    if found is None:
        raise NotFound(f"there is no case {name!r}, but {', '.join(case.name for case in known)}")
    return found
