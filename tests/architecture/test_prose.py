"""The documents and docstrings keep the rules of ``CONTRIBUTING.md`` that a machine can check.

Law of this file: a bound here is the share that is allowed, and is never raised.
"""

import re
from pathlib import Path

import pytest

from tests.architecture import prose

OFFENDING_MAX = 0.02
"""Share of all sentences that may break a rule: some are quotations, or lists that read better as a line."""
ROOM_MAX = 0.03
"""The same of a single room or document."""
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]+)?\)")


def measured() -> dict[str, list[prose.Sentence]]:
    """Sentences by room."""
    rooms: dict[str, list[prose.Sentence]] = {}
    for path in prose.files():
        for sentence in prose.sentences_of(path):
            rooms.setdefault(prose.room_of(sentence.path), []).append(sentence)
    return rooms


def test_sentences_are_plain() -> None:
    rooms = measured()
    everything = [sentence for sentences in rooms.values() for sentence in sentences]
    assert len(everything) > 10_000
    for room, sentences, most in [*((name, found, ROOM_MAX) for name, found in rooms.items()),
                                  ("the project", everything, OFFENDING_MAX)]:
        offending = [sentence for sentence in sentences if sentence.broken()]
        assert len(offending) <= most * len(sentences) + 1, "\n".join(
            [f"{room}: {len(offending)} of {len(sentences)}", *(f"{each.path}:{each.line}: {each.text}"
                                                                for each in offending)])


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("The pool is full.", []),
        ("What is full is named.", ["opening"]),
        ("What is full?", []),
        ("A store waits: the pool is full; the link is busy.", ["stops"]),
        ("A " + "very " * 25 + "long sentence.", ["length"]),
    ],
)
def test_each_rule_finds_its_sentence(text: str, broken: list[str]) -> None:
    assert prose.Sentence("x", 1, "document", text).broken() == broken


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path", [path for path in prose.files() if path.suffix == ".md"],
    ids=lambda path: str(path.relative_to(prose.ROOT)),
)
def test_links_lead_to_a_file_and_a_heading(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        found = (path.parent / target).resolve()
        assert found.exists(), f"{path.name}: {target}"
        assert not anchor or anchor[1:] in anchors(found), f"{path.name}: {target}{anchor}"
