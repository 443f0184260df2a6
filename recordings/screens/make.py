"""Draws the pictures of this directory from ``run.mcap``: ``make screens``.

Each main view in several looks, a picture of an event stream, three pictures for the README, and a film of twenty
seconds of the demo's incident: a request that never ends is found, explained, and the next one is held; then the prefix
map. Film and README run the machine itself, in virtual time.
``--record`` makes the run itself again first; ``--check`` writes nothing and names the pictures that today's code would
draw otherwise.

Law of this file: nothing depends on the wall's clock, so that the same code draws the same pictures.
"""

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
from textual.geometry import Region

from recordings.screens.film import film
from recordings.screens.stage import Stage
from recordings.screens.tape import SECOND, Tape, record
from tui.app import ConsoleApp
from tui.source import TargetSession

HERE: Final = Path(__file__).resolve().parent
SIZE: Final = (120, 40)
SHOWN_NS: Final = 12 * SECOND + SECOND // 2
"""When the pictures are taken: three seconds into the hold."""
VIEWS: Final = {
    "1": "console", "2": "slots", "3": "slot", "4": "timeline", "5": "transfers", "6": "tiers", "7": "breakpoints",
    "8": "record", "9": "log", "p": "prefixes", "M": "misses", "exclamation_mark": "warnings",
}
"""Key to the name of the picture."""
MORE: Final = {"why": ("2", "down", "w"), "help": ("escape", "1", "question_mark")}
"""Further panels and the keys that lead there, in the sets that a test compares."""


class Look(msgspec.Struct, frozen=True):
    """How a set of pictures looks; ``views`` names some of them, empty is all."""

    size: tuple[int, int]
    theme: str = "dark"
    ascii_only: bool = False
    views: tuple[str, ...] = ()


FEW: Final = ("console", "slots", "timeline", "tiers")
LOOKS: Final = {
    "80x24": Look((80, 24)), "80x24-light": Look((80, 24), "light"), "120x40-light": Look((120, 40), "light"),
    "80x24-ansi": Look((80, 24), "ansi", views=FEW), "200x60": Look((200, 60)),
}
"""Further sets of pictures, which a test compares: a folder each."""
TEXTS: Final = {
    f"{width}x{height}-{name}": Look((width, height), "none", name == "ascii")
    for width, height in ((80, 24), (120, 40)) for name in ("none", "ascii")
}
"""Sets that are kept as text with their emphasis: a picture without colour says no more than these, in a tenth of the
room. A file each, all views in it."""
FILM_SIZE: Final = (100, 30)
FRAME_S: Final = 0.8
"""How long a frame of the film stays: long enough to read what changed."""
FILM: Final[tuple[tuple[float, str], ...]] = (
    (14.0, ""), (16.0, ""), (18.0, ""), (19.0, ""),  # NEEDS YOU names a slow copy
    (19.5, "enter"), (20.5, ""),  # it is this one
    (21.0, "enter"), (22.0, ""), (23.0, ""), (24.0, ""),  # its request, and the rank that it waits for
    (24.5, "b"), (25.0, "ctrl+u t o space o n b o a r d i n g"), (25.5, "enter"), (26.0, ""),  # the next one is to stop
    (27.0, "H"), (28.0, ""), (29.0, ""), (30.0, "c"), (31.0, ""),  # held, looked at, let go
    (31.5, "p"), (34.0, ""), (37.0, ""), (40.0, ""), (43.0, ""),  # the prefix map
    (43.5, "1"),
)
"""The film: the second of the incident, and the keys that are pressed then."""
README: Final = {"console.svg": (46.0, "1"), "timeline.svg": (47.0, "4"), "prefixes.svg": (48.0, "p")}
"""The pictures of the README: the second of the incident, and the key of the view."""
STREAM: Final = Path(__file__).resolve().parent / "stream.mcap"
"""A minute of vLLM 0.33's own server, with a stand-in for the device that takes 60 ms a step. ``serve --engine
http://HOST:PORT --record DIR`` followed its events and its metrics."""
STREAM_NS: Final = 56 * SECOND
STREAM_SIZE: Final = (112, 19)
DOCUMENTS: Final = {"documents/stream.svg": "6"}
"""The pictures of ``docs``: of ``stream.mcap``, and the key of the view."""
_NAMES: Final = re.compile(r"terminal-\d+")
"""Names of elements, different in every process."""
_FONTS: Final = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""Fonts from elsewhere: a picture in a document may not load them, and should not."""


def picture(app: ConsoleApp, name: str) -> str:
    """The screen as a picture."""
    return _FONTS.sub("", _NAMES.sub(name, app.export_screenshot(title="kvbm-console")))


class Still(ConsoleApp):
    """A console that draws when it is told to, and never by the wall's clock."""

    def frame(self) -> None:
        """Nothing: ``draw`` is called."""


