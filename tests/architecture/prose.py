"""Measures the prose of the project: docstrings, help texts, documents, and texts on screens.

Rules, each checked per sentence:

* ``opening``: a sentence does not begin with What, Who, Whoever or Where, unless it is a question;
* ``length``: a sentence has at most 25 words;
* ``stops``: a sentence has at most one semicolon or colon.

A code span counts as one word. Code blocks, doctests, headings and generated parts are left out. A table cell and a
list item are texts of their own. ``python -m tests.architecture.prose`` prints the figures of every room;
``python -m tests.architecture.prose --list [PATH ...]`` prints each offending sentence of these paths.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
WORDS_MAX: Final = 25
STOPS_MAX: Final = 1
SCREEN_WORDS_MIN: Final = 5  # shorter strings are labels
_PACKAGES: Final = ("kvbm_console", "server", "tui")
_GENERATED: Final = ("kvbm_console/wire/v1/",)
_SCREENS: Final = ("tui/", "kvbm_console/cli/", "kvbm_console/analysis/lints/", "kvbm_console/analysis/lints/")
_SPAN: Final = re.compile(r"``.+?``|`[^`\n]+`|https?://\S+")
_WORD: Final = re.compile(r"[^\W_][\w'’./%+-]*")
_OPENING: Final = re.compile(r"^\W*(?:What|Who|Whoever|Where)\b")
_STOP: Final = re.compile(r"[;:](?=\s|$)")
_END: Final = re.compile(r"(?<=[.!?])[\"')\]*]*\s+(?=[^\s])")
_ABBREVIATION: Final = re.compile(r"\b(?:(?:e\.g|i\.e|etc|vs|No)\.|\.\.\.)\s")
_GENERATED_PART: Final = re.compile(r"<!-- generated: .*?<!-- end of .*?-->", re.DOTALL)


@dataclass(frozen=True)
class Sentence:
    """A sentence with the place where it stands, and the rules that it breaks."""

    path: str
    line: int
    kind: str
    text: str

    def broken(self) -> list[str]:
        """Names of the rules that this sentence breaks."""
        text = _SPAN.sub("X", self.text)
        rules = []
        if _OPENING.match(text) and not text.rstrip("\"') ").endswith("?"):
            rules.append("opening")
        if len(_WORD.findall(text)) > WORDS_MAX:
            rules.append("length")
        if len(_STOP.findall(text)) > STOPS_MAX:
            rules.append("stops")
        return rules


def split(text: str) -> list[str]:
    """The sentences of a paragraph.

    >>> split("The pool is full. A store waits, e.g. ``op 7``; it is told.")
    ['The pool is full.', 'A store waits, e.g. ``op 7``; it is told.']
    """
    text = _ABBREVIATION.sub(lambda match: match[0].replace(" ", "\u00a0"), " ".join(text.split()))
    return [part.replace("\u00a0", " ").strip() for part in _END.split(text) if _WORD.search(part)]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and table cells of a document, with the offset of their first line."""
    text = _GENERATED_PART.sub(lambda match: "\n" * match[0].count("\n"), text)
    fenced, start, kept = False, 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""]):
        bare = line.strip()
        if bare.startswith("```"):
            fenced, bare = not fenced, ""
        elif fenced or bare.startswith((">>>", "...", "#", "<", "![")) or (line.startswith("    ") and not kept):
            bare = ""
        item = re.match(r"(?:[-*+]|\d+\.)\s+(.*)", bare)
        if (not bare or item or bare.startswith("|")) and kept:
            yield start, " ".join(kept)
            kept = []
        if bare.startswith("|"):
            if not re.fullmatch(r"[|:\s-]+", bare):
                yield from ((number, cell) for cell in re.split(r"(?<!\\)\|", bare.strip("|")) if cell.strip())
        elif bare:
            if not kept:
                start = number
            kept.append(item[1] if item else bare)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """String constants that are no docstrings; a formatted part of an f-string counts as one word."""
    documented = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documented.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            documented.update(id(part) for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = node.value.value
            first, _, rest = text.partition("\n")
            dedented = "\n".join(line[4:] if line.startswith("    ") else line for line in rest.splitlines())
            if not isinstance(tree.body[0], ast.Expr) or node is not tree.body[0]:
                rest = dedented if not dedented.startswith("    ") else "\n".join(x[4:] for x in dedented.splitlines())
            yield node.lineno, f"{first}\n{rest}"


def sentences_of(path: Path) -> Iterator[Sentence]:
    """Every sentence of a Python file (docstrings, screens) or of a document."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        found = [(number + 1, "document", part) for number, part in paragraphs(text)]
    else:
        tree = ast.parse(text)
        found = [(line + at, "docstring", part) for line, doc in _docstrings(tree) for at, part in paragraphs(doc)]
        if name.startswith(_SCREENS):
            found += [
                (line, "screen", string) for line, string in _strings(tree)
                if len(_WORD.findall(string)) >= SCREEN_WORDS_MIN and " " in string
            ]
    for line, kind, part in found:
        for sentence in split(part):
            yield Sentence(name, line, kind, sentence)


def files() -> list[Path]:
    """The files whose prose is measured: the packages and every document."""
    found = [path for package in _PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found += [path for path in sorted(ROOT.rglob("*.md")) if not path.relative_to(ROOT).parts[0].startswith(".")]
    return [path for path in found if not path.relative_to(ROOT).as_posix().startswith(_GENERATED)]


def room_of(name: str) -> str:
    """The package of a file, or the document itself."""
    parts = name.split("/")
    if name.endswith(".md"):
        return name
    return "/".join(parts[:2]) if parts[0] == "kvbm_console" and len(parts) > 2 else parts[0]


def main() -> int:
    """Print the figures of every room, or with ``--list`` each offending sentence."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", help="files or folders; all of the project without them")
    parser.add_argument("--list", action="store_true", help="print each offending sentence")
    given = parser.parse_args()
    chosen = tuple(str(path).rstrip("/") for path in given.paths)
    sentences = [
        sentence for path in files() if not chosen or path.relative_to(ROOT).as_posix().startswith(chosen)
        for sentence in sentences_of(path)
    ]
    rooms: dict[str, list[Sentence]] = {}
    for sentence in sentences:
        rooms.setdefault(room_of(sentence.path), []).append(sentence)
        if given.list and (broken := sentence.broken()):
            print(f"{sentence.path}:{sentence.line}: {','.join(broken)}: {sentence.text}")
    for room, members in [*sorted(rooms.items()), ("all", sentences)]:
        counts = [sum(rule in member.broken() for member in members) for rule in ("opening", "length", "stops")]
        offending = sum(bool(member.broken()) for member in members)
        share = 100 * offending / max(len(members), 1)
        print(f"{room:34} {len(members):6} sentences {offending:5} offend {share:5.1f} %   "
              f"opening {counts[0]:4}  length {counts[1]:4}  stops {counts[2]:4}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
