"""Hostile names, and the monitor of everything that a person's tools would show of a daemon that was told them.

``r40`` names requests, engines, pools and breakpoints so that a terminal that prints them raw obeys: it is retitled,
cleared, written over, turned from right to left, or given a forged line. The wire takes any text that UTF-8 can write,
so no unpaired surrogate gets as far as a daemon.

The tools' own functions are asked, with the simulated facts: the lines of ``status`` and ``tail``, their JSON, the page
of metrics, each view of the console up to the row that its canvas sends, and at last the exports of recordings.

Law of this file: it takes no simulated time and no dice of others.
"""

import contextlib
import io
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvbm_console.analysis import export
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.cli.output import print_json, print_lines
from kvbm_console.cli.status import render
from kvbm_console.cli.tail import Printer
from kvbm_console.core.events import Event
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.document import event_document
from kvbm_console.stream.feed import Connected, EventsArrived, SnapshotTaken
from tests.sim.scrapers import page_troubles
from tui.canvas import Canvas
from tui.desk import Desk
from tui.draw.frame import NAMES
from tui.model.mirror import Mirror
from tui.source import TargetSession
from tui.theme import Theme
from tui.views import all_views

if TYPE_CHECKING:
    from tests.sim.machine import Life
    from tests.sim.run import Simulation

PIECES: Final = (
    "\x1b]0;PWNED\x07", "\x1b[2J", "\x9b2J", "\u202egnp\u2066", "\nFORGED ", "\r", "\0", "\x7f\x08", "\u200b", "\x85",
    "\u2028", "\U000e0001",
    '"', "\\", "{", "}", "\\n", "%s", "{0}", "日本", "e\u0301", "=cmd|' /C calc'!A0", "</script>",
    "[bold]", ",a=b", "#",
)
LOOK_S: Final = 2.0
"""A look takes a tenth of a second of the processor, and the names of a run are few."""
EVENTS_MAX: Final = 60
"""Events that a look prints."""
SCREENS: Final = ((80, 24), (160, 50))
_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")
"""The codes that a canvas itself sends."""