async def shown(look: Look, take: Callable[[ConsoleApp, str], str], *, more: bool) -> dict[str, str]:
    """Name to what ``take`` makes of the view in one look; ``more`` with the further panels."""
    tape, made = Tape(), {}
    session = TargetSession(
        tape, None, socket="unix:kvbm-console.sock", mono=tape.mono, wall=tape.wall, explain=tape.explain)
    app = Still(session, theme=look.theme, ascii_only=look.ascii_only, utc=True)
    async with app.run_test(size=look.size) as pilot:
        at = 0
        while at < SHOWN_NS:  # drawn all along, as lints look at what is drawn
            at += SECOND // 4
            await tape.until(at)
            app.draw()
        ways = {name: (key,) for key, name in VIEWS.items()} | (MORE if more else {})
        for name, keys in ways.items():
            if look.views and name not in look.views:
                continue
            await pilot.press(*keys)
            await pilot.pause()  # what a key began in a task ends
            app.draw()
            await pilot.pause()
            made[name] = take(app, name)
    return made


async def streamed(key: str, name: str) -> str:
    """A picture of the console that followed an event stream."""
    tape = Tape(STREAM, "gpu7:5557", STREAM_NS)
    session = TargetSession(
        tape, None, socket="unix:kvbm-console.sock", mono=tape.mono, wall=tape.wall, explain=tape.explain)
    app = Still(session, utc=True)
    async with app.run_test(size=STREAM_SIZE) as pilot:
        for at in range(SECOND, STREAM_NS, SECOND):
            await tape.until(at)
            app.draw()
        await pilot.press(key)
        app.draw()
        await pilot.pause()
        return picture(app, name)


async def pictures(look: Look, folder: str = "") -> dict[str, str]:
    """File name to content: the views in one look."""
    found = await shown(look, picture, more=bool(folder))
    return {f"{folder}{name}.svg": content for name, content in found.items()}


def text_of(app: ConsoleApp, name: str) -> str:
    """The screen without colour: each row, and below it what is bold (b) and reversed (r)."""
    rows = [f"=== {name} ==="]
    for strip in app.canvas.render_lines(Region(0, 0, *app.size)):
        marks = "".join(
            ("r" if segment.style is not None and segment.style.reverse else
             "b" if segment.style is not None and segment.style.bold else " ") * segment.cell_length
            for segment in strip
        )
        rows.append(f"  {strip.text.rstrip()}".rstrip())
        if marks.strip():
            rows.append(f"~ {marks.rstrip()}")
    return "\n".join(rows) + "\n"


async def texts(look: Look) -> str:
    """All views of one look in one file."""
    return "".join((await shown(look, text_of, more=True)).values())


async def played(script: Sequence[tuple[float, str]], size: tuple[int, int], name: str) -> list[str]:
    """A picture after each key of a script, on the demo's incident."""
    stage, frames = Stage("incident"), []
    session = TargetSession(
        stage, stage, socket="unix:demo.sock", mono=stage.mono, wall=stage.wall, explain=stage.explain)
    app = Still(session, theme="dark", utc=True)
    async with app.run_test(size=size) as pilot:
        at = 0
        for second, key in script:
            while at < second * SECOND:
                at = min(at + SECOND // 4, int(second * SECOND))
                await stage.until(at)
                app.draw()
            if key:
                await pilot.press(*key.split())
                await pilot.pause()  # what a key began in a task ends
            app.draw()
            await pilot.pause()
            frames.append(picture(app, name))
    return frames


def draw() -> dict[str, str]:
    """File name to content of everything here."""
    made = dict(zip(README, asyncio.run(played(tuple(README.values()), SIZE, "view")), strict=True))
    made |= {name: asyncio.run(streamed(key, "stream")) for name, key in DOCUMENTS.items()}
    for folder, look in LOOKS.items():
        made |= asyncio.run(pictures(look, f"{folder}/"))
    for name, look in TEXTS.items():
        made[f"{name}.txt"] = asyncio.run(texts(look))
    return {**made, "film.svg": film(asyncio.run(played(FILM, FILM_SIZE, "film")), FRAME_S)}


def stale() -> list[str]:
    """The pictures that today's code draws otherwise."""
    made = draw()
    kept = {path.relative_to(HERE).as_posix() for kind in ("*.svg", "*.txt") for path in HERE.rglob(kind)}
    return sorted({name for name, text in made.items() if not (HERE / name).exists()
                   or (HERE / name).read_text(encoding="utf-8") != text} | (kept - set(made)))


def main(arguments: list[str]) -> int:
    """Draw, or check."""
    if "--record" in arguments:
        record()
    if "--check" in arguments:
        old = stale()
        print("\n".join(f"{name} is stale: make screens" for name in old), file=sys.stderr, end="\n" if old else "")
        return 1 if old else 0
    for name, text in draw().items():
        (HERE / name).parent.mkdir(exist_ok=True)
        (HERE / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
