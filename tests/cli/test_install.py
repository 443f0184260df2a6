"""The installation commands that documents and messages give are true today: the project is not on PyPI.

Law of this file: each ``pip install`` of the project names a clone or an address of a repository, and an extra that
exists; the long test runs pip on both forms.
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import pytest

import kvbm_console
from kvbm_console.extras import install_line
from tests.cli.programs import DEADLINE_S, PROGRAM, environment

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Final = set(PROJECT["optional-dependencies"])
TRUE: Final = re.compile(r"\.(?:\[([a-z]+)\])?|kvbm-console(?:\[([a-z]+)\])? @ git\+(?:ADDRESS|https://\S+)")
"""A clone or a Git address, each with at most one extra."""
TAP: Final = ROOT / "kvbm_console" / "tap"
TAP_TRUE: Final = ("./kvbm_console/tap", "./kvbm_console/tap[sanitize]",
                   "kvbm-console-tap @ git+ADDRESS#subdirectory=kvbm_console/tap")
"""The distribution for environments of engines."""
MISSING: Final = {
    "web": ("textual_serve", ("attach", "--serve-web")), "plot": ("matplotlib", ("compare", "--plot", "x.svg")),
    "parquet": ("pyarrow", ("rec", "export", "RECORDING", "--to", "parquet", "--out", "x")),
    "perfetto": ("perfetto.protos.perfetto.trace.perfetto_trace_pb2",
                 ("rec", "export", "RECORDING", "--to", "perfetto", "--out", "x")),
    "engines": ("zmq", ("rec", "capture", "zmq://127.0.0.1:1", "--out", "x")),
    "lake": ("pyarrow", ("lake", "add", "RECORDING", "--lake", "x")),
    "mcp": ("mcp.server", ("mcp", "RECORDING")),
    "otlp": ("opentelemetry.exporter.otlp.proto.http", ("serve", "--otlp", "http://127.0.0.1:1")),
    "nats": ("nats", ("fleet", "nats://127.0.0.1:1", "--once")),
}
"""Extra to its library and a command that needs the library."""


def places() -> list[Path]:
    """Documents and sources in which a person may read an installation command."""
    documents = [path for path in ROOT.glob("**/*.md") if not path.relative_to(ROOT).parts[0].startswith(".")]
    return [*documents, *(ROOT / "kvbm_console").rglob("*.py"), *(ROOT / "server").rglob("*.py"),
            *(ROOT / "tui").rglob("*.py")]


def commands(text: str) -> list[str]:
    """What ``pip install`` is given, in each place of a text that names the project or a directory."""
    found = re.findall(r"pip install (?:-e |--no-deps )?(?:'([^']+)'|([^\s`'\"]+))", text)
    return [quoted or plain for quoted, plain in found]


def test_every_installation_command_is_true() -> None:
    told = {}
    for path in places():
        for command in commands(path.read_text(encoding="utf-8").replace("{extra}", "web")):
            told[path.relative_to(ROOT)] = command
            if command in TAP_TRUE:
                continue
            match = TRUE.fullmatch(command)
            assert match, f"{path}: pip install {command!r} does not work: the project is not on PyPI"
            assert {match[1], match[2]} - {None} <= EXTRAS, f"{path}: {command!r} names no extra of the project"
    assert {Path("README.md"), Path("recordings/ASKING.md"), Path("kvbm_console/extras.py")} <= told.keys()


def test_the_readme_names_every_extra() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for extra in EXTRAS - {"dev"}:
        assert f"`{extra}`" in text, extra


def test_every_extra_has_a_command_that_tells_how_to_install_it() -> None:
    assert MISSING.keys() == EXTRAS - {"dev"}


@pytest.mark.parametrize("extra", MISSING)
def test_a_missing_library_is_one_sentence_with_commands_that_work(extra: str, tmp_path: Path) -> None:
    library, words = MISSING[extra]
    recording = str(ROOT / "recordings" / "gap.mcap")
    arguments = [recording if word == "RECORDING" else word for word in words]
    if extra == "plot":
        arguments += ["--trace", "multiturn:requests=4,sessions=2", "--total-kv-blocks", "40"]
    hide = f"import sys; sys.modules[{library!r}] = None\n"
    if extra == "web":
        hide += "import kvbm_console.cli.ask as ask\nasync def known(target): pass\nask.check_target = known\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}from kvbm_console.cli.main import main; main()", *arguments], cwd=tmp_path,
        capture_output=True, text=True, timeout=DEADLINE_S, env=environment(tmp_path), check=False,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    assert install_line(extra) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def unpacked_tap(tmp_path: Path) -> Path:
    """The tap's wheel, built and unpacked."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--disable-pip-version-check",
         "--wheel-dir", tmp_path, TAP], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    ZipFile(wheel).extractall(tmp_path / "tap")
    return tmp_path / "tap"


