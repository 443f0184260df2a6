"""The screen of a fleet: a cell for each daemon, those that need a person by name, and the prefixes that miss.

    FLEET  1,204   ▲ 3 fault  × 1 gone  ■ 1,200 fine        hit 61 %  first token p50 120 ms  p99 1.31 s
    REUSE  held 71 %  captured 61 %  delivered 61 %
    ▲▲▲×■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■
    DAEMON            STANDS   HIT      G1     G2   SLOTS  NEEDS YOU
    prod-17           fault    12 %   98 %  100 %      41  rank 3  has not reported a copy for 40 s
    MISSES FROM BLOCK  BLOCKS REQUESTS WHY      LIES AT
    a3f1...            41,202       97 evicted  prod-3 G2, prod-9 G2

Law of this file: it draws a report and decides nothing. Every daemon has its cell, and the list scrolls over all.
"""

import asyncio
import socket
import time
from typing import NamedTuple

from textual import events
from textual.app import App, ComposeResult

from kvbm_console.analysis.fleet import GONE, DaemonRow, FleetReport
from kvbm_console.client.fleet import FleetView

from .app import key_name
from .canvas import Canvas
from .draw.spans import BLANK, Line, fit
from .draw.spans import Row as Pen
from .model.numbers import brief, count, cut, cut_middle, percent, plain, spoken
from .theme import Theme

ASK_EVERY_S = 2.0
SUMMED_A_SECOND = 40
"""Daemons that are added up in a second: a sum counts the hours that they remember, so it changes slowly."""
SHARE = 10
"""Reciprocal of the share of a core that asking takes: a thousand daemons are asked every three seconds."""
ROLES = {"fault": "fault", GONE: "fault", "held": "held", "caution": "caution", "fine": "ok"}
GLYPHS = {"fault": "▲", GONE: "×", "held": "◆", "caution": "△", "fine": "■"}
ASCII_GLYPHS = {"fault": "!", GONE: "x", "held": "H", "caution": "?", "fine": "."}
MISSING_ROWS = 6
MISSING_SHARE = 8
"""Reciprocal of the share of a low screen that missing prefixes take."""
REUSE_HEIGHT = 12
"""Lower screens have no line for the reuse."""
OTHER_ROWS = 8
"""Rows that the head, the foot and a few daemons of the list need. Cells take a quarter of the others. Where there are
more daemons than cells, a cell stands for several of them and shows the worst."""


