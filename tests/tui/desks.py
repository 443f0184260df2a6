"""Desks on folded scripts, with actions and a transport that remember what was asked.

Law of this file: no terminal and no clock of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvbm_console.core.state import CacheState
from kvbm_console.planning.what_if import Counterfactual
from kvbm_console.stream.feed import FeedItem
from kvbm_console.stream.verbs import Verb
from tests.tui.script import Mono, S, Script, opening, story
from tui.desk import Desk
from tui.draw.glyphs import ASCII, UNICODE
from tui.keys import press
from tui.model.mirror import Mirror
from tui.model.places import TapeHits
from tui.model.seeks import TapeIndex
from tui.source import Kept
from tui.views import all_views


class FakeTape:
    """The recording as ``Transport`` remembers it."""

    gaps = ()

    def state_at(self, seq: int) -> CacheState:
        raise NotImplementedError

    def events(self, first_seq: int | None = None) -> "list[list[object]]":
        raise NotImplementedError


class FakeTransport:
    """A transport that remembers what was asked."""

    def __init__(self) -> None:
        self.position_seq, self.first_seq, self.last_seq, self.at_ns = 50, 0, 100, 7 * S
        self.playing, self.speed = False, 1.0
        self.calls: list[tuple[object, ...]] = []
        self.recording = FakeTape()

    def toggle(self) -> None:
        self.playing = not self.playing

    def set_speed(self, speed: float) -> None:
        self.speed = speed

    def step(self, n: int = 1) -> None:
        self.calls.append(("step", n))

    def seek(self, seq: int) -> None:
        self.calls.append(("seek", seq))

    def seq_of(self, place: str, *, utc: bool = False) -> int:
        self.calls.append(("seq_of", place))
        return int(place)

    def density(self, cells: int) -> list[int]:
        return [1] * cells


class FakeActions:
    """A session that remembers the questions of the desk."""

    def __init__(self, playback: FakeTransport | None = None) -> None:
        self.paused = self.overflowed = False
        self.buffered = 0
        self.playback = playback
        self.control = True
        self.hits = TapeHits()
        self.explained = None
        self.kept: Kept | None = None
        self.unexplained = ""
        self.spared: Counterfactual | None = None
        self.spared_text = ""
        self.replays = False
        self.calls: list[Verb[Any] | tuple[object, ...]] = []
        """Verbs, and other methods by name with their arguments."""
        self.recorder_asked = 0
        self.past = self.reel = None
        self.index = TapeIndex()

    def pause(self, paused: bool) -> None:
        self.paused = paused

    def ask(self, verb: Verb[Any]) -> None:
        self.calls.append(verb)

    def ask_recorder(self) -> None:
        """Asked with every frame of view 8: it changes nothing, so it is counted and not told."""
        self.recorder_asked += 1

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((name, *arguments))


def desk_of(
    script: Script | None = None, *, mono: Mono | None = None, items: Sequence[FeedItem] | None = None,
    late_ns: int = 3 * S, actions: FakeActions | None = None, ascii_only: bool = False, read_only: bool = False,
) -> Desk:
    """A desk on a folded script, after lints have had their two seconds."""
    mono = mono or Mono()
    mirror = Mirror()
    for item in items if items is not None else opening(script or story()):
        mirror.take(item, mono.at_ns)
    desk = Desk(mirror, actions or FakeActions(), mono, all_views(),  # type: ignore[arg-type]
                glyphs=ASCII if ascii_only else UNICODE, read_only=read_only)
    desk.draw(80, 24)
    for _ in range(3 if late_ns else 0):
        mono.at_ns += late_ns // 3
        if script is not None or items is None:
            mirror.take((script or story()).heartbeat(), mono.at_ns)
        desk.draw(80, 24)
    return desk


def screen(desk: Desk, width: int = 80, height: int = 24) -> list[str]:
    return [line.text.rstrip() for line in desk.draw(width, height)]


def everything(desk: Desk, width: int = 80, height: int = 24) -> str:
    return "\n".join(screen(desk, width, height))


def run_command(desk: Desk, text: str) -> None:
    """Type a command into the palette, and enter."""
    for key in (":", *text.replace(" ", "\0"), "enter"):
        press(desk, "space" if key == "\0" else key)