def test_the_taps_distribution_needs_msgspec_alone_and_is_of_the_same_release(tmp_path: Path) -> None:
    """vLLM, SGLang and LMCache name ranges of protobuf that exclude each other, so the tap names none."""
    (found,) = Distribution.discover(path=[str(unpacked_tap(tmp_path))])
    needed = [one for one in found.requires or () if "extra ==" not in one]
    assert [re.split(r"[<>=;]", one)[0] for one in needed] == ["msgspec"]
    assert found.version == kvbm_console.__version__
    assert found.metadata["Requires-Python"] == ">=3.10"
    files = [one for one in found.files or () if one.suffix == ".py"]
    for file in files:
        ast.parse(file.read_text(), feature_version=(3, 10))
    assert {str(one.relative_to(ROOT)) for one in TAP.glob("*.py")} <= {str(one) for one in files}
    ours = PROJECT.get("entry-points", {}).get("vllm.general_plugins", {})
    theirs = tomllib.loads((TAP / "pyproject.toml").read_text())["project"].get("entry-points", {})
    assert theirs.get("vllm.general_plugins", {}) == ours, "both distributions install the same plugin"


def test_the_taps_distribution_has_every_module_that_its_modules_import(tmp_path: Path) -> None:
    place = unpacked_tap(tmp_path)
    lacking = set()
    for file in place.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvbm_console"):
                module = place.joinpath(*str(node.module).split("."))
                if not module.with_suffix(".py").exists() and not (module / "__init__.py").exists():
                    lacking.add((file.name, node.module))
    assert lacking == {("__init__.py", "kvbm_console.analysis.notebook")}, "only open() needs more, and says so"
    code = f"import sys; sys.path.insert(0, {str(place)!r}); import kvbm_console; kvbm_console.open('run')"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "kvbm-console-tap reads no recordings; install kvbm-console in its place" in done.stderr


@pytest.mark.slow
def test_pip_takes_both_forms(tmp_path: Path) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("needs git")
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    for package in ("kvbm_console", "server", "tui"):
        (clone / package).mkdir()
        shutil.copy(ROOT / package / "__init__.py", clone / package)
    shutil.copytree(ROOT / "recordings" / "cases", clone / "recordings" / "cases")
    as_author = ("-c", "user.name=author", "-c", "user.email=author@localhost")
    for words in (("init", "--quiet"), ("add", "."), (*as_author, "commit", "--quiet", "--message", "files")):
        subprocess.run([git, *words], cwd=clone, check=True)
    pip = [str(Path(PROGRAM).parent / "python"), "-m", "pip", "install", "--dry-run", "--no-deps",
           "--no-build-isolation", "--disable-pip-version-check"]
    for command in commands(install_line("engines")):
        given = command.replace("ADDRESS", f"file://localhost{clone}")
        done = subprocess.run([*pip, given], cwd=clone, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr
        assert "Would install kvbm-console" in done.stdout


def test_the_module_is_the_program(tmp_path: Path) -> None:
    """``python -m kvbm_console`` where the script is not on the path."""
    for program in ([PROGRAM], [sys.executable, "-m", "kvbm_console"]):
        said = subprocess.run([*program, "status", "unix:/nowhere"], capture_output=True, text=True, check=False,
                              env=environment(tmp_path), timeout=DEADLINE_S)
        assert (said.returncode, said.stderr.startswith("kvbm-console: ")) == (3, True), said
