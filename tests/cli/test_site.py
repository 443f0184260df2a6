"""The documentation site is built strictly from the project's own texts, and every command has its page and man page.

Law of this file: the site is built by the commands of ``make site``.
"""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from shutil import which

import pytest

from tests.cli.tree import leaves

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder with documents, man pages and the site."""
    place = tmp_path_factory.mktemp("site")
    kept = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    config = place / "mkdocs.yml"
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config.write_text(text.replace("build/docs", str(place / "docs")).replace("build/site", str(place / "site")))
    for command in ([sys.executable, "docs/site.py", str(place)],
                    [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(config)]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100, env=kept)
        assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_the_site_has_every_document_and_asks_no_other_host_for_fonts(built: Path) -> None:
    pages = {path.relative_to(built / "site").as_posix() for path in (built / "site").rglob("*.html")}
    documents = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]
    assert documents
    assert {path.with_suffix(".html").as_posix() for path in documents} <= pages
    assert "index.html" in pages
    assert "fonts.googleapis.com" not in (built / "site" / "index.html").read_text(encoding="utf-8")


def test_every_command_has_its_page_and_its_man_page(built: Path) -> None:
    page = (built / "docs" / "docs" / "commands.md").read_text(encoding="utf-8")
    shown = unescape((built / "site" / "docs" / "commands.html").read_text(encoding="utf-8"))
    for words, command in leaves().items():
        name = " ".join(("kvbm-console", *words))
        assert f"\n## {name}\n" in page
        manual = (built / "man" / f"{name.replace(' ', '-')}.1").read_text(encoding="utf-8").replace("\\-", "-")
        first = re.split(r"[.:;,]", (command.help or "").strip().splitlines()[0])[0]
        assert first in manual
        assert first.split("`")[0] in shown


def test_groff_takes_the_man_pages(built: Path) -> None:
    groff = which("groff")
    if groff is None:
        pytest.skip("needs groff")
    done = subprocess.run([groff, "-man", "-Tutf8", "-ww", "-z", *map(str, sorted((built / "man").glob("*.1")))],
                          capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "can't break line" not in line]) == (0, [])
