"""The application: puts the desk's rows on the terminal and carries keys, clicks and time to it.

Law of this file: a frame is at most one write, and 30 frames a second are the most. Drawing takes a fifth of a core at
most in the long run, and the next frame answers a key.
"""

import asyncio
import contextlib
import csv
import gc
import html
import os
import re
import signal
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import COLOR_SYSTEMS
from textual import events
from textual.app import App, ComposeResult
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver

from .canvas import Canvas
from .desk import OVERVIEW, Desk, View
from .draw.glyphs import ASCII, NO_PIXELS, UNICODE
from .draw.table import Table
from .keys import click, press
from .model.numbers import plural, shown
from .source import TargetSession
from .terminal import Terminal
from .theme import THEMES, Theme
from .tour import Tour
from .views import all_views

FRAME_S: Final = 1 / 30
"""Thirty frames a second at most: no eye needs more, and fewer look like stutter while a list scrolls."""
TICK_S: Final = 0.25
"""Ages tick four times a second when nothing else happens."""
SYNC_START: Final = "\x1b[?2026h"
SYNC_END: Final = "\x1b[?2026l"
"""Between these a terminal that knows them shows nothing, so that a frame appears as a whole."""
MONOCHROME: Final = ("vt100", "vt102", "vt220", "dumb")
MONOCHROME_ENDS: Final = ("-m", "-mono")
"""By term(7) a name with ``-m`` is the monochrome form of a terminal."""
POOR_FONTS: Final = (*MONOCHROME, "linux", "cons25")
"""Terminals whose fonts have 256 or 512 characters: the kernel's console draws a box for the rest."""
ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""Signals that end the console; as an exit status 128 and the number, as shells report it."""
SHARE: Final = 0.2
"""Share of a core for drawing. While frames have taken more, the next frame waits."""
SAVED_S: Final = 2 * SHARE * FRAME_S
"""Drawing time that can be saved up, because otherwise a frame a little above its share would cost the next frame its
place."""


class ConsoleApp(App[int]):
    """A console on one session or several."""

    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
    CSS = "Screen { layout: vertical; overflow: hidden; } Canvas { width: 100%; height: 100%; }"

    def __init__(
        self, session: TargetSession, *, theme: str = "dark", ascii_only: bool = False, read_only: bool = False,
        views: list[View] | None = None, more: Sequence[TargetSession] = (), utc: bool = False,
        tour: bool = False,
    ) -> None:
        """``tour`` explains the demo's incident on the first target."""
        self.look = Theme(theme)
        super().__init__(ansi_color=not self.look.rich)
        self.sessions = [session, *more]
        for each in self.sessions:
            if each.reel is not None:
                each.reel.bytes_max //= len(self.sessions)
        self.desks = [
            Desk(
                each.mirror, each, each.mono, views if views is not None and each is session else all_views(),
                glyphs=ASCII if ascii_only else NO_PIXELS if theme == "none" else UNICODE, read_only=read_only,
                socket=each.socket, wall=each.wall, utc=utc,
            ) for each in self.sessions
        ]
        if tour:
            self.desks[0].tour = Tour()
        self.shown = 0
        self.canvas = Canvas(self.look, ascii_only=ascii_only)
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched: list[int] = []
        self._before_cont: Any = None
        self._drawn_version = -1
        self._drawn_at = 0.0
        self._left = SAVED_S
        """Seconds of drawing that may be spent now."""
        self._asked_at = 0.0
        self._dirty = True
        self.frames = 0

    def compose(self) -> ComposeResult:
        """Show the canvas alone."""
        yield self.canvas

    def get_driver_class(self) -> type[Driver]:
        """``Terminal`` in place of Textual's terminal driver; other drivers stay."""
        found = super().get_driver_class()
        return Terminal if found is LinuxDriver else found

    def on_mount(self) -> None:
        """Start the feed and the frame clock."""
        self.screen.styles.background = self.look.background or "ansi_default"
        self.canvas.send = self._send
        self.canvas.colours = COLOR_SYSTEMS.get(self.console.color_system or "")
        for session, desk in zip(self.sessions, self.desks, strict=True):
            session.attach(
                self._spawn, desk.tell, self._leave, self.copy_to_clipboard, self._export, self._show_target)
            self._spawn(session.run(), "feed")
        self.set_interval(FRAME_S, self.frame)
        self._watch_signals()
        self.frame()

    def _watch_signals(self) -> None:
        """End in order when told to: an unhandled signal would leave the terminal as it is."""
        loop = asyncio.get_running_loop()
        for number in ENDING:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self.exit, 128 + number, 128 + number)
                self._watched.append(number)
        with contextlib.suppress(AttributeError, ValueError):
            before = self._before_cont = signal.getsignal(signal.SIGCONT)

            def resumed(number: int, frame: FrameType | None) -> None:
                if callable(before):
                    before(number, frame)  # the terminal is ours again
                loop.call_soon_threadsafe(self._repaint)

            signal.signal(signal.SIGCONT, resumed)

    def _repaint(self) -> None:
        """Draw everything again, because another program had the terminal."""
        self.screen.refresh(layout=True)
        self.canvas.refresh()
        self._dirty = True

    @property
    def session(self) -> TargetSession:
        """The session of the target that is shown."""
        return self.sessions[self.shown]

    @property
    def desk(self) -> Desk:
        """The desk of the target that is shown."""
        return self.desks[self.shown]

    def _show_target(self, number: int) -> None:
        """Show another target; each keeps its views, selections and filters."""
        if 0 <= number < len(self.sessions):
            self.shown = number
            self._dirty = True

    def _name_targets(self) -> None:
        """Tell the desk the names of all targets, as they are known now."""
        if len(self.sessions) > 1:
            self.desk.target = self.shown
            self.desk.targets = [
                each.mirror.connected.target if each.mirror.connected is not None else each.socket
                for each in self.sessions
            ]

    def _leave(self) -> None:
        """Leave; holds of this session resume, and the terminal says so."""
        held = sum(
            len(desk.live.mirror.state.holds) for desk in self.desks
            if desk.live.mirror.state is not None and desk.live.control and not desk.read_only)
        self.exit(0, message=f"{held} held: those that this console holds resume now" if held else None)

    def export_screenshot(self, *, title: str | None = None, simplify: bool = False) -> str:
        """The screen as SVG, drawn alike by every program."""
        return sturdy(super().export_screenshot(title=title, simplify=simplify))

    def _export(self, name: str, table: Table | None, picture: str | None = None) -> None:
        """The screen as ``name.txt`` and ``name.svg`` in the working directory, its list as ``name.csv``.

        ``picture`` takes the place of the screen's SVG.
        """
        text = shown("\n".join(line.text.rstrip() for line in self.canvas.lines))
        try:
            Path(f"{name}.txt").write_text(text + "\n", encoding="utf-8")
            Path(f"{name}.svg").write_text(shown(picture or self.export_screenshot(title=name)), encoding="utf-8")
            if table is not None:
                with Path(f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                    csv.writer(file).writerows([[shown(cell) for cell in row] for row in (table[0], *table[1])])
        except OSError as error:
            self.desk.tell(f"not written: {error.strerror or error}", "fault")
            return
        rows = f", .csv with {plural(len(table[1]), 'row')}" if table is not None else ""
        self.desk.tell(f"written: {name}.txt, .svg{rows}")

    def _spawn(self, work: Awaitable[None], name: str) -> None:
        async def run() -> None:
            await work

        task = asyncio.get_running_loop().create_task(run(), name=f"console {name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            try:
                raise error  # Textual draws the traceback of the exception that is being handled
            except Exception as fault:
                self._handle_exception(fault)
        self._dirty = True

    async def on_unmount(self) -> None:
        """End all tasks: the feed closes its connection."""
        if self._before_cont is not None:
            signal.signal(signal.SIGCONT, self._before_cont)
        for number in self._watched:
            asyncio.get_running_loop().remove_signal_handler(number)
        self._watched.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- drawing -----------------------------------------------------------------------------------------------------

    def frame(self) -> None:
        """Draw when there is something new, within the budget, and the terminal has taken the frames before."""
        if isinstance(self._driver, Terminal) and self._driver.behind:
            return
        now = time.perf_counter()
        self._left = min(SAVED_S, self._left + (now - self._asked_at) * SHARE)
        self._asked_at = now
        due = self._dirty or now - self._drawn_at >= TICK_S or (
            self.desk.mirror.version != self._drawn_version and self._left > 0
        )
        if due:
            self.draw()

    def draw(self) -> None:
        """Draw the whole frame; only changed rows go to the terminal."""
        started = time.thread_time()
        self._dirty = False
        self._drawn_version = self.desk.mirror.version
        width, height = self.size
        self._name_targets()
        if width > 0 and height > 0:
            self.canvas.draw(self.desk.draw(width, height), width)
            self.frames += 1
        self._drawn_at = time.perf_counter()
        self._left -= time.thread_time() - started

    def _send(self, text: str) -> bool:
        """Write to the terminal at once; False when there is none, or when more than the canvas is on the screen."""
        driver = self._driver
        if driver is None or self.is_headless or not self._running or self._closed:
            return False
        if self._batch_count or len(self.screen_stack) > 1:
            return False
        driver.write(f"{SYNC_START}{text}{SYNC_END}" if self._sync_available else text)
        driver.flush()
        return True

    def on_resize(self, event: events.Resize) -> None:
        """The terminal has another size."""
        self._dirty = True
        self.call_after_refresh(self.frame)

    # --- input -------------------------------------------------------------------------------------------------------

    async def on_event(self, event: events.Event) -> None:
        """Keys go to the desk before any binding of Textual's own."""
        if isinstance(event, events.Key) and not event.is_forwarded:
            if event.key == "ctrl+z":
                self.action_suspend_process()
                return
            press(self.desk, key_name(event))
            self.draw()
            return
        await super().on_event(event)

    def on_click(self, event: events.Click) -> None:
        """A click on a row."""
        if event.y < len(self.canvas.lines):
            click(self.desk, event.x, self.canvas.lines[event.y])
            self.draw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """The wheel moves like the arrow keys."""
        self._wheel("up")

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """The wheel moves like the arrow keys."""
        self._wheel("down")

    def _wheel(self, key: str) -> None:
        if self.desk.prompt is None:
            for _ in range(3):
                self.desk.press(key)
            self.draw()


def key_name(event: events.Key) -> str:
    """The character of a printable key, else its name; ``space`` keeps its name."""
    if event.key == "space":
        return "space"
    if event.character is not None and event.is_printable:
        return event.character
    return event.key


def choose_theme(theme: str | None, no_color: bool, environment: dict[str, str] | None = None) -> str:
    """The theme to use: as asked, without colour when that is asked for or the terminal has none, 16 colours where it
    has no more."""
    environment = dict(os.environ) if environment is None else environment
    if no_color or environment.get("NO_COLOR"):
        return "none"
    if theme in THEMES:
        return theme
    terminal = environment.get("TERM", "")
    if environment.get("COLORTERM", "") in ("truecolor", "24bit") or "256" in terminal or not terminal:
        return "dark"
    return "none" if terminal in MONOCHROME or terminal.endswith(MONOCHROME_ENDS) else "ansi"


def choose_ascii(ascii_only: bool, environment: dict[str, str] | None = None) -> bool:
    """True to draw in ASCII: as asked, and where the terminal's own font has no block elements and shapes."""
    environment = dict(os.environ) if environment is None else environment
    return ascii_only or environment.get("TERM", "") in POOR_FONTS


def run_console(
    session: TargetSession, *, theme: str | None = None, ascii: bool = False, no_color: bool = False,
    read_only: bool = False, more: Sequence[TargetSession] = (), utc: bool = False, view: int = OVERVIEW,
    request: str | None = None,
) -> int:
    """Run the console, which begins at ``view`` with this request selected, until it is left; returns the exit status.
    The terminal is restored whatever happens."""
    app = ConsoleApp(
        session, theme=choose_theme(theme, no_color), ascii_only=choose_ascii(ascii), read_only=read_only,
        more=more, utc=utc,
    )
    app.desk.current = view
    app.desk.select(request)
    gc.freeze()  # loaded modules stay, so no collection needs to walk them again
    result = app.run()
    return result if result is not None else (app.return_code or 0)


_PIECE: Final = re.compile(
    r'<text class="(?P<kind>[^"]*)" x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)" textLength="(?P<length>[\d.]+)" '
    r'clip-path="(?P<clip>[^"]*)">(?P<text>[^<]*)</text>'
)
_ROOT: Final = re.compile(r'(<svg\b(?![^>]* width=)[^>]*?) viewBox="0 0 (?P<width>[\d.]+) (?P<height>[\d.]+)"')
_SPACES: Final = " \u00a0"


def sturdy(svg: str) -> str:
    """The same picture with its size; pieces of nothing but spaces are left out."""
    sized = _ROOT.sub(r'\1 width="\g<width>" height="\g<height>" viewBox="0 0 \g<width> \g<height>"', svg, count=1)
    return _PIECE.sub(_trimmed, sized)


def _trimmed(piece: re.Match[str]) -> str:
    text = html.unescape(piece["text"])
    kept = text.strip(_SPACES)
    if not kept:
        return ""
    if len(kept) == len(text):
        return piece[0]
    cell = float(piece["length"]) / len(text)
    x = float(piece["x"]) + cell * (len(text) - len(text.lstrip(_SPACES)))
    told = html.escape(kept).replace(" ", "&#160;").replace("\u00a0", "&#160;")
    return (
        f'<text class="{piece["kind"]}" x="{x:.1f}" y="{piece["y"]}" textLength="{cell * len(kept):.1f}" '
        f'clip-path="{piece["clip"]}">{told}</text>'
    )
