"""The pictures of the README: drawn from a recording, never older than the code, and all of them shown.

Law of this file: what is committed is compared with what today's code draws, character by character.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from recordings.screens import make  # noqa: E402
from recordings.screens.film import film  # noqa: E402


@pytest.mark.timeout(600)  # 35 s of CPU: minutes beside others
def test_the_pictures_are_what_the_code_draws() -> None:
    assert make.stale() == [], "make screens draws them again"


def test_every_view_and_panel_is_there_in_every_look() -> None:
    views = {*make.VIEWS.values(), *make.MORE}
    for name, look in make.LOOKS.items():
        assert {path.stem for path in (make.HERE / name).glob("*.svg")} == set(look.views or views)
    for name in make.TEXTS:
        told = (make.HERE / f"{name}.txt").read_text(encoding="utf-8")
        assert set(re.findall(r"^=== (\w+) ===$", told, re.MULTILINE)) == views
        assert name.endswith("none") or told.isascii()


@pytest.mark.parametrize("path", sorted(make.HERE.rglob("*.svg")), ids=lambda path: str(path.relative_to(make.HERE)))
def test_every_picture_says_its_size(path: Path) -> None:
    head = path.read_text(encoding="utf-8").split(">", 1)[0]
    width, height = (re.findall(rf' {name}="([\d.]+)"', head) for name in ("width", "height"))
    assert re.findall(r' viewBox="([^"]*)"', head) == [f"0 0 {width[0]} {height[0]}"]
    assert float(width[0]) > 0 < float(height[0])


STYLE = """
body { margin: 0 }
.markdown-body { width: 838px; box-sizing: border-box; font-size: 16px; line-height: 1.5 }
.markdown-body img { max-width: 100%; box-sizing: content-box }
.markdown-body table { display: block; width: max-content; max-width: 100%; overflow: auto; border-spacing: 0 }
.markdown-body table th, .markdown-body table td { padding: 6px 13px; border: 1px solid #d1d9e0 }
"""
"""The rules of a forge's style sheet for documents that decide how wide a picture is."""
MEASURE = """
addEventListener("load", () => {
  const sizes = [...document.images].map(image => {
    const box = image.getBoundingClientRect();
    return [image.getAttribute("src"), image.complete, image.naturalWidth, image.naturalHeight, box.width, box.height];
  });
  const told = document.createElement("pre");
  told.id = "measured";
  told.textContent = JSON.stringify(sizes);
  document.body.append(told);
});
"""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def measured(body: str, folder: Path) -> list[Any]:
    """(source, loaded, own width, own height, width, height) of every picture of a document, in a browser."""
    page = folder / "page.html"
    page.write_text(
        f'<!doctype html><html><head><base href="{ROOT.as_uri()}/"><style>{STYLE}</style><script>{MEASURE}</script>'
        f'</head><body><article class="markdown-body">{body}</article></body></html>', encoding="utf-8")
    assert CHROMIUM is not None
    shown = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
         "--window-size=1280,1024", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout
    sizes: list[Any] = json.loads(shown.split('<pre id="measured">')[1].split("</pre>")[0])
    return sizes


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: pictures are not measured in a browser")
def test_every_picture_of_the_readme_has_the_width_of_the_page(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = measured(MarkdownIt("commonmark").enable("table").render(text), tmp_path)
    assert len(found) == len(list(make.HERE.glob("*.svg")))
    for source, loaded, own_width, own_height, width, height in found:
        assert loaded, source
        assert width == pytest.approx(838, abs=1), (source, width, height)
        assert height == pytest.approx(width * own_height / own_width, rel=0.01), source


def test_a_film_stays_in_its_window() -> None:
    text = (make.HERE / "film.svg").read_text(encoding="utf-8")
    width, height = (float(size) for size in re.findall(
        r'<clipPath id="window"><rect x="0" y="0" width="([\d.]+)" height="([\d.]+)" ?/></clipPath>', text)[0])
    whole = [float(size) for size in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0]]
    assert (width + 2 * 9 + 1, height + 41 + 9) <= (whole[0], whole[1] + 1)
    rows = text[text.index("</style>"):].split('<g transform="translate(9, 41)" clip-path="url(#window)">')
    assert len(rows) == 2
    assert 'class="s' not in rows[0], "no row is drawn outside of the window"


def test_every_picture_is_in_the_readme() -> None:
    shown = set(re.findall(r"\(recordings/screens/(\w+\.svg)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert shown == {path.name for path in make.HERE.glob("*.svg")}


def test_every_picture_of_the_documents_is_in_one() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    shown = set(re.findall(r"\(\.\./recordings/screens/(documents/\w+\.svg)\)", text))
    assert shown == set(make.DOCUMENTS) != set()


def frame(rows: list[str]) -> str:
    """A picture as the console exports it, with one text in each row."""
    text = "".join(
        f'<text class="film-r{len(row)}" x="0" y="{20 + 24.4 * y:.1f}" clip-path="url(#film-line-{y})">{row}</text>'
        for y, row in enumerate(rows) if row
    )
    styles = "".join(f".film-r{number} {{ fill: #{number}{number}{number} }}\n" for number in range(1, 6))
    return f'<svg><style>{styles}</style><defs></defs><g transform="translate(9, 41)">{text}</g></svg>'


def seen(moving: str, number: int, total: int) -> list[str]:
    """The texts that are visible during a frame."""
    rules = dict(re.findall(r"@keyframes (f\d+)\{(.*?)\}\.f", moving))
    texts = []
    for name, cells in re.findall(r'<g(?: class="(f\d+)")?>(<text.*?</text>)</g>', moving):
        steps = re.findall(r"([\d.]+)%\{visibility:(\w+)\}", rules.get(name, "0%{visibility:visible}"))
        now = [what for percent, what in steps if float(percent) <= 100 * (number + 0.5) / total]
        if now[-1] == "visible":
            texts.append(re.sub("<[^>]*>", "", cells))
    return texts


@pytest.mark.parametrize("frames", [
    [["a", "bb"], ["a", "ccc"], ["a", "bb"]], [["a"], ["b"], ["c"], ["a"]], [["a", "", "b"], ["", "a", "b"]],
])
def test_a_film_shows_every_frame_as_it_was(frames: list[list[str]]) -> None:
    moving = film([frame(rows) for rows in frames], 0.5)
    for number, rows in enumerate(frames):
        assert seen(moving, number, len(frames)) == [row for row in rows if row]
