"""The house rules that a machine can check: layers, light imports, the shape of files, fresh documents, doctests."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import json_table
from tests.architecture.generate import DOCUMENT, regenerated

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("kvbm_console", "server", "tui")
GENERATED = "kvbm_console/wire/v1/"
FUNCTION_LINES_MAX = 60
LONG_FUNCTIONS = {
    "_describe": "the cold match over all kinds of events",
    "make_report": "a line for each key of the report",
}


def sources() -> list[Path]:
    """Every module that we wrote."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found += sorted((ROOT / "tests").rglob("*.py"))
    return [path for path in found if GENERATED not in path.as_posix()]


def loaded_by(statement: str) -> set[str]:
    """Modules in ``sys.modules`` after this statement, in a process of its own."""
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stdout.split())


def test_layers_are_kept() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"], capture_output=True, text=True, cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import kvbm_console", {"msgspec", "pathlib", "kvbm_console.core", "pyarrow", "click"}),
        ("import kvbm_console.core.leader", {"anyio", "asyncio", "grpc", "google.protobuf", "textual", "rich"}),
        ("import kvbm_console.core.describe", {"anyio", "asyncio", "grpc", "google.protobuf", "textual", "rich"}),
        ("import server.daemon", {"textual", "rich"}),
        ("import kvbm_console.cli.main", {"grpc", "textual", "google.protobuf", "anyio"}),
        ("import kvbm_console.recording.reader", {"grpc", "textual"}),
        ("import tui.app", {"grpc", "mcap", "numpy", "kvbm_console.core.leader", "kvbm_console.recording.reader"}),
    ],
)
def test_imports_stay_light(statement: str, forbidden: set[str]) -> None:
    assert not loaded_by(statement) & forbidden


def test_all_commands_stay_light_in_help() -> None:
    """Listing every command imports all their modules, and still nothing heavy."""
    statement = (
        "import kvbm_console.cli.main as m; ctx = m.click.Context(m.cli); "
        "[m.cli.get_command(ctx, name) for name in m.cli.list_commands(ctx)]"
    )
    assert not loaded_by(statement) & {"grpc", "textual", "google.protobuf"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_file_has_the_house_shape(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.name == "__init__.py" and not text.strip():
        return
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "opens with a docstring: what it is for, and its one law"
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.end_lineno is not None and node.name not in LONG_FUNCTIONS:
            assert node.end_lineno - node.lineno < FUNCTION_LINES_MAX, f"{node.name} is too long"


def test_a_public_class_name_exists_once() -> None:
    places: dict[str, list[str]] = {}
    for path in sources():
        if path.relative_to(ROOT).parts[0] != "tests":
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_the_errors_of_unreadable_bytes_are_listed_once() -> None:
    wanted = {"DecodeError", "UnicodeDecodeError", "RecursionError"}
    places = [
        path.relative_to(ROOT).as_posix() for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Tuple)
        and wanted <= {getattr(each, "attr", getattr(each, "id", "")) for each in node.elts}
    ]
    assert places == ["kvbm_console/core/unreadable.py"]


def core_modules() -> list[str]:
    """Every module of the core, and of the command line's formatting, where examples are run."""
    names = [
        "kvbm_console.cli.output", "kvbm_console.stream.document", "kvbm_console.analysis.lints.lint",
        "kvbm_console.analysis.export.pictures", "kvbm_console.recording.format",
    ]
    core = importlib.import_module("kvbm_console.core")
    names += [module.name for module in pkgutil.walk_packages(core.__path__, "kvbm_console.core.")]
    return names


@pytest.mark.parametrize("name", core_modules())
def test_examples_in_docstrings_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_the_core_has_examples() -> None:
    finder = doctest.DocTestFinder()
    found = [test for name in core_modules() for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) >= 8


def test_the_generated_documents_are_fresh() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == regenerated(text), "docs/kinds.md is stale: run make docs"
    assert json_table.FILE.read_text(encoding="utf-8") == json_table.text(), "JSON.md is stale: run make docs"


def test_the_table_of_invariants_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if re.match(r"\| I\d+ \|", line)]
    assert [line.split("|")[1].strip() for line in table] == [f"I{number}" for number in range(1, 18)]
    for line in table:
        evidence = re.findall(r"`(tests/[^`]+)`", line.split("|")[4])
        assert len(evidence) >= 2, line
        assert all((ROOT / path).is_file() for path in evidence), line