class FleetDesk:
    """A report, with the daemon that is selected and the text that is searched."""

    def __init__(self, *, ascii_only: bool = False) -> None:
        self.report: FleetReport | None = None
        self.glyphs = ASCII_GLYPHS if ascii_only else GLYPHS
        self.at = 0
        """Index of the selected daemon among those shown."""
        self._follows = ""
        """Target of the selected daemon, empty where the first is selected, whichever that is."""
        self.search: str | None = None
        """The text that narrows the list; None while nothing is searched."""
        self.typing = False
        self.lives_on: dict[str, str] = {}
        """Target to the slot of the request whose name was searched."""
        self.note = ""
        """A sentence for the foot, until the next key."""
        self.top = 0

    @property
    def rows(self) -> list[DaemonRow]:
        """The daemons whose name, address, or problem has the searched text, or on which a request of that name
        lives."""
        rows = [] if self.report is None else self.report.rows
        text = (self.search or "").lower()
        return [row for row in rows if row.target in self.lives_on or text in _searched(row)] if text else rows

    def take(self, report: FleetReport) -> None:
        """Show a newer report. A daemon that was selected stays so wherever it stands now."""
        self.report = report
        places = [row.target for row in self.rows]
        if self._follows in places:
            self.at = places.index(self._follows)

    @property
    def selected(self) -> DaemonRow | None:
        """The daemon under the cursor."""
        rows = self.rows
        return rows[min(self.at, len(rows) - 1)] if rows else None

    def press(self, key: str) -> str | None:
        """Take a key; ``quit``, ``open``, ``find`` for the request that was searched, or None."""
        self.note = ""
        if self.typing:
            return self._type(key)
        if key in ("q", "escape") and (key == "q" or self.search is None):
            return "quit"
        if key == "escape":
            self.search = None
            self.lives_on = {}
        elif key == "/":
            self.typing, self.search = True, ""
            self._go(0)
        elif key == "enter":
            return "open" if self.selected is not None else None
        else:
            self._move(key)
        return None

    def _type(self, key: str) -> str | None:
        self.lives_on = {}
        if key in ("enter", "escape"):
            self.typing = False
            self.search = self.search or None if key == "enter" else None
            self._go(0)
            return "find" if self.search else None
        if key == "backspace":
            self.search = (self.search or "")[:-1]
        elif len(key) == 1:
            self.search = (self.search or "") + key
        self._go(0)
        return None

    def _move(self, key: str) -> None:
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -20, "pagedown": 20, "home": -10**6, "end": 10**6,
                 "g": -10**6, "G": 10**6}
        self._go(self.at + steps.get(key, 0))

    def _go(self, at: int) -> None:
        rows = self.rows
        self.at = max(0, min(at, len(rows) - 1))
        self._follows = rows[self.at].target if self.at else ""

    def draw(self, width: int, height: int) -> list[Line]:
        """The whole screen."""
        report = self.report
        if report is None:
            return fit([Pen().put(" FLEET", "title").put("   asking the daemons", "muted").line("bar", width)], height)
        reuse = [_reuse(report, width)] if height >= REUSE_HEIGHT else []
        lines = [self._head(report, width), *reuse, *self._cells(width, height), BLANK]
        missing = _missing(report, width, min(MISSING_ROWS, height // MISSING_SHARE)) if height >= 16 else []
        lines += self._list(width, max(3, height - len(lines) - len(missing) - 1))
        lines = [*fit([*lines, *missing], height - 1), self._foot(width)]
        return lines[-height:]

    def _head(self, report: FleetReport, width: int) -> Line:
        """The number of daemons by how they stand, each with the glyph of its cells, and the sum of their figures."""
        digest = report.digest
        pen = Pen().put(" FLEET", "title").put(f"   {count(len(report.rows))}  ", "strong")
        for word, number in report.stands.items():
            if number:
                pen.put(f" {self.glyphs[word]} {count(number)} {word}", ROLES[word]).put(" ")
        if report.dropped:
            pen.put(f" +{count(report.dropped)} dropped", "fault").put(" ")
        first = digest.first_token
        right = (f"hit {percent(sum(digest.hits), digest.prompt_blocks)}   first token p50 "
                 f"{spoken(first.quantile(0.5))}   p99 {spoken(first.quantile(0.99))} ")
        if pen.x + 2 + len(right) <= width:
            pen.right(right, width, "text")
        return pen.line("bar", width)

    def _cells(self, width: int, height: int) -> list[Line]:
        """A cell for each daemon in the order of the list; a cell stands for several where there are too many."""
        assert self.report is not None
        rows = self.report.rows
        across = max(1, width - 2)
        room = max(1, (height - OTHER_ROWS) // 4) * across
        each = -(-len(rows) // room) if rows else 1
        shown = [rows[at] for at in range(0, len(rows), each)]  # sorted by need: the first of each cell is the worst
        lines = []
        for at in range(0, len(shown), across):
            pen = Pen().put(" ")
            for row in shown[at : at + across]:
                pen.put(self.glyphs[row.stands], ROLES[row.stands])
            lines.append(pen.line("", width))
        if each > 1:
            lines.append(Pen().put(f" a cell is {each} daemons, the worst of them", "faint").line("", width))
        return lines

    def _list(self, width: int, height: int) -> list[Line]:
        rows = self.rows
        self.at = max(0, min(self.at, len(rows) - 1))
        shown = max(1, height - 1)
        self.top = max(0, min(self.top, self.at, max(0, len(rows) - shown)), self.at - shown + 1)
        everyone = [] if self.report is None else self.report.rows
        columns = _columns(width, max((len(plain(row.name)) for row in everyone), default=0))
        pen = Pen().put(" DAEMON", "faint").to(columns.stands).put("STANDS", "faint")
        for title, end in columns.ends.items():
            pen.right(title, end, "faint")
        lines = [pen.to(columns.text).put("NEEDS YOU", "faint").line("bar", width)]
        for at, row in enumerate(rows[self.top : self.top + shown], self.top):
            lives = self.lives_on.get(row.target, "")
            lines.append(_daemon(row, columns, width, "sel" if at == self.at else "", lives))
        if not rows:
            what = f" no daemon matches {plain(self.search or '')}" if self.search else " no daemon"
            lines.append(Pen().put(what, "muted").line("", width))
        return lines

    def _foot(self, width: int) -> Line:
        if self.typing:
            return Pen().put(f" /{plain(self.search or '')}", "strong").put("▏", "strong").line("bar", width)
        if self.note:
            return Pen().put(f" {cut(plain(self.note), width - 2)}", "strong").line("bar", width)
        found = f"   /{plain(self.search)}: {count(len(self.rows))}" if self.search else ""
        return Pen().put(" enter its console   / search   q quit", "faint").put(found, "strong").line("bar", width)


class Columns(NamedTuple):
    """The places of the list's columns at a width."""

    stands: int
    ends: dict[str, int]
    text: int


_COLUMNS = (("HIT", 6, 0), ("G1", 6, 0), ("G2", 6, 0), ("G3", 6, 100), ("SLOTS", 7, 100), ("HOLDS", 6, 100))
"""Name, cells, and the width of the screen from which the column is shown."""


def _columns(width: int, name: int) -> Columns:
    """The places at a width for names of at most ``name`` cells; they take a third of the screen at most."""
    stands = 2 + max(12, min(name, width // 3))
    ends, at = {}, stands + len("caution")
    for title, cells, least in _COLUMNS:
        if width >= least:
            at += cells
            ends[title] = at
    return Columns(stands, ends, at + 2)


def _searched(row: DaemonRow) -> str:
    summary = row.summary
    problems = [] if summary is None else [f"{each.who} {each.what} {each.request or ''}" for each in summary.problems]
    return " ".join([row.name, row.target, row.stands, row.error, *problems]).lower()


def _reuse(report: FleetReport, width: int) -> Line:
    """The reuse that the fleet held, that routing captured, and that engines delivered."""
    reuse, of = report.reuse, report.digest.prompt_blocks
    if not of:
        return BLANK
    pen = Pen().put(" REUSE", "faint")
    for word, blocks in (("held", reuse.held), ("captured", reuse.captured), ("delivered", reuse.delivered)):
        pen.put(f"  {word} ", "muted").put(percent(blocks, of), "text")
    rest = f"of {count(of)} prompt blocks "
    if pen.x + 2 + len(rest) <= width:
        pen.right(rest, width, "faint")
    return pen.line("", width)


def _daemon(row: DaemonRow, columns: Columns, width: int, ground: str, lives: str = "") -> Line:
    pen = Pen().put(" ").put(cut_middle(plain(row.name), columns.stands - 2), "strong").to(columns.stands)
    pen.put(row.stands, ROLES[row.stands])
    summary = row.summary
    if summary is not None:
        digest = summary.digest
        cells = {
            "HIT": percent(sum(digest.hits), digest.prompt_blocks), "SLOTS": brief(sum(summary.slots.values())),
            "HOLDS": brief(summary.holds),
        }
        for tier, (resident, capacity) in summary.tiers.items():
            cells[tier.upper()] = brief(resident) if capacity is None else percent(resident, capacity)
        for title, end in columns.ends.items():
            held = title == "HOLDS" and summary.holds
            pen.right(cells.get(title, ""), end, "held" if held else "text")
    text, role, more = (lives, "strong", "") if lives else _need(row)
    pen.to(columns.text).put(cut(text, max(1, width - columns.text - 1 - len(more))), role).put(more, role)
    return pen.line(ground, width)


def _need(row: DaemonRow) -> tuple[str, str, str]:
    """The reason why a daemon needs a person, its role, and the number of further reasons."""
    summary = row.summary
    if row.error:
        since = f"silent for {spoken(int(row.silent_s * 1e9))}: " if summary is not None else ""
        return since + plain(row.error), "fault", ""
    if summary is None or not summary.problems:
        passed = summary.passed_over if summary is not None else 0
        return (f"{count(passed)} events passed over" if passed else ""), "muted", ""
    worst = summary.problems[0]
    more = f"  +{len(summary.problems) - 1}" if len(summary.problems) > 1 else ""
    return "  ".join(map(plain, filter(None, (worst.who, worst.what, worst.because)))), ROLES[worst.level], more


def _elsewhere(row: DaemonRow) -> str:
    """The reason why the daemon's own console cannot be opened from here."""
    if row.host and row.host != socket.gethostname() and row.opens.startswith("unix:") and row.keyframe is None:
        return f"{row.name} listens on a Unix socket of {row.host}: run kvbm-console attach {row.opens} there"
    return ""


def _missing(report: FleetReport, width: int, most: int) -> list[Line]:
    """The ``most`` prefixes that miss most, and where their first missing block lies."""
    if not report.missing:
        return []
    names = {row.target: plain(row.name) for row in report.rows}
    head = Pen().put(" MISSES FROM BLOCK", "faint").right("BLOCKS", 31, "faint").right("REQUESTS", 41, "faint")
    lines = [BLANK, head.to(43).put("WHY", "faint").to(58).put("LIES AT", "faint").line("bar", width)]
    for each in report.missing[:most]:
        pen = Pen().put(" ").put(each.hash).right(count(each.missed.blocks), 31).right(count(each.missed.requests), 41)
        places = [(names[target], " ".join(tiers).upper()) for target, tiers in each.lies_at.items()]
        pen.to(43).put(cut(each.missed.why.replace("_", " "), 14), "muted").to(58)
        pen.put(_places(places, width - 59), "text") if places else pen.put("on no daemon", "faint")
        lines.append(pen.line("", width))
    return lines


def _places(places: list[tuple[str, str]], room: int) -> str:
    """As many (daemon, its tiers) as fit, and the number of the others. The first always stands there, with its name
    cut if need be."""
    name, tiers = places[0]
    more = f", +{len(places) - 1}" if len(places) > 1 else ""
    told = f"{cut_middle(name, room - 1 - len(tiers) - len(more))} {tiers}"
    for at, (name, tiers) in enumerate(places[1:], 1):
        longer = f"{told}, {name} {tiers}"
        more = f", +{len(places) - at - 1}" if at + 1 < len(places) else ""
        if len(longer) + len(more) > room:
            return f"{told}, +{len(places) - at}"
        told = longer
    return told


class FleetApp(App[DaemonRow]):
    """Shows a fleet until it is left; the result is the daemon whose console is to be opened."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { layout: vertical; overflow: hidden; } Canvas { width: 100%; height: 100%; }"

    def __init__(
        self, fleet: FleetView, desk: FleetDesk | None = None, *, theme: str = "dark", ascii_only: bool = False
    ) -> None:
        self.look = Theme(theme)
        super().__init__(ansi_color=not self.look.rich)
        self.fleet = fleet
        self.desk = desk or FleetDesk(ascii_only=ascii_only)
        self.canvas = Canvas(self.look, ascii_only=ascii_only)
        self.looks = 0
        """Rounds of questions so far."""
        self._task: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        """Show the canvas alone."""
        yield self.canvas

    def on_mount(self) -> None:
        """Ask, and draw."""
        self.screen.styles.background = self.look.background or "ansi_default"
        self._task = asyncio.get_running_loop().create_task(self._ask(), name="fleet")
        if self.desk.search:
            self._find(self.desk.search)
        self.redraw()

    async def _ask(self) -> None:
        while True:
            began_s = time.thread_time()
            self.desk.take(await self.fleet.look(len(self.fleet.rows) / SUMMED_A_SECOND))
            self.looks += 1
            self.redraw()
            await asyncio.sleep(max(ASK_EVERY_S, (SHARE - 1) * (time.thread_time() - began_s)))

    def _find(self, request: str) -> None:
        """Ask every daemon for the request, and show those on which it lives."""
        async def find() -> None:
            found = await self.fleet.find([], request)
            if self.desk.search == request:
                self.desk.lives_on = {
                    target: f"{plain(request)} lives here: slot {answers[-1].slot}, {answers[-1].state}"
                    for target, answers in found.items() if answers[-1].slot is not None
                }
                self.redraw()

        if self._finding is not None:
            self._finding.cancel()
        self._finding = asyncio.get_running_loop().create_task(find(), name="find")
        self.redraw()

    async def on_unmount(self) -> None:
        """Ask no more."""
        for task in (self._task, self._finding):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def redraw(self) -> None:
        """Draw the whole frame; only changed rows go to the terminal."""
        width, height = self.size
        if width > 0 and height > 0:
            self.canvas.draw(self.desk.draw(width, height), width)

    def on_resize(self, event: events.Resize) -> None:
        """The terminal has another size."""
        self.call_after_refresh(self.redraw)

    async def on_event(self, event: events.Event) -> None:
        """Keys go to the desk before any binding of Textual's own."""
        if isinstance(event, events.Key) and not event.is_forwarded:
            asked = self.desk.press(key_name(event))
            selected = self.desk.selected
            if asked == "quit":
                self.exit()
            elif asked == "find" and self.desk.search:
                self._find(self.desk.search)
            elif asked == "open" and selected is not None:
                self.desk.note = _elsewhere(selected)
                if self.desk.note:
                    self.redraw()
                else:
                    self.exit(selected)
            else:
                self.redraw()
            return
        await super().on_event(event)