class Names:
    """The names that clients give. They are plain until ``hostile`` is set; ``plain`` stays a part of each."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(f"{seed} names")
        self.hostile = False

    def of(self, plain: str, most: int = 256, *, kept: float = 0.0, printable: float = 0.0) -> str:
        """A name of at most so many bytes; with these shares the plain one, or one that may be printed."""
        if not self.hostile or self.dice.random() < kept:
            return plain
        only_printable = self.dice.random() < printable
        pieces = [piece for piece in PIECES if piece.isprintable() or not only_printable]
        drawn = self.dice.sample(pieces, self.dice.randrange(1, 6))
        if self.dice.random() < 0.1:
            drawn += [self.dice.choice(pieces)] * most
        name = plain
        for piece in drawn:
            longer = name + piece if self.dice.random() < 0.7 else piece + name
            if len(longer.encode()) <= most:
                name = longer
        return name


class ShownLaws:
    """Of one simulation. ``violated`` gets a sentence for each character that a terminal would obey."""

    def __init__(self, simulation: "Simulation", violated: Callable[[str, str], None]) -> None:
        self.simulation, self.world = simulation, simulation.world
        self._violated = violated
        self._looked_s = 0.0
        self._incarnation = ""
        self._mirror = Mirror()
        self._printed = 0
        self._canvas: Canvas | None = None

    def sample(self, life: "Life", events: list[Event]) -> None:
        """Look, if hostile names have come and the last look is some time ago."""
        names = self.simulation.names
        if names.hostile and self.world.seconds - self._looked_s > LOOK_S:
            self._looked_s = self.world.seconds
            before = self.world.now
            try:
                self.look(life, events)
            except Exception as error:  # a tool that cannot show the name
                self._violated("shown", f"{type(error).__name__}: {error}")
            self.world.now = before

    def look(self, life: "Life", events: list[Event]) -> None:
        """Everything that shows the daemon now, and its newest events."""
        assert life.daemon is not None
        document = msgspec.to_builtins(life.daemon.service.status())
        self._lines("status", lambda: print_lines(render(document).split("\n")), len(render(document).split("\n")))
        self._json("status", document)
        for trouble in page_troubles(life.daemon._metrics_page()):
            self._violated("shown", f"metrics: {trouble}")
        self._follow(life.daemon.service.incarnation, events)
        self._tail(events[max(self._printed, len(events) - EVENTS_MAX) :])
        self._printed = len(events)
        self._draw()

    def _follow(self, incarnation: str, events: list[Event]) -> None:
        """The console's own mirror of the daemon."""
        if incarnation != self._incarnation:
            self._incarnation, self._mirror, self._printed = incarnation, Mirror(), 0
            self._mirror.take(Connected("sim", incarnation, 0, control=True, block_bytes=None), 0)
            self._mirror.take(SnapshotTaken(CacheState()), 0)
        assert self._mirror.state is not None
        self._mirror.take(EventsArrived(events[self._mirror.state.seq :]), 0)

    def _tail(self, events: list[Event]) -> None:
        printer = Printer("text", None, 0, None)
        printer.state = self._mirror.state
        for event in events:
            self._lines("tail", lambda event=event: printer._line(event), 1)  # type: ignore[misc]
            self._json("tail", msgspec.to_builtins(event_document(event)))

    def _draw(self) -> None:
        """Each view on a small and on a large screen, as its rows are sent to a terminal."""
        canvas = self._canvas = self._canvas or Canvas(Theme("dark"))
        session = TargetSession(_Nothing())
        session.mirror = self._mirror
        self._mirror.clock.live = False
        for width, height in SCREENS:
            desk = Desk(self._mirror, session, lambda: 0, all_views(), read_only=True, wall=lambda: 0)
            for view in range(len(NAMES)):
                desk.current = view
                for line in desk.draw(width, height):
                    text = _STYLE.sub("", canvas.row(line, width))
                    self._harmless(f"view {view}", text)

    def exported(self, recording: Recording) -> None:
        """``rec export --to jsonl`` and ``--to chrome``."""
        evidence = evidence_of(recording)
        lines, trace = io.BytesIO(), io.BytesIO()
        export._stream(evidence, "jsonl", lines, None, None)
        export._stream(evidence, "chrome", trace, None, None)
        told, lost_to = iter(lines.getvalue().decode().removesuffix("\n").split("\n")), -1
        for batch in recording.events():
            for event in batch:
                if event.seq > lost_to:
                    lost_to = self._exported_event(event, told)
        for line in trace.getvalue().decode().removesuffix("\n").split("\n"):
            self._harmless("export chrome", line)
        json.loads(trace.getvalue())

    def _exported_event(self, event: Event, told: Iterator[str]) -> int:
        """The last event that a gap around this one covers, or -1: behind damage nothing folds until a keyframe."""
        for line in told:
            self._harmless("export jsonl", line)
            document = json.loads(line)
            if document == msgspec.to_builtins(event_document(event)):
                return -1
            if document["kind"] == "Gap" and document["first"] <= event.seq <= document["last"]:
                return int(document["last"])
        self._violated("shown", f"export jsonl: event {event.seq} is not a line of its own")
        return -1

    # --- what is looked for ---

    def _harmless(self, where: str, line: str) -> None:
        if not line.isprintable():
            self._violated("shown", f"{where}: {line[:160]!r}")

    def _lines(self, where: str, print_it: Callable[[], None], count: int) -> None:
        text = printed(print_it)
        lines = text.removesuffix("\n").split("\n")
        if len(lines) != count:
            self._violated("shown", f"{where}: {len(lines)} lines instead of {count}: {text[:160]!r}")
        for line in lines:
            self._harmless(where, line)

    def _json(self, where: str, document: Any) -> None:
        text = printed(lambda: print_json(document))
        self._harmless(f"{where} as JSON", text.removesuffix("\n"))
        if json.loads(text) != document:
            self._violated("shown", f"{where} as JSON is another document")


class _Nothing:
    """A feed that tells nothing."""

    async def items(self) -> Any:
        return
        yield


def printed(action: Callable[[], None]) -> str:
    """The text that ``action`` prints."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True, newline="")
    with contextlib.redirect_stdout(out):
        action()
        sys.stdout.flush()
    text: str = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    out.close()  # click keeps every stream that it wrote to
    return text
